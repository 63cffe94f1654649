"""Estimators whose numerator and denominator hold different entries, as one set of entries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kvbench.kv import CompressedKV, LayerKV, rows_at

Sample = tuple[Tensor, Tensor]
"""Tokens that stand for a stream: positions in it [heads, c] int64 and log-weights [heads, c]; where a
head has fewer than another, -1 and -inf."""

MIX = 2.0**-10
"""Share of the denominator that is estimated from the numerator's entries (see `combine`)."""


def combine(
    layer: LayerKV, numerator: Sample, denominator: Sample, start: int, exact: Tensor
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
        numerator, denominator: of the streams of all heads, [batch * kv_heads, c].
        start: the prompt position of a stream's first token.
        exact: [c] int64, the prompt positions of R.
    """
    batch, heads = layer.keys.shape[:2]
    above, below = _trimmed(layer, start, numerator, denominator)
    recent = exact.to(layer.keys.device).expand(batch, heads, -1)
    positions = torch.cat([below[0], above[0], recent], dim=-1)
    of_recent = torch.full(recent.shape, math.log1p(MIX), device=recent.device)
    log_weights = torch.cat([below[1], above[1] + math.log(MIX), of_recent], dim=-1)
    keys_only, sampled = below[0].shape[-1], above[0].shape[-1]
    keys = rows_at(layer.keys, positions.clamp(min=0))
    values = rows_at(layer.values, positions[..., keys_only:].clamp(min=0))
    scaled = values[:, :, :sampled].float() * ((1 + MIX) / MIX)
    values[:, :, :sampled] = scaled.to(values.dtype)
    return CompressedKV(keys, values, log_weights, positions, keys_only=keys_only)


def _trimmed(layer: LayerKV, start: int, *samples: Sample) -> list[Sample]:
    """Prompt positions and log-weights [batch, kv_heads, most] without the room that no head uses,
    which would be held all the same. A GPU is asked once for all."""
    device, shape = layer.keys.device, (*layer.keys.shape[:2], -1)
    pairs = [(torch.where(at < 0, -1, at + start), weights) for at, weights in samples]
    placed = [(p.to(device).view(shape), w.to(device).view(shape)) for p, w in pairs]
    empty = [log_weights == -math.inf for _, log_weights in placed]
    most = torch.stack([(~of_prompt).sum(-1).max() for of_prompt in empty]).tolist()
    trimmed = []
    for (positions, weights), of_prompt, count in zip(placed, empty, most, strict=True):
        order = of_prompt.int().argsort(dim=-1, stable=True)[..., :count]
        trimmed.append((positions.gather(-1, order), weights.gather(-1, order)))
    return trimmed
