"""Metrics for texts of any kind: what a metric is, and those that belong to no benchmark."""

from __future__ import annotations

import re
import string
import unicodedata
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
        letters = (option_letter(answer, self.choices) for answer in self.answers)
        return frozenset(letter for letter in letters if letter is not None)


def option_letter(answer: str, choices: Sequence[str]) -> str | None:
    """The letter of the option that an answer key means, by the option's text or by its letter, e.g.
    ``(b)``; None if it means none."""
    texts = [choice.strip() for choice in choices[:26]]
    if answer.strip() in texts:
        return string.ascii_uppercase[texts.index(answer.strip())]
    letter = answer.strip().strip("().").upper()
    return letter if len(letter) == 1 and letter in _letters(choices) else None


def _letters(choices: Sequence[str]) -> str:
    """The letters of the options; all letters where the options are not known."""
    return string.ascii_uppercase[: len(choices) or None]


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
    """The scorer of the package rouge-score for these kinds of ROUGE, e.g. ``rougeL``."""
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(kinds), use_stemmer=stem)


_PLAIN = str.maketrans(
    dict.fromkeys("‘’‚‛′ʼ", "'")
    | dict.fromkeys("“”„‟″«»", '"')
    | dict.fromkeys("。．｡۔।։።", ".")
    | dict.fromkeys("！", "!")
    | dict.fromkeys("？؟", "?")
    | dict.fromkeys("−‐‑‒–", "-")
)
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})++(?!,?\d)")


def folded(text: str) -> str:
    """A text for comparisons: NFC, lower case, single blanks, ASCII for typographic quotes,
    hyphens, the minus sign and the full stops of other scripts, and 4711 for 4,711."""
    plain = " ".join(unicodedata.normalize("NFC", text.lower()).translate(_PLAIN).split())
    return _THOUSANDS.sub(lambda number: number[0].replace(",", ""), plain)


# A sentence of these has no blanks.
_UNSPACED = r"[\p{Han}\p{Hiragana}\p{Katakana}\p{Thai}\p{Lao}\p{Khmer}\p{Myanmar}\p{Tibetan}]"
# These join particles and endings to the end of a word, and the first two also to its beginning.
_PREFIXING = r"[\p{Hebrew}\p{Arabic}]"
_JOINING = (
    rf"[{_PREFIXING}\p{{Hangul}}\p{{Devanagari}}\p{{Bengali}}\p{{Gurmukhi}}\p{{Gujarati}}\p{{Oriya}}"
    r"\p{Tamil}\p{Telugu}\p{Kannada}\p{Malayalam}\p{Sinhala}]"
)
_BEFORE = rf"[\w--{_UNSPACED}--{_PREFIXING}]"
_BEHIND = rf"[\w--{_UNSPACED}--{_JOINING}]"
"""The letters that end a match: none of them stands before or behind a word that is found whole."""
_NO_DIGIT_BEFORE = rf"(?<!{_BEFORE}|\d\.|(?<![\w.])[-.])"
_NUMBER = re.compile(r"-?\d+(\.\d+)?")
_VIRAMA = 9
"""The combining class of the signs of Indic scripts that leave a consonant without a vowel."""
_OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}


def _words(text: str) -> list[str]:
    """The words of a folded text, made of letters and digits; in a script without blanks every letter
    is one."""
    return regex.findall(rf"{_UNSPACED}|[\w--{_UNSPACED}]+", folded(text), regex.V1)


@cache
def _whole(answer: str) -> Any:
    """The pattern of a folded answer as a whole word or number. Behind a number may be a unit (5km)."""
    before = after = ""
    if answer[:1].isdecimal():
        before = _NO_DIGIT_BEFORE
    elif _NUMBER.match(answer) or regex.match(_BEFORE, answer, regex.V1):
        before = rf"(?<!{_BEFORE})"
    if _NUMBER.fullmatch(answer):
        after = rf"(?!{_BEHIND}*\d|\.\d)"
    elif answer[-1:].isdecimal():
        after = rf"(?!{_BEHIND}|\.\d)"
    elif regex.match(_BEHIND, answer[-1:], regex.V1):
        after = rf"(?!{_BEHIND})"
    elif unicodedata.combining(answer[-1:] or " ") == _VIRAMA:
        answer = answer[:-1]  # which an ending with a vowel takes away
    return regex.compile(before + regex.escape(answer) + after, regex.V1)


