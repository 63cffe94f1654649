"""Perplexity of texts longer than the cache, by the tokens read: a window, the first tokens beside it
(StreamingLLM), a window computed anew for every token, H2O, and the exact cache.

Every token but the first is predicted from the entries that are held before it. With positions=cache an
entry's position is its place in the cache (arXiv 2309.17453, section 3.2), so that a text may be longer
than the model's positions; with positions=absolute it is its place in the text.

    kvbench reproduce streaming_llm_figure3     Llama-2-7B, PG-19, a GPU of 24 GB
    kvbench reproduce h2o_figure5               LLaMA, PG-19, a GPU of 40 GB
    kvbench reproduce streams                   the shipped model, generated sentences
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from _common import Run, started
from torch import Tensor

from kvbench.engine.architecture import compressible_layers
from kvbench.engine.ask import vocabulary
from kvbench.engine.attention import Capture, LayerCall, Pass, UnsupportedModel
from kvbench.engine.device import input_device
from kvbench.engine.prefill import forward
from kvbench.engine.rotary import table_change
from kvbench.errors import UserError
from kvbench.kernels.logits import softcapped, softmax
from kvbench.methods.h2o import H2O
from kvbench.probes.base import places
from kvbench.tasks.encoding import encode_start

CHUNK = 256
"""Tokens of a pass. Results do not depend on it."""
CACHED = ("exact", "local", "streaming_llm", "h2o")

Rotary = Callable[[Tensor], tuple[Tensor, Tensor]]
"""A function from positions [p] to their cosines and sines, each [p, width]."""


def rotary(frequencies: Tensor) -> Rotary:
    """A rotary table of fixed frequencies [pairs], its angles float64 (exact at large positions)."""

    def table(positions: Tensor) -> tuple[Tensor, Tensor]:
        turns = frequencies.to(positions.device, torch.float64)
        angles = (positions[:, None].double() * turns).repeat(1, 2)
        return angles.cos().float(), angles.sin().float()

    return table


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., tokens, dim] with its first `width` channels rotated, the first half of these against the
    second, by cosines and sines [..., tokens, width]; float32."""
    part, rest = x.float().split([cos.shape[-1], x.shape[-1] - cos.shape[-1]], dim=-1)
    first_half, second_half = part.chunk(2, dim=-1)
    turned = part * cos + torch.cat([-second_half, first_half], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1)


def rotation_of(model: Any) -> Rotary | None:
    """The model's rotary table; None for a model that adds positions to the embedding (OPT). The table
    is compared with the model's own keys of the first layer, so that another encoding, such as
    frequencies that depend on the length, is refused."""
    frequencies = [x for name, x in model.named_buffers() if name.endswith("inv_freq")]
    if not frequencies:
        return None
    rotation = rotary(frequencies[0].float())
    ids = torch.tensor([[5, 3, 4]], device=input_device(model)) % vocabulary(model)
    later = torch.tensor([3, 17, 40], device=ids.device)
    keys = []
    for positions in (torch.zeros_like(later), later):
        state = Capture([0])
        forward(model, ids, positions, state, keep=1)
        keys.append(state.calls[0][0].key)
    tolerance = 1e-3 if model.dtype == torch.float32 else 3e-2
    difference = (rotated(keys[0], *rotation(later)) - keys[1].float()).abs().max()
    if float(difference) > tolerance * float(keys[1].abs().max()):
        raise UnsupportedModel(
            f"{type(model).__name__} encodes positions otherwise than by fixed rotary frequencies; "
            "allowed with positions=cache: models that do, or that learn their positions"
        )
    return rotation


class Reading(Pass):
    """Holds the entries of a text that is read in chunks, keys without positions where there is a
    `rotation`. `seen` tokens have been read; after a token at most `most` entries are held."""

    def __init__(self, most: int, rotation: Rotary | None) -> None:
        self.most = most
        self.rotation = rotation
        self.seen = 0
        self.layers: dict[int, tuple[Tensor, ...]] = {}

    def with_new(self, layer: int, *new: Tensor) -> list[Tensor]:
        """The layer's entries, each part with its new rows (along dimension -2) behind it."""
        held = self.layers.get(layer, tuple(x[..., :0, :] for x in new))
        return [torch.cat(pair, dim=-2) for pair in zip(held, new, strict=True)]


