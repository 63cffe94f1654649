"""A copy of an experiment in Weights & Biases, on which no local file depends, and a report of it:
``python -m kvbench.report.wandb <folder>``.

A method at a rate is a W&B run. Its group is a model on a task at that rate, and has a run of the exact
cache, too. The experiment is one more run, with its page, tables and charts. All are written offline,
into ``<results>/<experiment>/wandb``, and then sent by ``wandb sync`` if that is wanted. An id is made
from what its run is about, so that logging again replaces what was logged.

The report has the published numbers beside ours, the first table of each model and task, the charts of
the experiment's own run, and how to reproduce it. It is written to ``<folder>/wandb/report.json``, and
published where an API key is set.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd
from filelock import FileLock

from kvbench.errors import complain, first_line
from kvbench.records.figures import Heatmap
from kvbench.records.read import Run
from kvbench.records.store import replace_file
from kvbench.report.frame import tidy, totals
from kvbench.report.ratios import (
    MORE_THAN,
    RATIO_AT_95,
    measures_several_rates,
    rate_text,
    weighed,
)
from kvbench.report.runs import BASELINE, Group, as_text, group_runs, prompt_seed, words

if TYPE_CHECKING:
    import wandb  # slow to import, and needed only where something is logged
    import wandb_workspaces.reports.v2 as wr

    from kvbench.report.build import ReportPaths
    from kvbench.report.runs import Experiment

log = logging.getLogger(__name__)
Mode = Literal["auto", "online", "offline", "disabled"]
OVERVIEW = "overview"
"""Job type of the W&B run of an experiment."""
MOST_STEPS = 20
"""Points of a run's history: a run of more examples logs evenly spaced ones."""
_MADE = ("experiment", "seed", "command", "code_revision", "versions", "hardware", "started")
_COSTS = ("ratio", "cache_bytes", "entries_mean", "prefill_s", "compress_s", "decode_s")
_ABOUT = ("example_id", "dataset", "seed", "status", "prompt_tokens", "new_tokens")
_ANSWERS = ("prompt_tail", "answers", "prediction")
_TOTALS = ("score", "difference", "times", "ratio")
SEND_S = 600.0
"""Seconds that sending for a report may take."""
_unsent: set[Path] = set()
"""Experiments that this process could not send: said once, and not tried again."""


def log_runs(
    runs: Sequence[Run],
    *,
    project: str = "kvbench",
    entity: str | None = None,
    mode: Mode = "auto",
    timeout_s: float = 120.0,
    predictions: bool = False,
) -> int:
    """Log an experiment's runs to W&B; returns how many W&B runs were written.

    All of it is written to disk before anything is sent. Whatever goes wrong is a warning of one line.

    Args:
        runs: as `kvbench.records.read.load_runs` gives them.
        mode: "auto" is online when WANDB_API_KEY is set (and WANDB_MODE does not say otherwise),
            else offline.
        timeout_s: seconds that sending may take.
        predictions: whether the tables of records have the answers, too.
    """
    runs = [run for run in runs if not run.records.empty]
    if not runs:
        return 0
    folder = runs[0].folder.parents[2]

    def write() -> Iterator[Path]:
        for name, group in _groups(runs):
            where = {"project": project, "entity": entity}
            yield from _log_group(folder, name, group, predictions, where)

    return len(_written(folder, write, mode, timeout_s))


