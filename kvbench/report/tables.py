"""The tables of a report, each made of the tidy frame (`kvbench.report.frame`) or of records."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvbench.records.figures import Curve, Distances, Times
from kvbench.report.experiment import BASELINE, Group, as_text, natural_order
from kvbench.report.frame import AVERAGE, failures_of, failures_text, strata_of, totals
from kvbench.report.scaling import slopes
from kvbench.report.stats import (
    NOTHING,
    Scores,
    common_means,
    difference_intervals,
    estimates,
    median_of,
    paired_tests,
)
from kvbench.report.table import (
    INTERVAL,
    MISSING,
    Column,
    Table,
    in_percent,
    legend,
    number,
    p_text,
    score_format,
    signed_text,
    size,
    unit_text,
    whole,
    wide,
)

_WIDE = 4
"""With more columns than this, intervals are shown for the average only."""
_PAIRS = 15
"""Rows that readers see of more."""
METHOD = Column("variant", "method")
_COSTS = (
    Column("ratio", "ratio", number),
    Column("entries_mean", "entries", whole),
    Column("prefill_s", "prefill s", number),
    Column("compress_s", "compress s", number),
    Column("decode_ms_per_token", "decode ms/token", number),
    Column("self_bleu", "self-BLEU", number),
)


def tables_of(group: Group, frame: pd.DataFrame) -> list[Table]:
    """The tables of one model and task; the first is what it is about."""
    field = [name for name in frame["by"].unique() if name not in ("dataset", "")]
    split = [score_table(group, frame, name) for name in field]
    scored = score_table(group, frame)
    if group.meta.figure(Times):
        return [timing_table(group), scored, *split, *_splits(group, field)]
    curve = group.meta.figure(Curve)
    if curve and curve.y in group.records and slopes(group, curve).size:
        return [slope_table(group, curve), *split, scored]
    rates, fidelity = rates_table(group, frame), group.meta.figure(Distances)
    found = [rates] if rates else []
    found += [scored]
    if fidelity and "kl" in group.records:
        found.append(fidelity_table(group))
    found += [*_some(pairs_table(group)), *split]
    for name in ("dataset", *field):
        several = frame[(frame["by"] == name) & (frame["measure"] == "difference")]
        if several["value"].nunique() > 1:
            found.append(difference_table(group, several))
    return found + _splits(group, field)


def _some(table: Table | None) -> list[Table]:
    return [table] if table else []


def score_table(
    group: Group, frame: pd.DataFrame, by: str = "dataset", *, narrow: bool = False
) -> Table:
    """Scores, paired differences, costs and failures of every variant.

    Args:
        narrow: of many datasets the average only, as a terminal has no room for more.
    """
    rows = frame[(frame["by"] == by) & (frame["measure"] == "score")]
    names = list(rows["value"].unique())
    many = len(names) > _WIDE
    shown = [AVERAGE] if narrow and many and AVERAGE in names else names
    table = wide(rows, ["method", "variant"], "value")
    unit, once = group.meta.score_unit, by == "measure" or AVERAGE in names or len(names) == 1
    text, count = score_format(unit), totals(frame) if once else rows.groupby("variant").sum()
    table["scored"] = [f"{count['n'][v]:.0f}/{count['expected'][v]:.0f}" for v in table["variant"]]
    failures = totals(frame)["failures"]
    table["failures"] = [failures[v] for v in table["variant"]]
    columns = [METHOD]
    columns += [
        Column(n, n if by == "dataset" else f"{by} {n}", text, not many or n == AVERAGE)
        for n in shown
    ]
    data = frame[frame["by"] == by]
    if by == "dataset":
        data = frame[frame["by"].isin([by, ""])]
        table, more = _with_costs(group, frame, table)
        columns += more
    columns += [Column("scored"), Column("failures", "failed")]
    if narrow:  # what a narrow terminal leaves out goes last
        first = {"variant", *shown, "difference", "ratio", "failures"}
        columns.sort(key=lambda column: column.key not in first)
        columns = [c for c in columns if c.key != "failures" or table["failures"].any()]
    title = f"{group.task} on {group.model}: score{unit_text(unit)}"
    title += f"; average of {len(names) - 1} datasets" * (shown != names)
    return Table(
        f"{group.task}-{group.model}" + ("" if by == "dataset" else f"-by-{by}"),
        title if by == "dataset" else f"{title} by {by}",
        table,
        tuple(columns),
        (INTERVAL, *legend(table), *_notes(group)),
        in_percent(data),
    )


def _with_costs(
    group: Group, frame: pd.DataFrame, table: pd.DataFrame
) -> tuple[pd.DataFrame, list[Column]]:
    """The score table with the total difference to the exact cache and with every cost."""
    columns = []
    if group.baseline_name:
        change = totals(frame, "difference").rename_axis(None)
        for name, key in (("", "mean"), ("_low", "low"), ("_high", "high")):
            table[f"difference{name}"] = table["variant"].map(change[key])
        text = score_format(group.meta.score_unit, signed=True)
        columns.append(Column("difference", f"Δ {group.baseline_name}", text))
    for column in _COSTS:
        table[column.key] = table["variant"].map(totals(frame, column.key)["mean"])
        columns += [column] * int(table[column.key].notna().any())
    return table, columns


def _notes(group: Group) -> Iterator[str]:
    """What to keep in mind about a group's examples."""
    if group.baseline_name:
        yield f"Δ is the paired difference to {group.baseline_name}, over examples that both scored."
    elif not group.meta.lower_is_better:
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
        yield f"Intervals resample the {unit.removesuffix('_id')}: {group.records[unit].nunique()}."
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


