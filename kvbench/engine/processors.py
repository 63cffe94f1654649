"""The logits processors of a model's generation config (`repetition_penalty` and others): transformers'
own, as `generate` applies them. They decide what a model answers; likelihoods, KL and layer errors are
of its own logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers as t
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

NEUTRAL: Mapping[str, Any] = {
    "sequence_bias": None,
    "encoder_repetition_penalty": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "min_length": 0,
    "min_new_tokens": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
"""The options of a generation config that change logits before a token is chosen, in the order in which
`generate` applies them, each with the value at which it changes nothing (beside None). Temperature,
top_p and the others of sampling are not among them: `kvbench.engine.answer.Sampling` decides."""


def acting_options(
    config: GenerationConfig | None, asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The options that change logits, as values of JSON: those of a generation config, if there is one,
    and in their place those among `asked`."""
    found = {name: getattr(config, name, None) for name in NEUTRAL} | {
        name: value for name, value in (asked or {}).items() if name in NEUTRAL
    }
    return {
        name: _plain(value)
        for name, value in found.items()
        if value is not None and value != NEUTRAL[name]
    }


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):  # sequence_bias, by tuples of token ids
        return [[list(tokens), bias] for tokens, bias in value.items()]
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def processors(
    options: Mapping[str, Any],
    prompt: Sequence[int],
    max_new_tokens: int,
    end_ids: Sequence[int],
    device: torch.device,
) -> LogitsProcessorList:
    """Make the processors of one answer.

    Args:
        options: those of `acting_options`.
        prompt: all token ids before the answer, evicted or not.
        end_ids: the tokens that end the answer.
        device: the logits'.
    """
    ends, n = torch.tensor(list(end_ids), device=device), len(prompt)
    ids = torch.tensor([list(prompt)], device=device)
    on: dict[str, Any] = {"device": device}
    make: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": t.SequenceBiasLogitsProcessor,
        "encoder_repetition_penalty": lambda x: t.EncoderRepetitionPenaltyLogitsProcessor(x, ids),
        "repetition_penalty": t.RepetitionPenaltyLogitsProcessor,
        "no_repeat_ngram_size": t.NoRepeatNGramLogitsProcessor,
        "encoder_no_repeat_ngram_size": lambda x: t.EncoderNoRepeatNGramLogitsProcessor(x, ids),
        "bad_words_ids": lambda x: t.NoBadWordsLogitsProcessor(x, ends if end_ids else None),
        "min_length": lambda x: t.MinLengthLogitsProcessor(x, ends, **on),
        "min_new_tokens": lambda x: t.MinNewTokensLengthLogitsProcessor(n, x, ends, **on),
        "forced_bos_token_id": t.ForcedBOSTokenLogitsProcessor,
        "forced_eos_token_id": lambda x: t.ForcedEOSTokenLogitsProcessor(
            n + max_new_tokens, x, **on
        ),
        "exponential_decay_length_penalty": lambda x: t.ExponentialDecayLengthPenalty(
            tuple(x), ends, n
        ),
        "suppress_tokens": lambda x: t.SuppressTokensLogitsProcessor(x, **on),
        "begin_suppress_tokens": lambda x: t.SuppressTokensAtBeginLogitsProcessor(x, n, **on),
    }
    of_ends = ("min_length", "min_new_tokens", "exponential_decay_length_penalty")
    return LogitsProcessorList(
        make[name](options[name])
        for name in NEUTRAL
        if name in options and (end_ids or name not in of_ends)
    )


class Processing:
    """The processors of one answer, and the ids that they see: those before it and its own.

    Args:
        options, prompt, max_new_tokens, end_ids: see `processors`.
    """

    def __init__(
        self,
        options: Mapping[str, Any],
        prompt: Sequence[int],
        max_new_tokens: int,
        end_ids: Sequence[int],
    ) -> None:
        self._given = options, prompt, max_new_tokens, end_ids
        self._made: LogitsProcessorList | None = None
        self._ids = torch.empty(1, 0, dtype=torch.long)

    def __call__(self, logits: Tensor, chosen: Sequence[int]) -> Tensor:
        """The logits [1, vocab] of the token that follows the answer's `chosen` tokens, in float32."""
        prompt = self._given[1]
        if self._made is None:
            self._made = processors(*self._given, logits.device)
            self._ids = torch.tensor([list(prompt)], device=logits.device)
        new = chosen[self._ids.shape[1] - len(prompt) :]
        self._ids = torch.cat([self._ids, self._ids.new_tensor([list(new)])], 1)
        processed: Any = self._made(self._ids, logits.to(torch.float32, copy=True))
        return processed
