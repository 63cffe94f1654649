"""Contexts: read once, compressed, asked many questions."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import transformers as t
from support.asking import generate_one
from support.generation import CONTEXT, SMALL, tiny_model
from support.tiny import prompt_ids

from kvbench import compress
from kvbench.engine.answer import Stopping
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.live_cache import UnsupportedGeneration
from kvbench.engine.model import local_path
from kvbench.engine.row import prompt_name
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.prompts import PromptError

QUESTIONS = [prompt_ids(90)[60:], prompt_ids(40)[30:], prompt_ids(90)[60:75]]


def alone(model: Any, name: str, question: list[int]) -> Any:
    """What the benchmark's own engine generates with compress_after=context."""
    methods = {name: (build_method(name), Budget(0.25, **SMALL))}
    with kvbench_attention_on(model):
        where: Any = {"example_id": prompt_name(CONTEXT), "compress_after": "context"}
        results = generate_one(model, CONTEXT, question, methods, Stopping(6), seed=0, **where)
    assert results[name].failure is None
    return results[name].tokens


@pytest.mark.parametrize("name", ["exact", "topk", "h2o", "balancekv", "subgen_streaming"])
def test_every_question_is_asked_of_the_same_cache(name: str) -> None:
    model = tiny_model("llama")
    expected = [alone(model, name, question) for question in QUESTIONS]
    with compress(model, name, rate=0.25, **SMALL) as session:
        context = session.read(CONTEXT)
        held = context.cache_bytes
        singly = [context.ask(question, max_new_tokens=6) for question in QUESTIONS]
        assert singly == expected
        assert context.ask_all(QUESTIONS, max_new_tokens=6) == expected
        assert context.tokens == 120
        assert context.cache_bytes == held == context._row.cache_bytes()
    assert context.ask(QUESTIONS[0], max_new_tokens=6) == expected[0], "outside the block, too"
    held_of_a_head = context.kept().groupby(["layer", "head"]).size()
    assert held_of_a_head.mean() == context.entries["mean"]
    assert model.config._attn_implementation != "kvbench"
    if name not in ("exact", "topk"):
        assert context.ratio < 1


def test_a_context_is_drawn_with_the_sessions_seed() -> None:
    model = tiny_model("llama")
    answers = []
    for seed in (1, 1, 2):
        with compress(model, "uniform", rate=0.25, seed=seed, **SMALL) as session:
            answers.append(session.read(CONTEXT).ask_all(QUESTIONS, max_new_tokens=6))
    assert answers[0] == answers[1] != answers[2]


@pytest.mark.parametrize("name", ["snapkv", "h2o", "balancekv"])
def test_generate_goes_on_from_a_context_and_from_its_own_cache(name: str) -> None:
    model, options = tiny_model("llama"), {"max_new_tokens": 6, "do_sample": False}
    first, second = QUESTIONS[:2]
    with compress(model, name, **SMALL) as session:
        context = session.read(CONTEXT)
        expected = context.ask(first, max_new_tokens=6)
        ids = torch.tensor([[*CONTEXT, *first]])
        given = context.cache()
        out = model.generate(ids, past_key_values=given, **options)
        assert out[0, 150:].tolist() == expected
        assert given.get_seq_length() == 155
        row: Any = session.rows[-1]
        assert (row.prompt_tokens, row.cache_bytes) == (120, context.cache_bytes)
        assert row.cache_bytes_end >= row.cache_bytes
        model.generate(ids, max_new_tokens=2, do_sample=False)  # another generation in between
        held = context.cache_bytes
        context.ask(first, max_new_tokens=6, keep=True)
        assert (context._row.cache_bytes() > held) == (name != "h2o"), "which evicts"
        more = torch.cat([out, torch.tensor([second])], dim=1)
        twin = copy.deepcopy(given)
        out = model.generate(more, past_key_values=given, **options)
        assert out[0, 166:].tolist() == context.ask(second, max_new_tokens=6)
        new, mask = more[:, 155:], torch.ones_like(more)  # what is new, with the mask of all
        again = model.generate(new, attention_mask=mask, past_key_values=twin, **options)
        assert again[0, new.shape[1] :].tolist() == out[0, 166:].tolist()
        stranger = tiny_model("qwen3")
        foreign = pytest.raises(UnsupportedGeneration, match="a compressed cache of another model")
        with foreign, compress(stranger, name, **SMALL):
            stranger.generate(out, past_key_values=twin, **options)
    # One new token, for which transformers makes no mask that would not fit.
    one = torch.tensor([[*CONTEXT, first[0]]])
    for cache in (context.cache(), copy.deepcopy(given)):
        with pytest.raises(UnsupportedGeneration, match="outside compress"):
            model(one[:, -1:], past_key_values=cache)
    with pytest.raises(UnsupportedGeneration, match="outside compress"):
        model.generate(one, past_key_values=context.cache(), **options)


