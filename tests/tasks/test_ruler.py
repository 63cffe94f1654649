"""RULER: strings, structure, lengths, determinism, traps of the official scripts, wrong files."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.encoders import Letters, Words, chat, ids_of, shipped

from kvbench.prompts import PromptEncoder
from kvbench.tasks import ruler_generators
from kvbench.tasks.base import Example, TaskError
from kvbench.tasks.ruler import GENERATED, TASKS, Ruler
from kvbench.tasks.ruler_data import Collection, DocumentQuestion
from kvbench.tasks.ruler_generators import DEPTHS, DOCUMENT, NEEDLE, NOISE, PROMPTS

NUMBER = re.compile(r"(?:^| )\d+\. ")
"""What stands before each word of a numbered list."""
TOWNS = [
    "Arnby",
    "Lund",
    "Colvik",
    "Ivel",
    "Grenna",
    "Kelso",
    "Morvik",
    "Farrow",
    "Jarrow",
    "Selby",
]


def sentences(count: int, seed: str) -> str:
    rng = random.Random(seed)
    people = ("potter", "glazier", "warden", "drummer", "weaver", "cooper")
    actions = ("buys the kiln", "measures the hedge", "forgets the road", "admires the harbour")
    ends = (".", "!", "?")
    return " ".join(
        f"The {rng.choice(people)} {rng.choice(actions)}{rng.choice(ends)}" for _ in range(count)
    )


def squad_article(town: str) -> dict[str, Any]:
    """Four paragraphs, each with a question that has an answer and one that has none."""
    paragraphs = []
    for part in range(1, 5):
        year = 1600 + 10 * len(town) + part
        text = f"{town} part {part}. In {year} it built the mural. {sentences(3, f'{town} {part}')}"
        answered = {
            "question": f"In which {{year}} did {town} build the mural (part {part})?",
            "id": f"{town}-{part}",
            "is_impossible": False,
            "answers": [{"text": f"{year}"}, {"text": f"In {year}"}],
        }
        unanswered = {"question": f"Who paid for it in {town}?", "id": f"{town}-{part}-x"}
        qas = [answered, {**unanswered, "is_impossible": True, "answers": []}]
        paragraphs.append({"context": text, "qas": qas})
    return {"title": town, "paragraphs": paragraphs}


def hotpotqa_row(number: int) -> dict[str, Any]:
    paragraphs = [
        [
            f"{town} {number}",
            [f"{town} {number} is a place.", f" {sentences(2, f'{town}{number}')}"],
        ]
        for town in TOWNS
    ]
    paragraphs[3][1].append(f" {TOWNS[3]} {number} lies on the river Um{number}.")
    question = f"On which river lies the place where the mayor of Jarrow {number} was born?"
    return {
        "_id": f"{number}",
        "question": question,
        "answer": f"Um{number}",
        "context": paragraphs,
    }


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Invented essays, SQuAD and HotpotQA in their published formats."""
    contents = {
        "essays": ("ruler_essay", {"text": sentences(600, "essay")}),
        "squad": ("squad", {"version": "v", "data": [squad_article(town) for town in TOWNS[:6]]}),
        "hotpotqa": ("hotpotqa", [hotpotqa_row(number) for number in range(5)]),
    }
    paths = {}
    for option, (name, content) in contents.items():
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(content))
        paths[option] = str(path)
    return paths


def made(files: dict[str, str] | None = None, encoder: Any = None, **options: Any) -> list[Example]:
    few = {"tasks": ["niah_single_1"], "lengths": [2048], "num_examples": 2, "seed": 7}
    return list(Ruler(**{**few, **(files or {}), **options}).examples(encoder or shipped()))


def prompt(example: Example) -> str:
    return example.context + example.question


# against the official generator


