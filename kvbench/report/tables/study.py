"""Groups that are studied rather than ranked: rates of growth, ablations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.figures.ablation import ablation_figure
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.scaling import scaling_figures
from kvbench.report.tables.ablation import (
    ablation_findings,
    ablation_of,
    effect_frame,
    effect_view,
    grid_view,
)
from kvbench.report.tables.scaling import scaling_of, slope_frame, slope_view
from kvbench.report.tables.scaling_views import scaling_findings
from kvbench.report.views import View


@dataclass(frozen=True, eq=False)
class Study:
    """What takes the place of a ranking.

    Attributes:
        findings: paragraphs, written from the numbers.
        views: tables. frames: numbers by file name stem.
    """

    findings: tuple[str, ...]
    views: tuple[View, ...]
    figures: tuple[Drawn, ...] = ()
    frames: Mapping[str, pd.DataFrame] = field(default_factory=dict)


def study_of(group: Group, folder: Path, *, draw: bool = True) -> Study | None:
    """The study a group's task asks for, None where it asks for none or has no records.

    Args:
        folder: the experiment's, beside which published tables may lie.
        draw: False leaves the figures out.

    Raises:
        PaperError: a published table that should stand beside ours is not there.
    """
    scaling, ablation = scaling_of(group), ablation_of(group)
    if scaling is not None:
        view = slope_view(group, scaling)
        return Study(
            tuple(scaling_findings(group, scaling)),
            (view,),
            tuple(scaling_figures(group, scaling)) if draw else (),
            {view.name: slope_frame(group, scaling)},
        )
    if ablation is not None:
        view = effect_view(group, ablation)
        grid = grid_view(group, ablation, folder)
        return Study(
            tuple(ablation_findings(group, ablation)),
            (view,) if grid is None else (view, grid),
            (ablation_figure(group, ablation),) if draw else (),
            {view.name: effect_frame(group, ablation)},
        )
    return None
