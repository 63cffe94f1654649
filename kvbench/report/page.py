"""The page: one HTML file with everything that an experiment found, which opens from disk.

Predictions and error texts are untrusted: the template escapes every value, and the page's content
security policy allows no script but those that it holds itself (by their hash), and no request.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from kvbench.errors import disk_line, printable, printable_lines
from kvbench.records.read import StoreError
from kvbench.report.drawing import Drawn
from kvbench.report.figures import kept_of
from kvbench.report.papers import notes_on
from kvbench.report.ratios import rate_texts, ratio_text
from kvbench.report.render import PAGE_MARK, write_text
from kvbench.report.runs import Experiment, Group, as_text, protocol_of, starts_of, words
from kvbench.report.style import style_of
from kvbench.report.table import Table, footer, score_format

_HERE = Path(__file__).parent / "templates"
PAGE = "report.html"
LIMIT = 60
"""Examples whose answers a page shows."""
MOST_ANSWERS = 1000
"""Answers of one model and task that a page shows: of many methods fewer examples."""
LONGEST = 400
"""Characters of a prediction or a prompt tail that are shown."""
FULL_SHADE, MOST_BESIDE = 9, 150
"""Steps in which a page shows how much of a piece of a prompt is kept; characters of the prompt that it
shows at both ends and on both sides of the answer."""
_FAILURES = 100
"""Failed examples that a page names."""
_PROTOCOLS = {
    "all_but_last": "all of a prompt but its last token, which is fed to every cache (all_but_last)",
    "context": "the context alone; the question is fed to every cache (context)",
    "prompt": "the whole prompt; an answer's first token is the exact cache's (prompt)",
}
"""By value of ``compress_after`` the part of a prompt that is compressed."""
_PLACE = re.compile(r""" ('?)results_dir=/[^\s']*\1(?= |$)""")
"""An absolute ``results_dir`` in a command."""
_KEPT, _NOT_COUNTED = ", always kept", " and not counted in the rate"
"""Said of every sink and window; and of those beside a rate of the middle."""


@dataclass(frozen=True)
class Section:
    """The part of a page on one model and task: the first table and figure, with the others folded."""

    group: Group
    verdict: str
    tables: Sequence[Table]
    figures: Sequence[Drawn] = ()
    answers: int = LIMIT

    @cached_property
    def sample(self) -> tuple[list[dict[str, Any]], int]:
        """Examples whose answers are shown, and how many examples there are in all."""
        return sample_of(self.group, self.answers)

    @property
    def filters(self) -> dict[str, list[str]]:
        """Fields to filter answers by, each with its values in order of appearance."""
        fields = pd.DataFrame([example["fields"] for example in self.sample[0]])
        values = {str(name): fields[name].dropna().unique().tolist() for name in fields}
        return {name: distinct for name, distinct in values.items() if len(distinct) > 1}

    @cached_property
    def kept_words(self) -> list[dict[str, Any]]:
        """For each variant the words of the prompt whose kept tokens are shown."""
        kept = kept_of(self.group)
        words_of = [
            {"title": title, "method": variant.method, "words": words_kept(held)}
            for title, (variant, held) in (kept.by_title.items() if kept else ())
        ]
        return [each for each in words_of if each["words"]]

    @property
    def failures(self) -> pd.DataFrame:
        columns = ["variant", "dataset", "example_id", "status", "error"]
        return self.group.records.loc[self.group.records["status"] != "ok", columns]


def sample_of(group: Group, limit: int = LIMIT) -> tuple[list[dict[str, Any]], int]:
    """About `limit` examples at most, spread evenly over the records, the same number from each dataset
    and at least one, and how many there are in all; none where a task has no answers."""
    records = group.records[group.records["prediction"].notna() | (group.records["status"] != "ok")]
    if group.records["prediction"].isna().all():
        return [], 0
    first = records.drop_duplicates(["seed", "example_id"])
    strata = sorted((part.index for _, part in first.groupby("dataset")), key=len)
    chosen: list[Any] = []
    for i, stratum in enumerate(strata):
        share = max(1, (limit - len(chosen)) // (len(strata) - i))
        step = max(1.0, len(stratum) / share)
        chosen += [stratum[int(k * step)] for k in range(min(share, len(stratum)))]
    keys = first.loc[sorted(chosen), ["seed", "example_id"]]
    some = records.merge(keys, on=["seed", "example_id"])
    parts = some.groupby(["seed", "example_id"], sort=False, dropna=False)
    return [_answers_to(group, part) for _, part in parts], len(first)


def _answers_to(group: Group, part: pd.DataFrame) -> dict[str, Any]:
    """One example with every variant's answer, as the template takes it; ``evidence`` is the part of the
    prompt that holds the answer, ``differs`` whether a text is another than the baseline's."""
    first = part.iloc[0]
    by_variant = {str(row["variant"]): row for _, row in part.iterrows()}
    answers = []
    for variant in group.variants:
        if variant.label not in by_variant:
            continue
        row = by_variant[variant.label]
        baseline = by_variant.get(group.baseline[variant.label] or "")
        good = row["status"] == "ok"
        score = float(row["score"])
        verdict = "none" if good else "failed"
        if good and group.percent and not math.isnan(score):
            verdict = "right" if score >= 1 else "wrong" if score <= 0 else "part"
        names_rate = variant.label != variant.without_rate
        answers.append(
            {
                "label": variant.label,
                "ratio": ratio_text([float(row["ratio"])]) if names_rate else "",
                "color": style_of(variant.method).color,
                "text": clip(row["prediction"] if good else row["error"]),
                "verdict": verdict,
                "score": score,
                "status": str(row["status"]),
                "differs": baseline is not None and row["prediction"] != baseline["prediction"],
            }
        )
    fields = {"dataset": str(first["dataset"])}
    fields |= {name: as_text(first[name]) for name in group.meta.breakdown if name in part}
    expected = first["answers"] if isinstance(first["answers"], list) else []
    return {
        "example_id": str(first["example_id"]),
        "seed": as_text(first["seed"]),
        "fields": fields,
        "prompt_tail": clip(first["prompt_tail"], from_end=True),
        "evidence": clip(first.get("evidence")),
        "expected": " | ".join(map(str, expected)),
        "answers": answers,
        "disagree": len({answer["verdict"] for answer in answers}) > 1,
    }


