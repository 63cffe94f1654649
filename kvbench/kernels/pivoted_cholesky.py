"""Randomly pivoted Cholesky of the exponential kernel over many small sets of keys at once (WildCat,
arXiv 2602.10056): each pivot is drawn in proportion to the part of the kernel's diagonal that the
pivots before it do not explain. Nystroem weights then express every key of the set by the pivots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXHAUSTED = 1e-6
"""A key whose residual is at most this, of a kernel of diagonal 1, counts as explained by the pivots.
The residual is 1 less a sum of squares in float32, whose rounding (6e-8 each) differs between
processors: that of a key which is equal to a pivot may be 2e-7."""

GRAM_LIMIT = 1024
"""Up to so many keys of a set, all inner products at once take less time than pivot by pivot."""


class Gaussian:
    """The kernel exp(-c |k_i - k_j|^2 / 2) within each of many sets of keys [sets, n, d] float32.

    Attributes:
        norms: [sets, n] float32, the keys' squared norms.
        factors: [sets] float32, the c of each set; 1 until a caller sets it, before the first row.
    """

    def __init__(self, keys: Tensor) -> None:
        self.keys = keys
        sets, n = keys.shape[:2]
        self.first = torch.arange(0, sets * n, n, device=keys.device)
        small = keys.shape[1] <= GRAM_LIMIT
        self.dots = keys @ keys.mT if small else None
        self.norms = (
            torch.einsum("bnd,bnd->bn", keys, keys)
            if self.dots is None
            else self.dots.diagonal(dim1=1, dim2=2).clone()
        )
        self.factors = torch.ones(len(keys), device=keys.device)

    def row(self, pivots: Tensor) -> Tensor:
        """The kernel of one key of each set (`pivots` [sets] int64) with all of the set: [sets, n]."""
        index = self.first + pivots
        if self.dots is None:
            rows = self.keys.flatten(0, 1).index_select(0, index)
            dots = (self.keys @ rows[..., None])[..., 0]
        else:
            dots = self.dots.flatten(0, 1).index_select(0, index)
        pivot_norms = self.norms.gather(1, pivots[:, None])
        exponents = torch.sub(dots, self.norms, alpha=0.5).sub_(pivot_norms, alpha=0.5)
        return exponents.mul_(self.factors[:, None]).clamp_(max=0).exp_()


def pivoted_cholesky(
    kernel: Gaussian, uniforms: Tensor, real: Tensor | None, wanted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw the pivots of every set and compute its Cholesky factor.

    The Gaussian kernel is the exponential kernel exp(c k_i.k_j) divided by exp((h_i + h_j) / 2), where
    h_i = c |k_i|^2. Step t draws key i with probability proportional to rho_i exp(h_i), the residual
    diagonal of the exponential kernel (rho is that of the Gaussian one), as the largest of
    log rho_i + h_i - log(-log u_i).

    Args:
        uniforms: [r, sets, n] in [0, 1), row t for step t.
        real: [sets, n] bool, False for places that only pad a set.
        wanted: [sets], how many pivots each set is to have, at most r; None for r each.

    Returns:
        pivots: [sets, r] int64 in order of choice; 0 where a set has no such pivot.
        factor: [sets, r, n] float32, row t the t-th column of the Cholesky factor; 0 where there is no
            pivot.
        chosen: [sets, r] bool, whether the set has a pivot of that step. A set with equal keys may have
            fewer than wanted.
    """
    sets, n = kernel.norms.shape
    steps, device = uniforms.shape[0], kernel.norms.device
    # -log(-log u) is Gumbel noise; u = 0 gives -inf, which never wins.
    noise = uniforms.to(torch.float32).log().neg_().log_().neg_()
    noise += kernel.factors[:, None] * kernel.norms
    if real is not None:
        noise.masked_fill_(~real, -math.inf)
    rho = torch.ones_like(kernel.norms) if real is None else real.float()
    pivots = torch.zeros(sets, steps, dtype=torch.int64, device=device)
    chosen = torch.zeros(sets, steps, dtype=torch.bool, device=device)
    factor = torch.zeros(sets, steps, n, device=device)
    for step in range(steps):
        pivot = noise[step].add_(rho.log()).argmax(-1)
        residual = rho.gather(1, pivot[:, None])[:, 0]
        is_chosen = residual > 0
        if wanted is not None:
            is_chosen &= wanted > step
        column = kernel.row(pivot)
        if step:
            earlier = factor[:, :step]
            pivot_row = earlier.gather(2, pivot[:, None, None].expand(-1, step, 1)).mT
            column = torch.baddbmm(column[:, None], pivot_row, earlier, alpha=-1)[:, 0]
        column *= torch.where(is_chosen, residual, torch.inf).rsqrt()[:, None]
        column *= rho > 0  # exactly 0 at the pivots before
        factor[:, step] = column
        rho = torch.addcmul(rho, column, column, value=-1)
        rho.masked_fill_(rho <= EXHAUSTED, 0.0)  # never drawn, since its logarithm is -inf
        rho.scatter_(1, pivot[:, None], (residual * ~is_chosen)[:, None])
        pivots[:, step] = pivot * is_chosen
        chosen[:, step] = is_chosen
    return pivots, factor, chosen


def nystroem(pivots: Tensor, factor: Tensor, chosen: Tensor) -> Tensor:
    """The Nystroem weights [sets, r, n] of every key, from what `pivoted_cholesky` returned: G_SS^-1
    G_S, where G_SS is the kernel among the pivots and G_S that of the pivots with all keys, by one
    triangular solve (G_S = L_S L^T). Rows of pivots that were not chosen are 0."""
    index = pivots[:, None].expand(-1, factor.shape[1], -1)
    corner = factor.gather(2, index).mT.tril()  # L_S: row a is the factor's row of pivot a
    corner = corner * chosen[:, None] * chosen[..., None]
    corner.diagonal(dim1=1, dim2=2).add_((~chosen).to(corner.dtype))
    return torch.linalg.solve_triangular(corner.mT, factor, upper=True)


def lambert_w(y: Tensor) -> Tensor:
    """The principal branch of Lambert's W of y > 0, in float64."""
    y = y.double()
    log_y = y.log()
    # Newton's iteration on w + log w = log y.
    w = torch.where(log_y > 1, log_y - log_y.clamp(min=1).log(), y / math.e)
    for _ in range(6):
        w = w / (1 + w) * (1 + log_y - w.log())
    return w
