"""One compressed prompt and several conversations, of every method: the answers of separate runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.prompts import facts
from support.prompts import methods as variants
from support.tiny import on_kvbench, prompt_ids, tiny_model

from kvbench.engine import generate as engine
from kvbench.engine import memory
from kvbench.engine.generate import Prompt, Question, run_batch, run_conversations
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method

NOT_HERE = ("kvpress", "minference", "transformers")
"""Methods that need their packages, and one that kvbench does not decode."""
SMALL = Budget(rate=0.25, sink=4, window=4)
QUESTIONS = [prompt_ids(90)[60:80], prompt_ids(40)[30:], prompt_ids(90)[60:75]]
WITHOUT_TOKENIZER = {"kvzip": {"instructed": False}}
METHODS = {
    name: build_method(name, **WITHOUT_TOKENIZER.get(name, {}))
    for name in available_methods()
    if name not in NOT_HERE
} | variants()


def prompt_of(methods: dict[str, Any], new: int = 10) -> Prompt:
    budgets = {label: (method, SMALL) for label, method in methods.items()}
    questions = [[Question(ids, Stopping(new))] for ids in QUESTIONS]
    return Prompt(prompt_ids(120), (), budgets, Stopping(new), "x", conversations=questions)


def test_questions_are_answered_as_in_separate_runs() -> None:
    model = on_kvbench(tiny_model("llama"))
    prompt = prompt_of(METHODS)
    together = run_conversations(model, [prompt], seed=3)[0]
    for i, question in enumerate(QUESTIONS):
        alone = replace(prompt, question_ids=question, conversations=())
        (separate,) = run_batch(model, [alone], seed=3, compress_after="context")
        for name, answers in together.items():
            assert answers[i].failure is None, name
            assert facts({name: answers[i]}) == facts({name: separate[name]})
    for name, answers in together.items():
        assert len({tuple(answer.tokens) for answer in answers}) > 1, name


def test_as_many_conversations_at_once_as_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The answers are the same."""
    model = on_kvbench(tiny_model("llama"))
    prompt = prompt_of({name: METHODS[name] for name in ("exact", "snapkv")})
    rows: list[int] = []
    real = engine.decode_rows
    monkeypatch.setattr(
        engine, "decode_rows", lambda m, batch, g: (rows.append(len(batch)), real(m, batch, g))
    )
    wide = run_conversations(model, [prompt], seed=0)[0]
    monkeypatch.setattr(memory, "total_bytes", lambda device: 1)
    monkeypatch.setattr(memory, "used_bytes", lambda device: 1)
    short = run_conversations(model, [prompt], seed=0)[0]
    assert rows == [6, 2, 2, 2]
    assert [facts({"x": a}) for label in wide for a in wide[label]] == [
        facts({"x": a}) for label in short for a in short[label]
    ]
