"""The words, essays and documents from which RULER's prompts are made."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from kvbench.tasks.base import TaskError
from kvbench.tasks.data import matching, parsed_json, read_text
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.words import words_of

GENERATED_SENTENCES = 20_000
"""The sentences of a generated text, in place of essays: more words than a prompt of 128k tokens
has."""


@cache
def sorted_words(*kinds: str) -> tuple[str, ...]:
    return tuple(sorted(set(words_of(*kinds))))


@dataclass(frozen=True)
class Essays:
    """The text in which needles are hidden: text files, JSON objects with a field ``text``, or
    generated."""

    files: str | None
    seed: int

    @cached_property
    def words(self) -> Sequence[str]:
        if self.files is None:
            return _generated_words(self.seed)
        # RULER joins its essays without a separator.
        text = "".join(_read_essay(path) for path in _matching_files("essays", self.files))
        words = text.split()
        if not words:
            raise TaskError(f"ruler: essays={self.files!r} hold no words")
        return words

    def text(self, count: int) -> str:
        """The first `count` words, again from the first after the last."""
        return " ".join(islice(cycle(self.words), count))


@lru_cache(maxsize=1)
def _generated_words(seed: int) -> Sequence[str]:
    """The words of generated text about so many facts that it repeats itself no more than essays
    do."""
    sentences = generated_haystack(f"ruler {seed}", facts=1000)
    return " ".join(islice(sentences, GENERATED_SENTENCES)).split()


def _read_essay(path: Path) -> str:
    text = read_text("ruler", path)
    if path.suffix != ".json":
        return text
    content = parsed_json("ruler", str(path), text.encode())
    essay = content.get("text") if isinstance(content, dict) else None
    if not isinstance(essay, str):
        raise TaskError(
            f"ruler: {path} is no object with a field text; allowed: that, or text files"
        )
    return essay


def _matching_files(option: str, pattern: str) -> list[Path]:
    paths = matching([pattern])
    if not paths:
        raise TaskError(f"ruler: no file matches {option}={pattern!r}; allowed: a file or a glob")
    return paths


@dataclass(frozen=True)
class DocumentQuestion:
    """A question and the indices of the documents that hold the answer, and of others of their
    article."""

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    same_article: tuple[int, ...] = ()


@dataclass(frozen=True)
class Collection:
    documents: Sequence[str]
    questions: Sequence[DocumentQuestion]

    def draw(self, question: DocumentQuestion, count: int, rng: random.Random) -> list[str]:
        """Draw `count` documents for a question, in random order: the gold ones, then others of the
        same article, then any others.

        Other than in RULER's scripts no document is drawn twice, so that `count` is at most the number
        of documents.
        """
        same_article = list(question.same_article)
        preferred = {*question.gold, *same_article}
        others = [index for index in range(len(self.documents)) if index not in preferred]
        rng.shuffle(same_article)
        rng.shuffle(others)
        drawn = [*question.gold, *same_article, *others][:count]
        rng.shuffle(drawn)
        return [self.documents[index] for index in drawn]


def _squad(content: Any) -> Collection:
    """Its distinct paragraphs, sorted, and the questions that have an answer, in the order of the
    file."""
    articles = [article["paragraphs"] for article in content["data"]]
    documents = sorted({paragraph["context"] for article in articles for paragraph in article})
    index_of = {text: index for index, text in enumerate(documents)}
    questions = []
    for article in articles:
        article_indices = {index_of[paragraph["context"]] for paragraph in article}
        for paragraph in article:
            gold = index_of[paragraph["context"]]
            same_article = tuple(sorted(article_indices - {gold}))
            for row in paragraph["qas"]:
                if not row["is_impossible"]:
                    answers = tuple(str(answer["text"]) for answer in row["answers"])
                    questions.append(
                        DocumentQuestion(row["question"], answers, (gold,), same_article)
                    )
    return Collection(documents, questions)


def _hotpotqa(content: Any) -> Collection:
    """The distractor setting. All ten paragraphs of a question count as gold."""
    texts_of_rows = [
        [f"{title}\n{''.join(sentences)}" for title, sentences in row["context"]] for row in content
    ]
    documents = sorted({text for texts in texts_of_rows for text in texts})
    index_of = {text: index for index, text in enumerate(documents)}
    questions = []
    for row, texts in zip(content, texts_of_rows, strict=True):
        gold = tuple(dict.fromkeys(index_of[text] for text in texts))
        questions.append(DocumentQuestion(row["question"], (str(row["answer"]),), gold))
    return Collection(documents, questions)


READERS: Mapping[str, tuple[str, Callable[[Any], Collection]]] = {
    "squad": ("SQuAD 2.0", _squad),
    "hotpotqa": ("HotpotQA", _hotpotqa),
}
"""The collections by the task's option, with their names, and what reads the published JSON file."""


def read_collection(option: str, pattern: str) -> Collection:
    """From the first file that matches the pattern of a task's option."""
    name, collection_of = READERS[option]
    path = _matching_files(option, pattern)[0]
    content = parsed_json("ruler", str(path), read_text("ruler", path).encode())
    try:
        collection = collection_of(content)
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise TaskError(
            f"ruler: {path} is not {name}; allowed: its JSON file as published"
        ) from problem
    if not collection.questions:
        raise TaskError(f"ruler: {path} holds no question with an answer")
    return collection
