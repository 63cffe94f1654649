"""Shares by rank: what falls off as a power of the rank (H2O, arXiv 2306.14048)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from kvbench.errors.options import Distinct
from kvbench.kv import KVError
from kvbench.probes.base import Tokens, scaling_figure
from kvbench.probes.layers import LayerSource
from kvbench.run.plan import Outcome
from kvbench.run.session import Session


@dataclass(frozen=True, kw_only=True)
class Ranked(LayerSource):
    """The share that the key or neuron of each rank has, and the power law through it.

    Attributes:
        ranks: from 1, the one with the largest share.
    """

    breakdown: ClassVar[tuple[str, ...]] = ("rank",)
    field: ClassVar[str]
    """The record field of the share."""
    labels: ClassVar[tuple[str, str]]
    """What the figure's axes are called."""

    ranks: Distinct[Tokens] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        meta = super().meta()
        law = scaling_figure("rank", self.field, *self.labels, meta["unit"], finding="power_law")
        return {**meta, "figures": [law]}

    def endings(self, session: Session) -> Sequence[str]:
        """See `LayerSource.endings`."""
        return [f"/rank{rank}" for rank in self.ranks]

    def check_count(self, count: int, what: str) -> None:
        """Refuse fewer keys or neurons than ranks; `what` says which have `count`.

        Raises:
            KVError: there are fewer.
        """
        if count < max(self.ranks):
            raise KVError(f"task.ranks has {max(self.ranks)} and {what}; allowed: as many at most")

    def outcomes(
        self, label: str, shares: Tensor, prompt: str, layer: int, **fields: Any
    ) -> Iterator[Outcome]:
        """A record for each rank of the shares of one layer, the largest first."""
        for rank in self.ranks:
            share = float(shares[rank - 1])
            where = {"prompt": prompt, "layer": layer, "dataset": f"layer {layer}", "rank": rank}
            yield Outcome(
                label,
                f"{prompt}/layer{layer}/rank{rank}",
                {**where, **fields, self.field: share, "score": share},
            )
