"""Random draws of methods, by Philox: a GPU draws the same numbers as the CPU.

The CPU generator gives one key for each tensor of draws. The numbers are made on the layer's own
device, so that nothing is copied and the CPU does not wait for the GPU.
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
    """Draw uniform numbers in [0, 1), [1, *shape], on `device`.

    All rows of a batch, which are different prompts, share the draws. So the result of a prompt does not
    depend on the batch that contains it.
    """
    return philox(_key(generator), 1, *shape, dtype=dtype, device=device)


def places(
    generator: torch.Generator, heads: int, n: int, count: int, device: torch.device
) -> Tensor:
    """Draw `count` of the places 0 .. n - 1 for each head without replacement: [1, heads, count] int64
    on `device`, ascending."""
    words = philox(_key(generator), 1, heads, n, dtype=torch.int64, device=_drawing_device(device))
    # The lower bits are replaced by the place. So no two words are equal, and every device orders them
    # in the same way.
    lower_bits = (1 << n.bit_length()) - 1
    words = (words & ~lower_bits) | torch.arange(n, device=words.device)
    return to_device(top_positions(words, count), device)


def place(generator: torch.Generator, heads: int, n: int, device: torch.device) -> Tensor:
    """Draw one of the places 0 .. n - 1 for each head: [1, heads] int64 on `device`."""
    draws = uniforms(generator, _drawing_device(device), heads, dtype=torch.float64)
    return to_device((draws * n).long(), device)


def _key(generator: torch.Generator) -> int:
    """Draw a key of Philox. It is at least 2^32, so that Triton always sees a 64-bit argument."""
    return int(torch.randint(2**32, 2**62, (), generator=generator))


def _drawing_device(device: torch.device) -> torch.device:
    """The device that draws for `device`: `device` itself on CUDA, else the CPU, since other devices may
    lack float64 or cannot sort int64."""
    return device if device.type == "cuda" else torch.device("cpu")
