"""Metrics: every one by a table of predictions, and the official scorers' own cases."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer
from support.paths import GOLDEN, ROOT

from kvbench.tasks.base import Example, TaskError
from kvbench.tasks.longbench_datasets import bucket, score
from kvbench.tasks.longeval_lines import LongEvalLines, parse_number
from kvbench.tasks.metrics import (
    METRICS,
    _own_metric,
    check_metric,
    metric_named,
    own_function,
    scorer,
)
from kvbench.tasks.metrics_benchmarks import lm_eval_module
from kvbench.tasks.metrics_text import Key, containment, released_recall, rouge1, word_recall
from kvbench.tasks.ruler import Ruler, clean

CASES = json.loads((ROOT / "tests/data/metrics.json").read_text(encoding="utf-8"))
"""By metric: prediction, answers, choices, score; more are in tests/data/benchmarks.json,
and LongBench's own below."""


@pytest.mark.parametrize(
    ("name", "prediction", "answers", "choices", "expected"),
    [
        pytest.param(name, *case, id=f"{name} {number}")
        for name, cases in CASES.items()
        for number, case in enumerate(cases)
    ],
)
def test_every_metric_scores_its_cases(
    name: str, prediction: str, answers: list[str], choices: list[str], expected: float
) -> None:
    scores = METRICS[name](prediction, Key(tuple(answers), tuple(choices)))
    assert scores["score"] == pytest.approx(expected, abs=1e-6)


def test_without_lm_eval_a_metric_that_needs_it_is_refused(monkeypatch: Any) -> None:
    packages = {"lm_eval", "rouge", "jieba", "fuzzywuzzy"}
    for module in [name for name in sys.modules if name.partition(".")[0] in packages]:
        monkeypatch.delitem(sys.modules, module)
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    lm_eval_module.cache_clear()
    refused: dict[str, str] = {}
    for name, metric in METRICS.items():
        try:
            check_metric(name)
        except TaskError as problem:
            refused[name] = str(problem)
        else:
            assert metric("3", Key(('{"a": "3"}',), ("3", "4"), pattern="3"))["score"] <= 1
    assert {"qa_f1", "boxed"} <= refused.keys()
    assert not {"contains", "f1", "code_similarity"} & refused.keys()
    command = "try: pip install 'kvbench[lm-eval]'"
    assert all(message.endswith(command) for message in refused.values())


