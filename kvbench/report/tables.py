"""The tables of a report, each made of the tidy frame (`kvbench.report.frame`) or of records."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvbench.records.figures import Curve, Distances, Times
from kvbench.report.experiment import BASELINE, Group, as_text, natural_order
from kvbench.report.frame import (
    AVERAGE,
    COSTS,
    compared_strata,
    comparisons,
    failures_of,
    failures_text,
    scores,
    strata_of,
    totals,
)
from kvbench.report.scaling import slopes
from kvbench.report.stats import FEWEST, Estimate, median_of
from kvbench.report.table import (
    INTERVAL,
    LEGEND,
    TOGETHER,
    Column,
    Table,
    in_percent,
    legend,
    number,
    p_text,
    score_format,
    size,
    unit_text,
    value_text,
    whole,
    wide,
)

_WIDE = 4
"""With more columns than this, intervals are shown for the average only."""
_PAIRS = 15
"""Rows that readers see of more."""
_RATES, _NAMES = 3, 4
"""Rates that a verdict speaks of, the lowest ones, and methods that a list of it names."""
METHOD = Column("variant", "method")


def tables_of(group: Group, frame: pd.DataFrame) -> list[Table]:
    """The tables of one model and task; the first is what it is about."""
    fields = [name for name in frame["by"].unique() if name not in ("dataset", "")]
    split = [split_table(group, frame, name) for name in fields]
    scored = score_table(group, frame)
    if group.meta.figure(Times):
        return [timing_table(group), scored, *split, *_splits(group, fields)]
    curve = group.meta.figure(Curve)
    if curve and curve.y in group.records and slopes(group, curve).size:
        return [slope_table(group, curve), *split, scored]
    found: list[Table | None] = [scored]
    if group.meta.figure(Distances) and "kl" in group.records:
        found.append(fidelity_table(group))
    found.append(pairs_table(group, frame))
    return [table for table in found if table] + split + _splits(group, fields)


def score_table(group: Group, frame: pd.DataFrame) -> Table:
    """The ranking: total score, paired difference, what is held and failures of every variant; the exact
    cache first, then by score, a group of rows for each rate. Files hold every dataset, too."""
    lower, total = group.meta.lower_is_better, totals(frame)
    table = total.rename(columns={k: f"total_{k}" for k in ("low", "high", "mark")})
    table["total"] = table.pop("mean")
    change = totals(frame, "difference")
    for end, key in (("", "mean"), ("_low", "low"), ("_high", "high")):
        table[f"difference{end}"] = table["variant"].map(change[key])
    held = [key for key in COSTS if key != "entries_max"]
    for key in held:
        table[key] = table["variant"].map(totals(frame, key)["mean"])
    table["scored"] = [f"{row.n:.0f}/{row.expected:.0f}" for row in total.itertuples()]
    order = table.assign(
        rank=table["total"] if lower else -table["total"], last=-table["rate"].astype(float)
    )
    order["compared"] = ~table["variant"].map(lambda label: group.baseline[label] is None)
    table = table.loc[order.sort_values(["compared", "last", "rank"], kind="stable").index]
    if table["rate"].nunique() > 1:
        rates = table["rate"].where(table["variant"].map(group.baseline).notna())
        table["group"] = [f"rate {rate:g}" if rate == rate else "" for rate in rates]
        table["variant"] = table["variant"].map(group.names)
    unit, count = group.meta.score_unit, len(group.datasets)
    name = group.datasets[0] if count == 1 else f"average of {count} datasets"
    columns = [METHOD, Column("total", str(name), score_format(unit))]
    if group.baseline_name:
        text = score_format(unit, signed=True)
        columns.append(Column("difference", f"Δ {group.baseline_name}", text))
    for key in held:
        if table[key].notna().any():
            name = key.removesuffix("_mean").replace("_", " ")
            columns.append(Column(key, name, whole if name == "entries" else number))
    columns += [Column("failures", "failed")] * bool(table["failures"].any()) + [Column("scored")]
    named = {variant.rate for variant in group.variants if variant.rate is not None}
    at_rate = f" at rate {named.pop():g}" if len(named) == 1 else ""
    return Table(
        f"{group.task}-{group.model}",
        f"{group.task} on {group.model}{at_rate}: score{unit_text(unit)}",
        table,
        tuple(columns),
        tuple(dict.fromkeys([*_interval_notes(group, table), *legend(table), *_notes(group)])),
        in_percent(frame[frame["by"].isin(["dataset", ""])]),
    )


def split_table(group: Group, frame: pd.DataFrame, by: str) -> Table:
    """Scores of every variant by the values of a record field."""
    rows = frame[frame["by"].eq(by) & frame["measure"].eq("score")]
    title = f"{group.task} on {group.model}: score by {by.replace('_', ' ')}"
    table = _pivot(group, f"{group.task}-{group.model}-by-{by}", title, rows, "value")
    return replace(table, data=in_percent(frame[frame["by"] == by]))


def _interval_notes(group: Group, table: pd.DataFrame) -> Iterator[str]:
    """What the intervals and differences of a score table say, where it has them."""
    if table["total_low"].notna().any():
        yield INTERVAL
    if 0 < table["units"].max() < FEWEST:
        yield LEGEND["few"]
    elif comparisons(group):
        yield TOGETHER
        used, every = len(compared_strata(group)), len(strata_of(group))
        if used < every:
            yield (
                f"Differences and marks are of the {used} datasets of ten prompts or more: in an average"
                f" that counts each alike, the few prompts of the other {every - used} hide the rest."
            )


def _notes(group: Group) -> Iterator[str]:
    """What to keep in mind about a group's examples."""
    if group.baseline_name:
        yield f"Δ is the paired difference to {group.baseline_name}, over examples that both scored."
    elif group.compressed and not group.meta.lower_is_better:
        yield "The exact cache was not run: add exact to the methods for differences to it."
    whole = group.good["compressed"].eq(False) & group.good["saves_memory"].eq(True)
    if whole.any():
        counts = group.good["variant"][whole].value_counts()
        named = ", ".join(f"{label} ({count})" for label, count in counts.items())
        yield f"Prompts no longer than the capacity stay uncompressed: {named}."
    if "budget_preset" in group.good:
        for label, part in group.good.dropna(subset=["budget_preset"]).groupby("variant"):
            held, allowed = part["entries_mean"].mean(), part["capacity"].mean()
            yield (
                f"{label} holds {held:.0f} entries per layer and KV head where the budget allows"
                f" {allowed:.0f}: its preset reproduces a released code's own split."
            )
    unit = group.meta.unit
    if unit != "example_id" and unit in group.records:
        yield f"Independent is each {unit.removesuffix('_id')}: {group.records[unit].nunique()}."
    if "beyond_positions" in group.records:
        over = group.records[group.records["beyond_positions"].eq(True)]["example_id"].nunique()
        if over:
            yield f"{over} prompts are longer than the model's positions: their scores say nothing."
    if "imagined" in group.records:
        masked = group.records["variant"][group.records["imagined"].eq(True)].unique()
        yield f"{', '.join(masked)}: a mask of one pass; its entries are of a cache that nobody holds."
    cut = [set(manifest.get("datasets_left_out") or []) for manifest in group.manifests]
    left_out = sorted(set.intersection(*cut)) if cut else []
    if left_out:
        yield f"Left out by limit: {', '.join(left_out)}."
    if group.left_out:
        yield f"Not shown, as they were run on other prompts: {', '.join(group.left_out)}."


