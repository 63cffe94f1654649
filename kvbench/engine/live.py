"""transformers' own `generate` with compressed caches: what `kvbench.compress` adds to a model.

Within it, a forward hook replaces the cache that `generate` made by a `LiveCache`, which does
generate's bookkeeping (lengths, beams) and holds no keys or values itself: the attention function gives
those to the forks, one per batch row, as in the benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from kvbench.engine.architecture import rotary_of
from kvbench.engine.attention import LayerCall
from kvbench.engine.context import Context, Text
from kvbench.engine.fork import Fork, ForkBatch, prompt_name
from kvbench.engine.live_cache import (
    NO_ATTENTIONS,
    NO_CACHE,
    NOT_OURS,
    LiveCache,
    Row,
    UnsupportedGeneration,
)
from kvbench.engine.prefill import PrefillState
from kvbench.errors import is_integer
from kvbench.kv import Budget, KVError, Rotary
from kvbench.methods.base import Method


class _BatchPrefill:
    """Attention state of a batch's prefill: every row is read separately, without its padding.

    Args:
        forks: one per row.
        padding: leading tokens of each row that are padding.
        compressible: see `compressible_layers`.
        context: tokens of each row that are compressed; those after them go through the compressed
            cache. None: all.
    """

    def __init__(
        self,
        forks: Sequence[Fork],
        padding: Sequence[int],
        compressible: Sequence[int],
        context: int | None = None,
        rotary: Rotary | None = None,
    ) -> None:
        self.padding = padding
        self.context = context
        self.rows = [PrefillState([fork], compressible, rotary=rotary) for fork in forks]

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention of each row's own tokens; padding attends to nothing."""
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        for i, (row, start) in enumerate(zip(self.rows, self.padding, strict=True)):
            end = call.query.shape[2] if self.context is None else start + self.context
            out[i : i + 1, :, start:end] = row.attend(call.of_row(i, start, end))
            (fork,) = row.forks
            if fork.failure is None and end < call.query.shape[2]:
                later = call.of_row(i, end)
                count = later.query.shape[2]
                positions = torch.arange(end - start, end - start + count, device=out.device)
                out[i : i + 1, :, end:] = ForkBatch([fork], positions).attend(later)
                row.exact_bytes += later.nbytes
            if fork.failure is not None:
                raise fork.failure
        return out


