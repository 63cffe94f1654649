"""Draws every method of an experiment on one axis of bytes, a panel per task, the Pareto set named.

    python scripts/frontier.py results/frontier --out results/frontier/figures/frontier.png

Tasks whose lower scores are better come first. Points of the Pareto set (no other has fewer bytes and a
better mean) are joined, the others faint; a panel names each of its methods once.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from kvbench.report.experiment import BASELINE, Group, load_experiment
from kvbench.report.figures.canvas import SMALL, TEXT, Drawn, new_figure, plain_ticks, style_axes
from kvbench.report.figures.memory import pareto, points_of
from kvbench.report.figures.style import style_of
from kvbench.report.files import write_bytes

UNITS = {"fraction": "score (%)", "relative_error": "relative error of a layer"}
COLUMNS = 2


def draw(groups: Sequence[Group]) -> Drawn:
    """The figure: panels of the groups, in the order of their tasks' names."""
    rows = -(-len(groups) // COLUMNS)
    figure = new_figure(3.4 * COLUMNS, 0.4 + 2.9 * rows)
    axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for ax, group in zip(axes, groups, strict=False):
        panel(ax, group)
    for ax in axes[len(groups) :]:
        ax.remove()
    figure.supxlabel("bytes held / bytes of the exact cache", fontsize=TEXT)
    return Drawn("frontier", "The frontier", "Bytes against error, divergence and score.", figure)


def panel(ax: Axes, group: Group) -> None:
    """One task."""
    lower, fraction = group.meta.lower_is_better, group.meta.score_unit == "fraction"
    scale = 100.0 if fraction else 1.0
    points = [
        (label, ratio, scale * score.value)
        for label, line in points_of(group).items()
        for ratio, score in line
        if label.split(",")[0] != BASELINE and ratio < 1
    ]
    best = pareto([(ratio, value) for _, ratio, value in points], lower=lower)
    for (label, ratio, value), on in zip(points, best, strict=True):
        style = style_of(label.split(",")[0])
        alpha, size = (1.0, 34) if on else (0.3, 16)
        ax.scatter(
            [ratio], [value], s=size, c=style.color, marker=style.marker, alpha=alpha, lw=0.6
        )
    front = sorted(point[1:] + point[:1] for point, on in zip(points, best, strict=True) if on)
    ax.plot([p[0] for p in front], [p[1] for p in front], color="0.25", lw=0.9, zorder=0)
    named: set[str] = set()
    for ratio, value, label in front if lower else reversed(front):
        name = label.split(",")[0]
        if name in named:
            continue
        named.add(name)
        ax.annotate(
            name,
            (ratio, value),
            xytext=(-4, -3 if lower else 3),
            textcoords="offset points",
            ha="right",
            va="top" if lower else "bottom",
            fontsize=SMALL - 1.5,
            color=style_of(name).color,
        )
    ax.set_xscale("log", base=2)
    ratios = [ratio for _, ratio, _ in points]
    ax.set_xlim(min(ratios) / 7, 1.1)
    ax.xaxis.set_major_locator(LogLocator(base=4, subs=(1.0,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: "1" if x == 1 else f"1/{1 / x:.0f}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    if lower:
        ax.set_yscale("log")
        values = [value for _, _, value in points]
        wide = max(values) > 300 * min(values)
        plain_ticks(ax.yaxis, LogLocator(base=10, subs=(1.0,) if wide else (1.0, 2.0, 5.0)))
    unit = group.meta.score_unit
    ax.set_ylabel(UNITS.get(unit, unit.replace("_", " ")), fontsize=SMALL)
    where = "" if group.model.startswith("synthetic") else f", {group.model}"
    ax.set_title(group.task.replace("_", " ") + where, fontsize=TEXT)
    style_axes(ax)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a PNG file")
    asked = parser.parse_args()
    groups = [g for g in load_experiment(asked.experiment).groups if not g.records.empty]

    def place(group: Group) -> tuple[bool, int, str]:
        return not group.meta.lower_is_better, len(group.task), group.task

    drawn = draw(sorted(groups, key=place))
    write_bytes(asked.out, drawn.png)
    print(f"{asked.out}: {asked.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
