"""The log of an experiment, ``<results>/<experiment>/log.jsonl``: where the time of its jobs went.

A line is written at the end of each job, and of each report: when, the job's model and task, the records
that were written, and `seconds` by phase.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.records.schema import disk_errors
from kvbench.records.store import append_to_file

LOG = "log.jsonl"
PHASES = ("load", "prefill", "compress", "decode", "score", "report")
"""`load`: imports, data and model; `score`: the rest of a job: scoring, writing, what a probe measures
beside the passes. Where methods share a second pass, `compress` has `score`, too: records count that
pass once for each of them."""


def write_log(experiment_folder: Path, **event: Any) -> None:
    line = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **event}
    path = experiment_folder / LOG
    with disk_errors(path):
        path.touch()
        append_to_file(path, json.dumps(line).encode() + b"\n")


def seconds_by_phase(experiment_folder: Path) -> str:
    """One line: the seconds of all jobs and reports so far, by phase; empty where there is no log."""
    path = experiment_folder / LOG
    if not path.is_file():
        return ""
    total = dict.fromkeys(PHASES, 0.0)
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            seconds = json.loads(line)["seconds"]
            total |= {name: total[name] + float(seconds.get(name, 0)) for name in PHASES}
        except (ValueError, TypeError, LookupError, AttributeError):
            continue  # half a line of a killed process
    return "seconds: " + ", ".join(f"{name} {value:.0f}" for name, value in total.items())
