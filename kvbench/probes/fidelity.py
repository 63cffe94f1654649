"""How far a compressed cache moves the model's next-token distribution, without any answers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.fork import Fork
from kvbench.engine.loading import Model
from kvbench.engine.scoring import (
    CompressedPrompt,
    LogitsHook,
    feed_continuations,
    masked_pass_cache,
    read,
    relabelled_copy,
    run_masked_pass,
)
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.methods.exact import Exact

REFERENCE = "(reference)"
"""The label of the exact fork that all are compared with."""

ROUNDING = 1e-6
"""A KL divergence is not negative; in float32 it comes out as little as this below zero."""


class InfiniteDivergence(ArithmeticError):
    """The method gives probability 0 to a token that the exact model does not rule out."""

    def __init__(self, token: int) -> None:
        super().__init__(f"infinite KL divergence at token {token} of the continuation")


@dataclass
class Fidelity:
    """One method against the exact cache, token by token of one continuation.

    Attributes:
        kl: sum_v p_v (log p_v - log q_v) in nats; p is the exact, q the method's next-token
            distribution.
        agree: 1 where both have the same most likely token, else 0.
        nll_exact, nll: -log p and -log q of the continuation's token, in nats.
        difference: nll - nll_exact.
        top: the method's most likely token. top_exact: the exact one.
        failure: what stopped the method; the lists are empty then.
        entries, cache_bytes, exact_bytes, compressed, compress_s, prefill_s: as in a record.
        imagined: a mask of a whole pass: entries and bytes are those of a cache that nobody holds.
    """

    kl: list[float] = field(default_factory=list)
    agree: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_exact: list[float] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    top_exact: list[int] = field(default_factory=list)
    failure: Exception | None = None
    entries: Mapping[str, float] | None = None
    cache_bytes: int | None = None
    exact_bytes: int | None = None
    compressed: bool = False
    imagined: bool = False
    compress_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def difference(self) -> list[float]:
        """nll - nll_exact."""
        return [mine - exact for mine, exact in zip(self.nll, self.nll_exact, strict=True)]

    def extend(self, other: Mapping[str, Sequence[float]]) -> None:
        """Further tokens."""
        for name, values in other.items():
            getattr(self, name).extend(values)

    def check(self) -> None:
        """A divergence that is no number is a failure, and is averaged with nothing."""
        wrong = [i for i, value in enumerate(self.kl) if not math.isfinite(value)]
        if wrong and self.failure is None:
            self.failure = InfiniteDivergence(wrong[0] + 1)


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of log-probabilities [tokens, vocab] float32: [tokens] float64.

    Where p is 0 the term is 0; what rounding leaves below zero is zero.
    """
    terms = exact.exp().double() * (exact.double() - other.double())
    kl = torch.where(exact == -torch.inf, 0.0, terms).sum(-1)
    return torch.where((kl < 0) & (kl > -ROUNDING), 0.0, kl)


class _CompareWithFirst:
    """A `LogitsHook` that sets every row against the first."""

    def __init__(self, results: Sequence[Fidelity], continuation: Sequence[int]) -> None:
        self.results = results
        self.continuation = torch.tensor(list(continuation))

    def __call__(self, begin: int, logits: Tensor) -> None:
        target = self.continuation[begin : begin + logits.shape[1], None].to(logits.device)
        exact = logits[0].float().log_softmax(-1)
        top, nll = exact.argmax(-1), -exact.gather(-1, target)[:, 0]
        for result, row in zip(self.results, logits, strict=True):
            other = row.float().log_softmax(-1)
            mine = other.argmax(-1)
            result.extend(
                {
                    "kl": divergence(exact, other).tolist(),
                    "agree": (mine == top).long().tolist(),
                    "nll": (-other.gather(-1, target)[:, 0]).tolist(),
                    "nll_exact": nll.tolist(),
                    "top": mine.tolist(),
                    "top_exact": top.tolist(),
                }
            )


