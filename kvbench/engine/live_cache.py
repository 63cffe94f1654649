"""The forks of a batch as a cache of transformers, and what such a cache cannot do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.engine.fork import Fork

NO_MULTI_TURN = (
    "past_key_values holds an earlier conversation; allowed: none, since every generate under "
    "compress starts afresh (pass the whole conversation as the prompt)"
)
NO_CACHE = "use_cache is False, so there is no cache to compress; allowed: True"
NO_ATTENTIONS = "output_attentions is set; compress computes none; allowed: False"


class UnsupportedGeneration(ValueError):
    """A use of `generate` that a compressed cache cannot serve: one line with what is allowed."""


_CLOSED = (
    "past_key_values is a compressed cache whose generation is over; allowed: none, since every "
    "generate starts afresh (pass the whole conversation as the prompt)"
)


class LiveCache(Cache):
    """The forks of a batch, as generate's cache.

    Args:
        forks: one per row.
        lengths: prompt tokens of each row, without padding.
        num_layers: of the model.
    """

    def __init__(self, forks: Sequence[Fork], lengths: Sequence[int], num_layers: int) -> None:
        super().__init__(layers=[])
        self.forks = list(forks)
        self.lengths = list(lengths)
        self.num_layers = num_layers
        self.seen = 0  # tokens fed so far, padding included
        self.open = True  # until the generation that it belongs to is over

    def __len__(self) -> int:
        return self.num_layers

    @property
    def is_compileable(self) -> bool:
        """Rows differ in length, so there is nothing to compile."""
        return False

    @property
    def is_croppable(self) -> bool:
        """What a method dropped cannot come back."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values as they are: the attention function stores them.

        Raises:
            UnsupportedGeneration: the generation is over, so that nothing would store them.
        """
        if not self.open:
            raise UnsupportedGeneration(_CLOSED)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers believes it needs."""
        count = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + count, 0

    def _pick(self, indices: Sequence[int]) -> None:
        """Rows in a new order; a row that is wanted more than once is copied."""
        taken: set[int] = set()
        forks = []
        for index in indices:
            fork = self.forks[index]
            forks.append(fork.clone() if index in taken else fork)
            taken.add(index)
        self.forks = forks
        self.lengths = [self.lengths[index] for index in indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row ``beam_idx[i]``."""
        self._pick(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._pick([row for row in range(len(self.forks)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._pick(torch.arange(len(self.forks))[indices.cpu()].tolist())

    def crop(self, *arguments: int, **named: int) -> None:
        """Refused, unless nothing is to be cropped: what a method dropped cannot come back."""
        if any(arguments) or any(named.values()):
            raise UnsupportedGeneration(
                "a compressed cache cannot be cropped (assisted decoding does so); "
                "allowed: greedy, sampling, beam search"
            )

    def reset(self) -> None:
        """Refused: every call of generate starts afresh anyway."""
        raise UnsupportedGeneration("a compressed cache cannot be reset; call generate again")
