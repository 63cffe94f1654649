"""Keys that are hidden in a context, and one or more questions about them. Where there are several,
the context is read, and under ``compress_after=context`` compressed, once for all of them.

* Key-value retrieval: N. F. Liu et al., "Lost in the Middle: How Language Models Use Long Contexts",
  arXiv 2307.03172, github.com/nelson-liu/lost-in-the-middle. Every key and value of a JSON object is a
  random UUID; the score is whether the answer contains the value.
* Passkey and number string: A. Mohtashami, M. Jaggi, "Landmark Attention", arXiv 2305.16300, as
  InfiniteBench has them (arXiv 2402.13718, github.com/OpenBMB/InfiniteBench,
  data/construct_synthetic_dataset.py): lines of noise, among them a sentence with a key of digits; the
  score is whether the first number of the answer is the key. Several keys have a name each.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from annotated_types import Ge, Le

from kvbench.errors.options import Count, Distinct, Text
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, NewTokens, Task, TaskError, Tokens, depth_in_tens
from kvbench.tasks.encoding import (
    check_template,
    encode_shared,
    largest_fitting,
    split_template,
)
from kvbench.tasks.haystack import QUALITIES, THINGS
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.metrics_text import Key, occurs
from kvbench.tasks.words import drawn_uuid

PAIRS, KEY, NAME, CONTEXT, QUESTION = "{pairs}", "{key}", "{name}", "{context}", "{question}"
"""The fields of the templates."""


@dataclass(frozen=True, kw_only=True)
class HiddenKeys(Task):
    """Contexts of several sizes, and questions about keys that are hidden in them. A context is divided
    into as many parts as there are questions about it (`queries`), and one key of each part is asked
    for. conf/task tells the options."""

    template: Text
    num_examples: Many = 20
    queries: Count = 1
    seed: int = 0
    max_new_tokens: NewTokens = 100

    def _example(self, label: str, query: int, **example_fields: Any) -> Example:
        """The example of question `query` about the context called `label`."""
        several = self.queries > 1
        return Example(
            id=f"{label}-q{query}" if several else label,
            context_id=label if several else None,
            max_new_tokens=self.max_new_tokens,
            **example_fields,
        )


@dataclass(frozen=True, kw_only=True)
class KeyValue(HiddenKeys):
    """JSON objects of UUIDs, and questions about the values of some of their keys. The fields of the
    template are ``{pairs}`` and ``{key}``."""

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
        del encoder
        examples: list[Example] = []
        for number in range(self.num_examples):
            for size in self.num_pairs:
                examples += self._object_examples(size, number)
        return examples

    def _object_examples(self, size: int, number: int) -> list[Example]:
        rng = random.Random(f"kvbench key_value {self.seed} {size} {number}")
        pairs = [(drawn_uuid(rng), drawn_uuid(rng)) for _ in range(size)]
        lines = ",\n ".join(f'"{key}": "{value}"' for key, value in pairs)
        before, white, question = split_template(self.template, PAIRS)
        place_in_part = rng.random()
        examples = []
        for query in range(self.queries):
            place = int((query + place_in_part) * size / self.queries)
            key, value = pairs[place]
            examples.append(
                self._example(
                    f"pairs{size}-{number:04d}",
                    query,
                    context=f"{before}{{{lines}}}{white}",
                    question=question.replace(KEY, key),
                    answers=(value,),
                    dataset=f"{size} pairs",
                    is_final=self.if_scored_by(KeyValue, partial(occurs, answer=value)),
                    fields={"num_pairs": size, "depth": depth_in_tens(place, size - 1)},
                )
            )
        return examples

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        return {"score": float(occurs(prediction, example.answers[0]))}


@dataclass(frozen=True, kw_only=True)
class Passkey(HiddenKeys):
    """Keys of digits in texts of every length. The fields of the template are ``{context}`` and
    ``{question}``; the line that holds a key (`needle`) has ``{key}``. ``{name}`` stands there and in
    question and answer_prefix: empty where there is one key only, else e.g. " of the old lantern". With
    `runs` half of the digits repeat the one before them, as in the original number string."""

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
            text = getattr(self, option)
            if self.queries > 1 and NAME not in text:
                raise TaskError(
                    f"task.{option} is {text!r} and queries {self.queries}; allowed: "
                    "text with {name}, or queries=1"
                )

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        lines_of = dict.fromkeys(self.lengths, 1)
        examples: list[Example] = []
        for number in range(self.num_examples):
            for length in self.lengths:
                examples_of = partial(self._text_examples, encoder, length, number)
                lines_of[length] = self._most_lines(examples_of, length, guess=lines_of[length])
                examples += examples_of(lines_of[length])
        return examples

    def _most_lines(
        self, examples_of: Callable[[int], list[Example]], length: int, guess: int
    ) -> int:
        """The lines of noise of the longest text whose prompts have at most `length` tokens; `guess` is
        tried first."""

        def tokens(lines: int) -> int:
            examples = examples_of(lines)
            longest_question = max(len(example.question_ids or ()) for example in examples)
            return len(examples[0].context_ids or ()) + longest_question

        lines = largest_fitting(
            tokens, length, least=self.queries, most=max(length, self.queries), guess=guess
        )
        if lines is None:
            raise TaskError(
                f"task.lengths has {length}, and the shortest prompt takes {tokens(self.queries)} "
                "tokens of this tokenizer; allowed: longer"
            )
        return lines

    def _text_examples(
        self, encoder: PromptEncoder, length: int, number: int, num_lines: int
    ) -> list[Example]:
        rng = random.Random(f"kvbench passkey {self.seed} {length} {number}")
        names = [""]
        if self.queries > 1:
            all_names = [f" of the {quality} {thing}" for quality in QUALITIES for thing in THINGS]
            names = rng.sample(all_names, self.queries)
        keys = [self._key(rng) for _ in names]
        places = [
            int((part + rng.random()) * num_lines / self.queries) for part in range(self.queries)
        ]
        lines = [self.noise] * num_lines
        for name, key, place in reversed(list(zip(names, keys, places, strict=True))):
            lines.insert(place, self.needle.replace(KEY, key).replace(NAME, name))
        before, white, question_template = split_template(self.template, CONTEXT)
        context = before + "\n".join(lines) + white
        template = question_template.replace(QUESTION, self.question)
        questions = [
            (template.replace(NAME, name), self.answer_prefix.replace(NAME, name)) for name in names
        ]
        context_ids, question_ids = encode_shared(encoder, context, questions)
        examples = []
        for query, (key, place) in enumerate(zip(keys, places, strict=True)):
            examples.append(
                self._example(
                    f"len{length}-{number:04d}",
                    query,
                    context=context,
                    question="".join(questions[query]),
                    answers=(key,),
                    dataset=f"{length} tokens",
                    context_ids=context_ids,
                    question_ids=question_ids[query],
                    is_final=self.if_scored_by(Passkey, _number_is_over),
                    fields={"length": length, "depth": depth_in_tens(place, num_lines)},
                )
            )
        return examples

    def _key(self, rng: random.Random) -> str:
        num_repeated = self.digits // 2 if self.runs else 0
        digits = [str(rng.randint(0, 9)) for _ in range(self.digits - num_repeated)]
        for _ in range(num_repeated):
            place = rng.randrange(len(digits))
            digits.insert(place, digits[place])
        return "".join(digits)

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        return METRICS["first_integer"](prediction, Key(example.answers))


def _number_is_over(text: str) -> bool:
    """Whether something other than a digit follows the first number of a text."""
    return re.search(r"[0-9][^0-9]", text) is not None
