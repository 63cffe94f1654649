"""A comparison of two experiments as tables of text, and as files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvbench.errors import disk_line
from kvbench.records.read import StoreError
from kvbench.report.files import write_text
from kvbench.report.render.answers import clip
from kvbench.report.render.page import environment, page_parts
from kvbench.report.render.text import csv, markdown, plain
from kvbench.report.stats.significance import ALPHA
from kvbench.report.tables.compare import (
    Change,
    Comparison,
    Flip,
    Match,
    Setting,
    TaskComparison,
    comparison_table,
)
from kvbench.report.tables.pairs import p_text
from kvbench.report.tables.scores import AVERAGE, failures_text
from kvbench.report.views import (
    INTERVAL_NOTE,
    View,
    estimate_text,
    number,
    unit_text,
)

_FLIPS_SHOWN = 60
_LONG_VALUE = 160


def comparison_views(comparison: Comparison) -> list[View]:
    """What changed in the runs, then every task: methods, and methods by dataset."""
    views = [_settings_view(comparison)] if comparison.settings else []
    for task in comparison.tasks:
        views.append(_task_view(task))
        if any(len(match.changes) > 1 for match in task.matches):
            views.append(_dataset_view(task))
    return views


def write_comparison(comparison: Comparison, folder: Path) -> list[Path]:
    """Write compare.html, compare.md and compare.csv; returns their paths.

    Raises:
        StoreError: the folder cannot be written.
    """
    views = comparison_views(comparison)
    first, second = comparison.names
    text = plain(f"# {first} → {second}") + "\n\n"
    text += plain(f"first: {first}; second: {second}") + "\n\n"
    text += "\n".join(markdown(view) for view in views)
    for name, lines in only_lines(comparison):
        text += "\n" + plain(f"Only in {name}:") + "\n\n"
        text += "".join(f"- {plain(line)}\n" for line in lines)
    table = csv(comparison_table(comparison))
    template = environment().get_template("compare.html.j2")
    page = template.render(
        **page_parts(),
        comparison=comparison,
        tables=views,
        only=only_lines(comparison),
        flips=_shown_flips(comparison),
        total_flips=sum(len(m.flips) for t in comparison.tasks for m in t.matches),
        clip=clip,
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return [
            write_text(folder / "compare.html", page),
            write_text(folder / "compare.md", text),
            write_text(folder / "compare.csv", table),
        ]
    except OSError as error:
        raise StoreError(f"cannot write the comparison in {folder}: {disk_line(error)}") from error


def only_lines(comparison: Comparison) -> list[tuple[str, tuple[str, ...]]]:
    """Of each experiment, the runs that the other lacks, where there are any."""
    both = zip(comparison.names, comparison.only, strict=True)
    return [(name, lines) for name, lines in both if lines]


def _settings_view(comparison: Comparison) -> View:
    return View(
        name="settings",
        title="What changed in the runs that both have",
        columns=("key", "first", "second", "where"),
        rows=tuple(
            (s.key, _short(s.first), _short(s.second), _where(s)) for s in comparison.settings
        ),
        texts=frozenset({1, 2, 3}),
    )


def _where(setting: Setting) -> str:
    if setting.everywhere:
        return "everywhere"
    more = len(setting.runs) - 3
    return ", ".join(setting.runs[:3]) + (f" and {more} more" if more > 0 else "")


def _short(value: str) -> str:
    return value if len(value) <= _LONG_VALUE else f"{value[:_LONG_VALUE]}…"


def _task_view(task: TaskComparison) -> View:
    totals = [match.total for match in task.matches]
    header = ["method", "first", "second", "change", "p, adjusted", "common", "better", "worse"]
    header += ["ratio", "seconds", "failed"]
    rows = [
        (
            match.label,
            estimate_text(match.total.first, task.unit),
            estimate_text(match.total.second, task.unit),
            _change_text(match.total, task.unit),
            p_text(match.total.adjusted),
            str(match.total.common),
            str(match.total.better),
            str(match.total.worse),
            _arrow(*(number(x) for x in match.total.ratio)),
            _arrow(*(number(x) for x in match.total.seconds)),
            _arrow(*(failures_text(x) or "0" for x in match.total.failed)),
        )
        for match in task.matches
    ]
    notes = [
        INTERVAL_NOTE,
        "change: second minus first, paired over the examples that both scored; bold where it"
        " is shown: p, adjusted, below 0.05. p is of the exact paired test (McNemar's for right and"
        " wrong, else over the signs of the differences), adjusted by Holm's method for all methods and"
        " tasks shown. seconds: median of compressing and decoding.",
    ]
    if any(not total.paired for total in totals):
        notes.append(
            "* unpaired: fewer than half of the examples are the same in both (in some dataset), so the"
            " interval is that of two independent samples, and there is no paired test."
        )
    return View(
        name=f"compare-{task.task}-{task.model}",
        title=f"{task.task} on {task.model}: score{unit_text(task.unit)}",
        columns=tuple(header),
        rows=tuple(rows),
        notes=tuple(notes),
        bold=frozenset((i, 3) for i, total in enumerate(totals) if total.adjusted < ALPHA),
    )


def _dataset_view(task: TaskComparison) -> View:
    columns = list(dict.fromkeys(c.dataset for match in task.matches for c in match.changes))
    columns.sort(key=lambda name: name == AVERAGE)
    rows, bold = [], set()
    for i, match in enumerate(task.matches):
        by_dataset = {change.dataset: change for change in match.changes}
        rows.append((match.label, *(_dataset_text(by_dataset.get(c), task.unit) for c in columns)))
        bold |= {
            (i, j) for j, c in enumerate(columns, 1) if c in by_dataset and by_dataset[c].p < ALPHA
        }
    return View(
        name=f"compare-{task.task}-{task.model}-by-dataset",
        title=f"{task.task} on {task.model}: change by dataset{unit_text(task.unit)}",
        columns=("method", *columns),
        rows=tuple(rows),
        notes=(f"Bold: p of this change is below {ALPHA:.2f} (not adjusted for their number).",),
        bold=frozenset(bold),
    )


def _dataset_text(change: Change | None, unit: str) -> str:
    return "" if change is None else _change_text(change, unit)


def _change_text(change: Change, unit: str) -> str:
    text = estimate_text(change.difference, unit, signed=True)
    return text if change.paired else f"{text} *"


def _arrow(first: str, second: str) -> str:
    return first if first == second else f"{first} → {second}"


def _shown_flips(comparison: Comparison) -> list[tuple[TaskComparison, Match, Flip]]:
    """Some of each method and task, as many as fit."""
    groups = [(t, m) for t in comparison.tasks for m in t.matches if m.flips]
    each = max(1, _FLIPS_SHOWN // max(1, len(groups)))
    return [(t, m, flip) for t, m in groups for flip in m.flips[:each]][:_FLIPS_SHOWN]


def terminal_views(comparison: Comparison) -> Sequence[View]:
    """What is printed: everything but the tables by dataset."""
    return [view for view in comparison_views(comparison) if not view.name.endswith("-by-dataset")]
