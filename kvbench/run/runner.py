"""Model x methods x task -> records. The runner never asks which method it has."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from kvbench.engine.faults import device_is_usable
from kvbench.engine.limits import in_main_thread
from kvbench.engine.ranks import Ranks
from kvbench.errors import redact
from kvbench.kv import KVError
from kvbench.methods.base import describe_itself
from kvbench.records.read import COMMON_FIELDS, recorded
from kvbench.records.shards import Shard
from kvbench.records.store import (
    RecordStore,
    config_hash,
    run_folder,
    write_examples,
    write_manifest,
)
from kvbench.run.batching import GOES_ON, DeviceLost, Runner, Work
from kvbench.run.identity import RunIdentity, without_defaults
from kvbench.run.plan import Methods, Outcome, Plan, TaskPlan, Unit
from kvbench.run.progress import Progress
from kvbench.run.session import Session

log = logging.getLogger(__name__)

PLACEMENT = ("device_map", "max_memory")
"""What a model's config says about where its weights lie: it changes no result."""


@dataclass(frozen=True)
class Selection:
    """The units of a job.

    Attributes:
        within_limit: all up to the limit, those of other shards included.
        own: of these, those of the job's shard.
        left_out: datasets of the task of which the limit leaves nothing.
    """

    within_limit: Sequence[Unit]
    own: Sequence[Unit]
    left_out: tuple[str, ...]

    @property
    def ids_within_limit(self) -> set[str]:
        """The example ids of the records of all units up to the limit."""
        return {record_id for unit in self.within_limit for record_id in unit.record_ids}

    @property
    def own_ids(self) -> set[str]:
        """The example ids of the records of the shard's units."""
        return {record_id for unit in self.own for record_id in unit.record_ids}


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

    def __post_init__(self) -> None:
        for label, (method, _) in self.methods.items():
            decoder = getattr(method, "decoded_by", "kvbench")
            if decoder not in self.plan.decoders:
                raise KVError(
                    f"method {label!r} is decoded by {decoder}, a witness of seconds; allowed: "
                    f"task=throughput (task {self.task} measures what kvbench decodes)"
                )
        across_heads = [
            label
            for label, description in self.self_descriptions.items()
            if not description["by_head"]
        ]
        if self.session.spec.parallel is not None:
            self._check_tensor_parallel(across_heads)

    def _check_tensor_parallel(self, across_heads: Sequence[str]) -> None:
        """Refuse what would let ranks do different things, or what needs all heads in one process.

        Args:
            across_heads: the methods that do not choose for each KV head by itself.

        Raises:
            KVError: naming the methods.
        """
        timed = self.session.example_timeout is not None
        if across_heads or timed or self.batch_size == "auto":
            raise KVError(
                "model.parallel is 'tensor'; allowed with it: batch_size=<number>, example_timeout="
                "null, methods that choose for each KV head by itself (not: "
                f"{across_heads or '-'})"
            )

    @cached_property
    def self_descriptions(self) -> dict[str, dict[str, Any]]:
        """How every method describes itself (`describe_itself`), asked once; by label."""
        return {
            label: describe_itself(label, method) for label, (method, _) in self.methods.items()
        }

    @cached_property
    def meta(self) -> dict[str, Any]:
        """See `Plan.meta`; made once, as it digests files."""
        return self.plan.meta()

    @cached_property
    def units(self) -> Selection:
        """The units of the first `limit` contexts, and the shard's part of them; made once, as a
        benchmark has tens of millions of tokens.

        Raises:
            KVError, TaskError: what the plan refuses to run; a record that would be taken for another.
        """
        units = self.plan.units(self.session, self.methods)
        for name, count in Counter(name for unit in units for name in unit.record_ids).items():
            if count > 1:
                raise KVError(
                    f"task {self.task} has {count} examples with the id {name!r}; allowed: one, or the "
                    "others would be skipped"
                )
        contexts = list(dict.fromkeys(unit.context or unit.id for unit in units))[: self.limit]
        contexts_of_shard = contexts if self.shard is None else self.shard.select(contexts)
        within_limit = _of_contexts(units, contexts)
        datasets: Sequence[str] = ()
        if isinstance(self.plan, TaskPlan):
            datasets = self.plan.datasets(self.session)
        present = {encoded.example.dataset for unit in within_limit for encoded in unit.examples}
        left_out = tuple(name for name in datasets if name not in present)
        return Selection(within_limit, _of_contexts(within_limit, contexts_of_shard), left_out)

    @property
    def warnings(self) -> list[str]:
        """A line for each thing about the job's examples that its numbers do not show."""
        lines = []
        if self.units.left_out:
            lines.append(
                f"limit is {self.limit}: no example is run of {', '.join(self.units.left_out)}"
            )
        lengths = [encoded.n for unit in self.units.own for encoded in unit.examples]
        positions = self.session.encoder.max_positions if lengths else None
        if positions is None:
            return lines
        beyond = [n for n in lengths if n > positions]
        if beyond:
            lines.append(
                f"{len(beyond)} of {len(lengths)} prompts are longer than the model's positions: up to "
                f"{max(beyond):,} tokens, and {self.session.spec.name} has {positions:,}; their records "
                "say so"
            )
        return lines

    @cached_property
    def runs(self) -> dict[str, RunIdentity]:
        """The run of each method: whatever changes its scores, its names and its folder."""
        names = {"experiment": self.experiment, "model": self.session.spec.label, "task": self.task}
        settings_of_job = self._settings_of_job()
        runs = {}
        for label, description in self.self_descriptions.items():
            settings = dict(settings_of_job)
            if description["version"] > 1:
                settings["method_version"] = description["version"]
            settings["method"] = self.method_configs[label]
            settings["budget"] = self.budget_config if description["uses_budget"] else None
            digest = config_hash(without_defaults(settings))
            own_names = names | {"method": label, "config_hash": digest}
            folder = run_folder(self.results_dir, **own_names)
            runs[label] = RunIdentity(settings, own_names | {"seed": self.session.seed}, folder)
        return runs

    def _settings_of_job(self) -> dict[str, Any]:
        """What changes the scores of every method of the job, as the hash and the manifest have it."""
        session = self.session
        model = {name: value for name, value in vars(session.spec).items() if name not in PLACEMENT}
        settings: dict[str, Any] = {
            "model": model,
            "dtype": str(session.dtype),
            "task": self.task_config,
            "task_version": self.meta["version"],
            "data": self.meta.get("data"),
            "compress_after": session.compress_after,
            "timeout_s": session.example_timeout,  # as older manifests call it
            "seed": session.seed,
        }
        if not session.sampling.greedy:  # the number of samples adds records and changes none
            settings["sampling"] = {
                "temperature": session.sampling.temperature,
                "top_p": session.sampling.top_p,
            }
        if session.decode != "auto":  # a run goes on with the decoding that it began with
            settings["decode"] = session.decode
        return settings

    def manifest(self, label: str) -> dict[str, Any]:
        """Where the records of method `label` come from."""
        manifest = {
            **self.runs[label].names,
            "identity": self.runs[label].settings,
            "shard": None if self.shard is None else str(self.shard),
            "batch_size": self.batch_size,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "task_meta": self.meta,
            "datasets_left_out": list(self.units.left_out),
            **self.extra,
        }
        return redact(manifest)

    def record(self, outcome: Outcome) -> dict[str, Any]:
        """An outcome with what the job knows of it."""
        method, _ = self.methods[outcome.method]
        return {
            **dict.fromkeys(COMMON_FIELDS),
            **self.runs[outcome.method].names,
            "decode": self.session.decode,
            "dataset": self.task,
            "example_id": outcome.example_id,
            "status": "ok",
            "saves_memory": self.self_descriptions[outcome.method]["saves_memory"]
            or method.quantize is not None,
            **outcome.fields,
        }


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


