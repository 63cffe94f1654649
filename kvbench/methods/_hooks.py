"""The data that the hooks of a `Method` receive and return, for those methods that do more than
`compress`: that evict, restrict or compress again while decoding, or see the prompt repeated."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from kvbench.kv import Budget

# --- what a method may do while decoding ----------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The entries that a row's cache holds at one layer while decoding, the newest entry last.

    Attributes:
        scores: [kv_heads, c] float32, `CompressedKV.scores` as the last `Method.evict` returned them; a
            new entry starts at 0. None where `compress` returned no scores.
        positions: [kv_heads, c] int64, the prompt or generation position of each entry.
        capacity: the entries per head that the budget grants this layer: `Method.layer_capacity`, or
            `Budget.capacity` for a method that holds the whole cache.
        sink: how many of the prompt's first tokens are always kept.
    """

    scores: Tensor | None
    positions: Tensor
    capacity: int
    sink: int


class HeldShape(NamedTuple):
    """The size of one layer's compressed cache.

    Attributes:
        heads: KV heads, of `entries` entries each.
        itemsize: the bytes of a number.
    """

    heads: int
    entries: int
    dim: int
    value_dim: int
    itemsize: int


@dataclass(frozen=True)
class Schedule:
    """The times at which a compressed cache is compressed again while decoding, and to how many entries.

    Attributes:
        every: the number of tokens between two compressions.
        to: the entries per KV head that a compression leaves. A number below 1 is a share of the tokens
            of prompt and generation so far; None stands for what the budget grants.
        queries: the number of last tokens whose queries `compress` is shown.
        phase: ``steps`` compresses after every `every` decoding steps, ``tokens`` whenever the number of
            tokens before the step is a multiple of `every`.
        inside: True where the cache never exceeds the budget between two compressions. A full cache is
            then compressed to leave room for `every` tokens, at most an eighth of the budget; `phase` is
            not read, and `to` must be None.
    """

    every: int
    to: float | None
    queries: int
    phase: str = "steps"
    inside: bool = False

    def entries_to_keep(
        self, budget: Budget, prompt_tokens: int, fed_tokens: int, entries: int
    ) -> int | None:
        """To how many entries per head a cache of `entries` is compressed at this step; None where it is
        not."""
        full = self._entries_when_full(budget, prompt_tokens, fed_tokens)
        if full is None or entries <= full:
            return None
        if self.inside:
            room = max(1, min(self.every, full // 8))
            return max(_least_entries(budget), full - room)
        count = prompt_tokens + fed_tokens - 1 if self.phase == "tokens" else fed_tokens
        return None if count % self.every else full

    def _entries_when_full(self, budget: Budget, prompt_tokens: int, fed_tokens: int) -> int | None:
        """The entries per head above which a cache is compressed; None where the budget grants all."""
        if self.to is None:
            limit = budget.limit(prompt_tokens)
            return None if limit is None else max(limit, _least_entries(budget))
        if self.to >= 1:
            return int(self.to)
        return max(round(self.to * (prompt_tokens + fed_tokens)), _least_entries(budget))


def _least_entries(budget: Budget) -> int:
    return budget.sink + budget.window + 1


# --- a second look at the prompt ------------------------------------------------------------------


@dataclass(frozen=True)
class SecondPass:
    """A second pass over the prompt before compression, in which the model is asked to repeat the
    prompt.

    The prompt is repeated chunk by chunk. Every chunk attends to the exact cache of the whole prompt,
    and the keys and values of the repetition are dropped. Methods with equal passes share one.

    Attributes:
        chunk: how many prompt tokens after the sink one chunk repeats; the last chunk may be shorter.
        first: the instruction before the first chunk, plain text; empty for none.
        following: the instruction before each later chunk; the last `overlap` tokens of the previous
            chunk follow the instruction.
        gradients: whether `Method.observe` is shown `Replay.gradients`. Each chunk then takes a backward
            pass and the memory of its graph, and chunks are halved where that does not suffice.
        hidden_norms: whether it is shown `Replay.hidden_norms`. It changes nothing of the pass.
        prompt_queries: whether the method is shown the prompt's queries, too; those of all layers are
            then held until the second pass is over. Else `LayerKV.queries` is None. It changes nothing
            of the pass.
    """

    chunk: int
    first: str = ""
    following: str = ""
    overlap: int = 0
    gradients: bool = False
    hidden_norms: bool = field(default=False, compare=False, repr=False)
    prompt_queries: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class Replay:
    """One layer while the model repeats the prompt tokens start .. stop - 1.

    The model reads a sequence of t tokens, the instruction and then the repeated tokens, at the
    positions that follow the prompt.

    Attributes:
        queries: [batch, heads, t, head_dim], after position encoding.
        keys, values: [batch, kv_heads, t, head_dim], keys after position encoding.
        hidden_norms: [batch, t] float32, the Euclidean norms of the hidden states that enter the
            attention block, after the norm before it. None unless `SecondPass.hidden_norms`.
        gradients: [batch, t, hidden], the gradient of Phi with respect to what the attention block
            returns after its output projection. Phi is the squared norm of what the last decoder layer
            returns, before the final norm, summed over the t tokens. Parameters and the prompt's keys
            and values are constants. None unless `SecondPass.gradients`.
    """

    start: int
    stop: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    hidden_norms: Tensor | None = None
    gradients: Tensor | None = None
