"""Dry runs: print a job's examples, tokens and memory, without running or writing anything."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from contextlib import suppress

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbench.engine.architecture import cache_bytes
from kvbench.engine.model import ModelError, load_config
from kvbench.errors import printable
from kvbench.records.aside import lines_of
from kvbench.records.store import run_folder
from kvbench.run.job import Job, record_ids

MIB = 2**20
PROTOCOLS = {
    "all_but_last": "compressed after all of the prompt but its last token (all_but_last)",
    "context": "compressed after the context (context)",
    "prompt": "compressed after the prompt, whose first new token is the exact cache's (prompt)",
}


def print_dry_run(job: Job, name: str = "") -> None:
    """Print how many examples and tokens the job would run, and the memory and folder of each method.

    Args:
        name: the name of the job where there are several; it is then described in one line.
    """
    is_here = not job.is_about_the_model or job.session.weights_are_here()
    on_disk = job.done_on_disk() if is_here else {}
    examples = f"{len(job.items)} examples, {len(job.work_left(on_disk))} of them to run"
    if job.shard is not None:
        examples += f" (shard {job.shard} of {len(job.within_limit)})"
    answers = len(record_ids(job.items))
    if answers != len(job.items):
        examples += f", {answers} answers per method"
    prompts = [encoded for item in job.items for encoded in item.examples]  # none of a probe
    lengths = [encoded.n for encoded in prompts]
    compressed = [encoded.n - encoded.held_back(job.session.compress_after) for encoded in prompts]
    tokens = "tokens as the task says"
    if lengths:
        new_tokens = sum(encoded.example.max_new_tokens for encoded in prompts)
        tokens = (
            f"{sum(lengths):,} prompt tokens (min {min(lengths)}, median "
            f"{int(statistics.median(lengths))}, max "
            f"{max(lengths)}), up to {new_tokens:,} new ones per method"
        )
    session = job.session
    folder = run_folder(
        job.results_dir, job.experiment, session.spec.label, job.task, "-", ""
    ).parent
    if name:
        lines = [f"{name}: {len(job.methods)} methods, {examples}; {tokens}; {folder}"]
    else:
        lines = [
            f"{session.spec.label} x {job.task}: dry run, nothing written",
            f"  {examples}",
            f"  {tokens}",
            f"  {PROTOCOLS[session.compress_after]}, on {session.device}, "
            f"{str(session.dtype).removeprefix('torch.')}",
            f"  results in {folder}",
        ]
        warnings = [*job.warnings, *(job.warnings_of_code if is_here else ())]
        lines += [f"  warning: {warning}" for warning in warnings]
    if is_here:
        lines += [f"  left aside: {line}" for line in lines_of(job.aside)]
    else:
        lines += ["  the weights are not on this machine: what they have on disk is not known"]
    out = Console(width=None if sys.stdout.isatty() else 140)
    for line in lines:
        out.print(printable(line), highlight=False, markup=False, soft_wrap=True)
    if name:
        return
    median = int(statistics.median(compressed)) if compressed else None
    out.print(_table_of_methods(job, median, on_disk))
    if lengths:
        note = (
            "capacity and bytes are those after compression of the median prompt, without weights and "
            "scores"
        )
        out.print(f"  {note}", style="dim", highlight=False)


def _table_of_methods(job: Job, tokens: int | None, on_disk: Mapping[str, set[str]]) -> Table:
    """A row for each method: its capacity and bytes where so many tokens are compressed, its records on
    disk, and its folder."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("method", "capacity", "cache", "exact cache", "on disk", "run"):
        table.add_column(column, justify="left" if column in ("method", "run") else "right")
    config = None
    with suppress(ModelError):  # of a session that was given its model
        config = load_config(job.session.spec).get_text_config()
    for label, (method, budget) in job.methods.items():
        memory = ["-", "-", "-"]
        if tokens is not None:
            capacity = budget.capacity(tokens) if method.saves_memory else tokens
            memory[0] = str(capacity)
        if tokens is not None and config is not None:
            exact = cache_bytes(config, job.session.dtype, tokens, tokens)
            held = cache_bytes(config, job.session.dtype, tokens, capacity, method.quantization())
            memory[1:] = f"{held / MIB:.3f} MiB ({held / exact:.0%})", f"{exact / MIB:.3f} MiB"
        records, name = "-", "-"
        if label in on_disk:
            records = f"{len(on_disk[label])}/{len(record_ids(job.items))}"
            name = job.folders[label].name
        table.add_row(escape(label), *memory, records, name)
    return table