def log_overview(folder: Path, paths: ReportPaths) -> bool:
    """Log the page of an experiment, its scores, a table of methods by tasks, and its charts of scores
    against bytes and of needles. Returns whether it was written: not where its jobs' logger is another
    one, or nothing is ranked."""
    logger = (paths.manifest.get("config") or {}).get("logger") or {}
    if logger.get("name") != "wandb" or paths.scores.empty:
        return False
    name = str(paths.manifest["experiment"])
    about = {"project": logger["project"], "entity": logger["entity"], "group": name}
    about |= {"name": f"{name}/{OVERVIEW}", "job_type": OVERVIEW, "config": {"kind": OVERVIEW}}

    def write() -> Iterator[Path]:
        import wandb

        measures = (*_TOTALS, RATIO_AT_95)
        rows = pd.concat([totals(paths.scores, measure) for measure in measures], ignore_index=True)
        cells = rows.assign(column=rows["task"] + ": " + rows["measure"])
        cells = cells[cells["mark"].ne(MORE_THAN)]  # no number that others can stand beside
        wide = cells.pivot_table("mean", ["model", "variant"], "column", sort=False)
        values = {
            "page": wandb.Html(paths.page.read_text(encoding="utf-8"), inject=False),
            "scores": _table(rows),
            "task_by_method": _table(wide.reset_index()),
        }
        for drawn in paths.drawn:
            if drawn.in_wandb:
                caption = f"{drawn.title}. {drawn.caption}"
                values[drawn.name] = wandb.Image(str(drawn.write(folder, "png")), caption=caption)
        with _opened(folder, run_id(name, OVERVIEW), paths.manifest, about) as run:
            run.log(values)
        yield Path(run.dir).parent

    return bool(_written(folder, write, logger["mode"], float(logger["timeout_s"])))


def run_id(*about: object) -> str:
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def not_sent(folders: Sequence[Path]) -> list[Path]:
    """Those of these W&B runs that ``wandb sync`` has not marked as sent."""
    return [folder for folder in folders if not any(folder.glob("*.synced"))]


def _written(
    folder: Path, write: Callable[[], Iterator[Path]], mode: Mode, timeout_s: float
) -> list[Path]:
    """The folders of the W&B runs that `write` writes, by one process at a time; then they are sent if
    the mode is online. Whatever goes wrong is a warning, since a copy must not end a sweep."""
    if mode == "auto":
        online = "online" if os.environ.get("WANDB_API_KEY") else "offline"
        mode = os.environ.get("WANDB_MODE", online)  # type: ignore[assignment]
    written: list[Path] = []
    if mode == "disabled":
        return written
    place = folder / "wandb"
    collects = gc.isenabled()
    gc.disable()  # model and figures are millions of objects, and live on
    for name, value in (("WANDB_ERROR_REPORTING", "false"), ("WANDB_SILENT", "true")):
        os.environ.setdefault(name, value)  # before wandb is imported
    try:
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / ".lock"):
            written.extend(write())
    except Exception as error:  # noqa: BLE001 - W&B's, whatever it is
        log.warning("W&B: %s was not logged: %s", folder.name, first_line(error))
    finally:
        if collects:
            gc.enable()
    if mode == "online" and written and folder not in _unsent:
        environment = {**os.environ, "WANDB_MODE": "online", "WANDB_DIR": str(folder)}
        silent: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            words = [sys.executable, "-m", "wandb", "sync", *map(str, written)]
            subprocess.run(words, check=False, timeout=timeout_s, env=environment, **silent)
        if left := not_sent(written):
            _unsent.add(folder)
            log.warning(
                "W&B: %d of %d runs were not sent; they, and what this process logs from now on, are on"
                " disk. Send them later with: wandb sync %s",
                *(len(left), len(written), shlex.quote(str(place))),
            )
    return written


def _groups(runs: Sequence[Run]) -> Iterator[tuple[str, Group]]:
    """The runs of each model, task, seed and budget, with the name of their group in W&B. Methods that
    no budget changes, the exact cache first, are in the groups of all budgets."""
    jobs = defaultdict[Any, dict[str, list[Run]]](lambda: defaultdict(list))
    for run in runs:
        identity = run.manifest.get("identity") or {}
        budget = None if run.manifest["method"] == BASELINE else identity.get("budget")
        job = (run.manifest.get("model"), run.manifest.get("task"), prompt_seed(run.manifest))
        jobs[*job, run.manifest.get("seed")][json.dumps(budget)].append(run)
    for (_, _, prompts, seed), by_budget in jobs.items():
        in_all = by_budget.pop("null", [])
        for text, own in (by_budget or {"{}": []}).items():
            budget = json.loads(text)
            size = [key for key in ("size", "total_rate", "rate") if budget.get(key)][:1]
            for group in group_runs([*in_all, *own]):
                kept = [f"{key} {budget[key]}" for key in size]
                kept += [f"prompts {prompts}"] if prompts.strip("0") else []
                yield "/".join([group.model, group.task, *kept, f"seed {seed}"]), group


