"""Published numbers beside ours, where an experiment names the published table: a join of two frames.

A file of results/paper is tidy and in our names: ``method`` (``a|b``: the best of ours of these names in
every column), ``model`` and ``rate`` where they matter, ``by`` the record field (or fields, joined by
``+``) whose ``value`` a number is of, ``field`` the record field that it measures, ``unit``, and
``printed``, the number as the paper prints it (a fraction where the unit says so; of a field in bytes
GiB, in which ours are shown then). A value such as ``qasper+hotpotqa`` is the sum of those datasets'
scores; no value is everything. ``models.csv`` says which of our models a published name means. A number
of another model or of other lengths than ours stands beside ours without a difference, and the table
says of what it is. A paper prints one run's mean and no interval: the interval beside it is ours alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

import pandas as pd

from kvbench.errors import first_line
from kvbench.report.frame import AVERAGE, scores
from kvbench.report.papers import PaperError, PaperTable, file_of, paper_folders, specs_of
from kvbench.report.runs import Experiment, Group, as_text, words
from kvbench.report.table import INTERVAL, METHOD, Column, Table, legend, score_format, unit_text

LENGTH = "prompt_tokens"
"""The field of prompts' lengths, which tables of times and throughputs have in ``by``."""
_KEYS = ("source", "task", "model", "published_model", "method", "variant")


def beside(experiment: Experiment) -> pd.DataFrame:
    """A row for each of our numbers that has a published number beside it, fractions in per cent.

    The CSV files are in ``paper`` beside the experiment's folder, or in the repository's results/paper.
    Raises PaperError: the table is not there, or cannot be compared.
    """
    parts: list[pd.DataFrame] = []
    named: dict[str, str] = {}
    for group in experiment.groups:
        configs = [manifest.get("config") or {} for manifest in group.manifests]
        specs: list[PaperTable] = []
        for config in configs:
            specs += [s for s in specs_of(config.get("paper_table")) if s not in specs]
        for spec in specs:
            named[spec.file] = ", ".join(map(str, group.datasets))
            theirs = _read(spec, file_of(spec, experiment.folder.resolve().parent))
            try:
                parts += _joined(group, spec, theirs)
            except (LookupError, TypeError, ValueError) as error:
                why = f"cannot be compared with {group.task}: {first_line(error)}"
                raise PaperError(f"paper_table {spec.file} {why}") from error
    if named and not parts:
        datasets = "; ".join(dict.fromkeys(named.values()))
        raise PaperError(
            f"paper_table {', '.join(named)}: no row is of a method, rate and value that were run"
            f" (datasets: {datasets}; an average needs all of its own)"
        )
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def _read(spec: PaperTable, path: Path) -> pd.DataFrame:
    """The published table as text, so that 22.0 stays what was printed; the rows of ``where``."""
    if path.resolve().parent != path.parent.resolve():
        raise PaperError(f"paper_table {path} is a link to another folder; it is not read")
    try:
        frame = pd.read_csv(path, dtype=str, keep_default_na=False)
    except (OSError, ValueError) as error:  # no CSV, or not UTF-8
        raise PaperError(f"{path} cannot be read: {first_line(error)}") from error
    where = spec.where or {}
    lacking = sorted({*where, "method", "by", "value", "field", "unit", "printed"} - set(frame))
    if lacking:
        has = ", ".join(map(str, frame))
        raise PaperError(f"{path.name} has no column {', '.join(lacking)}; it has {has}")
    for column, wanted in where.items():
        allowed = wanted if isinstance(wanted, list | tuple) else [wanted]
        frame = frame[frame[column].map(_shortest).isin([_shortest(one) for one in allowed])]
    return frame.reindex(columns=list(dict.fromkeys([*frame, "model", "rate"])), fill_value="")


def _shortest(text: object) -> str:
    """A number as it is written shortest, other text as it is."""
    try:
        return as_text(float(str(text)))
    except ValueError:
        return str(text)