def _pivot(group: Group, name: str, title: str, rows: pd.DataFrame, over: str) -> Table:
    """A row for each variant, a column for each value of `over`, of some rows of a tidy frame."""
    keys = ["group", "method", "variant"] if "group" in rows else ["method", "variant"]
    table = wide(rows, keys, over)
    names = [value for value in rows[over].unique() if value != AVERAGE]
    names += [AVERAGE] * (AVERAGE in set(rows[over]))
    unit, many = group.meta.score_unit, len(names) > _WIDE
    text = score_format(unit)
    columns = [Column(value, value, text, not many or value == AVERAGE) for value in names]
    notes = (INTERVAL, *legend(table), *_notes(group))
    return Table(name, f"{title}{unit_text(unit)}", table, (METHOD, *columns), notes)


def paper_table(groups: Sequence[tuple[Group, pd.DataFrame]]) -> Table:
    """One task as papers print it: datasets as columns, a block of rows for each model."""
    rows = pd.concat([f[(f["by"] == "dataset") & (f["measure"] == "score")] for _, f in groups])
    task, rows = groups[0][0].task, rows.assign(group=rows["model"])
    return _pivot(groups[0][0], f"{task}-paper", f"{task}: score", rows, "value")


def overview_table(groups: Sequence[tuple[Group, pd.DataFrame]]) -> Table:
    """Of one model with several tasks, every variant on all of them."""
    rows = pd.concat([totals(f) for _, f in groups], ignore_index=True)
    order = {v.label: v.sort_key for group, _ in groups for v in group.variants}
    rows = rows.iloc[sorted(range(len(rows)), key=lambda i: order[rows["variant"][i]])]
    table = wide(rows, ["method", "variant"], "task")
    columns = [
        Column(g.task, f"{g.task}{unit_text(g.meta.score_unit)}", score_format(g.meta.score_unit))
        for g, _ in groups
    ]
    model, notes = groups[0][0].model, (INTERVAL, *legend(table))
    return Table(f"overview-{model}", f"{model}: all tasks", table, (METHOD, *columns), notes)


