"""A copy of an experiment in Weights & Biases; local files never depend on it.

One W&B run per run folder, one per (model, task) that sets the methods side by side, and one of the
whole experiment. Their ids are made from what they are about, so that logging again replaces what was
logged. Runs are written offline, into ``<results>/<experiment>/wandb``, and then sent by W&B's own
client in a process of its own if that is wanted: a server that is down, slow or broken loses nothing,
and ``wandb sync <that folder>`` sends what is left at any time.

``python -m kvbench.report.wandb <results>/<experiment>`` builds a W&B report of an experiment.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import logging
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
from filelock import FileLock

from kvbench.errors import first_line, needs_extra, redact
from kvbench.records.durable import make_folder, read_file, replace
from kvbench.records.figures import Heatmap, Times
from kvbench.records.read import MANIFEST, Run, StoreError, load_run, record_files
from kvbench.report.experiment import BASELINE, Experiment, Group, group_runs, load_experiment
from kvbench.report.frame import tidy, totals
from kvbench.report.objective import scalars_of

if TYPE_CHECKING:
    import wandb
    import wandb_workspaces.reports.v2 as wr

    from kvbench.report.build import ReportPaths
    from kvbench.report.figures import Drawn

log = logging.getLogger(__name__)
Mode = Literal["auto", "online", "offline", "disabled"]
MODES = ("auto", "online", "offline", "disabled")
COMPARISON, OVERVIEW = "comparison", "overview"
"""Job type and tag of the W&B runs that set methods side by side, and of those of an experiment."""
MAX_PREDICTIONS = 500
"""Rows of a table of predictions."""
PROBE_S, SEND_S = 10.0, 600.0
"""Seconds within which the server must answer at all, and that sending for a report may take."""
_QUIET = {"WANDB_ERROR_REPORTING": "false"}
_ABOUT = ("experiment", "model", "task", "method", "config_hash")
_MADE = ("seed", "command", "code_revision", "versions", "hardware", "started")


class NotSent(RuntimeError):
    """Why the server did not take everything: one line, without the API key."""


def check_logger(mode: str, timeout_s: float) -> None:
    """Refuse what `log_runs` cannot work with.

    Raises:
        ValueError: one line with what is allowed.
    """
    if mode not in MODES:
        raise ValueError(f"logger.mode is {mode!r}; allowed: {', '.join(MODES)}")
    if not isinstance(timeout_s, int | float) or not 0 < timeout_s < math.inf:
        raise ValueError(f"logger.timeout_s is {timeout_s!r}; allowed: a positive number")


def log_runs(
    runs: Sequence[Run],
    *,
    project: str = "kvbench",
    entity: str | None = None,
    mode: Mode = "auto",
    timeout_s: float = 120.0,
) -> int:
    """Log runs to W&B, one W&B run each, and one for every (model, task) that has several variants.

    All of it is written to disk before anything is sent. Whatever goes wrong is a warning of one
    line and nothing else; a server that fails is not asked again by this process.

    Args:
        runs: as `kvbench.records.read.load_runs` gives them. Those beside them on disk (same experiment,
            model and task) serve for differences and for the comparison.
        mode: "auto" is online when WANDB_API_KEY is set (and WANDB_MODE does not say otherwise),
            else offline.
        timeout_s: seconds that sending may take.

    Returns:
        How many runs were logged.

    Raises:
        ValueError: an unknown mode, or a timeout that is not positive.
    """
    check_logger(mode, timeout_s)
    mode = _resolved(mode)
    tasks: dict[Path, list[Path]] = {}
    for run in runs if mode != "disabled" else ():
        if not run.records.empty:
            tasks.setdefault(run.folder.parent, []).append(run.folder)
    where = {"project": project, "entity": entity}
    found = [_log_task(task, folders, where) for task, folders in tasks.items()]
    written = [folder for both in found for folders in both for folder in folders]
    if mode == "online" and written:
        _send_written(written, timeout_s)
    return sum(len(logged) for logged, _ in found)


def _resolved(mode: Mode) -> Mode:
    """The mode that "auto" stands for."""
    wanted = os.environ.get("WANDB_MODE")
    if mode != "auto":
        return mode
    if wanted == "disabled":
        return "disabled"
    return "online" if os.environ.get("WANDB_API_KEY") and wanted != "offline" else "offline"


def id_of(about: Mapping[str, Any]) -> str:
    """A W&B run's id: the same for the same experiment, model, task, method and config hash."""
    text = json.dumps([str(about.get(key)) for key in _ABOUT])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _log_task(
    task: Path, folders: Sequence[Path], where: Mapping[str, Any]
) -> tuple[list[Path], list[Path]]:
    """Write the runs of one task folder and the comparison of all that is there; returns their W&B
    folders."""
    logged: list[Path] = []
    compared: list[Path] = []
    with _failure_warned(str(task)), _writing(task.parents[1]):
        paths = sorted({path.parent for path in task.glob(f"*/{MANIFEST}")})
        runs = [run for run in map(load_run, paths) if not run.records.empty]
        for run in (run for run in runs if run.folder in folders):
            with _failure_warned(run.folder.name):
                logged.append(_log_run(run, runs, where))
        for group in group_runs(runs):
            if len(group.variants) > 1:
                with _failure_warned(f"the comparison of {group.task} on {group.model}"):
                    compared.append(_log_comparison(group, task.parents[1], where))
    return logged, compared


