"""Runs that are left aside: of other code or other weights than a later run of the same settings.

Their records stay in their folders, and no reader of an experiment sees them. A run of manifest format
1, which does not say what code and weights it is of, is left aside where the experiment has one that
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.records.read import MANIFEST, complete_lines, read_manifest, record_files

Manifest = Mapping[str, Any]
OLD = "a kvbench before 0.3 (their code and weights are not known)"


@dataclass(frozen=True)
class Aside:
    """A run folder that is left aside.

    Attributes:
        why: what its records are of.
        date: of its last start.
    """

    folder: Path
    records: int
    why: str
    date: str


def aside_of(
    experiment_folder: str | Path, upcoming: Mapping[Path, Manifest] | None = None
) -> list[Aside]:
    """The runs of an experiment that are left aside.

    Of each model (its name, path, revision and tokenizer, as they were asked for) the weights of the run
    that was started last are current, of each source file the code that the last run with it had, of
    each method and task the files that were in the code of their last run, and of each settings the run
    that was started last.

    Args:
        upcoming: runs that are about to start, by folder, as if they had.
    """
    paths = sorted(Path(experiment_folder).glob(f"*/*/*/{MANIFEST}"))
    manifests = {path.parent: read_manifest(path) for path in paths} | dict(upcoming or {})
    known = {folder: manifest for folder, manifest in manifests.items() if _says_its_code(manifest)}
    order = sorted(known, key=lambda folder: _started(known[folder]))
    order = [*(folder for folder in order if folder not in (upcoming or {})), *(upcoming or {})]
    latest: dict[Any, Path] = {}  # by settings
    weights: dict[Any, Any] = {}  # by model
    source: dict[str, str] = {}
    of_classes: dict[Any, Mapping[str, str]] = {}
    for folder in order:
        identity = known[folder].get("identity") or {}
        latest[_key(folder, known[folder])] = folder
        own_source = of_classes[_classes(folder, known[folder])] = identity.get("source") or {}
        source |= own_source
        if identity.get("weights") is not None:
            weights[_model(folder, known[folder])] = identity["weights"]
    found = []
    for folder, manifest in manifests.items():
        if folder in (upcoming or {}):
            continue
        if folder not in known:
            why = OLD if known else ""
        else:
            own = manifest.get("identity") or {}
            current = known[latest[_key(folder, manifest)]].get("identity") or {}
            why = _why(own, current) if latest[_key(folder, manifest)] != folder else ""
            now = {name: source[name] for name in of_classes[_classes(folder, manifest)]}
            of_model = {"source": now, "weights": weights.get(_model(folder, manifest))}
            why = why or _why(own, {**own, **of_model})
        if why:
            found.append(_aside(folder, manifest, why))
    return found


def lines_of(runs: Iterable[Aside]) -> list[str]:
    """A line for each reason: how many records are left aside, of what, and from when."""
    counts: dict[tuple[str, str], int] = {}
    for run in {run.folder: run for run in runs}.values():
        counts[run.why, run.date] = counts.get((run.why, run.date), 0) + run.records
    return [
        f"{count} record{'s' if count > 1 else ''} of {why}, {date}"
        for (why, date), count in counts.items()
        if count
    ]


def _aside(folder: Path, manifest: Manifest, why: str) -> Aside:
    records = sum(len(complete_lines(path)[0]) for path in record_files(folder))
    date = "no date"
    with suppress(ValueError):  # of a manifest that somebody wrote
        date = f"{datetime.fromisoformat(_started(manifest)):%d %b %Y}".lstrip("0")
    return Aside(folder, records, why, date)


def _why(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The code or weights of a run of one identity, where they are not those of another; else empty."""
    before: Mapping[str, str] = theirs.get("source") or {}
    now: Mapping[str, str] = ours.get("source") or {}
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if names:
        return f"an earlier {' and '.join(_few(list(map(_file, names))))}"
    if theirs.get("weights") not in (None, ours.get("weights")):
        return "other weights"
    older = [
        f"{key.replace('_', ' ')} {theirs.get(key, 1)}"
        for key in ("task_version", "method_version")
        if theirs.get(key, 1) != ours.get(key, 1)
    ]
    return " and ".join(older)


def _few(names: Sequence[str]) -> list[str]:
    return [*names] if len(names) <= 3 else [*names[:2], f"{len(names) - 2} other files"]


def _file(module: str) -> str:
    """The file of a module as a user calls it; what is no module's name stays."""
    return f"{module.rpartition('.')[2]}.py" if module.replace(".", "").isidentifier() else module


def _says_its_code(manifest: Manifest) -> bool:
    return int(manifest.get("format", 1)) >= 2


def _settings(manifest: Manifest) -> Any:
    return manifest.get("settings_hash") or manifest.get("config_hash")


def _key(folder: Path, manifest: Manifest) -> tuple[Any, ...]:
    """Model, task, method and settings: of the runs that have them in common the last one counts."""
    model = _model(folder, manifest)
    return model, folder.parts[-2], manifest.get("method"), _settings(manifest)


def _model(folder: Path, manifest: Manifest) -> tuple[Any, ...]:
    """A model as it was asked for: two revisions of one name are no replacement of each other."""
    asked = manifest.get("model_asked") or {}
    return folder.parts[-3], *(asked.get(key) for key in ("path", "revision", "tokenizer"))


def _classes(folder: Path, manifest: Manifest) -> tuple[Any, ...]:
    """The classes that decide which files a run's code has. A file of kvbench is among them only while
    it is edited."""
    identity = manifest.get("identity") or {}
    texts = {*_texts(identity.get("method")), *_texts(identity.get("task"))}
    return folder.parts[-2], manifest.get("method"), *sorted(texts)


def _texts(config: Any) -> Iterator[str]:
    """The texts in a config at any depth: names of classes, inner methods, metrics and data sets."""
    if isinstance(config, str):
        yield config
    elif isinstance(config, Mapping):
        for part in config.values():
            yield from _texts(part)
    elif isinstance(config, list | tuple):
        for part in config:
            yield from _texts(part)


def _started(manifest: Manifest) -> str:
    return str(manifest.get("started") or "")
