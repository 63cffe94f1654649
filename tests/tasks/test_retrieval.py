"""LongEval's lines, key-value retrieval, passkey, number string: what is hidden and where."""

from __future__ import annotations

import json
import re
import uuid
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.command import composed
from support.encoders import Letters, chat, ids_of, shipped
from wonderwords import RandomWord

from kvbench.prompts import PromptEncoder
from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import TaskError
from kvbench.tasks.longeval_lines import INTRODUCTION, LINE, QUESTION, LongEvalLines

WORDS = RandomWord()
ADJECTIVES, NOUNS = (set(WORDS.filter(include_categories=[of])) for of in ("adjective", "noun"))


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
    """Invented, of three lines in another order each time."""
    cases = []
    for turn in range(3):
        pairs = [("old-hat", 41077), ("big-cup", 12903), ("shy-owl", 30058)]
        pairs = pairs[turn:] + pairs[:turn]
        record = "".join(LINE.format(key=key, number=number) for key, number in pairs)
        key, number = pairs[1]
        prompt = INTRODUCTION + record + QUESTION.format(key=key)
        asked = {"random_idx": [key, 1], "expected_number": number, "correct_line": "x"}
        cases.append({**asked, "prompt": prompt, "num_lines": 3})
    path = tmp_path / "3_lines.jsonl"
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    check_read_as_written(path, cases)


def check_read_as_written(path: Path, cases: list[dict[str, Any]]) -> None:
    """The examples of an official file are its prompts, parted at the question."""
    found = lines(files=[str(path)])
    count = path.name.partition("_")[0]
    for example, case in zip(found, cases, strict=True):
        assert example.context + example.question == case["prompt"]
        record = "".join(LINE.format(key=k, number=n) for k, n in lines_of(case["prompt"]))
        assert example.context == INTRODUCTION + record
        assert example.answers == (str(case["expected_number"]),)
        assert example.dataset == f"{count}_lines"
        fields = {name: case[name] for name in ("num_lines", "correct_line")}
        assert fields | {"line_key": case["random_idx"][0]} == {
            name: example.fields[name] for name in ("num_lines", "correct_line", "line_key")
        }
    assert len({example.id for example in found}) == len(cases)


def test_generated_records_depend_on_the_seed_and_every_prefix_is_balanced() -> None:
    options = {"num_lines": [5, 40, 9], "num_examples": 3, "number_range": [7, 900]}
    found = lines(**options, seed=3)
    for example in found:
        pairs = lines_of(example.context)
        keys = [key for key, _ in pairs]
        assert len(pairs) == example.fields["num_lines"] == len(set(keys))
        assert {int(number) for _, number in pairs} <= set(range(7, 901))
        parts = ((key[:i], key[i + 1 :]) for key in keys for i, c in enumerate(key) if c == "-")
        assert sum(how in ADJECTIVES and what in NOUNS for how, what in parts) == len(keys)
    assert [e.fields["num_lines"] for e in found] == [5, 40, 9] * 3
    assert lines(**options | {"num_examples": 4}, seed=3)[:9] == found
    assert not {e.context for e in found} & {e.context for e in lines(**options, seed=4)}


def test_a_generated_question_asks_for_one_of_the_lines() -> None:
    for example in lines(num_lines=[5, 9], num_examples=3):
        pairs, asked = lines_of(example.context), example.fields["line_key"]
        assert pairs[example.fields["line_place"]] == (asked, example.answers[0])
        assert example.context.startswith(INTRODUCTION)
        assert example.question == QUESTION.format(key=asked)
        assert example.evidence == LINE.format(key=asked, number=example.answers[0]).strip()


def test_lines_may_stand_several_times() -> None:
    (example,) = lines(num_lines=[12], num_examples=1, repeats=4)
    keys = [key for key, _ in lines_of(example.context)]
    assert all(keys.count(key) == 4 for key in keys)
    assert keys[:12] * 4 != keys


