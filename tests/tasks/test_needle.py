"""Needle in a haystack: exact lengths, placement, determinism, balance, other texts."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.encoders import Letters, ids_of, tokenizer
from support.paths import ROOT

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, TaskError, balanced_order
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.needle import Needle, place_needles

NEEDLE = {
    "needle": "The best thing to do in San Francisco is eat a sandwich and sit in Dolores Park on a "
    "sunny day.",
    "question": "What is the best thing to do in San Francisco?\n"
    "The best thing to do in San Francisco is",
    "answer": "eat a sandwich and sit in Dolores Park on a sunny day",
}
PLAIN = PromptEncoder(tokenizer=Letters())
WRAPPED = PromptEncoder(tokenizer=Letters(), prefix_ids=(1, 2, 3), suffix_ids=(4,))
FIGURE_4 = yaml.safe_load((ROOT / "conf/papers/experiment/balancekv_figure4.yaml").read_text())


def task(**options: Any) -> Any:
    few = {"lengths": [500, 900], "depths": [0, 10, 50, 99, 100], "num_examples": 1}
    return Needle(**{**NEEDLE, **few, **options})


@pytest.mark.parametrize("encoder", [PLAIN, WRAPPED])
def test_prompts_have_exactly_the_asked_length(encoder: Any) -> None:
    examples = task().examples(encoder)
    assert len(examples) == 10
    for example in examples:
        assert len(ids_of(example)) == example.fields["length"]
        around = [encoder.decode(ids) for ids in (encoder.prefix_ids, encoder.suffix_ids)]
        assert around[0] + example.context == encoder.decode(example.context_ids)
        assert example.question + around[1] == encoder.decode(example.question_ids)
        assert example.context.count(NEEDLE["needle"]) == 1


@pytest.mark.parametrize("depths", [(0, 50), (50, 100), (3, 4), (0, 0)], ids=str)
@pytest.mark.parametrize("start", [1, 3, 6])
def test_a_needle_at_the_very_start_may_have_another_number_of_tokens(
    start: int, depths: tuple[int, int]
) -> None:
    """The prompt is as long as asked all the same: sentences of 5 tokens, needles of 3 or `start`."""
    pieces = [[10 + i] * 5 for i in range(30)]
    needles = [([1, 1, 1], [1] * start), ([2, 2, 2], [2] * start)]
    ids, spans = place_needles(pieces, needles, depths, 99, 80)
    assert len(ids) == 80
    for number, (begin, count) in enumerate(spans):
        assert ids[begin : begin + count] == [number + 1] * count
        assert count == (start if depths[number] < 6 else 3)
    filler = [token for token in ids if token >= 10]
    assert filler == [token for piece in pieces for token in piece][: len(filler)]


@pytest.mark.parametrize(("begin_tokens", "count"), [(False, 0), (True, 3)])
def test_a_begin_token_stands_in_the_filler_only_where_that_is_asked(
    with_begin_token: Any, begin_tokens: bool, count: int
) -> None:
    begin = with_begin_token.bos_token_id
    options = {"begin_tokens": begin_tokens, "depths": [50], "lengths": [500]}
    (example,) = task(**options).examples(PromptEncoder(with_begin_token, (begin,)))
    assert list(example.context_ids).count(begin) == 1 + count


def test_needle_follows_the_nearest_sentence_end_at_or_before_its_depth() -> None:
    for example in task().examples(PLAIN):
        text = example.context
        place = text.index(NEEDLE["needle"])
        before, after = text[:place], text[place + len(NEEDLE["needle"]) :]
        assert example.fields["needle_start"] == max(0, place - 1)
        filler = len(text) - example.fields["needle_tokens"]
        target = example.fields["depth"] / 100 * filler
        start = len(before.rstrip())
        assert start <= target
        if example.fields["depth"] == 100:
            assert place == len(text) - len(NEEDLE["needle"])
            assert len(before) == filler + 1, "last, wherever the filler was cut"
            continue
        rest = before.rstrip() + after if start else after.lstrip()
        ends = [i + 1 for i, letter in enumerate(rest) if letter == "." and i + 1 <= target]
        assert start == max([0, *ends])


FACTS = {
    "hat": {
        "needle": "The hat is red.",
        "question": "What colour is the hat?",
        "answer": "red",
    },
    "dog": {
        "needle": "The dog is called Bo.",
        "question": "What is the dog called?",
        "answer": "Bo",
    },
}
NO_NEEDLE: dict[str, Any] = dict.fromkeys(NEEDLE)


def test_facts_take_turns_and_each_has_its_own_fillers() -> None:
    examples = task(**NO_NEEDLE, facts=FACTS, num_examples=2).examples(PLAIN)
    assert len(examples) == 2 * 2 * 5 * 2
    assert len({example.id for example in examples}) == len(examples)
    assert len({example.fields["filler"] for example in examples}) == len(examples)
    for prefix in range(2, len(examples) + 1):
        named = [example.fields["fact"] for example in examples[:prefix]]
        assert abs(named.count("hat") - named.count("dog")) <= 1
    for example in examples:
        fact = FACTS[example.fields["fact"]]
        assert example.evidence == fact["needle"]
        assert example.context.count(fact["needle"]) == 1
        assert example.question.strip() == fact["question"]
        assert example.answers == (fact["answer"],)


def test_one_fact_is_the_same_prompts_as_one_needle() -> None:
    alone = task().examples(PLAIN)
    (named, *_), contexts = alone, [example.context for example in alone]
    of_facts = task(**NO_NEEDLE, facts={"park": NEEDLE}).examples(PLAIN)
    assert [example.context for example in of_facts] == contexts
    assert of_facts[0].id == f"park-{named.id}"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"facts": FACTS}, "task.facts holds the needles"),
        ({**NO_NEEDLE, "facts": FACTS, "together": True}, "together=false"),
        (NO_NEEDLE, "task.needle is "),
        ({**NO_NEEDLE, "facts": {"hat": {"needle": "A red hat."}}}, "task.facts.hat is "),
    ],
)
def test_facts_that_are_not_whole_are_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(TaskError, match=named):
        task(**options)


def test_shared_fillers_stand_at_every_length_and_depth() -> None:
    first_sentences: dict[str, set[str]] = {}
    for example in task(seed=5, num_examples=3, share_fillers=True).examples(PLAIN):
        first = example.context.replace(NEEDLE["needle"], "").split(".")[0].strip()
        first_sentences.setdefault(example.fields["filler"], set()).add(first)
    assert [len(sentences) for sentences in first_sentences.values()] == [1, 1, 1]
    assert len(set.union(*first_sentences.values())) == 3


def test_of_every_prefix_the_shares_are_right_to_within_one_example() -> None:
    for sizes in itertools.product(range(1, 7), range(1, 7), range(1, 5)):
        order = balanced_order(sizes)
        assert sorted(order) == sorted(itertools.product(*map(range, sizes)))
        cells = np.array(order)
        for axis, size in enumerate(sizes):
            counts = np.cumsum(cells[:, axis, None] == np.arange(size), axis=0)
            fair = np.arange(1, len(cells) + 1)[:, None] / size
            assert np.abs(counts - fair).max() < 1


def released(
    inner: Any, essays: str, needle: str, question: str, length: int, depth: float
) -> list[int]:
    """The prompt of github.com/ksheth96/BalanceKV, run_needle_in_haystack.py (b6b82544), step by step
    from its description: encode() puts a begin token before everything, and nothing takes it away."""
    encode, decode = inner.encode, inner.decode
    (period,) = encode(".", add_special_tokens=False)
    hay, straw = encode(decode(encode(essays)[:length])), encode(needle)
    hay = hay[: length - 200 - len(straw)]
    place = len(hay) if depth == 100 else int(len(hay) * (depth / 100))
    while depth != 100 and place and hay[place - 1] != period:
        place -= 1
    book = decode(hay[:place] + straw + hay[place:])
    prompt = f"<|im_start|> This is a very long story book: <book> {book} </book>.\n"
    prompt += f" Based on the content of the book, Question: {question}\nAnswer:"
    return list(encode(prompt))


@pytest.fixture(scope="module")
def with_begin_token() -> Any:
    """As Llama 3's has, which encode() adds."""
    return tokenizer(bos="<|begin|>")


