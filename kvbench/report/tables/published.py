"""Published numbers beside ours, where an experiment names the published table.

The experiment's config says so under ``paper_table``: a file in results/paper, a mapping, or a list of
them. How a table is laid out and what it calls our methods and tasks stands once, in tables.yaml
beside the CSV files; a mapping with layout keys of its own does without

    file: subgen_table1        results/paper/subgen_table1.csv
    value: accuracy            long tables: the column that holds the number
    by: num_lines              long tables: the record field (and column) that spreads over columns
    methods: [exact, uniform]  tables with a column per method: which columns those are
    where: {model: OPT-30B}    only these rows
    method: balancekv          the method of a table that has no column ``method``
    model: opt_30b             the model of a table that has no column ``model``
    mean_as: all               with ``methods``: their means over all rows are shown, as the dataset of
                               this name
    scale: 100                 what to multiply the published number by to be per cent
    sums: {code: [lcc, repobench-p]}   columns that are sums of datasets' scores
    fields: {decode_s: decode_s}       columns that are seconds: other record fields than the score
    field: latency_s           the record field that stands for the score, in seconds
    unit: fraction             of that field or those fields, where it is not seconds
    setting: {prompt_len: prompt_tokens, gen_len: asked_new_tokens}   columns and the record fields that
                               are the same: a column for each combination
    records: {asked_rate: 0.2}    only our records with this value, or with none
    rename: {system: method}   columns that are called otherwise there
    reduction: reduction_percent  the column of per cent of the cache that is left out; the rest is a
                               row's rate
    across_tasks: longeval_lines  several tasks (``task_label``) have columns of the one table: its name
    names: {h2o_20: h2o}       methods that are called otherwise there; a list: several of ours
    best_of: {subgen: [a, b]}  a row more, with the best of these variants of ours in every column
    models: {opt_6_7b: OPT-6.7B}  models that are called otherwise there
    differences: [a, b]        how our settings are known to differ from the paper's, one line each; []
                               where none is known
    rescored: 0.05             the share of examples that two honest runs answer anew (`margins`)

A wide table (one column per dataset) needs only its file. Where the table has our model, only that
model's rows are shown, else those of all its models. A column ``rate`` is matched with the budget's
rate of a method that has one. The average is shown where ours is over the same datasets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.errors import first_line
from kvbench.report.experiment import Experiment, Group
from kvbench.report.stats.estimate import Estimate
from kvbench.report.stats.margins import margin_of, rescored_share
from kvbench.report.tables.differences import PaperError, differences_of, specs_of
from kvbench.report.tables.published_files import laid_out, number_in, read_table
from kvbench.report.tables.published_rows import (
    Pair,
    Published,
    PublishedRow,
    best_rows,
    joined_rows,
    merged_differences,
)
from kvbench.report.tables.scores import AVERAGE, NO_CELL, Cell, ScoreTable, score_table
from kvbench.report.tables.strata import as_text


def published_tables(experiment: Experiment, folder: Path | None = None) -> list[Published]:
    """One comparison per group whose config names a published table.

    Args:
        folder: where the CSV files are; by default ``paper`` beside the experiment's folder, or the
            repository's results/paper.

    Raises:
        PaperError: the table is not there, lacks a column that the config names, or cannot be compared.
    """
    found = []
    for group in experiment.groups:
        specs: dict[str, dict[str, Any]] = {}
        differences: dict[str, tuple[str, ...] | None] = {}
        given = [spec for manifest in group.manifests for spec in _specs_of(manifest)]
        for spec in (one for each in given for one in laid_out(experiment.folder, each, folder)):
            said = differences_of(spec)
            key = str({name: value for name, value in spec.items() if name != "differences"})
            specs.setdefault(key, spec)
            differences[key] = merged_differences([differences.get(key), said])
        for key, spec in specs.items():
            try:
                f = rescored_share(experiment.folder, group.model, group.task, spec)
            except ValueError as error:
                raise PaperError(f"paper_table {spec.get('file')}: {error}") from error
            if any((m.get("config") or {}).get("limit") for m in group.manifests):
                f = None  # some of the paper's examples: no run of the same ones
            table = _compared(group, spec, read_table(experiment.folder, spec, folder), f)
            found.append(replace(table, differences=differences[key]))
    return [table for table in found if table.rows]


def _specs_of(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return specs_of((manifest.get("config") or {}).get("paper_table"))


def _compared(
    group: Group, spec: Mapping[str, Any], frame: pd.DataFrame, rescored: float | None
) -> Published:
    """`_compare`, in one line what a table or records from elsewhere make impossible."""
    try:
        return _compare(group, spec, frame, rescored)
    except PaperError:
        raise
    except (LookupError, TypeError, ValueError) as error:
        raise PaperError(
            f"paper_table {spec['file']} cannot be compared with {group.task}:"
            f" {type(error).__name__}: {first_line(error)}"
        ) from error


def _compare(
    group: Group, spec: Mapping[str, Any], frame: pd.DataFrame, rescored: float | None
) -> Published:
    by, value, sums = spec.get("by"), spec.get("value"), spec.get("sums") or {}
    if spec.get("mean_as"):
        means = frame[spec["methods"]].astype(float).mean().round(4).astype(str)
        frame = means.to_frame().T.assign(dataset=spec["mean_as"])
    if spec.get("methods"):
        kept = [column for column in frame if column not in spec["methods"]]
        frame = frame.melt(kept, spec["methods"], var_name="method", value_name="value")
        by, value = by or "dataset", "value"
    given = {"method": spec.get("method", "")} | (
        {"model": spec["model"]} if spec.get("model") else {}
    )
    frame = frame.assign(**{name: value for name, value in given.items() if name not in frame})
    ours = spec.get("names") or {}
    frame = frame.assign(method=[ours.get(name, name) for name in frame["method"]])
    frame = frame.explode("method", ignore_index=True)
    if spec.get("reduction"):
        left_out = pd.to_numeric(frame[spec["reduction"]], errors="coerce")
        frame = frame.assign(rate=(1.0 - left_out / 100.0).map(as_text))
    if group.model in (spec.get("models") or {}):
        frame = frame[frame["model"] == spec["models"][group.model]]
    group = replace(group, records=_select_records(group.records, spec))
    if spec.get("setting"):
        by = "setting"
        theirs = {column: column for column in spec["setting"]}
        frame = frame.assign(setting=_setting_text(frame, theirs))
        records = group.records.assign(setting=_setting_text(group.records, spec["setting"]))
        group = replace(group, records=records)
    if "model" in frame and (frame["model"] == group.model).any():
        frame = frame[frame["model"] == group.model]
    table = score_table(group, by or "dataset", sums=sums)
    if spec.get("fields"):
        table = _fields_table(group, spec["fields"], str(spec["file"]))
    parts = _parts_of(table, score_table(group, by or "dataset") if sums else table, sums)
    order: Sequence[str] = table.columns
    if spec.get("setting"):
        order = list(dict.fromkeys(frame["setting"]))
    if by and value:
        frame = _spread(frame, by, value, str(spec["file"]))
    else:
        order = list(frame.columns)  # as the paper has them
    columns = tuple(column for column in order if column in table.columns and column in frame)
    if AVERAGE in columns and not _same_datasets(frame, table):
        columns = tuple(column for column in columns if column != AVERAGE)
    scale = float(spec.get("scale", 1.0))
    rows = [
        PublishedRow(
            method=row.variant.method,
            model=str(line.get("model", "")),
            label=row.variant.label,
            pairs=tuple(
                _pair(
                    table,
                    row.cells.get(c, NO_CELL),
                    line[c],
                    scale,
                    (parts[row.variant.label, c], 1.0 if rescored is None else rescored, c in sums)
                    if _same_model(group, spec, line) and table.unit == "fraction"
                    else None,
                )
                for c in columns
            ),
        )
        for _, line in frame.iterrows()
        for row in table.rows
        if row.variant.method == line["method"] and _same_rate(group, row.variant.label, line)
    ]
    rows = joined_rows(rows)
    lower = group.meta.lower_is_better
    best = best_rows(rows, spec.get("best_of") or {}, lower_is_better=lower)
    return Published(
        source=str(spec["file"]).removesuffix(".csv"),
        task=group.task,
        model=group.model,
        unit=spec.get("unit", "s") if spec.get("field") or spec.get("fields") else table.unit,
        columns=columns,
        rows=(*rows, *best) if columns else (),
        field=spec.get("field"),
        part_of=spec.get("across_tasks"),
        rescored=rescored,
    )


def _parts_of(
    table: ScoreTable, single: ScoreTable, sums: Mapping[str, Sequence[str]]
) -> dict[tuple[str, str], list[Cell]]:
    """By variant and column, the cells that the column is the mean or the sum of."""
    whole = [column for column in single.columns if column != AVERAGE]
    found = {}
    for row in single.rows:
        for column in table.columns:
            names = sums.get(column) or (whole if column == AVERAGE else [column])
            found[row.variant.label, column] = [row.cells.get(name, NO_CELL) for name in names]
    return found


def _same_model(group: Group, spec: Mapping[str, Any], line: pd.Series) -> bool:
    """Whether a published row is about our model, as far as it says."""
    theirs = str(line.get("model", ""))
    return theirs in ("", group.model, (spec.get("models") or {}).get(group.model))


def _select_records(records: pd.DataFrame, spec: Mapping[str, Any]) -> pd.DataFrame:
    """The records that a spec is about, with what it compares as their score.

    Raises:
        PaperError: no such field.
    """
    asked, field = spec.get("records") or {}, spec.get("field")
    named = [*asked, *(spec.get("setting") or {}).values(), *([field] if field else [])]
    unknown = [name for name in named if name not in records]
    if unknown:
        raise PaperError(f"{spec.get('file')}: the records have no field {', '.join(unknown)}")
    for name, wanted in asked.items():
        records = records[records[name].isna() | (records[name] == wanted)]
    if field:
        records = records.assign(score=pd.to_numeric(records[field], errors="coerce"))
    return records


def _setting_text(frame: pd.DataFrame, fields: Mapping[str, str]) -> pd.Series:
    """The values of several fields as one text, e.g. ``prompt_len 2048, gen_len 512``."""
    texts = [name + " " + frame[f].map(number_in).map(as_text) for name, f in fields.items()]
    return reduce(lambda text, more: text + ", " + more, texts)


def _fields_table(group: Group, fields: Mapping[str, str], file: str) -> ScoreTable:
    """Means over runs of record fields (seconds), by the published column they stand beside.

    Raises:
        PaperError: no such field, or records of several settings, whose means say nothing.
    """
    if group.records["dataset"].nunique() > 1:
        raise PaperError(f"{file} has one setting; {group.task} was run with several")
    cells: dict[str, dict[str, Cell]] = {variant.label: {} for variant in group.variants}
    for column, name in fields.items():
        if name not in group.records:
            raise PaperError(f"{file}: the records of {group.task} have no field {name}")
        numbers = pd.to_numeric(group.records[name], errors="coerce")
        measured = replace(group, records=group.records.assign(score=numbers))
        table = score_table(measured)
        for row in table.rows:
            cells[row.variant.label][column] = row.total
    rows = tuple(replace(row, cells=cells[row.variant.label]) for row in table.rows)
    return replace(table, unit="s", columns=tuple(fields), rows=rows)


def _spread(frame: pd.DataFrame, by: str, value: str, file: str) -> pd.DataFrame:
    """A long table with the values of the column `by` as columns."""
    keys = [column for column in ("model", "method", "rate") if column in frame and column != by]
    frame = frame.assign(**{by: frame[by].map(lambda text: as_text(number_in(text)))})
    if frame.duplicated([*keys, by]).any():
        raise PaperError(f"{file} has several rows per {by}: choose some by `where`")
    wide = frame.pivot(index=keys, columns=by, values=value).reset_index()
    order = frame[keys].drop_duplicates()
    return order.merge(wide, on=keys)


def _same_rate(group: Group, label: str, line: pd.Series) -> bool:
    """Whether a published row is about this variant's budget; a variant that keeps all has none."""
    variant = next(variant for variant in group.variants if variant.label == label)
    if "rate" not in line or label not in group.compressed or variant.rate is None:
        return True
    rate = number_in(line["rate"])
    return isinstance(rate, float) and math.isclose(rate, variant.rate)


