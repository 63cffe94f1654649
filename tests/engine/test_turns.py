"""Conversations on a compressed cache: kept turns, copies, rewinding, caches given back to generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny import prompt_ids, tiny_model

from kvbench import compress
from kvbench.engine.context import Context
from kvbench.engine.fork import prompt_name
from kvbench.engine.generate import run_forks
from kvbench.engine.live import UnsupportedGeneration
from kvbench.engine.loading import ModelSpec
from kvbench.engine.stopping import Stopping
from kvbench.engine.switch import kvbench_attention_on
from kvbench.engine.tokenizer import load_tokenizer
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method

SMALL: dict[str, Any] = {"sink": 4, "window": 4}
CONTEXT = prompt_ids(120)
FIRST, SECOND = prompt_ids(90)[60:], prompt_ids(40)[30:]


@pytest.fixture
def model() -> Any:
    made = tiny_model("llama")
    made.generation_config.eos_token_id = None
    return made


def context_of(model: Any, name: str = "snapkv", **options: Any) -> Context:
    return Context(model, build_method(name), Budget(0.25, **SMALL), CONTEXT, **options)


def test_a_copy_goes_its_own_way_and_a_rewound_cache_is_as_before(model: Any) -> None:
    context = context_of(model)
    expected = [context.ask(question, max_new_tokens=6) for question in (FIRST, SECOND)]
    context.chat([FIRST], max_new_tokens=6)
    twin = context.copy()
    after = context.ask(SECOND, max_new_tokens=6)
    assert context.tokens == 120 + 30 + 5
    reply = context.chat([SECOND[:4], SECOND[4:]], max_new_tokens=6)
    assert reply == after == twin.ask(SECOND, max_new_tokens=6)
    assert (twin.tokens, context.tokens) == (155, 155 + 1 + 10 + 5)
    assert context.token_ids == [*twin.token_ids, *SECOND, *reply]
    context.crop(155)  # the end of the first turn: its last token comes back, too
    assert context.token_ids == twin.token_ids
    assert context.chat([SECOND], max_new_tokens=6) == reply
    context.crop(-(context.tokens - 120))
    assert context.token_ids == CONTEXT
    assert context.ask_all([FIRST, SECOND], max_new_tokens=6) == expected
    assert context.cache_bytes == twin.cache_bytes == context._fork.cache_bytes()
    for wrong in (119, 121, 0, "all", True):
        with pytest.raises(KVError, match="allowed: 120, which were compressed together, to 120"):
            context.crop(wrong)  # type: ignore[arg-type]
    evicting = context_of(model, "h2o")
    evicting.chat([FIRST], max_new_tokens=3)
    with pytest.raises(
        KVError, match="H2O evicts while decoding, and what left does not come back"
    ):
        evicting.crop(120)


@pytest.mark.parametrize("name", ["snapkv", "h2o", "balancekv"])
def test_generate_goes_on_from_a_context_and_from_its_own_cache(model: Any, name: str) -> None:
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False}
    with compress(model, name, **SMALL) as session:
        context = session.read(CONTEXT)
        expected = context.ask(FIRST, max_new_tokens=6)
        ids = torch.tensor([[*CONTEXT, *FIRST]])
        given = context.cache()
        out = model.generate(ids, past_key_values=given, **options)
        assert out[0, 150:].tolist() == expected
        assert given.get_seq_length() == 155
        row = session.last[0]
        assert (row.prompt_tokens, row.cache_bytes) == (120, context.cache_bytes)
        assert row.cache_bytes_end >= row.cache_bytes
        assert context.ask(FIRST, max_new_tokens=6) == expected, "it went on from a copy"
        model.generate(ids, max_new_tokens=2, do_sample=False)  # another generation in between
        context.ask(FIRST, max_new_tokens=6, keep=True)
        more = torch.cat([out, torch.tensor([SECOND])], dim=1)
        twin = copy.deepcopy(given)
        out = model.generate(more, past_key_values=given, **options)
        assert out[0, 166:].tolist() == context.ask(SECOND, max_new_tokens=6)
        new = more[:, 155:]  # what is new, with the mask of all
        mask = torch.ones_like(more)
        again = model.generate(new, attention_mask=mask, past_key_values=twin, **options)
        assert again[0, new.shape[1] :].tolist() == out[0, 166:].tolist()
        if name != "h2o":
            given.crop(155)
            assert torch.equal(model.generate(more, past_key_values=given, **options), out)
        stranger: Any = tiny_model("llama", seed=1)
        foreign = pytest.raises(UnsupportedGeneration, match="a compressed cache of another model")
        with foreign, compress(stranger, name, **SMALL):
            stranger.generate(out, past_key_values=twin, **options)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
@pytest.mark.parametrize("name", ["exact", "snapkv", "balancekv"])
def test_the_tokens_after_the_context_go_through_its_compressed_cache(
    name: str, architecture: str
) -> None:
    model: Any = tiny_model(architecture)
    model.generation_config.eos_token_id = None
    methods = {name: (build_method(name), Budget(**SMALL))}
    with kvbench_attention_on(model):
        expected = run_forks(
            model,
            CONTEXT,
            FIRST,
            methods,
            Stopping(6),
            seed=0,
            example_id=prompt_name(CONTEXT),
            compress_after="context",
        )[name]
    ids = torch.tensor([[0] * 3 + CONTEXT + FIRST, prompt_ids(153, 1)])
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    with compress(model, name, **SMALL, compress_after=120) as session:
        out = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)
    assert out[0, 153:].tolist() == expected.tokens
    assert session.entries[0] == expected.entries["mean"]
    assert session.rows[0].cache_bytes_end == expected.cache_bytes_end
    assert session.rows[0].prompt_tokens == 150
    if name == "exact":
        assert session.ratio == [1.0, 1.0]
    if (name, architecture) == ("snapkv", "llama"):
        for after in ("later", 0, True):
            with pytest.raises(KVError, match=f"compress_after is {after!r}; allowed: 'prompt'"):
                compress(model, name, compress_after=after)  # type: ignore[arg-type]
        unknown = pytest.raises(UnsupportedGeneration, match="where the context of a prompt ends")
        with unknown, compress(model, name, compress_after="context"):
            model.generate(ids, max_new_tokens=2)
        unseen = pytest.raises(KVError, match="a context is compressed before its questions")
        with unseen, compress(model, name, compress_after="prompt") as session:
            session.read(CONTEXT)


def test_a_chat_is_what_the_template_makes_of_the_whole_conversation() -> None:
    tokenizer = load_tokenizer(ModelSpec(name="recall_mini", path="asset:recall_mini"))
    model: Any = tiny_model("llama")
    model.resize_token_embeddings(len(tokenizer))
    context = Context(model, build_method("exact"), Budget(), "a document. ", tokenizer)
    messages = [{"role": "user", "content": "one?"}]
    with pytest.raises(KVError, match="messages have roles and there is no chat template"):
        context.chat(messages)
    for wrong in ([], "one?", [messages[0], "two?"]):
        with pytest.raises(KVError, match="messages are no list of messages"):
            context.chat(wrong)  # type: ignore[arg-type]
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<|end|>\n"
        "{% endfor %}<assistant>"
    )
    said = "a document. "
    for question in ("one?", "two? "):
        messages = [{"role": "user", "content": question}]
        reply = context.chat(messages, max_new_tokens=4)
        said += f"<user>{question.strip()}<|end|>\n<assistant>"
        said += reply
        ended = context.token_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(context.token_ids) == said + "<|end|>" * ended
        said += "<|end|>\n"
