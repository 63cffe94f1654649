"""Metrics of published benchmarks; the comment above each group names the code that it follows.

Where lm-eval has a benchmark's own function, that function is called.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import warnings
from collections.abc import Mapping
from decimal import Decimal
from functools import cache
from importlib import import_module
from itertools import combinations
from threading import Thread
from typing import Any

from kvbench.errors import needs_extra
from kvbench.tasks.base import TaskError
from kvbench.tasks.metrics_text import Key, Metric, Pairwise, best_of_answers, rouge_scorer


@cache
def lm_eval_module(name: str) -> Any:
    """Import a module of lm-eval's tasks, e.g. ``longbench.metrics``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fuzzywuzzy warns about a package that it does not find
        try:
            return import_module(f"lm_eval.tasks.{name}")
        except ImportError as error:
            raise TaskError(
                f"the metric calls lm_eval.tasks.{name}: {needs_extra('lm-eval', 'lm-eval')}"
            ) from error


# LongBench: metrics.py of github.com/THUDM/LongBench, by lm-eval's copy except where the copy differs:
# * Code similarity. lm-eval skips blank lines before it picks the line to compare; the original takes a
#   blank line as well. And fuzzywuzzy's ratio depends on whether the Levenshtein package is installed,
#   which LongBench's requirements do not ask for; here it is always difflib's.
# * ROUGE-L. It reconstructs subsequences by recursion and returns 0 where Python's recursion limit is
#   reached. In a thread, whose stack is empty, the result does not depend on how deep its caller is.


def longbench(function: str) -> Pairwise:
    """The function of this name in lm-eval's copy of LongBench's metrics."""

    def score(prediction: str, answer: str) -> float:
        return float(getattr(lm_eval_module("longbench.metrics"), function)(prediction, answer))

    return score


def longbench_rouge(function: str) -> Pairwise:
    """The function as `longbench` gives it, called in a thread of its own."""
    score = longbench(function)

    def score_in_thread(prediction: str, answer: str) -> float:
        scores: list[float] = []
        thread = Thread(target=lambda: scores.append(score(prediction, answer)), name="rouge")
        thread.start()
        thread.join()
        return scores[0]

    return score_in_thread


def code_similarity(prediction: str, answer: str) -> float:
    """The similarity between the answer and the first line of the prediction that has no backtick,
    ``#`` or ``//``, in whole per cent: the ratio of fuzzywuzzy without the Levenshtein package."""
    lines = prediction.lstrip("\n").split("\n")
    code = (line for line in lines if "`" not in line and "#" not in line and "//" not in line)
    line = next(code, "")
    if line == answer:
        return 1.0
    if not line or not answer:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, answer).ratio()) / 100


def classification(prediction: str, key: Key) -> Mapping[str, float]:
    """LongBench's classification score of a prediction, whose classes are `Key.choices`."""
    score = lm_eval_module("longbench.metrics").classification_score
    classes = list(key.choices)
    return best_of_answers(lambda text, answer: score(text, answer, all_classes=classes))(
        prediction, key
    )


# MATH, GSM8K, AIME: the functions for \\boxed{} and for comparing are lm-eval's copies of those of the
# MATH data set's authors (arXiv 2103.03874, github.com/hendrycks/math).


_FONT = r"\\(?:text(?:bf|it|rm|normal)?|math(?:bf|it|rm|sf)|mbox)\s*"
_POWER = re.compile(r"\\(?:times|cdot)10\^(?:\{([+-]?\d{1,3})\}|(\d))")
_UNIT = re.compile(
    r"(?<=[\d.])(?:\s*\\mathrm\s*\{\s*[A-Za-z]{2,}\s*\}"
    r"|(?:\s+(?!(?:hundred|thousand|million|billion|trillion|dozen|squared|cubed|factorial"
    r"|or|and|to|times|plus|minus|over|mod|base|pi)\b)[A-Za-z]{2,})++)\s*\Z"
)


def _unwrapped(text: str) -> str:
    r"""A text without the \text{} or \mathbf{} around it, and with a hyphen for a minus sign."""
    plain = text.replace("\N{MINUS SIGN}", "-")
    wrapped = re.fullmatch(rf"\s*{_FONT}\{{([^{{}}]*)\}}\s*", plain)
    return plain if wrapped is None else wrapped[1]


def _number(text: str) -> Decimal | None:
    """The number that an unwrapped text is, after thousands' commas, signs of money and per cent, and
    units (words of two letters and more) are dropped; None for any other text."""
    plain = re.sub(r"\\!|\\?[$%]|\\text\{[^{}]*\}", "", text)
    plain = _UNIT.sub("", re.sub(r"\\[,; ]|~", " ", plain))
    plain = re.sub(r"\{?,\}?(?=\d{3}(?!\d))", "", re.sub(r"\s", "", plain))
    plain = _POWER.sub(lambda power: f"e{power[1] or power[2]}", plain)
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?", plain)
    return Decimal(plain) if is_number else None