def _splits(group: Group, fields: Sequence[str]) -> list[Table]:
    """Every dataset split by each record field, for files.

    Beside each part's mean stands the plain mean of the dataset's parts, which is how LongBench-E
    averages a dataset over its length buckets.
    """
    found = []
    for by in (name for name in fields if name in group.records and len(group.datasets) > 1):
        keys = ["variant", "dataset"]
        means = group.good.groupby([*keys, by])["score"].agg(["mean", "count"]).reset_index()
        means["mean_of_parts"] = means.groupby(keys)["mean"].transform("mean")
        order: list[Any] = [
            (group.labels.index(v), group.datasets.index(d), natural_order(x))
            for v, d, x in zip(means["variant"], means["dataset"], means[by], strict=True)
        ]
        means = means.iloc[sorted(range(len(means)), key=order.__getitem__)]
        means = means.rename(columns={"mean": "score", "count": "scored"})
        data = means.assign(model=group.model, task=group.task, unit=group.meta.score_unit)
        data = in_percent(data, ["score", "mean_of_parts"])
        found.append(
            Table(f"{group.task}-{group.model}-by-{by}-and-dataset", "", means, (), (), data)
        )
    return found


def pairs_table(group: Group, frame: pd.DataFrame) -> Table | None:
    """Every pair of compressed variants of the same rate, the better one first: can their difference be
    told from chance. Of many, readers see those with the best."""
    # A variant may have no record of a named dataset, and so no mean.
    total = totals(frame)["mean"].reindex(group.labels)
    strata = compared_strata(group)
    sign = -1.0 if group.meta.lower_is_better else 1.0
    rows: list[dict[str, Any]] = []
    for peers in group.peers:
        scored = [i for i in peers if total[group.labels[i]] == total[group.labels[i]]]
        ranked = sorted(scored, key=lambda i: -sign * total[group.labels[i]])
        for i, j in itertools.combinations(ranked, 2):
            found = comparisons(group)[min(i, j), max(i, j)]
            if i > j:
                found = Estimate(-found.value, -found.high, -found.low, found.p)
            both = [~np.isnan(one.values[:, [i, j]]).any(axis=1) for one in strata]
            row = {"first": group.labels[i], "second": group.labels[j], "to_best": i == ranked[0]}
            row |= found.named("difference") | {"p": found.p, "datasets": len(strata)}
            units = [len(set(one.units[of])) for one, of in zip(strata, both, strict=True)]
            rows.append(row | {"examples": sum(units)})
    if not rows:
        return None
    data = pd.DataFrame(rows).assign(model=group.model, task=group.task, unit=group.meta.score_unit)
    shown = data if len(data) <= _PAIRS else data[data["to_best"]]
    unit = group.meta.score_unit
    return Table(
        f"{group.task}-{group.model}-pairs",
        f"{group.task} on {group.model}: which compressed methods are shown to differ{unit_text(unit)}",
        shown.assign(methods=shown["first"] + " − " + shown["second"]),
        (
            Column("methods"),
            Column("difference", text=score_format(unit, signed=True)),
            Column("p", text=p_text),
            Column("examples", text=whole),
        ),
        (INTERVAL, TOGETHER),
        in_percent(data, ["difference", "difference_low", "difference_high"]),
    )


