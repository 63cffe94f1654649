"""Scores of captions against several references: CIDEr-D, ROUGE-L and BLEU, as COCO's evaluation has
them.

COCO's tools split words with Stanford's tokenizer, which needs Java; here words are runs of letters and
digits, in lower case. METEOR and SPICE need Java too, and are left out.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence

from nltk.translate.bleu_score import corpus_bleu
from rouge_score.rouge_scorer import RougeScorer

MOST = 4
"""Words of the longest n-gram."""
SIGMA = 6.0
"""CIDEr-D: standard deviation of the penalty on a difference in length."""
BETA = 1.2
"""ROUGE-L: weight of recall."""
LEAST = 1e-30
"""BLEU: nltk gives less, and not 0, where an n-gram order has no match."""
Grams = Counter[tuple[str, ...]]


class Words:
    """The tokenizer, in the form that rouge-score asks for."""

    @staticmethod
    def tokenize(text: str) -> list[str]:
        """Words in lower case, punctuation left out."""
        return re.findall(r"[^\W_]+(?:'[^\W_]+)?", text.lower())


def grams_of(text: str) -> Grams:
    """How often each n-gram of 1 to `MOST` words occurs."""
    words = Words.tokenize(text)
    return Counter(
        tuple(words[at : at + n]) for n in range(1, MOST + 1) for at in range(len(words) - n + 1)
    )


class CiderD:
    """CIDEr-D (arXiv 1411.5726, section 5): cosine of TF-IDF n-grams, clipped, with a penalty on length,
    mean over n and references, times 10; document frequencies are those of all images' references."""

    def __init__(self, references: Iterable[Sequence[str]]) -> None:
        self.images: Grams = Counter()
        self.count = 0
        for captions in references:
            self.images.update({gram for caption in captions for gram in grams_of(caption)})
            self.count += 1

    def score(self, prediction: str, references: Sequence[str]) -> float:
        """The CIDEr-D score of one caption."""
        mine, norms, length = self._vector(prediction)
        total = 0.0
        for theirs, their_norms, their_length in map(self._vector, references):
            penalty = math.exp(-((length - their_length) ** 2) / (2 * SIGMA**2))
            for n in range(1, MOST + 1):
                shared = sum(
                    min(weight, theirs.get(gram, 0.0)) * theirs.get(gram, 0.0)
                    for gram, weight in mine.items()
                    if len(gram) == n
                )
                both = norms[n] * their_norms[n]
                total += penalty * (shared / both if both else shared)
        return 10.0 * total / (MOST * len(references))

    def _vector(self, text: str) -> tuple[dict[tuple[str, ...], float], list[float], int]:
        """TF-IDF weights, their norm for each n, and the length, which COCO's code counts in bigrams."""
        grams, log_count = grams_of(text), math.log(max(self.count, 1))
        weights = {g: k * (log_count - math.log(max(1, self.images[g]))) for g, k in grams.items()}
        norms = [
            math.sqrt(sum(w**2 for g, w in weights.items() if len(g) == n)) for n in range(MOST + 1)
        ]
        return weights, norms, sum(k for g, k in grams.items() if len(g) == 2)


def rouge_l(prediction: str, references: Sequence[str]) -> float:
    """F of the longest common subsequence; best precision and best recall over the references."""
    scorer = RougeScorer(["rougeL"], tokenizer=Words())
    scores = [scorer.score(reference, prediction)["rougeL"] for reference in references]
    precision = max(score.precision for score in scores)
    recall = max(score.recall for score in scores)
    if not precision or not recall:
        return 0.0
    return float((1 + BETA**2) * precision * recall / (recall + BETA**2 * precision))


def bleu(predictions: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """BLEU-1 to -4 of a set of captions: counts are added up, then divided (the length of the reference
    that is nearest in length); 0 where an n-gram order has no match."""
    said = [Words.tokenize(prediction) for prediction in predictions]
    truth = [[Words.tokenize(reference) for reference in each] for each in references]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of orders without a match
        values = corpus_bleu(truth, said, weights=[(1 / n,) * n for n in range(1, MOST + 1)])
    return [float(value) if value > LEAST else 0.0 for value in values]
