"""The figure of a script: means as lines, with the power laws through them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure


def lines(frame: pd.DataFrame, y: str, x: str, by: str, panel: str, fit: Any = None) -> Figure:
    """The mean of `y` against `x`: a panel for each `panel`, a line for each `by`.

    Args:
        fit: with it axes are logarithmic, and the exponent of each line's power law between these two
            values of x is printed (least squares of logarithms).
    """
    figure, panels = Figure(figsize=(12, 4)), list(frame[panel].unique())
    axes = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    scale = "log" if fit else "linear"
    for (title, label), part in frame.groupby([panel, by], sort=False):
        mean, ax = part.groupby(x)[y].mean(), axes[panels.index(title)]
        ax.plot(mean.index, mean, marker=".", label=label)
        ax.set(title=f"{panel} {title}", xlabel=x, ylabel=y, xscale=scale, yscale=scale)
        seen = mean[(mean > 0) & mean.index.to_series().between(*fit)] if fit else mean[:0]
        if len(seen) > 1:
            slope = np.polyfit(np.log(seen.index.to_numpy()), np.log(seen), 1)[0]
            print(f"{panel} {title}, {by} {label}: {y} as {x}^{slope:.3f}")
    axes[-1].legend()
    return figure
