"""A copy of an experiment in Weights & Biases; local files never depend on it.

One W&B run per method and rate, grouped by job (a model on a task), so that W&B's own grouping, charts
and sweeps compare methods; and one of the whole experiment with its page and charts. Their ids are made
from what they are about, so that logging again replaces what was logged. Runs are written offline, into
``<results>/<experiment>/wandb``, and then sent by W&B's own client in a process of its own if that is
wanted: a server that is down, slow or broken loses nothing, and ``wandb sync <that folder>`` sends what
is left at any time.

``python -m kvbench.report.wandb <results>/<experiment>`` builds a W&B report of an experiment.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import logging
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from filelock import FileLock

from kvbench.errors import UserError, first_line, presentable, redact
from kvbench.errors.options import Positive, fits, refusal
from kvbench.records.durable import make_folder, replace
from kvbench.records.read import Run

if TYPE_CHECKING:
    import pandas as pd
    import wandb
    import wandb_workspaces.reports.v2 as wr

    from kvbench.report.build import ReportPaths
    from kvbench.report.experiment import Experiment, Group, Variant
    from kvbench.report.figures import Drawn

log = logging.getLogger(__name__)
Mode = Literal["auto", "online", "offline", "disabled"]
OVERVIEW = "overview"
"""Job type of the W&B run of an experiment."""
MAX_PREDICTIONS = 500
"""Rows of a table of predictions."""
SEND_S = 600.0
"""Seconds that sending for a report may take."""
_QUIET = {"WANDB_ERROR_REPORTING": "false"}
_MADE = ("seed", "command", "code_revision", "versions", "hardware", "started")
_FAILED: set[Path] = set()
"""Where this process could not send from: said once, and not tried again."""


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
    mode, jobs = _resolved(mode), dict[str, list[Run]]()
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
        _send(written, timeout_s)
    return len(written)


def _resolved(mode: Mode) -> Mode:
    """The mode that "auto" stands for."""
    wanted, known = os.environ.get("WANDB_MODE"), os.environ.get("WANDB_API_KEY")
    if mode == "auto" and wanted != "disabled":
        return "online" if known and wanted != "offline" else "offline"
    return "disabled" if mode == "auto" else mode


def _write(experiment: Path, what: str, make: Callable[[], object]) -> None:
    """One process at a time writes W&B's copies of an experiment. A failure, of its folder too, is one
    line: a copy's failure must not end a sweep."""
    before, logging.raiseExceptions = logging.raiseExceptions, False  # of W&B's log on a full disk
    try:
        make_folder(experiment / "wandb", experiment)
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
    for name, value in {**_QUIET, "WANDB_SILENT": "true"}.items():
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
        self._wanted = _resolved(logger["mode"]) == "online"
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
        self.callback(_end, _client(*words, place=places[0].parent))

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
    manifest, (variant,) = run.manifest, group.variants
    by_rate = scores[(scores["by"] == "rate") & (scores["measure"] == "score")]
    only_rate = variant.rate if by_rate.empty else None  # a probe measures at several in one run
    rate = [] if only_rate is None else [f"rate {only_rate:g}"]
    seed = f"seed{manifest.get('seed')}"
    budget = (manifest.get("config") or {}).get("budget") or {}
    job = "/".join((group.model, group.task, f"rate {budget.get('rate')}", seed))
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
        "/".join((group.model, group.task, variant.method, *rate, seed)),
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
        found: dict[str, Any] = {"examples": len(numbers)}
        found |= {"scores": _table(scores), "records": _table(_plain_records(group))}
        found |= {k: v for k, v in _extras(group, predictions).items() if v is not None}
        logged.log(found)
        last = {str(name): mean for name, mean in numbers.mean().items() if not math.isnan(mean)}
        summary = {k.rpartition("/")[2]: v for k, v in scalars_of(scores).items()}
        for value, mean in zip(by_rate["value"], by_rate["mean"], strict=True):
            summary[f"score at rate {value}"] = mean
        failed = len(group.records) - len(group.good)
        logged.summary.update({**last, **summary, "examples": len(numbers), "failed": failed})
        return Path(logged.dir).parent


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
    mode = _resolved(logger["mode"]) if logger.get("name") == "wandb" else "disabled"
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
            found: dict[str, Any] = {"task_by_method": _table(spread.reset_index())}
            for drawn in paths.drawn:
                if drawn.name.endswith(("-ratio", "-heatmap")):
                    found[drawn.name] = _image(drawn)
            run.log(found)
            page = wandb.Artifact(f"report-{run.id}", "report")
            page.add_file(str(paths.page))
            run.log_artifact(page)
            for (model, task), part in scores.groupby(["model", "task"], sort=False):
                run.summary.update({f"{model}/{task}/{k}": v for k, v in scalars_of(part).items()})

    _write(folder, name, write)
    written = list((folder / "wandb").glob(f"offline-run-*-{code}"))  # none where it failed
    if written and mode == "online":
        _send(written, float(logger["timeout_s"]))
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
        for one in example.answers:
            line |= {f"{one.label}: prediction": one.text, f"{one.label}: score": one.score}
        lines.append(line)
    return _table(pd.DataFrame(lines)) if lines else None


