"""LongEval's lines, key-value retrieval, passkey, number string: what is hidden and where. Their texts
are in tests/data/prompts.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.command import composed
from support.encoders import Letters, chat, ids_of, shipped

from kvbench.prompts import PromptEncoder
from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import TaskError
from kvbench.tasks.longeval_lines import INTRODUCTION, LINE, QUESTION, LongEvalLines


def lines(**options: Any) -> Any:
    return LongEvalLines(**options).examples(PromptEncoder(tokenizer=Letters()))


def lines_of(text: str) -> list[tuple[str, str]]:
    return re.findall(r"^line (\S.*): REGISTER_CONTENT is <(\d+)>$", text, re.MULTILINE)


@pytest.mark.parametrize("count", [200, 300, 680])
def test_official_files(shared_file: Any, count: int) -> None:
    path = shared_file(f"data/longeval_lines/{count}_lines.jsonl")
    cases = [json.loads(row) for row in path.read_text().splitlines()]
    assert len(cases) == 50
    check_read_as_written(path, cases)


def test_a_file_in_the_official_format(tmp_path: Path) -> None:
    cases = []
    for turn in range(3):
        pairs = [("old-hat", 41077), ("big-cup", 12903), ("shy-owl", 30058)]
        pairs = pairs[turn:] + pairs[:turn]
        record = "".join(LINE.format(key=key, number=number) for key, number in pairs)
        key, number = pairs[1]
        prompt = INTRODUCTION + record + QUESTION.format(key=key)
        answer = {"random_idx": [key, 1], "expected_number": number, "correct_line": "x"}
        cases.append({**answer, "prompt": prompt, "num_lines": 3})
    path = tmp_path / "3_lines.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    check_read_as_written(path, cases)


def check_read_as_written(path: Path, cases: list[dict[str, Any]]) -> None:
    """The examples of an official file are its prompts, parted at the question."""
    examples = lines(files=[str(path)])
    count = path.name.partition("_")[0]
    for example, case in zip(examples, cases, strict=True):
        assert example.context + example.question == case["prompt"]
        pairs = lines_of(case["prompt"])
        record = "".join(LINE.format(key=key, number=number) for key, number in pairs)
        assert example.context == INTRODUCTION + record
        assert example.answers == (str(case["expected_number"]),)
        assert example.dataset == f"{count}_lines"
        assert example.fields["num_lines"] == case["num_lines"]
        assert example.fields["correct_line"] == case["correct_line"]
        assert example.fields["line_key"] == case["random_idx"][0]
    assert len({example.id for example in examples}) == len(cases)


RECORDS: dict[str, Any] = {"num_lines": [5, 40, 9], "num_examples": 3, "number_range": [7, 900]}


def test_generated_records_have_the_official_lines_and_every_prefix_is_balanced() -> None:
    examples = lines(**RECORDS, seed=3)
    assert [example.fields["num_lines"] for example in examples] == [5, 40, 9] * 3
    assert lines(**RECORDS | {"num_examples": 4}, seed=3)[:9] == examples
    for example in examples:
        pairs, key = lines_of(example.context), example.fields["line_key"]
        keys = {key for key, _ in pairs}
        assert len(pairs) == len(keys) == example.fields["num_lines"]
        assert all(7 <= int(number) <= 900 for _, number in pairs)
        assert pairs[example.fields["line_place"]] == (key, example.answers[0])
        assert example.evidence == LINE.format(key=key, number=example.answers[0]).strip()


CASE = {"prompt": "x", "expected_number": 1, "random_idx": ["a-b", 0]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}\n", "line 1 is not a test case"),
        ("", "no test case"),
        (json.dumps(CASE | {"expected_number": 7e400}), "line 1 is not a test case"),
        (json.dumps(CASE), "after a blank line"),
        (None, "git clone"),
    ],
)
def test_a_file_in_another_format_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TaskError, match=message):
        lines(files=[str(path)])


def test_lines_are_counted_where_the_case_does_not_say_how_many_there_are(tmp_path: Path) -> None:
    prompt = INTRODUCTION + LINE.format(key="a-b", number=1) + QUESTION.format(key="a-b")
    path = tmp_path / "one.jsonl"
    path.write_text(json.dumps(CASE | {"prompt": prompt}) + "\n")
    (example,) = lines(files=str(path))
    assert example.fields["num_lines"] == 1
    with pytest.raises(TaskError, match="file names must differ"):
        lines(files=[str(tmp_path / "other" / path.name), str(path)])


def task(name: str, **options: Any) -> Any:
    settings = [f"task.{key}={value}" for key, value in options.items()]
    return instantiate(composed(f"task={name}", *settings).task, _convert_="all")


def test_several_questions_are_asked_about_one_object() -> None:
    made = task("key_value", num_pairs="[5,12]", num_examples=3, queries=3)
    examples = made.examples(shipped())
    for first in range(0, len(examples), 3):
        group = examples[first : first + 3]
        assert len({example.context_id for example in group}) == 1
        assert len({example.context_ids for example in encode_examples(group, shipped())}) == 1
        assert len({example.answers for example in group}) == 3
        depths = [example.fields["depth"] for example in group]
        assert depths == sorted(depths)
    for example in examples:
        assert made.score(f' "{example.answers[0].upper()}",', example) == {"score": 1.0}
        assert made.score(example.answers[0][:-1], example) == {"score": 0.0}
        assert example.is_final("is " + example.answers[0])


def test_a_passkeys_answer_begins_after_the_assistants_header_within_the_length() -> None:
    (example,) = task("passkey", lengths="[300]", num_examples=1).examples(chat())
    text = chat().decode(ids_of(example))
    assert text.endswith("What is the pass key?</user><model>\n\nThe pass key is")
    assert len(ids_of(example)) <= 300
    with pytest.raises(TaskError, match=r"task.lengths has 50, and the shortest prompt takes \d+"):
        task("passkey", lengths="[50]").examples(shipped())


@pytest.mark.parametrize(("name", "digits"), [("passkey", 5), ("number_string", 10)])
def test_a_key_is_hidden_in_a_text_as_long_as_there_is_room(name: str, digits: int) -> None:
    made = task(name, lengths="[400,900]", num_examples=12)
    examples = made.examples(shipped())
    for example in examples:
        (key,) = example.answers
        assert len(key) == digits
        assert made.score(f" {key}. 1", example) == {"score": 1.0}
        assert made.score(f"1 {key}", example) == {"score": 0.0}, "the first number counts"
        assert not example.is_final(key)
        assert example.is_final(key + ".")
        assert example.fields["length"] - 32 <= len(ids_of(example)) <= example.fields["length"]
        lines = example.context.strip().split("\n")[2:]
        place = next(number for number, line in enumerate(lines) if key in line)
        assert example.fields["depth"] == 10 * round(10 * place / (len(lines) - 1))
    assert made.examples(shipped()) == examples
    other, *_ = task(name, seed=1, lengths="[400]").examples(shipped())
    assert other.context not in {example.context for example in examples}
