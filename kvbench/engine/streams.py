"""Reading a text of any length through a method's bounded cache, by chunks.

Every token attends to what it would attend to if tokens were fed one by one, so that results do not
depend on the chunks. What is held between them is a band of first and last tokens (`BandState`), or the
cache of a method that evicts (`EvictingState`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.attention import AttentionState, LayerCall, UnsupportedModel
from kvbench.engine.cache import EvictingCache, store_of
from kvbench.engine.entries import Entries
from kvbench.engine.estimate import shape_of
from kvbench.engine.prefill import CaptureState, compressible_layers, forward_rows, input_device
from kvbench.engine.scoring import CHUNK_LOGITS, vocabulary
from kvbench.kernels.decode_attention import products
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, Rotary
from kvbench.methods.base import Method, rule_of

POSITIONS = ("cache", "absolute")
"""How positions are counted: inside the cache (as StreamingLLM: entries and query by their place there,
so that the text may be longer than the model's positions), or every entry keeps its own."""

CHUNK = 256
"""Tokens per chunk."""


@dataclass(frozen=True)
class Read:
    """A text that was read.

    Attributes:
        nll: [tokens - 1] float32, -log p of every token but the first.
        entries: the most entries per layer and KV head after a token.
        held_bytes: bytes held at the end; where every token is predicted by a pass of its own, those of
            the keys and values of one pass.
        exact_bytes: bytes of the entries of all tokens.
    """

    nll: Tensor
    entries: int
    held_bytes: int
    exact_bytes: int


def check_reads(label: str, method: Method, budget: Budget, positions: str) -> None:
    """Refuse methods that cannot keep a cache bounded while they read, or not with these positions.

    Raises:
        KVError: naming the method.
    """
    if method.reading(budget) is not None:
        return
    if method.evicts and (positions == "absolute" or budget.size is not None):
        if positions == "cache" and method.quantize is not None:
            raise KVError(
                f"method {label!r} packs its entries, which have no place in the cache to be turned to; "
                "allowed: positions=absolute, or quantize=null"
            )
        return
    raise KVError(
        f"method {label!r} with positions={positions} and budget.size={budget.size} cannot read a "
        "stream; allowed: exact, and with a size streaming_llm, local and methods that evict while "
        "decoding (h2o)"
    )


@torch.inference_mode()
def read_text(
    model: PreTrainedModel,
    ids: Sequence[int],
    method: Method,
    budget: Budget,
    positions: str = "cache",
    *,
    label: str = "method",
) -> Read:
    """-log p of every token but the first, each from what is held when it comes.

    Args:
        positions: see `POSITIONS`.

    Raises:
        KVError: see `check_reads`. UnsupportedModel: see `stream`. Whatever stopped the method.
    """
    check_reads(label, method, budget, positions)
    band = method.reading(budget)
    n = len(ids)
    shape = shape_of(model.config.get_text_config(), model.dtype)
    if band is not None and band.recomputed:
        assert band.last is not None
        nll = torch.cat(list(recomputed(model, ids, recent=band.last)))
        entries = min(n, band.last)
        return Read(nll, entries, shape.bytes(n, entries), shape.bytes(n, n))
    rotation = rotation_of(model) if positions == "cache" else None
    state: BandState | EvictingState
    if band is None:
        state = EvictingState(method, budget, n, rotation)
    else:
        state = BandState(band.first, n if band.last is None else band.last, rotation)
    nll = torch.cat(list(stream(model, ids, state, positions)))
    return Read(nll, min(n, state.most), state.held_bytes, shape.bytes(n, n))


@torch.inference_mode()
def stream(
    model: PreTrainedModel,
    ids: Sequence[int],
    state: BandState | EvictingState,
    positions: str = "cache",
) -> Iterator[Tensor]:
    """-log p of every token but the first, in chunks, each [tokens] float32 on the CPU.

    Args:
        state: what is held; the text may follow an earlier one that was read with the same state.
        positions: see `POSITIONS`.

    Raises:
        UnsupportedModel: layers without full attention.
    """
    device = input_device(model)
    if len(compressible_layers(model)) < model.config.get_text_config().num_hidden_layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has sliding-window layers; allowed: full attention"
        )
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
    size = max(1, min(CHUNK, CHUNK_LOGITS // vocabulary(model)))
    for begin in range(0, len(tokens) - 1, size):
        chunk = tokens[begin : begin + size]
        at = torch.arange(state.seen, state.seen + len(chunk), device=device)
        if positions == "cache" and state.rotation is None:
            # Positions are learned: a token has that of its place in the cache.
            at = at.clamp(max=state.most)
        elif positions == "cache":
            # The state rotates queries and keys itself; at position 0 the model does not.
            at = torch.zeros_like(at)
        logits = forward_rows(model, chunk[None], at, state)[0]
        state.seen += len(chunk)
        yield nll_of(logits, tokens[begin + 1 : begin + 1 + len(chunk)])


@torch.inference_mode()
def recomputed(
    model: PreTrainedModel, ids: Sequence[int], *, recent: int, rows: int = 16
) -> Iterator[Tensor]:
    """Negative log-likelihoods as `stream` yields them, by sliding-window re-computation: each token is
    predicted by a new pass over the `recent` + 1 tokens before it. Takes O(len(ids) * recent^2) time."""
    device = input_device(model)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
    exact = CaptureState({}, 0)
    # The first tokens, which all have fewer than `recent` before them, in one pass.
    beginning = tokens[: recent + 1][None]
    positions = torch.arange(beginning.shape[1], device=device)
    logits = forward_rows(model, beginning, positions, exact)[0]
    yield nll_of(logits, tokens[1 : recent + 2])
    last_tokens = list(range(recent + 1, len(tokens) - 1))  # of the windows of later passes
    positions = torch.arange(recent + 1, device=device)
    for begin in range(0, len(last_tokens), rows):
        last = torch.tensor(last_tokens[begin : begin + rows], device=device)
        windows = tokens[last[:, None] - recent + positions]
        logits = forward_rows(model, windows, positions, exact, keep=1)[:, -1]
        yield nll_of(logits, tokens[last + 1])


def nll_of(logits: Tensor, target: Tensor) -> Tensor:
    """-log p of the tokens `target` [t], each predicted by the row of the same place in logits
    [at least t, vocab]: [t] float32 on the CPU."""
    logprobs = logits[: len(target)].float().log_softmax(-1)
    return -logprobs.gather(-1, target[:, None])[:, 0].cpu()


def rotary(frequencies: Tensor) -> Rotary:
    """The table of rotary positions by fixed frequencies [pairs], exact at any position."""

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = frequencies.to(positions.device, torch.float64)
        angles = (positions[:, None].double() * turns).repeat(1, 2)
        return angles.cos().float(), angles.sin().float()

    return table


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., tokens, dim], of which the first dimensions are rotated by cosines and sines [..., tokens,
    width], halves paired; in float32."""
    part, rest = x.float().split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first_half, second_half = part.chunk(2, dim=-1)
    turned = part * cos + torch.cat([-second_half, first_half], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


@torch.inference_mode()
def rotation_of(model: PreTrainedModel) -> Rotary | None:
    """The model's rotary table; None where positions enter with the embedding (OPT).

    The rotation is verified on the first layer: a key at position 0 is not rotated, and rotated here to
    another position it must equal the model's own key there.

    Raises:
        UnsupportedModel: another encoding, such as frequencies that depend on the length.
    """
    buffers = dict(model.named_buffers())
    frequencies = [buffer for name, buffer in buffers.items() if name.endswith("inv_freq")]
    if not frequencies:
        return None
    rotation = rotary(frequencies[0].float())
    ids = torch.tensor([[5, 3, 4]], device=input_device(model)) % vocabulary(model)
    later_positions = torch.tensor([3, 17, 40], device=ids.device)
    keys = []
    for positions in (torch.zeros_like(later_positions), later_positions):
        state = CaptureState({0: None}, 1)
        forward_rows(model, ids, positions, state, keep=1)
        layer = state.layers[0]
        assert layer is not None
        keys.append(layer.keys)
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    cos, sin = rotation(later_positions.to(keys[0].device))
    difference = (rotated(keys[0], cos, sin) - keys[1].float()).abs().max()
    if float(difference) > tolerance * float(keys[1].abs().max()):
        raise UnsupportedModel(
            f"{type(model).__name__} encodes positions otherwise than by fixed rotary frequencies; "
            "allowed with positions=cache: models that do, or that learn their positions"
        )
    return rotation


class BandState(AttentionState):
    """Attention state that reads a stream and holds the first `start` and the last `recent` tokens: each
    of a chunk's tokens attends to those held when it is read, and to itself.

    Attributes:
        most: the most entries of any layer and head after a token.
        seen: tokens read so far.
        rotation: rotates keys, which are held without a position, to their places in the cache; None:
            they are held with the positions that the model gave them.
    """

    def __init__(self, start: int, recent: int, rotation: Rotary | None = None) -> None:
        self.start = start
        self.recent = recent
        self.most = start + recent
        self.rotation = rotation
        self.seen = 0
        # Keys and values [kv_heads, entries, dim] by layer, and the token number of each entry.
        self._layers: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """See `BandState`."""
        key, value = call.key[0], call.value[0]
        now = torch.arange(self.seen, self.seen + call.query.shape[2], device=key.device)
        times = now  # the token number at which each entry was read
        if call.layer in self._layers:
            keys, values, before = self._layers[call.layer]
            key, value = torch.cat([keys, key], dim=1), torch.cat([values, value], dim=1)
            times = torch.cat([before, now])
        heads, kv_heads = call.query.shape[1], key.shape[0]
        query = call.query[0].view(kv_heads, heads // kv_heads, len(now), -1)
        logits = self._logits(query, key[:, None], now, times) * call.scaling
        distance = now[:, None] - times
        seen = (distance >= 0) & ((times < self.start) | (distance <= self.recent))
        weights = capped(logits, call.softcap).masked_fill(~seen, -torch.inf).softmax(-1)
        out = weights.to(value.dtype) @ value[:, None]
        kept = (times < self.start) | (times > now[-1] - self.recent)
        self._layers[call.layer] = key[:, kept], value[:, kept], times[kept]
        return out.reshape(1, heads, len(now), -1)

    def _logits(self, query: Tensor, key: Tensor, now: Tensor, times: Tensor) -> Tensor:
        """q.k of queries [kv_heads, group, t, d] at `now` and entries [kv_heads, 1, c, d] of `times`.

        Places in the cache are counted from the oldest entry: once the cache is full, a query has the
        place start + recent, so that its distance to a recent entry is the difference of their times,
        and to a first entry the difference of their places.
        """
        if self.rotation is None:
            return products(query, key)
        first = int((times < self.start).sum())
        base = times[first] if first < len(times) else now[0]
        query_turn, key_turn = self.rotation(now - base), self.rotation(times - base)
        to_recent = rotated(query, *query_turn) @ rotated(key, *key_turn).mT
        query_turn = self.rotation(now.clamp(max=self.most))
        key_turn = self.rotation(times[:first])
        to_first = rotated(query, *query_turn) @ rotated(key[:, :, :first], *key_turn).mT
        return torch.cat([to_first, to_recent[..., first:]], dim=-1)

    @property
    def held_bytes(self) -> int:
        """Bytes of the keys and values held."""
        return sum(key.nbytes + value.nbytes for key, value, _ in self._layers.values())


class _PlacedEntries(Entries):
    """Entries with unrotated keys: each key is read at its place among the entries, by age.

    Args:
        table: cosines and sines of the places, each [places, width].
    """

    def __init__(self, held: CompressedKV, room: int, table: tuple[Tensor, Tensor]) -> None:
        super().__init__(held, room, keeps_scores=True)
        self.table = table

    def dot_keys(self, query: Tensor) -> Tensor:
        """See `Entries.dot_keys`, of the newest token's query."""
        n = self.length
        places = self.positions[:, :n].argsort(-1).argsort(-1)
        cos, sin = (part[places] for part in self.table)
        last = (part[n - 1] for part in self.table)
        return rotated(query, *last) @ rotated(self.keys[:, :n], cos, sin).mT


class EvictingState(AttentionState):
    """Attention state that reads a stream and holds what a method that evicts leaves.

    Every token, from the first on, is added, attends, and evicts an entry once the cache is full, layer
    by layer, so that accumulated scores (H2O's) are those of Algorithm 1.

    Args:
        tokens: length of the whole text.
        rotation: see `BandState`.
    """

    def __init__(
        self, method: Method, budget: Budget, tokens: int, rotation: Rotary | None
    ) -> None:
        self.method = method
        self.sink = budget.sink
        self.most = budget.capacity(tokens)
        self.rotation = rotation
        self.seen = 0
        self._layers: dict[int, EvictingCache] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """See `BandState`."""
        if call.layer not in self._layers:
            self._layers[call.layer] = self._begin(call)
        query = call.query
        at = torch.arange(self.seen, self.seen + query.shape[2], device=query.device)
        return self._layers[call.layer].step(call, at)[None].to(query.dtype)

    def _begin(self, call: LayerCall) -> EvictingCache:
        """The cache of a layer that has read nothing."""
        no_scores = call.key.new_zeros(1, call.key.shape[1], 0, dtype=torch.float32)
        rule = rule_of(self.method, self.most, self.sink)
        needs_scores = rule is None or rule.leaves != "oldest"
        held = CompressedKV(
            call.key[:, :, :0],
            call.value[:, :, :0],
            None,
            positions=no_scores.long(),
            scores=no_scores if needs_scores else None,
        )
        room = self.most + 1  # for the token that is being read
        if self.rotation is None:
            store = store_of(held, room, self.method.quantization(), keeps_scores=True)
        else:
            places = torch.arange(room, device=call.key.device)
            store = _PlacedEntries(held, room, self.rotation(places))
        return EvictingCache(
            store, capacity=self.most, method=self.method, granted=self.most, sink=self.sink
        )

    @property
    def held_bytes(self) -> int:
        """Bytes of what the caches of all layers hold, scores included."""
        return sum(cache.entry_bytes() for cache in self._layers.values())
