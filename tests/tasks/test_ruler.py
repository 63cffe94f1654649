"""RULER: strings, structure, lengths, determinism, traps of the official scripts, scores, errors."""

from __future__ import annotations

import importlib.util
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.encoders import Letters, Words, chat, ids_of, shipped

from kvbench.tasks.base import Example, PromptEncoder, TaskError
from kvbench.tasks.encoding import encode_split, largest_fitting
from kvbench.tasks.ruler import TASKS, Ruler, clean
from kvbench.tasks.ruler import templates as ruler_templates
from kvbench.tasks.ruler.generators import DEPTHS
from kvbench.tasks.ruler.task import GENERATED

SPLIT = re.compile(r"(?:^| )\d+\. ")


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """Invented essays, SQuAD and HotpotQA in their published formats."""
    paragraphs = [
        {
            "context": f"Town {i} has {i + 20} mills. " + "Nobody counts them. " * 5,
            "qas": [
                {
                    "question": f"How many mills {{has}} town {i}?",
                    "is_impossible": i % 4 == 3,
                    "answers": [{"text": f"{i + 20}"}, {"text": f"{i + 20} mills"}],
                }
            ],
        }
        for i in range(24)
    ]
    articles = [{"title": f"A{i}", "paragraphs": paragraphs[i : i + 4]} for i in range(0, 24, 4)]
    hotpot = [
        {
            "question": f"Which river is near {i}?",
            "answer": f"River{i}",
            "context": [[f"Page {i} {j}", [f"River{i} is here.", " Yes."]] for j in range(10)],
        }
        for i in range(4)
    ]
    texts = {
        "essays": json.dumps({"text": "One thing\n\nis  said. Another is not! Why? " * 400}),
        "squad": json.dumps({"data": articles}),
        "hotpotqa": json.dumps(hotpot),
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    return {name: str(tmp_path / f"{name}.json") for name in texts}


def made(files: dict[str, str] | None = None, encode: Any = None, **options: Any) -> list[Example]:
    few = {"tasks": ["niah_single_1"], "lengths": [2048], "num_examples": 2, "seed": 7}
    task = Ruler(**{**few, **(files or {}), **options})
    return list(task.examples(encode or shipped()))


def prompt(example: Example) -> str:
    return example.context + example.question


# against the official generator and scorer


def test_every_string_is_the_originals(shared_file):
    golden = json.loads(shared_file("golden/tasks/ruler_templates.json").read_text())
    names = dict(
        zip(
            ("niah", "vt", "cwe", "fwe", "qa"),
            ("niah", "variable_tracking", "common_words_extraction", "freq_words_extraction", "qa"),
            strict=True,
        )
    )
    for name in ("needle", "noise", "document"):
        assert ruler_templates.strings()[name] == golden[name]
    for ours, theirs in names.items():
        found, expected = ruler_templates.prompt_of(ours), golden["generators"][theirs]
        assert found.before + "{context}" + found.after == expected["template"]
        assert found.prefix == expected["answer_prefix"]
        assert found.new_tokens == expected["tokens_to_generate"]


def test_the_official_scorers_cases(shared_file):
    golden = json.loads(shared_file("golden/tasks/ruler_scoring.json").read_text())
    assert len(golden["cases"]) == 60
    task, scores = Ruler(), {}
    for case in golden["cases"]:
        example = Example(
            id="x", context="c", question="q", answers=tuple(case["references"]),
            max_new_tokens=1, dataset=case["task"],
        )  # fmt: skip
        found = task.score(case["prediction"], example)
        assert round(100 * found["score"], 2) == case["score"], case
        assert clean(case["prediction"]) == case["postprocessed"]
        scores.setdefault(case["task"], []).append(found)
    for name, expected in golden["whole_set"].items():
        values = [each["score"] for each in scores[name]]
        assert len(values) == expected["n"]
        assert round(100 * sum(values) / len(values), 2) == expected["score"]
        assert sum(each["null"] for each in scores[name]) == expected["nulls"]


@pytest.mark.parametrize("task", TASKS)
def test_structure_is_the_official_generators(shared_file, tmp_path, task):
    spec = importlib.util.spec_from_file_location(
        "ruler_structure", shared_file("golden/tasks/ruler_structure.py")
    )
    checker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(checker)
    templates = json.loads(shared_file("golden/tasks/ruler_templates.json").read_text())
    for name, data in json.loads(shared_file("golden/tasks/ruler_qa.json").read_text()).items():
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
    files = {name: str(tmp_path / f"{name}.json") for name in ("squad", "hotpotqa")}
    essays = str(shared_file("golden/tasks/ruler_essay.json"))
    for length in (1536, 4096):
        for example in made(files, tasks=[task], lengths=[length], essays=essays):
            text = prompt(example)
            assert checker.check(task, text, list(example.answers), length, templates) == []
            used = len(shipped().encode_text(text)) + example.max_new_tokens
            assert used <= length
            if length == 4096 and task not in ("qa_1", "qa_2"):
                assert used >= 0.85 * length


# lengths


@pytest.mark.parametrize("task", GENERATED)
@pytest.mark.parametrize("tokenizer", [Letters(), Words()], ids=["letters", "words"])
def test_prompts_fit_any_tokenizer_and_use_what_there_is(task, tokenizer):
    length = 24_000 if isinstance(tokenizer, Letters) else 3000
    encode = PromptEncoder(tokenizer, prefix_ids=(1,) * 30)
    for example in made(encode=encode, tasks=[task], lengths=[length]):
        whole = len(tokenizer.encode(prompt(example))) + encode.overhead
        assert len(ids_of(example)) == whole
        assert 0.93 * length <= whole + example.max_new_tokens <= length


def test_with_a_chat_template_the_prefix_follows_the_assistants_header():
    for example in made(encode=chat(), tasks=GENERATED, num_examples=1, lengths=[2048]):
        assert example.complete
        text = chat().decode(ids_of(example))
        inner, _, prefix = text.removeprefix("<user>").partition("</user><model>")
        assert inner + prefix == prompt(example)
        assert prefix == ruler_templates.prompt_of(
            example.dataset.partition("_")[0]
        ).prefix or re.fullmatch(r" (The special|Answer:).*(are|is|: )", prefix)
        assert len(ids_of(example)) + example.max_new_tokens <= 2048


@pytest.mark.parametrize("task", GENERATED)
def test_a_length_that_is_too_short_is_one_line(task):
    for length in (64, 180):
        with pytest.raises(TaskError, match=f"length {length} is too short for {task}") as caught:
            made(tasks=[task], lengths=[length])
        assert "\n" not in str(caught.value)


def test_the_least_length_is_found_by_the_error():
    with pytest.raises(TaskError) as caught:
        made(tasks=["niah_multikey_3"], lengths=[400])
    (least,) = re.findall(r"take (\d+) of", str(caught.value))
    (example,) = made(tasks=["niah_multikey_3"], lengths=[int(least) + 60], num_examples=1)
    assert example.context.count("One of the special magic uuids") >= 6


class Measured:
    """Counts tokens of sizes and remembers which it was asked for."""

    def __init__(self, tokens: Callable[[int], int]) -> None:
        self.tokens, self.asked = tokens, 0

    def __call__(self, size: int) -> int:
        self.asked += 1
        return self.tokens(size)


@pytest.mark.parametrize("slope", [1, 7, 45])
@pytest.mark.parametrize("wobble", [0, 3])
def test_the_search_ends_at_the_largest_size_that_fits(slope, wobble):
    tokens = Measured(lambda size: 40 + slope * size + (size * 7919 % 5) * wobble // 4)
    for room in (10, 120, 5000, 40_003):
        fits = [size for size in range(3, 8001) if tokens(size) <= room]
        for guess in (1, 50, 9000):
            tokens.asked = 0
            found = largest_fitting(tokens, room, least=3, most=8000, guess=guess)
            assert tokens.asked <= 32
            if found is None:
                assert not fits
            else:
                assert fits[-1] - (1 + wobble) <= found <= fits[-1]
                assert tokens(found) <= room


def test_a_search_without_order_ends():
    for seed in range(200):
        tokens = Measured(partial(_noise, seed))
        found = largest_fitting(tokens, 500, least=1, most=10_000, guess=77)
        assert tokens.asked < 80
        assert found is None or tokens(found) <= 500


def _noise(seed: int, size: int) -> int:
    return random.Random(f"{seed} {size}").randrange(1000)


# draws


def test_the_same_seed_gives_the_same_prompts_and_samples_differ():
    options = {"tasks": GENERATED, "lengths": [1536]}
    first, again = made(**options), made(**options)
    assert [prompt(e) for e in first] == [prompt(e) for e in again]
    assert len({prompt(e) for e in first}) == len(first) == 11 * 2
    assert len({e.id for e in first}) == len(first)
    other = made(**options, seed=8)
    assert not {prompt(e) for e in first} & {prompt(e) for e in other}
    more = {e.id: prompt(e) for e in made(**options, num_examples=3)}
    assert all(more[e.id] == prompt(e) for e in first)
    assert Counter(e.dataset for e in first[:11]) == Counter(GENERATED)


def test_needles_are_where_they_should_be(files):
    for example in made(files, tasks=["niah_single_2"], num_examples=40, lengths=[1024]):
        context = example.context.partition("afterwards.\n")[2]
        before = context.partition("One of the special")[0].strip()
        assert not before or before[-1] in ".!?"
        assert example.fields["haystack"] == "essays"
        assert context.count(example.answers[0]) == 1
    assert DEPTHS[0] == 0
    assert DEPTHS[-1] == 100
    assert len(set(DEPTHS)) == 40


def test_one_key_is_asked_in_the_singular_and_several_are_not(files):
    (one,) = made(files, tasks=["niah_single_3"], num_examples=1)
    assert one.context.startswith("A special magic uuid is hidden within")
    assert "What is the special magic uuid for" in one.question
    assert one.question.endswith(" mentioned in the provided text is")
    assert "special magic uuids for" in one.context  # the needle itself keeps the plural
    (four,) = made(files, tasks=["niah_multiquery"], num_examples=1)
    keys = re.search(r"numbers for ([^,]+), ([^,]+), ([^,]+), and (\S+) mentioned", four.question)
    assert keys is not None
    for key, value in zip(keys.groups(), four.answers, strict=True):
        assert f"for {key} is: {value}." in four.context
    (many,) = made(files, tasks=["niah_multivalue"], num_examples=1)
    assert len(many.answers) == 4


def test_no_distractor_has_the_key_that_is_asked(monkeypatch):
    from kvbench.tasks.ruler import generators

    monkeypatch.setattr(generators, "word_lists", lambda: (("red", "old"), ("hat", "cup"), ()))
    for example in made(tasks=["niah_multikey_2"], num_examples=10, lengths=[600]):
        key = re.search(r"number for (\S+) mentioned", example.question)
        assert key is not None
        assert example.context.count(f"for {key[1]} is:") == 1


def test_a_chain_is_in_order_and_its_example_is_solved():
    for example in made(tasks=["vt"], num_examples=5):
        solved, asked = re.split(r"\n\n(?=Memorize)", example.context)
        assert len(shipped().encode_text(solved)) <= 520
        statements = re.findall(r"^VAR (\w{5}) = (?:VAR )?(\w+)( ?)$", asked, re.MULTILINE)
        assert [name for name, _, _ in statements] == list(example.answers)
        assert [value for _, value, _ in statements[1:]] == list(example.answers[:-1])
        assert [blank for _, _, blank in statements] == ["", " ", " ", " ", " "]
        assert statements[0][1] in example.question
        assert example.question.endswith(", they are: ")
        assert re.search(r", they are:  ([A-Z]{3} ?){5}$", solved)
    contexts = [e.context for e in made(tasks=["vt"], num_examples=2)]
    assert len({re.findall(r"VAR (\w{3}) =", text)[0] for text in contexts}) == 2


@pytest.mark.parametrize(("length", "often", "seldom"), [(1536, 6, 1), (4096, 30, 3)])
def test_common_words_are_common_and_never_fewer_than_ten(length, often, seldom):
    for example in made(tasks=["cwe"], num_examples=6, lengths=[length]):
        *_, listed = example.context.rstrip().rsplit("\n", 2)
        counts = Counter(SPLIT.split(listed.removesuffix("Question: "))[1:])
        assert len(counts) >= 11
        assert {counts[word] for word in example.answers} == {often}
        assert {n for word, n in counts.items() if word not in example.answers} == {seldom}


def test_more_words_than_the_list_has_are_made_of_two(monkeypatch):
    from kvbench.tasks.ruler import generators

    lists = (("a",), ("b",), tuple(f"w{i}x" for i in range(60)))
    monkeypatch.setattr(generators, "word_lists", lambda: lists)
    (example,) = made(tasks=["cwe"], num_examples=1, lengths=[2048])
    assert example.fields["paired_words"] > 0
    counts = Counter(SPLIT.split(example.context.rstrip().rsplit("\n", 1)[1])[1:])
    assert len(counts) == 60 + example.fields["paired_words"]


def test_ranks_of_frequent_words_differ():
    for example in made(tasks=["fwe"], num_examples=6, lengths=[700, 2048]):
        words = example.context.partition("coded words. ")[2].split()
        (noise, first), *ranks = Counter(words).most_common(5)
        assert noise == "..."
        assert tuple(word for word, _ in ranks[:3]) == example.answers
        assert first > ranks[0][1] > ranks[1][1] > ranks[2][1] > ranks[3][1]


def test_the_answer_is_among_the_documents(files):
    for task, gold in (("qa_1", 1), ("qa_2", 10)):
        for length in (1536, 8192):
            for example in made(files, tasks=[task], lengths=[length], num_examples=3):
                numbers = re.findall(r"^Document (\d+):$", example.context, re.MULTILINE)
                assert numbers == [str(i) for i in range(1, len(numbers) + 1)]
                assert len(numbers) >= gold
                assert any(answer in example.context for answer in example.answers)
                bodies = re.split(r"\n*Document \d+:\n", example.context)[1:]
                assert len(set(bodies)) == len(bodies), "no document twice"
    asked = [e.question for e in made(files, tasks=["qa_1"], num_examples=6)]
    assert "How many mills {has} town 4?" in asked[3], "questions without an answer are left out"


# scores


def test_generation_may_end_once_everything_was_said():
    (example,) = made(tasks=["niah_multivalue"], num_examples=1)
    assert example.settled is not None
    text = " ".join(example.answers)
    assert not example.settled(" ".join(example.answers[:3]))
    assert example.settled(text + " and")
    assert Ruler().score(text.lower() + "\0and", example) == {"score": 1.0, "null": 0.0}
    assert Ruler().score(" \x01\n", example) == {"score": 0.0, "null": 1.0}
    assert Ruler().score(example.answers[0], example)["score"] == 0.25


# errors


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"tasks": ["niah_singel_1"]}, "did you mean 'niah_single_"),
        ({"tasks": []}, r"tasks is \[\]; allowed: a list of texts, each once"),
        ({"lengths": [0]}, r"lengths is \[0\]; allowed: a list of integers from 1 to"),
        ({"lengths": [4096, 4096]}, r"4096\]; allowed: .*each once"),
        ({"num_examples": True}, "num_examples is True; allowed: an integer from 1"),
        ({"tasks": ["qa_1"]}, r"qa_1 needs task.squad=<file>, dev-v2.0.json"),
        ({"tasks": ["qa_2"], "hotpotqa": 3}, "hotpotqa is 3; allowed: text, or null"),
        ({"tasks": ["niah_single_2"], "essays": "/no/such/*.txt"}, "no file matches essays="),
    ],
)
def test_wrong_options_are_one_line(options, line):
    with pytest.raises(TaskError, match=line) as caught:
        made(**options)
    assert "\n" not in str(caught.value)


