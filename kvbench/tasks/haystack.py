"""Generated text, the filler of prompts that hide something, and how a text is cut into sentences.

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


SENTENCE = re.compile(r".+?(?:[.!?]+[\"'\u201d\u2019)\]]*(?=\s|$)|$)", re.DOTALL)
"""A sentence with the white space before it; sentences joined again are the text."""


def split_sentences(text: str) -> list[str]:
    """The pieces joined are the text."""
    return SENTENCE.findall(text)
