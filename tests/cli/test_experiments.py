"""The experiments run what the papers' tables mean: entries, weights and shares as they are printed."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from support.command import composed, job_of
from support.method_layers import make_layer, run

from kvbench.cli.items import paper_items
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method


def methods_of(config: Any) -> dict[str, Any]:
    return {
        label: instantiate(node, _convert_="all")
        for label, node in config.methods.items()
        if not label.startswith("minference")
    }


@pytest.mark.parametrize("reduction", [35, 42, 50])
def test_subgens_table_1_keeps_the_papers_entries(reduction: int) -> None:
    """2,048 or 3,072 recent tokens and the rest centres, so many per cent less in all."""
    share = 1 - reduction / 100
    config = composed(
        "experiment=subgen_table1", "task.files=[x]", f"budget.total_rate={share:.2f}"
    )
    methods, budget = methods_of(config), instantiate(config.budget)
    variants = {label: m for label, m in methods.items() if label.startswith("subgen")}
    assert {m.recent for m in variants.values()} == {2048, 3072}
    n = {35: 5000, 42: 7000, 50: 9000}[reduction]
    layer = make_layer(n, batch=1, kv_heads=1, dim=4, seed=1)
    for method in (*variants.values(), methods["streaming_llm"]):
        kept = run(method, layer, budget).positions[0, 0].tolist()
        assert len(set(kept)) == round(share * n)
        recent = getattr(method, "recent", round(share * n) - 32)
        assert set(range(n - recent, n)) <= set(kept)
    assert methods["h2o"].evicts
    runs = paper_items()["subgen_table1"].runs
    assert sum(line.endswith(f"budget.total_rate={share:.2g}") for line in runs) == 1


def test_subgens_table_2_is_half_recent_and_half_centres_or_first_tokens() -> None:
    config = composed("experiment=subgen_table2")
    layer = make_layer(2600, batch=1, kv_heads=2, dim=4, seed=2)
    for label in ("subgen", "streaming_llm"):
        kept = run(methods_of(config)[label], layer, instantiate(config.budget)).positions[0]
        for head in kept.tolist():
            assert len(set(head)) == 2048
            assert sorted(head)[1024:] == list(range(2600 - 1024, 2600))
            assert (sorted(head)[:1024] == list(range(1024))) is (label == "streaming_llm")


def chosen_by(method: Any, budget: Budget, layer: LayerKV) -> list[tuple[tuple[int, int], ...]]:
    """Of every head, the middle's positions that are kept, with their weights."""
    kept = run(method, layer, budget, seed=5)
    weights = (
        torch.zeros_like(kept.positions) if kept.log_weights is None else kept.log_weights
    ).exp()
    middle = range(budget.sink, layer.n - budget.window)
    chosen = []
    for positions, row in zip(kept.positions[0].tolist(), weights[0].tolist(), strict=True):
        entries = zip(positions, (round(w, 4) for w in row), strict=True)
        chosen.append(tuple((p - budget.sink, w) for p, w in entries if p in middle))
    return chosen


@pytest.mark.parametrize("rate", [0.95, 0.9, 0.8, 0.5, 0.3, 0.25])
def test_uniform_in_the_subset_is_balancekv_without_balance(rate: float) -> None:
    """The same positions and weights as gamma = 0; beside the balanced walk, the same part may go."""
    layer = make_layer(700, batch=1, kv_heads=3, dim=8, seed=4)
    budget = Budget(rate=rate, sink=16, window=16)
    subset = chosen_by(build_method("uniform", scope="subset"), budget, layer)
    assert subset == chosen_by(build_method("balancekv", gamma=0.0), budget, layer)
    other_keys = replace(layer, keys=layer.keys.flip(2))
    assert subset == chosen_by(build_method("uniform", scope="subset"), budget, other_keys)
    balanced = chosen_by(build_method("balancekv"), budget, layer)
    assert subset != balanced
    middle = layer.n - 32
    kept = round(rate * middle)
    touched = min(middle, 2 * (middle - kept))
    for head in (*subset, *balanced):
        assert len(head) == kept
        assert [p for p, _ in head if p >= touched] == list(range(touched, middle))
        assert {w for p, w in head if p >= touched} <= {1.0}
        assert {w for p, w in head if p < touched} <= {1.0, 2.0, 4.0}
    plain = chosen_by(build_method("uniform", scope="subset", weighted=False), budget, layer)
    assert plain == [tuple((p, 1.0) for p, _ in head) for head in subset]


@pytest.mark.parametrize(
    ("experiment", "more", "released"),
    [
        ("h2o_table3", [], {(512, 32): 0.1, (512, 512): 0.2, (512, 1024): 0.3}),
        ("h2o_table5", [], {(2048, 2048): 0.2}),
        ("h2o_table5", ["task.settings=[[5000,5000,4,0.4]]"], {(5000, 5000): 0.2}),
        ("h2o_table5", ["task.settings=[[7000,1024,1,0.22]]"], {(7000, 1024): 0.11}),
    ],
)
def test_twenty_per_cent_is_twenty_per_cent(
    experiment: str, more: list[str], released: dict[tuple[int, int], float]
) -> None:
    """`released` has the --hh-ratio of h2o_suite.py: int(ratio * prompt) entries are heavy hitters, as
    many are recent, and together they are about a fifth of prompt and answer, as the table says."""
    job: Any = job_of(f"experiment={experiment}", "device=cpu", *more)
    settings = job.plan._settings()
    assert {(s.prompt_tokens, s.new_tokens) for s in settings} == set(released)
    for setting in settings:
        n, new = setting.prompt_tokens, setting.new_tokens
        for label, (method, budget) in job.methods.items():
            if not method.uses_budget:
                continue
            capacity = budget.with_share(setting.rate).capacity(n)
            assert abs(capacity - 2 * int(released[n, new] * n)) <= 1, label
            assert capacity / (n + new) == pytest.approx(0.2, abs=0.013)
    assert job.methods["h2o"][0].evicts
    assert job.methods["local"][0].evicts
    runs = paper_items()[experiment].runs
    assert all(any(shlex.quote(word) in line for line in runs) for word in more)
