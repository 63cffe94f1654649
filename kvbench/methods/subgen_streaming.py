"""SubGen (ClusterGen) as its Algorithm 1: one token at a time, in memory that does not grow with n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, NonNegative, Whole
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kernels.online_clusters import BLOCK, OnlineClusters, count_clusters
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, rows_at
from kvbench.methods._draws import uniforms
from kvbench.methods._estimator import Sample, combine
from kvbench.methods.base import Method

BISECTIONS = 6
"""Halvings of the interval in which `delta: null` looks for a radius."""


class SubGenStream:
    """The state of Algorithm 1 for many heads that read their streams in step.

    Attributes (h heads, m clusters that there is room for):
        found: the clusters and their representatives, each the first key of its cluster.
        counts: [h, m] keys that joined, the first included.
        slots: [h, m, t] int64, for each cluster t uniform samples of its keys, as stream positions.
        mu: [h] float64, sum of ||v||^2 so far.
        sampled: [h, s] int64, positions of s samples in proportion to ||v||^2 (-1: none yet).
        sampled_weights: [h, s] float64, their ||v||^2.
        seen: tokens so far.
    """

    def __init__(
        self, heads: int, dim: int, delta: Tensor, t: int, s: int, most: int | None = None
    ) -> None:
        """`delta` and `most`: see `OnlineClusters`. Everything is on the device of `delta`."""
        device = delta.device
        self.t, self.s, self.seen = t, s, 0
        self.found = OnlineClusters(heads, dim, delta, most)
        self.counts = torch.zeros(heads, 0, device=device)
        self.slots = torch.zeros(heads, 0, t, dtype=torch.int64, device=device)
        self.mu = torch.zeros(heads, dtype=torch.float64, device=device)
        self.sampled = torch.full((heads, s), -1, device=device)
        self.sampled_weights = torch.zeros(heads, s, dtype=torch.float64, device=device)

    def read(self, keys: Tensor, values: Tensor, draws: Tensor) -> None:
        """Read at most `BLOCK` tokens, with the result of one after the other: keys [h, b, dim], values
        [h, b, value_dim], draws [b, h, t + s] uniform in [0, 1)."""
        keys, values = keys.float(), values.float()
        order = torch.arange(1, keys.shape[1] + 1, dtype=torch.int16, device=keys.device)
        slot_draws, value_draws = draws.split([self.t, self.s], dim=-1)
        self._sample_clusters(keys, slot_draws.transpose(0, 1), order)
        self._sample_values(values, value_draws, order)
        self.seen += keys.shape[1]

    def _sample_clusters(self, keys: Tensor, draws: Tensor, order: Tensor) -> None:
        where = self.found.read(keys)
        more = self.found.room - self.counts.shape[1]
        if more > 0:
            self.counts = F.pad(self.counts, (0, more))
            self.slots = F.pad(self.slots, (0, 0, 0, more), value=-1)
        # The size of its cluster when a key has joined: keys of earlier blocks and of this one.
        same = where.unsqueeze(1) == where.unsqueeze(2)
        size = self.counts.gather(1, where) + same.tril_().sum(-1)
        self.counts.scatter_add_(1, where, torch.ones_like(size))
        # The first key of a cluster has chance 1: it goes into every slot.
        replaced = draws < (1.0 / size).unsqueeze(-1)
        position = torch.where(replaced, (self.seen - 1 + order.long()).view(1, -1, 1), -1)
        index = where.unsqueeze(-1).expand_as(position)
        self.slots.scatter_reduce_(1, index, position, "amax")

    def _sample_values(self, values: Tensor, draws: Tensor, order: Tensor) -> None:
        weight = values.double().square().sum(-1)
        mu = torch.cat([self.mu.unsqueeze(1), weight], 1).cumsum(1)[:, 1:]
        self.mu, chance = mu[:, -1].clone(), torch.where(mu > 0, weight / mu, 0.0)
        # Rounded up to float32, which no comparison with a float32 draw can tell from the float64.
        above = chance.float()
        above = torch.where(above < chance, above.nextafter(torch.ones_like(above)), above)
        replaced = draws < above.T.unsqueeze(-1)
        last = (replaced * order.view(-1, 1, 1)).amax(0).long() - 1
        taken = weight.gather(1, last.clamp(min=0))
        self.sampled_weights = torch.where(last >= 0, taken, self.sampled_weights)
        self.sampled = torch.where(last >= 0, self.seen + last, self.sampled)

    def numerator(self) -> Sample:
        """The sample that estimates the sum of exp(q.k) v: entries with weights mu / (s ||v||^2)."""
        weights = torch.log(self.mu.unsqueeze(-1) / (self.s * self.sampled_weights))
        return self.sampled, weights.masked_fill(self.sampled < 0, -math.inf).float()

    def denominator(self) -> Sample:
        """The sample that estimates the sum of exp(q.k): entries with weights count / t."""
        weights = torch.log(self.counts / self.t).unsqueeze(-1).expand_as(self.slots)
        empty = (self.counts == 0).unsqueeze(-1)
        return self.slots.masked_fill(empty, -1).flatten(1), weights.flatten(1)


@dataclass(frozen=True, kw_only=True)
class SubGenStreaming(Method):
    """Runs Algorithm 1 over the prompt's older tokens; keeps the last `recent` ones exactly.

    The online clustering of keys stands for the denominator (softmax's normaliser), the samples in
    proportion to ||v||^2 for the numerator; recent tokens join both with weight 1. Entries:
    m t + s + recent for m clusters.

    Departures: the denominator mixes in 2^-10 of the numerator's own estimate (see
    `_estimator.combine`), which lets one attention call evaluate both; with `delta` null the radius
    is chosen per head from the whole prompt, so that a streaming run would have to be told it.

    Args:
        delta: radius (l2) of a cluster; null: about the smallest at which the older keys form no
            more clusters than the capacity has room for. A given `delta` may lead to more, which
            fails the audit.
        t: uniform samples kept of each cluster.
        s: samples for the numerator; null: half of what the capacity leaves beside `recent`.
        recent: most recent tokens kept exactly; null: budget.window.
    """

    paper: ClassVar[str] = "arXiv 2402.06082, Algorithm 1"
    version: ClassVar[int] = 3

    delta: NonNegative | None = None
    t: Count = 4
    s: Count | None = None
    recent: Whole | None = None

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Samples of the clusters (keys only), then of the numerator, then the recent tokens.

        Positions may repeat: the samples are drawn with replacement.

        Raises:
            KVError: the capacity leaves no room for one cluster and one sample.
        """
        stream = self.stream(layer, budget, generator)
        recent = torch.arange(stream.seen, layer.n, device=layer.keys.device)
        return combine(layer, stream.numerator(), stream.denominator(), 0, recent)

    def stream(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> SubGenStream:
        """Algorithm 1 after the older tokens of `layer`, its batch and KV heads flattened."""
        batch, heads, n, dim = layer.keys.shape
        recent = budget.window if self.recent is None else self.recent
        room = budget.capacity(n) - recent
        s = max(1, room // 2) if self.s is None else self.s
        clusters = (room - s) // self.t
        if clusters < 1:
            raise KVError(
                f"subgen_streaming.s is {s}; allowed: an s that leaves t = {self.t} of a cluster "
                f"in the {max(room, 0)} entries beside the recent ones"
            )
        older = n - recent
        keys = layer.keys[:, :, :older].reshape(batch * heads, older, dim).float()
        values = layer.values[:, :, :older].reshape(batch * heads, older, -1)
        most = min(clusters, older) if self.delta is None else None
        fixed = keys.new_full((batch * heads,), self.delta or 0.0)
        delta = fixed if most is None else _radius(keys, most)
        stream = SubGenStream(batch * heads, dim, delta, self.t, s, most)
        for key, value in zip(keys.split(BLOCK, 1), values.split(BLOCK, 1), strict=True):
            draws = uniforms(generator, keys.device, key.shape[1], heads, self.t + s)[0]
            stream.read(key, value, draws.repeat(1, batch, 1))
        return stream


def _radius(keys: Tensor, clusters: int) -> Tensor:
    """A radius per head at which at most `clusters` clusters arise: [h].

    Bisection for a small one, with a few clusters to spare for rounding, below the radius that
    guarantees it: twice that which `clusters` greedy centres cover the keys with, the distance of the
    centre that would be next (more keys cannot be farther apart, since two would share a centre).
    """
    first = torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device)
    chosen = greedy_k_centre(keys, min(clusters + 1, keys.shape[1]), first)
    centres = rows_at(keys[None], chosen[None])[0]
    enough = 2.001 * (centres[:, -1:] - centres[:, :clusters]).square().sum(-1).sqrt().amin(-1)
    too_small = torch.zeros_like(enough)
    target = clusters - 1 - clusters // 32
    for _ in range(BISECTIONS):
        middle = (enough + too_small) / 2
        fits = count_clusters(keys, middle, target + 1) <= target
        enough = torch.where(fits, middle, enough)
        too_small = torch.where(fits, too_small, middle)
    return enough
