"""Metrics: every one by a table of predictions, and the official scorers' own cases."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rouge import Rouge
from rouge_score.rouge_scorer import RougeScorer
from support.paths import ROOT

from kvbench.tasks.base import Example, TaskError
from kvbench.tasks.longbench import bucket, score
from kvbench.tasks.longeval_lines import LongEvalLines, parse_number
from kvbench.tasks.metrics import (
    METRICS,
    Key,
    containment,
    released_recall,
    rouge1,
    word_recall,
)
from kvbench.tasks.ruler import Ruler, clean

CASES = json.loads((ROOT / "tests/data/metrics.json").read_text(encoding="utf-8"))
"""By metric: prediction, answers, choices, score; more are in tests/data/benchmarks.json,
and LongBench's own below."""


def test_every_metric_scores_its_cases() -> None:
    for name, cases in CASES.items():
        for prediction, answers, choices, expected in cases:
            found = METRICS[name](prediction, Key(tuple(answers), tuple(choices)))["score"]
            assert found == pytest.approx(expected, abs=1e-6), (name, prediction)


def test_a_box_holds_the_same_number_or_the_same_text() -> None:
    for boxed, answers, wanted in (
        (r"\boxed{1,000}", ["1000.0"], 1.0),  # a number alone
        (r"\boxed{\frac12}", [r"\frac{1}{2}"], 1.0),  # a text alone
        (r"\boxed{x}", ["y"], 0.0),
        (r"\boxed{3}", ["4"], 0.0),
        (r"\boxed{3}", ["y", "3"], 1.0),
        (r"\boxed{x}", ["3"], 0.0),
        ("3", ["3"], 0.0),  # no box
    ):
        found = METRICS["boxed"](boxed, Key(tuple(answers)))
        assert found == {"score": wanted, "null": float("boxed" not in boxed)}, boxed


def test_what_stands_beside_a_score() -> None:
    text, answer = "the old harbour was opened on Monday", "The harbour was opened on Sunday."
    (theirs,) = Rouge().get_scores(text, answer)
    found = METRICS["rouge_2"](text, Key((answer,)))
    assert (found["score"], found["rouge1"]) == (theirs["rouge-2"]["f"], theirs["rouge-1"]["f"])
    assert found["rougeL"] == pytest.approx(theirs["rouge-l"]["f"])
    scores = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(answer, text)
    product = math.prod(one.fmeasure for one in scores.values())
    assert METRICS["rouge_geometric"](text, Key((answer,)))["score"] == product ** (1 / 3)


