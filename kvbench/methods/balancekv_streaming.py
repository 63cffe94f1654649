"""BalanceKV as its Algorithms 1, 2 and 4: one token at a time, in memory logarithmic in n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor

from kvbench.errors.options import Positive, Share
from kvbench.kernels.self_balancing import softmax_balance, walk_bound
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods._estimator import combine
from kvbench.methods._select import side_by_side
from kvbench.methods.base import SEED_STRIDE, Method

RESTARTS = 100
"""Fresh attempts at a batch whose walk failed, with on_fail=restart, before giving up."""


class BalanceFailure(RuntimeError):
    """A walk strayed farther than its bound (Algorithm 2's FAIL)."""


class MergeAndReduce:
    """Algorithm 4: a stream kept as levels, an entry of level l standing for 2^l tokens.

    Tokens collect in level 0. Every t of them, level 0 goes through SoftmaxBalance into level 1, and
    while the number of batches so far, halved each time, is even, the next level goes on likewise.

    Attributes:
        keys, values: [m, d], [m, e] of the prompt; without values they count 1 (the denominator).
        t: entries that fill a level.
        radii: what no key's and no value's norm exceeds.
        levels: places [c] of each level's entries, at most t of them.
        seen: tokens so far. batches: times that level 0 was full.
    """

    def __init__(
        self,
        keys: Tensor,
        values: Tensor | None,
        t: int,
        radii: tuple[float, float],
        options: BalanceKVStreaming,
        bound: float,
        seed: int,
    ) -> None:
        self.keys, self.values, self.t, self.radii = keys, values, t, radii
        self.levels: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
        self.seen, self.batches = 0, 0
        self._options, self._bound = options, bound
        self._generator = torch.Generator().manual_seed(seed)

    def read(self, places: Tensor) -> MergeAndReduce:
        """Read the tokens at these places [m], in order; as m times one. Returns itself.

        Raises:
            BalanceFailure: a walk failed (on_fail=raise, or again and again).
        """
        self.seen += len(places)
        while len(places):
            room = self.t - len(self.levels[0])
            self.levels[0], places = torch.cat([self.levels[0], places[:room]]), places[room:]
            if len(self.levels[0]) < self.t:
                break
            self.batches += 1
            level, batches = 0, self.batches
            self._reduce(level)
            while batches % 2 == 0:
                level, batches = level + 1, batches // 2
                self._reduce(level)
        return self

    def _reduce(self, level: int) -> None:
        """Move what SoftmaxBalance keeps of a level into the next one."""
        places, options = self.levels[level], self._options
        for _ in range(1 if options.on_fail == "raise" else RESTARTS):
            kept = softmax_balance(
                self.keys[places],
                None if self.values is None else self.values[places],
                torch.rand(len(places), generator=self._generator),
                key_radius=self.radii[0],
                value_radius=self.radii[1],
                bound=self._bound,
                exact_half=options.halve == "even",
            )
            if kept is not None:
                break
        else:
            raise BalanceFailure(
                f"the walk over {len(places)} entries of level {level} exceeded its bound "
                f"{self._bound:g}; a larger constant or smaller t avoids it"
            )
        following = [] if level + 1 == len(self.levels) else [self.levels[level + 1]]
        joined = torch.cat([*following, places[kept]])
        self.levels[level : level + 2] = [places[:0], joined]

    def sample(self) -> tuple[Tensor, Tensor]:
        """Places of all levels' entries, and log-weights level * log 2."""
        weights = [torch.full((len(at),), i * math.log(2)) for i, at in enumerate(self.levels)]
        return torch.cat(self.levels), torch.cat(weights)


def structures(
    keys: Tensor, values: Tensor, options: BalanceKVStreaming, t: int, radius: float, seed: int
) -> tuple[dict[int, MergeAndReduce], MergeAndReduce]:
    """Algorithm 1 after all tokens of a head, keys [m, d] of norms up to `radius`, values [m, e]: its
    buckets, and its structure for the denominator.

    Bucket i holds the tokens with 2^i <= ||v|| < 2^(i+1) and serves the numerator; one more structure
    holds every token with v = 1 for the denominator. A bucket is erased once its upper end, 2^(i+1), is
    at most eps / (2 n) * exp(-r^2 / sqrt(d)) * v_max: then all that it holds, and tokens as small that
    come later, weigh too little to matter. By the lower end it would be erased with values of up to
    twice that norm in it. The threshold only grows, so that those left at the end are read.

    Raises:
        BalanceFailure: a walk failed.
    """
    n, norms = len(keys), values.double().norm(dim=-1)
    bound = walk_bound(n, options.delta, options.constant)
    least = options.eps / (2 * n) * float(norms.max())
    least *= math.exp(-(radius**2) / keys.shape[1] ** 0.5)

    def structure(of: Tensor | None, value_radius: float, salt: int) -> MergeAndReduce:
        drawn = (SEED_STRIDE * seed + salt) % 2**62
        return MergeAndReduce(keys, of, t, (radius, value_radius), options, bound, drawn)

    index, buckets = buckets_of(norms), {}
    for i in index[norms > 0].unique().tolist():
        if (end := 2.0 ** (i + 1)) > least:
            mine = ((index == i) & (norms > 0)).nonzero().squeeze(-1)
            buckets[i] = structure(values, end, 2 * (i + 5000) + 1).read(mine)
    return buckets, structure(None, 1.0, 0).read(torch.arange(n))


@dataclass(frozen=True, kw_only=True)
class BalanceKVStreaming(Method):
    """Runs Algorithm 1 over the middle of the prompt; sink and window are kept exactly.

    Numerator and denominator keep different entries, each weighing 2^level.

    Departures: the denominator mixes in 2^-10 of the numerator's own estimate (see
    `_estimator.combine`), which lets one attention call evaluate both; a bucket's bound on the norm
    of values is its upper end; `halve=even`.

    Args:
        t: entries that fill a level; null: the largest for which all structures
            together surely fit the capacity.
        eps: accuracy, which only decides what buckets are too small to matter.
        delta: probability of failure.
        constant: c = constant * log(n / delta).
        on_fail: raise | restart (the batch, with fresh draws).
        halve: even (the smaller sign class, completed to exactly half by the latest entries of the
            larger, so that the weights of a structure sum to the tokens it has read) | smaller (the
            smaller class alone, as Algorithm 2 states: the weights fall short, by some per cent per
            level, and not alike in numerator and denominator).
    """

    paper: ClassVar[str] = "arXiv 2502.07861, Algorithms 1, 2 and 4"
    version: ClassVar[int] = 2

    t: Annotated[int, Ge(2)] | None = None
    eps: Positive = 0.1
    delta: Share = 0.01
    constant: Positive = 30.0
    on_fail: Literal["raise", "restart"] = "raise"
    halve: Literal["even", "smaller"] = "even"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Entries of the denominator (keys only), of the numerator, then sink and window.

        Raises:
            KVError: no t fits the capacity.
            BalanceFailure: a walk failed.
        """
        batch, heads, n = layer.keys.shape[:3]
        start, stop, room = budget.sink, n - budget.window, budget.middle_kept(n)
        keys, values = (
            x[:, :, start:stop].flatten(0, 1).float().cpu() for x in (layer.keys, layer.values)
        )
        t = self.t or largest_batch(values, room)
        if not t:
            raise KVError(
                "balancekv_streaming.t is null; allowed: a budget with room for its levels (the rate "
                f"leaves {room} entries, fewer than any t >= 2 needs)"
            )
        # The rows of a batch have the same draws.
        seeds = torch.randint(2**40, (heads,), generator=generator).tolist() * batch
        radius, above, below = float(keys.double().norm(dim=-1).max()), [], []
        none = torch.zeros(0, dtype=torch.int64), torch.zeros(0)  # where every bucket is erased
        for key, value, seed in zip(keys, values, seeds, strict=True):
            buckets, denominator = structures(key, value, self, t, radius, seed)
            samples = [none, *(bucket.sample() for bucket in buckets.values())]
            positions, weights = zip(*samples, strict=True)
            above.append((torch.cat(positions), torch.cat(weights)))
            below.append(denominator.sample())
        exact = torch.cat([torch.arange(start), torch.arange(stop, n)])
        sampled, counted = side_by_side(above, -math.inf), side_by_side(below, -math.inf)
        return combine(layer, sampled, counted, start, exact)


def buckets_of(norms: Tensor) -> Tensor:
    """i of 2^i <= norm < 2^(i+1), int64."""
    # frexp: norm = mantissa * 2^exponent with the mantissa in [1/2, 1).
    return torch.frexp(norms).exponent.long() - 1


def largest_batch(values: Tensor, room: int) -> int:
    """The largest even t with which the structures of every head's values [heads, m, e] surely hold at
    most `room` entries; 0: there is none.

    After m tokens a structure holds m mod t entries at level 0 and at most t / 2 at each level whose
    bit is set in the number of batches, floor(m / t).
    """
    counts = [
        buckets_of(norms[norms > 0]).unique(return_counts=True)[1]
        for norms in values.double().norm(dim=-1)
    ]
    sizes = [[values.shape[1], *tokens.tolist()] for tokens in counts]

    def held(t: int, m: int) -> int:
        return m % t + t // 2 * (m // t).bit_count()

    fitting = (
        t
        for t in range(2 * (room // 2), 1, -2)
        if max(sum(held(t, m) for m in head) for head in sizes) <= room
    )
    return next(fitting, 0)
