"""Tables as text: what is shown, in which words; the same for terminal, Markdown and LaTeX."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbench.report.experiment import BASELINE
from kvbench.report.stats.estimate import Estimate
from kvbench.report.tables.scores import (
    AVERAGE,
    NO_CELL,
    Cell,
    Overview,
    Row,
    ScoreTable,
    failures_text,
)

MISSING = "–"
INCOMPLETE = "†"
TIED = "≈"
OUTSIDE = "‡"

INTERVAL_NOTE = (
    "[low, high] is a 95 % interval over examples as a sample of all such examples: Wilson's for shares,"
    " Student's t for other scores and differences; one example has none."
)
MARKS_NOTE = (
    f"Bold: the best compressed method of the column at its rate. {TIED}: not shown to differ from it."
    " Without a mark: shown worse, by a paired test over the examples that both scored, adjusted for all"
    " pairs at that rate and column; of tables of equal methods, one in twenty shows any as worse."
)
NO_BASELINE_NOTE = (
    "The exact cache was not run, so nothing is compared with it: add exact to the methods for the"
    " column of differences."
)
_WIDE = 4
"""With more columns than this, intervals are shown for the average only."""


@dataclass(frozen=True)
class View:
    """A table of text.

    Attributes:
        name: file name stem, unique within an experiment.
        columns: headers; the first column names the row.
        notes: what the marks mean, and what to keep in mind.
        bold: (row, column) of the cells to set in bold.
        parts: row groups, each a heading and how many rows it has; none: one without a heading.
        texts: columns of text rather than numbers, besides the first.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = field(default=())
    bold: frozenset[tuple[int, int]] = frozenset()
    parts: tuple[tuple[str, int], ...] = ()
    texts: frozenset[int] = frozenset()

    @property
    def blocks(self) -> list[tuple[str, range]]:
        """The row groups: their headings, and which rows they have."""
        start, found = 0, []
        for heading, count in self.parts or (("", len(self.rows)),):
            found.append((heading, range(start, start + count)))
            start += count
        return found


def score_view(table: ScoreTable, *, narrow: bool = False) -> View:
    """Scores, paired differences, cost and failures of one table.

    Args:
        narrow: of many datasets show the average only, as a terminal has no room for more.
    """
    by_dataset = table.by == "dataset"
    wide = len(table.columns) > _WIDE
    columns = (AVERAGE,) if narrow and wide and AVERAGE in table.columns else table.columns
    header = ["method"]
    header += [column if by_dataset else f"{table.by} {column}" for column in columns]
    compare = by_dataset and table.baseline is not None
    if compare:
        header.append(f"Δ {table.baseline}")
    costs = costs_of(table) if by_dataset else {}
    header += costs
    header += ["scored", "failed"]
    rows: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    for i, row in enumerate(table.rows):
        cells = [
            score_text(row.cells[c], table.unit, interval=not wide or c == AVERAGE) for c in columns
        ]
        bold |= {(i, j) for j, c in enumerate(columns, 1) if row.cells[c].best}
        if compare:
            cells.append(difference_text(row.total.difference, table.unit))
        cells += [cost_text(row, attribute) for attribute in costs.values()]
        rows.append((row.arm.label, *cells, *_counts(row, once=table.by == "measure")))
    title = f"{table.task} on {table.model}: score{unit_text(table.unit)}"
    if columns != table.columns:
        title += f"; average of {len(table.columns) - 1} datasets"
    return View(
        name=f"{table.task}-{table.model}" + ("" if by_dataset else f"-by-{table.by}"),
        title=title if by_dataset else f"{title} by {table.by}",
        columns=tuple(header),
        rows=tuple(rows),
        notes=tuple(notes_of([table])),
        bold=frozenset(bold),
    )


def paper_view(tables: Sequence[ScoreTable], order: Sequence[str] = ()) -> View:
    """One task as papers print it: datasets as columns, a block of rows for each model.

    Args:
        tables: of one task by dataset, one per model.
        order: columns that go first, where there are such.
    """
    task, unit = tables[0].task, tables[0].unit
    found_columns = {c for t in tables for c in t.columns if c != AVERAGE}
    columns = list(dict.fromkeys(c for c in order if c in found_columns))
    columns += dict.fromkeys(
        c for t in tables for c in t.columns if c in found_columns - set(columns)
    )
    if any(AVERAGE in table.columns for table in tables):
        columns.append(AVERAGE)
    failed = any(row.total.failures for table in tables for row in table.rows)
    rows: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    for table in tables:
        for row in table.rows:
            found = [row.cells.get(column, NO_CELL) for column in columns]
            bold |= {(len(rows), j) for j, cell in enumerate(found, 1) if cell.best}
            texts = [
                score_text(cell, unit, interval=column == AVERAGE or len(columns) <= _WIDE)
                for column, cell in zip(columns, found, strict=True)
            ]
            rows.append((row.arm.label, *texts, number(row.ratio), *(_counts(row)[1:] * failed)))
    return View(
        name=f"{task}-paper",
        title=f"{task}: score{unit_text(unit)}",
        columns=("method", *columns, "ratio", *(["failed"] * failed)),
        rows=tuple(rows),
        notes=tuple(notes_of(tables)),
        bold=frozenset(bold),
        parts=tuple((table.model, len(table.rows)) for table in tables),
    )


