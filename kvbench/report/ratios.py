"""The measured ratios that stand beside a rate wherever a title, caption, label or sentence names one,
and the number of a sweep over rates: the ratio from which on a method keeps 95 % of the exact cache's
score.

A rate is what a budget asks for: the share of the middle that a method may keep. The ratio is what was
measured: the bytes that a method held over those of the exact cache. It also counts sink and window, and
how many bits an entry has, so a rate of 0.25 may be a ratio of 0.31, or of 0.04 with few bits.

The margin at a rate is the paired mean of a method's score less 95 % of the exact cache's, over the same
examples and with the same interval as every difference (`kvbench.report.stats`). Between neighbouring
rates it is a straight line over the measured ratio. Enough is the smallest ratio from which on it is
nowhere negative: what a lower rate wins where a higher one loses is chance, and does not count. The
bounds of its interval are where the upper and the lower bound of the margin do the same.

With few prompts nothing can be told: the margin of a method that loses nothing at all has an interval
that reaches below zero, too (`prompts_for_95`). There is no number then, and a note says so.

What lies beyond the rates that were run is not guessed at. Lower is better, a difference or an error
have no 95 %, and an exact cache that scores nothing has nothing to keep: there is no number then.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from kvbench.report.runs import Group, Variant, listed
from kvbench.report.stats import Estimate, Scores, differences, num_units, paired

RATIO_AT_95 = "ratio_at_95"
"""The measure's name in the tidy frame, in files and in W&B."""
SHARE = 0.95
AT_MOST, MORE_THAN = "at_most", "more_than"


def ratios_of(group: Group, labels: Collection[str] | None = None) -> pd.DataFrame:
    """Mean measured ratios: a row for each variant (by default the compressed ones), rate and dataset,
    with the columns ``variant``, ``at`` (`Variant.at`) and ``ratio``.

    The rate is the record's own where a run measured several rates, else the variant's. A variant that
    has no rate is left out: the exact cache, and one that holds the same bytes at every rate of its run,
    as few bits of all entries do.
    """
    labels = group.compressed if labels is None else labels
    good = group.good[group.good["variant"].isin(labels)]
    at = good["variant"].map(group.at)
    if measures_several_rates(group):
        rate = pd.to_numeric(good["rate"])
        ratio = good["ratio"].astype(float).round(4)
        num_rates, num_ratios = (
            of.groupby(good["variant"]).transform("nunique") for of in (rate, ratio)
        )
        at = rate.map(at_rate).mask((num_rates > 1) & (num_ratios < 2))
    rows = good.assign(at=at.replace("", None), ratio=good["ratio"].astype(float))
    means = rows.groupby(["variant", "at", "dataset"], sort=False)["ratio"].mean()
    return means.dropna().reset_index()[["variant", "at", "ratio"]]


def at_rate(rate: float) -> str:
    """The name of a rate that is a record's; that of a run's is `Variant.at`."""
    return "" if math.isnan(rate) else f"rate {rate:g}"


def largest_first(at: str) -> tuple[str, float]:
    """A sort key of `Variant.at`."""
    name, _, rate = at.rpartition(" ")
    return name, -float(rate)


def weighed(records: pd.DataFrame, keys: Sequence[str], fields: Sequence[str]) -> pd.DataFrame:
    """Means of these fields by these keys, weighed as scores are: over the examples of each dataset that
    have a score, then over datasets."""
    scored = records[records["score"].notna() & records["status"].eq("ok")]
    known = [name for name in fields if name in scored]
    numbers = scored.assign(**{name: scored[name].astype(float) for name in known})
    of_datasets = numbers.groupby([*keys, "dataset"], sort=False, dropna=False)[known].mean()
    return of_datasets.groupby(level=list(keys), sort=False).mean()


def measures_several_rates(group: Group) -> bool:
    """Whether each run of the group measures several rates, as probes of layers and of fidelity do: the
    rate then is a field of a record, and no setting of a run."""
    return "rate" in group.good and group.good["rate"].nunique() > 1


def ratio_text(ratios: Iterable[float]) -> str:
    """ "ratio 0.31"; "ratio 0.28 to 0.31" where two digits show a difference; empty without a number."""
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    if not known:
        return ""
    low, high = f"{min(known):#.2g}", f"{max(known):#.2g}"
    return f"ratio {low}" if low == high else f"ratio {low} to {high}"


def rate_text(at: str, ratios: Iterable[float]) -> str:
    """ "rate 0.25, ratio 0.31"."""
    return ", ".join(filter(None, [at, ratio_text(ratios)]))


def rate_texts(*groups: Group) -> dict[str, str]:
    """By rate (`Variant.at`), the largest first, what headings call it: the rate with the ratios of all
    methods that were run at it."""
    rows = pd.concat([ratios_of(group) for group in groups], ignore_index=True)
    variants = [variant for group in groups for variant in group.variants]
    every = {variant.at for variant in variants} | set(rows["at"])
    return {
        at: rate_text(at, rows.loc[rows["at"].eq(at), "ratio"])
        for at in sorted(every - {""}, key=largest_first)
    }


def headings(rates: Iterable[str], texts: Mapping[str, str]) -> list[str]:
    """By rate what the group of a table's row is called; empty for a row without one."""
    return [texts.get(at, at) for at in rates]


def label_with_ratio(group: Group, variant: Variant) -> str:
    """The label of a variant; where it names the rate, the measured ratio stands behind it."""
    if variant.label == variant.without_rate:
        return variant.label
    measured = ratio_text(ratios_of(group, [variant.label])["ratio"])
    return ", ".join(filter(None, [variant.label, measured]))


