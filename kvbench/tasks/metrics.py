"""The metrics that a config can name, which are kvbench's own or a function of the user's."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pydoc import ErrorDuringImport, locate
from types import FunctionType
from typing import Any

from kvbench.errors import check_known, first_line
from kvbench.tasks.base import TaskError
from kvbench.tasks.metrics_benchmarks import (
    boxed,
    classification,
    code_similarity,
    concordance,
    exponential_similarity,
    first_letter,
    infinitebench,
    letter_accuracy,
    lm_eval_module,
    longbench,
    longbench_rouge,
    longbench_v2,
    loogle,
    loogle_cloze,
    math_calc,
    rouge_2,
    rouge_geometric,
)
from kvbench.tasks.metrics_text import (
    Key,
    Metric,
    best_of_answers,
    choose,
    containment,
    contains_all,
    exact_match,
    match_pattern,
    word_f1,
)

LONGBENCH: Mapping[str, Metric] = {
    "qa_f1": best_of_answers(longbench("qa_f1_score")),
    "f1_zh": best_of_answers(longbench("qa_f1_zh_score")),
    "rouge_l_zh": best_of_answers(longbench_rouge("rouge_zh_score")),
    "classification": classification,
    "count": best_of_answers(longbench("count_score")),
    "retrieval": best_of_answers(longbench("retrieval_score")),
    "retrieval_zh": best_of_answers(longbench("retrieval_zh_score")),
}
INFINITEBENCH: Mapping[str, Metric] = {
    "first_integer": infinitebench("process_results_int_match"),
    "word": infinitebench("process_results_kv"),
    "first_number": infinitebench("process_results_math"),
    "last_integer": infinitebench("process_results_code_run"),
    "code_debug": infinitebench("process_results_code_debug"),
    "last_letter": infinitebench("process_results_choice"),
    "substring": infinitebench("process_results"),
    "token_f1": infinitebench("process_results_qa_en"),
    "token_f1_zh": infinitebench("process_results_qa_chn"),
    "rouge_lsum": infinitebench("process_results_rouge"),
}
METRICS: Mapping[str, Metric] = {
    # for any data
    "contains": best_of_answers(containment),
    "exact": best_of_answers(exact_match),
    "f1": best_of_answers(word_f1),
    "rouge_l": best_of_answers(longbench_rouge("rouge_score")),
    "rouge_2": rouge_2,
    "choice": choose,
    "regex": match_pattern,
    # of benchmarks
    "boxed": boxed,
    "contains_all": contains_all,
    **LONGBENCH,
    "code_similarity": best_of_answers(code_similarity),
    "longbench_v2": longbench_v2,
    **INFINITEBENCH,
    "math_calc": math_calc,
    "first_letter": first_letter,
    "rouge_geometric": rouge_geometric,
    "letter": best_of_answers(letter_accuracy),
    "exponential_similarity": best_of_answers(exponential_similarity),
    "concordance": best_of_answers(concordance),
    "loogle": loogle,
    "loogle_cloze": loogle_cloze,
}
"""Every metric by the name that a config gives it."""

OF_LETTERS = frozenset(("choice", "longbench_v2"))
"""The metrics by which an answer is the letter of an option."""
OF_OPTIONS = OF_LETTERS | {"classification", "first_letter", "code_debug", "last_letter"}
"""The metrics that need the options of a question, or its classes, beside the answers."""

LM_EVAL = {
    "longbench.metrics": {*LONGBENCH, "rouge_l", "rouge_2", "loogle"},
    "hendrycks_math.utils": {"boxed"},
    "infinitebench.utils": {*INFINITEBENCH},
}
"""The metrics that call a module of lm-eval or, for `longbench.metrics`, need its packages."""


def metric_named(name: str) -> Metric:
    """A metric of `METRICS`, or of a function ``my.module.function``, which takes a prediction and the
    list of acceptable answers and returns a number from 0 to 1."""
    return METRICS[name] if name in METRICS else _own_metric(name)


def own_function(name: str) -> FunctionType | None:
    """The user's function of this name, imported; None for a metric of `METRICS`.

    Raises:
        TaskError: there is none, or it does not take a prediction and a list of answers.
    """
    if name in METRICS:
        return None
    what = f"task.metric is {name!r}"
    if "." not in name:
        check_known(what, name, [*METRICS, "my.module.function"], TaskError)
    allowed = "allowed: a function of a prediction and a list of answers"
    # What a model wrote is no argument for a function of the standard library, such as os.system.
    if name.partition(".")[0] in sys.stdlib_module_names:
        raise TaskError(f"{what}, of Python's own library; {allowed}")
    try:
        function: Any = locate(name)
    except ErrorDuringImport as error:
        raise TaskError(f"{what}: {first_line(error)}") from error
    if function is None:
        raise TaskError(f"{what}, which cannot be found (is its folder on PYTHONPATH?); {allowed}")
    try:
        assert inspect.isfunction(function)
        inspect.signature(function).bind("", [])
    except (AssertionError, TypeError):
        raise TaskError(f"{what}; {allowed}") from None
    return function


@cache
def _own_metric(name: str) -> Metric:
    function = own_function(name)
    assert function is not None

    def metric(prediction: str, key: Key) -> dict[str, float]:
        score = function(prediction, list(key.answers))
        is_share = isinstance(score, int | float) and not math.isnan(score) and 0 <= score <= 1
        if not is_share:
            raise TaskError(f"metric {name} returned {score!r:.60}; allowed: a number from 0 to 1")
        return {"score": float(score)}

    return metric


def scorer(metric: str) -> Callable[[str, Sequence[str]], float]:
    """The score of a prediction by a metric that needs nothing but the acceptable answers."""
    if metric in OF_OPTIONS:
        others = ", ".join(name for name in METRICS if name not in OF_OPTIONS)
        raise TaskError(
            f"metric {metric!r} needs the options of each question, which records do not hold; "
            f"allowed: {others}, my.module.function"
        )
    check_metric(metric)
    score = metric_named(metric)
    return lambda prediction, answers: score(prediction, Key(tuple(answers)))["score"]


def check_metric(name: str) -> None:
    """Import the user's function or the module of lm-eval that a metric needs, so that its absence is
    known before a run."""
    own_function(name)
    for module, metrics in LM_EVAL.items():
        if name in metrics:
            lm_eval_module(module)
