"""RULER's strings, and the five generators that make prompts of any size from them.

Every generator has

* ``name``: its key in `PROMPTS`,
* ``least`` and ``most``: the fewest and the most units that a prompt may have. A unit is a word of an
  essay, a line of noise, a word of a list, a coded word or a document.
* ``draft(size, number, rng)``: the prompt of sample `number` with `size` units, drawn from `rng`: words
  of essays or lines beside the needles (niah), lines of noise (vt), different words (cwe), about so
  many occurrences (fwe), documents (qa).

C.-P. Hsieh et al., arXiv 2404.06654; github.com/NVIDIA/RULER at c3f5e3b4 (Apache-2.0, copyright NVIDIA
CORPORATION), scripts/data/synthetic.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from kvbench.tasks.base import TaskError
from kvbench.tasks.encoding import split_template
from kvbench.tasks.haystack import split_sentences
from kvbench.tasks.ruler_data import Collection, Essays, sorted_words
from kvbench.tasks.words import drawn_uuid


class Strings(NamedTuple):
    """The strings of one generator: the user's text with its fields, the beginning of the answer behind
    the assistant's header, and the most tokens of an answer."""

    template: str
    prefix: str
    new_tokens: int


NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
DOCUMENT = "Document {i}:\n{document}"
_BRIEFLY = (
    "Answer the question based on the given documents. Only give me the answer and do not output any "
    "other words.\n\n"
)
PROMPTS = {
    "niah": Strings(
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special "
        "magic {type_needle_v} for {query} mentioned in the provided text?",
        " The special magic {type_needle_v} for {query} mentioned in the provided text are",
        128,
    ),
    "vt": Strings(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables "
        "are assigned the value {query}, they are: ",
        30,
    ),
    "cwe": Strings(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
        "words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        120,
    ),
    "fwe": Strings(
        "Read the following coded text and track the frequency of each coded word. Find the three most "
        "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
        "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
        "text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
    ),
    "qa": Strings(
        f"{_BRIEFLY}The following are given documents.\n\n{{context}}\n\n{_BRIEFLY}Question: {{query}}",
        " Answer:",
        32,
    ),
}
"""The strings of each generator, as RULER has them."""


@dataclass(frozen=True)
class Draft:
    """The text of a prompt, which may turn out to be too long; `evidence` is the sentence of the context
    that holds the first answer."""

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = ""

    @property
    def text(self) -> str:
        return self.context + self.question + self.prefix


def _draft(
    prompt: Strings, context: str, answers: Sequence[str], *, evidence: str = "", **fields: Any
) -> Draft:
    """The draft of a prompt whose only open field is ``{context}``."""
    before, white, question = split_template(prompt.template, "{context}")
    return Draft(
        before + context + white, question, prompt.prefix, tuple(answers), fields, evidence
    )


def _filled(prompt: Strings, **fields: str) -> Strings:
    template = prompt.template.format(context="{context}", **fields)
    return Strings(template, prompt.prefix.format(**fields), prompt.new_tokens)


def _singular(prompt: Strings) -> Strings:
    """The strings of a prompt about one key with one value. The replacements and their order are
    RULER's."""
    template, prefix = prompt.template, prompt.prefix
    for plural, singular in (
        ("Some", "A"),
        ("are all", "is"),
        ("are", "is"),
        ("answers", "answer"),
    ):
        template = template.replace(plural, singular)
        prefix = prefix.replace(plural, singular)
    return Strings(template, prefix, prompt.new_tokens)


UNLIMITED = 10_000_000
"""The most units of a generator that has no limit of its own."""
DEPTHS = [round(100 * place / 39) for place in range(40)]
"""The depths of needles in essays, in per cent of the sentences: 40 values from 0 to 100."""


@dataclass(frozen=True)
class NeedleSettings:
    """The needles of one of the eight needle tasks, and their haystack.

    Attributes:
        haystack: "noise" (one line again and again), "essay", or "needle" (needles of other keys).
        keys, values: "words", "numbers" or "uuids".
        num_keys: the number of keys that have needles.
        values_per_key: the number of values, each in a needle of its own.
        keys_asked: the number of keys that the question is about.
    """

    haystack: str
    keys: str
    values: str
    num_keys: int = 1
    values_per_key: int = 1
    keys_asked: int = 1

    @property
    def num_needles(self) -> int:
        return self.num_keys * self.values_per_key


