"""A comparison of two experiments as tables."""

from __future__ import annotations

from kvbench.report.stats.significance import ALPHA
from kvbench.report.table import UNPAIRED, Column, Row, Table, unit_text
from kvbench.report.tables.compare import Change, Comparison, Setting, TaskComparison
from kvbench.report.tables.score_notes import INTERVAL_NOTE
from kvbench.report.tables.scores import AVERAGE

_LONG_VALUE = 160


def change_tables(comparison: Comparison) -> list[Table]:
    """What changed in the runs, then every task: methods, and methods by dataset."""
    tables = [_settings_table(comparison)] if comparison.settings else []
    for task in comparison.tasks:
        tables.append(_task_table(task))
        if any(len(match.changes) > 1 for match in task.matches):
            tables.append(_dataset_table(task))
    return tables


def _settings_table(comparison: Comparison) -> Table:
    return Table(
        name="settings",
        title="What changed in the runs that both have",
        columns=tuple(Column(name, name) for name in ("key", "first", "second", "where")),
        rows=tuple(
            Row(
                {
                    "key": s.key,
                    "first": _short(s.first),
                    "second": _short(s.second),
                    "where": _where(s),
                }
            )
            for s in comparison.settings
        ),
    )


def _where(setting: Setting) -> str:
    if setting.everywhere:
        return "everywhere"
    more = len(setting.runs) - 3
    return ", ".join(setting.runs[:3]) + (f" and {more} more" if more > 0 else "")


def _short(value: str) -> str:
    return value if len(value) <= _LONG_VALUE else f"{value[:_LONG_VALUE]}…"


def _task_table(task: TaskComparison) -> Table:
    totals = [match.total for match in task.matches]
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
    return Table(
        name=f"compare-{task.task}-{task.model}",
        title=f"{task.task} on {task.model}: score{unit_text(task.unit)}",
        columns=(
            Column("variant", "method", "label"),
            Column("first", "first", "score", task.unit),
            Column("second", "second", "score", task.unit),
            Column("difference", "change", "difference", task.unit),
            Column("p_holm", "p, adjusted", "p"),
            Column("common_examples", "common", "label"),
            Column("better", "better", "label"),
            Column("worse", "worse", "label"),
            Column("ratio", "ratio", "both"),
            Column("seconds", "seconds", "both"),
            Column("failed", "failed", "failed"),
        ),
        rows=tuple(
            Row(
                line,
                marks={"difference": "" if match.total.paired else UNPAIRED},
                bold=frozenset({"difference"} if match.total.adjusted < ALPHA else ()),
                method=match.method,
            )
            for match, line in ((m, _values(m.total) | {"variant": m.label}) for m in task.matches)
        ),
        notes=tuple(notes),
    )


def _values(change: Change) -> dict[str, object]:
    return {
        "first": change.first,
        "second": change.second,
        "difference": change.difference,
        "paired": change.paired,
        "p": change.p,
        "p_holm": change.adjusted,
        "common_examples": change.common,
        "better": change.better,
        "worse": change.worse,
        "failed": change.failed,
        "ratio": change.ratio,
        "seconds": change.seconds,
    }


def _dataset_table(task: TaskComparison) -> Table:
    names = list(dict.fromkeys(c.dataset for match in task.matches for c in match.changes))
    names.sort(key=lambda name: name == AVERAGE)
    rows = []
    for match in task.matches:
        found = {change.dataset: change for change in match.changes}
        rows.append(
            Row(
                {"variant": match.label, **{name: c.difference for name, c in found.items()}},
                marks={name: "" if c.paired else UNPAIRED for name, c in found.items()},
                bold=frozenset(name for name, c in found.items() if c.p < ALPHA),
                method=match.method,
            )
        )
    return Table(
        name=f"compare-{task.task}-{task.model}-by-dataset",
        title=f"{task.task} on {task.model}: change by dataset{unit_text(task.unit)}",
        columns=(
            Column("variant", "method", "label"),
            *(Column(n, n, "difference", task.unit, total=n == AVERAGE) for n in names),
        ),
        rows=tuple(rows),
        notes=(f"Bold: p of this change is below {ALPHA:.2f} (not adjusted for their number).",),
    )


def every_change(task: TaskComparison) -> Table:
    """Every change of a task in long form: one row per variant and dataset."""
    unit = task.unit
    return Table(
        name="",
        title="",
        columns=(
            *map(Column, ("model", "task", "method", "variant", "dataset", "unit")),
            Column("first", kind="score", unit=unit),
            Column("second", kind="score", unit=unit),
            Column("difference", kind="difference", unit=unit),
            *map(Column, ("paired", "p", "p_holm", "common_examples", "better", "worse")),
            Column("failed", kind="failed"),
            Column("ratio", kind="both"),
            Column("seconds", kind="both"),
        ),
        rows=tuple(
            Row(
                {
                    "model": task.model,
                    "task": task.task,
                    "method": match.method,
                    "variant": match.label,
                    "dataset": change.dataset,
                    "unit": "%" if unit == "fraction" else unit,
                }
                | _values(change)
            )
            for match in task.matches
            for change in match.changes
        ),
    )