class Band(Reading):
    """The first `start` and the last `recent` tokens. A token attends to those that are held when it is
    read, and to itself."""

    def __init__(self, start: int, recent: int, rotation: Rotary | None = None) -> None:
        super().__init__(start + recent, rotation)
        self.start, self.recent = start, recent

    def attend(self, call: LayerCall) -> Tensor:
        now = torch.arange(self.seen, self.seen + call.query.shape[2], device=call.key.device)
        key, value, times = self.with_new(call.layer, call.key[0], call.value[0], now[:, None])
        times = times[:, 0]
        query = call.query[0].unflatten(0, (len(key), -1))  # [kv_heads, group, t, d]
        logits = self.products(query, key[:, None], now, times) * call.scaling
        distance = now[:, None] - times
        seen = (distance >= 0) & ((times < self.start) | (distance <= self.recent))
        sinks = None if call.sinks is None else call.sinks.view(len(key), -1, 1)
        weights = softmax(softcapped(logits, call.softcap).masked_fill(~seen, -torch.inf), sinks)
        out = weights.to(value.dtype) @ value[:, None]
        kept = (times < self.start) | (times > now[-1] - self.recent)
        self.layers[call.layer] = key[:, kept], value[:, kept], times[kept, None]
        return out.flatten(0, 1)[None]

    def products(self, query: Tensor, key: Tensor, now: Tensor, times: Tensor) -> Tensor:
        """Products of queries, read at `now` [t], with keys, read at `times` [c]: rotated to their
        places in the cache. In a full cache the query has the place start + recent: its distance to a
        recent entry is that of their times, its distance to one of the first that of their places."""
        if self.rotation is None:
            return query.float() @ key.float().mT
        first = int((times < self.start).sum())
        base = times[first] if first < len(times) else now[0]
        recent = rotated(key, *self.rotation(times - base))
        to_recent = rotated(query, *self.rotation(now - base)) @ recent.mT
        begin = rotated(key[:, :, :first], *self.rotation(times[:first]))
        to_first = rotated(query, *self.rotation(now.clamp(max=self.most))) @ begin.mT
        return torch.cat([to_first, to_recent[..., first:]], dim=-1)