@dataclass(frozen=True)
class Niah:
    """Needles in a haystack. A unit is a word of the essays, or a line."""

    settings: NeedleSettings
    essays: Essays
    name: ClassVar[str] = "niah"
    most: ClassVar[int] = UNLIMITED

    @property
    def least(self) -> int:
        """One unit more than there are needles; in a haystack of lines five at least."""
        least = self.settings.num_needles + 1
        return least if self.settings.haystack == "essay" else max(5, least)

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        settings = self.settings
        drawn_keys: set[str] = set()
        values_of: dict[str, list[str]] = {}
        for _ in range(settings.num_keys):
            key = self._unused_key(drawn_keys, rng)
            drawn_keys.add(key)
            values_of[key] = [_token(settings.values, rng) for _ in range(settings.values_per_key)]
        needles = [self._needle(key, value) for key in values_of for value in values_of[key]]
        rng.shuffle(needles)
        keys_asked = rng.sample(list(values_of), settings.keys_asked)
        answers = [value for key in keys_asked for value in values_of[key]]
        if settings.haystack == "essay":
            text = self._in_essay(needles, size, rng)
            haystack = "essays" if self.essays.files else "generated"
        else:
            text = self._in_lines(needles, size, drawn_keys, rng)
            haystack = settings.haystack
        evidence = self._needle(keys_asked[0], answers[0])
        prompt = self._prompt(keys_asked)
        return _draft(prompt, text, answers, evidence=evidence, haystack=haystack)

    def _prompt(self, keys: list[str]) -> Strings:
        query = keys[0]
        if len(keys) > 1:
            query = ", ".join(keys[:-1]) + ", and " + keys[-1]
        prompt, kind = PROMPTS[self.name], self.settings.values
        if len(keys) * self.settings.values_per_key == 1:
            prompt, kind = _singular(prompt), kind.removesuffix("s")
        return _filled(prompt, type_needle_v=kind, query=query)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.settings.values, key=key, value=value)

    def _unused_key(self, drawn_keys: set[str], rng: random.Random) -> str:
        """Draw a key that is not among `drawn_keys`. There are millions of keys of each kind, so that
        a second draw is rare."""
        key = _token(self.settings.keys, rng)
        while key in drawn_keys:
            key = _token(self.settings.keys, rng)
        return key

    def _in_essay(self, needles: list[str], words: int, rng: random.Random) -> str:
        """The first `words` words of the essays with needles between the sentences at random
        `DEPTHS`."""
        depths = sorted(rng.sample(DEPTHS, len(needles)))
        sentences = [part.strip() for part in split_sentences(self.essays.text(words))]
        parts = []
        start = 0
        for needle, depth in zip(needles, depths, strict=True):
            end = int(len(sentences) * depth / 100)
            parts += [" ".join(sentences[start:end]), needle]
            start = end
        return " ".join([*parts, " ".join(sentences[start:])])

    def _in_lines(
        self, needles: list[str], size: int, drawn_keys: set[str], rng: random.Random
    ) -> str:
        """`size` lines of noise, or of needles of other keys than `drawn_keys`, with the needles at
        random places."""
        lines = []
        for _ in range(size):
            if self.settings.haystack == "noise":
                lines.append(NOISE)
            else:
                key = self._unused_key(drawn_keys, rng)
                lines.append(self._needle(key, _token(self.settings.values, rng)))
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)


def _token(kind: str, rng: random.Random) -> str:
    """Draw a key or a value: of "numbers" one of seven digits, of "uuids" a version 4 uuid, of "words"
    an adjective and a noun."""
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    if kind == "uuids":
        return drawn_uuid(rng)
    adjective = rng.choice(sorted_words("adjective"))
    return f"{adjective}-{rng.choice(sorted_words('noun'))}"


def _distinct(count: int, draw: Callable[[], str], used: Sequence[str] = ()) -> list[str]:
    """Draw until there are `count` different texts, none of which is among `used`."""
    texts: dict[str, None] = dict.fromkeys(used)
    while len(texts) < count + len(used):
        texts[draw()] = None
    return list(texts)[len(used) :]


def _letters(alphabet: str, count: int, rng: random.Random) -> str:
    return "".join(rng.choices(alphabet, k=count))


@dataclass(frozen=True)
class VariableTracking:
    """One chain of variable assignments among noise, after a solved example. A unit is a line of
    noise.

    Attributes:
        example_lines: the lines of noise of the solved example.
    """

    example_lines: int
    HOPS: ClassVar[int] = 4
    EXAMPLE_TOKENS: ClassVar[int] = 500
    name: ClassVar[str] = "vt"
    most: ClassVar[int] = UNLIMITED
    least: ClassVar[int] = HOPS + 1
    """One line for each statement of the chain, which is inserted before it."""

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        example = self.solved(self.example_lines, rng)
        draft = self._chain(size, 5, rng)
        return Draft(f"{example}\n{draft.context}", draft.question, draft.prefix, draft.answers)

    @classmethod
    def solved(cls, lines: int, rng: random.Random) -> str:
        """The solved example: a prompt with variable names of three letters, and its answer."""
        draft = cls._chain(lines, 3, rng)
        return draft.text + f" {' '.join(draft.answers)}\n"

    @classmethod
    def _chain(cls, size: int, letters: int, rng: random.Random) -> Draft:
        """A prompt without an example, whose variables have names of `letters` letters."""
        names = _distinct(
            cls.HOPS + 1, lambda: _letters(string.ascii_uppercase, letters, rng), used=["VAR"]
        )
        value = str(rng.randrange(10_000, 99_999))
        statements = [f"VAR {names[0]} = {value}"]
        statements += [f"VAR {name} = VAR {earlier} " for earlier, name in pairwise(names)]
        lines = [NOISE] * size
        places = sorted(rng.sample(range(size), len(statements)))
        for inserted, (place, statement) in enumerate(zip(places, statements, strict=True)):
            lines.insert(place + inserted, statement)
        prompt = _filled(PROMPTS["vt"], query=value, num_v=str(len(names)))
        return _draft(prompt, "\n".join(lines), names)


