"""The cache that transformers' `generate` is given under `kvbench.compress`.

`generate` asks a cache for lengths and, in beam search, reorders its rows: a `LiveCache` answers that,
and holds no keys or values itself. The attention function hands those to the forks, one per batch row,
as in the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.engine.cache import GROWTH
from kvbench.engine.costs import Cost
from kvbench.engine.decoding import DecodeState
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.prefill import input_device
from kvbench.engine.states import PassingCache, is_hybrid


class UnsupportedGeneration(ValueError):
    """A use of `generate` that a compressed cache cannot serve: one line with what is allowed."""


class LiveCache(Cache):
    """The forks of a batch, as generate's cache; operations it cannot serve are refused.

    Args:
        model: whose keys and values the forks hold.
        forks: one per batch row.
        rows: the cost of each fork, of its tokens without padding; filled in place after the prefill.
        seen: tokens fed so far to each row, padding included.

    Attributes:
        open: until the generation that the cache belongs to is over.
        steps: the attention state of single tokens fed one after the other, if such steps are under way.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forks: Sequence[Fork],
        rows: Sequence[Cost],
        seen: int,
    ) -> None:
        config = model.config.get_text_config()
        super().__init__(layers=PassingCache(config).layers if is_hybrid(config) else [])
        self.model = model
        self.forks = list(forks)
        self.rows = list(rows)
        self.seen = seen
        self.open = True
        self.steps: DecodeState | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveCache:
        """An independent copy; if the model is copied too, it belongs to that copy."""
        self.settle()
        forks = [fork.clone() for fork in self.forks]
        model = memo.get(id(self.model), self.model)
        return LiveCache(model, forks, self.rows, self.seen)

    def __len__(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def is_compileable(self) -> bool:
        """Rows differ in length, so there is nothing to compile."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: the attention function stores them.

        Raises:
            UnsupportedGeneration: the generation is over, so that nothing would store them.
        """
        if not self.open:
            raise UnsupportedGeneration(
                "past_key_values is a compressed cache whose generation is over; allowed: inside "
                "compress, where it can be given back to generate with the whole conversation as "
                "input_ids"
            )
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers believes it needs."""
        count = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + count, 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row ``beam_idx[i]``; a row from which several do is copied."""
        self.settle()
        sources = beam_idx.tolist()
        self.forks = [
            self.forks[source].clone() if source in sources[:row] else self.forks[source]
            for row, source in enumerate(sources)
        ]

    def crop(self, tokens: int) -> None:
        """Refused: what a method dropped does not come back."""
        raise UnsupportedGeneration("a compressed cache cannot be cropped; call generate again")

    def begin_pass(self, batch: int, count: int, mask: Tensor | None) -> ForkBatch:
        """The attention state of a pass that feeds `count` tokens to every row.

        A single token after a single token gets the state of the token before: it has room for `GROWTH`
        tokens, and is made anew after those, or after a pass of several tokens.

        Args:
            batch: rows of the pass.
            mask: [batch, tokens] of all tokens; None where it is known to hide none of the new ones.

        Raises:
            UnsupportedGeneration: another number of rows than forks; a mask that hides new tokens.
        """
        if batch != len(self.forks):
            raise UnsupportedGeneration(
                f"the batch has {batch} rows and the cache {len(self.forks)}; allowed: as many"
            )
        if mask is not None and not bool(mask[:, -count:].all()):
            raise UnsupportedGeneration("attention_mask hides new tokens; allowed: left padding")
        taken = self.forks[0].ledger.appended % GROWTH
        if count == 1 and taken and self.steps is not None:
            return self.steps
        self.settle()
        if count > 1:
            first = torch.tensor([fork.tokens for fork in self.forks])
            return ForkBatch(self.forks, first[:, None] + torch.arange(count))
        room = [GROWTH - taken] * batch
        self.steps = DecodeState(self.forks, room, input_device(self.model))
        return self.steps

    def settle(self) -> None:
        """End a run of single-token steps, if one is under way: every fork's cache is told how many
        entries it holds by now."""
        if self.steps is not None:
            self.steps.settle()
        self.steps = None
