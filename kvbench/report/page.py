"""The page: one HTML file with everything an experiment found, that opens from disk.

Predictions and error texts are untrusted: the template escapes every value, and the page's own
policy forbids any script but the one it ships, and any fetch.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.errors import disk_line, printable
from kvbench.records.read import StoreError
from kvbench.report.answers import LIMIT, Shown, clip, sample_of
from kvbench.report.experiment import Experiment, Group
from kvbench.report.figures import Drawn
from kvbench.report.files import write_text
from kvbench.report.style import style_of
from kvbench.report.table import Table, unit_text, value_text

_HERE = Path(__file__).parent / "templates"
PAGE = "report.html"
MOST_BYTES = 2_000_000
"""Of a page."""
_EXAMPLES = (LIMIT, LIMIT // 2, LIMIT // 5, 3)
"""Answers of so many examples a section: as many as the page has room for."""
_FAILURES, _NAMED = 100, 6


@dataclass(frozen=True)
class Section:
    """What a page shows of one model and task: a sentence, tables (the first is open) and figures (the
    first is open)."""

    group: Group
    verdict: str
    tables: Sequence[Table]
    figures: Sequence[Drawn] = ()


@dataclass(frozen=True)
class Page:
    """What a page shows; before the sections what is about several models and tasks, and the published
    numbers beside ours."""

    experiment: Experiment
    sections: Sequence[Section]
    tables: Sequence[Table] = ()
    published: Sequence[Table] = ()
    warnings: Sequence[str] = field(default_factory=list)


def render_page(page: Page) -> str:
    """The page's HTML: at most `MOST_BYTES` where fewer answers, and then fewer figures, make it so; the
    largest figures go first."""
    text = ""
    for examples in _EXAMPLES:
        text = _rendered(page, examples, frozenset())
        if len(text.encode(errors="replace")) <= MOST_BYTES:
            return text
    over = len(text.encode(errors="replace")) - MOST_BYTES
    without: set[str] = set()
    figures = [drawn for section in page.sections for drawn in section.figures]
    for drawn in sorted(figures, key=lambda drawn: len(drawn.svg), reverse=True):
        if over > 0:
            without.add(drawn.name)
            over -= len(drawn.address)
    return _rendered(page, _EXAMPLES[-1], frozenset(without))


def _rendered(page: Page, examples: int, without: frozenset[str]) -> str:
    experiment = page.experiment
    sections = []
    for i, section in enumerate(page.sections, 1):
        shown, count = sample_of(section.group, examples)
        failed = section.group.records[section.group.records["status"] != "ok"]
        columns = ["variant", "dataset", "example_id", "status", "error"]
        sections.append(
            {
                **vars(section),
                "id": f"section-{i}",
                "shown": shown,
                "examples": count,
                "filters": _filters(shown),
                "failures": failed[columns].head(_FAILURES).to_numpy().tolist(),
                "failed": len(failed),
                "figures": [drawn for drawn in section.figures if drawn.name not in without],
                "left_out": sum(drawn.name in without for drawn in section.figures),
            }
        )
    return html(
        "page.html.j2",
        title=experiment.name,
        page=page,
        facts=facts_of(experiment),
        sections=sections,
        reproduce=how_to_reproduce(experiment),
    )


def html(template: str, **values: Any) -> str:
    """A page from one of the templates; every value is escaped, an unknown name is an error."""
    made = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    return made.get_template(template).render(
        style=(_HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        clip=clip,
        color=lambda method: style_of(str(method)).color,
        unit_text=unit_text,
        value_text=value_text,
        **values,
    )


def _filters(shown: Sequence[Shown]) -> dict[str, list[str]]:
    """Fields to filter answers by, each with its values in order of appearance."""
    values: dict[str, dict[str, None]] = {}
    for example in shown:
        for name, value in example.fields.items():
            values.setdefault(name, {})[value] = None
    return {name: list(found) for name, found in values.items() if len(found) > 1}


def facts_of(experiment: Experiment) -> dict[str, str]:
    """An experiment in a few lines: what it ran on what, and how much of it failed."""
    manifests = [run.manifest for run in experiment.runs]
    statuses = Counter(s for g in experiment.groups for s in g.records["status"].astype(str))
    variants = [variant for group in experiment.groups for variant in group.variants]
    rates = sorted({v.rate for v in variants if v.rate is not None}, reverse=True)
    hardware = [manifest.get("hardware") or {} for manifest in manifests]
    devices = (str(h.get("gpu") or h.get("processor") or h.get("cpu") or "") for h in hardware)
    dates = sorted(str(m["started"])[:10] for m in manifests if m.get("started"))
    failed = {name: count for name, count in sorted(statuses.items()) if name != "ok"}
    found = {
        "model": _listed(group.model for group in experiment.groups),
        "tasks": _listed(group.task for group in experiment.groups),
        "methods": ", ".join(dict.fromkeys(variant.method for variant in variants)),
        "rate": _listed(f"{rate:g}" for rate in rates),
        "device": _listed(devices),
        "date": " to ".join(dict.fromkeys(dates[:1] + dates[-1:])),
        "code revision": _listed(str(m.get("code_revision") or "")[:12] for m in manifests),
        "records": f"{sum(statuses.values()):,}",
        "failed": ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in failed.items()),
    }
    return {name: value for name, value in found.items() if value}


def _listed(values: Iterable[str]) -> str:
    """Each once; of many the first and how many more."""
    found = [value for value in dict.fromkeys(values) if value]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more


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
    return " ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def write_index(folders: Sequence[Path]) -> Path:
    """Write index.html, which links the reports in `folders`, beside them; returns its path.

    Raises:
        StoreError: none has a report, or the file cannot be written.
    """
    found = [folder.resolve() for folder in folders if (folder / PAGE).is_file()]
    if not found:
        raise StoreError(
            f"no reports in {', '.join(map(str, folders)):.200}; expected {PAGE} in each"
        )
    place = Path(os.path.commonpath([folder.parent for folder in found]))
    links = [
        (quote(f"{folder.relative_to(place).as_posix()}/{PAGE}"), printable(folder.name))
        for folder in found
    ]
    text = html("index.html.j2", title=printable(place.name), links=links)
    try:
        return write_text(place / "index.html", text)
    except OSError as error:
        raise StoreError(f"cannot write {place / 'index.html'}: {disk_line(error)}") from error