def test_a_pattern_finds_the_answer_and_is_stopped_where_it_runs_for_ever(monkeypatch) -> None:
    key = Key(("3",), pattern=r"#### (\d+)")
    assert METRICS["regex"]("so 5 + 5 #### 3", key) == {"score": 1.0}
    assert METRICS["regex"]("3", key) == {"score": 0.0}
    monkeypatch.setattr("kvbench.tasks.metrics.REGEX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TaskError, match=r"takes more than 0.2 s on one prediction"):
        METRICS["regex"]("a" * 60 + "!", Key(("x",), pattern=r"(a|aa|a?)+$"))
    with pytest.raises(TaskError, match="no regular expressions"):
        METRICS["regex"]("a", Key(("(",)))
    assert time.monotonic() - start < 5


# needle


def test_scores_of_a_needle() -> None:
    answer = "eat a sandwich and sit in Dolores Park on a sunny day"
    right = " Eat a sandwich and  sit in Dolores Park on a sunny day."
    for said in (right, right.rstrip(".")):
        assert containment(said, answer) == containment(said, answer + ".") == 1.0
    assert containment("eat a sandwich", answer) == containment("day", ".") == 0.0
    assert word_recall("a sandwich, a day!", "eat a sandwich on a day") == pytest.approx(4 / 6)
    assert word_recall("", "eat") == word_recall("eat", "") == 0.0
    assert rouge1("eat a sandwich", "eat a sandwich") == 1.0
    assert rouge1("eat a", "eat a fine sandwich") == pytest.approx(2 / 3)
    assert rouge1("eats", "eat") == 0.0, "words are not stemmed"
    released = answer + "."  # 11 different words, which keep their punctuation
    for response, share in (
        ("EAT A SANDWICH and sit in dolores park\ton a sunny\n\nday.", 11),
        (answer, 10),
        ("It is a story about a boy and a girl in a house on a hill.", 4),
    ):
        assert released_recall(response, released) == pytest.approx(share / 11), response
        assert released_recall(response, "") == 0.0


# LongBench


@pytest.fixture
def longbench(shared_file: Callable[[str], Path]) -> Any:
    return json.loads(shared_file("golden/longbench_metrics.json").read_text(encoding="utf-8"))


def test_every_case_scored_by_the_original_code_scores_the_same(longbench) -> None:
    assert len(longbench["cases"]) == 342
    for case in longbench["cases"]:
        found = score(case["dataset"], case["prediction"], case["answers"], case["all_classes"])
        assert found == pytest.approx(case["score"], abs=1e-9), (case["dataset"], case["case"])
    for dataset, whole in longbench["whole_set"].items():
        cases = [case for case in longbench["cases"] if case["dataset"] == dataset]
        assert len(cases) == whole["n"]
        scores = [
            score(dataset, c["prediction"], c["answers"], whole["all_classes"]) for c in cases
        ]
        assert round(100 * sum(scores) / len(scores), 2) == pytest.approx(whole["scorer"], abs=1e-9)
        for name, expected in whole["scorer_e"].items():
            some = [s for s, c in zip(scores, cases, strict=True) if bucket(c["length"]) == name]
            assert round(100 * sum(some) / len(some), 2) == pytest.approx(expected, abs=1e-9)


def test_code_similarity_ignores_an_installed_levenshtein(longbench, monkeypatch) -> None:
    def wrong(*arguments: Any) -> None:
        raise AssertionError("the backend of fuzzywuzzy was asked")

    monkeypatch.setattr("fuzzywuzzy.fuzz.SequenceMatcher", wrong)
    for case in longbench["cases"]:
        if "score_levenshtein_backend" in case:
            found = score(case["dataset"], case["prediction"], case["answers"])
            assert found == pytest.approx(case["score"], abs=1e-9)


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
    with pytest.raises(TaskError, match=r"dataset 'quality' unknown; allowed: narrativeqa, "):
        score("quality", "a", ["a"])
    with pytest.raises(TaskError, match="trec is scored by its classes"):
        score("trec", "a", ["a"])


# LongEval, RULER


def made(answers: Any, dataset: str = "x") -> Example:
    given = {"id": "x", "context": "c", "question": "q", "max_new_tokens": 1}
    return Example(answers=tuple(answers), dataset=dataset, **given)


def test_lines_are_scored_as_by_the_official_scorer(shared_file) -> None:
    golden = json.loads(shared_file("golden/longeval_scoring.json").read_text())
    total = 0.0
    for case in golden["cases"]:
        assert parse_number(case["output"]) == case["parsed"], case
        found = LongEvalLines().score(case["output"], made([str(case["label"])]))["score"]
        assert found == float(case["correct"]), case
        total += found
    assert total / golden["n"] == pytest.approx(golden["accuracy"])
    assert parse_number("1" * 5000) == -1, "too long for an integer: wrong, no error"


def test_ruler_is_scored_as_by_the_official_scorer(shared_file) -> None:
    golden = json.loads(shared_file("golden/tasks/ruler_scoring.json").read_text())
    assert len(golden["cases"]) == 60
    scores: dict[str, list[Any]] = {}
    for case in golden["cases"]:
        found = Ruler().score(case["prediction"], made(case["references"], case["task"]))
        assert round(100 * found["score"], 2) == case["score"], case
        assert clean(case["prediction"]) == case["postprocessed"]
        scores.setdefault(case["task"], []).append(found)
    for name, expected in golden["whole_set"].items():
        values = [each["score"] for each in scores[name]]
        assert len(values) == expected["n"]
        assert round(100 * sum(values) / len(values), 2) == expected["score"]
        assert sum(each["null"] for each in scores[name]) == expected["nulls"]
