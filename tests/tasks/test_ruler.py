"""RULER: strings, structure, lengths, determinism, traps of the official scripts, wrong files."""

from __future__ import annotations

import importlib.util
import itertools
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
from kvbench.tasks import ruler
from kvbench.tasks.base import Example, TaskError
from kvbench.tasks.encoding import encode_split
from kvbench.tasks.ruler import DEPTHS, GENERATED, PROMPTS, TASKS, Ruler
from kvbench.tasks.ruler_data import Collection, Question

SPLIT = re.compile(r"(?:^| )\d+\. ")


TOWNS = (
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
)


def sentences(count: int, seed: str) -> str:
    """Sentences about nobody."""
    rng, who = random.Random(seed), ("potter", "glazier", "warden", "drummer", "weaver", "cooper")
    what = ("buys the kiln", "measures the hedge", "forgets the road", "admires the harbour")
    ends = (".", "!", "?")
    told = ((rng.choice(who), rng.choice(what), rng.choice(ends)) for _ in range(count))
    return " ".join(f"The {one} {does}{end}" for one, does, end in told)


def squad_article(town: str) -> dict[str, Any]:
    """Four paragraphs, each with a question that has an answer and one that has none."""
    paragraphs = []
    for part in range(1, 5):
        year = 1600 + 10 * len(town) + part
        text = f"{town} part {part}. In {year} it built the mural. {sentences(3, f'{town} {part}')}"
        asked = {
            "question": f"In which {{year}} did {town} build the mural (part {part})?",
            "id": f"{town}-{part}",
            "is_impossible": False,
            "answers": [{"text": f"{year}"}, {"text": f"In {year}"}],
        }
        unanswered = {"question": f"Who paid for it in {town}?", "id": f"{town}-{part}-x"}
        qas = [asked, {**unanswered, "is_impossible": True, "answers": []}]
        paragraphs.append({"context": text, "qas": qas})
    return {"title": town, "paragraphs": paragraphs}


def hotpotqa_row(number: int) -> dict[str, Any]:
    """A question about two of ten paragraphs."""
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
    found = {}
    for option, (name, content) in contents.items():
        found[option] = str(tmp_path / f"{name}.json")
        Path(found[option]).write_text(json.dumps(content))
    return found


def made(files: dict[str, str] | None = None, encode: Any = None, **options: Any) -> list[Example]:
    few = {"tasks": ["niah_single_1"], "lengths": [2048], "num_examples": 2, "seed": 7}
    return list(Ruler(**{**few, **(files or {}), **options}).examples(encode or shipped()))


def prompt(example: Example) -> str:
    return example.context + example.question


# against the official generator


def test_every_string_is_the_originals(shared_file) -> None:
    golden = json.loads(shared_file("golden/tasks/ruler_templates.json").read_text())
    strings = (ruler.NEEDLE, ruler.NOISE, ruler.DOCUMENT)
    assert strings == tuple(golden[name] for name in ("needle", "noise", "document"))
    long = {"vt": "variable_tracking", "cwe": "common_words_extraction"}
    long["fwe"] = "freq_words_extraction"
    for name, found in PROMPTS.items():
        expected = golden["generators"][long.get(name, name)]
        assert found.template == expected["template"]
        assert found.prefix == expected["answer_prefix"]
        assert found.new_tokens == expected["tokens_to_generate"]


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
def test_prompts_fit_any_tokenizer_and_use_what_there_is(tokenizer: Any) -> None:
    length = 3000 if isinstance(tokenizer, Words) else 24_000
    encode = PromptEncoder(tokenizer, prefix_ids=(1,) * 30)
    for example in made(encode=encode, tasks=GENERATED, lengths=[length], num_examples=1):
        whole = len(tokenizer.encode(prompt(example))) + encode.overhead
        assert len(ids_of(example)) == whole
        assert 0.93 * length <= whole + example.max_new_tokens <= length
    (example,) = made(encode=chat(), num_examples=1)
    inner, _, prefix = chat().decode(ids_of(example))[len("<user>") :].partition("</user><model>")
    assert example.complete
    assert inner + prefix == prompt(example)
    assert prefix.startswith(" The special magic number")
    context, question = encode_split(shipped(), "a hat is there.\n", "Where is it?")
    assert [*context, *question] == shipped().encode_text("a hat is there.\nWhere is it?")


def test_a_length_that_is_too_short_is_one_line_with_the_least() -> None:
    for task in GENERATED:
        with pytest.raises(TaskError, match=f"length 180 is too short for {task}"):
            made(tasks=[task], lengths=[180])
    with pytest.raises(TaskError) as caught:
        made(tasks=["niah_multikey_3"], lengths=[400])
    (least,) = re.findall(r"take (\d+) of", str(caught.value))
    (example,) = made(tasks=["niah_multikey_3"], lengths=[int(least) + 60], num_examples=1)
    assert example.context.count("One of the special magic uuids") >= 6


# draws