def test_wrong_files_of_lines_are_one_line(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    with pytest.raises(TaskError, match="git clone"):
        lines(files=[str(bad)])
    case = {"prompt": "x", "expected_number": 1, "random_idx": ["a-b", 0]}
    for text, said in (
        ("{}\n", "line 1 is not a test case"),
        ("", "no test case"),
        (json.dumps(case | {"expected_number": 7e400}), "line 1 is not a test case"),
        (json.dumps(case), "after a blank line"),
    ):
        bad.write_text(text)
        with pytest.raises(TaskError, match=said):
            lines(files=[str(bad)])
    prompt = INTRODUCTION + LINE.format(key="a-b", number=1) + QUESTION.format(key="a-b")
    bad.write_text(json.dumps(case | {"prompt": prompt}) + "\n")
    (example,) = lines(files=str(bad))
    assert example.fields["num_lines"] == 1
    (tmp_path / "other").mkdir()
    other = bad.rename(tmp_path / "other" / "bad.jsonl")
    bad.write_text(other.read_text())
    with pytest.raises(TaskError, match="file names must differ"):
        lines(files=[str(other), str(bad)])


def task(name: str, **options: Any) -> Any:
    settings = [f"task.{key}={value}" for key, value in options.items()]
    return instantiate(composed(f"task={name}", *settings).task, _convert_="all")


def test_several_uuids_are_asked_of_one_object() -> None:
    made = task("key_value", num_pairs="[5,12]", num_examples=3, queries=3)
    found = made.examples(shipped())
    for first in range(0, len(found), 3):
        group = found[first : first + 3]
        assert len({e.context for e in group}) == len({e.context_id for e in group}) == 1
        assert group[0].context_id is not None
        assert len({e.context_ids for e in encode_examples(group, shipped())}) == 1
        assert len({e.answers for e in group}) == 3
        depths = [e.fields["depth"] for e in group]
        assert depths == sorted(depths)
        data = json.loads(group[0].context.partition("JSON data:\n")[2])
        assert len(data) == group[0].fields["num_pairs"] == (5, 12)[first // 3 % 2]
        assert all(uuid.UUID(text).version == 4 for pair in data.items() for text in pair)
    assert len({e.context for e in found}) == 6


def test_the_value_of_a_key_is_the_answer() -> None:
    made = task("key_value", num_pairs="[5]", num_examples=1, queries=3)
    for example in made.examples(shipped()):
        data = json.loads(example.context.partition("JSON data:\n")[2])
        key = re.fullmatch(r'Key: "(.+)"\nCorresponding value:', example.question)
        assert key is not None
        assert data[key[1]] == example.answers[0]
        assert made.score(f' "{example.answers[0].upper()}",', example) == {"score": 1.0}
        assert made.score(example.answers[0][:-1], example) == {"score": 0.0}
        assert example.settled("is " + example.answers[0])


def test_a_passkey_of_several_is_named_and_its_answer_begins_within_the_length() -> None:
    for example in task("passkey", lengths="[500]", queries=3).examples(shipped()):
        key = re.search(r"What is the pass key( of the \w+ \w+)\?", example.question)
        assert key is not None
        told = f"The pass key{key[1]} is {example.answers[0]}. Remember it. "
        assert told in example.context
        assert example.question.endswith(f"The pass key{key[1]} is")
    (example,) = task("passkey", lengths="[300]", num_examples=1).examples(chat())
    text = chat().decode(ids_of(example))
    assert text.endswith("What is the pass key?</user><model>\n\nThe pass key is")
    assert len(ids_of(example)) <= 300
    with pytest.raises(TaskError, match=r"task.lengths has 50, and the shortest prompt takes \d+"):
        task("passkey", lengths="[50]").examples(shipped())


@pytest.mark.parametrize("name", ["passkey", "number_string"])
def test_a_key_is_hidden_in_a_text_as_long_as_there_is_room(name: str) -> None:
    made = task(name, lengths="[400,900]", num_examples=12)
    found = made.examples(shipped())
    for example in found:
        (key,) = example.answers
        assert example.context.count(key) == 2
        assert len(key) == (5 if name == "passkey" else 10)
        assert example.fields["length"] - 32 <= len(ids_of(example)) <= example.fields["length"]
        lines = example.context.strip().split("\n")[2:]
        place = next(i for i, line in enumerate(lines) if key in line)
        nearest = 10 * round(10 * place / (len(lines) - 1))
        assert (example.fields["depth"], type(example.fields["depth"])) == (nearest, int)
    if name == "number_string":
        assert all(re.search(r"(\d)\1", e.answers[0]) for e in found)
    assert len({e.fields["depth"] for e in found}) > 4
    assert made.examples(shipped()) == found
    other = task(name, seed=1, lengths="[400]").examples(shipped())
    assert other[0].context not in {e.context for e in found}


@pytest.mark.parametrize("name", ["passkey", "number_string"])
def test_a_key_is_the_first_number_of_an_answer(name: str) -> None:
    made = task(name, lengths="[400]", num_examples=1)
    for example in made.examples(shipped()):
        (key,) = example.answers
        assert made.score(f" {key}. 1", example) == {"score": 1.0}
        assert made.score(f"1 {key}", example) == {"score": 0.0}
        assert not example.settled(key)
        assert example.settled(key + ".")
