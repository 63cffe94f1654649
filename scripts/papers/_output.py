"""What a script leaves behind: rows as CSV, a figure of means, what was published beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from kvbench.cli.catalogue import paper_folders


def write(
    rows: list[dict[str, Any]], place: Path, y: str, x: str, by: str, panel: str, fit: Any = None
) -> None:
    """Write the rows as CSV and the mean of `y` against `x` as a figure, a panel for each `panel` and a
    line for each `by`; print these means, and what results/paper has under the name of the folder.

    Args:
        place: of both files, less the ending.
        fit: with it axes are logarithmic, and the exponent of each line's power law between these two
            values of x is printed (least squares of logarithms).
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    frame, scale = pd.DataFrame(rows), "log" if fit else "linear"
    frame.to_csv(f"{place}.csv", index=False)
    print(frame.pivot_table(y, list(dict.fromkeys([panel, x])), by, sort=False).to_string())
    figure, panels = Figure(figsize=(12, 4)), list(frame[panel].unique())
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for (title, label), part in frame.groupby([panel, by], sort=False):
        mean, ax = part.groupby(x)[y].mean(), axes[panels.index(title)]
        ax.plot(mean.index, mean, marker=".", label=label)
        ax.set(title=f"{panel} {title}", xlabel=x, ylabel=y, xscale=scale, yscale=scale)
        seen = mean[(mean > 0) & mean.index.to_series().between(*fit)] if fit else mean[:0]
        if len(seen) > 1:
            slope = np.polyfit(np.log(seen.index.to_numpy()), np.log(seen), 1)[0]
            print(f"{panel} {title}, {by} {label}: {y} as {x}^{slope:.3f}")
    axes[-1].legend()
    figure.savefig(f"{place}.png", dpi=150, bbox_inches="tight")
    for file in (folder / f"{place.parent.name}.csv" for folder in paper_folders()):
        if file.is_file():
            published = pd.read_csv(file, dtype=str)
            of = ", ".join(published["model"].unique()) if "model" in published else ""
            print(f"published{of and ', of ' + of}:\n{published.to_string(index=False)}")
    print(f"{len(rows)} rows: {place}.csv")
