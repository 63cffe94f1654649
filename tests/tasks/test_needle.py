"""Needle in a haystack: exact lengths, placement, determinism, scores, other haystacks, errors."""

from __future__ import annotations

import itertools
import re
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.configs import composed
from support.report_runs import write_run
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from kvbench.cli.build import build_job
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.scores import score_table, strata_of
from kvbench.run.plan import TaskPlan
from kvbench.tasks.base import PromptEncoder, TaskError
from kvbench.tasks.haystack import generated_haystack, split_sentences
from kvbench.tasks.needle import (
    Needle,
    containment,
    released_recall,
    rouge1,
    word_recall,
)
from kvbench.tasks.order import balanced_order

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


ROOT = Path(__file__).parents[2]


def task(**options: Any) -> Any:
    few = {"lengths": [500, 900], "depths": [0, 10, 50, 99, 100], "num_examples": 1}
    return Needle(**{**NEEDLE, **few, **options})


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
        if example.fields["depth"] == 100:
            assert at == len(text) - len(NEEDLE["needle"])
            assert len(before) == filler + 1, "last, wherever the filler was cut"
            continue
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


def test_of_every_prefix_the_shares_are_right_to_within_one_example() -> None:
    for sizes in itertools.product(range(1, 7), range(1, 7), range(1, 5)):
        order = balanced_order(sizes)
        assert sorted(order) == sorted(itertools.product(*map(range, sizes)))
        cells = np.array(order)
        for axis, size in enumerate(sizes):
            counts = np.cumsum(cells[:, axis, None] == np.arange(size), axis=0)
            fair = np.arange(1, len(cells) + 1)[:, None] / size
            assert np.abs(counts - fair).max() < 1


def test_the_default_needle_s_prefixes_show_what_the_whole_shows() -> None:
    conf = yaml.safe_load((ROOT / "conf" / "task" / "needle.yaml").read_text())
    grid = {name: conf[name] for name in ("lengths", "depths", "num_examples")}
    assert grid["num_examples"] > 1
    letters = {"lengths": [length * 4 for length in grid.pop("lengths")]}
    found = task(**grid, **letters).examples(PLAIN)
    everything = list(itertools.product(letters["lengths"], grid["depths"]))
    assert {(e.fields["length"], e.fields["depth"]) for e in found[: len(everything)]} == set(
        everything
    )
    assert len({e.id for e in found}) == len(everything) * grid["num_examples"]
    # A method that keeps both ends finds the needle there: 40 % of all. So it is of every prefix, to
    # within an example; and of every run of depths and of lengths, to within two.
    both = np.cumsum([e.fields["depth"] in (0, 100) for e in found])
    tried = np.arange(1, len(found) + 1)
    assert np.abs(both - 0.4 * tried).max() <= 1.2
    assert [round(100 * both[limit - 1] / limit) for limit in (4, 8, 10)] == [50, 38, 40]
    for field, values in (("depth", grid["depths"]), ("length", letters["lengths"])):
        for low, high in itertools.combinations(range(len(values) + 1), 2):
            inside = np.cumsum([e.fields[field] in values[low:high] for e in found])
            assert np.abs(inside - tried * (high - low) / len(values)).max() < 2


def test_fillers_differ_and_each_serves_every_length_and_depth() -> None:
    found = task(num_examples=3, seed=4).examples(PLAIN)
    texts: dict[str, set[str]] = {}
    for example in found:
        plain = example.context.replace(NEEDLE["needle"], "").split(".")[0].strip()
        texts.setdefault(example.fields["filler"], set()).add(plain)
    assert len(texts) == 3
    assert [len(first) for first in texts.values()] == [1, 1, 1], (
        "one filler has one first sentence"
    )
    assert len(set.union(*texts.values())) == 3
    other = {e.fields["filler"] for e in task(num_examples=3, seed=5).examples(PLAIN)}
    assert not other & set(texts), "another seed's fillers are other units"


