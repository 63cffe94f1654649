"""Dry runs: print a job's examples, tokens and memory, without running or writing anything."""

from __future__ import annotations

import statistics
import sys

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.estimate import cache_shape
from kvbench.errors import printable
from kvbench.records.read import recorded
from kvbench.run.runner import Job, record_ids

MIB = 2**20


def print_dry_run(job: Job, name: str = "") -> None:
    """Print how many examples and tokens the job would run, and the memory and folder of each method.

    Args:
        name: the name of the job where there are several; it is then described in one line.
    """
    examples = _examples_line(job)
    tokens = _tokens_line(job)
    folder = next(iter(job.folders.values())).parent
    session = job.session
    if name:
        lines = [f"{name}: {len(job.methods)} methods, {examples}; {tokens}; {folder}"]
    else:
        lines = [
            f"{session.spec.label} x {job.task}: dry run, nothing written",
            f"  {examples}",
            f"  {tokens}",
            f"  compressed after the {session.compress_after}, on {session.device}, "
            f"{str(session.dtype).removeprefix('torch.')}",
            f"  results in {folder}",
        ]
        lines += [f"  warning: {warning}" for warning in job.warnings]
    out = Console(width=None if sys.stdout.isatty() else 140)
    for line in lines:
        out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    if name:
        return
    out.print(_table_of_methods(job))
    if _prompt_lengths(job):
        note = "capacity and bytes are those of the median prompt, without weights and scores"
        out.print(f"  {note}", style="dim", highlight=False)


def _prompt_lengths(job: Job) -> list[int]:
    """The number of tokens of each example's prompt; none for a probe, which has no examples."""
    return [encoded.n for unit in job.units for encoded in unit.examples]


def _ids_on_disk(job: Job) -> dict[str, set[str]]:
    """By label, the example ids of this job that have a record of the method on disk."""
    return {
        label: recorded(folder) & record_ids(job.units) for label, folder in job.folders.items()
    }


def _examples_line(job: Job) -> str:
    """How many examples the job has, and how many of them lack records."""
    units = job.units
    on_disk = _ids_on_disk(job)
    incomplete = [
        unit
        for unit in units
        if any(not ids.issuperset(unit.record_ids) for ids in on_disk.values())
    ]
    line = f"{len(units)} examples, {len(incomplete)} of them to run"
    if job.shard is not None:
        line += f" (shard {job.shard} of {len(job.within_limit)})"
    answers = len(record_ids(job.units))
    if answers != len(units):
        line += f", {answers} answers per method"
    return line


def _tokens_line(job: Job) -> str:
    """How many prompt tokens the job reads, and how many tokens it generates at most."""
    lengths = _prompt_lengths(job)
    if not lengths:
        return "tokens as the task says"
    new_tokens = sum(
        encoded.example.max_new_tokens for unit in job.units for encoded in unit.examples
    )
    return (
        f"{sum(lengths):,} prompt tokens (min {min(lengths)}, median "
        f"{int(statistics.median(lengths))}, max {max(lengths)}), up to {new_tokens:,} new ones per "
        "method"
    )


def _table_of_methods(job: Job) -> Table:
    """A table with a row for each method: its capacity and bytes at the median prompt, its records on
    disk, and its folder."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "capacity", "cache", "exact cache", "on disk", "run"):
        table.add_column(column, justify="left" if column in ("method", "run") else "right")
    lengths = _prompt_lengths(job)
    shape = cache_shape(job.session.spec, job.session.dtype)
    on_disk = _ids_on_disk(job)
    for label, (method, budget) in job.methods.items():
        memory = ["-", "-", "-"]
        if lengths:
            median = int(statistics.median(lengths))
            capacity = budget.capacity(median) if method.saves_memory else median
            memory = [str(capacity), "unknown", "unknown"]
            if shape is not None:
                exact_bytes = shape.bytes(median, median)
                cache_bytes = shape.bytes(median, capacity, method.quantization())
                memory[1] = f"{cache_bytes / MIB:.3f} MiB ({cache_bytes / exact_bytes:.0%})"
                memory[2] = f"{exact_bytes / MIB:.3f} MiB"
        records = f"{len(on_disk[label])}/{len(record_ids(job.units))}"
        table.add_row(escape(label), *memory, records, job.folders[label].name)
    return table
