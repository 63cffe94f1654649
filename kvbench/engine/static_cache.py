"""Exact decoding by transformers itself: a second witness of the seconds of kvbench's exact cache.

A throughput table divides by kvbench's own `exact`. Here the same model, at the same weights, lengths
and batch, is read and decoded by transformers' code alone: its `generate`, its `StaticCache`, an
attention backend that it names and, on a GPU, its torch.compile of the decode step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StaticCache

from kvbench.engine.attention import IMPLEMENTATION, UnsupportedModel
from kvbench.engine.costs import ExactBytes
from kvbench.engine.loading import Model
from kvbench.engine.prefill import input_device, synchronize
from kvbench.engine.rows import Generation

WARM_UP = 8
"""Tokens that are generated before the clock starts, so that the decode step is compiled and captured
for this cache."""


class _FirstLogits(LogitsProcessor):
    """Notes when the logits of the first new token are there; changes none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seen_at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.seen_at is None:
            synchronize(self.device)
            self.seen_at = time.perf_counter()
        return scores


@contextmanager
def _attention_of_transformers(model: Model, name: str) -> Iterator[None]:
    """The model uses the attention backend `name` within the context, and kvbench's afterwards."""
    try:
        model.set_attn_implementation(name)
        yield
    finally:
        model.set_attn_implementation(IMPLEMENTATION)


def generate_with_static_cache(
    model: Model,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    attention: str,
    compiled: bool,
) -> list[Generation]:
    """Greedy answers of `new_tokens` tokens to prompts of one length, decoded together by transformers.

    The cache has room for prompt and answer, and is used twice: for `WARM_UP` tokens that are not timed,
    then, emptied, for the answer.

    Args:
        model: loaded for kvbench's attention, which it has again afterwards.
        prompts: token ids, all of the same length.
        attention: a backend as transformers names it: sdpa, eager, flash_attention_2 ...
        compiled: whether the decode step goes through torch.compile on a GPU; on a CPU it never does.

    Returns:
        One `Generation` a prompt. `prefill_s` ends with the first token's logits; it and `decode_s` are
        of the whole batch, divided by its size. Bytes are those of the entries that have been written,
        as for `exact`, whatever room the cache reserves.

    Raises:
        ImportError, ValueError: transformers has no such backend here, or not for this model.
        UnsupportedModel: a layer that holds a state in place of keys and values.
    """
    device = input_device(model)
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
    batch, length = ids.shape
    cache = StaticCache(config=model.config, max_cache_len=length + new_tokens)
    no_token = model.config.get_text_config().vocab_size

    generate_tokens: Any = model.generate  # typed as what a subclass may lack

    def generate(most: int, first: _FirstLogits) -> Tensor:
        """The prompts and `most` new tokens: [batch, length + most]."""
        settings = GenerationConfig(
            max_new_tokens=most,
            do_sample=False,
            eos_token_id=no_token,  # an answer ends at its length alone
            pad_token_id=0,
            disable_compile=not compiled,
        )
        generated: Tensor = generate_tokens(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            generation_config=settings,
            logits_processor=LogitsProcessorList([first]),
        )
        return generated

    with torch.inference_mode(), _attention_of_transformers(model, attention):
        generate(min(WARM_UP, new_tokens), _FirstLogits(device))
        cache.reset()
        first = _FirstLogits(device)
        synchronize(device)
        begin = time.perf_counter()
        answers = generate(new_tokens, first)[:, length:]
        synchronize(device)
        end = time.perf_counter()
    assert first.seen_at is not None
    bytes_at = _bytes_of_prompt(cache, batch)
    last = length + new_tokens - 1  # the answer's last token is not fed
    over_time = [bytes_at.at(tokens) for tokens in range(length, last + 1)]
    mean_bytes = sum(over_time) / len(over_time)
    entries = [min(length, window or length) for _, window in bytes_at.layers]
    return [
        Generation(
            prompt_tokens=length,
            capacity=length,
            entries={"mean": sum(entries) / len(entries), "max": max(entries)},
            cache_bytes=over_time[0],
            cache_bytes_end=over_time[-1],
            cache_bytes_peak=over_time[-1],
            cache_bytes_mean=mean_bytes,
            exact_bytes=over_time[0],
            exact_bytes_mean=mean_bytes,
            tokens=answer,
            new_tokens=new_tokens,
            prefill_s=(first.seen_at - begin) / batch,
            decode_s=(end - first.seen_at) / batch,
            failure=None,
            batch=batch,
        )
        for answer in answers.tolist()
    ]


def _bytes_of_prompt(cache: StaticCache, batch: int) -> ExactBytes:
    """What one prompt of the batch takes in each layer of the cache; a sliding layer has no room for
    more than its window."""
    layers: list[tuple[int, int | None]] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            raise UnsupportedModel(
                f"a layer of the static cache is a {type(layer).__name__}; allowed: layers of keys and "
                "values"
            )
        room = keys.shape[2]
        layers.append(((keys.nbytes + values.nbytes) // (batch * room), room))
    return ExactBytes(layers)
