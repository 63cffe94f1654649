"""KVzip: the attention that entries receive while the model repeats its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import top_positions, with_sink_and_window
from kvbench.methods.adakv import keep
from kvbench.methods.base import Method, Repetition, Rescoring

ROWS = 64
"""Queries whose attention is held at once: few enough that a CPU's cache holds it."""

FIRST = "\n\nRepeat the previous context exactly."
FOLLOWING = "\n\nRepeat the part of the previous context exactly, starting with "
OVERLAP = 8
"""The released words, and how many tokens of the chunk before follow the second."""


def largest_attention(layer: LayerKV, repeated: Repetition, sink: int) -> Tensor:
    """The largest attention that each token of a chunk receives from any query of the group while it is
    repeated, [batch, kv_heads, stop - start] float32; softmax over the sink, the chunk and the sequence.
    """
    start, stop = repeated.start, repeated.stop
    keys = torch.cat(
        [layer.keys[:, :, :sink], layer.keys[:, :, start:stop], repeated.keys], 2
    ).float()
    batch, kv_heads, count, dim = keys.shape
    length = repeated.queries.shape[2]
    queries = (repeated.queries.float() * layer.scaling).view(batch, kv_heads, -1, length, dim)
    best = keys.new_zeros(batch, kv_heads, stop - start)
    future = torch.ones(ROWS, ROWS, dtype=torch.bool, device=keys.device).triu(1)
    for begin in range(0, length, ROWS):
        rows = queries[..., begin : begin + ROWS, :]
        number = rows.shape[3]
        seen = keys[:, :, : count - length + begin + number]
        logits = (rows.flatten(2, 3) @ seen.mT).unflatten(2, (-1, number))
        logits = capped(logits, layer.softcap)
        logits[..., -number:].masked_fill_(future[:number, :number], -torch.inf)
        weights = logits.softmax(-1)[..., sink : sink + stop - start]
        best = torch.maximum(best, weights.amax((2, 3)))
    return best


def threshold(scores: Tensor, count: int) -> Tensor:
    """What the scores [layers, batch, kv_heads, tokens] of a prompt must exceed so that about `count` of
    them do: the `count`-th largest, so that it and its ties leave. [batch]"""
    flat = scores.transpose(0, 1).flatten(1)
    return flat.kthvalue(flat.shape[1] + 1 - max(count, 1), dim=-1).values


@dataclass(frozen=True, kw_only=True)
class KVzip(Method):
    """Keeps what the model looks at most when it repeats its context: a second pass over it.

    After the exact prefill everything behind the sink is repeated, `chunk` tokens at a time, against the
    exact cache of all (`Rescoring`); an entry's score is the largest attention it receives, over queries
    and the group, in the softmax over sink, chunk and the sequence itself. Sink and window always stay.
    The pass costs about a prefill with twice its attention, which is part of the seconds of compression,
    and until it is over the whole cache is held.

    Meant for ``compress_after=context``, where what is repeated is the context alone. Under ``prompt``
    there is no separate context: the question is repeated with the rest, its last tokens being the
    window, and scores of the context are those of a repetition all the same. `generate` inside
    `compress` reads a prompt once and refuses it, as do probes that show a method one layer at a time;
    ``session.read(...).ask(...)`` serves it.

    Departures from the authors' code (github.com/snu-mllab/KVzip): scores in float32, there in the
    model's dtype; the sink is the budget's, there the system prompt; the window is the budget's, there
    none; `level: head`, which needs files of scores for each model, is left out.

    Args:
        chunk: tokens repeated at a time. Below 8 the tokens that follow the words, the last 8 before the
            chunk, reach past the chunk before, as in the authors' code.
        level: pair (all entries of all layers and heads compete: those above the score of number
            rate * all of them, so at most one less; heads and layers hold different numbers) | uniform
            (every head keeps as many).
        instructed: ask in the released words, which takes a tokenizer; false: the chunk alone.
    """

    paper: ClassVar[str] = "arXiv 2505.23416; github.com/snu-mllab/KVzip"
    by_head: ClassVar[bool] = False  # with level: pair

    chunk: Count = 2000
    level: Literal["pair", "uniform"] = "pair"
    instructed: bool = True

    @property
    def rescoring(self) -> Rescoring:
        """See `Method.rescoring`."""
        if not self.instructed:
            return Rescoring(self.chunk)
        return Rescoring(self.chunk, FIRST, FOLLOWING, OVERLAP)

    def rescore(self, layer: LayerKV, repeated: Repetition, budget: Budget) -> None:
        """Note the chunk's scores; computed once for all methods that share the pass."""
        highest = layer.once(
            f"{self.rescoring} from {budget.sink}: {repeated.start}",
            lambda: largest_attention(layer, repeated, budget.sink),
        )
        name = f"scores {layer.layer_index}"
        before = [layer.carried[name]] if repeated.start > budget.sink else []
        layer.carried[name] = torch.cat([*before, highest], dim=-1)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """The best of the middle, ascending, between sink and window.

        Raises:
            KVError: nobody had the model repeat the prompt.
        """
        names = [f"scores {index}" for index in range(layer.num_layers)]
        if not all(name in layer.carried for name in names):
            raise KVError(
                "kvzip has not seen the prompt repeated; allowed: where whole prompts are read "
                "(tasks with answers, fidelity, session.read)"
            )
        n, sink = layer.n, budget.sink
        middle = slice(0, n - budget.window - sink)
        mine = layer.carried[names[layer.layer_index]][..., middle]
        count = budget.middle_kept(n)
        if self.level == "uniform":
            best = top_positions(mine, count) + sink
            return gather_entries(layer, with_sink_and_window(layer, budget, best))
        if "threshold" not in layer.carried:
            scores = torch.stack([layer.carried[name][..., middle] for name in names])
            pairs = count * scores.shape[0] * scores.shape[2]
            layer.carried["threshold"] = threshold(scores, pairs)
        stay = torch.ones(layer.keys.shape[:3], dtype=torch.bool, device=layer.keys.device)
        stay[..., sink : n - budget.window] = mine > layer.carried["threshold"][:, None, None]
        return keep(layer, stay)

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        """Entries that a layer may hold per head: all n with ``level: pair``, which shares one budget
        among all layers."""
        return n if self.level == "pair" else budget.capacity(n)
