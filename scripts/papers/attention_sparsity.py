"""Share of attention weights below a threshold relative to the largest of their row, by layer.

H2O (arXiv 2306.14048), Figure 2a: the threshold 1 %, on WikiText-103. The figure prints no numbers; the
text says more than 95 % in almost all layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from _common import Run, started
from torch import Tensor

from kvbench.kernels.softcap import capped
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
    at = torch.arange(n, device=keys.device)
    for start in range(0, n, rows):
        block = at[start : start + rows]
        logits = capped(queries[:, :, block] @ keys * layer.scaling, layer.softcap)
        seen = at[None] <= block[:, None]
        top = logits.masked_fill(~seen, -torch.inf).amax(-1, keepdim=True)
        for i, share in enumerate(shares):
            below[i] += ((logits - top < math.log(share)) & seen).sum((-2, -1))
    return below.flatten(1).double() / (n * (n + 1) / 2)


def main(given: Sequence[str]) -> None:
    """A row for each prompt, layer and threshold: mean over heads, least and most. Own keys: shares,
    layers."""
    task = "task=text task.dataset_name=Salesforce/wikitext task.dataset_config=wikitext-103-raw-v1"
    own = {"shares": [0.01, 0.001, 0.1], "layers": None}
    run = Run(__file__, given, "model=opt_6_7b", task, **own)
    rows = []
    for prompt, ids in run.prompts():
        for layer, kv in run.captured(ids, run.layers):
            for share, heads in zip(run.shares, sparsity(kv, run.shares), strict=True):
                row = {"prompt": prompt, "layer": layer, "below": share, "of": "all heads"}
                row |= {"sparsity": float(heads.mean()), "least": float(heads.min())}
                rows.append(row | {"most": float(heads.max())})
    run.save(rows, y="sparsity", x="layer", by="below", panel="of")


if __name__ == "__main__":
    started(main)
