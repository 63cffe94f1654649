"""The cost of a method's cache of one prompt: bytes, entries and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class ExactBytes:
    """The bytes of the exact cache of one prompt, by the number of tokens.

    Attributes:
        layers: for each layer that holds keys the bytes of a token, of all KV heads, and the length of
            the layer's sliding window in tokens, or None.
        states: the bytes of the layers that hold a state in place of keys, the same after any number of
            tokens.
    """

    layers: list[tuple[int, int | None]] = field(default_factory=list)
    states: int = 0

    def at(self, tokens: int) -> int:
        """The bytes after `tokens` tokens have been read."""
        held = sum(of_token * min(tokens, window or tokens) for of_token, window in self.layers)
        return held + self.states


MAY_LACK = ("prefill_s", "decode_s", "new_tokens", "batch", "budget_preset")
"""Fields of `Cost` that a record does not take over where they are None."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of a method's cache of one prompt. Every record has these fields.

    Attributes:
        prompt_tokens: the number of tokens that were compressed.
        capacity: the entries per layer and KV head that the budget allows the method.
        entries: the entries per layer and KV head after compression, under the keys ``mean`` and
            ``max``; None where the method failed.
        cache_bytes: the bytes of the cache after compression; None where the method failed.
        exact_bytes: the bytes of the exact cache at the same point.
        cache_bytes_end: the bytes of the cache after the last token; None before `Row.audit`, like the
            next three.
        cache_bytes_peak, cache_bytes_mean: the largest number of bytes that the cache had after the
            prompt or after a step of the generation, and the mean over these points.
        exact_bytes_mean: the mean of the exact cache's bytes over the same points.
        compressed: False where the prompt is held as it is, because it is within its capacity or the
            method keeps all entries in the model's dtype. True once entries have been evicted while
            decoding.
        compress_s: the seconds of compression.
        prefill_s: the seconds of the prompt's own exact prefill. Like `compress_s`, it is the same for
            all questions about one compressed prompt.
        decode_s: the seconds of the decode steps in which the row took part, each divided by the number
            of rows. (Methods and prompts share the steps; the throughput probe measures a method alone.)
        new_tokens: the number of new tokens, the ending token included.
        batch: the number of prompts that were decoded together.
        budget_preset: the name of the preset that exceeds the budget, or None.
        extras: further fields (`Method.extras`).
    """

    prompt_tokens: int
    capacity: int
    entries: dict[str, float] | None = None
    cache_bytes: int | None = None
    cache_bytes_end: int | None = None
    cache_bytes_peak: int | None = None
    cache_bytes_mean: float | None = None
    exact_bytes_mean: float | None = None
    exact_bytes: int
    compressed: bool = False
    compress_s: float = 0.0
    prefill_s: float | None = None
    decode_s: float | None = None
    new_tokens: int | None = None
    batch: int | None = None
    budget_preset: str | None = None
    extras: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """`cache_bytes` over `exact_bytes`."""
        return None if self.cache_bytes is None else self.cache_bytes / self.exact_bytes

    def record(self, *, long_answer: bool = False) -> dict[str, Any]:
        """The fields of a record: those of this class except `prompt_tokens`, the `extras`, and
        ``ratio``.

        Args:
            long_answer: whether the ratio is that of the means over the generation instead of that
                after compression.
        """
        costs = {field.name: getattr(self, field.name) for field in fields(Cost)}
        del costs["prompt_tokens"], costs["extras"]
        costs = {name: x for name, x in costs.items() if x is not None or name not in MAY_LACK}
        record = {**self.extras, **costs, "ratio": self.ratio}
        if long_answer and self.cache_bytes_mean and self.exact_bytes_mean:
            record["ratio"] = self.cache_bytes_mean / self.exact_bytes_mean
        return record