_MEDIANS = {
    "prefill_compress_s_over_exact": "prefill_ratio",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_s_over_exact": "speedup",
    "decode_tokens_per_s": "decode_tokens_per_s",
    "decode_tokens_per_s_over_exact": "decode_speedup",
    "decode_tokens_per_s_over_transformers": "decode_over_transformers",
}
"""Of a throughput probe, medians by the record field that they are of."""
_MEANS = ("peak_bytes", "cache_bytes", "ratio")
WITNESSED = (
    "x transformers: times the decoding rate of transformers' own static cache (torch.compile on a GPU)"
    " in the same run; of exact, how fast the yardstick of this table is."
)


def timings(group: Group) -> pd.DataFrame:
    """What a throughput probe measured: a row per setting (prompt + new tokens, and batch and rate where
    they were chosen) and variant: minimum and median seconds, medians of rates, means of bytes."""
    records = group.records
    asked = [c for c in ("asked_new_tokens", "asked_batch", "asked_rate") if c in records]
    rows = []
    for key, at in records.groupby(["prompt_tokens", *asked], sort=True, dropna=False):
        for variant in group.variants:
            part = at[at["variant"] == variant.label]
            if part.empty:
                continue
            good = part[part["status"] == "ok"]
            fields = [*_MEDIANS.values(), *_MEANS, "batch", "new_tokens", "decode_s", "score"]
            measured = good.reindex(columns=fields).apply(pd.to_numeric)
            rate = measured["new_tokens"] / measured["decode_s"]
            measured["tokens_per_s"] = measured["tokens_per_s"].fillna(measured["score"])
            measured["decode_tokens_per_s"] = measured["decode_tokens_per_s"].fillna(rate)
            measured["prefill_compress_s"] = good["prefill_s"] + good["compress_s"].fillna(0.0)
            named = dict(zip(["prompt_tokens", *asked], key, strict=True))
            row: dict[str, Any] = {"method": variant.method, "variant": variant.label}
            row |= {
                "prompt_and_new_tokens": _setting(named, good),
                "batch": measured["batch"].mean(),
            }
            for name in ("prefill_compress_s", "decode_s"):
                row |= {f"{name}_min": measured[name].min(), name: measured[name].median()}
            for name, field in _MEDIANS.items():
                row |= median_of(measured[field]).named(name)
            row |= dict(measured[list(_MEANS)].mean())
            rows.append(row | {"runs": len(good), "failures": failures_text(failures_of(part))})
    return pd.DataFrame(rows)


def _setting(asked: Mapping[str, Any], records: pd.DataFrame) -> str:
    new = asked.get("asked_new_tokens", records["new_tokens"].max())
    text = f"{as_text(asked['prompt_tokens'])} + {as_text(new) if new == new else '?'}"
    batch, rate = asked.get("asked_batch", "1"), asked.get("asked_rate")
    text += f", batch {batch}" if batch != "1" else ""
    return text if rate is None or rate != rate else f"{text}, rate {rate}"


