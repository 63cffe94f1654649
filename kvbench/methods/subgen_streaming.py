"""SubGen (ClusterGen) as its Algorithm 1: one token at a time, in memory that does not grow with n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvbench.errors.options import Count, NonNegative, Whole
from kvbench.kernels.kcentre import greedy_k_centre, nearest_centre
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods._estimator import combine
from kvbench.methods._layer_streams import SubGenLayer
from kvbench.methods.base import Method

BISECTIONS = 6
"""Halvings of the interval in which `delta: null` looks for a radius."""


class SubGenStream:
    """The state of Algorithm 1 for many heads that read their streams in step.

    Attributes (h heads, m clusters so far in the head that has most):
        clusters: [h] int64, clusters of each head.
        representatives: [h, m, dim], the first key of each cluster.
        counts: [h, m] keys that joined, the first included.
        slots: [h, m, t] int64, for each cluster t uniform samples of its keys, as stream positions.
        slot_keys: [h, m, t, dim], their keys.
        mu: [h] float64, sum of ||v||^2 so far.
        sampled: [h, s] int64, positions of s samples in proportion to ||v||^2 (-1: none yet).
        sampled_keys, sampled_values: [h, s, dim], theirs.
        seen: tokens so far.
    """

    def __init__(
        self,
        heads: int,
        dim: int,
        value_dim: int,
        delta: Tensor,
        t: int,
        s: int,
        most: int | None = None,
    ) -> None:
        """`delta`: [heads], how far (l2) a key may be from the representative it joins. `most`: a head
        with so many clusters starts no other, and a key joins the nearest."""
        self.delta, self.t, self.s, self.seen = delta, t, s, 0
        self.most = most
        self.clusters = torch.zeros(heads, dtype=torch.int64)
        self.representatives = torch.zeros(heads, 0, dim)
        self.counts = torch.zeros(heads, 0)
        self.slots = torch.zeros(heads, 0, t, dtype=torch.int64)
        self.slot_keys = torch.zeros(heads, 0, t, dim)
        self.mu = torch.zeros(heads, dtype=torch.float64)
        self.sampled = torch.full((heads, s), -1)
        self.sampled_keys = torch.zeros(heads, s, dim)
        self.sampled_values = torch.zeros(heads, s, value_dim)
        self._heads = torch.arange(heads)

    def update(self, key: Tensor, value: Tensor, slot_draws: Tensor, value_draws: Tensor) -> None:
        """Read one token: key, value [h, dim], uniforms [h, t] and [h, s] in [0, 1)."""
        self._cluster(key.float(), slot_draws)
        weight = value.double().square().sum(-1)
        self.mu += weight
        chance = torch.where(self.mu > 0, weight / self.mu, 0.0)
        replaced = value_draws < chance.unsqueeze(-1)
        self.sampled[replaced] = self.seen
        wide = replaced.unsqueeze(-1)
        torch.where(wide, key.float().unsqueeze(1), self.sampled_keys, out=self.sampled_keys)
        torch.where(wide, value.float().unsqueeze(1), self.sampled_values, out=self.sampled_values)
        self.seen += 1

    def _cluster(self, key: Tensor, draws: Tensor) -> None:
        width = self.counts.shape[1]
        distance = (self.representatives - key.unsqueeze(1)).square().sum(-1).sqrt_()
        distance.masked_fill_(self.counts == 0, math.inf)
        joined = torch.zeros_like(self.clusters, dtype=torch.bool)
        nearest = torch.zeros_like(self.clusters)
        if width:
            best, nearest = distance.min(-1)
            joined = best <= self.delta
            if self.most is not None:
                joined |= self.clusters >= self.most
        where = torch.where(joined, nearest, self.clusters)
        if not bool(joined.all()) and int(self.clusters[~joined].max()) == width:
            self._widen(max(8, width))
        fresh = ~joined
        self.representatives[self._heads[fresh], where[fresh]] = key[fresh]
        self.clusters += fresh
        self.counts[self._heads, where] += 1
        # A new cluster has count 1: every slot takes its key.
        replaced = draws < (1.0 / self.counts[self._heads, where]).unsqueeze(-1)
        mine = self.slots[self._heads, where]
        self.slots[self._heads, where] = torch.where(replaced, self.seen, mine)
        mine_keys = self.slot_keys[self._heads, where]
        self.slot_keys[self._heads, where] = torch.where(
            replaced.unsqueeze(-1), key.unsqueeze(1), mine_keys
        )

    def _widen(self, more: int) -> None:
        for name in ("representatives", "counts", "slots", "slot_keys"):
            old = getattr(self, name)
            room = old.new_zeros(old.shape[0], more, *old.shape[2:])
            setattr(self, name, torch.cat([old, room], dim=1))

    def numerator(self) -> tuple[Tensor, Tensor]:
        """Positions [h, s] and log-weights log(mu / (s ||v||^2)); -1 and -inf where none."""
        norms = self.sampled_values.double().square().sum(-1)
        weights = torch.log(self.mu.unsqueeze(-1) / (self.s * norms))
        return self.sampled, weights.masked_fill(self.sampled < 0, -math.inf).float()

    def denominator(self) -> tuple[Tensor, Tensor]:
        """Positions [h, m * t] and log-weights log(count / t); -1 and -inf where none."""
        weights = torch.log(self.counts / self.t).unsqueeze(-1).expand_as(self.slots)
        empty = (self.counts == 0).unsqueeze(-1)
        return self.slots.masked_fill(empty, -1).flatten(1), weights.flatten(1)

    def query(self, query: Tensor, scaling: float) -> Tensor:
        """The estimate z / tau of attention over the stream so far, in log space: [h, value_dim].

        Args:
            query: [h, dim]; logits are scaling * q.k.
        """
        logits = (self.sampled_keys @ query.unsqueeze(-1)).squeeze(-1) * scaling
        above = logits + self.numerator()[1]
        logits = (self.slot_keys.flatten(1, 2) @ query.unsqueeze(-1)).squeeze(-1) * scaling
        below = logits + self.denominator()[1]
        top = torch.cat([above, below], dim=-1).amax(-1, keepdim=True)
        z = (torch.exp(above - top).unsqueeze(-1) * self.sampled_values).sum(1)
        return z / torch.exp(below - top).sum(-1, keepdim=True)


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
    version: ClassVar[int] = 2
    streams: ClassVar[bool] = True

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
        batch, heads = layer.keys.shape[:2]
        numerator, denominator = (
            (positions.view(batch, heads, -1), weights.view(batch, heads, -1))
            for positions, weights in (stream.numerator(), stream.denominator())
        )
        device = layer.keys.device
        return combine(
            layer,
            (numerator[0].to(device), numerator[1].to(device)),
            (denominator[0].to(device), denominator[1].to(device)),
            torch.arange(stream.seen, layer.n),
        )

    def layer_stream(
        self, keys: Tensor, values: Tensor, *, room: int, tokens: int, generator: torch.Generator
    ) -> SubGenLayer:
        """Algorithm 1 as it reads. With `delta` null the radius is one at which the first keys form half
        of the clusters that there is room for; once there are all, a key joins the nearest one.

        Raises:
            KVError: no room for a cluster and a sample.
        """
        s = max(1, room // 2) if self.s is None else self.s
        clusters = (room - s) // (self.t + 1)
        if clusters < 1:
            raise KVError(
                f"subgen_streaming.s is {s}; allowed: an s that leaves a representative and t = "
                f"{self.t} samples of the {room} entries beside the recent ones"
            )
        delta = torch.full((len(keys),), self.delta or 0.0)
        if self.delta is None:
            delta = _radius(keys.float(), max(1, min(clusters // 2, keys.shape[1]))).cpu()
        dims = keys.shape[-1], values.shape[-1]
        most = clusters if self.delta is None else None
        return SubGenLayer(SubGenStream(len(keys), *dims, delta, self.t, s, most), generator)

    def stream(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> SubGenStream:
        """Algorithm 1 after the older tokens of `layer`, its batch and KV heads flattened.

        The stream runs on the CPU, where a step of many small operations is cheapest.
        """
        batch, heads, n, dim = layer.keys.shape
        recent = budget.window if self.recent is None else self.recent
        room = budget.capacity(n) - recent
        s = max(1, room // 2) if self.s is None else self.s
        clusters = (room - s) // self.t
        if clusters < 1:
            raise KVError(
                f"subgen_streaming.s is {s}; allowed: an s that leaves t = {self.t} of the "
                f"{max(room, 0)} entries beside the recent ones"
            )
        older = n - recent
        keys = layer.keys[:, :, :older].reshape(batch * heads, older, dim).float()
        delta = torch.full((batch * heads,), self.delta or 0.0)
        if self.delta is None:
            delta = _radius(keys, min(clusters, older)).cpu()
        keys = keys.cpu()
        values = layer.values[:, :, :older].reshape(batch * heads, older, -1).float().cpu()
        stream = SubGenStream(batch * heads, dim, values.shape[-1], delta, self.t, s)
        for token in range(older):
            # One draw for every row of a batch (see `draw_uniforms`).
            draws = torch.rand(1, heads, self.t + s, generator=generator)
            draws = draws.expand(batch, -1, -1).reshape(batch * heads, -1)
            stream.update(keys[:, token], values[:, token], *draws.split([self.t, s], dim=-1))
        return stream


def _radius(keys: Tensor, clusters: int) -> Tensor:
    """A radius per head at which at most `clusters` clusters arise: [h].

    Bisection for a small one, with a few clusters to spare for rounding, below the radius that
    guarantees it: twice that which `clusters` greedy centres cover the keys with (more keys than
    centres cannot be farther apart than that pairwise, since two would share a centre).
    """
    first = torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device)
    centres = greedy_k_centre(keys, clusters, first)
    nearest = centres.gather(1, nearest_centre(keys, centres))
    around = keys.gather(1, nearest.unsqueeze(-1).expand_as(keys))
    enough = 2.001 * (keys - around).square().sum(-1).sqrt().amax(-1)
    too_small = torch.zeros_like(enough)
    target = clusters - 1 - clusters // 32
    for _ in range(BISECTIONS):
        middle = (enough + too_small) / 2
        fits = _count_clusters(keys, middle, target) <= target
        enough = torch.where(fits, middle, enough)
        too_small = torch.where(fits, too_small, middle)
    return enough


def _count_clusters(keys: Tensor, delta: Tensor, most: int) -> Tensor:
    """Clusters that Algorithm 1 starts in each head, counted to `most` + 1: [h].

    A key starts one unless a representative before it is within delta, so the next representative
    is the first key that none so far covers.
    """
    place = torch.arange(keys.shape[1], device=keys.device)
    uncovered = torch.ones(keys.shape[:2], dtype=torch.bool, device=keys.device)
    count = torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device)
    for _ in range(most + 1):
        next_ = torch.where(uncovered, place, keys.shape[1]).amin(-1)
        left = next_ < keys.shape[1]
        if not bool(left.any()):
            break
        count += left
        index = next_.clamp(max=keys.shape[1] - 1).view(-1, 1, 1).expand(-1, 1, keys.shape[2])
        far = (keys - keys.gather(1, index)).square().sum(-1).sqrt() > delta.unsqueeze(-1)
        uncovered &= far
    return count
