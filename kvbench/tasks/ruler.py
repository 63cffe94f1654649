"""RULER: thirteen tasks of any length.

C.-P. Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?", arXiv
2404.06654; github.com/NVIDIA/RULER at c3f5e3b4 (Apache-2.0, copyright NVIDIA CORPORATION). Strings,
settings and scores are its own. Departures from its scripts, none of which changes what is asked:

* Prompts are sized by a search of ours, which ends, takes off single units (theirs takes off steps, and
  a sample that misses by one token loses up to 500 words) and counts every token that the model sees.
* Everything is drawn anew for each sample from (seed, task, length, number); theirs repeat the order
  of needles, and where the answers of cwe and fwe stand, in all samples of a job.
* What is drawn for n units is the beginning of what is drawn for n + 1, wherever that is possible.
* Keys are drawn again where they would be ambiguous: two needles of one key, a distractor with the
  key that is asked for.
"""

from __future__ import annotations

import math
import random
import re
import string
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

from kvbench.errors import nearest
from kvbench.errors.options import Distinct
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, Task, TaskError, Tokens, balanced_order
from kvbench.tasks.data import file_digests
from kvbench.tasks.encoding import SplitIds, encode_split, largest_fitting, split_template
from kvbench.tasks.haystack import split_sentences
from kvbench.tasks.metrics_text import Key, contains_all
from kvbench.tasks.ruler_data import (
    Collection,
    Essays,
    hotpotqa,
    sorted_words,
    squad,
)
from kvbench.tasks.words import words_version

# RULER's strings


class Prompt(NamedTuple):
    """The strings of one generator.

    Attributes:
        template: the user's text around ``{context}``.
        prefix: how the answer begins; it stands behind the assistant's header of a chat template.
        new_tokens: limit of an answer.
    """

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
    "niah": Prompt(
        "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special "
        "magic {type_needle_v} for {query} mentioned in the provided text?",
        " The special magic {type_needle_v} for {query} mentioned in the provided text are",
        128,
    ),
    "vt": Prompt(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        "{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.",
        " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables "
        "are assigned the value {query}, they are: ",
        30,
    ),
    "cwe": Prompt(
        "Below is a numbered list of words. In these words, some appear more often than others. "
        "Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common "
        "words in the above list?",
        " Answer: The top 10 words that appear most often in the list are:",
        120,
    ),
    "fwe": Prompt(
        "Read the following coded text and track the frequency of each coded word. Find the three most "
        "frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please "
        "ignore the dots '....'. What are the three most frequently appeared words in the above coded "
        "text?",
        " Answer: According to the coded text above, the three most frequently appeared words are:",
        50,
    ),
    "qa": Prompt(
        f"{_BRIEFLY}The following are given documents.\n\n{{context}}\n\n{_BRIEFLY}Question: {{query}}",
        " Answer:",
        32,
    ),
}


@dataclass(frozen=True)
class Draft:
    """A prompt that may be too long.

    Attributes:
        context: all before the question. question: the rest of the user's text. prefix: how the answer
            begins. answers: the references. evidence: the sentence of the first answer.
    """

    context: str
    question: str
    prefix: str
    answers: tuple[str, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)
    evidence: str = ""

    @property
    def text(self) -> str:
        """The whole prompt of a model without a chat template."""
        return self.context + self.question + self.prefix


def _draft(
    prompt: Prompt, context: str, answers: Sequence[str], *, evidence: str = "", **fields: Any
) -> Draft:
    """A prompt whose other fields are filled, around a context."""
    before, white, question = split_template(prompt.template, "{context}")
    whole = before + context + white
    return Draft(whole, question, prompt.prefix, tuple(answers), fields, evidence)


def _filled(prompt: Prompt, **fields: str) -> Prompt:
    """The strings with their fields filled in, but for the context."""
    template = prompt.template.format(context="{context}", **fields)
    return Prompt(template, prompt.prefix.format(**fields), prompt.new_tokens)