def test_wrong_files_are_one_line_and_unused_ones_may_be_missing(tmp_path, files):
    assert made(tasks=["vt"], essays="/none", squad="/none", hotpotqa="/none")
    wrong = tmp_path / "wrong.json"
    for text, line in (
        ("[1", "not complete JSON"),
        ("[1]", "is not"),
        ("[]", "holds no question"),
        ('{"data": [{"paragraphs": []}]}', "holds no question|is not HotpotQA"),
    ):
        wrong.write_text(text)
        for task, option in (("qa_1", "squad"), ("qa_2", "hotpotqa")):
            if (text, task) == ("[]", "qa_1"):
                line = "is not SQuAD|no question"
            with pytest.raises(TaskError, match=line):
                made(tasks=[task], **{option: str(wrong)})
        with pytest.raises(TaskError, match=r"JSON|object with a field text"):
            made(tasks=["niah_single_2"], essays=str(wrong))
    with pytest.raises(TaskError, match=r"that has 4; allowed: num_examples of at most 4"):
        made(files, tasks=["qa_2"], num_examples=5)


def test_another_file_is_another_run(files):
    task = Ruler(tasks=["niah_single_2", "qa_1"], **files)
    assert set(task.digests()) == {"words", "essays.json", "squad.json"}
    assert task.digests()["words"].startswith("wonderwords ")
    assert set(Ruler(tasks=["vt"], **files).digests()) == {"words"}


def test_a_changed_template_is_refused(monkeypatch):
    changed = {**ruler_templates._file(), "noise": "The grass is blue."}
    monkeypatch.setattr(ruler_templates, "_file", lambda: changed)
    ruler_templates.strings.cache_clear()
    try:
        with pytest.raises(TaskError, match=r"noise of .* is not RULER's"):
            ruler_templates.strings()
    finally:
        monkeypatch.undo()
        ruler_templates.strings.cache_clear()


def test_context_and_question_are_tokenised_in_one_piece():
    context, question = encode_split(shipped(), "a hat is there.\n", "Where is it?")
    whole = shipped().encode_text("a hat is there.\nWhere is it?")
    assert [*context, *question] == whole
