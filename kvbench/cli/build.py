"""From a composed config to a job, its tables and its page.

What reads results and draws them is imported when there are any: that takes as long as a small job.
"""

from __future__ import annotations

import copy
import json
import logging
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pydoc import locate
from typing import Any, TypeVar

import torch
from filelock import FileLock, Timeout
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.arguments import wrong_argument
from kvbench.cli.check import resolved
from kvbench.cli.overrides import is_folder_name
from kvbench.engine.loading import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.sampling import Sampling
from kvbench.errors import complain, nearest, presentable, printable
from kvbench.errors.options import check_options
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.records.durable import read_file, replace
from kvbench.records.read import StoreError, load_run, record_files
from kvbench.records.shards import Shard
from kvbench.records.store import safe_name
from kvbench.report.wandb.send import check_logger
from kvbench.run import provenance
from kvbench.run.batching import check_batch_size
from kvbench.run.encoding import EncodedExample
from kvbench.run.plan import BringsRows, Plan, TaskPlan
from kvbench.run.preview import print_dry_run
from kvbench.run.progress import progress_display
from kvbench.run.runner import Job, JobResult, run_job
from kvbench.run.session import Session
from kvbench.run.termination import Termination
from kvbench.tasks.base import Task

log = logging.getLogger(__name__)

KEYS = (
    *(
        "model",
        "task",
        "methods",
        "budget",
        "logger",
        "experiment_name",
        "results_dir",
        "task_label",
    ),
    *("seed", "limit", "device", "dtype", "compress_after", "example_timeout", "retry_failed"),
    *("lock_timeout", "dry_run", "batch_size", "decode", "paper_table"),
    *("shard", "shards", "launcher", "sampling"),
)
"""Top-level keys of a composed config; Hydra's ``+key=value`` could add others that nothing reads."""


_PLAN = ("meta", "units", "run")
T = TypeVar("T")


@dataclass
class SharedParts:
    """What the checked or planned jobs of a sweep have in common, made once. No job that runs has any
    of it.

    Attributes:
        objects: by what the config says of them.
        examples: of the latest task; see `TaskPlan`.
    """

    objects: dict[str, Any] = field(default_factory=dict)
    examples: dict[str, list[EncodedExample]] = field(default_factory=dict)


def _part(node: DictConfig, key: str, kind: type[T], made: SharedParts | None, plain: object) -> T:
    """What a config's ``_target_`` makes.

    Args:
        plain: the node as plain values.

    Raises:
        KVError: it is not of the kind that the key stands for, or has a value of the wrong type.
        InstantiationException: the constructor's own refusal.
    """
    if made is None:
        return _instantiated(node, key, kind)
    said = repr((key, plain))
    if said not in made.objects:
        made.objects[said] = _instantiated(node, key, kind, plain)
    found = made.objects[said]
    assert isinstance(found, kind)
    return found


def _instantiated(node: DictConfig, key: str, kind: type[T], plain: object = None) -> T:
    try:
        made = _constructed(plain) or instantiate(node, _convert_="all")
    except InstantiationException as error:
        problem = wrong_argument(OmegaConf.to_container(node, resolve=True), key)
        if problem is not None:  # with the whole key, which the object itself does not know
            raise KVError(problem) from error
        raise
    except OmegaConfBaseException:
        raise
    except (TypeError, ValueError) as error:  # of Hydra's own keys, e.g. _partial_
        raise KVError(f"{key} cannot be made: {' '.join(str(error).split())}") from error
    if not isinstance(made, kind):
        raise KVError(
            f"{key}._target_ is {node.get('_target_')!r}, which makes a {type(made).__name__}; "
            f"allowed: a {kind.__name__}"
        )
    check_options(made, f"{key}.", KVError)
    return made


def _constructed(plain: object) -> object | None:
    """What Hydra's `instantiate` makes of a node in which only the node itself has a target, sooner;
    None where it has more to do, or something to say."""
    if not isinstance(plain, Mapping) or repr(plain).count("'_") > 1:
        return None
    options = {str(name): copy.deepcopy(plain[name]) for name in plain if name != "_target_"}
    try:
        target: Any = locate(plain["_target_"])
        return None if target is None else target(**options)
    except Exception:  # noqa: BLE001 - Hydra's words for it are the user's
        return None


