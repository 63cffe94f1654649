"""Self-BLEU: how alike several texts are."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

_LONGEST_GRAM = 4
"""The lengths of n-grams are 1 to 4 words, with equal weights: BLEU-4."""
_ABSENT = 0.1
"""The number of matches of an n-gram length that has none. With 0 the other lengths would not count
(method 1 of Chen and Cherry, 2014)."""


def words_of(text: str) -> list[str]:
    """The words and the punctuation marks of a text, as they are written."""
    return re.findall(r"\w+|[^\w\s]", text)


def self_bleu(texts: Sequence[str]) -> list[float]:
    """For each text its BLEU-4, 0 to 1, with all other texts as references; NaN for a single text.

    The mean of these is Self-BLEU (arXiv 1802.01886): the lower it is, the more diverse the texts are.
    H2O (arXiv 2306.14048, appendix C.1) names the measure, but neither the length of n-grams, nor the
    smoothing, nor what a word is. Chosen here are BLEU-4, `_ABSENT` matches for a length that has none,
    and `words_of`.

    Only the two largest counts of each n-gram over all texts are kept. The largest count among the other
    texts is the largest of all or, for the text that has the largest itself, the second largest.
    """
    if len(texts) < 2:
        return [math.nan for _ in texts]
    worded = [words_of(text) for text in texts]
    logs, empty = np.zeros(len(texts)), np.zeros(len(texts), dtype=bool)
    for n in range(1, _LONGEST_GRAM + 1):
        counted = [Counter(zip(*(words[k:] for k in range(n)), strict=False)) for words in worded]
        counts: dict[tuple[str, ...], list[int]] = {}
        for grams in counted:
            for gram, count in grams.items():
                counts[gram] = sorted([*counts.get(gram, (0, 0)), count])[-2:]
        for i, grams in enumerate(counted):
            matches = sum(min(c, counts[g][c < counts[g][1]]) for g, c in grams.items())
            empty[i] |= n == 1 and not matches
            logs[i] += math.log((matches or _ABSENT) / max(1, sum(grams.values()))) / _LONGEST_GRAM
    for i, words in enumerate(worded):  # the other text of the nearest length, the shorter of two
        others = [len(other) for k, other in enumerate(worded) if k != i]
        reference = min(others, key=lambda length: (abs(length - len(words)), length))
        logs[i] += min(0.0, 1 - reference / max(1, len(words)))
    return [float(x) for x in np.where(empty, 0.0, np.exp(logs))]
