"""Triton kernel of the sequential step of online clustering: which points become representatives."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvbench.kernels._choice import on_its_device


@triton.jit(do_not_specialize=["b"])
def first_come_kernel(
    near,  # [h, b, b] uint8
    free,  # [h, b] uint8
    room,  # [h] int64
    fresh,  # [h, b] uint8, out
    b,
    B: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    near += head * b * b
    place = tl.arange(0, B)
    real = place < b
    taken = 1 - tl.load(free + head * b + place, mask=real, other=0).to(tl.int32)
    chosen = tl.zeros([B], tl.int32)
    left = tl.load(room + head)
    for i in range(b):
        goes = (tl.sum(tl.where(place == i, taken, 0), 0) == 0) & (left > 0)
        row = tl.load(near + i * b + place, mask=real, other=0).to(tl.int32)
        chosen = tl.where((place == i) & goes, 1, chosen)
        taken = tl.where(goes, taken | row, taken)
        left -= goes.to(tl.int64)
    tl.store(fresh + head * b + place, chosen.to(tl.uint8), mask=real)


@on_its_device
def first_come(near: Tensor, free: Tensor, room: Tensor) -> Tensor:
    """`online_clusters._first_come` in one launch: near [h, b, b] bool (within the radius), free [h, b]
    bool, room [h] int64; [h, b] bool."""
    heads, b = free.shape
    fresh = torch.empty_like(free, dtype=torch.uint8)
    options = {"B": triton.next_power_of_2(b), "num_warps": 1}
    first_come_kernel[(heads,)](near.byte(), free.byte(), room, fresh, b, **options)
    return fresh.bool()
