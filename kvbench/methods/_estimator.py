"""Attention estimators whose numerator and denominator sample different tokens, as one set of
entries."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvbench.kv import CompressedKV, LayerKV, rows_at

Sample = tuple[Tensor, Tensor]
"""A weighted sample of a stream of tokens: positions in the stream [heads, c] int64 and log-weights
[heads, c]. A head with fewer tokens than another is padded with position -1 and log-weight -inf."""

MIX = 2.0**-10
"""The share of the denominator that is estimated from the numerator's sample (see `combine`)."""


def combine(
    layer: LayerKV, numerator: Sample, denominator: Sample, start: int, exact: Tensor
) -> CompressedKV:
    """Build entries whose ordinary weighted attention is the quotient of two estimators.

    The quotient is (sum_N a_i e_i v_i + sum_R e_i v_i) / (sum_D b_i e_i + sum_R e_i) with e_i =
    exp(q.k_i), where N and D are the samples of numerator and denominator with weights a_i and b_i, and
    R are entries that are kept exactly. A softmax has one weight per entry. So the denominator is
    estimated by the mixture (D + MIX * N) / (1 + MIX) of two estimators of the same sum: entries of N
    have weight MIX * a_i and values multiplied by (1 + MIX) / MIX, entries of D have weight b_i and no
    value, entries of R have weight 1 + MIX and their own values. The mixture is unbiased if N and D
    are, and differs from D by at most MIX times the difference of the two.

    Args:
        numerator, denominator: samples of the streams of all heads, [batch * kv_heads, c].
        start: the prompt position of a stream's first token.
        exact: [c] int64, the prompt positions of R.

    Returns:
        the entries of D, then those of N, then those of R.
    """
    batch, heads = layer.keys.shape[:2]
    numerator, denominator = _trimmed(layer, start, [numerator, denominator])
    numerator_positions, numerator_weights = numerator
    denominator_positions, denominator_weights = denominator
    exact_positions = exact.to(layer.keys.device).expand(batch, heads, -1)
    exact_weights = torch.full(
        exact_positions.shape, math.log1p(MIX), device=exact_positions.device
    )
    positions = torch.cat([denominator_positions, numerator_positions, exact_positions], dim=-1)
    log_weights = torch.cat(
        [denominator_weights, numerator_weights + math.log(MIX), exact_weights], dim=-1
    )
    keys_only = denominator_positions.shape[-1]
    sampled = numerator_positions.shape[-1]
    keys = rows_at(layer.keys, positions.clamp(min=0))
    values = rows_at(layer.values, positions[..., keys_only:].clamp(min=0))
    scaled = values[:, :, :sampled].float() * ((1 + MIX) / MIX)
    values[:, :, :sampled] = scaled.to(values.dtype)
    return CompressedKV(keys, values, log_weights, positions, keys_only=keys_only)


def _trimmed(layer: LayerKV, start: int, samples: Sequence[Sample]) -> list[Sample]:
    """The samples by prompt position, [batch, kv_heads, c], without the columns that are padding in
    every head, which a cache would store. The CPU waits for the device once for all samples."""
    device = layer.keys.device
    shape = (*layer.keys.shape[:2], -1)
    by_head = []
    for stream_positions, log_weights in samples:
        positions = torch.where(stream_positions < 0, -1, stream_positions + start)
        by_head.append((positions.to(device).view(shape), log_weights.to(device).view(shape)))
    padding = [log_weights == -math.inf for _, log_weights in by_head]
    widths = torch.stack([(~mask).sum(-1).max() for mask in padding]).tolist()
    trimmed = []
    for (positions, log_weights), mask, width in zip(by_head, padding, widths, strict=True):
        padding_last = mask.int().argsort(dim=-1, stable=True)[..., :width]
        trimmed.append((positions.gather(-1, padding_last), log_weights.gather(-1, padding_last)))
    return trimmed
