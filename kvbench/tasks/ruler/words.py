"""Where RULER's words, essays and documents come from."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

from kvbench.tasks.base import TaskError
from kvbench.tasks.files import matching, read_text
from kvbench.tasks.haystack import generated_haystack

GENERATED_SENTENCES = 20_000
"""Of generated text, in place of essays: more words than 128k tokens have."""


@cache
def word_lists() -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Distinct adjectives, nouns, and words of both and verbs, of wonderwords, each sorted.

    Entries may hold a blank or a hyphen ("contact lens", "e-mail").
    """
    from wonderwords import RandomWord

    words = RandomWord()
    lists = (["adjective"], ["noun"], ["noun", "adjective", "verb"])
    adjectives, nouns, union = (
        tuple(sorted(set(words.filter(include_categories=kinds)))) for kinds in lists
    )
    return adjectives, nouns, union


def words_version() -> str:
    """Of the package of the word lists, which differ between versions."""
    return f"wonderwords {version('wonderwords')}"


@dataclass(frozen=True)
class Essays:
    """The text that needles are hidden in.

    Attributes:
        files: a file or glob: text files, or JSON objects with a field ``text``; none: generated text.
        seed: of generated text.
    """

    files: str | None
    seed: int

    @cached_property
    def words(self) -> Sequence[str]:
        """All words of all essays, white space collapsed.

        Raises:
            TaskError: files that are missing, unreadable or without words.
        """
        if self.files is None:
            return _generated(self.seed)
        # joined as they are, with no separator
        words = "".join(map(_essay, files_of("essays", self.files))).split()
        if not words:
            raise TaskError(f"ruler: essays={self.files!r} hold no words")
        return words

    def text(self, count: int) -> str:
        """The first `count` words, from the start again where there are no more."""
        words = self.words
        times, rest = divmod(count, len(words))
        return " ".join([*words] * times + [*words[:rest]])


@lru_cache(maxsize=1)
def _generated(seed: int) -> Sequence[str]:
    """Words of many facts, so that the text repeats itself no more than essays do."""
    sentences = generated_haystack(f"ruler {seed}", facts=1000)
    return " ".join(islice(sentences, GENERATED_SENTENCES)).split()


def _essay(path: Path) -> str:
    if path.suffix != ".json":
        return read_text("ruler", path)
    text = load_json(path)
    text = text.get("text") if isinstance(text, dict) else None
    if not isinstance(text, str):
        raise TaskError(
            f"ruler: {path} is no object with a field text; allowed: that, or text files"
        )
    return text


def files_of(option: str, pattern: str) -> list[Path]:
    """The files that an option names, by path.

    Raises:
        TaskError: there is none.
    """
    paths = [Path(name) for name in matching([pattern])]
    if not paths:
        raise TaskError(f"ruler: no file matches {option}={pattern!r}; allowed: a file or a glob")
    return paths


def load_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises:
        TaskError: it cannot be read.
    """
    try:
        return json.loads(read_text("ruler", path))
    except (ValueError, RecursionError) as problem:
        raise TaskError(f"ruler: {path} is not complete JSON ({problem})") from problem


@dataclass(frozen=True)
class Question:
    """One question of a collection of documents.

    Attributes:
        gold: numbers of the documents that hold the answer.
        more: numbers of others of the same article.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    more: tuple[int, ...]


@dataclass(frozen=True)
class Collection:
    """Documents and the questions asked of them."""

    documents: Sequence[str]
    questions: Sequence[Question]

    def drawn(self, question: Question, count: int, rng: random.Random) -> list[str]:
        """`count` documents, gold among them, shuffled: then others of the same article, then of all.

        Unlike RULER's, no document is taken twice, so `count` is at most the number of documents.
        """
        more, known = list(question.more), {*question.gold, *question.more}
        rest = [number for number in range(len(self.documents)) if number not in known]
        rng.shuffle(more)
        rng.shuffle(rest)
        chosen = [*question.gold, *more, *rest][:count]
        rng.shuffle(chosen)
        return [self.documents[number] for number in chosen]


def _shaped(name: str, path: Path) -> Any:
    return TaskError(f"ruler: {path} is not {name}; allowed: its JSON file as published")


def squad(path: Path) -> Collection:
    """SQuAD 2.0: distinct paragraphs, sorted, and the questions that have an answer, in file order.

    Raises:
        TaskError: the file is none of SQuAD.
    """
    data = load_json(path)
    try:
        articles = [[p["context"] for p in article["paragraphs"]] for article in data["data"]]
        documents = sorted({text for texts in articles for text in texts})
        place = {text: number for number, text in enumerate(documents)}
        questions = []
        for article in data["data"]:
            for paragraph in article["paragraphs"]:
                gold = place[paragraph["context"]]
                others = {place[p["context"]] for p in article["paragraphs"]} - {gold}
                for asked in paragraph["qas"]:
                    if not asked["is_impossible"]:
                        answers = tuple(str(answer["text"]) for answer in asked["answers"])
                        more = tuple(sorted(others))
                        questions.append(Question(asked["question"], answers, (gold,), more))
    except (KeyError, TypeError, AttributeError) as problem:
        raise _shaped("SQuAD 2.0", path) from problem
    return _checked(Collection(documents, questions), path)


def hotpotqa(path: Path) -> Collection:
    """HotpotQA's distractor setting: the ten documents of a question are all gold.

    Raises:
        TaskError: the file is none of HotpotQA.
    """
    data = load_json(path)
    try:
        texts = [[f"{t}\n{''.join(parts)}" for t, parts in row["context"]] for row in data]
        documents = sorted({text for each in texts for text in each})
        place = {text: number for number, text in enumerate(documents)}
        questions = [
            Question(row["question"], (str(row["answer"]),), tuple({place[t]: 0 for t in each}), ())
            for row, each in zip(data, texts, strict=True)
        ]
    except (KeyError, TypeError, ValueError) as problem:
        raise _shaped("HotpotQA", path) from problem
    return _checked(Collection(documents, questions), path)


def _checked(found: Collection, path: Path) -> Collection:
    if not found.questions:
        raise TaskError(f"ruler: {path} holds no question with an answer")
    return found
