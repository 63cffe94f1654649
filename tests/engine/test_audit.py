"""The audit counts what is held, and no method judges itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from support.jobs import SMALL, make_job, records_of
from support.tiny import Greedy, tiny_model

from kvbench.engine.guard import check_held
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, LayerKV, gather_entries, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.probes.error_scaling import check_total
from kvbench.probes.layer_error import LayerError, SyntheticLayers
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.score_notes import notes_of
from kvbench.report.tables.scores import score_table
from kvbench.run.runner import run_job


@dataclass(frozen=True, kw_only=True)
class OwnJudge(Greedy):
    """Keeps everything, and says that it may."""

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return n

    def total_capacity(self, budget: Budget, n: int, num_layers: int) -> int:
        return n * num_layers


@dataclass(frozen=True, kw_only=True)
class Released(OwnJudge):
    """The same with a name for it."""

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"all_of_it": {"whole": True}}

    whole: bool = False


LAYERS = tiny_model("llama").config.num_hidden_layers


def test_more_than_the_budget_needs_a_presets_name_and_is_shown(tmp_path: Path) -> None:
    methods: dict[str, Method] = {
        "judge": OwnJudge(),
        "unnamed": Released(),
        "named": Released(whole=True),
        "snapkv": build_method("snapkv"),
    }
    result = run_job(make_job(tmp_path, methods, limit=1))
    found = {label: rows[0] for label, rows in records_of(result).items()}
    allowed = LAYERS * SMALL.capacity(75)
    for label in ("judge", "unnamed"):
        assert found[label]["status"] == "over_budget"
        line = f"{label!r} holds {LAYERS * 75} entries in all layers; its budget allows {allowed}"
        assert found[label]["error"].endswith(line)
    assert (found["named"]["status"], found["named"]["budget_preset"]) == ("ok", "all_of_it")
    assert "budget_preset" not in found["snapkv"]
    group = next(iter(load_experiment(tmp_path / "e").groups))
    (note,) = [line for line in notes_of([score_table(group)]) if "its preset" in line]
    assert note.startswith(
        f"named holds 75 entries per layer and KV head where the budget allows {SMALL.capacity(75)}:"
        " its preset all_of_it "
    )


@pytest.mark.parametrize("n", [300, 1000, 4096])
def test_the_released_pyramid_says_by_how_much_it_exceeds(n: int) -> None:
    """From the released formula alone: first - layer * ((first - last) // steps), summed."""
    from kvbench.methods.base import allowed_entries, preset_of

    method, plain = build_method("pyramidkv", preset="released"), build_method("pyramidkv")
    budget, layers = Budget(rate=0.25, sink=0, window=8), 6
    mean = budget.capacity(n) - 8
    first = min(2 * mean - mean // 20, n - 8)
    fall = (first - (2 * mean - first)) // (layers - 1)
    total = sum(first - layer * fall + 8 for layer in range(layers))
    over = total > layers * budget.capacity(n)
    assert allowed_entries(method, budget, n, layers) == (total, "released" if over else None)
    assert allowed_entries(plain, budget, n, layers) == (layers * budget.capacity(n), None)
    assert preset_of(replace(method, kernel_size=7)) == "released"


def test_probes_do_not_take_a_methods_word_either(tmp_path: Path) -> None:
    """Neither where one layer stands for all, nor where the layers measured share the budget."""
    budget = Budget(rate=0.5, sink=32, window=32)
    line = f"'m' holds 640 entries in all layers; its budget allows {2 * budget.capacity(320)}"
    for judge in (OwnJudge(), Released()):
        with pytest.raises(BudgetExceeded, match=line):
            check_total("m", judge, budget, 320, 2)
    check_total("m", Released(whole=True), budget, 320, 2)
    check_total("m", build_method("h2o"), budget, 320, 2)
    data = SyntheticLayers(n=320, heads=4, kv_heads=2, head_dim=16)
    probe = LayerError(rates=(0.5,), layers=(1, 2), seeds=1, exact=32, synthetic=data)
    methods = {"judge": OwnJudge(), "h2o": build_method("h2o")}
    found = records_of(run_job(make_job(tmp_path, methods, plan=probe)))
    for record in found["judge"]:
        assert (record["status"], record["score"]) == ("error", None)
        assert "holds 640 entries there at the least; allowed: layers at which" in record["error"]
    assert [row["status"] for row in found["h2o"]] == ["ok"] * 2


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
def test_room_that_no_head_uses_is_held(heads: tuple[str, ...], counts: list[int]) -> None:
    entries = torch.randn(1, 2, 4, 8)
    held = CompressedKV(entries, entries, weights_of(*heads), torch.zeros(1, 2, 4).long())
    assert held.entries.tolist() == [counts]


@dataclass(frozen=True, kw_only=True)
class Changed(Method):
    """The most recent entries of the capacity, after a change."""

    change: Callable[[CompressedKV, LayerKV], CompressedKV]

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        count = budget.capacity(layer.n)
        at = torch.arange(layer.n - count, layer.n).expand(1, layer.keys.shape[1], -1)
        return self.change(gather_entries(layer, at, torch.zeros(at.shape)), layer)


def hides_the_rest(held: CompressedKV, layer: LayerKV) -> CompressedKV:
    """All entries, those beyond the budget with no weight at any head."""
    whole, count = keep_all(layer), held.keys.shape[2]
    weights = torch.full(whole.keys.shape[:3], -math.inf)
    weights[:, :, -count:] = 0
    return replace(whole, log_weights=weights)


def test_entries_without_weight_at_every_head_exceed_the_budget(tmp_path: Path) -> None:
    result = run_job(make_job(tmp_path, {"hides": Changed(change=hides_the_rest)}, limit=1))
    (record,) = records_of(result)["hides"]
    assert record["status"] == "over_budget"
    assert "holds 75 entries at layer 0; its budget allows 25" in record["error"]


MISSHAPEN: dict[str, tuple[Callable[[CompressedKV, LayerKV], CompressedKV], str]] = {
    "weights that broadcast": (
        lambda held, layer: replace(keep_all(layer), log_weights=torch.zeros(1, 2, 1)),
        "ValueError: log_weights are (1, 2, 1) torch.float32 on cpu; allowed: (1, 2, 75) torch.float",
    ),
    "weights of one head": (
        lambda held, _: replace(held, log_weights=torch.zeros(1, 1, 25)),
        "ValueError: log_weights are (1, 1, 25) torch.float32 on cpu; allowed: (1, 2, 25) torch.flo",
    ),
    "weights in double": (
        lambda held, _: replace(held, log_weights=torch.zeros(1, 2, 25).double()),
        "ValueError: log_weights are (1, 2, 25) torch.float64 on cpu; allowed: (1, 2, 25) torch.flo",
    ),
    "scores that broadcast": (
        lambda held, _: replace(held, scores=torch.zeros(1, 1, 1)),
        "ValueError: scores are (1, 1, 1) torch.float32 on cpu; allowed: (1, 2, 25) torch.float32",
    ),
    "positions of one head": (
        lambda held, _: replace(held, positions=held.positions[:, :1]),
        "ValueError: positions are (1, 1, 25) torch.int64 on cpu; allowed: (1, 2, 25) torch.int64",
    ),
    "positions that are no integers": (
        lambda held, _: replace(held, positions=held.positions.float()),
        "ValueError: positions are (1, 2, 25) torch.float32 on cpu; allowed: (1, 2, 25) torch.int64",
    ),
    "no positions": (
        lambda held, _: replace(held, positions=None),  # type: ignore[arg-type]
        "TypeError: positions are a NoneType; allowed: a tensor",
    ),
    "keys elsewhere": (
        lambda held, _: replace(held, keys=held.keys.to("meta")),
        "ValueError: keys are (1, 2, 25, 16) torch.float32 on meta; allowed: (1, 2, 25, 16) torch.f",
    ),
}


@pytest.mark.parametrize("kind", MISSHAPEN)
def test_every_field_is_checked_against_the_keys(tmp_path: Path, kind: str) -> None:
    change, line = MISSHAPEN[kind]
    result = run_job(make_job(tmp_path, {"odd": Changed(change=change)}, limit=1))
    (record,) = records_of(result)["odd"]
    assert (record["status"], record["error"][: len(line)]) == ("error", line)


def test_what_fits_is_taken(tmp_path: Path) -> None:
    result = run_job(make_job(tmp_path, {"fine": Changed(change=lambda held, _: held)}, limit=1))
    assert records_of(result)["fine"][0]["status"] == "ok"
    layer = LayerKV(torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 9, 4), None, 0, 1, 0.5)
    twice = torch.zeros(1, 4, 9, 4)  # keys repeated to query heads
    check_held(CompressedKV(twice, twice, None, torch.zeros(1, 4, 9).long()), layer)
