"""Runs that are left aside: of other code or other weights than a later run of the same settings.

Their records stay in their folders, and no reader of an experiment sees them. A run of manifest format
1, which does not say what code and weights it is of, is left aside where the experiment has one that
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.records.read import MANIFEST, complete_lines, read_manifest, record_files

Manifest = Mapping[str, Any]


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


def aside_of(experiment_folder: str | Path) -> list[Aside]:
    """The runs of an experiment that are left aside."""
    paths = Path(experiment_folder).glob(f"*/*/*/{MANIFEST}")
    manifests = {path.parent: read_manifest(path) for path in sorted(paths)}
    known = {folder: made for folder, made in manifests.items() if _says_its_code(made)}
    latest: dict[Any, Path] = {}  # by settings
    for folder in sorted(known, key=lambda folder: _started(known[folder])):
        latest[_key(folder, known[folder])] = folder
    found = []
    for folder, manifest in manifests.items():
        current = latest.get(_key(folder, manifest)) if folder in known else None
        if current != folder and known:
            found.append(_aside(folder, manifest, known.get(current or folder, {})))
    return found


def beside(folder: Path, current: Manifest) -> list[Aside]:
    """The runs beside a run folder, there or not, that are left aside once it is there.

    Args:
        current: `method`, `settings_hash` and `identity` of its manifest.
    """
    found = []
    for path in sorted(folder.parent.glob(f"*/{MANIFEST}")):
        manifest = {} if path.parent == folder else read_manifest(path)
        if manifest.get("method") == current["method"] and (
            not _says_its_code(manifest) or _settings(manifest) == current["settings_hash"]
        ):
            found.append(_aside(path.parent, manifest, current))
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


def _aside(folder: Path, manifest: Manifest, current: Manifest) -> Aside:
    records = sum(len(complete_lines(path)[0]) for path in record_files(folder))
    started = _started(manifest)
    date = f"{datetime.fromisoformat(started):%d %b %Y}".lstrip("0") if started else "no date"
    return Aside(folder, records, _why(manifest, current), date)


def _why(manifest: Manifest, current: Manifest) -> str:
    """What the records of a run are of, in place of the current run's code and weights."""
    if not _says_its_code(manifest):
        return "a kvbench before 0.3 (their code and weights are not known)"
    theirs, ours = manifest.get("identity") or {}, current.get("identity") or {}
    mine: Mapping[str, str]
    mine, now = theirs.get("source") or {}, ours.get("source") or {}
    names = [name for name in sorted({*mine, *now}) if mine.get(name) != now.get(name)]
    if names:
        return f"an earlier {' and '.join(map(_file, _few(names)))}"
    if theirs.get("weights") != ours.get("weights"):
        return "other weights"
    versions = ("task_version", "method_version")
    parts = [
        f"{key.replace('_', ' ')} {theirs.get(key, 1)}"
        for key in versions
        if theirs.get(key, 1) != ours.get(key, 1)
    ]
    return " and ".join(parts) or "an earlier start"


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
    """What runs have in common of which one counts: model, task, method and settings."""
    return (*folder.parts[-3:-1], manifest.get("method"), _settings(manifest))


def _started(manifest: Manifest) -> str:
    return str(manifest.get("started") or "")