@contextmanager
def _failure_warned(what: str) -> Iterator[None]:
    """A failure inside is one line: a copy's failure must not end a sweep."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - W&B's, whatever it is
        log.warning("W&B: %s was not logged: %s", what, first_line(error))


@contextmanager
def _writing(experiment: Path) -> Iterator[None]:
    """One process at a time writes W&B's copies of an experiment. W&B keeps a log of its own; where that
    cannot be written, `logging` would print a traceback for every line of it."""
    make_folder(experiment / "wandb", experiment)
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        with FileLock(experiment / "wandb" / ".lock"):
            yield
    finally:
        logging.raiseExceptions = before


@contextmanager
def _offline_run(
    folder: Path,
    about: Mapping[str, Any],
    made: Mapping[str, Any],
    where: Mapping[str, Any],
    **more: Any,
) -> Iterator[wandb.Run]:
    """A W&B run in ``<folder>/wandb``, in the place of an earlier copy; gone if the block fails.

    Args:
        about: what the id is made from, and the tags. made: config keys that say how it was made.
    """
    import wandb  # not above: slow to import, and needed only here

    name = id_of(about)
    before = {key: os.environ.get(key) for key in (*_QUIET, "WANDB_SILENT", "WANDB_DATA_DIR")}

    def drop_copies() -> None:
        for old in (folder / "wandb").glob(f"*run-*-{name}"):
            shutil.rmtree(old)

    drop_copies()
    os.environ.update({**_QUIET, **{k: v for k, v in before.items() if v}, "WANDB_SILENT": "true"})
    notes = f"Made by: {made.get('command')}\nCode: {made.get('code_revision')}"
    tags = [str(about[key])[:64] for key in _ABOUT[:4] if about.get(key)]  # W&B's limit
    try:
        run = wandb.init(
            mode="offline",
            dir=str(folder.resolve()),  # its service may have another working directory
            id=name,
            reinit="create_new",
            notes=notes,
            tags=list(dict.fromkeys(tags)),
            group=str(about["experiment"]),
            config={**about, **made},
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,  # the command as it was typed; the config has it without secrets
            ),
            **where,
            **more,
        )
        os.environ["WANDB_DATA_DIR"] = str(Path(run.dir).parent)  # tables' files
        try:
            yield run
        except BaseException:
            run.finish(exit_code=1)
            drop_copies()
            raise
        run.finish()
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.update({key: value})


def _log_run(run: Run, runs: Sequence[Run], where: Mapping[str, Any]) -> Path:
    """One run beside its baseline of the same seed; returns the W&B run's folder."""
    import wandb

    manifest = run.manifest
    place = [manifest.get(key) for key in ("model", "task", "seed")]
    peers = [
        other
        for other in runs
        if manifest.get("method") != BASELINE == other.manifest.get("method")
        and [other.manifest.get(key) for key in ("model", "task", "seed")] == place
    ]
    group = group_runs([*peers[:1], run])[0]
    frame = tidy(group)
    variant = next(v for v in group.variants if v.method == str(manifest["method"]) or not peers)
    mine = frame[frame["variant"] == variant.label]
    about = {key: manifest.get(key) for key in _ABOUT}
    made = {key: manifest.get(key) for key in _MADE}
    made["run"] = dict(manifest.get("identity") or manifest.get("config") or {})
    rate = "" if variant.rate is None else f" rate {variant.rate:g}"
    name = f"{group.model}/{group.task}/{variant.label}{rate}/seed{manifest.get('seed')}"
    with _offline_run(
        run.folder.parents[2], about, made, where, name=name, job_type=str(manifest["task"])
    ) as logged:
        media: dict[str, Any] = {"scores": _table(mine), "predictions": _predictions(group, run)}
        spec = group.meta.figure(Heatmap)
        if spec and mine["mean"].notna().any():
            from kvbench.report.figures import heatmaps

            media |= _images("heatmap", heatmaps(group, spec, [variant.label]))
        logged.log(media)
        logged.summary.update(_summary(group, mine))
        artifact = wandb.Artifact(f"records-{id_of(about)}", type="records")
        copies = Path(logged.dir).parent / "artifacts" / "records"
        copies.mkdir(parents=True, exist_ok=True)
        for file in (*record_files(run.folder), run.folder / MANIFEST):
            replace(copies / file.name, read_file(file), sync=False)
            artifact.add_file(str(copies / file.name), policy="immutable", skip_cache=True)
        logged.log_artifact(artifact)
    return Path(logged.dir).parent


