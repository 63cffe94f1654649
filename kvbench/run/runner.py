"""Runs a job: the work that lacks records, in groups, each of whose records is on disk before the next.

The size of the groups changes the time and the memory that the answers need, not the answers. What ran
out of memory or time in company, and what an exception ended with others, runs again in smaller company:
a group in halves, a single item with one method at a time. So a record of such a failure is always that
of a method which failed alone. Nothing here depends on which method it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.compiler import is_compiling
from torch.nn import Module

from kvbench.engine.device import (
    device_is_usable,
    free_memory,
    is_out_of_memory,
    peak_bytes,
    reset_peak,
    total_bytes,
    used_bytes,
)
from kvbench.errors import FAILED, UserError, one_line
from kvbench.records.read import read_statuses
from kvbench.records.store import RecordStore, write_examples, write_manifest
from kvbench.run.job import Job, record_ids
from kvbench.run.plan import Fields, Methods, Work, WorkItem, failure_fields
from kvbench.run.progress import Progress, decoder_layers

log = logging.getLogger(__name__)

RETRIED_ALONE = ("oom", "timeout")
"""Statuses of failures that other methods or items of a group may have caused. What fails in this way is
run again alone."""

LARGEST_AUTO_GROUP = 64
"""The most items of a group with batch_size "auto". Records are written only when a group is done."""

SAFE_SHARE = 0.85
"""A group is doubled only if it is then expected to take at most this share of all memory."""


class DeviceLost(UserError, RuntimeError):
    """The device (a GPU after a fault) can run nothing any more in this process, since `when`."""

    status = FAILED

    def __init__(self, device: torch.device, when: str) -> None:
        super().__init__(
            f"{device} answers nothing any more {when}; the same command goes on after it"
        )


class GroupSize:
    """How many items the next group has.

    With batch_size "auto" the first group has one item. The size doubles as long as a group of twice the
    size is expected to fit into memory. After a group that ran out of memory it is halved, and does not
    grow again, unless one item of that group does not fit even alone: then the others are not to blame.

    Attributes:
        now: items of the next group.
        most: the largest size that `now` may grow to.
    """

    def __init__(self, batch_size: int | str, device: torch.device) -> None:
        self.device = device
        self.grows = isinstance(batch_size, str)
        self.now = 1 if isinstance(batch_size, str) else batch_size
        self.most = LARGEST_AUTO_GROUP if isinstance(batch_size, str) else batch_size
        self._bytes_before_group: int | None = None
        self._most_bytes_of_an_item = 0.0

    def group_begins(self) -> None:
        """Note how much memory is in use before a group runs."""
        if self.grows and reset_peak(self.device):
            self._bytes_before_group = used_bytes(self.device)

    def group_fitted(self, items: int) -> None:
        """Double the size, if memory allows it, after a group of this many items fitted."""
        if not self.grows or self.now == self.most:
            return
        before = self._bytes_before_group
        peak = peak_bytes(self.device)
        total = total_bytes(self.device)
        if before is None or peak is None or total is None:
            self.most = self.now  # a size whose need cannot be measured is not tried
            return
        # The most that an item of any group took. A later group may seem to take less, as it uses memory
        # that an earlier one has left allocated.
        self._most_bytes_of_an_item = max(self._most_bytes_of_an_item, (peak - before) / items)
        doubled = min(2 * self.now, self.most)
        expected = before + doubled * self._most_bytes_of_an_item
        if items == self.now and expected <= SAFE_SHARE * total:
            self.now = doubled

    def group_ran_out(self, items: int) -> None:
        """Halve the size, after a group of this many items ran out of memory."""
        self.now = self.most = max(1, min(self.most, items // 2))


class Runner:
    """Runs the items of a job in groups (`GroupSize`)."""

    def __init__(self, job: Job) -> None:
        self.plan = job.plan
        self.session = job.session
        self.size = GroupSize(job.batch_size, job.session.device)
        # Where no model runs, there are no passes that could be timed.
        self.seconds = job.session.example_timeout if job.is_about_the_model else None

    def run(self, work: Sequence[Work]) -> Iterator[Sequence[Fields]]:
        """Run all items. Yields the records of each item, failures included, as soon as they are final;
        items that run again come after the others of their group."""
        done = 0
        while done < len(work):
            size = self.size.now if self.plan.batches_items else 1
            group = work[done : done + size]
            done += len(group)
            self.size.group_begins()
            failed = False
            for records in self._run(group):
                failed |= any(record.get("error") is not None for record in records)
                yield records
            if failed and not device_is_usable(self.session.device):
                when = f"after example {group[-1][0].id!r}, whose records say why"
                raise DeviceLost(self.session.device, when)

    def _run(self, group: Sequence[Work]) -> Iterator[list[Fields]]:
        """Run a group. Yields the records of each item: first those that are final, then those of the
        items that run again, in halves of the group."""
        by_item, failure = self._attempt(group)
        goes_on = failure is None or device_is_usable(self.session.device)
        out_of_memory = failure is not None and is_out_of_memory(failure)
        again: list[Work] = []
        for (item, methods), records in zip(group, by_item, strict=True):
            lost = [] if failure is None else _missing(item, methods, failure, records, len(group))
            suspects = {r["method"] for r in records if r.get("status") in RETRIED_ALONE}
            suspects |= {record["method"] for record in lost}
            out_of_memory |= any(record.get("status") == "oom" for record in records)
            if suspects and goes_on and len(group) > 1:
                again.append((item, methods))
            elif suspects and goes_on and len(methods) > 1:
                others = [record for record in records if record["method"] not in suspects]
                alone = {label: own for label, own in methods.items() if label in suspects}
                yield [*others, *self._one_at_a_time(item, alone)]
            else:
                yield [*records, *lost]
        del by_item, failure  # they refer to tensors, which would stay in memory
        if not again:
            if len(group) > 1 or not out_of_memory:
                self.size.group_fitted(len(group))
            return
        log.info("%d of a batch of %d run again in smaller ones", len(again), len(group))
        self._give_back_memory()
        fits_nowhere = False
        half = len(group) // 2
        for start in range(0, len(again), half):
            for records in self._run(again[start : start + half]):
                fits_nowhere |= all(record.get("status") == "oom" for record in records)
                yield records
        if out_of_memory and not fits_nowhere:
            self.size.group_ran_out(len(group))
            log.info("a batch of %d did not fit; going on with %d", len(group), self.size.now)

    def _one_at_a_time(self, item: WorkItem, methods: Methods) -> Iterator[Fields]:
        log.info("%s: once more, one at a time: %s", item.id, ", ".join(sorted(methods)))
        for label, method in methods.items():
            self._give_back_memory()
            for records in self._run([(item, {label: method})]):
                yield from ({**record, "retried": True} for record in records)

    def _give_back_memory(self) -> None:
        """Free the decoding steps that were captured for later prompts, and the device's unused
        memory."""
        self.session.steps.kept.clear()
        free_memory(self.session.device)

    def _attempt(self, work: Sequence[Work]) -> tuple[list[list[Fields]], Exception | None]:
        """Run a group of items once.

        Returns:
            the records of each item, of those that were final before an exception ended the group, and
            that exception or None.
        """
        records: list[list[Fields]] = [[] for _ in work]
        place_of = {name: place for place, (item, _) in enumerate(work) for name in item.record_ids}
        with ExitStack() as stack:
            if self.seconds is not None:
                answers = sum(item.answers for item, _ in work)
                stack.enter_context(time_limit(self.session.model, self.seconds * answers))
            try:
                for record in self.plan.run(work, self.session):
                    records[place_of[record["example_id"]]].append(record)
            except Exception as failure:  # noqa: BLE001 - it becomes the items' records
                name = work[0][0].id if len(work) == 1 else f"{work[0][0].id} ..."
                level = logging.INFO if len(work) > 1 else logging.WARNING
                log.log(level, "%s: %s", name, one_line(failure))
                return records, failure
        return records, None


@contextmanager
def time_limit(model: Module, seconds: float) -> Iterator[None]:
    """Raise TimeoutError between two layers of a prefill that is still running after `seconds`. Decoding
    steps are left to `Stopping.timeout_s`, which stops one method's answer at a time."""
    end = time.monotonic() + seconds

    def check(_: Module, arguments: tuple[Any, ...]) -> None:
        is_prefill = bool(arguments) and arguments[0].dim() == 3 and arguments[0].shape[1] > 1
        if is_prefill and not is_compiling() and time.monotonic() > end:
            raise TimeoutError(f"the example took more than {seconds:g} s")

    hooks = [layer.register_forward_pre_hook(check) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _missing(
    item: WorkItem, methods: Methods, failure: Exception, records: Sequence[Fields], together: int
) -> list[Fields]:
    """A failed record for each of an item that is not among `records`, after a failure in a group of so
    many items."""
    status = failure_fields(failure)
    if together > 1:
        status["error"] += f" (in a batch of {together})"
    known = {(record["method"], record["example_id"]) for record in records}
    return [
        {
            "method": label,
            "example_id": record_id,
            **item.fields.get(record_id, {}),
            **status,
        }
        for label in methods
        for record_id in item.record_ids
        if (label, record_id) not in known
    ]


@dataclass(frozen=True)
class JobResult:
    """The result of a job.

    Attributes:
        folders: the run folder of each method, by label.
        failed: the number of this job's records with a status other than ok.
        written: the number of records that were written now; the others were on disk before.
        records: the number of this job's records.
        complete: whether every item, those of other shards included, has a record of every method.
        seconds: the time of each phase, see `kvbench.records.log`.
    """

    folders: Mapping[str, Path]
    failed: int
    written: int
    records: int
    complete: bool
    seconds: Mapping[str, float] = field(default_factory=dict)


def run_job(job: Job, progress: Progress | None = None, *, since: float | None = None) -> JobResult:
    """Run the items of a job that lack records. All records of a group of items are written before the
    next group starts.

    Args:
        since: the value of `time.monotonic` from which on it counts as loading; None: now.
    """
    since = time.monotonic() if since is None else since
    seconds = dict.fromkeys(("load", "prefill", "compress", "decode"), 0.0)
    if not device_is_usable(job.session.device):
        raise DeviceLost(job.session.device, "since an earlier job")
    for warning in [*job.warnings, *job.warnings_of_code]:
        log.warning("%s x %s: %s", job.session.spec.label, job.task, warning)
    if job.is_about_the_model and job.work_left(job.done_on_disk()):
        # Before the clock of the first example starts. A model that cannot be loaded leaves no empty
        # folders.
        job.session.model  # noqa: B018 - the property loads the model
    written = 0
    with ExitStack() as stack:
        stores = _open_stores(job, stack)
        work = job.work_left({label: job.done(store.statuses) for label, store in stores.items()})
        progress = Progress() if progress is None else progress
        progress.begin(work, len(job.items), job.methods)
        if work and work[0][0].examples:  # not for probes, since some measure seconds
            stack.enter_context(progress.watching(job.session.model))
        begun = time.monotonic()
        seconds["load"] = begun - since
        for of_item in Runner(job).run(work):
            for fields in of_item:
                written += stores[fields["method"]].append(job.record(fields))
            for phase, value in _passes(of_item).items():
                seconds[phase] += value
            progress.item_done(of_item)
        left = time.monotonic() - begun - seconds["prefill"] - seconds["decode"]
        # Methods share what they read in a second pass, and each record has the whole of it.
        seconds["compress"] = min(seconds["compress"], max(0.0, left))
        seconds["score"] = max(0.0, left - seconds["compress"])
        own = record_ids(job.items)
        statuses = [
            status
            for store in stores.values()
            for name, status in store.statuses.items()
            if name in own
        ]
        failed = sum(status != "ok" for status in statuses)
    complete = True
    if job.shard is not None:
        all_ids = record_ids(job.within_limit)
        complete = all(all_ids <= read_statuses(run).keys() for run in job.folders.values())
    return JobResult(job.folders, failed, written, len(statuses), complete, seconds)


def _passes(records: Sequence[Fields]) -> dict[str, float]:
    """The seconds of the passes of an item: one prefill, one compression of each method, and the
    decoding of each answer, whose steps are divided among the rows."""
    prefill, compress = 0.0, dict[str, float]()
    for fields in records:
        prefill = max(prefill, fields.get("prefill_s") or 0)
        label = fields["method"]
        compress[label] = max(compress.get(label, 0), fields.get("compress_s") or 0)
    decode = sum(fields.get("decode_s") or 0 for fields in records)
    return {"prefill": prefill, "compress": sum(compress.values()), "decode": decode}


def _open_stores(job: Job, stack: ExitStack) -> dict[str, RecordStore]:
    """Open and lock the store of each method, until the stack is closed, and write its manifest."""
    stores: dict[str, RecordStore] = {}
    suffix = None if job.shard is None else job.shard.suffix
    # Sorted, so that two jobs with the same methods do not wait for each other's locks.
    for label, folder in sorted(job.folders.items()):
        store = RecordStore(folder, job.lock_timeout, suffix)
        stores[label] = stack.enter_context(store)
        if job.rerun is not None:
            store.move_away(record_ids(job.items), job.rerun)
        # In this order: a process that is killed between them leaves a manifest that asks for no more
        # than the examples beside it.
        write_examples(folder, record_ids(job.within_limit))
        write_manifest(folder, job.manifest(label))
    return stores
