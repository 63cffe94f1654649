"""The tables of an experiment: the ranking of one model on one task with the sentence that it says, its
splits and pairs, the tables of probes, and those that set several models or tasks side by side.

In: groups. Out: `Table`, of their tidy frames (`kvbench.report.frame`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from kvbench.report.frame import (
    AVERAGE,
    COSTS,
    compared_strata,
    comparisons,
    failures_of,
    failures_text,
    scores,
    strata_of,
    tidy,
    totals,
    totals_at_rates,
)
from kvbench.report.ratios import (
    MORE_THAN,
    RATIO_AT_95,
    at_rate,
    headings,
    largest_first,
    mean_over_rates,
    measures_several_rates,
    rate_in_title,
    rate_text,
    rate_texts,
    ratios_of,
    too_few_for_95,
)
from kvbench.report.runs import BASELINE, Group, as_text, listed, natural_order, words
from kvbench.report.stats import FEWEST, NOTHING, median_of, num_units
from kvbench.report.table import (
    DIFFERENCE,
    ENOUGH,
    ENOUGH_COLUMN,
    INTERVAL,
    LEGEND,
    LOWER,
    METHOD,
    RATIOS,
    TESTED,
    TIMES,
    Column,
    Table,
    in_percent,
    legend,
    number,
    p_text,
    score_format,
    size,
    unit_text,
    whole,
    wide,
    with_values,
)

MOST_WITH_INTERVALS = 4
"""A table with more columns than this shows intervals for the average only."""
MOST_PAIRS = 15
"""A table of more pairs than this shows those with the best method."""
MOST_RATES = 3
"""Rates that a verdict speaks of: the lowest ones."""
_SECONDS = ("prefill_compress_s", "decode_s")
"""Columns of a throughput probe's table that are minima and medians over runs."""
_MEDIANS = {
    "prefill_compress_s_over_exact": "prefill_ratio",
    "tokens_per_s": "tokens_per_s",
    "tokens_per_s_over_exact": "speedup",
    "decode_tokens_per_s": "decode_tokens_per_s",
    "decode_tokens_per_s_over_exact": "decode_speedup",
}
"""Columns of a throughput probe's table that are medians over runs, each with its record field."""
_MEANS = ("peak_bytes", "cache_bytes", "ratio")
"""Columns that are means over runs."""
_DISTANCES = ("kl", "max_kl", "agreement", "difference", "perplexity_ratio", "ratio")
"""Record fields of a fidelity probe; agreement is a fraction."""


def tables_of(group: Group) -> list[Table]:
    """The tables of one model and task; its section of the page begins with the first."""
    fields = [name for name in tidy(group)["by"].unique() if name not in ("dataset", "")]
    tables = [score_table(group)]
    if group.meta.kind == "throughput":
        tables.insert(0, timing_table(group))
    else:
        if group.meta.kind == "fidelity" and "kl" in group.records:
            tables.append(fidelity_table(group))
        tables += filter(None, [pairs_table(group)])
    return [*tables, *(split_table(group, name) for name in fields), *_splits(group, fields)]


