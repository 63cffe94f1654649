"""One W&B run of a whole experiment: every method on every task, its score and its ratio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from filelock import FileLock

from kvbench.records.durable import make_folder
from kvbench.report.objective import scalars_of
from kvbench.report.table import NOTHING
from kvbench.report.tables.scores import ScoreTable
from kvbench.report.wandb.log import resolved, send_written
from kvbench.report.wandb.runs import (
    clipped_tags,
    config_of,
    failure_warned,
    id_of,
    notes_of,
    offline_run,
    silent_logging,
)

if TYPE_CHECKING:
    import wandb

OVERVIEW = "overview"
"""Job type and tag of these runs."""


def log_overview(folder: Path, scores: Sequence[ScoreTable], manifest: Mapping[str, Any]) -> bool:
    """Write the overview of an experiment, and send it where its jobs' logger says so.

    Args:
        folder: the experiment's.
        scores: of every model and task that is ranked, by dataset.
        manifest: of one of its runs: the logger of its config counts.

    Returns:
        Whether it was written: not where nothing is ranked, or the logger is none or disabled.
    """
    logger = (manifest.get("config") or {}).get("logger") or {}
    mode = resolved(logger["mode"]) if logger.get("name") == "wandb" else "disabled"
    if mode == "disabled" or not scores:
        return False
    experiment = str(manifest["experiment"])
    written = None
    with failure_warned(f"the overview of {experiment}"):
        place = folder / "wandb"
        make_folder(place, folder)
        with FileLock(place / ".lock"), silent_logging():
            written = _write(folder, experiment, scores, manifest, logger)
    if written is not None and mode == "online":
        send_written([written], float(logger["timeout_s"]))
    return written is not None


def overview_id(experiment: str) -> str:
    """The same for the same experiment."""
    return id_of({"experiment": experiment, "method": OVERVIEW}, ("experiment", "method"))


def lines_of(scores: Sequence[ScoreTable]) -> pd.DataFrame:
    """A line for each model, task and method: score with interval, difference, ratio, failures."""
    lines = [
        {
            "model": table.model,
            "task": table.task,
            "method": row.variant.label,
            "rate": row.variant.rate,
            "unit": table.unit,
            "lower_is_better": table.lower_is_better,
            **row.total.score.named("score"),
            "difference": (row.total.difference or NOTHING).value,
            "ratio": row.ratio,
            "scored": row.total.scored,
            "failures": sum(row.total.failures.values()),
        }
        for table in scores
        for row in table.rows
    ]
    return pd.DataFrame(lines)


def task_by_method(lines: pd.DataFrame) -> pd.DataFrame:
    """A line for each model and method: ``<task>: score`` and ``<task>: ratio`` of every task."""
    keys = ["model", "method", "rate"]
    whole = lines[keys].drop_duplicates()
    for task, of in lines.groupby("task", sort=False):
        named = of[[*keys, "score", "ratio"]].rename(
            columns={"score": f"{task}: score", "ratio": f"{task}: ratio"}
        )
        whole = whole.merge(named, how="left", on=keys)
    return whole


def _write(
    folder: Path,
    experiment: str,
    scores: Sequence[ScoreTable],
    manifest: Mapping[str, Any],
    logger: Mapping[str, Any],
) -> Path:
    """Returns the W&B run's folder."""
    lines = lines_of(scores)
    models, tasks = (list(dict.fromkeys(lines[key])) for key in ("model", "task"))
    scalars: dict[str, float] = {}
    for table in scores:
        prefix = f"{table.model}/{table.task}" if len(models) > 1 else table.task
        scalars |= {f"{prefix}/{name}": value for name, value in scalars_of(table).items()}
    about = config_of(manifest)
    with offline_run(
        folder,
        project=logger["project"],
        entity=logger["entity"],
        id=overview_id(experiment),
        name=f"{experiment}/{OVERVIEW}",
        group=experiment,
        job_type=OVERVIEW,
        tags=clipped_tags([experiment, *models, OVERVIEW]),
        notes=notes_of(manifest, {}),
        config={
            **{key: about[key] for key in ("experiment", "code_revision", "versions", "hardware")},
            "models": models,
            "tasks": tasks,
            "method": OVERVIEW,
        },
    ) as run:
        run.log({"task_by_method": _table(task_by_method(lines)), "scores": _table(lines)})
        run.summary.update(scalars)
    return Path(run.dir).parent


def _table(frame: pd.DataFrame) -> wandb.Table:
    import wandb

    return wandb.Table(dataframe=frame.astype(object).where(frame.notna(), None))
