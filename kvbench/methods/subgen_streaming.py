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
"""How many times the interval of possible radii is halved when ``delta: null`` searches for one."""


class SubGenStream:
    """The state of Algorithm 1 for many heads, each of which reads a stream of its own; all streams are
    read at the same pace.

    All tensors are on the device of `delta`. Below, h is the number of heads and m the number of
    clusters per head that there is room for.

    Args:
        delta: [h] float32, the radius of a cluster.
        most: the largest number of clusters per head, None for any (`OnlineClusters`).

    Attributes:
        clustering: the clusters and their representatives, each the first key of its cluster.
        counts: [h, m] float32, how many keys have joined each cluster, the first included.
        slots: [h, m, t] int64, for each cluster t uniform samples of its keys, as stream positions.
        mu: [h] float64, the sum of ||v||^2 so far.
        sampled: [h, s] int64, the stream positions of s samples drawn in proportion to ||v||^2; -1
            before the first.
        sampled_weights: [h, s] float64, the ||v||^2 of these samples.
        seen: the number of tokens read so far.
    """

    def __init__(
        self, heads: int, dim: int, delta: Tensor, t: int, s: int, most: int | None = None
    ) -> None:
        device = delta.device
        self.t = t
        self.s = s
        self.seen = 0
        self.clustering = OnlineClusters(heads, dim, delta, most)
        self.counts = torch.zeros(heads, 0, device=device)
        self.slots = torch.zeros(heads, 0, t, dtype=torch.int64, device=device)
        self.mu = torch.zeros(heads, dtype=torch.float64, device=device)
        self.sampled = torch.full((heads, s), -1, device=device)
        self.sampled_weights = torch.zeros(heads, s, dtype=torch.float64, device=device)

    def read(self, keys: Tensor, values: Tensor, draws: Tensor) -> None:
        """Read b tokens, at most `BLOCK`, with the result of reading one after the other.

        Args:
            keys: [h, b, dim].
            values: [h, b, value_dim].
            draws: [b, h, t + s], uniform in [0, 1).
        """
        keys, values = keys.float(), values.float()
        # The tokens' numbers in the block begin at 1, so that 0 can stand for no token.
        order = torch.arange(1, keys.shape[1] + 1, dtype=torch.int16, device=keys.device)
        slot_draws, value_draws = draws.split([self.t, self.s], dim=-1)
        self._sample_clusters(keys, slot_draws.transpose(0, 1), order)
        self._sample_values(values, value_draws, order)
        self.seen += keys.shape[1]

    def _sample_clusters(self, keys: Tensor, draws: Tensor, order: Tensor) -> None:
        """Let the keys of a block join clusters, and replace samples of these clusters. A key replaces a
        sample with the probability 1 / (size of its cluster when it has joined).

        Args:
            draws: [h, b, t].
            order: [b], 1 .. b.
        """
        cluster = self.clustering.read(keys)
        more = self.clustering.room - self.counts.shape[1]
        if more > 0:
            self.counts = F.pad(self.counts, (0, more))
            self.slots = F.pad(self.slots, (0, 0, 0, more), value=-1)
        same_cluster = cluster.unsqueeze(1) == cluster.unsqueeze(2)
        # The size when the key has joined: the keys of earlier blocks, and those of this one up to it.
        size = self.counts.gather(1, cluster) + same_cluster.tril_().sum(-1)
        self.counts.scatter_add_(1, cluster, torch.ones_like(size))
        # The first key of a cluster has probability 1, so it goes into every slot.
        replaces = draws < (1.0 / size).unsqueeze(-1)
        position = torch.where(replaces, (self.seen - 1 + order.long()).view(1, -1, 1), -1)
        index = cluster.unsqueeze(-1).expand_as(position)
        # The latest key that replaces a sample stays: it has the largest position.
        self.slots.scatter_reduce_(1, index, position, "amax")

    def _sample_values(self, values: Tensor, draws: Tensor, order: Tensor) -> None:
        """Replace samples of the numerator by tokens of a block. A token replaces a sample with the
        probability ||v||^2 / (sum of ||v||^2 up to it).

        Args:
            draws: [b, h, s].
            order: [b], 1 .. b.
        """
        squared_norms = values.double().square().sum(-1)
        mu = torch.cat([self.mu.unsqueeze(1), squared_norms], 1).cumsum(1)[:, 1:]
        self.mu = mu[:, -1].clone()
        probability = torch.where(mu > 0, squared_norms / mu, 0.0)
        # The draws are float32. A float32 number is below a float64 number exactly if it is below that
        # number rounded up to float32.
        rounded_up = probability.float()
        next_up = rounded_up.nextafter(torch.ones_like(rounded_up))
        rounded_up = torch.where(rounded_up < probability, next_up, rounded_up)
        replaces = draws < rounded_up.T.unsqueeze(-1)
        # The block's last token that replaces a sample, -1 where none does.
        last = (replaces * order.view(-1, 1, 1)).amax(0).long() - 1
        new_weights = squared_norms.gather(1, last.clamp(min=0))
        self.sampled_weights = torch.where(last >= 0, new_weights, self.sampled_weights)
        self.sampled = torch.where(last >= 0, self.seen + last, self.sampled)

    def numerator(self) -> Sample:
        """The sample by which the sum of exp(q.k) v is estimated; weights mu / (s ||v||^2)."""
        weights = torch.log(self.mu.unsqueeze(-1) / (self.s * self.sampled_weights))
        return self.sampled, weights.masked_fill(self.sampled < 0, -math.inf).float()

    def denominator(self) -> Sample:
        """The sample by which the sum of exp(q.k) is estimated; weights (keys of the cluster) / t."""
        weights = torch.log(self.counts / self.t).unsqueeze(-1).expand_as(self.slots)
        empty = (self.counts == 0).unsqueeze(-1)
        return self.slots.masked_fill(empty, -1).flatten(1), weights.flatten(1)


