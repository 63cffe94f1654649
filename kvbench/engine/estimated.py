"""Reading streams through streaming algorithms (BalanceKV's, SubGen's) and their estimators."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall, UnsupportedModel, capped
from kvbench.engine.fork import layer_generator
from kvbench.kv import Budget, BudgetExceeded
from kvbench.methods.base import LayerStream, Method

MOST_WAITING = 64
"""Most tokens that are collected before an algorithm reads them."""


@dataclass
class _Layer:
    """What a layer holds: sink and recent tokens exactly [kv_heads, entries, d], and the algorithm's
    estimators of the others, updated whenever it reads."""

    keys: Tensor
    values: Tensor
    algorithm: LayerStream | None = None
    numerator: tuple[Tensor, Tensor, Tensor] | None = None
    denominator: tuple[Tensor, Tensor] | None = None

    @property
    def entries(self) -> int:
        """Entries of the head that holds most."""
        exact = self.keys.shape[1]
        return exact if self.algorithm is None else exact + self.algorithm.entries

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        exact = self.keys.nbytes + self.values.nbytes
        return exact if self.algorithm is None else exact + self.algorithm.nbytes


class EstimatedState:
    """Attention state that reads a stream through a method's `Method.reading`.

    Everything is exact until ``budget.size`` has no room for another `waiting` tokens. Then the
    algorithm reads all tokens between sink and window, and afterwards those that leave the window, up
    to `waiting` at a time: when it reads depends on positions alone, not on the chunks of the model's
    passes. Attention is the quotient of its two estimators; sink and recent tokens are exact in both.

    Args:
        tokens: length of the whole text, which BalanceKV needs.

    Attributes:
        most: largest number of entries held by any layer and head.
    """

    def __init__(
        self, label: str, method: Method, budget: Budget, tokens: int, seed: int, name: str
    ) -> None:
        assert budget.size is not None
        self.label, self.method, self.budget = label, method, budget
        self.start, self.recent, self.tokens = 0, budget.size, tokens
        self.seed, self.name, self.seen = seed, name, 0
        between = budget.size - budget.sink - budget.window
        self.waiting = max(1, min(MOST_WAITING, between // 8))
        self.room, self.most = between - self.waiting, 0
        self._layers: dict[int, _Layer] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of each of the chunk's tokens to the entries held when it is read, and to itself."""
        if call.sliding_window is not None:
            raise UnsupportedModel("a layer has a sliding window; allowed: full attention")
        key, value = call.key[0], call.value[0]
        layer = self._layers.setdefault(call.layer, _Layer(key[:, :0], value[:, :0]))
        out, begin, end = [], 0, key.shape[1]
        while begin < end:  # up to the next token at which the algorithm may read
            step = min(end - begin, self.waiting - (self.seen + begin) % self.waiting)
            part = slice(begin, begin + step)
            layer.keys = torch.cat([layer.keys, key[:, part]], dim=1)
            layer.values = torch.cat([layer.values, value[:, part]], dim=1)
            out.append(self._attend(layer, call.query[0, :, part], call))
            begin += step
            self.most = max(self.most, layer.entries)
            if (self.seen + begin) % self.waiting == 0:
                self._read(layer, call.layer)
        return torch.cat(out, dim=1)[None].to(call.query.dtype)

    def _attend(self, layer: _Layer, query: Tensor, call: LayerCall) -> Tensor:
        """Attention of query [heads, t, d]; its own keys are the last `t` that are held."""
        heads, t, dim = query.shape
        kv_heads, held = layer.keys.shape[:2]
        rows = query.reshape(kv_heads, -1, dim).float()

        def logits(keys: Tensor) -> Tensor:
            return capped(rows @ keys.float().mT * call.scaling, call.softcap)

        order = torch.arange(held, device=query.device)
        hidden = order > order[held - t :, None]
        exact = logits(layer.keys).masked_fill(hidden.repeat(heads // kv_heads, 1), -torch.inf)
        top = exact.amax(-1, keepdim=True)
        if layer.numerator is None or layer.denominator is None:
            out = exact.softmax(-1) @ layer.values.float()
            return out.view(heads, t, -1)
        above = logits(layer.numerator[0]) + layer.numerator[2][:, None]
        below = logits(layer.denominator[0]) + layer.denominator[1][:, None]
        for part in (above, below):
            if part.shape[-1]:
                top = torch.maximum(top, part.amax(-1, keepdim=True))
        exact, above, below = (torch.exp(part - top) for part in (exact, above, below))
        total = exact @ layer.values.float() + above @ layer.numerator[1].float()
        out = total / (exact.sum(-1, keepdim=True) + below.sum(-1, keepdim=True))
        return out.view(heads, t, -1)

    def _read(self, layer: _Layer, index: int) -> None:
        """Let the algorithm read the tokens that have left the window, once the cache is full.

        Raises:
            BudgetExceeded: the layer holds more than the budget.
        """
        sink, held = self.budget.sink, layer.keys.shape[1]
        if layer.algorithm is None and held + self.waiting <= self.recent:
            return
        old = slice(sink, max(sink, held - self.budget.window))
        keys, values = layer.keys[:, old], layer.values[:, old]
        if layer.algorithm is None:
            begin = self.method.reading(self.budget)
            assert callable(begin)
            layer.algorithm = begin(
                keys,
                values,
                room=self.room,
                tokens=self.tokens,
                generator=layer_generator(self.seed, self.name, index),
            )
        layer.algorithm.extend(keys, values)
        layer.keys, layer.values = (
            torch.cat([part[:, :sink], part[:, old.stop :]], dim=1)
            for part in (layer.keys, layer.values)
        )
        device = layer.keys.device
        keys, values, log_weights = layer.algorithm.numerator()
        layer.numerator = keys.to(device), values.to(device), log_weights.to(device)
        keys, log_weights = layer.algorithm.denominator()
        layer.denominator = keys.to(device), log_weights.to(device)
        if layer.entries + self.waiting > self.recent:
            raise BudgetExceeded(self.label, index, self.recent, layer.entries + self.waiting)

    def advance(self, tokens: int) -> None:
        """So many tokens were read."""
        self.seen += tokens

    @property
    def held_bytes(self) -> int:
        """Bytes held."""
        return sum(layer.nbytes for layer in self._layers.values())
