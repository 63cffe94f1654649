"""``dry_run=true``: what a job would do, and what it would take. Writes nothing."""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.estimate import CacheShape, cache_shape, is_cheap
from kvbench.engine.limits import in_main_thread, time_limit
from kvbench.errors import complain, one_line, printable
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.records.read import StoreError, load_run, read_records
from kvbench.run.encoding import Asked, examples_of
from kvbench.run.plan import Unit, beyond_positions, contexts_of
from kvbench.run.runner import Job

LONGEST_TRIAL = 10.0
"""Seconds that trying an example with a short answer may take."""


@dataclass(frozen=True)
class Estimate:
    """Seconds a job would take, and how that was found."""

    seconds: float | None
    how: str

    def __str__(self) -> str:
        return self.how if self.seconds is None else f"about {duration(self.seconds)} ({self.how})"


def print_dry_run(job: Job, console: Console | None = None) -> None:
    """Print jobs, examples, tokens, methods, memory, time and where results would go.

    Raises:
        KVError, TaskError, ModelError: what the job itself would be refused for.
    """
    out = console or Console(width=None if sys.stdout.isatty() else 140)
    every, units = job.units()
    folders = {label: job.folder(label) for label in job.methods}
    done = {label: _done(folder, units) for label, folder in folders.items()}
    wanted = sum(len(unit.record_ids) for unit in units)
    todo = [unit for unit in units if any(not set(unit.record_ids) <= d for d in done.values())]
    lengths = [n for n in map(_prompt_tokens, units) if n is not None]
    new = [each.example.max_new_tokens for u in units for each in examples_of(u.payload)]
    shape = cache_shape(job.spec, job.session.dtype)
    lines = {
        "examples": f"{len(units)}, of which {len(todo)} still to run"
        + ("" if job.shard is None else f" (shard {job.shard} of {len(every)})")
        + _shared(units, wanted),
        "prompt tokens": _spread(lengths),
        "new tokens": f"up to {max(new)} each" if new else "as the task says",
        "compress after": job.session.compress_after,
        "runs on": f"{job.session.device}, {str(job.session.dtype).removeprefix('torch.')}",
        "time": str(estimate(job, todo)),
        "results": str(next(iter(folders.values())).parent),
    }
    beyond = beyond_positions(units, job.session)
    if beyond is not None:
        lines["warning"] = beyond
    out.print(
        f"[bold]{escape(printable(f'{job.spec.name} x {job.task}'))}[/bold]: dry run, nothing written"
    )
    for name, text in lines.items():
        out.print(f"  {name:15} {printable(text)}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("method", style="bold", no_wrap=True)
    for column in ("capacity", "cache", "exact cache", "records on disk", "run"):
        table.add_column(column, justify="left" if column == "run" else "right")
    for label, (method, budget) in job.methods.items():
        capacity, held, exact = _memory(method, budget, lengths, shape)
        table.add_row(
            escape(label),
            capacity,
            held,
            exact,
            f"{len(done[label])}/{wanted}",
            folders[label].name,
        )
    out.print(table)
    if lengths:
        out.print(
            "  capacity (entries per layer and KV head) and bytes are those of the median prompt; "
            "a method's\n  weights and scores, and keys repeated to query heads, come on top.",
            style="dim",
            highlight=False,
        )


def print_briefly(job: Job, title: str, planned: set[str]) -> None:
    """Print one line: a job of many, how many records it has on disk, and where.

    Making its units takes longer than all else, so that of jobs which differ in nothing but their seed
    only the first makes them, to find what it would be refused for.

    Args:
        planned: jobs that made them, and takes this one.

    Raises:
        KVError, TaskError, ModelError: what the job itself would be refused for.
    """
    identities = {label: job.identity(label) for label in job.methods}
    alike = repr((_seedless(identities), job.limit, job.shard))
    if alike not in planned:
        job.units()
        planned.add(alike)
    folders = [job.folder(label) for label in job.methods]
    found = sum(len(read_records(folder)) for folder in folders if folder.is_dir())
    print(
        f"{title}: {len(folders)} methods, {found} records on disk; "
        f"{folders[0].parent.relative_to(job.results_dir)}",
        flush=True,
    )


def _seedless(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _seedless(inner) for key, inner in value.items() if key != "seed"}
    return value


def units_to_run(job: Job) -> list[Unit]:
    """The job's units of which some method has no record yet."""
    _, units = job.units()
    done = [_done(job.folder(label), units) for label in job.methods]
    return [unit for unit in units if any(not set(unit.record_ids) <= d for d in done)]


def _done(folder: Path, units: Sequence[Unit]) -> set[str]:
    """Records of these units that are on disk already."""
    try:
        found = set(load_run(folder).records["example_id"])
    except (StoreError, OSError):
        return set()
    return found & {record_id for unit in units for record_id in unit.record_ids}


def _prompt_tokens(unit: Unit) -> int | None:
    """Prompt tokens of a unit, None where its plan does not tell."""
    if isinstance(unit.payload, tuple) and unit.payload and isinstance(unit.payload[0], int):
        return unit.payload[0]  # the throughput probe's (tokens, setting, run)
    n = getattr(unit.payload, "n", None)
    return n if isinstance(n, int) else None


def _shared(units: Sequence[Unit], records: int) -> str:
    """How many records a benchmark's units end in, where that is not one each."""
    asked = [unit.payload for unit in units if isinstance(unit.payload, Asked)]
    if len(asked) == records or not asked:
        return ""
    return f"; {records} answers per method, of {len(contexts_of(units))} contexts"


def _spread(lengths: Sequence[int]) -> str:
    if not lengths:
        return "as the task says"
    median = int(statistics.median(lengths))
    return f"min {min(lengths)}, median {median}, max {max(lengths)}"


def _memory(
    method: object, budget: Budget, lengths: Sequence[int], shape: CacheShape | None
) -> tuple[str, str, str]:
    """Capacity and bytes, compressed and exact, of the median prompt."""
    if not lengths or not isinstance(method, Method):
        return "-", "-", "-"
    n = int(statistics.median(lengths))
    capacity = budget.capacity(n) if method.saves_memory else n
    if shape is None:
        return str(capacity), "unknown", "unknown"
    exact, held = shape.bytes(n, n), shape.bytes(n, capacity, method.quantization())
    return str(capacity), f"{size(held)} ({held / exact:.0%})", size(exact)


def estimate(job: Job, todo: Sequence[Unit]) -> Estimate:
    """Run the shortest unit, keep nothing, and scale by prompt tokens.

    Only where that is cheap: a small model that is on this machine and answers quickly.
    """
    if not todo:
        return Estimate(0.0, "everything is on disk")
    if not is_cheap(job.spec):
        return Estimate(None, "unknown (measured only for small models on this machine)")
    lengths = [_prompt_tokens(unit) for unit in todo]
    known = [n for n in lengths if n is not None]
    shortest = todo[lengths.index(min(known))] if known else todo[0]
    try:
        # loads the model and warms it up
        if _seconds(job, few_tokens(shortest), LONGEST_TRIAL) > LONGEST_TRIAL:
            return Estimate(None, f"unknown (example {shortest.id} takes too long to try)")
        seconds = _seconds(job, shortest)
    except Exception as failure:  # noqa: BLE001 - a dry run says what it can
        return Estimate(None, f"unknown (example {shortest.id} fails: {one_line(failure)})")
    scale = sum(known) / min(known) if known else len(todo)
    return Estimate(seconds * scale, f"{shortest.id}, the shortest, took {duration(seconds)}")


def _seconds(job: Job, unit: Unit, patience: float = math.inf) -> float:
    """How long a unit takes; soon after `patience` seconds it is given up."""
    start = time.perf_counter()
    limit = patience if math.isfinite(patience) and in_main_thread() else None
    try:
        with time_limit(limit, lambda: complain(f"example {unit.id} takes too long to try")):
            for _ in job.plan.run(unit, job.methods, job.session):
                if time.perf_counter() - start > patience:
                    break
    except TimeoutError:
        pass
    return time.perf_counter() - start


def few_tokens(unit: Unit) -> Unit:
    """The same unit, with a short answer."""
    if not isinstance(unit.payload, Asked):
        return unit
    examples = tuple(
        replace(each, example=replace(each.example, max_new_tokens=4))
        for each in unit.payload.examples
    )
    return replace(unit, payload=replace(unit.payload, examples=examples))


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
