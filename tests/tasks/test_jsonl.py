"""The user's own data: fields, templates, several questions about one context, errors."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.encoders import chat, ids_of, shipped
from support.paths import write_lines

from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import TaskError
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.longeval_lines import LongEvalLines

FIELDS = {"context": "text", "question": "q", "answers": "gold"}
ROWS = [
    {"text": "Ann has a red hat.", "q": "Which hat?", "gold": "red", "level": "easy", "nr": 1},
    {"text": "Bob has 3 cups.", "q": "How many?", "gold": [3, "three"], "level": "hard", "nr": 2},
    {"text": "Ann has a red hat.", "q": "Who?", "gold": "Ann", "level": "hard", "nr": 3},
]


def write(path: Path, rows: list[Any]) -> str:
    write_lines(path, rows)
    return str(path)


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write(tmp_path / "my.jsonl", ROWS)


def examples(file: str, encoder: Any = None, **options: Any) -> list[Any]:
    task = Jsonl(**{"files": [file], "fields": FIELDS, "order": "file", **options})
    return list(task.examples(encoder or shipped()))


def batched(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def texts(made: list[Any]) -> list[str]:
    return [example.context + example.question for example in made]


def test_rows_become_prompts_and_those_of_one_context_stand_together(file: str) -> None:
    hat, who, cups = examples(file, breakdowns=["level", "nr"])
    assert texts([hat, who]) == [
        "Ann has a red hat.\n\nWhich hat?\nAnswer:",
        "Ann has a red hat.\n\nWho?\nAnswer:",
    ]
    assert (hat.id, who.id, cups.id) == ("my-00001", "my-00003", "my-00002")
    assert hat.context_id == who.context_id is not None
    assert cups.context_id is None
    assert cups.answers == ("3", "three")
    assert cups.fields == {"level": "hard", "nr": 2, "truncated_tokens": 0}


def test_fields_are_found_by_their_usual_names(file: str, tmp_path: Path, caplog: Any) -> None:
    assert texts(examples(file, fields={})) == texts(examples(file))
    assert "task.fields={context: text, question: q, answers: gold}" in caplog.text
    rows = [{"Document": "x", "question": "y", "Answer": "z"}]
    (found,) = examples(write(tmp_path / "other.jsonl", rows), fields={})
    assert (found.context, found.answers) == ("x\n\n", ("z",))


def test_the_tokens_of_one_context_are_the_same_for_its_questions(file: str) -> None:
    hat, who, cups = examples(file, breakdowns=["level", "nr"])
    task = Jsonl(files=[file], fields=FIELDS, breakdowns=["level", "nr"])
    assert list(task.breakdown) == ["level", "nr"]
    encoded = encode_examples([hat, who, cups], shipped())
    assert encoded[0].context_ids == encoded[1].context_ids
    decoded = [shipped().decode(ids_of(example)) for example in encoded]
    assert decoded == texts([hat, who, cups])


def test_an_answer_may_end_when_it_is_in_the_text(file: str) -> None:
    """Once the word or number cannot go on; an answer that later prompts quote is not cut."""
    hat, _, cups = examples(file, breakdowns=["level", "nr"])
    assert hat.is_final("it is red ")
    assert not hat.is_final("it is ")
    assert cups.is_final("3.\n")
    assert not any(map(cups.is_final, (" 3", " 3.", " 3,", " 30 ", " 3,000 ")))
    assert examples(file, metric="exact")[0].is_final is None
    assert examples(file, golden_turns=False)[0].is_final is None


class Strict(Jsonl):
    """A score about what follows the answer."""

    def score(self, prediction: str, example: Any) -> dict[str, float]:
        return {"score": float(prediction.endswith("red hat."))}


def test_a_score_of_ones_own_sees_the_whole_answer(file: str) -> None:
    for example in Strict(files=[file], fields=FIELDS).examples(shipped()):
        assert example.is_final is None


def shuffled(path: Path, rows: list[Any], **options: Any) -> list[str]:
    return [example.id for example in examples(write(path, rows), order="shuffled", **options)]


def test_a_limit_takes_contexts_by_their_ids_and_of_every_data_set(tmp_path: Path) -> None:
    """Of a file sorted by its answers, whatever the order of its rows is; questions of a context stay
    together, and a sample of all contexts looks drawn."""
    rows = [
        {"text": f"C{n}", "q": q, "gold": "ab"[n >= 40], "i": f"{n}{q}", "half": n >= 40}
        for n in range(80)
        for q in "xy"
    ]
    fields = {**FIELDS, "id": "i"}
    ids = shuffled(tmp_path / "a.jsonl", rows, fields=fields)
    assert sorted(ids) == sorted(f"a-{row['i']}" for row in rows)
    assert all(x[:-1] == y[:-1] and x[-1] + y[-1] == "xy" for x, y in batched(ids, 2))
    later = sum(int(context[2:-1]) >= 40 for context in ids[:40:2])
    assert 5 <= later <= 15  # of 20 contexts
    backwards = [row for pair in batched(rows[::-1], 2) for row in pair[::-1]]
    assert shuffled(tmp_path / "a.jsonl", backwards, fields=fields) == ids
    by_half = {**fields, "dataset": "half"}
    names = [
        name.split("-")[0] for name in shuffled(tmp_path / "a.jsonl", rows[::-1], fields=by_half)
    ]
    assert names == ["False", "False", "True", "True"] * 40
    few = shuffled(tmp_path / "a.jsonl", rows, fields=by_half, per_dataset=3)
    assert len(few) == 12
    assert set(few) < set(shuffled(tmp_path / "a.jsonl", rows, fields=by_half, per_dataset=4))


def test_a_limit_tokenises_no_more_than_it_takes(tmp_path: Path) -> None:
    rows = [
        {"text": f"C{n // 2}", "q": f"{n}?", "gold": "a", "set": "abc"[n % 7 % 3]}
        for n in range(40)
    ]
    options = {"files": [write(tmp_path / "a.jsonl", rows)], "fields": {**FIELDS, "dataset": "set"}}
    task = Jsonl(**options)
    all_examples = task.examples(shipped())
    contexts = list(dict.fromkeys(one.context_id or one.id for one in all_examples))
    for limit in (1, 4, 7):
        few = task.first(limit).examples(shipped())
        assert len(few) < len(all_examples)
        taken = contexts[:limit]
        first, same = (
            [one for one in examples if (one.context_id or one.id) in taken]
            for examples in (all_examples, few)
        )
        assert same == first
    backwards = Backwards(**options)
    assert backwards.first(1) is backwards


class Backwards(Jsonl):
    def examples(self, encoder: Any) -> Any:
        return super().examples(encoder)[::-1]


def test_a_metric_of_ones_own_scores_rows_and_belongs_to_the_tasks_code(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_of_rows.py").write_text(
        "def first(prediction, references): return prediction[:1] == references[0][:1]"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = Jsonl(files=[file], fields=FIELDS, metric="mine_of_rows.first")
    example = task.examples(shipped())[0]
    assert task.score(example.answers[0][0] + "!", example) == {"score": 1.0}
    assert example.is_final is None
    (function,) = task.code()
    assert function.__module__ == "mine_of_rows"
    assert task.metric_name() == "first"
    assert list(Jsonl(files=[file]).code()) == []


CHOICES = {**FIELDS, "choices": "c"}
COLOURS = ["red", "dark green", "blue"]


@pytest.mark.parametrize(
    ("answer", "options", "chosen"),
    [
        (1, COLOURS, "B"),  # MMLU
        ("1", COLOURS, "B"),
        ([0, "C"], COLOURS, "AC"),
        ("(b)", COLOURS, "B"),
        ("blue", COLOURS, "C"),
        (1, ["2", "0", "1"], "B"),
        ("1", ["2", "0", "1"], "C"),
        (1, [2, 0, 1], "C"),
        (0, ["B", "A"], "A"),
    ],
)
def test_an_answer_key_is_a_letter_an_option_or_its_index(
    tmp_path: Path, answer: Any, options: list[Any], chosen: str
) -> None:
    path = write(tmp_path / "c.jsonl", [{"text": "T.", "q": "?", "gold": answer, "c": options}])
    (example,) = examples(path, fields=CHOICES, metric="choice")
    task = Jsonl(files=[path], fields=CHOICES, metric="choice")
    right = [letter for letter in "ABC" if task.score(letter, example)["score"]]
    assert right == list(chosen)


def test_options_that_no_prompt_shows_are_said_once(tmp_path: Path, caplog: Any) -> None:
    row = {"text": "T.", "q": "Which?", "gold": 1, "c": ["teal", "mauve"]}
    path = write(tmp_path / "c.jsonl", [row, row])
    shown = "{{ context }}\n{{ question }}\n{{ choices | lettered }}\n"
    made = examples(path, fields=CHOICES, metric="choice", template=shown)
    assert texts(made)[0] == "T.\nWhich?\nA. teal\nB. mauve\nAnswer:"
    examples(path, fields=CHOICES)
    assert "do not show" not in caplog.text
    examples(path, fields=CHOICES, metric="choice")
    assert (
        caplog.text.count("prompts do not show the option 'teal', whose letter is asked for") == 1
    )


ARC = {"text": ["red", "dark green"], "label": ["1", "2"]}
MEANT: list[tuple[dict[str, Any], dict[str, str], tuple[str, ...]]] = [  # row, fields, answers
    ({"gold": 4711.0}, {}, ("4711",)),  # an integer column with gaps
    ({"gold": [4711.0, 2.5, "4.0"]}, {}, ("4711", "2.5", "4.0")),
    ({"gold": 12345678901234567890}, {}, ("12345678901234567890",)),
    ({"gold": {"text": ["a", "b"], "answer_start": [1, 2]}}, {}, ("a", "b")),  # SQuAD
    (
        {"gold": {"value": "a", "aliases": ["a", "b"]}},
        {"answers": "{{ gold.aliases }}"},
        ("a", "b"),
    ),
    ({"gold": 3.0}, {"answers": "{{ gold }} or {{ gold + 1 }}"}, ("3 or 4",)),
    ({"gold": 2, "c": COLOURS}, {"choices": "c"}, ("blue",)),  # MMLU
    ({"gold": 2.0, "c": COLOURS}, {"choices": "c"}, ("blue",)),
    ({"gold": "C", "c": COLOURS}, {"choices": "c"}, ("C",)),
    ({"gold": 1, "c": [2, 1.0]}, {"choices": "c"}, ("1",)),
    ({"gold": "2", "c": ARC}, {"choices": "c"}, ("dark green",)),
    ({"gold": 1, "c": {"A": "red", "B": "blue"}}, {"choices": "c"}, ("blue",)),  # MedQA
    ({"gold": 2, "choices": COLOURS}, {"answers": "{{ gold }}"}, ("2",)),
    ({"gold": True}, {}, ("yes", "true")),
    ({"gold": False}, {}, ("no", "false")),
    ({"gold": True, "c": ["No", "Yes"]}, {"choices": "c"}, ("Yes",)),
    ({"gold": False, "c": [True, False]}, {"choices": "c"}, ("no",)),
    ({"gold": True}, {"answers": "It is: {{ gold }}"}, ("It is: yes",)),
]


@pytest.mark.parametrize(("row", "fields", "answers"), MEANT, ids=range(len(MEANT)))
def test_an_answer_is_what_a_person_means(
    tmp_path: Path, row: Any, fields: Any, answers: tuple[str, ...]
) -> None:
    path = write(tmp_path / "my.jsonl", [{"text": "T.", "q": "?", **row}])
    (example,) = examples(path, fields={**FIELDS, **fields})
    assert example.answers == answers


CELLS: list[tuple[list[str], list[tuple[str, ...]]]] = [  # a column of a table, answers
    (["007", "NA", "null"], [("007",), ("NA",), ("null",)]),
    (["2009-01-02", "1e5", "9" * 20], [("2009-01-02",), ("1e5",), ("9" * 20,)]),
    (["4711.0", "-3.0"], [("4711",), ("-3",)]),  # pandas wrote it from a column with gaps
    (["4.0", "2.5"], [("4.0",), ("2.5",)]),
    (["['a', 'b']", '["c"]'], [("a", "b"), ("c",)]),
    (["{'text': ['a', 'b']}"], [("a", "b")]),
    (["True", "False"], [("yes", "true"), ("no", "false")]),
    (["True", "maybe"], [("True",), ("maybe",)]),
    (["[1, 2)", "[3, 4]"], [("[1, 2)",), ("[3, 4]",)]),
]


@pytest.mark.parametrize(("cells", "answers"), CELLS, ids=range(len(CELLS)))
def test_the_cells_of_a_table_are_texts(tmp_path: Path, cells: Any, answers: Any) -> None:
    contexts = [f'{{"a": [1, {number}]}}' for number in range(len(cells))]
    table = pd.DataFrame({"text": contexts, "q": "?", "gold": cells})
    table.to_csv(tmp_path / "my.csv", index=False)
    made = examples(str(tmp_path / "my.csv"))
    assert [example.answers for example in made] == answers
    assert made[0].context.startswith(contexts[0])


@pytest.mark.parametrize("cell", ["", " ", "['a' 'b']", "{'text': array(['a'], dtype=object)}"])
def test_a_cell_without_an_answer_or_with_an_array_is_refused(tmp_path: Path, cell: str) -> None:
    table = pd.DataFrame({"text": "T.", "q": "?", "gold": [cell, cell]})
    table.to_csv(tmp_path / "my.csv", index=False)
    with pytest.raises(TaskError, match=r"my.csv row 1: field 'gold' is .*; allowed: "):
        examples(str(tmp_path / "my.csv"))


def test_one_row_may_have_lists_of_questions_and_answers(tmp_path: Path) -> None:
    rows = [
        {"text": "T.", "q": ["A?", "B?"], "gold": ["a", ["b", "c"]]},
        {"text": "U.", "q": ["C?"], "gold": ["d"]},
    ]
    made = examples(write(tmp_path / "m.jsonl", rows))
    assert [(example.id, example.answers, example.context_id) for example in made] == [
        ("m-00001-q1", ("a",), "m-00001-q1"),
        ("m-00001-q2", ("b", "c"), "m-00001-q1"),
        ("m-00002", ("d",), None),
    ]
    rows = [{"i": 7, "text": "T.", "q": "A?", "gold": gold} for gold in ("a", "b")]
    path = write(tmp_path / "i.jsonl", rows)
    (merged,) = examples(path, fields={**FIELDS, "id": "i"}, merge_answers=True)
    assert (merged.id, merged.answers) == ("i-7", ("a", "b")), "rows of one id, too"


PAIRS = [{"Q": "A?", "A": "a"}, {"Q": "B?", "A": "b"}]


@pytest.mark.parametrize("value", [PAIRS, str(PAIRS), json.dumps(PAIRS)])
def test_one_row_may_have_a_list_of_objects(tmp_path: Path, value: Any) -> None:
    path = write(tmp_path / "p.jsonl", [{"text": "T.", "pairs": value}])
    fields = {"context": "text", "questions": "pairs", "question": "Q", "answers": "A"}
    first, second = examples(path, fields=fields)
    assert (first.answers, second.answers) == (("a",), ("b",))
    assert second.question.startswith("B?")


def test_fields_and_the_prompt_may_be_templates(file: str) -> None:
    made = examples(
        file,
        fields={**FIELDS, "context": "{{ text[:3] }}!", "question": None, "dataset": "level"},
        template="{% if nr > 2 %}Late. {% endif %}{{ context }} {{ text.split()[0] }} ({{ nr }})",
        answer_prefix="",
    )
    assert texts(made) == ["Ann! Ann (1)", "Bob! Bob (2)", "Late. Ann! Ann (3)"]
    assert [example.dataset for example in made] == ["easy", "hard", "hard"]


def test_a_backslash_and_an_n_of_the_command_line_are_a_newline(file: str) -> None:
    options = {"template": r"{{ context }}\n\nQ: {{ question }}{{ '\\ne' }}", "stop": [r"\n", "."]}
    options |= {"answer_prefix": r"\nA:", "fields": {**FIELDS, "context": r"{{ text }}\n(end)"}}
    hat, *_ = examples(file, **options)
    assert texts([hat]) == ["Ann has a red hat.\n(end)\n\nQ: Which hat?\\ne\nA:"]
    assert hat.stop == ("\n", ".")
    plain = LongEvalLines(stop=["\n"])
    typed = LongEvalLines(stop=[r"\n"])
    assert typed.stop == plain.stop
    assert typed.version > plain.version  # its earlier records were another prompt's


def test_each_data_set_has_its_own_options(file: str, tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[1:2])
    subsets = {"a": {"file": "my.jsonl"}, "b": {"file": "b.jsonl", "metric": "exact"}}
    options = {"files": [], "data": str(tmp_path), "subsets": subsets}
    metrics = [(example.dataset, example.metric) for example in examples("", **options)]
    assert metrics[:3] == [("a", "contains"), ("a", "contains"), ("b", "exact")]
    few = examples("", **options, per_dataset=1)
    assert [example.dataset for example in few] == ["a", "a", "b"]
    named = examples("", **options, datasets=["b"])
    assert [example.dataset for example in named] == ["b"]


def test_a_chat_template_goes_around_the_prompt_unless_chat_is_false(file: str) -> None:
    hat, *_ = examples(file, chat())
    text = "<user>Ann has a red hat.\n\nWhich hat?\n</user><model>Answer:"
    assert chat().decode(ids_of(hat)) == text
    plain, *_ = examples(file, chat(), chat=False)
    assert chat().decode(ids_of(plain)) == "Ann has a red hat.\n\nWhich hat?\nAnswer:"


@pytest.fixture
def long_file(tmp_path: Path) -> str:
    text = " ".join(map(str, range(10, 99)))
    rows = [{"text": text, "q": question, "gold": "x"} for question in ("A?", "Is it B?")]
    return write(tmp_path / "long.jsonl", rows)


def test_a_long_context_loses_its_middle_and_the_record_counts_the_tokens(long_file: str) -> None:
    full, cut = examples(long_file), examples(long_file, max_input=60)
    assert 59 <= max(len(ids_of(example)) for example in cut) <= 60
    assert cut[0].context_ids == cut[1].context_ids
    half = len(cut[0].context_ids) // 2
    assert cut[0].context_ids[:half] == full[0].context_ids[:half]
    assert cut[0].context_ids[-half:] == full[0].context_ids[-half:]
    for before, after in zip(full, cut, strict=True):
        assert before.fields["truncated_tokens"] == 0
        assert len(ids_of(before)) - len(ids_of(after)) == after.fields["truncated_tokens"]
        assert after.question_ids == before.question_ids
    (longest, _) = examples(long_file, replace(shipped(), max_positions=124), max_input="model")
    assert len(ids_of(longest)) + longest.max_new_tokens <= 124


# errors

FORBIDDEN = [
    "{% for i in range(1000000000) %}x{% endfor %}",
    "{{ context.__class__.__mro__ }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ gold.append(context) }}",
    "{% include 'x' %}",
    "{{ context",
    "{{ gold }}",
    "{{ gold.pop }}",
]
"""Templates that have no end, reach Python's objects, print one, or are none."""

