"""One compressed context, many questions: each answered from the same cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny import prompt_ids, tiny_model
from support.variants import VARIANTS, label

from kvbench import compress
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.fork import prompt_name
from kvbench.engine.generate import run_forks
from kvbench.engine.live import Context
from kvbench.engine.loading import ModelSpec, load_model, load_tokenizer
from kvbench.engine.prompts import Generation
from kvbench.engine.rows import DecodingRow
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method

SMALL: dict[str, Any] = {"sink": 4, "window": 4}
CONTEXT = prompt_ids(120)
QUESTIONS = [prompt_ids(90)[60:], prompt_ids(40)[30:], prompt_ids(90)[60:75]]
MORE: list[tuple[str, dict[str, Any]]] = [
    ("uniform", {"quantize": {"bits": 4, "group_size": 16}}),
    ("snapkv", {"quantize": {"bits": 2, "group_size": 16}}),
    ("balancekv_streaming", {"on_fail": "restart"}),
    ("subgen_streaming", {}),
]


def alone(model: Any, name: str, options: dict[str, Any], question: list[int]) -> list[int]:
    """What the benchmark's own engine answers with compress_after=context."""
    methods = {name: (build_method(name, **options), Budget(0.25, **SMALL))}
    with kvbench_attention_on(model):
        found = run_forks(
            model,
            CONTEXT,
            question,
            methods,
            Stopping(6),
            seed=0,
            example_id=prompt_name(CONTEXT),
            compress_after="context",
        )
    assert found[name].failure is None
    return found[name].tokens


@pytest.mark.parametrize("variant", [*VARIANTS, *MORE], ids=label)
def test_every_question_meets_the_same_cache(variant: tuple[str, dict[str, Any]]) -> None:
    name, options = variant
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    expected = [alone(model, name, options, question) for question in QUESTIONS]
    with compress(model, name, rate=0.25, **SMALL, **options) as session:
        context = session.read(CONTEXT)
        held = context.cache_bytes
        singly = [context.ask(question, max_new_tokens=6) for question in QUESTIONS]
        assert singly == expected
        assert context.ask_all(QUESTIONS, max_new_tokens=6) == expected
        assert context.tokens == 120
        assert context.cache_bytes == held == context._fork.cache_bytes()
    assert context.ask(QUESTIONS[0], max_new_tokens=6) == expected[0], "outside the block, too"
    assert model.config._attn_implementation != "kvbench"
    if name not in ("exact", "topk"):
        assert context.ratio < 1


def test_bytes_are_audited_after_every_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every row, as if it stood alone: what compression left, and its own tokens since."""
    model = tiny_model("llama")
    rows: list[Generation] = []
    finish = DecodingRow.finish

    def finished(row: DecodingRow) -> Generation:
        rows.append(finish(row))
        return rows[-1]

    monkeypatch.setattr(DecodingRow, "finish", finished)
    more: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in ("topk", "h2o", "balancekv")]
    for name, options in [*more, *MORE]:
        context = Context(model, build_method(name, **options), Budget(0.25, **SMALL), CONTEXT)
        context.ask_all(QUESTIONS, max_new_tokens=5)
        context.ask(QUESTIONS[0], max_new_tokens=5, keep=True)
        found = [row.cache_bytes_end for row in rows]
        twin = context._fork
        assert found[-1] == twin.cache_bytes(), "the copy that stays holds it all itself"
        held, width = context.cache_bytes, 0
        for layer in twin.layers.values():
            weights = sum(part is not None for part in (layer.log_weights, layer.scores))
            width += layer.keys.shape[0] * 4 * (2 * layer.keys.shape[2] + weights)
        if not twin.method.evicts:
            grown = [len(question) + 4 for question in (*QUESTIONS, QUESTIONS[0])]
            assert found == [held + tokens * width for tokens in grown], name
        else:
            assert found == [held] * 4, name
        rows.clear()


def test_turns_that_stay_are_a_conversation() -> None:
    """With everything kept, transformers' own cache says the same of the whole conversation."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    with compress(model, "exact") as session:
        context = session.read(CONTEXT)
        said = list(CONTEXT)
        for question in QUESTIONS:
            answer = context.ask(question, max_new_tokens=6, keep=True)
            said += question
            said += answer
            assert context.tokens == len(said) - 1  # the last token is fed with the next turn
    tokens = list(CONTEXT)
    for question in QUESTIONS:
        tokens += question
        out = model.generate(torch.tensor([tokens]), max_new_tokens=6, do_sample=False)
        tokens = out[0].tolist()
    assert said == tokens


def test_a_turn_that_stays_is_seen_by_the_next_and_another_is_not() -> None:
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    context = Context(model, build_method("snapkv"), Budget(0.25, **SMALL), CONTEXT)
    first = context.ask(QUESTIONS[1], max_new_tokens=8)
    context.ask(QUESTIONS[0], max_new_tokens=8)
    assert context.ask(QUESTIONS[1], max_new_tokens=8) == first
    context.ask(QUESTIONS[0], max_new_tokens=8, keep=True)
    assert context.tokens == 120 + 30 + 7
    assert context.ask(QUESTIONS[1], max_new_tokens=8) != first


def test_text_is_asked_and_answered_with_a_tokenizer() -> None:
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    model = load_model(spec, device=torch.device("cpu"), dtype=torch.float32, seed=0)
    tokenizer = load_tokenizer(spec)
    lines = {"brave-otter": 41077, "calm-heron": 12903, "shy-badger": 30058}
    text = "".join(
        f"line {name}: REGISTER_CONTENT is <{number}>\n" for name, number in lines.items()
    )
    with compress(model, "exact") as session:
        context = session.read(text, tokenizer)
        ask = "Tell me what is the REGISTER_CONTENT in line {}? "
        answers = context.ask_all([ask.format(name) for name in lines], max_new_tokens=16)
        assert all(isinstance(answer, str) for answer in answers)
        assert [str(n) in answer for n, answer in zip(lines.values(), answers, strict=True)] == [
            True
        ] * 3
        cut = context.ask(ask.format("calm-heron"), max_new_tokens=16, stop=["9"])
        assert "9" not in cut


def test_what_cannot_be_asked_is_one_line() -> None:
    model = tiny_model("llama")
    with compress(model, "snapkv", rate=0.25, **SMALL) as session:
        for wrong, said in (
            ([], "the context has no token ids"),
            ("text", "there is no tokenizer"),
            ({"input_ids": [[1, 2], [3, 4]]}, "has 2 texts"),
        ):
            with pytest.raises(KVError, match=said):
                session.read(wrong)
        context = session.read({"input_ids": torch.tensor([CONTEXT])})
        for question, options, said in (
            ([], {}, "the question has no token ids"),
            ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
            ([1], {"stop": ["x"]}, "there is no tokenizer"),
        ):
            with pytest.raises(KVError, match=said):
                context.ask(question, **options)
