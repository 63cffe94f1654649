"""A method that writes to what others read, or changes the process: its own record, nobody else's."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.jobs import SMALL, Echo, Letters, make_job, records_of
from support.tiny import prompt_ids, tiny_model

from kvbench import compare, compress
from kvbench.engine.guard import Guard, SharedStateChanged
from kvbench.kernels.seal import SEALED_ENDS, Seal
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Held, Method
from kvbench.methods.h2o import H2O
from kvbench.methods.topk import TopK
from kvbench.probes.error_scaling import BoundedData, ErrorScaling
from kvbench.probes.layer_error import LayerError
from kvbench.probes.layers import SyntheticLayers
from kvbench.run.runner import run_job


@dataclass(frozen=True, kw_only=True)
class Bad(H2O):
    """H2O, after a fault."""

    fault: Callable[[LayerKV, Budget], Any] = print

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        self.fault(layer, budget)
        return super().compress(layer, budget, generator)


def centres_keys(layer: LayerKV, _: Budget) -> None:
    keys = layer.keys.float()  # a copy of bfloat16, and no copy of float32
    keys -= keys.mean(2, keepdim=True)


def masks_queries(layer: LayerKV, _: Budget) -> None:
    assert layer.queries is not None
    layer.queries[:, :, :8] = 0


def zeroes_values_unseen(layer: LayerKV, _: Budget) -> None:
    layer.values.data.zero_()


def writes_through_numpy(layer: LayerKV, _: Budget) -> None:
    layer.keys.numpy()[..., -1, :] = 9.0


def normalises_mass(layer: LayerKV, _: Budget) -> None:
    mass = layer.attention_mass()
    mass /= mass.sum(-1, keepdim=True) * torch.arange(1, layer.n + 1)


def mass_through_numpy(layer: LayerKV, _: Budget) -> None:
    layer.attention_mass().numpy()[:] = 1.0


def late(layer: LayerKV, _: Budget) -> None:
    if layer.layer_index == 2:
        layer.keys.zero_()


def writes_and_fails(layer: LayerKV, _: Budget) -> None:
    layer.keys.neg_()
    raise ZeroDivisionError("and that")


def with_inference_mode(layer: LayerKV, _: Budget) -> None:
    with torch.inference_mode():
        layer.values.mul_(2)


WRITES: dict[Callable[[LayerKV, Budget], None], str] = {
    centres_keys: "wrote to keys of layer 0",
    masks_queries: "wrote to queries of layer 0",
    zeroes_values_unseen: "wrote to values of layer 0",
    writes_through_numpy: "wrote to keys of layer 0",
    normalises_mass: "wrote to attention_mass of ",
    mass_through_numpy: "wrote to attention_mass of ",
    late: "wrote to keys of layer 2",
    writes_and_fails: "wrote to keys of layer 0",
    with_inference_mode: "wrote to values of layer 0",
}


def setting(change: Callable[[], Any]) -> Callable[[LayerKV, Budget], None]:
    def fault(_layer: LayerKV, _budget: Budget) -> None:
        change()

    return fault


LEAVES: dict[str, Callable[[LayerKV, Budget], None]] = {
    "torch's default dtype at torch.float64 (it was torch.float32)": setting(
        lambda: torch.set_default_dtype(torch.float64)
    ),
    "torch's default device at meta (it was cpu)": setting(
        lambda: torch.set_default_device("meta")
    ),
    "torch's grad mode at True (it was False)": setting(lambda: torch.set_grad_enabled(True)),
    "torch's float32 matmul precision at medium (it was highest)": setting(
        lambda: torch.set_float32_matmul_precision("medium")
    ),
    "torch's global generator in another state": setting(lambda: torch.rand(1)),
    "numpy's global generator in another state": setting(lambda: np.random.rand()),
    "Python's global generator in another state": setting(random.random),
}

FAULTS = {**{fault.__name__: (fault, text) for fault, text in WRITES.items()}}
FAULTS |= {text: (fault, f"left {text}, which others use") for text, fault in LEAVES.items()}
RUNS = [1, 4]
BAD = "h2o_bad"
"""Methods run in the order of their names: h2o, which shares its attention mass, before it."""
OTHERS = ("snapkv", "h2o", "exact", "balancekv")


def records(
    folder: Path, batch: int, bad: Method | None, label: str = BAD
) -> dict[str, list[dict[str, Any]]]:
    methods: dict[str, Method] = {name: build_method(name) for name in OTHERS}
    if bad is not None:
        methods[label] = bad
    job = make_job(folder, methods, batch_size=batch, echo=Echo(count=min(batch, 2)))
    return records_of(run_job(job))


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    """What the others get where there is no bad one."""
    return {run: records(tmp_path_factory.mktemp("without"), run, None) for run in RUNS}


@pytest.mark.parametrize("batch", RUNS)
@pytest.mark.parametrize("kind", FAULTS)
def test_the_others_get_what_they_get_without_it(
    tmp_path: Path, without: Any, kind: str, batch: int
) -> None:
    fault, says = FAULTS[kind]
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    found = records(tmp_path, batch, Bad(fault=fault))
    for record in found.pop(BAD):
        assert record["status"] == "error"
        assert record["error"].startswith(f"SharedStateChanged: method '{BAD}' {says}")
        assert "; allowed: " in record["error"]
        assert record["score"] is None
    assert found == without[batch]
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == states[1:]
    assert (torch.get_default_dtype(), torch.get_default_device().type) == (torch.float32, "cpu")
    assert torch.is_grad_enabled()


def test_two_bad_methods_are_told_apart(tmp_path: Path) -> None:
    methods = {
        "one": Bad(fault=late),
        "snapkv": build_method("snapkv"),
        "two": Bad(fault=centres_keys),
    }
    found = records_of(run_job(make_job(tmp_path, methods, limit=1)))
    alone = records_of(
        run_job(make_job(tmp_path / "alone", {"snapkv": methods["snapkv"]}, limit=1))
    )
    assert "'one' wrote to keys of layer 2" in found["one"][0]["error"]
    assert "'two' wrote to keys of layer 0" in found["two"][0]["error"]
    assert found["snapkv"] == alone["snapkv"]


def test_what_a_method_sets_on_its_own_objects_reaches_nobody(tmp_path: Path, without: Any) -> None:
    """Its layer and its budget are copies: nothing is spoiled, and the audit asks the real budget."""

    def sets(layer: LayerKV, budget: Budget) -> None:
        object.__setattr__(layer, "keys", torch.zeros_like(layer.keys))
        object.__setattr__(budget, "rate", 1.0)
        object.__setattr__(budget, "sink", 0)

    for label in (BAD, "a_bad"):  # after h2o, and before all
        bad = Bad(fault=sets)
        found = records(tmp_path / label, 1, bad, label=label)
        says = f"BudgetExceeded: method '{label}' holds 75 entries at layer 0"
        assert says in found.pop(label)[0]["error"]
        assert found == without[1]


def test_what_is_shared_is_neither_dropped_nor_replaced() -> None:
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 40, 8, generator=generator).unbind()
    layer = LayerKV(keys, values, torch.randn(1, 4, 40, 8, generator=generator), 0, 1, 0.5)
    mass = layer.attention_mass()
    ((name, shared),) = layer.shared.items()
    fake = {name: replace(shared, tensor=torch.ones(1, 4, 40))}
    faults = {
        "drops": lambda kv, _: kv.shared.clear(),
        "replaces": lambda kv, _: kv.shared.update(fake),
    }
    for fault in faults.values():
        with pytest.raises(SharedStateChanged, match=f"wrote to {name} of layer 0"):
            Guard(layer).compress("bad", Bad(fault=fault), SMALL, generator, {})
        assert layer.attention_mass() is mass


def test_a_layer_made_of_another_has_results_of_its_own() -> None:
    """An honest slip: `replace` carries over what was computed from other keys."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 40, 8, generator=generator).unbind()
    layer = LayerKV(keys, values, torch.randn(1, 4, 40, 8, generator=generator), 0, 1, 0.5)
    flat = replace(layer, keys=torch.zeros_like(keys))
    want = flat.attention_mass().clone()
    other = replace(layer, shared={}).attention_mass()
    assert not torch.allclose(want, other)
    for _ in range(2):
        assert torch.equal(layer.attention_mass(), other)
        assert torch.equal(flat.attention_mass(), want)


