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

LONGEST = 4
"""Words of the longest n-gram."""
SIGMA = 6.0
"""CIDEr-D: standard deviation of the penalty on a difference in length."""
BETA = 1.2
"""ROUGE-L: weight of recall."""
NO_MATCH = 1e-30
"""BLEU: nltk returns a number below this, and not 0, where an n-gram order has no match."""
Grams = Counter[tuple[str, ...]]


class Words:
    """The tokenizer, in the form that rouge-score asks for."""

    @staticmethod
    def tokenize(text: str) -> list[str]:
        return re.findall(r"[^\W_]+(?:'[^\W_]+)?", text.lower())


def grams_of(text: str) -> Grams:
    """How often each n-gram of 1 to `LONGEST` words occurs."""
    words = Words.tokenize(text)
    return Counter(
        tuple(words[start : start + n])
        for n in range(1, LONGEST + 1)
        for start in range(len(words) - n + 1)
    )


class CiderD:
    """CIDEr-D (arXiv 1411.5726, section 5): cosine of TF-IDF n-grams, clipped, with a penalty on length,
    mean over n and references, times 10; document frequencies are those of all images' references."""

    def __init__(self, references: Iterable[Sequence[str]]) -> None:
        self.document_frequency: Grams = Counter()
        self.images = 0
        for captions in references:
            self.document_frequency.update({gram for text in captions for gram in grams_of(text)})
            self.images += 1

    def score(self, prediction: str, references: Sequence[str]) -> float:
        weights, norms, length = self._vector(prediction)
        total = 0.0
        for reference in references:
            their_weights, their_norms, their_length = self._vector(reference)
            penalty = math.exp(-((length - their_length) ** 2) / (2 * SIGMA**2))
            for n in range(1, LONGEST + 1):
                shared = sum(
                    min(weight, their_weights.get(gram, 0.0)) * their_weights.get(gram, 0.0)
                    for gram, weight in weights.items()
                    if len(gram) == n
                )
                product = norms[n] * their_norms[n]
                total += penalty * (shared / product if product else shared)
        return 10.0 * total / (LONGEST * len(references))

    def _vector(self, text: str) -> tuple[dict[tuple[str, ...], float], list[float], int]:
        """TF-IDF weights, their norm for each n, and the length, which COCO's code counts in bigrams."""
        grams = grams_of(text)
        log_images = math.log(max(self.images, 1))
        weights = {}
        for gram, count in grams.items():
            log_frequency = math.log(max(1, self.document_frequency[gram]))
            weights[gram] = count * (log_images - log_frequency)
        norms = [
            math.sqrt(sum(weight**2 for gram, weight in weights.items() if len(gram) == n))
            for n in range(LONGEST + 1)
        ]
        return weights, norms, sum(count for gram, count in grams.items() if len(gram) == 2)


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
    words = [Words.tokenize(prediction) for prediction in predictions]
    words_of_references = [[Words.tokenize(text) for text in captions] for captions in references]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nltk warns of orders without a match
        weights = [(1 / n,) * n for n in range(1, LONGEST + 1)]
        scores = corpus_bleu(words_of_references, words, weights=weights)
    return [float(score) if score > NO_MATCH else 0.0 for score in scores]
