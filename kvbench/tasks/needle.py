"""Needle in a haystack: find one sentence at a chosen depth of a prompt of an exact length.

Protocol: G. Kamradt, "Needle In A Haystack - Pressure Testing LLMs" (2023),
github.com/gkamradt/LLMTest_NeedleInAHaystack: filler text, a needle inserted at a percentage of its
length after the nearest sentence end at or before, and a question about it at the end. The default
filler is generated (:mod:`kvbench.tasks.haystack`); text files or a Hugging Face dataset can be used.

Scores of a prediction: ``containment`` (the expected answer stands in it, word for word),
``word_recall`` (share of the answer's words that are in it) and ``rouge1`` (ROUGE-1 F).
"""

from __future__ import annotations

import glob
import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

from kvbench.scalars import is_integer, is_number
from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.haystack import generated_haystack

SCORES = ("containment", "word_recall", "rouge1")
HAYSTACKS = ("generated", "files", "dataset")
SENTENCE = re.compile(r".+?(?:[.!?]+[\"'\u201d\u2019)\]]*(?=\s|$)|$)", re.DOTALL)
"""A sentence with the white space before it; sentences joined again are the text."""


def split_sentences(text: str) -> list[str]:
    """Cut a text after each sentence end; the pieces joined are the text."""
    return SENTENCE.findall(text)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def containment(prediction: str, answer: str) -> float:
    """1 if the answer stands in the prediction (case and runs of white space do not matter)."""
    return float(" ".join(answer.lower().split()) in " ".join(prediction.lower().split()))


def word_recall(prediction: str, answer: str) -> float:
    """Share of the answer's words, repetitions counted, that the prediction has."""
    wanted = Counter(_words(answer))
    if not wanted:
        return 0.0
    return sum((wanted & Counter(_words(prediction))).values()) / sum(wanted.values())


@lru_cache(maxsize=1)
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=False)


def rouge1(prediction: str, answer: str) -> float:
    """ROUGE-1 F of rouge-score, without stemming."""
    return float(_scorer().score(answer, prediction)["rouge1"].fmeasure)


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not is_integer(value, low, high):
        raise TaskError(f"needle: {name}={value!r} is not allowed; a whole number {low}..{high}")
    return value


