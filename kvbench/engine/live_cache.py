"""The cache that transformers' `generate` uses inside `kvbench.compress`.

`generate` asks its cache for lengths and, in beam search, reorders its rows. A `LiveCache` does that. It
holds no keys or values itself: the attention function passes them to the rows, as in the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from kvbench.engine import captured
from kvbench.engine.cache import GROWTH
from kvbench.engine.captured import KernelBatch
from kvbench.engine.cost import Cost
from kvbench.engine.decode import Feed
from kvbench.engine.device import input_device
from kvbench.engine.row import Row
from kvbench.engine.states import PassingCache, is_hybrid

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class UnsupportedGeneration(ValueError):
    """A use of `generate` that a compressed cache cannot serve: one line with what is allowed."""


class LiveCache(Cache):
    """The rows of a batch as a cache of transformers. Operations that it cannot serve are refused.

    Args:
        model: the model whose keys and values the rows hold.
        costs: the cost of each row for its tokens without padding; filled after the prefill.
        seen: the number of tokens fed so far to each row, padding included.

    Attributes:
        open: whether a generation inside `compress` uses the cache.
        kernel_batch: the pass of a run of steps of one token; None outside such a run.
        sound: by the number of the new token whether a GPU's logits for it are finite.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        costs: Sequence[Cost],
        seen: int,
    ) -> None:
        config = model.config.get_text_config()
        super().__init__(layers=PassingCache(config).layers if is_hybrid(config) else [])
        self.model = model
        self.rows = list(rows)
        self.costs = list(costs)
        self.seen = seen
        self.open = False
        self.kernel_batch: KernelBatch | None = None
        self.sound: dict[int, Tensor] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveCache:
        """An independent copy. If the model is copied together with it, it is the cache of that copy."""
        self.write_back()
        rows = [row.clone() for row in self.rows]
        model = memo.get(id(self.model), self.model)
        return LiveCache(model, rows, self.costs, self.seen)

    def __len__(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def is_compileable(self) -> bool:
        """False, since rows have different lengths."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: the attention function stores them.

        Raises:
            UnsupportedGeneration: no generation inside `compress` uses the cache, so that no attention
                function would store them.
        """
        if not self.open:
            raise UnsupportedGeneration(
                "past_key_values is a compressed cache, outside compress or whose generation is over; "
                "allowed: inside compress, where it can be given to generate with the whole "
                "conversation as input_ids"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of tokens fed so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """The length and the offset of a mask for `query_length` more tokens, which transformers asks
        for although no mask is made."""
        count = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + count, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let row i continue from row ``beam_idx[i]``, for beam search. Where several rows continue from
        one, all but the first get a copy."""
        self.write_back()
        sources = beam_idx.tolist()
        self.rows = [
            self.rows[source].clone() if source in sources[:place] else self.rows[source]
            for place, source in enumerate(sources)
        ]

    def crop(self, tokens: int) -> None:
        """Refuse to remove tokens: entries that a method dropped for them cannot be restored."""
        raise UnsupportedGeneration("a compressed cache cannot be cropped; call generate again")

    def begin_pass(self, batch: int, count: int) -> Feed:
        """Return the pass that feeds `count` tokens to every row.

        Where kernels run, steps of one token share a `KernelBatch` with room for `GROWTH` tokens. A new
        one is made after these, and after a pass of several tokens.

        Args:
            batch: the number of rows of the pass.

        Raises:
            UnsupportedGeneration: another number of rows.
        """
        if batch != len(self.rows):
            raise UnsupportedGeneration(
                f"the batch has {batch} rows and the cache {len(self.rows)}; allowed: as many"
            )
        taken = self.rows[0].fed % GROWTH
        if count == 1 and taken and self.kernel_batch is not None:
            return self.kernel_batch
        self.write_back()
        device = input_device(self.model)
        if count > 1 or not captured.uses_kernels(device):
            first = torch.tensor([row.tokens for row in self.rows])
            return Feed(self.rows, first[:, None] + torch.arange(count))
        room = [GROWTH - taken] * batch
        self.kernel_batch = KernelBatch(self.model, self.rows, room, device)
        return self.kernel_batch

    def write_back(self) -> None:
        """End a run of steps of one token, if there is one: update the number of entries in the caches
        (`KernelBatch.write_back`)."""
        if self.kernel_batch is not None:
            self.kernel_batch.write_back()
        self.kernel_batch = None
