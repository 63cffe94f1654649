"""RULER's five generators: a prompt of a given size (lines, words, documents) from a seeded draw.

Departures from the scripts at c3f5e3b4, none of which changes what is asked:

* Everything is drawn anew for each sample from (seed, task, length, number); theirs repeat the order
  of needles, and where the answers of cwe and fwe stand, in all samples of a job.
* What is drawn for n units is the beginning of what is drawn for n + 1, wherever that is possible.
* Keys are drawn again where they would be ambiguous: two needles of one key, a distractor with the
  key that is asked for.
"""

from __future__ import annotations

import math
import random
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar

from kvbench.tasks.base import TaskError
from kvbench.tasks.haystack import split_sentences
from kvbench.tasks.ruler.templates import Prompt, prompt_of, strings
from kvbench.tasks.ruler.words import Collection, Essays, word_lists

UNLIMITED = 10_000_000
DEPTHS = [round(100 * place / 39) for place in range(40)]
"""Per cent of an essay's sentences: 40 values from 0 to 100."""


@dataclass(frozen=True)
class Draft:
    """A prompt that may be too long.

    Attributes:
        context: all before the question. question: the rest of the user's text. prefix: how the answer
            begins. answers: the references.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The whole prompt of a model without a chat template."""
        return self.context + self.question + self.prefix


def _draft(prompt: Prompt, context: str, answers: tuple[str, ...], **fields: Any) -> Draft:
    """A filled prompt around a context. White space that begins the question belongs to the context,
    so that the boundary is one between words."""
    question = prompt.after.lstrip()
    white = prompt.after[: len(prompt.after) - len(question)]
    return Draft(prompt.before + context + white, question, prompt.prefix, answers, fields)


@dataclass(frozen=True)
class Generator(ABC):
    """Makes the prompts of one task and length."""

    name: ClassVar[str]
    """Name of its templates."""

    @property
    def new_tokens(self) -> int:
        """The limit of an answer."""
        return prompt_of(self.name).new_tokens

    @property
    @abstractmethod
    def least(self) -> int:
        """The smallest size."""

    @property
    def most(self) -> int:
        """The largest size."""
        return UNLIMITED

    @abstractmethod
    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """Sample `number` with `size` units."""


@dataclass(frozen=True)
class Niah(Generator):
    """Needles in a haystack.

    Attributes:
        haystack: noise (one line again and again), essay, or needle (distractors).
        keys, values: words, numbers or uuids.
        inserted: keys that have needles. each: values per key. asked: keys that are asked for.
    """

    haystack: str
    keys: str
    values: str
    inserted: int
    each: int
    asked: int
    essays: Essays
    name: ClassVar[str] = "niah"

    @property
    def least(self) -> int:
        """The needles and one unit more; five lines at least."""
        needles = self.inserted * self.each
        return needles + 1 if self.haystack == "essay" else max(5, needles + 1)

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """See `Generator.draft`; `size` words of essays, or lines."""
        known: set[str] = set()
        pairs = []
        for _ in range(self.inserted):
            key = _unlike(known, lambda: _token(self.keys, rng))
            known.add(key)
            pairs.append((key, [_token(self.values, rng) for _ in range(self.each)]))
        needles = [self._needle(key, value) for key, values in pairs for value in values]
        rng.shuffle(needles)
        asked = rng.sample(pairs, self.asked)
        keys = [key for key, _ in asked]
        query = ", ".join(keys[:-1]) + ", and " + keys[-1] if len(keys) > 1 else keys[0]
        prompt, kind = prompt_of("niah"), self.values
        if self.asked * self.each == 1:
            prompt, kind = prompt.singular(), kind[:-1]
        prompt = prompt.filled(type_needle_v=kind, query=query)
        answers = tuple(value for _, values in asked for value in values)
        if self.haystack == "essay":
            source = {"haystack": "essays" if self.essays.files else "generated"}
            return _draft(prompt, self._in_essay(needles, size, rng), answers, **source)
        if self.haystack == "noise":
            lines = [strings()["noise"]] * size
        else:
            lines = [self._distractor(known, rng) for _ in range(size)]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return _draft(prompt, "\n".join(lines), answers, haystack=self.haystack)

    def _needle(self, key: str, value: str) -> str:
        return strings()["needle"].format(type_needle_v=self.values, key=key, value=value)

    def _distractor(self, known: set[str], rng: random.Random) -> str:
        key = _unlike(known, lambda: _token(self.keys, rng))
        return self._needle(key, _token(self.values, rng))

    def _in_essay(self, needles: list[str], words: int, rng: random.Random) -> str:
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        sentences = [part.strip() for part in split_sentences(self.essays.text(words))]
        parts, last = [], 0
        for needle, depth in zip(needles, depths, strict=True):
            place = int(len(sentences) * depth / 100)
            parts += [" ".join(sentences[last:place]), needle]
            last = place
        return " ".join([*parts, " ".join(sentences[last:])])


def _token(kind: str, rng: random.Random) -> str:
    """A number of seven digits, a version 4 uuid, or an adjective and a noun."""
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    adjectives, nouns, _ = word_lists()
    return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def _unlike(known: set[str], draw: Callable[[], str]) -> str:
    """The first draw that is not known: there are millions of each kind, and few known."""
    while (drawn := draw()) in known:
        pass
    return drawn


