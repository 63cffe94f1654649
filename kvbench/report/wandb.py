"""A copy of an experiment in Weights & Biases; local files never depend on it.

A method at a rate is a W&B run. Its group is a model on a task at that rate, and has a run of the exact
cache, too. The experiment is one more run, with its page, tables and charts. All are written offline,
into ``<results>/<experiment>/wandb``, and then sent by ``wandb sync`` if that is wanted. An id is made
from what its run is about, so that logging again replaces what was logged.
"""

from __future__ import annotations

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
from markupsafe import escape

from kvbench.errors import first_line
from kvbench.records.figures import Heatmap
from kvbench.records.read import Run
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

    from kvbench.report.build import ReportPaths

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
            if drawn.kind in ("memory", "heatmap"):
                caption = f"{drawn.title}. {drawn.caption}"
                values[drawn.name] = wandb.Image(str(folder / drawn.file("png")), caption=caption)
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
        settings = run.manifest.get("identity") or run.manifest.get("config") or {}
        budget = None if run.manifest["method"] == BASELINE else settings.get("budget")
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
        if grid is not None and {grid.x, grid.y} <= set(records):
            tables["heatmap"] = _heatmap(records, grid)
        summary = {key: float(values.get(variant.label, math.nan)) for key, values in means.items()}
        rate = None if several else variant.rate  # of a run that measures at several
        measured = [] if rate is None else [rate_text(variant.at, [summary["ratio"]])]
        manifest = manifests[records["config_hash"].iloc[0]]
        about = {
            "name": "/".join([group.model, group.task, variant.method, *measured]),
            "group": name[:128],
            "job_type": group.task,
            "config": {
                "model": group.model,
                "task": group.task,
                "compress_after": group.protocol,
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


def _heatmap(records: pd.DataFrame, spec: Heatmap) -> wandb.Html:
    """Mean scores by two fields of records, as a table with colours: each run has one, and a figure
    takes ten times as long."""
    import wandb

    grid = records.pivot_table("score", spec.y, spec.x)
    least, most = min(0.0, float(np.nanmin(grid))), float(np.nanmax(grid))
    shades = (grid - least) / ((most - least) or 1.0)
    rows = [f"<th>{escape(words(spec.y))} / {escape(words(spec.x))}</th>"]
    rows[0] += "".join(f"<th>{escape(as_text(x))}</th>" for x in grid)
    for y, values, shades_of_row in zip(
        grid.index, grid.to_numpy(), shades.to_numpy(), strict=True
    ):
        cells = (
            f'<td style="background: rgba(33, 145, 140, {shade:.2f})">{value:.2f}</td>'
            for value, shade in zip(values, shades_of_row, strict=True)
        )
        rows.append(f"<th>{escape(as_text(y))}</th>{''.join(cells)}")
    return wandb.Html(f"<table><tr>{'</tr><tr>'.join(rows)}</tr></table>", inject=False)


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
