"""Scores that a config can name: of one prediction, 0 to 1, the best over the answers.

Where lm-eval has a benchmark's own function, that is called; see each group for its source.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from importlib import import_module
from threading import Thread
from typing import Any

import regex

from kvbench.tasks.base import TaskError

REGEX_SECONDS = 2.0
"""That a pattern may take on one prediction."""


@dataclass(frozen=True)
class Key:
    """What counts as right.

    Attributes:
        answers: acceptable answers.
        choices: texts of the options A, B ..., or names of classes, where there are any.
        pattern: regular expression of `regex`.
    """

    answers: tuple[str, ...]
    choices: tuple[str, ...] = ()
    pattern: str | None = None

    @property
    def letters(self) -> frozenset[str]:
        """The answers as letters; those that are the text of an option stand for its letter."""
        texts = [choice.strip() for choice in self.choices]
        return frozenset(
            string.ascii_uppercase[texts.index(answer.strip())]
            if answer.strip() in texts
            else answer.strip().strip("().").upper()
            for answer in self.answers
        )


Metric = Callable[[str, Key], Mapping[str, float]]
Pairwise = Callable[[str, str], float]
"""Of a prediction and one answer."""


def _best(score: Pairwise) -> Metric:
    return lambda prediction, key: {
        "score": max((float(score(prediction, answer)) for answer in key.answers), default=0.0)
    }


@cache
def _harness(benchmark: str) -> Any:
    """lm-eval's functions for a benchmark; importing fuzzywuzzy warns about its backend."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module(f"lm_eval.tasks.{benchmark}")


@cache
def _rouge_scorer(*kinds: str, stem: bool) -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(list(kinds), use_stemmer=stem)


# words of an answer


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def containment(prediction: str, answer: str) -> float:
    """1 if the answer stands in the prediction; case, runs of white space and the answer's own full
    stop at the end do not matter."""
    wanted = " ".join(answer.lower().split())
    return float((wanted.rstrip(".!?") or wanted) in " ".join(prediction.lower().split()))


def stands(answers: Sequence[str], text: str) -> bool:
    """Whether a text holds one of the answers, so that what may follow takes nothing away."""
    return any(containment(text, answer) for answer in answers)


def word_recall(prediction: str, answer: str) -> float:
    """Share of the answer's words, repetitions counted, that the prediction has; letters and digits
    make words, punctuation does not count."""
    wanted = Counter(_words(answer))
    if not wanted:
        return 0.0
    return sum((wanted & Counter(_words(prediction))).values()) / sum(wanted.values())


def released_recall(prediction: str, answer: str) -> float:
    """The recall of github.com/ksheth96/BalanceKV, run_needle_in_haystack.py: the share of the answer's
    different words that the prediction has, where words are what white space separates, lower-cased.
    It departs from `word_recall` in two ways: a word counts once however often the answer has
    it, and punctuation is part of it ("day." is not "day"). Words such as "a", "and" and "in" count like
    any other: their answer has 11 different words, and an unrelated sentence with "a", "and", "in" and
    "on" scores 4/11."""
    wanted = set(answer.lower().split())
    return len(wanted & set(prediction.lower().split())) / len(wanted) if wanted else 0.0


def rouge1(prediction: str, answer: str) -> float:
    """ROUGE-1 F of rouge-score against the answer, without stemming. The released script of BalanceKV
    compares with the whole needle, stems, and multiplies by ten."""
    scores = _rouge_scorer("rouge1", stem=False).score(answer, prediction)
    return float(scores["rouge1"].fmeasure)


def rouge_l_recall(prediction: str, answer: str) -> float:
    """ROUGE-L recall of rouge-score, without stemming: of the answer's words the share that the
    prediction has in their order."""
    scores = _rouge_scorer("rougeL", stem=False).score(answer, prediction)
    return float(scores["rougeL"].recall)


