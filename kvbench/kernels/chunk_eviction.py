"""Several tokens through a full cache, one entry leaving for each: all products at once.

Token i of t joins c entries, attends to those c + 1, and one of them leaves, so that what it attends to
depends on the tokens before it. But the logits of all t queries do not: they are two products. What is
left to do token by token is a softmax and a choice (`take_turns`, one launch on CUDA); by age, not
even that (`oldest_in_turn`). Then the values' weighted sums are two products again.

A *slot* is an entry's place among the c + 1; the new entry stands in the last one, and moves to the one
that became free. `leaving` is the slot that token i made free.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

Choose = Callable[[Tensor, Tensor], Tensor]
"""See `Eviction.choose`."""


def oldest_in_turn(positions: Tensor, tokens: int, sink: int) -> Tensor:
    """Which slot each of so many tokens makes free, [kv_heads, tokens]: that of the oldest entry at
    position `sink` or later; positions [kv_heads, c] of the entries held, older than the tokens."""
    count = positions.shape[1]
    fixed = positions < sink
    never = torch.iinfo(positions.dtype).max
    order = positions.masked_fill(fixed, never).argsort(dim=-1, stable=True)
    free = count - fixed.sum(-1, keepdim=True)
    # Once all of them have left, it is the tokens' own turn, in the same slots.
    turn = torch.arange(tokens, device=positions.device) % free.clamp(min=1)
    return order.gather(1, turn).masked_fill(free == 0, count)


def take_turns(
    logits: Tensor,
    among: Tensor,
    scores: Tensor,
    positions: Tensor,
    choose: Choose,
    *,
    heaviest: bool,
    sink: int,
    recent: int,
    implementation: str = "auto",
) -> Tensor:
    """Which slot each token makes free by the attention that entries have received, [kv_heads, t].

    Args:
        logits: [kv_heads, group, t, c + 1] float32 of the queries with the entries held; turned into
            the weights with which the tokens attend to the slots.
        among: [kv_heads, group, t, t] float32 of the queries with the tokens' own keys.
        scores: [kv_heads, c + 1] float32; grow by the mean weight of the group, move with the entries.
        positions: [kv_heads, c + t] int64 of the entries held, then of the tokens.
        choose: the rule on one token's scores and positions.
        heaviest, sink, recent: the same for the Triton kernel (`Eviction`).
    """
    heads, _, tokens, width = logits.shape
    if use_triton("take_turns", implementation, logits, rows_on_chip=False):
        from kvbench.kernels import _triton_chunk

        return _triton_chunk.take_turns(
            logits, among, scores, positions, heaviest=heaviest, sink=sink, recent=recent
        )
    count = width - 1
    held = positions[:, :width].clone()
    leaving = torch.empty(heads, tokens, dtype=torch.int64, device=logits.device)
    for i in range(tokens):
        logits[:, :, i, count] = among[:, :, i, i]
        held[:, count] = positions[:, count + i]
        scores[:, count] = 0
        weights = torch.softmax(logits[:, :, i], -1)
        logits[:, :, i] = weights
        scores += weights.mean(1)
        leaving[:, i] = slot = choose(scores, held)
        # Later tokens meet this one there; in the last slot it is overwritten by the next.
        later = among[:, :, i + 1 :, i, None]
        logits[:, :, i + 1 :].scatter_(-1, slot[:, None, None, None].expand_as(later), later)
        held.scatter_(1, slot[:, None], held[:, count:])
        scores.scatter_(1, slot[:, None], scores[:, count:])
    return leaving


def stays(leaving: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The token after which each entry leaves, t where none: of the `count` held, [kv_heads, count], and
    of the tokens themselves, [kv_heads, t]; of `leaving` [kv_heads, t]."""
    heads, tokens = leaving.shape
    turn = torch.arange(tokens, device=leaving.device)
    never = torch.full((heads, count + 1), tokens, device=leaving.device)
    held = never.scatter_reduce(1, leaving, turn.expand(heads, -1), "amin")[:, :count]
    again = (leaving[:, :, None] == leaving[:, None]) & (turn > turn[:, None])
    new = torch.where(again, turn, tokens).amin(-1)
    return held, torch.where(leaving == count, turn, new)


def attention_in_turn(
    logits: Tensor, among: Tensor, leaving: Tensor, count: int
) -> tuple[Tensor, Tensor]:
    """Weights of the queries on the `count` entries held before, [kv_heads, group, t, count], and on the
    tokens themselves, [kv_heads, group, t, t].

    Args:
        logits: of the entries held, [.., count]; or what `take_turns` has made of them, [.., count + 1].
        among, leaving: see `take_turns`.
    """
    held, new = stays(leaving, count)
    turn = torch.arange(among.shape[-1], device=leaving.device)[:, None]
    gone = (held[:, None] < turn)[:, None]
    unseen = ((turn < turn.T) | (new[:, None] < turn))[:, None]
    if logits.shape[-1] > count:
        own = turn == turn.T  # a token's weight on itself is in the last slot
        later = logits.gather(-1, leaving[:, None, None].expand_as(among))
        later = torch.where(own, logits[..., count:], later.masked_fill(unseen, 0))
        return logits[..., :count].masked_fill(gone, 0), later
    both = torch.cat([logits, among], dim=-1)
    weights = both.masked_fill_(torch.cat([gone, unseen], dim=-1), -torch.inf).softmax(-1)
    return weights[..., :count], weights[..., count:]
