"""Whether a job has nothing to do, read from its files alone: a command that is given again then imports
neither torch nor the libraries of models.

The hash that names a run's folder needs torch (the class of a method has its defaults, the device its
dtype). What it is made of does not: a run has ended if its manifest holds the settings of this job, the
data are those of the manifest, every example that was asked for has a record, and the experiment's page
is newer than all of it and than kvbench's code. In any doubt the job is made, and decides for itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import kvbench
from kvbench.cli.config import Settings
from kvbench.cli.construct import constructed
from kvbench.errors import redact
from kvbench.records.read import (
    EXAMPLES,
    MANIFEST,
    read_examples,
    read_manifest,
    read_records,
    record_files,
)
from kvbench.records.store import jsonable, safe_name
from kvbench.tasks.base import Task

PAGE = "report.html"
OWN = ("kvbench.tasks.", "kvbench.probes.", "kvbench.methods.")
"""Where the classes are whose code is kvbench's."""


class Finished(NamedTuple):
    """The run folders of a job, how many records it asked for, and how many of them failed."""

    folders: tuple[Path, ...]
    records: int
    failed: int


def finished(settings: Settings) -> Finished | None:
    """What a job has on disk, if that is all of it; None where something is, or may be, left to do."""
    if settings.shard is not None or settings.dry_run or _sends(settings.logger):
        return None
    folder = Path(settings.results_dir).expanduser() / settings.experiment_name
    page = folder / PAGE
    if not page.is_file():
        return None
    nodes = [*_nodes(settings.task), *_nodes(settings.methods)]
    if not all(node["_target_"].startswith(OWN) for node in nodes):
        return None  # a class of the user's own: its code may have changed
    data: dict[str, str] = {}
    for node in nodes:
        if node["_target_"].startswith("kvbench.tasks."):
            data |= constructed(node, "task", Task).digests()
    runs = {
        path.parent: read_manifest(path)
        for path in folder.glob(f"*/{safe_name(settings.task_label)}/*/{MANIFEST}")
    }
    used: dict[Path, tuple[int, int]] = {}
    asked: set[frozenset[str]] = set()
    for label, budget in product(settings.methods, settings.budgets):
        of_these = (
            run for run, manifest in runs.items() if _is_of(manifest, settings, label, budget, data)
        )
        run = next(of_these, None)
        ids = None if run is None else read_examples(run)
        if run is None or ids is None:
            return None
        statuses = {row["example_id"]: row["status"] for row in read_records(run)}
        failed = sum(statuses.get(name) != "ok" for name in ids)
        if not ids <= statuses.keys() or (settings.retry_failed and failed):
            return None
        used[run] = len(ids), failed
        asked.add(ids)
    if len(asked) > 1:  # of several commands
        return None
    # A later command's other examples are those of the table, until this one is the latest.
    first_start = min(str(runs[run].get("started")) for run in used)
    for run in runs.keys() - used.keys():
        if str(runs[run].get("started")) >= first_start and read_examples(run) not in asked:
            return None
    files = [path for run in used for path in (run / MANIFEST, run / EXAMPLES, *record_files(run))]
    code = [path for path in Path(kvbench.__file__).parent.rglob("*.*") if path.suffix != ".pyc"]
    if page.stat().st_mtime_ns <= max(path.stat().st_mtime_ns for path in (*files, *code)):
        return None
    counts = [sum(numbers) for numbers in zip(*used.values(), strict=True)]
    return Finished(tuple(used), *counts)


def _nodes(config: Any) -> Iterator[Mapping[str, Any]]:
    """The parts of a config that name a class, at any depth."""
    if isinstance(config, Mapping):
        if "_target_" in config:
            yield config
        config = list(config.values())
    if isinstance(config, list | tuple):
        for part in config:
            yield from _nodes(part)


def _is_of(
    manifest: Mapping[str, Any],
    settings: Settings,
    label: str,
    budget: Mapping[str, Any],
    data: Mapping[str, str],
) -> bool:
    """Whether a run is of this method under this budget with these settings, data and device."""
    config, identity = manifest.get("config"), manifest.get("identity")
    if manifest["method"] != label or not config or not identity:
        return False
    device = str((manifest.get("hardware") or {}).get("device"))
    return (
        identity["budget"] in (None, jsonable(budget, "budget"))
        and _of_method(config, label)
        == _of_method(jsonable(redact(vars(settings)), "config"), label)
        and identity["data"] in ({}, None, data)
        and (manifest.get("versions") or {}).get("kvbench") == kvbench.__version__
        and (settings.device != "auto" or device.partition(":")[0] == _auto())
    )


def _of_method(config: Mapping[str, Any], label: str) -> dict[str, Any]:
    methods = config["methods"]
    if config.get("limit") != "auto":  # which stops where these methods are told apart
        methods = methods.get(label)
    return {**config, "methods": methods, "budget": None}


def _auto() -> str:
    """The device that ``auto`` is, as far as files tell."""
    gpus = Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
    return "cuda" if gpus else "cpu"


def _sends(logger: Mapping[str, Any]) -> bool:
    """Whether W&B's runs are to be sent at once: those on disk may not have been."""
    mode = logger.get("mode", "offline")
    return mode == "online" or (mode == "auto" and "WANDB_API_KEY" in os.environ)
