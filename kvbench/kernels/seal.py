"""Tensors that several methods read: a seal tells whether one of them wrote."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.kernels.elapsed import Elapsed

SEALED_ENDS, SEALED_BETWEEN = 32, 64
"""Tokens of a shared tensor that a `Seal` copies: so many at either end, at most so many in between."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


class Seal:
    """Tells whether a tensor that several methods read was written to.

    torch counts the writes it sees (``Tensor._version``; not of tensors made under inference_mode).
    What it does not see (writes through ``.data``, a numpy view, a kernel of one's own) is looked for in
    a copy of `SEALED_ENDS` tokens at either end and up to `SEALED_BETWEEN` others, with all heads and
    channels: a write to every token, or to any of those, is found; one to a single other token may
    not be.

    Args:
        tensor: tokens along its longest dimension.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.version = self._writes(tensor)
        self.sample = self._sample(tensor)

    def written(self, tensor: Tensor) -> Tensor | bool:
        """The same, without waiting for a GPU where only the copy can tell: then a tensor on it."""
        if self._writes(tensor) != self.version:
            return True
        sample = self._sample(tensor)
        return sample.shape != self.sample.shape or (sample != self.sample).any()

    def broken(self, tensor: Tensor, closely: bool = True) -> bool:
        """Whether `tensor`, the one that was sealed, was written to since; the copy is looked at only
        `closely`."""
        if self._writes(tensor) != self.version:
            return True
        if not closely:
            return False
        sample = self._sample(tensor)
        # compared bit by bit: not every prompt query need be a number
        return sample.shape != self.sample.shape or not torch.equal(sample, self.sample)

    @staticmethod
    def _writes(tensor: Tensor) -> int | None:
        return None if tensor.is_inference() else tensor._version

    @staticmethod
    def _sample(tensor: Tensor) -> Tensor:
        if tensor.dim():
            x = tensor.movedim(max(range(tensor.dim()), key=lambda i: tensor.shape[i]), 0)
            first, last = SEALED_ENDS, len(x) - SEALED_ENDS
            if last - first > SEALED_BETWEEN:
                step = -(-(last - first) // SEALED_BETWEEN)
                tensor = torch.cat([x[:first], x[first:last:step], x[last:]])
        return tensor.detach().reshape(-1).clone().view(_BITS[tensor.element_size()])


@dataclass(frozen=True)
class Shared:
    """A tensor that `LayerKV.once` remembers, the clock of its making, its seal, and the keys, values
    and queries of the layer that it was computed for."""

    tensor: Tensor
    clock: Elapsed
    seal: Seal
    of: tuple[Tensor | None, ...]
