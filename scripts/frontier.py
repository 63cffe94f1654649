"""Draws every method of an experiment on one axis of bytes, a panel per task, the Pareto set named.

    python scripts/frontier.py results/frontier --out results/frontier/figures/frontier.png

Tasks whose lower scores are better come first. Points of the Pareto set (no other has fewer bytes and a
better mean) are joined, the others faint; a panel names each of its methods once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from kvbench.report.experiment import BASELINE, Group, load_experiment
from kvbench.report.figures import SMALL, TEXT, Drawn, memory_rows, new_panels, pareto, words
from kvbench.report.frame import tidy
from kvbench.report.style import style_of


def panel(ax: Axes, group: Group) -> None:
    """One task."""
    lower, rows = group.meta.lower_is_better, memory_rows(group, tidy(group))
    rows = rows[(rows["method"] != BASELINE) & (rows["x"] < 1)]
    points = list(zip(rows["x"], rows["mean"], strict=True))
    rows = rows.assign(best=pareto(points, lower=lower))
    for row in rows.to_dict("records"):
        style, (alpha, size) = style_of(row["method"]), (1.0, 34) if row["best"] else (0.3, 16)
        place = [row["x"]], [row["mean"]]
        ax.scatter(*place, s=size, c=style.color, marker=style.marker, alpha=alpha, lw=0.6)
    front = rows[rows["best"]].sort_values("x")
    ax.plot(front["x"], front["mean"], color="0.25", lw=0.9, zorder=0)
    named = front if lower else front[::-1]
    for row in named.drop_duplicates("method").to_dict("records"):
        text: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": "right",
            "fontsize": SMALL - 1.5,
        }
        color = style_of(row["method"]).color
        ax.annotate(row["method"], (row["x"], row["mean"]), xytext=(-4, -3), color=color, **text)
    ax.set_xscale("log", base=2)
    if lower:
        ax.set_yscale("log")
    ax.set_ylabel("score (%)" if group.percent else words(group.meta.score_unit), fontsize=SMALL)
    ax.set_title(f"{words(group.task)}, {group.model}", fontsize=TEXT)
    ax.grid(axis="y")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="a PNG file")
    asked = parser.parse_args()
    groups = [g for g in load_experiment(asked.experiment).groups if not g.records.empty]
    groups.sort(key=lambda g: (not g.meta.lower_is_better, len(g.task), g.task))
    figure, axes = new_panels(len(groups), 2, (3.4, 2.9), (0.0, 0.4))
    for ax, group in zip(axes, groups, strict=True):
        panel(ax, group)
    figure.supxlabel("bytes held / bytes of the exact cache", fontsize=TEXT)
    asked.out.write_bytes(Drawn("frontier", "The frontier", "", figure).encoded("png"))
    print(f"{asked.out}: {asked.out.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
