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
from kvbench.methods._layer_streams import BalanceKVLayer, batch_of_stream
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
        t: entries that fill a level.
        levels: for each level the stream positions of its entries, [c] int64, at most t of them.
        seen: tokens so far.
        batches: times that level 0 was full.
    """

    def __init__(
        self,
        t: int,
        *,
        key_radius: float,
        value_radius: float,
        use_values: bool,
        bound: float,
        on_fail: str,
        seed: int,
        halve: str = "even",
    ) -> None:
        self.t, self.seen, self.batches = t, 0, 0
        self.levels: list[Tensor] = [torch.zeros(0, dtype=torch.int64)]
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.key_radius, self._value_radius = key_radius, value_radius
        self._use_values, self._bound, self._on_fail = use_values, bound, on_fail
        self._exact_half = halve == "even"
        self._generator = torch.Generator().manual_seed(seed)

    def extend(self, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        """Read tokens in order: positions [m], keys [m, d], values [m, e]. As m updates by one.

        Raises:
            BalanceFailure: a walk failed (on_fail=raise, or again and again).
        """
        while len(positions):
            room = self.t - len(self.levels[0])
            parts = (positions[:room], keys[:room], values[:room])
            self._append(0, *parts)
            self.seen += len(parts[0])
            positions, keys, values = positions[room:], keys[room:], values[room:]
            if len(self.levels[0]) == self.t:
                self.batches += 1
                level, batches = 0, self.batches
                self._reduce(level)
                while batches % 2 == 0:
                    level, batches = level + 1, batches // 2
                    self._reduce(level)

    def _append(self, level: int, positions: Tensor, keys: Tensor, values: Tensor) -> None:
        if level == len(self.levels):
            self.levels.append(positions[:0])
        if level == len(self._keys):
            self._keys.append(keys[:0])
            self._values.append(values[:0])
        self.levels[level] = torch.cat([self.levels[level], positions])
        self._keys[level] = torch.cat([self._keys[level], keys])
        self._values[level] = torch.cat([self._values[level], values])

    def _reduce(self, level: int) -> None:
        """Move what SoftmaxBalance keeps of a level into the next one."""
        positions, keys, values = self.levels[level], self._keys[level], self._values[level]
        kept = None
        for _ in range(1 if self._on_fail == "raise" else RESTARTS):
            kept = softmax_balance(
                keys,
                values if self._use_values else None,
                torch.rand(len(positions), generator=self._generator),
                key_radius=self.key_radius,
                value_radius=self._value_radius,
                bound=self._bound,
                exact_half=self._exact_half,
            )
            if kept is not None:
                break
        if kept is None:
            raise BalanceFailure(
                f"the walk over {len(positions)} entries of level {level} exceeded its bound "
                f"{self._bound:g}; a larger constant or smaller t avoids it"
            )
        self._append(level + 1, positions[kept], keys[kept], values[kept])
        self.levels[level] = positions[:0]
        self._keys[level], self._values[level] = keys[:0], values[:0]

    def entries(self) -> tuple[Tensor, Tensor]:
        """Positions [c] int64 and log-weights level * log 2, [c] float32, of all levels."""
        weights = [torch.full((len(p),), i * math.log(2)) for i, p in enumerate(self.levels)]
        return torch.cat(self.levels), torch.cat(weights)

    def stored(self) -> tuple[Tensor, Tensor]:
        """Keys [c, d] and values [c, e] of `entries`, in the same order."""
        return torch.cat(self._keys), torch.cat(self._values)


class BalanceKVStream:
    """Algorithm 1 for one head: values in buckets by norm, one `MergeAndReduce` for each.

    Bucket i holds the tokens with 2^i <= ||v|| < 2^(i+1) and serves the numerator; one more
    structure holds every token with v = 1 for the denominator. A bucket is erased once its upper
    end, 2^(i+1), is at most eps / (2 n) * exp(-r^2 / sqrt(d)) * v_max: then all that it holds, and
    tokens as small that come later, weigh too little to matter. By the lower end it would be erased
    with values of up to twice that norm in it.

    Attributes:
        buckets: by i.
        denominator: of all tokens.
        largest: v_max, the largest ||v|| so far.
        seen: tokens so far.
    """

    def __init__(
        self,
        *,
        n: int,
        t: int,
        key_radius: float,
        eps: float = 0.1,
        delta: float = 0.01,
        constant: float = 30.0,
        on_fail: str = "raise",
        halve: str = "even",
        seed: int = 0,
    ) -> None:
        """`n`: tokens the stream may have; `key_radius`: r, which no key's norm may exceed."""
        self.n, self.t, self.key_radius, self.eps, self.seed = n, t, key_radius, eps, seed
        self.bound, self.on_fail = walk_bound(n, delta, constant), on_fail
        self.halve = halve
        self.buckets: dict[int, MergeAndReduce] = {}
        self.denominator = self._structure(1.0, use_values=False, salt=0)
        self.largest, self.seen, self._value_dim = 0.0, 0, 0

    def _structure(self, value_radius: float, *, use_values: bool, salt: int) -> MergeAndReduce:
        return MergeAndReduce(
            self.t,
            key_radius=self.key_radius,
            value_radius=value_radius,
            use_values=use_values,
            bound=self.bound,
            on_fail=self.on_fail,
            halve=self.halve,
            seed=(SEED_STRIDE * self.seed + salt) % 2**62,
        )

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """Read m tokens: keys [m, d], values [m, e]. The result is that of m single tokens.

        Raises:
            KVError: a key longer than `key_radius`.
            BalanceFailure: a walk failed.
        """
        longest = float(keys.double().norm(dim=-1).max())
        if longest > self.key_radius * (1 + 1e-5):
            raise KVError(f"a key has norm {longest:g}; allowed: at most {self.key_radius:g}")
        positions = torch.arange(self.seen, self.seen + len(keys))
        self.denominator.extend(positions, keys, values[:, :0])
        self._value_dim = values.shape[1]
        norms = values.double().norm(dim=-1)
        # frexp: norm = mantissa * 2^exponent with the mantissa in [1/2, 1).
        index = torch.frexp(norms).exponent.long() - 1
        for i in index[norms > 0].unique().tolist():
            mine = ((index == i) & (norms > 0)).nonzero().squeeze(-1)
            if i not in self.buckets:
                salt = 2 * (i + 5000) + 1
                self.buckets[i] = self._structure(2.0 ** (i + 1), use_values=True, salt=salt)
            self.buckets[i].extend(positions[mine], keys[mine], values[mine])
        self.largest = max(self.largest, float(norms.max()))
        self.seen += len(keys)
        least = self.eps / (2 * self.n) * self.largest
        least *= math.exp(-(self.key_radius**2) / keys.shape[1] ** 0.5)
        self.buckets = {i: kept for i, kept in self.buckets.items() if 2.0 ** (i + 1) > least}

    def query(self, query: Tensor, scaling: float) -> Tensor:
        """The estimate of attention over the stream so far (line 13), in log space: [e].

        NaN where the denominator holds nothing, so that there is no estimate: with halve=smaller
        all entries of a batch may go.

        Args:
            query: [d]; logits are scaling * q.k.
        """
        below = self.denominator.stored()[0] @ query * scaling + self.denominator.entries()[1]
        if not len(below):
            return torch.full((self._value_dim,), math.nan)
        top, out = below.max(), torch.zeros(self._value_dim)
        for bucket in self.buckets.values():
            keys, values = bucket.stored()
            above = keys @ query * scaling + bucket.entries()[1]
            out += torch.exp(above - top) @ values
        return out / torch.exp(below - top).sum()

    def widen(self, key_radius: float) -> None:
        """Let keys be as long as `key_radius` from here on; a walk needs the radius of its own batch."""
        self.key_radius = max(self.key_radius, key_radius)
        for one in (self.denominator, *self.buckets.values()):
            one.key_radius = self.key_radius

    def numerator_entries(self) -> tuple[Tensor, Tensor]:
        """Positions and log-weights of all buckets, as `MergeAndReduce.entries`."""
        parts = [self.buckets[i].entries() for i in sorted(self.buckets)]
        if not parts:
            return torch.zeros(0, dtype=torch.int64), torch.zeros(0)
        positions, weights = zip(*parts, strict=True)
        return torch.cat(positions), torch.cat(weights)

    def denominator_entries(self) -> tuple[Tensor, Tensor]:
        """Positions and log-weights of the structure with v = 1."""
        return self.denominator.entries()


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
    streams: ClassVar[bool] = True

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
        start, stop = budget.sink, n - budget.window
        keys = layer.keys[:, :, start:stop].float().cpu()
        values = layer.values[:, :, start:stop].float().cpu()
        t = self.t or largest_batch(values, budget.middle_kept(n))
        radius = float(keys.double().norm(dim=-1).max())
        seeds = torch.randint(2**40, (heads,), generator=generator).tolist()
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {"numerator": [], "denominator": []}
        for row in range(batch):
            for head in range(heads):
                stream = BalanceKVStream(
                    n=stop - start,
                    t=t,
                    key_radius=radius,
                    eps=self.eps,
                    delta=self.delta,
                    constant=self.constant,
                    on_fail=self.on_fail,
                    halve=self.halve,
                    seed=seeds[head],
                )
                stream.extend(keys[row, head], values[row, head])
                parts["numerator"].append(stream.numerator_entries())
                parts["denominator"].append(stream.denominator_entries())
        exact = torch.cat([torch.arange(start), torch.arange(stop, n)])
        padded = {name: _padded(entries, start, (batch, heads)) for name, entries in parts.items()}
        device = layer.keys.device
        numerator, denominator = (
            (padded[name][0].to(device), padded[name][1].to(device))
            for name in ("numerator", "denominator")
        )
        return combine(layer, numerator, denominator, exact)

    def layer_stream(
        self, keys: Tensor, values: Tensor, *, room: int, tokens: int, generator: torch.Generator
    ) -> BalanceKVLayer:
        """Algorithm 1 as it reads: t null is `batch_of_stream`, r the norm of the longest key so far.

        Raises:
            KVError: no t fits.
        """
        t = self.t or batch_of_stream(values, room, tokens)
        if not t:
            raise KVError(
                f"balancekv_streaming.t is null and a stream of {tokens} tokens has {room} entries; "
                "allowed: a larger budget.size"
            )
        seeds = torch.randint(2**40, (len(keys),), generator=generator).tolist()
        options = {"eps": self.eps, "delta": self.delta, "constant": self.constant}
        return BalanceKVLayer(
            [
                BalanceKVStream(
                    n=tokens,
                    t=t,
                    key_radius=0.0,
                    on_fail=self.on_fail,
                    halve=self.halve,
                    seed=seed,
                    **options,
                )
                for seed in seeds
            ]
        )


