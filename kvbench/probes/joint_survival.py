"""Whether neighbouring entries survive a compression together, against chance."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Distinct, Several, Share
from kvbench.kv import CompressedKV, LayerKV
from kvbench.probes.base import Layers, Tokens
from kvbench.probes.layers import LayerProbe, Look
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError


def survivors(held: CompressedKV, n: int) -> Tensor:
    """Which of n prompt positions are held, [kv_heads, n] bool; one held twice counts once."""
    positions = held.positions[0] + 1  # -1 is no position
    kept = torch.zeros(positions.shape[0], n + 1, dtype=torch.bool, device=positions.device)
    return kept.scatter_(-1, positions, True)[:, 1:]


def joint_survival(kept: Tensor, first: Tensor, distance: int) -> float | None:
    """P(both survive) / (P(first survives) P(second survives)) over pairs; 1 by independence.

    The probabilities are shares of the pairs, for each head by itself; the ratio is the mean over
    heads, without those that keep no first or no second entry at all.

    Args:
        kept: [kv_heads, n] bool.
        first: [pairs] positions; the other of each pair is `distance` further on.

    Returns:
        None where no head has a ratio.
    """
    one, other = kept[:, first].double(), kept[:, first + distance].double()
    both, chance = (one * other).mean(-1), one.mean(-1) * other.mean(-1)
    ratios = (both / chance)[chance > 0]
    return float(ratios.mean()) if len(ratios) else None


def number_pairs(texts: Sequence[str], distance: int) -> list[int]:
    """Tokens that begin a number which goes on for `distance` tokens or more.

    Args:
        texts: each token's text; a number is a run of tokens of digits.
    """
    digits = [text.strip().isdecimal() for text in texts]
    return [
        i
        for i in range(len(texts) - distance)
        if not (i and digits[i - 1]) and all(digits[i : i + distance + 1])
    ]


@dataclass(frozen=True, kw_only=True)
class JointSurvival(LayerProbe):
    """Probability that two neighbouring entries both survive, over what independence would give.

    A fact of several tokens can be copied only where all of them are held. Sampling without
    replacement keeps k of m entries independently but for (k - 1) m / (k (m - 1)), a little below
    1. Balancing gives entries that are alike opposite signs, and neighbours often are: below 1 they
    are separated. Above 1 entries are kept in runs (SnapKV, which pools its scores), or some
    stretches of the prompt more than others. Pairs lie in the middle; the methods see the whole
    layer.

    Attributes:
        exact: tokens kept exactly at both ends, which are not counted.
        distances: between the two entries of a pair.
        among: all (any two entries of the middle) | numbers (a number's first token and one of those
            that follow in it; needs prompts).
    """

    name: ClassVar[str] = "joint_survival"
    score_unit: ClassVar[str] = "joint survival over chance"

    rates: Several[Share] = (0.25,)
    layers: Layers = (1, 2, 3, 4)
    exact: Tokens = 32
    distances: Distinct[Tokens] = tuple(range(1, 17))
    among: Literal["all", "numbers"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.among == "numbers" and self.prompts is None:
            raise TaskError("task.among is 'numbers' and task.prompts is null; allowed: all")

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        meta = super().meta()
        if self.among == "numbers":
            meta["score_unit"] = "joint survival in numbers over chance"
        layers = [] if self.prompts is None else ["layer"]
        return {**meta, "breakdown": ["distance", *layers]}

    def endings(self, session: Session) -> Sequence[str]:
        """See `LayerSource.endings`."""
        draws = super().endings(session)
        return [f"{draw}/distance{distance}" for draw in draws for distance in self.distances]

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """Every method at every layer, rate and seed; one record per distance."""
        texts = None
        if self.among == "numbers":
            texts = [session.encoder.decode([token]) for token in unit.payload]

        def show(kv: LayerKV) -> tuple[LayerKV, Look]:
            def look(held: CompressedKV) -> Mapping[str, Any]:
                kept = survivors(held, kv.n)
                return {"ratios": [self._ratio(kept, d, texts) for d in self.distances]}

            return kv, look

        for place, label, fields in self.draws(unit, methods, session, show):
            ratios = fields.pop("ratios", [None] * len(self.distances))
            for distance, ratio in zip(self.distances, ratios, strict=True):
                record_id = f"{self.record_id(unit.id, *place)}/distance{distance}"
                yield Outcome(label, record_id, {**fields, "distance": distance, "score": ratio})

    def _ratio(self, kept: Tensor, distance: int, texts: Sequence[str] | None) -> float | None:
        """The ratio over the pairs of the middle."""
        n = kept.shape[1]
        pairs: Sequence[int] = range(n) if texts is None else number_pairs(texts, distance)
        last = n - self.exact - distance
        inside = [i for i in pairs if self.exact <= i < last]
        if not inside:
            return None
        return joint_survival(kept, torch.tensor(inside, device=kept.device), distance)
