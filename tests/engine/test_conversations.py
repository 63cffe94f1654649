"""One compressed prompt and several conversations, of every method: the answers of separate runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.prompts import facts
from support.prompts import methods as variants
from support.tiny import prompt_ids, tiny_model

from kvbench.engine import generate as engine
from kvbench.engine.generate import Prompt, Question, run_batch, run_conversations
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import available_methods, build_method

NEED_PACKAGES = ("kvpress", "minference")
SMALL = Budget(rate=0.25, sink=4, window=4)
QUESTIONS = [prompt_ids(90)[60:80], prompt_ids(40)[30:], prompt_ids(90)[60:75]]
WITHOUT_TOKENIZER = {"kvzip": {"instructed": False}}
METHODS = {
    name: build_method(name, **WITHOUT_TOKENIZER.get(name, {}))
    for name in available_methods()
    if name not in NEED_PACKAGES
} | variants()


def prompt_of(methods: dict[str, Any], new: int = 10) -> Prompt:
    budgets = {label: (method, SMALL) for label, method in methods.items()}
    questions = [[Question(ids, Stopping(new))] for ids in QUESTIONS]
    return Prompt(prompt_ids(120), (), budgets, Stopping(new), "x", conversations=questions)


@pytest.mark.parametrize("name", METHODS)
def test_questions_are_answered_as_in_separate_runs(name: str) -> None:
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    prompt = prompt_of({name: METHODS[name]})
    together = run_conversations(model, [prompt], seed=3)[0][name]
    assert len(together) == 3
    for question, answer in zip(QUESTIONS, together, strict=True):
        alone = replace(prompt, question_ids=question, conversations=())
        (separate,) = run_batch(model, [alone], seed=3, compress_after="context")
        assert answer.failure is None
        assert facts({name: answer}) == facts(separate)
    assert len({tuple(answer.tokens) for answer in together}) > 1


@pytest.mark.parametrize("new", [10, 200])
def test_where_answers_are_longer_than_the_prompt_each_has_a_copy(
    monkeypatch: pytest.MonkeyPatch, new: int
) -> None:
    """And then as many at once as the memory has room for; the answers are the same."""
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    prompt = prompt_of({name: METHODS[name] for name in ("exact", "snapkv")}, new)
    rows: list[int] = []
    real = engine.decode_rows
    monkeypatch.setattr(
        engine, "decode_rows", lambda m, batch, g: (rows.append(len(batch)), real(m, batch, g))
    )
    wide = run_conversations(model, [prompt], seed=0)[0]
    assert rows == [6]
    monkeypatch.setattr(engine.memory, "total_bytes", lambda device: 1)
    monkeypatch.setattr(engine.memory, "used_bytes", lambda device: 1)
    rows.clear()
    short = run_conversations(model, [prompt], seed=0)[0]
    assert rows == ([6] if new == 10 else [2, 2, 2])
    assert [facts({"x": a}) for label in wide for a in wide[label]] == [
        facts({"x": a}) for label in short for a in short[label]
    ]
