"""Needle in a haystack: find one sentence at a chosen depth of a prompt of an exact length.

Protocol: G. Kamradt, "Needle In A Haystack - Pressure Testing LLMs" (2023),
github.com/gkamradt/LLMTest_NeedleInAHaystack: filler text, a needle inserted at a percentage of its
length after the nearest sentence end at or before (at 100 per cent: last, wherever the filler was
cut), and a question about it at the end. The filler is generated (:mod:`kvbench.tasks.haystack`) or
comes from text files.

Prompts with the same filler are not independent, since the tokens that a method keeps of a text decide
about all of them. Intervals therefore resample fillers (record field ``filler``), and every prompt has
a filler of its own. Even so, long prompts that are made of few files share text. Of several facts
(`Needle.facts`) each has fillers of its own: the unit is the needle and its filler.

Scores of a prediction: ``containment`` (it contains the answer word for word), ``word_recall`` (the
share of the answer's words that it has), ``released_recall`` (the same, counted as in the code
released with BalanceKV) and ``rouge1`` (ROUGE-1 F). All are of the whole answer; no example has
`is_final`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, ClassVar, Literal, NamedTuple

from annotated_types import Ge, Le, MinLen

from kvbench.errors.options import Distinct, Text
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import (
    Example,
    Many,
    NewTokens,
    Task,
    TaskError,
    Tokens,
    balanced_order,
)
from kvbench.tasks.data import file_digests, texts_of_files
from kvbench.tasks.encoding import check_template
from kvbench.tasks.haystack import Filler, make_filler, place_needles
from kvbench.tasks.metrics_text import Pairwise, containment, released_recall, rouge1, word_recall
from kvbench.tasks.words import words_of

HAYSTACK, QUESTION = "{haystack}", "{question}"
"""The fields of `Needle.template`."""
PARTS = {"needle": ("{key}", "{value}"), "question": ("{key}",), "answer": ("{value}",)}
"""The fields that the texts of needles that are hidden together must have, by option."""
ESSAYS = (
    "; the protocol's essays come with: git clone "
    "https://github.com/gkamradt/LLMTest_NeedleInAHaystack"
)
"""A hint for the error where no file matches."""
SCORES: Mapping[str, Pairwise] = {
    "containment": containment,
    "word_recall": word_recall,
    "released_recall": released_recall,
    "rouge1": rouge1,
}
"""The scores of a prediction and the answer, by name."""


class Fact(NamedTuple):
    """A text that is hidden, and the question about it."""

    depth: float
    needle: str
    question: str
    answer: str


@dataclass(frozen=True, kw_only=True)
class Needle(Task):
    """A needle at every depth of prompts of every length.

    conf/task/needle.yaml tells the options. White space around the needle is kept; where there is none,
    a blank is added.

    Attributes:
        facts: several needles in turn, in place of the one, so that a result does not rest on one
            sentence: by name its ``needle``, ``question`` and ``answer``. A prompt has one of them; all
            occur equally often in every prefix of the examples.
        share_fillers: whether a filler is used at every length and depth, as in the protocol, so that
            there are `num_examples` units in all. Otherwise each prompt has its own.
        together: whether one prompt has a needle at every depth, each a fact of its own (``{key}`` in
            needle and question is a word, ``{value}`` in needle and answer a number of five digits),
            and a question about each. Under ``compress_after=context`` one compression then shows the
            recall at all depths.
        begin_tokens: whether the tokens that the tokenizer puts before any text (BOS) also stand twice
            before the haystack and once before each needle, as in the released code of BalanceKV.
    """

    name: ClassVar[str] = "needle"
    version: ClassVar[int] = 5
    unit: ClassVar[str] = "filler"
    measures: ClassVar[tuple[str, ...]] = ("containment", "word_recall")
    breakdown: ClassVar[tuple[str, ...]] = ("length", "depth", "fact")
    heatmap: ClassVar[tuple[str, str] | None] = ("length", "depth")

    needle: Text | None = None
    question: Text | None = None
    answer: Text | None = None
    facts: Mapping[Text, Mapping[str, Text]] = field(default_factory=dict)
    lengths: Distinct[Tokens] = (512, 1024, 2048, 4096)
    depths: Distinct[Annotated[float, Ge(0), Le(100)]] = (0, 25, 50, 75, 100)
    num_examples: Many = 4
    share_fillers: bool = False
    template: str = "{haystack}\n\n{question}"
    buffer: Annotated[int, Ge(0), Le(10_000_000)] | None = None
    begin_tokens: bool = False
    haystack_files: Sequence[str] = ()
    together: bool = False
    seed: int = 0
    primary: Literal["containment", "word_recall", "released_recall", "rouge1"] = "containment"
    max_new_tokens: NewTokens = 48
    stop: Sequence[str] = ()
    end_tokens: Sequence[Annotated[str, MinLen(1)]] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        check_template(self.template, HAYSTACK, QUESTION)
        single = self._single()
        if self.facts and (self.together or any(single.values())):
            raise TaskError(
                "task.facts holds the needles; allowed beside it: together=false, and null for needle, "
                "question and answer"
            )
        for name, texts in (self.facts or {"": single}).items():
            if texts.keys() != PARTS.keys() or not all(texts.values()):
                raise TaskError(
                    f"task.{f'facts.{name}' if name else 'needle'} is {dict(texts)}; allowed: texts for "
                    f"each of {', '.join(PARTS)}"
                )
        for option, names in PARTS.items():
            text = single[option]
            if self.together and not all(name in text for name in names):
                raise TaskError(
                    f"task.{option} is {text!r}; allowed with together=true: text with "
                    f"{' and '.join(names)}"
                )

    def digests(self) -> Mapping[str, str]:
        return file_digests(self.haystack_files)

    def metric_name(self) -> str:
        return self.primary

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """Every fact at every length and every depth `num_examples` times. In every prefix the facts,
        the lengths and the depths occur equally often, to within one example (one context, where all
        depths are `together`).
        """
        texts = self._texts()
        begin = encoder.begin_ids if self.begin_tokens else []
        head = self._head(encoder)

        @cache
        def filler(number: int) -> Filler:
            tokens = max(self.lengths)
            return make_filler(texts, self.seed, number, tokens, 2 * begin, encoder, head)

        names = list(self.facts) or [""]
        num_lengths = len(self.lengths)
        num_depths = 1 if self.together else len(self.depths)
        examples: list[Example] = []
        sizes = (len(names), num_lengths, num_depths, self.num_examples)
        for fact, length, depth, copy in balanced_order(sizes):
            number = copy * len(names) + fact
            if not self.share_fillers:
                number = (number * num_lengths + length) * num_depths + depth
            examples += self._context_examples(
                encoder,
                filler(number),
                number,
                self.lengths[length],
                self.depths[depth],
                names[fact],
            )
        return examples

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        scores = {name: score(prediction, example.answers[0]) for name, score in SCORES.items()}
        return {"score": scores[self.primary], **scores}

    def _single(self) -> Mapping[str, str]:
        return {option: getattr(self, option) or "" for option in PARTS}

    def _texts(self) -> list[tuple[str, str]]:
        if not self.haystack_files:
            return []
        texts = texts_of_files("haystack_files", self.haystack_files, ESSAYS)
        texts = [(name, text.strip()) for name, text in texts if text.strip()]
        if not texts:
            raise TaskError("needle: the haystack of files holds no text")
        return texts

    def _facts(
        self, number: int, length: int, depth: float, name: str
    ) -> tuple[list[Fact], list[Fact]]:
        """One, or one for every depth; and the same in the order in which they are asked for.

        Args:
            name: in `facts`; empty where there are none.
        """
        source = self.facts[name] if name else self._single()
        texts = [source[option] for option in PARTS]
        if not self.together:
            fact = Fact(depth, *texts)
            return [fact], [fact]
        rng = random.Random(f"kvbench needles {self.seed} {number} {length}")
        count = len(self.depths)
        keys = rng.sample([word for word in words_of("noun") if word.isalpha()], count)
        values = rng.sample(range(10_000, 100_000), count)
        facts = []
        for depth, key, value in zip(self.depths, keys, values, strict=True):
            filled = (text.replace("{key}", key).replace("{value}", str(value)) for text in texts)
            facts.append(Fact(depth, *filled))
        return facts, rng.sample(facts, count)

    def _context_examples(
        self,
        encoder: PromptEncoder,
        filler: Filler,
        number: int,
        length: int,
        depth: float,
        name: str,
    ) -> list[Example]:
        """The prompt of the longest question has exactly `length` tokens."""
        facts, asked = self._facts(number, length, depth, name)
        before, _, after = self.template.partition(HAYSTACK)
        texts = [after.replace(QUESTION, fact.question) for fact in asked]
        if encoder.adds_blank:
            begin = [] if encoder.before else list(encoder.prefix_ids)
            before_ids = begin + encoder.encode_text(self._head(encoder)[0])
            question_ids = [encoder.encode_after(".", text + encoder.after) for text in texts]
        else:
            before_ids = [*encoder.prefix_ids, *(encoder.encode_text(before) if before else ())]
            question_ids = [[*encoder.encode_text(text), *encoder.suffix_ids] for text in texts]
        around = len(before_ids) + max(map(len, question_ids))
        room = length - (around if self.buffer is None else self.buffer)
        depths = [fact.depth for fact in facts]
        needle_ids = [self._needle_ids(encoder, fact.needle) for fact in facts]
        haystack_ids, spans = place_needles(filler.pieces, needle_ids, depths, length, room)
        context = before + encoder.decode(haystack_ids)
        context_ids = (*before_ids, *haystack_ids)
        end_ids = {encoder.encode_text(text)[-1] for text in self.end_tokens}
        examples = []
        for fact, text, ids in zip(asked, texts, question_ids, strict=True):
            start, tokens = spans[facts.index(fact)]
            examples.append(
                Example(
                    id=f"{name}{'-' * bool(name)}len{length}-depth{fact.depth:g}-{number:04d}",
                    context=context,
                    question=text,
                    answers=(fact.answer,),
                    max_new_tokens=self.max_new_tokens,
                    dataset=self.name,
                    stop=tuple(self.stop),
                    context_ids=context_ids,
                    evidence=fact.needle.strip(),
                    question_ids=tuple(ids),
                    complete=True,
                    end_ids=encoder.end_ids | end_ids if end_ids else None,
                    context_id=f"len{length}-{number:04d}" if self.together else None,
                    fields={
                        "length": length,
                        "depth": fact.depth,
                        **({"fact": name} if name else {}),
                        "filler": filler.name,
                        "needle_start": start + len(before_ids),
                        "needle_tokens": tokens,
                        "haystack": "files" if self.haystack_files else "generated",
                    },
                )
            )
        return examples

    def _needle_ids(self, encoder: PromptEncoder, text: str) -> tuple[list[int], list[int]]:
        """The token ids of a needle inside the text, and at its very start, for `place_needles`. A
        blank is added before the one and after the other where the needle has no white space there."""
        begin = encoder.begin_ids if self.begin_tokens else []
        before, blank = self._head(encoder)
        # The first word of the filler may have a blank of its own.
        has_blank = encoder.adds_blank and (blank or not before)
        inside = text if text[0].isspace() else " " + text
        at_start = blank + (text if text[-1].isspace() or has_blank else text + " ")
        inside_ids = encoder.encode_after(".", inside)
        return begin + inside_ids, begin + encoder.encode_after(before, at_start)

    def _head(self, encoder: PromptEncoder) -> tuple[str, str]:
        """The text that is encoded with the haystack before it, and the blanks at its end, which belong
        to the first word; both empty unless the tokenizer `adds_blank`."""
        text = encoder.before + self.template.partition(HAYSTACK)[0] if encoder.adds_blank else ""
        head = text.rstrip(" ")
        return head, text[len(head) :]
