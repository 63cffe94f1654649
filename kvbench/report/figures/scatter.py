"""Points in a plane, some of them marked: what a t-SNE shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from kvbench.errors import is_integer, is_number
from kvbench.report.experiment import Group
from kvbench.report.figures import canvas, names
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.names import words
from kvbench.report.figures.style import SPARE
from kvbench.report.tables.strata import as_text

MOST_POINTS = 20_000
_MARK = "#D55E00"


def plane_of(value: object) -> tuple[NDArray[np.float64], list[int]] | None:
    """Points [n, 2] and the indices of those that are marked, of a record's field; None where it holds
    no such thing."""
    if not isinstance(value, Mapping):
        return None
    points, marked = value.get("points"), value.get("marked")
    if not isinstance(points, list) or not isinstance(marked, list):
        return None
    sound = 0 < len(points) <= MOST_POINTS and all(
        isinstance(p, list) and len(p) == 2 and all(is_number(x) and abs(x) < 1e9 for x in p)
        for p in points
    )
    if not sound or not all(is_integer(m, 0, len(points) - 1) for m in marked):
        return None
    return np.array(points, dtype=float), marked


def scatters(group: Group, spec: Mapping[str, Any]) -> list[Drawn]:
    """A row of panels per variant, a column per value of the field `x`, of the first example of each
    that says a plane."""
    field, x = str(spec.get("value", "plane")), str(spec["x"])
    if field not in group.records:
        return []
    found: dict[tuple[str, str], tuple[NDArray[np.float64], list[int]]] = {}
    records: pd.DataFrame = group.records[group.records[field].notna()]
    for variant, column, value in records[["variant", x, field]].itertuples(index=False):
        plane = plane_of(value)
        if plane is not None:
            found.setdefault((str(variant), as_text(column)), plane)
    rows = [v.label for v in group.variants if any(name == v.label for name, _ in found)]
    columns = list(dict.fromkeys(column for _, column in found))
    if not found:
        return []
    figure = canvas.new_figure(0.4 + 1.75 * len(columns), 0.4 + 1.75 * len(rows))
    axes = figure.subplots(len(rows), len(columns), squeeze=False)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            ax = axes[i, j]
            ax.set_xticks([])
            ax.set_yticks([])
            if (row, column) in found:
                points, marked = found[row, column]
                ax.scatter(*points.T, s=1.5, color=SPARE[0], linewidths=0, rasterized=True)
                ax.scatter(*points[marked].T, s=16, color=_MARK, marker="*", linewidths=0)
            if i == 0:
                ax.set_title(column, fontsize=canvas.TEXT)
            if j == 0:
                ax.set_ylabel(row, fontsize=canvas.SMALL)
    n, marks = max((len(points), len(marked)) for points, marked in found.values())
    return [
        Drawn(
            f"{names.stem(group)}-{field}",
            f"{group.task}: {', '.join(rows)} in the plane",
            f"t-SNE of {n} vectors of one head and one prompt; stars: {marks} centres of greedy "
            "k-centre, chosen among the vectors themselves. Distances in such a picture say little; the"
            " table does.",
            figure,
            f"{len(found)} pictures, by variant and {words(x)}.",
        )
    ]
