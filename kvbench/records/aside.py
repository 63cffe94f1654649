"""Runs that are left aside: of other code or other weights than a later run of the same settings.

Their records stay in their folders, and no reader of an experiment sees them. A run of manifest format
1, which does not say what code and weights it is of, is left aside where the experiment has one that
does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from kvbench.records.read import MANIFEST, complete_lines, read_manifest, record_files

VERSIONS = ("task_version", "method_version", "packing_version")
"""The parts of an identity that are numbers of versions, 1 where they are absent."""

OLD = "a kvbench before 0.3 (their code and weights are not known)"


@dataclass(frozen=True)
class Aside:
    """A run folder that is left aside.

    Attributes:
        why: the code or weights of its records.
        date: the day of its last start.
    """

    folder: Path
    records: int
    why: str
    date: str


def aside_of(
    experiment_folder: str | Path, upcoming: Mapping[Path, Mapping[str, Any]] | None = None
) -> list[Aside]:
    """The runs of an experiment that are left aside.

    Of each model (its name, path, revision and tokenizer, as they were asked for) the weights of the run
    that was started last are current, of each source file the code that the last run with it had, of
    each method and task the files that were in the code of their last run, and of each settings the run
    that was started last.

    Args:
        upcoming: runs that are about to start, by folder, as if they had.
    """
    upcoming = upcoming or {}
    paths = sorted(Path(experiment_folder).glob(f"*/*/*/{MANIFEST}"))
    manifests = {path.parent: read_manifest(path) for path in paths} | dict(upcoming)
    runs = [_Run(folder, manifest) for folder, manifest in manifests.items()]
    known = [run for run in runs if run.says_its_code]
    known.sort(key=lambda run: (run.folder in upcoming, run.started))
    latest = {run.settings: run for run in known}
    weights = {run.model: run.weights for run in known if run.weights is not None}
    classes = {run.classes: run.source for run in known}
    code = {file: digest for run in known for file, digest in run.source.items()}
    found = []
    for run in runs:
        if run.folder in upcoming:
            continue
        if not run.says_its_code:
            why = OLD if known else ""
        else:
            why = _why(run.identity, latest[run.settings].identity)
            now = {file: code[file] for file in classes[run.classes]}
            current = {**run.identity, "source": now, "weights": weights.get(run.model)}
            why = why or _why(run.identity, current)
        if why:
            records = sum(len(complete_lines(path)[0]) for path in record_files(run.folder))
            date = "no date"
            with suppress(ValueError):  # of a manifest that somebody wrote
                date = f"{datetime.fromisoformat(run.started):%d %b %Y}".lstrip("0")
            found.append(Aside(run.folder, records, why, date))
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


@dataclass(frozen=True)
class _Run:
    """A run by its folder and manifest, and what it has in common with others."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def says_its_code(self) -> bool:
        return int(self.manifest.get("format", 1)) >= 2

    @property
    def started(self) -> str:
        return str(self.manifest.get("started") or "")

    @property
    def identity(self) -> Mapping[str, Any]:
        return self.manifest.get("identity") or {}

    @property
    def source(self) -> Mapping[str, str]:
        return self.identity.get("source") or {}

    @property
    def weights(self) -> Any:
        return self.identity.get("weights")

    @property
    def model(self) -> tuple[Any, ...]:
        """A model as it was asked for: two revisions of one name are no replacement of each other."""
        asked = self.manifest.get("model_asked") or {}
        return self.folder.parts[-3], *(asked.get(key) for key in ("path", "revision", "tokenizer"))

    @property
    def settings(self) -> tuple[Any, ...]:
        """Model, task, method and settings: of the runs that have them in common the last one counts."""
        settings = self.manifest.get("settings_hash") or self.manifest.get("config_hash")
        return self.model, self.folder.parts[-2], self.manifest.get("method"), settings

    @property
    def classes(self) -> tuple[Any, ...]:
        """The classes that decide which files a run's code has. A file of kvbench is among them only
        while it is edited."""
        texts = {*_texts(self.identity.get("method")), *_texts(self.identity.get("task"))}
        return self.folder.parts[-2], self.manifest.get("method"), *sorted(texts)


def _why(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """The code or weights of a run of one identity, where they are not those of another; else empty."""
    before: Mapping[str, str] = theirs.get("source") or {}
    now: Mapping[str, str] = ours.get("source") or {}
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if names:
        files = [  # as a user calls them; what is no module's name stays
            f"{name.rpartition('.')[2]}.py" if name.replace(".", "").isidentifier() else name
            for name in names
        ]
        if len(files) > 3:
            files[2:] = [f"{len(files) - 2} other files"]
        return f"an earlier {' and '.join(files)}"
    if theirs.get("weights") not in (None, ours.get("weights")):
        return "other weights"
    older = [
        f"{key.replace('_', ' ')} {theirs.get(key, 1)}"
        for key in VERSIONS
        if theirs.get(key, 1) != ours.get(key, 1)
    ]
    return " and ".join(older)


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
