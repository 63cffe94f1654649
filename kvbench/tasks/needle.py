"""Needle in a haystack: find one sentence at a chosen depth of a prompt of an exact length.

Protocol: G. Kamradt, "Needle In A Haystack - Pressure Testing LLMs" (2023),
github.com/gkamradt/LLMTest_NeedleInAHaystack: filler text, a needle inserted at a percentage of its
length after the nearest sentence end at or before (at 100 per cent: last, wherever the filler was cut),
and a question about it at the end. The default filler is generated (:mod:`kvbench.tasks.haystack`);
text files or a Hugging Face dataset can be used.

Prompts with the same filler are not independent: what a method keeps of a text decides about all of
them. So the unit that intervals resample is the filler (record field ``filler``), and there are
several. Long prompts made of few files share text even so, and their fillers are then alike.

Scores of a prediction: ``containment`` (the expected answer stands in it, word for word),
``word_recall`` (share of the answer's words that are in it), ``released_recall`` (the same as the code
released with BalanceKV counts) and ``rouge1`` (ROUGE-1 F).
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le

from kvbench.errors.options import Distinct, Text
from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.haystack import (
    file_digests,
    generated_haystack,
    texts_of_dataset,
    texts_of_files,
)
from kvbench.tasks.options import Many, NewTokens, Repeats, Tokens
from kvbench.tasks.order import balanced_order

SCORES = ("containment", "word_recall", "released_recall", "rouge1")
HAYSTACKS = ("generated", "files", "dataset")
HAYSTACK, QUESTION = "{haystack}", "{question}"
SENTENCE = re.compile(r".+?(?:[.!?]+[\"'\u201d\u2019)\]]*(?=\s|$)|$)", re.DOTALL)
"""A sentence with the white space before it; sentences joined again are the text."""


def split_sentences(text: str) -> list[str]:
    """Cut a text after each sentence end; the pieces joined are the text."""
    return SENTENCE.findall(text)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def containment(prediction: str, answer: str) -> float:
    """1 if the answer stands in the prediction; case, runs of white space and the answer's own full
    stop at the end do not matter."""
    wanted = " ".join(answer.lower().split())
    return float((wanted.rstrip(".!?") or wanted) in " ".join(prediction.lower().split()))


def word_recall(prediction: str, answer: str) -> float:
    """Share of the answer's words, repetitions counted, that the prediction has; letters and digits
    make words, punctuation does not count."""
    wanted = Counter(_words(answer))
    if not wanted:
        return 0.0
    return sum((wanted & Counter(_words(prediction))).values()) / sum(wanted.values())


def released_recall(prediction: str, answer: str) -> float:
    """The recall of github.com/ksheth96/BalanceKV, run_needle_in_haystack.py: the share of the answer's
    different words that the prediction has, where words are what white space separates, lower-cased.
    It departs from `word_recall` in two ways: a word counts once however often the answer has
    it, and punctuation is part of it ("day." is not "day"). Words such as "a", "and" and "in" count like
    any other: their answer has 11 different words, and an unrelated sentence with "a", "and", "in" and
    "on" scores 4/11."""
    wanted = set(answer.lower().split())
    return len(wanted & set(prediction.lower().split())) / len(wanted) if wanted else 0.0


@lru_cache(maxsize=1)
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rouge1"], use_stemmer=False)


def rouge1(prediction: str, answer: str) -> float:
    """ROUGE-1 F of rouge-score against the answer, without stemming. The released script of BalanceKV
    compares with the whole needle, stems, and multiplies by ten."""
    return float(_scorer().score(answer, prediction)["rouge1"].fmeasure)


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """A needle at every depth of prompts of every length.

    Attributes:
        lengths: prompt lengths in tokens, everything the model sees counted (but see `buffer`).
        depths: percentages of the haystack before the needle, 0..100.
        num_examples: fillers; each is used at every length and depth.
        needle, question, answer: what is hidden, what is asked, what counts. White space around the
            needle is kept; where there is none a blank sets it off.
        template: the prompt, with ``{haystack}`` and after it ``{question}``.
        buffer: None: every prompt has exactly the asked number of tokens. Otherwise haystack and needle
            have so many less, whatever template and question have.
        begin_tokens: the tokens that the tokenizer puts before any text (BOS) also stand twice before
            the haystack and once before each needle, where the released code of BalanceKV leaves them.
        haystack: ``generated``, ``files`` or ``dataset``.
        haystack_files: glob or list of globs of text files; each example begins at another file.
        dataset_name, dataset_config, dataset_split, dataset_column: for ``dataset``.
        facts: how many different facts generated filler is about; fewer: more redundancy.
        repeats: copies of the needle, the first at the depth and the others spread evenly.
        seed: of filler.
        primary: which of the scores is the `score` of the tables.
        max_new_tokens, stop: generation limits.
        end_tokens: texts; the last token of each ends the generation, as the model's end token does.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[int] = 2
    unit: ClassVar[str] = "filler"
    measures: ClassVar[tuple[str, ...]] = ("containment", "word_recall")
    breakdown: ClassVar[tuple[str, ...]] = ("length", "depth")
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "depth")

    needle: Text
    question: Text
    answer: Text
    lengths: Distinct[Tokens] = (512, 1024, 2048, 4096)
    depths: Distinct[Annotated[float, Ge(0), Le(100)]] = (0, 25, 50, 75, 100)
    num_examples: Many = 7
    template: str = "{haystack}\n\n{question}"
    buffer: Annotated[int, Ge(0), Le(10_000_000)] | None = None
    begin_tokens: bool = False
    haystack: Literal["generated", "files", "dataset"] = "generated"
    haystack_files: Sequence[str] = ()
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_column: str = "text"
    facts: Many = 24
    repeats: Repeats = 1
    seed: int = 0
    primary: Literal["containment", "word_recall", "released_recall", "rouge1"] = "containment"
    max_new_tokens: NewTokens = 48
    stop: Sequence[str] = ()
    end_tokens: Sequence[Text] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        before, _, after = self.template.partition(HAYSTACK)
        if (before + after).count(HAYSTACK) or after.count(QUESTION) != 1 or QUESTION in before:
            raise TaskError(
                f"task.template is {self.template!r}; allowed: {HAYSTACK} and, after it, {QUESTION}, "
                "each once"
            )
        if self.haystack == "files" and not self.haystack_files:
            raise TaskError(
                "task.haystack_files is empty; allowed with haystack=files: globs of text files"
            )
        if self.haystack == "dataset" and not self.dataset_name:
            raise TaskError(
                "task.dataset_name is null; allowed with haystack=dataset: a Hugging Face dataset"
            )

    def digests(self) -> Mapping[str, str]:
        """sha256 of each haystack file, by file name."""
        return file_digests(self.haystack_files) if self.haystack == "files" else {}

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every length at every depth with every filler; of every prefix, the shares of each length,
        of each depth and of each filler are those of the whole to within one example."""
        texts = self._texts()
        fillers = [self._filler(texts, number, encoder) for number in range(self.num_examples)]
        sizes = (len(self.lengths), len(self.depths), self.num_examples)
        return [
            self._example(encoder, fillers[k], k, self.lengths[i], self.depths[j])
            for i, j, k in balanced_order(sizes)
        ]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """All four scores; the primary one again as ``score``."""
        answer = example.answers[0]
        scores = {
            "containment": containment(prediction, answer),
            "word_recall": word_recall(prediction, answer),
            "released_recall": released_recall(prediction, answer),
            "rouge1": rouge1(prediction, answer),
        }
        return {"score": scores[self.primary], **scores}

    def _texts(self) -> list[tuple[str, str]]:
        """Names and texts of the documents to fill prompts with; none for generated filler."""
        if self.haystack == "generated":
            return []
        if self.haystack == "files":
            texts = texts_of_files(self.haystack_files)
        else:
            texts = texts_of_dataset(
                str(self.dataset_name), self.dataset_config, self.dataset_split, self.dataset_column
            )
        texts = [(name, text.strip()) for name, text in texts if text.strip()]
        if not texts:
            raise TaskError(f"needle: the {self.haystack} haystack holds no text")
        return texts

    def _filler(
        self, texts: Sequence[tuple[str, str]], number: int, encoder: PromptEncoder
    ) -> tuple[str, list[list[int]]]:
        """What filler `number` is called, and token ids of its sentences, one list each, enough for the
        longest prompt: only length and depth of the prompts made of it differ, as in the protocol.

        Of several documents each filler begins at another one, as long as there are others.
        """
        need = max(self.lengths)
        pieces: list[list[int]] = []
        begin = 2 * self._begin_ids(encoder)
        total = 0
        if not texts:
            for sentence in generated_haystack(f"needle {self.seed} {number}", self.facts):
                pieces.append(encoder.encode_text(" " + sentence if pieces else sentence))
                total += len(pieces[-1])
                if total >= need:
                    break
            pieces[0] = begin + pieces[0]
            return f"seed {self.seed}, {number}", pieces
        order = list(range(len(texts)))
        random.Random(f"kvbench needle {self.seed}").shuffle(order)
        first = order[number % len(texts)]
        text = 0
        while total < need:
            document = texts[(first + text) % len(texts)][1]
            for sentence in split_sentences(document if text == 0 else "\n\n" + document):
                pieces.append(encoder.encode_text(sentence))
                total += len(pieces[-1])
                if total >= need:
                    break
            text += 1
            if text >= len(texts) and not total:
                raise TaskError("needle: the haystack's texts have no tokens")
        pieces[0] = begin + pieces[0]
        return texts[first][0], pieces

    def _begin_ids(self, encoder: PromptEncoder) -> list[int]:
        """Tokens that the tokenizer puts before any text; none unless `begin_tokens`."""
        if not self.begin_tokens:
            return []
        plain, whole = (
            encoder.encode_text("a"),
            encoder.tokenizer.encode("a", add_special_tokens=True),
        )
        return list(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else []

    def _example(
        self,
        encoder: PromptEncoder,
        filler: tuple[str, Sequence[Sequence[int]]],
        number: int,
        length: int,
        depth: float,
    ) -> Example:
        before, _, after = self.template.partition(HAYSTACK)
        question = after.replace(QUESTION, self.question)
        before_ids = encoder.encode_text(before) if before else []
        question_ids = encoder.encode_text(question)
        begin, needle = self._begin_ids(encoder), self.needle
        inner = begin + encoder.encode_text(needle if needle[0].isspace() else " " + needle)
        leading = begin + encoder.encode_text(needle if needle[-1].isspace() else needle + " ")
        # Copies of the needle: the first at `depth`, the others evenly over the rest.
        wanted = [depth]
        wanted += [100.0 * (copy + 0.5) / (self.repeats - 1) for copy in range(self.repeats - 1)]
        around = encoder.overhead + len(before_ids) + len(question_ids)
        room = length - (around if self.buffer is None else self.buffer)
        budget = room - self.repeats * len(inner)
        for _ in range(4):  # a needle at the very start may have another number of tokens
            kept, ends = self._cut(filler[1], budget)
            total = len(kept)
            places = [
                total
                if percent == 100
                else max(e for e in ends if e <= percent / 100 * total + 1e-9)
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
        if len(context) != room:
            raise AssertionError(f"haystack of {len(context)} tokens, expected {room}")
        return Example(
            id=f"len{length}-depth{depth:g}-{number:04d}",
            context=before + encoder.decode(context),
            question=question,
            answers=(self.answer,),
            max_new_tokens=self.max_new_tokens,
            dataset=self.name,
            stop=tuple(self.stop),
            context_ids=(*before_ids, *context),
            question_ids=tuple(question_ids),
            end_ids=self._end_ids(encoder),
            fields={
                "length": length,
                "depth": depth,
                "filler": filler[0],
                "needle_start": start + len(encoder.prefix_ids) + len(before_ids),
                "needle_tokens": len(inner) if places[0] else len(leading),
                "haystack": self.haystack,
                "repeats": self.repeats,
            },
        )

    def _end_ids(self, encoder: PromptEncoder) -> frozenset[int] | None:
        ends = {encoder.encode_text(text)[-1] for text in self.end_tokens}
        return encoder.end_ids | ends if ends else None

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
