"""Exact decoding by transformers alone, whose time is compared with that of kvbench's exact cache.

A throughput table compares every method with kvbench's own `exact`, and would flatter the methods if
`exact` were slow. So the same model, with the same weights, lengths and batch, is also run by
transformers' code alone: its `generate`, its `StaticCache`, one of its attention backends and, on a GPU,
torch.compile of the decode step.
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
from kvbench.engine.costs import ExactBytes, LayerBytes
from kvbench.engine.loading import Model
from kvbench.engine.prefill import input_device, synchronize
from kvbench.engine.rows import Generation

WARM_UP = 8
"""How many tokens are generated before the clock starts, so that the decode step is compiled and
captured for this cache."""


class _FirstLogitsClock(LogitsProcessor):
    """Notes the time at which the logits of the first new token are computed: the end of the prefill.
    It changes no logits.

    Attributes:
        read_s: the time by `time.perf_counter`; None before.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.read_s: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.read_s is None:
            synchronize(self.device)
            self.read_s = time.perf_counter()
        return scores


@contextmanager
def _attention_of_transformers(model: Model, name: str) -> Iterator[None]:
    """Within this context the model uses transformers' attention backend `name`; afterwards it uses
    kvbench's again."""
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
    """Generate greedy answers of exactly `new_tokens` tokens to all prompts together, by transformers.

    The same cache is used twice: for `WARM_UP` tokens that are not timed, and then, emptied, for the
    answers.

    Args:
        model: loaded with kvbench's attention, which it has again afterwards.
        prompts: token ids, all of the same length.
        attention: transformers' name of an attention backend: sdpa, eager, flash_attention_2 ...
        compiled: whether the decode step is compiled by torch.compile on a GPU; on a CPU it never is.

    Returns:
        one `Generation` per prompt. The prefill ends when the logits of the first token are computed.
        `prefill_s` and `decode_s` are the seconds of the batch divided by the number of prompts. Bytes
        are those of the entries that have been written, as for `exact`; the cache reserves more.

    Raises:
        ImportError: the package of the attention backend is missing.
        ValueError: transformers has no such backend, or not for this model.
        UnsupportedModel: a layer holds a state in place of keys and values.
    """
    device = input_device(model)
    ids = torch.tensor([list(prompt) for prompt in prompts], device=device)
    batch, length = ids.shape
    cache = StaticCache(config=model.config, max_cache_len=length + new_tokens)
    beyond_vocabulary = model.config.get_text_config().vocab_size
    untyped_generate: Any = model.generate  # mypy takes it for a module, which is not callable

    def generate(max_new_tokens: int, clock: _FirstLogitsClock) -> Tensor:
        """The prompts followed by `max_new_tokens` tokens: [batch, length + max_new_tokens]."""
        settings = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=beyond_vocabulary,  # never generated, so that no answer ends early
            pad_token_id=0,
            disable_compile=not compiled,
        )
        generated: Tensor = untyped_generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            generation_config=settings,
            logits_processor=LogitsProcessorList([clock]),
        )
        return generated

    with torch.inference_mode(), _attention_of_transformers(model, attention):
        generate(min(WARM_UP, new_tokens), _FirstLogitsClock(device))
        cache.reset()
        first_logits = _FirstLogitsClock(device)
        synchronize(device)
        begin_s = time.perf_counter()
        answers = generate(new_tokens, first_logits)[:, length:]
        synchronize(device)
        end_s = time.perf_counter()
    assert first_logits.read_s is not None
    exact = _exact_bytes(cache, batch)
    last_length = length + new_tokens - 1  # the answer's last token is not fed to the model
    over_time = [exact.at(tokens) for tokens in range(length, last_length + 1)]
    mean_bytes = sum(over_time) / len(over_time)
    entries = [min(length, layer.window or length) for layer in exact.layers]
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
            prefill_s=(first_logits.read_s - begin_s) / batch,
            decode_s=(end_s - first_logits.read_s) / batch,
            failure=None,
            batch=batch,
        )
        for answer in answers.tolist()
    ]


def _exact_bytes(cache: StaticCache, batch: int) -> ExactBytes:
    """The bytes of one prompt's entries in a static cache of `batch` prompts. The room of a layer takes
    the place of its window: a sliding-window layer has room for no more than its window.

    Raises:
        UnsupportedModel: a layer holds a state in place of keys and values.
    """
    layers: list[LayerBytes] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if not isinstance(keys, Tensor) or not isinstance(values, Tensor):
            raise UnsupportedModel(
                f"a layer of the static cache is a {type(layer).__name__}; allowed: layers of keys and "
                "values"
            )
        room = keys.shape[2]
        layers.append(LayerBytes((keys.nbytes + values.nbytes) // (batch * room), room))
    return ExactBytes(layers)
