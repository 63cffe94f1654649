"""Filler text for needle prompts, generated or from text files.

Generated text is deterministic, offline, and redundant. A document is about a few
*subjects* (a person, a place, a thing). Its sentences come from a small grammar and state a limited
number of facts about them again and again in other words, as notes and reports do. A compressed cache
can use that redundancy. Everything is drawn from a ``random.Random``, whose output for a given seed is
the same on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import TaskError

# fmt: off
PEOPLE = (
    "gardener", "teacher", "baker", "sailor", "farmer", "painter", "doctor", "tailor", "miller",
    "driver", "singer", "student", "carpenter", "librarian", "fisherman", "mayor", "neighbor",
    "merchant", "shepherd", "clerk",
)
PLACES = (
    "market", "harbor", "garden", "library", "kitchen", "station", "bridge", "village",
    "workshop", "school", "orchard", "tower", "valley", "river", "square", "museum", "forest",
    "mill", "theater", "lake",
)
THINGS = (
    "basket", "letter", "lantern", "map", "clock", "bread", "boat", "ladder", "blanket", "kettle",
    "wagon", "mirror", "violin", "bucket", "table", "coat", "apple", "candle", "book", "rope",
)
QUALITIES = (
    "old", "small", "quiet", "bright", "heavy", "warm", "green", "broken", "clean", "narrow",
    "simple", "empty", "famous", "gentle", "white", "dusty", "strong", "pale", "round", "cheap",
)
ACTIONS = (
    "repairs", "carries", "paints", "sells", "finds", "keeps", "cleans", "hides", "brings",
    "borrows", "admires", "counts", "moves", "lifts", "returns", "watches",
)
TIMES = (
    "in the morning", "at noon", "in the evening", "every week", "after the rain",
    "before breakfast", "in the winter", "on market days", "late at night", "once a year",
    "during the summer", "when the bell rings",
)
REASONS = (
    "because the work is easy", "because nobody else wants to", "since the road is long",
    "although it takes time", "so that the others can rest", "while the children play",
    "because it costs nothing", "although the weather is bad", "as people did long ago",
    "and nobody remembers why",
)
OPENERS = (
    "As a rule", "Most of the time", "It is said that", "People know that", "Still",
    "In those days", "For that reason", "Now and then", "As before", "Of course",
)
# fmt: on


def sentences(rng: random.Random, facts: int = 24) -> Iterator[str]:
    """Endless sentences of a document about a few subjects, to be joined with single spaces; fewer
    `facts` are repeated more often. The facts are drawn at once, the sentences one by one."""
    people, places, things = rng.sample(PEOPLE, 6), rng.sample(PLACES, 6), rng.sample(THINGS, 8)
    kinds = (people, ACTIONS, QUALITIES, things, places, TIMES, REASONS)
    drawn_facts = [[rng.choice(kind) for kind in kinds] for _ in range(max(1, facts))]
    return _sentences_about(drawn_facts, rng)


def _sentences_about(facts: Sequence[Sequence[str]], rng: random.Random) -> Iterator[str]:
    while True:
        person, action, quality, thing, place, time, reason = rng.choice(facts)
        text = rng.choice(
            (
                f"the {person} {action} the {quality} {thing} near the {place} {time}",
                f"the {person} {action} the {thing} {reason}",
                f"{time} the {person} {action} the {quality} {thing}",
                f"the {quality} {thing} is in the {place}, {reason}",
                f"near the {place} the {person} {action} the {thing} {time}",
                f"the {thing} of the {person} is {quality} {time}",
                f"the {place} is {quality}, and the {person} {action} the {thing}",
                f"the {person} is at the {place} {time} {reason}",
            )
        )
        if rng.random() < 0.25:
            text = f"{rng.choice(OPENERS).lower()} {text}".replace("still the", "still, the")
        yield text[0].upper() + text[1:] + "."


def generated_haystack(seed: int | str, facts: int = 24) -> Iterator[str]:
    return sentences(random.Random(f"kvbench haystack {seed}"), facts)


class Filler(NamedTuple):
    """The text around the needles of a prompt: its name, which is the unit that intervals resample, and
    the token ids of its sentences."""

    name: str
    pieces: list[list[int]]


def make_filler(
    texts: Sequence[tuple[str, str]],
    seed: int,
    number: int,
    tokens: int,
    begin: list[int],
    encoder: PromptEncoder,
    head: tuple[str, str] = ("", ""),
) -> Filler:
    """Filler `number`, of at least `tokens` tokens. It depends on no length or depth, so that the
    prompts that are made of it differ in these only, as in the protocol.

    Args:
        texts: names and texts of documents. Each filler begins with another one, as long as there are
            others, and goes on with those after it. Without documents the filler is generated.
        begin: the token ids before the first sentence.
        head: the text before the filler, and the blanks between them.
    """
    if texts:
        order = list(range(len(texts)))
        random.Random(f"kvbench needle {seed}").shuffle(order)
        first = order[number % len(texts)]
        name = texts[first][0]
        pieces = _encoded(_sentences_from(texts, first, encoder), tokens, encoder, head)
    else:
        name = f"seed {seed}, {number}"
        generated = generated_haystack(f"needle {seed} {number}")
        with_blanks = (f" {text}" if index else text for index, text in enumerate(generated))
        pieces = _encoded(with_blanks, tokens, encoder, head)
    pieces[0] = begin + pieces[0]
    return Filler(name, pieces)


def _encoded(
    texts: Iterator[str], tokens: int, encoder: PromptEncoder, head: tuple[str, str]
) -> list[list[int]]:
    """The token ids of texts, until there are at least `tokens`, one list each."""
    pieces: list[list[int]] = []
    before, blank = head
    total = 0
    while total < tokens:
        text = blank + next(texts)
        blank = ""
        pieces.append(encoder.encode_after(before, text))
        total += len(pieces[-1])
        before = text
    return pieces


def _sentences_from(
    texts: Sequence[tuple[str, str]], first: int, encoder: PromptEncoder
) -> Iterator[str]:
    """The sentences of document `first` and of those after it, endlessly, with a blank line between
    documents."""
    if not any(encoder.encode_text(text[:100]) for _, text in texts):
        raise TaskError("needle: the haystack's texts have no tokens")
    yield from split_sentences(texts[first][1])
    for index in count(first + 1):
        yield from split_sentences("\n\n" + texts[index % len(texts)][1])


SENTENCE = re.compile(r".+?(?:[.!?]+[\"'\u201d\u2019)\]]*(?=\s|$)|$)", re.DOTALL)
"""A sentence with the white space before it; sentences joined again are the text."""


def split_sentences(text: str) -> list[str]:
    """The pieces joined are the text."""
    return SENTENCE.findall(text)


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
