"""What the methods answered, side by side: a sample of examples for the page and for W&B."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.report.data import Group
from kvbench.report.tables import as_text

LONGEST = 400
"""Characters of a prediction or a prompt tail that are shown."""


@dataclass(frozen=True)
class Answer:
    """One arm's answer to one example.

    Attributes:
        verdict: "right", "wrong", "part" (a score in between), "failed", or "none" (no verdict:
            the score is not a fraction).
        differs: the text is not the baseline's.
    """

    label: str
    method: str
    text: str
    verdict: str
    score: float
    status: str
    ratio: float
    differs: bool


@dataclass(frozen=True)
class Shown:
    """One example with every arm's answer."""

    example_id: str
    seed: str
    dataset: str
    fields: Mapping[str, str]
    prompt_tail: str
    expected: str
    answers: tuple[Answer, ...]

    @property
    def filter_fields(self) -> str:
        """What the page filters by, as JSON."""
        return json.dumps({"dataset": self.dataset, **self.fields})

    @property
    def disagree(self) -> bool:
        """Whether the arms' scores differ."""
        return len({answer.verdict for answer in self.answers}) > 1


def sample_of(group: Group, limit: int = 24) -> tuple[list[Shown], int]:
    """Examples spread evenly over the order of the records, and how many there are in all."""
    records = group.records[group.records["prediction"].notna() | (group.records["status"] != "ok")]
    if group.records["prediction"].isna().all():
        return [], 0
    keys = list(dict.fromkeys(zip(records["seed"], records["example_id"], strict=True)))
    step = max(1.0, len(keys) / limit)
    chosen = [keys[int(i * step)] for i in range(min(limit, len(keys)))]
    rows = dict(iter(records.groupby(["seed", "example_id"], dropna=False)))
    return [_shown(group, rows[key]) for key in chosen], len(keys)


def _shown(group: Group, part: pd.DataFrame) -> Shown:
    first = part.iloc[0]
    by_arm = {str(row["arm"]): row for _, row in part.iterrows()}
    answers = []
    for arm in group.arms:
        row = by_arm.get(arm.label)
        if row is None:
            continue
        base = by_arm.get(group.baseline[arm.label] or "")
        answers.append(
            Answer(
                label=arm.label,
                method=arm.method,
                text=clip(row["prediction"]) if row["status"] == "ok" else clip(row["error"]),
                verdict=_verdict(group, row),
                score=float(row["score"]),
                status=str(row["status"]),
                ratio=float(row["ratio"]),
                differs=base is not None and row["prediction"] != base["prediction"],
            )
        )
    fields = {name: as_text(first[name]) for name in group.meta.breakdown if name in part}
    expected = first["answers"]
    return Shown(
        example_id=str(first["example_id"]),
        seed=as_text(first["seed"]),
        dataset=str(first["dataset"]),
        fields=fields,
        prompt_tail=clip(first["prompt_tail"], from_end=True),
        expected=" | ".join(map(str, expected)) if isinstance(expected, list) else "",
        answers=tuple(answers),
    )


def clip(text: Any, *, from_end: bool = False) -> str:
    """`text` cut to what is shown: its beginning and an ellipsis, or its end."""
    if not isinstance(text, str):
        return ""
    if len(text) <= LONGEST:
        return text
    return text[-LONGEST:] if from_end else f"{text[:LONGEST]}…"


def _verdict(group: Group, row: pd.Series) -> str:
    if row["status"] != "ok":
        return "failed"
    if group.meta.score_unit != "fraction" or pd.isna(row["score"]):
        return "none"
    return "right" if row["score"] >= 1 else "wrong" if row["score"] <= 0 else "part"
