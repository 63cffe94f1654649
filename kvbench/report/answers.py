"""The methods' answers side by side: a sample of examples for the page."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.labels import as_text
from kvbench.report.ratios import ratio_text
from kvbench.report.style import style_of

LIMIT = 60
"""Examples that the page shows."""
LONGEST = 400
"""Characters of a prediction or a prompt tail that are shown."""


@dataclass(frozen=True)
class Answer:
    """One variant's answer to one example.

    Attributes:
        ratio: the ratio measured on this example, as text, where the label names a rate; else empty.
        text: the prediction, or the error.
        verdict: "right", "wrong", "part" (a score in between), "failed", or "none" (the score is no
            fraction).
        differs: whether the text is another than the baseline's.
    """

    label: str
    ratio: str
    color: str
    text: str
    verdict: str
    score: float
    status: str
    differs: bool


@dataclass(frozen=True)
class ExampleAnswers:
    """One example with every variant's answer.

    Attributes:
        fields: record fields that the page filters examples by.
        evidence: the part of the prompt that holds the answer; empty where the task does not tell it.
    """

    example_id: str
    seed: str
    fields: Mapping[str, str]
    prompt_tail: str
    evidence: str
    expected: str
    answers: tuple[Answer, ...]

    @property
    def disagree(self) -> bool:
        return len({answer.verdict for answer in self.answers}) > 1


def sample_of(group: Group, limit: int = LIMIT) -> tuple[list[ExampleAnswers], int]:
    """About `limit` examples at most, spread evenly over the records, the same number from each dataset
    and at least one, and how many there are in all; none where a task has no answers."""
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
    return [_answers_to(group, part) for _, part in parts], len(first)


def _answers_to(group: Group, part: pd.DataFrame) -> ExampleAnswers:
    first = part.iloc[0]
    by_variant = {str(row["variant"]): row for _, row in part.iterrows()}
    answers = []
    for variant in group.variants:
        if variant.label not in by_variant:
            continue
        row = by_variant[variant.label]
        baseline = by_variant.get(group.baseline[variant.label] or "")
        good = row["status"] == "ok"
        score = float(row["score"])
        verdict = "none" if good else "failed"
        if good and group.percent and not math.isnan(score):
            verdict = "right" if score >= 1 else "wrong" if score <= 0 else "part"
        names_rate = variant.label != variant.without_rate
        answers.append(
            Answer(
                label=variant.label,
                ratio=ratio_text([float(row["ratio"])]) if names_rate else "",
                color=style_of(variant.method).color,
                text=clip(row["prediction"] if good else row["error"]),
                verdict=verdict,
                score=score,
                status=str(row["status"]),
                differs=baseline is not None and row["prediction"] != baseline["prediction"],
            )
        )
    fields = {"dataset": str(first["dataset"])}
    fields |= {name: as_text(first[name]) for name in group.meta.breakdown if name in part}
    expected = first["answers"] if isinstance(first["answers"], list) else []
    return ExampleAnswers(
        example_id=str(first["example_id"]),
        seed=as_text(first["seed"]),
        fields=fields,
        prompt_tail=clip(first["prompt_tail"], from_end=True),
        evidence=clip(first.get("evidence")),
        expected=" | ".join(map(str, expected)),
        answers=tuple(answers),
    )


def clip(text: Any, *, from_end: bool = False) -> str:
    """A text cut to `LONGEST` characters: its beginning with an ellipsis, or its end; empty for anything
    that is no text."""
    if not isinstance(text, str):
        return ""
    if len(text) <= LONGEST:
        return text
    return text[-LONGEST:] if from_end else f"{text[:LONGEST]}…"
