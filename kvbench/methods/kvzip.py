"""KVzip, KVzip+ and KVgrad: entries are scored by the attention they receive while the model repeats its
context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Count
from kvbench.kernels.logits import softcapped, softmax
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import keep_marked, top_positions, with_sink_and_window
from kvbench.methods.base import Method, Replay, SecondPass

ROWS = 64
"""How many queries' attention is computed at a time: few enough for a CPU's cache."""

FIRST = "\n\nRepeat the previous context exactly."
FOLLOWING = "\n\nRepeat the part of the previous context exactly, starting with "
OVERLAP = 8
"""The released instructions before the first chunk and before the others, and how many last tokens of
the previous chunk follow the latter."""


def largest_attention(
    layer: LayerKV,
    replay: Replay,
    sink: int,
    query_factors: Tensor | None = None,
    entry_factors: Tensor | None = None,
) -> Tensor:
    """The largest attention that each token of a chunk receives while the chunk is repeated, over the
    queries of the repetition and the heads of the group: [batch, kv_heads, stop - start] float32.

    The softmax is over the sink, the chunk, and the repetition's own tokens.

    Args:
        query_factors: [batch, t], by which the attention of each query is multiplied; None for 1.
        entry_factors: [batch, heads, stop - start], by which that to each token is; None for 1.
    """
    start, stop = replay.start, replay.stop
    keys = torch.cat([layer.keys[:, :, :sink], layer.keys[:, :, start:stop], replay.keys], 2)
    keys = keys.float()
    batch, kv_heads, count, dim = keys.shape
    length = replay.queries.shape[2]
    queries = (replay.queries.float() * layer.scaling).view(batch, kv_heads, -1, length, dim)
    layer_sinks = None if layer.sinks is None else layer.sinks.view(kv_heads, -1, 1)
    largest = keys.new_zeros(*queries.shape[:3], stop - start)
    future = torch.ones(ROWS, ROWS, dtype=torch.bool, device=keys.device).triu(1)
    for begin in range(0, length, ROWS):
        block = queries[..., begin : begin + ROWS, :]
        rows = block.shape[3]
        visible = keys[:, :, : count - length + begin + rows]
        logits = (block.flatten(2, 3) @ visible.mT).unflatten(2, (-1, rows))
        logits = softcapped(logits, layer.softcap)
        logits[..., -rows:].masked_fill_(future[:rows, :rows], -torch.inf)
        attention = softmax(logits, layer_sinks)[..., sink : sink + stop - start]
        if query_factors is not None:
            attention = attention * query_factors[:, None, None, begin : begin + rows, None]
        largest = torch.maximum(largest, attention.amax(3))
    if entry_factors is not None:
        largest = largest * entry_factors.unflatten(1, (kv_heads, -1))
    return largest.amax(2)


def output_norms(layer: LayerKV, start: int, stop: int) -> Tensor:
    """The most that the entries start .. stop - 1 can add to the residual stream: the norm of each value
    after the output projection's columns of each query head, [batch, heads, stop - start] float32.

    Raises:
        KVError: the projection's weight cannot be read.
    """
    if layer.output is None:
        raise KVError(
            f"the output projection of layer {layer.layer_index} cannot be read (packed in 4 bits, say, "
            "or of an unknown name); allowed: kvzip with score=attention"
        )
    weight = layer.output()
    values = layer.values[:, :, start:stop].float()
    by_head = weight.split(values.shape[-1], dim=1)
    copies = len(by_head) // values.shape[1]
    norms = [
        torch.linalg.vector_norm(values[:, head // copies] @ columns.float().mT, dim=-1)
        for head, columns in enumerate(by_head)
    ]
    return torch.stack(norms, dim=1)


def threshold(scores: Tensor, count: int) -> Tensor:
    """The `count`-th largest of a prompt's scores [layers, batch, kv_heads, tokens]: [batch]. Entries
    with larger scores are kept, which are count - 1, or fewer on ties."""
    flat = scores.transpose(0, 1).flatten(1)
    return flat.kthvalue(flat.shape[1] + 1 - max(count, 1), dim=-1).values


@dataclass(frozen=True, kw_only=True)
class KVzip(Method):
    """Keeps the entries to which the model attends most while it repeats its context.

    After the exact prefill, the tokens behind the sink are repeated, `chunk` tokens at a time, against
    the exact cache of the whole prompt (`SecondPass`). An entry's score is the largest attention it
    receives over the queries p of the repetition and the heads h of the group (`largest_attention`).
    Sink and window are always kept. The repetition costs about as much as a prefill with twice its
    attention, and this time is part of the compression; until it ends, the whole cache is in memory.

    The method is meant for ``compress_after=context``, where the context alone is repeated. Under
    ``prompt`` the question is part of what is repeated, and its last tokens are the window. `generate`
    inside `compress` refuses the method, since it reads a prompt only once, and so do probes that show a
    method one layer at a time; ``session.read(...).ask(...)`` serves it.

    Departures from the authors' code (github.com/snu-mllab/KVzip): scores are float32, there in the
    model's dtype; the sink is the budget's, there the system prompt; the window is the budget's, there
    none; `level: head`, which needs files of scores for each model, is left out. Departures of the other
    scores from kvpress 0.5.5 (KVzipPress, KVgradPress): the same, its sink being the first 4 tokens; the
    instruction before later chunks ends in a blank, as the authors' does; entries above a threshold are
    kept, there all but a number; sliding-window layers and hybrid models are served, there refused.

    Args:
        score: what an entry's attention A is multiplied by before the largest is taken. W is the part of
            the output projection that belongs to h, v the entry's value. ``attention``: nothing.
            ``plus``: ||W v|| / ||x||, x the hidden state of p that enters the attention block (KVzip+).
            ``gradient``: ||W v|| ||g||, g the gradient at p of `Replay.gradients` (KVgrad): how much the
            entry changes what the last layer returns, to first order. It takes a backward pass for each
            chunk. Where the attention block has a gate or a norm behind W, or a bias, they are left out.
        chunk: the number of tokens repeated at a time. Below 8 the last 8 tokens before the chunk, which
            follow the instruction, reach past the previous chunk, as in the authors' code.
        level: ``pair``: the entries of all layers and heads compete, and those above the threshold of
            the budget are kept, so that heads and layers hold different numbers (`threshold`).
            ``uniform``: every head keeps the same number.
        instructed: whether the released instructions come before each chunk, which needs a tokenizer.
    """

    paper: ClassVar[str] = "arXiv 2505.23416; github.com/snu-mllab/KVzip; plus: arXiv 2601.07891"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"plus": {"score": "plus"}}

    score: Literal["attention", "plus", "gradient"] = "attention"
    chunk: Count = 2000
    level: Literal["pair", "uniform"] = "pair"
    instructed: bool = True

    @property
    def second_pass(self) -> SecondPass:
        asked = SecondPass(
            self.chunk, gradients=self.score == "gradient", hidden_norms=self.score == "plus"
        )
        if not self.instructed:
            return asked
        return replace(asked, first=FIRST, following=FOLLOWING, overlap=OVERLAP)

    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        # Once for all variants of the method.
        tokens = f"{replay.start} to {replay.stop}"
        scores = layer.once(
            f"kvzip {self.score}: {self.second_pass} from {budget.sink}: {tokens}",
            lambda: self.chunk_scores(layer, replay, budget.sink),
        )
        name = f"scores {layer.layer_index}"
        if replay.start > budget.sink:
            scores = torch.cat([layer.carried[name], scores], dim=-1)
        layer.carried[name] = scores

    def chunk_scores(self, layer: LayerKV, replay: Replay, sink: int) -> Tensor:
        """The scores of a chunk's entries, [batch, kv_heads, stop - start] float32."""
        if self.score == "attention":
            return largest_attention(layer, replay, sink)
        if self.score == "plus":
            assert replay.hidden_norms is not None
            queries = 1 / replay.hidden_norms
        else:
            assert replay.gradients is not None
            queries = torch.linalg.vector_norm(replay.gradients, dim=-1, dtype=torch.float32)
        if not queries.isfinite().all():
            raise KVError(
                f"{self.method_name()}: the gradients or hidden states of layer {layer.layer_index} are "
                "not finite; allowed: finite numbers (try dtype=bfloat16 or float32)"
            )
        entries = output_norms(layer, replay.start, replay.stop)
        return largest_attention(layer, replay, sink, queries, entries)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        names = [f"scores {index}" for index in range(layer.num_layers)]
        if not all(name in layer.carried for name in names):
            raise KVError(
                f"{self.method_name()} has not seen the prompt repeated; allowed: where whole prompts "
                "are read (tasks with answers, fidelity, session.read)"
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
