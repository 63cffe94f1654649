"""transformers' own `generate` against fork caches: what `kvbench.compress` puts around a model.

While it lasts, a hook on the model's forward replaces the cache that `generate` made by a `LiveCache`,
which answers generate's bookkeeping (lengths, beams) and holds no keys or values itself: the attention
function gives those to the forks, one per batch row, exactly as in the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.engine.attention import LayerCall
from kvbench.engine.context import Context, Text
from kvbench.engine.fork import Fork, ForkBatch, prompt_name
from kvbench.engine.live_cache import (
    NO_ATTENTIONS,
    NO_CACHE,
    NO_MULTI_TURN,
    LiveCache,
    UnsupportedGeneration,
)
from kvbench.engine.prefill import PrefillState
from kvbench.kv import Budget
from kvbench.methods.base import Method


@dataclass
class Row:
    """What became of one row of a batch: one prompt and its cache.

    Attributes:
        prompt_tokens: without padding.
        compressed: False where the prompt is within its capacity, or the method keeps everything;
            at the end of a generation true as well where entries were evicted since.
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

    @property
    def ratio(self) -> float:
        """Bytes held over the bytes of the exact cache, after compression."""
        return self.cache_bytes / self.exact_bytes


class _BatchPrefill:
    """Attention state of a batch's prefill: every row alone, without its padding.

    Args:
        forks: one per row.
        padding: leading tokens of each row that are padding.
        compressible: see `compressible_layers`.
    """

    def __init__(
        self, forks: Sequence[Fork], padding: Sequence[int], compressible: Sequence[int]
    ) -> None:
        self.padding = padding
        self.rows = [PrefillState([fork], compressible) for fork in forks]

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention of each row's own tokens; padding attends to nothing."""
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        for i, (row, start) in enumerate(zip(self.rows, self.padding, strict=True)):
            out[i : i + 1, :, start:] = row.attend(call.of_row(i, start))
            failure = row.forks[0].failure
            if failure is not None:
                raise failure
        return out


