"""Everything that is derived from an experiment's records: tables, figures and the page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvbench.errors import disk_line
from kvbench.records.durable import make_folder
from kvbench.records.figures import Curve
from kvbench.records.read import StoreError
from kvbench.records.store import safe_name
from kvbench.report.experiment import Experiment, Group, load_experiment
from kvbench.report.frame import AVERAGE, tidy, totals
from kvbench.report.papers import PaperError
from kvbench.report.published import beside, published_tables
from kvbench.report.render import csv, latex, markdown, write_text
from kvbench.report.table import Table
from kvbench.report.tables import overview_table, paper_table, score_table, tables_of
from kvbench.report.verdicts import verdict

if TYPE_CHECKING:
    from kvbench.report.drawing import Drawn

Part = tuple[Group, pd.DataFrame]
SUMMARY = "summary.json"


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report, and what they were made of.

    Attributes:
        tables, figures: every file written.
        drawn: the figures.
        warnings: what the report had to leave out, one line each.
        scores: the tidy frame of every model and task whose methods are ranked.
        manifest: the manifest of the run that was started last.
    """

    page: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    drawn: tuple[Drawn, ...]
    warnings: tuple[str, ...]
    scores: pd.DataFrame
    manifest: Mapping[str, Any]


def build_report(experiment_folder: str | Path, *, for_print: bool = False) -> ReportPaths:
    """Write report.html, summary.json and tables/ into the experiment's folder, from records alone.

    The same records give the same files.

    Args:
        for_print: also figures/, every figure as PNG and PDF.

    Raises:
        StoreError: no runs, a broken run, or the folder cannot be written.
    """
    from kvbench.report.charts import chart_of
    from kvbench.report.figures import figures_of
    from kvbench.report.page import LIMIT, PAGE, Section, render_page

    experiment = load_experiment(Path(experiment_folder))
    parts = [(group, tidy(group)) for group in experiment.groups]
    warnings: list[str] = []
    published: list[Table] = []
    try:
        published = published_tables(beside(experiment))
    except PaperError as error:
        warnings.append(str(error))
    sections: list[Section] = []
    only_in_files: list[Table] = []
    for group, frame in parts:
        tables = tables_of(group, frame)
        only_in_files += [table for table in tables if not table.columns]
        figures = figures_of(group, frame)
        if experiment.small:
            for figure in figures:
                figure.say_above(" ".join(experiment.small))
        sections.append(
            Section(
                group,
                verdict(group, frame),
                [table for table in tables if table.columns],
                figures,
                chart_of(group, frame) if is_ranked(group) else None,
                answers=max(3, LIMIT // len(parts)),
            )
        )
    ranked = [part for part in parts if is_ranked(part[0])]
    shared = [
        paper_table(of_task)
        for of_task in _by(ranked, "task")
        if len(of_task) > 1 or AVERAGE in set(of_task[0][1]["value"])
    ]
    shared += _overviews(ranked)
    drawn = [figure for section in sections for figure in section.figures]
    shown = [*shared, *published, *(table for section in sections for table in section.tables)]
    try:
        place = write_text(
            experiment.folder / PAGE,
            render_page(experiment, sections, shared, published, warnings),
        )
        write_text(experiment.folder / SUMMARY, summary([frame for _, frame in ranked]))
        files = write_tables([*shown, *only_in_files], experiment.folder, experiment.small)
        drawings = _write_figures(drawn, experiment.folder) if for_print else []
    except OSError as error:
        raise StoreError(
            f"cannot write the report in {experiment.folder}: {disk_line(error)}"
        ) from error
    return ReportPaths(
        place,
        tuple(files),
        tuple(drawings),
        tuple(drawn),
        tuple(warnings),
        scores=pd.concat([frame for _, frame in ranked] or [pd.DataFrame()], ignore_index=True),
        manifest=max((run.manifest for run in experiment.runs), key=_started),
    )


def _started(manifest: Mapping[str, Any]) -> str:
    return str(manifest.get("started"))


def _write_figures(drawn: Sequence[Drawn], experiment_folder: Path) -> list[Path]:
    """Write every figure as PNG and PDF into figures/; returns the files."""
    folder = experiment_folder / "figures"
    make_folder(folder, experiment_folder)
    paths = []
    for figure in drawn:
        for file_type in ("png", "pdf"):
            paths.append(folder / f"{safe_name(figure.name)}.{file_type}")
            paths[-1].write_bytes(figure.encoded(file_type))
    return paths


def summary(frames: Sequence[pd.DataFrame]) -> str:
    """The total scores as JSON: by model, task and variant the score, its interval, the number of
    examples, and the measured ratio."""
    scores: dict[str, Any] = {}
    for frame in frames:
        ratios = totals(frame, "ratio")["mean"]
        for label, row in totals(frame).iterrows():
            numbers = {"score": row["mean"], "low": row["low"], "high": row["high"], "n": row["n"]}
            known = {**numbers, "ratio": ratios.get(label)}
            of_task = scores.setdefault(row["model"], {}).setdefault(row["task"], {})
            of_task[label] = {
                k: None if pd.isna(v) else round(float(v), 6) for k, v in known.items()
            }
    return json.dumps(scores, indent=1) + "\n"


def is_ranked(group: Group) -> bool:
    """Whether the group's methods are compared by their scores, not by times or curves."""
    return group.meta.kind != "throughput" and group.meta.figure(Curve) is None


def _by(parts: Sequence[Part], key: str) -> list[list[Part]]:
    """Parts whose groups have one model (or one task) together; `key` is the attribute's name."""
    together: dict[str, list[Part]] = {}
    for part in parts:
        together.setdefault(getattr(part[0], key), []).append(part)
    return list(together.values())


def _overviews(ranked: Sequence[Part]) -> list[Table]:
    """The leaderboard of each model that has scores of several tasks."""
    scored = [part for part in ranked if len(totals(part[1]))]
    return [overview_table(parts) for parts in _by(scored, "model") if len(parts) > 1]


def tables_to_print(experiment: Experiment) -> list[Table]:
    """The tables to print after a job: one per model and task, then all tasks of each model."""
    parts = [(group, tidy(group)) for group in experiment.groups]
    tables = [score_table(*part) if is_ranked(part[0]) else tables_of(*part)[0] for part in parts]
    return tables + _overviews([part for part in parts if is_ranked(part[0])])


def write_tables(tables: Sequence[Table], folder: Path, comments: Sequence[str] = ()) -> list[Path]:
    """Every table in ``tables`` below a folder, as CSV (where it holds numbers), Markdown and LaTeX
    (where readers see it); CSV files begin with the comments."""
    paths, place = [], folder / "tables"
    make_folder(place, folder)
    for table in tables:
        stem = safe_name(table.name)
        if table.data is not None:
            paths.append(write_text(place / f"{stem}.csv", csv(table.data, comments)))
        if table.columns:
            paths.append(write_text(place / f"{stem}.md", markdown(table)))
            paths.append(write_text(place / f"{stem}.tex", latex(table)))
    return paths