def _summary(group: Group, mine: pd.DataFrame) -> dict[str, Any]:
    """Scores per dataset with intervals, differences, memory, time and failures of one variant."""
    unit = {"score_unit": group.meta.score_unit, "lower_is_better": group.meta.lower_is_better}
    found: dict[str, Any] = dict(unit)
    for row in mine[mine["by"].isin(["dataset", ""])].to_dict("records"):
        key = f"{row['value']}/{row['measure']}" if row["by"] else row["measure"]
        found |= {key: row["mean"], f"{key}_low": row["low"], f"{key}_high": row["high"]}
    total = totals(mine).iloc[0]
    found |= {"score": total["mean"], "score_low": total["low"], "score_high": total["high"]}
    found |= {"scored": total["n"], "failures": total["failures"]}
    if group.meta.figure(Times):
        from kvbench.report.tables import timings

        for row in timings(group).to_dict("records"):
            if row["variant"] == total["variant"]:
                keys = ("tokens_per_s", "decode_tokens_per_s", "peak_bytes", "cache_bytes")
                found |= {f"{row['prompt_and_new_tokens']}/{key}": row[key] for key in keys}
    return {k: v for k, v in found.items() if not (isinstance(v, float) and math.isnan(v))}


def _log_comparison(group: Group, folder: Path, where: Mapping[str, Any]) -> Path:
    """All variants of a group side by side; returns the W&B run's folder."""
    from kvbench.report.answers import sample_of
    from kvbench.report.figures import figures_of

    manifest, frame = group.manifests[-1], tidy(group)
    experiment = str(manifest["experiment"])
    about = {
        "experiment": experiment,
        "model": group.model,
        "task": group.task,
        "method": COMPARISON,
    }
    made = {key: manifest.get(key) for key in _MADE}
    made |= {"variants": group.labels, "compared_runs": [id_of(one) for one in group.manifests]}
    name = f"{group.model}/{group.task}/{COMPARISON}"
    with _offline_run(folder, about, made, where, name=name, job_type=COMPARISON) as logged:
        media: dict[str, Any] = {"scores": _table(frame)}
        lines = []
        for example in sample_of(group, MAX_PREDICTIONS)[0]:
            line: dict[str, Any] = {"example_id": example.example_id, "seed": example.seed}
            line |= {
                **example.fields,
                "prompt_tail": example.prompt_tail,
                "answer": example.expected,
            }
            for answer in example.answers:
                line |= {
                    f"{answer.label}: prediction": answer.text,
                    f"{answer.label}: score": answer.score,
                }
            lines.append(line)
        if lines:
            media["predictions"] = _table(pd.DataFrame(lines))
        for drawn in figures_of(group, frame):
            media |= _images(drawn.name.removeprefix(f"{group.task}-"), [drawn])
        logged.log(media)
        logged.summary.update(scalars_of(frame))
    return Path(logged.dir).parent


