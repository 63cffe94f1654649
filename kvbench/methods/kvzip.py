"""KVzip: entries are scored by the attention they receive while the model repeats its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.kernels.sinks import softmax
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import keep_marked, top_positions, with_sink_and_window
from kvbench.methods.base import Method, Repetition, Rescoring

ROWS = 64
"""How many queries' attention is computed at a time: few enough for a CPU's cache."""

FIRST = "\n\nRepeat the previous context exactly."
FOLLOWING = "\n\nRepeat the part of the previous context exactly, starting with "
OVERLAP = 8
"""The released instructions before the first chunk and before the others, and how many last tokens of
the previous chunk follow the latter."""


def largest_attention(layer: LayerKV, repeated: Repetition, sink: int) -> Tensor:
    """The largest attention that each token of a chunk receives while the chunk is repeated, over the
    queries of the repetition and the heads of the group: [batch, kv_heads, stop - start] float32.

    The softmax is over the sink, the chunk, and the repetition's own tokens.
    """
    start, stop = repeated.start, repeated.stop
    keys = torch.cat(
        [layer.keys[:, :, :sink], layer.keys[:, :, start:stop], repeated.keys], 2
    ).float()
    batch, kv_heads, count, dim = keys.shape
    length = repeated.queries.shape[2]
    queries = (repeated.queries.float() * layer.scaling).view(batch, kv_heads, -1, length, dim)
    layer_sinks = None if layer.sinks is None else layer.sinks.view(kv_heads, -1, 1)
    largest = keys.new_zeros(batch, kv_heads, stop - start)
    future = torch.ones(ROWS, ROWS, dtype=torch.bool, device=keys.device).triu(1)
    for begin in range(0, length, ROWS):
        block = queries[..., begin : begin + ROWS, :]
        rows = block.shape[3]
        visible = keys[:, :, : count - length + begin + rows]
        logits = (block.flatten(2, 3) @ visible.mT).unflatten(2, (-1, rows))
        logits = capped(logits, layer.softcap)
        logits[..., -rows:].masked_fill_(future[:rows, :rows], -torch.inf)
        attention = softmax(logits, layer_sinks)[..., sink : sink + stop - start]
        largest = torch.maximum(largest, attention.amax((2, 3)))
    return largest


def threshold(scores: Tensor, count: int) -> Tensor:
    """The `count`-th largest of a prompt's scores [layers, batch, kv_heads, tokens]: [batch]. Entries
    with larger scores are kept, which are count - 1, or fewer on ties."""
    flat = scores.transpose(0, 1).flatten(1)
    return flat.kthvalue(flat.shape[1] + 1 - max(count, 1), dim=-1).values


@dataclass(frozen=True, kw_only=True)
class KVzip(Method):
    """Keeps the entries to which the model attends most while it repeats its context.

    After the exact prefill, the tokens behind the sink are repeated, `chunk` tokens at a time, against
    the exact cache of the whole prompt (`Rescoring`). An entry's score is the largest attention it
    receives over the queries and the heads of the group (`largest_attention`). Sink and window are
    always kept. The repetition costs about as much as a prefill with twice its attention, and this time
    is part of the compression; until it ends, the whole cache is in memory.

    The method is meant for ``compress_after=context``, where the context alone is repeated. Under
    ``prompt`` the question is part of what is repeated, and its last tokens are the window. `generate`
    inside `compress` refuses the method, since it reads a prompt only once, and so do probes that show a
    method one layer at a time; ``session.read(...).ask(...)`` serves it.

    Departures from the authors' code (github.com/snu-mllab/KVzip): scores are float32, there in the
    model's dtype; the sink is the budget's, there the system prompt; the window is the budget's, there
    none; `level: head`, which needs files of scores for each model, is left out.

    Args:
        chunk: the number of tokens repeated at a time. Below 8 the last 8 tokens before the chunk, which
            follow the instruction, reach past the previous chunk, as in the authors' code.
        level: ``pair``: the entries of all layers and heads compete, and those above the threshold of
            the budget are kept, so that heads and layers hold different numbers (`threshold`).
            ``uniform``: every head keeps the same number.
        instructed: whether the released instructions come before each chunk, which needs a tokenizer.
    """

    paper: ClassVar[str] = "arXiv 2505.23416; github.com/snu-mllab/KVzip"

    chunk: Count = 2000
    level: Literal["pair", "uniform"] = "pair"
    instructed: bool = True

    @property
    def rescoring(self) -> Rescoring:
        if not self.instructed:
            return Rescoring(self.chunk)
        return Rescoring(self.chunk, FIRST, FOLLOWING, OVERLAP)

    def rescore(self, layer: LayerKV, repeated: Repetition, budget: Budget) -> None:
        # Once for all variants of the method.
        scores = layer.once(
            f"kvzip: {self.rescoring} from {budget.sink}: {repeated.start}",
            lambda: largest_attention(layer, repeated, budget.sink),
        )
        name = f"scores {layer.layer_index}"
        if repeated.start > budget.sink:
            scores = torch.cat([layer.carried[name], scores], dim=-1)
        layer.carried[name] = scores

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        names = [f"scores {index}" for index in range(layer.num_layers)]
        if not all(name in layer.carried for name in names):
            raise KVError(
                "kvzip has not seen the prompt repeated; allowed: where whole prompts are read "
                "(tasks with answers, fidelity, session.read)"
            )
        n, sink = layer.n, budget.sink
        middle = slice(0, n - budget.window - sink)
        layer_scores = layer.carried[names[layer.layer_index]][..., middle]
        count = budget.middle_kept(n)
        if self.level == "uniform":
            best = top_positions(layer_scores, count) + sink
            return gather_entries(layer, with_sink_and_window(layer, budget, best))
        if "threshold" not in layer.carried:
            scores = torch.stack([layer.carried[name][..., middle] for name in names])
            pairs = count * scores.shape[0] * scores.shape[2]
            layer.carried["threshold"] = threshold(scores, pairs)
        stay = torch.ones(layer.keys.shape[:3], dtype=torch.bool, device=layer.keys.device)
        stay[..., sink : n - budget.window] = (
            layer_scores > layer.carried["threshold"][:, None, None]
        )
        return keep_marked(layer, stay)

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        # With pairs the layers share one budget.
        return n if self.level == "pair" else budget.capacity(n)
