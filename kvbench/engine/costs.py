"""The cost of a method's cache of one prompt: bytes, entries and seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from kvbench.kernels.elapsed import Elapsed


class LayerBytes(NamedTuple):
    """The memory of one layer of the exact cache.

    Attributes:
        token_bytes: the bytes of a token's keys and values, of all KV heads.
        window: the length of the layer's sliding window in tokens; None where all tokens are held.
    """

    token_bytes: int
    window: int | None


@dataclass
class ExactBytes:
    """The bytes of the exact cache of one prompt, as a function of the number of tokens.

    Attributes:
        layers: the layers that hold keys.
        states: the bytes of the layers that hold a state in place of keys, which are the same after any
            number of tokens.
    """

    layers: list[LayerBytes] = field(default_factory=list)
    states: int = 0

    def at(self, tokens: int) -> int:
        """The bytes after `tokens` tokens have been read."""
        keys_and_values = sum(
            layer.token_bytes * min(tokens, layer.window or tokens) for layer in self.layers
        )
        return keys_and_values + self.states


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
        cache_bytes_end: the bytes of the cache after the last token; None before `Fork.audit`, like the
            next three.
        cache_bytes_peak, cache_bytes_mean: the largest number of bytes that the cache had after the
            prompt or after a step of the generation, and the mean over these points.
        exact_bytes_mean: the mean of the exact cache's bytes over the same points.
        compressed: False where the prompt is held as it is, because it is within its capacity or the
            method keeps all entries in the model's dtype. True once entries have been evicted while
            decoding.
        compress_s: the seconds of compression.
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
    budget_preset: str | None = None
    extras: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """`cache_bytes` over `exact_bytes`."""
        return None if self.cache_bytes is None else self.cache_bytes / self.exact_bytes

    def record(self, *, long_answer: bool = False) -> dict[str, Any]:
        """The fields of a record: those of this class except `prompt_tokens`, the `extras`, and
        ``ratio``. `budget_preset` is among them only where there is one.

        Args:
            long_answer: whether the ratio is that of the means over the generation instead of that
                after compression.
        """
        costs = {field.name: getattr(self, field.name) for field in fields(Cost)}
        del costs["prompt_tokens"], costs["extras"]
        if self.budget_preset is None:
            del costs["budget_preset"]
        record = {**self.extras, **costs, "ratio": self.ratio}
        if long_answer and self.cache_bytes_mean and self.exact_bytes_mean:
            record["ratio"] = self.cache_bytes_mean / self.exact_bytes_mean
        return record


@dataclass
class Ledger:
    """The cost of one fork so far.

    Attributes:
        exact: the bytes of the exact cache of the same prompt.
        exact_over_time: the bytes of the exact cache after the prompt and after each step since.
        appended: the number of tokens fed since the prompt.
        compress_s: the seconds of compression, by the clocks that have been read.
        clocks: clocks of compression that are still to be read (`read_clocks`).
        after_prompt: the cost at the end of the prefill; None before.
        bytes_end: the bytes that were held at the last audit; None before.
    """

    exact: ExactBytes = field(default_factory=ExactBytes)
    exact_over_time: list[int] = field(default_factory=list)
    appended: int = 0
    compress_s: float = 0.0
    clocks: list[Elapsed] = field(default_factory=list)
    after_prompt: Cost | None = None
    bytes_end: int | None = None

    @property
    def prompt(self) -> Cost:
        """The cost at the end of the prefill. Called only after `begin`."""
        assert self.after_prompt is not None, "the prompt has not been read"
        return self.after_prompt

    @property
    def tokens(self) -> int:
        """The number of tokens of the prompt and of those fed since."""
        return self.prompt.prompt_tokens + self.appended

    @property
    def exact_bytes_mean(self) -> float:
        """The mean of `exact_over_time`."""
        return sum(self.exact_over_time) / len(self.exact_over_time)

    def begin(self, after_prompt: Cost, exact: ExactBytes) -> None:
        """Note the cost at the end of the prefill, when the prompt has been read and compressed."""
        self.after_prompt = after_prompt
        self.exact = exact
        self.exact_over_time = [exact.at(after_prompt.prompt_tokens)]

    def count_step(self, tokens: int) -> None:
        """Note a step that fed `tokens` tokens."""
        self.appended += tokens
        self.exact_over_time.append(self.exact.at(self.tokens))

    def read_clocks(self) -> None:
        """Add the seconds of `clocks` to `compress_s`. Waits for a GPU that is still compressing."""
        self.compress_s += sum(clock.seconds for clock in self.clocks)
        self.clocks = []

    def clone(self) -> Ledger:
        """A copy to which later steps of this ledger are not added."""
        return replace(self, exact_over_time=list(self.exact_over_time), clocks=list(self.clocks))