@dataclass(repr=False)
class Compression:
    """One method around one model; yielded by `kvbench.compress`.

    Attributes:
        rows: one per batch row of every prompt so far, in order (`generate` repeats a prompt for
            each beam and each returned sequence).
        last: the rows of the latest call.
        compress_after: see `kvbench.compress`.
    """

    model: PreTrainedModel
    method: Method
    budget: Budget
    label: str
    seed: int = 0
    compress_after: str | int | None = None
    rows: list[Row] = field(default_factory=list)
    last: list[Row] = field(default_factory=list)
    _compressible: list[int] = field(default_factory=list, repr=False)
    _cache: LiveCache | None = field(default=None, repr=False)
    _prefill: _BatchPrefill | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        last = f", ratio of the last {self.ratio[-1]:.3g}" if self.rows else ""
        return f"<kvbench session: {self.label}, {self.budget}; {len(self.rows)} rows{last}>"

    def __post_init__(self) -> None:
        after = self.compress_after
        if after not in (None, "prompt", "context") and not is_integer(after, 1):
            raise KVError(
                f"compress_after is {after!r}; allowed: 'prompt', 'context', or how many tokens of each "
                "prompt are its context"
            )

    def read(self, prompt: Text, tokenizer: PreTrainedTokenizerBase | None = None) -> Context:
        """Prefill a prompt once and compress it, to be asked many things: see `Context.ask`.

        Raises:
            KVError: an empty prompt, text without a tokenizer, or a `compress_after` that says
                otherwise.
        """
        if self.compress_after not in (None, "context"):
            raise KVError(
                f"compress_after is {self.compress_after!r} and a context is compressed before its "
                "questions; allowed: 'context', or generate with each question in its prompt"
            )
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
        """Forward pre-hook: pass the attention state to the model, and the cache to `generate`."""
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
            self._continue_with(given)
            state = ForkBatch(given.forks, self._positions(given, batch, count, mask))
            given.load_states(state)
            kwargs["kvbench"] = state
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
                raise UnsupportedGeneration(NOT_OURS.format(kind="DynamicCache"))
        self.finish()
        self._start(tokens, batch, count, mask)
        kwargs["past_key_values"] = self._cache
        kwargs["use_cache"] = True
        kwargs["kvbench"] = self._prefill
        return args, kwargs

    def _start(self, tokens: Tensor | None, batch: int, count: int, mask: Tensor | None) -> None:
        """Forks for a new batch of prompts.

        Raises:
            UnsupportedGeneration: `compress_after` does not say where the context of a prompt ends,
                or the method reads a prompt twice.
        """
        if self.compress_after == "context":
            raise UnsupportedGeneration(
                "compress_after is 'context' and generate does not know where the context of a prompt "
                "ends; allowed: how many tokens are context, or session.read(context).ask(question)"
            )
        if self.method.rescoring is not None:
            raise UnsupportedGeneration(
                f"method {self.label!r} has the model repeat its prompt before it compresses, and "
                "generate reads a prompt once; allowed: session.read(context, tokenizer).ask(question)"
            )
        padding = _left_padding(mask, batch, count)
        context = None if self.compress_after in (None, "prompt") else int(self.compress_after or 0)
        ids = None if tokens is None else [tokens[i, p:].tolist() for i, p in enumerate(padding)]
        lengths = [count - start for start in padding]
        if context is not None:
            lengths = [min(n, context) for n in lengths]
        forks = []
        for i, n in enumerate(lengths):
            name = f"row {i}" if ids is None else prompt_name(ids[i][:n])
            fork = Fork(self.label, self.method, self.budget, self.seed, name, room=0)
            fork.compressed = self.method.uses_budget and n > self.budget.capacity(n)
            forks.append(fork)
        self._cache = LiveCache(self.model, forks, lengths, [[] for _ in forks] if ids else None)
        rotary = rotary_of(self.model)
        self._prefill = _BatchPrefill(forks, padding, self._compressible, context, rotary)

    def _continue_with(self, cache: LiveCache) -> None:
        """Continue with a cache: this generation's, or one from an earlier generation.

        Raises:
            UnsupportedGeneration: it is another model's.
        """
        if cache is self._cache:
            return
        if cache.model is not self.model:
            raise UnsupportedGeneration(
                "past_key_values is a compressed cache of another model; allowed: one of this model"
            )
        self.finish()
        self._cache, self.last, cache.open = cache, cache.rows, True
        self.rows.extend(row for row in cache.rows if not any(row is one for one in self.rows))

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
        """Forward hook: count tokens, fill in the rows, raise a fork's failure."""
        cache: LiveCache | None = kwargs.get("past_key_values")
        if cache is None or cache is not self._cache:
            return
        tokens = kwargs.get("input_ids", args[0] if args else None)
        count = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
        cache.seen += count
        starting = self._prefill
        padding = [0] * len(cache.forks) if starting is None else starting.padding
        if tokens is None:
            cache.tokens = None
        elif cache.tokens is not None:
            for ids, row, start in zip(cache.tokens, tokens.tolist(), padding, strict=True):
                ids += row[start:]
        for start, n, fork in zip(padding, cache.lengths, cache.forks, strict=True):
            if fork.failure is not None:
                raise fork.failure
            fork.appended += count if starting is None else count - start - n
        if starting is None:
            return
        cache.store_states()
        cache.rows = [
            Row.of(fork, count - start, state.exact_bytes, self._compressible)
            for start, fork, state in zip(padding, cache.forks, starting.rows, strict=True)
        ]
        self.last = cache.rows
        self.rows.extend(cache.rows)
        self._prefill = None

    def finish(self, *, audit: bool = True) -> None:
        """End the generation: audit every row's entries, and release the cache.

        Raises:
            BudgetExceeded: a row holds more than its budget and the tokens since.
        """
        cache, self._cache = self._cache, None
        if cache is not None:
            cache.open = False
        if self._prefill is not None:  # the prefill failed
            self._prefill = None
            return
        if cache is None or not audit:
            return
        for row, n, fork in zip(cache.rows, cache.lengths, cache.forks, strict=False):
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
