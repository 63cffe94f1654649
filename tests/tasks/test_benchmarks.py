"""Published benchmarks that are configs over data of the right format: prompts, scores, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from rouge_score.rouge_scorer import RougeScorer
from support.benchmarks import BOOK, WRITERS
from support.configs import composed
from support.encoders import shipped

from kvbench.tasks.base import TaskError
from kvbench.tasks.metrics import METRICS, Key


def task(name: str, folder: Path, **options: Any) -> Any:
    settings = [f"task.{key}={value}" for key, value in options.items()]
    config = composed(f"task={name}", f"task.data={WRITERS[name](folder)}", *settings)
    return instantiate(config.task, _convert_="all")


def test_longbench_v2(tmp_path):
    made = task("longbench_v2", tmp_path)
    found = made.examples(shipped())
    assert made.breakdown == ("difficulty", "length")
    first = found[0]
    assert first.context == (
        f"Please read the following text and answer the question below.\n\n<text>\n{BOOK}\n"
    )
    assert first.question == (
        "</text>\n\nWhat is the correct answer to this question: Who met Bob 0?\nChoices:\n"
        "(A) Option A\n(B) Option B\n(C) Option C\n(D) Option D\n\nFormat your response as follows: "
        '"The correct answer is (insert answer here)".'
    )
    assert first.fields == {"difficulty": "easy", "length": "short", "truncated_tokens": 0}
    assert [e.answers for e in found[:5]] == [("A",), ("B",), ("C",), ("D",), ("A",)]
    for text, score in (
        ("**The correct answer is (A)**", 1.0),
        ("I think The correct answer is A.", 1.0),
        ("The correct answer is (B), or The correct answer is A", 0.0),
        ("the correct answer is (A)", 0.0),
        ("A", 0.0),
    ):
        assert made.score(text, first)["score"] == score, text


def test_infinitebench_s_prompts(tmp_path):
    found = {e.dataset: e for e in task("infinitebench", tmp_path).examples(shipped())}
    assert "math_calc" not in found
    assert len(found) == 11
    code = found["code_run"]
    assert code.context.startswith(
        "Following is a set of Python functions. There is a function called named func_1.\n\nAnn met"
    )
    assert code.question == (
        "Please give me the exact number of the return value of func_1(4). Be concise. Your response "
        "must end with the final returned value."
    )
    assert found["math_find"].context.startswith(
        "What is the largest number in the following list?"
    )
    assert found["longbook_choice_eng"].question.endswith("A. Carl\nB. Ann\nC. Dora\nD. Eve")
    assert found["longbook_qa_chn"].question == "问题：几只鹅？\n请尽量简短地回答。"
    limits = {name: e.max_new_tokens for name, e in found.items()}
    assert (limits["passkey"], limits["kv_retrieval"], limits["longbook_sum_eng"]) == (6, 50, 1200)


@pytest.mark.parametrize(
    ("dataset", "right", "wrong"),
    [
        ("passkey", "71432 is it, not 5", "5, or 71432"),
        ("number_string", " 2233344555.", "223334455"),
        ("kv_retrieval", '"9c-1".', "9c-12"),
        ("code_run", "It returns -7.", "-7 it is"),
        ("code_debug", "C.", "func_c or A"),
        ("math_find", "97", "9.7"),
        ("longdialogue_qa_eng", "It is Ann", "It is Bob"),
        ("longbook_qa_eng", "The seven geese.", "hens"),
        ("longbook_sum_eng", "Ann met Bob.", "Nothing."),
        ("longbook_choice_eng", "B", "A"),
        ("longbook_qa_chn", "七只。", "八"),
    ],
)
def test_infinitebench_s_scores(tmp_path, dataset, right, wrong):
    made = task("infinitebench", tmp_path, datasets=f"[{dataset}]")
    example, _ = made.examples(shipped())
    assert made.score(right, example)["score"] == 1.0
    assert made.score(wrong, example)["score"] == 0.0


def test_math_calc_counts_up_to_the_first_mistake(tmp_path):
    made = task("infinitebench", tmp_path, datasets="[math_calc]")
    example, _ = made.examples(shipped())
    assert example.answers == ("1", "4", "9")
    assert [made.score(t, example)["score"] for t in ("[1, 4, 9]", "1 4 8", "4 9", "")] == [
        1.0, 2 / 3, 0.0, 0.0,
    ]  # fmt: skip


def test_zeroscrolls(tmp_path):
    made = task("zeroscrolls", tmp_path)
    found = {e.dataset: e for e in made.examples(shipped())}
    assert len(found) == 10
    for example in found.values():
        assert example.context == f"You are given a text.\n\nText:\n{BOOK}\n\n"
        assert example.question == "Question:\nWhat?\n\nAnswer:\n"
    assert found["qasper"].answers == ("seven", "7 geese")
    for dataset, text, score in (
        ("qasper", "The 7 geese", 1.0),
        ("musique", "a mill in town", 0.5),
        ("quality", "the answer is B", 1.0),
        ("quality", "(C)", 0.0),
        ("space_digest", "about 52%", 0.5),
        ("space_digest", "62", 0.0),
        ("book_sum_sort", "3, 1, 2, 4", 1.0),
        ("book_sum_sort", "1, 3, 2, 4", 5 / 6),
        ("book_sum_sort", "4 2 1 3", 0.0),
        ("book_sum_sort", "3, 1, 2", 0.0),
        ("gov_report", "", 0.0),
    ):
        assert made.score(text, found[dataset])["score"] == pytest.approx(score), (dataset, text)
    text = "Seven geese were seen."
    scores = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True).score(
        found["gov_report"].answers[0], text
    )
    product = 1.0
    for one in scores.values():
        product *= one.fmeasure
    assert made.score(text, found["gov_report"])["score"] == pytest.approx(product ** (1 / 3))


def test_loogle_asks_a_document_all_its_questions(tmp_path):
    made = task("loogle", tmp_path)
    found = made.examples(shipped())
    short = [e for e in found if e.dataset == "shortdep_qa"]
    assert len({e.context_id for e in short}) == 1
    assert [e.answers for e in short] == [("Ann and Bob",), ("7",)]
    assert short[0].question == "Question: Who?\nAnswer: "
    (summary,) = [e for e in found if e.dataset == "longdep_summarization"]
    assert summary.context.startswith("Please generate a summary of the below paper. \nAnn")
    scores = made.score("Ann or Bob", short[0])
    assert scores["rougeL"] == scores["score"] == pytest.approx(2 / 3)
    assert scores["bleu1"] == pytest.approx(2 / 3)
    assert scores["bleu4"] == pytest.approx(0.0, abs=1e-6)
    assert made.score("", short[0])["score"] == 0.0


def test_loogle_s_clozes_are_literals_that_are_never_run(tmp_path):
    made = task("loogle", tmp_path, datasets="[shortdep_cloze]")
    (example,) = made.examples(shipped())
    assert "{'<mask-0>': 'Bob'" in example.context
    for text, exact, partial in (
        ("{'<mask-0>': 'Ann Lee', '<mask-1>': 'Bob'}", 1.0, 1.0),
        (" {'<mask-0>': 'Ann', '<mask-1>': 'Carl'}", 0.0, 0.5),
        ("__import__('os').getcwd()", 0.0, 0.0),
        ("{" * 5000, 0.0, 0.0),
        ("[1]", 0.0, 0.0),
    ):
        assert made.score(text, example) == {"score": exact, "partial": partial}


def test_what_is_missing_is_one_line(tmp_path, monkeypatch):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    monkeypatch.setattr("kvbench.tasks.hub.hub_answers", lambda: False)
    for name, file in (("longbench_v2", "data.json"), ("zeroscrolls", "gov_report.zip")):
        made = instantiate(composed(f"task={name}").task, _convert_="all")
        with pytest.raises(TaskError, match=rf"{file} of \S+ \(revision main\) cannot be fetched"):
            made.examples(shipped())
    made = instantiate(composed("task=loogle", f"task.data={tmp_path}").task, _convert_="all")
    with pytest.raises(TaskError, match=r"no data/shortdep_qa\.jsonl in"):
        made.examples(shipped())
    with pytest.raises(Exception, match=r"task.datasets is 'pass_key'.*did you mean 'passkey'"):
        task("infinitebench", tmp_path, datasets="[pass_key]")
    with pytest.raises(Exception, match=r"task.files is .* allowed: task.data="):
        task("infinitebench", tmp_path, files="[x.jsonl]")


def test_a_concordance_of_repeated_numbers_is_none():
    assert METRICS["concordance"]("1, 1", Key(("1, 1",)))["score"] == 0.0
