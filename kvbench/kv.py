"""Tensors in, tensors out: what a layer holds after prefill, and what it may hold instead.

Knows no library but torch (and the tensor functions of `kvbench.kernels`).

Vocabulary, used everywhere in kvbench: *n* prompt tokens; *sink* the first ``sink`` tokens and
*window* the last ``window`` tokens, always kept by the methods that have them; *middle* the others;
*rate* the fraction of the middle that is kept; *capacity* the entries allowed per layer and KV head;
*group* the query heads that share one KV head; *entry* one key-value pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvbench.budget import Budget, KVError
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.elapsed import Elapsed

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]

NORMALISERS = "normalisers of the attention"
"""The name in `LayerKV.shared` of the logarithm of each prompt query's sum of exponentials,
[batch, heads, n] float32; there only if the attention kernel of the prefill returns it."""

ATTENTION_MASS = "attention mass"
"""The beginning of the names in `LayerKV.shared` of what `LayerKV.attention_of_last` returns; the number
of queries follows."""

COMMON = (NORMALISERS, ATTENTION_MASS)
"""`LayerKV.once` shares results whose names begin so among all methods, any other within a class."""


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
class Shared:
    """A result that several methods use (`LayerKV.once`).

    Attributes:
        tensor: the result.
        clock: of its computation.
        of: the keys, values and queries that it was computed from.
    """

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
        withheld: how many of the prompt's last queries a method is not shown, because it will be judged
            by them. `queries` end before them; their tokens' keys and values are there.
        log_weights: [batch, kv_heads, n] float32 that the entries have already, where what is held is
            compressed again (`Method.recompression`), and those of `compress` add to; None: all 0.
        output: returns a copy of the weights that mix the heads' outputs, [hidden, heads * head_dim];
            None where they cannot be read.
        rotary: the model's rotary table, which maps positions [p] to cosines and sines [p, width] whose
            two halves are equal; None where the model has none.
        shared: results that `once` has computed for this layer, by name.
        carried: tensors that the method noted at earlier layers of the same prompt, by name; one
            dictionary for all layers.
        used: names of the results that the method whose turn it is has asked `once` for.
        owner: the class of the method whose turn it is.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor | None
    layer_index: int
    num_layers: int
    scaling: float
    softcap: float | None = None
    withheld: int = 0
    log_weights: Tensor | None = None
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
        """The result of ``compute()``, computed once and kept under ``name`` for the other methods of
        the same class, so that variants of a method share the work (`COMMON` names: for all methods).

        The result must depend on the layer's tensors and ``name`` alone, and like the layer's tensors it
        is not to be written to.
        """
        inputs = (self.keys, self.values, self.queries)
        if not name.startswith(COMMON):
            name = f"{self.owner}: {name}"
        if name not in self.shared:
            clock = Elapsed(self.keys.device)
            self.shared[name] = Shared(compute(), clock.stop(), inputs)
        computed_from = self.shared[name].of
        if any(ours is not theirs for ours, theirs in zip(inputs, computed_from, strict=True)):
            # A method has made a layer of its own from this one, with other tensors.
            return compute()
        self.used.add(name)
        return self.shared[name].tensor

    def charge_shared_work(self) -> Callable[[], list[Elapsed]]:
        """Begin the turn of one method.

        Returns:
            a function to be called after the turn: it returns the clocks of the shared results that the
            method used and an earlier method had computed, so that their seconds are charged to both.
        """
        computed_earlier = set(self.shared)
        self.used.clear()
        return lambda: [self.shared[name].clock for name in self.used & computed_earlier]

    def attention_mass(self) -> Tensor:
        """Causal softmax attention every key received from all prompt queries, [batch, heads, n].

        Column sums of the prompt's attention matrix, computed in query blocks: O(n) memory. float32.
        Withheld queries are left out.

        Raises:
            KVError: when the layer does not hold all n prompt queries.
        """
        return self.attention_of_last(self.n - self.withheld)

    def attention_of_last(self, count: int) -> Tensor:
        """Causal softmax attention that every key received from the last `count` queries that are not
        withheld, [batch, heads, n] float32: 0 for keys after the last of these queries.

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
                normalisers=None if normalisers is None else normalisers[:, :, first:],
            )
            return pad(mass, (0, self.withheld))

        return self.once(f"{ATTENTION_MASS} of {count} queries", compute)

    def _normalisers(self) -> Tensor | None:
        """The `NORMALISERS` of this layer's queries, if the prefill returned them and this layer has all
        of its queries and keys."""
        known = self.shared.get(NORMALISERS)
        if known is None or self.queries is None or self.queries.shape[2] != self.n:
            return None
        of_this_layer = known.of[0] is self.keys and known.of[2] is self.queries
        return known.tensor if of_this_layer else None


@dataclass(frozen=True)
class CompressedKV:
    """What a layer holds instead of its exact keys and values.

    Attention over it is ``softmax(q.k * scaling + log_weight) . v``, unless there are `denominators`.

    Attributes:
        keys, values: [batch, kv_heads, c, head_dim] (a method that repeats keys to query heads holds
            [batch, heads, c, head_dim]; its bytes are counted so).
        log_weights: [batch, kv_heads, c] float32, or None when all are zero. ``-inf`` marks padding:
            an entry that exists only because another head holds more; it is not counted.
        positions: [batch, kv_heads, c] int64, the prompt position of each entry, -1 where it has none.
        scores: [batch, kv_heads, c] float32 that the method wants back at every decoded token
            (`Method.evict`; H2O: accumulated attention), else None.
        keys_only: the number of leading entries that hold a key and no value, so that `values` is that
            much shorter than `keys`. They count in the softmax's denominator alone, as if their value
            were 0 (a streaming estimator samples its denominator separately).
        lengths: [batch, kv_heads] int64 where heads hold different numbers of entries: each head's are
            its first ones, and what follows is padding (log-weight -inf) that is not stored. The budget
            is charged the heads' mean. None: all heads hold c.
        denominators: [batch, kv_heads, c] float32, the factor of each entry in the softmax's
            denominator, which may be negative; None where all are 1. See
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
        """Bytes of keys, values and weights as they are; positions are bookkeeping and not counted."""
        if self.lengths is not None:
            # Neither the padding nor the log-weights that mark it are stored, those of heads that weigh
            # their entries are.
            entry = self.keys[0, 0, :1].nbytes + self.values[0, 0, :1].nbytes
            stored = int(self.lengths.sum()) * entry
            if self.log_weights is not None:
                weighted = (self.log_weights.isfinite() & (self.log_weights != 0)).any(-1)
                stored += int(self.lengths[weighted].sum()) * self.log_weights.element_size()
            return stored
        parts = [self.keys, self.values, self.log_weights, self.denominators]
        parts += self.value_range or ()
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
    """Entries held per head, [..., heads] int64, of log_weights [..., heads, c].

    A log-weight of -inf in a head that holds fewer entries than another is padding and not counted. A
    column that is -inf in every head is stored memory, and counted.
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
