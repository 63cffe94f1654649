"""What the methods answered, side by side: a sample of examples for the page and for W&B."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, TypeVar

import pandas as pd

from kvbench.report.experiment import Group
from kvbench.report.tables.strata import as_text

T = TypeVar("T")
_WORDS = re.compile(r"\w+|\s+|[^\w\s]")

LIMIT = 60
"""Examples that the page shows of one model and task."""
LONGEST = 400
"""Characters of a prediction or a prompt tail that are shown."""


@dataclass(frozen=True)
class Answer:
    """One variant's answer to one example.

    Attributes:
        verdict: "right", "wrong", "part" (a score in between), "failed", or "none" (no verdict:
            the score is not a fraction).
        differs: the text is not the baseline's.
        parts: the text in pieces, each with whether it is not in the baseline's text.
    """

    label: str
    method: str
    text: str
    verdict: str
    score: float
    status: str
    ratio: float
    differs: bool
    parts: tuple[tuple[str, bool], ...]


@dataclass(frozen=True)
class Shown:
    """One example with every variant's answer.

    Attributes:
        evidence: the part of the prompt that holds the answer, where the task knows it: in pieces, each
            with whether it is the answer itself.
    """

    example_id: str
    seed: str
    dataset: str
    fields: Mapping[str, str]
    prompt_tail: str
    expected: str
    answers: tuple[Answer, ...]
    evidence: tuple[tuple[str, bool], ...] = ()

    @property
    def filter_fields(self) -> str:
        """What the page filters by, as JSON."""
        return json.dumps({"dataset": self.dataset, **self.fields})

    @property
    def disagree(self) -> bool:
        """Whether the variants' scores differ."""
        return len({answer.verdict for answer in self.answers}) > 1


def sample_of(
    group: Group, limit: int = LIMIT, known: dict[object, Shown] | None = None
) -> tuple[list[Shown], int]:
    """Examples spread evenly over the order of the records, and how many there are in all.

    Each dataset and length has its share: those with few examples show them all, the others as many
    as the limit leaves.

    Args:
        known: what other samples of this group hold, to which this one's is added.
    """
    known = {} if known is None else known
    if group.records["prediction"].isna().all():
        return [], 0
    records = group.records[group.records["prediction"].notna() | (group.records["status"] != "ok")]
    buckets = records["prompt_tokens"].map(bucket_of)
    index = pd.MultiIndex.from_frame(records[["seed", "example_id"]])
    keys = list(index)
    strata: dict[tuple[str, str], dict[tuple[object, object], None]] = {}
    for dataset, bucket, key in zip(records["dataset"].astype(str), buckets, keys, strict=True):
        strata.setdefault((dataset, bucket), {})[key] = None
    chosen = _chosen([list(stratum) for stratum in strata.values()], limit)
    some = records[index.isin(chosen - set(known))]
    rows = dict(iter(some.groupby(["seed", "example_id"], dropna=False)))
    order = [key for key in dict.fromkeys(keys) if key in chosen]
    known.update((key, _shown(group, part)) for key, part in rows.items())
    return [known[key] for key in order], index.nunique()


def _chosen(strata: Sequence[Sequence[T]], limit: int) -> set[T]:
    """At most `limit` (but one of each stratum) in equal shares, evenly spread within each."""
    chosen: set[T] = set()
    waiting = sorted(strata, key=len)
    for i, stratum in enumerate(waiting):
        share = max(1, (limit - len(chosen)) // (len(waiting) - i))
        step = max(1.0, len(stratum) / share)
        chosen |= {stratum[int(k * step)] for k in range(min(share, len(stratum)))}
    return chosen


def bucket_of(tokens: float) -> str:
    """The length bucket of a prompt, in thousands of tokens; empty where it is not known."""
    if not tokens > 0:
        return ""
    low = 0
    for high in (1, 2, 4, 8, 16, 32, 64, 128):
        if tokens < high * 1000:
            return f"{low}–{high}k" if low else f"below {high}k"
        low = high
    return f"{low}k and more"


def _shown(group: Group, part: pd.DataFrame) -> Shown:
    first = part.iloc[0]
    by_variant = {str(row["variant"]): row for _, row in part.iterrows()}
    answers = []
    for variant in group.variants:
        row = by_variant.get(variant.label)
        if row is None:
            continue
        base = by_variant.get(group.baseline[variant.label] or "")
        good = row["status"] == "ok"
        text = clip(row["prediction"] if good else row["error"])
        reference = (
            clip(base["prediction"]) if base is not None and base["status"] == "ok" else None
        )
        answers.append(
            Answer(
                label=variant.label,
                method=variant.method,
                text=text,
                verdict=_verdict(group, row),
                score=float(row["score"]),
                status=str(row["status"]),
                ratio=float(row["ratio"]),
                differs=base is not None and row["prediction"] != base["prediction"],
                parts=((text, False),)
                if reference is None or not good
                else marked(text, reference),
            )
        )
    fields = {name: as_text(first[name]) for name in group.meta.breakdown if name in part}
    bucket = bucket_of(first["prompt_tokens"])
    if bucket and not any("length" in name or "bucket" in name for name in fields):
        fields["prompt_tokens"] = bucket
    expected = first["answers"]
    return Shown(
        example_id=str(first["example_id"]),
        seed=as_text(first["seed"]),
        dataset=str(first["dataset"]),
        fields=fields,
        prompt_tail=clip(first["prompt_tail"], from_end=True),
        expected=" | ".join(map(str, expected)) if isinstance(expected, list) else "",
        answers=tuple(answers),
        evidence=_evidence(first.get("evidence"), expected),
    )


def _evidence(text: Any, answers: Any) -> tuple[tuple[str, bool], ...]:
    """`text` in pieces, each with whether it is one of `answers`."""
    shown = clip(text)
    found = [str(answer) for answer in answers if answer] if isinstance(answers, list) else []
    if not shown or not found:
        return ((shown, False),) if shown else ()
    pieces = re.split(f"({'|'.join(map(re.escape, found))})", shown, flags=re.IGNORECASE)
    return tuple((piece, place % 2 == 1) for place, piece in enumerate(pieces) if piece)


def marked(text: str, reference: str) -> tuple[tuple[str, bool], ...]:
    """`text` in pieces, each with whether it is not in `reference`, by words and in their order."""
    words, theirs = (_WORDS.findall(one) for one in (text, reference))
    pieces = []
    at = 0
    for start, _, size in SequenceMatcher(
        None, words, theirs, autojunk=False
    ).get_matching_blocks():
        pieces += [("".join(words[at:start]), True), ("".join(words[start : start + size]), False)]
        at = start + size
    return tuple((piece, new) for piece, new in pieces if piece)


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