def timing_table(group: Group) -> Table:
    """Seconds, memory and rate of generation by setting, with intervals of the medians."""
    frame = timings(group)
    columns = (
        METHOD,
        Column("prompt_and_new_tokens", "prompt + new"),
        Column("batch", text=number),
        Column("prefill_compress_s", "prefill s", number),
        Column("prefill_compress_s_over_exact", "prefill x", number),
        Column("decode_s", "decode s", number),
        Column("tokens_per_s", "tokens/s", number),
        Column("tokens_per_s_over_exact", "tokens/s x", number),
        Column("decode_tokens_per_s", "decode tokens/s", number),
        Column("decode_tokens_per_s_over_exact", "decode x", number),
        Column("decode_tokens_per_s_over_transformers", "decode x transformers", number),
        Column("peak_bytes", "peak", size),
        Column("cache_bytes", "cache", size),
        Column("ratio", text=number),
        Column("runs", text=whole),
        Column("failures", "failed"),
    )
    return Table(
        f"{group.task}-{group.model}-timing",
        f"{group.task} on {group.model}: medians over runs",
        frame,
        tuple(column for column in columns if frame[column.key].notna().any()),
        (
            "No prefill is shared; its seconds include compression. tokens/s: new tokens of the whole"
            " batch over the time of prefill and decoding, and over decoding alone. x: times the exact"
            " cache's in the same run. [low, high]: 95 % intervals of medians between two order"
            " statistics; below six runs there are none. peak: allocated on the GPU; on a CPU the whole"
            " process.",
            *([WITNESSED] if frame["decode_tokens_per_s_over_transformers"].notna().any() else []),
        ),
        frame,
    )


_DISTANCES = ("kl", "max_kl", "agreement", "difference", "perplexity_ratio", "ratio")
"""Record fields of a fidelity probe; agreement is a fraction."""


def fidelity_table(group: Group) -> Table:
    """Mean over prompts of every distance from the exact model, by rate, with the intervals that these
    numbers have in every other table."""
    records, by = group.records, "rate" if "rate" in group.records else "dataset"
    parts: list[Any] = []
    for name in _DISTANCES:
        meta = replace(group.meta, score_unit="fraction" if name == "agreement" else "")
        rows = scores(replace(group, meta=meta, records=records.assign(score=records[name])), by)
        rows = rows[rows["measure"].eq("score")].set_index(["value", "method", "variant"])
        ends = rows[["mean", "low", "high"]].set_axis([name, f"{name}_low", f"{name}_high"], axis=1)
        parts.append(ends)
    whole_prompts = records.assign(value=records[by].map(as_text), all=1)
    kept = whole_prompts.groupby(["value", "method", "variant"])[["compressed", "all"]].sum()
    parts.append(
        (kept["compressed"].map(int).map(str) + "/" + kept["all"].map(str)).rename("compressed")
    )
    frame = pd.concat(parts, axis=1).drop(columns=["ratio_low", "ratio_high"]).reset_index()
    frame = frame.sort_values(
        "value", key=lambda of: pd.to_numeric(of, errors="coerce"), ascending=False, kind="stable"
    )
    frame["group"] = [f"rate {value}" if by == "rate" else "" for value in frame.pop("value")]
    shares = {str(k): 100 * frame[k] for k in frame if str(k).startswith("agreement")}
    return Table(
        f"{group.task}-{group.model}-fidelity",
        f"{group.task} on {group.model}: distance from the exact model, per token",
        frame,
        (
            METHOD,
            Column("kl", "KL, nats", number),
            Column("max_kl", "max KL, nats", number, bounds=False),
            Column("agreement", "same top token, %", score_format("fraction")),
            Column("difference", "Δ NLL, nats", score_format("", signed=True)),
            Column("perplexity_ratio", "perplexity ratio", number),
            Column("ratio", text=number),
            Column("compressed"),
        ),
        (
            "Every method reads the same continuation, token by token. KL is of the exact model's"
            " next-token distribution from the method's.",
        ),
        frame.assign(model=group.model, task=group.task, **shares),
    )


