"""Short prompts in one pass: each is what it is alone, and fails alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.faulty import Faulty
from support.jobs import SMALL
from support.tiny import CONFIGS, on_kvbench, prompt_ids, tiny_model

from kvbench.engine import packing
from kvbench.engine.attention import LayerCall
from kvbench.engine.fork import Fork
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.packing import packable_tokens, packs, prefill_together
from kvbench.engine.prefill import PrefillState, prefill
from kvbench.engine.stopping import Stopping
from kvbench.kv import LayerKV
from kvbench.methods import build_method
from kvbench.methods.base import Method

LENGTHS = (40, 4, 83, 57)


def forks_of(n: int, *methods: Method) -> list[Fork]:
    chosen = methods or (build_method("exact"), build_method("h2o"), build_method("balancekv"))
    return [Fork(str(i), each, SMALL, 3, f"x{n}", room=2) for i, each in enumerate(chosen)]


def work_of(*methods: Method) -> list[packing.Work]:
    return [(prompt_ids(n, seed=n), forks_of(n, *methods)) for n in LENGTHS]


def spied_on(monkeypatch: pytest.MonkeyPatch) -> list[LayerCall]:
    """What every prompt's layers are given."""
    calls: list[LayerCall] = []
    attend = PrefillState.attend

    def watched(state: PrefillState, call: LayerCall) -> torch.Tensor:
        calls.append(call)
        return attend(state, call)

    monkeypatch.setattr(PrefillState, "attend", watched)
    return calls


@pytest.mark.parametrize("architecture", CONFIGS)
def test_keys_values_and_queries_are_bit_by_bit_those_of_the_prompt_alone(
    architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_kvbench(tiny_model(architecture))
    calls = spied_on(monkeypatch)
    alone = [prefill(model, *each) for each in work_of()]
    one_by_one = list(calls)
    calls.clear()
    work = work_of()
    together = prefill_together(model, work)
    assert len(calls) == len(one_by_one) == 4 * len(LENGTHS)
    for call in calls:
        n = call.key.shape[2]
        same = [c for c in one_by_one if c.layer == call.layer and c.key.shape[2] == n]
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(call, name), getattr(same[0], name)), (n, call.layer, name)
    for start, twin, (ids, forks) in zip(together, alone, work, strict=True):
        assert (start.n, start.exact_bytes) == (len(ids), twin.exact_bytes)
        torch.testing.assert_close(start.logits, twin.logits, rtol=1e-4, atol=1e-5)
        assert [fork.failure for fork in forks] == [None] * 3
    seconds = [start.prefill_s / start.n for start in together]
    assert min(seconds) > 0
    assert max(seconds) == pytest.approx(min(seconds)), "divided by tokens"


def held(forks: Sequence[Fork]) -> list[Any]:
    return [
        (layer, name, getattr(cache, name)[:, : cache.length].clone())
        for fork in forks
        for layer, cache in fork.layers.items()
        for name in ("keys", "values", "positions")
    ]


def assert_held_alike(work: Sequence[packing.Work], other: Sequence[packing.Work]) -> None:
    for (_, forks), (_, twins) in zip(work, other, strict=True):
        for (layer, name, part), (_, _, twin) in zip(held(forks), held(twins), strict=True):
            assert torch.equal(part, twin), (layer, name)


def test_a_pass_without_memory_for_all_runs_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_kvbench(tiny_model("llama"))
    at_once, sizes = packing._prefill_at_once, list[int]()

    def short_of_memory(model: Any, work: Sequence[packing.Work]) -> Any:
        sizes.append(len(work))
        found = at_once(model, work)  # it runs out at the end, forks and all
        if len(work) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return found

    monkeypatch.setattr(packing, "_prefill_at_once", short_of_memory)
    work, alone = work_of(), work_of()
    prefill_together(model, work)
    assert sizes == [4, 2, 2]
    for each in alone:
        prefill(model, *each)
    assert_held_alike(work, alone)


def spoil(layer: LayerKV) -> None:
    if layer.n == LENGTHS[2] and layer.layer_index == 1:
        layer.keys.mul_(0)


def fail(layer: LayerKV) -> None:
    if layer.n == LENGTHS[2]:
        raise RuntimeError("not this one")


def draw(layer: LayerKV) -> None:
    if layer.n == LENGTHS[2]:
        torch.rand(1)


@pytest.mark.parametrize(
    ("fault", "said"),
    [(spoil, "wrote to"), (fail, "not this one"), (draw, "global generator")],
)
def test_a_method_that_fails_on_one_prompt_fails_there_only(fault: Any, said: str) -> None:
    model = on_kvbench(tiny_model("llama"))
    work = work_of(Faulty(fault=fault), build_method("h2o"))
    alone = work_of(Faulty(fault=fault), build_method("h2o"))
    prefill_together(model, work)
    for each in alone:
        prefill(model, *each)
    for (_, forks), (_, twins) in zip(work, alone, strict=True):
        for fork, twin in zip(forks, twins, strict=True):
            assert str(fork.failure) == str(twin.failure)
    failures = [fork.failure for _, forks in work for fork in forks]
    assert [failure is not None for failure in failures] == [i == 4 for i in range(8)]
    assert said in str(failures[4])
    assert_held_alike(work, alone)


def test_what_a_model_cannot_do_is_told_by_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_kvbench(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="keys of layer 0, KV head 0 are not finite"):
        prefill_together(model, work_of())
    on_time = TimeoutError("the example took more than 1 s")

    def late(*_: Any) -> Any:
        raise on_time

    monkeypatch.setattr(packing, "_prefill_at_once", late)
    with pytest.raises(TimeoutError, match="more than 1 s"):
        prefill_together(model, work_of())


@pytest.mark.parametrize(
    ("lengths", "most", "expected"),
    [
        ([], 100, [[]]),
        ([10, 20, 30], 100, [[10, 20, 30]]),
        ([10, 20, 30], 0, [[10], [20], [30]]),
        ([50, 50, 1, 51, 1, 2], 100, [[50, 50], [1], [51], [1, 2]]),
        ([0, 0, 5, 0, 6, 7], 100, [[0], [0], [5], [0], [6, 7]]),
        ([40, 40, 40, 200, 40], 100, [[40, 40], [40], [200], [40]]),
    ],
)
def test_packs(lengths: list[int], most: int, expected: list[list[int]]) -> None:
    assert [lengths[part] for part in packs(lengths, most)] == expected


def test_what_depends_on_the_longest_prompt_is_not_packed() -> None:
    model = on_kvbench(tiny_model("llama"))
    assert packable_tokens(model) == packing.PACK_TOKENS["cpu"]
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    assert packable_tokens(model) == 0


def test_prompts_of_a_batch_share_a_pass_unless_they_go_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = on_kvbench(tiny_model("llama"))
    at_once, sizes = packing._prefill_at_once, list[int]()

    def counted(model: Any, work: Sequence[packing.Work]) -> Any:
        sizes.append(len(work))
        return at_once(model, work)

    monkeypatch.setattr(packing, "_prefill_at_once", counted)
    plain = {"h2o": (build_method("h2o"), SMALL)}
    prompts = [Prompt(prompt_ids(n), [], plain, Stopping(3), str(n)) for n in LENGTHS]
    run_batch(model, prompts, seed=0)
    assert sizes == [4]
    run_batch(model, prompts, seed=0, chunk_tokens=16)
    assert sizes == [4], "in chunks every method reads for itself"
    run_batch(model, prompts[:1], seed=0)
    assert sizes == [4]
