"""Passkey and number string: digits hidden in a text that repeats itself.

Protocol: A. Mohtashami, M. Jaggi, "Landmark Attention", arXiv 2305.16300, as InfiniteBench (arXiv
2402.13718, data/construct_synthetic_dataset.py of github.com/OpenBMB/InfiniteBench) has it: lines of
noise, among them a sentence with the key; the score is whether the first number of the answer is the
key. Several keys, told apart by a name, may be hidden in one text, and each is asked for by a question
of its own: the text is then read, and under ``compress_after=context`` compressed, once for all.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from kvbench.errors.options import Distinct, Text
from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.encoding import encode_context, encode_question, largest_fitting
from kvbench.tasks.haystack import QUALITIES, THINGS
from kvbench.tasks.metrics import METRICS, Key
from kvbench.tasks.options import Many, NewTokens, Tokens

CONTEXT = "{context}"


@dataclass(frozen=True, kw_only=True)
class Passkey(Task):
    """Keys of digits at every depth of texts of every length.

    Attributes:
        needle, question, answer_prefix: with ``{name}``, which is empty where there is one key only and
            else tells keys apart (" of the old lantern"); the needle with ``{key}``.
        noise: a line of the text.
        template: the prompt, with ``{context}`` and after it ``{question}``; the prefix follows.
        lengths: tokens that a prompt has at most, everything that the model sees counted.
        num_examples: texts of each length.
        queries: keys in each text, each asked for; one in each of as many parts of the text.
        digits: of a key. runs: half of the digits repeat the one before them, as in the original
            number string.
        seed: of keys and places.
        max_new_tokens: generation limit.
    """

    name: ClassVar[str] = "passkey"
    breakdown: ClassVar[tuple[str, ...]] = ("length",)
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "depth")

    needle: Text
    question: Text
    answer_prefix: str
    noise: Text
    template: Text
    lengths: Distinct[Tokens] = (1024, 4096)
    num_examples: Many = 20
    queries: Annotated[int, Ge(1), Le(len(QUALITIES) * len(THINGS))] = 1
    digits: Annotated[int, Ge(1), Le(100)] = 5
    runs: bool = False
    seed: int = 0
    max_new_tokens: NewTokens = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template.partition(CONTEXT)[2].count("{question}") != 1:
            raise TaskError(
                f"task.template is {self.template!r}; allowed: {CONTEXT} and, after it, "
                "{question}, once"
            )
        if "{key}" not in self.needle:
            raise TaskError(f"task.needle is {self.needle!r}; allowed: text with {{key}}")
        for option in ("needle", "question"):
            if self.queries > 1 and "{name}" not in getattr(self, option):
                raise TaskError(
                    f"task.{option} is {getattr(self, option)!r} and queries {self.queries}; allowed: "
                    "text with {name}, or queries=1"
                )

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every length in turn, with all questions of a text together.

        Raises:
            TaskError: a length that is too short.
        """
        sizes = dict.fromkeys(self.lengths, 1)
        found: list[Example] = []
        for number in range(self.num_examples):
            for length in self.lengths:
                sizes[length], examples = self._sized(encoder, length, number, sizes[length])
                found += examples
        return found

    def _sized(
        self, encoder: PromptEncoder, length: int, number: int, guess: int
    ) -> tuple[int, list[Example]]:
        """Lines and questions of the longest text that fits."""

        def tokens(size: int) -> int:
            made = self._text(encoder, length, number, size)
            (context,) = {one.context_ids for one in made}
            return len(context or ()) + max(len(one.question_ids or ()) for one in made)

        size = largest_fitting(
            tokens, length, least=self.queries, most=max(length, self.queries), guess=guess
        )
        if size is None:
            raise TaskError(
                f"task.lengths has {length}, and the shortest prompt takes {tokens(self.queries)} "
                "tokens of this tokenizer; allowed: longer"
            )
        return size, self._text(encoder, length, number, size)

    def _text(self, encoder: PromptEncoder, length: int, number: int, size: int) -> list[Example]:
        """The questions about a text of `size` lines of noise."""
        rng = random.Random(f"kvbench passkey {self.seed} {length} {number}")
        names = [f" of the {how} {what}" for how in QUALITIES for what in THINGS]
        names = rng.sample(names, self.queries) if self.queries > 1 else [""]
        keys = [self._key(rng) for _ in names]
        places = [int((part + rng.random()) * size / self.queries) for part in range(self.queries)]
        lines = [self.noise] * size
        for place, key, name in reversed(list(zip(places, keys, names, strict=True))):
            lines.insert(place, self.needle.replace("{key}", key).replace("{name}", name))
        before, _, after = self.template.partition(CONTEXT)
        question = after.lstrip()
        context = before + "\n".join(lines) + after[: len(after) - len(question)]
        question = question.replace("{question}", self.question)
        ids = encode_context(encoder, context)
        label = f"len{length}-{number:04d}"
        found = []
        for query, (name, key, place) in enumerate(zip(names, keys, places, strict=True)):
            asked, prefix = (
                part.replace("{name}", name) for part in (question, self.answer_prefix)
            )
            found.append(
                Example(
                    id=label + (f"-q{query}" if self.queries > 1 else ""),
                    context=context,
                    question=asked + prefix,
                    answers=(key,),
                    max_new_tokens=self.max_new_tokens,
                    dataset=f"{length} tokens",
                    context_ids=ids,
                    question_ids=encode_question(encoder, asked, prefix),
                    complete=True,
                    context_id=label if self.queries > 1 else None,
                    settled=_number_is_over,
                    fields={"length": length, "depth": int(10 * round(10 * place / size))},
                )
            )
        return found

    def _key(self, rng: random.Random) -> str:
        repeated = self.digits // 2 if self.runs else 0
        digits = [str(rng.randint(0, 9)) for _ in range(self.digits - repeated)]
        for _ in range(repeated):
            place = rng.randrange(len(digits))
            digits.insert(place, digits[place])
        return "".join(digits)

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """1 if the first number of the prediction is the key."""
        return METRICS["first_integer"](prediction, Key(example.answers))


def _number_is_over(text: str) -> bool:
    return re.search(r"[0-9][^0-9]", text) is not None