def _same_datasets(frame: pd.DataFrame, table: ScoreTable) -> bool:
    """Whether both averages are over the same datasets; else they are not comparable."""
    numeric = [
        c for c in frame if all(x == "" or isinstance(number_in(x), float) for x in frame[c])
    ]
    return set(numeric) - {AVERAGE, "rate"} == set(table.columns) - {AVERAGE}


def _pair(
    table: ScoreTable,
    cell: Cell,
    printed: object,
    scale: float,
    margin: tuple[Sequence[Cell], float, bool] | None,
) -> Pair:
    """Args: margin: the cells that ours is made of, f, and whether they are summed."""
    number = number_in(printed)
    published = number * scale if isinstance(number, float) else math.nan
    factor = 100.0 if table.unit == "fraction" else 1.0
    score = cell.score
    ours = Estimate(score.value * factor, score.low * factor, score.high * factor)
    text = str(printed)  # e.g. OOM where it is no number
    apart = math.nan
    if margin is not None and not math.isnan(published):
        parts, f, total = margin
        digits = len(text.partition(".")[2])
        sizes = [(part.score.value, part.units) for part in parts]
        apart = factor * margin_of(sizes, f, total=total, unit=scale * 10.0**-digits / factor)
    if isinstance(number, float):
        text = "" if math.isnan(number) else text if scale == 1.0 else f"{published:g}"
    return Pair(published, ours, cell, text, apart)