def _log_group(
    folder: Path, name: str, group: Group, predictions: bool, where: Mapping[str, Any]
) -> Iterator[Path]:
    """Write a W&B run for each variant: its settings, its means by the number of examples, its scores,
    its records and its heatmap. Yields their folders."""
    scores = tidy(group)
    means = {measure: totals(scores, measure)["mean"] for measure in _TOTALS}
    manifests = {manifest["config_hash"]: manifest for manifest in group.manifests}
    texts = [*_ABOUT, *group.meta.breakdown, *(_ANSWERS if predictions else ())]
    grid, several = group.meta.figure(Heatmap), measures_several_rates(group)
    for variant in group.variants:
        records = group.records[group.records["variant"] == variant.label]
        numbers = _columns(records, ["score", *group.meta.measures, *_COSTS]).astype(float)
        tables: dict[str, Any] = {
            "scores": _table(scores[scores["variant"] == variant.label]),
            "records": _table(_columns(records, texts).join(numbers)),
        }
        has_scores = bool(records["score"].notna().any())
        if grid is not None and {grid.x, grid.y} <= set(records) and has_scores:
            tables["heatmap"] = _heatmap(group, variant.label, grid)
        summary = {key: float(values.get(variant.label, math.nan)) for key, values in means.items()}
        rate = None if several else variant.rate  # of a run that measures at several
        measured = [] if rate is None else [rate_text(variant.at, [summary["ratio"]])]
        manifest = manifests[records["config_hash"].iloc[0]]
        about = {
            "name": "/".join([group.model, group.task, variant.method, *measured]),
            "group": name[:128],
            "job_type": group.task,
            "config": {
                **group.about,
                "method": variant.method,
                "variant": variant.label,
                "rate": rate,
                "config_hash": manifest["config_hash"],
                "run": manifest.get("identity") or {},
                "config": manifest.get("config") or {},
            },
        }
        code = run_id(manifest["experiment"], name, variant.label, manifest["config_hash"])
        with _opened(folder, code, manifest, {**where, **about}) as run:
            run.define_metric("*", step_metric="examples")
            for count in np.linspace(1, len(numbers), min(len(numbers), MOST_STEPS)).astype(int):
                means_so_far = _means(records.iloc[:count], numbers)
                run.log({**means_so_far, "examples": int(count)})
            run.log({"examples": len(numbers), **tables})
            run.summary.update({**_means(records, numbers), **_known(summary)})
            if math.isnan(summary["score"]):  # of no datasets, or of some alone
                run.summary["score"] = math.nan
            run.summary["failed"] = int(records["status"].ne("ok").sum())
            for value, part in records.groupby("rate") if several else ():
                at_rate = _means(part, part[["score", "ratio"]])
                run.summary.update({f"{k} at rate {as_text(value)}": x for k, x in at_rate.items()})
        yield Path(run.dir).parent


def _means(records: pd.DataFrame, numbers: pd.DataFrame) -> dict[str, float]:
    """The means of some columns over these records, as tables have them."""
    means = weighed(records, ["variant"], list(map(str, numbers)))
    return _known(means.iloc[0]) if len(means) else {}


def _known(numbers: Any) -> dict[str, float]:
    return {str(key): float(x) for key, x in numbers.items() if not math.isnan(x)}


