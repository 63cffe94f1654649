"""BalanceKV as its Algorithms 1, 2 and 4: one token at a time, in memory logarithmic in n."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

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
"""How often a failed walk is tried with new draws under ``on_fail=restart``."""


class BalanceFailure(RuntimeError):
    """An inner product of a walk exceeded its bound (FAIL in Algorithm 2)."""


class MergeAndReduce:
    """Algorithm 4: a stream of tokens, reduced to levels of entries. An entry of level l stands for 2^l
    tokens.

    New tokens join level 0. When it holds t of them, a batch is complete: SoftmaxBalance moves half of
    level 0 to level 1. After an even number of batches it then moves half of level 1 to level 2, after
    a multiple of four half of level 2 to level 3, and so on.

    Args:
        keys: [m, d], the keys of the stream.
        values: [m, e]; None where every value is the number 1, as for the denominator.
        t: how many entries fill a level.
        radii: the largest norm of a key and of a value.
        options: the method, whose `on_fail` and `halve` are read.
        bound: the bound on the inner products of a walk (`walk_bound`).
        seed: of the walks' draws.

    Attributes:
        levels: for each level the places [c] in the stream of its entries, c <= t.
        seen: the number of tokens read so far.
        batches: how many times level 0 was full.
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
        self.keys = keys
        self.values = values
        self.t = t
        self.radii = radii
        self.levels: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
        self.seen = 0
        self.batches = 0
        self._options = options
        self._bound = bound
        self._generator = torch.Generator().manual_seed(seed)

    def read(self, places: Tensor) -> MergeAndReduce:
        """Read the tokens at `places` [m] of the stream, with the result of reading one after the other.
        Returns this structure.

        Raises:
            BalanceFailure: a walk failed, and with ``on_fail=restart`` so did all its repetitions.
        """
        self.seen += len(places)
        while len(places):
            room = self.t - len(self.levels[0])
            self.levels[0] = torch.cat([self.levels[0], places[:room]])
            places = places[room:]
            if len(self.levels[0]) < self.t:
                break
            self.batches += 1
            self._reduce(0)
            # Level l is due when the number of batches is a multiple of 2^l.
            level = 1
            while self.batches % 2**level == 0:
                self._reduce(level)
                level += 1
        return self

    def _reduce(self, level: int) -> None:
        """Move the entries that SoftmaxBalance keeps of a level to the next level; the others are
        dropped."""
        places = self.levels[level]
        options = self._options
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
        """The places of the entries of all levels, and their log-weights, level * log 2."""
        log_weights = [
            torch.full((len(places),), level * math.log(2))
            for level, places in enumerate(self.levels)
        ]
        return torch.cat(self.levels), torch.cat(log_weights)


class Structures(NamedTuple):
    """Algorithm 1's structures for one head.

    Attributes:
        buckets: for the numerator: bucket i holds the tokens with 2^i <= ||v|| < 2^(i+1).
        denominator: holds every token, with the value 1.
    """

    buckets: dict[int, MergeAndReduce]
    denominator: MergeAndReduce


def structures(
    keys: Tensor, values: Tensor, options: BalanceKVStreaming, t: int, radius: float, seed: int
) -> Structures:
    """Run Algorithm 1 over all tokens of a head.

    A bucket is erased once its upper end, 2^(i+1), is at most eps / (2 n) * exp(-r^2 / sqrt(d)) * v_max:
    all tokens that belong to it then weigh too little to matter (line 8, where a bucket's upper end is
    written 2^i). The threshold grows with v_max and never
    falls, so a bucket that is erased at any time is erased at the end. Only the other buckets are
    computed.

    Args:
        keys: [m, d], of norms up to `radius`.
        values: [m, e].
        options: the method.
        t: how many entries fill a level.
        seed: of the head's draws.

    Raises:
        BalanceFailure: a walk failed.
    """
    n = len(keys)
    norms = values.double().norm(dim=-1)
    bound = walk_bound(n, options.delta, options.constant)
    least = options.eps / (2 * n) * float(norms.max())
    least *= math.exp(-(radius**2) / keys.shape[1] ** 0.5)

    def empty_structure(
        own_values: Tensor | None, value_radius: float, number: int
    ) -> MergeAndReduce:
        """A structure that has read nothing; `number` gives each structure of the head its own draws."""
        own_seed = (SEED_STRIDE * seed + number) % 2**62
        radii = (radius, value_radius)
        return MergeAndReduce(keys, own_values, t, radii, options, bound, own_seed)

    bucket_of_token = buckets_of(norms)
    buckets: dict[int, MergeAndReduce] = {}
    for bucket in bucket_of_token[norms > 0].unique().tolist():
        upper_end = 2.0 ** (bucket + 1)
        if upper_end > least:
            tokens = ((bucket_of_token == bucket) & (norms > 0)).nonzero().squeeze(-1)
            # Buckets have odd numbers and the denominator 0. Buckets may be negative.
            number = 2 * (bucket + 5000) + 1
            buckets[bucket] = empty_structure(values, upper_end, number).read(tokens)
    denominator = empty_structure(None, 1.0, 0).read(torch.arange(n))
    return Structures(buckets, denominator)


