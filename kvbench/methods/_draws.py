"""What methods draw at random, in two versions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kvbench.kernels.philox import philox, to_device
from kvbench.methods._select import top_positions
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class Drawing(Method):
    """A method that draws at random.

    Args:
        draws: v1 (torch's generator, on the CPU) | v2 (Philox, on the layer's GPU, with the numbers that
            the CPU would draw: nothing is copied and nobody waits; of the generator a key is taken for
            each tensor of draws). None: what the job says, v1 where there is none.
    """

    draws: Literal["v1", "v2"] | None = None

    def draws_as(self, version: str) -> dict[str, Any]:
        """See `Method.draws_as`. v1 is what nobody has to say, so that old runs keep their names."""
        return {"draws": "v2" if (self.draws or version) == "v2" else None}

    def uniforms(
        self,
        generator: torch.Generator,
        device: torch.device,
        *shape: int,
        dtype: torch.dtype = torch.float32,
    ) -> Tensor:
        """Uniforms in [0, 1), [1, *shape], on the CPU with v1, else on `device`: one draw that every row
        of a batch shares.

        Rows of a batch are different prompts; sharing the draw makes a prompt's result independent of
        the batch it travels in.
        """
        if self.draws != "v2":
            return torch.rand(1, *shape, generator=generator, dtype=dtype)
        return philox(_key(generator), 1, *shape, dtype=dtype, device=device)

    def places(
        self, generator: torch.Generator, heads: int, n: int, count: int, device: torch.device
    ) -> Tensor:
        """`count` of the places 0 .. n - 1 for each head, without replacement, ascending:
        [1, heads, count] int64 on `device`."""
        if self.draws != "v2":
            # float64: float32 draws of a long prompt would tie.
            draws = torch.rand(1, heads, n, generator=generator, dtype=torch.float64)
            return to_device(top_positions(draws, count), device)
        words = philox(_key(generator), 1, heads, n, dtype=torch.int64, device=_maker(device))
        # The lower bits are the place itself: no two are equal, so that every device orders them alike.
        low = (1 << n.bit_length()) - 1
        words = (words & ~low) | torch.arange(n, device=words.device)
        return to_device(top_positions(words, count), device)

    def place(self, generator: torch.Generator, heads: int, n: int, device: torch.device) -> Tensor:
        """One of the places 0 .. n - 1 for each head: [1, heads] int64 on `device`."""
        on = _maker(device)
        draws = self.uniforms(generator, on, heads, dtype=torch.float64)
        return to_device((draws * n).long(), device)


def _key(generator: torch.Generator) -> int:
    """A key of Philox, at least 2^32, so that a kernel's argument is of one type."""
    return int(torch.randint(2**32, 2**62, (), generator=generator))


def _maker(device: torch.device) -> torch.device:
    """Where draws for `device` are made: not every other kind of device has float64 and sorts int64."""
    return device if device.type == "cuda" else torch.device("cpu")
