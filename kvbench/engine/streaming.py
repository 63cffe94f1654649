"""Reading texts of any length through a bounded cache of the first and the last tokens, by chunks.

The cache holds the first `start` and the last `recent` tokens. Every token attends to what it would
attend to if tokens were fed one by one, so that results do not depend on the chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.architecture import compressible_layers
from kvbench.engine.attention import LayerCall, UnsupportedModel, capped
from kvbench.engine.cache import LayerCache
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.prefill import forward_rows, input_device, prefill
from kvbench.engine.scoring import vocabulary
from kvbench.kv import Budget, CompressedKV
from kvbench.methods.base import Method

CHUNK = 256
"""Tokens per chunk."""
CHUNK_LOGITS = 2**24
"""Most logits in memory at a time."""


@dataclass(frozen=True)
class Rotation:
    """Rotary position encoding of the first dimensions, halves paired, by fixed frequencies.

    Attributes:
        frequencies: [pairs] float32.
    """

    frequencies: Tensor

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [..., tokens, dim] at positions [tokens], in float32."""
        return turned(x, *self.table(positions.to(x.device)))

    def table(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of positions [tokens], each [tokens, 2 * pairs] float32."""
        frequencies = self.frequencies.to(positions.device)
        angles = (positions[:, None].double() * frequencies.double()).repeat(1, 2)
        return angles.cos().float(), angles.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., tokens, dim] rotated by cosines and sines [..., tokens, width], in float32."""
    part, rest = x.float().split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    one, two = part.chunk(2, dim=-1)
    return torch.cat([part * cos + torch.cat([-two, one], dim=-1) * sin, rest], dim=-1)


@dataclass
class _FirstLayer:
    """Attention state that keeps the first layer's queries and keys."""

    found: list[Tensor] = field(default_factory=list)

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention."""
        if call.layer == 0:
            self.found += [call.query, call.key]
        return call.exact()


@torch.inference_mode()
def rotation_of(model: PreTrainedModel) -> Rotation | None:
    """The model's rotary encoding; None where positions enter with the embedding (OPT).

    The rotation is verified on the first layer: a key at position 0 is not rotated, and rotated here to
    another position it must equal the model's own key there.

    Raises:
        UnsupportedModel: another encoding, such as frequencies that depend on the length.
    """
    name = type(model).__name__
    named = {
        id(buffer): buffer for key, buffer in model.named_buffers() if key.endswith("inv_freq")
    }
    if not named:
        return None
    rotation = Rotation(next(iter(named.values())).float())
    ids = torch.tensor([[5, 3, 4]], device=input_device(model)) % vocabulary(model)
    there = torch.tensor([3, 17, 40], device=ids.device)
    plain, moved = _FirstLayer(), _FirstLayer()
    forward_rows(model, ids, torch.zeros_like(there), plain, keep=1)
    forward_rows(model, ids, there, moved, keep=1)
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    for unrotated, rotated in zip(plain.found, moved.found, strict=True):
        apart = (rotation(unrotated, there) - rotated.float()).abs().max()
        if float(apart) > tolerance * float(rotated.abs().max()):
            raise UnsupportedModel(
                f"{name} encodes positions otherwise than by fixed rotary frequencies; allowed with "
                "positions=cache: models that do, or that learn their positions"
            )
    return rotation


@dataclass
class _Held:
    """Keys and values [kv_heads, entries, d] that a layer holds, first tokens and last ones."""

    keys: Tensor
    values: Tensor


class StreamState:
    """Attention state that reads a stream; keys are held as the model computes them.

    Args:
        rotation: re-indexes positions inside the cache, by this encoding; None: keys keep their
            positions.
    """

    def __init__(self, start: int, recent: int, rotation: Rotation | None = None) -> None:
        self.start, self.recent, self.rotation = start, recent, rotation
        self.seen = 0
        self._layers: dict[int, _Held] = {}

    @property
    def times(self) -> Tensor:
        """The time (token number) at which each held entry was read."""
        first = min(self.start, self.seen)
        last = range(max(first, self.seen - self.recent), self.seen)
        return torch.tensor([*range(first), *last], dtype=torch.int64)

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of each of the chunk's tokens to the entries held when it is read, and to itself."""
        if call.sliding_window is not None:
            raise UnsupportedModel("a layer has a sliding window; allowed: full attention")
        key, value, device = call.key[0], call.value[0], call.key.device
        held = self._layers.get(call.layer)
        if held is not None:
            key = torch.cat([held.keys, key], dim=1)
            value = torch.cat([held.values, value], dim=1)
        now = torch.arange(self.seen, self.seen + call.query.shape[2], device=device)
        times = torch.cat([self.times.to(device), now])
        heads, kv_heads = call.query.shape[1], key.shape[0]
        query = call.query[0].view(kv_heads, heads // kv_heads, len(now), -1)
        logits = self._logits(query, key[:, None], now, times) * call.scaling
        distance = now[:, None] - times
        seen = (distance >= 0) & ((times < self.start) | (distance <= self.recent))
        weights = capped(logits.float(), call.softcap).masked_fill(~seen, -torch.inf).softmax(-1)
        out = weights.to(value.dtype) @ value[:, None]
        end = self.seen + len(now)
        kept = (times < self.start) | (times >= end - self.recent)
        self._layers[call.layer] = _Held(key[:, kept], value[:, kept])
        return out.reshape(1, heads, len(now), -1)

    def _logits(self, query: Tensor, key: Tensor, now: Tensor, times: Tensor) -> Tensor:
        """q.k of queries [kv_heads, group, t, d] at `now` and entries [kv_heads, 1, c, d] of `times`.

        Places in the cache are counted from the oldest entry: once the cache is full, a query has the
        place start + recent, so that its distance to a recent entry is the difference of their times,
        and to a first entry the difference of their places.
        """
        if self.rotation is None:
            return query @ key.mT
        first = int((times < self.start).sum())
        base = times[first] if first < len(times) else now[0]
        recent = self.rotation(query, now - base) @ self.rotation(key, times - base).mT
        place = now.clamp(max=self.start + self.recent)
        begin = self.rotation(query, place) @ self.rotation(key[:, :, :first], times[:first]).mT
        return torch.cat([begin, recent[..., first:]], dim=-1)

    def advance(self, tokens: int) -> None:
        """So many tokens were read."""
        self.seen += tokens

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(held.keys.nbytes + held.values.nbytes for held in self._layers.values())


class StreamReader(Protocol):
    """Attention state that reads a stream; `seen` tokens so far."""

    seen: int

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of the chunk's tokens."""
        ...

    def advance(self, tokens: int) -> None:
        """So many tokens were read."""
        ...


class PlacedCache(LayerCache):
    """A cache of unrotated keys that evicts: each key is given the position of its place among the held
    entries, by age.

    Attributes:
        table: cosines and sines of the places; None where positions enter with the embedding.
    """

    table: tuple[Tensor, Tensor] | None = None

    def dot_keys(self, query: Tensor, begin: int = 0) -> Tensor:
        """q.k of the newest token's query [kv_heads, q, d] with all that is held."""
        if self.table is None:
            return super().dot_keys(query, begin)
        n = self.length
        places = self.positions[:, :n].argsort(-1).argsort(-1)
        cos, sin = (part[places] for part in self.table)
        last = (part[n - 1] for part in self.table)
        return turned(query, *last) @ turned(self.keys[:, :n], cos, sin).mT


class PlacedState:
    """Attention state that reads a stream through a method that evicts, with positions in the cache.

    Every token, from the first on, is added, attends, and evicts an entry, so that accumulated scores
    (H2O's) are those of Algorithm 1.
    """

    def __init__(self, method: Method, budget: Budget, rotation: Rotation | None) -> None:
        assert budget.size is not None
        self.method, self.budget, self.rotation = method, budget, rotation
        self.start, self.recent = 0, budget.size
        self.seen = 0
        self._layers: dict[int, PlacedCache] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """See `LayerCache.step`."""
        if call.layer not in self._layers:
            self._layers[call.layer] = self._begin(call)
        query = call.query
        at = torch.arange(self.seen, self.seen + query.shape[2], device=query.device)
        return self._layers[call.layer].step(call, at)[None].to(query.dtype)

    def _begin(self, call: LayerCall) -> PlacedCache:
        size, device = self.recent, call.key.device
        none = torch.zeros(1, call.key.shape[1], 0, device=device)
        cache = PlacedCache(
            CompressedKV(call.key[:, :, :0], call.value[:, :, :0], None, none.long(), none),
            size + 1,
            self.method,
            capacity=size,
            sink=self.budget.sink,
        )
        if self.rotation is not None:
            cache.table = self.rotation.table(torch.arange(size + 1, device=device))
        return cache

    def advance(self, tokens: int) -> None:
        """So many tokens were read."""
        self.seen += tokens

    @property
    def held_bytes(self) -> int:
        """Bytes held, of scores too."""
        return sum(cache.entry_bytes() for cache in self._layers.values())


@torch.inference_mode()
def stream(
    model: PreTrainedModel,
    ids: Sequence[int],
    *,
    start: int,
    recent: int,
    positions: str = "cache",
    state: StreamReader | None = None,
) -> Iterator[Tensor]:
    """-log p of every token but the first, in chunks, each [tokens] float32 on the CPU.

    Args:
        start, recent: how many first and last tokens are held.
        positions: cache (as StreamingLLM: entries and query are counted by their place in the cache,
            so that the text may be longer than the model's positions) | absolute (each keeps its own).
        state: continues an earlier text, whose cache it holds.

    Raises:
        UnsupportedModel: sliding-window layers; with ``cache``, see `rotation_of`.
    """
    device = input_device(model)
    count = model.config.get_text_config().num_hidden_layers
    if len(compressible_layers(model)) < count:
        raise UnsupportedModel(
            f"{type(model).__name__} has sliding-window layers; allowed: full attention"
        )
    rotation = rotation_of(model) if positions == "cache" else None
    state = state or StreamState(start, recent, rotation)
    tokens = torch.tensor(list(ids), dtype=torch.int64)
    size = max(1, min(CHUNK, CHUNK_LOGITS // vocabulary(model)))
    for begin in range(0, len(tokens) - 1, size):
        chunk = tokens[begin : begin + size]
        target = tokens[begin + 1 : begin + 1 + len(chunk)]
        at = torch.arange(state.seen, state.seen + len(chunk), device=device)
        if positions == "cache":  # 0: not rotated; learned positions have the place in the cache
            at = torch.zeros_like(at) if rotation else at.clamp(max=start + recent)
        logits = forward_rows(model, chunk[None].to(device), at, state)[0]
        state.advance(len(chunk))
        yield nll_of(logits, target.to(device))


def nll_of(logits: Tensor, target: Tensor) -> Tensor:
    """-log p of the tokens `target` [t] by the first t of logits [>= t, vocab]: float32 on the CPU."""
    logprobs = logits[: len(target)].float().log_softmax(-1)
    return -logprobs.gather(-1, target[:, None])[:, 0].cpu()


@dataclass
class _Exact:
    """Attention state of plain causal attention."""

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention."""
        return call.exact()


@torch.inference_mode()
def recomputed(
    model: PreTrainedModel, ids: Sequence[int], *, recent: int, rows: int = 16
) -> Iterator[Tensor]:
    """As `stream`, by sliding-window re-computation: each token from a new pass over the `recent` tokens
    before it and itself. O(len(ids) * recent^2)."""
    device = input_device(model)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
    whole = tokens[: recent + 1][None]
    logits = forward_rows(model, whole, torch.arange(whole.shape[1], device=device), _Exact())[0]
    ends = list(range(recent + 1, len(tokens) - 1))
    target = tokens[1 : recent + 2]
    yield nll_of(logits, target)
    at = torch.arange(recent + 1, device=device)
    for begin in range(0, len(ends), rows):
        some = torch.tensor(ends[begin : begin + rows], device=device)
        windows = tokens[some[:, None] - recent + at]
        logits = forward_rows(model, windows, at, _Exact(), keep=1)[:, -1]
        yield nll_of(logits, tokens[some + 1])


@torch.inference_mode()
def stream_fork(model: PreTrainedModel, ids: Sequence[int], fork: Fork) -> list[Tensor]:
    """As `stream`, through a fork whose method evicts while it reads; every entry keeps its position.

    The first `capacity` tokens are read exactly; after them one entry is evicted per token, layer by
    layer, so that later layers see what earlier ones kept.

    Args:
        fork: of a method that evicts (`check_reads`).

    Raises:
        Exception: whatever made the fork fail.
    """
    n, device = len(ids), input_device(model)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
    first, whole = min(n, fork.budget.capacity(n)), fork.budget
    found = list(stream(model, ids[:first], start=0, recent=first, positions="absolute"))
    if first < n:
        # A rate of 1 keeps all of the first tokens and still lets the method note their scores.
        fork.budget = Budget(rate=1.0, sink=whole.sink, window=whole.window)
    logits = prefill(model, ids[:first], [fork], always_compress=first < n).logits[None]
    fork.budget = whole
    size = max(1, min(CHUNK, CHUNK_LOGITS // vocabulary(model)))
    for begin in range(first, n, size):
        if fork.failure is not None:
            break
        found.append(nll_of(logits, tokens[begin : begin + 1]))
        chunk = tokens[begin : begin + size]
        positions = torch.arange(begin, begin + len(chunk), device=device)
        rows = forward_rows(model, chunk[None], positions, ForkBatch([fork], positions))[0]
        found.append(nll_of(rows, tokens[begin + 1 : begin + len(chunk)]))
        logits = rows[-1:]
    if fork.failure is not None:
        raise fork.failure
    return found
