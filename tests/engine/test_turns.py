"""Compressed caches given to generate, and tokens after a context."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from support.tiny import prompt_ids, tiny_model

from kvbench import compress
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.fork import prompt_name
from kvbench.engine.generate import run_forks
from kvbench.engine.live import Context, UnsupportedGeneration
from kvbench.engine.stopping import Stopping
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