def log_overview(folder: Path, paths: ReportPaths) -> bool:
    """Write the W&B run of a whole experiment, every method on every task, and send it where its jobs'
    logger says so.

    Args:
        folder: the experiment's. paths: what `build_report` gave: its tidy frame of all that is ranked.

    Returns:
        Whether it was written: not where nothing is ranked, or the logger is none or disabled.
    """
    manifest, scores = paths.manifest, paths.scores
    logger = (manifest.get("config") or {}).get("logger") or {}
    mode = _resolved(logger["mode"]) if logger.get("name") == "wandb" else "disabled"
    if mode == "disabled" or scores.empty:
        return False
    experiment = str(manifest["experiment"])
    about = {"experiment": experiment, "method": OVERVIEW}
    made = {key: manifest.get(key) for key in _MADE}
    where = {"project": logger["project"], "entity": logger["entity"]}
    total = pd.concat([totals(scores), totals(scores, "ratio")], ignore_index=True)
    total["column"] = total["task"] + ": " + total["measure"]
    spread = total.pivot_table(
        index=["model", "variant"], columns="column", values="mean", sort=False
    )
    written = None
    with _failure_warned(f"the overview of {experiment}"), _writing(folder):
        name = f"{experiment}/{OVERVIEW}"
        with _offline_run(folder, about, made, where, name=name, job_type=OVERVIEW) as run:
            run.log({"task_by_method": _table(spread.reset_index()), "scores": _table(total)})
            for (model, task), part in scores.groupby(["model", "task"], sort=False):
                found = scalars_of(part).items()
                run.summary.update({f"{model}/{task}/{key}": value for key, value in found})
        written = Path(run.dir).parent
    if written is not None and mode == "online":
        _send_written([written], float(logger["timeout_s"]))
    return written is not None


def _table(frame: pd.DataFrame) -> wandb.Table:
    import wandb

    return wandb.Table(dataframe=frame.astype(object).where(frame.notna(), None))


def _predictions(group: Group, run: Run) -> wandb.Table:
    """The first `MAX_PREDICTIONS` answers (or examples) of a run, and their scores."""
    from kvbench.report.answers import clip

    fields = [name for name in group.meta.breakdown if name in run.records]
    shown = run.records.head(MAX_PREDICTIONS)
    texts = {name: shown[name].map(clip) for name in ("prediction", "error")}
    texts["prompt_tail"] = shown["prompt_tail"].map(lambda text: clip(text, from_end=True))
    texts["answers"] = shown["answers"].map(
        lambda a: " | ".join(map(str, a)) if isinstance(a, list) else ""
    )
    columns = ["example_id", "dataset", *fields, "prompt_tail", "answers", "prediction"]
    return _table(shown.assign(**texts)[[*columns, "score", "ratio", "status", "error"]])


def _images(name: str, figures: Sequence[Drawn]) -> dict[str, Any]:
    """Figures as W&B's images; from the second on their name bears a number."""
    import wandb
    from PIL import Image

    return {
        f"{name}_{i}" if i > 1 else name: wandb.Image(
            Image.open(io.BytesIO(drawn.png)), caption=f"{drawn.title}. {drawn.caption}"
        )
        for i, drawn in enumerate(figures, 1)
    }


