"""Discrepancy of the Self-Balancing Walk against n, beside random signs, on unit vectors.

BalanceKV (arXiv 2502.07861), Theorem 3.3 and Algorithm 3: for vectors of norm at most 1 the walk
promises |<sum, u>| = O(log(n / delta)) for every fixed unit u, with high probability; random signs give
sqrt(n / dim). One walk over the longest n gives every shorter one (its constant c is the longest's).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from _common import Run, started

CHUNK = 1024
"""Steps whose vectors are drawn together."""
RULES = {"random_signs": None, "walk_theory": "theory", "walk_c1": 1.0, "walk_released": 0.125}
"""c of the walk: +1 with probability 1/2 - <w, v> / (2 c), clipped, w being the signed sum so far. None:
random signs; theory: 30 log(n / delta), as in Algorithm 2, delta 0.01; 1: the least for which unit
vectors start without clipping; 1/8: gamma = 4, as in the released code; 0: always against w."""


def pull(c: Any, n: int) -> float:
    """1 / (2 c) for a walk over n vectors."""
    if c is None:
        return 0.0
    c = 30.0 * math.log(n / 0.01) if c == "theory" else float(c)
    return 0.5 / c if c > 0 else 1e200


def walked(
    dim: int, rules: Sequence[Any], steps: Sequence[int], walks: int, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The signed sums [rules, walks, dim] after each n of `steps`; all rules walk the same vectors with
    the same draws."""
    generators = [np.random.default_rng([seed, walk]) for walk in range(walks)]
    last = max(steps)
    pulls = np.array([[pull(c, last)] for c in rules])
    sums = np.zeros((len(rules), walks, dim))
    for start in range(0, last, CHUNK):
        count = min(CHUNK, last - start)
        drawn = np.stack([g.standard_normal((count, dim)) for g in generators], axis=1)
        v = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
        uniforms = np.stack([g.random(count) for g in generators], axis=1)
        for i in range(count):
            inner = np.einsum("rwd,wd->rw", sums, v[i])
            signs = np.where(uniforms[i] < 0.5 - pulls * inner, 1.0, -1.0)
            sums += signs[:, :, None] * v[i]
            if start + i + 1 in steps:
                yield start + i + 1, sums.copy()


def main(given: Sequence[str]) -> None:
    """A row for each dimension, n, walk and rule: the largest coordinate of the signed sum. Own keys:
    steps, walks, dims, rules."""
    steps = [64, 256, 1024, 4096, 16384, 65536, 262144]
    own = {"steps": steps, "walks": 16, "dims": [2, 16, 64], "rules": RULES}
    run = Run(__file__, given, "", "", **own)
    rows = []
    for dim in run.dims:
        for n, sums in walked(dim, [*run.rules.values()], run.steps, run.walks, run.seed):
            for rule, found in zip(run.rules, np.abs(sums).max(-1), strict=True):
                for walk, value in enumerate(found):
                    where = {"dim": dim, "n": n, "walk": walk, "rule": rule}
                    rows.append(where | {"discrepancy": float(value)})
    most = max(run.steps)
    run.save(rows, y="discrepancy", x="n", by="rule", panel="dim", fit=(most / 64, most))


if __name__ == "__main__":
    started(main)
