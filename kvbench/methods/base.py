"""The contract of a compression method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvbench.kv import Budget, CompressedKV, LayerKV


@dataclass(frozen=True)
class Held:
    """What a fork's cache holds at one layer while decoding, the newest entry last.

    Attributes:
        scores: [kv_heads, c] float32, `CompressedKV.scores` brought up to date by `Method.evict`;
            a new entry starts at 0.
        positions: [kv_heads, c] int64, the prompt or generation position of each entry.
        capacity: entries this layer may hold per head, as `Method.layer_capacity` said.
    """

    scores: Tensor
    positions: Tensor
    capacity: int


@dataclass(frozen=True, kw_only=True)
class Method:
    """A KV-cache compression method: a frozen dataclass whose fields are the paper's knobs.

    A subclass implements `compress`, and nothing else unless it must. One method is one file in
    kvbench/methods (the file's name is the method's) and one YAML of the same name in conf/method.
    """

    paper: ClassVar[str] = ""
    """Where the method comes from: arXiv number and section."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of options, e.g. ``{"released": {"order": "released"}}``."""
    needs_queries: ClassVar[str | int] = 0
    """Prompt queries `compress` reads: 0, "window" (the last `budget.window`) or "all"."""
    saves_memory: ClassVar[bool] = True
    """False when the cache stays whole (exact, topk): no budget applies, and the record says so."""

    uses_budget: ClassVar[bool] = True
    """False when `compress` does not look at the budget (exact): one record serves every rate."""

    @property
    def evicts(self) -> bool:
        """True when `evict` is to be called: the cache does not grow while decoding."""
        return False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """What `layer` holds instead.

        Called only for prompts longer than `layer_capacity`. Must be a pure function of its
        arguments: all randomness from `generator` (a CPU generator; move the draws, not it).
        """
        raise NotImplementedError(f"{type(self).__name__}.compress")

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        """Entries per KV head the method may hold at this layer after prefill of n tokens.

        The audit holds the method to it, and holds its sum over the layers to
        ``num_layers * budget.capacity(n)`` (see `total_capacity`).
        """
        return budget.capacity(n) if self.saves_memory else n

    def total_capacity(self, budget: Budget, n: int, num_layers: int) -> int:
        """Entries per KV head summed over the layers that the audit allows.

        Only a preset that reproduces a released code's own split may override it, and must say so.
        """
        return num_layers * (budget.capacity(n) if self.saves_memory else n)

    def evict(self, held: Held, attention: Tensor) -> tuple[Tensor, Tensor | None]:
        """After one decoded token: new scores, and which entry leaves.

        Args:
            held: what the layer holds, the new token's entry last.
            attention: [kv_heads, c] the step's softmax attention, mean over the group's queries.

        Returns:
            scores [kv_heads, c], and the index [kv_heads] of the entry that leaves each head (None:
            nothing leaves). Called only when `evicts`.
        """
        raise NotImplementedError(f"{type(self).__name__}.evict")
