"""Discrepancy of the Self-Balancing Walk (BalanceKV, arXiv 2502.07861, Algorithm 3) against n."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from annotated_types import Gt, Lt
from numpy.typing import NDArray

from kvbench.errors.options import Distinct, NonNegative, check_options
from kvbench.probes.base import (
    SYNTHETIC,
    Probe,
    Repeats,
    StandIn,
    Tokens,
    of_kind,
    scaling_figure,
)
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError

Array = NDArray[np.float64]

GREEDY = 1e200
"""A pull beyond any inner product that is not zero."""
_CHUNK = 1024
"""Steps whose vectors are drawn together."""


@dataclass(frozen=True, kw_only=True)
class Walk(StandIn):
    """A rule for signs: +1 with probability 1/2 - <w, v> / (2 c), w the signed sum so far.

    Args:
        c: the walk's constant; "theory" for 30 log(n / delta), as in the paper's Algorithm 2; 0 for
            the greedy limit (always against w, a fair coin where <w, v> = 0); None for random signs.
            The released code's gamma is 1 / (2 c). Where |<w, v>| exceeds c the probability is
            clipped (Algorithm 3 would fail there).
        delta: the failure probability "theory" allows.
    """

    saves_memory: ClassVar[bool] = True  # as records have always said
    paper: ClassVar[str] = "arXiv 2502.07861, Algorithm 3"

    c: NonNegative | Literal["theory"] | None = "theory"
    delta: Annotated[float, Gt(0), Lt(1)] = 0.01

    def pull(self, n: int) -> float:
        """1 / (2 c) for a walk over n vectors."""
        if self.c is None:
            return 0.0
        c = 30.0 * math.log(n / self.delta) if self.c == "theory" else float(self.c)
        return 0.5 / c if c > 0 else GREEDY


@dataclass(frozen=True, kw_only=True)
class UnitVectors:
    """Vectors drawn evenly from the unit sphere.

    Attributes:
        dim: their dimension.
    """

    dim: Repeats = 16

    def __post_init__(self) -> None:
        check_options(self, "", TaskError)

    def draw(self, generator: np.random.Generator, count: int) -> Array:
        """[count, dim]."""
        x = generator.standard_normal((count, self.dim))
        return x / np.linalg.norm(x, axis=-1, keepdims=True)


@dataclass(frozen=True, kw_only=True)
class WalkDiscrepancy(Probe):
    """How large the signed sum of n unit vectors grows: ||sum_i s_i v_i||_inf after every n.

    For vectors of norm at most 1 the walk promises |<sum, u>| = O(log(n / delta)) for every fixed
    unit u, with high probability; random signs give sqrt(n / dim). One walk over the longest n gives
    every shorter one (its constant c is that of the longest).

    Attributes:
        steps: the n's.
        walks: repetitions, each with vectors and draws of its own; all rules walk the same vectors
            with the same draws.
        data: named distributions of vectors.
        compare: label of the rule that the report divides the others by.
    """

    name: ClassVar[str] = "walk_discrepancy"
    score_unit: ClassVar[str] = "discrepancy"
    lower_is_better: ClassVar[bool] = True
    breakdown: ClassVar[tuple[str, ...]] = ("n",)
    repetition: ClassVar[str] = "replicate"

    steps: Distinct[Tokens] = (64, 256, 1024, 4096, 16384, 65536, 262144)
    walks: Repeats = 16
    data: Mapping[str, UnitVectors] = field(default_factory=dict)
    compare: str = "random_signs"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise TaskError("task.data is empty; allowed: named distributions of vectors")

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        labels = ("vectors signed, n", "largest coordinate of the signed sum")
        fit: dict[str, Any] = {
            "guides": [0.5],
            "fit_least": max(self.steps) / 64,
            "finding": "discrepancy",
        }
        curve = scaling_figure("n", "discrepancy", *labels, self.repetition, **fit)
        figures = [{**curve, "compare": self.compare}]
        return {**super().meta(), "subject": SYNTHETIC, "figures": figures}

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per distribution.

        Raises:
            KVError: a method that is no `Walk`.
        """
        of_kind(self.name, methods, Walk)
        return [
            Unit(
                name,
                tuple(
                    f"{name}/n{n}/walk{w}" for n in sorted(self.steps) for w in range(self.walks)
                ),
                vectors,
            )
            for name, vectors in self.data.items()
        ]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every rule over the same vectors, all walks of a distribution side by side."""
        rules = [*of_kind(self.name, methods, Walk).values()]
        for n, sums in self.walked(unit.payload, rules, session.seed):
            for label, found in zip(methods, np.abs(sums).max(-1), strict=True):
                for walk, value in enumerate(found):
                    fields = {
                        "dataset": unit.id,
                        "n": n,
                        "walk": walk,
                        "replicate": f"seed{session.seed}-walk{walk}",
                        "discrepancy": float(value),
                        "score": float(value),
                    }
                    yield Outcome(label, f"{unit.id}/n{n}/walk{walk}", fields)

    def walked(
        self, vectors: UnitVectors, rules: Sequence[Walk], seed: int
    ) -> Iterator[tuple[int, Array]]:
        """The signed sums [rules, walks, dim] after each n of `steps`."""
        generators = [np.random.default_rng([seed, w]) for w in range(self.walks)]
        steps, last = set(self.steps), max(self.steps)
        pulls = np.array([[rule.pull(last)] for rule in rules])
        sums = np.zeros((len(rules), self.walks, vectors.dim))
        for start in range(0, last, _CHUNK):
            count = min(_CHUNK, last - start)
            v = np.stack([vectors.draw(g, count) for g in generators], axis=1)
            uniforms = np.stack([g.random(count) for g in generators], axis=1)
            for i in range(count):
                inner = np.einsum("rwd,wd->rw", sums, v[i])
                signs = np.where(uniforms[i] < 0.5 - pulls * inner, 1.0, -1.0)
                sums += signs[:, :, None] * v[i]
                if start + i + 1 in steps:
                    yield start + i + 1, sums.copy()
