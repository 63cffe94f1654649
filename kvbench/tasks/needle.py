"""Needle in a haystack: find one sentence at a chosen depth of a prompt of an exact length.

Protocol: G. Kamradt, "Needle In A Haystack - Pressure Testing LLMs" (2023),
github.com/gkamradt/LLMTest_NeedleInAHaystack: filler text, a needle inserted at a percentage of its
length after the nearest sentence end at or before (at 100 per cent: last, wherever the filler was cut),
and a question about it at the end. The default filler is generated (:mod:`kvbench.tasks.haystack`);
text files or a Hugging Face dataset can be used.

Prompts with the same filler are not independent: what a method keeps of a text decides about all of
them. So the unit that intervals resample is the filler (record field ``filler``), and every prompt has
one of its own. Long prompts made of few files share text even so, and their fillers are then alike.

Scores of a prediction: ``containment`` (the expected answer stands in it, word for word),
``word_recall`` (share of the answer's words that are in it), ``released_recall`` (the same as the code
released with BalanceKV counts) and ``rouge1`` (ROUGE-1 F).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le, MinLen

from kvbench.errors.options import Distinct, Text
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import (
    Example,
    Many,
    NewTokens,
    Repeats,
    Task,
    TaskError,
    Tokens,
    balanced_order,
)
from kvbench.tasks.data import file_digests, texts_of_dataset, texts_of_files
from kvbench.tasks.encoding import check_template
from kvbench.tasks.haystack import filler, place_needles
from kvbench.tasks.metrics_text import Pairwise, containment, released_recall, rouge1, word_recall
from kvbench.tasks.words import words_of

HAYSTACK, QUESTION = "{haystack}", "{question}"
PARTS = {"needle": ("{key}", "{value}"), "question": ("{key}",), "answer": ("{value}",)}
"""What the texts of needles that are hidden together must hold."""
SCORES: Mapping[str, Pairwise] = {
    "containment": containment,
    "word_recall": word_recall,
    "released_recall": released_recall,
    "rouge1": rouge1,
}
"""Of a prediction and the answer."""


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """A needle at every depth of prompts of every length.

    Attributes:
        lengths: prompt lengths in tokens, everything the model sees counted (but see `buffer`).
        depths: percentages of the haystack before the needle, 0..100.
        num_examples: prompts at every length and depth.
        share_fillers: a filler is used at every length and depth, as in the protocol, so that there are
            `num_examples` units in all; False: each prompt has its own.
        needle, question, answer: what is hidden, what is asked, what counts. White space around the
            needle is kept; where there is none a blank sets it off.
        together: one prompt has a needle at every depth, each a fact of its own (``{key}`` in needle and
            question is a word, ``{value}`` in needle and answer a number of five digits), and each is
            asked for: under ``compress_after=context`` one compression shows the recall of all depths.
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
    version: ClassVar[int] = 3
    unit: ClassVar[str] = "filler"
    measures: ClassVar[tuple[str, ...]] = ("containment", "word_recall")
    breakdown: ClassVar[tuple[str, ...]] = ("length", "depth")
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "depth")

    needle: Text
    question: Text
    answer: Text
    lengths: Distinct[Tokens] = (512, 1024, 2048, 4096)
    depths: Distinct[Annotated[float, Ge(0), Le(100)]] = (0, 25, 50, 75, 100)
    num_examples: Many = 4
    share_fillers: bool = False
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
    together: bool = False
    seed: int = 0
    primary: Literal["containment", "word_recall", "released_recall", "rouge1"] = "containment"
    max_new_tokens: NewTokens = 48
    stop: Sequence[str] = ()
    end_tokens: Sequence[Annotated[str, MinLen(1), "text that is not empty"]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template, HAYSTACK, QUESTION)
        if self.haystack == "files" and not self.haystack_files:
            raise TaskError(
                "task.haystack_files is empty; allowed with haystack=files: globs of text files"
            )
        if self.haystack == "dataset" and not self.dataset_name:
            raise TaskError(
                "task.dataset_name is null; allowed with haystack=dataset: a Hugging Face dataset"
            )
        for option, names in PARTS.items():
            text = getattr(self, option)
            if self.together and not all(name in text for name in names):
                raise TaskError(
                    f"task.{option} is {text!r}; allowed with together=true: text with "
                    f"{' and '.join(names)}"
                )
        if self.together and self.repeats > 1:
            raise TaskError(
                f"task.repeats is {self.repeats}; allowed with together=true: 1 (a needle per depth)"
            )

    def digests(self) -> Mapping[str, str]:
        """sha256 of each haystack file, by file name."""
        return file_digests(self.haystack_files) if self.haystack == "files" else {}

    def metric_name(self) -> str:
        """See `Task.metric_name`."""
        return self.primary

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every length at every depth `num_examples` times; of every prefix, the shares of each length
        and of each depth are those of the whole to within one example (one context, where all depths
        are `together`)."""
        texts = self._texts()
        begin = encoder.begin_ids if self.begin_tokens else []

        @cache
        def filling(number: int) -> tuple[str, list[list[int]]]:
            need = max(self.lengths)
            return filler(texts, self.seed, number, need, 2 * begin, encoder, self.facts)

        sizes = (len(self.lengths), 1 if self.together else len(self.depths), self.num_examples)
        examples = []
        for i, j, k in balanced_order(sizes):
            number = k if self.share_fillers else (k * sizes[0] + i) * sizes[1] + j
            asked = self._asked(encoder, filling(number), number, self.lengths[i], self.depths[j])
            examples.extend(asked)
        return examples

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """All four scores; the primary one again as ``score``."""
        scores = {name: score(prediction, example.answers[0]) for name, score in SCORES.items()}
        return {"score": scores[self.primary], **scores}

    def _settled(self, answer: str, text: str) -> bool:
        """Whether the whole answer is there, so that what may follow takes nothing away."""
        return self.primary != "rouge1" and SCORES[self.primary](text, answer) == 1.0

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

    def _facts(
        self, number: int, length: int, depth: float
    ) -> tuple[list[tuple[float, str]], list[tuple[int, str, str]]]:
        """Depth and text of each needle of a context, and which is asked for by which question with
        which answer: the needle and its copies, or a fact at every depth."""
        if not self.together:
            copies = range(self.repeats - 1)  # the others evenly over the text
            depths = [depth, *(100.0 * (copy + 0.5) / (self.repeats - 1) for copy in copies)]
            return [(place, self.needle) for place in depths], [(0, self.question, self.answer)]
        rng = random.Random(f"kvbench needles {self.seed} {number} {length}")
        keys = rng.sample([word for word in words_of("noun") if word.isalpha()], len(self.depths))
        values = rng.sample(range(10_000, 100_000), len(self.depths))

        def told(text: str, fact: int) -> str:
            return text.replace("{key}", keys[fact]).replace("{value}", str(values[fact]))

        order = rng.sample(range(len(self.depths)), len(self.depths))
        needles = [(place, told(self.needle, fact)) for fact, place in enumerate(self.depths)]
        return needles, [(f, told(self.question, f), told(self.answer, f)) for f in order]

    def _asked(
        self,
        encoder: PromptEncoder,
        filling: tuple[str, Sequence[Sequence[int]]],
        number: int,
        length: int,
        depth: float,
    ) -> list[Example]:
        """The examples of one context. The longest has exactly `length` tokens."""
        needles, asked = self._facts(number, length, depth)
        before, _, after = self.template.partition(HAYSTACK)
        before_ids = encoder.encode_text(before) if before else []
        questions = [after.replace(QUESTION, question) for _, question, _ in asked]
        question_ids = [encoder.encode_text(question) for question in questions]
        begin = encoder.begin_ids if self.begin_tokens else []
        put = [
            (
                begin + encoder.encode_text(text if text[0].isspace() else " " + text),
                begin + encoder.encode_text(text if text[-1].isspace() else text + " "),
            )
            for _, text in needles
        ]
        around = encoder.overhead + len(before_ids) + max(map(len, question_ids))
        room = length - (around if self.buffer is None else self.buffer)
        depths = [depth for depth, _ in needles]
        context, spans = place_needles(filling[1], put, depths, length, room)
        ids, text = (*before_ids, *context), before + encoder.decode(context)
        ends = {encoder.encode_text(end)[-1] for end in self.end_tokens}
        return [
            Example(
                id=f"len{length}-depth{depths[fact]:g}-{number:04d}",
                context=text,
                question=question,
                answers=(answer,),
                max_new_tokens=self.max_new_tokens,
                dataset=self.name,
                stop=tuple(self.stop),
                context_ids=ids,
                evidence=needles[fact][1].strip(),
                question_ids=tuple(asked_ids),
                end_ids=encoder.end_ids | ends if ends else None,
                settled=partial(self._settled, answer),
                context_id=f"len{length}-{number:04d}" if self.together else None,
                fields={
                    "length": length,
                    "depth": depths[fact],
                    "filler": filling[0],
                    "needle_start": spans[fact][0] + len(encoder.prefix_ids) + len(before_ids),
                    "needle_tokens": spans[fact][1],
                    "haystack": self.haystack,
                    "repeats": self.repeats,
                },
            )
            for (fact, _, answer), question, asked_ids in zip(
                asked, questions, question_ids, strict=True
            )
        ]
