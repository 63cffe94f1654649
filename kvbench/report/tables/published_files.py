"""Published tables as files: where they lie, how each is laid out, what is in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from kvbench.errors import first_line
from kvbench.report.tables.differences import PaperError, paper_folders, specs_of
from kvbench.report.tables.strata import as_text


def published_frame(experiment: Path, name: str) -> pd.DataFrame:
    """The published table `name`, as for an experiment in the folder `experiment`.

    Raises:
        PaperError: the table is not there.
    """
    frame = read_table(experiment, {"file": name}, None)
    return frame.apply(numbers_in)


def laid_out(experiment: Path, spec: dict[str, Any], folder: Path | None) -> list[dict[str, Any]]:
    """A spec with its table's layout, as tables.yaml has it, or several where that has several.

    Raises:
        PaperError: tables.yaml cannot be read, or holds what a ``paper_table`` may not.
    """
    if set(spec) - _OUR_OWN:  # it brings a layout
        return [spec]
    name = _file_name(spec)
    file = _place_of(experiment, name, folder) / "tables.yaml"
    if not file.is_file():
        return [spec]
    try:
        layouts = yaml.safe_load(file.read_text(encoding="utf-8")).get(
            name.removesuffix(".csv"), {}
        )
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        raise PaperError(f"{file} cannot be read: {first_line(error)}") from error
    several = layouts if isinstance(layouts, list) else [layouts]
    return [one for layout in several for one in specs_of({**layout, **spec})]


_OUR_OWN = {"file", "differences", "rescored", "records", "where"}
"""What an experiment says of the table, whatever its layout."""


def _file_name(spec: Mapping[str, Any]) -> str:
    return f"{spec.get('file')}".removesuffix(".csv") + ".csv"


def _place_of(experiment: Path, name: str, folder: Path | None) -> Path:
    """The folder that has a published table."""
    places = [folder] if folder else [experiment.resolve().parent / "paper", *paper_folders()]
    place = next((place for place in places if (place / name).is_file()), None)
    if place is None:
        raise PaperError(f"paper_table {name} is in none of {', '.join(map(str, places))}")
    if (place / name).resolve().parent != place.resolve():
        raise PaperError(f"paper_table {place / name} is a link to another folder; it is not read")
    return place


def read_table(experiment: Path, spec: Mapping[str, Any], folder: Path | None) -> pd.DataFrame:
    """The table as text, so that 22.0 stays what was printed; only the rows of ``where``."""
    name = _file_name(spec)
    place = _place_of(experiment, name, folder)
    try:
        frame = pd.read_csv(place / name, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:  # no CSV, or not UTF-8
        raise PaperError(f"{place / name} cannot be read: {first_line(error)}") from error
    frame = frame.rename(columns=spec.get("rename") or {})
    twice = frame.columns[frame.columns.duplicated()]
    if len(twice):
        raise PaperError(f"{name} has several columns {', '.join(twice)}, as renamed")
    where = spec.get("where") or {}
    named = [*where, *(spec[key] for key in ("value", "by", "reduction") if spec.get(key))]
    named += [
        name for key in ("methods", "sums", "fields", "setting") for name in spec.get(key) or ()
    ]
    unknown = [column for column in named if column not in frame]
    if unknown:
        raise PaperError(
            f"{name} has no column {', '.join(unknown)}; it has {', '.join(frame.columns)}"
        )
    for column, wanted in where.items():
        several = isinstance(wanted, Sequence) and not isinstance(wanted, str)
        allowed = {as_text(number_in(value)) for value in (wanted if several else [wanted])}
        frame = frame[frame[column].map(lambda text: as_text(number_in(text))).isin(allowed)]
    return frame


def number_in(text: object) -> object:
    """A number where the text is one, else what was given."""
    try:
        return float(str(text))
    except ValueError:
        return text


def numbers_in(column: pd.Series) -> pd.Series:
    """A column as numbers where all of it is numeric; what is empty is NaN."""
    numbers = pd.to_numeric(column.mask(column == ""), errors="coerce")
    return column if (numbers.isna() & (column != "")).any() else numbers
