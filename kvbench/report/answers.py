"""The methods' answers side by side: a sample of examples for the page and for W&B."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.report.experiment import Group, as_text
from kvbench.report.style import style_of

LIMIT = 60
"""Examples that the page shows."""
LONGEST = 400
"""Characters of a prediction or a prompt tail that are shown."""


@dataclass(frozen=True)
class Answer:
    """One variant's answer to one example.

    Attributes:
        verdict: "right", "wrong", "part" (a score in between), "failed", or "none" (no verdict:
            the score is not a fraction).
        differs: the text is not the baseline's.
    """

    label: str
    color: str
    text: str
    verdict: str
    score: float
    status: str
    differs: bool


@dataclass(frozen=True)
class Shown:
    """One example with every variant's answer; `fields` are those that the page filters by, `evidence`
    the part of the prompt that holds the answer, where the task knows it."""

    example_id: str
    seed: str
    fields: Mapping[str, str]
    prompt_tail: str
    evidence: str
    expected: str
    answers: tuple[Answer, ...]

    @property
    def disagree(self) -> bool:
        """Whether the variants' scores differ."""
        return len({answer.verdict for answer in self.answers}) > 1


def sample_of(group: Group, limit: int = LIMIT) -> tuple[list[Shown], int]:
    """Examples spread evenly over the order of the records, in equal shares of datasets (one of each at
    least), and how many there are in all."""
    records = group.records[group.records["prediction"].notna() | (group.records["status"] != "ok")]
    if group.records["prediction"].isna().all():
        return [], 0
    first = records.drop_duplicates(["seed", "example_id"])
    strata = sorted((part.index for _, part in first.groupby("dataset")), key=len)
    chosen: list[Any] = []
    for i, stratum in enumerate(strata):
        share = max(1, (limit - len(chosen)) // (len(strata) - i))
        step = max(1.0, len(stratum) / share)
        chosen += [stratum[int(k * step)] for k in range(min(share, len(stratum)))]
    keys = first.loc[sorted(chosen), ["seed", "example_id"]]
    some = records.merge(keys, on=["seed", "example_id"])
    parts = some.groupby(["seed", "example_id"], sort=False, dropna=False)
    return [_shown(group, part) for _, part in parts], len(first)


def _shown(group: Group, part: pd.DataFrame) -> Shown:
    first = part.iloc[0]
    by_variant = {str(row["variant"]): row for _, row in part.iterrows()}
    answers = []
    for variant in (v for v in group.variants if v.label in by_variant):
        row, base = by_variant[variant.label], by_variant.get(group.baseline[variant.label] or "")
        score, good = float(row["score"]), row["status"] == "ok"
        text = clip(row["prediction"] if good else row["error"])
        verdict = "none" if good else "failed"
        if good and group.percent and score == score:
            verdict = "right" if score >= 1 else "wrong" if score <= 0 else "part"
        differs = base is not None and row["prediction"] != base["prediction"]
        look = variant.label, style_of(variant.method).color
        answers.append(Answer(*look, text, verdict, score, str(row["status"]), differs))
    fields = {"dataset": str(first["dataset"])}
    fields |= {name: as_text(first[name]) for name in group.meta.breakdown if name in part}
    expected = first["answers"] if isinstance(first["answers"], list) else []
    return Shown(
        example_id=str(first["example_id"]),
        seed=as_text(first["seed"]),
        fields=fields,
        prompt_tail=clip(first["prompt_tail"], from_end=True),
        evidence=clip(first.get("evidence")),
        expected=" | ".join(map(str, expected)),
        answers=tuple(answers),
    )


def clip(text: Any, *, from_end: bool = False) -> str:
    """`text` cut to what is shown: its beginning and an ellipsis, or its end."""
    if not isinstance(text, str):
        return ""
    if len(text) <= LONGEST:
        return text
    return text[-LONGEST:] if from_end else f"{text[:LONGEST]}…"