THERE = "fields there are: text, q, gold, level, nr"
MISTYPED = {**FIELDS, "context": "txt"}
ROW = {"text": "x", "q": "y", "gold": "z"}
REFUSED: list[tuple[dict[str, Any], list[Any], str]] = [  # options, rows, message
    (
        {"fields": MISTYPED},
        ROWS,
        rf"row 1 has no field 'txt' .* \(did you mean 'text'\?\); {THERE}",
    ),
    ({"fields": {}}, [{**ROW, "target": "z"}], "'answers' and may mean gold or target; allowed"),
    ({"template": "{{ questoin }}{{ context }}"}, ROWS, "'questoin' is undefined; fields there"),
    ({"template": "{{ question }}"}, ROWS, "prints the context 0 times"),
    ({"template": "{{ context }} {{ context }}"}, ROWS, "prints the context 2 times"),
    ({"breakdowns": ["lvl"]}, ROWS, r"no field 'lvl' \(task.breakdowns\)"),
    ({"chat": True}, ROWS, "chat is true and the model has no chat template"),
    ({"max_input": 12}, ROWS, r"max_input=12 leaves -?\d+ tokens to the context of my-"),
    ({}, [[1]], "row 1 is not an object"),
    ({}, [{**ROW, "q": {}}], r"field 'q' is \{\}; allowed: text"),
    ({}, [{**ROW, "text": None}], "field 'text' is None; allowed: text"),
    ({}, [{**ROW, "gold": None}], "field 'gold' is None; allowed: a text, a number"),
    ({}, [ROW, {**ROW, "gold": math.nan}], "my.jsonl row 2: field 'gold' is None; allowed: a text"),
    ({}, [{**ROW, "gold": ["a", math.nan]}], r"field 'gold' is \['a', nan\]; allowed"),
    ({}, [{**ROW, "text": math.nan}], "field 'text' is None; allowed: text"),
    ({}, [{**ROW, "gold": 1.2e19}], "row 1: field 'gold': 1.2e.19 has lost digits; allowed"),
    ({}, [{**ROW, "gold": {"text": []}}], r"row 1: field 'gold' is \{'text': \[\]\}; allowed"),
    (
        {},
        [{**ROW, "gold": {"value": "a"}}],
        r"row 1: field 'gold' .* allowed: .* task.fields.answers='\{\{ gold.<name> \}\}'",
    ),
    ({}, [{**ROW, "gold": "['a' 'b']"}], "field 'gold' .* allowed: a list, as JSON writes it"),
    ({}, [{**ROW, "gold": "{'text': array(['a'])}"}], "field 'gold' .* a list, as JSON writes it"),
    (
        {"fields": {**FIELDS, "answers": "{{ gold }}."}},
        [{**ROW, "gold": ["a"]}],
        r"answers: \S*my.jsonl row 1: \{\{ ... \}\} is a list; allowed: text, .* fields there are",
    ),
    ({"fields": {**FIELDS, "answers": "{{ gld }}"}}, [ROW], "row 1: 'gld' is undefined; fields"),
    (
        {},
        [{**ROW, "gold": 2, "choices": COLOURS}],
        "row 1: field 'gold' is 2 and .* 'choices'; allowed: task.fields.choices=choices if",
    ),
    ({"fields": CHOICES}, [{**ROW, "c": COLOURS, "gold": 3}], "row 1: field 'gold' is 3; allowed"),
    (
        {"metric": "choice", "fields": CHOICES},
        [{**ROW, "c": COLOURS, "gold": True}],
        "'gold' is True; allowed: a letter",
    ),
    ({}, [{**ROW, "q": ["y"]}], "has 1 questions and 'gold' is 'z'"),
    ({}, [], "the data hold no question"),
    ({}, [ROW, {**ROW, "gold": " "}], r"my.jsonl row 2: field 'gold' is ' '; allowed: text that"),
    ({"metric": "regex"}, [{**ROW, "gold": ["z", ""]}], r"row 1: field 'gold' is \['z', ''\]"),
    (
        {"metric": "choice"},
        [ROW, {**ROW, "gold": 2}],
        "row 2: field 'gold' is 2; allowed: a letter;",
    ),
    (
        {"metric": "choice", "fields": CHOICES},
        [{**ROW, "c": COLOURS, "gold": gold} for gold in ("C", "D")],
        r"my.jsonl row 2: field 'gold' is 'D'; allowed: a letter A to C, an option's text, or",
    ),
    ({"metric": "choice", "fields": CHOICES}, [{**ROW, "c": COLOURS, "gold": 3}], "is 3; allowed"),
]


@pytest.mark.parametrize(("options", "rows", "message"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_wrong_is_one_line(
    tmp_path: Path, options: dict[str, Any], rows: list[Any], message: str
) -> None:
    with pytest.raises(TaskError, match=message) as caught:
        examples(write(tmp_path / "my.jsonl", rows), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("template", FORBIDDEN)
def test_a_template_that_is_not_allowed_is_refused_at_once(tmp_path: Path, template: str) -> None:
    start = time.process_time()
    with pytest.raises(TaskError, match=r"^task\.template") as caught:
        examples(write(tmp_path / "my.jsonl", ROWS[1:]), template=template)
    assert "\n" not in str(caught.value)
    assert time.process_time() - start < 5
