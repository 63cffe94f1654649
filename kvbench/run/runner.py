"""Model x methods x task -> records. The runner never asks which method it has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.engine.faults import device_is_usable
from kvbench.engine.limits import in_main_thread
from kvbench.engine.loading import ModelSpec
from kvbench.errors import redact
from kvbench.kv import KVError
from kvbench.records.read import COMMON_FIELDS, MANIFEST, read_manifest, read_records
from kvbench.records.shards import Shard
from kvbench.records.store import (
    RecordStore,
    config_hash,
    manifest_lock,
    run_folder,
    write_manifest,
)
from kvbench.run.attempts import DeviceLost
from kvbench.run.batching import BatchSize, groups, run_group
from kvbench.run.identity import without_defaults
from kvbench.run.plan import (
    Methods,
    Outcome,
    Plan,
    Unit,
    beyond_positions,
    check_ids,
    contexts_of,
    datasets_of,
    of_contexts,
)
from kvbench.run.session import Session

log = logging.getLogger(__name__)

GOES_ON = "the same command goes on after it"

PLACEMENT = ("device_map", "max_memory")
"""What a model's config says about where its weights lie: it changes no result."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything one job needs, resolved and checked.

    Attributes:
        experiment, task: names for folders and tables.
        methods: by label, each with its budget.
        method_configs, task_config, budget_config: as written in the config, for hash and manifest.
        limit: run the first so many contexts only (examples, where no two share a context).
        shard: of these, run this part only; other processes run the others.
        batch_size: units that run together where the plan can, or "auto"; changes no answer.
        retry_failed: run again what an earlier run recorded with a status other than ok.
        extra: further manifest entries (the resolved config, the command ...).
    """

    experiment: str
    task: str
    results_dir: Path
    session: Session
    plan: Plan
    methods: Methods
    method_configs: Mapping[str, Mapping[str, Any]]
    task_config: Mapping[str, Any]
    budget_config: Mapping[str, Any]
    limit: int | None = None
    shard: Shard | None = None
    batch_size: int | str = 1
    retry_failed: bool = False
    lock_timeout: float = 10.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.session.spec

    @cached_property
    def _planned(self) -> tuple[list[Unit], tuple[str, ...]]:
        """The units up to the limit, and the datasets of which there is none among them."""
        units = list(self.plan.units(self.session, self.methods))
        check_ids(self.task, units)
        kept = of_contexts(units, set(contexts_of(units)[: self.limit]))
        datasets, found = datasets_of(units), datasets_of(kept)
        left_out = tuple(name for name in datasets if name not in found)
        if left_out:
            log.warning(
                "limit is %s and %s has %d datasets: none is run of %s",
                self.limit,
                self.task,
                len(datasets),
                ", ".join(left_out),
            )
        return kept, left_out

    @property
    def left_out(self) -> tuple[str, ...]:
        """Datasets of the task of which the limit leaves nothing."""
        return self._planned[1]

    def units(self) -> tuple[list[Unit], list[Unit]]:
        """All units up to the limit, and those of them that are this job's.

        Raises:
            KVError, TaskError: what the plan refuses to run.
        """
        units = self._planned[0]  # made once: a benchmark has tens of millions of tokens
        if self.shard is None:
            return units, units
        return units, of_contexts(units, set(self.shard.select(contexts_of(units))))

    def identity(self, label: str) -> dict[str, Any]:
        """Whatever changes a score of method `label`; see `kvbench.run.identity`."""
        method, _ = self.methods[label]
        meta = self.plan.meta()
        changed: dict[str, Any] = {"method_version": method.version} if method.version > 1 else {}
        sampling = self.session.sampling
        if not sampling.greedy:  # the number of samples adds records and changes none
            changed["sampling"] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        return {
            **changed,
            "model": {k: v for k, v in vars(self.spec).items() if k not in PLACEMENT},
            "dtype": str(self.session.dtype),
            "task": self.task_config,
            "task_version": meta["version"],
            "data": meta.get("data"),
            "method": self.method_configs[label],
            "budget": self.budget_config if method.uses_budget else None,
            "compress_after": self.session.compress_after,
            "timeout_s": self.session.example_timeout,  # as older manifests call it
            "seed": self.session.seed,
        }

    def names(self, label: str) -> dict[str, Any]:
        """What its records and its manifest call the run of method `label`."""
        return {
            "experiment": self.experiment,
            "model": self.spec.label,
            "task": self.task,
            "method": label,
            "config_hash": self.folder(label).name.rpartition("-")[2],
            "seed": self.session.seed,
        }

    def folder(self, label: str) -> Path:
        """Where the records of method `label` are."""
        digest = config_hash(without_defaults(self.identity(label)))
        return run_folder(
            self.results_dir, self.experiment, self.spec.label, self.task, label, digest
        )


@dataclass
class Progress:
    """What a progress display is told: units done of all, running mean score per method."""

    total: int
    done: int = 0
    scores: dict[str, tuple[float, int]] = field(default_factory=dict)

    def add(self, method: str, score: float | None) -> None:
        """Count one record."""
        if score is not None:
            total, count = self.scores.get(method, (0.0, 0))
            self.scores[method] = (total + score, count + 1)


@dataclass(frozen=True)
class JobResult:
    """What a job left behind.

    Attributes:
        folders: run folder by method label.
        failed: records of this job with a status other than ok, old ones included.
        written: records written now (the others were there already).
        records: records of this job that there are.
        complete: whether every unit has a record of every method, those of other shards included.
    """

    folders: Mapping[str, Path]
    failed: int
    written: int
    records: int = 0
    complete: bool = True


def run_job(
    job: Job,
    report_progress: Callable[[Progress], None] = lambda progress: None,
    example: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> JobResult:
    """Run what is not on disk yet; every record is written before the next group of units starts.

    Args:
        example: entered for each group of units and left when its records are on disk; whoever gives
            it can hold back there what would interrupt an example.

    Raises:
        KVError, TaskError, ModelError: what cannot be run, before a model is loaded where possible.
        StoreError: another process holds a folder, or the disk is full.
        DeviceLost: nothing more can be run in this process.
    """
    if job.session.example_timeout is not None and not in_main_thread():
        raise KVError(
            f"example_timeout is {job.session.example_timeout}; allowed outside the main thread: null"
        )
    if not device_is_usable(job.session.device):  # of an earlier job in this process
        raise DeviceLost(f"{job.session.device} answers nothing any more; {GOES_ON}")
    every, units = job.units()
    beyond = beyond_positions(units, job.session)
    if beyond is not None:
        log.warning("%s x %s: %s", job.spec.label, job.task, beyond)
    folders = {label: job.folder(label) for label in job.methods}
    names = {label: job.names(label) for label in job.methods}
    _load_model(job, units, folders)
    failed = written = 0
    part = None if job.shard is None else job.shard.suffix
    with ExitStack() as stack:
        stores: dict[str, RecordStore] = {}
        # in one order, so that two jobs that share methods cannot wait for each other
        for label, folder in sorted(folders.items()):
            stores[label] = stack.enter_context(
                RecordStore(folder, job.lock_timeout, part, job.results_dir)
            )
            if job.retry_failed:
                stores[label].drop_failed()
            with manifest_lock(folder):
                write_manifest(folder, _manifest(job, label, folder))
        progress = Progress(total=len(units))
        report_progress(progress)

        def save(outcomes: Sequence[Outcome]) -> None:
            nonlocal written
            for outcome in outcomes:
                record = _record(job, outcome, names[outcome.method])
                written += stores[outcome.method].append(record)
                progress.add(outcome.method, record["score"])

        done = {label: store.done for label, store in stores.items()}
        work = [
            (
                unit,
                {
                    label: job.methods[label]
                    for label in stores
                    if not done[label].issuperset(unit.record_ids)
                },
            )
            for unit in units
        ]
        progress.done = sum(not todo for _, todo in work)
        size = BatchSize(job.batch_size, job.session.device)
        for group in groups([(unit, todo) for unit, todo in work if todo], size, job.plan):
            failed_here = False
            with example():
                for outcomes in run_group(job.plan, group, job.session, size, save):
                    save(outcomes)
                    failed_here |= _failed(outcomes)
                    progress.done += 1
                    report_progress(progress)
            if failed_here and not device_is_usable(job.session.device):
                raise DeviceLost(
                    f"{job.session.device} answers nothing any more after example "
                    f"{group[-1][0].id!r}, whose records say why; {GOES_ON}"
                )
        wanted = _record_ids(units)
        failed = sum(len(store.failed & wanted) for store in stores.values())
        records = sum(len(store.done & wanted) for store in stores.values())
    all_ids = _record_ids(every)
    complete = job.shard is None or all(all_ids <= _recorded(folder) for folder in folders.values())
    return JobResult(folders, failed, written, records, complete)


def _record_ids(units: Sequence[Unit]) -> set[str]:
    return {record_id for unit in units for record_id in unit.record_ids}


def _recorded(folder: Path) -> set[str]:
    return {record["example_id"] for record in read_records(folder)}


def _failed(outcomes: Sequence[Outcome]) -> bool:
    return any(outcome.fields.get("error") is not None for outcome in outcomes)


def _load_model(job: Job, units: Sequence[Unit], folders: Mapping[str, Path]) -> None:
    """Load the model if anything is to be run with it: before the clock of the first example starts,
    and before there is a folder for results that a model which cannot be loaded will not give."""
    if job.plan.meta().get("subject") is not None:
        return
    wanted = _record_ids(units)
    if job.retry_failed or any(wanted - _recorded(folder) for folder in folders.values()):
        job.session.model  # noqa: B018 - loaded when first asked for


def _record(job: Job, outcome: Outcome, names: Mapping[str, Any]) -> dict[str, Any]:
    method, _ = job.methods[outcome.method]
    return {
        **dict.fromkeys(COMMON_FIELDS),
        **names,
        "dataset": job.task,
        "example_id": outcome.example_id,
        "status": "ok",
        "saves_memory": method.saves_memory or getattr(method, "quantize", None) is not None,
        **outcome.fields,
    }


EACH_START = ("started", "command", "shard", "code_revision", "versions", "hardware")
"""Manifest keys that tell one start of a run from another."""


def _manifest(job: Job, label: str, folder: Path) -> dict[str, Any]:
    """What made the records; a run that goes on remembers its earlier starts."""
    earlier: list[Any] = []
    if (folder / MANIFEST).is_file():
        before = read_manifest(folder / MANIFEST)
        start = {key: before.get(key) for key in EACH_START}
        earlier = [*before.get("earlier_starts", []), start]
    manifest = {
        "earlier_starts": earlier,
        **job.names(label),
        "identity": job.identity(label),
        "shard": None if job.shard is None else str(job.shard),
        "batch_size": job.batch_size,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "task_meta": job.plan.meta(),
        "datasets_left_out": list(job.left_out),
        **job.extra,
    }
    return redact(manifest)
