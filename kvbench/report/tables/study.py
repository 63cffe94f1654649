"""Groups that are studied rather than ranked: rates of growth, ablations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.report.experiment import Group
from kvbench.report.figures.ablation import ablation_figure
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.scaling import scaling_figures
from kvbench.report.figures.scatter import scatters
from kvbench.report.table import Table
from kvbench.report.tables.ablation import ablation_findings, ablation_of, effect_table, grid_table
from kvbench.report.tables.scaling import scaling_of, slope_table
from kvbench.report.tables.scaling_words import scaling_findings


@dataclass(frozen=True, eq=False)
class Study:
    """What takes the place of a ranking: paragraphs written from the numbers, tables, figures."""

    findings: tuple[str, ...]
    verdict: str
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
        planes = group.meta.figure("scatter")
        if planes and draw:
            figures += tuple(scatters(group, planes))
        said = scaling_findings(scaling)
        return Study(tuple(said), _verdict(said, "As steep as"), (slope_table(scaling),), figures)
    ablation = ablation_of(group)
    if ablation is not None:
        grid = grid_table(ablation, folder)
        tables = (effect_table(ablation), *([grid] if grid else []))
        drawn = (ablation_figure(ablation),) if draw else ()
        said = ablation_findings(ablation)
        return Study(tuple(said), _verdict(said), tables, drawn)
    return None


def _verdict(findings: Sequence[str], begins: str = "") -> str:
    """What sums up: from the sentence that begins so on, else the last paragraph."""
    for finding in findings if begins else ():
        if begins in finding:
            return finding[finding.index(begins) :]
    return findings[-1] if findings else ""
