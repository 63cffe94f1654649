"""Everything that is derived from an experiment's records: tables, figures and the page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvbench.errors import disk_line
from kvbench.records.durable import make_folder
from kvbench.records.figures import Curve, Times
from kvbench.records.read import StoreError
from kvbench.records.store import safe_name
from kvbench.report.experiment import Experiment, Group, load_experiment
from kvbench.report.frame import AVERAGE, tidy, totals
from kvbench.report.papers import PaperError
from kvbench.report.published import beside, published_tables
from kvbench.report.render import csv, latex, markdown, write_text
from kvbench.report.table import Table
from kvbench.report.tables import (
    overview_table,
    paper_table,
    score_table,
    tables_of,
    verdict,
)

if TYPE_CHECKING:
    from kvbench.report.figures import Drawn

Part = tuple[Group, pd.DataFrame]
SUMMARY = "summary.json"


@dataclass(frozen=True)
class ReportPaths:
    """Where a report lies.

    Attributes:
        tables, figures: every file written.
        drawn: the figures.
        warnings: what the report had to leave out, one line each.
        scores: the tidy frame of every model and task whose methods are ranked.
        manifest: of the run that was started last.
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
    from kvbench.report.figures import figures_of
    from kvbench.report.page import LIMIT, PAGE, Section, render_page

    experiment = load_experiment(Path(experiment_folder))
    parts = [(group, tidy(group)) for group in experiment.groups]
    warnings: list[str] = []
    compared: list[Table] = []
    try:
        compared = published_tables(beside(experiment))
    except PaperError as error:
        warnings.append(str(error))
    sections, hidden = [], []
    for group, frame in parts:
        tables = tables_of(group, frame)
        hidden += [table for table in tables if not table.columns]
        shown = [table for table in tables if table.columns]
        answers = max(3, LIMIT // len(parts))
        figures = figures_of(group, frame)
        for one in figures if experiment.small else ():
            one.say_above(" ".join(experiment.small))
        sections.append(Section(group, verdict(group, frame), shown, figures, answers))
    ranked = [part for part in parts if is_ranked(part[0])]
    shared = [
        paper_table(parts)
        for parts in _by(ranked, "task")
        if len(parts) > 1 or AVERAGE in set(parts[0][1]["value"])
    ]
    shared += _overviews(ranked)
    drawn = [one for section in sections for one in section.figures]
    page = render_page(experiment, sections, shared, compared, warnings)
    every = [*shared, *compared, *(t for section in sections for t in section.tables), *hidden]
    try:
        place = write_text(experiment.folder / PAGE, page)
        write_text(experiment.folder / SUMMARY, summary([frame for _, frame in ranked]))
        files = write_tables(every, experiment.folder, experiment.small)
        drawings: list[Path] = []
        if for_print:
            folder = experiment.folder / "figures"
            make_folder(folder, experiment.folder)
            for one, kind in itertools.product(drawn, ("png", "pdf")):
                drawings.append(folder / f"{safe_name(one.name)}.{kind}")
                drawings[-1].write_bytes(one.encoded(kind))
    except OSError as error:
        raise StoreError(
            f"cannot write the report in {experiment.folder}: {disk_line(error)}"
        ) from error
    last = max((run.manifest for run in experiment.runs), key=lambda m: str(m.get("started")))
    scores = pd.concat([frame for _, frame in ranked] or [pd.DataFrame()], ignore_index=True)
    written = tuple(files), tuple(drawings), tuple(drawn)
    return ReportPaths(place, *written, tuple(warnings), scores, last)


def summary(frames: Sequence[pd.DataFrame]) -> str:
    """JSON of the scores: model, task, variant; score, its interval, of how many examples, ratio."""
    found: dict[str, Any] = {}
    for frame in frames:
        ratios = totals(frame, "ratio")["mean"]
        for label, row in totals(frame).iterrows():
            numbers = {"score": row["mean"], "low": row["low"], "high": row["high"], "n": row["n"]}
            known = {**numbers, "ratio": ratios.get(label)}
            of_task = found.setdefault(row["model"], {}).setdefault(row["task"], {})
            of_task[label] = {
                k: None if pd.isna(v) else round(float(v), 6) for k, v in known.items()
            }
    return json.dumps(found, indent=1) + "\n"


def is_ranked(group: Group) -> bool:
    """Whether methods are compared by score: no timings, no curves."""
    return not (group.meta.figure(Times) or group.meta.figure(Curve))


def _by(parts: Sequence[Part], key: str) -> list[list[Part]]:
    """Parts of one model, or one task, together."""
    found: dict[str, list[Part]] = {}
    for part in parts:
        found.setdefault(getattr(part[0], key), []).append(part)
    return list(found.values())


def _overviews(ranked: Sequence[Part]) -> list[Table]:
    """Of models with several tasks."""
    return [overview_table(parts) for parts in _by(ranked, "model") if len(parts) > 1]


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