def normalised(text: str) -> str:
    """SQuAD's form for comparisons: lower case, no punctuation, no articles, single blanks."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _contains_all(prediction: str, key: Key) -> dict[str, float]:
    """The share of the answers that occur in a prediction, whatever their case."""
    contained = sum(answer.lower() in prediction.lower() for answer in key.answers)
    return {"score": contained / len(key.answers)}


def _regex(prediction: str, key: Key) -> dict[str, float]:
    """Whether what the pattern finds first (its first group, if it has one) is an answer; without a
    pattern, whether an answer, itself a pattern, is found."""
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


_STATED = re.compile(
    r"(?:answer|option|choice)\s*(?:is|:)?\s*:?\s*[\"'*(\[]*([A-Z])\b", re.IGNORECASE
)
_LETTER = re.compile(r"\b([A-Z])\b")


def chosen_letter(prediction: str, choices: Sequence[str] = ()) -> str | None:
    """The option that a prediction names: after "answer is" and the like, else the first capital that
    stands alone (not the words "A" and "I" of a sentence), else the option whose text it begins with."""
    stated = [m for m in _STATED.finditer(prediction) if m[1].isupper()]
    if stated:
        return stated[-1][1]
    text = prediction.strip()
    for match in _LETTER.finditer(text):
        rest = text[match.end() :]
        if match[1] not in "AI" or not re.match(r" [a-z]|'", rest):
            return match[1]
    for number, choice in enumerate(choices):
        if choice.strip() and text.lower().startswith(choice.strip().lower()):
            return string.ascii_uppercase[number]
    return None


def _choice(prediction: str, key: Key) -> dict[str, float]:
    return {"score": float(chosen_letter(prediction, key.choices) in key.letters)}


# LongBench: metrics.py of github.com/THUDM/LongBench, of which lm-eval's copy is called but where it
# differs. Code similarity: lm-eval skips blank lines before it picks the line to compare, the original
# takes a blank line as well; and fuzzywuzzy's ratio depends on whether the Levenshtein package is
# installed, which LongBench's requirements do not ask for: here it is always difflib's. ROUGE-L
# reconstructs subsequences by recursion and gives 0 where Python's recursion limit is hit: a thread's
# own stack makes that independent of how deep the caller is.


def _longbench(name: str) -> Pairwise:
    return lambda prediction, answer: getattr(_harness("longbench.metrics"), name)(
        prediction, answer
    )


def _with_fresh_stack(score: Pairwise) -> Pairwise:
    def scored(prediction: str, answer: str) -> float:
        scores: list[float] = []
        thread = Thread(target=lambda: scores.append(score(prediction, answer)), name="rouge")
        thread.start()
        thread.join()
        return scores[0]

    return scored


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


def _classification(prediction: str, key: Key) -> Mapping[str, float]:
    """LongBench's classification score of a prediction, whose classes are `Key.choices`."""
    score = _harness("longbench.metrics").classification_score
    classes = list(key.choices)
    return _best(lambda text, answer: score(text, answer, all_classes=classes))(prediction, key)


# MATH, GSM8K, AIME: \\boxed{} and the comparison are lm-eval's copies of those of the MATH data set's
# authors (arXiv 2103.03874, github.com/hendrycks/math)


def _number(text: str) -> Decimal | None:
    """The number that a text is, but for thousands' commas and what stands for money and per cent."""
    plain = re.sub(r"\\[!,; ]|\\?[$%,]|\\text\{[^{}]*\}|\s", "", text)
    return Decimal(plain) if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)", plain) else None


def _boxed(prediction: str, key: Key) -> dict[str, float]:
    """Whether the last \\boxed{} of a prediction holds an answer: the same number, or the same text once
    both are written in one way. ``null``: nothing is boxed."""
    math = _harness("hendrycks_math.utils")
    try:
        box = math.last_boxed_only_string(prediction)
        boxed = math.remove_boxed(box.replace("\\fbox", "\\boxed", 1))
    except (AttributeError, AssertionError, IndexError):  # no box, or a broken one
        return {"score": 0.0, "null": 1.0}
    number = _number(boxed)
    right = any(
        math.is_equiv(boxed, answer) or (number is not None and number == _number(answer))
        for answer in key.answers
    )
    return {"score": float(right), "null": 0.0}


# LongBench v2: extract_answer of pred.py, github.com/THUDM/LongBench


def _longbench_v2(prediction: str, key: Key) -> dict[str, float]:
    text = prediction.replace("*", "")
    letter = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(
        r"The correct answer is ([A-D])", text
    )
    return {
        "score": float(letter is not None and letter[1] in key.letters),
        "null": float(not letter),
    }


