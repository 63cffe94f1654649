"""A comparison of two experiments as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.report.stats.significance import ALPHA
from kvbench.report.table import UNPAIRED, Column, Table, long_table, unit_text
from kvbench.report.tables.compare import Change, Comparison, Match, Setting, TaskComparison
from kvbench.report.tables.score_notes import INTERVAL_NOTE
from kvbench.report.tables.scores import AVERAGE

_LONG_VALUE = 160
_METHOD = Column("variant", "method", "label", of=lambda match: match.label)


def change_tables(comparison: Comparison) -> list[Table]:
    """What changed in the runs, then every task: methods, and methods by dataset."""
    tables = [_settings_table(comparison)] if comparison.settings else []
    for task in comparison.tasks:
        tables.append(_task_table(task))
        if any(len(match.changes) > 1 for match in task.matches):
            tables.append(_dataset_table(task))
    return tables


def _settings_table(comparison: Comparison) -> Table:
    return Table.of(
        "settings",
        "What changed in the runs that both have",
        (
            Column("key", "key"),
            Column("first", "first", of=lambda setting: _short(setting.first)),
            Column("second", "second", of=lambda setting: _short(setting.second)),
            Column("where", "where", of=_where),
        ),
        comparison.settings,
    )


def _where(setting: Setting) -> str:
    if setting.everywhere:
        return "everywhere"
    more = len(setting.runs) - 3
    return ", ".join(setting.runs[:3]) + (f" and {more} more" if more > 0 else "")


def _short(value: str) -> str:
    return value if len(value) <= _LONG_VALUE else f"{value[:_LONG_VALUE]}…"


def _task_table(task: TaskComparison) -> Table:
    notes = [
        INTERVAL_NOTE,
        "change: second minus first, paired over the examples that both scored; bold where it"
        " is shown: p, adjusted, below 0.05. p is of the exact paired test (McNemar's for right and"
        " wrong, else over the signs of the differences), adjusted by Holm's method for all methods and"
        " tasks shown. seconds: median of compressing and decoding.",
    ]
    if any(not match.total.paired for match in task.matches):
        notes.append(
            "* unpaired: fewer than half of the examples are the same in both (in some dataset), so the"
            " interval is that of two independent samples, and there is no paired test."
        )

    def total(key: str, heading: str, kind: str = "label") -> Column:
        return Column(key, heading, kind, task.unit, of=lambda match: getattr(match.total, key))

    def look(match: Match) -> Mapping[str, Any]:
        return {
            "marks": {"difference": "" if match.total.paired else UNPAIRED},
            "bold": frozenset({"difference"} if match.total.p_holm < ALPHA else ()),
            "method": match.method,
        }

    return Table.of(
        f"compare-{task.task}-{task.model}",
        f"{task.task} on {task.model}: score{unit_text(task.unit)}",
        (
            _METHOD,
            total("first", "first", "score"),
            total("second", "second", "score"),
            total("difference", "change", "difference"),
            total("p_holm", "p, adjusted", "p"),
            total("common_examples", "common"),
            total("better", "better"),
            total("worse", "worse"),
            total("ratio", "ratio", "both"),
            total("seconds", "seconds", "both"),
            total("failed", "failed", "failed"),
        ),
        task.matches,
        notes,
        row=look,
    )


def _dataset_table(task: TaskComparison) -> Table:
    names = list(dict.fromkeys(c.dataset for match in task.matches for c in match.changes))
    names.sort(key=lambda name: name == AVERAGE)

    def change_on(name: str) -> Column:
        total = name == AVERAGE
        return Column(name, name, "difference", task.unit, total=total, of=lambda m: _on(m, name))

    def look(match: Match) -> Mapping[str, Any]:
        return {
            "marks": {c.dataset: "" if c.paired else UNPAIRED for c in match.changes},
            "bold": frozenset(c.dataset for c in match.changes if c.p < ALPHA),
            "method": match.method,
        }

    return Table.of(
        f"compare-{task.task}-{task.model}-by-dataset",
        f"{task.task} on {task.model}: change by dataset{unit_text(task.unit)}",
        (_METHOD, *map(change_on, names)),
        task.matches,
        (f"Bold: p of this change is below {ALPHA:.2f} (not adjusted for their number).",),
        row=look,
    )


def _on(match: Match, dataset: str) -> Any:
    return next((c.difference for c in match.changes if c.dataset == dataset), None)


def every_change(task: TaskComparison) -> Table:
    """Every change of a task in long form: one row per variant and dataset."""
    unit = "%" if task.unit == "fraction" else task.unit
    lines = [
        {"model": task.model, "task": task.task, "method": match.method, "variant": match.label}
        | {"dataset": change.dataset, "unit": unit}
        | {key: getattr(change, key) for key in Change.__dataclass_fields__}
        for match in task.matches
        for change in match.changes
    ]
    kinds = {"difference": "difference", "failed": "failed", "ratio": "both", "seconds": "both"}
    return long_table(lines, task.unit, first="score", second="score", **kinds)
