"""Data of one's own: fields, templates, metrics, several questions of one context, errors."""

from __future__ import annotations

import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from support.encoders import chat, ids_of, shipped

from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import Example, TaskError
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.jsonl.template import PromptTemplate
from kvbench.tasks.metrics import GENERAL, METRICS, Key, chosen_letter

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


# prompts


def test_rows_become_prompts_and_those_of_one_context_stand_together(file):
    hat, who, cups = made(file)
    assert texts([hat, who]) == [
        "Ann has a red hat.\n\nWhich hat?\nAnswer:",
        "Ann has a red hat.\n\nWho?\nAnswer:",
    ]
    assert (hat.id, who.id, cups.id) == ("my-00001", "my-00003", "my-00002")
    assert hat.context_id == who.context_id is not None
    assert cups.context_id is None
    assert cups.answers == ("3", "three")
    assert hat.context_ids == who.context_ids
    encoded = encode_examples([hat, who, cups], shipped())
    assert [shipped().decode([*e.context_ids, *e.question_ids]) for e in encoded] == texts(
        [hat, who, cups]
    )


def test_the_same_from_a_list_a_folder_and_the_hub(file, tmp_path, monkeypatch):
    (tmp_path / "my.json").write_text(json.dumps(ROWS))
    assert texts(made(str(tmp_path / "my.json"))) == texts(made(file))
    (tmp_path / "deep").mkdir()
    write(tmp_path / "deep" / "other.jsonl", ROWS[1:2])
    both = made(str(tmp_path / "**/*.jsonl"))
    assert sorted({example.dataset for example in both}) == ["my", "other"]

    def load(path: str, **options: Any) -> list[dict[str, Any]]:
        assert (path, options["name"], options["split"]) == ("org/name", "easy", "dev")
        return ROWS

    monkeypatch.setattr("datasets.load_dataset", load)
    monkeypatch.setattr("kvbench.tasks.hub.hub_answers", lambda: True)
    options = {"files": [], "dataset": "org/name", "config": "easy", "split": "dev"}
    assert texts(made(file, **options)) == texts(made(file))
    monkeypatch.setattr("kvbench.tasks.hub.hub_answers", lambda: False)
    with pytest.raises(TaskError, match="cannot read org/name easy dev: the Hub cannot be reached"):
        made(file, **options)


def test_parquet_is_read_too(file, tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows = [{**row, "gold": list(map(str, [row["gold"]]))} for row in ROWS]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "my.parquet")
    assert texts(made(str(tmp_path / "my.parquet"))) == texts(made(file))


def test_one_row_may_ask_several_questions(tmp_path):
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


def test_a_template_says_everything_about_the_prompt(file):
    template = (
        "Level {{ level | upper }}{% if nr > 1 %} ({{ nr + 1 }}){% endif %}: <{{ context }}>  \n"
        "{% for letter in [level, q] %}{{ loop.index }}={{ letter[:4] }} {% endfor %}{{ question }}"
    )
    hat, _, who = made(file, template=template, answer_prefix=" So:")
    assert hat.context == "Level EASY: <Ann has a red hat."
    assert hat.question == ">  \n1=easy 2=Whic Which hat? So:"
    assert who.context == "Level HARD (4): <Ann has a red hat."
    assert who.context_id is None, "another context once it is rendered"
    (only, *_) = made(file, fields={**FIELDS, "context": None}, template="{{ question }}")
    assert (only.context, only.question) == ("", "Which hat?Answer:")


def test_the_chat_template_is_on_or_off(file):
    hat, *_ = made(file, chat())
    text = "<user>Ann has a red hat.\n\nWhich hat?\n</user><model>Answer:"
    assert chat().decode(ids_of(hat)) == text
    hat, *_ = made(file, chat(), chat=False)
    assert chat().decode(ids_of(hat)) == "Ann has a red hat.\n\nWhich hat?\nAnswer:"
    assert ids_of(made(file, chat(), chat=True)[0]) == ids_of(made(file, chat())[0])
    with pytest.raises(TaskError, match="chat is true and the model has no chat template"):
        made(file, chat=True)


