"""The budget: how much of a prompt's cache a method may keep.

This module does not import torch, so that an impossible budget is refused at once. Methods import
`Budget` and `KVError` from `kvbench.kv`, whose docstring has the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench.errors import UserError
from kvbench.errors.options import Share, Whole, check_options


class KVError(UserError, ValueError):
    """A user-facing error: one line that names the thing, its value and what is allowed."""


LEAST = 2
"""The least number of entries to which a prompt is compressed: SpAtten's layers have half on average."""


@dataclass(frozen=True)
class Budget:
    """How much of a prompt's cache a method may keep, by one of `rate`, `total_rate` and `size`.

    Args:
        rate: the fraction of the middle that is kept, in (0, 1]; sink and window come on top.
        sink: how many of the first tokens are always kept.
        window: how many of the last tokens are always kept.
        size: the entries per layer and KV head for prompts of any length, sink and window included.
        total_rate: the entries per layer and KV head as a fraction of the prompt's tokens, in (0, 1],
            sink and window included.
    """

    rate: Share = 0.25
    sink: Whole = 32
    window: Whole = 32
    size: Whole | None = None
    total_rate: Share | None = None

    def __post_init__(self) -> None:
        check_options(self, "budget.", KVError)
        if self.size is not None and self.size <= self.sink + self.window:
            raise KVError(
                f"budget.size is {self.size}; allowed: more than budget.sink + budget.window, "
                f"{self.sink + self.window}"
            )
        # A rate equal to the default counts as not set, since `rate` has no None.
        changed = [
            f"budget.{name} is {getattr(self, name)}"
            for name in ("total_rate", "rate", "size")
            if getattr(self, name) != getattr(Budget, name)
        ]
        if len(changed) > 1:
            raise KVError(f"{' and '.join(changed)}; allowed: one of rate, total_rate and size")

    @property
    def share(self) -> float | None:
        """`total_rate` where it is set, else `rate`; None for a budget by `size`."""
        if self.size is not None:
            return None
        return self.rate if self.total_rate is None else self.total_rate

    def with_share(self, share: float | None) -> Budget:
        """Return this budget with `share` in place of its `total_rate` if that is set, else in place of
        its `rate`; unchanged where `share` is None.

        Raises:
            KVError: `share` is not in (0, 1], or the budget has a `size`.
        """
        if share is None:
            return self
        if self.size is not None:
            raise KVError(f"budget.size is {self.size}, so there is no rate to vary; allowed: null")
        if self.total_rate is None:
            return replace(self, rate=share)
        return replace(self, total_rate=share)

    def middle(self, n: int) -> int:
        """The number of tokens of an n-token prompt that are neither sink nor window, at least 0."""
        return max(0, n - self.sink - self.window)

    def middle_kept(self, n: int) -> int:
        """How many entries of the middle a method may keep.

        This is round(rate * middle), half to even. With `size` or `total_rate` it is the number of
        entries that they grant, less sink and window.

        Raises:
            KVError: `total_rate` grants this prompt fewer entries than sink and window.
        """
        always = self.sink + self.window
        if self.size is not None:
            return min(self.middle(n), self.size - always)
        if self.total_rate is None:
            return round(self.rate * self.middle(n))
        total = round(self.total_rate * n)
        if total < always:
            raise KVError(
                f"budget.total_rate {self.total_rate} of a prompt of {n} tokens is {total} entries; "
                f"allowed: at least budget.sink + budget.window, {always}"
            )
        return total - always

    def rate_of(self, n: int) -> float:
        """The fraction of an n-token prompt's middle that is kept: `rate`, or with `size` or
        `total_rate` `middle_kept` / `middle`."""
        if self.size is None and self.total_rate is None:
            return self.rate
        return self.middle_kept(n) / max(1, self.middle(n))

    def capacity(self, n: int) -> int:
        """The capacity for an n-token prompt: the entries that each KV head of a layer may hold after
        prefill, sink + window + `middle_kept`, at most n."""
        return min(n, self.sink + self.window + self.middle_kept(n))

    def check_compresses(self, n: int) -> None:
        """Refuse a budget that leaves an n-token prompt fewer than `LEAST` entries."""
        capacity = self.capacity(n)
        if capacity < min(n, LEAST):
            name = next(
                name for name in ("size", "total_rate", "rate") if getattr(self, name) is not None
            )
            raise KVError(
                f"budget.{name} {getattr(self, name)} of a prompt of {n} tokens is {capacity} entries, "
                f"budget.sink {self.sink} and budget.window {self.window} included; allowed: at least "
                f"{LEAST}"
            )

    def limit(self, n: int) -> int | None:
        """The entries per layer and KV head that a method which evicts may hold while it generates after
        an n-token prompt; None where the budget grants the whole cache (a share of 1).

        Unlike `capacity`, the limit may exceed n. The cache of a shorter prompt grows up to the limit;
        from then on one entry leaves for every new one.
        """
        if self.size is not None:
            return self.size
        return None if self.share == 1.0 else self.sink + self.window + self.middle_kept(n)
