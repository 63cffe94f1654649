"""Tensors in, tensors out: what a layer holds after prefill, and what it may hold instead.

Knows no library but torch (and the tensor functions of `kvbench.kernels`).

Vocabulary, used everywhere in kvbench: *n* prompt tokens; *sink* the first ``sink`` tokens and
*window* the last ``window`` tokens, always kept by the methods that have them; *middle* the others;
*rate* the fraction of the middle that is kept; *capacity* the entries allowed per layer and KV head;
*group* the query heads that share one KV head; *entry* one key-value pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.errors import UserError
from kvbench.errors.options import Share, Whole, check_options
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.elapsed import Elapsed

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]

NORMALISERS = "normalisers of the attention"
"""In `LayerKV.shared`: of each query the log of its sum of exponentials, if the prefill tells it."""

ATTENTION_MASS = "attention mass"
"""In `LayerKV.shared`, with the number of queries: see `LayerKV.attention_of_last`."""

COMMON = (NORMALISERS, ATTENTION_MASS)
"""How the names begin of what `LayerKV.once` remembers for all methods together."""


class KVError(UserError, ValueError):
    """A user-facing error: one line that names the thing, its value and what is allowed."""


class BudgetExceeded(RuntimeError):
    """A method held more entries than its budget allows (design: "Budgets and the audit").

    Args:
        layer: 0-based, or -1 for the sum over all layers.
    """

    def __init__(self, method: str, layer: int, expected: int, found: int) -> None:
        where = f"at layer {layer}" if layer >= 0 else "in all layers"
        super().__init__(
            f"method {method!r} holds {found} entries {where}; its budget allows {expected}"
        )
        self.method, self.layer, self.expected, self.found = method, layer, expected, found


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
        if self.total_rate is None:
            return
        other = "size" if self.size is not None else "rate"
        if getattr(self, other) != getattr(Budget, other):  # the default rate stands for none
            raise KVError(
                f"budget.total_rate is {self.total_rate} and budget.{other} is "
                f"{getattr(self, other)}; allowed: one of rate, total_rate and size"
            )

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


@dataclass(frozen=True)
class Shared:
    """A tensor that `LayerKV.once` remembers, the clock of its making, and the keys, values and queries
    of the layer that it was computed for."""

    tensor: Tensor
    clock: Elapsed
    of: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class LayerKV:
    """What one attention layer holds after an exact prefill.

    Attributes:
        keys, values: [batch, kv_heads, n, head_dim], keys after position encoding.
        queries: [batch, heads, m, head_dim], the last m prompt queries that are not withheld, after
            position encoding; m = n - withheld unless the prefill was cut, None where the layer's
            queries are not available.
        layer_index: 0-based. num_layers: how many layers of the model are compressed.
        scaling: the factor on q.k before the softmax.
        softcap: s of s * tanh(logit / s), for the models that bound their logits (Gemma 2), else None.
        withheld: how many of the prompt's last tokens do not show their queries (their keys and
            values are there): those that a method is then judged by. `queries` end before them.
        shared: what `once` remembers: tensors used by several methods. used: the names of those that
            were asked for in one method's turn. owner: that method's class.
        output: gives a copy of what mixes the heads' outputs, [hidden, heads * head_dim]; or None.
        rotary: the model's table: positions [p] -> cos, sin [p, width], halves repeated; or None.
        carried: what methods noted at earlier layers of the same prompt; one for all layers.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None
    layer_index: int
    num_layers: int
    scaling: float
    softcap: float | None = None
    withheld: int = 0
    output: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    rotary: Rotary | None = field(default=None, compare=False, repr=False)
    shared: dict[str, Shared] = field(default_factory=dict, compare=False, repr=False)
    carried: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)
    used: set[str] = field(default_factory=set, compare=False, repr=False)
    owner: str = field(default="", compare=False, repr=False)

    @property
    def n(self) -> int:
        """Prompt tokens."""
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        if self.queries is None:
            raise KVError(f"layer {self.layer_index} has no queries; the method needs them")
        return self.queries.shape[1] // self.keys.shape[1]

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """``compute()``, remembered under ``name`` and the class of the method whose turn it is, so that
        variants of a method share the work; what is `COMMON` is remembered for all methods. Like the
        layer's own tensors it is read only."""
        of = (self.keys, self.values, self.queries)
        if not name.startswith(COMMON):
            name = f"{self.owner}: {name}"
        if name not in self.shared:
            clock = Elapsed(self.keys.device)
            self.shared[name] = Shared(compute(), clock.stop(), of)
        elif any(mine is not its for mine, its in zip(of, self.shared[name].of, strict=True)):
            return compute()  # a layer that a method made of this one, with tensors of its own
        self.used.add(name)
        return self.shared[name].tensor

    def charge_shared_work(self) -> Callable[[], list[Elapsed]]:
        """Begin one method's turn. The function returned gives, after it, the clocks of the shared work
        that the method used and an earlier one had paid for."""
        before = set(self.shared)
        self.used.clear()
        return lambda: [self.shared[name].clock for name in self.used & before]

    def attention_mass(self) -> Tensor:
        """Causal softmax attention every key received from all prompt queries, [batch, heads, n].

        Column sums of the prompt's attention matrix, computed in query blocks: O(n) memory. float32.
        Withheld queries are left out.

        Raises:
            KVError: when the layer does not hold all n prompt queries.
        """
        return self.attention_of_last(self.n - self.withheld)

    def attention_of_last(self, count: int) -> Tensor:
        """The same of the last `count` queries that are not withheld, [batch, heads, n] float32.

        A key after the last of them received nothing.

        Raises:
            KVError: when the layer does not hold that many.
        """
        queries = self.queries
        have = 0 if queries is None else queries.shape[2]
        if queries is None or have < count:
            raise KVError(
                f"layer {self.layer_index} holds {have} prompt queries; the method needs the last "
                f"{count}"
            )
        known = self.shared.get(NORMALISERS) if have == self.n else None
        ours = known is not None and known.of[0] is self.keys and known.of[2] is queries
        return self.once(
            f"{ATTENTION_MASS} of {count} queries",
            lambda: pad(
                attention_mass(
                    queries[:, :, have - count :],
                    self.keys[:, :, : self.n - self.withheld],
                    scaling=self.scaling,
                    softcap=self.softcap,
                    normalisers=known.tensor[:, :, have - count :] if known and ours else None,
                ),
                (0, self.withheld),
            ),
        )