def clip(text: Any, *, from_end: bool = False) -> str:
    """A text cut to `LONGEST` characters: its beginning with an ellipsis, or its end; empty for anything
    that is no text."""
    if not isinstance(text, str):
        return ""
    if len(text) <= LONGEST:
        return text
    return text[-LONGEST:] if from_end else f"{text[:LONGEST]}…"


def words_kept(kept: Mapping[str, Any]) -> list[tuple[str, int | None, bool]]:
    """A prompt's text in parts of one shade, which say how much a variant kept of them: the prompt's
    beginning, the text around the answer, and its end (`MOST_BESIDE`).

    Returns:
        Text, shade (0 to `FULL_SHADE`, over layers and KV heads) and whether the answer stands in it; a
        gap says how many tokens it is, and its shade is None.
    """
    weights = np.mean([np.array(layer, float) for layer in kept["layers"].values()], axis=0) / 100
    shades = np.ceil(FULL_SHADE * np.nan_to_num(weights).clip(0, 1)).astype(int)
    texts = [str(text) for text in kept.get("texts") or ()][: len(shades)]
    start, end = kept.get("answer") or (0, 0)
    first_tokens = np.arange(len(texts)) * kept["width"]
    has_answer = (first_tokens < end) & (first_tokens + kept["width"] > start)
    ends = np.cumsum([len(text) for text in texts])
    starts = ends - [len(text) for text in texts]
    shown = (starts < MOST_BESIDE) | (ends > ends[-1:].sum() - MOST_BESIDE)
    answer = np.flatnonzero(has_answer)
    if answer.size:
        near = ends > starts[answer[0]] - MOST_BESIDE
        shown |= near & (starts < ends[answer[-1]] + MOST_BESIDE)
    parts: list[tuple[str, int | None, bool]] = []
    keys = [(int(shades[i]), bool(has_answer[i])) if shown[i] else None for i in range(len(texts))]
    for key, same in groupby(range(len(texts)), keys.__getitem__):
        places = list(same)
        if key is None:
            parts.append((f" … {len(places) * kept['width']} tokens … ", None, False))
        else:
            text = "".join(texts[i] for i in places).replace("\n", "↵ ")
            parts.append((text, *key))
    return parts


