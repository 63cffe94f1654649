"""How alike texts are among themselves: Self-BLEU."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

LONGEST = 4
"""n-grams of 1 to so many words count alike, as in BLEU-4."""
ABSENT = 0.1
"""Matches of an n-gram length without any, so that others count: method 1 of Chen and Cherry, 2014."""

Grams = Counter[tuple[str, ...]]


def words_of(text: str) -> list[str]:
    """Words and punctuation marks, as they are written."""
    return re.findall(r"\w+|[^\w\s]", text)


def self_bleu(texts: Sequence[str]) -> list[float]:
    """Of each text the BLEU-4 with all others as its references, 0 to 1, whose mean is their Self-BLEU
    (arXiv 1802.01886): the lower, the more diverse. NaN of a single text.

    H2O (arXiv 2306.14048, appendix C.1) names the measure, but neither length of n-grams, smoothing
    nor words: here BLEU-4 with `ABSENT`, and `words_of`. The others' largest count of an n-gram is
    that of all texts or, for the text that has it, the second: one pass, not one for every pair.
    """
    if len(texts) < 2:
        return [math.nan for _ in texts]
    worded = [words_of(text) for text in texts]
    lengths = [len(words) for words in worded]
    precisions: list[list[tuple[int, int]]] = [[] for _ in texts]
    for n in range(1, LONGEST + 1):
        counted = [_grams(words, n) for words in worded]
        first, second = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        for grams in counted:
            for gram, count in grams.items():
                if count > first[gram]:
                    first[gram], second[gram] = count, first[gram]
                elif count > second[gram]:
                    second[gram] = count
        for own, grams in zip(precisions, counted, strict=True):
            found = sum(
                min(count, second[gram] if count == first[gram] else first[gram])
                for gram, count in grams.items()
            )
            own.append((found, max(1, sum(grams.values()))))
    return [
        _bleu(own, length, _nearest(length, lengths))
        for own, length in zip(precisions, lengths, strict=True)
    ]


def _grams(words: Sequence[str], n: int) -> Grams:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _nearest(length: int, lengths: Sequence[int]) -> int:
    """The length that is nearest to one of them among the others, the shorter of two."""
    others = list(lengths)
    others.remove(length)
    return min(others, key=lambda other: (abs(other - length), other))


def _bleu(precisions: Sequence[tuple[int, int]], length: int, reference: int) -> float:
    if not precisions[0][0]:
        return 0.0
    logs = [math.log((found or ABSENT) / total) for found, total in precisions]
    brevity = min(0.0, 1 - reference / length)
    return math.exp(brevity + sum(logs) / len(logs))
