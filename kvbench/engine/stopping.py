"""The end of a generation, and where its text is cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.prompts import Thought


@dataclass(frozen=True)
class Stopping:
    """When a generation ends.

    Attributes:
        max_new_tokens: the largest number of tokens.
        end_ids: tokens that end the generation; they are not part of the text.
        strings: stop strings, which end the generation; the text is cut before the first of them.
        decode: turns token ids into text; needed for `strings` and `settled`.
        timeout_s: the seconds, prefill included, after which a fork that has not ended fails; None for
            no limit.
        may_be_empty: False where the first token must not end the generation.
        thought: what comes before the answer; None for nothing. `strings` and `settled` are about the
            answer behind it.
        thought_end_ids: the tokens of `end_ids` that end the generation within a thought, too.
        settled: is called with the text so far, and returns whether the score can no longer change; the
            generation then ends. Beyond 256 tokens it is called about 100 times while the answer's
            length doubles.
    """

    max_new_tokens: int
    end_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    timeout_s: float | None = None
    may_be_empty: bool = True
    settled: Callable[[str], bool] | None = None
    thought: Thought | None = None
    thought_end_ids: frozenset[int] = frozenset()

    def mask_first(self, logits: Tensor) -> Tensor:
        """The logits [rows, vocab] of the first token, with -inf for tokens that it must not be."""
        ids = [token for token in sorted(self.end_ids) if 0 <= token < logits.shape[-1]]
        if self.may_be_empty or not ids:
            return logits
        ends = torch.tensor(ids, device=logits.device)
        return logits.index_fill(-1, ends, float("-inf"))

    def cut(self, text: str) -> str:
        """Cut `text` before the first stop string."""
        places = [text.find(stop) for stop in self.strings]
        found_at = [place for place in places if place >= 0]
        return text[: min(found_at)] if found_at else text

    def answer_from(self, tokens: Sequence[int]) -> int | None:
        """See `Thought.answer_from`; 0 without a thought."""
        if self.thought is None or self.decode is None:
            return 0
        return self.thought.answer_from(tokens, self.decode)

    def reached(self, tokens: Sequence[int], answer_from: int | None = 0) -> bool:
        """Whether a generation that produced `tokens` is over.

        Args:
            answer_from: see `answer_from`.
        """
        ends = self.thought_end_ids if answer_from is None else self.end_ids
        if len(tokens) >= self.max_new_tokens or (tokens and tokens[-1] in ends):
            return True
        answer = [] if answer_from is None else tokens[answer_from:]
        decode = self.decode
        if decode is None or not answer:
            return False

        def text(ids: Sequence[int]) -> str:
            """The text of the answer, or of its last tokens."""
            # White space between a thought and the answer belongs to neither.
            after_thought = answer_from and len(ids) == len(answer)
            return decode(list(ids)).lstrip() if after_thought else decode(list(ids))

        if self.strings:
            # A stop string of c characters spans at most c tokens of a character each. The eight more
            # cover a character at its edge that consists of several tokens.
            tail = text(answer[-(max(map(len, self.strings)) + 8) :])
            if any(stop in tail for stop in self.strings):
                return True
        # To decode the whole text at every token would take time quadratic in the answer's length.
        due = len(answer) <= 256 or len(answer) % (len(answer) // 128) == 0
        return self.settled is not None and due and self.settled(text(answer))
