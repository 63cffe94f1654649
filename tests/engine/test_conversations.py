"""One compressed prompt and several conversations, of every method: the answers of separate runs."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.asking import Prompt, generate, generate_each
from support.prompts import facts
from support.prompts import methods as variants
from support.tiny import on_kvbench, prompt_ids, tiny_model

from kvbench.engine import ask as engine
from kvbench.engine.answer import Stopping
from kvbench.engine.ask import Question, copies_at_once
from kvbench.engine.row import Row
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method

NOT_HERE = ("kvpress", "minference", "transformers")
"""Methods that need their packages, and one that kvbench does not decode."""
SMALL = Budget(rate=0.25, sink=4, window=4)
QUESTIONS = [prompt_ids(90)[60:80], prompt_ids(40)[30:], prompt_ids(90)[60:75]]
WITHOUT_TOKENIZER: dict[str, Any] = {
    "kvzip": {"instructed": False},
    "kvgrad": {"instructed": False},
    "solved": {"options": {"instructed": False}},
}
METHODS = {
    name: build_method(name, **WITHOUT_TOKENIZER.get(name, {}))
    for name in available_methods()
    if name not in NOT_HERE
} | variants()


def prompt_of(methods: dict[str, Any], new: int = 10) -> Prompt:
    budgets = {label: (method, SMALL) for label, method in methods.items()}
    questions = [[Question(ids, Stopping(new))] for ids in QUESTIONS]
    return Prompt(prompt_ids(120), budgets, "x", questions)


def test_questions_are_answered_as_in_separate_runs() -> None:
    model = on_kvbench(tiny_model("llama"))
    prompt = prompt_of(METHODS, new=6)
    together = generate(model, [prompt], seed=3)[0]
    for i, question in enumerate(QUESTIONS):
        alone = Prompt.of(
            prompt.ids, question, prompt.methods, Stopping(6), "x", compress_after="context"
        )
        (separate,) = generate_each(model, [alone], seed=3)
        for name, answers in together.items():
            assert answers[i].failure is None, name
            assert facts({name: answers[i]}) == facts({name: separate[name]})
    for name, answers in together.items():
        assert len({tuple(answer.tokens) for answer in answers}) > 1, name


def test_as_many_conversations_at_once_as_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = on_kvbench(tiny_model("llama"))
    prompt = prompt_of({name: METHODS[name] for name in ("exact", "snapkv")})
    rows: list[int] = []
    real = engine.answer

    def answer(model: Any, asked: Any, **how: Any) -> Any:
        rows.append(len(asked))
        return real(model, asked, **how)

    monkeypatch.setattr(engine, "answer", answer)
    wide = generate(model, [prompt], seed=0)[0]
    monkeypatch.setattr(engine, "total_bytes", lambda device: 1)
    monkeypatch.setattr(engine, "used_bytes", lambda device: 1)
    short = generate(model, [prompt], seed=0)[0]
    assert rows == [6, 2, 2, 2]
    assert [facts({"x": a}) for label in wide for a in wide[label]] == [
        facts({"x": a}) for label in short for a in short[label]
    ]


@pytest.mark.parametrize(
    ("most", "total", "used", "copies"),
    [
        (10, 1000, 200, 4),  # 800 are free, half of them for copies of 100
        (3, 1000, 200, 3),
        (1, 1000, 200, 1),
        (10, 1000, 950, 1),
        (2, 1000, 950, 1),
        (10, None, 200, 10),
        (10, 1000, None, 10),
    ],
)
def test_copies_take_half_of_the_free_memory(
    most: int, total: int | None, used: int | None, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "total_bytes", lambda device: total)
    monkeypatch.setattr(engine, "used_bytes", lambda device: used)
    rows: list[Any] = []
    for held in (20, 80):
        row = Row("m", METHODS["exact"], SMALL, 0, "x", room=0)
        row.caches[0] = (SimpleNamespace(reserved_bytes=lambda held=held: held),)  # type: ignore
        rows.append(row)
    assert copies_at_once(rows, most, torch.device("cpu")) == copies
    empty = [Row("m", METHODS["exact"], SMALL, 0, "x", room=0)]
    assert copies_at_once(empty, most, torch.device("cpu")) == most, "nothing is copied"


def test_prompts_with_unlike_many_conversations_get_all_their_answers() -> None:
    model = on_kvbench(tiny_model("llama"))
    three = prompt_of({name: METHODS[name] for name in ("exact", "snapkv")})
    one = replace(three, conversations=three.conversations[1:2], example_id="y")
    for prompts, counts in (([three, one], [3, 1]), ([one, three], [1, 3])):
        results = generate(model, prompts, seed=0)
        assert [len(answers["snapkv"]) for answers in results] == counts
        wide, narrow = results if counts[0] == 3 else reversed(results)
        assert narrow["exact"][0].tokens == wide["exact"][1].tokens
        assert all(answer.cost.decode_s > 0 for answers in results for answer in answers["exact"])


def test_the_time_of_an_answer_is_its_prompts_own_and_what_is_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a clock that goes on by 2 s when a prompt is read, by 5 s when all are answered."""
    now, seen = [100.0], []
    real_prefill, real_answer = engine.prefill, engine.answer
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def prefill(*given: Any, **how: Any) -> Any:
        now[0] += 2.0
        return real_prefill(*given, **how)

    def answer(model: Any, asked: Any, **how: Any) -> Any:
        given = real_answer(model, asked, **how)
        seen.append([now[0] - one.begin_s for one in given])
        now[0] += 5.0
        return given

    monkeypatch.setattr(engine, "prefill", prefill)
    monkeypatch.setattr(engine, "answer", answer)
    one = prompt_of({"exact": METHODS["exact"]}, new=2)
    one = replace(one, conversations=[[question for (question,) in one.conversations[:2]]])
    generate(on_kvbench(tiny_model("llama")), [one, replace(one, example_id="y")], seed=0)
    assert seen == [[2.0, 2.0], [7.0, 7.0]]