# InfiniteBench: lm-eval's copies of src/compute_scores.py, github.com/OpenBMB/InfiniteBench


def _infinitebench(name: str) -> Metric:
    def score(prediction: str, key: Key) -> dict[str, float]:
        process = getattr(_harness("infinitebench.utils"), f"process_results{name}")
        doc = {"answer": list(key.answers), "options": list(key.choices)}
        return {"score": float(process(doc, [prediction])["score"])}

    return score


def _math_calc(prediction: str, key: Key) -> dict[str, float]:
    """The share of intermediate values that are right before the first that is not."""
    numbers, right = re.findall(r"\d+", prediction), 0
    for value, answer in zip(numbers, key.answers, strict=False):
        if value.lstrip("0") != answer.lstrip("-").lstrip("0") or answer.startswith("-"):
            break
        right += 1
    return {"score": right / len(key.answers)}


# SCBench: get_score_one_longbook_choice_eng of compute_scores.py, github.com/microsoft/MInference


def _first_letter(prediction: str, key: Key) -> dict[str, float]:
    """Whether a prediction begins with the right letter, is the right option's text, or else names the
    right one after "answer is" and the like, or first of all letters that stand alone."""
    text, right = prediction.strip(), {*key.letters, *key.answers}
    if not text:
        return {"score": 0.0}
    if text[0] in "ABCD":
        return {"score": float(text[0] in right)}
    if text in right:
        return {"score": 1.0}
    text = " ".join(re.sub(r"[\n\"'.,?!{}]", " ", text).split())
    for marker in ("answer is:", "answer:", "answer is", "option is"):
        _, marker_there, rest = text.partition(marker)
        if marker_there:
            return {"score": float(any(rest[1:].startswith(beginning) for beginning in right))}
    letter = next((word for word in text.split() if word in "ABCD"), "")
    return {"score": float(letter in right)}


# ZeroSCROLLS: metrics of arXiv 2305.14196 and of SCROLLS, huggingface.co/datasets/tau/scrolls


def _rouge_geometric(prediction: str, key: Key) -> dict[str, float]:
    """The geometric mean of ROUGE-1, -2 and -L of each example; the benchmark takes that of the three
    means over a set, which the three scores beside it give."""
    kinds = ("rouge1", "rouge2", "rougeL")
    scores = [_rouge_scorer(*kinds, stem=True).score(each, prediction) for each in key.answers]
    each = {kind: max((s[kind].fmeasure for s in scores), default=0.0) for kind in kinds}
    product = each["rouge1"] * each["rouge2"] * each["rougeL"]
    return {"score": product ** (1 / 3), **each}


def _letter_accuracy(prediction: str, answer: str) -> float:
    answered, right = (re.search(r"\b[A-D]\b", text) for text in (prediction, answer))
    return float(answered is not None and right is not None and answered[0] == right[0])


def _exponential_similarity(prediction: str, answer: str) -> float:
    """Half as good for every ten points that the percentage is wrong."""
    answered, right = (re.search(r"(\d+\.?\d*)%", text) for text in (prediction, answer))
    if answered is None or right is None:
        return 0.0
    return float(0.5 ** (abs(float(answered[1]) - float(right[1])) / 10))


def _concordance(prediction: str, answer: str) -> float:
    """The share of pairs in the right order, of a list of the right numbers."""
    answered, right = (
        [int(n) for n in re.findall(r"\d{1,9}", text)] for text in (prediction, answer)
    )
    if (
        sorted(answered) != sorted(right)
        or len(set(answered)) != len(answered)
        or len(answered) < 2
    ):
        return 0.0
    place = {number: i for i, number in enumerate(answered)}
    pairs = [(a, b) for i, a in enumerate(right) for b in right[i + 1 :]]
    return sum(place[a] < place[b] for a, b in pairs) / len(pairs)


# H2O's summaries (HELM's): h2o_hf/run_summarization.py, github.com/FMInference/H2O


def _rouge_2(prediction: str, key: Key) -> dict[str, float]:
    """F of ROUGE-2, and beside it of ROUGE-1 and -L, by the package `rouge` as released; a prediction
    without a word has 0, where the package raises."""
    from rouge import Rouge

    best = {"rouge-1": 0.0, "rouge-2": 0.0}
    for answer in key.answers if prediction.strip(". \n\t") else ():
        scores = Rouge(metrics=[*best]).get_scores(prediction, answer)[0]
        best = {name: max(value, float(scores[name]["f"])) for name, value in best.items()}
    of_lines = METRICS["rouge_l"](prediction, key)["score"]
    return {"score": best["rouge-2"], "rouge1": best["rouge-1"], "rougeL": of_lines}