def render_page(
    experiment: Experiment,
    sections: Sequence[Section],
    *,
    leaderboards: Sequence[Table],
    leads: Sequence[Drawn],
    tables: Sequence[Table],
    published: Sequence[Table],
    warnings: Sequence[str],
) -> str:
    """The page's HTML: leaderboards with the figures of all (`leads`), a section for each model and
    task, folded where there is a leaderboard, then tables of several. `warnings` are lines on what the
    report had to leave out. A note stands below the first table that has it."""
    configs = [run.manifest.get("config") or {} for run in experiment.runs]
    seen: set[str] = set()

    def new_notes(notes: Sequence[str]) -> list[str]:
        new = [note for note in notes if note not in seen]
        seen.update(new)
        return footer(new)

    return html(
        "page.html.j2",
        title=experiment.name,
        small=experiment.small,
        differs=dict.fromkeys(n for config in configs for n in notes_on(config.get("differs"))),
        facts=facts_of(experiment),
        sections=sections,
        leaderboards=leaderboards,
        leads=leads,
        tables=tables,
        published=published,
        warnings=warnings,
        new_notes=new_notes,
        reproduce=how_to_reproduce(experiment),
    )


def _shown(value: Any) -> Any:
    """A template's value as the page shows it: text without invisible characters (escape sequences,
    marks that change the direction of writing); markup as it is."""
    return printable_lines(value) if type(value) is str else value


def _breakable(text: str) -> Markup:
    """A name that a narrow column breaks behind its underscores, not within a word."""
    return escape(printable_lines(text)).replace("_", Markup("_<wbr>"))