def test_the_interval_is_over_fillers(tmp_path: Path) -> None:
    """Half the fillers are found at every length and depth, half nowhere: 48 prompts say no more than
    their 6 fillers do."""
    cells = task(num_examples=6, depths=[0, 30, 60, 100]).examples(PLAIN)
    fillers = sorted({e.fields["filler"] for e in cells})
    good = [fillers.index(e.fields["filler"]) % 2 == 0 for e in cells]
    records = [
        {"example_id": e.id, "score": float(right), **e.fields}
        for e, right in zip(cells, good, strict=True)
    ]
    meta = TaskPlan(task()).meta()
    write_run(tmp_path, task="needle", method="snapkv", records=records, task_meta=meta)
    (group,) = load_experiment(tmp_path / "demo").groups
    (scores,) = strata_of(group)
    assert len(scores.values) == 48
    assert len(np.unique(scores.units)) == 6
    by_filler = [scores.values[scores.units == unit, 0] for unit in range(6)]
    assert all(len(values) == 8 and len(set(values)) == 1 for values in by_filler)
    (row,) = score_table(group).rows
    width = row.total.score.high - row.total.score.low
    assert width > 2 * (2 * 1.96 * 0.5 / np.sqrt(48)), (
        "twice what 48 independent prompts would give"
    )


def test_the_report_shows_word_recall_beside_containment(tmp_path: Path) -> None:
    example = task().examples(PLAIN)[0]
    answers = ["eat a sandwich and sit in Dolores Park on a sunny day", "eat a sandwich", "no"]
    records = [
        {"example_id": f"n{i}", "prediction": text, **task().score(text, example), **example.fields}
        for i, text in enumerate(answers)
    ]
    meta = TaskPlan(task()).meta()
    write_run(tmp_path, task="needle", method="snapkv", records=records, task_meta=meta)
    paths = build_report(tmp_path / "demo")
    assert (
        "The independent unit is the filler: intervals are over the 1 there"
        in paths.page.read_text()
    )
    table = (paths.page.parent / "tables" / "needle-recall_mini-by-measure.md").read_text()
    (row,) = [line.split("|") for line in table.splitlines() if "snapkv" in line]
    assert "containment" in table.splitlines()[2]
    assert "word_recall" in table.splitlines()[2]
    assert row[2].replace("*", "").split()[0] == "33.3"  # 1 of 3
    assert row[3].replace("*", "").split()[0] == "41.7"  # (12 + 3 + 0) / 12 / 3
    assert row[4].strip() == "3/3", "every example once, not once per measure"


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
    assert set(half) == {"score", "containment", "word_recall", "released_recall", "rouge1"}
    assert containment(right, NEEDLE["answer"] + ".") == 1.0
    assert containment(right.rstrip("."), NEEDLE["answer"] + ".") == 1.0
    assert containment("day", ".") == 0.0


RELEASED = "eat a sandwich and sit in Dolores Park on a sunny day."


@pytest.mark.parametrize(
    ("response", "share"),
    [  # of eat, a, sandwich, and, sit, in, dolores, park, on, sunny, "day.": 11
        ("", 0),
        ("eat a sandwich and sit in Dolores Park on a sunny day.", 11),
        ("EAT A SANDWICH and sit in dolores park\ton a sunny\n\nday.", 11),
        ("eat a sandwich and sit in Dolores Park on a sunny day", 10),
        ("Eat a sandwich, and sit in Dolores Park on a sunny day.", 10),
        ("a a a a", 1),
        ("It is a story about a boy and a girl in a house on a hill.", 4),
        ("daydream. parks insane", 0),
    ],
)
def test_the_released_recall_counts_different_words_and_keeps_their_punctuation(
    response: str, share: int
) -> None:
    assert released_recall(response, RELEASED) == pytest.approx(share / 11)
    assert released_recall(response, "") == 0.0


class Released:
    """The prompt of github.com/ksheth96/BalanceKV, run_needle_in_haystack.py (b6b82544), step by step
    from its description: encode() puts a begin token before everything, and nothing takes it away."""

    def __init__(self, tokenizer: Any, period: int) -> None:
        self.tokenizer, self.period = tokenizer, period

    def prompt(
        self, essays: str, needle: str, question: str, length: int, depth: float
    ) -> list[int]:
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        hay = encode(decode(encode(essays)[:length]))
        straw = encode(needle)
        hay = hay[: length - 200 - len(straw)]
        place = len(hay) if depth == 100 else int(len(hay) * (depth / 100))
        while depth != 100 and place and hay[place - 1] != self.period:
            place -= 1
        book = decode(hay[:place] + straw + hay[place:])
        return list(
            encode(
                f"<|im_start|> This is a very long story book: <book> {book} </book>.\n"
                f" Based on the content of the book, Question: {question}\nAnswer:"
            )
        )


