"""Triton kernel of `chunk_eviction`: a program per KV head takes the tokens in turn."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device


@triton.jit(do_not_specialize=["tokens", "count", "group", "score_step", "sink", "recent"])
def turns_kernel(
    logits,  # [kv_heads, group, tokens, count + 1] float32; weights afterwards
    among,  # [kv_heads, group, tokens, tokens] float32
    scores,  # [kv_heads, ..] float32
    positions,  # [kv_heads, count + tokens] int64
    held,  # [kv_heads, count + 1] int64, of the entries; changed
    leaving,  # [kv_heads, tokens] int64
    tokens,
    count,
    group,
    score_step,
    sign,
    sink,
    recent,
    BLOCK: tl.constexpr,
    LATER: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    width = count + 1
    scores += head * score_step
    positions += head * (count + tokens) + count  # of the tokens
    held += head * width
    leaving += head * tokens
    lanes = tl.arange(0, BLOCK)
    for i in range(0, tokens):
        newest = tl.load(positions + i)
        # The token stands in the last slot.
        for member in range(0, group):
            own = (head * group + member) * tokens + i
            tl.store(logits + own * width + count, tl.load(among + own * tokens + i))
        tl.store(held + count, newest)
        tl.store(scores + count, 0.0)
        tl.debug_barrier()
        # Each query's logits become its weights, which the scores take up.
        for member in range(0, group):
            query = logits + ((head * group + member) * tokens + i) * width
            top = tl.full([BLOCK], -float("inf"), tl.float32)
            total = tl.zeros([BLOCK], tl.float32)
            for start in range(0, width, BLOCK):
                here = start + lanes
                s = tl.load(query + here, mask=here < width, other=-float("inf"))
                new_top = tl.maximum(top, s)
                base = tl.where(new_top == -float("inf"), 0.0, new_top)
                total = total * tl.exp(top - base) + tl.exp(s - base)
                top = new_top
            most = tl.max(top, 0)
            total = tl.sum(tl.where(top == -float("inf"), 0.0, total * tl.exp(top - most)), 0)
            for start in range(0, width, BLOCK):
                here = start + lanes
                s = tl.load(query + here, mask=here < width, other=-float("inf"))
                weight = tl.exp(s - most) / total
                tl.store(query + here, weight, mask=here < width)
                score = tl.load(scores + here, mask=here < width, other=0.0)
                tl.store(scores + here, score + weight / group, mask=here < width)
            tl.debug_barrier()
        # Of each lane the least worth and, as blocks come in order, its first slot.
        least = tl.full([BLOCK], float("inf"), tl.float32)
        slot = tl.zeros([BLOCK], tl.int64) + width
        for start in range(0, width, BLOCK):
            here = (start + lanes).to(tl.int64)
            position = tl.load(held + here, mask=here < width, other=0)
            score = tl.load(scores + here, mask=here < width, other=0.0)
            free = (here < width) & (position >= sink) & (position <= newest - recent)
            better = free & ((sign * score < least) | (slot == width))
            slot = tl.where(better, here, slot)
            least = tl.where(better, sign * score, least)
        lowest = tl.min(least, 0)
        chosen = tl.min(tl.where(least == lowest, slot, width), 0)
        chosen = tl.where(chosen == width, 0, chosen)  # nothing is free: as torch's argmin
        tl.store(leaving + i, chosen)
        score = tl.load(scores + count)
        # It moves to the free slot, where later tokens meet it.
        tl.store(held + chosen, newest)
        tl.store(scores + chosen, score)
        for member in range(0, group):
            own = (head * group + member) * tokens
            for start in range(i + 1, tokens, LATER):
                later = start + tl.arange(0, LATER)
                s = tl.load(among + (own + later) * tokens + i, mask=later < tokens)
                tl.store(logits + (own + later) * width + chosen, s, mask=later < tokens)
        tl.debug_barrier()


@on_its_device
def take_turns(
    logits: Tensor,
    among: Tensor,
    scores: Tensor,
    positions: Tensor,
    *,
    heaviest: bool,
    sink: int,
    recent: int,
) -> Tensor:
    """`chunk_eviction.take_turns` on CUDA: one launch, all tokens of the chunk in it."""
    heads, group, tokens, width = logits.shape
    count = width - 1
    held = torch.empty(heads, width, dtype=torch.int64, device=logits.device)
    held[:, :count] = positions[:, :count]
    leaving = torch.empty(heads, tokens, dtype=torch.int64, device=logits.device)
    turns_kernel[(heads,)](
        logits,
        among.contiguous(),
        scores,
        positions.contiguous(),
        held,
        leaving,
        tokens,
        count,
        group,
        scores.stride(0),
        -1.0 if heaviest else 1.0,
        sink,
        recent,
        BLOCK=min(4096, triton.next_power_of_2(width)),
        LATER=64,
        num_warps=16 if width > 2048 else 4,
    )
    return leaving