def build_job(config: DictConfig, made: SharedParts | None = None) -> Job:
    """Instantiate what the config names and check what can be checked without loading a model.

    Args:
        made: what earlier jobs were made of: this one is then only to be looked at, not to be run.

    Raises:
        KVError, TaskError, ModelError: one line naming the thing, its value and what is allowed.
    """
    plain = resolved(config)
    for key in plain:
        if key not in KEYS:
            raise KVError(f"unknown key {key!r}{nearest(key, KEYS)}; allowed: {', '.join(KEYS)}")
    if config.logger.name == "wandb":
        try:
            check_logger(config.logger.mode, config.logger.timeout_s)
        except ValueError as error:
            raise KVError(str(error)) from error
    experiment = plain["experiment_name"]
    if not is_folder_name(experiment):  # what an interpolation came to
        raise KVError(f"experiment_name is {experiment!r}; allowed: a folder's name")
    results_dir = results_folder(plain["results_dir"])
    device = resolve_device(config.device)
    spec = _part(config.model, "model", ModelSpec, made, plain["model"])
    for key, name in (("model.name", spec.label), ("task_label", plain["task_label"])):
        try:
            safe_name(str(name))
        except StoreError as error:
            raise KVError(
                f"{key} is {name!r}; allowed: text with a letter or digit in it"
            ) from error
    budget = _part(config.budget, "budget", Budget, made, plain["budget"])
    written: Any = plain["methods"]
    methods: dict[str, tuple[Method, Budget]] = {}
    method_configs: dict[str, Any] = {}
    for label, node in config.methods.items():
        one = _part(node, f"methods.{label}", Method, made, written[str(label)])
        methods[str(label)] = (one, budget)
        method_configs[str(label)] = written[str(label)]
        one.quantization()
    task: Any = _part(config.task, "task", object, made, plain["task"])
    if not isinstance(task, Task) and not all(hasattr(task, part) for part in _PLAN):
        raise KVError(f"task is a {type(task).__name__}; allowed: a task or a probe")
    plan: Plan = task
    if isinstance(task, Task):
        plan = TaskPlan(task, None if made is None else made.examples)
    if isinstance(plan, BringsRows):  # ways to generate that are no methods of ours
        rows, left_out = plan.rows()
        for label, row in rows.items():
            methods[label] = (row, budget)
            method_configs[label] = {"row_of": task.name, "name": label}
        for reason in left_out.values():
            log.warning("left out: %s", reason)
    session = Session(
        spec=spec,
        device=device,
        dtype=resolve_dtype(config.dtype, device, spec.dtype),
        seed=config.seed,
        compress_after=config.compress_after,
        example_timeout=config.example_timeout,
        decode=config.decode,
        sampling=_part(config.sampling, "sampling", Sampling, made, plain["sampling"]),
    )
    task_config: Any = plain["task"]
    if isinstance(task, Task):
        task_config = {k: v for k, v in task_config.items() if k not in task.unhashed}
    budget_config: Any = plain["budget"]
    return Job(
        experiment=config.experiment_name,
        task=str(config.task_label),
        results_dir=results_dir,
        session=session,
        plan=plan,
        methods=methods,
        method_configs=method_configs,
        task_config=task_config,
        budget_config=budget_config,
        limit=config.limit,
        shard=Shard.parse(config.shard),
        batch_size=check_batch_size(config.batch_size),
        retry_failed=config.retry_failed,
        lock_timeout=config.lock_timeout,
        extra={} if made is not None else _provenance(plain, device),
    )


def _provenance(config: Mapping[str, object], device: torch.device) -> dict[str, Any]:
    """What a job's manifest says about where its records came from."""
    return {
        "config": config,
        "command": provenance.command(),
        "versions": provenance.versions(),
        "code_revision": provenance.code_revision(),
        "hardware": provenance.hardware(device),
    }


