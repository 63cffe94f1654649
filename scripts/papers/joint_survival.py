"""Whether neighbouring entries survive a compression together, against chance.

A fact of several tokens can be copied only where all of them are held. Sampling without replacement
keeps k of m entries independently but for (k - 1) m / (k (m - 1)), a little below 1. Balancing gives
entries that are alike opposite signs, and neighbours often are: below 1 they are separated. Above 1
entries are kept in runs (SnapKV, which pools its scores). Pairs lie in the middle; the methods see the
whole layer. No paper shows it; results/README-more.md has a table of it.

    kvbench reproduce joint_survival      any model; `make results-claims` has the table's settings
    kvbench reproduce joint_survival model=recall_mini limit=1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from _common import Run, method_with, started
from torch import Tensor

from kvbench.engine.row import layer_generator
from kvbench.kv import Budget, CompressedKV
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import compress_measured

METHODS: dict[str, dict[str, Any]] = {
    "exact": {},
    "uniform": {},
    "snapkv": {},
    "h2o": {},
    "subgen": {},
    "balancekv": {},
    "gamma_0": {"name": "balancekv", "gamma": 0.0},
}
"""Options by label; ``name`` of the method where the label is not its name."""


def survivors(compressed: CompressedKV, n: int) -> Tensor:
    """Which of n prompt positions are held, [kv_heads, n] bool; one held twice counts once."""
    positions = compressed.positions[0] + 1  # -1 is no position
    kept = torch.zeros(positions.shape[0], n + 1, dtype=torch.bool, device=positions.device)
    return kept.scatter_(-1, positions, True)[:, 1:]


def joint_survival(kept: Tensor, first: Tensor, distance: int) -> float | None:
    """P(both survive) / (P(first survives) P(second survives)) over pairs; 1 by independence; None where
    no head has a ratio. The probabilities are shares of the pairs, for each head by itself; the ratio is
    the mean over heads, without those that keep no first or no second entry at all.

    Args:
        kept: [kv_heads, n] bool.
        first: [pairs] positions; the second entry of each pair is `distance` further on.
    """
    firsts, seconds = kept[:, first].double(), kept[:, first + distance].double()
    together = (firsts * seconds).mean(-1)
    by_chance = firsts.mean(-1) * seconds.mean(-1)
    ratios = (together / by_chance)[by_chance > 0]
    return float(ratios.mean()) if len(ratios) else None


def rows_of_prompt(run: Run, prompt: str, ids: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each layer, method, draw and distance."""
    budget = Budget(rate=run.rate, sink=run.exact, window=run.exact)
    carried: dict[tuple[str, int], dict[str, Tensor]] = {}
    for layer, kv in run.captured(ids, run.layers):
        for label, options in run.methods.items():
            method = method_with(options, label)
            for draw in range(run.draws):
                seen = replace(kv, carried=carried.setdefault((label, draw), {}))
                generator = layer_generator(SEED_STRIDE * run.seed + draw, prompt, layer)
                compressed, _ = compress_measured(label, method, budget, generator, seen)
                kept = survivors(compressed, kv.n)
                for distance in run.distances:
                    middle = torch.arange(run.exact, max(run.exact, kv.n - run.exact - distance))
                    ratio = joint_survival(kept, middle, distance) if len(middle) else None
                    yield {
                        "prompt": prompt,
                        "layer": layer,
                        "draw": draw,
                        "method": label,
                        "distance": distance,
                        "ratio": ratio,
                    }


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer, draw, method and distance: the ratio of `joint_survival`.

    Keys of its own: methods (options by label), rate, layers, draws, exact (tokens kept exactly at both
    ends, which are not counted), distances.
    """
    run = Run(
        __file__,
        arguments,
        "model=recall_mini",
        "task=longeval_lines task.num_lines=[150]",
        methods=METHODS,
        rate=0.25,
        layers=None,
        draws=2,
        exact=32,
        distances=list(range(1, 17)),
    )
    rows: list[dict[str, Any]] = []
    for prompt, ids in run.prompts():
        rows += rows_of_prompt(run, prompt, ids)
    run.save(rows, y="ratio", x="distance", by="method", panel="layer")


if __name__ == "__main__":
    started(main)
