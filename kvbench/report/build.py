"""Everything that is derived from an experiment's records: tables, figures and the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import disk_line
from kvbench.records.read import StoreError
from kvbench.report.experiment import Experiment, Group, by_measure, load_experiment
from kvbench.report.figures.canvas import Drawn, save_figures
from kvbench.report.figures.heatmap import figures_of, grids_of, heatmap_alone
from kvbench.report.figures.intervals import throughput, throughput_scaling
from kvbench.report.files import file_stem, part_of, remove_stale, write_text
from kvbench.report.render.page import Section, render_page
from kvbench.report.render.text import csv, latex, markdown
from kvbench.report.tables.pairs import pairs_frame, pairs_of, pairs_view
from kvbench.report.tables.published import (
    PaperError,
    Published,
    comparison_frame,
    published_tables,
)
from kvbench.report.tables.published_views import comparison_name, comparison_views
from kvbench.report.tables.scores import ScoreTable, frame_of, overviews, score_table, split_frame
from kvbench.report.tables.speeds import speed_frame, speeds_of
from kvbench.report.tables.study import Study, study_of
from kvbench.report.tables.timing_views import speed_view, timing_view
from kvbench.report.tables.timings import timing_frame, timing_table
from kvbench.report.views import (
    View,
    difference_view,
    overview_view,
    paper_view,
    score_view,
)


@dataclass(frozen=True)
class ReportPaths:
    """Where a report lies.

    Attributes:
        tables, figures: every file written.
        warnings: what the report had to leave out, one line each.
    """

    page: Path
    tables: tuple[Path, ...]
    figures: tuple[Path, ...]
    warnings: tuple[str, ...] = ()


def build_report(experiment_folder: str | Path) -> ReportPaths:
    """Write report.html, tables/ and figures/ into the experiment's folder, from records alone.

    The same records give the same files.

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
    sections = [
        _section(group, experiment.folder, published, warnings) for group in experiment.groups
    ]
    across = overviews([s.tables[0] for s in sections if s.ranked])
    printed = _printed(sections, published)
    several = [view for view in printed if len(view.parts) > 1]
    try:
        page = write_text(
            experiment.folder / "report.html",
            render_page(experiment, sections, across, published, warnings, several),
        )
        tables = _write_tables(
            experiment, sections, [*map(overview_view, across), *printed], published
        )
        figures = save_figures(
            [drawn for section in sections for drawn in (*section.figures, *_alone(section.group))],
            part_of(experiment.folder, "figures"),
        )
        remove_stale(experiment.folder, [*tables, *figures])
    except OSError as error:
        raise StoreError(
            f"cannot write the report in {experiment.folder}: {disk_line(error)}"
        ) from error
    return ReportPaths(page, tuple(tables), tuple(figures), tuple(warnings))


def views_of(experiment: Experiment) -> list[View]:
    """The tables to print after a job: one per model and task, then all tasks of each model."""
    views: list[View] = []
    ranked = []
    for group in experiment.groups:
        if _is_timing(group):
            continue
        study = _study_or_none(group, experiment.folder)
        if study is not None:
            views += study.views
        else:
            ranked.append(score_table(group))
            views.append(score_view(ranked[-1], narrow=True))
    for group in filter(_is_timing, experiment.groups):
        views.append(timing_view(group.task, group.model, timing_table(group)))
    return views + [overview_view(one) for one in overviews(ranked) if len(one.tables) > 1]


def _study_or_none(group: Group, folder: Path) -> Study | None:
    """The study without its figures; None where a table it needs is missing (the page says which)."""
    try:
        return study_of(group, folder, draw=False)
    except PaperError:
        return None


