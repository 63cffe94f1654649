"""The measured ratios that stand beside a rate wherever a title, caption, label or sentence names one.

A rate is what a budget asks for: the share of the middle that a method may keep. The ratio is what was
measured: the bytes that a method held over those of the exact cache. It also counts sink and window, and
how many bits an entry has, so a rate of 0.25 may be a ratio of 0.31, or of 0.04 with few bits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.variants import Variant


def ratios_of(group: Group, labels: Collection[str] | None = None) -> pd.DataFrame:
    """Mean measured ratios: a row for each variant (by default the compressed ones), rate and dataset,
    with the columns ``variant``, ``rate`` and ``ratio``.

    The rate is the record's own where a run measured several rates, else the variant's. A variant that
    has no rate is left out: the exact cache, and one that holds the same bytes at every rate of its run,
    as few bits of all entries do.
    """
    labels = group.compressed if labels is None else labels
    good = group.good[group.good["variant"].isin(labels)]
    rate = good["variant"].map({variant.label: variant.rate for variant in group.variants})
    if measures_several_rates(group):
        rate = pd.to_numeric(good["rate"])
        ratio = good["ratio"].astype(float).round(4)
        num_rates, num_ratios = (
            of.groupby(good["variant"]).transform("nunique") for of in (rate, ratio)
        )
        rate = rate.mask((num_rates > 1) & (num_ratios < 2))
    rows = good.assign(rate=rate.astype(float), ratio=good["ratio"].astype(float))
    means = rows.groupby(["variant", "rate", "dataset"], sort=False)["ratio"].mean()
    return means.dropna().reset_index()[["variant", "rate", "ratio"]]


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


def rate_text(rate: float, ratios: Iterable[float]) -> str:
    """ "rate 0.25, ratio 0.31"."""
    return ", ".join(filter(None, [f"rate {rate:g}", ratio_text(ratios)]))


def rate_texts(*groups: Group) -> dict[float, str]:
    """By rate what headings call it: the rate with the ratios of all methods that were run at it."""
    rows = pd.concat([ratios_of(group) for group in groups], ignore_index=True)
    variants = [variant for group in groups for variant in group.variants]
    texts = {v.rate: f"rate {v.rate:g}" for v in variants if v.rate is not None}
    for rate in sorted(rows["rate"].unique()):
        texts[rate] = rate_text(rate, rows.loc[rows["rate"].eq(rate), "ratio"])
    return texts


def headings(rates: Iterable[float], texts: Mapping[float, str]) -> list[str]:
    """By rate what the group of a table's row is called; empty for a row without one."""
    return ["" if math.isnan(rate) else texts.get(rate, f"rate {rate:g}") for rate in rates]


def label_with_ratio(group: Group, variant: Variant) -> str:
    """The label of a variant; where it names the rate, the measured ratio stands behind it."""
    if variant.label == variant.without_rate:
        return variant.label
    measured = ratio_text(ratios_of(group, [variant.label])["ratio"])
    return ", ".join(filter(None, [variant.label, measured]))


def rate_in_title(group: Group) -> str:
    """What a title says of the rate: the only one of all methods, or those that numbers are means over;
    empty where methods were run at several, which then are headings, or at none."""
    if measures_several_rates(group):
        return f", {mean_over_rates(group)}"
    texts = rate_texts(group)
    return f" at {next(iter(texts.values()))}" if len(texts) == 1 else ""


def mean_over_rates(group: Group) -> str:
    """ "mean over rates 0.5, 0.25 and 0.125"."""
    rates = sorted(pd.to_numeric(group.good["rate"]).dropna().unique(), reverse=True)
    *first, last = [f"{rate:g}" for rate in rates]
    return f"mean over rates {', '.join(first)} and {last}"