def largest_batch(values: Tensor, room: int) -> int:
    """The largest even t with which every head's structures surely hold at most `room` entries.

    After m tokens a structure holds m mod t entries at level 0 and at most t / 2 at each level whose
    bit is set in the number of batches, floor(m / t).

    Raises:
        KVError: there is none.
    """
    norms = values.double().norm(dim=-1).flatten(0, 1)
    index = torch.frexp(norms).exponent.long()
    sizes = [
        [len(head), *head[norm > 0].unique(return_counts=True)[1].tolist()]
        for head, norm in zip(index, norms, strict=True)
    ]
    for t in range(2 * (room // 2), 1, -2):
        bounds = (sum(m % t + t // 2 * (m // t).bit_count() for m in head) for head in sizes)
        if all(bound <= room for bound in bounds):
            return t
    raise KVError(
        f"balancekv_streaming.t is null; allowed: a budget with room for its levels (the rate leaves "
        f"{room} entries, fewer than any t >= 2 needs)"
    )


def _padded(
    parts: list[tuple[Tensor, Tensor]], start: int, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Entries of all heads side by side: prompt positions (-1 pads) and log-weights (-inf)."""
    width = max(len(positions) for positions, _ in parts)
    positions = torch.full((len(parts), width), -1)
    weights = torch.full((len(parts), width), -math.inf)
    for row, (mine, log_weights) in enumerate(parts):
        positions[row, : len(mine)] = mine + start
        weights[row, : len(mine)] = log_weights
    return positions.view(*shape, width), weights.view(*shape, width)