def test_every_string_is_the_originals(shared_file: Callable[[str], Path]) -> None:
    golden = json.loads(shared_file("golden/tasks/ruler_templates.json").read_text())
    strings = {"needle": NEEDLE, "noise": NOISE, "document": DOCUMENT}
    assert strings == {name: golden[name] for name in strings}
    long_names = {
        "vt": "variable_tracking",
        "cwe": "common_words_extraction",
        "fwe": "freq_words_extraction",
    }
    for name, strings_of_task in PROMPTS.items():
        expected = golden["generators"][long_names.get(name, name)]
        assert strings_of_task.template == expected["template"]
        assert strings_of_task.prefix == expected["answer_prefix"]
        assert strings_of_task.new_tokens == expected["tokens_to_generate"]


@pytest.mark.parametrize("task", TASKS)
def test_structure_is_the_official_generators(
    shared_file: Callable[[str], Path], files: dict[str, str], task: str
) -> None:
    path = shared_file("golden/tasks/ruler_structure.py")
    spec = importlib.util.spec_from_file_location("ruler_structure", path)
    assert spec is not None
    assert spec.loader is not None
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    templates = json.loads(shared_file("golden/tasks/ruler_templates.json").read_text())
    for example in made(files, tasks=[task], lengths=[1536, 4096]):
        text, length = prompt(example), example.fields["length"]
        assert checker.check(task, text, list(example.answers), length, templates) == []
        used = len(shipped().encode_text(text)) + example.max_new_tokens
        assert used <= length
        assert used >= 0.85 * length or length == 1536 or task in ("qa_1", "qa_2")
        if task.startswith("niah"):
            assert example.evidence in example.context
            assert example.answers[0] in example.evidence


# lengths


@pytest.mark.parametrize("tokenizer", [Letters(), Words()], ids=["letters", "words"])
def test_prompts_fit_any_tokenizer_and_use_the_length(tokenizer: Any) -> None:
    length = 3000 if isinstance(tokenizer, Words) else 24_000
    encoder = PromptEncoder(tokenizer, prefix_ids=(1,) * 30)
    for example in made(encoder=encoder, tasks=GENERATED, lengths=[length], num_examples=1):
        tokens = len(tokenizer.encode(prompt(example))) + len(encoder.prefix_ids)
        assert len(ids_of(example)) == tokens
        assert 0.93 * length <= tokens + example.max_new_tokens <= length


def test_in_a_chat_template_the_prefix_follows_the_assistants_header() -> None:
    (example,) = made(encoder=chat(), num_examples=1)
    text = chat().decode(ids_of(example))
    message, _, prefix = text.removeprefix("<user>").partition("</user><model>")
    assert message + prefix == prompt(example)
    assert prefix.startswith(" The special magic number")


def test_a_length_that_is_too_short_is_refused_with_the_least() -> None:
    for task in GENERATED:
        with pytest.raises(TaskError, match=f"length 180 is too short for {task}"):
            made(tasks=[task], lengths=[180])
    with pytest.raises(TaskError) as caught:
        made(tasks=["niah_multikey_3"], lengths=[400])
    (least,) = re.findall(r"take (\d+) of", str(caught.value))
    (example,) = made(tasks=["niah_multikey_3"], lengths=[int(least) + 60], num_examples=1)
    assert example.context.count("One of the special magic uuids") >= 6


# draws


def test_more_examples_begin_with_the_same() -> None:
    options = {"tasks": GENERATED, "lengths": [1536]}
    first = {e.id: prompt(e) for e in made(**options)}
    assert len(set(first.values())) == 11 * 2
    assert first.items() <= {e.id: prompt(e) for e in made(**options, num_examples=3)}.items()


def test_a_needle_follows_a_sentence_of_the_essays(files: dict[str, str]) -> None:
    for example in made(files, tasks=["niah_single_2"], num_examples=40, lengths=[1024]):
        context = example.context.partition("afterwards.\n")[2]
        before = context.partition("One of the special")[0].strip()
        assert not before or before[-1] in ".!?"
        assert example.fields["haystack"] == "essays"
        assert context.count(example.answers[0]) == 1
    assert (DEPTHS[0], DEPTHS[-1], len(set(DEPTHS))) == (0, 100, 40)


