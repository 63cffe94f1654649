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
from kvbench.methods.base import check_answers
from kvbench.records.read import COMMON_FIELDS, recorded
from kvbench.records.shards import Shard
from kvbench.records.store import (
    RecordStore,
    config_hash,
    run_folder,
    write_examples,
    write_manifest,
)
from kvbench.run.batching import GOES_ON, DeviceLost, Runner
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
        every: all up to the limit.
        mine: of these, those of the job's shard.
        left_out: datasets of the task of which the limit leaves nothing.
    """

    every: Sequence[Unit]
    mine: Sequence[Unit]
    left_out: tuple[str, ...]

    @property
    def every_id(self) -> set[str]:
        """The example ids of the records of all units up to the limit."""
        return {record_id for unit in self.every for record_id in unit.record_ids}

    @property
    def mine_ids(self) -> set[str]:
        """The example ids of the records of its units."""
        return {record_id for unit in self.mine for record_id in unit.record_ids}


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
            check_answers(label, method)
            decoder = getattr(method, "decoded_by", "kvbench")
            if decoder not in self.plan.decoders:
                raise KVError(
                    f"method {label!r} is decoded by {decoder}, a witness of seconds; allowed: "
                    f"task=throughput (task {self.task} measures what kvbench decodes)"
                )
        unlike = [k for k, pair in self.methods.items() if not getattr(pair[0], "by_head", True)]
        alone = unlike or self.batch_size == "auto" or self.session.example_timeout is not None
        if self.session.spec.parallel is not None and alone:
            raise KVError(
                "model.parallel is 'tensor'; allowed with it: batch_size=<number>, example_timeout="
                f"null, methods that choose for each KV head by itself (not: {unlike or '-'})"
            )

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
        own = set(contexts if self.shard is None else self.shard.select(contexts))
        wanted = set(contexts)
        every = [unit for unit in units if (unit.context or unit.id) in wanted]
        mine = [unit for unit in every if (unit.context or unit.id) in own]
        there = {e.example.dataset for unit in every for e in unit.examples}
        datasets = self.plan.datasets(self.session) if isinstance(self.plan, TaskPlan) else ()
        return Selection(every, mine, tuple(name for name in datasets if name not in there))

    @property
    def warnings(self) -> list[str]:
        """A line for each thing about the job's examples that its numbers do not show."""
        said, units, spec = [], self.units, self.session.spec
        if units.left_out:
            said.append(f"limit is {self.limit}: no example is run of {', '.join(units.left_out)}")
        lengths = [each.n for unit in units.mine for each in unit.examples]
        positions = self.session.encoder.max_positions if lengths else None
        over = [n for n in lengths if positions is not None and n > positions]
        if over:
            said.append(
                f"{len(over)} of {len(lengths)} prompts are longer than the model's positions: up to "
                f"{max(over):,} tokens, and {spec.name} has {positions:,}; their records say so"
            )
        return said

    @cached_property
    def runs(self) -> dict[str, RunIdentity]:
        """The run of each method: whatever changes its scores, its names and its folder."""
        names = {"experiment": self.experiment, "model": self.session.spec.label, "task": self.task}
        common: dict[str, Any] = {
            "model": {k: v for k, v in vars(self.session.spec).items() if k not in PLACEMENT},
            "dtype": str(self.session.dtype),
            "task": self.task_config,
            "task_version": self.meta["version"],
            "data": self.meta.get("data"),
            "compress_after": self.session.compress_after,
            "timeout_s": self.session.example_timeout,  # as older manifests call it
            "seed": self.session.seed,
        }
        sampling = self.session.sampling
        if not sampling.greedy:  # the number of samples adds records and changes none
            common["sampling"] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        if self.session.decode != "auto":  # a run goes on with the decoding that it began with
            common["decode"] = self.session.decode
        found = {}
        for label, (method, _) in self.methods.items():
            settings = {
                **({"method_version": method.version} if method.version > 1 else {}),
                **common,
                "method": self.method_configs[label],
                "budget": self.budget_config if method.uses_budget else None,
            }
            own = names | {"method": label, "config_hash": config_hash(without_defaults(settings))}
            folder = run_folder(self.results_dir, **own)
            found[label] = RunIdentity(settings, own | {"seed": self.session.seed}, folder)
        return found

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
            "saves_memory": method.saves_memory or method.quantize is not None,
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
    units = job.units
    for warning in job.warnings:
        log.warning("%s x %s: %s", job.session.spec.label, job.task, warning)
    folders = {label: run.folder for label, run in job.runs.items()}
    wanted = units.mine_ids
    # before the clock of the first example starts, and before there is a folder for results that a
    # model which cannot be loaded will not give
    if job.meta.get("subject") is None and (
        job.retry_failed or any(wanted - recorded(folder) for folder in folders.values())
    ):
        job.session.model  # noqa: B018 - loaded when first asked for
    written = 0
    with ExitStack() as stack:
        stores: dict[str, RecordStore] = {}
        suffix = None if job.shard is None else job.shard.suffix
        rank, ranks = job.session.spec.place
        # in one order, so that two jobs that share methods cannot wait for each other
        for label, folder in sorted(folders.items()) if rank == 0 else ():
            store = RecordStore(folder, job.lock_timeout, suffix, job.results_dir)
            stores[label] = stack.enter_context(store)
            if job.retry_failed:
                store.drop_failed()
            write_manifest(folder, job.manifest(label))
            write_examples(folder, units.every_id)
        done = {k: stores[k].done if stores else recorded(folders[k]) for k in folders}
        done = Ranks(ranks).gather(done)[0]  # by the first rank, before it writes
        every = [
            (u, {k: job.methods[k] for k, ids in done.items() if not ids.issuperset(u.record_ids)})
            for u in units.mine
        ]
        work = [(unit, methods) for unit, methods in every if methods]
        progress = Progress() if progress is None else progress
        progress.begin(work, len(units.mine))
        if work and work[0][0].examples:  # a probe may measure seconds
            stack.enter_context(progress.watching(job.session.model))

        measures = ("score", *job.meta.get("measures", ()))

        def save(outcomes: Sequence[Outcome]) -> None:
            nonlocal written
            for outcome in outcomes if stores else ():
                record = job.record(outcome)
                written += stores[outcome.method].append(record)
                progress.add(outcome.method, {name: record.get(name) for name in measures})

        for outcomes in Runner(job.plan, job.session, job.batch_size, save).run(work):
            save(outcomes)
            progress.unit_done()
        failed = sum(len(store.failed & wanted) for store in stores.values())
        records = sum(len(store.done & wanted) for store in stores.values())
    every_id = units.every_id
    complete = job.shard is None or all(every_id <= recorded(f) for f in folders.values())
    return JobResult(folders, failed, written, records, complete)
