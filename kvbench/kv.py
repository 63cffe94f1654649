"""The data of compression: a layer's exact keys and values (`LayerKV`) and what replaces them
(`CompressedKV`).

This module imports no library but torch, and of kvbench only the budget and `kvbench.kernels`.

Vocabulary, used everywhere in kvbench: *n* is the number of prompt tokens; *sink* are the first
``sink`` tokens and *window* the last ``window`` tokens, which methods that have them always keep;
*middle* are the other tokens; *rate* is the fraction of the middle that is kept; *capacity* is the
number of entries allowed per layer and KV head; a *group* are the query heads that share one KV head;
an *entry* is a key and its value.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import CodeType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.budget import Budget, KVError
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.elapsed import Elapsed

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from positions [p] to their cosines and sines, each [p, width]."""

SharedKey = tuple[str, CodeType | None]
"""Under what a result is shared (`LayerKV.once`): its name, and the code that computes it. Two methods
that happen to use one name for two things have two results."""

NORMALISERS: SharedKey = ("normalisers of the attention", None)
"""The key in `LayerKV.shared` of the softmax normalisers: for every prompt query the logarithm of its
sum of exponentials, [batch, heads, n] float32. Only some prefill kernels return them."""

ATTENTION_MASS = "attention mass"
"""The first words of the keys in `LayerKV.shared` under which `LayerKV.attention_of_last` stores its
results, one key for each number of queries."""


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
        self.method = method
        self.layer = layer
        self.expected = expected
        self.found = found


class Shared(NamedTuple):
    """A result that several methods use (`LayerKV.once`), the time that it took, and the keys, values
    and queries from which it was computed."""

    tensor: Tensor
    clock: Elapsed
    computed_from: tuple[Tensor | None, ...]