def _joined(group: Group, spec: PaperTable, theirs: pd.DataFrame) -> list[pd.DataFrame]:
    """The published rows of our methods beside our numbers, one frame per record field and split.

    Where none of the published prompt lengths is ours, a method's rows stand beside each other although
    their lengths differ; they have no difference then."""
    places = [place / "models.csv" for place in paper_folders()]
    models = pd.read_csv(next(place for place in places if place.is_file()))
    name = dict(zip(models["ours"], models["published"], strict=True)).get(group.model, group.model)
    if (theirs["model"] == name).any():
        theirs = theirs[theirs["model"] == name]
    is_model_taken = spec.model in (None, group.model, name)
    same = theirs["model"].eq(name) | (theirs["model"].eq("") & is_model_taken)
    model = theirs["model"].where(theirs["model"] != "", spec.model or "")
    theirs = theirs.assign(model=model, same=same, published_at="")
    frames = _matched(group, spec, theirs, ["method", "value"])
    lengths = theirs["by"].str.contains(LENGTH)
    if not frames and lengths.any():
        others = theirs[lengths].assign(same=False, published_at=theirs["value"])
        frames = _matched(group, spec, others, ["method"])
    return frames


def _matched(
    group: Group, spec: PaperTable, theirs: pd.DataFrame, keys: list[str]
) -> list[pd.DataFrame]:
    frames = []
    for key, part in theirs.groupby(["by", "field"], sort=False):
        by, field = map(str, key)
        if not {field, *filter(None, by.split("+"))} <= set(group.records):
            raise PaperError(f"{spec.file}: our records have no field {by or field}")
        ours = _ours(group, by, field, part, spec.statistic)
        both = part.merge(ours, on=keys, suffixes=("_paper", ""))
        both = both[_is_at(group, both, both["rate_paper"])]
        both = pd.concat([both, *_best(group, part, ours)], ignore_index=True)
        if len(both):
            both = both.assign(source=spec.file.removesuffix(".csv"), field=field)
            frames.append(_compared(both))
    return frames


def _ours(group: Group, by: str, field: str, part: pd.DataFrame, statistic: str) -> pd.DataFrame:
    """Our scores of the values that the published rows name. Where the paper prints the minimum of
    repeated runs, ours is a minimum, too, and has no interval; the median stands beside it."""
    unit = group.meta.score_unit if field == "score" else part["unit"].iloc[0]
    split, records = _split(group, [name for name in by.split("+") if name])
    numbers = pd.to_numeric(records[field], errors="coerce") / (2**30 if unit == "GiB" else 1)
    in_our_unit = "fraction" if unit == "%" else unit
    measured = replace(group, records=records).measuring(numbers, in_our_unit)
    sums = {v: v.split("+") for v in part["value"].unique() if split == "dataset" and "+" in v}
    ours = scores(measured, split, also=sums)
    ours = ours[ours["measure"] == "score"]
    values = [v for v in ours["value"].unique() if v != AVERAGE and v not in sums]
    if set(part["value"]) - {AVERAGE} != set(values):  # an average over others is another number
        ours = ours[ours["value"] != AVERAGE]
    count = ours["value"].map(lambda value: len(sums.get(value, [value])))
    ours = ours.assign(**{key: ours[key] * count for key in ("mean", "low", "high")})
    ours["median"] = math.nan
    if statistic == "minimum":
        runs = measured.records.groupby(["variant", split])["score"]
        keys = list(zip(ours["variant"], ours["value"], strict=True))
        least, median = runs.min(), runs.median()
        ours["mean"] = [least.get(key, math.nan) for key in keys]
        ours["median"] = [median.get(key, math.nan) for key in keys]
        ours["low"] = ours["high"] = math.nan
    return ours.drop(columns=["by"]).rename(columns={"unit": "our_unit", "model": "our_model"})


def _split(group: Group, fields: Sequence[str]) -> tuple[str, pd.DataFrame]:
    """The record field that splits examples as these fields together do, and records that have it."""
    if len(fields) == 1:
        return fields[0], group.records
    if not fields and group.records["dataset"].nunique() > 1:
        raise PaperError(f"the paper has one setting; {group.task} was run with several")
    texts = group.records[[*fields]].map(_shortest).to_numpy()
    return "setting", group.records.assign(setting=["+".join(row) for row in texts])


def _is_at(group: Group, ours: pd.DataFrame, rates: pd.Series) -> pd.Series:
    """Whether rows of ours are at these published rates (texts, empty for none). What has no budget, as
    the exact cache, is at every rate; a number of entries is at none."""
    with_size = {variant.label for variant in group.variants if variant.size is not None}
    has_budget = ours["rate"].notna() | ours["variant"].isin(with_size)
    same = (pd.to_numeric(rates, errors="coerce") - ours["rate"]).abs().lt(1e-9)
    return ~(has_budget & ours["variant"].isin(group.compressed)) | rates.eq("") | same