def test_the_same_seed_gives_the_same_prompts_and_samples_differ() -> None:
    options = {"tasks": GENERATED, "lengths": [1536]}
    first = {e.id: prompt(e) for e in made(**options)}
    assert len(set(first.values())) == 11 * 2
    assert not {*first.values()} & {prompt(e) for e in made(**options, seed=8, num_examples=1)}
    assert first.items() <= {e.id: prompt(e) for e in made(**options, num_examples=3)}.items()


def test_needles_are_where_they_should_be(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for example in made(files, tasks=["niah_single_2"], num_examples=40, lengths=[1024]):
        context = example.context.partition("afterwards.\n")[2]
        before = context.partition("One of the special")[0].strip()
        assert not before or before[-1] in ".!?"
        assert example.fields["haystack"] == "essays"
        assert context.count(example.answers[0]) == 1
    assert (DEPTHS[0], DEPTHS[-1], len(set(DEPTHS))) == (0, 100, 40)
    words = {"adjective": ("red", "old"), "noun": ("hat", "cup")}
    monkeypatch.setattr(ruler, "sorted_words", words.__getitem__)
    for example in made(tasks=["niah_multikey_2"], num_examples=10, lengths=[600]):
        key = re.search(r"number for (\S+) mentioned", example.question)
        assert key is not None
        assert example.context.count(f"for {key[1]} is:") == 1, "no distractor has the key"


def test_common_words_of_a_short_list_are_made_of_two(monkeypatch) -> None:
    words = tuple(f"w{i}x" for i in range(60))
    monkeypatch.setattr(ruler, "sorted_words", lambda *kinds: words)
    (example,) = made(tasks=["cwe"], num_examples=1, lengths=[2048])
    counts = Counter(SPLIT.split(example.context.rstrip().rsplit("\n", 1)[1])[1:])
    assert len(counts) == 60 + example.fields["paired_words"] > 60
    assert {counts[word] for word in example.answers} == {6}


def test_frequent_words_lie_between_the_others() -> None:
    (example,) = made(tasks=["fwe"], num_examples=1, lengths=[1536])
    words = example.context.split()
    assert words.count("...") > 40
    runs = sum(word != before for before, word in itertools.pairwise(words))
    assert runs > len(words) / 4, "they are shuffled"


def test_no_document_stands_twice_and_questions_without_an_answer_are_left_out(
    files: dict[str, str],
) -> None:
    for example in made(files, tasks=["qa_1", "qa_2"], lengths=[1536, 8192]):
        bodies = re.split(r"\n*Document \d+:\n", example.context)[1:]
        assert len(set(bodies)) == len(bodies)
    asked = {e.question for e in made(files, tasks=["qa_1"], num_examples=20)}
    assert all("In which {year}" in question for question in asked), "not: who paid for it"


def test_documents_beside_the_gold_are_drawn_at_random() -> None:
    """First those of the same article, then others; each subset of the rest comes up."""
    question = Question("?", ("a",), gold=(0,), more=(1, 2))
    collection = Collection("abcdefgh", [question])
    drawn = [frozenset(collection.drawn(question, 5, random.Random(i))) for i in range(200)]
    assert all(documents >= set("abc") for documents in drawn)
    assert len(set(drawn)) == 10, "pairs of the five others"


def test_generation_may_end_once_everything_was_said() -> None:
    (example,) = made(tasks=["niah_multivalue"], num_examples=1)
    text = " ".join(example.answers)
    assert example.settled is not None
    assert not example.settled(" ".join(example.answers[:3]))
    assert example.settled(text + " and")
    assert Ruler().score(text.lower() + "\0and", example) == {"score": 1.0, "null": 0.0}
    assert Ruler().score(" \x01\n", example) == {"score": 0.0, "null": 1.0}
    assert Ruler().score(example.answers[0], example)["score"] == 0.25


def test_wrong_files_are_one_line_and_unused_ones_may_be_missing(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert made(tasks=["vt"], essays="/none", squad="/none", hotpotqa="/none")
    wrong = tmp_path / "wrong.json"
    for text in ("[1", "[1]", "[]", '{"data": [{"paragraphs": []}]}'):
        wrong.write_text(text)
        said = r"ruler: \S+ (is not|holds no question)"
        for task, option in (("qa_1", "squad"), ("qa_2", "hotpotqa")):
            with pytest.raises(TaskError, match=said):
                made(tasks=[task], **{option: str(wrong)})
        with pytest.raises(TaskError, match=r"JSON|object with a field text"):
            made(tasks=["niah_single_2"], essays=str(wrong))
    wrong.with_suffix(".txt").write_text(" \n")
    with pytest.raises(TaskError, match="hold no words"):
        made(tasks=["niah_single_2"], essays=str(wrong.with_suffix(".txt")))
    with pytest.raises(TaskError, match="no file matches essays="):
        made(tasks=["niah_single_2"], essays="/no/such/*.txt")
    with pytest.raises(TaskError, match=r"that has 5; allowed: num_examples of at most 5"):
        made(files, tasks=["qa_2"], num_examples=6)
    task = Ruler(tasks=["niah_single_2", "qa_1"], **files)
    assert set(task.digests()) == {"words", "ruler_essay.json", "squad.json"}
    assert set(Ruler(tasks=["vt"], **files).digests()) == {"words"}