def difference_view(table: ScoreTable) -> View:
    """The paired difference to the baseline, per column."""
    rows = [
        (
            row.arm.label,
            *(difference_text(row.cells[c].difference, table.unit) for c in table.columns),
        )
        for row in table.rows
        if row.total.difference is not None
    ]
    named = "" if table.by == "dataset" else f" by {table.by}"
    return View(
        name=f"{table.task}-{table.model}{named.replace(' ', '-')}-difference",
        title=f"{table.task} on {table.model}: paired difference to"
        f" {table.baseline}{unit_text(table.unit)}{named}",
        columns=("method", *table.columns),
        rows=tuple(rows),
        notes=(INTERVAL_NOTE, "Differences are over the examples that both scored."),
    )


def overview_view(overview: Overview) -> View:
    """Every arm on every task of one model."""
    header = ["method"]
    for table in overview.tables:
        header += [f"{table.task}{unit_text(table.unit)}", "ratio"]
    rows: list[tuple[str, ...]] = []
    bold: set[tuple[int, int]] = set()
    for i, arm in enumerate(overview.arms):
        cells = [overview.label(arm)]
        for table in overview.tables:
            row = overview.row(table, arm)
            if row is not None and row.total.best:
                bold.add((i, len(cells)))
            if row is None:
                cells += [MISSING] * 2
                continue
            cells += [score_text(row.total, table.unit), number(row.ratio)]
        rows.append(tuple(cells))
    return View(
        name=f"overview-{overview.model}",
        title=f"{overview.model}: all tasks",
        columns=tuple(header),
        rows=tuple(rows),
        notes=tuple(notes_of(overview.tables)),
        bold=frozenset(bold),
    )


def costs_of(table: ScoreTable) -> dict[str, str]:
    """Headers of the costs that any row has, each with the row's attribute."""
    costs = {
        "ratio": "ratio",
        "entries": "entries_mean",
        "prefill s": "prefill_s",
        "compress s": "compress_s",
        "decode ms/token": "decode_ms",
    }
    return {
        name: attribute
        for name, attribute in costs.items()
        if not all(math.isnan(getattr(row, attribute)) for row in table.rows)
    }


def cost_text(row: Row, attribute: str) -> str:
    """One cost of a row; entries as a whole number."""
    value: float = getattr(row, attribute)
    whole = attribute == "entries_mean" and not math.isnan(value)
    return f"{value:.0f}" if whole else number(value)


def notes_of(tables: Sequence[ScoreTable]) -> list[str]:
    """What the marks in these tables mean, and what to keep in mind when reading them."""
    rows = [row for table in tables for row in table.rows]
    cells = [cell for row in rows for cell in row.cells.values()]
    notes = [INTERVAL_NOTE]
    baselines: dict[str, list[str]] = {}
    for table in tables:
        if table.baseline:
            baselines.setdefault(table.baseline, []).append(table.task)
    if any(_lacks_exact(table) for table in tables):
        notes.append(NO_BASELINE_NOTE)
    for baseline, tasks in baselines.items():
        where = f" on {', '.join(dict.fromkeys(tasks))}" if len(baselines) > 1 else ""
        notes.append(
            f"Δ is the paired difference to {baseline}{where}, over examples that both scored."
        )
    notes.append(
        "ratio is measured: bytes held / bytes of the exact cache; seconds are medians per example,"
        " those of decoding per token, as answers differ in length (methods of a job decode together"
        " and share each step's time by rows)."
    )
    if any(cell.best for cell in cells):
        notes.append(MARKS_NOTE)
    if any(not cell.complete for cell in cells):
        notes.append(
            f"{INCOMPLETE} some examples failed or are missing: the mean is over the others, and so not"
            " over the same examples as that of a method without this mark; paired differences are"
            " over the examples that both scored."
        )
    for beyond in dict.fromkeys(table.beyond for table in tables if table.beyond):
        count, longest, positions = beyond
        notes.append(
            f"{count} prompts are longer than the model's positions (up to {longest:,} tokens, "
            f"{positions:,} positions): their scores say nothing about a method."
        )
    whole: Counter[str] = Counter()
    for row in rows:
        whole[row.arm.label] += row.kept_whole
    whole = +whole
    if whole:
        named = ", ".join(f"{label} ({whole[label]})" for label in sorted(whole))
        notes.append(f"Prompts no longer than the capacity were kept whole: {named}.")
    notes += dict.fromkeys(
        f"{row.arm.label} holds {row.entries_mean:.0f} entries per layer and KV head where the budget"
        f" allows {row.capacity:.0f}: its preset {row.budget_preset} reproduces a released code's own"
        " split."
        for row in rows
        if row.budget_preset is not None
    )
    return notes


