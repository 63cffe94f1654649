"""The rotation of rotary position encoding."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate vectors x [..., p, dim] by cosines and sines [p, width] or [heads, p, width]: the first
    half of the first `width` channels against the second half. Other channels stay as they are."""
    width = cos.shape[-1]
    half = width // 2
    out = torch.empty_like(x)
    torch.mul(x[..., :width], cos, out=out[..., :width])
    out[..., :half].addcmul_(x[..., half:width], sin[..., :half], value=-1.0)
    out[..., half:width].addcmul_(x[..., :half], sin[..., half:])
    out[..., width:] = x[..., width:]
    return out


def unrotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Undo `rotate`."""
    # Some models scale the table, so that its cosines and sines are not of norm 1.
    squared_norm = cos.square() + sin.square()
    return rotate(x, cos / squared_norm, -sin / squared_norm)