def containment(prediction: str, answer: str) -> float:
    """1 if the prediction contains the answer as whole words or numbers, else 0. Both are `folded`; a
    ``.``, ``!`` or ``?`` at the end of the answer makes no difference. An answer of yes, no, true or
    false is 0 where its opposite comes first.

    In the scripts of `_JOINING` a word may go on behind the answer, and in Hebrew and Arabic begin
    before it. Latin, Greek and Cyrillic words are whole, those of Hungarian and Turkish with their
    endings, too: the metric `substring` is for these.
    """
    answer_text = folded(answer)
    without_end = answer_text.rstrip(".!?") or answer_text
    text = folded(prediction)
    found = _whole(without_end).search(text)
    if found is not None and without_end in _OPPOSITES:
        opposite = _whole(_OPPOSITES[without_end]).search(text)
        return float(opposite is None or found.start() < opposite.start())
    return float(found is not None)


def contains_for_good(answers: Sequence[str], text: str) -> bool:
    """Whether a text contains one of the answers (see `containment`) whatever follows. Its last word or
    number may go on, and does not count until white space follows."""
    finished = re.match(r".*\s", text, re.DOTALL)
    return finished is not None and any(containment(finished[0], answer) for answer in answers)


def occurs(prediction: str, answer: str) -> bool:
    """Whether an answer stands in a prediction letter for letter, whatever the case."""
    return answer.lower() in prediction.lower()


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


# The sign of a number, also before its currency, and what stands inside one: 3.14, 1/2, 2:30, 1e-5.
_IN_NUMBER = r"(?<!\w)-(?=\p{Sc}?\.?\d)|(?<!\d)\.(?=\d)|(?<=\d)[^\w\s](?=\d)|(?<=\de)-(?=\d)"
_PUNCTUATION = regex.compile(rf"(?:{_IN_NUMBER})(*SKIP)(*FAIL)|[\p{{P}}$+<=>^`|~]")


def normalised(text: str) -> str:
    """A text in SQuAD's form for comparisons: lower case, no punctuation, no articles, single blanks.
    It departs from SQuAD's in that a number keeps its sign, its point and what else stands between its
    digits (1,000 is 1000), and that punctuation is that of every script. A text of articles alone (the
    option A) keeps them, and one of signs alone its signs."""
    plain = folded(text)
    words = _PUNCTUATION.sub("", plain)
    for form in (re.sub(r"\b(a|an|the)\b", " ", words), words):
        if form.strip():
            return " ".join(form.split())
    return plain


def exact_match(prediction: str, answer: str) -> float:
    """1 if prediction and answer are the same text once both are `normalised`, else 0."""
    return float(normalised(prediction) == normalised(answer))


def word_f1(prediction: str, answer: str) -> float:
    """SQuAD's F1 of the words of prediction and answer, both `normalised`; in a script without blanks
    every letter is a word."""
    words, expected = (
        Counter(regex.findall(rf"{_UNSPACED}|[\S--{_UNSPACED}]+", normalised(text), regex.V1))
        for text in (prediction, answer)
    )
    shared = (words & expected).total()
    return 2 * shared / (words.total() + expected.total()) if shared else 0.0


def contains_all(prediction: str, key: Key) -> dict[str, float]:
    """The share of the answers that occur in a prediction (see `occurs`)."""
    contained = sum(occurs(prediction, answer) for answer in key.answers)
    return {"score": contained / len(key.answers)}