# LooGLE: Evaluation/automatic_metrics.py, github.com/bigai-nlco/LooGLE


def _loogle(prediction: str, key: Key) -> dict[str, float]:
    """ROUGE-L as LooGLE reports it, i.e. recall, and beside it ROUGE-1 and BLEU-1 and -4. Its METEOR,
    BERTScore and GPT-4 scores need models and word nets and are not computed."""
    from nltk.translate.bleu_score import sentence_bleu
    from rouge import Rouge

    (answer, *_) = key.answers
    text = prediction.strip() or "None"
    try:
        scores = Rouge().get_scores([text], [answer])[0]
    except ValueError:  # nothing but full stops
        scores = {"rouge-1": {"r": 0.0}, "rouge-l": {"r": 0.0}}
    words = [part.replace("\n", " ").split() for part in (answer, text)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # short answers have no 4-grams
        bleu1, bleu4 = (
            float(sentence_bleu([words[0]], words[1], weights=weights))
            for weights in ((1, 0, 0, 0), (0, 0, 0, 1))
        )
    rouge = {"rouge1": float(scores["rouge-1"]["r"]), "rougeL": float(scores["rouge-l"]["r"])}
    return {"score": rouge["rougeL"], **rouge, "bleu1": bleu1, "bleu4": bleu4}


def _loogle_cloze(prediction: str, key: Key) -> dict[str, float]:
    """The share of masks that are filled in exactly, and beside it of those that share a word. LooGLE
    divides by the masks of a whole set; it reads the prediction with `eval`, here it is a literal."""
    right: dict[str, str] = json.loads(key.answers[0])
    try:
        filled = ast.literal_eval(prediction.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        filled = None
    filled = filled if isinstance(filled, dict) else {}
    exact = sum(filled.get(mask) == name for mask, name in right.items())
    partial = sum(
        bool(set(name.split()) & set(str(filled.get(mask, "")).split()))
        for mask, name in right.items()
    )
    return {"score": exact / len(right), "partial": partial / len(right)}


METRICS: Mapping[str, Metric] = {
    # of any data
    "contains": _best(containment),
    "exact": _best(lambda prediction, answer: normalised(prediction) == normalised(answer)),
    "f1": _best(_longbench("qa_f1_score")),
    "rouge_l": _best(_with_fresh_stack(_longbench("rouge_score"))),
    "rouge_2": _rouge_2,
    "choice": _choice,
    "regex": _regex,
    # of benchmarks
    "boxed": _boxed,
    "contains_all": _contains_all,
    "f1_zh": _best(_longbench("qa_f1_zh_score")),
    "rouge_l_zh": _best(_with_fresh_stack(_longbench("rouge_zh_score"))),
    "classification": _classification,
    "count": _best(_longbench("count_score")),
    "retrieval": _best(_longbench("retrieval_score")),
    "retrieval_zh": _best(_longbench("retrieval_zh_score")),
    "code_similarity": _best(code_similarity),
    "longbench_v2": _longbench_v2,
    "first_integer": _infinitebench("_int_match"),
    "word": _infinitebench("_kv"),
    "first_number": _infinitebench("_math"),
    "last_integer": _infinitebench("_code_run"),
    "math_calc": _math_calc,
    "code_debug": _infinitebench("_code_debug"),
    "first_letter": _first_letter,
    "last_letter": _infinitebench("_choice"),
    "substring": _infinitebench(""),
    "token_f1": _infinitebench("_qa_en"),
    "token_f1_zh": _infinitebench("_qa_chn"),
    "rouge_lsum": _infinitebench("_rouge"),
    "rouge_geometric": _rouge_geometric,
    "letter": _best(_letter_accuracy),
    "exponential_similarity": _best(_exponential_similarity),
    "concordance": _best(_concordance),
    "loogle": _loogle,
    "loogle_cloze": _loogle_cloze,
}
"""Every metric by the name that a config gives it."""