def _template(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


_TEMPLATES = Environment(  # one for all pages: a template is compiled once
    loader=FileSystemLoader(_HERE),
    autoescape=True,
    finalize=_shown,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.globals.update(
    breakable=_breakable,
    clip=clip,
    color=lambda method: style_of(str(method)).color,
    footer=footer,
    most_failures=_FAILURES,
    score_format=score_format,
)


def html(template: str, **values: Any) -> str:
    """A page made from one of the templates. Every value is escaped; an unknown name is an error."""
    script = _template("page.js")
    digest = hashlib.sha256(script.encode()).digest()
    return _TEMPLATES.get_template(template).render(
        style=_template("page.css"),
        script=script,
        script_hash=base64.b64encode(digest).decode(),
        **values,
    )


def facts_of(experiment: Experiment) -> dict[str, str]:
    """By name what was run with which settings on which device, and how much of it failed."""
    manifests = [run.manifest for run in experiment.runs]
    statuses = Counter(s for g in experiment.groups for s in g.records["status"].astype(str))
    variants = [variant for group in experiment.groups for variant in group.variants]
    rates = rate_texts(*experiment.groups)
    hardware = [manifest.get("hardware") or {} for manifest in manifests]
    starts = [start for manifest in manifests for start in starts_of(manifest)]
    dates = sorted(str(start["started"])[:10] for start in starts if start.get("started"))
    failed = [f"{n} {name}" for name, n in sorted(statuses.items()) if name != "ok"]
    identities = [manifest.get("identity") or {} for manifest in manifests]
    compressed = [_compressed(identity) for identity in identities]
    budgets = [identity.get("budget") or {} for identity in identities]
    counted = any(budget.get("total_rate") or budget.get("size") for budget in budgets)
    ending = _KEPT if counted else f"{_KEPT}{_NOT_COUNTED}"
    facts = {
        "model": [group.model for group in experiment.groups],
        "dtype": [str(one.get("dtype") or "").removeprefix("torch.") for one in identities],
        "methods": [variant.method for variant in variants],
        "budget": ["; ".join(rates.values())],
        "sink and window": _by_task(manifests, [ends for ends, _ in compressed], ending),
        "compressed": _by_task(manifests, [when for _, when in compressed]),
        "device": [str(h.get("gpu") or h.get("processor") or h.get("cpu") or "") for h in hardware],
        "date": dates[:1] + dates[-1:],
        "records": [f"{sum(statuses.values()):,}"],
        "failed": [words(one) for one in failed],
    }
    texts = {name: ", ".join(dict.fromkeys(filter(None, each))) for name, each in facts.items()}
    return {name: text for name, text in texts.items() if text}


def _by_task(manifests: Sequence[Any], texts: Sequence[str], ending: str = "") -> list[str]:
    """Each text once, then the ending; with the names of the tasks where the runs' texts differ."""
    tasks_of: dict[str, dict[str, None]] = {}
    for manifest, text in zip(manifests, texts, strict=True):
        if text:
            tasks_of.setdefault(text, {})[str(manifest.get("task"))] = None
    if len(tasks_of) > 1:
        parts = [f"{', '.join(tasks)}: {text}" for text, tasks in tasks_of.items()]
    else:
        parts = list(tasks_of)
    return ["; ".join(parts) + ending] if parts else []


def _compressed(identity: Mapping[str, Any]) -> tuple[str, str]:
    """Which tokens a run kept at both ends of a prompt, and when it compressed the others. A probe of
    single layers has its own number of tokens in place of the budget's."""
    budget, task = identity.get("budget") or {}, identity.get("task")
    sink, window = budget.get("sink"), budget.get("window")
    when = _PROTOCOLS.get(protocol_of({"identity": identity}), "")
    by_probe = task.get("exact") if isinstance(task, Mapping) else None
    if isinstance(by_probe, int):
        sink, window, when = by_probe, by_probe, "the cache of each layer by itself"
    known = sink is not None and window is not None
    return f"first {sink} and last {window} tokens" if known else "", when


def how_to_reproduce(experiment: Experiment) -> list[tuple[str, list[str]]]:
    """Commands and seeds of the runs, and code, versions and hardware of all their starts, each with its
    distinct values. Commands are without the place of the results on the machine that ran them."""
    manifests = [run.manifest for run in experiment.runs]
    starts = [start for manifest in manifests for start in starts_of(manifest)]
    lines = []
    for key in ("command", "seed", "code_revision", "versions", "hardware"):
        values = [made.get(key) for made in (manifests if key in ("command", "seed") else starts)]
        texts = [_plain(value) for value in values if value is not None]
        if key == "command":
            texts = [_PLACE.sub("", text) for text in texts]
        lines.append((words(key), list(dict.fromkeys(texts))))
    return lines


def _plain(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items() if item is not None)
    return " ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


def write_index(folders: Sequence[Path]) -> Path:
    """Write index.html, which links the reports in `folders`, beside them."""
    with_page = [folder.resolve() for folder in folders if (folder / PAGE).is_file()]
    if not with_page:
        raise StoreError(
            f"no reports in {', '.join(map(str, folders)):.200}; expected {PAGE} in each"
        )
    place = Path(os.path.commonpath([folder.parent for folder in with_page]))
    names = [folder.relative_to(place).as_posix() for folder in with_page]
    links = [(quote(f"{name}/{PAGE}"), printable(name.rsplit("/", 1)[-1])) for name in names]
    text = html("index.html.j2", title=printable(place.name), links=links)
    try:
        return write_text(place / "index.html", text, PAGE_MARK)
    except OSError as error:
        raise StoreError(f"cannot write {place / 'index.html'}: {disk_line(error)}") from error
