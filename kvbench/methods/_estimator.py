"""Estimators whose numerator and denominator hold different entries, as one set of entries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.kv import CompressedKV, LayerKV, rows_at

MIX = 2.0**-10
"""Share of the denominator that is estimated from the numerator's entries (see `combine`)."""


def combine(
    layer: LayerKV,
    numerator: tuple[Tensor, Tensor],
    denominator: tuple[Tensor, Tensor],
    exact: Tensor,
) -> CompressedKV:
    """Entries whose ordinary weighted attention is the quotient of two estimators.

    Wanted: (sum_N a_i e_i v_i + sum_R e_i v_i) / (sum_D b_i e_i + sum_R e_i) with e_i = exp(q.k_i),
    N and D different samples of the prompt, R kept exactly. One softmax has one weight per entry, so
    the denominator is taken as the mixture (D + MIX * N) / (1 + MIX) of the two estimators of the
    same sum: entries of N weigh MIX * a_i and carry values scaled by (1 + MIX) / MIX, entries of D
    weigh b_i and hold a key only, entries of R weigh 1 + MIX and keep their values. The mixture is
    as unbiased as its parts and differs from D by at most MIX relative to their difference.

    Returns the entries of D, which have no values, then those of N and of R.

    Args:
        numerator, denominator: prompt positions [batch, kv_heads, c] int64 (-1 pads) and log-weights
            log a, log b [batch, kv_heads, c] float32 (-inf on padding).
        exact: [c] int64, the prompt positions of R.
    """
    batch, heads = layer.keys.shape[:2]
    numerator, denominator = _trimmed(numerator, denominator)
    recent = exact.to(layer.keys.device).expand(batch, heads, -1)
    positions = torch.cat([denominator[0], numerator[0], recent], dim=-1)
    of_recent = torch.full(recent.shape, math.log1p(MIX), device=recent.device)
    log_weights = torch.cat([denominator[1], numerator[1] + math.log(MIX), of_recent], dim=-1)
    keys_only, sampled = denominator[0].shape[-1], numerator[0].shape[-1]
    keys = rows_at(layer.keys, positions.clamp(min=0))
    values = rows_at(layer.values, positions[..., keys_only:].clamp(min=0))
    scaled = values[:, :, :sampled].float() * ((1 + MIX) / MIX)
    values[:, :, :sampled] = scaled.to(values.dtype)
    return CompressedKV(keys, values, log_weights, positions, keys_only=keys_only)


def _trimmed(*samples: tuple[Tensor, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Positions and log-weights without the room that no head uses, which would be held all the same:
    [batch, kv_heads, most]. A GPU is asked once for all."""
    empty = [log_weights == -math.inf for _, log_weights in samples]
    most = torch.stack([(~one).sum(-1).max() for one in empty]).tolist()
    trimmed = []
    for sample, one, count in zip(samples, empty, most, strict=True):
        order = one.int().argsort(dim=-1, stable=True)[..., :count]
        trimmed.append((sample[0].gather(-1, order), sample[1].gather(-1, order)))
    return trimmed
