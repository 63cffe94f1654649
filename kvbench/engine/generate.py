"""Greedy generation of many forks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from kvbench.engine.cache import Fork, ForkBatch
from kvbench.engine.chunked import chunked_prefill
from kvbench.engine.faults import NonFiniteLogits, choose
from kvbench.engine.prefill import Prefill, compressible_layers, forward, prefill, synchronize
from kvbench.kv import Budget
from kvbench.methods.base import Method


@dataclass(frozen=True)
class Stopping:
    """When a generation ends.

    Attributes:
        max_new_tokens: at most so many tokens.
        end_ids: any of these tokens ends it (and is not part of the text).
        strings: any of these in the text ends it (and is cut, with what follows).
        decode: token ids to text; needed for `strings`.
        timeout_s: seconds, prefill included, after which the forks still running fail; None: no limit.
    """

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    timeout_s: float | None = None

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        ends = [text.find(stop) for stop in self.strings]
        ends = [end for end in ends if end >= 0]
        return text[: min(ends)] if ends else text

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether a generation that produced `tokens` is over."""
        if len(tokens) >= self.max_new_tokens or (tokens and tokens[-1] in self.end_ids):
            return True
        if self.strings and self.decode is not None:
            # A stop string of c characters spans at most c tokens that hold a character each; the
            # margin covers multi-token characters at its edge.
            tail = self.decode(list(tokens[-(max(map(len, self.strings)) + 8) :]))
            return any(stop in tail for stop in self.strings)
        return False


@dataclass
class Generation:
    """What one fork produced, and what it cost.

    Attributes:
        tokens: new tokens, without the ending token.
        new_tokens: tokens produced, the ending token included.
        entries: prompt entries per layer and KV head after compression, mean and maximum.
        cache_bytes, exact_bytes: after compression, and of the exact cache at the same point.
        cache_bytes_end: after the last token.
        decode_s: seconds of the decode steps this fork took part in, divided by the rows of each
            (decoding is shared; the throughput probe measures methods alone).
        failure: what stopped the fork, None if it ended well.
    """

    tokens: list[int]
    new_tokens: int
    entries: dict[str, float] | None
    cache_bytes: int | None
    cache_bytes_end: int | None
    exact_bytes: int
    compressed: bool
    prefill_s: float
    compress_s: float
    decode_s: float
    failure: Exception | None


@torch.inference_mode()
def run_forks(
    model: PreTrainedModel,
    context_ids: Sequence[int],
    question_ids: Sequence[int],
    methods: dict[str, tuple[Method, Budget]],
    stopping: Stopping,
    *,
    seed: int,
    example_id: str,
    compress_after: str = "prompt",
    chunk_tokens: int | None = None,
) -> dict[str, Generation]:
    """One exact prefill, every method's fork, greedy decoding of all forks together.

    Args:
        context_ids, question_ids: the prompt is their concatenation.
        methods: by label; each with its budget.
        compress_after: "prompt" (the papers' protocol: the question is in the prefill, so the first
            new token comes from exact attention) or "context" (the context is prefilled and
            compressed; the question's tokens then run through every fork).
        chunk_tokens: read the prompt in chunks of so many tokens, each method through its own
            bounded cache (`kvbench.engine.chunked`), in place of the shared prefill.

    Returns:
        One `Generation` per label; a fork that failed says so and stops nothing else.
    """
    begun = time.perf_counter()
    head = [*context_ids, *question_ids] if compress_after == "prompt" else list(context_ids)
    tail = [] if compress_after == "prompt" else list(question_ids)
    forks = [
        Fork(label, method, budget, seed, example_id, room=len(tail) + stopping.max_new_tokens)
        for label, (method, budget) in methods.items()
    ]
    if chunk_tokens is None:
        starts = dict.fromkeys(methods, prefill(model, head, forks))
    else:
        starts = {fork.label: chunked_prefill(model, head, fork, chunk_tokens) for fork in forks}
    compressible = compressible_layers(model)
    results: dict[str, Generation] = {}
    for fork in forks:
        healthy = fork.failure is None
        results[fork.label] = Generation(
            tokens=[],
            new_tokens=0,
            entries=fork.prompt_counts(compressible) if healthy else None,
            cache_bytes=fork.cache_bytes() if healthy else None,
            cache_bytes_end=None,
            exact_bytes=starts[fork.label].exact_bytes,
            compressed=fork.compressed or fork.method.quantize is not None,
            prefill_s=starts[fork.label].prefill_s,
            compress_s=fork.compress_s,
            decode_s=0.0,
            failure=None,
        )
    _decode(model, starts, forks, tail, stopping, results, begun)
    for fork in forks:
        result = results[fork.label]
        if fork.failure is None:
            try:
                fork.audit(len(head), compressible)
                result.cache_bytes_end = fork.cache_bytes()
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)
        result.failure = fork.failure
        result.new_tokens = len(result.tokens)
        if result.tokens and result.tokens[-1] in stopping.end_ids:
            result.tokens.pop()
    return results


def _decode(
    model: PreTrainedModel,
    starts: Mapping[str, Prefill],
    forks: Sequence[Fork],
    tail: list[int],
    stopping: Stopping,
    results: dict[str, Generation],
    begun: float,
) -> None:
    """Feed the question's tokens (if any), then decode greedily until every fork has ended.

    Args:
        begun: when the example began, on the clock of time.perf_counter.
    """
    device = model.device
    active = [fork for fork in forks if fork.failure is None]
    position = starts[active[0].label].n if active else 0
    pending = dict.fromkeys(starts, tail)
    if not tail:
        for fork in active:
            (first,), (finite,) = choose(starts[fork.label].logits[None])
            if not finite:
                fork.fail(NonFiniteLogits(1))
                continue
            results[fork.label].tokens.append(first)
            pending[fork.label] = [first]
        active = _running(active, results, stopping)
    while active:
        elapsed = time.perf_counter() - begun
        if stopping.timeout_s is not None and elapsed > stopping.timeout_s:
            for fork in active:
                fork.fail(TimeoutError(f"the example took more than {stopping.timeout_s:g} s"))
            return
        ids = torch.tensor([pending[fork.label] for fork in active], device=device)
        count = ids.shape[1]
        synchronize(device)
        start = time.perf_counter()
        positions = torch.arange(position, position + count, device=device)
        logits = forward(model, ids, positions, ForkBatch(active, positions))
        chosen, finite_rows = choose(logits)
        seconds = (time.perf_counter() - start) / len(active)
        position += count
        for fork, token, finite in zip(active, chosen, finite_rows, strict=True):
            fork.appended += count
            result = results[fork.label]
            result.decode_s += seconds
            if fork.failure is None and not finite:
                fork.fail(NonFiniteLogits(len(result.tokens) + 1))
            if fork.failure is None:
                result.tokens.append(token)
                pending[fork.label] = [token]
        active = _running(active, results, stopping)


def _running(
    forks: Sequence[Fork], results: Mapping[str, Generation], stopping: Stopping
) -> list[Fork]:
    """The forks that have a token to come."""
    return [
        fork
        for fork in forks
        if fork.failure is None and not stopping.reached(results[fork.label].tokens)
    ]
