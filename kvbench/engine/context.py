"""A prompt that is compressed once and asked many questions, each from the same cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvbench.engine.fork import Fork, prompt_name
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.live_cache import LiveCache, Row
from kvbench.engine.prefill import compressible_layers, prefill
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
from kvbench.tasks.base import PromptEncoder, check_length, tokenizing

Text = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or what a tokenizer returns for one text."""


class Context:
    """One prompt, prefilled once and compressed before any question is known.

    `ask` answers without changing the cache, so that answers do not depend on earlier questions; with
    ``keep=True`` the question and its answer are added to the cache. Draws depend on
    the seed, the prompt and the layer, so that a document is always compressed to the same cache.

    Attributes:
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
        self._ids = token_ids(prompt, tokenizer, "the context")
        fork = Fork(label, method, budget, seed, prompt_name(self._ids), room=0)
        with kvbench_attention_on(model), torch.inference_mode():
            self._compressible = compressible_layers(model)
            encoder = None if tokenizer is None else PromptEncoder(tokenizer)
            start = prefill(model, self._ids, [fork], encoder=encoder)
        if fork.failure is not None:
            raise fork.failure
        self._fork, self._start = fork, start
        self.entries = fork.prompt_counts(self._compressible)
        self.cache_bytes, self.exact_bytes = fork.cache_bytes(), start.exact_bytes
        self.prefill_s, self.compress_s = start.prefill_s, fork.compress_s

    @property
    def ratio(self) -> float:
        """`cache_bytes` over `exact_bytes`."""
        return self.cache_bytes / self.exact_bytes

    @property
    def tokens(self) -> int:
        """Tokens in the cache: the prompt's, and those of turns that were kept."""
        return self._start.n + self._fork.appended

    @property
    def token_ids(self) -> list[int]:
        """Tokens of prompt, questions and answers; an answer's last one is fed with the next turn."""
        return list(self._ids)

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
            keep: add the question and its answer to the cache.

        Raises:
            KVError: an empty question, text without a tokenizer, a wrong `max_new_tokens`.
            BudgetExceeded, and whatever the method raises; the cache is then unchanged.
        """
        ids = self._ids_of(question)
        ((answer, row),) = self._answers([ids], max_new_tokens, stop)
        if keep:
            self._ids += [*ids, *row.chosen]
            self._fork = row.fork.merged()
        return answer

    def ask_all(
        self, questions: Sequence[Text], *, max_new_tokens: int = 64, stop: Sequence[str] = ()
    ) -> list[Any]:
        """The answers to several questions, each as `ask` gives it, decoded as one batch that reads the
        context's entries once."""
        asked = [self._ids_of(question) for question in questions]
        return [answer for answer, _ in self._answers(asked, max_new_tokens, stop)]

    def cache(self) -> LiveCache:
        """A cache for ``model.generate(input_ids, past_key_values=...)`` inside `compress`, to continue
        from here; ``input_ids`` must begin with all of `token_ids`, as transformers requires."""
        fork, n, seen = self._fork.branch(), self._start.n, self.tokens
        row = Row(
            n, fork.compressed, self.entries, self.cache_bytes, self.exact_bytes, self.compress_s
        )
        return LiveCache(self.model, [fork], [n], [self._ids[:seen]], [row], seen=seen)

    def _answers(
        self, asked: Sequence[Sequence[int]], max_new_tokens: int, stop: Sequence[str]
    ) -> list[tuple[Any, DecodingRow]]:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 1:
            raise KVError(f"max_new_tokens is {max_new_tokens!r}; allowed: an integer >= 1")
        if stop and self.tokenizer is None:
            raise KVError("stop is given and there is no tokenizer; allowed: read(..., tokenizer)")
        decode = None if self.tokenizer is None else self._decoded
        ends = (
            model_end_ids(self.model)
            if self.tokenizer is None
            else end_token_ids(self.model, self.tokenizer)
        )
        stopping = Stopping(max_new_tokens, ends, tuple(stop), decode)
        unread = self._ids[self.tokens :]
        rows = []
        with kvbench_attention_on(self.model), torch.inference_mode():
            for _ in asked:
                row = open_row(self._fork.branch(), self._start, stopping, self._compressible)
                row.position = self.tokens
                rows.append(row)
            feed_questions(self.model, rows, [[*unread, *ids] for ids in asked])
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

    def _ids_of(self, question: Any) -> list[int]:
        return token_ids(question, self.tokenizer, "the question", special=False)

    def _decoded(self, tokens: Sequence[int]) -> str:
        assert self.tokenizer is not None
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def token_ids(
    given: Text, tokenizer: PreTrainedTokenizerBase | None, what: str, *, special: bool = True
) -> list[int]:
    """The token ids of a text, of ids, or of a tokenizer's output.

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