@dataclass(frozen=True, kw_only=True)
class BadWhileDecoding(H2O):
    """H2O that changes the process at a decoded token."""

    change: Callable[[], Any] = print

    def evict(self, held: Held, attention: torch.Tensor) -> Any:
        self.change()
        return super().evict(held, attention)


@dataclass(frozen=True, kw_only=True)
class BadWhileRestricting(TopK):
    """TopK that changes the process at a decoded token."""

    change: Callable[[], Any] = print

    def restrict(self, held: Held, logits: torch.Tensor) -> Any:
        self.change()
        return super().restrict(held, logits)


@pytest.mark.parametrize("kind", [BadWhileDecoding, BadWhileRestricting])
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda: torch.set_default_dtype(torch.float64), "left torch's default dtype at torch."),
        (lambda: torch.set_grad_enabled(True), "left torch's grad mode at True"),
        (random.random, "left Python's global generator in another state"),
    ],
)
def test_changes_of_the_process_while_decoding_are_found_too(
    tmp_path: Path, without: Any, kind: type, change: Callable[[], Any], says: str
) -> None:
    found = records(tmp_path, 4, kind(change=change))
    for record in found.pop(BAD):
        assert record["error"].startswith(f"SharedStateChanged: method '{kind.__name__}' {says}")
    assert found == without[4]


