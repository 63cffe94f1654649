"""The Pareto set, by definition."""

from __future__ import annotations

import random

from kvbench.report.figures.memory import pareto


def test_no_point_of_the_set_is_beaten_and_every_other_is():
    draw = random.Random(0)
    for lower in (True, False):
        points = [(draw.choice((0.1, 0.2, 0.5, 1.0)), draw.randrange(10) / 10) for _ in range(60)]
        on = pareto(points, lower=lower)
        sign = 1 if lower else -1
        for (cost, score), best in zip(points, on, strict=True):
            beaten = any(
                a <= cost and sign * b <= sign * score and (a < cost or sign * b < sign * score)
                for a, b in points
            )
            assert best == (not beaten)
    assert pareto([(1.0, 1.0), (1.0, 1.0)], lower=True) == [True, True]
    assert pareto([], lower=True) == []
