"""A dry run: a job's examples, tokens and memory; nothing is run or written."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.estimate import CacheShape, cache_shape
from kvbench.errors import printable
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.records.read import StoreError, load_run
from kvbench.run.encoding import examples_of
from kvbench.run.plan import Unit, beyond_positions
from kvbench.run.runner import Job


def print_dry_run(job: Job, console: Console | None = None, name: str = "") -> None:
    """Print what the job would run: examples, tokens, and of each method the memory and the folder.

    Args:
        name: of one of many jobs, which is then told in one line.

    Raises:
        KVError, TaskError, ModelError: what the job itself would be refused for.
    """
    every, units = job.units.every, job.units.mine
    folders = {label: run.folder for label, run in job.runs.items()}
    done = {label: _done(folder, units) for label, folder in folders.items()}
    todo = [u for u in units if any(not ids.issuperset(u.record_ids) for ids in done.values())]
    wanted = sum(len(unit.record_ids) for unit in units)
    lengths = [n for n in map(prompt_tokens, units) if n is not None]
    most = sum(each.example.max_new_tokens for u in units for each in examples_of(u.payload))
    examples = f"{len(units)} examples, {len(todo)} of them to run"
    if job.shard is not None:
        examples += f" (shard {job.shard} of {len(every)})"
    if wanted != len(units):
        examples += f", {wanted} answers per method"
    tokens = "prompt tokens as the task says"
    if lengths:
        tokens = (
            f"{sum(lengths):,} prompt tokens (min {min(lengths)}, median "
            f"{int(statistics.median(lengths))}, max {max(lengths)})"
        )
    if most:
        tokens += f", up to {most:,} new ones per method"
    place = next(iter(folders.values())).parent
    out = console or Console(width=None if sys.stdout.isatty() else 140)
    if name:
        line = f"{name}: {len(folders)} methods, {examples}; {tokens}; {place}"
        out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        return
    lines = [
        f"{job.spec.label} x {job.task}: dry run, nothing written",
        f"  {examples}",
        f"  {tokens}",
        f"  compressed after the {job.session.compress_after}, on {job.session.device}, "
        f"{str(job.session.dtype).removeprefix('torch.')}",
        f"  results in {place}",
    ]
    beyond = beyond_positions(units, job.session)
    if beyond is not None:
        lines.append(f"  warning: {beyond}")
    for line in lines:
        out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "capacity", "cache", "exact cache", "on disk", "run"):
        table.add_column(column, justify="left" if column in ("method", "run") else "right")
    shape = cache_shape(job.spec, job.session.dtype)
    for label, (method, budget) in job.methods.items():
        memory = _memory(method, budget, lengths, shape)
        table.add_row(escape(label), *memory, f"{len(done[label])}/{wanted}", folders[label].name)
    out.print(table)
    if lengths:
        note = "capacity and bytes are those of the median prompt, without weights and scores"
        out.print(f"  {note}", style="dim", highlight=False)


def prompt_tokens(unit: Unit) -> int | None:
    """Prompt tokens of a unit, None where its plan does not tell."""
    if isinstance(unit.payload, tuple) and unit.payload and isinstance(unit.payload[0], int):
        return unit.payload[0]  # the throughput probe's (tokens, setting, run)
    n = getattr(unit.payload, "n", None)
    return n if isinstance(n, int) else None


def _done(folder: Path, units: Sequence[Unit]) -> set[str]:
    """Records of these units that are on disk already."""
    try:
        found = set(load_run(folder).records["example_id"])
    except (StoreError, OSError):
        return set()
    return found & {record_id for unit in units for record_id in unit.record_ids}


def _memory(
    method: Method, budget: Budget, lengths: Sequence[int], shape: CacheShape | None
) -> tuple[str, str, str]:
    """Capacity (entries per layer and KV head) and bytes, compressed and exact, of the median prompt."""
    if not lengths or not isinstance(method, Method):  # rows that a task brings are no methods
        return "-", "-", "-"
    n = int(statistics.median(lengths))
    capacity = budget.capacity(n) if method.saves_memory else n
    if shape is None:
        return str(capacity), "unknown", "unknown"
    exact, held = shape.bytes(n, n), shape.bytes(n, capacity, method.quantization())
    return str(capacity), f"{_size(held)} ({held / exact:.0%})", _size(exact)


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