def rate_in_title(group: Group) -> str:
    """The words of a title on the rate: the only one of all methods, or those that numbers are means
    over; empty where methods were run at several, which then are headings, or at none."""
    if measures_several_rates(group):
        return f", {mean_over_rates(group)}"
    texts = rate_texts(group)
    return f" at {next(iter(texts.values()))}" if len(texts) == 1 else ""


def mean_over_rates(group: Group) -> str:
    """ "mean over rates 0.5, 0.25 and 0.125"."""
    rates = sorted(pd.to_numeric(group.good["rate"]).dropna().unique(), reverse=True)
    return f"mean over rates {listed([f'{rate:g}' for rate in rates], len(rates))}"


def nonnegative_from(ratios: ArrayLike, margins: ArrayLike) -> float:
    """The ratio from which on margins at these ascending ratios are nowhere negative: 0 where none is,
    infinite where the last one is; NaN where a margin is not known."""
    x, y = np.asarray(ratios, dtype=float), np.asarray(margins, dtype=float)
    if np.isnan(y).any():
        return math.nan
    below = np.flatnonzero(y < -1e-12)
    if not len(below):
        return 0.0
    i = below[-1]
    if i == len(y) - 1:
        return math.inf
    return float(x[i] + (x[i + 1] - x[i]) * y[i] / (y[i] - y[i + 1]))


def enough(ratios: Sequence[float], margins: Sequence[Estimate]) -> tuple[Estimate, str]:
    """The ratio that is enough, given the margin at each of these measured ratios, and its mark:
    `AT_MOST` where the smallest of them is enough, `MORE_THAN` where the largest, which the number then
    is, is not.

    A bound is 0 where the smallest ratio may be enough, infinite where the largest may not be, and NaN
    where the margins have none or all of the interval is beyond the rates.
    """
    order = np.argsort(ratios, kind="stable")
    x = np.asarray(ratios, dtype=float)[order]
    value, low, high = np.array([margin[:3] for margin in margins])[order].T
    at = nonnegative_from(x, value)
    mark = AT_MOST if at == 0 else MORE_THAN if math.isinf(at) else ""
    low_end, high_end = nonnegative_from(x, high), nonnegative_from(x, low)
    if math.isinf(low_end) or high_end == 0:
        low_end = high_end = math.nan
    return Estimate(float(np.clip(at, x[0], x[-1])), low_end, high_end), mark


def _keeps_a_share(group: Group) -> bool:
    """Whether 95 % of a score means something, and a method was run at two rates."""
    rates: dict[str, set[str]] = defaultdict(set)
    for variant in group.variants:
        rates[variant.without_rate] |= {variant.at} - {""}
    several = any(len(each) > 1 for each in rates.values())
    is_share = group.percent and not group.meta.lower_is_better
    return several and is_share and not measures_several_rates(group)


def enough_ratios(
    group: Group, strata: Sequence[Scores], held: Sequence[Scores]
) -> dict[str, tuple[Estimate, str]]:
    """The ratio that is enough of each method over these datasets, by its name without the rate; none
    where no method was run at two rates. `held` are the ratios in the place of scores; they are weighed
    as the margins are: over the prompts that the method and the exact cache scored."""
    if not _keeps_a_share(group):
        return {}
    pairs = list(group.exact_of.items())
    can_tell = {
        exact: prompts_for_95(strata, exact) <= num_units(strata, [exact]) for _, exact in pairs
    }
    margins = paired(strata, pairs, fraction=True, share=SHARE)
    points: dict[str, list[tuple[float, Estimate]]] = defaultdict(list)
    for (i, exact), margin in zip(pairs, margins, strict=True):
        both = [dataset.scored_by([i, exact]) for dataset in strata]
        ratio = math.nan
        if all(scored.any() for scored in both):
            means = [of.values[own, i].mean() for of, own in zip(held, both, strict=True)]
            ratio = float(np.mean(means))
        if ratio < 1 and can_tell[exact] and not math.isnan(margin.low):
            points[group.names[group.labels[i]]].append((ratio, margin))
    if max(map(len, points.values()), default=0) < 2:
        return {}
    return {name: enough(*zip(*each, strict=True)) for name, each in points.items()}


def prompts_for_95(strata: Sequence[Scores], exact: int) -> float:
    """How many prompts can tell that a method which loses nothing keeps 95 % of the score of the variant
    `exact`, with the datasets as large beside each other as they are: the interval of its differences,
    which are all 0, has to reach no further than 5 % of that score. Infinite where the score is 0."""
    parts = [dataset.by_unit(dataset.values[:, [exact]]) for dataset in strata]
    largest = max((float(np.nanmax(part, initial=0.0)) for part in parts), default=0.0)
    if not largest or not all((~np.isnan(part)).any() for part in parts):
        return math.inf
    lost = (1 - SHARE) * float(np.mean([np.nanmean(part) for part in parts]))
    for times in 1.02 ** np.arange(300):
        sizes = [math.ceil((~np.isnan(part)).sum() * times) for part in parts]
        (unchanged,) = differences([np.zeros((size, 1)) for size in sizes], reach=largest)
        if unchanged.high <= lost:
            return float(sum(sizes))
    return math.inf


def too_few_for_95(group: Group, strata: Sequence[Scores]) -> str:
    """A note on the prompts that the ratio at 95 % lacks; empty where it has enough or is none."""
    exact = set(group.exact_of.values())
    if not exact or not _keeps_a_share(group):
        return ""
    wanted = max(prompts_for_95(strata, i) for i in exact)
    have = min(num_units(strata, [i]) for i in exact)
    if have >= wanted or math.isinf(wanted):
        return ""
    return f"The ratio that keeps 95 % can be told from about {wanted:.0f} prompts on; these are {have}."
