"""A copy of an experiment in Weights & Biases; local files never depend on it.

One W&B run per method and rate, grouped by job (a model on a task), so that W&B's own grouping, charts
and sweeps compare methods; and one of the whole experiment with its page and charts. Their ids are made
from what they are about, so that logging again replaces what was logged. Runs are written offline, into
``<results>/<experiment>/wandb``, and then sent by W&B's own client in a process of its own if that is
wanted (`kvbench.report.wandb_client`); ``wandb sync <that folder>`` sends what is left at any time.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from kvbench.errors import UserError, first_line
from kvbench.errors.options import Positive, fits, refusal
from kvbench.records.read import Run
from kvbench.report.wandb_client import QUIET, Mode, client, end, resolved, send

if TYPE_CHECKING:
    import pandas as pd
    import wandb

    from kvbench.report.build import ReportPaths
    from kvbench.report.experiment import Group
    from kvbench.report.figures import Drawn
    from kvbench.report.variants import Variant

log = logging.getLogger(__name__)
OVERVIEW = "overview"
"""Job type of the W&B run of an experiment."""
MAX_PREDICTIONS = 500
"""Rows of a table of predictions."""
_MADE = ("seed", "command", "code_revision", "versions", "hardware", "started")


def check_logger(mode: str, timeout_s: float) -> None:
    """Refuse what `log_runs` cannot work with.

    Raises:
        UserError: one line with what is allowed.
    """
    for name, value, hint in (("mode", mode, Mode), ("timeout_s", timeout_s, Positive)):
        if not fits(hint, value):
            raise UserError(refusal(f"logger.{name}", value, hint))


def log_runs(
    runs: Sequence[Run],
    *,
    project: str = "kvbench",
    entity: str | None = None,
    mode: Mode = "auto",
    timeout_s: float = 120.0,
    predictions: bool = False,
) -> int:
    """Log runs to W&B, one W&B run for each method and rate of a job: a model, task, seed and budget.

    All of it is written to disk before anything is sent. Whatever goes wrong is a warning of one
    line and nothing else; a server that fails is not asked again by this process.

    Args:
        runs: as `kvbench.records.read.load_runs` gives them.
        mode: "auto" is online when WANDB_API_KEY is set (and WANDB_MODE does not say otherwise),
            else offline.
        timeout_s: seconds that sending may take.
        predictions: also the methods' answers, side by side.

    Returns:
        How many W&B runs were written.

    Raises:
        UserError: an unknown mode, or a timeout that is not positive.
    """
    check_logger(mode, timeout_s)
    mode, jobs = resolved(mode), dict[str, list[Run]]()
    for run in runs if mode != "disabled" else ():
        if not run.records.empty:
            about = [run.manifest.get(key) for key in ("model", "task", "seed")]
            budget = (run.manifest.get("config") or {}).get("budget")
            jobs.setdefault(json.dumps([*about, budget]), []).append(run)
    written: list[Path] = []
    for job in jobs.values():

        def write(job: Sequence[Run] = job) -> None:
            written.extend(_log_job(job, predictions, {"project": project, "entity": entity}))

        _write(job[0].folder.parents[2], job[0].folder.name, write)
    if mode == "online" and written:
        send(written, timeout_s)
    return len(written)


def _write(experiment: Path, what: str, make: Callable[[], object]) -> None:
    """One process at a time writes W&B's copies of an experiment. A failure, of its folder too, is one
    line: a copy's failure must not end a sweep."""
    before, logging.raiseExceptions = logging.raiseExceptions, False  # of W&B's log on a full disk
    try:
        (experiment / "wandb").mkdir(parents=True, exist_ok=True)
        with FileLock(experiment / "wandb" / ".lock"):
            make()
    except Exception as error:  # noqa: BLE001 - W&B's, whatever it is
        log.warning("W&B: %s was not logged: %s", what, first_line(error))
    finally:
        logging.raiseExceptions = before


