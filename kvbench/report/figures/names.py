"""What figures, their parts and their files are called."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

from kvbench.report.experiment import BASELINE, Group
from kvbench.report.labels import Variant
from kvbench.report.table import unit_text, value_text
from kvbench.report.tables.strata import as_text

MAX_PANELS = 16
"""Variants that one picture holds."""
_AXES = {
    "length": "context length (tokens)",
    "depth": "depth (%)",
    "num_lines": "number of lines",
    "prompt_tokens": "prompt length (tokens)",
    "rate": "rate (fraction of the middle that is kept)",
    "layer": "layer",
}


def extremes(values: Mapping[str, float], unit: str, *, lower: bool, signed: bool = False) -> str:
    """Who is best and who is last, as its text alternative."""
    known = {name: value for name, value in values.items() if math.isfinite(value)}
    if not known:
        return ""
    ranked = sorted(known, key=lambda name: known[name], reverse=not lower)
    texts = [f"{name} {value_text(known[name], unit, signed=signed)}" for name in ranked]
    what = f"{'difference' if signed else 'mean'}{unit_text(unit)}"
    return f"Best {what}: {texts[0]}" + (f"; last: {texts[-1]}." if len(texts) > 1 else ".")


def percent(unit: str) -> float:
    return 100.0 if unit == "fraction" else 1.0


def axis_unit(group: Group) -> str:
    return " (%)" if group.meta.score_unit == "fraction" else f" ({words(group.meta.score_unit)})"


def axis_name(name: str) -> str:
    return _AXES.get(name, words(name))


def words(name: str) -> str:
    return name.replace("_", " ")


def tick_text(value: object, axis: str) -> str:
    if axis == "rate" and isinstance(value, float) and 0 < value < 1 and (1 / value).is_integer():
        return f"1/{int(1 / value)}"
    return as_text(value)


def slug(name: str) -> str:
    """A part of a file's name; of a long one the beginning and a digest of the whole."""
    safe = "".join(c if c.isalnum() or c in "._" else "-" for c in name).strip("-")
    if len(safe) <= 80:
        return safe
    return f"{safe[:60].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def stem(group: Group) -> str:
    return f"{slug(group.task)}-{slug(group.model)}"


def pages(
    group: Group, variants: Sequence[Variant], per_rate: bool = False
) -> list[tuple[str, list[Variant]]]:
    """Variants split by rate, each with the baselines, where one picture cannot hold them all."""
    rates = sorted({a.rate for a in variants if a.rate is not None and a.options}, reverse=True)
    if len(rates) < 2 or (not per_rate and len(variants) <= MAX_PANELS):
        return [("", list(variants))]
    return [
        (f"-rate-{rate:g}", [a for a in variants if a.rate == rate or a.method == BASELINE])
        for rate in rates
    ]
