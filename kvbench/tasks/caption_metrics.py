"""Scores of a caption against several reference captions: CIDEr-D, ROUGE-L and BLEU, as COCO's
evaluation computes them, for one caption at a time.

COCO's tools split words with Stanford's tokenizer, which needs Java; here words are runs of letters and
digits, in lower case. METEOR and SPICE need Java too, and are left out.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MOST = 4
"""Words of the longest n-gram."""

SIGMA = 6.0
"""CIDEr-D: standard deviation of the penalty on a difference in length."""

BETA = 1.2
"""ROUGE-L: weight of recall."""

LEAST = 1e-30
"""BLEU: nltk gives less, and not 0, where an n-gram order has no match."""

Grams = Counter[tuple[str, ...]]


def words_of(text: str) -> list[str]:
    """Words in lower case, punctuation left out."""
    return re.findall(r"[^\W_]+(?:'[^\W_]+)?", text.lower())


def grams_of(words: Sequence[str]) -> Grams:
    """How often each n-gram of 1 to `MOST` words occurs."""
    return Counter(
        tuple(words[at : at + n]) for n in range(1, MOST + 1) for at in range(len(words) - n + 1)
    )


@dataclass(frozen=True)
class CiderD:
    """CIDEr-D (arXiv 1411.5726, section 5): cosine of TF-IDF n-grams, clipped, with a penalty on
    length, mean over n and references, times 10.

    Attributes:
        images: in how many images' references an n-gram occurs. count: images.
    """

    images: Grams
    count: int

    @classmethod
    def of(cls, references: Iterable[Sequence[str]]) -> CiderD:
        """Document frequencies over all images' references."""
        images: Grams = Counter()
        count = 0
        for captions in references:
            images.update({gram for caption in captions for gram in grams_of(words_of(caption))})
            count += 1
        return cls(images, count)

    def score(self, prediction: str, references: Sequence[str]) -> float:
        """Of one caption."""
        mine, norms, length = self._vector(prediction)
        total = 0.0
        for reference in references:
            theirs, their_norms, their_length = self._vector(reference)
            penalty = math.exp(-((length - their_length) ** 2) / (2 * SIGMA**2))
            for n in range(1, MOST + 1):
                shared = sum(
                    min(weight, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0)
                    for gram, weight in mine.items()
                    if len(gram) == n
                )
                if norms[n] and their_norms[n]:
                    shared /= norms[n] * their_norms[n]
                total += penalty * shared
        return 10.0 * total / (MOST * len(references))

    def _vector(self, text: str) -> tuple[dict[tuple[str, ...], float], dict[int, float], int]:
        """TF-IDF weights, their norm for each n, and the length, which COCO's code counts in bigrams."""
        grams = grams_of(words_of(text))
        log_count = math.log(max(self.count, 1))
        weights = {
            gram: times * (log_count - math.log(max(1.0, self.images[gram])))
            for gram, times in grams.items()
        }
        norms = {
            n: math.sqrt(sum(w**2 for gram, w in weights.items() if len(gram) == n))
            for n in range(1, MOST + 1)
        }
        return weights, norms, sum(times for gram, times in grams.items() if len(gram) == 2)


class _Words:
    """What rouge-score needs of a tokenizer."""

    tokenize = staticmethod(words_of)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """F of the longest common subsequence; best precision and best recall over the references."""
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    found = [scorer.score(reference, prediction)["rougeL"] for reference in references]
    precision = max(one.precision for one in found)
    recall = max(one.recall for one in found)
    if not precision or not recall:
        return 0.0
    return float((1 + BETA**2) * precision * recall / (recall + BETA**2 * precision))


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """BLEU-1 to -4 of a set of captions: counts are added up, then divided (the length of the reference
    that is nearest in length); 0 where an n-gram order has no match."""
    from nltk.translate.bleu_score import corpus_bleu

    said = [words_of(prediction) for prediction in predictions]
    truth = [[words_of(reference) for reference in each] for each in references]
    weights = [(1 / n,) * n for n in range(1, MOST + 1)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders without a match
        found = corpus_bleu(truth, said, weights=weights)
    return [float(value) if value > LEAST else 0.0 for value in found]