def _pivot(
    group: Group, name: str, title: str, rows: pd.DataFrame, over: str, *, signed: bool = False
) -> Table:
    """A row for each variant, a column for each value of `over`, of some rows of a tidy frame."""
    keys = ["group", "method", "variant"] if "group" in rows else ["method", "variant"]
    table = wide(rows, keys, over)
    names = [value for value in rows[over].unique() if value != AVERAGE]
    names += [AVERAGE] * (AVERAGE in set(rows[over]))
    unit, bounds = group.meta.score_unit, len(names) <= _WIDE or signed
    text = score_format(unit, signed=signed)
    columns = [Column(value, value, text, bounds or value == AVERAGE) for value in names]
    notes = (INTERVAL, *legend(table), *_notes(group))
    return Table(name, f"{title}{unit_text(unit)}", table, (METHOD, *columns), notes)


def rates_table(group: Group, frame: pd.DataFrame) -> Table | None:
    """The total score of every method by rate; None for fewer than two rates. A method without a rate
    stands in every column."""
    rates = sorted({v.rate for v in group.variants if v.rate is not None}, reverse=True)
    if len(rates) < 2:
        return None
    total, ratio = totals(frame), totals(frame, "ratio")
    each = []
    for rate in rates:
        mine = total[total["rate"].eq(rate) | total["rate"].isna()]
        span = span_text(ratio["mean"][ratio["rate"].eq(rate)])
        each.append(mine.assign(at=f"rate {rate:g} (ratio {span})"))
    names = {v.label: v.without_rate for v in group.variants}
    rows = pd.concat(each, ignore_index=True)
    rows["variant"] = rows["variant"].map(names)
    title = f"{group.task} on {group.model}: score by rate"
    return _pivot(group, f"{group.task}-{group.model}-rates", title, rows, "at")


def difference_table(group: Group, rows: pd.DataFrame) -> Table:
    """The paired difference to the exact cache for every value that `rows` split by."""
    by = str(rows["by"].iloc[0])
    named = "" if by == "dataset" else f"-by-{by}"
    title = f"{group.task} on {group.model}: paired difference to {group.baseline_name} by {by}"
    name = f"{group.task}-{group.model}{named}-difference"
    return _pivot(group, name, title, rows, "value", signed=True)


def paper_table(groups: Sequence[tuple[Group, pd.DataFrame]]) -> Table:
    """One task as papers print it: datasets as columns, a block of rows for each model."""
    rows = pd.concat([f[(f["by"] == "dataset") & (f["measure"] == "score")] for _, f in groups])
    task, rows = groups[0][0].task, rows.assign(group=rows["model"])
    return _pivot(groups[0][0], f"{task}-paper", f"{task}: score", rows, "value")