@dataclass(frozen=True)
class LayerKV:
    """The keys, values and queries of one attention layer after an exact prefill.

    Attributes:
        keys, values: [batch, kv_heads, n, head_dim], keys after position encoding.
        queries: [batch, heads, m, head_dim], the last m prompt queries that are not withheld, after
            position encoding; m = n - withheld unless the prefill was cut, None where the layer's
            queries are not available.
        layer_index: the layer's number among the compressed layers, from 0.
        num_layers: how many layers of the model are compressed.
        scaling: the factor on q.k before the softmax.
        softcap: the bound s in models that replace a logit by s * tanh(logit / s) (Gemma 2); else
            None.
        sinks: [heads] float32, one more logit in the softmax of each query head, whose value is 0
            (the attention sinks of gpt-oss). The decode step has it, too, whatever a method keeps; so
            it is no entry. None in models without it.
        withheld: how many of the prompt's last queries a method is not shown, because the method will
            be judged on them. `queries` lacks them; `keys` and `values` contain these tokens.
        log_weights: [batch, kv_heads, n] float32, the log-weights that the entries have before
            `compress`, which adds its own to them, when a compressed cache is compressed again
            (`Method.schedule`); None where all are 0.
        output: a function that returns a copy of the output projection's weight,
            [hidden, heads * head_dim]; None where the weight cannot be read.
        rotary: the table by which the layer rotates its queries and keys; the two halves of its cosines
            are equal, and those of its sines. Its width is 0 where the layer rotates none; None where no
            such table describes the layer.
        shared: the results that `once` has computed for this layer, by name and code.
        charged: those that the current method has asked `once` for, each with the clock of a result
            that an earlier method computed (its seconds are charged to both), or None.
        carried: tensors that the method stored at earlier layers of the same prompt, by name; all
            layers share this dictionary.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None
    layer_index: int
    num_layers: int
    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    withheld: int = 0
    log_weights: Tensor | None = None
    output: Callable[[], Tensor] | None = field(default=None, compare=False, repr=False)
    rotary: Rotary | None = field(default=None, compare=False, repr=False)
    shared: dict[SharedKey, Shared] = field(default_factory=dict, compare=False, repr=False)
    charged: dict[SharedKey, Elapsed | None] = field(
        default_factory=dict, compare=False, repr=False
    )
    carried: dict[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @property
    def n(self) -> int:
        """The number of prompt tokens."""
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """The number of query heads per KV head."""
        if self.queries is None:
            raise KVError(f"layer {self.layer_index} has no queries; the method needs them")
        return self.queries.shape[1] // self.keys.shape[1]

    def once(self, name: str, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of ``compute()``, which is computed once and shared by all methods that ask
        for ``name`` with the same code (the lambda or function at one place of a file). The result must
        depend on the layer's tensors and ``name`` alone. No caller may write to it."""
        key = name, getattr(compute, "__code__", None)
        inputs = (self.keys, self.values, self.queries)
        if key not in self.shared:
            clock = Elapsed(self.keys.device)
            self.shared[key] = Shared(compute(), clock.stop(), inputs)
            self.charged[key] = None
        tensor, clock, computed_from = self.shared[key]
        if any(now is not then for now, then in zip(inputs, computed_from, strict=True)):
            # A method has replaced tensors of this layer by its own, so that the stored result is not
            # that of these tensors.
            return compute()
        self.charged.setdefault(key, clock)
        return tensor

    def attention_mass(self) -> Tensor:
        """The causal softmax attention that every key received from all prompt queries but the
        withheld ones, [batch, heads, n] float32.

        These are the column sums of the prompt's attention matrix. They are computed in blocks of
        queries, in O(n) memory.

        Raises:
            KVError: the layer does not hold all prompt queries.
        """
        return self.attention_of_last(self.n - self.withheld)

    def attention_of_last(self, count: int) -> Tensor:
        """The causal softmax attention that every key received from the last `count` queries before
        the withheld ones, [batch, heads, n] float32. Keys of withheld tokens received 0.

        Raises:
            KVError: the layer does not hold that many queries.
        """
        queries = self.queries
        available = 0 if queries is None else queries.shape[2]
        if queries is None or available < count:
            raise KVError(
                f"layer {self.layer_index} holds {available} prompt queries; the method needs the last "
                f"{count}"
            )
        first = available - count
        normalisers = self._normalisers()

        def compute() -> Tensor:
            mass = attention_mass(
                queries[:, :, first:],
                self.keys[:, :, : self.n - self.withheld],
                scaling=self.scaling,
                softcap=self.softcap,
                sinks=self.sinks,
                normalisers=None if normalisers is None else normalisers[:, :, first:],
            )
            return pad(mass, (0, self.withheld))

        return self.once(f"{ATTENTION_MASS} of {count} queries", compute)

    def _normalisers(self) -> Tensor | None:
        """The prefill's `NORMALISERS`; None where the prefill returned none or where this layer does
        not hold the prefill's keys and all of its queries."""
        stored = self.shared.get(NORMALISERS)
        if stored is None or self.queries is None or self.queries.shape[2] != self.n:
            return None
        keys, _, queries = stored.computed_from
        unchanged = keys is self.keys and queries is self.queries
        return stored.tensor if unchanged else None