def test_figure_4_has_the_released_prompt(tmp_path: Path, with_begin_token: Any) -> None:
    inner = with_begin_token
    sentences = generated_haystack("essay", 40)
    essay = " ".join(next(sentences) for _ in range(200))
    (tmp_path / "essay.txt").write_text(essay)
    options = {"lengths": [700, 1301], "depths": [0, 11, 50, 89, 100], "num_examples": 1}
    conf = FIGURE_4["task"] | {"haystack_files": str(tmp_path / "*.txt")} | options
    encoder = PromptEncoder(inner, (inner.bos_token_id,), end_ids=frozenset({0}))
    newline = inner.encode("\n", add_special_tokens=False)[-1]
    needle = inner.encode(conf["needle"])
    for ours in Needle(**conf).examples(encoder):
        length, depth = ours.fields["length"], ours.fields["depth"]
        ids = [*ours.context_ids, *ours.question_ids]
        assert ids == released(inner, essay, conf["needle"], conf["question"], length, depth)
        assert ids.count(inner.bos_token_id) == 4  # prompt, twice the haystack, needle
        start = ours.fields["needle_start"]
        assert ids[start : start + ours.fields["needle_tokens"]] == needle
        assert ours.end_ids == {0, newline}
        assert ours.max_new_tokens == 30
        assert ours.answers == (NEEDLE["answer"] + ".",)
        assert ours.context.startswith("<|im_start|> This is a very long story book: <book> ")