@pytest.fixture(scope="module")
def with_begin_token() -> Any:
    """The shipped tokenizer with a begin token that encode() adds, as Llama 3's has."""
    inner = Tokenizer.from_file(str(ROOT / "kvbench" / "assets" / "recall_mini" / "tokenizer.json"))
    inner.add_special_tokens(["<|begin|>"])
    begin = [("<|begin|>", inner.token_to_id("<|begin|>"))]
    inner.post_processor = TemplateProcessing(single="<|begin|> $A", special_tokens=begin)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<|begin|>", clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("depth", [0, 11, 50, 89, 100])
@pytest.mark.parametrize("length", [700, 1301])
def test_figure_4_has_the_released_prompt(
    tmp_path: Path, with_begin_token: Any, length: int, depth: int
) -> None:
    tokenizer = with_begin_token
    sentences = generated_haystack("essay", 40)
    essay = " ".join(next(sentences) for _ in range(200))
    (tmp_path / "essay.txt").write_text(essay)
    conf = yaml.safe_load((ROOT / "conf" / "experiment" / "balancekv_figure4.yaml").read_text())[
        "task"
    ]
    conf |= {"haystack_files": str(tmp_path / "*.txt"), "lengths": [length], "depths": [depth]}
    encoder = PromptEncoder(tokenizer, (tokenizer.bos_token_id,), end_ids=frozenset({0}))
    ours = Needle(**conf | {"num_examples": 1}).examples(encoder)[0]
    ids = [*encoder.prefix_ids, *ours.context_ids, *ours.question_ids]
    (period,) = tokenizer.encode(".", add_special_tokens=False)
    released = Released(tokenizer, period)
    assert ids == released.prompt(essay, conf["needle"], conf["question"], length, depth)
    assert ids.count(tokenizer.bos_token_id) == 4  # prompt, twice the haystack, needle
    start = ours.fields["needle_start"]
    assert ids[start] == tokenizer.bos_token_id
    needle = tokenizer.encode(conf["needle"])
    assert ids[start : start + ours.fields["needle_tokens"]] == needle
    newline = tokenizer.encode("\n", add_special_tokens=False)[-1]
    assert ours.end_ids == {0, newline}
    assert ours.max_new_tokens == 30
    assert ours.answers == (RELEASED,)
    assert ours.context.startswith("<|im_start|> This is a very long story book: <book> ")


def test_figure_4_has_the_released_grid_and_what_differs_is_named() -> None:
    conf = yaml.safe_load((ROOT / "conf" / "experiment" / "balancekv_figure4.yaml").read_text())
    grid = np.logspace(10, 17, num=22, base=2).astype(int).tolist()[6:-1]
    assert conf["task"]["lengths"] == grid
    assert len(grid) == 15
    assert conf["task"]["depths"] == np.round(np.linspace(0, 100, 10)).astype(int).tolist()
    assert conf["task"]["primary"] == "released_recall"
    assert "uniform" in conf["defaults"][2]["override /method"]
    assert conf["model"]["chat_template"] == "never"
    differences = conf["paper_table"]["differences"]
    assert any("uniform" in line for line in differences)
    assert all(isinstance(line, str) and "\n" not in line for line in differences)


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
    assert len(examples) == 2 * 3 * 5
    assert len({example.id for example in examples}) == len(examples)
    for _, group in itertools.groupby(examples, key=lambda example: example.context_id):
        asked = list(group)
        assert sorted(example.fields["depth"] for example in asked) == [0, 25, 50, 75, 100]
        (context,) = {example.context_ids for example in asked}
        length = asked[0].fields["length"]
        longest = max(len(example.question_ids or ()) for example in asked)
        assert encoder.overhead + len(context) + longest == length
        numbers = {example.answers[0] for example in asked}
        assert len(numbers) == 5
        for example in asked:
            start = example.fields["needle_start"] - len(encoder.prefix_ids)
            straw = encoder.decode(context[start : start + example.fields["needle_tokens"]]).strip()
            key = example.question.partition("Where is the ")[2].partition("?")[0]
            assert straw == f"The secret number of the {key} is {example.answers[0]}."
            assert example.context.count(example.answers[0]) == 1
            depth = example.fields["depth"]
            assert abs(start / len(context) - depth / 100) < 0.12, (
                "at a sentence end near its depth"
            )
            assert task.score(f"it is {example.answers[0]}.", example)["score"] == 1
            others = " ".join(numbers - set(example.answers))
            assert task.score(others, example)["score"] == 0
    orders = {tuple(e.fields["depth"] for e in examples[i : i + 5]) for i in range(0, 30, 5)}
    assert len(orders) > 1, "what is asked first is not always the same depth"


