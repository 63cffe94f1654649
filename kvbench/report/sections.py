"""Which runs stand in one table, and on which prompts.

Runs of one model and task stand together where the task's settings are the same: prompts of 20 lines and
prompts of 200 are different tables, whatever folder they lie in. Within a table every row is about the
same prompts, those that the command which ran last asked for: a method that was run on fewer of them is
left out and named, where its row would be about other prompts than the row above it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvbench.records.read import Run
from kvbench.report.labels import digest, flat, short_name


def sections_of(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs of one model and task by the name of their section: the settings in which it differs from the
    others, such as ``num_lines 20``; empty where there is one.

    A setting that older runs lack, since the option did not exist, is taken to have the others' value.
    """
    sections: list[tuple[dict[str, str], list[Run]]] = []
    for run in runs:
        settings = task_settings(run.manifest)
        for known, members in sections:
            if all(known[key] == settings[key] for key in known.keys() & settings.keys()):
                known |= settings
                members.append(run)
                break
        else:
            sections.append((dict(settings), [run]))
    named: dict[str, list[Run]] = {}
    for own, members in sections:
        parts = []
        for key, value in own.items():
            if any(other.get(key, value) != value for other, _ in sections):
                parts.append(f"{key.rsplit('.', 1)[-1]} {value.strip('[]')}")
        name = short_name(", ".join(parts))
        if name in named:
            name = f"{name} {digest(json.dumps(own, sort_keys=True))}"
        named[name] = members
    return named


def task_settings(manifest: Mapping[str, Any]) -> dict[str, str]:
    """What a run was asked for that decides its prompts and scores: the task's options and version, and
    the files that the examples come from."""
    identity = manifest.get("identity") or {}
    task = identity.get("task")
    settings = flat(task) if isinstance(task, Mapping) else {}
    if identity.get("task_version") is not None:
        settings["task_version"] = json.dumps(identity["task_version"])
    if identity.get("data"):
        settings["data"] = digest(json.dumps(identity["data"], sort_keys=True))
    return settings


def on_the_same_prompts(runs: Sequence[Run]) -> tuple[list[Run], list[str]]:
    """Restrict the runs of a section to the prompts that the last command asked for, seed by seed.

    A run that was asked for a prompt and has no record of it stays: it was interrupted, and its table
    says so. A run that was never asked for some of the prompts is left out. Where the last run's prompts
    are not recorded, all records of the seed count.

    Returns:
        The runs with their records of these prompts, and the methods of the runs that are left out.
    """
    asked = {}
    for run in sorted(runs, key=lambda run: str(run.manifest.get("started"))):
        asked[run.manifest.get("seed")] = run.asked
    kept: list[Run] = []
    left_out: list[str] = []
    for run in runs:
        prompts, names = asked[run.manifest.get("seed")], run.records["example_id"]
        if prompts is None:
            kept.append(run)
        elif prompts <= (run.asked or frozenset()) | set(names):
            records = run.records[names.isin(prompts)].reset_index(drop=True)
            kept.append(replace(run, records=records))
        else:
            left_out.append(str(run.manifest.get("method")))
    return kept, left_out
