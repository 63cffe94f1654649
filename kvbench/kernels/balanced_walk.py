"""The self-balancing walk of BalanceKV: signs for the tokens of every block, all blocks at once."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

GROUP = 128
"""Blocks walked together: enough to hide the loop over steps, few enough to stay in cache."""
CHUNK = 8
"""Blocks whose kernel matrices are formed together, in cache."""
STRIP = 64
"""Rows of the kernel matrix formed at once, from the first column to the diagonal."""
SAFE_EXPONENT = 60.0
"""Rows whose exponents are certainly below this need no scaling in float32."""


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
    """Signs of the walk within each block: the first is +1; for i >= 1,

        inner_i = sum over j < i of G_ij s_j,    s_i = +1 if u_i < 1/2 - gamma * inner_i, else -1,
        G_ij = exp(temperature * <k_i, k_j> / sqrt(d) - beta) * (<w_i v_i, w_j v_j> + offset),

    with k centred within its block. The kernel matrix is never held whole: see `_torch_walk` and
    `_triton_walk` for how it is cut up.

    Keys of any norm are safe: a row whose exponents could overflow is scaled by its largest one (the
    comparison is scaled alike), so that probability saturates where the plain formula gives NaN.

    Leading dimensions (...), none or [batch, kv_heads], are those of every tensor.

    Args:
        keys: [..., rows, d], any float dtype; computed in float32 (float64 inputs in float64).
        values: [..., rows, e], or None for G without its value factor.
        index: [..., blocks, b] int64, the row of each place; places beyond `counts` hold any valid
            row.
        uniforms: [..., blocks, b] in [0, 1), one per place (the first of a block is not used).
        gamma: >= 0; 0 makes every sign a fair coin (but the first).
        offset: added to the values' inner product.
        temperature, beta: of the exponent.
        counts: [..., blocks] real rows of each block, from the start; None when all are full. Signs
            of places beyond mean nothing.
        weights: [..., blocks, b], factors on the values; None for 1.
        centre: mean (over a block's real rows) | released (their sum over b, as if the block were
            padded with zero rows) | none.
        implementation: auto (Triton on CUDA, torch elsewhere) | triton | torch.

    Returns:
        [..., blocks, b] bool, True for +1.

    Raises:
        ValueError: a forced implementation that is not possible.
    """
    if gamma == 0.0:
        positive = uniforms < 0.5
        positive[..., :1] = True
        return positive
    scale, reach = temperature / keys.shape[-1] ** 0.5, math.exp(beta) / gamma
    tensors = (keys,) if values is None else (keys, values)
    if use_triton("balanced_walk", implementation, *tensors):
        from kvbench.kernels import _triton_walk

        def led(x: Tensor) -> Tensor:
            return x if index.ndim == 4 else x[None, None]

        return _triton_walk.walk(
            led(keys),
            None if values is None else led(values),
            led(index),
            led(uniforms),
            scale=scale,
            offset=offset,
            reach=reach,
            counts=None if counts is None else led(counts),
            weights=None if weights is None else led(weights),
            centre=centre,
        ).view(index.shape)
    b, rows = index.shape[-1], keys.shape[-2]
    if index.ndim > 2:
        heads = math.prod(index.shape[:-2])
        origin = torch.arange(heads, device=index.device) * rows
        index_of_all = (index.reshape(heads, -1) + origin.unsqueeze(-1)).view(-1, b)
    else:
        index_of_all = index
    return _torch_walk(
        keys.reshape(-1, keys.shape[-1]),
        None if values is None else values.reshape(-1, values.shape[-1]),
        index_of_all,
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
    """`balanced_walk` with no leading dimensions, [blocks, b].

    The kernel matrix is formed in strips of rows and only up to the diagonal; what earlier strips
    contribute to `inner` is summed at once, so only the steps inside a strip are walked one by one.
    """
    blocks, b = index.shape
    dtype = torch.promote_types(keys.dtype, torch.float32)
    # How far the sum over the signs so far exceeds the threshold: the next sign is its opposite (at
    # zero, too: -1). The first sign has no choice.
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
        _walk([strip[:size] for strip in kernel], excess[group], opposite[group])
    return opposite < 0


def _centred(k: Tensor, counts: Tensor | None, centre: str) -> Tensor:
    """Keys [blocks, b, d] with padded places zeroed, centred within each block (in place)."""
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
    """Fill `out`, the strips [blocks, rows, end] of G, scaled where they might overflow.

    Left of the diagonal tile each row is scaled by its own factor. Row i of the diagonal tile is what
    place i adds to later places, so there each column is scaled, by the factor of the later place.

    Returns:
        [blocks, b] float32: row i was multiplied by e^-shift[i]. It is the row's largest exponent over
        earlier places, at least 0, where a bound (Cauchy-Schwarz) says that the row might overflow, and
        0 elsewhere. None where no row might.
    """
    norms = torch.linalg.vector_norm(k, dim=-1)
    bound = norms * norms.amax(-1, keepdim=True) * abs(scale)
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
    """Scale rows that might overflow (see `_form_kernel`), in place.

    Args:
        e: [blocks, rows, end], the exponents of a strip: each row's largest one is subtracted.
        shift: [blocks, rows], filled with what was subtracted.
        risky: [blocks, rows] bool, the rows to scale.
    """
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
    tile -= shift.unsqueeze(1)
    # Smaller exponents add nothing beside exp(0), and their denormal numbers are slow.
    e.clamp_(min=-SAFE_EXPONENT)


def _walk(kernel: list[Tensor], excess: Tensor, opposite: Tensor) -> None:
    """Walk through the places of each block in order.

    The steps run in numpy on the host: each handles so few numbers that it costs one call, and torch's
    calls take twice as long.

    Args:
        kernel: the strips [blocks, rows, end] of G, see `_form_kernel`.
        excess: [blocks, b], overwritten: how far the sum over earlier signs exceeds the threshold
            of each place; without earlier signs (u - 1/2) / gamma.
        opposite: [blocks, b], filled with minus the sign of each place.
    """
    left, minus = excess.cpu(), opposite.cpu()  # themselves on a CPU
    for strip in kernel:
        g, end = strip.cpu(), strip.shape[2]
        top = end - g.shape[1]
        if top:
            left[:, top:end] -= torch.bmm(g[:, :, :top], minus[:, :top, None]).squeeze(-1)
        tile = g[:, :, top:].numpy()  # row i: what place i does to later ones
        moved, after = np.empty_like(tile[:, 0]), left[:, top:end].numpy()
        signs = minus[:, top:end].numpy()
        for i in range(end - top):
            # copysign of +0 is +1, and the difference of equal numbers is +0.
            step = np.copysign(1.0, after[:, i, None], out=signs[:, i, None])
            if i + 1 < end - top:
                np.multiply(tile[:, i, i + 1 :], step, out=moved[:, i + 1 :])
                after[:, i + 1 :] -= moved[:, i + 1 :]
    opposite.copy_(minus)