def results_folder(value: object) -> Path:
    """The folder for results that a config names, ``~`` expanded.

    Raises:
        KVError: it cannot be a folder's name: no text, not UTF-8, a name too long, an unknown user.
    """
    try:
        if isinstance(value, str) and value and "\0" not in value:
            folder = Path(value).expanduser()
            if all(len(part.encode()) <= 255 for part in folder.parts):
                return folder
    except (RuntimeError, UnicodeEncodeError):  # no such user, or bytes that are no text
        pass
    raise KVError(
        f"results_dir is {value!r:.300}; allowed: a folder, in UTF-8, names of at most 255 bytes, and "
        "after ~ no user but one of this machine"
    )


def run_config(config: DictConfig) -> tuple[Path, JobResult] | None:
    """Run one job; print its tables. Returns the experiment's folder and what the job left, None for
    a dry run."""
    if config.dry_run:
        print_dry_run(build_job(config, SharedParts()))
        return None
    from kvbench.report.experiment import Experiment, group_runs
    from kvbench.report.render.terminal import print_tables as show_tables
    from kvbench.report.sections import tables_of

    job = build_job(config)
    title = presentable(f"{job.spec.label} x {job.task}")
    with progress_display(title) as show, Termination() as termination:
        result = run_job(job, show, termination.example)
    folder = job.results_dir / job.experiment
    runs = tuple(load_run(path) for path in result.folders.values())
    show_tables(tables_of(Experiment(job.experiment, folder, runs, tuple(group_runs(runs)))))
    if config.logger.name == "wandb" and result.complete:  # of several shards, the last logs
        from kvbench.report.wandb.log import log_runs

        logger = config.logger
        log_runs(
            runs,
            project=logger.project,
            entity=logger.entity,
            mode=logger.mode,
            timeout_s=logger.timeout_s,
        )
    return folder, result


def check_briefly(config: DictConfig, made: SharedParts, number: int, name: str) -> None:
    """Check a job of a large dry run; print one line."""
    print_dry_run(build_job(config, made), name=f"job {number}: {name}")


def print_scores(folder: Path, *, every: bool) -> None:
    """Print what the jobs of a sweep came to: of a model with several tasks, task x method.

    Args:
        every: also the table of each task, which jobs of other processes did not print here.
    """
    from kvbench.report.experiment import load_experiment
    from kvbench.report.render.terminal import print_tables as show_tables
    from kvbench.report.sections import tables_of

    tables = tables_of(load_experiment(folder))
    whole = [table.name for table in tables if table.name.startswith("overview-")]
    covered = tuple(name.removeprefix("overview") for name in whole)  # -<model>
    if not every and whole:
        tables = [t for t in tables if t.name in whole or not t.name.endswith(covered)]
    show_tables(tables)


def finish(folder: Path) -> None:
    """Rebuild the experiment's tables, figures and page from its records; print where they are.

    Of several processes that finish at once, one builds at a time; one that had to wait builds only
    if there are records that the page before it did not have.
    """
    from kvbench.report.build import build_report

    lock = FileLock(folder / ".lock-report")
    built = folder / ".lock-report-of"
    try:
        lock.acquire(timeout=0)
        waited = False
    except Timeout:
        lock.acquire()
        waited = True
    try:
        found = _records_state(folder)
        if waited and built.is_file() and read_file(built) == found.encode():
            print(printable(f"page: {folder / 'report.html'}"))
            return
        paths = build_report(folder)
        replace(built, found.encode(), sync=False)
    finally:
        lock.release()
    for warning in paths.warnings:
        complain(warning)
    from kvbench.report.wandb.overview import log_overview

    log_overview(folder, paths.scores, paths.manifest)
    print(printable(f"page: {paths.page}"))
    _print_wandb(folder / "wandb")


def _print_wandb(place: Path) -> None:
    """Say where W&B's copy is, and what sends it."""
    from kvbench.report.wandb.send import not_taken

    runs = sorted(place.glob("offline-run-*"))
    waiting = len(not_taken(runs))
    if waiting:
        print(printable(f"W&B: {place} ({waiting} runs, not sent)"))
        print(printable(f"to send them: wandb sync {shlex.quote(str(place))}"))
    elif runs:
        print(printable(f"W&B: {place} ({len(runs)} runs, sent)"))


def _records_state(folder: Path) -> str:
    """Changes with every record of an experiment."""
    files = sorted(file for run in folder.glob("*/*/*") for file in record_files(run))
    return json.dumps([[str(file.relative_to(folder)), file.stat().st_size] for file in files])
