"""When a generation ends, and where its text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Stopping:
    """When a generation ends.

    Attributes:
        max_new_tokens: at most so many tokens.
        end_ids: tokens that end it (not part of the text).
        strings: stop strings, which end it and are cut from the text with all that follows.
        decode: token ids to text; needed for `strings` and `settled`.
        may_be_empty: False: the first token is chosen among those that do not end the generation.
        settled: called with the text so far; True ends the generation, as nothing that follows would
            change the score. Beyond 256 tokens it is called about 100 times per doubling of the answer.
        timeout_s: seconds, prefill included, after which forks that still run fail; None: no limit.
    """

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    timeout_s: float | None = None
    may_be_empty: bool = True
    settled: Callable[[str], bool] | None = None

    def first(self, logits: Tensor) -> Tensor:
        """Logits [rows, vocab] of the first token, -inf for tokens it may not be."""
        ids = [token for token in sorted(self.end_ids) if 0 <= token < logits.shape[-1]]
        if self.may_be_empty or not ids:
            return logits
        ends = torch.tensor(ids, device=logits.device)
        return logits.index_fill(-1, ends, float("-inf"))

    def cut(self, text: str) -> str:
        """`text` up to the first stop string."""
        ends = [text.find(stop) for stop in self.strings]
        ends = [end for end in ends if end >= 0]
        return text[: min(ends)] if ends else text

    def reached(self, tokens: Sequence[int]) -> bool:
        """Whether a generation that produced `tokens` is over."""
        if len(tokens) >= self.max_new_tokens or (tokens and tokens[-1] in self.end_ids):
            return True
        if self.decode is None or not tokens:
            return False
        if self.strings:
            # A stop string of c characters spans at most c tokens that hold a character each; the
            # margin covers multi-token characters at its edge.
            tail = self.decode(list(tokens[-(max(map(len, self.strings)) + 8) :]))
            if any(stop in tail for stop in self.strings):
                return True
        # Decoding the whole text at every token would cost the square of a long answer.
        due = len(tokens) <= 256 or len(tokens) % (len(tokens) // 128) == 0
        return self.settled is not None and due and self.settled(self.decode(list(tokens)))
