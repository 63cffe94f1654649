"""W&B runs as they are written, offline: names, tags, config, files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbench.errors import first_line
from kvbench.records.durable import read_file, replace
from kvbench.records.read import MANIFEST, Run, record_files
from kvbench.report.tables.scores import VariantScores
from kvbench.report.wandb.media import Curve
from kvbench.report.wandb.send import QUIET

if TYPE_CHECKING:
    import wandb

log = logging.getLogger(__name__)


_CONFIG_KEYS = (
    *("experiment", "model", "task", "method", "config_hash", "seed", "command"),
    *("code_revision", "versions", "hardware", "started"),
)


@contextmanager
def offline_run(folder: Path, *, id: str, **about: Any) -> Iterator[wandb.Run]:
    """A W&B run in ``<folder>/wandb``, in the place of an earlier copy; gone if the block fails."""
    import wandb  # not above: slow to import, and needed only here

    _drop_copies(folder, id)
    with environment({"WANDB_SILENT": "true"}):
        run = wandb.init(
            mode="offline",
            dir=str(folder.resolve()),  # its service may have another working directory
            id=id,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                disable_git=True,
                disable_code=True,
                x_disable_meta=True,  # the command as it was typed; the config has it without secrets
            ),
            **about,
        )
    try:
        with environment({"WANDB_DATA_DIR": str(Path(run.dir).parent)}):  # tables' files
            yield run
    except BaseException:
        run.finish(exit_code=1)
        _drop_copies(folder, id)
        raise
    run.finish()


def log_curve(run: wandb.Run, curve: Curve) -> None:
    """One step per point; its own axis, so that the line panels of several runs overlay."""
    axis = f"{curve.section}/{curve.x}"
    run.define_metric(axis, hidden=True, summary="none")
    for key in curve.points[0]:
        if key != curve.x:
            run.define_metric(f"{curve.section}/{key}", step_metric=axis, summary="none")
    for point in curve.points:
        run.log({f"{curve.section}/{key}": value for key, value in point.items()})


@contextmanager
def failure_warned(what: str) -> Iterator[None]:
    """A failure inside is one line: a copy's failure must not end a sweep."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - W&B's, whatever it is
        log.warning("W&B: %s was not logged: %s", what, first_line(error))


@contextmanager
def silent_logging() -> Iterator[None]:
    """W&B keeps a log of its own; where that cannot be written (a full disk), `logging` would print a
    traceback for every line of it."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables for what W&B reads from there alone, and as they were afterwards."""
    changed = {**QUIET, **values}
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update({**QUIET, **{k: v for k, v in before.items() if v is not None}, **values})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def records_artifact(run: Run, name: str, folder: Path) -> wandb.Artifact:
    """The records as they are now, copied into the offline run's folder so that it stays whole."""
    import wandb

    artifact = wandb.Artifact(f"records-{name}", type="records")
    copies = folder.parent / "artifacts" / "records"
    copies.mkdir(parents=True, exist_ok=True)
    for file in (*record_files(run.folder), run.folder / MANIFEST):
        copy = copies / file.name
        replace(copy, read_file(file), sync=False)
        artifact.add_file(str(copy), policy="immutable", skip_cache=True)
    return artifact


def config_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    identity = manifest.get("identity") or manifest.get("config") or {}
    return {key: manifest.get(key) for key in _CONFIG_KEYS} | {"run": dict(identity)}


def notes_of(manifest: Mapping[str, Any], note: Mapping[str, Any]) -> str:
    """How to reproduce the run, and what its tables leave out."""
    lines = [f"Made by: {manifest.get('command')}", f"Code: {manifest.get('code_revision')}"]
    lines += [f"Predictions: {text}" for text in note.values()]
    return "\n".join(lines)


def tags_of(manifest: Mapping[str, Any], row: VariantScores) -> list[str]:
    tags = [str(manifest[key]) for key in ("experiment", "model", "task", "method")]
    if rate_text(row):
        tags.append(rate_text(row))
    if row.total.failures:
        tags.append("failures")
    return clipped_tags(tags)


def rate_text(row: VariantScores) -> str:
    """E.g. ``rate 0.25``; empty where the method has no budget."""
    return "" if row.variant.rate is None else f"rate {row.variant.rate:g}"


def clipped_tags(tags: Sequence[str]) -> list[str]:
    return [tag[:64] for tag in dict.fromkeys(tags)]  # W&B's limit


def _drop_copies(folder: Path, name: str) -> None:
    """Remove the local copies of this W&B run that an earlier call left."""
    for old in (folder / "wandb").glob(f"*run-*-{name}"):
        shutil.rmtree(old)


def id_of(names: Mapping[str, Any], keys: Sequence[str]) -> str:
    text = json.dumps([str(names.get(key)) for key in keys])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
