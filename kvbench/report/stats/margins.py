"""How far a published number may lie from ours before the difference says anything.

A paper prints one run's mean and no interval. Of two honest runs of one experiment on the same
examples (another dtype, batch size or GPU), some answers differ. Let f be the share of examples that
are in effect answered anew; then the difference of the two means has the variance 2 f p (1 - p) / n, and

    margin = 1.96 sqrt(2 f p (1 - p) / n) + half a unit of the last printed digit

f = 1 where nothing is known of it: two independent samples of n examples. It is measured by running an
experiment twice (`kvbench-report A --rescored B`), or given as ``paper_table.rescored``. The margin is
descriptive: other prompts, templates and library versions move a mean too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvbench.records.read import StoreError
from kvbench.report.experiment import Experiment
from kvbench.report.files import write_text
from kvbench.report.stats.distributions import normal_quantile
from kvbench.report.stats.estimate import LEVEL
from kvbench.report.tables.compare import keyed_records, matched_groups, matched_variants

RESCORED = "rescored.json"
"""Beside an experiment's runs: what `measure` found for each of its models and tasks."""


@dataclass(frozen=True)
class Rescored:
    """Two honest runs of one model and task.

    Attributes:
        f: share of examples answered anew (`share_anew`).
        changed: share of examples whose score changed. examples: that both scored, over all methods.
        other: the second run's experiment.
    """

    f: float
    changed: float
    examples: int
    other: str


def measure(first: Experiment, second: Experiment) -> dict[str, Rescored]:
    """By ``model/task`` of the first, for those whose scores are fractions.

    Raises:
        StoreError: the two share no example of a method at the same options.
    """
    found = {}
    for a, b in matched_groups(first, second):
        if a.meta.score_unit != "fraction":
            continue
        moved = chance = changed = 0.0
        examples = 0
        for x, y in matched_variants(a, b):
            if x.label != y.label:
                continue
            one, other = keyed_records(a, x, b, y)
            both = one.merge(other[["key", "good"]], on="key", suffixes=("", "_b"))
            both = both.dropna(subset=["good", "good_b"])
            change = both["good_b"] - both["good"]
            middle = (both["good_b"] + both["good"]) / 2
            p = middle.groupby(both["dataset"].map(str)).transform("mean")
            moved += float((change**2).sum())
            chance += float((2 * p * (1 - p)).sum())
            changed += float((change != 0).sum())
            examples += len(both)
        if examples:
            f = share_anew(moved, chance)
            found[f"{a.model}/{a.task}"] = Rescored(f, changed / examples, examples, second.name)
    if not found:
        raise StoreError(f"{first.folder} and {second.folder} share no scored example of a method")
    return found


def share_anew(moved: float, chance: float) -> float:
    """f, from the squared changes of scores between two runs and what they would be were every example
    answered anew, 2 p (1 - p), both summed over examples. One changed example and two in all are added,
    so that no change among few is not taken for none at all."""
    return min(1.0, (moved + 1) / (chance + 2))


def write_rescored(folder: Path, found: Mapping[str, Rescored]) -> Path:
    """Keep what `measure` found beside the runs of the experiment in `folder`."""
    text = json.dumps({key: asdict(one) for key, one in found.items()}, indent=2)
    return write_text(folder / RESCORED, f"{text}\n")


def rescored_share(folder: Path, model: str, task: str, spec: Mapping[str, Any]) -> float | None:
    """f as given in a ``paper_table``, or as measured; None where it is neither.

    Raises:
        ValueError: it is no share of 1.
    """
    given = spec.get("rescored")
    path = folder / RESCORED
    if given is None and path.is_file():
        try:
            given = json.loads(path.read_text(encoding="utf-8")).get(f"{model}/{task}", {}).get("f")
        except (ValueError, AttributeError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given <= 1:
        raise ValueError(f"rescored is {given}; allowed: a share from 0 to 1")
    return float(given)


def margin_of(parts: Sequence[tuple[float, int]], f: float, *, total: bool, unit: float) -> float:
    """The margin of a mean over datasets, or of their sum.

    Args:
        parts: by dataset, the mean score as a fraction and how many examples it is of.
        total: whether the means are summed.
        unit: of the last printed digit, as a fraction.
    """
    variance = 0.0
    for mean, n in parts:
        if math.isnan(mean) or n == 0:
            return math.nan
        p = (mean * n + 1) / (n + 2)  # of a mean of 0 or 1, too, some answers may change
        variance += 2 * f * p * (1 - p) / n
    z = normal_quantile((1 + LEVEL) / 2)
    return z * math.sqrt(variance) / (1 if total else len(parts)) + unit / 2