def test_a_long_context_loses_its_middle_and_says_so(tmp_path):
    rows = [
        {"text": " ".join(map(str, range(10, 99))), "q": q, "gold": "x"} for q in ("A?", "Is it B?")
    ]
    path = write(tmp_path / "long.jsonl", rows)
    whole = made(path)
    short = made(path, max_input=60)
    assert [len(ids_of(e)) <= 60 for e in short] == [True, True]
    assert max(len(ids_of(e)) for e in short) >= 59
    assert short[0].context_ids == short[1].context_ids
    for long, cut in zip(whole, short, strict=True):
        assert long.fields["truncated_tokens"] == 0
        assert len(ids_of(long)) - len(ids_of(cut)) == cut.fields["truncated_tokens"]
        half = len(cut.context_ids) // 2
        assert cut.context_ids[:half] == long.context_ids[:half]
        assert cut.context_ids[-half:] == long.context_ids[-half:]
        assert cut.question_ids == long.question_ids
    from dataclasses import replace

    (one, _) = made(path, replace(shipped(), max_positions=124), max_input="model")
    assert len(ids_of(one)) + one.max_new_tokens <= 124
    with pytest.raises(
        TaskError, match=r"max_input=12 leaves -?\d tokens to the context of long-0"
    ):
        made(path, max_input=12)


# metrics


@pytest.mark.parametrize(
    ("metric", "prediction", "answers", "score"),
    [
        ("contains", "It is the  Red hat!", ["red hat."], 1.0),
        ("contains", "blue", ["red", "green"], 0.0),
        ("exact", " The red hat. ", ["red hat"], 1.0),
        ("exact", "a red hat, I think", ["red hat"], 0.0),
        ("f1", "red coat", ["red hat", "no"], 0.5),
        ("rouge_l", "the cat sat on a mat", ["the cat sat on a mat"], 1.0),
        ("choice", "The answer is (C), not A.", ["C"], 1.0),
        ("choice", "B. because", ["b"], 1.0),
        ("choice", "A red hat is D", ["A"], 0.0),
        ("choice", "", ["A"], 0.0),
        ("regex", "I see 17 of them", [r"\b17\b"], 1.0),
        ("regex", "I see 170", [r"\b17\b"], 0.0),
    ],
)
def test_metrics_for_any_data(metric, prediction, answers, score):
    found = METRICS[metric](prediction, Key(tuple(answers)))["score"]
    assert found == pytest.approx(score, abs=1e-6)
    assert metric in GENERAL


def test_choices_may_be_told_by_their_text():
    options = ("red", "green", "dark blue")
    assert chosen_letter("Dark blue, I think", options) == "C"
    assert METRICS["choice"]("(B)", Key(("green",), options))["score"] == 1.0
    assert METRICS["choice"]("dark blue", Key(("C",), options))["score"] == 1.0


def test_a_pattern_finds_the_answer(file):
    task = Jsonl(files=[file], fields=FIELDS, metric="regex", pattern=r"#### (\d+)")
    _, _, cups = task.examples(shipped())
    assert task.score("so 5 + 5 #### 3", cups) == {"score": 1.0}
    assert task.score("3", cups) == {"score": 0.0}


def test_a_pattern_that_runs_for_ever_is_stopped(monkeypatch):
    monkeypatch.setattr("kvbench.tasks.metrics.REGEX_SECONDS", 0.2)
    start = time.monotonic()
    with pytest.raises(TaskError, match=r"takes more than 0.2 s on one prediction"):
        METRICS["regex"]("a" * 60 + "!", Key(("x",), pattern=r"(a|aa|a?)+$"))
    assert time.monotonic() - start < 5


def test_an_answer_that_contains_the_gold_may_end(file):
    hat, _, _ = made(file)
    assert hat.settled("it is red.")
    assert not hat.settled("it is")
    assert made(file, metric="exact")[0].settled is None


