"""Builds the report of an experiment from its records: the page, tables and figures."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvbench.errors import disk_line
from kvbench.records.aside import aside_of, lines_of
from kvbench.records.read import StoreError
from kvbench.records.store import safe_name
from kvbench.report.frame import AVERAGE, tidy, totals
from kvbench.report.papers import PaperError
from kvbench.report.published import beside, published_tables
from kvbench.report.remarks import remarks
from kvbench.report.render import PAGE_MARK, csv, latex, markdown, write_text
from kvbench.report.runs import Experiment, Group, listed, load_experiment
from kvbench.report.table import Table
from kvbench.report.tables import overview_tables, paper_table, score_table, tables_of, verdict

if TYPE_CHECKING:
    from kvbench.report.drawing import Drawn, FileType

SUMMARY, SUMMARY_MARK = "summary.json", '"score":'


@dataclass(frozen=True)
class ReportPaths:
    """The files of a report, and the data that W&B logs of it.

    Attributes:
        drawn: the figures whose files are `figures`.
        warnings: a line for each part that the report lacks.
        scores: the tidy frames of all groups whose methods are ranked, as one frame.
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
    """Write report.html, summary.json, tables/ and figures/ into the experiment's folder.

    They are made from the records alone; the same records give the same files.

    Args:
        for_print: every figure as PNG and PDF, too; else as SVG alone.

    Raises:
        StoreError: the folder has no runs, or a broken one, or cannot be written to.
    """
    from kvbench.report.figures import figures_of, memory
    from kvbench.report.page import LIMIT, MOST_ANSWERS, PAGE, Section, render_page

    experiment = load_experiment(Path(experiment_folder))
    warnings = list(incomplete(experiment))
    theirs = pd.DataFrame()
    try:
        theirs = beside(experiment)
    except PaperError as error:
        warnings.append(str(error))
    published = published_tables(theirs)
    ranked = [group for group in experiment.groups if is_ranked(group)]
    # A leaderboard sets those of one protocol side by side; the table of rates of one that is alone in
    # its protocol stands in its own section.
    count = Counter(group.protocol for group in ranked)
    together = [group for group in ranked if count[group.protocol] > 1]
    above = " ".join(experiment.small)
    sections, of_sections = [], []
    for group in experiment.groups:
        tables = tables_of(group)
        of_sections += tables
        if is_ranked(group) and group not in together:
            tables = [*overview_tables([group]), *tables]
        figures = [replace(drawn, above=above) for drawn in figures_of(group)]
        examples = min(LIMIT // len(experiment.groups), MOST_ANSWERS // len(group.variants))
        sections.append(Section(group, verdict(group), tables, figures, max(3, examples)))
    of_several = memory(together) if len(together) > 1 else None
    leads = [replace(of_several, above=above)] if of_several else []
    by_task: dict[tuple[str, str], list[Group]] = {}
    for group in ranked:
        by_task.setdefault((group.task, group.protocol), []).append(group)
    protocols = Counter(task for task, _ in by_task)
    shared = [
        paper_table(same_task, theirs, f"{task}-{protocol}" if protocols[task] > 1 else task)
        for (task, protocol), same_task in by_task.items()
        if len(same_task) > 1 or AVERAGE in set(tidy(same_task[0])["value"])
    ]
    drawn = [*leads, *(figure for section in sections for figure in section.figures)]
    said_first = remarks(experiment)  # which the terminal prints below its tables
    said_first += [f"left aside: {line}" for line in lines_of(aside_of(experiment.folder))]
    shown = [*shared, *overview_tables(ranked), *published, *of_sections]
    try:
        page = write_text(
            experiment.folder / PAGE,
            render_page(
                experiment,
                sections,
                leaderboards=overview_tables(together) if len(together) > 1 else [],
                leads=leads,
                tables=shared,
                published=published,
                warnings=[*warnings, *said_first],
            ),
            PAGE_MARK,
        )
        if SUMMARY_MARK in (scores := summary(ranked)):  # not where nothing has a score
            write_text(experiment.folder / SUMMARY, scores, SUMMARY_MARK)
        table_files = write_tables(shown, experiment.folder, experiment.small)
        types: Sequence[FileType] = ("svg", "png", "pdf") if for_print else ("svg",)
        figure_files = [
            one.write(experiment.folder, file_type) for one in drawn for file_type in types
        ]
    except OSError as error:
        raise StoreError(
            f"cannot write the report in {experiment.folder}: {disk_line(error)}"
        ) from error
    return ReportPaths(
        page,
        tuple(table_files),
        tuple(figure_files),
        tuple(drawn),
        tuple(warnings),
        scores=pd.concat([tidy(group) for group in ranked] or [pd.DataFrame()], ignore_index=True),
        manifest=max(
            (run.manifest for run in experiment.runs), key=lambda made: str(made.get("started"))
        ),
    )


def incomplete(experiment: Experiment) -> Iterator[str]:
    """A line on the runs that lack records of examples they were asked for; none where all are there."""
    short = []
    for run in experiment.runs:
        asked = run.asked or frozenset()
        there = len(asked & set(run.records["example_id"]))
        if there < len(asked) or run.records.empty:
            name = run.folder.relative_to(experiment.folder)
            short.append(f"{name} has {there} of {len(asked)}" if asked else f"{name} has none")
    if short:
        named = listed(short, separator="; ")
        yield f"records are missing: {named}; their command again runs what is missing"


def summary(groups: Sequence[Group]) -> str:
    """The total scores as JSON: for each model, task and variant the score, its interval, the number of
    examples, and the measured ratio."""
    scores: dict[str, Any] = {}
    for group in groups:
        ratios = totals(tidy(group), "ratio")["mean"]
        for label, row in totals(tidy(group)).iterrows():
            numbers = {"score": row["mean"], "low": row["low"], "high": row["high"], "n": row["n"]}
            numbers["ratio"] = ratios.get(label)
            scores_of_task = scores.setdefault(row["model"], {}).setdefault(row["task"], {})
            scores_of_task[label] = {
                name: None if pd.isna(number) else round(float(number), 6)
                for name, number in numbers.items()
            }
    return json.dumps(scores, indent=1) + "\n"


def is_ranked(group: Group) -> bool:
    """Whether the methods of a group are ranked by their scores; those of the throughput probe are
    not."""
    return group.meta.kind != "throughput"


def tables_to_print(experiment: Experiment) -> list[Table]:
    """The tables that are printed after a job: one for each model and task, then those over all."""
    groups = experiment.groups
    tables = [score_table(group) if is_ranked(group) else tables_of(group)[0] for group in groups]
    return tables + overview_tables([group for group in groups if is_ranked(group)])


def write_tables(tables: Sequence[Table], folder: Path, comments: Sequence[str]) -> list[Path]:
    """Write tables to ``<folder>/tables`` and return the files. A table with data becomes a CSV file,
    and one with columns, which the page shows, a Markdown and a LaTeX file."""
    paths = []
    folder_of_tables = folder / "tables"
    folder_of_tables.mkdir(parents=True, exist_ok=True)
    for table in tables:
        stem = folder_of_tables / safe_name(table.name)
        if table.data is not None:
            paths.append(write_text(Path(f"{stem}.csv"), csv(table.data, comments)))
        if table.columns:
            paths.append(write_text(Path(f"{stem}.md"), markdown(table)))
            paths.append(write_text(Path(f"{stem}.tex"), latex(table)))
    return paths