def overview_table(groups: Sequence[tuple[Group, pd.DataFrame]]) -> Table:
    """Of one model with several tasks, every variant on all of them."""
    rows = pd.concat([totals(f) for _, f in groups], ignore_index=True)
    ratio = pd.concat([totals(f, "ratio") for _, f in groups], ignore_index=True)["mean"]
    variants = {(v.label, v.rate or 0.0): v for group, _ in groups for v in group.variants}
    twice = pd.Series([label for label, _ in variants]).value_counts().gt(1)
    keys = list(zip(rows["variant"], rows["rate"].fillna(0.0), strict=True))
    rows["variant"] = [f"{n}, rate {r:g}" if twice[n] and r else n for n, r in keys]
    rows["ratio"] = ratio.groupby(rows["variant"]).transform(span_text)
    rows = rows.iloc[sorted(range(len(rows)), key=lambda i: variants[keys[i]].sort_key)]
    table = wide(rows, ["method", "variant", "ratio"], "task")
    columns = [
        Column(g.task, f"{g.task}{unit_text(g.meta.score_unit)}", score_format(g.meta.score_unit))
        for g, _ in groups
    ]
    model, notes = groups[0][0].model, (INTERVAL, *legend(table))
    shown = (METHOD, *columns, Column("ratio"))
    return Table(f"overview-{model}", f"{model}: all tasks", table, shown, notes)


def span_text(ratios: Sequence[float] | pd.Series) -> str:
    """One ratio, or the smallest and largest of several; a dash where none is known."""
    known = sorted(float(ratio) for ratio in ratios if ratio == ratio)
    if not known:
        return MISSING
    low, high = (f"{end:.2f}" for end in (known[0], known[-1]))
    return low if low == high else f"{low}–{high}"


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


def pairs_table(group: Group) -> Table | None:
    """Every pair of compressed variants of the same rate, the better one first: can their difference be
    told from chance. Of many, readers see those with the best and those of neighbouring rank."""
    strata = strata_of(group)
    rows = [row for peers in group.peers for row in _pairs(group, strata, peers)]
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    shown = frame if len(frame) <= _PAIRS else frame[frame["neighbours"] | frame["to_best"]]
    unit, numbers = group.meta.score_unit, ["difference", "difference_low", "difference_high"]
    data = frame.assign(model=group.model, task=group.task, unit=unit)
    return Table(
        f"{group.task}-{group.model}-pairs",
        f"{group.task} on {group.model}: which compressed methods are shown to differ{unit_text(unit)}",
        shown.assign(methods=shown["first"] + " − " + shown["second"]),
        (
            Column("methods"),
            Column("difference", text=score_format(unit, signed=True)),
            Column("p", text=p_text),
            Column("p_adjusted", "p, adjusted", p_text),
            Column("examples", text=whole),
        ),
        (
            "The difference is paired, over examples that both scored. p is of the exact paired test"
            " (McNemar's for right and wrong, else over the signs of the differences), and adjusted"
            " (Westfall and Young) for all pairs of compressed methods at the same rate.",
        ),
        in_percent(data, numbers),
    )