def score_table(group: Group) -> Table:
    """The ranking: total score, paired difference, bytes and entries held and failures of every variant.

    The exact cache stands first, then the others by score, a group of rows for each rate. The CSV file
    has every dataset's scores, too.
    """
    frame, lower = tidy(group), group.meta.lower_is_better
    total = totals(frame)
    measures = ("score", "difference", "times")
    rows = pd.concat([totals(frame, measure) for measure in measures])
    numbers = wide(rows, ["variant"], "measure", measures).set_index("variant")
    table = total[["variant", "method", "rate", "failures", "units"]].join(numbers)
    costs = [key for key in COSTS if key != "entries_max"]
    for key in costs:
        table[key] = table["variant"].map(totals(frame, key)["mean"])
    table["scored"] = [f"{row.n:.0f}/{row.expected:.0f}" for row in total.itertuples()]
    order = table.assign(
        loss=table["score"] if lower else -table["score"],
        share=table["variant"].map({variant.label: variant.share for variant in group.variants}),
        minus_rate=-table["rate"].astype(float),
        minus_size=table["variant"].map({v.label: -(v.size or 0) for v in group.variants}),
        is_compared=[group.baseline[label] is not None for label in table["variant"]],
    )
    keys = ["is_compared", "share", "minus_rate", "minus_size", "loss"]
    table = table.loc[order.sort_values(keys, kind="stable").index]
    table = _in_groups_by_rate(group, table)
    unit, count = group.meta.score_unit, len(group.datasets)
    name = str(group.datasets[0]) if count == 1 else f"average of {count} datasets"
    others = (
        Column("difference", f"Δ {BASELINE}", score_format(unit, signed=True)),
        Column("times", f"× {BASELINE}", number),
        Column("failures", "failed"),
        *(
            Column(key, words(key.removesuffix("_mean")), whole if "entries" in key else number)
            for key in costs
        ),
        Column("scored"),
    )
    score = Column("score", f"{name}{metric_text(group)}", score_format(unit))
    columns = (METHOD, score, *with_values(table, others))
    return Table(
        f"{group.task}-{group.model}",
        f"{group.task} on {group.model}{rate_in_title(group)}{group.protocol_in_title}:"
        f" score{unit_text(unit)}",
        table,
        columns,
        tuple(
            dict.fromkeys([*_interval_notes(group, table), *legend(table, columns), *_notes(group)])
        ),
        in_percent(frame[frame["by"].isin(["dataset", ""])]),
        answer=tuple(verdict(group).splitlines()),
    )


