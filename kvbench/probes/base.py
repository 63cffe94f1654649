"""The base class of probes, which holds what reports read of a probe, and the prompts of a task as
tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvbench.errors.options import check_options
from kvbench.records.figures import Figure, TaskKind, as_json
from kvbench.run.encoding import EncodedExample, encode_example
from kvbench.run.plan import Plan
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError


def encoded_prompts(task: Task, session: Session, most: int | None = None) -> list[EncodedExample]:
    examples = task.examples(session.encoder)[:most]
    return [encode_example(example, session.encoder) for example in examples]


def places(tokens: int, most: int) -> dict[str, slice]:
    """Groups of the places 0 .. tokens - 1 of a text, as slices by name.

    Names count from 1: token 1, token 2, tokens 3-4, tokens 5-8 ...; from the second group on, each is
    twice as long as the one before. The names are the same for all texts of at most `most` tokens.
    """
    groups: dict[str, slice] = {}
    begin = 0
    end = 1
    while begin < tokens:
        last = min(most, end)
        name = f"token {last}" if last == begin + 1 else f"tokens {begin + 1}\N{EN DASH}{last}"
        groups[name] = slice(begin, min(end, tokens))
        begin = end
        end = 2 * end
    return groups


@dataclass(frozen=True, kw_only=True)
class Probe(Plan):
    """A plan that measures tensors or times: a frozen dataclass whose fields are its options.

    The class attributes describe its scores; `meta` puts them into the run's manifest, where reports
    read them.
    """

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised whenever scores change; part of the config hash."""
    score_unit: ClassVar[str]
    lower_is_better: ClassVar[bool] = False
    breakdown: ClassVar[tuple[str, ...]] = ()
    """Record fields that tables split by."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Record fields that a table shows beside the score."""
    figures: ClassVar[tuple[Figure, ...]] = ()
    """Figures that the report draws."""
    kind: ClassVar[TaskKind] = "scores"
    """Decides which tables a report has of the probe."""
    unit: ClassVar[str] = "example_id"
    """Record field that names the independent unit of the data, which intervals resample."""

    def __post_init__(self) -> None:
        check_options(self, "task.", TaskError)

    def meta(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "data": None,
            "subject": None,
            "score_unit": self.score_unit,
            "lower_is_better": self.lower_is_better,
            "breakdown": list(self.breakdown),
            "measures": list(self.measures),
            "figures": as_json(self.figures),
            "kind": self.kind,
            "unit": self.unit,
        }
