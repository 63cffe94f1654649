"""A copy of an experiment in Weights & Biases; local files never depend on it.

One W&B run per run folder, one per (model, task) that sets the methods side by side, and one of the
whole experiment (`kvbench.report.wandb.overview`). Their ids are made from what they are about, so
that logging again replaces what was logged. Runs are written
offline, into ``<results>/<experiment>/wandb``, and then sent if that is wanted; ``wandb sync <that
folder>`` sends what is left at any time.
"""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock

from kvbench.errors import first_line
from kvbench.records.durable import make_folder, read_file, remove, replace
from kvbench.records.read import MANIFEST, Run, StoreError, load_run
from kvbench.report.experiment import BASELINE, Group, group_runs
from kvbench.report.objective import scalars_of, without_nan
from kvbench.report.tables.scores import ScoreTable, VariantScores, score_table
from kvbench.report.tables.timings import timings_of
from kvbench.report.wandb.media import cap_note, comparison_media, curves, field_tables, run_media
from kvbench.report.wandb.runs import (
    clipped_tags,
    config_of,
    failure_warned,
    id_of,
    log_curve,
    notes_of,
    offline_run,
    rate_text,
    records_artifact,
    silent_logging,
    tags_of,
)
from kvbench.report.wandb.send import NotSent, check_logger, not_taken, send

log = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]
COMPARISON = "comparison"
"""Job type and tag of the W&B runs that set methods side by side."""


def log_runs(
    runs: Sequence[Run],
    *,
    project: str = "kvbench",
    entity: str | None = None,
    mode: Mode = "auto",
    timeout_s: float = 120.0,
) -> int:
    """Log runs to W&B, one W&B run each, and one for every (model, task) that has several variants.

    All of it is written to disk before anything is sent. Whatever goes wrong is a warning of one
    line and nothing else; a server that fails is not asked again by this process.

    Args:
        runs: as `kvbench.records.read.load_runs` gives them. Those beside them on disk (same experiment,
            model and task) serve for differences and for the comparison.
        mode: "auto" is online when WANDB_API_KEY is set (and WANDB_MODE does not say otherwise),
            else offline.
        timeout_s: seconds that sending may take.

    Returns:
        How many runs were logged.

    Raises:
        ValueError: an unknown mode, or a timeout that is not positive.
    """
    check_logger(mode, timeout_s)
    mode = resolved(mode)
    if mode == "disabled":
        return 0
    tasks: dict[Path, list[Path]] = {}
    for run in runs:
        if not run.records.empty:
            tasks.setdefault(run.folder.parent, []).append(run.folder)
    found = [_log_task(task, folders, project, entity) for task, folders in tasks.items()]
    written = [folder for both in found for folders in both for folder in folders]
    if mode == "online" and written:
        send_written(written, timeout_s)
    return sum(len(logged) for logged, _ in found)


def run_id(manifest: Mapping[str, Any]) -> str:
    """The same for the same experiment, model, task, method and config hash."""
    return id_of(manifest, ("experiment", "model", "task", "method", "config_hash"))


def comparison_id(experiment: str, group: Group) -> str:
    """The same for the same experiment, model and task."""
    names = {"experiment": experiment, "model": group.model, "task": group.task}
    return id_of(names | {"method": COMPARISON}, ("experiment", "model", "task", "method"))


def summary_of(table: ScoreTable, row: VariantScores) -> dict[str, Any]:
    """Scores per dataset with intervals, differences, memory, time and failures."""
    summary: dict[str, Any] = {"score_unit": table.unit, "lower_is_better": table.lower_is_better}
    for column, cell in row.cells.items():
        summary |= cell.score.named(f"{column}/score")
        summary[f"{column}/scored"] = cell.scored
        if cell.difference is not None:
            summary |= cell.difference.named(f"{column}/difference")
            summary["baseline"] = table.baseline
    summary |= {**row.total.score.named("score"), **row.costs}
    summary |= {"failures": dict(row.total.failures), "uncompressed": row.uncompressed}
    return without_nan(summary)


def _log_task(
    task: Path, folders: Sequence[Path], project: str, entity: str | None
) -> tuple[list[Path], list[Path]]:
    """Write the runs of one task folder and the comparison of all that is there.

    Returns:
        The W&B folders of the runs, and of the comparisons.
    """
    place = task.parents[1] / "wandb"
    written: list[Path] = []
    compared: list[Path] = []
    try:
        make_folder(place, place.parent)
        # several processes may work on one experiment
        with FileLock(place / ".lock"), silent_logging():
            runs = [
                load_run(path) for path in sorted({p.parent for p in task.glob(f"*/{MANIFEST}")})
            ]
            runs = [run for run in runs if not run.records.empty]
            for run in runs:
                if run.folder in folders:
                    with failure_warned(run.folder.name):
                        written.append(_log_run(run, runs, project, entity))
            for group in group_runs(runs):
                if len(group.variants) > 1:
                    with failure_warned(f"the comparison of {group.task} on {group.model}"):
                        compared.append(_log_comparison(group, place.parent, project, entity))
    except (OSError, StoreError) as error:
        log.warning("W&B: %s was not logged: %s", task, first_line(error))
    return written, compared