@contextmanager
def _opened(
    folder: Path, code: str, manifest: Mapping[str, Any], about: Mapping[str, Any]
) -> Iterator[wandb.Run]:
    """A W&B run with this id, in the place of an earlier one; none is left where writing it fails."""
    import wandb

    for old in (folder / "wandb").glob(f"*run-*-{code}"):
        shutil.rmtree(old)
    off = ("disable_git", "disable_code", "silent", "x_disable_meta", "x_disable_stats")
    quiet: Any = {"console": "off", "x_save_requirements": False, **dict.fromkeys(off, True)}
    run = wandb.init(
        mode="offline",
        dir=str(folder.resolve()),  # its service may have another working directory
        id=code,
        reinit="create_new",
        settings=wandb.Settings(**quiet),
        **{**about, "config": {key: manifest.get(key) for key in _MADE} | about["config"]},
    )
    place, before = Path(run.dir).parent, dict(os.environ)
    os.environ["WANDB_DATA_DIR"] = str(place)  # tables' files, which ``wandb sync`` looks for
    try:
        with run:
            yield run
    except Exception:
        shutil.rmtree(place)
        raise
    finally:
        os.environ.clear()
        os.environ.update(before)


def _heatmap(group: Group, label: str, spec: Heatmap) -> wandb.Html:
    """Mean scores by two fields of records, as a table with colours on one scale for all methods: each
    run has one, and a figure takes ten times as long."""
    import wandb

    means = group.good.pivot_table("score", ["variant", spec.y], spec.x)
    least, most = min(0.0, float(np.nanmin(means))), float(np.nanmax(means))
    grid = means.loc[[label]].droplevel("variant").rename(as_text).rename(as_text, axis=1)
    grid = grid.rename_axis(words(spec.y)).rename_axis(words(spec.x), axis=1)
    style = grid.style.set_uuid("grid").format(precision=2, escape="html", na_rep="")
    for axis in (0, 1):
        style = style.format_index(escape="html", axis=axis)
    style = style.background_gradient("Greens", axis=None, vmin=least, vmax=most)
    return wandb.Html(style.to_html(), inject=False)


def _columns(records: pd.DataFrame, names: Sequence[str]) -> pd.DataFrame:
    return records[[name for name in dict.fromkeys(names) if name in records]]


def _table(frame: pd.DataFrame) -> wandb.Table:
    """A table whose columns have the types of their values. W&B takes a type from every cell; two rows
    have them all: the first values, and nothing where a column lacks one."""
    import wandb

    known = frame.notna().to_numpy()
    cells = np.array(frame, dtype=object)
    cells[~known] = None
    typical = [cells[row, i] for i, row in enumerate(known.argmax(axis=0))] if len(frame) else []
    gaps = [typical[i] if known[:, i].all() else None for i in range(len(typical))]
    rows: list[Any] = [typical, gaps][: len(frame)]
    table = wandb.Table(columns=list(map(str, frame)), data=rows)
    table.data = cells.tolist()
    return table


def build_wandb_report(experiment: Experiment, project: str, entity: str = "") -> wr.Report:
    """The report, not yet published."""
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces import expr

    from kvbench.report.page import how_to_reproduce
    from kvbench.report.papers import PaperError
    from kvbench.report.published import beside, published_tables
    from kvbench.report.render import markdown
    from kvbench.report.tables import tables_of

    tables = []
    try:
        tables += published_tables(beside(experiment))
    except PaperError as error:
        complain(f"warning: {error}", "wandb")
    for group in experiment.groups:
        tables += [table for table in tables_of(group) if table.columns][:1]
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
    from kvbench.report.runs import load_experiment

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
            (folder / "wandb").mkdir(parents=True, exist_ok=True)
            text = report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True)
            replace_file(folder / "wandb" / "report.json", text.encode())
            print(f"{folder / 'wandb' / 'report.json'}: built")
            if options.send:
                where = {"project": options.project, "entity": options.entity or None}
                log_runs(experiment.runs, **where, mode="online", timeout_s=SEND_S)
                report.save()
                print(f"report: {report.url}")

    return in_a_line(work, options.folders, "wandb")


if __name__ == "__main__":
    sys.exit(main())
