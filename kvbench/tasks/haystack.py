"""Filler text for needle prompts: generated, from text files, or from a Hugging Face dataset.

Generated text is deterministic, offline, and of tunable redundancy. A document is about a few
*subjects* (a person, a place, a thing). Its sentences come from a small grammar and state a limited
number of facts about them again and again in other words, as notes and reports do: that redundancy
is what a compressed cache can live on. Everything is drawn from a ``random.Random``, whose output for
a given seed is the same on every machine.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence

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
    """Sentences without end of a document about a few subjects, each with its full stop and without
    white space around it; join them with single spaces. The facts are drawn at once.

    Args:
        facts: how many different facts the document states; fewer means more redundancy.
    """
    people, places, things = rng.sample(PEOPLE, 6), rng.sample(PLACES, 6), rng.sample(THINGS, 8)
    kinds = (people, ACTIONS, QUALITIES, things, places, TIMES, REASONS)
    known = [[rng.choice(kind) for kind in kinds] for _ in range(max(1, facts))]
    return _told(rng, known)


def _told(rng: random.Random, known: Sequence[Sequence[str]]) -> Iterator[str]:
    while True:
        who, does, how, what, where, when, why = rng.choice(known)
        text = rng.choice(
            (
                f"the {who} {does} the {how} {what} near the {where} {when}",
                f"the {who} {does} the {what} {why}",
                f"{when} the {who} {does} the {how} {what}",
                f"the {how} {what} is in the {where}, {why}",
                f"near the {where} the {who} {does} the {what} {when}",
                f"the {what} of the {who} is {how} {when}",
                f"the {where} is {how}, and the {who} {does} the {what}",
                f"the {who} is at the {where} {when} {why}",
            )
        )
        if rng.random() < 0.25:
            text = f"{rng.choice(OPENERS).lower()} {text}".replace("still the", "still, the")
        yield text[0].upper() + text[1:] + "."


def generated_haystack(seed: int | str, facts: int = 24) -> Iterator[str]:
    """`sentences` of the document with this seed."""
    return sentences(random.Random(f"kvbench haystack {seed}"), facts)


def filler(
    texts: Sequence[tuple[str, str]],
    seed: int,
    number: int,
    need: int,
    begin: list[int],
    encoder: PromptEncoder,
    facts: int,
) -> tuple[str, list[list[int]]]:
    """What filler `number` is called, and token ids of its sentences, one list each, of at least `need`
    tokens: only length and depth of the prompts made of it differ, as in the protocol.

    Of several documents each filler begins at another one, as long as there are others.

    Args:
        texts: names and texts of documents; none for generated filler (of so many `facts`).
        begin: tokens that stand before the first sentence.
    """
    pieces: list[list[int]] = []
    total = 0
    if not texts:
        for sentence in generated_haystack(f"needle {seed} {number}", facts):
            pieces.append(encoder.encode_text(" " + sentence if pieces else sentence))
            total += len(pieces[-1])
            if total >= need:
                break
        pieces[0] = begin + pieces[0]
        return f"seed {seed}, {number}", pieces
    order = list(range(len(texts)))
    random.Random(f"kvbench needle {seed}").shuffle(order)
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


SENTENCE = re.compile(r".+?(?:[.!?]+[\"'\u201d\u2019)\]]*(?=\s|$)|$)", re.DOTALL)
"""A sentence with the white space before it; sentences joined again are the text."""


def split_sentences(text: str) -> list[str]:
    """Cut a text after each sentence end; the pieces joined are the text."""
    return SENTENCE.findall(text)


def place_needles(
    pieces: Sequence[Sequence[int]],
    needles: Sequence[tuple[Sequence[int], Sequence[int]]],
    depths: Sequence[float],
    length: int,
    room: int,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Filler with needles in it, of `room` tokens.

    Args:
        pieces: token ids of the filler's sentences.
        needles: token ids of each, within the text and at its very start.
        depths: of each, percentage of the filler before it; it goes to the nearest sentence end at or
            before that (at 100 per cent: last, wherever the filler is cut).
        length: of the whole prompt, for the message.

    Returns:
        Token ids, and of each needle where it begins and how many tokens it has.

    Raises:
        TaskError: there is no room for any filler.
    """
    budget = room - sum(len(inner) for inner, _ in needles)
    for _ in range(4):  # a needle at the very start may have another number of tokens
        kept, ends = _cut(pieces, budget)
        total = len(kept)
        places = [
            total if depth == 100 else max(e for e in ends if e <= depth / 100 * total + 1e-9)
            for depth in depths
        ]
        put = [needle[not place] for needle, place in zip(needles, places, strict=True)]
        used = sum(map(len, put))
        if budget == room - used:
            break
        budget = room - used
    if budget < 0 or not kept:
        raise TaskError(
            f"needle: length {length} is too short for needle, question and filler; "
            f"at least {length + 1 - budget} tokens"
        )
    context: list[int] = []
    spans = [(-1, 0)] * len(needles)
    last = 0
    for place, number in sorted((place, number) for number, place in enumerate(places)):
        context += kept[last:place]
        spans[number] = len(context), len(put[number])
        context += put[number]
        last = place
    context += kept[last:]
    return context, spans


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
