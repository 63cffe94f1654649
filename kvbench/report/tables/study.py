"""Groups that are studied rather than ranked: rates of growth, ablations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.report.experiment import Group
from kvbench.report.figures.ablation import ablation_figure
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.scaling import scaling_figures
from kvbench.report.table import Table
from kvbench.report.tables.ablation import ablation_findings, ablation_of, effect_table, grid_table
from kvbench.report.tables.scaling import scaling_of, slope_table
from kvbench.report.tables.scaling_words import scaling_findings


@dataclass(frozen=True, eq=False)
class Study:
    """What takes the place of a ranking: paragraphs written from the numbers, tables, figures."""

    findings: tuple[str, ...]
    tables: tuple[Table, ...]
    figures: tuple[Drawn, ...] = ()


def study_of(group: Group, folder: Path, *, draw: bool = True) -> Study | None:
    """The study a group's task asks for, None where it asks for none or has no records.

    Args:
        folder: the experiment's, beside which published tables may lie.
        draw: False leaves the figures out.

    Raises:
        PaperError: a published table that should stand beside ours is not there.
    """
    scaling = scaling_of(group)
    if scaling is not None:
        figures = tuple(scaling_figures(scaling)) if draw else ()
        return Study(tuple(scaling_findings(scaling)), (slope_table(scaling),), figures)
    ablation = ablation_of(group)
    if ablation is not None:
        grid = grid_table(ablation, folder)
        tables = (effect_table(ablation), *([grid] if grid else []))
        drawn = (ablation_figure(ablation),) if draw else ()
        return Study(tuple(ablation_findings(ablation)), tables, drawn)
    return None