def teacher_forced(
    model: Model,
    prompt_ids: Sequence[int],
    continuation: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    seed: int = 0,
    example_id: str = "x",
) -> dict[str, Fidelity]:
    """Every method against the exact cache on one continuation, from one prefill.

    All but the last prompt token are compressed; that one and the continuation are fed to every fork,
    the exact one among them, in one batch. Pure: nothing is drawn but by the methods, nothing written.

    Args:
        continuation: at least one token; the last is predicted and never fed.
        methods: by label, with their budgets; "exact" need not be among them.

    Returns:
        label -> `Fidelity`, its lists as long as the continuation.
    """
    with kvbench_attention_on(model):
        everyone = with_reference(methods)
        room = len(continuation)
        reading = read(model, prompt_ids, everyone, seed=seed, example_id=example_id, room=room)
        return compare(model, reading, continuation)


def with_reference(
    methods: Mapping[str, tuple[Method, Budget]],
) -> dict[str, tuple[Method, Budget]]:
    """The methods to read a prompt with, an exact one before the others."""
    return {REFERENCE: (Exact(), Budget()), **methods}


@torch.inference_mode()
def compare(
    model: Model, reading: CompressedPrompt, continuation: Sequence[int]
) -> dict[str, Fidelity]:
    """Every method of a reading against its first fork, which is exact."""
    results = {fork.label: _after_compression(fork, reading) for fork in reading.forks}
    sound = [fork for fork in reading.forks if fork.failure is None]
    on_logits: LogitsHook = _CompareWithFirst([results[fork.label] for fork in sound], continuation)
    feed_continuations(model, reading, [(fork, continuation) for fork in sound], on_logits)
    for fork in sound:
        results[fork.label].failure = fork.failure
        results[fork.label].compressed = fork.cost().compressed
    for label, pair in reading.whole.items():
        entries, ratio = masked_pass_cache(model, pair, len(reading.prompt_ids) + len(continuation))
        results[label] = Fidelity(
            compressed=True,
            imagined=True,
            entries={"mean": entries, "max": entries},
            cache_bytes=round(ratio * reading.start.exact_bytes),
            exact_bytes=reading.start.exact_bytes,
            prefill_s=reading.start.prefill_s,
        )
        rows = [Fidelity(), results[label]]
        run_masked_pass(
            model,
            reading.prompt_ids,
            continuation,
            [None, pair],
            _CompareWithFirst(rows, continuation),
        )
    del results[REFERENCE]
    for result in results.values():
        result.check()
    return results


def _after_compression(fork: Fork, reading: CompressedPrompt) -> Fidelity:
    """What is known of a fork after compression."""
    if fork.failure is not None:
        return Fidelity(failure=fork.failure)
    cost = fork.cost()
    return Fidelity(
        entries=cost.entries,
        cache_bytes=cost.cache_bytes,
        exact_bytes=cost.exact_bytes,
        compressed=cost.compressed,
        compress_s=cost.compress_s,
        prefill_s=reading.start.prefill_s,
    )


@torch.inference_mode()
def noise_floor(
    model: Model, reading: CompressedPrompt, continuation: Sequence[int]
) -> list[float]:
    """The KL divergence of the exact fork from itself, fed a second time in a batch of another size:
    what kernels alone make of rounding. To be called before `compare`, which uses the forks up."""
    reference = reading.forks[0]
    both: list[list[Tensor]] = [[], []]
    for found, rows in zip(both, (1, 2), strict=True):
        twins = [(relabelled_copy(reference, REFERENCE), continuation) for _ in range(rows)]
        feed_continuations(model, reading, twins, _keep_first(found))
    floor = [
        divergence(*(logits.float().log_softmax(-1) for logits in pair))
        for pair in zip(*both, strict=False)
    ]
    return torch.cat(floor).tolist()


def _keep_first(found: list[Tensor]) -> LogitsHook:
    """A `LogitsHook` that keeps the first row."""
    return lambda begin, logits: found.append(logits[0])
