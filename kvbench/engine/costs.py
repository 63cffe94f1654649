"""What a method's cache of one prompt costs: bytes, entries, seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from kvbench.kernels.elapsed import Elapsed


@dataclass
class ExactBytes:
    """Bytes of the exact cache of one prompt, whatever its length.

    Attributes:
        layers: of each layer that holds keys, the bytes of a token and the layer's sliding window in
            tokens (None: all tokens are held).
        states: bytes of the layers that hold a state in place of keys, the same after any number of
            tokens.
    """

    layers: list[tuple[int, int | None]] = field(default_factory=list)
    states: int = 0

    def at(self, tokens: int) -> int:
        """Bytes after `tokens` tokens have been read."""
        keys_and_values = sum(
            token_bytes * min(tokens, window or tokens) for token_bytes, window in self.layers
        )
        return keys_and_values + self.states


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a method's cache of one prompt costs. Every record has these fields.

    Attributes:
        prompt_tokens: the number of tokens that were compressed.
        capacity: entries per layer and KV head that the budget allows the method.
        entries: held per layer and KV head after compression, mean and maximum; None, like the bytes,
            where a failure left none.
        cache_bytes, exact_bytes: after compression, and of the exact cache at the same point.
        cache_bytes_end: after the last token; None before, like the next three.
        cache_bytes_peak, cache_bytes_mean: the most, and the mean, of what is held at the end of the
            prompt and after each step of the generation. exact_bytes_mean: of the exact cache.
        compressed: False where the prompt is held as it is: it is within its capacity, or the method
            keeps all entries in the model's dtype. True once entries have left while decoding.
        compress_s: seconds of compression.
        budget_preset: the preset that holds more than the budget, if any.
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
        """Bytes held over the bytes of the exact cache, after compression."""
        return None if self.cache_bytes is None else self.cache_bytes / self.exact_bytes

    def record(self, *, long_answer: bool = False) -> dict[str, Any]:
        """All fields of a record except `prompt_tokens`; `budget_preset` only where there is one.

        Args:
            long_answer: the ratio is that of the means over the generation.
        """
        own = {field.name: getattr(self, field.name) for field in fields(Cost)}
        del own["prompt_tokens"], own["extras"]
        if self.budget_preset is None:
            del own["budget_preset"]
        record = {**self.extras, **own, "ratio": self.ratio}
        if long_answer and self.cache_bytes_mean and self.exact_bytes_mean:
            record["ratio"] = self.cache_bytes_mean / self.exact_bytes_mean
        return record


@dataclass
class Ledger:
    """What one fork has cost so far.

    Attributes:
        exact: bytes of the exact cache of the same prompt.
        exact_at: bytes of the exact cache at the end of the prompt and after each step since.
        appended: tokens fed since the prompt.
        compress_s: seconds of compression that were read from clocks.
        clocks: clocks of compression that are still to be read (`read_clocks`).
        after_prompt: the cost at the end of the prefill; None before.
        bytes_end: bytes held at the last audit; None before.
    """

    exact: ExactBytes = field(default_factory=ExactBytes)
    exact_at: list[int] = field(default_factory=list)
    appended: int = 0
    compress_s: float = 0.0
    clocks: list[Elapsed] = field(default_factory=list)
    after_prompt: Cost | None = None
    bytes_end: int | None = None

    @property
    def prompt(self) -> Cost:
        """The cost at the end of the prefill, which must be over."""
        assert self.after_prompt is not None, "the prompt has not been read"
        return self.after_prompt

    @property
    def tokens(self) -> int:
        """Tokens of the prompt and those fed since."""
        return self.prompt.prompt_tokens + self.appended

    @property
    def exact_bytes_mean(self) -> float:
        """Mean bytes of the exact cache over the end of the prompt and the steps since."""
        return sum(self.exact_at) / len(self.exact_at)

    def begin(self, after_prompt: Cost, exact: ExactBytes) -> None:
        """The prompt has been read and compressed."""
        self.after_prompt = after_prompt
        self.exact = exact
        self.exact_at = [exact.at(after_prompt.prompt_tokens)]

    def count_step(self, tokens: int) -> None:
        """A step fed `tokens` tokens."""
        self.appended += tokens
        self.exact_at.append(self.exact.at(self.tokens))

    def read_clocks(self) -> None:
        """Add up the seconds of compression so far; waits for a GPU that is not done with it."""
        self.compress_s += sum(clock.seconds for clock in self.clocks)
        self.clocks = []

    def clone(self) -> Ledger:
        """A copy that goes on separately from here."""
        return replace(self, exact_at=list(self.exact_at), clocks=list(self.clocks))
