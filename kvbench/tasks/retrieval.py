"""Keys hidden in one context, of which several may be asked, each by a question of its own: the context
is then read, and under ``compress_after=context`` compressed, once for all of them.

* Key-value retrieval: N. F. Liu et al., "Lost in the Middle: How Language Models Use Long Contexts",
  arXiv 2307.03172, github.com/nelson-liu/lost-in-the-middle. Every key and value of a JSON object is a
  random UUID; the score is whether the value stands in the answer.
* Passkey and number string: A. Mohtashami, M. Jaggi, "Landmark Attention", arXiv 2305.16300, as
  InfiniteBench has them (arXiv 2402.13718, github.com/OpenBMB/InfiniteBench,
  data/construct_synthetic_dataset.py): lines of noise, among them a sentence with a key of digits; the
  score is whether the first number of the answer is the key. Several keys are told apart by a name.
"""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

from annotated_types import Ge, Le

from kvbench.errors.options import Count, Distinct, Text
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, NewTokens, Task, TaskError, Tokens
from kvbench.tasks.encoding import (
    check_template,
    encode_context,
    encode_question,
    largest_fitting,
    split_template,
)
from kvbench.tasks.haystack import QUALITIES, THINGS
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.metrics_text import Key, containment, contains_any

PAIRS, KEY, CONTEXT, QUESTION = "{pairs}", "{key}", "{context}", "{question}"


@dataclass(frozen=True, kw_only=True)
class HiddenKeys(Task):
    """Contexts of several sizes, and questions about keys that are hidden in them.

    Attributes:
        template: the prompt: the context's field and, after it, the question's.
        num_examples: contexts of each size.
        queries: keys that are asked of each, one in each of as many parts, at the same place of each.
        seed: of keys, values and places.
        max_new_tokens: generation limit.
    """

    template: Text
    num_examples: Many = 20
    queries: Count = 1
    seed: int = 0
    max_new_tokens: NewTokens = 100

    def _example(self, label: str, query: int, **given: object) -> Example:
        """The example of one question of the context called `label`."""
        several = self.queries > 1
        return Example(
            id=label + (f"-q{query}" if several else ""),
            context_id=label if several else None,
            max_new_tokens=self.max_new_tokens,
            **given,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, kw_only=True)
