"""Random draws of methods: by Philox, on the layer's GPU with the numbers that the CPU would draw.

Nothing is copied and nobody waits; of the generator a key is taken for each tensor of draws.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.philox import philox, to_device
from kvbench.methods._select import top_positions


def uniforms(
    generator: torch.Generator,
    device: torch.device,
    *shape: int,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Uniforms in [0, 1), [1, *shape], on `device`: one draw that every row of a batch shares.

    Rows of a batch are different prompts; sharing the draw makes a prompt's result independent of the
    batch it travels in.
    """
    return philox(_key(generator), 1, *shape, dtype=dtype, device=device)


def places(
    generator: torch.Generator, heads: int, n: int, count: int, device: torch.device
) -> Tensor:
    """`count` of the places 0 .. n - 1 for each head, without replacement, ascending:
    [1, heads, count] int64 on `device`."""
    words = philox(_key(generator), 1, heads, n, dtype=torch.int64, device=_maker(device))
    # The lower bits are the place itself: no two are equal, so that every device orders them alike.
    low = (1 << n.bit_length()) - 1
    words = (words & ~low) | torch.arange(n, device=words.device)
    return to_device(top_positions(words, count), device)


def place(generator: torch.Generator, heads: int, n: int, device: torch.device) -> Tensor:
    """One of the places 0 .. n - 1 for each head: [1, heads] int64 on `device`."""
    draws = uniforms(generator, _maker(device), heads, dtype=torch.float64)
    return to_device((draws * n).long(), device)


def _key(generator: torch.Generator) -> int:
    """A key of Philox, at least 2^32, so that a kernel's argument is of one type."""
    return int(torch.randint(2**32, 2**62, (), generator=generator))


def _maker(device: torch.device) -> torch.device:
    """The device on which draws for `device` are made: CUDA or the CPU, since other kinds of devices may
    lack float64 or sorting of int64."""
    return device if device.type == "cuda" else torch.device("cpu")