def _in_groups_by_rate(group: Group, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of variants in groups by their rate, whose heading is a column ``group``; the variants are
    then named without it. Where all variants have one rate the rows stay as they are."""
    if len(set(group.at.values()) - {""}) < 2:
        return rows
    rates = [group.at[label] if label in group.compressed else "" for label in rows["variant"]]
    names = rows["variant"].map(group.names)
    return rows.assign(group=headings(rates, rate_texts(group)), variant=names)


def split_table(group: Group, by: str) -> Table:
    frame = tidy(group)
    rows = frame[frame["by"].eq(by) & frame["measure"].eq("score")]
    rows = _in_groups_by_rate(group, rows)
    title = f"{group.title}: score by {words(by)}"
    table = _pivot([group], f"{group.task}-{group.model}-by-{by}", title, rows)
    columns = table.columns
    if by == "rate":
        texts = rate_texts(group)
        rates = [at_rate(float(column.key)) for column in columns[1:]]
        named = zip(columns[1:], headings(rates, texts), strict=True)
        columns = (METHOD, *(replace(column, heading=heading) for column, heading in named))
    return replace(table, columns=columns, data=in_percent(frame[frame["by"] == by]))


def _interval_notes(group: Group, table: pd.DataFrame) -> Iterator[str]:
    if table["score_low"].notna().any():
        yield INTERVAL
    if 0 < table["units"].max() < FEWEST:
        yield LEGEND["few"]
    elif comparisons(group):
        used, every = len(compared_strata(group)), len(strata_of(group))
        if used < every:
            yield (
                f"Differences and marks are over the {used} datasets of ten prompts or more. An average"
                f" counts each dataset alike, so that the error of the other {every - used}, with few"
                " prompts each, would be most of its error."
            )


def _notes(group: Group) -> Iterator[str]:
    """Notes on a group's examples: which were not compressed, cut or left out, and why."""
    if group.exact_of:
        for measure, note in (("difference", DIFFERENCE), ("times", TIMES)):
            if totals(tidy(group), measure)["mean"].notna().any():
                yield note
    elif group.compressed and not group.meta.lower_is_better:
        yield "The exact cache was not run: add exact to the methods for differences to it."
    yield from _by_command(group)
    draws = group.records.groupby("example_id")["seed"].nunique().max() if len(group.records) else 1
    if draws > 1:
        yield f"Means over {draws} draws (seeds) of each prompt."
    if decided := _decided_by_first_token(group):
        yield decided
    names = dict.fromkeys(variant.method for variant in group.variants)
    repeating = [name for name in names if name.startswith(("kvzip", "kvgrad"))]
    if repeating and group.protocol not in ("", "context"):
        yield f"The protocol of {listed(repeating)} in their papers is compress_after=context."
    uncompressed = group.good["compressed"].eq(False) & group.good["saves_memory"].eq(True)
    if uncompressed.any():
        prompts = group.good[uncompressed].drop_duplicates(["variant", "example_id"])
        counts = prompts["variant"].value_counts()
        named = ", ".join(f"{label} ({count})" for label, count in counts.items())
        yield f"Prompts that are no longer than the capacity are not compressed: {named}."
    if "budget_preset" in group.good:
        for label, part in group.good.dropna(subset=["budget_preset"]).groupby("variant"):
            entries, allowed = part["entries_mean"].mean(), part["capacity"].mean()
            yield (
                f"{label} holds {entries:.0f} entries per layer and KV head where the budget allows"
                f" {allowed:.0f}: its preset reproduces a released code's own split."
            )
    unit = group.meta.unit
    if unit != "example_id" and unit in group.records:
        count = group.good.loc[group.good["score"].notna(), unit].nunique()
        yield f"Intervals are over {count} independent units, one for each {unit_name(group)}."
    if "beyond_positions" in group.records:
        over = group.records[group.records["beyond_positions"].eq(True)]["example_id"].nunique()
        if over:
            yield f"{over} prompts are longer than the model has positions: their scores mean nothing."
    if "imagined" in group.records:
        masked = group.records["variant"][group.records["imagined"].eq(True)].unique()
        yield (
            f"{', '.join(masked)}: measured by a mask in one pass over the prompt; entries and bytes are"
            " those that a cache would hold."
        )
    cut = [set(manifest.get("datasets_left_out") or []) for manifest in group.manifests]
    left_out = sorted(set.intersection(*cut)) if cut else []
    if left_out:
        yield f"Datasets of which the limit leaves no example: {', '.join(left_out)}."
    if few := too_few_for_95(group, compared_strata(group)):
        yield few
    if group.left_out:
        yield f"Not shown, as they were run on other prompts: {', '.join(group.left_out)}."


def unit_name(group: Group) -> str:
    """What an independent unit of the group is called."""
    names = {"example_id": "prompt", "context_id": "context", "filler": "filler text"}
    if "sample" in group.records:  # of a prompt that is answered several times
        names["context_id"] = "prompt"
    return names.get(group.meta.unit, words(group.meta.unit))


def _decided_by_first_token(group: Group) -> str:
    """A note on the answers whose score their first token alone decides, where that token is the exact
    prefill's: under ``compress_after=prompt``, and of the prompts that had to be read whole under
    another protocol. Empty where no token was.

    A wrong answer of several tokens is among them, since its first token alone scores 0, too; so the
    note says how many score more.
    """
    if "first_token_score" not in group.good:
        return ""
    answers = group.good[group.good["variant"].isin(group.compressed)]
    answers = answers.dropna(subset=["first_token_score", "score"])
    score = answers["score"].astype(float)
    decided = answers["first_token_score"].astype(float).eq(score)
    if answers.empty:
        return ""
    of = f"{decided.sum()} of {len(answers)} answers"
    above = f"Of these, {(decided & score.gt(0)).sum()} score above 0."
    return f"{of} were decided by their first token, which is the exact cache's. {above}"


def _by_command(group: Group) -> Iterator[str]:
    """A note that says which rows of a method are of the command that ran last, where not all are."""
    last = max(group.manifests, key=lambda manifest: str(manifest.get("started")), default={})
    made = {
        manifest["config_hash"]
        for manifest in group.manifests
        if manifest.get("command") == last.get("command")
    }
    newest = set(group.records["variant"][group.records["config_hash"].isin(made)])
    of_method: dict[str, tuple[list[str], list[str]]] = {}
    for variant in group.variants:
        new, old = of_method.setdefault(variant.method, ([], []))
        (new if variant.label in newest else old).append(variant.label)
    for new, old in of_method.values():
        if new and old:
            yield f"Of the last command: {'; '.join(new)}. Of earlier ones: {'; '.join(old)}."


def _pivot(groups: Sequence[Group], name: str, title: str, rows: pd.DataFrame) -> Table:
    """Rows of a tidy frame of these groups, which are one task on several models, as a table: a row for
    each variant, a column for each ``value``. A note that not all models have names its own."""
    group = groups[0]
    keys = ["group", "method", "variant"] if "group" in rows else ["method", "variant"]
    table = wide(rows, keys, "value")
    names = [value for value in rows["value"].unique() if value != AVERAGE]
    if AVERAGE in set(rows["value"]):
        names.append(AVERAGE)
    unit, many = group.meta.score_unit, len(names) > MOST_WITH_INTERVALS
    text = score_format(unit)
    columns = [Column(value, value, text, not many or value == AVERAGE) for value in names]
    of_groups = [
        [note for note in _notes(each) if note not in (DIFFERENCE, TIMES)] for each in groups
    ]
    about = [
        note if all(note in others for others in of_groups) else f"{each.model}: {note}"
        for each, own in zip(groups, of_groups, strict=True)
        for note in own
    ]
    marks = legend(table, columns)
    if AVERAGE in names and LEGEND["best"] in marks:
        marks.append(LEGEND["average"])
    notes = (INTERVAL, *marks, *dict.fromkeys(about))
    return Table(name, f"{title}{unit_text(unit)}", table, (METHOD, *columns), notes)


def paper_table(groups: Sequence[Group], published: pd.DataFrame, name: str = "") -> Table:
    """One task under one protocol as papers print it: datasets as columns, a group of rows for each
    model, then one for each model of whose methods numbers were `published`
    (`kvbench.report.published.beside`). The file is called by the task unless there is a `name`."""
    parts = []
    for group in groups:
        frame = tidy(group)
        rows = frame[frame["by"].eq("dataset") & frame["measure"].eq("score")]
        rows = _in_groups_by_rate(group, rows)
        heading = rows["model"]
        if "group" in rows:
            heading = heading + rows["group"].map(lambda text: f", {text}" if text else "")
        parts.append(rows.assign(group=heading))
    first = groups[0]
    if len(published):
        parts.append(_as_papers_print(first, published, set(pd.concat(parts)["value"])))
    return _pivot(
        groups,
        f"{name or first.task}-paper",
        f"{first.task}{first.protocol_in_title}: score",
        pd.concat(parts),
    )


def _as_papers_print(group: Group, published: pd.DataFrame, values: set[str]) -> pd.DataFrame:
    rows = published[published["task"].eq(group.task) & published["field"].eq("score")]
    rows = rows[rows["value"].isin(values)]
    rows = rows.drop_duplicates(["source", "published_model", "variant", "value"])
    order = {label: place for place, label in enumerate(group.labels)}
    rows = rows.sort_values("variant", key=lambda names: names.map(order), kind="stable")
    return rows.assign(
        group=(rows["published_model"] + ", published (" + rows["source"] + ")").str.lstrip(", "),
        mean=rows["published"] / (100 if group.meta.score_unit == "fraction" else 1),
        low=np.nan,
        high=np.nan,
        mark="",
    )


def overview_tables(groups: Sequence[Group]) -> list[Table]:
    """The tables at the top of the page and of the terminal, where an experiment has several tasks,
    rates or models: for each protocol and model its methods by tasks, else by rates, with the ratios
    that are enough; for models that have one task and rate in common, methods by models.

    None of one model on one task at one rate, whose ranking says it all. Methods without a rate (the
    exact cache) stand above the others, which are best first: by the ratio that is enough, then by the
    score.
    """
    groups = [group for group in groups if len(totals(tidy(group)))]
    protocols = list(dict.fromkeys(group.protocol for group in groups if group.protocol))
    if len(protocols) > 1:
        return [
            replace(found, name=f"{found.name}-{protocol}")
            for protocol in protocols
            for found in overview_tables([group for group in groups if group.protocol == protocol])
        ]
    models, tasks = ({getattr(g, key) for g in groups} for key in ("model", "task"))
    several_rates = len({at for group in groups for at in totals_at_rates(group)["at"]} - {""}) > 1
    if len(models) > 1 and (len(tasks) > 1 or several_rates):
        of_models = itertools.groupby(groups, key=lambda group: group.model)
        return [table for _, of_model in of_models for table in overview_tables(list(of_model))]
    if len(groups) > 1:
        across = "task" if len(tasks) > 1 else "model"
        found = [_groups_side_by_side(groups, across)]
        return [*found, *(_enough_by_task(groups) if across == "task" else ())]
    return [_rates_side_by_side(groups[0])] if several_rates else []


def _groups_side_by_side(groups: Sequence[Group], across: str) -> Table:
    """Methods by groups, which are the tasks of one model or the models of one task (`across`)."""
    first = groups[0]
    columns = []
    for group in groups:
        unit, heading = group.meta.score_unit, ""
        if across == "task":
            better = f" {LOWER[0]}" if group.meta.lower_is_better else ""
            heading = f"{group.task}{metric_text(group)}{unit_text(unit)}{better}"
        columns.append(Column(getattr(group, across), heading, score_format(unit)))
    texts = rate_texts(*groups)
    places = {at: place for place, at in enumerate(["", *texts])}
    rows = pd.concat([totals_at_rates(group) for group in groups])
    group_of = headings(rows["at"], texts)
    rows = rows.assign(variant=rows["label"], group=group_of, place=rows["at"].map(places))
    keys, names = ["group", "place", "method", "variant"], [column.key for column in columns]
    table = wide(rows, keys, across).dropna(subset=names, how="all")
    table = table.join(rows.groupby(keys)["ratio"].mean(), on=keys)
    loss = table[names[0]] * (1 if first.meta.lower_is_better else -1)
    table = table.assign(loss=loss).sort_values(["place", "loss"], kind="stable")
    what, shows = first.task, f"score{unit_text(first.meta.score_unit)}"
    if across == "task":
        what, shows = first.model, "all tasks"
    protocol = next(filter(None, (group.protocol_in_title for group in groups)), "")
    lower = across == "task" and any(group.meta.lower_is_better for group in groups)
    return _overview(
        first.model if across == "task" else "",
        f"{what}{protocol}: {shows}",
        table,
        [*columns, Column("ratio", f"ratio, mean of {across}s", number)],
        notes=[LOWER] * lower,
        answer=[_headline(group, across) for group in groups],
    )


def _rates_side_by_side(group: Group) -> Table:
    """The methods of one model on one task by rates, with the ratio that is enough. What has no rate
    stands above, with the same score at each."""
    rows, texts = totals_at_rates(group), rate_texts(group)
    rows = rows.assign(variant=rows["label"])
    rates = [at for at in texts if at in set(rows["at"])]
    columns = [Column(at, texts[at], score_format(group.meta.score_unit)) for at in rates]
    without_rate = rows[rows["at"].eq("")]
    above = [without_rate.assign(at=at, place=0) for at in rates]
    rows = pd.concat([*above, rows[rows["at"].ne("")].assign(place=1)])
    table = wide(rows, ["place", "method", "variant"], "at")
    table = table.dropna(subset=rates, how="all")
    # A method that lacks a score at one of the rates stands below the others.
    loss = table[rates].mean(axis=1, skipna=False) * (1 if group.meta.lower_is_better else -1)
    table, order, notes = table.assign(loss=loss), ["place", "loss"], []
    enough = totals(tidy(group), RATIO_AT_95)
    if len(enough):
        found = wide(enough, ["variant"], "measure").set_index("variant")
        table = _missed_last(table.join(found, on="variant"), ENOUGH_COLUMN)
        columns.append(ENOUGH_COLUMN)
        order.insert(1, f"{RATIO_AT_95}_order")
        notes.append(ENOUGH)
    return _overview(
        group.model,
        f"{group.title}: score{unit_text(group.meta.score_unit)}",
        table.sort_values(order, kind="stable"),
        columns,
        notes=notes,
        answer=verdict(group).splitlines(),
    )


def _overview(
    model: str,
    title: str,
    table: pd.DataFrame,
    columns: Sequence[Column],
    *,
    notes: Sequence[str],
    answer: Sequence[str],
) -> Table:
    shown = with_values(table, (METHOD, *columns))
    return Table(
        f"overview-{model}" if model else "overview",
        title,
        table,
        shown,
        (INTERVAL, *legend(table, shown), *notes),
        kind="overview",
        answer=tuple(filter(None, answer)),
    )


def _enough_by_task(groups: Sequence[Group]) -> Iterator[Table]:
    """The ratios that are enough on each task of a model; none where no task has one."""
    enough = pd.concat([totals(tidy(group), RATIO_AT_95) for group in groups])
    if enough.empty:
        return
    table = wide(enough, ["method", "variant"], "task")
    tasks = [replace(ENOUGH_COLUMN, key=name, heading=name) for name in enough["task"].unique()]
    for column in tasks:
        table = _missed_last(table, column)
    table = table.sort_values([f"{column.key}_order" for column in tasks], kind="stable")
    model = groups[0].model
    yield Table(
        f"overview-{model}-{RATIO_AT_95}",
        f"{model}: {ENOUGH_COLUMN.name}",
        table,
        (METHOD, *tasks),
        (*legend(table, tasks), ENOUGH),
        kind="overview",
    )


def _missed_last(table: pd.DataFrame, column: Column) -> pd.DataFrame:
    """With the order of a column of ratios that are enough: what is not enough at any rate is last,
    whatever number it has missed at."""
    missed = table[f"{column.key}_mark"].eq(MORE_THAN)
    return table.assign(**{f"{column.key}_order": table[column.key].where(~missed, np.inf)})


def metric_text(group: Group) -> str:
    """The metric behind a task or dataset in a heading, where the task names one."""
    return f": {words(group.meta.metric)}" if group.meta.metric else ""


def _splits(group: Group, fields: Sequence[str]) -> list[Table]:
    """Every dataset split by each record field; tables that only their CSV files show.

    Beside each part's mean stands the plain mean of the dataset's parts, which is how LongBench-E
    averages a dataset over its length buckets.
    """
    tables = []
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
        data = means.assign(**group.about, unit=group.meta.score_unit)
        data = in_percent(data, ["score", "mean_of_parts"])
        name = f"{group.task}-{group.model}-by-{by}-and-dataset"
        tables.append(Table(name, "", means, columns=(), data=data))
    return tables


def pairs_table(group: Group) -> Table | None:
    """Differences between compressed variants of the same rate, the better one first, each with its
    p-value. Of more than `MOST_PAIRS` readers see those with the best. None without a pair."""
    # A variant may have no record of a named dataset, and so no mean.
    total = totals(tidy(group))["mean"].reindex(group.labels)
    strata = compared_strata(group)
    sign = -1.0 if group.meta.lower_is_better else 1.0
    rows: list[dict[str, Any]] = []
    for peers in group.peers:
        scored = [i for i in peers if total[group.labels[i]] == total[group.labels[i]]]
        ranked = sorted(scored, key=lambda i: -sign * total[group.labels[i]])
        for i, j in itertools.combinations(ranked, 2):
            change = comparisons(group)[min(i, j), max(i, j)]
            if i > j and not math.isnan(change.value):
                change = change.reversed()
            row: dict[str, Any] = {"sign": " / " if change.times else " − "}
            row |= {"first": group.labels[i], "second": group.labels[j], "to_best": i == ranked[0]}
            row["at"] = group.variants[i].at
            for measure, is_ratio in (("difference", False), ("times", True)):
                row |= (change if change.times is is_ratio else NOTHING).named(measure)
            row |= {"p": change.p, "zeros": change.zeros}
            rows.append(row | {"datasets": len(strata), "examples": num_units(strata, [i, j])})
    if not rows:
        return None
    frame = pd.DataFrame(rows)
    unit = group.meta.score_unit
    data = frame.drop(columns=["at", "sign"]).assign(**group.about, unit=unit)
    shown = frame if len(frame) <= MOST_PAIRS else frame[frame["to_best"]]
    first, second = shown["first"], shown["second"]
    if len(group.peers) > 1:
        first, second = first.map(group.names), second.map(group.names)
        shown = shown.assign(group=headings(shown["at"], rate_texts(group)))
    shown = shown.assign(methods=first + frame["sign"].reindex(shown.index) + second)
    columns = (
        Column("methods"),
        Column("difference", text=score_format(unit, signed=True)),
        Column("times", "ratio", number),
        Column("p", text=p_text),
        Column("examples", text=whole),
    )
    notes = [INTERVAL, TESTED] if shown["p"].notna().any() else [INTERVAL, LEGEND["few"]]
    if shown["times"].notna().any():
        notes.append(RATIOS)
        if frame["zeros"].any():
            notes.append(
                f"Prompts of which a value is 0 are left out: at most {frame['zeros'].max()}."
            )
        if shown["difference"].notna().any():
            notes.append("Pairs with a difference: more than a tenth of their prompts have a 0.")
    return Table(
        f"{group.task}-{group.model}-pairs",
        f"{group.title}: which compressed methods differ significantly{unit_text(unit)}",
        shown,
        with_values(shown, columns),
        tuple(notes),
        in_percent(data, ["difference", "difference_low", "difference_high"]),
    )


def timing_table(group: Group) -> Table:
    """The numbers of a throughput probe, a row per setting and variant: minimum and median seconds,
    medians of tokens per second, means of bytes. A setting is a number of prompt and new tokens, and a
    batch and rate where the probe was asked for several."""
    records = group.records
    asked = [c for c in ("asked_new_tokens", "asked_batch", "asked_rate") if c in records]
    rows = []
    for key, at in records.groupby(["prompt_tokens", *asked], sort=True, dropna=False):
        for variant in group.variants:
            part = at[at["variant"] == variant.label]
            if part.empty:
                continue
            good = part[part["status"] == "ok"]
            fields = [*_SECONDS, *_MEDIANS.values(), *_MEANS, "batch"]
            measured = good.reindex(columns=fields).apply(pd.to_numeric)
            named = dict(zip(["prompt_tokens", *asked], key, strict=True))
            row: dict[str, Any] = {"method": variant.method, "variant": variant.label}
            row |= {
                "prompt_and_new_tokens": _setting(named, good),
                "batch": measured["batch"].mean(),
            }
            for name in _SECONDS:
                row |= {f"{name}_min": measured[name].min(), name: measured[name].median()}
            for name, field in _MEDIANS.items():
                row |= median_of(measured[field]).named(name)
            row |= dict(measured[list(_MEANS)].mean())
            rows.append(row | {"runs": len(good), "failures": failures_text(failures_of(part))})
    frame = pd.DataFrame(rows)
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
        with_values(frame, columns),
        (
            "Every method has a prefill of its own, whose seconds include compression. tokens/s: the"
            " batch's new tokens divided by the seconds of prefill and decoding; decode tokens/s: by"
            " those of decoding alone. x: divided by the exact cache's value in the same run. [low,"
            " high]: 95 % confidence intervals of medians (order statistics), from six runs on. peak:"
            " memory allocated on the GPU; on a CPU that of the whole process.",
        ),
        frame,
    )