def test_in_compare_the_line_says_it_and_the_others_stay() -> None:
    model = tiny_model("llama")
    methods = {"snapkv": "snapkv", "bad": Bad(fault=centres_keys), "h2o": "h2o"}
    options: dict[str, Any] = {"sink": 4, "window": 4, "max_new_tokens": 5}
    frame = compare(model, Letters2(), "x" * 60, methods, **options)
    assert "wrote to keys of layer 0" in frame.loc["bad", "error"]
    plain = compare(model, Letters2(), "x" * 60, ["snapkv", "h2o"], **options)
    columns = ["text", "bytes", "ratio"]
    stayed = frame.loc[["snapkv", "h2o"], columns]
    assert stayed.to_dict() == plain.loc[:, columns].to_dict()


class Letters2(Letters):
    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return str(token_ids)


def test_around_generate_it_is_raised() -> None:
    model: Any = tiny_model("llama")
    ids = torch.tensor([prompt_ids(60)])
    with (
        pytest.raises(SharedStateChanged, match=r"'Bad' wrote to queries of layer 0"),
        compress(model, Bad(fault=masks_queries), sink=4, window=4),
    ):
        model.generate(ids, max_new_tokens=2, do_sample=False)


@pytest.mark.parametrize(
    "probe",
    [
        LayerError(
            rates=(0.5, 0.25),
            layers=(1, 2),
            seeds=2,
            exact=32,
            synthetic=SyntheticLayers(n=320, heads=4, kv_heads=2, head_dim=16),
        ),
        LayerError(rates=(0.5,), layers=(1, 4), seeds=1, exact=20, prompts=Echo(count=1)),
        ErrorScaling(n=64, kept=(8, 16), queries=2, draws=2, data={"d": BoundedData(head_dim=4)}),
    ],
)
@pytest.mark.parametrize("fault", [centres_keys, zeroes_values_unseen, LEAVES.popitem()[1]])
def test_in_probes_as_well(tmp_path: Path, probe: Any, fault: Any) -> None:
    @dataclass(frozen=True, kw_only=True)
    class BadUniform(type(build_method("uniform"))):  # type: ignore[misc]
        def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> Any:
            fault(layer, budget)
            return super().compress(layer, budget, generator)

    others = {name: build_method(name) for name in ("balancekv", "uniform")}
    first, last = others
    methods = {first: others[first], "bad": BadUniform(), last: others[last]}
    found = records_of(run_job(make_job(tmp_path, methods, plan=probe)))
    for record in found.pop("bad"):
        assert record["status"] == "error"
        assert record["error"].startswith("SharedStateChanged: method 'bad' ")
    alone = records_of(run_job(make_job(tmp_path / "alone", others, plan=probe)))
    assert found == alone


def test_a_seal_finds_writes_that_torch_does_not_see() -> None:
    n = 1000
    for shape in ((1, 2, n, 8), (1, 4, n), (n,), (3, n)):
        for place in (0, SEALED_ENDS - 1, n - SEALED_ENDS, n - 1):
            tensor = torch.randn(shape)
            seal = Seal(tensor)
            assert not seal.broken(tensor)
            at = [0] * len(shape)
            at[shape.index(n)] = place
            tensor.numpy()[tuple(at)] += 1e-3
            assert seal.broken(tensor)
    for whole in (torch.zeros(1, 2, n, 8), torch.full((1, 2, n), torch.nan), torch.tensor(1.0)):
        seal = Seal(whole)
        assert not seal.broken(whole), "what is no number stays no number"
        whole.data.add_(1) if whole.isfinite().all() else whole.data.zero_()
        assert seal.broken(whole)
    with torch.inference_mode():
        uncounted = torch.zeros(1, 2, n, 8)
        seal = Seal(uncounted)
        uncounted[:, :, 5] = 1
        assert seal.broken(uncounted)


def test_what_a_guard_cannot_restore_is_computed_again() -> None:
    """The shared results of a layer whose keys were written to are wrong, although nobody wrote to
    them: they were computed from the keys as they were by then."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 40, 8, generator=generator)
    queries = torch.randn(1, 4, 40, 8, generator=generator)
    layer = LayerKV(keys, values, queries, 0, 1, 0.5)
    want = replace(layer, shared={}).attention_mass().clone()

    def zeroes_and_asks(kv: LayerKV, _: Budget) -> None:
        kv.keys.zero_()
        kv.attention_mass()

    guard = Guard(layer, restores=True)
    with pytest.raises(SharedStateChanged, match="wrote to keys"):
        guard.compress("bad", Bad(fault=zeroes_and_asks), SMALL, generator, {})
    assert torch.equal(layer.attention_mass(), want)
    held, capacity, _ = guard.compress("h2o", build_method("h2o"), SMALL, generator, {})
    assert held.keys.shape[2] == capacity == SMALL.capacity(40)
    assert torch.equal(keep_all(layer).keys, keys)