@dataclass(frozen=True)
class VariableTracking(Generator):
    """One chain of assignments among noise, behind a solved example.

    Attributes:
        example_lines: noise lines of the solved example.
    """

    example_lines: int
    HOPS: ClassVar[int] = 4
    EXAMPLE_TOKENS: ClassVar[int] = 500

    name: ClassVar[str] = "vt"

    @property
    def least(self) -> int:
        """A line for every statement to stand before."""
        return self.HOPS + 1

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """See `Generator.draft`; `size` noise lines."""
        example = self.solved(self.example_lines, rng)
        prompt, context, names = self._chain(size, 5, rng)
        draft = _draft(prompt, context, names)
        return Draft(f"{example}\n{draft.context}", draft.question, draft.prefix, names)

    @classmethod
    def solved(cls, lines: int, rng: random.Random) -> str:
        """The solved example: names of three letters, the answer behind the prefix."""
        prompt, context, names = cls._chain(lines, 3, rng)
        return _draft(prompt, context, names).text + f" {' '.join(names)}\n"

    @classmethod
    def _chain(
        cls, size: int, letters: int, rng: random.Random
    ) -> tuple[Prompt, str, tuple[str, ...]]:
        known = {"VAR"}
        names = []
        for _ in range(cls.HOPS + 1):
            names.append(
                _unlike(known, lambda: "".join(rng.choices(string.ascii_uppercase, k=letters)))
            )
            known.add(names[-1])
        value = str(rng.randrange(10_000, 99_999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
        lines = [strings()["noise"]] * size
        for place, (at, statement) in enumerate(
            zip(sorted(rng.sample(range(size), len(chain))), chain, strict=True)
        ):
            lines.insert(at + place, statement)
        prompt = prompt_of("vt").filled(query=value, num_v=str(len(names)))
        return prompt, "\n".join(lines), tuple(names)


@dataclass(frozen=True)
class CommonWords(Generator):
    """Ten words that occur more often than the others of a numbered list, behind a solved example.

    More words than the list of wonderwords has are made of two of them; RULER has a second list.

    Attributes:
        long: lengths from 4096 on repeat words more often.
    """

    long: bool
    COMMON: ClassVar[int] = 10

    name: ClassVar[str] = "cwe"

    @property
    def least(self) -> int:
        """The common words and another."""
        return self.COMMON + 1

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """See `Generator.draft`; `size` different words."""
        words = list(word_lists()[2])
        rng.shuffle(words)
        first, *_ = shown = (40, 10, 3) if self.long else (20, 3, 1)
        solved, told = _listed(words[-first:], *shown[1:], rng)
        paired = max(0, size - len(words))
        known = set(words)
        for _ in range(paired):
            words.append(_unlike(known, lambda: "".join(rng.sample(words[:1000], 2))))
            known.add(words[-1])
        listed, common = _listed(words[:size], *((30, 3) if self.long else (6, 1)), rng)
        prompt = prompt_of("cwe")
        numbered = " ".join(f"{place}. {word}" for place, word in enumerate(told, start=1))
        draft = _draft(prompt, listed, common, paired_words=paired)
        example = _draft(prompt, solved, told).text + f" {numbered}\n"
        return Draft(example + draft.context, draft.question, draft.prefix, common, draft.fields)


def _listed(
    words: list[str], often: int, seldom: int, rng: random.Random
) -> tuple[str, tuple[str, ...]]:
    """A numbered list in which the first ten words stand `often`, the others `seldom` times."""
    common = words[: CommonWords.COMMON]
    items = common * often + words[CommonWords.COMMON :] * seldom
    rng.shuffle(items)
    return " ".join(f"{place}. {word}" for place, word in enumerate(items, start=1)), tuple(common)


@dataclass(frozen=True)
class FrequentWords(Generator):
    """The most frequent of coded words, whose counts fall with the square of their rank."""

    vocabulary: int
    ZETA: ClassVar[float] = math.pi**2 / 6

    name: ClassVar[str] = "fwe"

    @property
    def least(self) -> int:
        """Of fewer, ranks 2 to 5 may tie."""
        return 53

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """See `Generator.draft`; `size` occurrences, before each count is rounded down."""
        known: set[str] = set()
        words = []
        for _ in range(self.vocabulary):
            words.append(_unlike(known, lambda: "".join(rng.choices(string.ascii_lowercase, k=6))))
            known.add(words[-1])
        words[0] = "..."
        items = [
            word
            for rank, word in enumerate(words, start=1)
            for _ in range(int(size * rank**-2 / self.ZETA))
        ]
        rng.shuffle(items)
        return _draft(prompt_of("fwe"), " ".join(items), tuple(words[1:4]))


@dataclass(frozen=True)
class Questions(Generator):
    """A question about documents, those with the answer among others."""

    collection: Collection

    name: ClassVar[str] = "qa"

    @property
    def least(self) -> int:
        """As many documents as the question with most needs."""
        return max(len(question.gold) for question in self.collection.questions)

    @property
    def most(self) -> int:
        """All documents, each once."""
        return len(self.collection.documents)

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """See `Generator.draft`; `size` documents."""
        asked = self.collection.questions
        if number >= len(asked):
            raise TaskError(
                f"ruler: question {number + 1} of a file that has {len(asked)}; allowed: num_examples "
                f"of at most {len(asked)}"
            )
        question = asked[number]
        documents = self.collection.drawn(question, size, rng)
        context = "\n\n".join(
            strings()["document"].format(i=place, document=text)
            for place, text in enumerate(documents, start=1)
        )
        prompt = prompt_of("qa")
        after = prompt.after.replace("{query}", question.text)
        filled = Prompt(prompt.before, after, prompt.prefix, prompt.new_tokens)
        return _draft(filled, context, question.answers)
