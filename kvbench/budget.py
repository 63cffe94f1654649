"""How much of a prompt's cache a method may keep. Imports no torch, so that a budget that cannot be is
refused at once; methods know `Budget` and `KVError` as names of `kvbench.kv`.

Vocabulary: see `kvbench.kv`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbench.errors import UserError
from kvbench.errors.options import Share, Whole, check_options


class KVError(UserError, ValueError):
    """A user-facing error: one line that names the thing, its value and what is allowed."""


@dataclass(frozen=True)
class Budget:
    """How much of a prompt's cache a method may keep: one of `rate`, `total_rate` and `size`.

    Args:
        rate: fraction of the middle that is kept, in (0, 1]; sink and window come on top.
        sink: leading tokens that are always kept.
        window: trailing tokens that are always kept.
        size: entries per layer and KV head in all, whatever the prompt's length; in place of the rate.
        total_rate: entries in all, sink and window included, as a fraction of the whole prompt, in
            (0, 1]; in place of the rate.
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
        given = []
        for name in ("total_rate", "rate", "size"):
            value = getattr(self, name)
            if value != getattr(Budget, name):  # the default rate stands for none
                given.append(f"budget.{name} is {value}")
        if len(given) > 1:
            raise KVError(f"{' and '.join(given)}; allowed: one of rate, total_rate and size")

    @property
    def share(self) -> float | None:
        """The fraction that the budget names, of the middle or of the whole prompt; None with `size`."""
        if self.size is not None:
            return None
        return self.rate if self.total_rate is None else self.total_rate

    def with_share(self, share: float | None) -> Budget:
        """The same budget at another fraction, if one is given: of the whole prompt where it names one,
        else of the middle.

        Raises:
            KVError: the fraction is not in (0, 1], or the budget is a `size`.
        """
        if share is None:
            return self
        if self.size is not None:
            raise KVError(f"budget.size is {self.size}, so there is no rate to vary; allowed: null")
        at_rate = self.total_rate is None
        return replace(self, rate=share) if at_rate else replace(self, total_rate=share)

    def middle(self, n: int) -> int:
        """Tokens of an n-token prompt that are neither sink nor window (0 for short prompts)."""
        return max(0, n - self.sink - self.window)

    def middle_kept(self, n: int) -> int:
        """Entries of the middle a method may keep: round(rate * middle), half to even; with `size` or
        `total_rate`, what sink and window leave of it.

        Raises:
            KVError: `total_rate` of the prompt is less than sink and window.
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
        """Fraction of an n-token prompt's middle that is kept: `rate`, or what `size` or `total_rate`
        comes to."""
        if self.size is None and self.total_rate is None:
            return self.rate
        return self.middle_kept(n) / max(1, self.middle(n))

    def capacity(self, n: int) -> int:
        """Entries per layer and KV head: sink, window and `middle_kept`, at most n."""
        return min(n, self.sink + self.window + self.middle_kept(n))

    def limit(self, n: int) -> int | None:
        """Entries per layer and KV head at any time of a generation from an n-token prompt, for a
        method that evicts; None where the budget keeps all (a share of 1).

        The `capacity`, or more than the prompt where that does not fill it: then the cache grows up to
        the limit, and from there one entry leaves for every one that comes.
        """
        if self.size is not None:
            return self.size
        return None if self.share == 1.0 else self.sink + self.window + self.middle_kept(n)
