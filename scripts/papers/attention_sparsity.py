"""Share of attention weights below a threshold relative to the largest of their row, by layer.

H2O (arXiv 2306.14048), Figure 2a: the threshold 1 %, on WikiText-103. The figure prints no numbers; the
text says more than 95 % in almost all layers.

    kvbench reproduce h2o_figure2a      OPT-6.7B, a GPU
    kvbench reproduce h2o_figure2a model=recall_mini limit=1
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from _common import WIKITEXT, Run, started
from torch import Tensor

from kvbench.kernels.logits import softcapped
from kvbench.kv import LayerKV

BLOCK = 1 << 22
"""Logits of a block of queries: 32 MiB in float64."""


def sparsity(layer: LayerKV, shares: Sequence[float]) -> Tensor:
    """The share of causal attention weights below each of `shares` of their row's maximum.

    A weight is exp(logit - row maximum) times the row's maximum, so logits are compared and no softmax
    is taken; in float64, a block of queries at a time.

    Returns:
        [len(shares), heads] float64: of the n (n + 1) / 2 weights that a head may use.
    """
    assert layer.queries is not None
    kv_heads, n = layer.keys.shape[1], layer.n
    queries = layer.queries[0].double().unflatten(0, (kv_heads, layer.group))
    keys = layer.keys[0].double()[:, None].mT
    below = torch.zeros(len(shares), kv_heads, layer.group, dtype=torch.int64, device=keys.device)
    rows = max(1, BLOCK // (kv_heads * layer.group * n))
    positions = torch.arange(n, device=keys.device)
    for start in range(0, n, rows):
        block = positions[start : start + rows]
        logits = softcapped(queries[:, :, block] @ keys * layer.scaling, layer.softcap)
        seen = positions[None] <= block[:, None]
        largest = logits.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        for i, share in enumerate(shares):
            below[i] += ((logits - largest < math.log(share)) & seen).sum((-2, -1))
    return below.flatten(1).double() / (n * (n + 1) / 2)


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer and threshold: the mean over heads, the least and the most.

    Keys of its own: shares (the thresholds), layers.
    """
    shares = [0.01, 0.001, 0.1]
    run = Run(__file__, arguments, "model=opt_6_7b", WIKITEXT, shares=shares, layers=None)
    rows = []
    for prompt, layer, kv in run.every_layer():
        for share, heads in zip(run.shares, sparsity(kv, run.shares), strict=True):
            rows.append(
                {
                    "prompt": prompt,
                    "layer": layer,
                    "below": share,
                    "of": "all heads",
                    "sparsity": float(heads.mean()),
                    "least": float(heads.min()),
                    "most": float(heads.max()),
                }
            )
    run.save(rows, y="sparsity", x="layer", by="below", panel="of")


if __name__ == "__main__":
    started(main)