class KeyValue(HiddenKeys):
    """JSON objects of UUIDs, and the values of some of their keys; ``{pairs}``, ``{key}``.

    Attributes:
        num_pairs: keys of an object; 75, 140 and 300 in the paper.
        max_new_tokens: generation limit (100 in the paper).
    """

    name: ClassVar[str] = "key_value"
    breakdown: ClassVar[tuple[str, ...]] = ("num_pairs",)
    heatmap: ClassVar[tuple[str, str] | None] = ("num_pairs", "depth")

    num_pairs: Distinct[Annotated[int, Ge(1), Le(100_000)]] = (20, 50, 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template, PAIRS, KEY)
        if self.queries > min(self.num_pairs):
            raise TaskError(
                f"task.queries is {self.queries}; allowed: at most {min(self.num_pairs)}, the fewest "
                "num_pairs"
            )

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every size in turn, with all questions of an object together."""
        del encoder
        numbers = range(self.num_examples)
        return [e for number in numbers for n in self.num_pairs for e in self._object(n, number)]

    def _object(self, size: int, number: int) -> list[Example]:
        rng = random.Random(f"kvbench key_value {self.seed} {size} {number}")
        pairs = [(_uuid(rng), _uuid(rng)) for _ in range(size)]
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
        before, white, question = split_template(self.template, PAIRS)
        turn = rng.random()
        places = [int((query + turn) * size / self.queries) for query in range(self.queries)]
        return [
            self._example(
                f"pairs{size}-{number:04d}",
                query,
                context=f"{before}{{{lines}}}{white}",
                question=question.replace(KEY, pairs[place][0]),
                answers=(pairs[place][1],),
                dataset=f"{size} pairs",
                settled=partial(contains_any, (pairs[place][1],)),
                fields={"num_pairs": size, "depth": int(10 * round(10 * place / max(1, size - 1)))},
            )
            for query, place in enumerate(places)
        ]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """1 if the value stands in the prediction, whatever its case."""
        return {"score": containment(prediction, example.answers[0])}


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


@dataclass(frozen=True, kw_only=True)
class Passkey(HiddenKeys):
    """Keys of digits at every depth of texts of every length; ``{context}``, ``{question}``.

    Attributes:
        needle, question, answer_prefix: with ``{name}``, which is empty where there is one key only and
            else tells keys apart (" of the old lantern"); the needle with ``{key}``. The prefix follows
            the prompt.
        noise: a line of the text.
        lengths: tokens that a prompt has at most, everything that the model sees counted.
        digits: of a key. runs: half of the digits repeat the one before them, as in the original
            number string.
    """

    name: ClassVar[str] = "passkey"
    breakdown: ClassVar[tuple[str, ...]] = ("length",)
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "depth")

    needle: Text
    question: Text
    answer_prefix: str
    noise: Text
    lengths: Distinct[Tokens] = (1024, 4096)
    queries: Annotated[int, Ge(1), Le(len(QUALITIES) * len(THINGS))] = 1
    digits: Annotated[int, Ge(1), Le(100)] = 5
    runs: bool = False
    max_new_tokens: NewTokens = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template, CONTEXT, QUESTION)
        if KEY not in self.needle:
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
        examples: list[Example] = []
        for number in range(self.num_examples):
            for length in self.lengths:
                made = partial(self._text, encoder, length, number)
                sizes[length] = self._largest(made, length, sizes[length])
                examples += made(sizes[length])
        return examples

    def _largest(self, made: Callable[[int], list[Example]], length: int, guess: int) -> int:
        """Lines of the longest text that fits."""

        def tokens(size: int) -> int:
            asked = made(size)
            context = asked[0].context_ids or ()
            return len(context) + max(len(example.question_ids or ()) for example in asked)

        size = largest_fitting(
            tokens, length, least=self.queries, most=max(length, self.queries), guess=guess
        )
        if size is None:
            raise TaskError(
                f"task.lengths has {length}, and the shortest prompt takes {tokens(self.queries)} "
                "tokens of this tokenizer; allowed: longer"
            )
        return size

    def _text(self, encoder: PromptEncoder, length: int, number: int, size: int) -> list[Example]:
        """The questions about a text of `size` lines of noise."""
        rng = random.Random(f"kvbench passkey {self.seed} {length} {number}")
        names = [f" of the {how} {what}" for how in QUALITIES for what in THINGS]
        names = rng.sample(names, self.queries) if self.queries > 1 else [""]
        keys = [self._key(rng) for _ in names]
        places = [int((part + rng.random()) * size / self.queries) for part in range(self.queries)]
        lines = [self.noise] * size
        for place, key, name in reversed(list(zip(places, keys, names, strict=True))):
            lines.insert(place, self.needle.replace(KEY, key).replace("{name}", name))
        before, white, question = split_template(self.template, CONTEXT)
        context = before + "\n".join(lines) + white
        question = question.replace(QUESTION, self.question)
        ids = encode_context(encoder, context)
        examples = []
        for query, (name, key, place) in enumerate(zip(names, keys, places, strict=True)):
            asked, prefix = (
                part.replace("{name}", name) for part in (question, self.answer_prefix)
            )
            examples.append(
                self._example(
                    f"len{length}-{number:04d}",
                    query,
                    context=context,
                    question=asked + prefix,
                    answers=(key,),
                    dataset=f"{length} tokens",
                    context_ids=ids,
                    question_ids=encode_question(encoder, asked, prefix),
                    complete=True,
                    settled=_number_is_over,
                    fields={"length": length, "depth": int(10 * round(10 * place / size))},
                )
            )
        return examples

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
