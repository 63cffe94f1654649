"""Reading a text of any length with a method's bounded cache, in chunks.

Every token attends to the entries to which it would attend if tokens were fed one by one, so that
results do not depend on the chunks. Between two chunks either the first and the last tokens are held
(`BandState`), or the cache of a method that evicts (`EvictingState`).
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
from kvbench.engine.rotary import table_change
from kvbench.engine.scoring import CHUNK_LOGITS, vocabulary
from kvbench.kernels.decode_attention import products
from kvbench.kernels.sinks import softmax
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, Rotary
from kvbench.methods.base import Method, rule_of

POSITIONS = ("cache", "absolute")
"""How positions are counted. ``cache``: the position of an entry and of the query is its place in the
cache, as in StreamingLLM, so that the text may be longer than the model's positions. ``absolute``: every
entry keeps its position in the text."""

CHUNK = 256
"""The number of tokens in a chunk."""


@dataclass(frozen=True)
class Read:
    """The result of reading a text.

    Attributes:
        nll: [tokens - 1] float32, the negative log-likelihood of every token but the first.
        entries: the largest number of entries per layer and KV head after a token.
        held_bytes: the bytes held at the end. Where every token is predicted by a pass of its own, those
            of the keys and values of one pass.
        exact_bytes: the bytes of the exact cache of the text.
    """

    nll: Tensor
    entries: int
    held_bytes: int
    exact_bytes: int


def check_reads(label: str, method: Method, budget: Budget, positions: str) -> None:
    """Refuse a method that cannot read a text with a bounded cache, or not with these `POSITIONS`.

    Raises:
        KVError: the method, its settings, and what is allowed.
    """
    if method.reading(budget) is not None:
        return
    if method.evicts and (positions == "absolute" or budget.size is not None):
        if positions == "cache" and method.quantize is not None:
            raise KVError(
                f"method {label!r} packs its keys with their positions, which positions=cache would "
                "change later; allowed: positions=absolute, or quantize=null"
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
    """Read a text with a method's bounded cache, and predict every token but the first by the entries
    that are held before it.

    Args:
        ids: the token ids of the text.
        positions: see `POSITIONS`.
        label: what messages call the method.

    Raises:
        KVError: see `check_reads`.
        UnsupportedModel: see `stream`. Whatever the method raises is raised, too.
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
    """Yield the negative log-likelihoods of every token but the first, chunk by chunk, each [tokens]
    float32 on the CPU.

    Args:
        state: holds the entries. A text may continue an earlier one that was read with the same state.
        positions: see `POSITIONS`.

    Raises:
        UnsupportedModel: layers without full attention, or positions for which the model has other
            rotary factors than for the first.
    """
    device = input_device(model)
    if len(compressible_layers(model)) < model.config.get_text_config().num_hidden_layers:
        raise UnsupportedModel(
            f"{type(model).__name__} has sliding-window layers; allowed: full attention"
        )
    longest = state.most if positions == "cache" else state.seen + len(ids)
    change = table_change(model.config)
    if change is not None and longest > change.tokens:
        raise UnsupportedModel(
            f"{type(model).__name__} has other rotary factors beyond {change.tokens} tokens and the "
            f"stream has {longest} positions; allowed: at most {change.tokens}"
        )
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
    size = max(1, min(CHUNK, CHUNK_LOGITS // vocabulary(model)))
    for begin in range(0, len(tokens) - 1, size):
        chunk = tokens[begin : begin + size]
        position_ids = torch.arange(state.seen, state.seen + len(chunk), device=device)
        if positions == "cache" and state.rotation is None:
            # Positions are learned: a token has the position of its place in the cache.
            position_ids = position_ids.clamp(max=state.most)
        elif positions == "cache":
            # The state rotates queries and keys itself, and the model rotates none at position 0.
            position_ids = torch.zeros_like(position_ids)
        logits = forward_rows(model, chunk[None], position_ids, state)[0]
        state.seen += len(chunk)
        yield nll_of(logits, tokens[begin + 1 : begin + 1 + len(chunk)])


@torch.inference_mode()
def recomputed(
    model: PreTrainedModel, ids: Sequence[int], *, recent: int, rows: int = 16
) -> Iterator[Tensor]:
    """Yield negative log-likelihoods as `stream` does, by sliding-window re-computation: each token is
    predicted by a new pass over the `recent` + 1 tokens before it, in O(len(ids) * recent^2) time.

    Args:
        rows: how many passes run as one batch.
    """
    device = input_device(model)
    tokens = torch.tensor(list(ids), dtype=torch.int64, device=device)
    exact = CaptureState({}, 0)
    # The first tokens, which all have fewer than `recent` before them, in one pass.
    beginning = tokens[: recent + 1][None]
    positions = torch.arange(beginning.shape[1], device=device)
    logits = forward_rows(model, beginning, positions, exact)[0]
    yield nll_of(logits, tokens[1 : recent + 2])
    last_tokens = list(range(recent + 1, len(tokens) - 1))  # the last token of each later pass
    positions = torch.arange(recent + 1, device=device)
    for begin in range(0, len(last_tokens), rows):
        last = torch.tensor(last_tokens[begin : begin + rows], device=device)
        windows = tokens[last[:, None] - recent + positions]
        logits = forward_rows(model, windows, positions, exact, keep=1)[:, -1]
        yield nll_of(logits, tokens[last + 1])


def nll_of(logits: Tensor, target: Tensor) -> Tensor:
    """The negative log-likelihoods of the tokens `target` [t] by logits [at least t, vocab], whose i-th
    row predicts the i-th token: [t] float32 on the CPU."""
    logprobs = logits[: len(target)].float().log_softmax(-1)
    return -logprobs.gather(-1, target[:, None])[:, 0].cpu()


def rotary(frequencies: Tensor) -> Rotary:
    """Make a rotary table of fixed frequencies [pairs]. Angles are float64, so that they are exact at
    large positions."""

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = frequencies.to(positions.device, torch.float64)
        angles = (positions[:, None].double() * turns).repeat(1, 2)
        return angles.cos().float(), angles.sin().float()

    return table


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `width` channels of x [..., tokens, dim] by cosines and sines [..., tokens,
    width], the first half of these channels against the second: [..., tokens, dim] float32."""
    part, rest = x.float().split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first_half, second_half = part.chunk(2, dim=-1)
    turned = part * cos + torch.cat([-second_half, first_half], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


@torch.inference_mode()
def rotation_of(model: PreTrainedModel) -> Rotary | None:
    """The model's rotary table; None for a model that adds positions to the embedding (OPT).

    The table is verified at the first layer. The model's keys at position 0 are not rotated; rotated by
    the table to other positions, they must equal the model's own keys at these positions.

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
    """An attention state that reads a stream and holds its first `start` and its last `recent` tokens.
    Each token attends to those that are held when it is read, and to itself.

    Attributes:
        most: the largest number of entries of a layer and head after a token.
        seen: the number of tokens read so far.
        rotation: the rotary table by which keys, which are held without positions, are rotated to their
            places in the cache; None where keys are held with the model's positions.
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
        """Attention of a chunk; afterwards the tokens that later chunks do not see are dropped."""
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
        sinks = None if call.sinks is None else call.sinks.view(kv_heads, -1, 1)
        weights = softmax(capped(logits, call.softcap).masked_fill(~seen, -torch.inf), sinks)
        out = weights.to(value.dtype) @ value[:, None]
        kept = (times < self.start) | (times > now[-1] - self.recent)
        self._layers[call.layer] = key[:, kept], value[:, kept], times[kept]
        return out.reshape(1, heads, len(now), -1)

    def _logits(self, query: Tensor, key: Tensor, now: Tensor, times: Tensor) -> Tensor:
        """The products of queries [kv_heads, group, t, d] with keys [kv_heads, 1, c, d], rotated to
        their places in the cache: [kv_heads, group, t, c].

        Places are counted from the oldest entry, so in a full cache the query has the place start +
        recent. Its distance to a recent entry is then the difference of their token numbers, and its
        distance to one of the first entries the difference of their places.

        Args:
            now: [t], the token number of each query.
            times: [c], the token number of each entry.
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
        """The bytes of the keys and values that are held."""
        return sum(key.nbytes + value.nbytes for key, value, _ in self._layers.values())


class _PlacedEntries(Entries):
    """Entries whose keys are stored without positions. When they are read, each key is rotated to its
    place among the entries, counted from the oldest.

    Args:
        table: the cosines and the sines of the places, each [places, width].
    """

    def __init__(self, compressed: CompressedKV, room: int, table: tuple[Tensor, Tensor]) -> None:
        super().__init__(compressed, room, keeps_scores=True)
        self.table = table

    def dot_keys(self, query: Tensor) -> Tensor:
        """See `Entries.dot_keys`. The queries are those of the newest token, whose place is the last."""
        n = self.length
        # The second argsort gives the rank of each position: the entry's place.
        places = self.positions[:, :n].argsort(-1).argsort(-1)
        cos, sin = (part[places] for part in self.table)
        last = (part[n - 1] for part in self.table)
        return rotated(query, *last) @ rotated(self.keys[:, :n], cos, sin).mT


class EvictingState(AttentionState):
    """An attention state that reads a stream with the cache of a method that evicts.

    From the first token on, every token is added and attends, and once the cache is full an entry is
    evicted for it. Accumulated scores (H2O's) are therefore of what the cache held, as in its
    Algorithm 1.

    Args:
        tokens: the length of the whole text.
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
        """Attention of a chunk, whose tokens are added one by one."""
        if call.layer not in self._layers:
            self._layers[call.layer] = self._begin(call)
        query = call.query
        positions = torch.arange(self.seen, self.seen + query.shape[2], device=query.device)
        return self._layers[call.layer].step(call, positions)[None].to(query.dtype)

    def _begin(self, call: LayerCall) -> EvictingCache:
        """Make the empty cache of a layer."""
        no_scores = call.key.new_zeros(1, call.key.shape[1], 0, dtype=torch.float32)
        rule = rule_of(self.method, self.most, self.sink)
        needs_scores = rule is None or rule.leaves != "oldest"
        no_entries = CompressedKV(
            call.key[:, :, :0],
            call.value[:, :, :0],
            None,
            positions=no_scores.long(),
            scores=no_scores if needs_scores else None,
        )
        room = self.most + 1  # the new token is added before one leaves
        if self.rotation is None:
            store = store_of(no_entries, room, self.method.quantization(), keeps_scores=True)
        else:
            places = torch.arange(room, device=call.key.device)
            store = _PlacedEntries(no_entries, room, self.rotation(places))
        return EvictingCache(
            store, capacity=self.most, method=self.method, granted=self.most, sink=self.sink
        )

    @property
    def held_bytes(self) -> int:
        """The bytes that the caches of all layers hold, scores included."""
        return sum(cache.entry_bytes() for cache in self._layers.values())