def _lacks_exact(table: ScoreTable) -> bool:
    """Whether scores of compressed caches stand alone; an error is against the exact cache anyway."""
    exact = any(row.arm.method == BASELINE for row in table.rows)
    return not exact and not table.lower_is_better


def score_text(cell: Cell, unit: str, *, interval: bool = True) -> str:
    """E.g. ``71.2 [65.0, 77.1] ≈``."""
    marks = (INCOMPLETE if not cell.complete else "") + (TIED if cell.tied else "")
    text = estimate_text(cell.score, unit) if interval else value_text(cell.score.value, unit)
    return f"{text} {marks}".rstrip()


def difference_text(difference: Estimate | None, unit: str) -> str:
    """E.g. ``−3.1 [−5.0, −1.2]``; nothing for the baseline itself."""
    return "" if difference is None else estimate_text(difference, unit, signed=True)


def estimate_text(estimate: Estimate, unit: str, *, signed: bool = False) -> str:
    """The value with its interval, or with a dash where it has none."""
    if math.isnan(estimate.value):
        return MISSING
    return f"{value_text(estimate.value, unit, signed=signed)} " + interval_text(
        estimate, unit, signed=signed
    )


def interval_text(
    estimate: Estimate, unit: str, *, signed: bool = False, shown: bool = False
) -> str:
    """E.g. ``[65.0, 77.1]``; ``[–]`` where there is none.

    Args:
        shown: the numbers are per cent already where their unit is a fraction.
    """
    if math.isnan(estimate.low):
        return f"[{MISSING}]"
    text = shown_text if shown else value_text
    return "[{}, {}]".format(
        *(text(bound, unit, signed=signed) for bound in (estimate.low, estimate.high))
    )


def average_first(columns: Sequence[str]) -> list[str]:
    """The columns of a table that may be wider than its window."""
    return sorted(columns, key=lambda column: column != AVERAGE)


def published_text(value: float) -> str:
    """A published number as it was printed, as far as a number can tell."""
    return MISSING if math.isnan(value) else f"{value:g}"


def shown_text(value: float, unit: str, *, signed: bool = False) -> str:
    """`value_text` of a number that is already per cent where its unit is a fraction."""
    return value_text(value / 100 if unit == "fraction" else value, unit, signed=signed)


def value_text(value: float, unit: str, *, signed: bool = False) -> str:
    """Fractions as per cent with one decimal, anything else with three significant digits."""
    if math.isnan(value):
        return MISSING
    text = f"{100 * value:.1f}" if unit == "fraction" else number(value)
    if float(text) == 0:
        text = text.lstrip("-")
    if signed and float(text) > 0:
        text = f"+{text}"
    return text.replace("-", "−")


def unit_text(unit: str) -> str:
    """What follows "score" in a header."""
    return ", %" if unit == "fraction" else f", {unit.replace('_', ' ')}"


def number(value: float) -> str:
    """Three significant digits, no exponent within reason."""
    if math.isnan(value):
        return MISSING
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e6:
        return f"{value:.2e}"
    digits = 2 - math.floor(math.log10(abs(float(f"{value:.3g}"))))
    return f"{value:.{max(0, digits)}f}"


def size(value: float) -> str:
    """Bytes in binary units."""
    if math.isnan(value):
        return MISSING
    for unit in ("B", "KiB", "MiB"):
        if abs(value) < 1024:
            return f"{number(value)} {unit}"
        value /= 1024
    return f"{number(value)} GiB"


def _counts(row: Row, *, once: bool = False) -> tuple[str, str]:
    """Scored of all, and what failed; `once`: every column is about the same examples."""
    once = once or AVERAGE in row.cells or len(row.cells) == 1
    cells = [row.total] if once else row.cells.values()
    scored, expected = sum(c.scored for c in cells), sum(c.expected for c in cells)
    failures: dict[str, int] = {}
    for cell in cells:
        for status, count in cell.failures.items():
            failures[status] = failures.get(status, 0) + count
    return f"{scored}/{expected}", failures_text(failures) or "0"
