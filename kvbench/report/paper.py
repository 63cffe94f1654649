"""Published numbers beside ours, where an experiment names the published table.

The experiment's config says so under ``paper_table``: a file in results/paper, or a mapping

    file: subgen_table1        results/paper/subgen_table1.csv
    value: accuracy            long tables: the column that holds the number
    by: num_lines              long tables: the record field (and column) that spreads over columns
    where: {model: OPT-30B}    only these rows
    method: balancekv          the method of a table that has no column ``method``
    scale: 100                 what to multiply the published number by to be per cent

A wide table (one column per dataset) needs only its file. Its average is shown where ours is over the
same datasets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.report.data import Experiment, Group
from kvbench.report.tables import AVERAGE, ScoreTable, as_text, score_table


class PaperError(ValueError):
    """A ``paper_table`` that cannot be read: one line that names it and what is wrong."""


@dataclass(frozen=True)
class Pair:
    """A published number and ours; NaN where one of them is missing. Both in the shown unit."""

    published: float
    ours: float

    @property
    def difference(self) -> float:
        """Ours minus the published one."""
        return self.ours - self.published


@dataclass(frozen=True)
class PublishedRow:
    """One of our arms beside one published row; `model` is the one the paper used."""

    method: str
    model: str
    label: str
    pairs: tuple[Pair, ...]


@dataclass(frozen=True)
class Published:
    """A published table next to the arms that it has in common with ours.

    Attributes:
        columns: what both tables have.
    """

    source: str
    task: str
    model: str
    unit: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]


def published_tables(experiment: Experiment, folder: Path | None = None) -> list[Published]:
    """One comparison per group whose config names a published table.

    Args:
        folder: where the CSV files are; by default ``paper`` beside the experiment's folder, or the
            repository's results/paper.

    Raises:
        PaperError: the table is not there, or lacks a column that the config names.
    """
    found = []
    for group in experiment.groups:
        specs = {str(_spec_of(m)): _spec_of(m) for m in group.manifests}
        for spec in specs.values():
            if spec:
                found.append(_compare(group, spec, _read(experiment.folder, spec, folder)))
    return [table for table in found if table.rows]


def published_frame(experiment: Path, name: str) -> pd.DataFrame:
    """The published table `name`, as for an experiment in the folder `experiment`.

    Raises:
        PaperError: the table is not there.
    """
    return _read(experiment, {"file": name}, None)


def _spec_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    spec = (manifest.get("config") or {}).get("paper_table")
    if not spec:
        return {}
    return {"file": spec} if isinstance(spec, str) else dict(spec)


def _read(experiment: Path, spec: Mapping[str, Any], folder: Path | None) -> pd.DataFrame:
    name = f"{spec.get('file')}".removesuffix(".csv") + ".csv"
    root = Path(__file__).parents[2] / "results" / "paper"
    places = [folder] if folder else [experiment.resolve().parent / "paper", root]
    for place in places:
        if (place / name).is_file():
            frame = pd.read_csv(place / name)
            break
    else:
        raise PaperError(f"paper_table {name} is in none of {', '.join(map(str, places))}")
    where = spec.get("where") or {}
    named = [*where, *(spec[key] for key in ("value", "by") if spec.get(key))]
    unknown = [column for column in named if column not in frame]
    if unknown:
        raise PaperError(
            f"{name} has no column {', '.join(unknown)}; it has {', '.join(frame.columns)}"
        )
    for column, wanted in where.items():
        values = (
            wanted if isinstance(wanted, Sequence) and not isinstance(wanted, str) else [wanted]
        )
        frame = frame[frame[column].isin(values)]
    return frame


def _compare(group: Group, spec: Mapping[str, Any], frame: pd.DataFrame) -> Published:
    by, value = spec.get("by"), spec.get("value")
    table = score_table(group, by or "dataset")
    if "method" not in frame:
        frame = frame.assign(method=spec.get("method", ""))
    if by and value:
        keys = [column for column in ("model", "method") if column in frame]
        numbers = pd.to_numeric(frame[value], errors="coerce")
        frame = frame.assign(**{by: frame[by].map(as_text), value: numbers})
        if frame.duplicated([*keys, by]).any():
            raise PaperError(f"{spec['file']} has several rows per {by}: choose some by `where`")
        frame = frame.pivot_table(index=keys, columns=by, values=value, sort=False).reset_index()
    columns = tuple(column for column in table.columns if column in frame)
    if AVERAGE in columns and not _same_datasets(frame, table):
        columns = tuple(column for column in columns if column != AVERAGE)
    scale = float(spec.get("scale", 1.0))
    rows = []
    for _, line in frame.iterrows():
        for row in table.rows:
            if row.arm.method == line["method"]:
                pairs = tuple(
                    _pair(table, row.cells[c].score.value, line[c], scale) for c in columns
                )
                rows.append(
                    PublishedRow(row.arm.method, str(line.get("model", "")), row.arm.label, pairs)
                )
    return Published(
        source=str(spec["file"]),
        task=group.task,
        model=group.model,
        unit=table.unit,
        columns=columns,
        rows=tuple(rows) if columns else (),
    )


def _same_datasets(frame: pd.DataFrame, table: ScoreTable) -> bool:
    """Whether both averages are over the same datasets; else they are not comparable."""
    published = set(frame.select_dtypes("number").columns) - {AVERAGE}
    return published == set(table.columns) - {AVERAGE}


def _pair(table: ScoreTable, ours: float, published: object, scale: float) -> Pair:
    number = float(pd.to_numeric(pd.Series([published]), errors="coerce").iloc[0]) * scale
    return Pair(number, ours * 100 if table.unit == "fraction" else ours)
