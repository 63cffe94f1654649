"""Norms of queries, keys and values, and the bound that BalanceKV's theorems ask for.

BalanceKV (arXiv 2502.07861), Table 3; ClusterGen, appendix C.1. Theorem 3.1 holds for queries and keys
of norm r at most, with memory in proportion to exp(2 r^2 / sqrt(d)): log10_factor is that power of ten
at r = norm_max of the rows `bound`. Keys are shifted by the mean of their head over the prompt; over
what the paper takes that mean, and whether before or after position encoding, is not known here. Its
norms are means over all layers and heads.

    kvbench reproduce balancekv_table3      Llama-3.1-8B, a GPU; also clustergen_c1
    kvbench reproduce balancekv_table3 model=recall_mini limit=1      16 s on one core
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from _common import TRIVIAQA, Run, started
from torch import Tensor

from kvbench.kv import LayerKV

KINDS = ("queries", "keys", "keys_shifted", "values", "bound")


def norms_of(layer: LayerKV, kind: str) -> Tensor:
    """Norms of one of `KINDS` by KV head: [kv_heads, n] float64, of queries [kv_heads, group * n];
    ``bound`` [kv_heads, 1] is the largest of the queries and of the shifted keys."""
    assert layer.queries is not None
    keys = layer.keys[0].double()
    queries = layer.queries[0].double().norm(dim=-1).view(keys.shape[0], -1)
    shifted = (keys - keys.mean(1, keepdim=True)).norm(dim=-1)
    norms_by_kind = {
        "queries": queries,
        "keys": keys.norm(dim=-1),
        "keys_shifted": shifted,
        "values": layer.values[0].double().norm(dim=-1),
        "bound": torch.cat([queries, shifted], dim=-1).amax(-1, keepdim=True),
    }
    return norms_by_kind[kind]


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer, KV head (with the queries of its group) and kind.

    Keys of its own: kinds (of KINDS), layers.
    """
    run = Run(
        __file__,
        arguments,
        "model=llama31_8b_instruct",
        TRIVIAQA,
        limit=31,  # numbers of the paper's prompts: up to 30
        kinds=KINDS,
        layers=None,
    )
    rows = []
    for prompt, layer, kv in run.every_layer():
        for kind in run.kinds:
            for head, norms in enumerate(norms_of(kv, kind), start=1):
                largest = float(norms.max())
                row = {
                    "prompt": prompt,
                    "layer": layer,
                    "head": head,
                    "kind": kind,
                    "norm_mean": float(norms.mean()),
                    "norm_max": largest,
                    "of": "all heads",
                    "variation": float(norms.std(correction=0) / norms.mean()),
                }
                if kind == "bound":
                    row["log10_factor"] = 2 * largest**2 * kv.scaling / math.log(10)
                rows.append(row)
    run.save(rows, y="norm_mean", x="layer", by="kind", panel="of")


if __name__ == "__main__":
    started(main)
