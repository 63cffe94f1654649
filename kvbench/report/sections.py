"""What a report shows of one model and task: its tables, findings and figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Template

from kvbench.report.experiment import Experiment, Group, by_measure
from kvbench.report.figures.bars import bars
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.heatmap import heatmaps, heatmaps_alone
from kvbench.report.figures.intervals import breakdown, by_dataset, differences
from kvbench.report.figures.kept import kept_figures
from kvbench.report.figures.memory import error_against_memory, score_against_ratio, score_on_tasks
from kvbench.report.figures.names import MAX_PANELS
from kvbench.report.figures.throughput import throughput, throughput_scaling
from kvbench.report.table import Table, number
from kvbench.report.tables.differences import PaperError
from kvbench.report.tables.fidelity import divergence_table, fidelity_table, is_fidelity
from kvbench.report.tables.pairs import pairs_of, pairs_table
from kvbench.report.tables.published_rows import Published
from kvbench.report.tables.score_tables import (
    as_table,
    difference_table,
    overview_tables,
    paper_layout,
    split_table,
    sweep_table,
)
from kvbench.report.tables.scores import AVERAGE, ScoreTable, score_table
from kvbench.report.tables.study import Study, study_of
from kvbench.report.tables.timings import decoding_table, timing_table
from kvbench.report.tables.verdict import verdict_of


@dataclass(frozen=True)
class Section:
    """One model and task.

    Attributes:
        scores: by dataset, then by every other field.
        verdict: what was found, in words. memory: the score against memory.
        lead: the tables that come first: of scores, of timings, or of a study.
        folded: further tables, each with the line that opens it. filed: tables for files alone.
        findings: paragraphs of a study. notes: what the examples are a sample of.
        figures: all others. kept: what each method kept of one example.
        ranked: whether scores are compared: no timings, no study.
        warnings: what had to be left out.
    """

    group: Group
    scores: tuple[ScoreTable, ...]
    lead: tuple[Table, ...]
    verdict: str = ""
    memory: Drawn | None = None
    folded: tuple[tuple[str, Table], ...] = ()
    filed: tuple[Table, ...] = ()
    findings: tuple[str, ...] = ()
    figures: tuple[Drawn, ...] = ()
    kept: tuple[Drawn, ...] = ()
    notes: tuple[str, ...] = ()
    ranked: bool = True
    warnings: tuple[str, ...] = ()

    @property
    def tables(self) -> list[Table]:
        """Every table that is written; what the page leads with may be a part of one."""
        every = (*self.lead, *(table for _, table in self.folded), *self.filed)
        return list({table.name: table for table in every}.values())

    @property
    def drawn(self) -> list[Drawn]:
        """Every figure."""
        return [*([self.memory] if self.memory else []), *self.figures, *self.kept]


def section_of(group: Group, folder: Path, published: Sequence[Published] = ()) -> Section:
    """All that a page and its files show of a group.

    Args:
        folder: the experiment's.
        published: the published tables beside ours.
    """
    scores = _scores(group)
    timed, (study, warnings) = _is_timed(group), _study(group, folder, draw=True)
    split = [as_table(table) for table in scores[1:]]
    by_field = [f"By {table.by.replace('_', ' ')}" for table in scores[1:]]
    several = [table for table in scores if table.baseline and len(table.columns) > 1]
    changes = list(map(difference_table, several))
    section = Section(
        group,
        tuple(scores),
        (),
        notes=tuple(_sample_notes(group)),
        ranked=not (timed or study or group.meta.figure("measured")),
        warnings=warnings,
    )
    whole = as_table(scores[0])
    if timed:
        return replace(
            section,
            lead=(timing_table(group),),
            filed=(whole, *split, *changes, *_splits(group, scores)),
            figures=(*figures_of(group, scores), *_timing_figures(group)),
        )
    if study is not None:
        unit = group.meta.score_unit.replace("_", " ")
        headings = [f"Mean {unit} {name[0].lower()}{name[1:]}" for name in by_field]
        return replace(
            section,
            lead=study.tables,
            verdict=study.verdict,
            folded=tuple(zip(headings, split, strict=True)),
            filed=(whole, *changes),
            findings=study.findings,
            figures=study.figures,
        )
    if group.meta.figure("measured"):
        return replace(
            section,
            lead=tuple(split) or (whole,),
            folded=(("Over all of them", whole),) if split else (),
            findings=tuple(_measured_findings(group)),
            figures=tuple(figures_of(group, scores)),
        )
    rates = sweep_table(scores[0])
    folded: list[tuple[str, Table]] = [("Every number: entries, seconds, examples", whole)]
    pairs = pairs_of(group, _published_averages(group, published))
    if pairs:
        heading = "Which compressed methods are shown to differ, and the examples that takes"
        folded.append((heading, pairs_table(group, pairs)))
    decoding = decoding_table(group)
    if decoding is not None:
        folded.append(("Seconds of decoding per token, by length of the prompt", decoding))
    folded += zip(by_field, split, strict=True)
    for table, change in zip(several, changes, strict=True):
        folded.append(
            (f"Paired differences to {table.baseline} by {table.by.replace('_', ' ')}", change)
        )
    if is_fidelity(group):
        where = divergence_table(group)
        folded[:0] = [("Where a method begins to differ", where)] if where else []
    failed = any(row.total.failures for row in scores[0].rows)
    shown = {"variant", *scores[0].columns, "difference", "ratio", *(["failures"] * failed)}
    shown |= {"self_bleu"}  # of answers that were drawn
    return replace(
        section,
        lead=(rates or whole.only(shown), *([fidelity_table(group)] if is_fidelity(group) else [])),
        verdict=verdict_of(group),
        memory=_memory(group, scores[0]),
        folded=tuple(folded),
        filed=tuple(_splits(group, scores)),
        figures=tuple(figures_of(group, scores)),
        kept=tuple(kept_figures(group)),
    )


def tables_of(experiment: Experiment) -> list[Table]:
    """The tables to print after a job: one per model and task, then all tasks of each model."""
    tables: list[Table] = []
    ranked: list[ScoreTable] = []
    for group in experiment.groups:
        study, _ = _study(group, experiment.folder, draw=False)
        if study is not None and not _is_timed(group):
            tables += study.tables
        elif not _is_timed(group):
            ranked.append(score_table(group))
            tables.append(as_table(ranked[-1], narrow=True))
            tables += [fidelity_table(group)] if is_fidelity(group) else []
    tables += [timing_table(group) for group in experiment.groups if _is_timed(group)]
    return tables + several_tasks(ranked)


def several_tasks(ranked: Sequence[ScoreTable]) -> list[Table]:
    """Of each model that was run on several tasks, the methods on all of them."""
    counts = [table.model for table in ranked]
    return overview_tables([table for table in ranked if counts.count(table.model) > 1])


def by_model(sections: Sequence[Section]) -> list[list[Section]]:
    """The sections of each model."""
    found: dict[str, list[Section]] = {}
    for section in sections:
        found.setdefault(section.group.model, []).append(section)
    return list(found.values())


def memory_of_tasks(sections: Sequence[Section]) -> Drawn | None:
    """Score against memory on several tasks of one model, side by side; None where there is only one, or
    too many to draw."""
    drawn = [
        (section.group, section.scores[0])
        for section in sections
        if section.memory and section.group.meta.score_unit == "fraction"
    ]
    return score_on_tasks(drawn) if 1 < len(drawn) <= MAX_PANELS else None


def as_printed(sections: Sequence[Section], published: Sequence[Published]) -> list[Table]:
    """The tables that a paper would print: one for each task with several datasets or models, its
    datasets in the order of the published table where there is one."""
    by_task: dict[str, list[ScoreTable]] = {}
    for section in sections:
        if section.ranked:
            by_task.setdefault(section.group.task, []).append(section.scores[0])
    return [
        paper_layout(of, [c for table in published if table.task == task for c in table.columns])
        for task, of in by_task.items()
        if len(of) > 1 or len(of[0].columns) > 1
    ]


def figures_of(group: Group, tables: Sequence[ScoreTable]) -> list[Drawn]:
    """Every figure that the group's task asks for, and those that its records allow.

    Args:
        tables: the group's score table by dataset, then those by other fields.
    """
    figures: list[Drawn] = []
    if not ((group.records["status"] == "ok") & group.records["score"].notna()).any():
        return figures
    heat, bar_spec = group.meta.figure("heatmap"), group.meta.figure("bars")
    if heat:
        figures += heatmaps(group, heat)
    if bar_spec:
        figures += bars(group, bar_spec)
    if _is_timed(group):
        return figures
    for table in tables[1:]:
        if len(table.columns) > 1 and not (bar_spec and table.by == bar_spec.get("x")):
            figures.append(breakdown(group, table))
    table = tables[0]
    if any(row.total.difference for row in table.rows):
        figures.append(differences(table))
    if AVERAGE in table.columns:
        figures.append(by_dataset(group, table))
    return figures


def _memory(group: Group, table: ScoreTable) -> Drawn | None:
    """Score or error against memory; None where nothing was scored, or nothing saves memory."""
    scored = {row.variant.label for row in table.rows if not math.isnan(row.total.score.value)}
    if not scored & group.compressed:
        return None
    return error_against_memory(group) or score_against_ratio(group, table)


def alone(group: Group) -> list[Drawn]:
    """One heatmap per variant, for papers; the page shows them side by side instead."""
    spec = group.meta.figure("heatmap")
    good = set(group.records["variant"][group.records["status"] == "ok"].unique())
    variants = [variant for variant in group.variants if variant.label in good]
    return heatmaps_alone(group, variants, spec) if spec and variants else []


def _scores(group: Group) -> list[ScoreTable]:
    fields = [name for name in group.meta.breakdown if name in group.records]
    tables = [score_table(group), *(score_table(group, name) for name in fields)]
    if any(name in group.records for name in group.meta.measures):
        tables.append(score_table(by_measure(group), "measure"))
    return tables


def _measured_findings(group: Group) -> Iterator[str]:
    """A sentence about each field that the task has one for, with its extremes and its mean."""
    spec = group.meta.figure("measured") or {}
    for field, text in (spec.get("say") or {}).items():
        if field not in group.records:
            continue
        found = group.records[field].dropna()
        if not found.empty:
            numbers = {"least": found.min(), "mean": found.mean(), "most": found.max()}
            said = {name: number(float(value)) for name, value in numbers.items()}
            yield Template(text).safe_substitute(said)


def _is_timed(group: Group) -> bool:
    return group.meta.figure("throughput") is not None


def _study(group: Group, folder: Path, *, draw: bool) -> tuple[Study | None, tuple[str, ...]]:
    """The study; none, and why, where a table it needs is missing."""
    try:
        return study_of(group, folder, draw=draw), ()
    except PaperError as error:
        return None, (str(error),)


def _timing_figures(group: Group) -> list[Drawn]:
    scaling = throughput_scaling(group)
    return [throughput(group), *([scaling] if scaling else [])]


def _published_averages(
    group: Group, published: Sequence[Published]
) -> dict[str, dict[str, float]]:
    """Of the published tables beside this group, by the paper's model, each method's average."""
    return {
        model: methods
        for table in published
        if (table.task, table.model) == (group.task, group.model)
        for model, methods in table.averages.items()
    }


def _splits(group: Group, scores: Sequence[ScoreTable]) -> list[Table]:
    if group.records["dataset"].nunique() < 2:
        return []
    return [
        split_table(group, table.by)
        for table in scores
        if table.by in group.records and table.by != "dataset"
    ]


def _sample_notes(group: Group) -> list[str]:
    """What the examples are a sample of: the unit where it is not the example, and what `limit` cut."""
    notes, unit = [], group.meta.unit
    if unit != "example_id" and unit in group.records:
        name = unit.removesuffix("_id").replace("_", " ")
        notes.append(
            f"The independent unit is the {name}: intervals are over the"
            f" {group.records[unit].nunique()} there are, each with all of its examples."
        )
    if "imagined" in group.records:
        masked = group.records["variant"][group.records["imagined"].eq(True)].unique()
        notes.append(
            f"{', '.join(masked)}: a mask of one pass over prompt and answer. Entries and bytes are"
            " those of a cache that nobody holds; no memory is saved, and nothing could be generated. A"
            " mask may be chosen with the answer in sight: h2o's released_global is, it sees the future."
        )
    if group.left_out:
        notes.append(f"Left out by limit: {', '.join(group.left_out)}.")
    return notes
