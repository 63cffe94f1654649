"""The forks of a batch as a cache of transformers; operations it cannot serve are refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.states import PassingCache, is_hybrid, row_of, state_bytes, states_in

NOT_OURS = (
    "past_key_values is a {kind} that was not filled under compress, without the queries that methods "
    "choose by; allowed: none, or a cache that compress made of this model (the past_key_values "
    "of an earlier output, context.cache())"
)
NO_CACHE = "use_cache is False, so there is no cache to compress; allowed: True"
NO_ATTENTIONS = "output_attentions is set; compress computes none; allowed: False"


class UnsupportedGeneration(ValueError):
    """A use of `generate` that a compressed cache cannot serve: one line with what is allowed."""


_CLOSED = (
    "past_key_values is a compressed cache whose generation is over; allowed: inside compress, where "
    "it can be given back to generate with the whole conversation as input_ids"
)


@dataclass
class Row:
    """Measurements of one row of a batch: one prompt and its cache.

    Attributes:
        prompt_tokens: without padding.
        compressed: False where the prompt is within its capacity, or the method keeps everything;
            true at the end of a generation in which entries were evicted.
        entries: held per layer and KV head after compression, mean and maximum.
        cache_bytes, exact_bytes: after compression, and of the exact cache at the same point.
        cache_bytes_end: when the generation was over; None before.
        compress_s: seconds of compression.
    """

    prompt_tokens: int
    compressed: bool
    entries: dict[str, float]
    cache_bytes: int
    exact_bytes: int
    compress_s: float
    cache_bytes_end: int | None = None

    @classmethod
    def of(cls, fork: Fork, tokens: int, exact_bytes: int, compressible: Sequence[int]) -> Row:
        """The row of a fork at the end of its prefill."""
        return cls(
            prompt_tokens=tokens,
            compressed=fork.compressed,
            entries=fork.prompt_counts(compressible),
            cache_bytes=fork.cache_bytes(),
            exact_bytes=exact_bytes + state_bytes(fork.states),
            compress_s=fork.compress_s,
        )

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of the exact cache, after compression."""
        return self.cache_bytes / self.exact_bytes


class LiveCache(Cache):
    """The forks of a batch, as generate's cache.

    Args:
        model: whose keys and values they hold.
        forks: one per row.
        lengths: tokens of each row that were compressed, without padding.
        tokens: of each row, fed so far, without padding; None where embeddings were fed.
        rows: measurements of each; empty before the prefill.
        seen: tokens fed so far, padding included.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        forks: Sequence[Fork],
        lengths: Sequence[int],
        tokens: Sequence[Sequence[int]] | None,
        rows: Sequence[Row] = (),
        *,
        seen: int = 0,
    ) -> None:
        config = model.config.get_text_config()
        super().__init__(layers=PassingCache(config).layers if is_hybrid(config) else [])
        self.model = model
        self.forks = list(forks)
        self.lengths = list(lengths)
        self.tokens = None if tokens is None else [list(ids) for ids in tokens]
        self.rows = list(rows)
        self.seen = seen
        self.open = True  # until the generation that it belongs to is over

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveCache:
        """An independent copy; if the model is copied too, it belongs to that copy."""
        return LiveCache(
            memo.get(id(self.model), self.model),
            [fork.clone() for fork in self.forks],
            self.lengths,
            self.tokens,
            [copy.copy(row) for row in self.rows],
            seen=self.seen,
        )

    def check_continued(self, ids: Tensor, mask: Tensor | None) -> None:
        """Refuse `input_ids` that do not continue the tokens of the cache.

        Args:
            ids: [rows, tokens], the whole conversation, or what is new with a mask of the whole.

        Raises:
            UnsupportedGeneration: no new token, or other tokens than those of the cache.
        """
        whole = ids.shape[1] if mask is None else max(ids.shape[1], mask.shape[1])
        if whole <= self.seen:
            raise UnsupportedGeneration(
                f"input_ids have {whole} tokens and past_key_values holds {self.seen}; allowed: the "
                "whole conversation, new tokens included"
            )
        if self.tokens is None or whole > ids.shape[1] or len(ids) != len(self.tokens):
            return
        for i, (row, held) in enumerate(zip(ids.tolist(), self.tokens, strict=True)):
            if row[self.seen - len(held) : self.seen] != held:
                raise UnsupportedGeneration(
                    f"input_ids of row {i} do not begin with the tokens that past_key_values holds; "
                    "allowed: the whole conversation, in the same order"
                )

    def __len__(self) -> int:
        return int(self.model.config.get_text_config().num_hidden_layers)

    @property
    def is_compileable(self) -> bool:
        """Rows differ in length, so there is nothing to compile."""
        return False

    @property
    def is_croppable(self) -> bool:
        """False: what a method dropped does not come back."""
        return False

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new keys and values unchanged: the attention function stores them.

        Raises:
            UnsupportedGeneration: the generation is over, so that nothing would store them.
        """
        if not self.open:
            raise UnsupportedGeneration(_CLOSED)
        return key_states, value_states

    def load_states(self, state: ForkBatch) -> None:
        """Load the recurrent states of a hybrid model's forks, batched, for a pass with this state."""
        config = self.model.config.get_text_config()
        if is_hybrid(config):
            self.layers = state.past(config).layers

    def store_states(self) -> None:
        """After the prefill: store each row's recurrent states in its fork."""
        for number, fork in enumerate(self.forks):
            fork.states = row_of(states_in(self), number)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens fed so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int | Tensor, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the mask that transformers believes it needs."""
        count = query_length.shape[0] if isinstance(query_length, Tensor) else query_length
        return self.seen + count, 0

    def _reorder_rows(self, indices: Sequence[int]) -> None:
        """Select rows by index; a row that is selected more than once is copied."""
        taken: set[int] = set()
        forks = []
        for index in indices:
            fork = self.forks[index]
            forks.append(fork.clone() if index in taken else fork)
            taken.add(index)
        self.forks = forks
        self.lengths = [self.lengths[index] for index in indices]
        if self.tokens is not None:
            self.tokens = [list(self.tokens[index]) for index in indices]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row ``beam_idx[i]``."""
        self._reorder_rows(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        self._reorder_rows([row for row in range(len(self.forks)) for _ in range(repeats)])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep some rows."""
        self._reorder_rows(torch.arange(len(self.forks))[indices.cpu()].tolist())

    def crop(self, tokens: int) -> None:
        """Refused: what a method dropped does not come back."""
        raise UnsupportedGeneration("a compressed cache cannot be cropped; call generate again")

    def reset(self) -> None:
        """Refused: every call of generate starts afresh anyway."""
        raise UnsupportedGeneration("a compressed cache cannot be reset; call generate again")
