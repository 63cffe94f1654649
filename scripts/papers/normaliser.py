"""Relative error of the softmax's normaliser, the sum of exponentials, under a method's entries.

SubGen (arXiv 2402.06082), Theorem 1, keeps it within a factor 1 +- eps; nothing is printed about it.

    python scripts/claims.py model=<any> claims=S3      runs it (results/claims.yaml)
    python scripts/papers/normaliser.py model=recall_mini limit=1
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from _common import Run, started
from torch import Tensor

from kvbench.engine.row import layer_generator
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import compress_measured, hold_out, seen_logits


def log_sums(compressed: CompressedKV, queries: Tensor, first: int, layer: LayerKV) -> Tensor:
    """Log of the estimated sum of exponentials of the queries at positions first, first + 1, ...:
    [1, heads, m] float64; NaN where signed weights make it negative."""
    logits = seen_logits(compressed, queries, first, layer)
    largest = logits.amax(-1, keepdim=True)
    terms = (logits - largest).exp()
    if compressed.denominators is not None:
        terms = terms * compressed.denominators.double()[:, :, None, None]
    return (terms.sum(-1).log() + largest[..., 0]).flatten(1, 2)


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer and method: the median error over queries and heads.

    Keys of its own: methods, rate, layers, asked (the last tokens, so many, are kept exactly; their
    queries are measured, and no method sees them).
    """
    run = Run(
        __file__,
        arguments,
        "model=llama2_7b",
        "task=text",
        methods=["uniform", "subgen", "subgen_streaming"],
        rate=0.25,
        asked=64,
        layers=4,
    )
    rows = []
    for prompt, layer, kv in run.every_layer():
        seen, queries, first = hold_out(kv, run.asked)
        exact = log_sums(keep_all(kv), queries, first, kv)
        budget = Budget(rate=run.rate, sink=run.asked, window=run.asked)
        for name in run.methods:
            generator = layer_generator(SEED_STRIDE * run.seed, prompt, layer)
            method = build_method(name)
            compressed, _ = compress_measured(name, method, budget, generator, seen)
            error = ((log_sums(compressed, queries, first, kv) - exact).exp() - 1).abs()
            where = {"prompt": prompt, "layer": layer, "method": name, "of": "all heads"}
            rows.append(where | {"error": float(error.nan_to_num(torch.inf).median())})
    run.save(rows, y="error", x="layer", by="method", panel="of")


if __name__ == "__main__":
    started(main)
