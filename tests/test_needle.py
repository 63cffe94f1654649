"""Needle in a haystack: exact lengths, placement, determinism, scores, other haystacks, errors."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest

from kvbench.tasks.base import PromptEncoder
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.needle import Needle, containment, rouge1, split_sentences, word_recall

NEEDLE = {
    "needle": "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a "
    "sunny day.",
    "question": "What is the best thing to do in San Francisco?\n"
    "The best thing to do in San Francisco is",
    "answer": "eat a sandwich and sit in Dolores Park on a sunny day",
}


class Letters:
    """A tokenizer of one token per character."""

    def encode(self, text: Any, *, add_special_tokens: Any = False) -> Any:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: Any = True) -> Any:
        return "".join(map(chr, token_ids))


PLAIN = PromptEncoder(tokenizer=Letters())
WRAPPED = PromptEncoder(tokenizer=Letters(), prefix_ids=(1, 2, 3), suffix_ids=(4,))


def task(**options: Any) -> Any:
    return Needle(**{**NEEDLE, "lengths": [500, 900], "depths": [0, 10, 50, 99, 100], **options})


@pytest.mark.parametrize("encoder", [PLAIN, WRAPPED])
@pytest.mark.parametrize("repeats", [1, 3])
def test_prompts_have_exactly_the_asked_length(encoder: Any, repeats: Any) -> None:
    found = task(repeats=repeats).examples(encoder)
    assert len(found) == 10
    for example in found:
        total = len(example.context_ids) + len(example.question_ids) + encoder.overhead
        assert total == example.fields["length"]
        assert example.context == encoder.decode(example.context_ids)
        assert example.question == encoder.decode(example.question_ids)
        assert example.context.count(NEEDLE["needle"]) == repeats


def test_needle_follows_the_nearest_sentence_end_at_or_before_its_depth() -> None:
    for example in task().examples(PLAIN):
        text = example.context
        at = text.index(NEEDLE["needle"])
        before, after = text[:at], text[at + len(NEEDLE["needle"]) :]
        assert example.fields["needle_start"] == max(0, at - 1)
        filler = len(text) - example.fields["needle_tokens"]
        target = example.fields["depth"] / 100 * filler
        start = len(before.rstrip())
        assert start <= target
        if start:
            assert before.rstrip().endswith(".")
        rest = before.rstrip() + after if start else after.lstrip()
        ends = [i + 1 for i, letter in enumerate(rest) if letter == "." and i + 1 <= target]
        assert start == max([0, *ends])


def test_examples_depend_on_the_seed_alone() -> None:
    assert task(seed=5).examples(PLAIN) == task(seed=5).examples(PLAIN)
    for a, b in zip(task(seed=5).examples(PLAIN), task(seed=6).examples(PLAIN), strict=True):
        assert a.context != b.context
        assert a.id == b.id
    few = {example.id: example for example in task(seed=5).examples(PLAIN)}
    for example in task(seed=5, num_examples=3).examples(PLAIN):
        assert few.get(example.id, example) == example


def test_prefixes_are_balanced_and_cover_every_cell_before_repeating() -> None:
    found = task(num_examples=2).examples(PLAIN)
    cells = [(example.fields["length"], example.fields["depth"]) for example in found]
    assert len(set(cells[:10])) == 10
    assert set(cells[10:]) == set(cells[:10])
    for limit in range(1, 11):
        lengths = [length for length, _ in cells[:limit]]
        assert abs(lengths.count(500) - lengths.count(900)) <= 1
    assert len({example.id for example in found}) == 20


def test_scores() -> None:
    right = " Eat a sandwich and  sit in Dolores Park on a sunny day."
    assert containment(right, NEEDLE["answer"]) == 1.0
    assert containment("eat a sandwich", NEEDLE["answer"]) == 0.0
    assert word_recall("a sandwich, a day!", "eat a sandwich on a day") == pytest.approx(4 / 6)
    assert word_recall("", "eat") == 0.0
    assert rouge1("eat a sandwich", "eat a sandwich") == 1.0
    assert rouge1("eat a", "eat a fine sandwich") == pytest.approx(2 / 3)
    example = task().examples(PLAIN)[0]
    assert task().score(right, example)["score"] == 1.0
    half = task(primary="word_recall").score("eat a sandwich", example)
    assert half["score"] == half["word_recall"] == pytest.approx(3 / 12)
    assert set(half) == {"score", "containment", "word_recall", "rouge1"}


def test_sentences_joined_again_are_the_text() -> None:
    text = 'One. Two? "Three!" Four e.g. 3.5 five\n\nSix.  Seven'
    pieces = split_sentences(text)
    assert "".join(pieces) == text
    assert pieces[0] == "One."
    assert pieces[2] == ' "Three!"'
    assert " Four e.g." in pieces


def test_generated_filler_is_redundant_when_asked() -> None:
    def distinct(facts: Any) -> Any:
        stream = generated_haystack("x", facts)
        return len({next(stream) for _ in range(300)})

    assert distinct(2) < distinct(24) < distinct(500)
    assert next(generated_haystack(1)) == next(generated_haystack(1))


def test_text_files(tmp_path: Any) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"Text {name} is short. It says little!\n" * 5)
    (tmp_path / "c.md").write_text("Not this.")
    found = task(haystack="files", haystack_files=str(tmp_path / "*.txt")).examples(PLAIN)
    for example in found:
        assert len(example.context_ids) + len(example.question_ids) == example.fields["length"]
        assert "Not this" not in example.context
        assert "Text a" in example.context
        assert "Text b" in example.context
    starts = {
        example.context[:6]
        for seed in range(10)
        for example in task(
            haystack="files", haystack_files=[str(tmp_path / "*.txt")], seed=seed, depths=[100]
        ).examples(PLAIN)
    }
    assert starts == {"Text a", "Text b"}


def test_essays(shared_file: Any) -> None:
    folder = shared_file("data/paul_graham_essays")
    for example in task(haystack="files", haystack_files=f"{folder}/*.txt").examples(WRAPPED):
        total = len(example.context_ids) + len(example.question_ids) + WRAPPED.overhead
        assert total == example.fields["length"]
        at = example.context.index(NEEDLE["needle"])
        assert not at or example.context[:at].rstrip()[-1] in ".!?\"')"


def test_hugging_face_dataset(monkeypatch: Any) -> None:
    asked = []

    class Rows:
        def take(self, number: Any) -> Any:
            return iter([{"text": "Some text here. And more."}] * 3)

    def load_dataset(name: Any, config: Any, *, split: Any, streaming: Any) -> Any:
        asked.append((name, config, split, streaming))
        return Rows()

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", fake)
    options = {"haystack": "dataset", "dataset_name": "some/set", "dataset_split": "test"}
    found = task(**options).examples(PLAIN)
    assert asked == [("some/set", None, "test", True)]
    assert all("And more." in example.context for example in found)
    with pytest.raises(ValueError, match="no column 'body'; one of text"):
        task(**options, dataset_column="body").examples(PLAIN)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ConnectionError("no network\nmore")

    fake.load_dataset = refuse  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"cannot load dataset some/set test: no network$"):
        task(**options).examples(PLAIN)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": [0]}, ["lengths=0"]),
        ({"lengths": []}, ["lengths", "empty"]),
        ({"depths": [101]}, ["depths=101", "0..100"]),
        ({"depths": ["top"]}, ["depths", "top"]),
        ({"depths": [5, 5]}, ["depths", "twice"]),
        ({"primary": "bleu"}, ["primary='bleu'", "rouge1"]),
        ({"haystack": "wiki"}, ["haystack='wiki'", "generated, files, dataset"]),
        ({"haystack": "files"}, ["haystack_files"]),
        ({"haystack": "dataset"}, ["dataset_name"]),
        ({"repeats": 0}, ["repeats=0"]),
        ({"needle": " "}, ["needle is empty"]),
    ],
)
def test_bad_options_are_refused_in_one_line(options: Any, words: Any) -> None:
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        task(**options)
    assert all(word in str(raised.value) for word in words)
    assert "\n" not in str(raised.value)


def test_too_short_a_prompt_names_the_least_length(tmp_path: Any) -> None:
    for encoder in (PLAIN, WRAPPED):
        with pytest.raises(
            ValueError, match=r"length 60 is too short.*at least \d+ tokens"
        ) as found:
            task(lengths=[60]).examples(encoder)
        least = int(str(found.value).split()[-2])
        assert len(task(lengths=[least]).examples(encoder)) == 5
        with pytest.raises(ValueError, match="too short"):
            task(lengths=[least - 1]).examples(encoder)
    with pytest.raises(ValueError, match="no file matches"):
        task(haystack="files", haystack_files=str(tmp_path / "*.txt")).examples(PLAIN)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(ValueError, match="holds no text"):
        task(haystack="files", haystack_files=str(tmp_path / "*.txt")).examples(PLAIN)
    with pytest.raises(ValueError, match="needle"):
        replace(task(), seed=1, primary="none")