def boxed(prediction: str, key: Key) -> dict[str, float]:
    """1 if the last \\boxed{} of a prediction holds an answer, else 0: the same number, or the same
    text once both are normalised. ``null`` is 1 where nothing is boxed."""
    math = lm_eval_module("hendrycks_math.utils")
    # Alone and without a blank: lm-eval's function prefers a "\boxed " to any "\boxed{" after it.
    from_last_box = prediction[max(0, prediction.rfind("\\boxed")) :]
    from_last_box = re.sub(r"\\(boxed|fbox)\s+\{", r"\\\1{", from_last_box)
    try:
        box = math.last_boxed_only_string(from_last_box)
        content = _unwrapped(math.remove_boxed(box.replace("\\fbox", "\\boxed", 1)))
    except (AttributeError, AssertionError, IndexError):  # there is no box, or it is not closed
        return {"score": 0.0, "null": 1.0}
    number = _number(content)
    answers = map(_unwrapped, key.answers)
    is_right = any(
        math.is_equiv(content, answer) or (number is not None and number == _number(answer))
        for answer in answers
    )
    return {"score": float(is_right), "null": 0.0}


# LongBench v2: extract_answer of pred.py, github.com/THUDM/LongBench


def longbench_v2(prediction: str, key: Key) -> dict[str, float]:
    """1 if the letter after "The correct answer is" is right, else 0. ``null`` is 1 where there is
    none."""
    text = prediction.replace("*", "")
    match = re.search(r"The correct answer is \(([A-D])\)", text)
    match = match or re.search(r"The correct answer is ([A-D])", text)
    if match is None:
        return {"score": 0.0, "null": 1.0}
    return {"score": float(match[1] in key.letters), "null": 0.0}


# InfiniteBench: lm-eval's copies of src/compute_scores.py, github.com/OpenBMB/InfiniteBench


def infinitebench(function: str) -> Metric:
    """The metric that calls the function of this name in lm-eval's copy of InfiniteBench's scores."""

    def metric(prediction: str, key: Key) -> dict[str, float]:
        process_results = getattr(lm_eval_module("infinitebench.utils"), function)
        row = {"answer": list(key.answers), "options": list(key.choices)}
        return {"score": float(process_results(row, [prediction])["score"])}

    return metric


def math_calc(prediction: str, key: Key) -> dict[str, float]:
    """The share of intermediate values that are right before the first wrong one."""
    values = re.findall(r"\d+", prediction)
    right = 0
    for value, answer in zip(values, key.answers, strict=False):
        is_negative = answer.startswith("-")  # the prediction's values have no sign
        if is_negative or value.lstrip("0") != answer.lstrip("0"):
            break
        right += 1
    return {"score": right / len(key.answers)}


# SCBench: get_score_one_longbook_choice_eng of compute_scores.py, github.com/microsoft/MInference


def first_letter(prediction: str, key: Key) -> dict[str, float]:
    """1 if the prediction chooses the right option, else 0: by the letter that it begins with, by the
    text of the option alone, by what follows "answer is" and the like, or else by the first of the
    letters A to D that is a word of its own."""
    text = prediction.strip()
    right_answers = {*key.letters, *key.answers}
    if not text:
        return {"score": 0.0}
    if text[0] in "ABCD":
        return {"score": float(text[0] in right_answers)}
    if text in right_answers:
        return {"score": 1.0}
    text = " ".join(re.sub(r"[\n\"'.,?!{}]", " ", text).split())
    for marker in ("answer is:", "answer:", "answer is", "option is"):
        if marker in text:
            after_blank = text.partition(marker)[2][1:]
            is_right = any(after_blank.startswith(answer) for answer in right_answers)
            return {"score": float(is_right)}
    letter = next((word for word in text.split() if word in "ABCD"), "")
    return {"score": float(letter in right_answers)}


# ZeroSCROLLS: metrics of arXiv 2305.14196 and of SCROLLS, huggingface.co/datasets/tau/scrolls


def rouge_geometric(prediction: str, key: Key) -> dict[str, float]:
    """The geometric mean of ROUGE-1, -2 and -L (F, stemmed, each the best over the answers), and the
    three beside it. The benchmark takes the geometric mean of the three means over a data set, which
    can be computed from the latter."""
    kinds = ("rouge1", "rouge2", "rougeL")
    scorer = rouge_scorer(*kinds, stem=True)
    by_answer = [scorer.score(answer, prediction) for answer in key.answers]
    best = {
        kind: max((scores[kind].fmeasure for scores in by_answer), default=0.0) for kind in kinds
    }
    product = best["rouge1"] * best["rouge2"] * best["rougeL"]
    return {"score": product ** (1 / 3), **best}


