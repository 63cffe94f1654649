"""Metrics for texts of any kind: what a metric is, and those that belong to no benchmark."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import regex

from kvbench.tasks.base import TaskError

REGEX_SECONDS = 2.0
"""The longest time that a regular expression may take on one text, in seconds."""


@dataclass(frozen=True)
class Key:
    """The answer key of one example.

    Attributes:
        answers: the acceptable answers.
        choices: the texts of the options A, B ..., or the names of the classes; empty for other
            questions.
        pattern: the regular expression of the metric `regex`.
    """

    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def letters(self) -> frozenset[str]:
        """The letters of the acceptable answers. An answer that is the text of an option becomes the
        letter of that option; any other answer is taken to be a letter, e.g. ``(b)``."""
        choices = [choice.strip() for choice in self.choices]
        letters = set()
        for answer in map(str.strip, self.answers):
            if answer in choices:
                letters.add(string.ascii_uppercase[choices.index(answer)])
            else:
                letters.add(answer.strip("().").upper())
        return frozenset(letters)


Metric = Callable[[str, Key], Mapping[str, float]]
"""A function of a prediction and the answer key. It returns scores by name; ``"score"`` is the primary
one, between 0 and 1."""
Pairwise = Callable[[str, str], float]
"""A function of a prediction and one answer, which returns a score between 0 and 1."""


def best_of_answers(score: Pairwise) -> Metric:
    """The metric that takes the best score over the answers, 0 where there is no answer."""

    def metric(prediction: str, key: Key) -> dict[str, float]:
        scores = (float(score(prediction, answer)) for answer in key.answers)
        return {"score": max(scores, default=0.0)}

    return metric


@cache
def rouge_scorer(*kinds: str, stem: bool) -> Any:
    """The scorer of the package rouge-score for these kinds of ROUGE, e.g. ``rougeL``.

    Args:
        stem: whether words are stemmed before they are compared.
    """
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(kinds), use_stemmer=stem)


def _words(text: str) -> list[str]:
    """The lower-cased words of a text, made of letters and digits."""
    return re.findall(r"\w+", text.lower())


def containment(prediction: str, answer: str) -> float:
    """1 if the prediction contains the answer, else 0. Case, runs of white space, and a ``.``, ``!``
    or ``?`` at the end of the answer make no difference."""
    answer_text = " ".join(answer.lower().split())
    without_end = answer_text.rstrip(".!?") or answer_text
    return float(without_end in " ".join(prediction.lower().split()))


def contains_any(answers: Sequence[str], text: str) -> bool:
    """Whether a text contains one of the answers (see `containment`). It then does so whatever
    follows."""
    return any(containment(text, answer) for answer in answers)


def word_recall(prediction: str, answer: str) -> float:
    """The share of the answer's words, repetitions counted, that the prediction has. Letters and
    digits make words; punctuation and case do not count."""
    answer_words = Counter(_words(answer))
    if not answer_words:
        return 0.0
    shared_words = answer_words & Counter(_words(prediction))
    return shared_words.total() / answer_words.total()


def released_recall(prediction: str, answer: str) -> float:
    """The recall of BalanceKV's release (github.com/ksheth96/BalanceKV, run_needle_in_haystack.py):
    the share of the answer's different words that the prediction has, where words are what white space
    separates, lower-cased.

    It departs from `word_recall` in two ways: a word counts once however often the answer has it, and
    punctuation is part of it ("day." is not "day"). Words such as "a", "and" and "in" count like any
    other: the answer of the release has 11 different words, and an unrelated sentence with "a", "and",
    "in" and "on" scores 4/11.
    """
    answer_words = set(answer.lower().split())
    if not answer_words:
        return 0.0
    return len(answer_words & set(prediction.lower().split())) / len(answer_words)


def rouge1(prediction: str, answer: str) -> float:
    """ROUGE-1 F of rouge-score against the answer, without stemming. The released script of BalanceKV
    compares with the whole needle, stems, and multiplies by ten."""
    scores = rouge_scorer("rouge1", stem=False).score(answer, prediction)
    return float(scores["rouge1"].fmeasure)


def rouge_l_recall(prediction: str, answer: str) -> float:
    """ROUGE-L recall of rouge-score, without stemming: the share of the answer's words that the
    prediction has in the same order."""
    scores = rouge_scorer("rougeL", stem=False).score(answer, prediction)
    return float(scores["rougeL"].recall)


def normalised(text: str) -> str:
    """A text in SQuAD's form for comparisons: lower case, no punctuation, no articles, single
    blanks."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, answer: str) -> float:
    """1 if prediction and answer are the same text once both are `normalised`, else 0."""
    return float(normalised(prediction) == normalised(answer))


def contains_all(prediction: str, key: Key) -> dict[str, float]:
    """The share of the answers that occur in a prediction, whatever their case."""
    contained = sum(answer.lower() in prediction.lower() for answer in key.answers)
    return {"score": contained / len(key.answers)}


def match_pattern(prediction: str, key: Key) -> dict[str, float]:
    """1 if the first match of the key's pattern (its first group, if it has one) is an answer, else 0.
    Without a pattern every answer is a pattern itself, and one of them must match.

    Raises:
        TaskError: a pattern takes longer than `REGEX_SECONDS`, or an answer is no pattern.
    """
    try:
        if key.pattern is None:
            matches = any(
                regex.search(answer, prediction, timeout=REGEX_SECONDS) for answer in key.answers
            )
            return {"score": float(matches)}
        match = regex.search(key.pattern, prediction, timeout=REGEX_SECONDS)
    except TimeoutError as problem:
        raise TaskError(
            f"pattern {key.pattern or key.answers!r} takes more than {REGEX_SECONDS:g} s on one "
            "prediction; allowed: less"
        ) from problem
    except regex.error as problem:
        raise TaskError(f"{key.answers!r} are no regular expressions: {problem}") from problem
    if match is None:
        return {"score": 0.0}
    text = (match[1] if match.re.groups else match[0]) or ""
    return {"score": float(text.strip() in {answer.strip() for answer in key.answers})}


_STATED_LETTER = re.compile(
    r"(?:answer|option|choice)\s*(?:is|:)?\s*:?\s*[\"'*(\[]*([A-Z])\b", re.IGNORECASE
)
_LETTER = re.compile(r"\b([A-Z])\b")


def chosen_letter(prediction: str, choices: Sequence[str] = ()) -> str | None:
    """The letter of the option that a prediction chooses, or None.

    It is the last letter after "answer is" and the like; else the first capital letter that stands
    alone and is not the word "A" or "I" of a sentence; else the option with whose text the prediction
    begins.
    """
    stated = [match[1] for match in _STATED_LETTER.finditer(prediction) if match[1].isupper()]
    if stated:
        return stated[-1]
    text = prediction.strip()
    for match in _LETTER.finditer(text):
        is_word = match[1] in "AI" and re.match(r" [a-z]|'", text[match.end() :])
        if not is_word:
            return match[1]
    for number, choice in enumerate(choices):
        if choice.strip() and text.lower().startswith(choice.strip().lower()):
            return string.ascii_uppercase[number]
    return None


def choose(prediction: str, key: Key) -> dict[str, float]:
    """1 if the prediction chooses the right option (see `chosen_letter`), else 0."""
    return {"score": float(chosen_letter(prediction, key.choices) in key.letters)}