def _pairs(
    group: Group, strata: Sequence[Scores], peers: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Pairs of variants that compete with each other."""
    scored = [i for i in peers if all((~np.isnan(one.values[:, i])).any() for one in strata)]
    if len(scored) < 2 or not strata:
        return
    means = common_means(strata, scored)
    if np.isnan(means).any():  # no example that all of them scored: each by its own mean
        means = np.mean([np.nanmean(one.values[:, scored], axis=0) for one in strata], axis=0)
    order = np.argsort(means if group.meta.lower_is_better else -means, kind="stable")
    ranked = [scored[k] for k in order]
    tests = paired_tests(strata, ranked)
    found = difference_intervals(tests.strata, fraction=group.percent)
    counts = np.array([(stratum.counts > 0).sum(0) for stratum in tests.strata])
    for k, (i, j) in enumerate(tests.pairs):
        yield {
            "first": group.labels[i],
            "second": group.labels[j],
            **found[k].named("difference"),
            "p": tests.p[k],
            "p_adjusted": tests.adjusted[k],
            "datasets": len(strata),
            "examples": int(counts[:, k].sum()),
            "neighbours": ranked.index(j) == ranked.index(i) + 1,
            "to_best": i == ranked[0],
        }


_MEDIANS = {
    "prefill_compress_s_over_exact": "prefill_ratio",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_s_over_exact": "speedup",
    "decode_tokens_per_s": "decode_tokens_per_s",
    "decode_tokens_per_s_over_exact": "decode_speedup",
}
"""Of a throughput probe, medians by the record field that they are of."""


def timings(group: Group) -> pd.DataFrame:
    """What a throughput probe measured: a row per setting (prompt + new tokens, and batch and rate where
    they were chosen) and variant: minimum and median seconds, medians of rates, means of bytes."""
    records = group.records
    asked = [c for c in ("asked_new_tokens", "asked_batch", "asked_rate") if c in records]
    rows = []
    for key, at in records.groupby(["prompt_tokens", *asked], sort=True, dropna=False):
        for variant in group.variants:
            part = at[at["variant"] == variant.label]
            if not len(part):
                continue
            good = part[part["status"] == "ok"]
            numbers = {f: pd.to_numeric(good[f]) for f in _MEASURED if f in good}
            none = pd.Series(dtype=float)
            rate = numbers.get("tokens_per_s", none)
            medians = {k: median_of(numbers.get(f, none)) for k, f in _MEDIANS.items()}
            if not len(rate):
                medians["tokens_per_s"] = median_of(good["score"])
            if "decode_tokens_per_s" not in numbers:
                medians["decode_tokens_per_s"] = median_of(good["new_tokens"] / good["decode_s"])
            prefill = good["prefill_s"].add(good["compress_s"].fillna(0.0))
            row: dict[str, Any] = {"method": variant.method, "variant": variant.label}
            row["prompt_and_new_tokens"] = _setting(
                dict(zip(["prompt_tokens", *asked], key, strict=True)), good
            )
            row |= {"batch": float(numbers.get("batch", none).mean())}
            for name, seconds in (("prefill_compress_s", prefill), ("decode_s", good["decode_s"])):
                row |= {f"{name}_min": float(seconds.min()), name: median_of(seconds).value}
            for name, found in medians.items():
                row |= found.named(name)
            row |= {
                f: float(numbers.get(f, none).mean())
                for f in ("peak_bytes", "cache_bytes", "ratio")
            }
            rows.append(row | {"runs": len(good), "failures": failures_text(failures_of(part))})
    return pd.DataFrame(rows)


_MEASURED = (*_MEDIANS.values(), "batch", "peak_bytes", "cache_bytes", "ratio")


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
        ),
        frame,
    )


_DISTANCES = ("kl", "max_kl", "agreement", "difference", "perplexity_ratio")


def fidelity_table(group: Group) -> Table:
    """Mean over prompts of every distance from the exact model, with bootstrap intervals; the same
    prompts are drawn for all methods."""
    records = group.records
    rates: list[Any] = [None]
    if "rate" in records:
        rates = sorted(records["rate"].dropna().unique(), reverse=True)
    rows = []
    for rate in rates:
        part = records if rate is None else records[records["rate"] == rate]
        found = {}
        for name in _DISTANCES:
            (one,) = strata_of(group, part.assign(score=part[name]))
            found[name] = estimates([one.stratum(one.values)])
        for i, variant in enumerate(group.variants):
            mine = part[part["variant"] == variant.label]
            good = mine[mine["status"] == "ok"]
            row: dict[str, Any] = {
                "group": "" if rate is None else f"rate {as_text(rate)}",
                "method": variant.method,
            }
            row |= {"variant": variant.label, "ratio": float(good["ratio"].mean())}
            row |= {"compressed": f"{int(good['compressed'].eq(True).sum())}/{len(mine)}"}
            for name in _DISTANCES:
                row |= (found[name][i] if len(good) else NOTHING).named(name)
            rows.append(row)
    frame = pd.DataFrame(rows)
    shares = [str(key) for key in frame if str(key).startswith("agreement")]
    floor = pd.to_numeric(records.get("kl_floor", pd.Series(dtype=float)), errors="coerce").max()
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
            " next-token distribution from the method's. [low, high]: 95 % bootstrap over prompts.",
            *([f"Rounding alone comes to a KL of {floor:.1e} at most."] if floor == floor else []),
        ),
        frame.assign(model=group.model, task=group.task, **{k: 100 * frame[k] for k in shares}),
    )


def slope_table(group: Group, curve: Curve) -> Table:
    """Log-log slopes of error against entries: variants by data sets; in files one row for each."""
    data = slopes(group, curve)
    named = {"slope": "mean", "slope_low": "low", "slope_high": "high"}
    frame = wide(
        data.rename(columns=named).assign(mark=""), ["method", "variant", "expected"], curve.facet
    )
    columns = [Column(name, text=signed_text) for name in data[curve.facet].unique()]
    predicted = (
        [Column("expected", "predicted", signed_text)] if data["expected"].notna().any() else []
    )
    least, most = data["fitted_from"].min(), data["fitted_to"].max()
    return Table(
        f"{group.task}-{group.model}-slopes",
        f"{group.task} on {group.model}: log-log slopes",
        frame,
        (METHOD, *predicted, *columns),
        (
            f"Least-squares slopes of log {curve.y} against log {curve.x}, from"
            f" {least:.0f} to {most:.0f}, with 95 % bootstrap intervals over {curve.unit}s"
            f" ({data['repetitions'].min():.0f} or more), widened by Student's t; one has no interval.",
        ),
        data.assign(model=group.model, task=group.task),
    )


def verdict(group: Group, frame: pd.DataFrame) -> str:
    """One sentence for each rate about the total column, by its marks and intervals; empty where nothing
    is compared."""
    curve = group.meta.figure(Curve)
    if group.meta.figure(Times):
        return ""
    if curve is not None and curve.y in group.records:
        return slope_verdict(slopes(group, curve))
    total, change = totals(frame), totals(frame, "difference")
    unit = group.meta.score_unit
    percent = " %" if group.percent else ""
    said = []
    for peers in group.peers:
        mine = total.loc[[group.variants[i].label for i in peers]].dropna(subset=["mean"])
        mine = mine.sort_values("mean", ascending=group.meta.lower_is_better, kind="stable")
        if mine.empty:
            continue
        rate = group.variants[peers[0]].rate
        names = {v.label: v.without_rate for v in group.variants}
        parts = {
            word: [names[str(k)] for k, marks in mine["mark"].items() if word in marks.split()]
            for word in ("best", "tied", "worse")
        }
        label = next(
            (str(k) for k, m in mine["mark"].items() if "best" in m.split()), str(mine.index[0])
        )
        text = f"{names[label]} has {score_format(unit)(mine['mean'][label])}{percent}"
        if label in change.index and not math.isnan(change["low"][label]):
            low, value, high = (
                score_format(unit, signed=True)(change[key][label])
                for key in ("low", "mean", "high")
            )
            text += f", {value} [{low}, {high}] to {group.baseline_name or BASELINE}"
        leaders = [name for name in parts["best"] if name != names[label]] + parts["tied"]
        text += f"; not shown to differ: {', '.join(leaders)}" if leaders else ""
        text += f"; shown worse: {', '.join(parts['worse'])}" if parts["worse"] else ""
        said.append(text + "." if rate is None else f"At rate {rate:g}, {text}.")
    return "\n".join(said)


def slope_verdict(data: pd.DataFrame) -> str:
    """How many slopes are as predicted, or steeper or shallower, by the whole interval."""
    known = data.dropna(subset=["verdict"])
    said = [
        f"{label} (predicted {signed_text(float(part['expected'].iloc[0]))}): "
        + ", ".join(
            f"{word} on {count} of {len(part)}"
            for word, count in part["verdict"].value_counts().items()
        )
        for label, part in known.groupby("variant", sort=False)
    ]
    return f"Slopes: {'; '.join(said)}." if said else ""