def match_pattern(prediction: str, key: Key) -> dict[str, float]:
    """1 if the first match of the key's pattern (its first group, if it has one) is an answer, else 0.
    Without a pattern every answer is a pattern itself, and one of them must match.
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


# An English "a" or "I" is followed by another word, the letter of an option by none or by one of these.
_LETTER = (
    r"(?![AaIi](?:['’]\w|\s+(?!(?:because|since|as|and|but|or|not|is|if|for|which|with)\b)[a-z]))"
    r"([A-Za-z])(?!\w|['’-]\w|\.[A-Za-z]\b|[+#])"
)
_ALONE = r"(?<![\w.'’-])" + _LETTER
_MARKS = r"[\s*_\"'“”‘’`()<>\[\]{}$:,.–—-]"
_SURE = r"(?:(?:clearly|definitely|likely|most|obviously|probably|simply|surely)\s+)*+"
_HEDGE = (
    r"(?i:\bI(?:['’]m|\s+am|['’]d|\s+would)?\s+(?:think|believe|guess|suppose|say|sure|certain)\b"
    r"|\b(?:answer|choice|clearly|correct|definitely|indeed|is|it|letter|likely|most|obviously|option"
    r"|probably|simply|surely|that|the|therefore|thus)\b)"
)
_STATEMENT = (
    r"(?:\b(?i:answer|option|choice)\b[\s*_\"')]*+(?i:(?:to|for)\s+(?:this|the)\s+\w+\s+)?"
    r"(?::|=|(?i:is\b))|\\boxed\b)"
)
_BETWEEN = rf"(?:{_MARKS}|\\[a-z]+(?=\s*\{{)|{_HEDGE})"
_STATED = re.compile(rf"{_STATEMENT}{_BETWEEN}{{0,40}}+{_LETTER}")
_STATES, _SKIPPED = re.compile(_STATEMENT), re.compile(rf"{_BETWEEN}|(?i:an?\b)")
_FIRST = re.compile(
    rf"{_MARKS}*+(?:(?i:answer|option|choice|letter)\b{_MARKS}*+)?([A-Za-z])"
    rf"(?=[.):,\]*\"'’”\s]*+(?:\Z|(?<=\n))|[.):\]*]++\s)"
)
_CONFIRMED = re.compile(
    rf"{_ALONE}[)\]*\"'”]*+\s+(?i:is\s+{_SURE}(?:the\s+)?(?:correct|right|answer)\b)"
)
_NAMED = re.compile(
    rf"(?<!\bnot )(?<!\bnot [Oo]ption )(?<!\bnot \(){_ALONE}"
    rf"(?!\W*\s(?i:is|was)\s+{_SURE}(?:not|incorrect|wrong|false)\b)"
)


def chosen_letter(prediction: str, choices: Sequence[str] = ()) -> str | None:
    """The letter of the option that a prediction chooses, or None. The first of these that there is:

    * the last letter that is stated in either case: after "answer is", "answer:" and the like, words
      such as "I think" or "option" skipped, or in a box;
    * the last option whose text, the longest, is so stated;
    * a letter in either case with which the prediction begins, alone or before ``.``, ``)`` or ``:``;
    * the option with whose text the prediction begins, the longest;
    * the last letter of which is said that it "is correct";
    * the first capital letter that stands alone and is not said to be wrong.

    The word "a" or "I" of a sentence is no letter, nor is one that no option has.
    """
    text = prediction.strip()
    stated = _last(_STATED, text, choices)
    if stated is not None:
        return stated
    stated = _stated_text(text, choices)
    if stated is not None:
        return stated
    first = _FIRST.match(text)
    if first is not None and first[1].upper() in _letters(choices):
        return first[1].upper()
    begun = _begun(text, choices)
    if begun is not None:
        return begun
    confirmed = _last(_CONFIRMED, text, choices)
    if confirmed is not None:
        return confirmed
    named = (match[1] for match in _NAMED.finditer(text) if match[1] in _letters(choices))
    return next(named, None)


def _stated_text(text: str, choices: Sequence[str]) -> str | None:
    """The letter of the last option whose text is stated, or None."""
    for match in reversed(list(_STATES.finditer(text)) if choices else []):
        place = match.end()
        for _ in range(40):
            letter = _begun(text, choices, place)
            if letter is not None:
                return letter
            skipped = _SKIPPED.match(text, place)
            if skipped is None:
                break
            place = skipped.end()
    return None


def _begun(text: str, choices: Sequence[str], place: int = 0) -> str | None:
    """The letter of the option whose text, the longest, is at a place of a text, or None."""
    begun = [
        (len(choice), -number)
        for number, choice in enumerate(map(str.strip, choices[:26]))
        if choice and _as_option(choice).match(text, place)
    ]
    return string.ascii_uppercase[-max(begun)[1]] if begun else None


def _as_option(choice: str) -> re.Pattern[str]:
    """The pattern of an option's text as a whole word or number."""
    return re.compile(rf"{re.escape(choice)}(?!\w|(?<=\d)[.,:/]\d)", re.IGNORECASE)


def _last(pattern: re.Pattern[str], text: str, choices: Sequence[str]) -> str | None:
    """The last letter of an option that is the pattern's first group, or None."""
    letters = [match[1].upper() for match in pattern.finditer(text)]
    return next((letter for letter in reversed(letters) if letter in _letters(choices)), None)


def choose(prediction: str, key: Key) -> dict[str, float]:
    """1 if the prediction chooses the right option (see `chosen_letter`), else 0."""
    return {"score": float(chosen_letter(prediction, key.choices) in key.letters)}
