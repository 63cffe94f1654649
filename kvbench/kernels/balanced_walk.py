"""The self-balancing walk of BalanceKV (arXiv 2502.07861) as its authors' code runs it: signs for the
tokens of every block, all blocks at once. (`self_balancing` has the paper's own Algorithms 2 and
3.)"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

GROUP = 128
"""How many blocks are walked together: enough that the loop over steps costs little for each, and few
enough for their kernel matrices to stay in cache."""
CHUNK = 8
"""How many blocks' kernel matrices are computed together: their keys stay in cache."""
STRIP = 64
"""How many rows of the kernel matrix are computed together, from the first column to the diagonal."""
SAFE_EXPONENT = 60.0
"""Rows whose exponents cannot exceed this do not overflow in float32 and are not scaled."""


def balanced_walk(
    keys: Tensor,
    values: Tensor | None,
    index: Tensor,
    uniforms: Tensor,
    *,
    gamma: float,
    offset: float,
    temperature: float = 1.0,
    beta: float = 0.0,
    counts: Tensor | None = None,
    weights: Tensor | None = None,
    centre: str = "mean",
    implementation: str = "auto",
) -> Tensor:
    """Choose the signs of the walk within each block: the first is +1; for i >= 1,

        inner_i = sum over j < i of G_ij s_j,    s_i = +1 if u_i < 1/2 - gamma * inner_i, else -1,
        G_ij = exp(temperature * <k_i, k_j> / sqrt(d) - beta) * (<w_i v_i, w_j v_j> + offset),

    with k centred within its block. Without values the second factor of G is 1.

    Keys of any norm are safe: a row of G whose exponents could overflow is divided by e to the power
    of its largest one, and so is the number it is compared with. The probability is then 0 or 1 where
    the plain formula gives NaN.

    The leading dimensions (...) of all tensors are equal: none, or [batch, kv_heads].

    Args:
        keys: [..., rows, d], any float dtype; computed in float32 (float64 inputs in float64).
        values: [..., rows, e].
        index: [..., blocks, b] int64, the row of each place of a block.
        uniforms: [..., blocks, b] in [0, 1), one per place (the first of a block is not used).
        gamma: >= 0; 0 makes every sign a fair coin (but the first).
        counts: [..., blocks], how many places of each block, from the first, are real; None where all
            are. The signs of other places mean nothing.
        weights: [..., blocks, b], the factors w on the values; None for 1.
        centre: mean (over a block's real places) | released (their sum over b, as if the block were
            padded with zero rows) | none.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        [..., blocks, b] bool, True for +1.
    """
    if gamma == 0.0:
        positive = uniforms < 0.5
        positive[..., :1] = True
        return positive
    scale = temperature / keys.shape[-1] ** 0.5
    reach = math.exp(beta) / gamma  # inner, without e^-beta, is compared with (1/2 - u) * reach
    tensors = (keys,) if values is None else (keys, values)
    if use_triton("balanced_walk", implementation, *tensors):
        from kvbench.kernels import _triton_walk

        def with_heads(x: Tensor) -> Tensor:
            return x if index.ndim == 4 else x[None, None]

        return _triton_walk.walk(
            with_heads(keys),
            None if values is None else with_heads(values),
            with_heads(index),
            with_heads(uniforms),
            scale=scale,
            offset=offset,
            reach=reach,
            counts=None if counts is None else with_heads(counts),
            weights=None if weights is None else with_heads(weights),
            centre=centre,
        ).view(index.shape)
    b = index.shape[-1]
    flat_index = index
    if index.ndim > 2:  # rows of all heads, one head after the other
        heads = math.prod(index.shape[:-2])
        first_rows = torch.arange(heads, device=index.device) * keys.shape[-2]
        flat_index = (index.reshape(heads, -1) + first_rows.unsqueeze(-1)).view(-1, b)
    return _torch_walk(
        keys.reshape(-1, keys.shape[-1]),
        None if values is None else values.reshape(-1, values.shape[-1]),
        flat_index,
        uniforms.reshape(-1, b),
        scale,
        offset,
        reach,
        None if counts is None else counts.reshape(-1),
        None if weights is None else weights.reshape(-1, b),
        centre,
    ).view(index.shape)


def _torch_walk(
    keys: Tensor,
    values: Tensor | None,
    index: Tensor,
    uniforms: Tensor,
    scale: float,
    offset: float,
    reach: float,
    counts: Tensor | None,
    weights: Tensor | None,
    centre: str,
) -> Tensor:
    """`balanced_walk` without leading dimensions, index [blocks, b]. The kernel matrix is computed in
    strips of rows and only up to the diagonal. What the signs of earlier strips add to `inner` is one
    matrix product, so that only the steps inside a strip are taken one by one."""
    blocks, b = index.shape
    dtype = torch.promote_types(keys.dtype, torch.float32)
    # By how much the sum over the signs so far exceeds the threshold. The next sign is the opposite of
    # the excess's sign (-1 at zero). The first sign of a block is +1.
    excess = (uniforms.to(dtype) - 0.5) * reach
    excess[:, 0] = float("-inf")
    opposite = torch.empty_like(excess)
    strips = [(top, min(top + STRIP, b)) for top in range(0, b, STRIP)]
    shape = min(GROUP, blocks)
    kernel = [excess.new_empty(shape, end - top, end) for top, end in strips]
    work = excess.new_empty(2, CHUNK * min(STRIP, b) * b)
    for first in range(0, blocks, GROUP):
        group = slice(first, min(first + GROUP, blocks))
        for start in range(first, group.stop, CHUNK):
            chunk = slice(start, min(start + CHUNK, group.stop))
            rows = index[chunk].reshape(-1)
            k = keys.index_select(0, rows).to(dtype).view(-1, b, keys.shape[1])
            k = _centred(k, None if counts is None else counts[chunk], centre)
            v = None
            if values is not None:
                v = values.index_select(0, rows).to(dtype).view(-1, b, values.shape[1])
                if weights is not None:
                    v *= weights[chunk].to(dtype).unsqueeze(-1)
            out = [strip[start - first : chunk.stop - first] for strip in kernel]
            shift = _form_kernel(k, v, out, work, scale, offset)
            if shift is not None:
                excess[chunk] *= torch.exp(-shift)
        size = group.stop - first
        _walk_blocks([strip[:size] for strip in kernel], excess[group], opposite[group])
    return opposite < 0


