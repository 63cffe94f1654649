"""Everything that is derived from an experiment's records: tables, figures and the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import disk_line
from kvbench.records.read import StoreError
from kvbench.report.experiment import load_experiment
from kvbench.report.figures.canvas import save_figures
from kvbench.report.files import file_stem, part_of, remove_stale, write_text
from kvbench.report.render.page import Page, render_page
from kvbench.report.render.summary import SUMMARY, summary_of, summary_text
from kvbench.report.render.text import csv, latex, markdown
from kvbench.report.sections import (
    alone,
    as_printed,
    by_model,
    memory_of_tasks,
    section_of,
    several_tasks,
)
from kvbench.report.table import Table
from kvbench.report.tables.differences import PaperError
from kvbench.report.tables.published import published_tables
from kvbench.report.tables.published_rows import comparison_tables
from kvbench.report.tables.score_tables import overview_tables
from kvbench.report.tables.scores import ScoreTable


@dataclass(frozen=True)
class ReportPaths:
    """Where a report lies.

    Attributes:
        tables, figures: every file written.
        warnings: what the report had to leave out, one line each.
        scores: of every model and task whose methods are ranked, by dataset.
        manifest: of the run that was started last.
    """

    page: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    warnings: tuple[str, ...] = ()
    scores: tuple[ScoreTable, ...] = ()
    manifest: Mapping[str, Any] = field(default_factory=dict)


def build_report(experiment_folder: str | Path, *, for_print: bool = False) -> ReportPaths:
    """Write report.html and tables/ into the experiment's folder, from records alone.

    The same records give the same files.

    Args:
        for_print: also figures/, which takes most of the time: every figure as PNG and PDF, each panel
            of a heatmap alone.

    Raises:
        StoreError: no runs, a broken run, or the folder cannot be written.
    """
    experiment = load_experiment(Path(experiment_folder))
    warnings: list[str] = []
    try:
        published = published_tables(experiment)
    except PaperError as error:
        published = []
        warnings.append(str(error))
    sections = [section_of(group, experiment.folder, published) for group in experiment.groups]
    warnings += [warning for section in sections for warning in section.warnings]
    ranked = [section.scores[0] for section in sections if section.ranked]
    printed = as_printed(sections, published)
    compared = comparison_tables(published)
    summary = summary_of(experiment, sections)
    memory = [m for m in (memory_of_tasks(s) for s in by_model(sections)) if m is not None]
    page = Page(
        summary,
        sections,
        memory=memory,
        overview=[t for t in printed if len(list(t.groups())) > 1] + several_tasks(ranked),
        published=compared,
        warnings=warnings,
    )
    every = [*overview_tables(ranked), *printed, *compared]
    every += [table for section in sections for table in section.tables]
    try:
        place = write_text(experiment.folder / "report.html", render_page(experiment, page))
        write_text(experiment.folder / SUMMARY, summary_text(summary))
        tables = write_tables(every, part_of(experiment.folder, "tables"))
        figures: list[Path] = []
        if for_print:
            drawn = [*memory, *(d for s in sections for d in (*s.drawn, *alone(s.group)))]
            figures = save_figures(drawn, part_of(experiment.folder, "figures"))
        remove_stale(experiment.folder, [*tables, *figures])
    except OSError as error:
        raise StoreError(
            f"cannot write the report in {experiment.folder}: {disk_line(error)}"
        ) from error
    last = max((run.manifest for run in experiment.runs), key=lambda m: str(m.get("started")))
    return ReportPaths(
        place, tuple(tables), tuple(figures), tuple(warnings), tuple(ranked), manifest=last
    )


def write_tables(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Every table as CSV (where it holds numbers), Markdown and LaTeX (where readers see it)."""
    paths = []
    for table in tables:
        stem = file_stem(table.name)
        if table.saved:
            paths.append(write_text(folder / f"{stem}.csv", csv(table)))
        if table.shown:
            paths.append(write_text(folder / f"{stem}.md", markdown(table)))
            paths.append(write_text(folder / f"{stem}.tex", latex(table)))
    return paths
