"""Random numbers that are a function of a key: Philox 4x64-10, the same bits on every device.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.2: block c of four
words of 64 bits is ten rounds over the counter (c + 1, 0, 0, 0) with the key (key, 0). numpy's bit
generator counts like this and is the reference. On CUDA a Triton kernel computes the same words on the
device, so that the host neither draws nor copies. (Philox 4x32-10 would be as good, but numpy does not
have it.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

_PER_WORD = {torch.int64: 1, torch.float64: 1, torch.float32: 2}  # numbers that a word gives


def philox(
    key: int,
    *shape: int,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str = "auto",
) -> Tensor:
    """The first numbers of a key in row-major order; a longer or shorter shape begins with the same.

    Args:
        key: 0 .. 2^63 - 1.
        dtype: int64 (the bits of a word) | float64 (in [0, 1), from the upper 53 bits of a word) |
            float32 (in [0, 1), two numbers of a word: from the upper 24 bits of its lower half, then
            of its upper half).
        implementation: auto (Triton on CUDA, numpy elsewhere) | triton | torch (numpy, then a copy
            that does not wait for the device).
    """
    if dtype not in _PER_WORD:
        raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, _PER_WORD))}")
    count = math.prod(shape)
    on_device = torch.empty(0, device=device)
    if use_triton("philox", implementation, on_device, rows_on_chip=False):
        from kvbench.kernels import _triton_philox

        out = torch.empty(shape, dtype=dtype, device=device)
        return _triton_philox.fill(out, key) if count else out
    return to_device(torch.from_numpy(_numbers(key, count, dtype)).view(shape), device)


def _numbers(key: int, count: int, dtype: torch.dtype) -> np.ndarray:
    words = np.random.Philox(key=key).random_raw(-(-count // _PER_WORD[dtype]))
    if dtype == torch.int64:
        return words.view(np.int64)
    if dtype == torch.float64:
        return (words >> np.uint64(11)) * 2.0**-53
    halves = words.view(np.uint32)[:count]  # the lower half of a word comes first
    halves >>= np.uint32(8)
    return np.multiply(halves, np.float32(2.0**-24), dtype=np.float32, casting="unsafe")


def to_device(draws: Tensor, device: torch.device) -> Tensor:
    """Copy draws to `device`, without waiting for the work that is queued on a GPU."""
    if device.type == "cuda" and draws.device.type == "cpu":
        return draws.pin_memory().to(device, non_blocking=True)
    return draws.to(device)
