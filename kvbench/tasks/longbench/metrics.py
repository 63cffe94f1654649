"""LongBench's scores: lm-eval's metric functions, and our own where those differ from the original.

The original is ``LongBench/metrics.py`` and ``eval.py`` of github.com/THUDM/LongBench. lm-eval's copy
is called for F1, ROUGE, classification, counting and retrieval. What is not its own:

* which line of a prediction is scored (the original drops leading newlines only; lm-eval all white
  space at both ends);
* code similarity: lm-eval skips blank lines before it picks the line to compare, the original takes a
  blank line as well; and fuzzywuzzy's ratio depends on whether the Levenshtein package is installed,
  which LongBench's requirements do not ask for: here it is always difflib's.
* ROUGE-L reconstructs subsequences by recursion and gives 0 where Python's recursion limit is hit.
  A thread's own stack makes that independent of how deep the caller is.
"""

from __future__ import annotations

import difflib
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from threading import Thread
from types import ModuleType

from kvbench.tasks.base import TaskError

FIRST_LINE = frozenset(("trec", "triviaqa", "samsum", "lsht"))
"""Datasets of which only the first line of a prediction is scored."""
CLASSIFIED = frozenset(("trec", "lsht"))
"""Datasets whose examples name the classes there are."""

BUCKETS = ("0-4k", "4-8k", "8k+")
"""LongBench-E's length buckets, by the field `length` (words; characters for Chinese)."""


def bucket(length: int) -> str:
    """The length bucket of an example: below 4000, below 8000, the rest."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


@lru_cache(maxsize=1)
def _lm_eval() -> ModuleType:
    """lm-eval's metric functions; importing fuzzywuzzy warns about the backend it would use."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from lm_eval.tasks.longbench import metrics
    return metrics


def _with_fresh_stack(compute: Callable[[], float]) -> float:
    """The result of `compute`, run in a thread, where nothing of the recursion limit is used up."""
    found: list[float] = []
    thread = Thread(target=lambda: found.append(compute()), name="rouge")
    thread.start()
    thread.join()
    return found[0]


def _rouge(prediction: str, answer: str) -> float:
    return _with_fresh_stack(lambda: float(_lm_eval().rouge_score(prediction, answer)))


def _rouge_zh(prediction: str, answer: str) -> float:
    return _with_fresh_stack(lambda: float(_lm_eval().rouge_zh_score(prediction, answer)))


def code_similarity(prediction: str, answer: str) -> float:
    """Similarity of the first line free of backtick, ``#`` and ``//`` to the answer, in whole per
    cent: what fuzzywuzzy's ratio is without the Levenshtein package."""
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if "`" not in line and "#" not in line and "//" not in line)
    line = next(code, "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def _from_lm_eval(name: str) -> Callable[[str, str], float]:
    return lambda prediction, answer: float(getattr(_lm_eval(), name)(prediction, answer))


_F1, _RETRIEVAL = _from_lm_eval("qa_f1_score"), _from_lm_eval("retrieval_score")
_METRICS: Mapping[str, Callable[[str, str], float]] = {
    "narrativeqa": _F1,
    "qasper": _F1,
    "multifieldqa_en": _F1,
    "multifieldqa_zh": _from_lm_eval("qa_f1_zh_score"),
    "hotpotqa": _F1,
    "2wikimqa": _F1,
    "musique": _F1,
    "dureader": _rouge_zh,
    "gov_report": _rouge,
    "qmsum": _rouge,
    "multi_news": _rouge,
    "vcsum": _rouge_zh,
    "triviaqa": _F1,
    "samsum": _rouge,
    "passage_count": _from_lm_eval("count_score"),
    "passage_retrieval_en": _RETRIEVAL,
    "passage_retrieval_zh": _from_lm_eval("retrieval_zh_score"),
    "lcc": code_similarity,
    "repobench-p": code_similarity,
}

ANSWER_PATTERNS = {
    "passage_retrieval_en": re.compile(r"Paragraph \d+"),
    "passage_retrieval_zh": re.compile(r"段落\d+"),
}
"""What an answer must contain to be scored."""


def score(
    dataset: str,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
) -> float:
    """LongBench's score of one prediction, 0..1: the best over the answers.

    Args:
        dataset: one of LongBench's 21, without ``_e``.
        all_classes: the class names, for trec and lsht only.

    Raises:
        TaskError: an unknown dataset; trec or lsht without classes.
    """
    if dataset not in _METRICS and dataset not in CLASSIFIED:
        known = ", ".join(sorted({*_METRICS, *CLASSIFIED}))
        raise TaskError(f"longbench: dataset {dataset!r} unknown; allowed: {known}")
    if dataset in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    if dataset not in CLASSIFIED:
        return max((_METRICS[dataset](prediction, answer) for answer in answers), default=0.0)
    if not all_classes:
        raise TaskError(f"longbench: {dataset} is scored by its classes; all_classes is empty")
    classify = _lm_eval().classification_score
    found = (classify(prediction, answer, all_classes=list(all_classes)) for answer in answers)
    return float(max(found, default=0.0))


def bucket_means(scores: Sequence[float], lengths: Sequence[int]) -> dict[str, float]:
    """Mean score per length bucket, NaN for an empty one, as LongBench-E reports a dataset."""
    groups: dict[str, list[float]] = {name: [] for name in BUCKETS}
    for value, length in zip(scores, lengths, strict=True):
        groups[bucket(length)].append(value)
    return {name: sum(group) / len(group) if group else math.nan for name, group in groups.items()}
