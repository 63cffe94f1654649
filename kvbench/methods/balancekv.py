"""BalanceKV: the middle halved again and again by a self-balancing walk over blocks of tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import NonNegative, Several
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.philox import to_device
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods import _draws
from kvbench.methods._select import positions_between, side_by_side, with_sink_and_window
from kvbench.methods.base import Method

PADDING = -1
"""Position of an entry that exists only because another head holds more."""

Block = Annotated[int, Ge(2)]
"""Entries of a block of a walk."""


@dataclass(frozen=True, kw_only=True)
class BalanceKV(Method):
    """Keeps sink, window, and of the middle the subset that self-balancing walks leave.

    A halving cuts the entries into blocks, signs them with `kernels.balanced_walk` and keeps half;
    a kept entry stands for up to twice as many as before. At rate 2^-T there are T halvings; at other
    rates the last one covers only the first so many survivors, those of the earliest tokens when
    `order=position`, as bring the count to round(rate * middle), and leaves the others alone.

    Departures from the authors' code, which the preset `released` takes back except the first two:
    a row whose exponentials could overflow float32 is scaled by its largest one (theirs turns to NaN
    and the sign to -1); probabilities are compared without clipping, which changes nothing; blocks
    of 256 as in the paper (theirs 128); survivors go on by position; keys are centred over a
    block's real rows only; every weight acts on numerator and denominator alike.

    Args:
        block_size: entries per block; one integer, or one per halving.
        gamma: how strongly a walk is pulled back to balance, >= 0; one number, or one per halving.
            At 4 and usual norms nearly every choice is forced; 0 is a fair coin.
        centre: mean | released (a short block counts as padded with zero rows) | none.
        selection: cut (scan the signs of a head in order until one class has floor(n / 2) members;
            that class is dropped up to there, the other kept with weight doubled, what follows kept
            as it is) | algorithm2 (the smaller class of each block, weight doubled; the +1 class on
            a tie). `algorithm2` leaves at most half, not exactly half, and not the same number in
            every head: the result is padded with entries of log-weight -inf.
        order: position | released (doubled entries first, then the others): the order in which the
            next halving finds the survivors. The same after a cut: all doubled entries are before it.
        weights: entry (log w on each entry) | released (values scaled by w / 2^T, log 2^T on all
            compressed entries, for T halvings; with a partial last one the mean factor
            middle / kept stands for 2^T) | values (the scaled values alone, without log 2^T: an entry
            counts w / 2^T against 1 in the normaliser, as WildCat's authors ran BalanceKV) | none.
        halvings: partial (the last one spends the budget exactly) | whole (ceil(log2(1 / rate)) of all
            entries; holds less than the budget between powers of two).
        normalise: rescale each head's weights to sum to the number of tokens they stand for.
        value_offset: added to <v_i, v_j> in the kernel.
        use_values: False drops the factor of the values from the kernel.
        temperature: of the exponent <k_i, k_j> / sqrt(d).
        beta: subtracted from the exponent.
    """

    paper: ClassVar[str] = "arXiv 2502.07861, Appendix B (the form of its experiments)"
    version: ClassVar[int] = 2
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {
            "block_size": 128,
            "order": "released",
            "centre": "released",
            "weights": "released",
        },
        "wildcat": {
            "order": "released",
            "centre": "released",
            "weights": "values",
            "halvings": "whole",
        },
    }

    block_size: Block | Several[Block] = 256
    gamma: NonNegative | Several[NonNegative] = 4.0
    centre: Literal["mean", "released", "none"] = "mean"
    selection: Literal["cut", "algorithm2"] = "cut"
    order: Literal["position", "released"] = "position"
    weights: Literal["entry", "released", "values", "none"] = "entry"
    halvings: Literal["partial", "whole"] = "partial"
    normalise: bool = False
    value_offset: NonNegative = 0.025
    use_values: bool = True
    temperature: NonNegative = 1.0
    beta: float = 0.0

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, the survivors of the middle by position, window.

        The draws of a halving are one tensor [kv_heads, blocks, block_size], shared by the rows of a
        batch, in float32.
        """
        heads, n = layer.keys.shape[1:3]
        middle = budget.middle(n)
        plan = plan_halvings(middle, budget.rate_of(n), budget.middle_kept(n))
        if self.halvings == "whole":
            plan = [(middle >> t, middle >> t) for t in range(len(plan))]
        sizes = per_halving(self, "block_size", len(plan))
        draws = [
            _draws.uniforms(generator, layer.keys.device, heads, math.ceil(size / b), b)
            for (_, size), b in zip(plan, sizes, strict=True)
        ]
        order = positions_between(layer, budget.sink, n - budget.window)
        chosen, weights = self.select(layer.keys, layer.values, draws, plan=plan, order=order)
        return self._weighted(layer, budget, chosen, weights, plan)

    def select(
        self,
        keys: Tensor,
        values: Tensor | None,
        uniforms: Sequence[Tensor],
        kept: int | None = None,
        *,
        plan: Sequence[tuple[int, int]] | None = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The choice as a pure function of the draws.

        Args:
            keys, values: [batch, kv_heads, n, dim]; values None as with use_values=False.
            uniforms: one tensor [batch, kv_heads, blocks, block_size] in [0, 1) per halving (a batch
                dimension of 1 is shared); blocks = ceil(entries to halve / block_size).
            kept: entries to keep, when the last halving is to be partial; None halves everything
                len(uniforms) times.
            plan: in place of `kept`, see `plan_halvings`.
            order: [batch, kv_heads, c] int64, the entries among which to choose, in that order; None:
                all of them.

        Returns:
            positions: [batch, kv_heads, c] int64, of `order`: ascending, or in the released code's
                order with order=released; -1 pads heads that kept fewer.
            weights: [batch, kv_heads, c] float32, powers of two (before `normalise`); 0 on padding.
        """
        if order is None:
            order = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        if plan is None:
            plan = [(order.shape[2] >> t, order.shape[2] >> t) for t in range(len(uniforms))]
            if plan and kept is not None:
                left = plan[-1][0]
                if not left <= 2 * kept <= 2 * left:
                    raise KVError(f"kept is {kept}; allowed: from half of {left} to all of it")
                plan[-1] = (left, 2 * (left - kept))
        if not self.use_values:
            values = None
        sizes = per_halving(self, "block_size", len(plan))
        for step, ((_, size), b) in enumerate(zip(plan, sizes, strict=True)):
            shape, given = (*keys.shape[:2], math.ceil(size / b), b), tuple(uniforms[step].shape)
            if given not in (shape, (1, *shape[1:])):
                raise KVError(f"uniforms[{step}] has shape {given}; allowed: {shape} or 1 in front")
        draws = [to_device(draw, keys.device).expand(len(keys), -1, -1, -1) for draw in uniforms]
        if self.selection == "cut":
            return self._halvings(keys, values, draws, plan, order)
        # Heads come to hold different numbers: one after the other, then padded.
        parts = []
        for row, head in itertools.product(*map(range, keys.shape[:2])):
            at = slice(row, row + 1), slice(head, head + 1)
            of_head = None if values is None else values[at]
            positions, weights = self._halvings(
                keys[at], of_head, [draw[at] for draw in draws], plan, order[at]
            )
            parts.append((positions[0, 0], weights[0, 0]))
        positions, weights = side_by_side(parts, 0.0)
        return positions.unflatten(0, (len(keys), -1)), weights.unflatten(0, (len(keys), -1))

    def _halvings(
        self,
        keys: Tensor,
        values: Tensor | None,
        uniforms: Sequence[Tensor],
        plan: Sequence[tuple[int, int]],
        order: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`select` of heads that hold the same number; with algorithm2, of one head."""
        weights = torch.ones(1, device=keys.device).expand(order.shape)
        sizes = per_halving(self, "block_size", len(plan))
        gammas = per_halving(self, "gamma", len(plan))
        for step, ((left, size), b, gamma) in enumerate(zip(plan, sizes, gammas, strict=True)):
            count = order.shape[2]  # less than `left` where earlier halvings left less than half
            size = count if size == left else min(count, max(0, 2 * (count - left + size // 2)))
            if size == 0:
                continue
            blocks = math.ceil(size / b)
            shape, counts = (*order.shape[:2], blocks, b), None
            if size < blocks * b:
                starts = torch.arange(blocks, device=keys.device) * b
                counts = (size - starts).clamp(0, b).expand(shape[:3])
            weighs, beyond = step and values is not None, (0, blocks * b - size)  # padded with 0
            positive = balanced_walk(
                keys,
                values,
                F.pad(order[:, :, :size], beyond).view(shape),
                uniforms[step][:, :, :blocks],
                gamma=float(gamma),
                offset=self.value_offset,
                temperature=self.temperature,
                beta=self.beta,
                counts=counts,
                weights=F.pad(weights[:, :, :size], beyond).view(shape) if weighs else None,
                centre=self.centre,
            ).view(*order.shape[:2], -1)[:, :, :size]
            cut = halve if self.selection == "cut" else partial(smaller_classes, b=b)
            order, weights = cut(positive, order, weights)
        return order, weights

    def _weighted(
        self,
        layer: LayerKV,
        budget: Budget,
        chosen: Tensor,
        weights: Tensor,
        plan: Sequence[tuple[int, int]],
    ) -> CompressedKV:
        """Entries and log-weights from the choice, as prompt positions."""
        padding = chosen == PADDING
        middle, count = budget.middle(layer.n), chosen.shape[2]
        if self.order == "released":
            chosen, by_position = chosen.sort(-1)
            weights, padding = weights.gather(-1, by_position), padding.gather(-1, by_position)
        if self.normalise:
            weights = weights * (middle / weights.sum(-1, keepdim=True).clamp(min=1.0))
        place = chosen.masked_fill(padding, 0)
        kept = gather_entries(layer, with_sink_and_window(layer, budget, place))
        inside = slice(budget.sink, budget.sink + count)
        log_weights = torch.zeros(kept.positions.shape, device=kept.positions.device)
        if self.weights == "entry":
            log_weights[:, :, inside] = weights.log()
        elif self.weights in ("released", "values"):
            uneven = bool(plan) and plan[-1][0] != plan[-1][1]
            mean = middle / max(count, 1) if uneven else 2.0 ** len(plan)
            if self.weights == "released":
                log_weights[:, :, inside] = math.log(mean)
            values = kept.values.clone()
            values[:, :, inside] *= (weights / mean).to(values.dtype).unsqueeze(-1)
            kept = replace(kept, values=values)
        # The cut leaves every head the same number: no need to ask the device for padding.
        if (plan and self.selection == "cut") or not padding.any():
            plain = self.weights in ("none", "values")
            return replace(kept, log_weights=None if plain else log_weights)
        log_weights[:, :, inside].masked_fill_(padding, -math.inf)
        positions = kept.positions.clone()
        positions[:, :, inside].masked_fill_(padding, PADDING)
        return replace(kept, positions=positions, log_weights=log_weights)


def plan_halvings(middle: int, rate: float, kept: int) -> list[tuple[int, int]]:
    """(entries before, entries halved) of each halving that brings `middle` entries to the budget.

    At rate 2^-T: T halvings of everything that is left. Between 2^-(T+1) and 2^-T: T such halvings,
    then one of as many entries as leaves `kept` in all.
    """
    mantissa, exponent = math.frexp(rate)
    whole = 1 - exponent if mantissa == 0.5 else -exponent
    plan, left = [], middle
    for _ in range(whole):
        plan.append((left, left))
        left //= 2
    if mantissa != 0.5 and left > kept:
        plan.append((left, 2 * (left - kept)))
    return plan


def smaller_classes(
    positive: Tensor, order: Tensor, weights: Tensor, b: int
) -> tuple[Tensor, Tensor]:
    """Halve the first m entries of a head, in blocks of b: the smaller sign class of each block stays,
    with its weight doubled (Algorithm 2; the +1 class on a tie). What follows is kept as it is.

    Args:
        positive: [1, 1, m] bool, the signs. order, weights: [1, 1, c], c >= m.
    """
    m = positive.shape[2]
    block = torch.arange(m, device=positive.device) // b
    sums = torch.bincount(block, positive[0, 0].float())
    few = 2 * sums <= torch.bincount(block)
    keep = (positive[0, 0] == few[block]).nonzero()[:, 0]
    return (
        torch.cat([order[:, :, keep], order[:, :, m:]], dim=-1),
        torch.cat([2 * weights[:, :, keep], weights[:, :, m:]], dim=-1),
    )


def per_halving(method: BalanceKV, option: str, count: int) -> tuple[Any, ...]:
    """An option's value for each of `count` halvings.

    Raises:
        KVError: a list that is too short.
    """
    value = getattr(method, option)
    if isinstance(value, int | float):
        return (value,) * count
    if len(value) < count:
        name = type(method).__module__.rpartition(".")[2]
        raise KVError(f"{name}.{option} is {list(value)}; allowed: {count} values at this rate")
    return tuple(value[:count])
