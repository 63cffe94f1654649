"""The engine counts the entries of every cache; what a method says of itself does not count."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.jobs import SMALL, make_job, records_of
from support.probing import SYNTHETIC
from support.tiny import Everything, Greedy, tiny_model

from kvbench.engine.check import check_compressed
from kvbench.kv import (
    Budget,
    BudgetExceeded,
    CompressedKV,
    KVError,
    LayerKV,
    gather_entries,
    keep_all,
)
from kvbench.methods import available_methods, build_method
from kvbench.methods.base import Method, allowed_entries
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.probes.layer_error import check_total, compress_measured
from kvbench.run.runner import run_job


@dataclass(frozen=True, kw_only=True)
class OwnJudge(Greedy):
    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return n

    def total_capacity(self, budget: Budget, n: int, num_layers: int) -> int:
        return n * num_layers


@dataclass(frozen=True, kw_only=True)
class Released(OwnJudge):
    """Keeps everything, and says that a preset of this name allows it."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"all_of_it": {"whole": True}}

    whole: bool = False


class OfKvbench(Released):
    """The same as a file of kvbench/methods, whose presets are those of a paper's code."""


OfKvbench.__module__ = "kvbench.methods.released"


class Nothing(Method):
    def compress(self, layer: Any, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return gather_entries(layer, torch.zeros(1, 2, 0, dtype=torch.int64))


class Overwrites(Everything):
    """Whose record would say that it holds one entry, of an example that was never asked."""

    def extras(self, n: int, held: Any) -> dict[str, Any]:
        return {"entries": 1, "example_id": 9}


@dataclass(frozen=True, kw_only=True)
class Undecided(StreamingLLM):
    """Evicts, and holds entries that leave in no order of their own."""

    decode: Any = "evict"
    keys_only: int = 0

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        kept = super().compress(layer, budget, generator)
        if self.keys_only:
            values = kept.values[:, :, self.keys_only :]
            return replace(kept, values=values, keys_only=self.keys_only)
        return replace(kept, lengths=torch.full((1, 2), kept.keys.shape[2]))


def test_entries_that_cannot_leave_one_by_one_fail_a_method_that_evicts(tmp_path: Path) -> None:
    methods: dict[str, Method] = {"heads": Undecided(), "keys": Undecided(keys_only=2)}
    result = run_job(make_job(tmp_path, methods, limit=1))
    found = {label: rows[0]["error"] for label, rows in records_of(result).items()}
    said = "Undecided acts on its entries while decoding, and holds {}; allowed: one or the other"
    assert found["heads"].endswith(said.format("heads of different lengths"))
    assert found["keys"].endswith(said.format("2 without a value"))


def test_a_cache_of_nothing_and_fields_of_others_fail_their_method(tmp_path: Path) -> None:
    methods: dict[str, Method] = {"nothing": Nothing(), "overwrites": Overwrites()}
    methods["snapkv"] = build_method("snapkv")
    result = run_job(make_job(tmp_path, methods, limit=1))
    found = {label: rows[0] for label, rows in records_of(result).items()}
    assert "compress kept no entry; allowed: at least one per KV head" in found["nothing"]["error"]
    assert (found["overwrites"]["status"], found["overwrites"]["example_id"]) == ("error", "e0")
    assert "have 'entries', which every record has" in found["overwrites"]["error"]
    assert found["overwrites"]["entries"]["max"] == 74, "what was really held"
    assert found["snapkv"]["status"] == "ok"


class Twice(Method):
    """Keeps the sink, and token 7 in every other place."""

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        chosen = [*range(budget.sink), *[7] * (budget.capacity(layer.n) - budget.sink)]
        return gather_entries(layer, torch.tensor([[chosen] * 2]))


def test_a_position_that_is_kept_twice_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    others = {"kvpress", "minference", "kvzip", "solved"}  # other packages, or a second pass
    methods = {name: build_method(name) for name in available_methods() if name not in others}
    run_job(make_job(tmp_path, {"twice": Twice(), **methods}, limit=2))
    (said,) = (record.message for record in caplog.records if "twice in one" in record.message)
    assert said.startswith("method 'twice' holds position 7 twice in one head: each counts as an")


LAYERS = tiny_model("llama").config.num_hidden_layers


def test_more_than_the_budget_needs_a_presets_name_and_is_shown(tmp_path: Path) -> None:
    methods: dict[str, Method] = {
        "judge": OwnJudge(),
        "unnamed": Released(),
        "foreign": Released(whole=True),
        "named": OfKvbench(whole=True),
        "snapkv": build_method("snapkv"),
    }
    result = run_job(make_job(tmp_path, methods, limit=1))
    found = {label: rows[0] for label, rows in records_of(result).items()}
    allowed = LAYERS * SMALL.capacity(74)
    for label in ("judge", "unnamed", "foreign"):
        assert found[label]["status"] == "over_budget"
        line = f"{label!r} holds {LAYERS * 74} entries in all layers; its budget allows {allowed}"
        assert found[label]["error"].endswith(line)
    assert (found["named"]["status"], found["named"]["budget_preset"]) == ("ok", "all_of_it")
    assert "budget_preset" not in found["snapkv"]


@pytest.mark.parametrize(("outside", "preset"), [(False, "released"), (True, None)])
def test_a_wrapper_may_hold_what_a_preset_of_its_inner_method_may(
    outside: bool, preset: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = {"budgets": "released", "granularity": "query_head"}
    method = build_method("solved", of="pyramidkv", options=released)
    if outside:
        monkeypatch.setattr(type(method), "__module__", "elsewhere")
    budget = Budget(rate=0.25, sink=32, window=32)
    entries, by = allowed_entries(method, budget, 1000, 30)
    assert by == preset
    assert (entries > 30 * budget.capacity(1000)) == (preset is not None)


@pytest.mark.parametrize("judge", [OwnJudge(), Released(), Released(whole=True)], ids=str)
def test_probes_check_the_budget_whatever_a_method_says_of_itself(judge: Method) -> None:
    budget = Budget(rate=0.5, sink=32, window=32)
    line = f"'m' holds 640 entries in all layers; its budget allows {2 * budget.capacity(320)}"
    layer = SYNTHETIC.layer(0, 2)
    with pytest.raises(BudgetExceeded, match=line):
        compress_measured("m", judge, budget, torch.Generator(), layer)
    for allowed in (OfKvbench(whole=True), build_method("h2o")):
        check_total("m", allowed, budget, 320, 2)


def weights_of(*heads: str) -> torch.Tensor:
    """Log-weights of one row: ``x`` an entry, ``.`` padding."""
    return torch.tensor([[[0.0 if c == "x" else -math.inf for c in head] for head in heads]])


@pytest.mark.parametrize(
    ("heads", "counts"),
    [
        (("xxxx", "xx.."), [4, 2]),  # padding stands for what the other head holds
        (("xxx.", "xx.."), [4, 3]),  # nobody uses the last: both hold it
        (("....", "...."), [4, 4]),
        (("xx..", "..xx"), [4, 4]),  # two would do
        (("x.x.", ".xxx"), [3, 4]),
    ],
)
def test_room_that_no_head_uses_counts(heads: tuple[str, ...], counts: list[int]) -> None:
    entries = torch.randn(1, 2, 4, 8)
    held = CompressedKV(entries, entries, weights_of(*heads), torch.zeros(1, 2, 4).long())
    assert held.entries.tolist() == [counts]


@dataclass(frozen=True, kw_only=True)
class Hides(Method):
    """All entries, those beyond the budget with no weight at any head."""

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        weights = torch.full(layer.keys.shape[:3], -math.inf)
        weights[:, :, -budget.capacity(layer.n) :] = 0
        return replace(keep_all(layer), log_weights=weights)


def test_entries_without_weight_at_every_head_exceed_the_budget(tmp_path: Path) -> None:
    (record,) = records_of(run_job(make_job(tmp_path, {"hides": Hides()}, limit=1)))["hides"]
    assert record["status"] == "over_budget"
    assert "holds 74 entries at layer 0; its budget allows 24" in record["error"]


LAYER = LayerKV(torch.zeros(1, 2, 75, 16), torch.zeros(1, 2, 75, 16), None, 0, 1, 0.5)
HELD = gather_entries(LAYER, torch.arange(50, 75).expand(1, 2, -1), torch.zeros(1, 2, 25))


def test_fields_that_fit_are_accepted() -> None:
    check_compressed(HELD, LAYER)
    assert keep_all(LAYER).entries.tolist() == [[75, 75]]
    twice = torch.zeros(1, 4, 9, 16)  # keys repeated to query heads
    check_compressed(CompressedKV(twice, twice, None, torch.zeros(1, 4, 9).long()), LAYER)


def test_a_share_of_the_prompt_is_the_share_in_all() -> None:
    budget = Budget(total_rate=0.2, sink=8, window=8)
    for n in (100, 512, 513, 7000):
        assert budget.capacity(n) == budget.limit(n) == round(0.2 * n)
        assert budget.middle_kept(n) == round(0.2 * n) - 16
        assert budget.rate_of(n) == (round(0.2 * n) - 16) / (n - 16)
    assert Budget(total_rate=0.2, sink=0, window=0).capacity(512) == 102
    assert Budget(rate=0.2).capacity(512) == 64 + 90  # 30 per cent of the prompt
    assert budget.with_share(0.5).capacity(100) == 50
    assert Budget().with_share(0.5).capacity(100) == 64 + 18
    assert Budget(total_rate=1.0).capacity(70) == 70


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"total_rate": 0.0}, r"budget.total_rate is 0.0; allowed: greater than 0"),
        ({"total_rate": 1.5}, r"budget.total_rate is 1.5; allowed: less than or equal to 1"),
        ({"total_rate": 0.2, "rate": 0.5}, "is 0.2 and budget.rate is 0.5; allowed"),
        ({"total_rate": 0.2, "size": 100}, "is 0.2 and budget.size is 100; allowed: one of"),
        ({"rate": 0.5, "size": 100}, "rate is 0.5 and budget.size is 100; allowed: one of"),
        ({"total_rate": 0.2}, "prompt of 100 tokens is 20 entries; allowed"),
        ({"size": 100}, r"size is 100, so there is no rate to vary"),
    ],
)
def test_a_budget_names_one_share(options: dict[str, Any], said: str) -> None:
    def use() -> None:
        budget = Budget(**options)
        assert budget.capacity(100)
        budget.with_share(0.2)

    with pytest.raises(KVError, match=said):
        use()