def _send_written(folders: Sequence[Path], timeout_s: float) -> None:
    """Send what was written; say in one line where it is, or why it is not there."""
    place = folders[0].parent
    failed, me = place / ".not-sent-by", str(os.getpid()).encode()
    if failed.is_file() and read_file(failed) == me:
        return  # said already
    try:
        send(folders, timeout_s)
    except (NotSent, OSError) as error:
        with suppress(OSError):  # then the next ones are told again
            replace(failed, me, sync=False)
        log.warning(
            "W&B: %s. %d of %d runs were not sent; they, and what this process logs from now on, are"
            " on disk. Send them later with: wandb sync %s",
            first_line(error),
            len(not_taken(folders)),
            len(folders),
            shlex.quote(str(place)),
        )
    else:
        failed.unlink(missing_ok=True)
        log.info("W&B: %d runs sent", len(folders))


def send(folders: Sequence[Path], timeout_s: float) -> None:
    """Send offline runs (``offline-run-*``) to the W&B server; one that is there already is replaced.

    Raises:
        NotSent: some were not taken within `timeout_s` seconds.
    """
    import wandb

    probe(wandb.setup().settings.base_url)
    environment = {**_QUIET, **os.environ, "WANDB_DIR": str(folders[0].parents[1])}  # its own logs
    environment.pop("WANDB_MODE", None)
    process = subprocess.Popen(
        [sys.executable, "-m", "wandb", "sync", *map(str, folders)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that the client's helper processes end with it
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise NotSent(f"not done after {timeout_s:g} s") from None
        raise
    if not_taken(folders):
        raise NotSent(_reason(output, process.returncode))


def not_taken(folders: Sequence[Path]) -> list[Path]:
    """Those of the runs that the client has not marked as sent (and nobody has replaced since)."""
    return [folder for folder in folders if folder.exists() and not any(folder.glob("*.synced"))]


def probe(url: str) -> None:
    """Ask the server once, so that nobody waits for the client's many retries.

    Raises:
        NotSent: nothing answers there, or nothing but errors.
    """
    query = b'{"query": "query Viewer { viewer { id } }"}'
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url.rstrip('/')}/graphql", data=query, headers=headers)
    try:
        urllib.request.urlopen(request, timeout=PROBE_S).close()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code >= 500:
            raise NotSent(f"the server {url} answers {error.code}") from error
    except (OSError, ValueError) as error:  # URLError is an OSError; ValueError: not a URL
        cause = getattr(error, "reason", error)
        late = isinstance(cause, TimeoutError)
        why = f"no answer in {PROBE_S:g} s" if late else getattr(cause, "strerror", None) or cause
        raise NotSent(f"the server {url} could not be reached: {why}") from error


def _reason(output: str, status: int) -> str:
    """The last error that the client named."""
    lines = [line.removeprefix("wandb: ").strip() for line in output.splitlines()]
    found = [re.match(r"error:? (?!find detailed error logs)(.*)", line, re.I) for line in lines]
    errors = [match.group(1).rstrip(".") for match in found if match]
    if errors and errors[-1] == "<no message>":  # what the client makes of an empty 401
        return "the server refused them, as it does when it does not know the API key"
    return redact(errors[-1] if errors else f"`wandb sync` ended with status {status}")


def build_wandb_report(experiment: Experiment, project: str, entity: str = "") -> wr.Report:
    """The report, not yet published: published numbers beside ours; for each model and task its tables,
    bars of its scalars, and the media of the methods side by side; how to reproduce it."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    from kvbench.report.page import how_to_reproduce
    from kvbench.report.papers import PaperError
    from kvbench.report.published import beside, published_tables
    from kvbench.report.render import markdown
    from kvbench.report.tables import tables_of

    blocks: list[Any] = [wr.TableOfContents()]
    try:
        compared = published_tables(*beside(experiment))
        blocks += [wr.H1("Published numbers beside ours")] * bool(compared)
        blocks += [wr.MarkdownBlock(text=markdown(table)) for table in compared]
    except PaperError as error:
        blocks.append(wr.P(f"Published numbers are left out: {error}"))
    for group in experiment.groups:
        blocks.append(wr.H1(f"{group.task} on {group.model}"))
        shown = [table for table in tables_of(group, tidy(group)) if table.columns]
        blocks.append(wr.MarkdownBlock(text=markdown(shown[0])))
        manifest = group.manifests[-1]
        ours = [expr.Config(key) == str(manifest[key]) for key in ("experiment", "model")]
        bars = [
            wr.BarPlot(title=key, metrics=[key])
            for key in ("score", "ratio", "decode_ms_per_token")
        ]
        runs = wr.Runset(
            name="runs", filters=expr.And(*ours, expr.Config("task") == str(manifest["task"]))
        )
        blocks.append(wr.PanelGrid(runsets=[runs], panels=bars))
        side = [*ours, expr.Config("task") == group.task, expr.Config("method") == COMPARISON]
        tables = [wr.WeavePanelSummaryTable(table_name=name) for name in ("scores", "predictions")]
        sets = [wr.Runset(name=COMPARISON, filters=expr.And(*side))]
        blocks.append(wr.PanelGrid(runsets=sets, panels=[wr.MediaBrowser(num_columns=1), *tables]))
    blocks.append(wr.H1("How to reproduce"))
    for what, lines in how_to_reproduce(experiment):
        blocks += [wr.H3(what), wr.CodeBlock(code="\n".join(lines), language=None)]
    title = f"kvbench: {experiment.name}"[:128]
    return wr.Report(project=project, entity=entity, title=title, blocks=blocks, width="fluid")


def publish(report: wr.Report, memory: Path) -> str:
    """Save the report on the server; returns its address.

    Args:
        memory: a file that remembers what was published where, so that it is updated next time.

    Raises:
        NotSent: the server did not take it.
    """
    import wandb

    base = wandb.setup().settings.base_url
    probe(base)
    try:
        report.entity = report.entity or str(wandb.Api().default_entity)
        place = {"server": base, "entity": report.entity, "project": report.project}
        known = json.loads(read_file(memory)) if memory.exists() else {}
        if {key: known.get(key) for key in place} == place:
            report.id = known["id"]
        report.save()
    except Exception as error:
        raise NotSent(first_line(error)) from error
    replace(memory, json.dumps(place | {"id": report.id, "url": report.url}).encode(), sync=False)
    return str(report.url)


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 all well, 1 records that cannot be read, or a server that took nothing."""
    parser = argparse.ArgumentParser(prog="python -m kvbench.report.wandb", description=__doc__)
    parser.add_argument("folders", nargs="+", metavar="folder", help="<results>/<experiment>")
    parser.add_argument("--project", default="kvbench", help="W&B project (default: kvbench)")
    parser.add_argument("--entity", default=os.environ.get("WANDB_ENTITY", ""), help="its owner")
    parser.add_argument(
        "--send",
        action=argparse.BooleanOptionalAction,
        default=bool(os.environ.get("WANDB_API_KEY")),
        help="log the runs and publish (default: if WANDB_API_KEY is set)",
    )
    options = parser.parse_args(arguments)
    status = 0
    for folder in map(Path, options.folders):
        try:
            experiment = load_experiment(folder)
            report = build_wandb_report(experiment, options.project, options.entity)
            make_folder(folder / "wandb", folder)
            text = report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
            replace(folder / "wandb" / "report.json", text.encode(), sync=False)
            if options.send:
                where = {"project": options.project, "entity": options.entity or None}
                log_runs(experiment.runs, **where, mode="online", timeout_s=SEND_S)
                print(f"report: {publish(report, folder / 'wandb' / 'report-published.json')}")
            else:
                print(f"{folder / 'wandb' / 'report.json'}: built; to publish it set WANDB_API_KEY")
        except (StoreError, NotSent, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 1
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "wandb_workspaces":
                raise
            print(f"error: {needs_extra('wandb-workspaces', 'wandb-report')}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
