"""The page: one HTML file with everything an experiment found, that opens from disk.

Predictions and error texts are untrusted: the template escapes every value, and the page's own
policy forbids any script but the one it ships, and any fetch.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from kvbench.report.experiment import Experiment, Group
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.style import style_of
from kvbench.report.render.answers import LIMIT, Shown, clip, sample_of
from kvbench.report.render.summary import Summary
from kvbench.report.sections import Section
from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import INTERVAL, KINDS, MARKS, Column, Note, Table, unit_text, value_text

_HERE = Path(__file__).parent / "templates"
_FAILURES_SHOWN = 100
_MANIFESTS_SHOWN = 20
MOST_BYTES = 2_000_000
"""Of a page."""
_EXAMPLES = (LIMIT, LIMIT // 2, LIMIT // 5, 3)
"""Answers of so many examples a section: as many as the page has room for."""


@dataclass(frozen=True)
class Page:
    """What a page shows: its summary and sections; before them figures and tables of several models and
    tasks, and the published numbers beside ours."""

    summary: Summary
    sections: Sequence[Section]
    memory: Sequence[Drawn] = ()
    overview: Sequence[Table] = ()
    published: Sequence[Table] = ()
    warnings: Sequence[str] = ()


def render_page(experiment: Experiment, page: Page) -> str:
    """The page's HTML: at most `MOST_BYTES` where fewer answers, and then fewer figures, make it so. The
    figures of memory stay; of the others the largest go first."""
    text, over = "", 0
    known: list[dict[object, Shown]] = [{} for _ in page.sections]
    for examples in _EXAMPLES:
        text = _rendered(experiment, page, examples, known)
        over = len(text.encode(errors="replace")) - MOST_BYTES
        if over <= 0:
            return text
    without: set[str] = set()
    figures = [d for section in page.sections for d in (*section.figures, *section.kept)]
    for drawn in sorted(figures, key=lambda drawn: len(drawn.svg), reverse=True):
        if over > 0:
            without.add(drawn.name)
            over -= len(drawn.svg.encode(errors="replace")) - _NOTE_BYTES
    return _rendered(experiment, page, _EXAMPLES[-1], known, frozenset(without))


_NOTE_BYTES = 200
"""What a section says of the figures it lacks."""


def _rendered(
    experiment: Experiment,
    page: Page,
    examples: int,
    known: Sequence[dict[object, Shown]],
    without: frozenset[str] = frozenset(),
) -> str:
    """`examples`: of every section; `known`: read before. `without`: figures that are left out."""
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            **page_parts(),
            experiment=experiment,
            summary=page.summary,
            several_models=len({section.group.model for section in page.sections}) > 1,
            sections=[
                _section(section, f"section-{i}", sample_of(section.group, examples, of), without)
                for i, (section, of) in enumerate(zip(page.sections, known, strict=True), 1)
            ],
            memory=page.memory,
            overview=page.overview,
            published=[_by_model(table) for table in page.published],
            warnings=page.warnings,
            reproduce=how_to_reproduce(experiment),
            manifests=[
                (str(run.folder.relative_to(experiment.folder)), _as_text(run.manifest))
                for run in experiment.runs[:_MANIFESTS_SHOWN]
            ],
        )
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
        ascends=_ascends,
        notes_of=_notes,
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


def _section(
    section: Section, place: str, sample: tuple[list[Shown], int], without: frozenset[str]
) -> dict[str, Any]:
    """The section with what its template needs besides."""
    shown, examples = sample
    return vars(section) | {
        "id": place,
        "figures": [drawn for drawn in section.figures if drawn.name not in without],
        "kept": [drawn for drawn in section.kept if drawn.name not in without],
        "left_out": sum(drawn.name in without for drawn in (*section.figures, *section.kept)),
        "shown": shown,
        "examples": examples,
        "filters": _filters(shown),
        "failures": _failures(section.group),
    }


def _by_model(table: Table) -> tuple[Table, Table]:
    """A published table's rows about our model, and those about others."""
    ours = tuple(row for row in table.rows if not row.aside)
    others = tuple(row for row in table.rows if row.aside)
    title = "About other models than ours" if ours else table.title
    return replace(table, rows=ours), replace(table, rows=others, title=title)


def _notes(table: Table) -> list[str]:
    """The notes on what the table shows."""
    shown = {column.key for column in table.shown}
    shown |= {INTERVAL} if any(column.bounds for column in table.shown) else set()
    if any(column.remark.startswith("ratio") for column in table.shown):
        shown.add("ratio")
    return [n for n in table.notes if not isinstance(n, Note) or not n.about or n.about & shown]


def _ascends(column: Column, first: bool) -> bool:
    """Whether sorting begins with the smallest: names from a to z, the best first."""
    return first or column.ascending or column.kind in ("text", "p", "failures")


def _filters(shown: Sequence[Shown]) -> dict[str, list[str]]:
    """Fields to filter predictions by, each with its values in order of appearance."""
    values: dict[str, dict[str, None]] = {}
    for example in shown:
        for name, value in {"dataset": example.dataset, **example.fields}.items():
            values.setdefault(name, {})[value] = None
    return {name: list(found) for name, found in values.items() if len(found) > 1}


def _failures(group: Group) -> dict[str, Any]:
    failed = group.records[group.records["status"] != "ok"]
    rows = [
        (row["variant"], row["dataset"], row["example_id"], row["status"], clip(row["error"]))
        for _, row in failed.head(_FAILURES_SHOWN).iterrows()
    ]
    return {"rows": rows, "total": len(failed)}


def _as_text(manifest: Mapping[str, Any]) -> Markup:
    """As JSON for an element's content, where quotation marks, half of its bytes escaped, may stand."""
    return Markup(html.escape(json.dumps(manifest, indent=1), quote=False))


def how_to_reproduce(experiment: Experiment) -> list[tuple[str, list[str]]]:
    """What the runs were made with: one line per distinct value."""
    keys = ("command", "seed", "code_revision", "versions", "hardware")
    found = {key: [run.manifest.get(key) for run in experiment.runs] for key in keys}
    return [
        (key.replace("_", " "), list(dict.fromkeys(_plain(v) for v in values if v is not None)))
        for key, values in found.items()
    ]


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return " ".join(map(_plain, value))
    return str(value)


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
