"""A method that writes to what others read, changes a setting, raises or returns what cannot be held
fails alone: the records of the others are those of a job without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.asking import generate_one
from support.jobs import Echo, make_job, records_of
from support.method_layers import make_layer
from support.tiny import prompt_ids, tiny_model

from kvbench import compress
from kvbench.engine.answer import Stopping
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.check import compress as guarded
from kvbench.kv import Budget, CompressedKV, LayerKV, gather_entries
from kvbench.methods import build_method
from kvbench.methods.base import Held, Method, Replay
from kvbench.methods.h2o import H2O
from kvbench.methods.kvzip import KVzip
from kvbench.methods.topk import TopK
from kvbench.probes.layer_error import LayerError
from kvbench.run.runner import run_job

BAD = "h2o_bad"
"""Methods run in the order of their names: h2o, which shares its attention mass, before it."""
OTHERS = ("snapkv", "h2o", "exact", "balancekv")


@dataclass(frozen=True, kw_only=True)
class Bad(H2O):
    fault: Callable[[LayerKV], Any] = print

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        self.fault(layer)
        return super().compress(layer, budget, generator)


def writes_later(layer: LayerKV) -> None:
    if layer.layer_index == 1:
        layer.values.mul_(2.0)


def raises(layer: LayerKV) -> None:
    layer.keys.neg_()
    raise RuntimeError("after a write")


IN_PLACE: list[tuple[Callable[[LayerKV], Any], str]] = [
    (lambda layer: layer.keys.zero_(), "keys of layer 0"),
    (lambda layer: layer.queries.fill_(1.0), "queries of layer 0"),
    (lambda layer: layer.attention_mass().zero_(), "attention mass of 74 queries of layer 0"),
    (writes_later, "values of layer 1"),
    (raises, "keys of layer 0"),
]


def records(folder: Path, *bad: Method) -> dict[str, Any]:
    methods = {name: build_method(name) for name in OTHERS}
    methods |= {f"{BAD}_{i}": method for i, method in enumerate(bad)}
    return records_of(run_job(make_job(folder, methods, echo=Echo(count=1))))


def errors_in(found: dict[str, Any]) -> list[str]:
    """Take the records of the bad methods out, in order: their errors, "" where there is none."""
    bad = [label for label in list(found) if label.startswith(BAD)]
    return [found.pop(label)[0]["error"] or "" for label in sorted(bad, key=lambda x: int(x[8:]))]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return records(tmp_path_factory.mktemp("without"))


def test_a_method_that_writes_in_place_fails_alone(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, *(Bad(fault=fault) for fault, _ in IN_PLACE))
    for number, (error, (_, what)) in enumerate(zip(errors_in(found), IN_PLACE, strict=True)):
        assert f"method '{BAD}_{number}' wrote to the {what} in place" in error
        assert "allowed: to write to copies" in error
    assert found == without


def test_whoever_prefills_reads_the_prompt_again_for_the_others() -> None:
    model: Any = tiny_model("llama")
    ids, budget = prompt_ids(60), Budget(rate=0.25, sink=4, window=4)
    good = {name: (build_method(name), budget) for name in ("h2o", "snapkv")}
    bad = {"bad": (Bad(fault=lambda layer: layer.keys.zero_()), budget)}
    stopping = Stopping(4)
    with kvbench_attention_on(model):
        expected = generate_one(model, ids, (), good, stopping, seed=0, example_id="x")
        found = generate_one(model, ids, (), bad | good, stopping, seed=0, example_id="x")
    assert "'bad' wrote to the keys" in str(found["bad"].failure)
    for label in good:
        assert found[label].tokens == expected[label].tokens
        assert found[label].cost.entries == expected[label].cost.entries


CHANGES: list[Callable[[LayerKV], Any]] = [
    lambda _: torch.rand(1),
    lambda _: np.random.rand(),
    lambda _: torch.set_default_dtype(torch.float64),
    lambda _: torch.set_grad_enabled(True),
    lambda _: torch.set_num_threads(2),
]


def settings() -> tuple[Any, ...]:
    return (
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.get_num_threads(),
    )


def test_generators_and_settings_are_put_back(tmp_path: Path, without: Any) -> None:
    before = settings()
    found = records(tmp_path, *(Bad(fault=change) for change in CHANGES))
    assert errors_in(found) == [""] * len(CHANGES)
    assert found == without
    assert settings() == before


def odd(**answers: Any) -> Method:
    method: Method = type("Odd", (H2O,), {**answers, "__module__": "elsewhere"})()
    return method


EXTRAS: list[tuple[Callable[..., Any], str]] = [
    (lambda *_: {"pages": object()}, "have pages = <object object at"),
    (lambda *_: {"length": 9}, "have 'length'; allowed: names that the task does not use"),
    (lambda *_: {"status": 1}, "have 'status', which every record has; allowed: other names"),
    (lambda *_: {}[0], "KeyError"),
]


def test_extras_are_new_numbers(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, *(odd(extras=extras) for extras, _ in EXTRAS))
    for error, (_, says) in zip(errors_in(found), EXTRAS, strict=True):
        assert says in error
    assert found == without


HELD: list[tuple[Callable[[CompressedKV], Any], str]] = [
    (lambda held: None, "compress returned a NoneType; allowed: a CompressedKV"),
    (
        lambda held: type("Small", (CompressedKV,), {"nbytes": 0})(**vars(held)),
        "compress returned a Small; allowed: a CompressedKV",
    ),
    (lambda held: replace(held, keys=[1]), "keys are a list; allowed: a tensor"),
    (lambda held: replace(held, keys=held.keys.half()), "keys are .*torch.float16"),
    (lambda held: replace(held, keys=held.keys[None]), "keys are .*; allowed: "),
    (
        lambda held: replace(held, keys=held.keys.to("meta")),
        "keys are .* on meta; allowed: .* on cpu",
    ),
    (lambda held: replace(held, positions=held.positions.float()), "positions are .*float32"),
    (lambda held: replace(held, positions=held.positions[:, :1]), r"positions are \(1, 1, 20\)"),
    (lambda held: replace(held, positions=None), "positions are a NoneType; allowed: a tensor"),
    (lambda held: replace(held, log_weights=torch.zeros(1, 2, 1)), r"log_weights are \(1, 2, 1\)"),
    (
        lambda held: replace(held, log_weights=torch.zeros(1, 1, 20)),
        r"log_weights are \(1, 1, 20\)",
    ),
    (lambda held: replace(held, log_weights=torch.zeros(1, 2, 20).double()), "are .*float64"),
    (lambda held: replace(held, scores=torch.zeros(1, 1, 1)), r"scores .*; allowed: \(1, 2, 20\)"),
    (lambda held: replace(held, keys_only="all"), "keys_only is 'all'; allowed: 0 to "),
    (lambda held: replace(held, keys_only=-1), "keys_only is -1; allowed: 0 to "),
    (lambda held: replace(held, value_range=(1, 2)), "value_range is not of two tensors"),
    (
        lambda held: replace(held, lengths=torch.zeros(1, 2).long()),
        "lengths are 0 to 0; allowed: 1",
    ),
    (lambda held: replace(held, lengths=torch.full((1, 2), 999)), "lengths are 999 to 999; allow"),
    (lambda held: replace(held, lengths=torch.ones(1, 2)), "lengths are .*torch.float32"),
]


@pytest.mark.parametrize(("change", "says"), HELD)
def test_what_cannot_be_held_is_refused(change: Callable[[CompressedKV], Any], says: str) -> None:
    layer = make_layer(40, kv_heads=2)
    held = gather_entries(layer, torch.arange(20).expand(1, 2, 20))
    method = odd(compress=lambda *_: change(held))
    with pytest.raises((TypeError, ValueError), match=says):
        guarded("odd", method, layer, Budget(), torch.Generator(), {})


def test_positions_outside_the_prompt_and_missing_scores_are_refused(
    tmp_path: Path, without: Any
) -> None:
    def changed(**changes: Callable[[CompressedKV], Any]) -> Method:
        def compress(self: Any, layer: LayerKV, budget: Budget, generator: torch.Generator) -> Any:
            held = H2O.compress(self, layer, budget, generator)
            return replace(held, **{name: change(held) for name, change in changes.items()})

        return odd(compress=compress)

    beyond = changed(positions=lambda held: held.positions + 10**9)
    found = records(tmp_path, beyond, changed(scores=lambda held: None))
    first, second = errors_in(found)
    assert f"method '{BAD}_0' holds position 10000000" in first
    assert "lets entries go by their scores and compress gave none" in second
    assert found == without


@dataclass(frozen=True, kw_only=True)
class BadEviction(H2O):
    def eviction(self, capacity: int, sink: int) -> None:
        return None

    def evict(self, held: Held, attention: torch.Tensor) -> Any:
        raise KeyError("evict")


@dataclass(frozen=True, kw_only=True)
class BadRestriction(TopK):
    def restrict(self, held: Held, logits: torch.Tensor) -> Any:
        raise KeyError("restrict")


def test_faults_while_decoding(tmp_path: Path, without: Any) -> None:
    found = records(tmp_path, BadEviction(), BadRestriction())
    assert errors_in(found) == ["KeyError: 'evict'", "KeyError: 'restrict'"]
    assert found == without


@dataclass(frozen=True, kw_only=True)
class BadObservation(KVzip):
    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        super().observe(layer, replay, budget)
        replay.keys.zero_()


def test_faults_while_the_prompt_is_repeated(tmp_path: Path) -> None:
    good = build_method("kvzip", instructed=False)
    methods = {"a": BadObservation(instructed=False), "b": good}
    found = records_of(run_job(make_job(tmp_path, methods, echo=Echo(count=1))))
    alone = records_of(run_job(make_job(tmp_path / "alone", {"b": good}, echo=Echo(count=1))))
    assert "wrote to the repeated keys" in found["a"][0]["error"]
    assert found["b"] == alone["b"]


def test_faults_around_generate_and_in_probes(tmp_path: Path) -> None:
    model: Any = tiny_model("llama")
    bad = Bad(fault=lambda layer: layer.keys.zero_())
    prompt = torch.tensor([prompt_ids(60)])
    with pytest.raises(ValueError, match="'Bad' wrote to the keys"):  # noqa: SIM117
        with compress(model, bad, sink=4, window=4):
            model.generate(prompt, max_new_tokens=2, do_sample=False)
    probe = LayerError(rates=(0.5,), layers=(1, 4), seeds=1, exact=20, prompts=Echo(count=1))
    others = {"balancekv": build_method("balancekv"), "uniform": build_method("uniform")}
    found = records_of(run_job(make_job(tmp_path, {"bad": bad, **others}, plan=probe)))
    assert all("'bad' wrote to the keys" in record["error"] for record in found.pop("bad"))
    assert found == records_of(run_job(make_job(tmp_path / "alone", others, plan=probe)))