def _best(group: Group, part: pd.DataFrame, ours: pd.DataFrame) -> list[pd.DataFrame]:
    """Published rows about the best of several methods beside the best of our variants of these at the
    same rate, chosen for each value; none where fewer than two of them were run."""
    frames, lower = [], group.meta.lower_is_better
    several = part[part["method"].str.contains("|", regex=False)]
    for (names, rate), rows in several.groupby(["method", "rate"]):
        mine = ours[ours["method"].isin(str(names).split("|"))].dropna(subset=["mean"])
        mine = mine[_is_at(group, mine, pd.Series(str(rate), mine.index))]
        count = mine["variant"].nunique()
        if count > 1:
            best = mine.sort_values("mean", ascending=lower, kind="stable").drop_duplicates("value")
            best = best.assign(variant=f"best of {str(names).replace('|', ', ')}")
            frames.append(
                rows.drop(columns="method").merge(best, on="value", suffixes=("_paper", ""))
            )
    return frames


def _compared(both: pd.DataFrame) -> pd.DataFrame:
    percent, is_fraction = both["our_unit"].eq("fraction"), both["unit"].eq("fraction")
    factor = 1.0 + 99.0 * percent
    numbers = {"score": "mean", "score_low": "low", "score_high": "high", "median": "median"}
    compared = both.assign(
        model=both["our_model"],
        published_model=both["model"],
        unit=both["our_unit"].where(~percent, "%"),
        printed_unit=both["unit"],
        published=pd.to_numeric(both["printed"], errors="coerce") * (1.0 + 99.0 * is_fraction),
        **{key: both[of] * factor for key, of in numbers.items()},
    )
    compared["difference"] = (compared["score"] - compared["published"]).where(compared["same"])
    other_model = compared["published_model"].where(~compared["same"], "")
    compared["published_of"] = (other_model + " " + compared["published_at"]).str.strip()
    keys = [*_KEYS, "value", "field", "unit", "printed", "printed_unit", "published", *numbers]
    return compared[[*keys, "difference", "n", "expected", "published_of"]]


def published_tables(frame: pd.DataFrame) -> list[Table]:
    """One table per published source and record field, a row for each of our numbers."""
    tables = []
    for source, whole in frame.groupby("source", sort=False) if len(frame) else ():
        named = whole["value"].ne("").any()
        for field, part in whole.groupby("field", sort=False) if named else [("score", whole)]:
            tables.append(_table(str(source), str(field), part))
    return tables


def _table(source: str, field: str, part: pd.DataFrame) -> Table:
    unit = str(part["unit"].iloc[0])
    frame = part.assign(value=part["value"].where(part["value"] != "", part["field"]))
    frame["group"] = [
        f"{task} on {ours}" + (f"; published: {theirs}" if theirs else "")
        for task, ours, theirs in part[["task", "model", "published_model"]].itertuples(index=False)
    ]
    for row in part.index[part["printed_unit"].eq("fraction")]:
        with suppress(InvalidOperation):  # in per cent with the same digits: 0.830 is 83.0
            frame.loc[row, "printed"] = f"{Decimal(part.loc[row, 'printed']).scaleb(2):f}"
    frame["score_mark"] = (part["n"] < part["expected"]).map({True: "incomplete", False: ""})
    text, signed = (score_format(unit, signed=s) for s in (False, True))
    repeated = frame["median"].notna().any()  # a minimum and a median of repeated runs
    columns = [
        METHOD,
        Column("value", "measured on"),
        Column("score", "ours (minimum)" if repeated else "ours", text),
    ]
    if repeated:
        columns.append(Column("median", "median", text))
    columns.append(Column("printed", "published"))
    if (frame["published_of"] != "").any():
        columns.append(Column("published_of", "published of"))
    if frame["difference"].notna().any():
        columns.append(Column("difference", text=signed))
    notes = [] if repeated else [INTERVAL]
    of = "" if field == "score" or unit == "s" else f", {words(field)}"
    return Table(
        f"{source}{'' if field == 'score' else '-' + field}-published",
        f"{', '.join(part['task'].unique())}{of}: ours beside {source}{unit_text(unit)}",
        frame,
        tuple(columns),
        (*notes, *legend(frame, columns)),
        part,
    )