@dataclass(frozen=True)
class CompressedKV:
    """What the layer holds instead.

    Attention over it is ``softmax(q.k * scaling + log_weight) . v``, but for `denominators`.

    Attributes:
        keys, values: [batch, kv_heads, c, head_dim] (a method that repeats keys to query heads holds
            [batch, heads, c, head_dim]; its bytes are counted so).
        log_weights: [batch, kv_heads, c] float32, or None when all are zero. ``-inf`` marks padding:
            an entry that exists only because another head holds more; it is not counted.
        positions: [batch, kv_heads, c] int64, the prompt position of each entry, -1 where it has none.
        scores: [batch, kv_heads, c] float32 that the method wants back at every decoded token
            (`Method.evict`; H2O: accumulated attention), else None.
        keys_only: how many entries, the first ones, hold a key and no value: `values` is that much
            shorter than `keys`. They count in the softmax's normaliser, as if their value were 0
            (the denominator's own samples of a streaming estimator).
        lengths: [batch, kv_heads] int64 where heads hold different numbers of entries, at the front;
            what follows is padding (log-weight -inf) that is not held, and the budget is charged their
            mean. None: all hold c.
        denominators: [batch, kv_heads, c] float32, what each entry counts in the normaliser, which may
            be negative, or None when all count 1. See
            `kvbench.engine.attention.signed_mean`.
        value_range: two tensors [batch, kv_heads, head_dim], the least and the largest value of each
            channel of the prompt, to which outputs are clamped; with `denominators` only.
    """

    keys: Tensor
    values: Tensor
    log_weights: Tensor | None
    positions: Tensor
    scores: Tensor | None = None
    keys_only: int = 0
    lengths: Tensor | None = None
    denominators: Tensor | None = None
    value_range: tuple[Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and weights as they are; positions are bookkeeping."""
        parts = [self.keys, self.values, self.log_weights, self.denominators]
        parts += self.value_range or ()
        if self.lengths is not None:  # no padding, nor the log-weights that mark it
            entry = self.keys[0, 0, :1].nbytes + self.values[0, 0, :1].nbytes
            return int(self.lengths.sum()) * entry
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    @property
    def charged(self) -> int:
        """Entries per head that a budget is charged: the largest head's, or with `lengths` the mean of
        the heads, rounded up."""
        entries = self.entries
        if self.lengths is None:
            return int(entries.max())
        return -int(-entries.sum(-1).max() // entries.shape[1])

    @property
    def entries(self) -> Tensor:
        """Entries held per head, padding left out: [batch, kv_heads] int64."""
        if self.lengths is not None:
            return self.lengths
        if self.log_weights is None:
            shape = self.keys.shape[:2]
            return torch.full(shape, self.keys.shape[2], dtype=torch.int64, device=self.keys.device)
        return weighted_entries(self.log_weights)


def weighted_entries(log_weights: Tensor) -> Tensor:
    """Entries held per head, of log_weights [..., heads, c]: [..., heads] int64.

    A head's padding stands for what another head holds more; room that no head uses is held like any
    entry.
    """
    used = (log_weights != float("-inf")).sum(-1)
    return used + (log_weights.shape[-1] - used.max())


def gather_entries(
    layer: LayerKV, positions: Tensor, log_weights: Tensor | None = None
) -> CompressedKV:
    """The entries of ``layer`` at ``positions`` [batch, kv_heads, c], in the order given."""
    keys, values = (rows_at(x, positions) for x in (layer.keys, layer.values))
    return CompressedKV(keys, values, log_weights, positions)


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Rows of x [batch, kv_heads, n, dim] at positions [batch, kv_heads, c]."""
    batch, heads, n, dim = x.shape
    if not x.is_contiguous():
        return x.gather(2, positions.unsqueeze(-1).expand(-1, -1, -1, dim))
    # Whole rows: some times faster than gathering number by number.
    first = torch.arange(0, batch * heads * n, n, device=x.device).view(batch, heads, 1)
    rows = x.view(-1, dim).index_select(0, (positions + first).flatten())
    return rows.view(batch, heads, -1, dim)


WHOLE = Budget(rate=1.0, sink=0, window=0)
"""Grants a prompt of any length its whole cache."""


def keep_all(layer: LayerKV) -> CompressedKV:
    """Everything, without a copy: what `exact` holds and what a prompt within its capacity keeps."""
    batch, heads, n, _ = layer.keys.shape
    positions = torch.arange(n, device=layer.keys.device).expand(batch, heads, n)
    return CompressedKV(layer.keys, layer.values, None, positions)
