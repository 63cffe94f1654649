from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar, Literal

from kvbench.errors.options import Count
from kvbench.kv import Budget
from kvbench.methods._select import by_largest_remainder
from kvbench.methods.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV's selection with a capacity that falls linearly from the first layer to the last.

    Let C = capacity - window. Beside the window the last layer gets C // beta entries and the first
    layer 2C - C // beta, or all entries if there are fewer. The other layers lie evenly between the
    two, rounded by largest remainder so that the sum is exactly num_layers * C. A prompt with n < 2C
    gets C in every layer, and so does a model of one layer.

    Args:
        beta: how steeply the capacity falls; the last layer keeps about 1 / beta of the mean.
        budgets: ``linear``; or ``released``, which lowers each layer by the integer quotient
            (first - last) // (num_layers - 1), as the authors' code does. The last layers then keep more
            than planned and the mean exceeds C; only the preset may do so (`allowed_entries`).
    """

    paper: ClassVar[str] = "arXiv 2406.02069, section 4"
    # A second compression would have to divide the budget among the layers again.
    can_compress_again: ClassVar[bool] = False
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {"budgets": "released", "granularity": "query_head"}
    }

    beta: Count = 20
    budgets: Literal["linear", "released"] = "linear"

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        capacity = budget.capacity(n)
        mean = capacity - budget.window
        if n <= capacity or n < 2 * mean or num_layers == 1:
            return [capacity] * num_layers
        first = min(2 * mean - mean // self.beta, n - budget.window)
        last = 2 * mean - first
        steps = num_layers - 1
        if self.budgets == "released":
            fall = (first - last) // steps
            return [first - layer * fall + budget.window for layer in range(num_layers)]
        wanted = [first - Fraction(layer * (first - last), steps) for layer in range(num_layers)]
        entries = by_largest_remainder(wanted, num_layers * mean)
        return [count + budget.window for count in entries]
