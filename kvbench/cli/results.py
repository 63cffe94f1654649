"""Prints the tables of an experiment's folder and writes its page, from records alone: no torch.

The modules that read and draw results are imported where there are results, since importing them takes
as long as a small job.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from kvbench.errors import UserError, complain, printable
from kvbench.records.aside import aside_of, lines_of
from kvbench.records.log import write_log
from kvbench.records.schema import disk_errors
from kvbench.records.store import replace_file, safe_name

if TYPE_CHECKING:
    from kvbench.report.runs import Experiment

MOST_FAILURES = 10
"""The lines about failures that the terminal shows."""


def print_scores(folder: Path, runs: Collection[Path] = ()) -> None:
    """Print the tables of an experiment's folder as the page shows them; where run folders are given,
    those that have one of them. An experiment of several tasks has one table of methods by tasks for
    each model."""
    from kvbench.report.remarks import remarks
    from kvbench.report.runs import load_experiment

    experiment = load_experiment(folder)
    if runs:
        hashes = {run.name.rpartition("-")[2] for run in runs}
        groups = [
            group
            for group in experiment.groups
            if hashes & {manifest["config_hash"] for manifest in group.manifests}
        ]
        experiment = replace(experiment, groups=tuple(groups))
    _print_tables(experiment)
    failures = list(_failures(experiment))
    for line in failures[:MOST_FAILURES]:
        print(printable(f"failed: {line}"))
    if len(failures) > MOST_FAILURES:
        print(f"failed: and {len(failures) - MOST_FAILURES} more, which the page has")
    if failures:
        print("to run again what failed: retry_failed=true")
    for line in remarks(experiment):
        print(printable(f"note: {line}"))
    for line in lines_of(aside_of(folder)):
        print(printable(f"left aside: {line}; to remove them: kvbench prune {folder}"))


def _failures(experiment: Experiment) -> Iterator[str]:
    """For each model and task why examples failed: the first error of each method and how many it has,
    the methods of one error together."""
    for group in experiment.groups:
        failed = group.records[group.records["status"] != "ok"]
        methods: dict[str, list[str]] = {}
        for label, records in failed.groupby("variant", sort=False):
            methods.setdefault(str(records["error"].iloc[0]), []).append(
                f"{label} ({len(records)})"
            )
        for error, labels in methods.items():
            yield f"{group.model} on {group.task}: {', '.join(labels)}: {error}"


def _print_tables(experiment: Experiment) -> None:
    from kvbench.report.build import tables_to_print
    from kvbench.report.render import terminal

    tables = tables_to_print(experiment)
    terminal([table for table in tables if table.kind == "overview"] or tables)


def score_by(folder: Path, metric: str) -> None:
    """Score the stored answers of an experiment by another metric, print their tables, and write the
    scores to ``<folder>/scores/<metric>.csv``. Records stay as they are; no model is loaded.

    Raises:
        UserError: an unknown metric, no answers, or answers that ended before their own end, as soon as
            the score of their own task was settled.
    """
    import pandas as pd

    from kvbench.report.runs import group_runs, load_experiment
    from kvbench.tasks.metrics import scorer

    score = scorer(metric)
    experiment = load_experiment(folder)
    runs, rows = [], []
    for run in experiment.runs:
        answered = run.records["status"].eq("ok") & run.records["prediction"].notna()
        records = run.records[answered].reset_index(drop=True)
        records = records.drop(columns="first_token_score", errors="ignore")  # by the other metric
        cut = int(records["ended_early"].astype(object).eq(True).sum())
        unknown = int(records["ended_early"].isna().sum())
        if cut or unknown:
            why = "ended as soon as the score of their task was settled"
            if not cut:
                why = "are of a kvbench that did not note whether they ended early"
            raise UserError(
                f"{cut or unknown} of {len(records)} answers in {run.folder} {why}, so that another "
                "metric would see half an answer; allowed: answers that ended by themselves (give the "
                "task this metric, task.metric=..., and run it again)"
            )
        records["score"] = [
            float(score(prediction, [str(answer) for answer in answers or ()]))
            for prediction, answers in zip(records["prediction"], records["answers"], strict=True)
        ]
        meta = {**(run.manifest.get("task_meta") or {}), "metric": metric}
        meta |= {"measures": [], "score_unit": "fraction", "lower_is_better": False}
        runs.append(replace(run, records=records, manifest={**run.manifest, "task_meta": meta}))
        rows.append(
            records[["model", "task", "method", "config_hash", "seed", "example_id", "score"]]
        )
    if not any(map(len, rows)):
        raise UserError(
            f"no answers are stored in {folder}; allowed: an experiment that asks for some"
        )
    _print_tables(replace(experiment, groups=tuple(group_runs(runs))))
    path = folder / "scores" / f"{safe_name(metric)}.csv"
    with disk_errors(path):
        path.parent.mkdir(exist_ok=True)
        replace_file(path, pd.concat(rows).to_csv(index=False).encode())
    print(printable(f"scores: {path}"))


def prune(folder: Path, *, sure: bool) -> None:
    """List the runs of an experiment that are left aside, and remove them if that is meant.

    Args:
        sure: whether to remove them without a question. It is asked where somebody can answer.
    """
    if not folder.is_dir():
        raise UserError(f"prune has {str(folder)!r}; allowed: the folder of an experiment")
    runs = aside_of(folder)
    for run in runs:
        (line,) = lines_of([run]) or ["no records"]
        print(printable(f"{run.folder}: {line}"))
    if not runs:
        print(printable(f"nothing is left aside in {folder}"))
        return
    if not sure and sys.stdin.isatty():
        sure = input(f"remove these {len(runs)} folders? [y/N] ").strip().lower() in ("y", "yes")
    if not sure:
        complain("nothing was removed; to remove these folders: yes=true")
        return
    for run in runs:
        with disk_errors(run.folder):
            shutil.rmtree(run.folder)
    print(f"removed {len(runs)} folders")


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
