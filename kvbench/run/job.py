"""A job: one model and one task with several methods, the identity of its runs, and their folders."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from kvbench.engine.cache import PACKING_VERSION
from kvbench.engine.fingerprint import commit_of
from kvbench.errors import redact
from kvbench.kv import KVError
from kvbench.records.aside import Aside, aside_of, lines_of
from kvbench.records.read import MANIFEST, read_manifest, read_statuses
from kvbench.records.schema import COMMON_FIELDS, FORMAT
from kvbench.records.shards import Shard
from kvbench.records.store import config_hash, run_folder, safe_name
from kvbench.run.identity import settings_alone, without_defaults
from kvbench.run.plan import Fields, Methods, Plan, TaskPlan, Work, WorkItem
from kvbench.run.session import Session
from kvbench.run.source import changed_since, has_no_commit, source_of, unsaved

log = logging.getLogger(__name__)

FILE_OPTIONS = ("path", "otherwise", "revision", "tokenizer", "device_map", "max_memory")
"""The options of a model that say where its files and its weights lie. They change no result: its
fingerprint says which model it is."""


class MethodConfig(NamedTuple):
    """A method of a job as its records and its config have it: its name (several labels are of one
    method under several budgets), and the configs of the method and of its budget, for the hash and
    the manifest."""

    name: str
    method: Mapping[str, Any]
    budget: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything one job needs, resolved and checked.

    Attributes:
        experiment, task: their names in folders and tables.
        methods, configs: the methods by label, each with its budget, and what was typed of both.
        task_config: as in the config, for the hash and the manifest.
        limit: how many contexts are run, the first ones; None: all. (Examples that share no context are
            counted one by one.)
        shard: the part of these contexts that this job runs, while other processes run the others.
        batch_size: how many items run together, or "auto", where the plan can do so; it changes no
            answer.
        retry_failed: whether examples run again whose record has a status other than ok.
        rerun: the name under which the records of this job's examples are moved away, so that all run
            again; None: what is on disk counts.
        lock_timeout: see `RecordStore`.
        extra: further entries of the manifest (the resolved config, the command ...).
    """

    experiment: str
    task: str
    results_dir: Path
    session: Session
    plan: Plan
    methods: Methods
    configs: Mapping[str, MethodConfig]
    task_config: Mapping[str, Any]
    limit: int | None = None
    shard: Shard | None = None
    batch_size: int | str = 1
    retry_failed: bool = False
    rerun: str | None = None
    lock_timeout: float = 10.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def meta(self) -> dict[str, Any]:
        """See `Plan.meta`. Computed once, since it digests files."""
        return self.plan.meta()

    @cached_property
    def _all_items(self) -> Sequence[WorkItem]:
        """All items of the plan. Computed once, since the examples of a benchmark have tens of millions
        of tokens."""
        items = self.plan.items(self.session, self.methods)
        for name, count in Counter(name for item in items for name in item.record_ids).items():
            if count > 1:
                raise KVError(
                    f"task {self.task} has {count} examples with the id {name!r}; allowed: one, or the "
                    "others would be skipped"
                )
        return items

    @cached_property
    def within_limit(self) -> Sequence[WorkItem]:
        """The items of the first `limit` contexts, those of other shards included."""
        return _of_contexts(self._all_items, _contexts_of(self._all_items)[: self.limit])

    @cached_property
    def items(self) -> Sequence[WorkItem]:
        """The items that this job runs: those of its own shard within the limit."""
        if self.shard is None:
            return self.within_limit
        chosen = self.shard.select(_contexts_of(self.within_limit))
        return _of_contexts(self.within_limit, chosen)

    @property
    def left_out(self) -> list[str]:
        """The datasets of the task that have no example within the limit."""
        if not isinstance(self.plan, TaskPlan):
            return []
        present = {
            encoded.example.dataset for item in self.within_limit for encoded in item.examples
        }
        return [name for name in self.plan.datasets(self.session) if name not in present]

    @property
    def warnings(self) -> list[str]:
        """A line for every dataset that the limit excludes, one for a model that thinks before it
        answers, and one for prompts that are longer than the model's positions."""
        lines = []
        if self.left_out:
            lines.append(f"limit is {self.limit}: no example is run of {', '.join(self.left_out)}")
        answers = [e.example.max_new_tokens for item in self.items for e in item.examples]
        thought = self.session.encoder.thought if answers else None
        if thought is not None:
            lines.append(
                f"{self.session.spec.name} may think before it answers: only what follows "
                f"{thought.end!r} is scored, and a thought that is not over after {min(answers)} new "
                "tokens scores as an empty answer (task.max_new_tokens, model.enable_thinking)"
            )
        lengths = [encoded.n for item in self.items for encoded in item.examples]
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

    @property
    def warnings_of_code(self) -> Iterator[str]:
        """A line for what cannot be continued, for a checkout without git, for a shard whose code is not
        that of the others, and for records that shipped code has made before it was changed in another
        commit."""
        modules = dict.fromkeys(
            name for own in self.settings.values() for name in unsaved(own["source"])
        )
        for module in modules:
            yield f"{module} has no file that could be compared later: this run is never continued"
        is_anew = not all(folder.is_dir() for folder in self.folders.values())
        if is_anew and has_no_commit() and any(run.records for run in self.aside):
            yield (
                "git does not answer for kvbench's folder, so that each of its files counts as edited: "
                "this run begins anew, and records that were made with git are left aside"
            )
        if self.shard is not None:
            for line in lines_of(self.aside):
                yield f"shard {self.shard} is of other code or weights than {line}, which are left aside"
        this = str(self.extra.get("code_revision")).removesuffix("+dirty")
        made: dict[str, list[str]] = {}
        for label, folder in self.folders.items():
            if self.rerun is None and (folder / MANIFEST).is_file():
                revision = str(read_manifest(folder / MANIFEST).get("code_revision"))
                made.setdefault(revision.removesuffix("+dirty"), []).append(label)
        for commit, labels in made.items():
            if commit in (this, "None", "unknown"):
                continue
            methods = [self.methods[label][0] for label in labels]
            files = changed_since(commit, *methods, *self.code_of_task)
            if files:
                go = f"and {len(labels) - 1} more go" if labels[1:] else "goes"
                yield (
                    f"{labels[0]} {go} on with records of commit {commit[:10]}, where "
                    f"{', '.join(files)} had other code of the same version; rerun=true runs them again"
                )

    @cached_property
    def settings(self) -> dict[str, dict[str, Any]]:
        """By label all settings that change a score, those at their defaults included."""
        settings_of_job = self._settings_of_job()
        code = self.code_of_task
        settings = {}
        for label, (method, _) in self.methods.items():
            own = {
                **settings_of_job,
                "source": source_of(method, *code, command_id=self.session.command_id),
            }
            if method.version > 1:
                own["method_version"] = method.version
            if method.quantize is not None:
                own["packing_version"] = PACKING_VERSION
            own["method"] = self.configs[label].method
            own["budget"] = self.configs[label].budget if method.uses_budget else None
            settings[label] = own
        return settings

    @cached_property
    def names(self) -> dict[str, dict[str, Any]]:
        """By label the fields of records and manifest that name the run, with the hash of the settings
        that are not at their defaults."""
        names = {"experiment": self.experiment, "model": self.session.spec.label, "task": self.task}
        return {
            label: {
                **names,
                "method": self.configs[label].name,
                "config_hash": config_hash(without_defaults(settings)),
                "seed": self.session.seed,
            }
            for label, settings in self.settings.items()
        }

    @cached_property
    def is_about_the_model(self) -> bool:
        """Whether the numbers are about the model; not those of vectors that a probe draws."""
        return self.meta.get("subject") is None

    @property
    def code_of_task(self) -> Sequence[object]:
        """The task or probe, and what else its scores depend on: see `source_of`."""
        if isinstance(self.plan, TaskPlan):
            return self.plan.task, *self.plan.task.code()
        return (self.plan,)

    @property
    def aside(self) -> list[Aside]:
        """The runs of the experiment whose records are of other code or weights than this job's."""
        named = {folder: self._named(label) for label, folder in self.folders.items()}
        upcoming = {folder: {"format": FORMAT, **own} for folder, own in named.items()}
        return aside_of(self.results_dir / safe_name(self.experiment), upcoming)

    def _named(self, label: str) -> dict[str, Any]:
        """The names of the run of a label in its manifest, and what it is identified by."""
        identity = self.settings[label]
        settings_hash = config_hash(settings_alone(identity))
        spec = self.session.spec
        asked = {"path": spec.path, "revision": spec.revision, "tokenizer": spec.tokenizer}
        hashes = {"settings_hash": settings_hash, "identity": identity}
        return {**self.names[label], **hashes, "model_asked": asked}

    @cached_property
    def folders(self) -> dict[str, Path]:
        """The run folder of each method, by label."""
        return {
            label: run_folder(
                self.results_dir, **{key: name for key, name in names.items() if key != "seed"}
            )
            for label, names in self.names.items()
        }

    def done(self, statuses: Mapping[str, str]) -> set[str]:
        """The ids of this job's records that count, of those with these statuses by id."""
        own = record_ids(self.items) & statuses.keys()
        return {name for name in own if statuses[name] == "ok" or not self.retry_failed}

    def done_on_disk(self) -> dict[str, set[str]]:
        """By label the ids of the records that count before the job starts."""
        return {
            label: self.done({} if self.rerun is not None else read_statuses(folder))
            for label, folder in self.folders.items()
        }

    def work_left(self, done: Mapping[str, Set[str]]) -> list[Work]:
        """The items that lack records, each with the methods for which they do. `done` has by label the
        ids of the records that count."""
        work: list[Work] = []
        for item in self.items:
            methods = {  # sorted: in whatever order methods are typed, they run in the same
                label: self.methods[label]
                for label in sorted(self.methods)
                if not done.get(label, set()) >= set(item.record_ids)
            }
            if methods:
                work.append((item, methods))
        return work

    def _settings_of_job(self) -> dict[str, Any]:
        """The settings that change the scores of all methods, as the hash and the manifest have them."""
        session = self.session
        model = {
            name: value for name, value in vars(session.spec).items() if name not in FILE_OPTIONS
        }
        settings: dict[str, Any] = {
            "model": model,
            "weights": session.weights if self.is_about_the_model else None,
            "dtype": str(session.dtype),
            "task": self.task_config,
            "task_version": self.meta["version"],
            "data": self.meta.get("data"),
            "compress_after": (
                "prompt" if self.plan.reads_whole_prompts else session.compress_after
            ),
            "timeout_s": session.example_timeout,  # as older manifests call it
            "seed": session.seed,
        }
        if not session.sampling.greedy:
            # Without the number of samples: more samples add records and change none.
            settings["sampling"] = {
                "temperature": session.sampling.temperature,
                "top_p": session.sampling.top_p,
            }
        if isinstance(self.plan, TaskPlan) and session.encoder.thought is not None:
            settings["thought"] = vars(session.encoder.thought)  # only what follows it is scored
        if isinstance(self.plan, TaskPlan) and session.processors:
            settings["generation_config"] = session.processors
        if session.decode != "auto":  # so that a run continues with the decoding that it began with
            settings["decode"] = session.decode
        return settings

    def manifest(self, label: str) -> dict[str, Any]:
        """The manifest of the run of the method with this label."""
        manifest = {
            **self._named(label),
            "model_revision": commit_of(self.session.spec) if self.is_about_the_model else None,
            "shard": None if self.shard is None else str(self.shard),
            "batch_size": self.batch_size,
            "started": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "task_meta": self.meta,
            "datasets_left_out": self.left_out,
            **self.extra,
        }
        if "config" in self.extra:  # of a job with several budgets, the one of this run
            manifest["config"] = {**self.extra["config"], "budget": self.configs[label].budget}
        return redact(manifest)

    def record(self, fields: Fields) -> dict[str, Any]:
        """A whole record: the fields that the job knows, and those of the plan."""
        label = fields["method"]
        method, _ = self.methods[label]
        return {
            **dict.fromkeys(COMMON_FIELDS),
            **self.names[label],
            "decode": self.session.decode,
            "dataset": self.task,
            "status": "ok",
            "saves_memory": method.saves_memory or method.quantize is not None,
            **fields,
            "method": self.configs[label].name,
        }


def record_ids(items: Sequence[WorkItem]) -> set[str]:
    """The example ids of the records of these items."""
    return {record_id for item in items for record_id in item.record_ids}


def _contexts_of(items: Sequence[WorkItem]) -> list[str]:
    """The contexts of these items, in their order; an item without one is its own."""
    return list(dict.fromkeys(item.context or item.id for item in items))


def _of_contexts(items: Sequence[WorkItem], contexts: Sequence[str]) -> list[WorkItem]:
    """The items that belong to these contexts."""
    chosen = set(contexts)
    return [item for item in items if (item.context or item.id) in chosen]
