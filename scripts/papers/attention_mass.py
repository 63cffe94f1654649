"""Attention that each key accumulates over all queries, the largest first, and its power law.

H2O (arXiv 2306.14048), Figure 2b (four layers) and Figure 10 (layers=null: all of OPT-1.3B), on
WikiText-103. The figures print no numbers.

    kvbench reproduce h2o_figure2b      OPT-6.7B, a GPU; also h2o_figure10
    kvbench reproduce h2o_figure2b model=recall_mini limit=1
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from _common import WIKITEXT, Run, started
from torch import Tensor

from kvbench.kv import LayerKV


def sorted_mass(layer: LayerKV, per: str) -> Tensor:
    """Shares of all attention that keys accumulate, the largest first, mean over heads: [n] float64.

    Args:
        per: head (every query head, as the paper shows it) | group (the mean over the query heads that
            share a key, which kvbench's `h2o` goes by).
    """
    mass = layer.attention_mass()[0].double()
    if per == "group":
        mass = mass.unflatten(0, (layer.keys.shape[1], layer.group)).mean(1)
    return (mass / mass.sum(-1, keepdim=True)).sort(dim=-1, descending=True).values.mean(0)


def power_law_share(shares: Tensor, last: int, rank: int) -> float:
    """The share of the first `rank` of all ranks by the power law that fits the ranks 1 .. `last` (least
    squares of logarithms)."""
    ranks = np.arange(1, len(shares) + 1)
    slope = np.polyfit(np.log(ranks[:last]), np.log(shares[:last].numpy()), 1)[0]
    law = ranks**slope
    return float(law[:rank].sum() / law.sum())


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer, way to accumulate and rank: the share of attention.

    Keys of its own: per (see `sorted_mass`), ranks, layers, fit_most (the last rank that is fitted: keys
    that come late are seen by few queries), top (a share of the keys: in place of the ranks, one row
    with what these keys accumulate together, and how much more that is than by the power law).
    """
    run = Run(
        __file__,
        arguments,
        "model=opt_6_7b",
        WIKITEXT,
        per=["head", "group"],
        ranks=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        layers=4,
        fit_most=512,
        top=None,
    )
    rows: list[dict[str, Any]] = []
    for prompt, layer, kv in run.every_layer():
        for per in run.per:
            shares = sorted_mass(kv, per)
            where = {"prompt": prompt, "layer": layer, "per": per}
            if run.top is None:
                for rank in run.ranks:
                    rows.append(where | {"rank": rank, "attention": float(shares[rank - 1])})
            else:
                rank = round(run.top * kv.n)
                attention = float(shares[:rank].sum())
                beyond = attention - power_law_share(shares.cpu(), run.fit_most, rank)
                top = {"rank": rank, "attention": attention, "beyond_power_law": beyond}
                rows.append(where | top)
    run.save(rows, y="attention", x="rank", by="layer", panel="per", fit=(1, run.fit_most))


if __name__ == "__main__":
    started(main)