@dataclass(frozen=True, kw_only=True)
class BalanceKVStreaming(Method):
    """Runs Algorithm 1 over the middle of the prompt; sink and window are kept exactly.

    Numerator and denominator keep different entries; an entry of level l has the weight 2^l.

    Departures:

    - The denominator mixes in 2^-10 of the numerator's own estimate, so that one attention call
      evaluates both (see `_estimator.combine`).
    - A halving leaves exactly half (`halve`).

    Args:
        t: how many entries fill a level; null for the largest number with which the structures of every
            head fit the capacity.
        eps: the accuracy; it only decides which buckets are too small to matter.
        delta: the probability of failure.
        constant: the factor in the bound of a walk, constant * log(n / delta).
        on_fail: what a walk does that exceeds its bound: ``raise`` fails the method, ``restart`` repeats
            the walk with new draws.
        halve: ``even`` keeps the smaller sign class and as many of the latest entries of the larger one
            as complete it to half, so that the weights of a structure sum to the tokens it has read.
            ``smaller`` keeps the smaller class alone, as Algorithm 2 states; the weights then fall short
            by some per cent at every level, and differently for numerator and denominator.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, Algorithms 1, 2 and 4"
    version: ClassVar[int] = 2
    keeps_entries: ClassVar[bool] = False

    t: Annotated[int, Ge(2)] | None = None
    eps: Positive = 0.1
    delta: Share = 0.01
    constant: Positive = 30.0
    on_fail: Literal["raise", "restart"] = "raise"
    halve: Literal["even", "smaller"] = "even"

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Keep the entries of the denominator, which have no values, then those of the numerator, then
        sink and window.

        Raises:
            KVError: no t fits the capacity.
            BalanceFailure: a walk failed.
        """
        batch, heads, n = layer.keys.shape[:3]
        start, stop = budget.sink, n - budget.window
        room = budget.middle_kept(n)
        # The walk, which goes token by token, is computed by numpy.
        keys = layer.keys[:, :, start:stop].flatten(0, 1).float().cpu()
        values = layer.values[:, :, start:stop].flatten(0, 1).float().cpu()
        t = self.t or largest_batch(values, room)
        if not t:
            raise KVError(
                "balancekv_streaming.t is null; allowed: a budget with room for its levels (the rate "
                f"leaves {room} entries, fewer than any t >= 2 needs)"
            )
        # The rows of a batch have the same draws.
        seeds = torch.randint(2**40, (heads,), generator=generator).tolist() * batch
        radius = float(keys.double().norm(dim=-1).max())
        numerators, denominators = [], []
        # The sample of a head whose buckets are all erased.
        empty_sample = torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        for head_keys, head_values, seed in zip(keys, values, seeds, strict=True):
            buckets, denominator = structures(head_keys, head_values, self, t, radius, seed)
            samples = [empty_sample, *(bucket.sample() for bucket in buckets.values())]
            places, log_weights = zip(*samples, strict=True)
            numerators.append((torch.cat(places), torch.cat(log_weights)))
            denominators.append(denominator.sample())
        exact = torch.cat([torch.arange(start), torch.arange(stop, n)])
        numerator = side_by_side(numerators, -math.inf)
        return combine(layer, numerator, side_by_side(denominators, -math.inf), start, exact)


def buckets_of(norms: Tensor) -> Tensor:
    """The bucket of each norm, the integer i with 2^i <= norm < 2^(i+1): int64, of the shape of
    `norms`."""
    # frexp gives norm = mantissa * 2^exponent with the mantissa in [1/2, 1).
    return torch.frexp(norms).exponent.long() - 1


def largest_batch(values: Tensor, room: int) -> int:
    """The largest even t with which the structures of every head hold at most `room` entries, whatever
    is drawn; 0 if there is none.

    Args:
        values: [heads, m, e].
    """
    # For each head the tokens that each of its structures reads: the denominator's, then the buckets'.
    tokens_by_head: list[list[int]] = []
    for norms in values.double().norm(dim=-1):
        bucket_sizes = buckets_of(norms[norms > 0]).unique(return_counts=True)[1]
        tokens_by_head.append([values.shape[1], *bucket_sizes.tolist()])

    def most_entries(t: int, tokens: int) -> int:
        """The entries that a structure may hold after so many tokens: the incomplete batch in level 0,
        and t / 2 in each level whose bit is set in the number of batches."""
        return tokens % t + t // 2 * (tokens // t).bit_count()

    for t in range(2 * (room // 2), 1, -2):
        entries = [sum(most_entries(t, m) for m in tokens) for tokens in tokens_by_head]
        if max(entries) <= room:
            return t
    return 0