@pytest.fixture
def shipped() -> tuple[Any, Any]:
    path = local_path("asset:recall_mini")
    model = t.AutoModelForCausalLM.from_pretrained(path, device_map="cpu").eval()
    return model, t.AutoTokenizer.from_pretrained(path, padding_side="left")


def test_text_is_asked_and_answered_with_a_tokenizer(shipped: Any) -> None:
    model, tokenizer = shipped
    lines = {"brave-otter": 41077, "calm-heron": 12903, "shy-badger": 30058}
    text = "".join(f"line {name}: REGISTER_CONTENT is <{n}>\n" for name, n in lines.items())
    with compress(model, "exact") as session:
        context = session.read(text, tokenizer)
        assert re.fullmatch(r"<kvbench context: exact, \d+ tokens, ratio 1>", repr(context))
        ask = "Tell me what is the REGISTER_CONTENT in line {}? "
        answers = context.ask_all([ask.format(name) for name in lines], max_new_tokens=16)
        assert all(str(n) in answer for n, answer in zip(lines.values(), answers, strict=True))
        cut = context.ask(ask.format("calm-heron"), max_new_tokens=16, stop=["9"])
        assert "9" not in cut
        # A text is one stop string, or one question: not its characters.
        question = ask.format("calm-heron")
        for stop, expected in (("03", answers[1].partition("03")[0]), ("31", answers[1])):
            assert context.ask(question, max_new_tokens=16, stop=stop) == expected
        with pytest.raises(KVError, match=r"questions is the text 'Tell me .*; allowed: a list"):
            context.ask_all(question)


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ eos_token }}{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{{ eos_token }}{% endif %}"
)
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize("max_new_tokens", [3, 40], ids=["cut", "ended"])
@pytest.mark.parametrize("last", ["user", "assistant", "system"])
def test_a_chat_is_asked_in_its_template_turn_after_turn(
    shipped: Any, last: str, max_new_tokens: int
) -> None:
    """What `generate` answers to the rendered conversation."""
    model, tokenizer = shipped
    tokenizer.chat_template = TURNS
    document = "".join(f"line {name}: REGISTER_CONTENT is <{i}>\n" for i, name in enumerate("abc"))
    messages = {
        "user": [SYSTEM, {"role": "user", "content": document}],
        "assistant": [
            {"role": "user", "content": document},
            {"role": "assistant", "content": "ok"},
        ],
        "system": [{**SYSTEM, "content": document}],
    }[last]
    questions = ["Tell me what is the REGISTER_CONTENT in line b? ", "And in line c? "]
    said, ended = list(messages), []
    with compress(model, "exact") as session:
        context = session.read(messages, tokenizer)
        assert session.ratio == [1.0]
        for question in questions:
            if said[-1]["role"] == "user":
                said[-1] = {**said[-1], "content": said[-1]["content"] + question}
            else:
                said.append({"role": "user", "content": question})
            alone = context.ask(question, max_new_tokens=max_new_tokens)
            ids = tokenizer.apply_chat_template(
                said, add_generation_prompt=True, return_tensors="pt"
            )
            ids = ids["input_ids"]
            out = model.generate(ids, max_new_tokens=max_new_tokens, do_sample=False)
            ended.append(int(out[0, -1]) == tokenizer.eos_token_id)
            answer = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
            assert alone == answer
            as_ids = tokenizer.encode(question, add_special_tokens=False)
            assert context.ask_all([question, as_ids], max_new_tokens=max_new_tokens) == [alone] * 2
            assert context.ask(question, max_new_tokens=max_new_tokens, keep=True) == answer
            said.append({"role": "assistant", "content": answer})
    if last == "user":
        assert ended[0] == (max_new_tokens == 40)


def test_a_chat_model_that_says_nothing_to_a_raw_text_is_told_how_to_be_asked(
    shipped: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, tokenizer = shipped
    tokenizer.chat_template = TURNS
    model.generation_config.eos_token_id = [*range(len(tokenizer))]
    with compress(model, "exact") as session:
        context = session.read("line a: REGISTER_CONTENT is <1>\n", tokenizer)
        assert context.ask_all(["?", "??"], max_new_tokens=4) == ["", ""]
        with pytest.raises(
            KVError, match="the context is a chat and there is no tokenizer; allowed"
        ):
            session.read([SYSTEM])
        with pytest.raises(
            PromptError, match="content of the last message is a list; allowed: text"
        ):
            session.read([{"role": "user", "content": [{"type": "text"}]}], tokenizer)
    (said,) = caplog.messages
    assert "It is a chat model and its context a raw text: session.read([{'role': 'user'," in said
