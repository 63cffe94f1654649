"""Least squares in float32 by the normal equations: for many rows, few columns and many targets."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.kv import KVError

BLOCK = 64
"""How many columns of a Gram matrix are computed at a time."""
JITTERS = (0.0, 1e-5, 1e-4, 1e-3)
"""Added to the unit diagonal of a matrix, one after the other, until it can be factored."""


def least_squares(
    columns: Tensor,
    target: Tensor,
    ridge: float = 0.0,
    gram: Tensor | None = None,
    penalty: Tensor | None = None,
) -> Tensor:
    """The x of least ||columns x - target||^2 + penalty * ||x||^2.

    It solves the t x t normal equations. Where there are fewer rows than columns, it solves the m x m
    equations of the x of least norm instead. The matrix is scaled to a unit diagonal before it is
    factored, and the diagonal is raised where the matrix is singular (`JITTERS`). Its products are
    rounded to float32, so one step of iterative refinement by the residual follows.

    Args:
        columns: [m, t] float32.
        target: [m, k] float32.
        ridge: the penalty, as a share of the squared spectral norm of `columns`.
        gram: `gram_of` the columns, if the caller has computed it.
        penalty: a number, in place of `ridge`.

    Returns:
        x, [t, k] float32.
    """
    rows, count = columns.shape
    wide = rows < count
    normal = gram_of(columns.mT if wide else columns) if gram is None or wide else gram.clone()
    if penalty is None:
        penalty = ridge * largest_eigenvalue(normal) if ridge else normal.new_zeros(())
    normal.diagonal().add_(penalty)
    norms = normal.diagonal().sqrt().clamp(min=1e-30)[:, None]
    normal.div_(norms).div_(norms.mT)
    factor = cholesky(normal)

    def solve(right: Tensor) -> Tensor:
        return torch.cholesky_solve(right / norms, factor) / norms

    if wide:
        multipliers = solve(target)
        residual = target - columns @ (columns.mT @ multipliers) - penalty * multipliers
        return columns.mT @ (multipliers + solve(residual))
    solution = solve(columns.mT @ target)
    residual = columns.mT @ (target - columns @ solution) - penalty * solution
    return solution + solve(residual)


def bounded_least_squares(
    columns: Tensor,
    target: Tensor,
    *,
    start: Tensor,
    least: Tensor,
    most: Tensor,
    ridge: float,
    steps: int,
) -> Tensor:
    """The x between `least` and `most` of least ||columns x - target||^2 + ridge * ||columns||_2^2 *
    ||x - start||^2, by `steps` steps of Nesterov's projected gradient from `start`.

    Args:
        columns: [m, t] float32 without a negative element.
        target: [m]; start, least, most: [t].
    """
    wide = columns.shape[0] < columns.shape[1]
    # A few large operations in each step: there are many heads, and many steps for each.
    if wide:
        norm = squared_norm(columns)
    else:
        gram = gram_of(columns)
        norm = largest_eigenvalue(gram)
    step = 1 / ((1.1 + ridge) * norm)
    remains = 1 - ridge * norm * step
    constant = step * (columns.mT @ target) + (1 - remains) * start
    if wide:
        scaled = columns * step.sqrt()

        def follow(x: Tensor) -> Tensor:
            return torch.addmv(constant + remains * x, scaled.mT, scaled @ x, alpha=-1)
    else:
        matrix = gram.mul_(-step)
        matrix.diagonal().add_(remains)

        def follow(x: Tensor) -> Tensor:
            return torch.addmv(constant, matrix, x)

    x = ahead = start
    momentum = 1.0
    for _ in range(steps):
        moved = follow(ahead).clamp_(least, most)
        following = (1 + math.sqrt(1 + 4 * momentum**2)) / 2
        ahead = moved.lerp(x, (1 - momentum) / following)
        x, momentum = moved, following
    return x


def gram_of(columns: Tensor) -> Tensor:
    """The Gram matrix columns^T columns, [t, t], of columns [m, t].

    Only the lower triangle is computed, a block of columns at a time, and copied to the upper one.
    """
    gram = columns.new_zeros(columns.shape[1], columns.shape[1])
    for start in range(0, len(gram), BLOCK):
        stop = start + BLOCK
        torch.mm(columns[:, start:].mT, columns[:, start:stop], out=gram[start:, start:stop])
    return gram.tril_().add_(gram.tril(-1).mT)


def extend_gram(gram: Tensor, columns: Tensor) -> Tensor:
    """The Gram matrix of columns [m, t], of which the first have the Gram matrix `gram`."""
    known = len(gram)
    new_columns = columns.mT @ columns[:, known:]
    return torch.cat([torch.cat([gram, new_columns[:known].mT]), new_columns], dim=1)


def cholesky(matrix: Tensor) -> Tensor:
    """The lower Cholesky factor of a matrix [t, t] of unit diagonal, which is raised where the matrix
    is singular (`JITTERS`). Writes to the diagonal of `matrix`.
    """
    for jitter in JITTERS:
        matrix.diagonal().fill_(1.0 + jitter)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        if not failed:
            return factor
    raise KVError("least squares of keys, values or queries that are not finite; allowed: numbers")


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """The largest eigenvalue of a symmetric matrix [t, t] without a negative element."""
    return power_iteration(lambda vector: gram @ vector, torch.ones_like(gram[0]))


def squared_norm(columns: Tensor) -> Tensor:
    """The squared spectral norm of columns [m, t] without a negative element."""
    return power_iteration(lambda x: columns.mT @ (columns @ x), torch.ones_like(columns[0]))


def power_iteration(multiply: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
    """The largest eigenvalue of the matrix that `multiply` multiplies by, by eight steps from
    `vector`."""
    for _ in range(8):
        vector = multiply(vector)
        vector = vector / vector.norm().clamp(min=1e-30)
    return (vector @ multiply(vector)).clamp(min=1e-12)
