"""Data of one's own: fields, templates, several questions of one context, errors."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.encoders import chat, ids_of, shipped

from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import TaskError
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.template import PromptTemplate

FIELDS = {"context": "text", "question": "q", "answers": "gold"}
ROWS = [
    {"text": "Ann has a red hat.", "q": "Which hat?", "gold": "red", "level": "easy", "nr": 1},
    {"text": "Bob has 3 cups.", "q": "How many?", "gold": [3, "three"], "level": "hard", "nr": 2},
    {"text": "Ann has a red hat.", "q": "Who?", "gold": "Ann", "level": "hard", "nr": 3},
]


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "my.jsonl", ROWS)


def made(file: str, encoder: Any = None, **options: Any) -> list[Any]:
    task = Jsonl(**{"files": [file], "fields": FIELDS, **options})
    return list(task.examples(encoder or shipped()))


def texts(examples: list[Any]) -> list[str]:
    return [example.context + example.question for example in examples]


def test_rows_become_prompts_and_those_of_one_context_stand_together(file: str) -> None:
    hat, who, cups = made(file, breakdowns=["level", "nr"])
    assert texts([hat, who]) == [
        "Ann has a red hat.\n\nWhich hat?\nAnswer:",
        "Ann has a red hat.\n\nWho?\nAnswer:",
    ]
    assert (hat.id, who.id, cups.id) == ("my-00001", "my-00003", "my-00002")
    assert hat.context_id == who.context_id is not None
    assert cups.context_id is None
    assert cups.answers == ("3", "three")
    assert cups.fields == {"level": "hard", "nr": 2, "truncated_tokens": 0}


def test_the_tokens_of_one_context_are_the_same_for_its_questions(file: str) -> None:
    hat, who, cups = made(file, breakdowns=["level", "nr"])
    task = Jsonl(files=[file], fields=FIELDS, breakdowns=["level", "nr"])
    assert list(task.breakdown) == ["level", "nr"]
    encoded = encode_examples([hat, who, cups], shipped())
    assert encoded[0].context_ids == encoded[1].context_ids
    read = [shipped().decode([*e.context_ids, *e.question_ids]) for e in encoded]
    assert read == texts([hat, who, cups])


def test_an_answer_may_end_when_it_is_in_the_text(file: str) -> None:
    hat, *_ = made(file, breakdowns=["level", "nr"])
    assert hat.settled("it is red.")
    assert not hat.settled("it is")
    assert made(file, metric="exact")[0].settled is None


def test_one_row_may_ask_several_questions(tmp_path: Path) -> None:
    rows = [
        {"text": "T.", "q": ["A?", "B?"], "gold": ["a", ["b", "c"]]},
        {"text": "U.", "q": ["C?"], "gold": ["d"]},
    ]
    found = made(write(tmp_path / "m.jsonl", rows))
    assert [(e.id, e.answers, e.context_id) for e in found] == [
        ("m-00001-q1", ("a",), "m-00001-q1"),
        ("m-00001-q2", ("b", "c"), "m-00001-q1"),
        ("m-00002", ("d",), None),
    ]
    pairs = [{"Q": "A?", "A": "a"}, {"Q": "B?", "A": "b"}]
    for value in (pairs, str(pairs), json.dumps(pairs)):
        path = write(tmp_path / "p.jsonl", [{"text": "T.", "pairs": value}])
        fields = {"context": "text", "questions": "pairs", "question": "Q", "answers": "A"}
        found = made(path, fields=fields)
        assert [e.answers for e in found] == [("a",), ("b",)]
        assert found[1].question.startswith("B?")
    rows = [{"i": 7, "text": "T.", "q": "A?", "gold": gold} for gold in ("a", "b")]
    path = write(tmp_path / "i.jsonl", rows)
    (one,) = made(path, fields={**FIELDS, "id": "i"}, merge_answers=True)
    assert (one.id, one.answers) == ("i-7", ("a", "b"))


def test_fields_templates_and_subsets_say_what_a_row_is(file: str, tmp_path: Path) -> None:
    fields = {**FIELDS, "context": "{{ text[:3] }}!", "question": None, "dataset": "level"}
    template = "{% if nr > 2 %}Late. {% endif %}{{ context }} {{ name }} ({{ nr }})"
    found = made(
        file, fields=fields, template=template, extract={"name": ["text", r"^(\w+)"]},
        answer_prefix="",
    )  # fmt: skip
    assert texts(found) == ["Ann! Ann (1)", "Bob! Bob (2)", "Late. Ann! Ann (3)"]
    assert [e.dataset for e in found] == ["easy", "hard", "hard"]
    write(tmp_path / "b.jsonl", ROWS[1:2])
    subsets = {"a": {"file": "my.jsonl"}, "b": {"file": "b.jsonl", "metric": "exact"}}
    options = {"files": [], "data": str(tmp_path), "subsets": subsets}
    found = made("", **options)
    assert [(e.dataset, e.metric) for e in found[:3]] == [
        ("a", "contains"), ("a", "contains"), ("b", "exact"),
    ]  # fmt: skip
    assert [e.dataset for e in made("", **options, per_dataset=1)] == ["a", "a", "b"]
    assert [e.dataset for e in made("", **options, datasets=["b"])] == ["b"]


def test_a_chat_template_goes_around_the_prompt_unless_told_otherwise(file: str) -> None:
    hat, *_ = made(file, chat())
    text = "<user>Ann has a red hat.\n\nWhich hat?\n</user><model>Answer:"
    assert chat().decode(ids_of(hat)) == text
    plain, *_ = made(file, chat(), chat=False)
    assert chat().decode(ids_of(plain)) == "Ann has a red hat.\n\nWhich hat?\nAnswer:"


def test_a_long_context_loses_its_middle_and_says_so(tmp_path: Path) -> None:
    text = " ".join(map(str, range(10, 99)))
    rows = [{"text": text, "q": q, "gold": "x"} for q in ("A?", "Is it B?")]
    path = write(tmp_path / "long.jsonl", rows)
    whole, short = made(path), made(path, max_input=60)
    assert 59 <= max(len(ids_of(e)) for e in short) <= 60
    assert short[0].context_ids == short[1].context_ids
    for long, cut in zip(whole, short, strict=True):
        assert long.fields["truncated_tokens"] == 0
        assert len(ids_of(long)) - len(ids_of(cut)) == cut.fields["truncated_tokens"]
        half = len(cut.context_ids) // 2
        assert cut.context_ids[:half] == long.context_ids[:half]
        assert cut.context_ids[-half:] == long.context_ids[-half:]
        assert cut.question_ids == long.question_ids
    (one, _) = made(path, replace(shipped(), max_positions=124), max_input="model")
    assert len(ids_of(one)) + one.max_new_tokens <= 124


# errors

FORBIDDEN = [  # templates
    "{{ 'x' * 1000000000 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{{ context | replace('a', context) }}",
    "{{ context.__class__.__mro__ }}",
    "{{ '%1000000000d' % 1 }}",
    "{% set x = context ~ context %}{{ x }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ context.format(1) }}",
    "{% for a in q %}{% for b in q %}{% for c in q %}x{% endfor %}{% endfor %}{% endfor %}",
    "{{ context",
]

KNOWN = "fields there are: text, q, gold, level, nr"
MORE = {**FIELDS, "context": "txt"}
ROW = {"text": "x", "q": "y", "gold": "z"}
REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [  # options, rows, what is said
    *(({"template": text}, ROWS, r"^task\.template") for text in FORBIDDEN),
    ({"fields": MORE}, ROWS, rf"row 1 has no field 'txt' .* \(did you mean 'text'\?\); {KNOWN}"),
    ({"template": "{{ questoin }}{{ context }}"}, ROWS, "'questoin' is undefined; fields there"),
    ({"template": "{{ question }}"}, ROWS, "prints the context 0 times"),
    ({"breakdowns": ["lvl"]}, ROWS, r"no field 'lvl' \(task.breakdowns\)"),
    ({"extract": {"name": ["text", "x"]}}, ROWS, r"without 'x' \(task.extract.name\)"),
    ({"chat": True}, ROWS, "chat is true and the model has no chat template"),
    ({"max_input": 12}, ROWS, r"max_input=12 leaves -?\d+ tokens to the context of my-"),
    ({}, [[1]], "row 1 is not an object"),
    ({}, [{**ROW, "q": {}}], r"field 'q' is \{\}; allowed: text"),
    ({}, [{**ROW, "text": None}], "field 'text' is None; allowed: text"),
    ({}, [{**ROW, "gold": None}], "field 'gold' is None; allowed: a text, a number"),
    ({}, [{**ROW, "q": ["y"]}], "has 1 questions and 'gold' is 'z'"),
    ({}, [], "the data hold no question"),
]


def test_what_is_wrong_is_one_line_and_stopped_at_once(tmp_path: Path, monkeypatch: Any) -> None:
    start = time.monotonic()
    for options, rows, line in REFUSED:
        with pytest.raises(TaskError, match=line) as caught:
            made(write(tmp_path / "my.jsonl", rows), **options)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5
    monkeypatch.setattr("kvbench.tasks.template.MOST_CHARACTERS", 1000)
    loops = PromptTemplate("t", "{% for a in x %}{% for b in x %}{{ x }}{% endfor %}{% endfor %}")
    assert len(loops.render({"x": "abc"})) == 27
    with pytest.raises(TaskError, match="more than 1000 characters"):
        loops.render({"x": "abcdefghijklmn"})