def _log_run(run: Run, runs: Sequence[Run], project: str, entity: str | None) -> Path:
    """One run beside its baseline; returns the W&B run's folder."""
    manifest = run.manifest
    group, table, row = _compared(run, runs)
    name = run_id(manifest)
    rate = f" {rate_text(row)}" if rate_text(row) else ""
    note = cap_note(len(run.records), f"the artifact records-{name}")
    about = f"{group.model}/{manifest['task']}/{row.variant.label}{rate}/seed{manifest.get('seed')}"
    with offline_run(
        run.folder.parents[2],
        project=project,
        entity=entity,
        id=name,
        name=about,
        group=str(manifest["experiment"]),
        job_type=str(manifest["task"]),
        tags=tags_of(manifest, row),
        notes=notes_of(manifest, note),
        config=config_of(manifest),
    ) as logged:
        tables = field_tables(group)
        logged.log(run_media(group, tables, row.variant, run))
        for curve in curves(group, tables, row.variant):
            log_curve(logged, curve)
        logged.summary.update(summary_of(table, row) | _timings(group, row) | note)
        logged.log_artifact(records_artifact(run, name, Path(logged.dir)))
    return Path(logged.dir).parent


def _log_comparison(group: Group, folder: Path, project: str, entity: str | None) -> Path:
    """All variants of a group side by side; returns the W&B run's folder."""
    manifest = group.manifests[-1]
    table = score_table(group)
    count = len(group.records[["seed", "example_id"]].drop_duplicates())
    note = cap_note(count, "the artifacts of the runs that are compared")
    about = {
        "experiment": str(manifest["experiment"]),
        "model": group.model,
        "task": group.task,
        "method": COMPARISON,
    }
    with offline_run(
        folder,
        project=project,
        entity=entity,
        id=comparison_id(about["experiment"], group),
        name=f"{group.model}/{group.task}/{COMPARISON}",
        group=about["experiment"],
        job_type=COMPARISON,
        tags=clipped_tags([*about.values()]),
        notes=notes_of(manifest, note),
        config={
            **about,
            "variants": [variant.label for variant in group.variants],
            "compared_runs": [run_id(one) for one in group.manifests],
        },
    ) as logged:
        logged.log(comparison_media(group, table))
        logged.summary.update(scalars_of(table) | note)
    return Path(logged.dir).parent


def _timings(group: Group, row: VariantScores) -> dict[str, float]:
    """What a throughput probe measured: of one setting by its plain names, of several by each."""
    if not group.meta.figure("throughput"):
        return {}
    mine = [timing for timing in timings_of(group) if timing.variant == row.variant]
    found: dict[str, float] = {}
    for timing in mine:
        prefix = f"{timing.setting}/" if len(mine) > 1 else ""
        for key in ("tokens_per_s", "decode_tokens_per_s", "peak_bytes", "cache_bytes"):
            found[prefix + key] = timing.number(key)
    return without_nan(found)


def send_written(folders: Sequence[Path], timeout_s: float) -> None:
    """Send what was written; say in one line where it is, or why it is not there."""
    place = folders[0].parent
    failed = place / ".not-sent-by"
    me = str(os.getpid())
    if failed.is_file() and read_file(failed) == me.encode():
        return  # said already
    try:
        url = send(folders, timeout_s)
    except (NotSent, OSError) as error:
        with suppress(OSError):  # then the next ones are told again
            replace(failed, me.encode(), sync=False)
        log.warning(
            "W&B: %s. %d of %d runs were not sent; they, and what this process logs from now on, are"
            " on disk. Send them later with: wandb sync %s",
            first_line(error),
            len(not_taken(folders)),
            len(folders),
            shlex.quote(str(place)),
        )
    else:
        with suppress(OSError):
            remove(failed)
        log.info("W&B: %d runs sent%s", len(folders), f" to {url}" if url else "")


def resolved(mode: Mode) -> Mode:
    """The mode that "auto" stands for."""
    if mode != "auto":
        return mode
    wanted = os.environ.get("WANDB_MODE")
    if wanted == "disabled":
        return "disabled"
    return "online" if os.environ.get("WANDB_API_KEY") and wanted != "offline" else "offline"


def _compared(run: Run, runs: Sequence[Run]) -> tuple[Group, ScoreTable, VariantScores]:
    """The run beside its baseline of the same model, task and seed, where there is one."""

    def place(manifest: Mapping[str, Any]) -> list[Any]:
        return [manifest.get(key) for key in ("model", "task", "seed")]

    mine = run.manifest
    peers = [
        other
        for other in runs
        if mine.get("method") != BASELINE == other.manifest.get("method")
        and place(other.manifest) == place(mine)
    ]
    group = group_runs([*peers[:1], run])[0]
    table = score_table(group)
    return group, table, next(r for r in table.rows if r.variant.method == mine["method"])
