"""Prints the tables of an experiment's folder and writes its page, from records alone: no torch.

The modules that read and draw results are imported where there are results, since importing them takes
as long as a small job.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from filelock import FileLock

from kvbench.errors import UserError, complain, printable
from kvbench.records.aside import aside_of, lines_of
from kvbench.records.log import write_log
from kvbench.records.read import disk_errors


def print_scores(folder: Path, runs: Collection[Path] = ()) -> None:
    """Print the tables of an experiment's folder as the page shows them; where run folders are given,
    those that have one of them. An experiment of several tasks has one table of methods by tasks for
    each model."""
    from kvbench.report.build import tables_to_print
    from kvbench.report.experiment import load_experiment
    from kvbench.report.render import terminal

    experiment = load_experiment(folder)
    if runs:
        hashes = {run.name.rpartition("-")[2] for run in runs}
        groups = [
            group
            for group in experiment.groups
            if hashes & {manifest["config_hash"] for manifest in group.manifests}
        ]
        experiment = replace(experiment, groups=tuple(groups))
    tables = tables_to_print(experiment)
    terminal([table for table in tables if table.kind == "overview"] or tables)
    for line in lines_of(aside_of(folder)):
        print(printable(f"left aside: {line}; to remove them: kvbench prune {folder}"))


def prune(folder: Path, *, sure: bool) -> int:
    """List the runs of an experiment that are left aside, and remove them if that is meant.

    Args:
        sure: whether to remove them without a question. It is asked where somebody can answer.

    Returns:
        The exit status.
    """
    if not folder.is_dir():
        raise UserError(f"prune has {str(folder)!r}; allowed: the folder of an experiment")
    runs = aside_of(folder)
    for run in runs:
        (line,) = lines_of([run]) or ["no records"]
        print(printable(f"{run.folder}: {line}"))
    if not runs:
        print(printable(f"nothing is left aside in {folder}"))
        return 0
    if not sure and sys.stdin.isatty():
        sure = input(f"remove these {len(runs)} folders? [y/N] ").strip().lower() in ("y", "yes")
    if not sure:
        complain("nothing was removed; to remove these folders: yes=true")
        return 0
    for run in runs:
        with disk_errors(run.folder):
            shutil.rmtree(run.folder)
    print(f"removed {len(runs)} folders")
    return 0


def write_page(folder: Path) -> list[str]:
    """Write an experiment's tables, figures and page from its records. A lock makes several processes
    take turns.

    Returns:
        The lines that name the page and say how to send W&B's runs.
    """
    from kvbench.report.build import build_report
    from kvbench.report.wandb import log_overview, not_sent

    begun = time.monotonic()
    with FileLock(folder / ".lock-report"):
        paths = build_report(folder)
    for warning in paths.warnings:
        complain(warning)
    log_overview(folder, paths)
    write_log(folder, seconds={"report": time.monotonic() - begun})
    lines = [f"page: {paths.page}"]
    runs = sorted((folder / "wandb").glob("offline-run-*"))
    if runs:
        waiting = len(not_sent(runs))
        state = f"{waiting} runs; to send them: wandb sync" if waiting else "all sent:"
        lines.append(f"W&B: {state} {json.dumps(str(folder / 'wandb'))}")
    return [printable(line) for line in lines]
