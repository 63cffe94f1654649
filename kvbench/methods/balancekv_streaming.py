"""BalanceKV as its Algorithms 1, 2 and 4: one token at a time, in memory logarithmic in n."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.errors.options import Positive, Share
from kvbench.kernels.self_balancing import softmax_balance, walk_bound
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods._estimator import combine
from kvbench.methods.base import SEED_STRIDE, Method, Sample

RESTARTS = 100
"""Fresh attempts at a batch whose walk failed, with on_fail=restart, before giving up."""


class BalanceFailure(RuntimeError):
    """A walk strayed farther than its bound (Algorithm 2's FAIL)."""


class MergeAndReduce:
    """Algorithm 4: a stream kept as levels, an entry of level l standing for 2^l tokens.

    Tokens collect in level 0. Every t of them, level 0 goes through SoftmaxBalance into level 1, and
    while the number of batches so far, halved each time, is even, the next level goes on likewise.

    Attributes:
        t: entries that fill a level.
        value_radius: what no value's norm exceeds; None: values count 1 (the denominator).
        levels: positions [c], keys and values of each level's entries, at most t of them.
        seen: tokens so far.
        batches: times that level 0 was full.
    """

    def __init__(
        self,
        t: int,
        *,
        key_radius: float,
        value_radius: float | None,
        bound: float,
        on_fail: str,
        seed: int,
        halve: str = "even",
    ) -> None:
        self.t, self.seen, self.batches = t, 0, 0
        self.levels: list[tuple[Tensor, Tensor, Tensor]] = []
        self.key_radius, self.value_radius = key_radius, value_radius
        self._bound, self._on_fail, self._exact_half = bound, on_fail, halve == "even"
        self._generator = torch.Generator().manual_seed(seed)

    def extend(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Read tokens in order: positions [m], keys [m, d], values [m, e]. As m updates by one.

        Raises:
            BalanceFailure: a walk failed (on_fail=raise, or again and again).
        """
        start, held = 0, len(self.levels[0][0]) if self.levels else 0
        while start < len(positions):
            part = slice(start, start + self.t - held)
            self._append(0, positions[part], keys[part], values[part])
            start, held = part.stop, len(self.levels[0][0])
            if held == self.t:
                self.batches += 1
                level, batches, held = 0, self.batches, 0
                self._reduce(level)
                while batches % 2 == 0:
                    level, batches = level + 1, batches // 2
                    self._reduce(level)
        self.seen += len(positions)

    def _append(self, level: int, *tokens: Tensor) -> None:
        if level == len(self.levels):
            self.levels.append((tokens[0][:0], tokens[1][:0], tokens[2][:0]))
        positions, keys, values = map(torch.cat, zip(self.levels[level], tokens, strict=True))
        self.levels[level] = positions, keys, values

    def _reduce(self, level: int) -> None:
        """Move what SoftmaxBalance keeps of a level into the next one."""
        positions, keys, values = self.levels[level]
        for _ in range(1 if self._on_fail == "raise" else RESTARTS):
            kept = softmax_balance(
                keys,
                None if self.value_radius is None else values,
                torch.rand(len(positions), generator=self._generator),
                key_radius=self.key_radius,
                value_radius=self.value_radius or 1.0,
                bound=self._bound,
                exact_half=self._exact_half,
            )
            if kept is not None:
                break
        else:
            raise BalanceFailure(
                f"the walk over {len(positions)} entries of level {level} exceeded its bound "
                f"{self._bound:g}; a larger constant or smaller t avoids it"
            )
        self.levels[level] = positions[:0], keys[:0], values[:0]
        self._append(level + 1, positions[kept], keys[kept], values[kept])

    def sample(self) -> Sample:
        """All levels, with log-weights level * log 2."""
        positions, keys, values = map(torch.cat, zip(*self.levels, strict=True))
        weights = [torch.full((len(p),), i * math.log(2)) for i, (p, *_) in enumerate(self.levels)]
        return Sample(positions, torch.cat(weights), keys, values)


class BalanceKVStream:
    """Algorithm 1: of each head values in buckets by norm, a `MergeAndReduce` for each.

    Bucket i holds the tokens with 2^i <= ||v|| < 2^(i+1) and serves the numerator; one more
    structure holds every token with v = 1 for the denominator. A bucket is erased once its upper
    end, 2^(i+1), is at most eps / (2 n) * exp(-r^2 / sqrt(d)) * v_max: then all that it holds, and
    tokens as small that come later, weigh too little to matter. By the lower end it would be erased
    with values of up to twice that norm in it.

    A walk is given the radius r of the longest key so far, since nobody knows that of the whole stream.

    Attributes:
        buckets: of each head, by i. denominators: of each head, of all tokens.
        key_radius: r of each head. largest: v_max, the largest ||v|| of each head so far.
        seen: tokens so far.
    """

    def __init__(
        self,
        options: BalanceKVStreaming,
        seeds: Sequence[int],
        *,
        n: int,
        t: int,
        key_radius: float = 0.0,
    ) -> None:
        """`seeds`: of each head. `n`: tokens the stream may have. `key_radius`: r at least."""
        self.options, self.seeds, self.n, self.t, self.seen = options, seeds, n, t, 0
        self.bound = walk_bound(n, options.delta, options.constant)
        self.key_radius, self.largest = [key_radius] * len(seeds), [0.0] * len(seeds)
        self.buckets: list[dict[int, MergeAndReduce]] = [{} for _ in seeds]
        self.denominators = [self._structure(head, None, salt=0) for head in range(len(seeds))]

    def _structure(self, head: int, value_radius: float | None, salt: int) -> MergeAndReduce:
        return MergeAndReduce(
            self.t,
            key_radius=self.key_radius[head],
            value_radius=value_radius,
            bound=self.bound,
            on_fail=self.options.on_fail,
            halve=self.options.halve,
            seed=(SEED_STRIDE * self.seeds[head] + salt) % 2**62,
        )

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Read tokens in order, as one at a time: keys [heads, m, d], values [heads, m, e].

        Raises:
            BalanceFailure: a walk failed.
        """
        keys, values = keys.float().cpu(), values.float().cpu()
        self._nothing = (
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(0),
            keys[0, :0],
            values[0, :0],
        )
        for head in range(len(keys)):
            self._extend(head, keys[head], values[head])
        self.seen += keys.shape[1]

    def _extend(self, head: int, keys: Tensor, values: Tensor) -> None:
        buckets, denominator = self.buckets[head], self.denominators[head]
        radius = max(self.key_radius[head], float(keys.double().norm(dim=-1).max()))
        self.key_radius[head] = radius
        for one in (denominator, *buckets.values()):
            one.key_radius = radius
        positions = torch.arange(self.seen, self.seen + len(keys))
        denominator.extend(positions, keys, values[:, :0])
        norms = values.double().norm(dim=-1)
        index = buckets_of(norms)
        for i in index[norms > 0].unique().tolist():
            mine = ((index == i) & (norms > 0)).nonzero().squeeze(-1)
            if i not in buckets:
                buckets[i] = self._structure(head, 2.0 ** (i + 1), salt=2 * (i + 5000) + 1)
            buckets[i].extend(positions[mine], keys[mine], values[mine])
        self.largest[head] = max(self.largest[head], float(norms.max()))
        least = self.options.eps / (2 * self.n) * self.largest[head]
        least *= math.exp(-(radius**2) / keys.shape[1] ** 0.5)
        self.buckets[head] = {i: kept for i, kept in buckets.items() if 2.0 ** (i + 1) > least}

    def _samples(self) -> tuple[list[Sample], list[Sample]]:
        """Of each head the entries of all buckets, and those of the denominator."""
        above = []
        for buckets in self.buckets:
            parts = [self._nothing, *(buckets[i].sample() for i in sorted(buckets))]
            above.append(Sample(*map(torch.cat, zip(*parts, strict=True))))
        return above, [one.sample() for one in self.denominators]

    def numerator(self) -> Sample:
        """Of the sum of exp(q.k) v."""
        return side_by_side(self._samples()[0])

    def denominator(self) -> Sample:
        """Of the sum of exp(q.k); its values are not used."""
        return side_by_side(self._samples()[1])


def side_by_side(samples: Sequence[Sample]) -> Sample:
    """Samples of several heads as one, padded."""
    padding = (-1, -math.inf, 0.0, 0.0)
    parts = zip(zip(*samples, strict=True), padding, strict=True)
    return Sample(*(pad_sequence(list(p), True, padding_value=fill) for p, fill in parts))


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
        keys, values = (x[:, :, start:stop].flatten(0, 1) for x in (layer.keys, layer.values))
        t = self.t or largest_batch(values.float().cpu(), room)
        if not t:
            raise KVError(
                "balancekv_streaming.t is null; allowed: a budget with room for its levels (the rate "
                f"leaves {room} entries, fewer than any t >= 2 needs)"
            )
        # The rows of a batch have the same draws.
        seeds = torch.randint(2**40, (heads,), generator=generator).tolist() * batch
        radius = float(keys.float().double().norm(dim=-1).max())
        stream = BalanceKVStream(self, seeds, n=stop - start, t=t, key_radius=radius)
        stream.extend(keys, values)
        exact = torch.cat([torch.arange(start), torch.arange(stop, n)])
        return combine(layer, stream.numerator(), stream.denominator(), start, exact)


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
    sizes = [[values.shape[1], *each.tolist()] for each in counts]

    def held(t: int, m: int) -> int:
        return m % t + t // 2 * (m // t).bit_count()

    fitting = (
        t
        for t in range(2 * (room // 2), 1, -2)
        if max(sum(held(t, m) for m in head) for head in sizes) <= room
    )
    return next(fitting, 0)