def _table(frame: pd.DataFrame) -> wandb.Table:
    import wandb

    return wandb.Table(dataframe=frame.astype(object).where(frame.notna(), None))


def _send(folders: Sequence[Path], timeout_s: float) -> None:
    """Send offline runs (``offline-run-*``) to the W&B server; one that is there already is replaced.
    What was not taken is one warning, without the API key; the same place is not tried again."""
    place = folders[0].parent
    if place in _FAILED:
        return
    process = _client("sync", *map(str, folders), place=place, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate(timeout=timeout_s)
        said = [line for line in output.splitlines() if "error" in line.lower()]
        why = (said or [f"`wandb sync` ended with status {process.returncode}"])[-1]
    except BaseException as error:
        _end(process)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        why = f"not done after {timeout_s:g} s"
    left = not_taken(folders)
    if left:
        _FAILED.add(place)
        log.warning(
            "W&B: %s. %d of %d runs were not sent; they, and what this process logs from now on, are on"
            " disk. Send them later with: wandb sync %s",
            *(presentable(redact(why)), len(left), len(folders), shlex.quote(str(place))),
        )


def _client(*words: str, place: Path, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
    """W&B's own command line with these words, for runs in this folder."""
    environment = {**_QUIET, **os.environ, "WANDB_DIR": str(place.parent)}  # its own logs
    environment.pop("WANDB_MODE", None)
    return subprocess.Popen(
        [sys.executable, "-m", "wandb", *words],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the client's helper processes end with it
    )


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def not_taken(folders: Sequence[Path]) -> list[Path]:
    """Those of the runs that the client has not marked as sent (and nobody has replaced since)."""
    return [folder for folder in folders if folder.exists() and not any(folder.glob("*.synced"))]


def build_wandb_report(experiment: Experiment, project: str, entity: str = "") -> wr.Report:
    """The report, not yet published: published numbers beside ours, the first table of each model and
    task, the charts and table of the experiment's own run, and how to reproduce it."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    from kvbench.report.frame import tidy
    from kvbench.report.page import how_to_reproduce
    from kvbench.report.published import beside, published_tables
    from kvbench.report.render import markdown
    from kvbench.report.tables import tables_of

    tables = published_tables(beside(experiment))
    for group in experiment.groups:
        tables += [table for table in tables_of(group, tidy(group)) if table.columns][:1]
    blocks: list[Any] = [wr.TableOfContents(), wr.H1("Scores")]
    blocks += [wr.MarkdownBlock(text=markdown(table)) for table in tables]
    of = expr.Config("experiment") == str(experiment.runs[0].manifest["experiment"])
    whole = wr.Runset(name=OVERVIEW, filters=expr.And(of, expr.Config("kind") == OVERVIEW))
    panels: list[Any] = [wr.MediaBrowser(), wr.WeavePanelSummaryTable(table_name="task_by_method")]
    blocks += [wr.H1("All methods side by side"), wr.PanelGrid(runsets=[whole], panels=panels)]
    blocks.append(wr.H1("How to reproduce"))
    for what, lines in how_to_reproduce(experiment):
        blocks += [wr.H3(what), wr.CodeBlock(code="\n".join(lines), language=None)]
    title = f"kvbench: {experiment.name}"[:128]
    return wr.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 records that cannot be read, or a server that took nothing."""
    from kvbench.report.__main__ import in_a_line
    from kvbench.report.experiment import load_experiment

    parser = argparse.ArgumentParser(prog="python -m kvbench.report.wandb", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    parser.add_argument("--project", default="kvbench", help="W&B project (default: kvbench)")
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="its owner")
    known = bool(os.environ.get("WANDB_API_KEY"))
    send_it: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": known}
    parser.add_argument("--send", **send_it, help="publish (default: if WANDB_API_KEY is set)")
    options = parser.parse_args(arguments)

    def work() -> None:
        for folder in map(Path, options.folders):
            experiment = load_experiment(folder)
            report = build_wandb_report(experiment, options.project, options.entity)
            make_folder(folder / "wandb", folder)
            text = report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
            replace(folder / "wandb" / "report.json", text.encode(), sync=False)
            print(f"{folder / 'wandb' / 'report.json'}: built")
            if options.send:
                where = {"project": options.project, "entity": options.entity or None}
                log_runs(experiment.runs, **where, mode="online", timeout_s=SEND_S)
                report.save()
                print(f"report: {report.url}")

    return in_a_line(work, options.folders, "wandb")


if __name__ == "__main__":
    sys.exit(main())