def letter_accuracy(prediction: str, answer: str) -> float:
    """1 if the first of the letters A to D that stands alone is the same in prediction and answer."""
    predicted_letter = re.search(r"\b[A-D]\b", prediction)
    right_letter = re.search(r"\b[A-D]\b", answer)
    if predicted_letter is None or right_letter is None:
        return 0.0
    return float(predicted_letter[0] == right_letter[0])


# Possessive, and from a number's first digit on: to search in a long run of digits takes linear time.
_SHARE = re.compile(r"(?<!\d)(\d++(?:\.\d*+)?)%")


def exponential_similarity(prediction: str, answer: str) -> float:
    """0.5 ** (d / 10), where d is the difference of the first percentages in prediction and answer; 0
    where one of them has none."""
    predicted_share = _SHARE.search(prediction)
    right_share = _SHARE.search(answer)
    if predicted_share is None or right_share is None:
        return 0.0
    return float(0.5 ** (abs(float(predicted_share[1]) - float(right_share[1])) / 10))


def concordance(prediction: str, answer: str) -> float:
    """The share of pairs of numbers that the prediction lists in the answer's order; 0 where it does
    not list the answer's numbers, each once."""
    predicted_order = [int(number) for number in re.findall(r"\d{1,9}", prediction)]
    right_order = [int(number) for number in re.findall(r"\d{1,9}", answer)]
    if sorted(predicted_order) != sorted(right_order) or len(predicted_order) < 2:
        return 0.0
    if len(set(predicted_order)) != len(predicted_order):
        return 0.0
    place = {number: index for index, number in enumerate(predicted_order)}
    pairs = list(combinations(right_order, 2))
    return sum(place[earlier] < place[later] for earlier, later in pairs) / len(pairs)


# H2O's summaries (HELM's): h2o_hf/run_summarization.py, github.com/FMInference/H2O


def rouge_2(prediction: str, key: Key) -> dict[str, float]:
    """ROUGE-2 F, and ROUGE-1 and -L F beside it, by the package `rouge` as in the release. A
    prediction or answer without a word scores 0, where the package raises."""
    from rouge import Rouge

    best = {"rouge-1": 0.0, "rouge-2": 0.0}
    if prediction.strip(". \n\t"):
        for answer in (answer for answer in key.answers if answer.strip(". \n\t")):
            (scores,) = Rouge(metrics=list(best)).get_scores(prediction, answer)
            best = {kind: max(value, float(scores[kind]["f"])) for kind, value in best.items()}
    rouge_l = best_of_answers(longbench_rouge("rouge_score"))(prediction, key)["score"]
    return {"score": best["rouge-2"], "rouge1": best["rouge-1"], "rougeL": rouge_l}


# LooGLE: Evaluation/automatic_metrics.py, github.com/bigai-nlco/LooGLE


def loogle(prediction: str, key: Key) -> dict[str, float]:
    """ROUGE-L as LooGLE reports it, which is recall, and beside it ROUGE-1 and BLEU-1 and -4. LooGLE's
    METEOR, BERTScore and GPT-4 scores need models and word nets and are not computed."""
    from nltk.translate.bleu_score import sentence_bleu
    from rouge import Rouge

    answer = key.answers[0]
    text = prediction.strip() or "None"
    try:
        (scores,) = Rouge().get_scores([text], [answer])
    except ValueError:  # the prediction has nothing but full stops
        scores = {"rouge-1": {"r": 0.0}, "rouge-l": {"r": 0.0}}
    answer_words = answer.replace("\n", " ").split()
    words = text.replace("\n", " ").split()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nltk warns where an answer is too short for 4-grams
        bleu1 = float(sentence_bleu([answer_words], words, weights=(1, 0, 0, 0)))
        bleu4 = float(sentence_bleu([answer_words], words, weights=(0, 0, 0, 1)))
    rouge_l = float(scores["rouge-l"]["r"])
    return {
        "score": rouge_l,
        "rouge1": float(scores["rouge-1"]["r"]),
        "rougeL": rouge_l,
        "bleu1": bleu1,
        "bleu4": bleu4,
    }


def loogle_cloze(prediction: str, key: Key) -> dict[str, float]:
    """The share of masks that are filled in exactly, and as ``partial`` the share whose filling has a
    word of the answer. LooGLE divides by the masks of a whole data set, and reads the prediction, a
    Python dictionary, with `eval`; here it is read as a literal. The key's first answer is a JSON object
    from mask to name."""
    names: dict[str, str] = json.loads(key.answers[0])
    try:
        fillings = ast.literal_eval(prediction.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        fillings = {}
    if not isinstance(fillings, dict):
        fillings = {}
    exact = sum(fillings.get(mask) == name for mask, name in names.items())
    partial = sum(
        not set(name.split()).isdisjoint(str(fillings.get(mask, "")).split())
        for mask, name in names.items()
    )
    return {"score": exact / len(names), "partial": partial / len(names)}
