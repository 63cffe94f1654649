"""An experiment in a few lines: what it ran on what, and what it found. The page begins with it, and a
landing page is made of many."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvbench.errors import printable
from kvbench.records.durable import read_file
from kvbench.report.experiment import Experiment
from kvbench.report.sections import Section

SUMMARY = "summary.json"
_MOST = 6
"""Of more values the first are named."""


@dataclass(frozen=True)
class Verdict:
    """What was found on one task; `model` where there are several, `id` of the section on the page."""

    task: str
    model: str
    text: str
    id: str


@dataclass(frozen=True)
class Summary:
    """Name, facts by name and verdicts; how many runs and records, and failures by status."""

    name: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    runs: int = 0
    records: int = 0
    failed: Mapping[str, int] = field(default_factory=dict)


def summary_of(experiment: Experiment, sections: Sequence[Section]) -> Summary:
    """All of an experiment; sections get the ids ``section-1``, ``section-2`` ..."""
    groups = experiment.groups
    statuses = Counter(s for group in groups for s in group.records["status"].astype(str).tolist())
    manifests = [run.manifest for run in experiment.runs]
    variants = [variant for group in groups for variant in group.variants]
    rates = sorted({v.rate for v in variants if v.rate is not None}, reverse=True)
    dates = sorted(str(m["started"])[:10] for m in manifests if m.get("started"))
    methods = dict.fromkeys(variant.method for variant in variants)
    revisions = [str(m["code_revision"])[:12] for m in manifests if m.get("code_revision")]
    facts = [
        ("model", _listed(group.model for group in groups)),
        ("tasks", _listed(group.task for group in groups)),
        ("methods", _listed(methods, most=len(methods))),
        ("rate", _listed(f"{rate:g}" for rate in rates)),
        ("device", _listed(map(_device, manifests))),
        ("date", " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))),
        ("code revision", _listed(revisions)),
        ("records", f"{sum(statuses.values()):,}"),
    ]
    several = len({group.model for group in groups}) > 1
    return Summary(
        name=experiment.name,
        facts=[(name, value) for name, value in facts if value],
        verdicts=[
            Verdict(s.group.task, s.group.model if several else "", s.verdict, f"section-{i}")
            for i, s in enumerate(sections, 1)
            if s.verdict
        ],
        runs=len(experiment.runs),
        records=sum(statuses.values()),
        failed={name: count for name, count in sorted(statuses.items()) if name != "ok"},
    )


def summary_text(summary: Summary) -> str:
    """As `read_summary` reads it."""
    return json.dumps(asdict(summary), indent=1, ensure_ascii=False) + "\n"


def read_summary(folder: Path) -> Summary | None:
    """What the report in a folder left; None where there is none, or it is not one."""
    try:
        found = json.loads(read_file(folder / SUMMARY))
        return Summary(
            name=printable(str(found["name"])),
            facts=[(str(name), str(value)) for name, value in found["facts"]],
            verdicts=[
                Verdict(*(str(one[key]) for key in ("task", "model", "text", "id")))
                for one in found["verdicts"]
            ],
            runs=int(found["runs"]),
            records=int(found["records"]),
            failed={str(name): int(count) for name, count in found["failed"].items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _device(manifest: Mapping[str, Any]) -> str:
    """E.g. ``cuda (NVIDIA H100)`` or ``cpu (AMD EPYC)``."""
    hardware = manifest.get("hardware") or {}
    kind = hardware.get("device") or ("cuda" if hardware.get("gpu") else "cpu" if hardware else "")
    name = hardware.get("gpu") or hardware.get("processor") or hardware.get("cpu")
    return f"{kind} ({name})" if kind and name else str(kind)


def _listed(values: Iterable[str], most: int = _MOST) -> str:
    """Each once; of many the first and how many more."""
    found = [value for value in dict.fromkeys(map(str, values)) if value]
    more = f" and {len(found) - most} more" if len(found) > most else ""
    return ", ".join(found[:most]) + more