def _section(
    group: Group, folder: Path, published: Sequence[Published], warnings: list[str]
) -> Section:
    timings = timing_table(group) if _is_timing(group) else []
    fields = [name for name in group.meta.breakdown if name in group.records]
    tables = [score_table(group), *(score_table(group, name) for name in fields)]
    if any(name in group.records for name in group.meta.measures):
        tables.append(score_table(by_measure(group), "measure"))
    study: Study | None = None
    try:
        study = study_of(group, folder)
    except PaperError as error:
        warnings.append(str(error))
    figures = list(study.figures) if study else figures_of(group, tables)
    if timings:
        scaling = throughput_scaling(group)
        figures += [throughput(group, timings), *([scaling] if scaling else [])]
    averages = {
        model: methods
        for table in published
        if (table.task, table.model) == (group.task, group.model)
        for model, methods in table.averages.items()
    }
    pairs = [] if timings or study else pairs_of(group, averages)
    speeds = [] if timings or study else speeds_of(group)
    return Section(
        group, tuple(tables), tuple(timings), tuple(figures), study, tuple(pairs), tuple(speeds)
    )


def _printed(sections: Sequence[Section], published: Sequence[Published]) -> list[View]:
    """The tables that a paper would print: one for each task with several datasets or models, its
    datasets in the order of the published table where there is one."""
    by_task: dict[str, list[ScoreTable]] = {}
    for section in sections:
        if section.ranked:
            by_task.setdefault(section.group.task, []).append(section.tables[0])
    return [
        paper_view(tables, [c for table in published if table.task == task for c in table.columns])
        for task, tables in by_task.items()
        if len(tables) > 1 or len(tables[0].columns) > 1
    ]


def _is_timing(group: Group) -> bool:
    return group.meta.figure("throughput") is not None


def _alone(group: Group) -> list[Drawn]:
    """One heatmap per arm, for papers; the page shows them side by side instead."""
    spec = group.meta.figure("heatmap")
    good = set(group.records["arm"][group.records["status"] == "ok"])
    if not spec:
        return []
    grids = grids_of(group, spec)
    return [heatmap_alone(group, a, spec, grids) for a in group.arms if a.label in good]


def _write_tables(
    experiment: Experiment,
    sections: Sequence[Section],
    across: Sequence[View],
    published: Sequence[Published],
) -> list[Path]:
    folder = part_of(experiment.folder, "tables")
    paths = []
    views = list(across)
    for view in comparison_views(published):
        views.append(view)
        same = [p for p in published if view.name == comparison_name(p)]
        text = csv(comparison_frame(same))
        paths.append(write_text(folder / f"{_stem(view)}.csv", text))
    for section in sections:
        group = section.group
        for table in section.tables:
            view = score_view(table)
            views.append(view)
            if table.baseline and len(table.columns) > 1:
                views.append(difference_view(table))
            text = csv(frame_of(table))
            paths.append(write_text(folder / f"{_stem(view)}.csv", text))
            several = section.study is None and group.records["dataset"].nunique() > 1
            if several and table.by != "dataset":
                text = csv(split_frame(group, table.by))
                paths.append(write_text(folder / f"{_stem(view)}-and-dataset.csv", text))
        if section.pairs:
            views.append(pairs_view(group, section.pairs))
            text = csv(pairs_frame(group, section.pairs))
            paths.append(write_text(folder / f"{_stem(views[-1])}.csv", text))
        if section.speeds:
            views.append(speed_view(group, section.speeds))
            text = speed_frame(group, section.speeds).to_csv(index=False, float_format="%.6g")
            paths.append(write_text(folder / f"{_stem(views[-1])}.csv", text))
        if section.study is not None:
            views += section.study.views
            for name, frame in section.study.frames.items():
                text = csv(frame)
                paths.append(write_text(folder / f"{file_stem(name)}.csv", text))
        if section.timings:
            views.append(timing_view(group.task, group.model, section.timings))
            text = csv(timing_frame(section.timings))
            paths.append(write_text(folder / f"{_stem(views[-1])}.csv", text))
    for view in views:
        paths.append(write_text(folder / f"{_stem(view)}.md", markdown(view)))
        paths.append(write_text(folder / f"{_stem(view)}.tex", latex(view)))
    return paths


def _stem(view: View) -> str:
    return file_stem(view.name)