OWN = """
THREE = 3
class Judge: ...
def half(prediction, references): return len(prediction) / (2 * len(references))
def of_three(prediction, references, threshold): return 1.0
def text(prediction, references): return "good"
def percent(prediction, references): return 87.5
def nothing(prediction, references): return float("nan")
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_metrics.py").write_text(OWN)
    (tmp_path / "broken_metrics.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_metrics", None)
    _own_metric.cache_clear()


def test_a_metric_may_be_a_function_of_ones_own(own: None) -> None:
    assert metric_named("own_metrics.half")("a", Key(("x", "y"))) == {"score": 0.25}
    assert scorer("own_metrics.half")("ab", ["x"]) == 1.0
    assert scorer("exact")("The Paris.", ["x", "paris"]) == 1.0
    own_function_ = own_function("own_metrics.half")
    assert own_function_ is not None
    assert own_function_.__code__.co_filename.endswith("own_metrics.py")
    assert own_function("contains") is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("contians", "'contians' (did you mean 'contains'?); allowed: contains, exact, "),
        (
            "own_metrics.nine",
            "which cannot be found (is its folder on PYTHONPATH?); allowed: a fun",
        ),
        ("broken_metrics.x", "division by zero"),
        ("os.system", "of Python's own library; allowed: a function of a prediction and a list of"),
        ("own_metrics.THREE", "allowed: a function of a prediction and a list of answers"),
        ("own_metrics.Judge", "allowed: a function of a prediction and a list of answers"),
        ("own_metrics.of_three", "allowed: a function of a prediction and a list of answers"),
        ("own_metrics.text", "returned 'good'; allowed: a number from 0 to 1"),
        ("own_metrics.percent", "returned 87.5; allowed: a number from 0 to 1"),
        ("own_metrics.nothing", "returned nan; allowed: a number from 0 to 1"),
        ("choice", "needs the options of each question, which records do not hold; allowed: cont"),
    ],
)
def test_what_is_no_metric_is_one_line(own: None, name: str, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        scorer(name)("x", ["y"])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rouge_scores_beside_the_primary_one() -> None:
    text, answer = "the old harbour was opened on Monday", "The harbour was opened on Sunday."
    (expected,) = Rouge().get_scores(text, answer)
    scores = METRICS["rouge_2"](text, Key((answer,)))
    assert scores["score"] == expected["rouge-2"]["f"]
    assert scores["rouge1"] == expected["rouge-1"]["f"]
    assert scores["rougeL"] == pytest.approx(expected["rouge-l"]["f"])
    kinds = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(answer, text)
    product = math.prod(kind.fmeasure for kind in kinds.values())
    assert METRICS["rouge_geometric"](text, Key((answer,)))["score"] == product ** (1 / 3)


def test_a_pattern_matches_the_answer() -> None:
    key = Key(("3",), pattern=r"#### (\d+)")
    assert METRICS["regex"]("so 5 + 5 #### 3", key) == {"score": 1.0}
    assert METRICS["regex"]("3", key) == {"score": 0.0}
    with pytest.raises(TaskError, match="no regular expressions"):
        METRICS["regex"]("a", Key(("(",)))


def test_a_pattern_that_runs_for_ever_is_stopped(monkeypatch: Any) -> None:
    monkeypatch.setattr("kvbench.tasks.metrics_text.REGEX_SECONDS", 0.2)
    start = time.process_time()
    with pytest.raises(TaskError, match=r"takes more than 0.2 s on one prediction"):
        METRICS["regex"]("a" * 60 + "!", Key(("x",), pattern=r"(a|aa|a?)+$"))
    assert time.process_time() - start < 5


# needle


ANSWER = "eat a sandwich and sit in Dolores Park on a sunny day"


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        (" Eat a sandwich and  sit in Dolores Park on a sunny day.", ANSWER, 1.0),
        (" Eat a sandwich and  sit in Dolores Park on a sunny day.", f"{ANSWER}.", 1.0),
        (ANSWER, f"{ANSWER}.", 1.0),
        ("eat a sandwich", ANSWER, 0.0),
        (f"{ANSWER}s", ANSWER, 0.0),
        ("day", ".", 0.0),
    ],
)
def test_containment_ignores_case_blanks_and_the_last_full_stop(
    prediction: str, answer: str, score: float
) -> None:
    assert containment(prediction, answer) == score


def test_word_recall_counts_repetitions_and_rouge_1_stems_nothing() -> None:
    assert word_recall("a sandwich, a day!", "eat a sandwich on a day") == pytest.approx(4 / 6)
    assert word_recall("", "eat") == word_recall("eat", "") == 0.0
    assert word_recall("答案是北京。", "北京") == word_recall("दिल्ली में", "दिल्ली") == 1.0
    assert rouge1("eat a sandwich", "eat a sandwich") == 1.0
    assert rouge1("eat a", "eat a fine sandwich") == pytest.approx(2 / 3)
    assert rouge1("eats", "eat") == 0.0


@pytest.mark.parametrize("metric", ["exponential_similarity", "contains", "choice", "boxed"])
@pytest.mark.parametrize("part", ["1", "1.", "1,", "answer is ", "\\boxed{", "I think ", "1 ab "])
def test_a_long_prediction_takes_linear_time(metric: str, part: str) -> None:
    start = time.process_time()
    METRICS[metric](part * 2000, Key(("5%",)))
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("prediction", "share"),
    [
        ("EAT A SANDWICH and sit in dolores park\ton a sunny\n\nday.", 11),
        (ANSWER, 10),
        ("It is a story about a boy and a girl in a house on a hill.", 4),
    ],
)
def test_released_recall_counts_different_words_with_their_punctuation(
    prediction: str, share: int
) -> None:
    answer = f"{ANSWER}."  # 11 different words
    assert released_recall(prediction, answer) == pytest.approx(share / 11)
    assert released_recall(prediction, "") == 0.0


# LongBench


@pytest.fixture
def longbench() -> Any:
    return json.loads((GOLDEN / "longbench_metrics.json").read_text(encoding="utf-8"))


def test_every_case_scored_by_the_original_code_scores_the_same(
    longbench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether or not fuzzywuzzy finds Levenshtein installed, whose scores are others."""
    monkeypatch.setattr("fuzzywuzzy.fuzz.SequenceMatcher", None)
    assert len(longbench["cases"]) == 342
    for case in longbench["cases"]:
        actual = score(
            case["dataset"], case["prediction"], case["answers"], case["all_classes"] or ()
        )
        assert actual == pytest.approx(case["score"], abs=1e-9), (case["dataset"], case["case"])


