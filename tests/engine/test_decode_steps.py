"""Decode steps: caches that fill up evict from there; steps that are replayed give the same tokens.

The bookkeeping of replayed steps is tested everywhere, by steps that run again where a graph would be
replayed; the graphs themselves where there is a GPU.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.asking import Prompt, generate_each
from support.forward import reference
from support.jobs import Echo, make_job, records_of
from support.kernel_reference import reference_kernels
from support.kernels import needs_triton
from support.pretended import needs_real
from support.prompts import facts, methods, unlike_prompts
from support.tiny import prompt_ids, tiny_model
from torch._inductor.utils import run_and_get_code

from kvbench import compress
from kvbench.engine import captured
from kvbench.engine.answer import Stopping
from kvbench.engine.cache import Cache
from kvbench.engine.captured import Counts
from kvbench.engine.context import Context
from kvbench.engine.model import ModelSpec
from kvbench.engine.row import Row
from kvbench.engine.steps import Steps
from kvbench.kv import Budget, BudgetExceeded, KVError
from kvbench.methods import available_methods, build_method, method_class
from kvbench.methods.base import Held, Method
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.run.runner import run_job
from kvbench.run.session import Session

SINK, NEW = 4, 30
ROOM = Budget(size=50, sink=SINK, window=4)
EVICTING = sorted(
    name
    for name in available_methods()
    if "decode" in method_class(name).__dataclass_fields__
    and build_method(name, decode="evict").evicts
)
SCORE_BYTES = {"h2o": 4}
"""What a method holds with each entry beside its key and value."""
PATHS = ("shared", "context", "batched", "live", "kernels", "live kernels")
FILLED = [
    (name, path, (40, 50, 51)[(i + j) % 3])
    for i, name in enumerate(EVICTING)
    for j, path in enumerate(PATHS)
]
"""Every path with every method, and both with prompts below, at and above the capacity."""


def model_on(device: str = "cpu", architecture: str = "llama") -> Any:
    model = tiny_model(architecture).to(device)
    model.set_attn_implementation("kvbench")
    return model


def evicting(name: str) -> Method:
    return build_method(name, decode="evict")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the caches of a generation did: the most entries after any token, and their ends."""
    found = SimpleNamespace(lengths=[], ends=[])
    attend, move_on, audit = Cache._attend, Counts.advance, Row.audit

    def attended(cache: Cache, *given: Any) -> Any:
        out = attend(cache, *given)
        found.lengths.append(int(cache.count().max()))
        return out

    def moved_on(counts: Counts) -> None:
        move_on(counts)
        found.lengths.extend(counts.entries.tolist())

    def audited(row: Row) -> None:
        caches = row.caches.items()
        found.ends.append(
            {i: c.positions[:, : c.length].sort(-1).values.tolist() for i, (c,) in caches}
        )
        audit(row)

    monkeypatch.setattr(Cache, "_attend", attended)
    monkeypatch.setattr(Counts, "advance", moved_on)
    monkeypatch.setattr(Row, "audit", audited)
    return found


def generate(path: str, n: int, method: Method, budget: Budget = ROOM) -> Any:
    """A generation of `NEW` tokens from an n-token prompt: what the path says that it cost."""
    ids, model = prompt_ids(n), tiny_model("llama")
    if path.startswith("live"):
        rate = budget.rate if budget.size is None else None
        with compress(
            model, method, rate=rate, sink=budget.sink, window=budget.window, size=budget.size
        ) as session:
            model.generate(torch.tensor([ids]), min_new_tokens=NEW, max_new_tokens=NEW)
        return session.rows[0]
    model.set_attn_implementation("kvbench")
    split, pair = n - 10, {"m": (method, budget)}
    after = "context" if path == "context" else "prompt"
    prompts = [Prompt.of(ids[:split], ids[split:], pair, Stopping(NEW), "p", compress_after=after)]
    if path == "batched":  # beside a prompt that is over the budget from the start
        prompts.append(Prompt.of(prompt_ids(90), [], pair, Stopping(NEW - 20), "longer"))
    result = generate_each(model, prompts, seed=0)[0]["m"]
    if result.failure is not None:
        raise result.failure
    return result.cost


