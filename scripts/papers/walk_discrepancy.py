"""Discrepancy of the Self-Balancing Walk against n, beside random signs, on unit vectors.

BalanceKV (arXiv 2502.07861), Theorem A.1 and Algorithm 3: for vectors of norm at most 1 the walk
promises |<sum, u>| = O(log(n / delta)) for every fixed unit u, with high probability; random signs give
sqrt(n / dim). One walk over the longest n gives every shorter one (its constant c is the longest's).

    kvbench reproduce balancekv_theorem_a1      random vectors, no model
    kvbench reproduce balancekv_theorem_a1 model=recall_mini      smaller:      17 s on one core
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
"""The walk's constant c, by label: a vector v gets the sign + with probability 1/2 - <w, v> / (2 c),
clipped, where w is the signed sum so far. None: random signs; theory: 30 log(n / delta), as in
Algorithm 3, delta 0.01; 1: the least for which unit vectors start without clipping; 1/8: gamma = 4, as
in the released code. (0 would be: always against w.)"""


def inverse_constant(c: Any, n: int) -> float:
    """1 / (2 c) for a walk over n vectors; c as in `RULES`."""
    if c is None:
        return 0.0
    if c == "theory":
        c = 30.0 * math.log(n / 0.01)
    return 0.5 / float(c) if float(c) > 0 else 1e200


def signed_sums(
    dim: int, constants: Sequence[Any], steps: Sequence[int], walks: int, seed: int
) -> Iterator[tuple[int, np.ndarray]]:
    """The signed sums [rules, walks, dim] after each n of `steps`. There is a rule for each of
    `constants`; all rules walk the same vectors with the same draws."""
    generators = [np.random.default_rng([seed, walk]) for walk in range(walks)]
    last = max(steps)
    inverse = np.array([[inverse_constant(c, last)] for c in constants])
    sums = np.zeros((len(constants), walks, dim))
    for start in range(0, last, CHUNK):
        count = min(CHUNK, last - start)
        drawn = np.stack([g.standard_normal((count, dim)) for g in generators], axis=1)
        vectors = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
        uniforms = np.stack([g.random(count) for g in generators], axis=1)
        for i in range(count):
            inner = np.einsum("rwd,wd->rw", sums, vectors[i])
            signs = np.where(uniforms[i] < 0.5 - inverse * inner, 1.0, -1.0)
            sums += signs[:, :, None] * vectors[i]
            if start + i + 1 in steps:
                yield start + i + 1, sums.copy()


def main(arguments: Sequence[str]) -> None:
    """Write a row for each dimension, n, walk and rule: the largest coordinate of the signed sum.

    Keys of its own: steps (the n's), walks, dims, rules (see RULES).
    """
    run = Run(
        __file__,
        arguments,
        "",
        "",
        steps=[64, 256, 1024, 4096, 16384, 65536, 262144],
        walks=16,
        dims=[2, 16, 64],
        rules=RULES,
    )
    constants = list(run.rules.values())
    rows = []
    for dim in run.dims:
        for n, sums in signed_sums(dim, constants, run.steps, run.walks, run.seed):
            for rule, coordinates in zip(run.rules, np.abs(sums).max(-1), strict=True):
                for walk, largest in enumerate(coordinates):
                    row = {"dim": dim, "n": n, "walk": walk, "rule": rule}
                    rows.append(row | {"discrepancy": float(largest)})
    longest = max(run.steps)
    run.save(rows, y="discrepancy", x="n", by="rule", panel="dim", fit=(longest / 64, longest))


if __name__ == "__main__":
    started(main)