def test_no_distractor_has_the_key_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {"adjective": ("red", "old"), "noun": ("hat", "cup")}
    monkeypatch.setattr(ruler_generators, "sorted_words", words.__getitem__)
    for example in made(tasks=["niah_multikey_2"], num_examples=10, lengths=[600]):
        key = re.search(r"number for (\S+) mentioned", example.question)
        assert key is not None
        assert example.context.count(f"for {key[1]} is:") == 1


def test_common_words_of_a_short_list_are_made_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    words = tuple(f"w{i}x" for i in range(60))
    monkeypatch.setattr(ruler_generators, "sorted_words", lambda *kinds: words)
    (example,) = made(tasks=["cwe"], num_examples=1, lengths=[2048])
    counts = Counter(NUMBER.split(example.context.rstrip().rsplit("\n", 1)[1])[1:])
    assert len(counts) == 60 + example.fields["paired_words"] > 60
    assert {counts[word] for word in example.answers} == {6}


def test_no_document_stands_twice(files: dict[str, str]) -> None:
    for example in made(files, tasks=["qa_1", "qa_2"], lengths=[1536, 8192], num_examples=5):
        documents = re.split(r"\n*Document \d+:\n", example.context)[1:]
        assert len(set(documents)) == len(documents)
        if example.dataset.startswith("qa_1"):
            assert "In which {year}" in example.question, "not one without an answer"


def test_documents_beside_the_gold_are_drawn_at_random() -> None:
    """First those of the same article, then others; each subset of the rest comes up."""
    question = DocumentQuestion("?", ("a",), gold=(0,), same_article=(1, 2))
    collection = Collection("abcdefgh", [question])
    drawn = [frozenset(collection.draw(question, 5, random.Random(i))) for i in range(200)]
    assert all(documents >= set("abc") for documents in drawn)
    assert len(set(drawn)) == 10, "pairs of the five others"


def test_generation_may_end_once_all_values_are_in_the_answer() -> None:
    (example,) = made(tasks=["niah_multivalue"], num_examples=1)
    text = " ".join(example.answers)
    assert example.is_final is not None
    assert not example.is_final(" ".join(example.answers[:3]))
    assert example.is_final(text + " and")
    assert Ruler().score(text.lower() + "\0and", example) == {"score": 1.0, "null": 0.0}
    assert Ruler().score(" \x01\n", example) == {"score": 0.0, "null": 1.0}
    assert Ruler().score(example.answers[0], example)["score"] == 0.25


# files


@pytest.mark.parametrize("content", ["[1", "[1]", "[]", '{"data": [{"paragraphs": []}]}'])
@pytest.mark.parametrize(
    ("task", "option", "message"),
    [
        ("qa_1", "squad", r"ruler: \S+ (is not|holds no question)"),
        ("qa_2", "hotpotqa", r"ruler: \S+ (is not|holds no question)"),
        ("niah_single_2", "essays", "JSON|object with a field text"),
    ],
)
def test_a_file_in_another_format_is_refused(
    tmp_path: Path, task: str, option: str, message: str, content: str
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(TaskError, match=message):
        made(tasks=[task], **{option: str(path)})


def test_essays_without_words_and_too_many_questions_are_refused(
    tmp_path: Path, files: dict[str, str]
) -> None:
    (tmp_path / "blank.txt").write_text(" \n")
    with pytest.raises(TaskError, match="hold no words"):
        made(tasks=["niah_single_2"], essays=str(tmp_path / "blank.txt"))
    with pytest.raises(TaskError, match="no file matches essays="):
        made(tasks=["niah_single_2"], essays="/no/such/*.txt")
    with pytest.raises(TaskError, match=r"that has 5; allowed: num_examples of at most 5"):
        made(files, tasks=["qa_2"], num_examples=6)


def test_files_that_no_task_reads_may_be_missing(files: dict[str, str]) -> None:
    assert made(tasks=["vt"], essays="/none", squad="/none", hotpotqa="/none")
    task = Ruler(tasks=["niah_single_2", "qa_1"], **files)
    assert set(task.digests()) == {"words", "1 ruler_essay.json", "2 squad.json"}
    assert set(Ruler(tasks=["vt"], **files).digests()) == {"words"}