@pytest.fixture
def kernels(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On some paths rows decode as a batch of the kernels."""
    if path.endswith("kernels"):
        reference_kernels(monkeypatch)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(("name", "path", "n"), FILLED)
def test_a_cache_that_fills_up_evicts_from_there(name: str, path: str, n: int, seen: Any) -> None:
    """40 prompt and 30 new tokens, 50 entries: never 51, and what is left is what the rule says."""
    result = generate(path, n, evicting(name))
    assert max(seen.lengths) <= 50
    assert result.compressed  # at the end it is not what exact holds
    entry = 2 * 16 * 4 + SCORE_BYTES.get(name, 0)
    assert result.cache_bytes_end == 4 * 2 * 50 * entry
    (end, *others) = seen.ends
    assert len(others) == (path == "batched")
    fed = n + NEW - 1  # the last token is not fed
    latest = {
        "local": [*range(fed - 50, fed)],
        "streaming_llm": [*range(SINK), *range(fed - 50 + SINK, fed)],
    }
    for held in (held for heads in end.values() for held in heads):
        assert len(held) == 50
        assert held == latest.get(name, held)
        if name in ("h2o", *latest):
            assert set(range(fed - 25, fed)) <= set(held)  # H2O's recent half


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("path", PATHS)
def test_a_method_with_an_evict_of_its_own_is_asked_and_audited(path: str, seen: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Own(StreamingLLM):
        decode: str = "evict"
        forgets: bool = False

        def evict(self, held: Held, attention: Any) -> Any:
            if self.forgets or held.positions.shape[-1] <= held.capacity:
                return None, None
            return None, held.positions.masked_fill(held.positions < held.sink, 999).argmin(-1)

    generate(path, 40, Own())
    assert max(seen.lengths) <= 50
    assert seen.ends[0][0][0] == [*range(SINK), *range(69 - 50 + SINK, 69)]
    with pytest.raises(BudgetExceeded) as caught:
        generate(path, 40, Own(forgets=True))
    assert (caught.value.expected, caught.value.found) == (50, 69)


@pytest.mark.parametrize("name", EVICTING)
def test_a_cache_that_never_fills_is_exact_and_says_so(name: str, seen: Any) -> None:
    model, ids = tiny_model("llama"), prompt_ids(40)
    expected = reference(model, ids, 30)
    model.set_attn_implementation("kvbench")
    whole = [Budget(rate=1.0), Budget(total_rate=1.0, sink=0, window=0)]
    for budget, new in ((ROOM, 11), *((each, 30) for each in whole)):
        prompt = Prompt.of(ids, [], {"m": (evicting(name), budget)}, Stopping(new), "x")
        found = generate_each(model, [prompt], seed=0)[0]["m"]
        assert (found.tokens, found.cost.compressed, found.failure) == (expected[:new], False, None)
    seen.lengths.clear()  # a rate's budget is sink, window and its share of the middle
    generate("shared", 30, evicting(name), Budget(rate=0.25, sink=20, window=20))
    assert max(seen.lengths) == 40
    seen.ends.clear()
    assert not generate("shared", 40, build_method(name, decode="grow")).compressed
    assert [len(heads[0]) for heads in seen.ends[0].values()] == [69] * 4


HELD = {
    "exact": ("exact", {}),
    "4 bits": ("exact", {"quantize": {"bits": 4, "group_size": 16}}),
    "h2o": ("h2o", {"decode": "evict"}),
    "adakv": ("adakv", {}),
    "uniform": ("uniform", {}),
    "own": ("topk", {}),
    "rkv": ("rkv", {"every": 4, "to": 40}),
}


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_what_is_held_while_decoding_is_what_each_step_left(architecture: str) -> None:
    """The bytes at the end of shorter answers are those at the steps of a longer one."""
    model, ids, new = model_on("cpu", architecture), prompt_ids(60), 8
    made = {label: build_method(name, **options) for label, (name, options) in HELD.items()}
    pairs = {label: (method, Budget(size=44, sink=4, window=4)) for label, method in made.items()}
    ends: dict[str, list[int]] = {label: [] for label in HELD}
    for tokens in range(1, new + 1):
        prompt = Prompt.of(ids, [], pairs, Stopping(tokens), "x")
        (found,) = generate_each(model, [prompt], seed=0)
        for label, one in found.items():
            assert one.failure is None, (label, one.failure)
            ends[label].append(one.cost.cache_bytes_end)  # type: ignore[arg-type]
    for label, answer in found.items():
        cost = answer.cost
        assert cost.exact_bytes_mean == pytest.approx(sum(ends["exact"]) / new), label
        if label != "rkv":
            assert (cost.cache_bytes_peak, cost.cache_bytes_mean) == (
                max(ends[label]),
                pytest.approx(sum(ends[label]) / new),
            ), label
            continue
        # what a token attends to, before it is compressed again
        assert max(ends[label]) <= cost.cache_bytes_peak  # type: ignore[operator]
        assert sum(ends[label]) / new <= cost.cache_bytes_mean < cost.exact_bytes_mean  # type: ignore[operator]


def test_what_left_while_decoding_counts_as_compressed_and_in_the_ratio(tmp_path: Path) -> None:
    """Prompts within the capacity, and answers that are longer: R-KV's own use."""

    @dataclass(frozen=True, kw_only=True)
    class Long(Echo):
        long_answers = True

        def examples(self, encoder: Any) -> Any:
            short = super().examples(encoder)
            return [replace(one, context="abcdefg", max_new_tokens=120) for one in short]

    few: list[tuple[str, dict[str, Any]]] = [("rkv", {"window": 4}), ("recompress", {"queries": 8})]
    again = {name: build_method(name, every=4, to=20, **queries) for name, queries in few}
    methods = {"exact": build_method("exact"), **again}
    job = make_job(tmp_path, methods, echo=Long(count=1))
    wide = {label: (method, Budget(size=60, sink=4, window=4)) for label, method in methods.items()}
    for label, (record,) in records_of(run_job(replace(job, methods=wide))).items():
        assert record["prompt_tokens"] == 18
        assert record["compressed"] == (label != "exact")
        ratio = record["cache_bytes_mean"] / record["exact_bytes_mean"]
        assert record["ratio"] == ratio
        assert ratio == 1 if label == "exact" else ratio < 0.6
        assert record["cache_bytes_end"] <= record["cache_bytes_peak"]


@pytest.mark.parametrize("runs", ["reference", pytest.param("interpreted", marks=needs_triton)])
def test_a_batch_of_the_kernels_answers_as_the_caches_do(
    runs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight methods, bytes over time included; prompts of unlike lengths, heads of unlike numbers."""
    names = ("exact", "snapkv", "h2o", "uniform", "adakv", "streaming_llm", "topk", "exact 4 bits")
    options: dict[str, Any] = {
        "exact 4 bits": {"quantize": {"bits": 4, "group_size": 16}},
        "streaming_llm": {"decode": "evict"},
    }
    pairs = {
        name: (
            build_method(name.split()[0], **options.get(name, {})),
            Budget(size=44, sink=4, window=4),
        )
        for name in names
    }
    model, lengths, new = model_on(), (60, 41), 5
    if runs == "interpreted":  # seconds for each launch
        model, lengths, new = tiny_model("llama", layers=1), (43,), 3
        model.set_attn_implementation("kvbench")
    prompts = [Prompt.of(prompt_ids(n), [], pairs, Stopping(new), str(n)) for n in lengths]
    by_caches = generate_each(model, prompts, seed=1)
    if runs == "reference":
        reference_kernels(monkeypatch)
    else:
        monkeypatch.setattr(captured, "uses_kernels", lambda device: True)
        monkeypatch.setattr(captured, "takes", lambda *_: True)
    launched: list[int] = []
    real = captured.weighted_decode_attention

    def attention(query: Any, *given: Any, **how: Any) -> Any:
        launched.append(len(query))
        return real(query, *given, **how)

    monkeypatch.setattr(captured, "weighted_decode_attention", attention)
    by_kernels = generate_each(model, prompts, seed=1)
    assert list(map(facts, by_kernels)) == list(map(facts, by_caches))
    assert launched


# --- steps that are replayed ----------------------------------------------------------------------

ALONE = ("topk", "subgen_streaming", "balancekv_streaming", "exact_4bit", "snapkv_2bit")
"""Methods whose rows decode one by one."""


def capturable_prompts(new_tokens: int = 40) -> list[dict[str, Any]]:
    return [
        prompt
        | {
            "methods": {k: v for k, v in prompt["methods"].items() if k not in ALONE},
            "stopping": replace(prompt["stopping"], max_new_tokens=new_tokens - 7 * i),
        }
        for i, prompt in enumerate(unlike_prompts())
    ]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps count as captured on a CPU, and are run again instead of replayed; their rows."""
    reference_kernels(monkeypatch)
    rows_captured, should_capture = list[int](), Steps.should_capture
    on_a_gpu = [SimpleNamespace(device=torch.device("cuda"))]

    def capture(self: Any, model: Any, step: Any, *_: Any) -> Any:
        rows_captured.append(len(step.__self__.turns))
        return lambda: step()

    def as_on_a_gpu(self: Any, model: Any, steps: int, *rest: Any) -> bool:
        there: Any = SimpleNamespace(config=model.config, parameters=lambda: on_a_gpu)
        return should_capture(self, there, steps, *rest)

    monkeypatch.setattr(Steps, "capture", capture)
    monkeypatch.setattr(Steps, "should_capture", as_on_a_gpu)
    monkeypatch.setattr("kvbench.engine.steps.WORTH_STEPS", 4)
    return rows_captured


def both_ways(asked: list[dict[str, Any]], *where: str, steps: Any = None, **how: Any) -> Any:
    """The answers of steps that are captured, and of steps that are not, to prompts (`Prompt.of`)."""
    model, prompts = model_on(*where), [Prompt.of(**one, **how) for one in asked]
    eager = generate_each(model, prompts, seed=1, steps=Steps("eager"))
    graph = generate_each(model, prompts, seed=1, steps=steps)
    return [facts(answer) for answer in graph], [facts(answer) for answer in eager]


@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_rows_that_ended_change_nothing_for_those_that_go_on(
    pretended: list[int], compress_after: str
) -> None:
    graph, eager = both_ways(capturable_prompts(), compress_after=compress_after)
    assert graph == eager
    assert len(pretended) >= 2, "captured anew when half of the rows had ended"
    assert pretended == sorted(pretended, reverse=True)


def test_eviction_is_captured_and_rows_that_step_one_by_one_are_apart(pretended: list[int]) -> None:
    prompt = unlike_prompts()[0] | {"stopping": Stopping(30)}
    graph, eager = both_ways([prompt])
    assert graph == eager
    assert pretended == [len(set(prompt["methods"]) - set(ALONE))]
    pretended.clear()
    both = {name: (evicting(name), ROOM) for name in EVICTING}
    graph, eager = both_ways(
        [
            {
                "context_ids": prompt_ids(n),
                "question_ids": [],
                "methods": both,
                "stopping": Stopping(40),
                "example_id": f"p{n}",
            }
            for n in (30, 45)
        ]
    )
    assert graph == eager
    assert pretended == [6]
    assert set(ALONE) < set(methods())


def test_a_context_tries_a_capture_that_fails_once(
    pretended: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, *step: Any) -> None:
        self.failed = True
        pretended.append(1)

    monkeypatch.setattr(Steps, "capture", fails)
    context = Context(model_on(), evicting("h2o"), ROOM, prompt_ids(60))
    assert context.ask([5], max_new_tokens=12) == context.ask([5], max_new_tokens=12)
    assert pretended == [1]


def test_which_step_is_recalled(pretended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []  # larger chunks round otherwise, and a run that goes on captures anew
    monkeypatch.setattr(Steps, "recall", lambda self, kind, tensors: kinds.append(kind))
    monkeypatch.setattr("kvbench.kernels.decode.multiprocessors", lambda device: 3)
    model, pairs = model_on(), {name: (build_method("exact"), ROOM) for name in "ab"}
    for n in (280, 279, 400):
        generate_each(model, [Prompt.of(prompt_ids(n), [], pairs, Stopping(9), "p")], seed=1)
    assert [kinds.index(kind) for kind in kinds] == [0, 0, 2]


def test_the_cpu_captures_nothing() -> None:
    assert not Steps().should_capture(model_on(), 10_000)


@pytest.mark.parametrize(
    ("decode", "message"),
    [
        ("graph", "decode is 'graph' and the device is cpu; allowed there: auto, eager, compiled"),
        ("fast", "decode is 'fast'; allowed: auto, eager, graph, compiled"),
        ("compiled", "decode is 'compiled' and there is no C.* compiler 'nosuch'; allowed: CXX="),
    ],
)
def test_what_decode_cannot_be_on_a_cpu(
    decode: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "nosuch")
    spec = ModelSpec(name="x", path="x")
    with pytest.raises(KVError, match=message):
        Session(spec, torch.device("cpu"), torch.float32, decode=decode)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_a_compiled_step_has_the_tokens_of_eager_ones_and_fewer_launches() -> None:
    """Attention's own three launches are not in compiled code: at most 20 a layer with them."""
    steps = Steps("compiled")
    (graph, eager), codes = run_and_get_code(both_ways, capturable_prompts(12)[:1], steps=steps)
    assert graph == eager
    calls = re.findall(r"(?:cpp_fused\w*|extern_kernels\.\w+)\(", "".join(codes))
    assert 12 <= len(calls) <= 17, "of one layer, and what is around the layers"


@pytest.mark.cuda
@needs_real
@pytest.mark.parametrize("architecture", ["llama", "opt", "qwen3"])
@pytest.mark.parametrize("compress_after", ["prompt", "context"])
def test_replayed_steps_give_the_tokens_of_eager_ones(
    architecture: str, compress_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, replay = Steps(), torch.cuda.CUDAGraph.replay
    captures: list[int] = []
    replays: list[int] = []

    def captured(*given: Any) -> Any:
        captures[-1] += 1
        return Steps.capture(steps, *given)

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        replays[-1] += 1
        replay(graph)

    monkeypatch.setattr(steps, "capture", captured)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", replayed)
    how: dict[str, Any] = {"steps": steps, "compress_after": compress_after}
    for shorter in range(2):
        captures.append(0)
        replays.append(0)
        prompts = [
            one | {"context_ids": one["context_ids"][shorter:]} for one in capturable_prompts(60)
        ]
        graph, eager = both_ways(prompts, "cuda", architecture, **how)
        assert graph == eager
    first, later = captures
    assert first >= 2
    assert later < first, "captured steps serve later prompts"
    assert min(replays) >= 20, "of 60 tokens; a capture needs steps before it and enough to come"
    assert not steps.failed
