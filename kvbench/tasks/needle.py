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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
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
from kvbench.tasks.haystack import generated_haystack, split_sentences
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


class Filler(NamedTuple):
    """The text around the needles of a prompt: its name, which is the unit that intervals resample, and
    the token ids of its sentences."""

    name: str
    pieces: list[list[int]]


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
        texts = self._texts(encoder)
        filler = cache(partial(self._filler, encoder, texts))
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

    def _texts(self, encoder: PromptEncoder) -> list[tuple[str, str]]:
        """The names and texts of the files; none where the filler is generated."""
        if not self.haystack_files:
            return []
        texts = texts_of_files("haystack_files", self.haystack_files, ESSAYS)
        texts = [(name, text.strip()) for name, text in texts if text.strip()]
        if not any(encoder.encode_text(text[:100]) for _, text in texts):
            raise TaskError("needle: the haystack of files holds no text, or none with tokens")
        return texts

    def _filler(
        self, encoder: PromptEncoder, texts: Sequence[tuple[str, str]], number: int
    ) -> Filler:
        """Filler `number`, of at least as many tokens as the longest prompt has. It depends on no length
        or depth, so that the prompts that are made of it differ in these only, as in the protocol. Of
        files each filler begins with another one, as long as there are others, and goes on with those
        after it."""
        if texts:
            order = list(range(len(texts)))
            random.Random(f"kvbench needle {self.seed}").shuffle(order)
            first = order[number % len(texts)]
            name, sentences = texts[first][0], _sentences_from(texts, first)
        else:
            name = f"seed {self.seed}, {number}"
            generated = generated_haystack(f"needle {self.seed} {number}")
            sentences = (f" {text}" if index else text for index, text in enumerate(generated))
        before, blank = self._head(encoder)
        pieces: list[list[int]] = []
        missing = max(self.lengths)
        while missing > 0:
            text = blank + next(sentences)
            blank = ""
            pieces.append(encoder.encode_after(before, text))
            missing -= len(pieces[-1])
            before = text
        begin = encoder.begin_ids if self.begin_tokens else []
        return Filler(name, [2 * begin + pieces[0], *pieces[1:]])

    def _facts(
        self, number: int, length: int, depth: float, name: str
    ) -> tuple[list[Fact], list[Fact]]:
        """Make the facts of a prompt, one or one for every depth. Returns them by depth, and in the
        order in which they are asked for.

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


def _sentences_from(texts: Sequence[tuple[str, str]], first: int) -> Iterator[str]:
    """The sentences of document `first` and of those after it, endlessly, with a blank line between
    documents."""
    yield from split_sentences(texts[first][1])
    for index in count(first + 1):
        yield from split_sentences("\n\n" + texts[index % len(texts)][1])


def place_needles(
    pieces: Sequence[Sequence[int]],
    needles: Sequence[tuple[Sequence[int], Sequence[int]]],
    depths: Sequence[float],
    length: int,
    room: int,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of `room` tokens, filler and needles together, and for each needle the place of its
    first token and the number of its tokens.

    Args:
        pieces: the token ids of the filler's sentences.
        needles: for each needle its token ids inside the text, and those at the very start of it.
        depths: for each needle the percentage of the filler before it. The needle is put at the nearest
            end of a sentence at or before that; at 100 per cent last, wherever the filler is cut.
        length: the number of tokens of the whole prompt, for the message.
    """
    filler_tokens = room - sum(len(inside) for inside, _ in needles)
    # Where a needle is the very start of the text it may have another number of tokens, and the filler
    # is then cut anew.
    for _ in range(4):
        filler, ends = _cut(pieces, filler_tokens)
        places = [_place(depth, ends, len(filler)) for depth in depths]
        inserted = [
            inside if place else at_start
            for (inside, at_start), place in zip(needles, places, strict=True)
        ]
        remaining = room - sum(map(len, inserted))
        if filler_tokens == remaining:
            break
        filler_tokens = remaining
    if filler_tokens < 0 or not filler:
        raise TaskError(
            f"needle: length {length} is too short for needle, question and filler; "
            f"at least {length + 1 - filler_tokens} tokens"
        )
    context: list[int] = []
    spans = [(-1, 0)] * len(needles)
    copied = 0
    for place, needle in sorted(zip(places, range(len(needles)), strict=True)):
        context += filler[copied:place]
        spans[needle] = (len(context), len(inserted[needle]))
        context += inserted[needle]
        copied = place
    context += filler[copied:]
    return context, spans


def _place(depth: float, ends: Sequence[int], total: int) -> int:
    """The last sentence end (in tokens) at or before `depth` per cent; `total` at 100."""
    if depth == 100:
        return total
    return max(end for end in ends if end <= depth / 100 * total + 1e-9)


def _cut(pieces: Sequence[Sequence[int]], tokens: int) -> tuple[list[int], list[int]]:
    """The first `tokens` tokens of the filler, and where in them sentences end, 0 included."""
    ids: list[int] = []
    ends = [0]
    for piece in pieces:
        if len(ids) >= tokens:
            break
        ids += piece
        if len(ids) <= tokens:
            ends.append(len(ids))
    return ids[: max(0, tokens)], ends