def _singular(prompt: Prompt) -> Prompt:
    """The strings about one key with one value; the order of the replacements is RULER's."""
    template, prefix = prompt.template, prompt.prefix
    for several, single in (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer")):
        template, prefix = template.replace(several, single), prefix.replace(several, single)
    return Prompt(template, prefix, prompt.new_tokens)


# generators: `draft(size, number, rng)` is sample `number` with `size` units (lines, words, documents),
# from `least` to `most`; its strings are those of `name`

UNLIMITED = 10_000_000


DEPTHS = [round(100 * place / 39) for place in range(40)]
"""Per cent of an essay's sentences: 40 values from 0 to 100."""


@dataclass(frozen=True)
class Niah:
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
    most: ClassVar[int] = UNLIMITED

    @property
    def least(self) -> int:
        """The needles and one unit more; five lines at least."""
        needles = self.inserted * self.each
        return needles + 1 if self.haystack == "essay" else max(5, needles + 1)

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """`size` words of essays, or lines."""
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
        prompt, kind = PROMPTS[self.name], self.values
        if self.asked * self.each == 1:
            prompt, kind = _singular(prompt), kind[:-1]
        prompt = _filled(prompt, type_needle_v=kind, query=query)
        answers = tuple(value for _, values in asked for value in values)
        evidence = self._needle(keys[0], answers[0])
        if self.haystack == "essay":
            source = "essays" if self.essays.files else "generated"
            text = self._in_essay(needles, size, rng)
            return _draft(prompt, text, answers, evidence=evidence, haystack=source)
        lines = [
            NOISE
            if self.haystack == "noise"
            else self._needle(
                _unlike(known, lambda: _token(self.keys, rng)), _token(self.values, rng)
            )
            for _ in range(size)
        ]
        places = sorted(rng.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        text = "\n".join(lines)
        return _draft(prompt, text, answers, evidence=evidence, haystack=self.haystack)

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(type_needle_v=self.values, key=key, value=value)

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
    adjective = rng.choice(sorted_words("adjective"))
    return f"{adjective}-{rng.choice(sorted_words('noun'))}"


def _unlike(known: set[str], draw: Callable[[], str]) -> str:
    """The first draw that is not known: there are millions of each kind, and few known."""
    while (drawn := draw()) in known:
        pass
    return drawn


def _distinct(count: int, draw: Callable[[], str], known: Sequence[str] = ()) -> list[str]:
    """`count` different draws, none of which is among `known`."""
    distinct: dict[str, None] = dict.fromkeys(known)
    while len(distinct) < count + len(known):
        distinct[draw()] = None
    return list(distinct)[len(known) :]


@dataclass(frozen=True)
class VariableTracking:
    """One chain of assignments among noise, behind a solved example.

    Attributes:
        example_lines: noise lines of the solved example.
    """

    example_lines: int
    HOPS: ClassVar[int] = 4
    EXAMPLE_TOKENS: ClassVar[int] = 500
    name: ClassVar[str] = "vt"
    most: ClassVar[int] = UNLIMITED
    least: ClassVar[int] = HOPS + 1
    """A line for every statement to stand before."""

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """`size` noise lines."""
        example = self.solved(self.example_lines, rng)
        draft = self._chain(size, 5, rng)
        return Draft(f"{example}\n{draft.context}", draft.question, draft.prefix, draft.answers)

    @classmethod
    def solved(cls, lines: int, rng: random.Random) -> str:
        """The solved example: names of three letters, the answer behind the prefix."""
        draft = cls._chain(lines, 3, rng)
        return draft.text + f" {' '.join(draft.answers)}\n"

    @classmethod
    def _chain(cls, size: int, letters: int, rng: random.Random) -> Draft:
        letter = partial(rng.choices, string.ascii_uppercase, k=letters)
        names = _distinct(cls.HOPS + 1, lambda: "".join(letter()), known=["VAR"])
        value = str(rng.randrange(10_000, 99_999))
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {b} = VAR {a} " for a, b in pairwise(names)]
        lines = [NOISE] * size
        places = sorted(rng.sample(range(size), len(chain)))
        for before, (place, statement) in enumerate(zip(places, chain, strict=True)):
            lines.insert(place + before, statement)
        prompt = _filled(PROMPTS["vt"], query=value, num_v=str(len(names)))
        return _draft(prompt, "\n".join(lines), names)


@dataclass(frozen=True)
class CommonWords:
    """Ten words that occur more often than the others of a numbered list, behind a solved example.

    More words than the list of wonderwords has are made of two of them; RULER has a second list.

    Attributes:
        long: lengths from 4096 on repeat words more often.
    """

    long: bool
    COMMON: ClassVar[int] = 10
    name: ClassVar[str] = "cwe"
    most: ClassVar[int] = UNLIMITED
    least: ClassVar[int] = COMMON + 1
    """The common words and another."""

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """`size` different words."""
        words = list(sorted_words("noun", "adjective", "verb"))
        rng.shuffle(words)
        first, often, seldom = (40, 10, 3) if self.long else (20, 3, 1)
        solved, told = self._listed(words[-first:], often, seldom, rng)
        paired, single = max(0, size - len(words)), words[:1000]
        words += _distinct(paired, lambda: "".join(rng.sample(single, 2)), known=words)
        often, seldom = (30, 3) if self.long else (6, 1)
        listed, common = self._listed(words[:size], often, seldom, rng)
        draft = _draft(PROMPTS[self.name], listed, common, paired_words=paired)
        example = _draft(PROMPTS[self.name], solved, told).text + f" {_numbered(told)}\n"
        return Draft(example + draft.context, draft.question, draft.prefix, common, draft.fields)

    def _listed(
        self, words: list[str], often: int, seldom: int, rng: random.Random
    ) -> tuple[str, tuple[str, ...]]:
        """A numbered list in which the first ten words stand `often`, the others `seldom` times."""
        common = words[: self.COMMON]
        items = common * often + words[self.COMMON :] * seldom
        rng.shuffle(items)
        return _numbered(items), tuple(common)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{place}. {word}" for place, word in enumerate(words, start=1))


@dataclass(frozen=True)
class FrequentWords:
    """The most frequent of coded words, whose counts fall with the square of their rank."""

    vocabulary: int
    ZETA: ClassVar[float] = math.pi**2 / 6
    name: ClassVar[str] = "fwe"
    most: ClassVar[int] = UNLIMITED
    least: ClassVar[int] = 53
    """Of fewer, ranks 2 to 5 may tie."""

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """`size` occurrences, before each count is rounded down."""
        letters = partial(rng.choices, string.ascii_lowercase, k=6)
        words = _distinct(self.vocabulary, lambda: "".join(letters()))
        words[0] = "..."
        items = [
            word
            for rank, word in enumerate(words, start=1)
            for _ in range(int(size * rank**-2 / self.ZETA))
        ]
        rng.shuffle(items)
        return _draft(PROMPTS[self.name], " ".join(items), words[1:4])


@dataclass(frozen=True)
class Questions:
    """A question about documents, those with the answer among others."""

    collection: Collection
    name: ClassVar[str] = "qa"

    @property
    def least(self) -> int:
        """The fewest documents that a prompt may have: as many as any question needs."""
        return max(len(question.gold) for question in self.collection.questions)

    @property
    def most(self) -> int:
        """All documents, each once."""
        return len(self.collection.documents)

    def draft(self, size: int, number: int, rng: random.Random) -> Draft:
        """`size` documents."""
        asked = self.collection.questions
        if number >= len(asked):
            raise TaskError(
                f"ruler: question {number + 1} of a file that has {len(asked)}; allowed: num_examples "
                f"of at most {len(asked)}"
            )
        question = asked[number]
        documents = self.collection.drawn(question, size, rng)
        context = "\n\n".join(
            DOCUMENT.format(i=place, document=text) for place, text in enumerate(documents, start=1)
        )
        prompt = PROMPTS[self.name]
        template = prompt.template.replace("{query}", question.text)
        return _draft(prompt._replace(template=template), context, question.answers)


Generator = Niah | VariableTracking | CommonWords | FrequentWords | Questions

# the task

NIAH = {
    # haystack, keys, values, keys inserted, values per key, keys asked
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}
QA = {"qa_1": "squad", "qa_2": "hotpotqa"}
GENERATED = (*NIAH, "vt", "cwe", "fwe")
TASKS = (*GENERATED, *QA)
DRAWS = 50
"""Of a sample, where the least prompt of a draw does not fit."""


def clean(prediction: str) -> str:
    """A prediction as RULER scores it: stripped, each character below U+0020 a line end, stripped."""
    return re.sub(r"[\x00-\x1f]", "\n", prediction.strip()).strip()


def matched(task: str, prediction: str, references: Sequence[str]) -> float:
    """The share of references that stand in a cleaned prediction, whatever their case; of the qa tasks
    1 if any does."""
    share = contains_all(prediction, Key(tuple(references)))["score"]
    return float(share > 0) if task in QA else share


def _settled(task: str, references: Sequence[str], text: str) -> bool:
    """Whether a prediction that begins like this has the full score, whatever follows."""
    return matched(task, clean(text), references) == 1.0


@dataclass(frozen=True, kw_only=True)
class Ruler(Task):
    """RULER's tasks at every length.

    Attributes:
        tasks: which of `TASKS`; by default the eleven that need no file.
        lengths: tokens of prompt and answer together, with all that the model sees: chat template and
            begin token, which RULER's own tools do not count in.
        num_examples: per task and length (500 as published).
        seed: of keys, values, words and places.
        essays: text files, or JSON objects with a field ``text``; a file or a glob. None: generated
            sentences stand for the essays.
        squad, hotpotqa: files of qa_1 and qa_2.
    """

    name: ClassVar[str] = "ruler"
    breakdown: ClassVar[tuple[str, ...]] = ("length",)
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "task")
    unhashed: ClassVar[tuple[str, ...]] = ("essays", "squad", "hotpotqa")

    tasks: Distinct[str] = GENERATED
    lengths: Distinct[Tokens] = (4096,)
    num_examples: Many = 20
    seed: int = 42
    essays: str | None = None
    squad: str | None = None
    hotpotqa: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for task in self.tasks:
            if task not in TASKS:
                raise TaskError(
                    f"task.tasks has {task!r}{nearest(task, TASKS)}; allowed: {', '.join(TASKS)}"
                )
            if task in QA and getattr(self, QA[task]) is None:
                raise TaskError(
                    f"ruler: {task} needs task.{QA[task]}=<file>, "
                    + ("dev-v2.0.json of rajpurkar.github.io/SQuAD-explorer" * (task == "qa_1"))
                    + ("hotpot_dev_distractor_v1.json of hotpotqa.github.io" * (task == "qa_2"))
                )

    def digests(self) -> Mapping[str, str]:
        """sha256 of each file in use, and the version of the word lists."""
        used = {QA[task] for task in self.tasks if task in QA}
        if any(NIAH.get(task, ("",))[0] == "essay" for task in self.tasks):
            used.add("essays")
        given = [getattr(self, option) for option in sorted(used)]
        return {"words": words_version(), **file_digests(filter(None, given))}

    @cached_property
    def _essays(self) -> Essays:
        return Essays(self.essays, self.seed)

    @cached_property
    def _collections(self) -> dict[str, Collection]:
        """Documents of the qa tasks that are asked for."""
        read = {"qa_1": squad, "qa_2": hotpotqa}
        return {t: read[t](getattr(self, QA[t])) for t in self.tasks if t in QA}

    def metric_name(self) -> str:
        """See `Task.metric_name`."""
        return "references found"

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every task at every length; of every prefix, the shares of each task and of each length are
        those of the whole to within one example.

        Raises:
            TaskError: a length that is too short for a task, a file that is missing or wrong.
        """
        ids: dict[int, int] = {}  # one object per token id: a set may have a hundred million tokens
        made = {
            (i, j): self._group(encoder, task, length, ids)
            for i, task in enumerate(self.tasks)
            for j, length in enumerate(self.lengths)
        }
        sizes = (len(self.tasks), len(self.lengths), self.num_examples)
        return [made[i, j][k] for i, j, k in balanced_order(sizes)]

    def _group(
        self, encoder: PromptEncoder, task: str, length: int, ids: dict[int, int]
    ) -> list[Example]:
        """The examples of one task and length; where one's size was found, the next one's begins."""
        generator = self._generator(encoder, task, length)
        new_tokens = PROMPTS[generator.name].new_tokens
        examples: list[Example] = []
        units = max(generator.least, length // 20)
        for number in range(self.num_examples):
            name = f"{task} {length} {number}"
            units, draft, (context, question) = self._sized(encoder, generator, name, number, units)
            examples.append(
                Example(
                    id=f"{task}-{length}-{number:04d}",
                    context=draft.context,
                    question=draft.question + draft.prefix,
                    answers=draft.answers,
                    max_new_tokens=new_tokens,
                    dataset=task,
                    context_ids=tuple(ids.setdefault(token, token) for token in context),
                    question_ids=tuple(ids.setdefault(token, token) for token in question),
                    complete=True,
                    settled=partial(_settled, task, draft.answers),
                    evidence=draft.evidence,
                    fields={"task": task, "length": length, "units": units, **draft.fields},
                )
            )
        return examples

    def _sized(
        self, encoder: PromptEncoder, generator: Generator, name: str, number: int, guess: int
    ) -> tuple[int, Draft, SplitIds]:
        """Units, draft and tokens of the largest prompt of a sample that fits.

        Args:
            name: "task length number".
        """
        task, length, _ = name.split()
        room = int(length) - PROMPTS[generator.name].new_tokens
        fitting: dict[int, tuple[Draft, SplitIds]] = {}
        seed, used = "", 0

        def tokens(size: int) -> int:
            nonlocal used
            draft = generator.draft(size, number, random.Random(seed))
            ids = encode_split(encoder, draft.context, draft.question, draft.prefix)
            used = sum(map(len, ids))
            if used <= room:
                fitting[size] = (draft, ids)
            return used

        bounds = {"least": generator.least, "most": generator.most}
        for draw in range(DRAWS):
            seed = f"kvbench ruler {self.seed} {name} {draw}"
            size = largest_fitting(tokens, room, **bounds, guess=guess)
            if size is not None:
                return size, *fitting[size]
            if used > 1.2 * room:  # no draw is so much shorter
                break
        raise TaskError(
            f"ruler: length {length} is too short for {task}: its shortest prompt and "
            f"{int(length) - room} new tokens take {used + int(length) - room} of this tokenizer; "
            "allowed: longer"
        )

    def _generator(self, encoder: PromptEncoder, task: str, length: int) -> Generator:
        if task in NIAH:
            return Niah(*NIAH[task], essays=self._essays)
        if task == "vt":
            return VariableTracking(self._example_lines(encoder, length))
        if task == "cwe":
            return CommonWords(long=length >= 4096)
        if task == "fwe":
            words = (length - PROMPTS["fwe"].new_tokens) // 50
            if words < 5:
                raise TaskError(
                    f"ruler: length {length} is too short for fwe, which has a coded word per 50 "
                    "tokens and asks for three; allowed: 300 or longer"
                )
            return FrequentWords(words)
        return Questions(self._collections[task])

    def _example_lines(self, encoder: PromptEncoder, length: int) -> int:
        """Noise lines of vt's solved example: as many as fit 500 tokens, or half of a length below
        1,000; five, which its statements stand between, where that is too little."""

        def tokens(lines: int) -> int:
            seed = f"kvbench ruler {self.seed} vt {length}"
            return len(encoder.encode_text(VariableTracking.solved(lines, random.Random(seed))))

        least = VariableTracking.least
        room = min(VariableTracking.EXAMPLE_TOKENS, length // 2)
        fitting = largest_fitting(tokens, room, least=least, most=room, guess=least)
        return least if fitting is None else fitting

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """RULER's score, 0 to 1; ``null`` is 1 for a prediction that is empty once cleaned."""
        text = clean(prediction)
        return {
            "score": matched(example.dataset, text, example.answers),
            "null": float(not text),
        }