@dataclass(frozen=True)
class CompressedKV:
    """The entries that a layer holds in place of its exact keys and values.

    Attention over its entries is ``softmax(q.k * scaling + log_weight) . v``, unless `denominators` is
    set.

    Attributes:
        keys, values: [batch, kv_heads, c, head_dim] (a method that repeats keys to query heads holds
            [batch, heads, c, head_dim]; its bytes are counted so).
        log_weights: [batch, kv_heads, c] float32, or None when all are zero. ``-inf`` marks padding:
            an entry that exists only because another head holds more entries; padding is not counted.
        positions: [batch, kv_heads, c] int64, the prompt position of each entry, -1 where it has none.
        scores: [batch, kv_heads, c] float32, the scores by which entries leave while decoding (H2O's
            accumulated attention; `Method.evict`); None for a method without scores.
        keys_only: how many of the first entries have a key and no value; `values` is shorter than
            `keys` by this number. Such an entry counts in the softmax's denominator alone, as if its
            value were 0 (a streaming estimator samples its denominator separately). `denominators`
            cannot say this: it would need a stored value of 0 and a factor for every entry, and the
            signed quotient in place of an ordinary softmax, which changes rounding. Neither can
            `keys_only` say what `denominators` says: a key stored once more would add to the
            denominator but take nothing away.
        lengths: [batch, kv_heads] int64, the number of entries of each head where heads differ. A
            head's entries come first. Padding of log-weight -inf follows them; it is not stored by the
            cache. The budget is charged the mean over the heads. None where every head has c entries.
        denominators: [batch, kv_heads, c] float32, the factor of each entry in the softmax's
            denominator, which may be negative; None where all are 1. See
            `kvbench.engine.attention.signed_mean`.
        value_range: the least and the largest value of each channel over the prompt, two tensors
            [batch, kv_heads, head_dim], between which outputs are clamped. Set only with
            `denominators`.
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
        """The bytes of keys, values and weights as stored. Positions are bookkeeping and not
        counted."""
        if self.lengths is not None:
            return self._nbytes_by_head(self.lengths)
        tensors = [self.keys, self.values, self.log_weights, self.denominators]
        if self.value_range is not None:
            tensors += self.value_range
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def _nbytes_by_head(self, lengths: Tensor) -> int:
        """The bytes of heads of different `lengths`. The padding is not stored, and neither are the
        log-weights of a head all of whose entries weigh 1."""
        entry_nbytes = self.keys[0, 0, :1].nbytes + self.values[0, 0, :1].nbytes
        nbytes = int(lengths.sum()) * entry_nbytes
        if self.log_weights is not None:
            weighted = (self.log_weights.isfinite() & (self.log_weights != 0)).any(-1)
            nbytes += int(lengths[weighted].sum()) * self.log_weights.element_size()
        return nbytes

    @property
    def charged(self) -> int:
        """The entries per head that are charged to the budget: the largest head's, or with `lengths`
        the mean over the heads, rounded up."""
        entries = self.entries
        if self.lengths is None:
            return int(entries.max())
        return -int(-entries.sum(-1).max() // entries.shape[1])

    @property
    def entries(self) -> Tensor:
        """The number of entries of each head without padding, [batch, kv_heads] int64."""
        if self.lengths is not None:
            return self.lengths
        if self.log_weights is None:
            shape = self.keys.shape[:2]
            return torch.full(shape, self.keys.shape[2], dtype=torch.int64, device=self.keys.device)
        return weighted_entries(self.log_weights)


def weighted_entries(log_weights: Tensor) -> Tensor:
    """Count the entries of each head by their log_weights [..., heads, c]; returns [..., heads] int64.

    A log-weight of -inf is padding where the head has fewer entries than the largest head; padding is
    not counted. Columns beyond the largest head's entries are memory that the cache holds, and are
    counted.
    """
    weighted = (log_weights != float("-inf")).sum(-1)
    beyond_largest_head = log_weights.shape[-1] - weighted.max()
    return weighted + beyond_largest_head


def gather_entries(
    layer: LayerKV, positions: Tensor, log_weights: Tensor | None = None
) -> CompressedKV:
    """Gather the entries of ``layer`` at ``positions`` [batch, kv_heads, c], in the order of
    ``positions``."""
    keys = rows_at(layer.keys, positions)
    values = rows_at(layer.values, positions)
    return CompressedKV(keys, values, log_weights, positions)


def rows_at(x: Tensor, positions: Tensor) -> Tensor:
    """Gather the rows of x [batch, kv_heads, n, dim] at positions [batch, kv_heads, c]; returns
    [batch, kv_heads, c, dim]."""
    batch, heads, n, dim = x.shape
    if not x.is_contiguous():
        return x.gather(2, positions.unsqueeze(-1).expand(-1, -1, -1, dim))
    # Copying rows of dim numbers is several times faster than gathering every number by its own index.
    first = torch.arange(0, batch * heads * n, n, device=x.device).view(batch, heads, 1)
    rows = x.view(-1, dim).index_select(0, (positions + first).flatten())
    return rows.view(batch, heads, -1, dim)


WHOLE = Budget(rate=1.0, sink=0, window=0)
"""The budget that grants every prompt its whole cache."""


def keep_all(layer: LayerKV) -> CompressedKV:
    """Keep all entries of the layer, without a copy, as for a prompt within its capacity."""
    batch, heads, n, _ = layer.keys.shape
    positions = torch.arange(n, device=layer.keys.device).expand(batch, heads, n)
    return CompressedKV(layer.keys, layer.values, None, positions)
