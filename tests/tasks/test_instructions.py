"""Prompts of several instructions: checks of answers, places, leakage, rows of IFEval."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import instantiate
from support.command import composed, job_of
from support.encoders import Letters, chat, ids_of, shipped, tokenizer
from support.paths import write_lines

from kvbench.engine.model import ModelSpec, prompt_encoder
from kvbench.prompts import PromptEncoder
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError
from kvbench.tasks.instructions import ASK, KINDS, PREAMBLE, SECRET, Instructions
from kvbench.tasks.instructions_checkers import CHECKS, follows

LESS = "less than"
LISTED = "* one\n* two\n- three"
ANSWERS: dict[str, list[tuple[dict[str, Any], str, str]]] = {
    "keywords:existence": [
        ({"keywords": ["fox", "Dover"]}, "Foxes of DOVER", "A fox"),
        ({"keywords": ["a.b"]}, "a.b", "axb"),
    ],
    "keywords:frequency": [
        ({"keyword": "fox", "frequency": 2, "relation": "at least"}, "fox, Fox", "fox"),
        ({"keyword": "fox", "frequency": 2, "relation": LESS}, "fox", "fox fox"),
    ],
    "keywords:forbidden_words": [({"forbidden_words": ["far"]}, "a farm", "so FAR, so good")],
    "keywords:letter_frequency": [
        ({"letter": "e", "let_frequency": 2, "let_relation": "at least"}, "Ede", "ed"),
        ({"letter": "!", "let_frequency": 1, "let_relation": LESS}, "oh", "oh!"),
    ],
    "length_constraints:number_words": [
        ({"num_words": 3, "relation": LESS}, "two words", "now three words"),
        ({"num_words": 3, "relation": "at least"}, "now three words", "two words"),
    ],
    "length_constraints:number_sentences": [
        ({"num_sentences": 2, "relation": LESS}, "It costs 3.5 pounds.", "One. Two"),
        ({"num_sentences": 2, "relation": "at least"}, "One? Two!", "One ... "),
    ],
    "length_constraints:number_paragraphs": [
        ({"num_paragraphs": 2}, "one\n***\ntwo\n***", "one\n***\n\n***\ntwo"),
        ({"num_paragraphs": 1}, "one\n\ntwo", "one\n***\ntwo"),
    ],
    "detectable_content:number_placeholders": [({"num_placeholders": 2}, "[a] [b c]", "[a] b")],
    "detectable_content:postscript": [
        ({"postscript_marker": "P.S."}, "Bye.\nP. S. more", "Bye. PS more"),
        ({"postscript_marker": "P.P.S"}, "p.p.s more", "P.S. more"),
    ],
    "detectable_format:number_bullet_lists": [({"num_bullets": 3}, LISTED, "* one\n* two")],
    "detectable_format:number_highlighted_sections": [
        ({"num_highlights": 2}, "*one* and **two**", "*one* and * *")
    ],
    "detectable_format:title": [({}, "<<The moon>>\nOnce", "<<>> <moon>")],
    "detectable_format:json_format": [({}, '```json\n{"a": [1]}\n```', "{'a': 1}")],
    "change_case:english_capital": [({}, "A FOX, 2", "A Fox")],
    "change_case:english_lowercase": [({}, "a fox, 2", "A fox")],
    "change_case:capital_word_frequency": [
        ({"capital_frequency": 2, "capital_relation": "at least"}, "NOW or NEVER", "NOW or never"),
        ({"capital_frequency": 1, "capital_relation": LESS}, "now", "NOW"),
        ({"capital_frequency": 1}, "a TOP-DOWN view", "a Top-Down view"),
        ({"capital_frequency": 2, "capital_relation": LESS}, "a TOP-DOWN view.", "TOP DOWN"),
        ({"capital_frequency": 1}, "I DON'T", "don'T"),
        ({"capital_frequency": 3, "capital_relation": LESS}, "U.S.A. NATO", "U. S. A."),
    ],
    "startend:end_checker": [({"end_phrase": "The end."}, 'So. the END." ', "The end. Or not")],
    "startend:quotation": [({}, ' "all\nof it" ', '"all" of it')],
    "punctuation:no_comma": [({}, "one; two", "one, two")],
    "startend:first_word": [({"first_words": ["Long"]}, '"long ago', "Once long ago")],
    "language:first_word": [({"language": "French"}, "¡Bonjour! Hola", "Hola, bonjour")],
    "detectable_format:bullet_list": [({}, LISTED, "one * two")],
}
"""By check: arguments, an answer that follows, and one that does not."""


def test_every_check_has_cases() -> None:
    assert ANSWERS.keys() == CHECKS.keys()


@pytest.mark.parametrize(
    ("check", "arguments", "right", "wrong"),
    [
        pytest.param(check, *case, id=f"{check} {number}")
        for check, cases in ANSWERS.items()
        for number, case in enumerate(cases)
    ],
)
def test_a_check_accepts_answers_that_follow_and_no_others(
    check: str, arguments: dict[str, Any], right: str, wrong: str
) -> None:
    assert follows(right, check, arguments)
    assert not follows(wrong, check, arguments)
    assert not follows(" \n", check, arguments)


TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE


def with_template(template: str) -> PromptEncoder:
    return prompt_encoder(tokenizer(template), ModelSpec(name="m", path="x"))


def instructed(encoder: PromptEncoder | None = None, **options: Any) -> Any:
    return Instructions(**options).examples(encoder or PromptEncoder(Letters()))


def test_a_system_prompt_is_its_instructions_and_each_kind_is_at_each_place_as_often() -> None:
    every = list(KINDS)[:8]
    examples = instructed(kinds=every, num_instructions=5, num_examples=24)
    places = Counter(
        (place, instruction.kind)
        for example in examples
        for place, instruction in enumerate(example.instructions)
    )
    assert len(places) == 5 * 8
    assert set(places.values()) == {3}
    assert len({example.context for example in examples}) == 24
    for example in examples:
        texts = [instruction.text for instruction in example.instructions]
        kinds = [instruction.kind for instruction in example.instructions]
        assert example.context == "\n".join([PREAMBLE, *texts])
        assert example.private_text == "\n".join(texts)
        assert len(set(kinds)) == 5
        assert example.fields["kinds"] == ", ".join(kinds)
    first = [e.instructions[0].kind for e in instructed(kinds=every, num_examples=24)]
    rounds = [tuple(first[i : i + 8]) for i in (0, 8, 16)]
    assert len({tuple(every), *rounds}) == 4, "another order in every round"
    assert {frozenset(order) for order in rounds} == {frozenset(every)}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_says_what_its_check_asks_for(name: str) -> None:
    kind = KINDS[name]
    for arguments in kind.arguments:
        instruction = kind._replace(arguments=[arguments]).draw(name, random.Random(0))
        for argument, value in arguments.items():
            if argument != "relation":
                words = value if isinstance(value, tuple) else (value,)
                assert all(str(word) in instruction.text for word in words), instruction
        assert "{" not in instruction.text


def test_a_conversation_is_that_of_the_chat_template() -> None:
    encoder = with_template(TEMPLATE)
    for example in instructed(encoder, num_examples=3):
        text = f"<system>{example.context}</><user>{example.question}</><assistant>"
        assert encoder.decode(ids_of(example)) == text
        assert encoder.decode(example.context_ids).endswith(example.instructions[-1].text)
        assert example.fields["role"] == "system"


def test_without_a_system_role_instructions_begin_the_users_message() -> None:
    for encoder, end in ((with_template(NO_SYSTEM), "</><assistant>"), (shipped(), "\n")):
        (example,) = instructed(encoder, num_examples=1)
        begin = "<user>" if encoder.chat else ""
        text = f"{begin}{example.context}\n\n{example.question}{end}"
        assert encoder.decode(ids_of(example)) == text
        assert example.fields["role"] == "user"


def test_scores_by_place_and_kind() -> None:
    task = Instructions(kinds=["hero", "town", "no_comma"], num_instructions=3, num_examples=3)
    for example in task.examples(PromptEncoder(Letters())):
        places = {}
        for number, instruction in enumerate(example.instructions, start=1):
            places[instruction.kind] = f"place_{number}"
            if instruction.kind == "hero":
                (hero,) = instruction.arguments["keywords"]
        scores = task.score(f"{hero}, alone", example)
        right = {"hero": 1.0, "town": 0.0, "no_comma": 0.0}
        assert scores == {
            "score": pytest.approx(1 / 3),
            **right,
            **{places[kind]: value for kind, value in right.items()},
            "leakage": pytest.approx(1 / word_count(example.private_text)),
        }
        assert task.score("", example)["score"] == 0.0
        assert task.score(example.private_text, example)["leakage"] == 1.0


def word_count(text: str) -> int:
    return len(re.findall(r"[a-z0-9]+", text.lower()))


def test_a_request_for_the_system_prompt_is_scored_by_the_leakage() -> None:
    task = Instructions(ask="system_prompt", num_instructions=4, num_examples=8)
    examples = task.examples(PromptEncoder(Letters()))
    secrets = Counter(example.instructions.index(SECRET) for example in examples)
    assert secrets == dict.fromkeys(range(4), 2)
    for example in examples:
        place = f"place_{example.instructions.index(SECRET) + 1}"
        assert example.question == ASK
        assert SECRET.text in example.context
        assert SECRET.text not in example.private_text
        first = example.private_text.split("\n")[0]
        leakage = word_count(first) / word_count(example.private_text)
        assert task.score(first, example) == pytest.approx(
            {"score": 1 - leakage, place: 1 - leakage, "leakage": leakage}
        )


ROWS = [
    {
        "key": 7,
        "prompt": "Write of a fox. No commas, at least 2 words.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{"num_words": None}, {"num_words": 2, "relation": "at least"}],
    },
    {
        "key": 8,
        "prompt": "Answer in Welsh.",
        "instruction_id_list": ["language:response_language"],
        "kwargs": [{"language": "cy"}],
    },
    {
        "key": 9,
        "prompt": "Use capital letters.",
        "instruction_id_list": ["change_case:english_capital"],
        "kwargs": [{}],
    },
]


def test_prompts_of_ifeval(tmp_path: Path) -> None:
    file = tmp_path / "ifeval_input_data.jsonl"
    write_lines(file, ROWS)
    for data in (file, tmp_path):
        task = Instructions(prompts="ifeval", data=str(data))
        first, last = task.examples(chat())  # that of an unknown check is left out
        assert (first.id, last.id) == ("7", "9")
        assert list(first.context_ids)[len(chat().prefix_ids) :] == chat().encode_text(
            ROWS[0]["prompt"]
        )
        assert first.question_ids == chat().suffix_ids
        assert task.score("one, two", first) == {
            "score": 0.5,
            "place_1": 0.0,
            "place_2": 1.0,
            "punctuation:no_comma": 0.0,
            "length_constraints:number_words": 1.0,
            "leakage": 0.0,
        }
        assert task.score("A FOX", last)["place_1"] == 1.0
        assert list(task.digests()) == [file.name]
    assert len(Instructions(prompts="ifeval", data=str(file), num_examples=1).examples(chat())) == 1
    of_the_hub = Instructions(prompts="ifeval").source
    assert (of_the_hub.dataset, of_the_hub.files) == ("google/IFEval", ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kwargs": [{}]}, "shorter"),
        ({"kwargs": [{}, {"num_wrds": 2}]}, "num_words"),
        ({"prompt": None}, "encode"),
        ({"instruction_id_list": 5}, "iterable"),
    ],
)
def test_a_wrong_row_of_ifeval_is_one_line(change: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    write_lines(file, [ROWS[0] | change])
    with pytest.raises(TaskError, match=r"rows.jsonl row 1 is no row of IFEval") as caught:
        instructed(chat(), prompts="ifeval", data=str(file))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["heroo"]}, "task.kinds has 'heroo' (did you mean 'hero'?)"),
        ({"kinds": ["hero"], "num_instructions": 2}, "each kind once in a prompt"),
        ({"num_instructions": 9}, "num_instructions is 9"),
        ({"prompts": "ifeval", "ask": "system_prompt"}, "allowed: request"),
        ({"data": "x"}, "task.data is 'x' and task.prompts 'generated'"),
    ],
)
def test_what_is_refused(options: Any, message: str) -> None:
    with pytest.raises(TaskError) as caught:
        Instructions(**options)
    assert message in str(caught.value)


def test_the_task_that_asks_for_the_system_prompt() -> None:
    made = instantiate(composed("task=instructions_told").task, _convert_="all")
    assert {SECRET in e.instructions for e in made.examples(shipped())} == {True}
    assert made.num_instructions == 4
    assert instantiate(composed("task=instructions").task, _convert_="all") == Instructions()


@pytest.mark.parametrize("after", ["prompt", "context"])
def test_a_run_has_scores_by_place(after: str, tmp_path: Path) -> None:
    job = job_of(
        "experiment=instructions",
        "method=[exact,snapkv,attention_matching]",
        "model=recall_mini",
        "task.num_examples=2",
        "task.max_new_tokens=3",
        f"compress_after={after}",
        f"results_dir={tmp_path}",
        "logger=none",
    )
    run_job(job)
    records = [json.loads(line) for file in tmp_path.rglob("records.jsonl") for line in file.open()]
    assert len(records) == 6
    for record in records:
        assert record["status"] == "ok", record
        assert {f"place_{i}" for i in range(1, 4)} | {"hero", "leakage"} <= record.keys()
        assert record["compressed"] == (record["method"] != "exact")
