"""A dry run: a job's examples, tokens and memory; nothing is run or written."""

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
from kvbench.run.runner import Job

MIB = 2**20


def print_dry_run(job: Job, name: str = "") -> None:
    """Print what the job would run: examples, tokens, and of each method the memory and the folder.

    Args:
        name: of one of several jobs, which is then told in one line.

    Raises:
        KVError, TaskError, ModelError, StoreError: what the job itself would be refused for.
    """
    units, wanted = job.units.mine, job.units.mine_ids
    done = {label: recorded(run.folder) & wanted for label, run in job.runs.items()}
    todo = [u for u in units if any(not ids.issuperset(u.record_ids) for ids in done.values())]
    asked = [each for unit in units for each in unit.examples]
    examples = f"{len(units)} examples, {len(todo)} of them to run"
    if job.shard is not None:
        examples += f" (shard {job.shard} of {len(job.units.every)})"
    if len(wanted) != len(units):
        examples += f", {len(wanted)} answers per method"
    lengths = [each.n for each in asked] or [0]
    median = int(statistics.median(lengths))
    tokens = (
        f"{sum(lengths):,} prompt tokens (min {min(lengths)}, median {median}, max {max(lengths)}), "
        f"up to {sum(each.example.max_new_tokens for each in asked):,} new ones per method"
    )
    tokens = tokens if asked else "tokens as the task says"
    place, session = next(iter(job.runs.values())).folder.parent, job.session
    lines = [
        f"{session.spec.label} x {job.task}: dry run, nothing written",
        f"  {examples}",
        f"  {tokens}",
        f"  compressed after the {session.compress_after}, on {session.device}, "
        f"{str(session.dtype).removeprefix('torch.')}",
        f"  results in {place}",
        *(f"  warning: {line}" for line in job.warnings),
    ]
    if name:
        lines = [f"{name}: {len(job.runs)} methods, {examples}; {tokens}; {place}"]
    out = Console(width=None if sys.stdout.isatty() else 140)
    for line in lines:
        out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    if name:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "capacity", "cache", "exact cache", "on disk", "run"):
        table.add_column(column, justify="left" if column in ("method", "run") else "right")
    shape = cache_shape(session.spec, session.dtype)
    for label, (method, budget) in job.methods.items():
        memory = ["-", "-", "-"]
        if asked:
            capacity = budget.capacity(median) if method.saves_memory else median
            memory = [str(capacity), "unknown", "unknown"]
            if shape is not None:
                exact = shape.bytes(median, median)
                held = shape.bytes(median, capacity, method.quantization())
                memory[1] = f"{held / MIB:.3f} MiB ({held / exact:.0%})"
                memory[2] = f"{exact / MIB:.3f} MiB"
        there = f"{len(done[label])}/{len(wanted)}"
        table.add_row(escape(label), *memory, there, job.runs[label].folder.name)
    out.print(table)
    if asked:
        note = "capacity and bytes are those of the median prompt, without weights and scores"
        out.print(f"  {note}", style="dim", highlight=False)
