"""The record fields that a task asks its tables and figures for, whoever wrote the records: checked
once, and short enough to stand in a label."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvbench.records.read import Run, StoreError
from kvbench.records.schema import LARGEST

LONGEST = 80
"""Characters of a name in tables and figures; of a longer one the beginning and a digest are shown."""

MEASURED = (
    *("tokens_per_s", "decode_tokens_per_s", "peak_bytes", "batch", "latency_s"),
    *("speedup", "decode_speedup", "prefill_ratio", "rate"),
)
"""Fields that tables and figures take for numbers wherever a record has them."""

_NUMBERS = {
    "heatmap": ("value",),
    "bars": ("value",),
    "scaling": ("x", "y", "level"),
    "ablation": ("y",),
}
_NAMES = {
    "heatmap": ("x", "y"),
    "bars": ("x", "facet"),
    "scaling": ("facet", "unit"),
    "scatter": ("x",),
    "ablation": ("by", "series", "unit"),
}
"""Of each kind of figure, the keys that name a field of numbers and those that name any field."""

Figures = Sequence[Mapping[str, Any]]


def short_name(text: str, longest: int = LONGEST) -> str:
    """The text, or its beginning and a digest of the whole where it is too long for a label."""
    if len(text) <= longest:
        return text
    digest = hashlib.sha256(text.encode(errors="replace")).hexdigest()[:8]
    return f"{text[: longest - 9]}…{digest}"


def checked(run: Run, figures: Figures, others: Sequence[str] = ()) -> pd.DataFrame:
    """A run's records, fit for tables and figures: numbers where they must be, no lists or mappings
    where values are compared, and short names.

    Args:
        figures: as the manifest's ``task_meta`` asks for them.
        others: further fields whose values are compared.

    Raises:
        StoreError: one line that names the folder, the record, the field and what is allowed.
    """
    records = run.records
    numbers = {*MEASURED, *_named(figures, _NUMBERS)} & set(records)
    names = {"dataset", "draw", *others, *_named(figures, _NAMES)} & set(records) - numbers
    # of a run that says no seed anywhere, all are the same
    changed = {"seed": records["seed"].fillna(run.manifest.get("seed") or 0)}
    for name in sorted(numbers | names):
        column = records[name]
        wrong = column[_beyond(column, text=name in names)]
        if len(wrong):
            words = "text, a number" if name in names else "a number"
            raise StoreError(
                f"{run.folder}, record of example {records['example_id'][wrong.index[0]]!r:.80}: "
                f"{name} is {_shown(wrong.iloc[0])}; allowed: {words} up to {LARGEST:g}, or null"
            )
        if name in numbers:
            changed[name] = pd.to_numeric(column)
        elif _longest(column) > LONGEST:
            changed[name] = column.map(lambda v: short_name(v) if isinstance(v, str) else v)
    return records.assign(**changed)


def drawable(figures: Figures, records: pd.DataFrame) -> tuple[Mapping[str, Any], ...]:
    """The figures whose fields some record has: the others have nothing to draw."""
    return tuple(
        figure for figure in figures if _named([figure], _NAMES) | _numbers(figure) <= set(records)
    )


def comparable(records: pd.DataFrame, figures: Figures, others: Sequence[str] = ()) -> pd.DataFrame:
    """Records of several runs, a field that is text in some and a number in others as text in all."""
    changed = {}
    for name in {"draw", *others, *_named(figures, _NAMES)} & set(records) - {"seed"}:
        values = records[name]
        mixed = pd.api.types.is_object_dtype(values)
        if mixed and len({isinstance(value, str) for value in values.dropna()}) > 1:
            changed[name] = values.map(_as_text, na_action="ignore")
    return records.assign(**changed)


def _named(figures: Figures, keys: Mapping[str, tuple[str, ...]]) -> set[str]:
    """The record fields that figures name under these keys."""
    return {
        str(figure[key])
        for figure in figures
        for key in keys.get(str(figure.get("kind")), ())
        if figure.get(key) is not None
    }


def _numbers(figure: Mapping[str, Any]) -> set[str]:
    """The fields without whose numbers a figure is empty; bars of none show scores."""
    return set() if figure.get("kind") == "bars" else _named([figure], _NUMBERS)


def _beyond(column: pd.Series, *, text: bool) -> Any:
    """Where a value is neither a number that can be drawn nor, if `text`, a text."""
    words = text and isinstance(column.dtype, pd.StringDtype)
    if words or pd.api.types.is_bool_dtype(column):
        return [False] * len(column)
    if pd.api.types.is_numeric_dtype(column):
        return column.abs() > LARGEST
    return [not _fits(value, text=text) for value in column]


def _longest(column: pd.Series) -> int:
    """Characters of the longest text."""
    if pd.api.types.is_numeric_dtype(column):
        return 0
    if isinstance(column.dtype, pd.StringDtype):
        return int(column.str.len().max()) if column.notna().any() else 0
    return max((len(value) for value in column if isinstance(value, str)), default=0)


def _fits(value: object, *, text: bool) -> bool:
    if value is None or isinstance(value, bool):
        return True
    return text if isinstance(value, str) else isinstance(value, int | float) and _is_small(value)


def _is_small(value: float) -> bool:
    return not abs(value) > LARGEST  # of NaN, too


def _as_text(value: object) -> str:
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def _shown(value: object) -> str:
    """A value for a message; an integer may have more digits than Python prints."""
    if isinstance(value, int) and not _is_small(value):
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.60}"