def _centred(k: Tensor, counts: Tensor | None, centre: str) -> Tensor:
    """Centre each block's real keys, and set the others to 0; k [blocks, b, d] is changed in place."""
    b = k.shape[1]
    if counts is not None:
        real = torch.arange(b, device=k.device) < counts[:, None]
        k *= real.unsqueeze(-1)
    if centre == "none":
        return k
    mean = k.sum(1, keepdim=True)
    if centre == "mean" and counts is not None:
        mean /= counts.clamp(min=1)[:, None, None]
    else:
        mean /= b
    return k.sub_(mean)


def _form_kernel(
    k: Tensor, v: Tensor | None, out: list[Tensor], work: Tensor, scale: float, offset: float
) -> Tensor | None:
    """Write the strips of G [blocks, rows, end] to `out`, without e^-beta, scaled where they might
    overflow. k [blocks, b, d] is centred, v [blocks, b, e] weighted, `work` [2, a strip's numbers].

    Returns:
        [blocks, b] float32, shift: row i was multiplied by e^-shift[i]. It is the row's largest
        exponent over earlier places, at least 0, where the row might overflow, and 0 elsewhere. None
        where no row might.
    """
    norms = torch.linalg.vector_norm(k, dim=-1)
    bound = norms * norms.amax(-1, keepdim=True) * abs(scale)  # Cauchy-Schwarz
    if v is not None:
        norms = torch.linalg.vector_norm(v, dim=-1)
        bound += torch.log1p(norms * norms.amax(-1, keepdim=True))
    risky = bound > SAFE_EXPONENT
    shift = torch.zeros_like(bound) if bool(risky.any()) else None
    for g in out:
        end = g.shape[2]
        top = end - g.shape[1]
        e = work[0, : g.numel()].view(g.shape) if v is not None else g
        torch.baddbmm(e, k[:, top:end], k[:, :end].mT, beta=0, alpha=scale, out=e)
        if shift is not None:
            _scale_rows(e, shift[:, top:end], risky[:, top:end])
        e.exp_()
        if v is not None:
            p = work[1, : g.numel()].view(g.shape)
            torch.bmm(v[:, top:end], v[:, :end].mT, out=p)
            torch.mul(p.add_(offset), e, out=g)
    return shift


def _scale_rows(e: Tensor, shift: Tensor, risky: Tensor) -> None:
    """Subtract from the exponents e [blocks, rows, end] of a strip the largest of each row, where it is
    risky [blocks, rows]; written to `shift` [blocks, rows]."""
    rows, end = e.shape[1:]
    top = end - rows
    tile = e[:, :, top:]
    # The lower half of the tile and its diagonal are never read.
    tile += torch.full((rows, rows), float("-inf"), dtype=e.dtype, device=e.device).tril_()
    largest = tile.amax(1)
    if top:
        largest = torch.maximum(largest, e[:, :, :top].amax(-1))
    torch.mul(largest.clamp_(min=0.0), risky, out=shift)
    e[:, :, :top] -= shift.unsqueeze(-1)
    # Row i of the tile is what place i adds to later places: each column has its place's factor.
    tile -= shift.unsqueeze(1)
    # Smaller exponents add nothing beside exp(0), and arithmetic with denormal numbers is slow.
    e.clamp_(min=-SAFE_EXPONENT)


def _walk_blocks(kernel: list[Tensor], excess: Tensor, opposite: Tensor) -> None:
    """Choose the signs of each block's places in order.

    Args:
        kernel: the strips [blocks, rows, end] of G, see `_form_kernel`.
        excess: [blocks, b], by how much the sum over earlier signs exceeds the threshold of each
            place. On entry no sign is in the sum; on a CPU it is overwritten.
        opposite: [blocks, b], written to: minus the sign of each place.
    """
    # In numpy on the host: a step handles so few numbers that the time is that of its calls, and
    # torch's calls take twice as long.
    host_excess = excess.cpu()  # the same tensor on a CPU
    host_opposite = opposite.cpu()
    for strip in kernel:
        g = strip.cpu()
        end = strip.shape[2]
        top = end - g.shape[1]
        if top:
            earlier = torch.bmm(g[:, :, :top], host_opposite[:, :top, None]).squeeze(-1)
            host_excess[:, top:end] -= earlier
        tile = g[:, :, top:].numpy()  # row i: what place i adds to later places
        change = np.empty_like(tile[:, 0])
        strip_excess = host_excess[:, top:end].numpy()
        strip_opposite = host_opposite[:, top:end].numpy()
        for i in range(end - top):
            # copysign of +0 is +1, and the difference of equal numbers is +0.
            step = np.copysign(1.0, strip_excess[:, i, None], out=strip_opposite[:, i, None])
            if i + 1 < end - top:
                np.multiply(tile[:, i, i + 1 :], step, out=change[:, i + 1 :])
                strip_excess[:, i + 1 :] -= change[:, i + 1 :]
    opposite.copy_(host_opposite)
