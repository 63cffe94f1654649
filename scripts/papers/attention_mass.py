"""Attention that each key accumulates over all queries, the largest first, and its power law.

H2O (arXiv 2306.14048), Figure 2b (four layers) and Figure 10 (layers=null: all of OPT-1.3B), on
WikiText-103. The figures print no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from _common import Run, started
from torch import Tensor

from kvbench.kv import LayerKV


def sorted_mass(layer: LayerKV, per: str) -> Tensor:
    """Shares of all attention that keys accumulate, the largest first, mean over heads: [n] float64.

    Args:
        per: head (every query head, as the paper shows it) | group (the mean over the query heads that
            share a key, which `h2o` here goes by).
    """
    mass = layer.attention_mass()[0].double()
    if per == "group":
        mass = mass.unflatten(0, (layer.keys.shape[1], layer.group)).mean(1)
    return (mass / mass.sum(-1, keepdim=True)).sort(dim=-1, descending=True).values.mean(0)


def power_law_share(shares: Tensor, most: int, rank: int) -> float:
    """What the first `rank` of all ranks hold by the power law that fits the ranks up to `most` (least
    squares of logarithms)."""
    ranks = np.arange(1, len(shares) + 1)
    slope = np.polyfit(np.log(ranks[:most]), np.log(shares[:most].numpy()), 1)[0]
    law = ranks**slope
    return float(law[:rank].sum() / law.sum())


def main(given: Sequence[str]) -> None:
    """A row for each prompt, layer, way to accumulate and rank. Own keys: per, ranks, layers, fit_most
    (the last rank that is fitted: keys that come late are seen by few queries), top (in place of ranks:
    what this share of the keys accumulates together, and how much more than by the fit)."""
    task = "task=text task.dataset_name=Salesforce/wikitext task.dataset_config=wikitext-103-raw-v1"
    ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    own = {"per": ["head", "group"], "ranks": ranks, "layers": 4, "fit_most": 512, "top": None}
    run = Run(__file__, given, "model=opt_6_7b", task, **own)
    rows = []
    for prompt, ids in run.prompts():
        for layer, kv in run.captured(ids, run.layers):
            for per in run.per:
                shares = sorted_mass(kv, per)
                where = {"prompt": prompt, "layer": layer, "per": per}
                if run.top is not None:
                    rank = round(run.top * kv.n)
                    held = float(shares[:rank].sum())
                    beyond = held - power_law_share(shares.cpu(), run.fit_most, rank)
                    found = {"rank": rank, "attention": held, "beyond_power_law": beyond}
                    rows.append(where | found)
                    continue
                rows += [where | {"rank": r, "attention": float(shares[r - 1])} for r in run.ranks]
    run.save(rows, y="attention", x="rank", by="layer", panel="per", fit=(1, run.fit_most))


if __name__ == "__main__":
    started(main)