def test_a_prefix_of_contexts_is_balanced_over_lengths() -> None:
    contexts = list(dict.fromkeys(e.context_id for e in Needle(**TOGETHER).examples(PLAIN)))
    assert len({str(name).partition("-")[0] for name in contexts[:2]}) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"needle": "A {key}."},
            "task.needle is 'A {key}.'; allowed with together=true: text with {key} and",
        ),
        (
            {"question": "What?"},
            "task.question is 'What?'; allowed with together=true: text with {key}",
        ),
        ({"answer": "5"}, "task.answer is '5'; allowed with together=true: text with {value}"),
        ({"repeats": 2}, "task.repeats is 2; allowed with together=true: 1"),
        ({"lengths": [150]}, "length 150 is too short for needle, question and filler; at least"),
    ],
)
def test_needles_together_that_cannot_be(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=re.escape(said)):
        Needle(**TOGETHER | changes).examples(PLAIN)


def test_needle_questions_come_after_the_compression() -> None:
    config = composed("task=needle_questions", "device=cpu", "task_label=t")
    assert config.compress_after == "context"
    assert len(config.task.depths) == 11
    assert build_job(config).plan.task.together


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
    both = task(haystack="files", haystack_files=str(tmp_path / "*.txt"), num_examples=4)
    named = {(e.id[-4:], e.fields["filler"], e.context[:6]) for e in both.examples(PLAIN)[:40]
             if e.fields["depth"] == 100}  # fmt: skip
    assert len(named) == 4
    assert {filler[0] for _, filler, _ in named} == {"a", "b"}, (
        "each begins with another file first"
    )
    assert all(start[-1] == filler[0] for _, filler, start in named)
    assert len({filler for _, filler, _ in named}) == 2, "the same text again is the same unit"


def test_essays(shared_file: Any) -> None:
    folder = shared_file("data/paul_graham_essays")
    for example in task(haystack="files", haystack_files=f"{folder}/*.txt").examples(WRAPPED):
        total = len(example.context_ids) + len(example.question_ids) + WRAPPED.overhead
        assert total == example.fields["length"]
        at = example.context.index(NEEDLE["needle"])
        if at and example.fields["depth"] < 100:
            assert example.context[:at].rstrip()[-1] in ".!?\"')"


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
        ({"lengths": [0]}, ["lengths is [0]"]),
        ({"lengths": []}, ["lengths is []", "a list of"]),
        ({"depths": [101]}, ["depths is [101]", "numbers in [0, 100]"]),
        ({"depths": ["top"]}, ["depths", "top"]),
        ({"depths": [5, 5]}, ["depths is [5, 5]", "each once"]),
        ({"primary": "bleu"}, ["primary is 'bleu'", "rouge1"]),
        ({"haystack": "wiki"}, ["haystack is 'wiki'", "generated | files | dataset"]),
        ({"haystack": "files"}, ["haystack_files"]),
        ({"haystack": "dataset"}, ["dataset_name"]),
        ({"repeats": 0}, ["repeats is 0"]),
        ({"needle": " "}, ["needle is ' '; allowed: text that is not empty"]),
        (
            {"template": "{question} {haystack}"},
            ["template is", "{haystack} and, after it, {question}"],
        ),
        ({"template": "{haystack}"}, ["template is"]),
        ({"template": "{haystack}{haystack}{question}"}, ["template is"]),
        ({"buffer": -1}, ["buffer is -1"]),
        ({"end_tokens": [""]}, ["end_tokens"]),
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
    with pytest.raises(ValueError, match=r"task\.primary"):
        replace(task(), seed=1, primary="none")