def run_id(*about: object) -> str:
    """A W&B run's id: the same for the same experiment, and for the same config hashes."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


@contextmanager
def _open(
    experiment: Path, code: str, title: str, manifest: Mapping[str, Any], **about: Any
) -> Iterator[wandb.Run]:
    """A W&B run in ``<experiment>/wandb``, in the place of an earlier copy; a failure leaves none.

    Args:
        manifest: how it was made. about: for ``wandb.init``.
    """
    import wandb  # not above: slow to import, and needed only here

    made = {key: manifest.get(key) for key in ("experiment", *_MADE)}
    off = ("silent", "x_disable_stats", "disable_git", "disable_code", "x_disable_meta")
    quiet: dict[str, Any] = dict.fromkeys(off, True)
    for old in (experiment / "wandb").glob(f"*run-*-{code}"):
        shutil.rmtree(old)
    for name, value in {**QUIET, "WANDB_SILENT": "true"}.items():
        os.environ.setdefault(name, value)
    before = os.environ.get("WANDB_DATA_DIR")
    run = wandb.init(
        mode="offline",
        dir=str(experiment.resolve()),  # its service may have another working directory
        id=code,
        name=title,
        reinit="create_new",
        notes=f"Made by: {made['command']}\nCode: {made['code_revision']}",
        settings=wandb.Settings(console="off", **quiet),
        **{"group": str(made["experiment"]), **about, "config": {**made, **about["config"]}},
    )
    place = Path(run.dir).parent
    os.environ["WANDB_DATA_DIR"] = str(place)  # tables' files, and copies of artifacts
    try:
        yield run
        run.finish()
    except BaseException:
        run.finish(exit_code=1)
        shutil.rmtree(place)
        raise
    finally:
        os.environ.pop("WANDB_DATA_DIR")
        os.environ.update({} if before is None else {"WANDB_DATA_DIR": before})


class Live(ExitStack):
    """A job in W&B while it runs, where the mode is online: each method's means of what there is so far,
    written to offline runs, which W&B's own client sends as they grow. `log_runs` puts the whole in
    their place. What goes wrong is one warning; the job goes on. A context manager.

    Args:
        experiment: its folder. names: of the job's runs: experiment, model, task, method, config_hash.
        logger: as `log_runs` takes them.
    """

    def __init__(
        self, experiment: Path, names: Sequence[Mapping[str, Any]], logger: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._experiment, self._names = experiment, names
        self._where = {key: logger[key] for key in ("project", "entity")}
        self._wanted = resolved(logger["mode"]) == "online"
        self._runs: dict[str, wandb.Run] = {}

    def log(self, means: Mapping[str, float]) -> None:
        """Log means by ``<method>/<measure>``; the runs are opened by the first."""
        if not self._wanted:
            return
        self._wanted = False  # until it went well

        def write() -> None:
            if not self._runs:
                self._open_runs()
            for method, run in self._runs.items():
                own = {k.removeprefix(f"{method}/"): mean for k, mean in means.items()}
                run.log({name: mean for name, mean in own.items() if "/" not in name})
            self._wanted = True

        _write(self._experiment, "a job that runs", write)

    def _open_runs(self) -> None:
        """A run of each method, and the client that sends all of them."""
        for names in self._names:
            code = run_id(*run_names(names))
            job = f"{names['model']}/{names['task']}"
            about = {"config": {"method": names["method"]}, "group": job, **self._where}
            title = f"{job}/{names['method']}"
            opened = _open(self._experiment, code, title, names, job_type=names["task"], **about)
            self._runs[str(names["method"])] = self.enter_context(opened)
        places = [Path(run.dir).parent for run in self._runs.values()]
        words = ["beta", "sync", "--live", "-n", str(len(places)), *map(str, places)]
        self.callback(end, client(*words, place=places[0].parent))

    def __exit__(self, *_: object) -> None:
        if self._runs:
            _write(self._experiment, "a job that ran", partial(super().__exit__, None, None, None))


def _log_job(runs: Sequence[Run], predictions: bool, where: Mapping[str, Any]) -> list[Path]:
    """The W&B runs of a job, one of each method. Their group is the job."""
    from kvbench.report.experiment import group_runs
    from kvbench.report.frame import tidy

    group = group_runs(runs)[0]
    frame = tidy(group)
    names_of = [run_names(run.manifest) for run in runs]
    runs_by_name = dict(zip(names_of, runs, strict=True))
    first = group.records.drop_duplicates("variant").to_dict("records")
    names_by_label = {str(record["variant"]): run_names(record) for record in first}  # type: ignore[arg-type]
    places = []
    for variant in group.variants:
        names = names_by_label[variant.label]
        scores = frame[frame["variant"] == variant.label]
        run, alone = runs_by_name[names], _alone(group, variant)
        places.append(_log_variant(run, run_id(*names), alone, scores, predictions, where))
    return places


def run_names(names: Mapping[str, Any]) -> tuple[str, ...]:
    """What tells a run of kvbench's from all others, of a manifest or a record."""
    return tuple(
        str(names[key]) for key in ("experiment", "model", "task", "method", "config_hash")
    )


