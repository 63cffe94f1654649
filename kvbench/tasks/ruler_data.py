"""Where RULER's words, essays and documents come from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import islice
from typing import Any

from kvbench.tasks.base import TaskError
from kvbench.tasks.data import matching, parsed_json, read_text
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.words import words_of

GENERATED_SENTENCES = 20_000
"""Of generated text, in place of essays: more words than 128k tokens have."""


@cache
def sorted_words(*kinds: str) -> tuple[str, ...]:
    """The distinct words of these kinds (see `words_of`), sorted."""
    return tuple(sorted(set(words_of(*kinds))))


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
        words = "".join(map(_essay, _files_of("essays", self.files))).split()
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


def _essay(path: str) -> str:
    if not path.endswith(".json"):
        return read_text("ruler", path)
    text = parsed_json("ruler", path, read_text("ruler", path).encode())
    text = text.get("text") if isinstance(text, dict) else None
    if not isinstance(text, str):
        raise TaskError(
            f"ruler: {path} is no object with a field text; allowed: that, or text files"
        )
    return text


def _files_of(option: str, pattern: str) -> list[str]:
    paths = matching([pattern])
    if not paths:
        raise TaskError(f"ruler: no file matches {option}={pattern!r}; allowed: a file or a glob")
    return paths


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
    more: tuple[int, ...] = ()


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


def squad(pattern: str) -> Collection:
    """SQuAD 2.0: distinct paragraphs, sorted, and the questions that have an answer, in file order.

    Raises:
        TaskError: there is no such file, or it is none of SQuAD.
    """

    def collection(data: Any) -> Collection:
        articles = [article["paragraphs"] for article in data["data"]]
        documents = sorted({part["context"] for article in articles for part in article})
        place = {text: number for number, text in enumerate(documents)}
        questions = []
        for article in articles:
            within = {place[part["context"]] for part in article}
            for part in article:
                gold = place[part["context"]]
                more = tuple(sorted(within - {gold}))
                for asked in part["qas"]:
                    if not asked["is_impossible"]:
                        answers = tuple(str(answer["text"]) for answer in asked["answers"])
                        questions.append(Question(asked["question"], answers, (gold,), more))
        return Collection(documents, questions)

    return _collection("squad", pattern, "SQuAD 2.0", collection)


def hotpotqa(pattern: str) -> Collection:
    """HotpotQA's distractor setting: the ten documents of a question are all gold.

    Raises:
        TaskError: there is no such file, or it is none of HotpotQA.
    """

    def collection(data: Any) -> Collection:
        texts = [[f"{t}\n{''.join(parts)}" for t, parts in row["context"]] for row in data]
        documents = sorted({text for paragraphs in texts for text in paragraphs})
        place = {text: number for number, text in enumerate(documents)}
        questions = [
            Question(
                row["question"],
                (str(row["answer"]),),
                tuple({place[text]: 0 for text in paragraphs}),
            )
            for row, paragraphs in zip(data, texts, strict=True)
        ]
        return Collection(documents, questions)

    return _collection("hotpotqa", pattern, "HotpotQA", collection)


def _collection(
    option: str, pattern: str, name: str, read: Callable[[Any], Collection]
) -> Collection:
    path = _files_of(option, pattern)[0]
    data = parsed_json("ruler", path, read_text("ruler", path).encode())
    try:
        collection = read(data)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise TaskError(
            f"ruler: {path} is not {name}; allowed: its JSON file as published"
        ) from problem
    if not collection.questions:
        raise TaskError(f"ruler: {path} holds no question with an answer")
    return collection
