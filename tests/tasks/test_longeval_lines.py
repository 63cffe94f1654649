"""LongEval lines: the official template, determinism, balance, scoring, errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import write_run

from kvbench.report.experiment import load_experiment
from kvbench.report.tables.scores import AVERAGE, score_table
from kvbench.run.plan import TaskPlan
from kvbench.tasks.base import PromptEncoder
from kvbench.tasks.longeval_lines import (
    INTRODUCTION,
    LINE,
    QUESTION,
    LongEvalLines,
    parse_number,
    word_lists,
)


class NoTokenizer:
    """Tokenizer of a task that does not tokenise."""

    def encode(self, text: Any, *, add_special_tokens: Any = False) -> Any:
        raise AssertionError("not needed")

    def decode(self, token_ids: Any, *, skip_special_tokens: Any = True) -> Any:
        raise AssertionError("not needed")


ENCODER = PromptEncoder(tokenizer=NoTokenizer())


def examples(**options: Any) -> Any:
    return LongEvalLines(**options).examples(ENCODER)


def lines_of(text: Any) -> Any:
    return re.findall(r"^line (\S.*): REGISTER_CONTENT is <(\d+)>$", text, re.MULTILINE)


def test_official_prompt_is_rebuilt_from_its_lines(shared_file: Any) -> None:
    path = shared_file("data/longeval_lines/200_lines.jsonl")
    for row in path.read_text().splitlines():
        case = json.loads(row)
        record = "".join(LINE.format(key=k, number=n) for k, n in lines_of(case["prompt"]))
        rebuilt = INTRODUCTION + record + QUESTION.format(key=case["random_idx"][0])
        assert rebuilt == case["prompt"]


@pytest.mark.parametrize("lines", [200, 300, 680])
def test_official_files(shared_file: Any, lines: Any) -> None:
    path = shared_file(f"data/longeval_lines/{lines}_lines.jsonl")
    found = examples(files=[str(path)])
    cases = [json.loads(row) for row in path.read_text().splitlines()]
    assert len(found) == len(cases) == 50
    for example, case in zip(found, cases, strict=True):
        assert example.context + example.question == case["prompt"]
        assert example.context.endswith(">\n")
        assert example.question.startswith("\nNow the record is over.")
        assert example.answers == (str(case["expected_number"]),)
        assert example.fields["num_lines"] == case["num_lines"] == lines
        assert example.fields["correct_line"] == case["correct_line"]
        assert example.fields["line_key"] == case["random_idx"][0]
    assert len({example.id for example in found}) == 50


def test_generated_records() -> None:
    adjectives, nouns = word_lists()
    for example in examples(num_lines=[5, 40], num_examples=3):
        lines = lines_of(example.context)
        keys = [key for key, _ in lines]
        assert len(lines) == example.fields["num_lines"] == len(set(keys))
        assert all(1 <= int(number) <= 50000 for _, number in lines)
        asked = example.fields["line_key"]
        assert dict(lines)[asked] == example.answers[0]
        assert keys[example.fields["line_place"]] == asked
        assert f"in line {asked}? " in example.question
        assert example.context.startswith(INTRODUCTION)
        assert example.question == QUESTION.format(key=asked)
        assert any(asked.startswith(f"{adjective}-") for adjective in adjectives)
        assert any(asked.endswith(f"-{noun}") for noun in nouns)


def test_repeats_put_every_line_in_several_times_shuffled() -> None:
    (example,) = examples(num_lines=[12], num_examples=1, repeats=4)
    keys = [key for key, _ in lines_of(example.context)]
    assert len(keys) == 48
    assert all(keys.count(key) == 4 for key in keys)
    assert keys[:12] * 4 != keys


def test_seeds_and_numbers_of_examples() -> None:
    first = examples(num_lines=[10, 20], num_examples=4, seed=3)
    assert first == examples(num_lines=[10, 20], num_examples=4, seed=3)
    longer = {
        example.id: example for example in examples(num_lines=[20, 10], num_examples=6, seed=3)
    }
    assert all(longer[example.id] == example for example in first)
    other = examples(num_lines=[10, 20], num_examples=4, seed=4)
    assert all(a.context != b.context for a, b in zip(first, other, strict=True))


def test_every_prefix_is_balanced() -> None:
    found = examples(num_lines=[5, 6, 7], num_examples=4)
    for limit in range(1, len(found) + 1):
        counts = [
            sum(example.fields["num_lines"] == lines for example in found[:limit])
            for lines in (5, 6, 7)
        ]
        assert max(counts) - min(counts) <= 1
    assert found[0].id == "lines5-0000"
    assert len({example.id for example in found}) == 12


def test_every_length_is_a_stratum(tmp_path: Path, shared_file: Any) -> None:
    found = examples(num_lines=[9, 100, 20], num_examples=3)
    kept = found[:7]  # three of 9 lines, two of the others
    assert [sum(e.fields["num_lines"] == lines for e in kept) for lines in (9, 100, 20)] == [
        3,
        2,
        2,
    ]
    records = [
        {"example_id": e.id, "dataset": e.dataset, "score": float(e.fields["num_lines"] == 9)}
        for e in kept
    ]
    meta = TaskPlan(LongEvalLines()).meta()
    write_run(tmp_path, task="lines", method="snapkv", records=records, task_meta=meta)
    (group,) = load_experiment(tmp_path / "demo").groups
    table = score_table(group)
    assert table.columns == ("9 lines", "20 lines", "100 lines", AVERAGE), (
        "by number, not by letter"
    )
    (row,) = table.rows
    assert row.total.score.value == pytest.approx(1 / 3), (
        "every length counts alike, not every case"
    )
    assert examples(files=[str(shared_file("data/longeval_lines/300_lines.jsonl"))])[0].dataset == (
        "300_lines"
    )


def test_number_range() -> None:
    for example in examples(num_lines=[30], num_examples=2, number_range=[7, 9]):
        assert {int(number) for _, number in lines_of(example.context)} <= {7, 8, 9}


def test_scoring_matches_the_official_scorer(shared_file: Any) -> None:
    golden = json.loads(shared_file("golden/longeval_scoring.json").read_text())
    task = LongEvalLines(num_lines=[2], num_examples=1)
    (example,) = task.examples(ENCODER)
    total = 0.0
    for case in golden["cases"]:
        assert parse_number(case["output"]) == case["parsed"], case
        labelled = type(example)(
            **{
                **{name: getattr(example, name) for name in example.__dataclass_fields__},
                "answers": (str(case["label"]),),
            }
        )
        score = task.score(case["output"], labelled)["score"]
        assert score == float(case["correct"]), case
        total += score
    assert total / golden["n"] == pytest.approx(golden["accuracy"])


def test_a_run_of_digits_too_long_for_an_integer_is_wrong_not_an_error() -> None:
    assert parse_number("1" * 5000) == -1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_lines": [0]}, ["num_lines is [0]", "from 1 to"]),
        ({"num_lines": []}, ["num_lines is []", "a list of"]),
        ({"num_lines": [5, 5]}, ["num_lines is [5, 5]", "each once"]),
        ({"num_lines": ["many"]}, ["num_lines is ['many']"]),
        ({"num_examples": 0}, ["num_examples is 0"]),
        ({"repeats": 0}, ["repeats is 0"]),
        ({"number_range": [5, 1]}, ["number_range is [5, 1]"]),
        ({"number_range": [5]}, ["number_range is [5]", "a list of 2: integers"]),
        ({"max_new_tokens": 0}, ["max_new_tokens is 0"]),
    ],
)
def test_bad_options_are_refused_in_one_line(options: Any, words: Any) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        LongEvalLines(**options)
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_bad_files_are_refused_in_one_line(tmp_path: Any) -> None:
    with pytest.raises(ValueError, match="git clone"):
        examples(files=[str(tmp_path / "none.jsonl")])
    bad = tmp_path / "bad.jsonl"
    for text, words in (
        ("{}\n", "line 1 is not a test case"),
        ("not json\n", "line 1 is not a test case"),
        ("", "no test case"),
        *(
            (
                f'{{"prompt": "x", "expected_number": {number}, "random_idx": ["a-b", 0]}}\n',
                "line 1 is not a test case .* at most 18 digits",
            )
            for number in (10**300, -(10**300), f'"{"7" * 400}"', "1e400", "7" * 5000)
        ),
        ('{"prompt": "x", "expected_number": 1, "random_idx": ["a-b", 0]}\n', "after a blank line"),
    ):
        bad.write_text(text)
        with pytest.raises(ValueError, match=words):
            examples(files=[str(bad)])
    good = tmp_path / "good" / "bad.jsonl"
    good.parent.mkdir()
    case = {
        "prompt": INTRODUCTION + LINE.format(key="a-b", number=1) + QUESTION.format(key="a-b"),
        "expected_number": 1,
        "random_idx": ["a-b", 0],
    }
    good.write_text(json.dumps(case) + "\n")
    (example,) = examples(files=str(good))
    assert example.fields["num_lines"] == 1
    bad.write_text(good.read_text())
    with pytest.raises(ValueError, match="file names must differ"):
        examples(files=[str(good), str(bad)])