# needles together

TOGETHER = {
    "together": True,
    "needle": "The secret number of the {key} is {value}.",
    "question": "Where is the {key}?\nThe secret number of the {key} is",
    "answer": "{value}",
    "depths": (0, 25, 50, 75, 100),
    "lengths": (1500, 2500),
    "num_examples": 3,
}


@pytest.mark.parametrize("encoder", [PLAIN, WRAPPED])
def test_needles_together_are_one_context_that_is_asked_about_each(encoder: PromptEncoder) -> None:
    task = Needle(**TOGETHER)
    examples = task.examples(encoder)
    assert examples == Needle(**TOGETHER).examples(encoder)
    assert len({example.id for example in examples}) == len(examples) == 2 * 3 * 5
    lengths = []
    for _, group in itertools.groupby(examples, key=lambda example: example.context_id):
        of_context = list(group)
        assert sorted(example.fields["depth"] for example in of_context) == [0, 25, 50, 75, 100]
        assert len({example.context_ids for example in of_context}) == 1
        lengths.append(of_context[0].fields["length"])
        longest = max(len(ids_of(example)) for example in of_context)
        assert longest == lengths[-1]
        numbers = {example.answers[0] for example in of_context}
        assert len(numbers) == 5
        for example in of_context:
            check_needle(example, encoder)
            assert task.score(f"it is {example.answers[0]}.", example)["score"] == 1
            others = " ".join(numbers - set(example.answers))
            assert task.score(others, example)["score"] == 0
    assert set(lengths[:2]) == {1500, 2500}, "a prefix of contexts is balanced over lengths"


def test_every_score_of_a_needle_is_of_the_whole_answer() -> None:
    """No example ends where the needle is reached: a longer answer has a lower ROUGE-1."""
    made = task(num_examples=1)
    for example in made.examples(PLAIN):
        assert example.is_final is None
    whole = made.score(f"{NEEDLE['answer']} and more of it", example)
    assert whole["containment"] == whole["word_recall"] == 1 > whole["rouge1"]


def check_needle(example: Example, encoder: PromptEncoder) -> None:
    context = example.context_ids or ()
    start = example.fields["needle_start"]
    straw = encoder.decode(context[start : start + example.fields["needle_tokens"]]).strip()
    key = example.question.partition("Where is the ")[2].partition("?")[0]
    assert straw == f"The secret number of the {key} is {example.answers[0]}."
    assert straw == example.evidence
    assert example.context.count(example.answers[0]) == 1
    assert abs(start / len(context) - example.fields["depth"] / 100) < 0.12


# texts


@pytest.fixture
def essays(tmp_path: Path) -> dict[str, Any]:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text(f"Text {name} is short. It says little!\n" * 5)
    return {"haystack_files": str(tmp_path / "*.txt")}


def test_text_files_take_turns_and_each_filler_begins_with_another(essays: dict[str, Any]) -> None:
    assert len(task(**essays).digests()) == 2
    for example in task(**essays).examples(PLAIN):
        assert len(ids_of(example)) == example.fields["length"]
        assert "Text a" in example.context
        assert "Text b" in example.context
    examples = task(**essays, num_examples=4, depths=[100]).examples(PLAIN)
    assert all(example.context[5] == example.fields["filler"][0] for example in examples)
    fillers = {example.fields["filler"] for example in examples}
    assert fillers == {"a.txt", "b.txt"}, "the same text again is the same unit"


@pytest.mark.parametrize("encoder", [PLAIN, WRAPPED])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lengths": [60]}, r"length 60 is too short.*at least \d+ tokens"),
        ({"haystack_files": "*.txt"}, "holds no text"),
        ({"haystack_files": "*.md"}, "no file matches"),
        (TOGETHER | {"lengths": [150]}, "length 150 is too short for needle, question"),
    ],
)
def test_too_short_prompts_and_missing_texts_are_refused(
    tmp_path: Path, monkeypatch: Any, encoder: PromptEncoder, options: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(TaskError, match=message) as caught:
        task(**options).examples(encoder)
    if options == {"lengths": [60]}:
        least = int(str(caught.value).split()[-2])
        assert len(task(lengths=[least]).examples(encoder)) == 5
        with pytest.raises(TaskError, match="too short"):
            task(lengths=[least - 1]).examples(encoder)
