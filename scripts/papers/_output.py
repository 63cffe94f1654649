"""What a script leaves behind: rows as CSV, a figure of means, and a page with what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvbench.cli.catalogue import paper_items
from kvbench.report.item import COMMENT, RunNote, means_of, write_item_page
from kvbench.report.papers import paper_folders


def write(
    rows: list[dict[str, Any]],
    place: Path,
    note: RunNote,
    fit: tuple[float, float] | None = None,
) -> None:
    """Write the rows as CSV, the mean of `note.y` against `note.x` as a figure, and the page of the
    item that the folder is named after; print the means, and what results/paper has of that item.

    Args:
        place: path of the files, without their endings.
        fit: two values of x. With it the axes are logarithmic, and the exponent of each line's power
            law between the two is printed (least squares of logarithms).
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    first_line = f"{COMMENT} {note.small}\n" if note.small else ""
    Path(f"{place}.csv").write_text(first_line + frame.to_csv(index=False), encoding="utf-8")
    print(means_of(frame, note).to_string())
    figure = figure_of_means(frame, note, fit)
    figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight")
    note.write(place)
    item = paper_items().get(place.parent.name.removesuffix("_small"))
    if item is not None:
        page = write_item_page(
            place.parent,
            title=item.name,
            paper=item.title,
            shows=item.shows,
            differs=item.differs,
        )
        print(f"page: {page}")
    print_published(place.parent.name)
    print(f"{len(rows)} rows: {place}.csv")


def print_published(item: str) -> None:
    """Print the published numbers of an item, where results/paper has some."""
    for folder in paper_folders():
        file = folder / f"{item}.csv"
        if file.is_file():
            published = pd.read_csv(file, dtype=str)
            models = ", ".join(published["model"].unique()) if "model" in published else ""
            heading = f"published, of {models}" if models else "published"
            print(f"{heading}:\n{published.to_string(index=False)}")


def figure_of_means(
    frame: pd.DataFrame, note: RunNote, fit: tuple[float, float] | None = None
) -> Figure:
    """A panel for each value of `note.panel`, in it a line for each value of `note.by`; see `write` for
    `fit`."""
    panels = list(frame[note.panel].unique())
    scale = "log" if fit else "linear"
    figure = Figure(figsize=(12, 4))
    if note.small:
        figure.suptitle(note.small, fontsize=8, wrap=True, y=1.04)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (panel, label), part in frame.groupby([note.panel, note.by], sort=False):
        means = part.groupby(note.x)[note.y].mean()
        ax = axes[panels.index(panel)]
        ax.plot(list(means.index), means, marker=".", label=label)
        heading = f"{note.panel} {panel}"
        ax.set(title=heading, xlabel=note.x, ylabel=note.y, xscale=scale, yscale=scale)
        if fit:
            fitted = means[(means > 0) & means.index.to_series().between(*fit)]
            if len(fitted) > 1:
                slope = np.polyfit(np.log(fitted.index.to_numpy()), np.log(fitted), 1)[0]
                print(f"{heading}, {note.by} {label}: {note.y} as {note.x}^{slope:.3f}")
    axes[-1].legend()
    return figure
