"""Discrepancy of SoftmaxBalance against n, beside random signs.

BalanceKV (arXiv 2502.07861), Theorem 3.3 and Algorithm 2: for keys and values in R^s, and for any query,
the sums of exp(<k, q> / sqrt(d)) v over the entries that are kept and over those that are not differ, in
norm, by O(sqrt(s) log(n s / delta)) times exp(||q||^2 / (2 sqrt(d))) exp(max ||k||^2 / (2 sqrt(d))) max
||v||, with a probability of at least 1 - delta. Random signs give a difference that grows like sqrt(n).

    kvbench reproduce balancekv_theorem3_3      random data, no model
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from _bounded import BoundedData
from _common import Run, started
from torch import Tensor

from kvbench.engine.row import layer_generator
from kvbench.kernels.self_balancing import softmax_balance, walk_bound

RULES = {"random_signs": None, "algorithm_2": 30.0, "constant_1": 1.0}
"""The constant in c = constant log(n s / delta), by label: 30 is Algorithm 2's, which the theorem's
proof runs with delta / s; 1 is ours; None: random signs."""
RESTARTS = 100
"""How often a walk that fails is tried with new draws."""


def difference(keys: Tensor, values: Tensor, queries: Tensor, kept: Tensor) -> Tensor:
    """The norms [m] of sum(kept) - sum(not kept) of exp(<k, q> / sqrt(d)) v, over exp(||q||^2 / (2
    sqrt(d))) exp(max ||k||^2 / (2 sqrt(d))) max ||v||.

    Args:
        keys: [n, d] float64. values: [n, s]. queries: [m, d]. kept: [n] bool.
    """
    root = keys.shape[1] ** 0.5
    largest = keys.square().sum(-1).max() + queries.square().sum(-1)[:, None]
    weights = (queries @ keys.mT / root - largest / (2 * root)).exp()
    signed = (2.0 * kept[:, None] - 1) * values
    return (weights @ signed).norm(dim=-1) / values.norm(dim=-1).max()


def main(arguments: Sequence[str]) -> None:
    """Write a row for each dimension s of the values (1: all are 1, as for the denominator), n, draw of
    the data and rule: the mean difference over the queries, and over what the theorem names.

    Keys of its own: steps (the n's), draws, dim (d), norm (of keys and queries), queries, delta, rules
    (see RULES).
    """
    run = Run(
        __file__,
        arguments,
        "",
        "",
        steps=[64, 256, 1024, 4096],
        draws=8,
        dim=64,
        norm=4.0,
        queries=64,
        delta=0.01,
        rules=RULES,
    )
    data = BoundedData(head_dim=run.dim, key_norm=run.norm, query_norm=run.norm, value_norm=1.0)
    rows: list[dict[str, Any]] = []
    for n, draw in product(run.steps, range(run.draws)):
        layer, queries = data.layer(n, run.queries, "softmax_balance", draw)
        keys, vectors, asked = (x[0, 0].double() for x in (layer.keys, layer.values, queries))
        for values in (vectors, torch.ones(n, 1, dtype=torch.float64)):
            s = values.shape[1]
            for rule, constant in run.rules.items():
                bound = math.inf
                if constant is not None:
                    bound = walk_bound(n * s, run.delta, constant)
                generator = layer_generator(run.seed, f"{rule}/{draw}", s)
                radii = {"key_radius": run.norm, "value_radius": 1.0}
                restarts = 0
                kept = None
                while kept is None and restarts < RESTARTS:
                    uniforms = torch.rand(n, generator=generator)
                    kept = softmax_balance(keys, values, uniforms, bound=bound, **radii)
                    restarts += kept is None
                row = {"s": s, "n": n, "draw": draw, "rule": rule, "restarts": restarts}
                if kept is None:
                    rows.append(row | {"discrepancy": None})
                    continue
                found = float(difference(keys, values, asked, kept).mean())
                over = found / (s**0.5 * math.log(n * s / run.delta))
                rows.append(row | {"discrepancy": found, "over_bound": over})
    longest = max(run.steps)
    run.save(rows, y="discrepancy", x="n", by="rule", panel="s", fit=(longest / 64, longest))


if __name__ == "__main__":
    started(main)