def run_job(job: Job, progress: Progress | None = None) -> JobResult:
    """Run what is not on disk yet; every record is written before the next group of units starts.

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
    for warning in job.warnings:
        log.warning("%s x %s: %s", job.session.spec.label, job.task, warning)
    _load_model_if_needed(job)
    folders = {label: run.folder for label, run in job.runs.items()}
    written = 0
    with ExitStack() as stack:
        stores = _open_stores(job, stack)
        work = _work_left(job, stores)
        progress = Progress() if progress is None else progress
        progress.begin(work, len(job.units.own))
        if work and work[0][0].examples:  # a probe may measure seconds
            stack.enter_context(progress.watching(job.session.model))
        measures = ("score", *job.meta.get("measures", ()))

        def save(outcomes: Sequence[Outcome]) -> None:
            nonlocal written
            if not stores:  # the first rank writes
                return
            for outcome in outcomes:
                record = job.record(outcome)
                written += stores[outcome.method].append(record)
                progress.add(outcome.method, {name: record.get(name) for name in measures})

        for outcomes in Runner(job.plan, job.session, job.batch_size, save).run(work):
            save(outcomes)
            progress.unit_done()
        own_ids = job.units.own_ids
        failed = sum(len(store.failed & own_ids) for store in stores.values())
        records = sum(len(store.done & own_ids) for store in stores.values())
    complete = True
    if job.shard is not None:
        wanted = job.units.ids_within_limit
        complete = all(wanted <= recorded(folder) for folder in folders.values())
    return JobResult(folders, failed, written, records, complete)


def _of_contexts(units: Sequence[Unit], contexts: Sequence[str]) -> list[Unit]:
    """The units that ask these contexts."""
    wanted = set(contexts)
    return [unit for unit in units if (unit.context or unit.id) in wanted]


def _load_model_if_needed(job: Job) -> None:
    """Load the model, if the job has records to make and needs one for them: before the clock of the
    first example starts, and before there is a folder for results that a model which cannot be loaded
    will not give."""
    if job.meta.get("subject") is not None:  # what the numbers are about is no model
        return
    wanted = job.units.own_ids
    lacks_records = any(wanted - recorded(run.folder) for run in job.runs.values())
    if job.retry_failed or lacks_records:
        job.session.model  # noqa: B018 - loaded when first asked for


def _open_stores(job: Job, stack: ExitStack) -> dict[str, RecordStore]:
    """The stores of all methods, locked until the stack is left, with their manifests; none on any rank
    but the first, which writes for all."""
    stores: dict[str, RecordStore] = {}
    rank, _ = job.session.spec.place
    if rank != 0:
        return stores
    suffix = None if job.shard is None else job.shard.suffix
    # In one order, so that two jobs that share methods cannot wait for each other.
    for label, run in sorted(job.runs.items(), key=lambda item: item[0]):
        store = RecordStore(run.folder, job.lock_timeout, suffix, job.results_dir)
        stores[label] = stack.enter_context(store)
        if job.retry_failed:
            store.drop_failed()
        write_manifest(run.folder, job.manifest(label))
        write_examples(run.folder, job.units.ids_within_limit)
    return stores


def _work_left(job: Job, stores: Mapping[str, RecordStore]) -> list[Work]:
    """The units of the job that lack records, each with the methods whose records it lacks. The first
    rank says which these are, before it writes any."""
    done: dict[str, set[str]] = {}
    for label, run in job.runs.items():
        done[label] = set(stores[label].done if stores else recorded(run.folder))
    _, ranks = job.session.spec.place
    done = Ranks(ranks).gather(done)[0]
    work: list[Work] = []
    for unit in job.units.own:
        methods = {
            label: job.methods[label]
            for label, ids in done.items()
            if not ids.issuperset(unit.record_ids)
        }
        if methods:
            work.append((unit, methods))
    return work
