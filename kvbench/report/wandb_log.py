"""A copy of an experiment in Weights & Biases; local files never depend on it.

One W&B run per run folder, with an id made from what the folder's name says: logging again replaces
what was logged, online by resuming the run, offline by replacing its folder. Offline runs lie in
``<results>/<experiment>/wandb``; ``wandb sync <that folder>/offline-run-*`` sends them.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvbench.report.data import BASELINE, Group, group_runs
from kvbench.report.figures import heatmap_alone
from kvbench.report.predictions import clip
from kvbench.report.tables import Row, ScoreTable, as_text, score_table
from kvbench.store import MANIFEST, Run, record_files

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)

Mode = Literal["auto", "online", "offline", "disabled"]
MODES = ("auto", "online", "offline", "disabled")
MAX_PREDICTIONS = 500
"""Rows of a predictions table; the run's summary says when there were more."""

_PREDICTION_COLUMNS = ("prompt_tail", "answer", "prediction", "score", "ratio", "status")
_CONFIG_KEYS = (
    *("experiment", "model", "task", "method", "config_hash", "seed", "command"),
    *("code_revision", "versions", "hardware", "started"),
)


def log_runs(
    runs: Sequence[Run],
    *,
    project: str = "kvbench",
    entity: str | None = None,
    mode: Mode = "auto",
) -> int:
    """Log runs to W&B, one W&B run each.

    Whatever goes wrong there is a warning of one line, and nothing else. A server that does not
    answer is asked once: what remains is logged offline.

    Args:
        runs: as `kvbench.store.load_runs` gives them; baselines among them serve for differences.
        mode: "auto" is online when WANDB_API_KEY is set, else offline.

    Returns:
        How many runs were logged.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"logger.mode is {mode!r}; allowed: {', '.join(MODES)}")
    if mode == "disabled":
        return 0
    online = mode == "online" or (mode == "auto" and bool(os.environ.get("WANDB_API_KEY")))
    logged = 0
    for run in runs:
        if run.records.empty:
            continue
        try:
            online = online and _log_online(run, runs, project, entity)
            if not online:
                _log_run(run, runs, project, entity, online=False)
            logged += 1
        except Exception as error:  # noqa: BLE001 - a copy's failure must not end a sweep
            log.warning("W&B: %s was not logged: %s", run.folder.name, _line(error))
    return logged


def run_id(manifest: Mapping[str, Any]) -> str:
    """The same for the same experiment, model, task, method and config hash."""
    keys = ("experiment", "model", "task", "method", "config_hash")
    text = json.dumps([str(manifest.get(key)) for key in keys])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def summary_of(table: ScoreTable, row: Row) -> dict[str, Any]:
    """Scores per dataset with intervals, differences, memory, time and failures."""
    summary: dict[str, Any] = {"score_unit": table.unit, "lower_is_better": table.lower_is_better}
    for column, cell in row.cells.items():
        summary[f"{column}/score"] = cell.score.value
        summary[f"{column}/score_low"] = cell.score.low
        summary[f"{column}/score_high"] = cell.score.high
        summary[f"{column}/scored"] = cell.scored
        if cell.difference is not None:
            summary[f"{column}/difference"] = cell.difference.value
            summary[f"{column}/difference_low"] = cell.difference.low
            summary[f"{column}/difference_high"] = cell.difference.high
            summary["baseline"] = table.baseline
    total = row.total
    summary |= {
        "score": total.score.value,
        "score_low": total.score.low,
        "score_high": total.score.high,
        "ratio": row.ratio,
        "entries_mean": row.entries_mean,
        "entries_max": row.entries_max,
        "prefill_s": row.prefill_s,
        "compress_s": row.compress_s,
        "decode_s": row.decode_s,
        "failures": dict(total.failures),
        "kept_whole": row.kept_whole,
    }
    return {key: value for key, value in summary.items() if not _is_nan(value)}


def _log_online(run: Run, runs: Sequence[Run], project: str, entity: str | None) -> bool:
    """Whether the server took the run; if not, say so and let its id be used again."""
    import wandb

    try:
        _log_run(run, runs, project, entity, online=True)
    except Exception as error:  # noqa: BLE001 - the network's or the server's, whatever it is
        log.warning("W&B: going offline, `wandb sync` sends it later: %s", _line(error))
        wandb.teardown()
        return False
    return True


def _log_run(
    run: Run, runs: Sequence[Run], project: str, entity: str | None, *, online: bool
) -> None:
    import wandb  # not above: slow to import, and needed only here

    manifest = run.manifest
    group, table, row = _compared(run, runs)
    folder = run.folder.parents[2]
    name = run_id(manifest)
    _drop_copies(folder, name)
    media = _media(group, table, row, run)
    with _environment(WANDB_SILENT="true"):
        logged = wandb.init(
            project=project,
            entity=entity,
            mode="online" if online else "offline",
            dir=str(folder),
            id=name,
            resume="allow" if online else None,
            name=f"{manifest['task']}/{row.arm.label}/seed{manifest.get('seed')}",
            group=str(manifest["experiment"]),
            job_type=str(manifest["task"]),
            tags=_tags(manifest, row),
            config=_config(manifest),
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                init_timeout=30,
                x_disable_stats=True,
                disable_git=True,
                disable_code=True,
            ),
        )
    try:
        with _environment(WANDB_DATA_DIR=str(Path(logged.dir).parent)):  # tables' files
            logged.log(media)
        logged.summary.update(summary_of(table, row) | _capped(run))
        logged.log_artifact(_artifact(run, name, Path(logged.dir)))
    finally:
        logged.finish()


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for what W&B reads from there alone, and as they were afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _compared(run: Run, runs: Sequence[Run]) -> tuple[Group, ScoreTable, Row]:
    """The run beside its baseline of the same seed, where there is one."""
    keys = ("model", "task", "seed")
    peers = [
        other
        for other in runs
        if other.manifest.get("method") == BASELINE
        and all(other.manifest.get(key) == run.manifest.get(key) for key in keys)
    ]
    if run.manifest.get("method") == BASELINE:
        peers = []
    group = group_runs([*peers[:1], run])[0]
    table = score_table(group)
    row = next(r for r in table.rows if r.arm.method == run.manifest["method"])
    return group, table, row


def _media(group: Group, table: ScoreTable, row: Row, run: Run) -> dict[str, Any]:
    """Tables and images."""
    import wandb
    from PIL import Image

    media: dict[str, Any] = {"predictions": _predictions(group, run)}
    for field in group.meta.breakdown:
        if field in group.records:
            media[f"by_{field}"] = _breakdown(score_table(group, field), row)
    spec = group.meta.figure("heatmap")
    if spec:
        drawn = heatmap_alone(group, row.arm, spec)
        media["heatmap"] = wandb.Image(Image.open(io.BytesIO(drawn.png)), caption=drawn.title)
    return media


def _predictions(group: Group, run: Run) -> wandb.Table:
    import wandb

    fields = [name for name in group.meta.breakdown if name in run.records]
    table = wandb.Table(columns=["example_id", "dataset", *fields, *_PREDICTION_COLUMNS])
    for _, record in run.records.head(MAX_PREDICTIONS).iterrows():
        answers = record["answers"] if isinstance(record["answers"], list) else []
        table.add_data(
            str(record["example_id"]),
            str(record["dataset"]),
            *(as_text(record[name]) for name in fields),
            clip(record["prompt_tail"], from_end=True),
            " | ".join(map(str, answers)),
            clip(record["prediction"]),
            _number(record["score"]),
            _number(record["ratio"]),
            str(record["status"]),
        )
    return table


def _breakdown(table: ScoreTable, row: Row) -> wandb.Table:
    import wandb

    shown = wandb.Table(columns=[table.by, "score", "low", "high", "scored"])
    mine = next(other for other in table.rows if other.arm == row.arm)
    for column, cell in mine.cells.items():
        score = cell.score
        shown.add_data(column, *map(_number, (score.value, score.low, score.high)), cell.scored)
    return shown


def _artifact(run: Run, name: str, folder: Path) -> wandb.Artifact:
    """The records as they are now, copied into the offline run's folder so that it stays whole."""
    import wandb

    artifact = wandb.Artifact(f"records-{name}", type="records")
    copies = folder.parent / "artifacts" / "records"
    copies.mkdir(parents=True, exist_ok=True)
    for file in (*record_files(run.folder), run.folder / MANIFEST):
        copy = Path(shutil.copy(file, copies / file.name))
        artifact.add_file(str(copy), policy="immutable", skip_cache=True)
    return artifact


def _capped(run: Run) -> dict[str, Any]:
    count = len(run.records)
    if count <= MAX_PREDICTIONS:
        return {}
    return {"predictions_note": f"the first {MAX_PREDICTIONS} of {count}; all are in the artifact"}


def _config(manifest: Mapping[str, Any]) -> dict[str, Any]:
    identity = manifest.get("identity") or manifest.get("config") or {}
    return {key: manifest.get(key) for key in _CONFIG_KEYS} | {"run": dict(identity)}


def _tags(manifest: Mapping[str, Any], row: Row) -> list[str]:
    tags = [str(manifest[key]) for key in ("experiment", "model", "task", "method")]
    if row.arm.rate is not None:
        tags.append(f"rate {row.arm.rate:g}")
    return [tag[:64] for tag in dict.fromkeys(tags)]  # W&B's limit


def _drop_copies(folder: Path, name: str) -> None:
    """Remove the local copies of this W&B run that an earlier call left."""
    for old in (folder / "wandb").glob(f"*run-*-{name}"):
        shutil.rmtree(old)


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(float(value)) else float(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)