# templates that would not end


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' * 1000000000 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{{ context | join(context) }}",
        "{{ context | replace('a', context) }}",
        "{{ context.__class__.__mro__ }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ 'a' | center(1000000000) }}",
        "{% set x = context ~ context %}{{ x }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'other' %}",
        "{{ context.format(1) }}",
        "{% for a in q %}{% for b in q %}{% for c in q %}x{% endfor %}{% endfor %}{% endfor %}",
        "{{ context",
        "{{ context[::0] }}",
    ],
)
def test_what_a_template_may_not_do_is_one_line(file, template):
    start = time.monotonic()
    with pytest.raises(TaskError, match=r"^task\.template") as caught:
        made(file, template=template)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - start < 5


def test_text_that_a_template_makes_is_counted(monkeypatch):
    monkeypatch.setattr("kvbench.tasks.jsonl.template.MOST_CHARACTERS", 1000)
    loops = PromptTemplate("t", "{% for a in x %}{% for b in x %}{{ x }}{% endfor %}{% endfor %}")
    assert len(loops.render({"x": "abc"})) == 27
    with pytest.raises(TaskError, match="more than 1000 characters"):
        loops.render({"x": "abcdefghijklmn"})


# errors


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"fields": {**FIELDS, "context": "txt"}},
         r"row 1 has no field 'txt' \(task.fields.context\) \(did you mean 'text'\?\); fields there "
         r"are: text, q, gold, level, nr"),
        ({"fields": {**FIELDS, "contxt": "text"}}, "fields.contxt stands for nothing"),
        ({"fields": {**FIELDS, "answers": None}}, "fields.answers is null"),
        ({"metric": "rouge"}, r"task.metric is 'rouge' \(did you mean 'rouge_\w+'\?\); allowed: con"),
        ({"metric": "regex", "pattern": "("}, "task.pattern is '\\(', which is no regular expression"),
        ({"template": "{{ questoin }}{{ context }}"}, "'questoin' is undefined; fields there are: "),
        ({"template": "{{ question }}"}, "prints the context 0 times"),
        ({"template": "{{ context }}{{ context }}"}, "prints the context 2 times"),
        ({"breakdowns": ["lvl"]}, r"no field 'lvl' \(task.breakdowns\)"),
        ({"files": ["nothing*.jsonl"]}, "no file matches files='nothing"),
        ({"files": []}, "no data; allowed: task.files"),
        ({"max_input": "modell"}, "task.max_input is 'modell'; allowed: "),
        ({"max_new_tokens": 0}, "task.max_new_tokens is 0; allowed: an integer from 1"),
        ({"datasets": ["x"]}, "task.datasets is 'x'"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_line(file, options, line):
    with pytest.raises(TaskError, match=line) as caught:
        made(file, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("[1]\n", "row 1 is not an object"),
        ('{"text": "x"\n', "line 1 is not complete JSON"),
        ('{"text": 1, "q": {}, "gold": "x"}\n', r"field 'q' is \{\}; allowed: text"),
        (
            '{"text": "x", "q": "y", "gold": null}\n',
            "field 'gold' is None; allowed: a text, a number",
        ),
        ('{"text": "x", "q": "y", "gold": []}\n', r"field 'gold' is \[\]"),
        ('{"text": "x", "q": ["y"], "gold": "z"}\n', "has 1 questions and 'gold' is 'z'"),
        ("", "the data hold no question"),
    ],
)
def test_wrong_rows_are_one_line(tmp_path, content, line):
    (tmp_path / "bad.jsonl").write_text(content)
    with pytest.raises(TaskError, match=line) as caught:
        made(str(tmp_path / "bad.jsonl"))
    assert "\n" not in str(caught.value)


def test_another_file_or_template_is_another_run(file, tmp_path):
    task = Jsonl(files=[file], fields=FIELDS)
    assert set(task.digests()) == {"my.jsonl"}
    before = task.digests()["my.jsonl"]
    write(tmp_path / "my.jsonl", ROWS[:1])
    assert Jsonl(files=[file], fields=FIELDS).digests()["my.jsonl"] != before
    with zipfile.ZipFile(tmp_path / "data.zip", "w") as archive:
        archive.writestr("data/my.jsonl", json.dumps(ROWS[0]))
    zipped = Jsonl(data=str(tmp_path / "data.zip"), file="my.jsonl", fields=FIELDS)
    (example,) = zipped.examples(shipped())
    assert isinstance(example, Example)
    assert len(zipped.digests()["my.jsonl"]) == 64
