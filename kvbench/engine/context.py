"""A prompt's compressed cache that is asked many things, each from the same cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.engine.fork import Fork, prompt_name
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.prefill import Prefill, compressible_layers, prefill
from kvbench.engine.rows import (
    DecodingRow,
    close_row,
    decode_rows,
    feed_questions,
    open_row,
)
from kvbench.engine.stopping import Stopping
from kvbench.engine.switch import kvbench_attention_on
from kvbench.engine.tokenizer import end_token_ids, model_end_ids
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.tasks.base import check_length, tokenizing

Text = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or what a tokenizer returns for one text."""


class Context:
    """One prompt, prefilled once and compressed without having seen a question.

    `ask` answers from a copy of the cache, so that no question changes what the next one finds; with
    ``keep=True`` the question and its answer stay, as turns of a conversation do. Draws depend on the
    seed, the prompt and the layer, so the same document is compressed to the same cache every time.

    Attributes:
        tokens: of the prompt, and of the turns that stayed.
        entries: per layer and KV head after compression, mean and maximum.
        cache_bytes, exact_bytes: after compression, and of the exact cache.
        prefill_s, compress_s: seconds.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        budget: Budget,
        prompt: Text,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        label: str = "method",
        seed: int = 0,
    ) -> None:
        self.model, self.tokenizer = model, tokenizer
        ids = token_ids(prompt, tokenizer, "the context")
        fork = Fork(label, method, budget, seed, prompt_name(ids), room=0)
        with kvbench_attention_on(model), torch.inference_mode():
            self._compressible = compressible_layers(model)
            self._start: Prefill = prefill(model, ids, [fork])
            if fork.failure is not None:
                raise fork.failure
            row = open_row(fork, self._start, Stopping(1), self._compressible)
        self._fork, self._position, self._unread = fork, row.position, list[int]()
        self.entries, self.exact_bytes = row.result.entries, row.result.exact_bytes
        self.cache_bytes = fork.cache_bytes()
        self.prefill_s, self.compress_s = row.result.prefill_s, row.result.compress_s

    @property
    def ratio(self) -> float:
        """`cache_bytes` over `exact_bytes`."""
        return self.cache_bytes / self.exact_bytes

    @property
    def tokens(self) -> int:
        """Tokens read so far."""
        return self._position

    def ask(
        self,
        question: Text,
        *,
        max_new_tokens: int = 64,
        stop: Sequence[str] = (),
        keep: bool = False,
    ) -> Any:
        """The greedy answer to one question: text where there is a tokenizer, else token ids.

        Args:
            question: what follows the context, as text (tokenised without special tokens) or ids.
            stop: strings that end an answer, and are cut from it; need a tokenizer.
            keep: let the question and its answer stay in the cache.

        Raises:
            KVError: an empty question, text without a tokenizer, a wrong `max_new_tokens`.
            BudgetExceeded, and whatever the method raises: its cache is then as before.
        """
        ((answer, row),) = self._answers([question], max_new_tokens, stop)
        if keep:
            self._fork, self._position = row.fork, row.position
            self._unread = row.chosen[-1:]  # chosen, but not fed yet
        return answer

    def ask_all(
        self, questions: Sequence[Text], *, max_new_tokens: int = 64, stop: Sequence[str] = ()
    ) -> list[Any]:
        """The answers to several questions, each as `ask` gives it; they are decoded together."""
        return [answer for answer, _ in self._answers(questions, max_new_tokens, stop)]

    def _answers(
        self, questions: Sequence[Text], max_new_tokens: int, stop: Sequence[str]
    ) -> list[tuple[Any, DecodingRow]]:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise KVError(f"max_new_tokens is {max_new_tokens!r}; allowed: an integer >= 1")
        if stop and self.tokenizer is None:
            raise KVError("stop is given and there is no tokenizer; allowed: read(..., tokenizer)")
        asked = [token_ids(q, self.tokenizer, "the question", special=False) for q in questions]
        decode = None if self.tokenizer is None else self._decoded
        ends = (
            model_end_ids(self.model)
            if self.tokenizer is None
            else end_token_ids(self.model, self.tokenizer)
        )
        stopping = Stopping(max_new_tokens, ends, tuple(stop), decode)
        rows = []
        with kvbench_attention_on(self.model), torch.inference_mode():
            for _ in asked:
                fork = replace(self._fork.clone(), carried=dict(self._fork.carried))
                row = open_row(fork, self._start, stopping, self._compressible)
                row.position = self._position
                rows.append(row)
            feed_questions(self.model, rows, [[*self._unread, *ids] for ids in asked])
            decode_rows(self.model, [row for row in rows if row.chosen], StepGraphs())
            for row in rows:
                close_row(row, self._compressible)
        found = []
        for row in rows:
            if row.fork.failure is not None:
                raise row.fork.failure
            tokens = row.result.tokens
            found.append((tokens if decode is None else stopping.cut(decode(tokens)), row))
        return found

    def _decoded(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def token_ids(
    given: Text, tokenizer: PreTrainedTokenizerBase | None, what: str, *, special: bool = True
) -> list[int]:
    """Token ids of a text, or of what stands for them.

    Raises:
        KVError: no tokens, several texts, or text where there is no tokenizer.
    """
    if isinstance(given, str):
        if tokenizer is None:
            raise KVError(f"{what} is text and there is no tokenizer; allowed: ids, or a tokenizer")
        check_length(given)
        with tokenizing(tokenizer):
            given = tokenizer(given, add_special_tokens=special)
    ids: Any = given["input_ids"] if isinstance(given, Mapping) else given
    ids = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if ids and isinstance(ids[0], list):
        if len(ids) > 1:
            raise KVError(f"{what} has {len(ids)} texts; allowed: one")
        ids = ids[0]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise KVError(f"{what} has no token ids; allowed: text, or at least one token id")
    return ids
