"""The streaming algorithms of BalanceKV and SubGen over one layer of a stream (`LayerStream`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvbench.kernels.online_clusters import BLOCK

if TYPE_CHECKING:
    from kvbench.methods.balancekv_streaming import BalanceKVStream
    from kvbench.methods.subgen_streaming import SubGenStream


class BalanceKVLayer:
    """Algorithm 1 of BalanceKV for every KV head. A walk is given the radius of the longest key so far,
    since nobody knows that of the whole stream."""

    def __init__(self, heads: Sequence[BalanceKVStream]) -> None:
        self.heads = heads

    @property
    def entries(self) -> int:
        """See `LayerStream`; a token that a bucket and the denominator hold counts twice."""
        return max(
            len(head.numerator_entries()[0]) + len(head.denominator_entries()[0])
            for head in self.heads
        )

    @property
    def nbytes(self) -> int:
        """See `LayerStream`."""
        return sum(
            part.nbytes
            for head in self.heads
            for one in (head.denominator, *head.buckets.values())
            for part in one.stored()
        )

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """See `LayerStream`."""
        for head, key, value in zip(
            self.heads, keys.float().cpu(), values.float().cpu(), strict=True
        ):
            head.widen(float(key.double().norm(dim=-1).max()))
            head.extend(key, value)

    def numerator(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerStream`."""
        stored = []
        for head in self.heads:
            parts = [head.buckets[i].stored() for i in sorted(head.buckets)]
            keys, values = zip(*parts, strict=True)  # the largest value's bucket is never erased
            stored.append((torch.cat(keys), torch.cat(values), head.numerator_entries()[1]))
        keys, values, weights = zip(*stored, strict=True)
        return _side_by_side(keys), _side_by_side(values), _side_by_side(weights, -math.inf)

    def denominator(self) -> tuple[Tensor, Tensor]:
        """See `LayerStream`."""
        keys = [head.denominator.stored()[0] for head in self.heads]
        weights = [head.denominator_entries()[1] for head in self.heads]
        return _side_by_side(keys), _side_by_side(weights, -math.inf)


def _side_by_side(parts: Sequence[Tensor], padding: float = 0.0) -> Tensor:
    return pad_sequence(list(parts), batch_first=True, padding_value=padding)


def batch_of_stream(values: Tensor, room: int, tokens: int) -> int:
    """The largest even t with which the structures of a stream of so many tokens hold at most `room`
    entries, if the norms of values go on as in the first ones [kv_heads, m, e]; one bucket more than
    these fill is counted, for a twentieth of the tokens.

    After m tokens level 0 of a structure has at most t - 1 entries, and t / 2 each level whose bit is
    set in the number of batches.
    """
    norms = values.double().norm(dim=-1)
    index = torch.frexp(norms).exponent
    shares = [
        [1.0, 0.05, *(head.unique(return_counts=True)[1] / len(head)).tolist()] for head in index
    ]

    def of_structure(t: int, read: float) -> int:
        levels = int(math.log2(read // t + 1))  # bits that a number of batches has at most
        return min(t - 1, math.ceil(read)) + t // 2 * levels

    def most(t: int) -> int:
        return max(sum(of_structure(t, share * tokens) for share in head) for head in shares)

    fitting = (t for t in range(2 * (room // 2), 1, -2) if most(t) <= room)
    return next(fitting, 0)


class SubGenLayer:
    """Algorithm 1 of SubGen for all KV heads of a layer.

    Args:
        generator: of the draws.
    """

    def __init__(self, stream: SubGenStream, generator: torch.Generator) -> None:
        self.stream, self.generator = stream, generator

    @property
    def _clusters(self) -> int:
        return int(self.stream.found.clusters.max())

    @property
    def entries(self) -> int:
        """See `LayerStream`: of each cluster its representative and samples, and the numerator's."""
        return self._clusters * (self.stream.t + 1) + self.stream.s

    @property
    def nbytes(self) -> int:
        """See `LayerStream`."""
        stream, m = self.stream, self._clusters
        parts = (stream.found.points[:, :m], stream.slot_keys[:, :m], stream.counts[:, :m])
        return sum(part.nbytes for part in (*parts, stream.sampled_keys, stream.sampled_values))

    def extend(self, keys: Tensor, values: Tensor) -> None:
        """See `LayerStream`."""
        drawn = len(keys), self.stream.t + self.stream.s
        for key, value in zip(keys.split(BLOCK, 1), values.split(BLOCK, 1), strict=True):
            draws = torch.rand(key.shape[1], *drawn, generator=self.generator)
            self.stream.extend(key.cpu(), value.cpu(), draws)

    def numerator(self) -> tuple[Tensor, Tensor, Tensor]:
        """See `LayerStream`."""
        return self.stream.sampled_keys, self.stream.sampled_values, self.stream.numerator()[1]

    def denominator(self) -> tuple[Tensor, Tensor]:
        """See `LayerStream`."""
        return self.stream.slot_keys.flatten(1, 2), self.stream.denominator()[1]
