"""The metrics that a config can name, and the check that the packages of one are installed."""

from __future__ import annotations

from collections.abc import Mapping

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
    Metric,
    best_of_answers,
    choose,
    containment,
    contains_all,
    exact_match,
    match_pattern,
)

LONGBENCH: Mapping[str, Metric] = {
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
    "f1": best_of_answers(longbench("qa_f1_score")),
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

LM_EVAL = {
    "longbench.metrics": {*LONGBENCH, "f1", "rouge_l", "rouge_2", "loogle"},
    "hendrycks_math.utils": {"boxed"},
    "infinitebench.utils": {*INFINITEBENCH},
}
"""By module of lm-eval, the metrics that call it (or, of `longbench.metrics`, the packages that it
needs)."""


def check_metric(metric: str) -> None:
    """Import the module of lm-eval that a metric needs, so that its absence is known before a run."""
    for module, metrics in LM_EVAL.items():
        if metric in metrics:
            lm_eval_module(module)