def _alone(group: Group, variant: Variant) -> Group:
    """The group with one variant."""
    records = group.records[group.records["variant"] == variant.label]
    baseline = {variant.label: None}
    return dataclasses.replace(group, variants=(variant,), records=records, baseline=baseline)


def _log_variant(
    run: Run,
    code: str,
    group: Group,
    scores: pd.DataFrame,
    predictions: bool,
    where: Mapping[str, Any],
) -> Path:
    """A method at a rate: its settings, its means by the number of examples, its scores by dataset, its
    records, its heatmap, and its answers where that is wanted.

    Args:
        code: the W&B run's id. group: with this variant alone. scores: its rows of the tidy frame.
    """
    import pandas as pd

    from kvbench.report.ratios import rate_text, ratios_of

    manifest, (variant,) = run.manifest, group.variants
    by_rate = scores[(scores["by"] == "rate") & (scores["measure"] == "score")]
    only_rate = variant.rate if by_rate.empty else None  # a probe measures at several in one run
    rate = [] if only_rate is None else [f"rate {only_rate:g}"]
    measured = [] if only_rate is None else [rate_text(only_rate, ratios_of(group)["ratio"])]
    seed = f"seed{manifest.get('seed')}"
    budget = (manifest.get("config") or {}).get("budget") or {}
    job = "/".join((group.model, group.task, _budget_text(budget), seed))
    config = {
        "model": group.model,
        "task": group.task,
        "method": variant.method,
        "variant": variant.label,
        "rate": only_rate,
        "config_hash": manifest.get("config_hash"),
        "run": dict(manifest.get("identity") or {}),
        "config": dict(manifest.get("config") or {}),
    }
    tags = dict.fromkeys(tag[:64] for tag in (group.model, group.task, variant.method, *rate))
    with _open(
        run.folder.parents[2],
        code,
        "/".join((group.model, group.task, variant.method, *measured, seed)),
        manifest,
        config=config,
        job_type=group.task,
        group=job[:128],
        tags=list(tags),
        **where,
    ) as logged:
        logged.define_metric("examples")
        logged.define_metric("*", step_metric="examples")
        numbers = _numbers(group)
        means = numbers.expanding().mean()
        for count, row in enumerate(means.to_dict("records"), start=1):
            known = {str(name): mean for name, mean in row.items() if not math.isnan(mean)}
            logged.log({"examples": count, **known})
        values: dict[str, Any] = {"examples": len(numbers)}
        values |= {"scores": _table(scores), "records": _table(_plain_records(group))}
        values |= {k: v for k, v in _extras(group, predictions).items() if v is not None}
        logged.log(values)
        last = {str(name): mean for name, mean in numbers.mean().items() if not math.isnan(mean)}
        summary = {k.rpartition("/")[2]: v for k, v in scalars_of(scores).items()}
        for value, mean in zip(by_rate["value"], by_rate["mean"], strict=True):
            summary[f"score at rate {value}"] = mean
            at_rate = pd.to_numeric(group.good["rate"]).eq(float(value))
            summary[f"ratio at rate {value}"] = float(group.good.loc[at_rate, "ratio"].mean())
        failed = len(group.records) - len(group.good)
        logged.summary.update({**last, **summary, "examples": len(numbers), "failed": failed})
        return Path(logged.dir).parent


def _budget_text(budget: Mapping[str, Any]) -> str:
    """What the methods of a job may keep, as the name of their group says it."""
    if budget.get("size") is not None:
        return f"{budget['size']} entries"
    if budget.get("total_rate") is not None:
        return f"rate {budget['total_rate']} of the prompt"
    return f"rate {budget.get('rate')} of the middle"


_COUNTED = ("ratio", "cache_bytes", "entries_mean", "prefill_s", "compress_s", "decode_s")
"""Fields of records, beside scores, that are of interest as means."""


def _numbers(group: Group) -> pd.DataFrame:
    """Scores and costs of the examples in their order."""
    names = ["score", *group.meta.measures, *_COUNTED]
    present = [name for name in dict.fromkeys(names) if name in group.records]
    return group.records[present].astype(float)