def _several(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | int | float):
        return (value,)
    if not value:
        raise TaskError(f"needle: {name} is empty; give at least one value")
    if len(set(value)) != len(value):
        raise TaskError(f"needle: {name}={list(value)} names a value twice; each value once")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """A needle at every depth of prompts of every length.

    Attributes:
        lengths: prompt lengths in tokens, everything the model sees counted.
        depths: percentages of the haystack before the needle, 0..100.
        num_examples: prompts per length and depth, with different filler.
        needle, question, answer: what is hidden, what is asked, what counts.
        haystack: ``generated``, ``files`` or ``dataset``.
        haystack_files: glob or list of globs of text files; each example begins at another file.
        dataset_name, dataset_config, dataset_split, dataset_column: for ``dataset``.
        facts: how many different facts generated filler is about; fewer: more redundancy.
        repeats: copies of the needle, the first at the depth and the others spread evenly.
        seed: of filler.
        primary: which of the scores is the `score` of the tables.
        max_new_tokens, stop: generation limits.
    """

    name: ClassVar[str] = "needle"
    breakdown: ClassVar[tuple[str, ...]] = ("length", "depth")
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "depth")

    needle: str
    question: str
    answer: str
    lengths: Sequence[int] = (512, 1024, 2048, 4096)
    depths: Sequence[float] = (0, 25, 50, 75, 100)
    num_examples: int = 1
    haystack: str = "generated"
    haystack_files: str | Sequence[str] = ()
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_column: str = "text"
    facts: int = 24
    repeats: int = 1
    seed: int = 0
    primary: str = "containment"
    max_new_tokens: int = 48
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        lengths = _several("lengths", self.lengths)
        for value in lengths:
            _whole("lengths", value, 1, 10_000_000)
        depths = _several("depths", self.depths)
        for value in depths:
            if not is_number(value):
                raise TaskError(f"needle: depths={value!r} is not allowed; a number 0..100")
            if not 0 <= value <= 100:
                raise TaskError(f"needle: depths={value!r} is not allowed; per cent 0..100")
        _whole("num_examples", self.num_examples, 1, 1_000_000)
        _whole("repeats", self.repeats, 1, 1000)
        _whole("facts", self.facts, 1, 1_000_000)
        _whole("max_new_tokens", self.max_new_tokens, 1, 100_000)
        for option in ("needle", "question", "answer"):
            if not getattr(self, option).strip():
                raise TaskError(f"needle: {option} is empty; it must have words")
        if self.primary not in SCORES:
            raise TaskError(f"needle: primary={self.primary!r} unknown; one of {', '.join(SCORES)}")
        if self.haystack not in HAYSTACKS:
            raise TaskError(
                f"needle: haystack={self.haystack!r} unknown; one of {', '.join(HAYSTACKS)}"
            )
        files = self.haystack_files
        files = () if files is None else (files,) if isinstance(files, str) else tuple(files)
        if self.haystack == "files" and not files:
            raise TaskError("needle: haystack=files needs haystack_files, a glob of text files")
        if self.haystack == "dataset" and not self.dataset_name:
            raise TaskError("needle: haystack=dataset needs dataset_name, a Hugging Face dataset")
        stop = () if self.stop is None else self.stop
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "depths", depths)
        object.__setattr__(self, "haystack_files", files)
        object.__setattr__(self, "stop", stop)

    def digests(self) -> Mapping[str, str]:
        """sha256 of each haystack file, by file name."""
        if self.haystack != "files":
            return {}
        paths = sorted({path for each in self.haystack_files for path in glob.glob(each)})
        return {
            Path(path).name: hashlib.sha256(Path(path).read_bytes()).hexdigest() for path in paths
        }

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every (length, depth) once before any a second time, lengths and depths interleaved."""
        cells = [
            (length, self.depths[(turn + shift) % len(self.depths)])
            for turn in range(len(self.depths))
            for shift, length in enumerate(self.lengths)
        ]
        texts = self._texts()
        found = []
        for number in range(self.num_examples):
            pieces = self._pieces(texts, number, encoder)
            found += [self._example(encoder, pieces, number, *cell) for cell in cells]
        return found

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """All three scores; the primary one again as ``score``."""
        answer = example.answers[0]
        scores = {
            "containment": containment(prediction, answer),
            "word_recall": word_recall(prediction, answer),
            "rouge1": rouge1(prediction, answer),
        }
        return {"score": scores[self.primary], **scores}

    def _texts(self) -> list[str]:
        """The documents to fill prompts with; none for generated filler."""
        if self.haystack == "generated":
            return []
        texts: list[str] = []
        if self.haystack == "files":
            paths = sorted({path for each in self.haystack_files for path in glob.glob(each)})
            if not paths:
                raise TaskError(
                    f"needle: no file matches haystack_files={list(self.haystack_files)}; the "
                    "protocol's essays come with: git clone "
                    "https://github.com/gkamradt/LLMTest_NeedleInAHaystack"
                )
            for path in paths:
                try:
                    texts.append(Path(path).read_text(encoding="utf-8"))
                except (OSError, UnicodeDecodeError) as problem:
                    raise TaskError(f"needle: cannot read {path}: {problem}") from problem
        else:
            texts = list(self._dataset())
        texts = [text.strip() for text in texts if text.strip()]
        if not texts:
            raise TaskError(f"needle: the {self.haystack} haystack holds no text")
        return texts

    def _dataset(self, limit: int = 200) -> Iterator[str]:
        """The first ``limit`` texts of the Hugging Face dataset."""
        from datasets import load_dataset

        parts = (self.dataset_name, self.dataset_config, self.dataset_split)
        where = " ".join(part for part in parts if part)
        try:
            rows = load_dataset(
                self.dataset_name, self.dataset_config, split=self.dataset_split, streaming=True
            )
            for row in rows.take(limit):
                if self.dataset_column not in row:
                    raise TaskError(
                        f"needle: dataset {where} has no column {self.dataset_column!r}; "
                        f"one of {', '.join(row)}"
                    )
                yield str(row[self.dataset_column])
        except TaskError:
            raise
        except Exception as problem:
            reason = str(problem).strip().splitlines()[0] if str(problem).strip() else "?"
            raise TaskError(f"needle: cannot load dataset {where}: {reason}") from problem

    def _pieces(self, texts: Sequence[str], number: int, encoder: PromptEncoder) -> list[list[int]]:
        """Token ids of the filler's sentences, one list each, enough for the longest prompt.

        All prompts with the same number share the filler, as in the protocol: only length and
        depth change.
        """
        need = max(self.lengths)
        pieces: list[list[int]] = []
        total = 0
        if texts:
            first = random.Random(f"kvbench needle {self.seed} {number}").randrange(len(texts))
            text = 0
            while total < need:
                document = texts[(first + text) % len(texts)]
                for sentence in split_sentences(document if text == 0 else "\n\n" + document):
                    ids = encoder.encode_text(sentence)
                    pieces.append(ids)
                    total += len(ids)
                    if total >= need:
                        break
                text += 1
                if text >= len(texts) and not total:
                    raise TaskError("needle: the haystack's texts have no tokens")
            return pieces
        for sentence in generated_haystack(f"needle {self.seed} {number}", self.facts):
            ids = encoder.encode_text(" " + sentence if pieces else sentence)
            pieces.append(ids)
            total += len(ids)
            if total >= need:
                return pieces
        raise AssertionError("generated filler has no end")

    def _example(
        self,
        encoder: PromptEncoder,
        pieces: Sequence[Sequence[int]],
        number: int,
        length: int,
        depth: float,
    ) -> Example:
        question = "\n\n" + self.question
        question_ids = encoder.encode_text(question)
        inner = encoder.encode_text(" " + self.needle.strip())
        leading = encoder.encode_text(self.needle.strip() + " ")
        # Copies of the needle: the first at `depth`, the others evenly over the rest.
        wanted = [depth]
        wanted += [100.0 * (copy + 0.5) / (self.repeats - 1) for copy in range(self.repeats - 1)]
        room = length - encoder.overhead - len(question_ids)
        budget = room - self.repeats * len(inner)
        for _ in range(4):  # a needle at the very start may have another number of tokens
            kept, ends = self._cut(pieces, budget)
            total = len(kept)
            places = [
                max(end for end in ends if end <= percent / 100 * total + 1e-9)
                for percent in wanted
            ]
            used = sum(len(inner) if place else len(leading) for place in places)
            if budget == room - used:
                break
            budget = room - used
        if budget < 0 or not kept:
            least = length + 1 - budget
            raise TaskError(
                f"needle: length {length} is too short for needle, question and filler; "
                f"at least {least} tokens"
            )
        context: list[int] = []
        last = 0
        start = -1
        for place, first in sorted((place, index) for index, place in enumerate(places)):
            context += kept[last:place]
            if first == 0:
                start = len(context)
            context += inner if place else leading
            last = place
        context += kept[last:]
        if len(context) + len(question_ids) + encoder.overhead != length:
            raise AssertionError(f"prompt of {len(context)} tokens, expected {room}")
        return Example(
            id=f"len{length}-depth{depth:g}-{number:04d}",
            context=encoder.decode(context),
            question=question,
            answers=(self.answer,),
            max_new_tokens=self.max_new_tokens,
            dataset=self.name,
            stop=tuple(self.stop),
            context_ids=tuple(context),
            question_ids=tuple(question_ids),
            fields={
                "length": length,
                "depth": depth,
                "needle_start": start + len(encoder.prefix_ids),
                "needle_tokens": len(inner) if places[0] else len(leading),
                "haystack": self.haystack,
                "repeats": self.repeats,
            },
        )

    @staticmethod
    def _cut(pieces: Sequence[Sequence[int]], budget: int) -> tuple[list[int], list[int]]:
        """The first ``budget`` tokens of the filler, and where sentences end in them (0 counts)."""
        kept: list[int] = []
        ends = [0]
        for piece in pieces:
            if len(kept) >= budget:
                break
            kept += piece
            if len(kept) <= budget:
                ends.append(len(kept))
        return kept[: max(0, budget)], ends
