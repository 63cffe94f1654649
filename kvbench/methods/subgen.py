"""SubGen (ClusterGen) as in its paper's experiments: recent tokens and the centres of clusters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from kvbench.errors.options import Whole
from kvbench.kernels.kcentre import greedy_k_centre, nearest_centre
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._draws import place
from kvbench.methods._select import positions_between
from kvbench.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class SubGen(Method):
    """Keeps the last `recent` tokens, and capacity - recent of the older ones as centres of clusters.

    Each KV head chooses its centres by the greedy k-centre algorithm in squared Euclidean distance of
    keys, starting from a random key. There is no separate sink.

    Args:
        recent: how many of the most recent tokens are kept; None for budget.window.
        weights: ``none``, as in the paper's experiments; or ``cluster``, with which a centre's
            log-weight is the logarithm of the size of its cluster.
    """

    paper: ClassVar[str] = "arXiv 2402.06082, section 3.2 (the form of its experiments)"
    version: ClassVar[int] = 2

    recent: Whole | None = None
    weights: Literal["none", "cluster"] = "none"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        batch, heads, n, dim = layer.keys.shape
        capacity = budget.capacity(n)
        recent = budget.window if self.recent is None else self.recent
        if recent > capacity:
            raise KVError(f"subgen.recent is {recent}; allowed: at most the capacity, {capacity}")
        older, count = n - recent, capacity - recent
        first = place(generator, heads, older, layer.keys.device)
        first = first.expand(batch, heads).flatten()
        points = layer.keys[:, :, :older].reshape(batch * heads, older, dim)
        centres = greedy_k_centre(points, count, first).sort(-1).values
        window = positions_between(layer, older, n)
        positions = torch.cat([centres.view(batch, heads, count), window], dim=-1)
        log_weights = None
        if self.weights == "cluster":
            nearest = nearest_centre(points, centres)
            sizes = torch.zeros(batch * heads, count, device=points.device)
            sizes.scatter_add_(1, nearest, torch.ones_like(nearest, dtype=torch.float32))
            log_weights = torch.zeros(positions.shape, device=points.device)
            log_weights[:, :, :count] = sizes.log().view(batch, heads, count)
        return gather_entries(layer, positions, log_weights)
