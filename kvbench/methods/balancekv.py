"""BalanceKV: self-balancing walks over blocks of tokens halve the middle again and again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

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
"""The position of an entry that exists only because another head holds more entries."""

BlockSize = Annotated[int, Ge(2)]
"""The number of entries in a block of the walk."""


class Halving(NamedTuple):
    """One step of a plan of halvings.

    Attributes:
        entries: how many entries there are before the step.
        halved: how many of them, from the first, the step halves; it leaves the others as they are.
    """

    entries: int
    halved: int


@dataclass(frozen=True, kw_only=True)
class BalanceKV(Method):
    """Keeps sink, window, and the subset of the middle that survives self-balancing walks.

    A halving cuts the entries into blocks, gives each entry a sign by `kernels.balanced_walk` and keeps
    half of them; the weight of a kept entry doubles or stays. At rate 2^-T there are T halvings of all
    entries. At other rates the last halving covers only as many of the first survivors as bring the
    count to round(rate * middle); with `order=position` these are the earliest tokens.

    Departures from the authors' code. The preset `released` undoes all but the first two:

    - A row whose exponentials could overflow float32 is scaled by its largest exponential; in the
      authors' code it becomes NaN and its sign -1.
    - Probabilities are compared without clipping, which does not change the result.
    - Blocks have 256 entries, as in the paper; in the authors' code 128.
    - Survivors enter the next halving by position.
    - The mean key of a block is taken over the block's real rows, not over its padding.
    - A weight acts on numerator and denominator alike.

    Args:
        block_size: entries per block; one integer, or one per halving.
        gamma: how strongly a walk is pulled back to balance, >= 0; one number, or one per halving. At 4
            and usual norms nearly every sign is determined by the keys; at 0 every sign is a fair coin.
            4 is the authors' code's; the paper's Algorithm 2 has 1 / (2 c R^2), c = 30 log(n / delta).
        centre: how the keys of a block are centred: ``mean`` subtracts their mean; ``released``
            subtracts their sum divided by the block size, as if a short block were padded with zero
            rows; ``none``.
        selection: ``cut`` scans the signs of a head in order up to the place where one sign has
            floor(n / 2) entries; up to that place it drops this sign and doubles the weights of the
            other, and it keeps the entries after that place. ``algorithm2`` keeps the rarer sign of
            each block with doubled weights (+1 on a tie). It leaves at most half, and heads may differ
            in how many; the result is then padded with entries of log-weight -inf.
        order: the order in which survivors enter the next halving: ``position``, or ``released`` for
            doubled entries first. After a cut the two agree, since all doubled entries lie before it.
        weights: how the weight w of an entry after T halvings enters attention. ``entry``: as log-weight
            log w. ``released``: values are multiplied by w / 2^T, and every entry of the middle has
            log-weight log 2^T; with a partial last halving middle / kept takes the place of 2^T.
            ``values``: the multiplied values without log-weights, so that every entry counts 1 in the
            denominator, as WildCat's authors ran BalanceKV. ``none``: not at all.
        halvings: ``partial``: the last halving spends the budget exactly. ``whole``: ceil(log2(1 /
            rate)) halvings of all entries, which keep less than the budget unless the rate is a power
            of two.
        normalise: whether each head's weights are rescaled to sum to the number of middle tokens.
        value_offset: the number added to <v_i, v_j> in the walk's kernel: .025 in the authors' code, 0
            in the paper.
        use_values: False drops the factor <v_i, v_j> + value_offset from the kernel.
        temperature: the factor on the exponent <k_i, k_j> / sqrt(d).
        beta: the number subtracted from the exponent.
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

    block_size: BlockSize | Several[BlockSize] = 256
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
        """Keep sink, the survivors of the middle by position, and window.

        The draws of a halving are one float32 tensor [kv_heads, blocks, block_size], which the rows of a
        batch share.
        """
        heads, n = layer.keys.shape[1:3]
        middle = budget.middle(n)
        plan = plan_halvings(middle, budget.rate_of(n), budget.middle_kept(n))
        if self.halvings == "whole":
            plan = whole_halvings(middle, len(plan))
        sizes = per_halving(self, "block_size", len(plan))
        draws = [
            _draws.uniforms(
                generator, layer.keys.device, heads, math.ceil(halving.halved / size), size
            )
            for halving, size in zip(plan, sizes, strict=True)
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
        plan: Sequence[Halving] | None = None,
        order: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose the entries to keep, as a pure function of the draws.

        Args:
            keys, values: [batch, kv_heads, n, dim]; without values the kernel lacks their factor.
            uniforms: for each halving a tensor [batch, kv_heads, blocks, block_size] in [0, 1), where
                blocks = ceil(entries to halve / block_size). All rows share a batch dimension of 1.
            kept: the number of entries to keep, which a partial last halving meets; None halves all
                entries len(uniforms) times. Not read where `plan` is given.
            plan: the halvings (`plan_halvings`).
            order: [batch, kv_heads, c] int64, the entries to choose from, in the order in which they
                enter the first halving; None for all entries by position.

        Returns:
            positions: [batch, kv_heads, c] int64, elements of `order` in its order, or with
                order=released in the released code's order; -1 pads heads that kept fewer.
            weights: [batch, kv_heads, c] float32, powers of two; 0 on padding.
        """
        if order is None:
            order = torch.arange(keys.shape[2], device=keys.device).expand(keys.shape[:3])
        if plan is None:
            plan = whole_halvings(order.shape[2], len(uniforms))
            if plan and kept is not None:
                left = plan[-1].entries
                if not left <= 2 * kept <= 2 * left:
                    raise KVError(f"kept is {kept}; allowed: from half of {left} to all of it")
                plan[-1] = Halving(left, 2 * (left - kept))
        if not self.use_values:
            values = None
        self._check_draws(uniforms, plan, keys)
        draws = [to_device(draw, keys.device).expand(len(keys), -1, -1, -1) for draw in uniforms]
        if self.selection == "cut":
            return self._halve(keys, values, draws, plan, order)
        # With algorithm2 heads come to hold different numbers of entries, so each is halved alone.
        heads = []
        for row, head in itertools.product(range(keys.shape[0]), range(keys.shape[1])):
            one = slice(row, row + 1), slice(head, head + 1)
            head_values = None if values is None else values[one]
            head_draws = [draw[one] for draw in draws]
            positions, weights = self._halve(keys[one], head_values, head_draws, plan, order[one])
            heads.append((positions[0, 0], weights[0, 0]))
        positions, weights = side_by_side(heads, 0.0)
        return positions.unflatten(0, (len(keys), -1)), weights.unflatten(0, (len(keys), -1))

    def _check_draws(
        self, uniforms: Sequence[Tensor], plan: Sequence[Halving], keys: Tensor
    ) -> None:
        sizes = per_halving(self, "block_size", len(plan))
        for step, (halving, size) in enumerate(zip(plan, sizes, strict=True)):
            wanted = (*keys.shape[:2], math.ceil(halving.halved / size), size)
            shape = tuple(uniforms[step].shape)
            if shape not in (wanted, (1, *wanted[1:])):
                raise KVError(
                    f"uniforms[{step}] has shape {shape}; allowed: {wanted} or 1 in front"
                )

    def _halve(
        self,
        keys: Tensor,
        values: Tensor | None,
        uniforms: Sequence[Tensor],
        plan: Sequence[Halving],
        order: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """`select` for heads that hold the same number of entries; with algorithm2, for a single
        head."""
        weights = torch.ones(1, device=keys.device).expand(order.shape)
        sizes = per_halving(self, "block_size", len(plan))
        gammas = per_halving(self, "gamma", len(plan))
        steps = zip(plan, sizes, gammas, uniforms, strict=True)
        for step, (halving, block_size, gamma, draws) in enumerate(steps):
            m = entries_to_halve(halving, order.shape[2])
            if m == 0:
                continue
            # Before the first halving all weights are 1.
            entry_weights = weights[:, :, :m] if step else None
            positive = self._signs(
                keys, values, order[:, :, :m], entry_weights, draws, float(gamma)
            )
            if self.selection == "cut":
                order, weights = halve(positive, order, weights)
            else:
                order, weights = smaller_classes(positive, order, weights, block_size)
        return order, weights

    def _signs(
        self,
        keys: Tensor,
        values: Tensor | None,
        entries: Tensor,
        weights: Tensor | None,
        uniforms: Tensor,
        gamma: float,
    ) -> Tensor:
        """The signs of one walk, [batch, kv_heads, m] bool, True for +1.

        Args:
            entries: [batch, kv_heads, m], which rows of `keys` and `values` are signed; consecutive ones
                form a block.
            weights: [batch, kv_heads, m], the factors on the values; None for 1.
            uniforms: [batch, kv_heads, blocks or more, block_size].
        """
        batch, heads, m = entries.shape
        block_size = uniforms.shape[3]
        blocks = math.ceil(m / block_size)
        in_blocks = (batch, heads, blocks, block_size)
        beyond = blocks * block_size - m
        counts = None
        if beyond:
            starts = torch.arange(blocks, device=keys.device) * block_size
            counts = (m - starts).clamp(0, block_size).expand(batch, heads, blocks)
        factors = None
        if weights is not None and values is not None:
            factors = F.pad(weights, (0, beyond)).view(in_blocks)
        positive = balanced_walk(
            keys,
            values,
            F.pad(entries, (0, beyond)).view(in_blocks),
            uniforms[:, :, :blocks],
            gamma=gamma,
            offset=self.value_offset,
            temperature=self.temperature,
            beta=self.beta,
            counts=counts,
            weights=factors,
            centre=self.centre,
        )
        return positive.view(batch, heads, -1)[:, :, :m]

    def _weighted(
        self,
        layer: LayerKV,
        budget: Budget,
        chosen: Tensor,
        weights: Tensor,
        plan: Sequence[Halving],
    ) -> CompressedKV:
        """The compressed cache of sink, chosen entries and window, weighted as the option `weights`
        says.

        Args:
            chosen, weights: [batch, kv_heads, c], prompt positions and weights as `select` returns them.
            plan: the halvings that led to them.
        """
        padding = chosen == PADDING
        middle, count = budget.middle(layer.n), chosen.shape[2]
        if self.order == "released":
            chosen, by_position = chosen.sort(-1)
            weights = weights.gather(-1, by_position)
            padding = padding.gather(-1, by_position)
        if self.normalise:
            weights = weights * (middle / weights.sum(-1, keepdim=True).clamp(min=1.0))
        positions = with_sink_and_window(layer, budget, chosen.masked_fill(padding, 0))
        compressed = gather_entries(layer, positions)
        inside = slice(budget.sink, budget.sink + count)
        log_weights = torch.zeros(positions.shape, device=positions.device)
        if self.weights == "entry":
            log_weights[:, :, inside] = weights.log()
        elif self.weights in ("released", "values"):
            partial = bool(plan) and plan[-1].entries != plan[-1].halved
            mean = middle / max(count, 1) if partial else 2.0 ** len(plan)
            if self.weights == "released":
                log_weights[:, :, inside] = math.log(mean)
            values = compressed.values.clone()
            values[:, :, inside] *= (weights / mean).to(values.dtype).unsqueeze(-1)
            compressed = replace(compressed, values=values)
        # A cut leaves the same number in every head, so the device need not be asked for padding.
        if (plan and self.selection == "cut") or not padding.any():
            unweighted = self.weights in ("none", "values")
            return replace(compressed, log_weights=None if unweighted else log_weights)
        log_weights[:, :, inside].masked_fill_(padding, -math.inf)
        positions = positions.clone()
        positions[:, :, inside].masked_fill_(padding, PADDING)
        return replace(compressed, positions=positions, log_weights=log_weights)


def plan_halvings(middle: int, rate: float, kept: int) -> list[Halving]:
    """Plan the halvings that bring `middle` entries to the budget.

    At rate 2^-T there are T halvings of all entries. At a rate between 2^-(T+1) and 2^-T there are T
    such halvings and then one of as many entries as leaves `kept`.
    """
    if not rate:  # sink and window are all that a share of the prompt grants
        return whole_halvings(middle, middle.bit_length())
    mantissa, exponent = math.frexp(rate)
    power_of_two = mantissa == 0.5
    plan = whole_halvings(middle, 1 - exponent if power_of_two else -exponent)
    left = middle >> len(plan)
    if not power_of_two and left > kept:
        plan.append(Halving(left, 2 * (left - kept)))
    return plan


def whole_halvings(entries: int, count: int) -> list[Halving]:
    return [Halving(entries >> step, entries >> step) for step in range(count)]


def entries_to_halve(halving: Halving, entries: int) -> int:
    """How many of the first entries a head halves. With algorithm2 it may hold fewer `entries` than
    planned; then the halving covers only as many as the planned number of survivors requires."""
    if halving.halved == halving.entries:
        return entries
    excess = entries - (halving.entries - halving.halved // 2)
    return min(entries, max(0, 2 * excess))


def smaller_classes(
    positive: Tensor, order: Tensor, weights: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """Keep the rarer sign of each block with its weights doubled, +1 on a tie (Algorithm 2), and all
    entries without a sign.

    Args:
        positive: [1, 1, m] bool, the signs of one head's first m entries.
        order: [1, 1, c] int64, the head's entries, c >= m.
        weights: [1, 1, c], the weights of these entries.

    Returns:
        order and weights of the entries that are kept.
    """
    m = positive.shape[2]
    block = torch.arange(m, device=positive.device) // block_size
    positives = torch.bincount(block, positive[0, 0].float())
    rarer_sign = 2 * positives <= torch.bincount(block)
    keep = (positive[0, 0] == rarer_sign[block]).nonzero()[:, 0]
    return (
        torch.cat([order[:, :, keep], order[:, :, m:]], dim=-1),
        torch.cat([2 * weights[:, :, keep], weights[:, :, m:]], dim=-1),
    )


def per_halving(method: BalanceKV, option: str, count: int) -> tuple[Any, ...]:
    """The values of an option for `count` halvings, where the option is one value or a list."""
    value = getattr(method, option)
    if isinstance(value, int | float):
        return (value,) * count
    if len(value) < count:
        raise KVError(
            f"{method.method_name()}.{option} is {list(value)}; allowed: {count} values at this rate"
        )
    return tuple(value[:count])
