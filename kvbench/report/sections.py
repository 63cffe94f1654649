"""Which runs stand in one table, and on which prompts.

Runs of one model and task stand together where the task's settings are the same: prompts of 20 lines and
prompts of 200 are different tables, whatever folder they lie in. Within a table every row is about the
same prompts, those that the command which ran last asked for: a method that was run on fewer of them is
left out and named, where its row would be about other prompts than the row above it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbench.records.read import Run
from kvbench.report.labels import digest, flat, shortest

NAME = "name"
"""The one key of a task's config that is not a setting."""


@dataclass
class Section:
    """Runs of one model and task with the same settings of the task: by dotted key the value as text.
    Runs that were made before an option existed are taken to have the value of the others."""

    settings: dict[str, str]
    runs: list[Run] = field(default_factory=list)

    @property
    def first_start(self) -> tuple[str, str]:
        return min(map(first_start, self.runs))


def first_start(run: Run) -> tuple[str, str]:
    """When and by which command a run was started for the first time."""
    starts = (run.manifest, *run.manifest.get("earlier_starts", ()))
    return min((str(start.get("started")), str(start.get("command"))) for start in starts)


def sections_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one model and task by the name of their section.

    The section whose runs were started first has the empty name, so that a later command that adds runs
    with other settings to the folder does not rename its table. Where one command started several
    sections, as a sweep over a setting of the task does, all of them are named by that setting.
    """
    sections: list[Section] = []
    for run in sorted(runs, key=first_start):
        settings = task_settings(run.manifest)
        section = next((s for s in sections if agree(s.settings, settings)), None)
        if section is None:
            section = Section(dict(settings))
            sections.append(section)
        section.settings |= settings
        section.runs.append(run)
    first, command = sections[0], sections[0].first_start[1]
    swept = [section for section in sections[1:] if section.first_start[1] == command]
    named: dict[str, list[Run]] = {}
    for section in sections:
        others = swept if section is first else [first]
        name = difference(section.settings, [other.settings for other in others])
        if name in named:
            name = f"{name} {digest(json.dumps(section.settings, sort_keys=True))}"
        named[name] = [run for run in runs if run in section.runs]
    return named


def task_settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a run was asked for that decides its prompts and scores: the task's options and version, and
    the files that the examples come from."""
    identity = manifest.get("identity") or manifest.get("config") or {}
    task = identity.get("task")
    settings = flat(task, without=(NAME,)) if isinstance(task, Mapping) else {}
    if identity.get("task_version") is not None:
        settings["task_version"] = json.dumps(identity["task_version"])
    if identity.get("data"):
        settings["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    return settings


def agree(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    return all(first[key] == second[key] for key in first.keys() & second.keys())


def difference(settings: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> str:
    """The settings in which a section differs from others, as a name: ``num_lines 20, depth 0.5``."""
    parts = []
    for key, value in settings.items():
        values = {value, *(other.get(key, value) for other in others)}
        if len(values) > 1:
            text = shortest(sorted(values))[value].strip("[]")
            parts.append(f"{key.rsplit('.', 1)[-1]} {text}")
    return ", ".join(parts)


def on_the_same_prompts(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Restrict the runs of a section to the prompts that the last command asked for, seed by seed.

    A run that was asked for a prompt and has no record of it stays: it was interrupted, and its table
    says so. A run that was never asked for some of the prompts is left out. Where the last run's prompts
    are not recorded, all records of the seed count.

    Returns:
        The runs with their records of these prompts, and the methods of the runs that are left out.
    """
    asked: dict[Any, frozenset[str] | None] = {}
    for run in sorted(runs, key=lambda run: str(run.manifest.get("started"))):
        asked[run.manifest.get("seed")] = run.asked
    kept: list[Run] = []
    left_out: list[str] = []
    for run in runs:
        prompts = asked[run.manifest.get("seed")]
        if prompts is None:
            kept.append(run)
            continue
        names = run.records["example_id"]
        if prompts <= (run.asked or frozenset()) | set(names):
            kept.append(
                replace(run, records=run.records[names.isin(prompts)].reset_index(drop=True))
            )
        else:
            left_out.append(str(run.manifest.get("method")))
    return kept, left_out