@dataclass(frozen=True)
class CommonWords:
    """Ten words that occur more often than the others of a numbered list, after a solved example. A
    unit is a different word.

    A prompt with more words than the list of wonderwords has gets words that are made of two of them;
    RULER has a second list.

    Attributes:
        long: whether words are repeated more often, as RULER does from a length of 4096 tokens on.
    """

    long: bool
    COMMON: ClassVar[int] = 10
    name: ClassVar[str] = "cwe"
    most: ClassVar[int] = UNLIMITED
    least: ClassVar[int] = COMMON + 1
    """The common words and another."""

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        words = list(sorted_words("noun", "adjective", "verb"))
        rng.shuffle(words)
        example = self._solved(words, rng)
        num_paired = max(0, size - len(words))
        single_words = words[:1000]
        words += _distinct(num_paired, lambda: "".join(rng.sample(single_words, 2)), used=words)
        often, seldom = (30, 3) if self.long else (6, 1)
        text, common = self._listed(words[:size], often, seldom, rng)
        draft = _draft(PROMPTS[self.name], text, common, paired_words=num_paired)
        context = example + draft.context
        return Draft(context, draft.question, draft.prefix, draft.answers, draft.fields)

    def _solved(self, words: list[str], rng: random.Random) -> str:
        """The solved example: a prompt about the last of `words`, and its answer."""
        size, often, seldom = (40, 10, 3) if self.long else (20, 3, 1)
        text, common = self._listed(words[-size:], often, seldom, rng)
        return _draft(PROMPTS[self.name], text, common).text + f" {_numbered(common)}\n"

    def _listed(
        self, words: list[str], often: int, seldom: int, rng: random.Random
    ) -> tuple[str, list[str]]:
        """A numbered list in which the first ten words stand `often` and the others `seldom` times,
        and those ten words."""
        common = words[: self.COMMON]
        items = common * often + words[self.COMMON :] * seldom
        rng.shuffle(items)
        return _numbered(items), common


def _numbered(words: Sequence[str]) -> str:
    """The words on one line, each after its number from 1."""
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWords:
    """The most frequent of coded words, whose counts fall with the square of their rank. A unit is an
    occurrence of a word, before the count of each word is rounded down.

    Attributes:
        vocabulary: the number of coded words. The most frequent one is "...", which the question
            excludes.
    """

    vocabulary: int
    ZETA: ClassVar[float] = math.pi**2 / 6
    """The sum of 1 / rank ** 2 over all ranks."""
    name: ClassVar[str] = "fwe"
    most: ClassVar[int] = UNLIMITED
    least: ClassVar[int] = 53
    """With fewer units the words of ranks 2 to 5 may have the same count."""

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        words = _distinct(self.vocabulary, lambda: _letters(string.ascii_lowercase, 6, rng))
        words[0] = "..."
        items = []
        for rank, word in enumerate(words, start=1):
            items += [word] * int(size * rank**-2 / self.ZETA)
        rng.shuffle(items)
        return _draft(PROMPTS[self.name], " ".join(items), words[1:4])


@dataclass(frozen=True)
class DocumentQuestions:
    """A question about documents, of which one or more hold the answer. A unit is a document."""

    collection: Collection
    name: ClassVar[str] = "qa"

    @property
    def least(self) -> int:
        """As many documents as the question with the most documents needs."""
        return max(len(question.gold) for question in self.collection.questions)

    @property
    def most(self) -> int:
        """All documents, each once."""
        return len(self.collection.documents)

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        questions = self.collection.questions
        if number >= len(questions):
            raise TaskError(
                f"ruler: question {number + 1} of a file that has {len(questions)}; allowed: "
                f"num_examples of at most {len(questions)}"
            )
        question = questions[number]
        documents = self.collection.draw(question, size, rng)
        context = "\n\n".join(
            DOCUMENT.format(i=place, document=text) for place, text in enumerate(documents, start=1)
        )
        prompt = PROMPTS[self.name]
        # Not by `format`: a question may contain braces.
        template = prompt.template.replace("{query}", question.text)
        return _draft(prompt._replace(template=template), context, question.answers)


Generator = Niah | VariableTracking | CommonWords | FrequentWords | DocumentQuestions
