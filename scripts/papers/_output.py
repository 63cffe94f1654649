"""What a script leaves behind: rows as CSV, a figure of means, and a page with what was published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvbench.cli.catalogue import item_called
from kvbench.report.item import COMMENT, RunNote, means_of, write_item_page
from kvbench.report.papers import paper_folders


def write(rows: list[dict[str, Any]], place: Path, note: RunNote, fit: Any = None) -> None:
    """Write the rows as CSV, the mean of `note.y` against `note.x` as a figure, and the page of the
    item whose name the folder has; print the means, and what results/paper has under that name.

    Args:
        place: of the files, less the ending.
        fit: with it axes are logarithmic, and the exponent of each line's power law between these two
            values of x is printed (least squares of logarithms).
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame(rows)
    first_line = f"{COMMENT} {note.small}\n" if note.small else ""
    Path(f"{place}.csv").write_text(first_line + frame.to_csv(index=False), encoding="utf-8")
    print(means_of(frame, note).to_string())
    figure = drawn(frame, note, fit)
    figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight")
    note.write(place)
    item = item_called(place.parent.name.removesuffix("_small"))
    if item is not None:
        page = write_item_page(
            place.parent,
            title=item.name,
            paper=item.title,
            shows=item.shows,
            differs=item.differs,
        )
        print(f"page: {page}")
    for file in (folder / f"{place.parent.name}.csv" for folder in paper_folders()):
        if file.is_file():
            published = pd.read_csv(file, dtype=str)
            of = ", ".join(published["model"].unique()) if "model" in published else ""
            print(f"published{of and ', of ' + of}:\n{published.to_string(index=False)}")
    print(f"{len(rows)} rows: {place}.csv")


def drawn(frame: pd.DataFrame, note: RunNote, fit: Any) -> Figure:
    """The figure of means: see `write`."""
    panels = list(frame[note.panel].unique())
    scale = "log" if fit else "linear"
    figure = Figure(figsize=(12, 4))
    if note.small:
        figure.suptitle(note.small, fontsize=8, wrap=True, y=1.04)
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (title, label), part in frame.groupby([note.panel, note.by], sort=False):
        mean = part.groupby(note.x)[note.y].mean()
        ax = axes[panels.index(title)]
        ax.plot(list(mean.index), mean, marker=".", label=label)
        heading = f"{note.panel} {title}"
        ax.set(title=heading, xlabel=note.x, ylabel=note.y, xscale=scale, yscale=scale)
        fitted = mean[(mean > 0) & mean.index.to_series().between(*fit)] if fit else mean[:0]
        if len(fitted) > 1:
            slope = np.polyfit(np.log(fitted.index.to_numpy()), np.log(fitted), 1)[0]
            print(f"{heading}, {note.by} {label}: {note.y} as {note.x}^{slope:.3f}")
    axes[-1].legend()
    return figure