def test_means_of_data_sets_are_those_of_the_original_code(longbench: Any) -> None:
    for dataset, expected in longbench["whole_set"].items():
        cases = [case for case in longbench["cases"] if case["dataset"] == dataset]
        assert len(cases) == expected["n"]
        scores: list[float] = []
        by_bucket: dict[str, list[float]] = {}
        for case in cases:
            answers, classes = case["answers"], expected["all_classes"] or ()
            scores.append(score(dataset, case["prediction"], answers, classes))
            by_bucket.setdefault(bucket(case["length"]), []).append(scores[-1])
        assert round(100 * fmean(scores), 2) == pytest.approx(expected["scorer"], abs=1e-9)
        for name, mean in expected["scorer_e"].items():
            assert round(100 * fmean(by_bucket[name]), 2) == pytest.approx(mean, abs=1e-9)


@pytest.mark.slow
def test_rouge_does_not_depend_on_the_depth_of_its_caller() -> None:
    text = " ".join(f"w{i}" for i in range(900))

    def deep(levels: int) -> float:
        return score("gov_report", text, [text]) if levels == 0 else deep(levels - 1)

    assert deep(0) == deep(700) == pytest.approx(0.999999995, abs=1e-9)
    longer = " ".join(f"w{i}" for i in range(1010))
    assert score("gov_report", longer, [longer]) == 0.0  # the original's recursion limit


def test_longbench_scores_by_dataset() -> None:
    assert score("lsht", "\n体育\n财经", ["体育"], ["体育", "财经"]) == 1.0  # the first line
    assert score("qasper", "a", []) == 0.0


# LongEval, RULER


def example(answers: Any, dataset: str = "x") -> Example:
    return Example(
        id="x", context="c", question="q", answers=tuple(answers), max_new_tokens=1, dataset=dataset
    )


def test_lines_are_scored_as_by_the_official_scorer() -> None:
    golden = json.loads((GOLDEN / "longeval_scoring.json").read_text())
    scores = []
    for case in golden["cases"]:
        assert parse_number(case["output"]) == case["parsed"], case
        scores.append(LongEvalLines().score(case["output"], example([str(case["label"])]))["score"])
        assert scores[-1] == float(case["correct"]), case
    assert fmean(scores) == pytest.approx(golden["accuracy"])
    assert parse_number("1" * 5000) == -1, "too long for an integer: wrong, and no error"


def test_ruler_is_scored_as_by_the_official_scorer() -> None:
    golden = json.loads((GOLDEN / "ruler_scoring.json").read_text())
    assert len(golden["cases"]) == 60
    by_task: dict[str, list[Any]] = {}
    for case in golden["cases"]:
        scores = Ruler().score(case["prediction"], example(case["references"], case["task"]))
        assert round(100 * scores["score"], 2) == case["score"], case
        assert clean(case["prediction"]) == case["postprocessed"]
        by_task.setdefault(case["task"], []).append(scores)
    for name, expected in golden["whole_set"].items():
        assert len(by_task[name]) == expected["n"]
        mean = fmean(scores["score"] for scores in by_task[name])
        assert round(100 * mean, 2) == expected["score"]
        assert sum(scores["null"] for scores in by_task[name]) == expected["nulls"]