def _plain_records(group: Group) -> pd.DataFrame:
    """The records less what a table in W&B cannot show or nobody reads there: texts and lists."""
    names = ["example_id", "dataset", "seed", "status", "prompt_tokens", "new_tokens"]
    names += [name for name in group.meta.breakdown if name in group.records]
    kept = group.records[[name for name in dict.fromkeys(names) if name in group.records]]
    return kept.join(_numbers(group))


def _extras(group: Group, predictions: bool) -> dict[str, Any]:
    """The heatmap of a task that has one, and the answers where they are wanted; else None."""
    from kvbench.records.figures import Heatmap
    from kvbench.report.figures import heatmaps

    spec = group.meta.figure(Heatmap)
    drawn = None if spec is None or group.good.empty else heatmaps(group, spec)
    return {
        "heatmap": None if drawn is None else _image(drawn),
        "predictions": _answers(group) if predictions else None,
    }


def _image(drawn: Drawn) -> wandb.Image:
    """A figure as a picture with its caption."""
    import wandb
    from PIL import Image

    picture = Image.open(io.BytesIO(drawn.encoded("png")))
    return wandb.Image(picture, caption=f"{drawn.title}. {drawn.caption}")


def log_overview(folder: Path, paths: ReportPaths) -> bool:
    """Write the W&B run of a whole experiment: its page, every method on every task, and the charts of
    scores against bytes and of needles; send it where its jobs' logger says so.

    Args:
        folder: the experiment's. paths: what `build_report` gave.

    Returns:
        Whether it was written: not where nothing is ranked, or the logger is none or disabled.
    """
    manifest, scores = paths.manifest, paths.scores
    logger = (manifest.get("config") or {}).get("logger") or {}
    mode = resolved(logger["mode"]) if logger.get("name") == "wandb" else "disabled"
    if mode == "disabled" or scores.empty:
        return False
    import pandas as pd
    import wandb

    from kvbench.report.frame import totals

    name = f"{manifest['experiment']}/{OVERVIEW}"
    code = run_id(str(manifest["experiment"]), OVERVIEW)
    about = {"project": logger["project"], "entity": logger["entity"], "job_type": OVERVIEW}

    def write() -> None:
        config = {"kind": OVERVIEW}
        with _open(folder, code, name, manifest, config=config, **about) as run:
            total = pd.concat([totals(scores), totals(scores, "ratio")], ignore_index=True)
            total["column"] = total["task"] + ": " + total["measure"]
            keys = ["model", "variant"]
            spread = total.pivot_table(index=keys, columns="column", values="mean", sort=False)
            values: dict[str, Any] = {"task_by_method": _table(spread.reset_index())}
            for drawn in paths.drawn:
                if drawn.kind in ("memory", "heatmap"):
                    values[drawn.name] = _image(drawn)
            run.log(values)
            page = wandb.Artifact(f"report-{run.id}", "report")
            page.add_file(str(paths.page))
            run.log_artifact(page)
            for (model, task), part in scores.groupby(["model", "task"], sort=False):
                run.summary.update({f"{model}/{task}/{k}": v for k, v in scalars_of(part).items()})

    _write(folder, name, write)
    written = list((folder / "wandb").glob(f"offline-run-*-{code}"))  # none where it failed
    if written and mode == "online":
        send(written, float(logger["timeout_s"]))
    return bool(written)


def scalars_of(frame: pd.DataFrame) -> dict[str, float]:
    """Score, difference and ratio of every variant of a tidy frame, for columns and charts of runs."""
    from kvbench.report.frame import totals

    return {
        f"{label}/{name}": float(value)
        for name in ("score", "difference", "ratio")
        for label, value in totals(frame, name)["mean"].items()
        if not math.isnan(value)
    }


def _answers(group: Group) -> wandb.Table | None:
    """The methods' answers to one example in a line; None where the task has no answers."""
    import pandas as pd

    from kvbench.report.answers import sample_of

    lines = []
    for example in sample_of(group, MAX_PREDICTIONS)[0]:
        line: dict[str, Any] = {"example_id": example.example_id, "seed": example.seed}
        line |= {**example.fields, "prompt_tail": example.prompt_tail, "answer": example.expected}
        for answer in example.answers:
            line |= {
                f"{answer.label}: prediction": answer.text,
                f"{answer.label}: score": answer.score,
            }
        lines.append(line)
    return _table(pd.DataFrame(lines)) if lines else None


def _table(frame: pd.DataFrame) -> wandb.Table:
    import wandb

    return wandb.Table(dataframe=frame.astype(object).where(frame.notna(), None))