def slope_table(group: Group, curve: Curve) -> Table:
    """Log-log slopes of error against entries: variants by data sets; in files one row for each."""
    data = slopes(group, curve)
    named = {"slope": "mean", "slope_low": "low", "slope_high": "high"}
    frame = wide(
        data.rename(columns=named).assign(mark=""), ["method", "variant", "expected"], curve.facet
    )
    columns = [Column(name, text=score_format("")) for name in data[curve.facet].unique()]
    predicted = (
        [Column("expected", "predicted", score_format(""))]
        if data["expected"].notna().any()
        else []
    )
    least, most = data["fitted_from"].min(), data["fitted_to"].max()
    return Table(
        f"{group.task}-{group.model}-slopes",
        f"{group.task} on {group.model}: log-log slopes",
        frame,
        (METHOD, *predicted, *columns),
        (
            f"Least-squares slopes of log {curve.y} against log {curve.x}, from"
            f" {least:.0f} to {most:.0f}, with 95 % t intervals over {curve.unit}s"
            f" ({data['repetitions'].min():.0f} or more); one has no interval.",
        ),
        data.assign(model=group.model, task=group.task),
    )


def verdict(group: Group, frame: pd.DataFrame) -> str:
    """One sentence for each of the lowest rates about the total column, by its marks and intervals;
    empty where nothing is compared."""
    curve = group.meta.figure(Curve)
    if group.meta.figure(Times):
        return ""
    if curve is not None and curve.y in group.records:
        return slope_verdict(slopes(group, curve))
    total, change = totals(frame), totals(frame, "difference")
    text, signed = (score_format(group.meta.score_unit, signed=s) for s in (False, True))
    names, said = group.names, []
    for peers in sorted(group.peers, key=lambda of: -(group.variants[of[0]].rate or 0))[-_RATES:]:
        mine = total.reindex([group.labels[i] for i in peers]).dropna(subset=["mean"])
        mine = mine.sort_values("mean", ascending=group.meta.lower_is_better, kind="stable")
        if mine.empty:
            continue
        marked: dict[str, list[str]] = {"best": [], "tied": [], "better": [], "worse": []}
        for label, marks in mine["mark"].items():
            for word in set(marks.split()) & set(marked):
                marked[word].append(str(label))
        first = (marked["best"] or [str(mine.index[0])])[0]
        rate, units = group.variants[peers[0]].rate, int(mine["units"].max())
        line = "" if rate is None else f"At rate {rate:g}: "
        unit = "%" if group.percent else group.meta.score_unit.replace("_", " ")
        score = f"{text(mine['mean'][first])} {unit}"
        line += f"{names[first]} has {score} ({units} prompts)"
        if units < FEWEST:
            said.append(f"{line}: too few prompts to say more.")
            continue
        if first in change.index and not math.isnan(change["low"][first]):
            low, value, high = (signed(change[key][first]) for key in ("low", "mean", "high"))
            line += f", {value} [{low}, {high}] to {group.baseline_name or BASELINE}"
        alike = [label for label in marked["best"] if label != first] + marked["tied"]
        shown = ("shown better", marked["better"]), ("not shown to differ", alike)
        for word, labels in (*shown, ("shown worse", marked["worse"])):
            some = [names[label] for label in labels[:_NAMES]]
            more = f" and {len(labels) - _NAMES} more" * (len(labels) > _NAMES)
            line += f"; {word}: {', '.join(some)}{more}" * bool(some)
        said.append(f"{line}.")
    return "\n".join(said)


def slope_verdict(data: pd.DataFrame) -> str:
    """How many slopes are as predicted, or steeper or shallower, by the whole interval."""
    known = data.dropna(subset=["verdict"])
    said = [
        f"{label} (predicted {value_text(float(part['expected'].iloc[0]), '')}): "
        + ", ".join(
            f"{word} on {count} of {len(part)}"
            for word, count in part["verdict"].value_counts().items()
        )
        for label, part in known.groupby("variant", sort=False)
    ]
    return f"Slopes: {'; '.join(said)}." if said else ""
