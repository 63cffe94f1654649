"""Whether neighbouring entries survive a compression together, against chance.

A fact of several tokens can be copied only where all of them are held. Sampling without replacement
keeps k of m entries independently but for (k - 1) m / (k (m - 1)), a little below 1. Balancing gives
entries that are alike opposite signs, and neighbours often are: below 1 they are separated. Above 1
entries are kept in runs (SnapKV, which pools its scores). Pairs lie in the middle; the methods see the
whole layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from _common import Run, started
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.kv import Budget, CompressedKV
from kvbench.methods import build_method
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import compress_measured

METHODS: dict[str, dict[str, Any]] = {name: {} for name in ("exact", "uniform", "snapkv", "h2o")}
METHODS |= {"subgen": {}, "balancekv": {}, "gamma_0": {"name": "balancekv", "gamma": 0.0}}
"""Options by label; ``name`` of the method where the label is not its name."""


def survivors(held: CompressedKV, n: int) -> Tensor:
    """Which of n prompt positions are held, [kv_heads, n] bool; one held twice counts once."""
    positions = held.positions[0] + 1  # -1 is no position
    kept = torch.zeros(positions.shape[0], n + 1, dtype=torch.bool, device=positions.device)
    return kept.scatter_(-1, positions, True)[:, 1:]


def joint_survival(kept: Tensor, first: Tensor, distance: int) -> float | None:
    """P(both survive) / (P(first survives) P(second survives)) over pairs; 1 by independence; None where
    no head has a ratio. The probabilities are shares of the pairs, for each head by itself; the ratio is
    the mean over heads, without those that keep no first or no second entry at all.

    Args:
        kept: [kv_heads, n] bool. first: [pairs] positions; the other of each is `distance` further on.
    """
    one, other = kept[:, first].double(), kept[:, first + distance].double()
    both, chance = (one * other).mean(-1), one.mean(-1) * other.mean(-1)
    ratios = (both / chance)[chance > 0]
    return float(ratios.mean()) if len(ratios) else None


def number_pairs(texts: Sequence[str], distance: int) -> list[int]:
    """Tokens that begin a number (a run of tokens of digits) which goes on for `distance` tokens or
    more."""
    digits = [text.strip().isdecimal() for text in texts]
    return [
        i
        for i in range(len(texts) - distance)
        if not (i and digits[i - 1]) and all(digits[i : i + distance + 1])
    ]


def main(given: Sequence[str]) -> None:
    """A row for each prompt, layer, draw, method and distance. Own keys: methods (options by label),
    rate, layers, draws, exact (tokens kept exactly at both ends, which are not counted), distances,
    numbers (only pairs of a number's first token and a later one of it)."""
    own: dict[str, Any] = {
        "methods": METHODS,
        "rate": 0.25,
        "layers": None,
        "draws": 2,
        "exact": 32,
    }
    own |= {"distances": list(range(1, 17)), "numbers": False}
    task = "task=longeval_lines task.num_lines=[150]"
    run = Run(__file__, given, "model=recall_mini", task, **own)
    budget = Budget(rate=run.rate, sink=run.exact, window=run.exact)
    rows = []
    for prompt, ids in run.prompts():
        texts = [run.session.encoder.decode([token]) for token in ids] if run.numbers else []
        pairs = {d: number_pairs(texts, d) if texts else range(len(ids)) for d in run.distances}
        carried: dict[tuple[str, int], dict[str, Tensor]] = {}
        for layer, kv in run.captured(ids, run.layers):
            for label, options in run.methods.items():
                method = build_method(**{"name": label, **options})
                for draw in range(run.draws):
                    mine = replace(kv, carried=carried.setdefault((label, draw), {}))
                    generator = layer_generator(SEED_STRIDE * run.seed + draw, prompt, layer)
                    held, _ = compress_measured(label, method, budget, generator, mine)
                    kept = survivors(held, kv.n)
                    for d, starts in pairs.items():
                        inside = [i for i in starts if run.exact <= i < kv.n - run.exact - d]
                        ratio = joint_survival(kept, torch.tensor(inside), d) if inside else None
                        where = {"prompt": prompt, "layer": layer, "draw": draw, "method": label}
                        rows.append({**where, "distance": d, "ratio": ratio})
    run.save(rows, y="ratio", x="distance", by="method", panel="layer")


if __name__ == "__main__":
    started(main)