class HeavyHitters(Reading):
    """H2O (arXiv 2306.14048, appendix A): once `most` entries are held, the one with the least
    accumulated attention leaves for each token, the `recent` newest apart."""

    def __init__(self, most: int, rotation: Rotary | None = None) -> None:
        super().__init__(most, rotation)
        self.recent = H2O().recent(most)

    def attend(self, call: LayerCall) -> Tensor:
        parts = (call.query[0].split(1, 1), call.key[0].split(1, 1), call.value[0].split(1, 1))
        outputs = [self.step(call, *token) for token in zip(*parts, strict=True)]
        return torch.cat(outputs, dim=1)[None].to(call.query.dtype)

    def step(self, call: LayerCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of one token: [heads, 1, d]. Entries are held in the order of their age."""
        unseen = key.new_zeros(len(key), 1, 1, dtype=torch.float32)
        keys, values, scores = self.with_new(call.layer, key, value, unseen)
        query, count = query.unflatten(0, (len(key), -1)), keys.shape[1]
        placed = keys
        if self.rotation is not None:
            turns = self.rotation(torch.arange(count, device=keys.device))
            placed = rotated(keys, *turns)
            query = rotated(query, *(turn[-1:] for turn in turns))
        logits = query.float() @ placed.float()[:, None].mT * call.scaling
        sinks = None if call.sinks is None else call.sinks.view(len(key), -1, 1)
        weights = softmax(softcapped(logits, call.softcap), sinks)  # [kv_heads, group, 1, count]
        scores = scores + weights.mean(1).mT
        out = weights.to(values.dtype) @ values[:, None]
        if count > self.most:
            leaves = scores[:, : count - self.recent, 0].argmin(-1)
            stay = torch.arange(count, device=keys.device) != leaves[:, None]
            keys, values, scores = (
                x[stay].view(len(key), count - 1, -1) for x in (keys, values, scores)
            )
        self.layers[call.layer] = keys, values, scores
        return out.flatten(0, 1)


def nll_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihoods of the tokens `targets` [t] by logits [at least t, vocab]."""
    logprobs = logits[: len(targets)].float().log_softmax(-1)
    return -logprobs.gather(-1, targets[:, None])[:, 0].cpu()


def stream(
    model: Any, ids: Sequence[int], state: Reading, positions: str = "cache"
) -> Iterator[Tensor]:
    """Negative log-likelihoods of every token but the first, chunk by chunk."""
    longest = state.most if positions == "cache" else state.seen + len(ids)
    change = table_change(model.config)
    if change is not None and longest > change.tokens:
        raise UnsupportedModel(
            f"{type(model).__name__} has other rotary factors beyond {change.tokens} tokens and the "
            f"stream has {longest} positions; allowed: at most {change.tokens}"
        )
    tokens = torch.tensor(list(ids), device=input_device(model))
    for begin in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[begin : begin + CHUNK]
        position_ids = torch.arange(state.seen, state.seen + len(chunk), device=tokens.device)
        if (
            positions == "cache" and state.rotation is None
        ):  # learned: a token has that of its place
            position_ids = position_ids.clamp(max=state.most)
        elif positions == "cache":  # the state rotates; the model rotates nothing at position 0
            position_ids = torch.zeros_like(position_ids)
        logits = forward(model, chunk[None], position_ids, state)[0]
        state.seen += len(chunk)
        yield nll_of(logits, tokens[begin + 1 : begin + 1 + len(chunk)])


def recomputed(model: Any, ids: Sequence[int], recent: int, rows: int = 16) -> Iterator[Tensor]:
    """The same without a cache: each token by a fresh pass over the `recent` + 1 tokens before it,
    `rows` passes at a time."""
    tokens = torch.tensor(list(ids), device=input_device(model))
    exact = Capture(())
    positions = torch.arange(min(recent + 1, len(tokens)), device=tokens.device)
    logits = forward(model, tokens[None, : recent + 1], positions, exact)[0]
    yield nll_of(logits, tokens[1 : recent + 2])
    for last in torch.arange(recent + 1, len(tokens) - 1, device=tokens.device).split(rows):
        windows = tokens[last[:, None] - recent + positions]
        yield nll_of(forward(model, windows, positions, exact, keep=1)[:, -1], tokens[last + 1])


def read_text(
    model: Any, ids: Sequence[int], method: str, size: int, sink: int, positions: str
) -> Tensor:
    """Negative log-likelihoods [tokens - 1] of a text under one method's cache of `size` entries."""
    if method == "recomputed":
        return torch.cat(list(recomputed(model, ids, size)))
    rotation = rotation_of(model) if positions == "cache" else None
    state: Reading
    if method == "h2o":
        state = HeavyHitters(size, rotation)
    elif method == "exact":
        state = Band(0, len(ids), rotation)
    else:
        start = sink if method == "streaming_llm" else 0
        state = Band(start, size - start, rotation)
    return torch.cat(list(stream(model, ids, state, positions)))


@torch.inference_mode()
def main(arguments: Sequence[str]) -> None:
    """Write a row for each text, method, size and group of tokens, with their mean and perplexity.

    Keys of its own: methods (exact, local, streaming_llm, h2o, recomputed), sizes (entries held), sink,
    positions (cache or absolute). task.tokens: of each text, at most.
    """
    methods = ["exact", "local", "streaming_llm"]
    run = Run(
        __file__, arguments, "model=recall_mini", "task=text task.tokens=8192", limit=4,
        methods=methods, sizes=[512], sink=4, positions="cache",
    )  # fmt: skip
    if unknown := set(run.methods) - {*CACHED, "recomputed"}:
        raise UserError(f"methods has {sorted(unknown)}; allowed: {', '.join(CACHED)}, recomputed")
    task = run.task()
    session, encoder = run.session, run.session.encoder
    layers = session.model.config.get_text_config().num_hidden_layers
    if len(compressible_layers(session.model)) < layers:
        raise UnsupportedModel("the model has sliding-window layers; allowed: full attention")
    rows = []
    for name, text in task.texts("stream", run.limit, run.limit)[: run.limit]:
        ids = encode_start(encoder, text)[: task.tokens]
        limit = encoder.max_positions
        if run.positions == "absolute" and limit is not None and len(ids) > limit:
            raise UserError(f"text {name!r} has {len(ids)} tokens; allowed: {limit} (task.tokens)")
        for size in run.sizes:
            for method in run.methods:
                nll = read_text(session.model, ids, method, size, run.sink, run.positions).double()
                for group, place in places(len(nll), task.tokens).items():
                    mean = float(nll[place].mean())
                    last = int(re.findall(r"\d+", group)[-1])  # also of a text that ends before it
                    where = {"text": name, "method": method, "size": size, "tokens": last}
                    rows.append(where | {"nll": mean, "perplexity": math.exp(min(mean, 700.0))})
    run.save(rows, y="perplexity", x="tokens", by="method", panel="size")


if __name__ == "__main__":
    started(main)
