"""The page: one HTML file with everything an experiment found, that opens from disk.

Predictions and error texts are untrusted: the template escapes every value, and the page's own
policy forbids any script but the one it ships, and any fetch.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.report.experiment import Experiment, Group
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.style import order_of, style_of
from kvbench.report.render.answers import Shown, clip, sample_of
from kvbench.report.sections import Section
from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import KINDS, MARKS, Column, Table, unit_text, value_text

_HERE = Path(__file__).parent / "templates"
_FAILURES_SHOWN = 100
_MANIFESTS_SHOWN = 100
_PIXELS_PER_INCH = 92


@dataclass(frozen=True)
class Page:
    """What a page shows: its sections, and before them the tables of several models and tasks, and the
    published numbers beside ours."""

    sections: Sequence[Section]
    overview: Sequence[Table] = ()
    published: Sequence[Table] = ()
    warnings: Sequence[str] = ()


def render_page(experiment: Experiment, page: Page) -> str:
    """The page's HTML."""
    template = environment().get_template("page.html.j2")
    return template.render(
        **page_parts(),
        experiment=experiment,
        sections=[_section(section, index) for index, section in enumerate(page.sections, 1)],
        overview=page.overview,
        published=page.published,
        warnings=page.warnings,
        methods=sorted({a.method for s in page.sections for a in s.group.variants}, key=order_of),
        totals=_totals(experiment),
        reproduce=how_to_reproduce(experiment),
        manifests=[
            (str(run.folder.relative_to(experiment.folder)), json.dumps(run.manifest, indent=2))
            for run in experiment.runs[:_MANIFESTS_SHOWN]
        ],
        statuses=_statuses(experiment),
    )


def environment() -> Environment:
    """Templates beside this file; every value is escaped, an unknown name is an error."""
    made = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.globals.update(
        color=lambda method: style_of(method).color,
        is_left=lambda column: KINDS[column.kind].left,
        marks=MARKS,
        track=_track,
        sort_key=_sort_key,
        unit_text=unit_text,
        value_text=value_text,
    )
    return made


def page_parts() -> dict[str, str]:
    """Style and script of a page, with the script's hash for its policy."""
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return {
        "style": (_HERE / "page.css").read_text(encoding="utf-8"),
        "script": script,
        "script_hash": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    }


def _section(section: Section, index: int) -> dict[str, Any]:
    shown, examples = sample_of(section.group)
    return {
        "id": f"section-{index}",
        "group": section.group,
        "lead": section.lead,
        "folded": section.folded,
        "findings": section.findings,
        "ranked": section.ranked,
        "notes": section.notes,
        "figures": [_figure(drawn) for drawn in section.figures],
        "shown": shown,
        "examples": examples,
        "filters": _filters(shown),
        "failures": _failures(section.group),
    }


def _figure(drawn: Drawn) -> dict[str, Any]:
    """One size of text on the page, however large the figure is."""
    return {
        "drawn": drawn,
        "uri": f"data:image/png;base64,{base64.b64encode(drawn.png).decode()}",
        "width": round(drawn.figure.get_figwidth() * _PIXELS_PER_INCH),
    }


def _filters(shown: Sequence[Shown]) -> dict[str, list[str]]:
    """Fields to filter predictions by, each with its values in order of appearance."""
    values: dict[str, dict[str, None]] = {"dataset": {}}
    for example in shown:
        values["dataset"][example.dataset] = None
        for name, value in example.fields.items():
            values.setdefault(name, {})[value] = None
    return {name: list(found) for name, found in values.items() if len(found) > 1}


def _failures(group: Group) -> dict[str, Any]:
    failed = group.records[group.records["status"] != "ok"]
    rows = [
        (row["variant"], row["dataset"], row["example_id"], row["status"], clip(row["error"]))
        for _, row in failed.head(_FAILURES_SHOWN).iterrows()
    ]
    return {"rows": rows, "total": len(failed)}


def _totals(experiment: Experiment) -> dict[str, int]:
    return {
        "models": len({group.model for group in experiment.groups}),
        "tasks": len({group.task for group in experiment.groups}),
        "runs": len(experiment.runs),
        "records": sum(len(group.records) for group in experiment.groups),
    }


def _statuses(experiment: Experiment) -> dict[str, int]:
    """Records by status: ok first, then failures."""
    counts: Counter[str] = Counter({"ok": 0})
    for group in experiment.groups:
        counts.update(group.records["status"].astype(str).tolist())
    return dict(sorted(counts.items(), key=lambda item: (item[0] != "ok", item[0])))


def how_to_reproduce(experiment: Experiment) -> list[tuple[str, list[str]]]:
    """What the runs were made with: one line per distinct value."""
    manifests = [run.manifest for run in experiment.runs]
    return [
        ("command", _distinct(manifests, "command")),
        ("seed", _distinct(manifests, "seed")),
        ("code revision", _distinct(manifests, "code_revision")),
        ("versions", _distinct(manifests, "versions")),
        ("hardware", _distinct(manifests, "hardware")),
    ]


def _distinct(manifests: Sequence[Mapping[str, Any]], key: str) -> list[str]:
    return list(dict.fromkeys(_plain(m[key]) for m in manifests if m.get(key) is not None))


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return str(value)


def _track(column: Column, value: object) -> dict[str, float] | None:
    """Where low, value and high of a fraction lie on a line from 0 to 100; None for anything else."""
    if not isinstance(value, Estimate) or (column.kind, column.unit) != ("score", "fraction"):
        return None
    if not column.bounds or math.isnan(value.low):
        return None
    return {name: round(100 * getattr(value, name), 1) for name in ("low", "value", "high")}


def _sort_key(value: object) -> float | str:
    """What a column is sorted by: numbers where the values are, else their text."""
    if isinstance(value, Mapping):
        return sum(value.values())
    if isinstance(value, tuple):
        return _sort_key(value[-1])
    number = value.value if isinstance(value, Estimate) else value
    if not isinstance(number, int | float):
        return "" if number is None else str(number)
    return "" if math.isnan(number) else number
