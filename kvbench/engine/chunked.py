"""Reading a prompt through a bounded cache, so that it may be longer than memory.

H2O's and StreamingLLM's own use: the first `capacity` tokens are read exactly; every later token
enters the cache and another one leaves, layer by layer, so that no layer ever holds more than its
capacity and the entry of the token being read. Keys, values and activations exist for one chunk at a
time. Unlike a shared prefill, later layers see what earlier ones kept: each method reads for itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.prefill import (
    Prefill,
    compressible_layers,
    forward_rows,
    input_device,
    prefill,
    synchronize,
)
from kvbench.engine.states import state_bytes
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method


def check_reads_in_chunks(label: str, method: Method) -> None:
    """Refuse methods that cannot keep a cache bounded while reading.

    Raises:
        KVError: naming the method.
    """
    if method.uses_budget and not method.evicts:
        raise KVError(
            f"prefill is 'chunked' and method {label!r} does not evict while reading; allowed: "
            "methods with decode=evict (h2o, streaming_llm, local), or exact"
        )


@torch.inference_mode()
def chunked_prefill(
    model: PreTrainedModel,
    ids: Sequence[int],
    fork: Fork,
    chunk_tokens: int,
    look: Callable[[int, Tensor], None] | None = None,
) -> Prefill:
    """Read the prompt with one fork; its seconds are all reading, `compress_s` stays 0.

    Args:
        look: shown the logits [tokens, vocab] after each token from the last of the first, exact pass
            on, with the first one's position.
    """
    check_reads_in_chunks(fork.label, fork.method)
    n, device = len(ids), input_device(model)
    capacity = fork.budget.capacity(n) if fork.method.uses_budget else n
    first = min(n, capacity if fork.method.uses_budget else chunk_tokens)
    if not fork.method.evicts:
        fork.room += n - first
    over = fork.method.uses_budget and n > capacity
    whole = fork.budget
    if over:
        # A rate of 1 keeps all of the first tokens and still lets the method note their scores.
        fork.budget = Budget(rate=1.0, sink=whole.sink, window=whole.window)
    start = prefill(model, ids[:first], [fork], always_compress=over)
    fork.budget = whole
    logits, seconds = start.logits, start.prefill_s + fork.compress_s
    fork.compress_s = 0.0
    if look is not None:
        look(first - 1, logits[None])
    for begin in range(first, n, chunk_tokens):
        if fork.failure is not None:
            break
        end = min(n, begin + chunk_tokens)
        synchronize(device)
        clock = time.perf_counter()
        positions = torch.arange(begin, end, device=device)
        chunk = torch.tensor([list(ids[begin:end])], device=device)
        keep = 1 if look is None else None
        rows = forward_rows(model, chunk, positions, ForkBatch([fork], positions), keep)[0]
        logits = rows[-1]
        if look is not None:
            look(begin, rows)
        synchronize(device)
        seconds += time.perf_counter() - clock
        if not fork.method.evicts:
            for cache in fork.layers.values():
                cache.capacity = cache.granted = cache.length
    for layer in compressible_layers(model):
        if fork.failure is None:
            fork.layers[layer].prompt_entries = fork.layers[layer].entries()
    return Prefill(logits, seconds, _exact_bytes(model, fork, n), n)


def _exact_bytes(model: PreTrainedModel, fork: Fork, n: int) -> int:
    """Bytes an exact cache of n tokens would hold, from the shapes that the fork holds."""
    compressible = set(compressible_layers(model))
    total = state_bytes(fork.states)
    for layer, cache in fork.layers.items():
        entries = n if layer in compressible else min(n, cache.window or n)
        width = cache.keys.shape[-1] + cache.values.shape[-1]
        total += cache.keys.shape[0] * entries * width * cache.keys.element_size()
    return total
