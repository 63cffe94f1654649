"""Random numbers that are a function of a key: Philox 4x64-10, the same bits on every device.

Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011), section 3.2: block c of four
words is ten rounds over the counter (c + 1, 0, 0, 0) with the key (key, 0). numpy's bit generator counts
like this, so that it is the reference; on CUDA a Triton kernel computes the same words where they are
wanted, and the host neither draws nor copies. (4x32-10 would be as good, but numpy has it not.)
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels._choice import use_triton

_SHARES = {torch.int64: 1, torch.float64: 1, torch.float32: 2}
"""Numbers that a word gives, by dtype."""


def philox(
    key: int,
    *shape: int,
    dtype: torch.dtype,
    device: torch.device,
    implementation: str = "auto",
) -> Tensor:
    """Numbers of a key: the first of them, whatever the shape, begin the same.

    Args:
        key: 0 .. 2^63 - 1.
        dtype: int64, a word's bits; float64, in [0, 1), its upper 53 bits; float32, in [0, 1), the upper
            24 bits of its lower half, then of its upper half.
        implementation: auto (Triton on CUDA, numpy elsewhere) | triton | torch (numpy, then a copy that
            does not wait for the device).

    Raises:
        ValueError: another dtype; a forced implementation that is not possible.
    """
    if dtype not in _SHARES:
        raise ValueError(f"dtype is {dtype}; allowed: {', '.join(map(str, _SHARES))}")
    count = math.prod(shape)
    place = torch.empty(0, device=device)
    if use_triton("philox", implementation, place, rows_on_chip=False):
        from kvbench.kernels import _triton_philox

        out = torch.empty(shape, dtype=dtype, device=device)
        return _triton_philox.fill(out, key) if count else out
    return to_device(torch.from_numpy(_numbers(key, count, dtype)).view(shape), device)


def _numbers(key: int, count: int, dtype: torch.dtype) -> np.ndarray:
    words = -(-count // _SHARES[dtype])
    raw = np.random.Philox(key=key).random_raw(words)
    if dtype == torch.int64:
        return raw.view(np.int64)
    if dtype == torch.float64:
        return (raw >> np.uint64(11)) * 2.0**-53
    halves = raw.view(np.uint32)[:count]  # the lower half of a word comes first
    halves >>= np.uint32(8)
    return np.multiply(halves, np.float32(2.0**-24), dtype=np.float32, casting="unsafe")


def to_device(draws: Tensor, device: torch.device) -> Tensor:
    """Draws made on the CPU, on `device`; without waiting for what a GPU has still to do."""
    if device.type == "cuda" and draws.device.type == "cpu":
        return draws.pin_memory().to(device, non_blocking=True)
    return draws.to(device)
