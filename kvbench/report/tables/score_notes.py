"""What the marks and columns of score tables mean: notes on what is there, and on nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvbench.report.experiment import BASELINE
from kvbench.report.table import INCOMPLETE, INTERVAL, TIED, Note
from kvbench.report.tables.scores import COSTS, ScoreTable

INTERVAL_NOTE = Note(
    f"{INTERVAL} is a 95 % interval over examples as a sample of all such examples: Wilson's for shares,"
    " Student's t for other scores and differences; one example has none.",
    INTERVAL,
)
BEST_NOTE = "Bold: the best compressed method of the column at its rate"
WORSE_NOTE = (
    "; those without a mark are shown worse, by a paired test over the examples that both scored,"
    " adjusted for all pairs at that rate and column (of tables of equal methods, one in twenty shows"
    " any as worse)"
)
TIED_NOTE = (
    f"{TIED}: not shown to differ from the best, by the paired test over the examples of both."
)
NO_BASELINE_NOTE = (
    "The exact cache was not run, so nothing is compared with it: add exact to the methods for the"
    " column of differences."
)


def notes_of(tables: Sequence[ScoreTable]) -> list[str]:
    """What the marks in these tables mean, and what to keep in mind when reading them."""
    rows = [row for table in tables for row in table.rows]
    cells = [cell for row in rows for cell in row.cells.values()]
    notes: list[str] = [INTERVAL_NOTE]
    baselines: dict[str, list[str]] = {}
    for table in tables:
        if table.baseline:
            baselines.setdefault(table.baseline, []).append(table.task)
    if any(_lacks_exact(table) for table in tables):
        notes.append(NO_BASELINE_NOTE)
    for baseline, tasks in baselines.items():
        where = f" on {', '.join(dict.fromkeys(tasks))}" if len(baselines) > 1 else ""
        text = f"Δ is the paired difference to {baseline}{where}, over examples that both scored."
        notes.append(Note(text, "difference"))
    notes.append(Note("ratio is measured: bytes held / bytes of the exact cache.", "ratio"))
    notes.append(
        Note(
            "Seconds are medians per example, those of decoding per token, as answers differ in length"
            " (methods of a job decode together and share each step's time by rows).",
            *(m.key for m in COSTS if m.heading and m.key.endswith(("_s", "_token"))),
        )
    )
    if any(cell.best for cell in cells):
        notes.append(BEST_NOTE + WORSE_NOTE * any(cell.worse for cell in cells) + ".")
    if any(cell.tied for cell in cells):
        notes.append(TIED_NOTE)
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
        whole[row.variant.label] += row.uncompressed
    whole = +whole
    if whole:
        named = ", ".join(f"{label} ({whole[label]})" for label in sorted(whole))
        notes.append(f"Prompts no longer than the capacity stay uncompressed: {named}.")
    notes += dict.fromkeys(
        f"{row.variant.label} holds {row.costs['entries_mean']:.0f} entries per layer and KV head where"
        f" the budget allows {row.capacity:.0f}: its preset {row.budget_preset} reproduces a"
        " released code's own split."
        for row in rows
        if row.budget_preset is not None
    )
    return notes


def _lacks_exact(table: ScoreTable) -> bool:
    """Whether scores of compressed caches stand alone; an error is against the exact cache anyway."""
    exact = any(row.variant.method == BASELINE for row in table.rows)
    return table.ranked and not exact and not table.lower_is_better