def _setting(asked: Mapping[str, Any], records: pd.DataFrame) -> str:
    new = asked.get("asked_new_tokens", records["new_tokens"].max())
    text = f"{as_text(asked['prompt_tokens'])} + {as_text(new) if new == new else '?'}"
    batch, rate = asked.get("asked_batch", "1"), asked.get("asked_rate")
    text += f", batch {batch}" if batch != "1" else ""
    return text if rate is None or rate != rate else f"{text}, rate {rate}"


def fidelity_table(group: Group) -> Table:
    """Every distance from the exact model, averaged over prompts, by rate; with the same intervals as in
    every other table."""
    records, by = group.records, "rate" if "rate" in group.records else "dataset"
    keys, parts = ["value", "method", "variant"], []
    for name in _DISTANCES:
        unit = "fraction" if name == "agreement" else ""
        measured = group.measuring(records[name], unit, signed=name == "difference")
        rows = scores(measured, by)
        parts.append(rows[rows["measure"].eq("score")].assign(measure=name))
    good = group.good.assign(value=group.good[by].map(as_text))
    prompts = good.groupby(keys)["compressed"]
    compressed = prompts.sum().map(int).map(str) + "/" + prompts.size().map(str)
    frame = wide(pd.concat(parts), keys, "measure", marks=False).join(compressed, on=keys)
    frame = frame.drop(columns=["ratio_low", "ratio_high"]).sort_values(
        "value", key=lambda of: pd.to_numeric(of, errors="coerce"), ascending=False, kind="stable"
    )
    value = frame.pop("value")
    frame["group"] = "rate " + value if by == "rate" else ""
    shares = {str(k): 100 * frame[k] for k in frame if str(k).startswith("agreement")}
    data = frame.assign(**group.about, **shares)
    if by == "rate":
        frame["group"] = headings(pd.to_numeric(value).map(at_rate), rate_texts(group))
    return Table(
        f"{group.task}-{group.model}-fidelity",
        f"{group.title}: distance from the exact model, per token",
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
            "Every method reads the same continuation, token by token. KL: the Kullback-Leibler"
            " divergence KL(exact || method) of the next-token distributions. NLL: negative"
            " log-likelihood of the continuation; Δ: the method's minus the exact cache's.",
        ),
        data,
    )


