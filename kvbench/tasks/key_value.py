"""Key-value retrieval: the value of a key in a JSON object of random UUIDs.

Protocol: N. F. Liu et al., "Lost in the Middle: How Language Models Use Long Contexts", arXiv
2307.03172, github.com/nelson-liu/lost-in-the-middle. Every key and value is a random UUID; the score is
whether the value stands in the answer. Of one object several keys may be asked, each by a question of
its own: the object is then read, and under ``compress_after=context`` compressed, once for all.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from kvbench.errors.options import Count, Distinct, Text
from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.needle import containment
from kvbench.tasks.options import Many, NewTokens

PAIRS, KEY = "{pairs}", "{key}"


@dataclass(frozen=True, kw_only=True)
class KeyValue(Task):
    """JSON objects of UUIDs, and the values of some of their keys.

    Attributes:
        num_pairs: keys of an object; 75, 140 and 300 in the paper.
        num_examples: objects of each size.
        queries: keys of each object that are asked for, spread evenly from its beginning to its end.
        template: the prompt, with ``{pairs}`` and after it ``{key}``.
        seed: of the UUIDs.
        max_new_tokens: generation limit (100 in the paper).
    """

    name: ClassVar[str] = "key_value"
    breakdown: ClassVar[tuple[str, ...]] = ("num_pairs",)
    heatmap: ClassVar[tuple[str, str] | None] = ("num_pairs", "depth")

    template: Text
    num_pairs: Distinct[Annotated[int, Ge(1), Le(100_000)]] = (20, 50, 100)
    num_examples: Many = 20
    queries: Count = 1
    seed: int = 0
    max_new_tokens: NewTokens = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        before, _, after = self.template.partition(PAIRS)
        if PAIRS in after or after.count(KEY) != 1 or KEY in before:
            raise TaskError(
                f"task.template is {self.template!r}; allowed: {PAIRS} and, after it, {KEY}, each once"
            )
        if self.queries > min(self.num_pairs):
            raise TaskError(
                f"task.queries is {self.queries}; allowed: at most {min(self.num_pairs)}, the fewest "
                "num_pairs"
            )

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every size in turn, with all questions of an object together."""
        del encoder
        return [
            example
            for number in range(self.num_examples)
            for pairs in self.num_pairs
            for example in self._object(pairs, number)
        ]

    def _object(self, size: int, number: int) -> list[Example]:
        rng = random.Random(f"kvbench key_value {self.seed} {size} {number}")
        pairs = [(_uuid(rng), _uuid(rng)) for _ in range(size)]
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
        before, _, after = self.template.partition(PAIRS)
        question = after.lstrip()
        white = after[: len(after) - len(question)]
        turn = (
            rng.random()
        )  # one key from each of as many parts of the object, at the same place of each
        places = [int((query + turn) * size / self.queries) for query in range(self.queries)]
        return [
            Example(
                id=f"pairs{size}-{number:04d}" + (f"-q{query}" if self.queries > 1 else ""),
                context=f"{before}{{{lines}}}{white}",
                question=question.replace(KEY, pairs[place][0]),
                answers=(pairs[place][1],),
                max_new_tokens=self.max_new_tokens,
                dataset=f"{size} pairs",
                context_id=f"pairs{size}-{number:04d}" if self.queries > 1 else None,
                settled=partial(_stands, pairs[place][1]),
                fields={"num_pairs": size, "depth": int(10 * round(10 * place / max(1, size - 1)))},
            )
            for query, place in enumerate(places)
        ]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """1 if the value stands in the prediction, whatever its case."""
        return {"score": containment(prediction, example.answers[0])}


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _stands(value: str, text: str) -> bool:
    return containment(text, value) == 1.0
