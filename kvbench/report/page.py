"""The page: one HTML file with everything an experiment found, that opens from disk.

Predictions and error texts are untrusted: the template escapes every value, and the page's own
policy forbids any script but the one it ships, and any fetch.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from kvbench.errors import disk_line, printable, printable_lines
from kvbench.records.read import StoreError
from kvbench.report.answers import LIMIT, Shown, clip, sample_of
from kvbench.report.experiment import Experiment, Group
from kvbench.report.figures import Drawn
from kvbench.report.papers import notes_on
from kvbench.report.render import write_text
from kvbench.report.style import style_of
from kvbench.report.table import Table, unit_text, value_text

_HERE = Path(__file__).parent / "templates"
PAGE = "report.html"
_FAILURES = 100


@dataclass(frozen=True)
class Section:
    """What a page shows of one model and task: a sentence, tables (the first is open), figures (the
    first and heatmaps are open) and so many of the answers."""

    group: Group
    verdict: str
    tables: Sequence[Table]
    figures: Sequence[Drawn] = ()
    answers: int = LIMIT

    @property
    def leading(self) -> list[Drawn]:
        """Figures that are not folded."""
        return [d for i, d in enumerate(self.figures) if not i or d.name.endswith("-heatmap")]

    @cached_property
    def sample(self) -> tuple[list[Shown], int]:
        """Answers that are shown, and of how many."""
        return sample_of(self.group, self.answers)

    @property
    def filters(self) -> dict[str, list[str]]:
        """Fields to filter answers by, each with its values in order of appearance."""
        fields = pd.DataFrame([one.fields for one in self.sample[0]])
        found = {str(name): fields[name].dropna().unique().tolist() for name in fields}
        return {name: values for name, values in found.items() if len(values) > 1}

    @property
    def failures(self) -> pd.DataFrame:
        """Of every failed example who failed, on what, and why."""
        columns = ["variant", "dataset", "example_id", "status", "error"]
        return self.group.records.loc[self.group.records["status"] != "ok", columns]


def render_page(
    experiment: Experiment,
    sections: Sequence[Section],
    tables: Sequence[Table] = (),
    published: Sequence[Table] = (),
    warnings: Sequence[str] = (),
) -> str:
    """The page's HTML.

    Args:
        tables: about several models or tasks, before the sections. published: numbers beside ours.
    """
    every = [*tables, *published, *(table for section in sections for table in section.tables)]
    configs = [run.manifest.get("config") or {} for run in experiment.runs]
    return html(
        "page.html.j2",
        title=experiment.name,
        small=experiment.small,
        notes=dict.fromkeys(note for table in every for note in table.notes),
        differs=dict.fromkeys(n for config in configs for n in notes_on(config.get("differs"))),
        facts=facts_of(experiment),
        sections=sections,
        tables=tables,
        published=published,
        warnings=warnings,
        reproduce=how_to_reproduce(experiment),
    )


def _shown(value: Any) -> Any:
    """A value of a template: text without characters that are not to be seen (escape sequences, marks
    that turn the direction of writing); what is markup already as it is."""
    return printable_lines(value) if type(value) is str else value


def html(template: str, **values: Any) -> str:
    """A page from one of the templates; every value is escaped, an unknown name is an error."""
    made = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        finalize=_shown,
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
        most_failures=_FAILURES,
        color=lambda method: style_of(str(method)).color,
        unit_text=unit_text,
        value_text=value_text,
        **values,
    )


def facts_of(experiment: Experiment) -> dict[str, str]:
    """An experiment in a few lines: what it ran on what, and how much of it failed."""
    manifests = [run.manifest for run in experiment.runs]
    statuses = Counter(s for g in experiment.groups for s in g.records["status"].astype(str))
    variants = [variant for group in experiment.groups for variant in group.variants]
    rates = sorted({v.rate for v in variants if v.rate is not None}, reverse=True)
    hardware = [manifest.get("hardware") or {} for manifest in manifests]
    starts = [one for m in manifests for one in (*m.get("earlier_starts", ()), m)]
    dates = sorted(str(one["started"])[:10] for one in starts if one.get("started"))
    failed = [f"{n} {name}" for name, n in sorted(statuses.items()) if name != "ok"]
    found = {
        "methods": [variant.method for variant in variants],
        "rate": [f"{rate:g}" for rate in rates],
        "device": [str(h.get("gpu") or h.get("processor") or h.get("cpu") or "") for h in hardware],
        "date": dates[:1] + dates[-1:],
        "code revision": [str(one.get("code_revision") or "")[:12] for one in starts],
        "records": [f"{sum(statuses.values()):,}"],
        "failed": [one.replace("_", " ") for one in failed],
    }
    each = {name: ", ".join(dict.fromkeys(filter(None, of))) for name, of in found.items()}
    return {name: text for name, text in each.items() if text}


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
    names = [folder.relative_to(place).as_posix() for folder in found]
    links = [(quote(f"{name}/{PAGE}"), printable(name.rsplit("/", 1)[-1])) for name in names]
    text = html("index.html.j2", title=printable(place.name), links=links)
    try:
        return write_text(place / "index.html", text)
    except OSError as error:
        raise StoreError(f"cannot write {place / 'index.html'}: {disk_line(error)}") from error