def verdict(group: Group) -> str:
    """A line for each of the lowest rates, made of the marks and intervals of the total scores; empty
    where methods are not compared by a score."""
    if group.meta.kind == "throughput":
        return ""
    return "\n".join(_at_rates(group)[-MOST_RATES:])


def _headline(group: Group, across: str) -> str:
    """The verdict at the middle rate, behind the name of the task or model; empty without one."""
    name = group.task if across == "task" else group.model
    lines = _at_rates(group)
    said = [f"{name}: {line[0].lower()}{line[1:]}" for line in lines[(len(lines) - 1) // 2 :][:1]]
    return "".join(said)


def _at_rates(group: Group) -> list[str]:
    """A line on the methods at each rate, the largest first."""

    def largest(peers: Sequence[int]) -> tuple[str, float, int]:
        variant = group.variants[peers[0]]
        return *largest_first(variant.at or "rate 0"), -(variant.size or 0)

    by_rate = sorted(group.peers, key=largest)
    frame = tidy(group)
    total = totals(frame)
    change = pd.concat([totals(frame, measure) for measure in ("difference", "times")])
    lines = []
    for peers in by_rate:
        scored = total.reindex([group.labels[i] for i in peers]).dropna(subset=["mean"])
        if len(scored):
            scored = scored.sort_values("mean", ascending=group.meta.lower_is_better, kind="stable")
            at, where = group.variants[peers[0]].at, ""
            if at and measures_several_rates(group):
                where = f"{mean_over_rates(group).capitalize()}: "
            elif at:
                ratios = ratios_of(group, [group.labels[i] for i in peers])["ratio"]
                where = f"At {rate_text(at, ratios)}: "
            lines.append(where + _verdict_on(group, scored, change))
    return lines


def _verdict_on(group: Group, scored: pd.DataFrame, change: pd.DataFrame) -> str:
    """The line on the methods of one rate, without the rate: `scored` are their totals, best first."""
    marked: dict[str, list[str]] = {"best": [], "tied": [], "better": [], "worse": []}
    for label, marks in scored["mark"].items():
        for word in set(marks.split()) & set(marked):
            marked[word].append(str(label))
    first = marked["best"][0] if marked["best"] else str(scored.index[0])
    text = score_format(group.meta.score_unit)
    signed = score_format(group.meta.score_unit, signed=True)
    score, units = text(scored["mean"][first]), int(scored["units"].max())
    apart = marked["better"] + marked["worse"]
    same = [str(label) for label, mean in scored["mean"].items() if text(mean) == score]
    equal = [first, *(label for label in same if label not in (first, *apart))]
    unit = "%" if group.percent else words(group.meta.score_unit)
    line = f"{_named(group, equal)} {'has' if len(equal) == 1 else 'have'} {score} {unit}"
    of_units = f"{unit_name(group)}s"
    line += f" ({units} {of_units})"
    if units < FEWEST:
        return f"{line}: too few {of_units} to say more."
    if first in change.index and not math.isnan(change["low"][first]):
        is_ratio = change["measure"][first] == "times"
        written = number if is_ratio else signed
        low, value, high = (written(change[key][first]) for key in ("low", "mean", "high"))
        interval = f" [{low}, {high}]" if len(equal) == 1 else ""
        against = "times that of" if is_ratio else "against"
        line += f", {value}{interval} {against} {BASELINE}"
    alike = [label for label in marked["best"] + marked["tied"] if label not in equal]
    for heading, labels in (
        ("significantly better", marked["better"]),
        ("not significantly different", alike),
        ("significantly worse", marked["worse"]),
    ):
        line += f"; {heading}: {_named(group, labels)}" if labels else ""
    return f"{line}."


def _named(group: Group, labels: Sequence[str]) -> str:
    return listed([group.names[label] for label in labels])