@dataclass(frozen=True, kw_only=True)
class SubGenStreaming(Method):
    """Runs Algorithm 1 over the prompt's older tokens; keeps the last `recent` ones exactly.

    An online clustering of the keys estimates the denominator (the softmax's normaliser), and tokens
    sampled in proportion to ||v||^2 estimate the numerator. Recent tokens join both with weight 1. With
    m clusters a head holds m t + s + recent entries.

    Departures:

    - The denominator mixes in 2^-10 of the numerator's own estimate, so that one attention call
      evaluates both (see `_estimator.combine`).
    - With `delta` null the radius of a head is chosen from the whole prompt, which a run that sees one
      token at a time could not do.

    Args:
        delta: the radius (l2) of a cluster; null for about the smallest at which the older keys form no
            more clusters than the capacity has room for. A number may lead to more clusters, and the
            audit then fails the method.
        t: how many uniform samples are kept of each cluster.
        s: how many samples are kept for the numerator; null for half of what the capacity leaves beside
            `recent`.
        recent: how many of the most recent tokens are kept exactly; null for budget.window.
    """

    paper: ClassVar[str] = "arXiv 2402.06082, Algorithm 1"
    version: ClassVar[int] = 3
    keeps_entries: ClassVar[bool] = False

    delta: NonNegative | None = None
    t: Count = 4
    s: Count | None = None
    recent: Whole | None = None

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Keep the samples of the clusters, which have no values, then those of the numerator, then the
        recent tokens. Positions may repeat, since the samples are drawn with replacement.
        """
        stream = self.stream(layer, budget, generator)
        recent = torch.arange(stream.seen, layer.n, device=layer.keys.device)
        return combine(layer, stream.numerator(), stream.denominator(), 0, recent)

    def stream(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> SubGenStream:
        """The state of Algorithm 1 after the older tokens of `layer`; its heads are the KV heads of all
        prompts of the batch.
        """
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
    """Find a small radius for each head at which its keys [h, n, dim] form at most `clusters` clusters:
    [h].

    Let r be the distance of the next greedy centre from the `clusters` greedy centres before it. Every
    key is within r of one of these centres, so of any `clusters` + 1 keys two share a centre and are
    within 2 r of each other. The radius 2 r is therefore large enough. (The factor is 2.001 because
    distances are rounded.) Bisection then searches for a smaller radius, at which a few clusters are
    left over, also because of rounding.
    """
    first = torch.zeros(keys.shape[0], dtype=torch.int64, device=keys.device)
    chosen = greedy_k_centre(keys, min(clusters + 1, keys.shape[1]), first)
    centres = rows_at(keys[None], chosen[None])[0]
    distances = (centres[:, -1:] - centres[:, :clusters]).square().sum(-1).sqrt()
    large_enough = 2.001 * distances.amin(-1)
    too_small = torch.zeros_like(large_enough)
    target = clusters - 1 - clusters // 32
    for _ in range(BISECTIONS):
        middle = (large_enough + too_small) / 2
        fits = count_clusters(keys, middle, target + 1) <= target
        large_enough = torch.where(fits, middle, large_enough)
        too_small = torch.where(fits, too_small, middle)
    return large_enough
