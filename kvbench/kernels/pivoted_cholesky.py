"""Randomly pivoted Cholesky of the exponential kernel over many small sets of keys at once.

The set-up of WildCat (arXiv 2602.10056): a few pivots of a set, drawn in proportion to what the pivots
before them leave unexplained, and the Nystroem weights that express every key through the pivots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EXHAUSTED = 1e-6
"""Residual of a kernel of diagonal 1 up to which a token counts as explained by the pivots. It is 1 less
a sum of squares in float32, whose rounding (6e-8 each) differs between processors: of a key that is
equal to a pivot, 2e-7 may be left."""

GRAM_LIMIT = 1024
"""Sets up to this size get all their inner products at once, which is faster than pivot by pivot."""


class Gaussian:
    """The kernel exp(-c |k_i - k_j|^2 / 2) within each of many sets of keys, row by row.

    Args:
        keys: [sets, n, d] float32.

    Attributes:
        norms: [sets, n], squared.
        factors: [sets] c, set before the first row is asked for.
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
        """Kernel of one token of each set [sets] with all of the set, [sets, n]."""
        index = self.first + pivots
        if self.dots is None:
            rows = self.keys.flatten(0, 1).index_select(0, index)
            dots = (self.keys @ rows[..., None])[..., 0]
        else:
            dots = self.dots.flatten(0, 1).index_select(0, index)
        own = self.norms.gather(1, pivots[:, None])
        exponents = torch.sub(dots, self.norms, alpha=0.5).sub_(own, alpha=0.5)
        return exponents.mul_(self.factors[:, None]).clamp_(max=0).exp_()


def pivoted_cholesky(
    kernel: Gaussian, uniforms: Tensor, real: Tensor | None, wanted: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Pivots and Cholesky factor of every set.

    The Gaussian kernel is the exponential kernel exp(c k_i.k_j) over exp((h_i + h_j) / 2), where
    h_i = c |k_i|^2. Step t draws token i with probability proportional to rho_i exp(h_i), the residual
    diagonal of the exponential kernel, as the largest of log rho_i + h_i - log(-log u_i).

    Args:
        uniforms: [r, sets, n] in [0, 1), row t for step t.
        real: [sets, n] bool, False for places that only fill a set up; None: all are real.
        wanted: [sets] pivots each set is to have, at most r; None: r each.

    Returns:
        pivots: [sets, r] int64 in order of choice; 0 where a set has no such pivot.
        factor: [sets, r, n], row t the t-th column of the Cholesky factor; 0 where there is no pivot.
        chosen: [sets, r] bool, whether the set has a pivot of that step. A set whose residual is
            exhausted (equal keys) has fewer than wanted.
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
        more = residual > 0
        if wanted is not None:
            more &= wanted > step
        column = kernel.row(pivot)
        if step:
            done = factor[:, :step]
            before = done.gather(2, pivot[:, None, None].expand(-1, step, 1)).mT
            column = torch.baddbmm(column[:, None], before, done, alpha=-1)[:, 0]
        column *= torch.where(more, residual, torch.inf).rsqrt()[:, None]
        column *= rho > 0  # exactly nothing at the pivots before
        factor[:, step] = column
        rho = torch.addcmul(rho, column, column, value=-1)
        rho.masked_fill_(rho <= EXHAUSTED, 0.0)  # never drawn, since its logarithm is -inf
        rho.scatter_(1, pivot[:, None], (residual * ~more)[:, None])
        pivots[:, step] = pivot * more
        chosen[:, step] = more
    return pivots, factor, chosen


def nystroem(pivots: Tensor, factor: Tensor, chosen: Tensor) -> Tensor:
    """Nystroem weights [sets, r, n] of every key: G_SS^-1 G_S with G_SS the kernel among the pivots and
    G_S that of the pivots with all keys, by one triangular solve (G_S = L_S L^T). Rows of pivots that
    were not chosen are 0."""
    index = pivots[:, None].expand(-1, factor.shape[1], -1)
    corner = factor.gather(2, index).mT.tril()  # row a: the pivot a in the columns so far
    corner = corner * chosen[:, None] * chosen[..., None]
    corner.diagonal(dim1=1, dim2=2).add_((~chosen).to(corner.dtype))
    return torch.linalg.solve_triangular(corner.mT, factor, upper=True)


def lambert_w(y: Tensor) -> Tensor:
    """Principal Lambert W of y > 0 in float64, by Newton's iteration on logarithms."""
    y = y.double()
    log_y = y.log()
    w = torch.where(log_y > 1, log_y - log_y.clamp(min=1).log(), y / math.e)
    for _ in range(6):
        w = w / (1 + w) * (1 + log_y - w.log())
    return w