@dataclass
class Compression:
    """One method around one model; yielded by `kvbench.compress`.

    Attributes:
        rows: one per batch row of every prompt so far, in order (`generate` repeats a prompt for
            each beam and each returned sequence).
        last: the rows of the latest call.
    """

    model: PreTrainedModel
    method: Method
    budget: Budget
    label: str
    seed: int = 0
    rows: list[Row] = field(default_factory=list)
    last: list[Row] = field(default_factory=list)
    _compressible: list[int] = field(default_factory=list, repr=False)
    _cache: LiveCache | None = field(default=None, repr=False)
    _prefill: _BatchPrefill | None = field(default=None, repr=False)

    def read(self, prompt: Text, tokenizer: PreTrainedTokenizerBase | None = None) -> Context:
        """Prefill a prompt once and compress it, to be asked many things: see `Context.ask`.

        Raises:
            KVError: an empty prompt, or text without a tokenizer.
        """
        return Context(
            self.model,
            self.method,
            self.budget,
            prompt,
            tokenizer,
            label=self.label,
            seed=self.seed,
        )

    @property
    def entries(self) -> list[float]:
        """Entries per layer and KV head after compression, mean over both, of each row."""
        return [row.entries["mean"] for row in self.rows]

    @property
    def cache_bytes(self) -> list[int]:
        """Bytes held after compression, of each row."""
        return [row.cache_bytes for row in self.rows]

    @property
    def exact_bytes(self) -> list[int]:
        """Bytes the exact cache would hold at the same point, of each row."""
        return [row.exact_bytes for row in self.rows]

    @property
    def ratio(self) -> list[float]:
        """`cache_bytes` over `exact_bytes`, of each row."""
        return [row.ratio for row in self.rows]

    @property
    def compress_s(self) -> list[float]:
        """Seconds of compression, of each row."""
        return [row.compress_s for row in self.rows]

    def before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: give the attention function its state, and generate its cache."""
        if "kvbench" in kwargs:  # the benchmark's own engine at work on the same model
            return args, kwargs
        tokens = kwargs.get("input_ids", args[0] if args else None)
        shaped = kwargs.get("inputs_embeds") if tokens is None else tokens
        if shaped is None:
            raise UnsupportedGeneration("compress needs input_ids or inputs_embeds")
        batch, count = shaped.shape[:2]
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.dim() != 2:
            raise UnsupportedGeneration(
                f"attention_mask has {mask.dim()} dimensions; allowed: 2 (batch, tokens)"
            )
        if kwargs.get("output_attentions"):
            raise UnsupportedGeneration(NO_ATTENTIONS)
        if kwargs.get("token_type_ids") is not None and hasattr(self.model.config, "text_config"):
            raise UnsupportedGeneration(
                "token_type_ids says which tokens are an image's, which attend to each other both "
                "ways; allowed: causal attention only"
            )
        if torch.is_grad_enabled():
            raise UnsupportedGeneration(
                "compress does not keep gradients; allowed: generate, or calls under torch.no_grad()"
            )
        given = kwargs.get("past_key_values")
        if isinstance(given, LiveCache):
            if given is not self._cache:
                raise UnsupportedGeneration(NO_MULTI_TURN)
            kwargs["kvbench"] = ForkBatch(given.forks, self._positions(given, batch, count, mask))
            return args, kwargs
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.model.config.get_text_config(), "use_cache", True)
        if not use_cache:
            raise UnsupportedGeneration(NO_CACHE)
        if given is not None:
            if type(given) is not DynamicCache or getattr(given, "offloading", False):
                raise UnsupportedGeneration(
                    f"past_key_values is a {type(given).__name__}; allowed: none, since compress "
                    "brings its own cache"
                )
            if given.get_seq_length():
                raise UnsupportedGeneration(NO_MULTI_TURN)
        self.finish()
        self._start(tokens, batch, count, mask)
        kwargs["past_key_values"] = self._cache
        kwargs["use_cache"] = True
        kwargs["kvbench"] = self._prefill
        return args, kwargs

    def _start(self, tokens: Tensor | None, batch: int, count: int, mask: Tensor | None) -> None:
        """Forks for a new batch of prompts."""
        padding = _left_padding(mask, batch, count)
        lengths = [count - start for start in padding]
        forks = []
        for i, (start, n) in enumerate(zip(padding, lengths, strict=True)):
            name = f"row {i}" if tokens is None else prompt_name(tokens[i, start:].tolist())
            fork = Fork(self.label, self.method, self.budget, self.seed, name, room=0)
            fork.compressed = self.method.uses_budget and n > self.budget.capacity(n)
            forks.append(fork)
        layers = self.model.config.get_text_config().num_hidden_layers
        self._cache = LiveCache(forks, lengths, layers)
        self._prefill = _BatchPrefill(forks, padding, self._compressible)

    def _positions(self, cache: LiveCache, batch: int, count: int, mask: Tensor | None) -> Tensor:
        """Positions [rows, tokens] of the tokens fed in a decode step."""
        if batch != len(cache.forks):
            raise UnsupportedGeneration(
                f"the batch has {batch} rows and the cache {len(cache.forks)}; allowed: as many"
            )
        if mask is not None and not bool(mask[:, -count:].all()):
            raise UnsupportedGeneration("attention_mask hides new tokens; allowed: left padding")
        first = [n + fork.appended for n, fork in zip(cache.lengths, cache.forks, strict=True)]
        return torch.tensor(first)[:, None] + torch.arange(count)

    def after_forward(
        self,
        module: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Forward hook: count the tokens, report the rows, raise what a fork ran into."""
        cache: LiveCache | None = kwargs.get("past_key_values")
        if cache is None or cache is not self._cache:
            return
        tokens = kwargs.get("input_ids", args[0] if args else None)
        count = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
        cache.seen += count
        if self._prefill is not None:
            self.last = [
                Row(
                    prompt_tokens=n,
                    compressed=fork.compressed,
                    entries=fork.prompt_counts(self._compressible),
                    cache_bytes=fork.cache_bytes(),
                    exact_bytes=state.exact_bytes,
                    compress_s=fork.compress_s,
                )
                for n, fork, state in zip(
                    cache.lengths, cache.forks, self._prefill.rows, strict=True
                )
            ]
            self.rows.extend(self.last)
            self._prefill = None
            return
        for fork in cache.forks:
            fork.appended += count
            if fork.failure is not None:
                raise fork.failure

    def finish(self, *, audit: bool = True) -> None:
        """The generation is over: count every row's entries again, and let go of them.

        Raises:
            BudgetExceeded: a row holds more than its budget and the tokens since.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.open = False
        if self._prefill is not None:  # a prefill that did not get through
            self._prefill = None
            return
        if cache is None or not audit:
            return
        for row, n, fork in zip(self.last, cache.lengths, cache.forks, strict=False):
            fork.audit(n, self._compressible)
            row.compressed |= fork.evicted
            row.cache_bytes_end = fork.cache_bytes()


def _left_padding(mask: Tensor | None, batch: int, count: int) -> list[int]:
    """Leading padding tokens of each row.

    Raises:
        UnsupportedGeneration: padding elsewhere, or a row of padding only.
    """
    if mask is None:
        return [0] * batch
    if tuple(mask.shape) != (batch, count):
        raise UnsupportedGeneration(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {(batch, count)}, the prompt's"
        )
    kept = mask.to("cpu", torch.bool)
    padding = []
    for i, row in enumerate(kept):
        start = count - int(row.sum())
        if start == count or not bool(row[start:].all()):
            raise UnsupportedGeneration(
                f"attention_mask of row {i} hides tokens after the first shown one, or all; allowed: "
                "padding on the left (tokenizer.padding_side = 'left')"
            )
        padding.append(start)
    return padding
