"""The reference queries that `attention_matching` and `solved` fit entries for."""

from __future__ import annotations

import torch
from torch import Tensor

from kvbench.kernels.rotation import rotate, unrotate
from kvbench.kv import Budget, LayerKV, rows_at
from kvbench.methods.base import Replay

FUTURE = 256
"""How many positions after the prompt count as those of queries to come."""


def evenly_spread(queries: Tensor, kv_heads: int, most: int) -> Tensor:
    """Choose at most `most` of the queries [batch, heads, m, dim] for each KV head: [batch, heads, at
    most m, dim].

    The chosen queries of a head are evenly spread along m. The heads of a group take different places,
    each head's between those of the others, so that together they cover m more densely.
    """
    batch, heads, m, _ = queries.shape
    group = heads // kv_heads
    count = max(1, most // group)
    if m <= count:
        return queries
    device = queries.device
    head_in_group = torch.arange(heads, device=device)[:, None] % group
    places = (torch.arange(count, device=device) * group + head_in_group) * m // (count * group)
    return rows_at(queries, places.expand(batch, -1, -1))


def for_kv_heads(queries: Tensor, kv_heads: int) -> Tensor:
    """The queries of a group's heads as those of their KV head: [batch, kv_heads, group * m, dim]."""
    return queries.unflatten(1, (kv_heads, -1)).flatten(2, 3)


def carry_queries(owner: str, layer: LayerKV, replay: Replay, budget: Budget, most: int) -> None:
    """Append the queries of a chunk of the repeated prompt to those of earlier chunks in
    `LayerKV.carried`, at most `most` for each KV head."""
    name = f"{owner}: queries {layer.layer_index}"
    queries = evenly_spread(replay.queries, layer.keys.shape[1], most)
    if replay.start > budget.sink:
        queries = torch.cat([layer.carried[name], queries], dim=2)
    layer.carried[name] = queries


def carried_queries(owner: str, layer: LayerKV) -> Tensor | None:
    return layer.carried.get(f"{owner}: queries {layer.layer_index}")


def as_after_prompt(layer: LayerKV, kv_heads: int, most: int) -> Tensor | None:
    """Choose queries of the prompt by `evenly_spread`, and encode them as though they stood at the
    `FUTURE` positions after it, evenly spread in their order: [batch, heads, at most m, dim].

    They stay as they are where no rotary table describes the layer. None where it holds no queries.
    """
    if layer.queries is None:
        return None
    queries, rotary = evenly_spread(layer.queries, kv_heads, most), layer.rotary
    if rotary is None:
        return queries
    heads, count = layer.queries.shape[1:3]
    place = torch.arange(count, device=queries.device).view(1, 1, -1, 1).expand(1, heads, -1, 1)
    place = evenly_spread(place, kv_heads, most)[0, :, :, 0]

    def table(positions: Tensor) -> list[Tensor]:
        tables = rotary(positions.flatten())
        return [part.float().unflatten(0, positions.shape) for part in tables]

    first = layer.n - layer.withheld - count
    plain = unrotate(queries.float(), *table(place + first))
    return rotate(plain, *table(layer.n + place * FUTURE // count))
