"""The best of several of our arms, where the published row is the best of several."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbench.report.tables.published import Pair, PublishedRow


def best_rows(
    rows: Sequence[PublishedRow], choices: Mapping[str, Sequence[str]], *, lower_is_better: bool
) -> list[PublishedRow]:
    """For each of `choices` (a published method and the arms of ours that it may be) a row that has in
    every column the best arm's pair; none where fewer than two of the arms stand beside a published row.
    """
    found = []
    for theirs, ours in choices.items():
        beside: dict[tuple[str, ...], list[PublishedRow]] = {}
        for row in (row for row in rows if row.method in ours):
            printed = (row.model, *(pair.printed for pair in row.pairs))
            beside.setdefault(printed, []).append(row)
        for arms in (arms for arms in beside.values() if len(arms) > 1):
            columns = zip(*(arm.pairs for arm in arms), strict=True)
            pairs = tuple(_best(column, lower_is_better) for column in columns)
            label = f"{theirs}, best of {len(arms)}"
            found.append(replace(arms[0], method=theirs, label=label, pairs=pairs))
    return found


def _best(pairs: Sequence[Pair], lower_is_better: bool) -> Pair:
    """The pair whose score of ours is best; one without a score loses to any."""
    sign = -1.0 if lower_is_better else 1.0

    def rank(pair: Pair) -> float:
        return -math.inf if math.isnan(pair.ours.value) else sign * pair.ours.value

    return max(pairs, key=rank)
