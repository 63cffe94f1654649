"""Makes the job of checked settings, and runs it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from kvbench.cli.config import Keys, Settings
from kvbench.cli.construct import constructed, methods_of
from kvbench.engine.answer import Sampling
from kvbench.engine.model import ModelSpec, check_config_class, resolve_device, resolve_dtype
from kvbench.errors import presentable
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.records.log import write_log
from kvbench.records.read import load_run
from kvbench.records.shards import Shard
from kvbench.run import provenance
from kvbench.run.job import Job, MethodConfig
from kvbench.run.plan import Plan, TaskPlan
from kvbench.run.progress import progress_display
from kvbench.run.runner import JobResult, run_job
from kvbench.run.session import Session
from kvbench.tasks.base import Task


def model_line(spec: ModelSpec) -> str:
    """The model's name, and the class of its config where that is known before the model is loaded."""
    config_class = check_config_class(spec)
    return f"model {spec.label} ({config_class})" if config_class else f"model {spec.label}"


def settings_checked(job: Job) -> str:
    """One line for a dry run: the model, task and methods that were made of a job's settings."""
    plan = job.plan
    task = plan.task if isinstance(plan, TaskPlan) else plan
    methods = ", ".join(job.methods)
    return (
        f"settings checked: {model_line(job.session.spec)}, task {type(task).__name__}, {methods}"
    )


def build_job(settings: Settings, shared: dict[str, Any] | None = None) -> Job:
    """The job of these settings, checked as far as possible without loading a model. Model, tokenizer
    and examples are `shared` by the jobs of a process, see `Session.once`."""
    device = resolve_device(settings.device)
    spec: ModelSpec = constructed(settings.model, "model", ModelSpec)
    check_config_class(spec)
    if not re.search(r"\w", spec.label):  # its results' folder could not be named after it
        raise KVError(f"model.name is {spec.label!r}; allowed: text with a letter or digit in it")
    # Each method under each budget, by a label; a method that no budget changes is there once.
    methods: dict[str, tuple[Method, Budget]] = {}
    configs: dict[str, MethodConfig] = {}
    for name, method in methods_of(settings.methods).items():
        for at, config in settings.budgets.items():
            label = name + at if method.uses_budget else name
            if label not in methods:
                methods[label] = method, constructed(config, "budget", Budget)
                configs[label] = MethodConfig(name, settings.methods[name], config)
    task: Any = constructed(settings.task, "task", Task, Plan)
    plan: Plan = TaskPlan(task, settings.limit) if isinstance(task, Task) else task
    unhashed = task.unhashed if isinstance(task, Task) else ()
    session = Session(
        spec=spec,
        device=device,
        dtype=resolve_dtype(settings.dtype, device, spec.dtype),
        seed=settings.seed,
        compress_after=settings.compress_after,
        example_timeout=settings.example_timeout,
        decode=settings.decode,
        sampling=constructed(settings.sampling, "sampling", Sampling),
        generation_config=settings.generation_config,
        shared={} if shared is None else shared,
    )
    return Job(
        experiment=settings.experiment_name,
        task=settings.task_label,
        results_dir=Path(settings.results_dir).expanduser(),
        session=session,
        plan=plan,
        methods=methods,
        configs=configs,
        task_config={key: value for key, value in settings.task.items() if key not in unhashed},
        limit=settings.limit,
        shard=Shard.parse(settings.shard),
        batch_size=settings.batch_size,
        retry_failed=settings.retry_failed,
        rerun=str(settings.rerun) if settings.rerun else None,
        lock_timeout=settings.lock_timeout,
        extra={
            "config": vars(settings),
            "command": provenance.command(),
            "versions": provenance.versions(),
            "code_revision": provenance.code_revision(),
            "hardware": provenance.hardware(device),
        },
    )


def run_logged(job: Job, logger: Keys, *, since: float | None = None) -> JobResult:
    """Run one job, note its seconds, and log it to W&B where `logger` asks for that. `since`: see
    `run_job`."""
    title = presentable(f"{job.session.spec.label} x {job.task}")
    with progress_display(title) as progress:
        result = run_job(job, progress, since=since)
    write_log(
        job.results_dir / job.experiment,
        model=job.session.spec.label,
        task=job.task,
        written=result.written,
        seconds=result.seconds,
    )
    if logger["name"] == "wandb" and result.complete:  # of several shards, the last logs the run
        from kvbench.report.wandb import log_runs

        options = {key: value for key, value in logger.items() if key != "name"}
        log_runs([load_run(path) for path in result.folders.values()], **options)
    return result
