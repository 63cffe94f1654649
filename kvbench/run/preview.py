"""What a job would do and what it would take: for ``dry_run=true``, which writes nothing, and for
``confirm=true``, which asks on a terminal."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.estimate import CacheShape, cache_shape
from kvbench.errors import presentable, printable
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.records.read import StoreError, load_run, read_records
from kvbench.run.encoding import Asked, examples_of
from kvbench.run.estimate import estimate, prompt_tokens
from kvbench.run.plan import Unit, beyond_positions, contexts_of
from kvbench.run.runner import Job


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
    todo = _without_records(units, done)
    lengths = [n for n in map(prompt_tokens, units) if n is not None]
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
        "time": str(estimate(job, todo, any_model=False)),
        "results": str(next(iter(folders.values())).parent),
    }
    beyond = beyond_positions(units, job.session)
    if beyond is not None:
        lines["warning"] = beyond
    out.print(
        f"[bold]{escape(printable(f'{job.spec.label} x {job.task}'))}[/bold]: dry run, nothing written"
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


def go_on(job: Job, *, ask: bool = True) -> bool:
    """Print examples, tokens and time of what is still to run; False if the user would rather not.

    Args:
        ask: whether to wait for an answer, which is done on a terminal only, and never under CI.

    Raises:
        KVError, TaskError, ModelError: what the job itself would be refused for.
    """
    todo = units_to_run(job)
    title = presentable(f"{job.spec.label} x {job.task}")
    if not todo:
        print(f"{title}: everything is on disk", flush=True)
        return True
    asked = [unit.payload for unit in todo if isinstance(unit.payload, Asked)]
    tokens, most = sum(each.n for each in asked), sum(each.new_tokens for each in asked)
    print(
        f"{title}: {len(todo)} examples to run with {len(job.methods)} methods on "
        f"{job.session.device}; {tokens:,} prompt tokens, up to {most:,} new ones per method",
        flush=True,
    )
    print(f"{title}: time {estimate(job, todo, any_model=True)}", flush=True)
    terminal = sys.stdin.isatty() and sys.stdout.isatty() and not os.environ.get("CI")
    if not ask or not terminal:
        return True
    return input("Go on? [Y/n] ").strip().lower() in ("", "y", "yes")


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
    return _without_records(units, {m: _done(job.folder(m), units) for m in job.methods})


def _without_records(units: Sequence[Unit], done: Mapping[str, set[str]]) -> list[Unit]:
    return [unit for unit in units if any(not d.issuperset(unit.record_ids) for d in done.values())]


def _done(folder: Path, units: Sequence[Unit]) -> set[str]:
    """Records of these units that are on disk already."""
    try:
        found = set(load_run(folder).records["example_id"])
    except (StoreError, OSError):
        return set()
    return found & {record_id for unit in units for record_id in unit.record_ids}


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


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
