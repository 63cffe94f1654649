"""WildCat: a weighted coreset of the middle, bin by bin, by randomly pivoted Cholesky."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from kvbench.errors.options import Positive, Whole
from kvbench.kernels.philox import to_device
from kvbench.kernels.pivoted_cholesky import Gaussian, lambert_w, nystroem, pivoted_cholesky
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries, rows_at
from kvbench.methods import _draws
from kvbench.methods._select import positions_between
from kvbench.methods.base import Method

CONSTANT = 3.94582
"""tau^2 Q / K of one of the two released temperatures; where the number comes from is not known."""
LAMBERT = 6.383202050647408
"""Divisor in the other: 2 sqrt(1 + exp(W(2 / e^2) + 2))."""


class Bins(NamedTuple):
    """How the middle is cut.

    Attributes:
        edges: of each bin within the middle, one more than bins; what follows the last joins the window.
        entries: wanted of each bin.
    """

    edges: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        """Tokens of each bin."""
        return [b - a for a, b in itertools.pairwise(self.edges)]


class Coresets(NamedTuple):
    """Entries of every bin; tensors [heads, bins, r, ...].

    Attributes:
        pivots: place of the chosen key in the middle.
        numerators: W v, [..., dim]. denominators: W 1. shifts: log-weights that large exponents leave.
        found: False where a bin has fewer entries.
    """

    pivots: Tensor
    numerators: Tensor
    denominators: Tensor
    shifts: Tensor
    found: Tensor


@dataclass(frozen=True, kw_only=True)
class WildCat(Method):
    """Keeps sink and window, and of every bin of the middle a coreset of its keys with general weights.

    Keys are centred by their mean over the whole prompt; a bin's pivots are drawn by randomly pivoted
    Cholesky of the exponential kernel; every other key of the bin is expressed through them (Nystroem).
    An entry holds a key of the prompt as it was, the same mixture W v of all values of its bin, and the
    sum of its weights as its share of the denominator, which may be negative: attention over these
    entries is N / D with clamping to the range of the prompt's values (`CompressedKV.denominators`).

    Known weakness: W interpolates, so on keys that the coreset does not span a bin's denominators sum to
    less than its tokens, and the middle is under-counted against sink and window. `normalise` rescales
    both sides of a bin to its tokens (an ablation).

    Departures from the authors' code (github.com/microsoft/wildcat), which was read and whose choices
    the golden values repeat: float32 throughout (theirs takes norms and weights in the model's dtype);
    a triangular solve in place of an inverse; large exponents are moved into log_weights instead of
    overflowing; a bin of few distinct keys keeps fewer entries (theirs turns to NaN); kept keys are
    those of the prompt bit for bit. Models that bound their logits (softcap) bound these after the fact:
    the kernel does not know of it.

    Args:
        bin_size: entries per bin, about; 0 is one bin (the paper's algorithm, O(n r^2)).
        bins: even (bins of nearly equal size that spend the capacity exactly, but for bins with fewer
            tokens than their share; entries by position) |
            released (floor(M (1 - ratio)) // r bins of equal size and r = bin_size entries each; what is
            left of the middle joins the window; entries by bin and choice).
        temperature: lambert | constant; both are in released files.
        query_norm: the largest query norm assumed, null: the largest centred key norm of the bin.
        normalise: rescale weights of a bin to sum to its tokens.
    """

    paper: ClassVar[str] = "arXiv 2602.10056; github.com/microsoft/wildcat"
    version: ClassVar[int] = 2
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "released": {"bins": "released", "temperature": "lambert"},
        "released_constant": {"bins": "released", "temperature": "constant"},
    }

    bin_size: Whole = 12
    bins: Literal["even", "released"] = "even"
    temperature: Literal["lambert", "constant"] = "lambert"
    query_norm: Positive | None = None
    normalise: bool = False

    def cut(self, budget: Budget, n: int) -> Bins:
        """The bins of an n-token prompt's middle, and the entries each gets.

        Raises:
            KVError: bins=released at a budget that grants the middle nothing.
        """
        middle, kept = budget.middle(n), budget.middle_kept(n)
        if self.bins == "even":
            count = max(1, kept // self.bin_size) if self.bin_size else 1
            edges = tuple(b * middle // count for b in range(count + 1))
            sizes = tuple((b + 1) * kept // count - b * kept // count for b in range(count))
            return Bins(edges, sizes)
        rate = budget.rate_of(n)
        target = math.floor(middle * (1 - (1 - rate)))  # their rate is 1 - compression_ratio
        if target < 1:
            raise KVError(
                f"wildcat.bins is released and rate {rate:g} of {middle} tokens keeps none; "
                "allowed: a larger budget, or bins=even"
            )
        size = min(self.bin_size, target) if self.bin_size else target
        count = target // size
        return Bins(tuple(b * (middle // count) for b in range(count + 1)), (size,) * count)

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        """The budget's; with bins=released, of a longer prompt, sink, window, what joins it (which may
        be more than the budget), and the bins' entries."""
        if self.bins == "even" or n <= budget.capacity(n):
            return [budget.capacity(n)] * num_layers
        bins = self.cut(budget, n)
        rest = budget.middle(n) - bins.edges[-1]
        return [budget.sink + budget.window + rest + sum(bins.entries)] * num_layers

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, the coresets, window. Draws: one tensor [r, kv_heads, bins, largest bin] float32, row t
        for the t-th pivot of every bin, shared by the rows of a batch."""
        bins = self.cut(budget, layer.n)
        shape = (max(bins.entries), layer.keys.shape[1], len(bins.entries), max(bins.tokens))
        uniforms = _draws.uniforms(generator, layer.keys.device, *shape)
        return self.select(layer, budget, uniforms[0][:, None])

    def select(self, layer: LayerKV, budget: Budget, uniforms: Tensor) -> CompressedKV:
        """What `compress` holds, as a pure function of the draws.

        Args:
            uniforms: [r, batch, kv_heads, bins, largest bin] in [0, 1); a batch of 1 is shared.
        """
        bins, n = self.cut(budget, layer.n), layer.n
        batch, heads = layer.keys.shape[:2]
        total, device = sum(bins.entries), layer.keys.device
        first, last = budget.sink, budget.sink + bins.edges[-1]
        sink, window = positions_between(layer, 0, first), positions_between(layer, last, n)
        if not total:
            return gather_entries(layer, torch.cat([sink, window], dim=-1))
        starts, sizes = (
            torch.tensor(x, device=device)[:, None] for x in (bins.edges[:-1], bins.tokens)
        )
        within = torch.arange(max(bins.tokens), device=device)
        places = starts + within * (within < sizes)  # beyond a bin's end its first token, again
        drawn = to_device(uniforms, device).expand(-1, batch, -1, -1, -1).flatten(1, 2)
        keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
        room = len(bins.entries) * max(bins.entries)
        mixed_values = values.new_empty(batch * heads, first + room + n - last, values.shape[2])
        mixed_values[:, :first], mixed_values[:, first + room :] = (
            values[:, :first],
            values[:, last:],
        )
        # On a processor one head at a time, whose tensors stay in its cache; on a GPU all at once.
        together = batch * heads if device.type == "cuda" else 1
        parts, ends = [], []
        for start in range(0, batch * heads, together):
            part = slice(start, start + together)
            k, v = keys[part, first:last], values[part, first:last]
            if places.numel() != last - first:  # bins of different sizes
                k, v = (x.index_select(1, places.flatten()) for x in (k, v))
            k = k - keys[part].mean(1, keepdim=True, dtype=torch.float32)
            k, v = (x.unflatten(1, places.shape) for x in (k, v.float()))
            ends.append((values[part].amin(1), values[part].amax(1)))  # faster than both at once
            coresets = self.coreset(k, v, drawn[:, part], bins, layer)
            mixed_values[part, first : first + room] = coresets.numerators.flatten(1, 2)
            parts.append(coresets._replace(numerators=coresets.pivots))  # not held twice
        columns = (torch.cat(column).flatten(1, 2) for column in zip(*parts, strict=True))
        coresets = Coresets(*(column.unflatten(0, (batch, heads)) for column in columns))
        mixed_values = mixed_values.unflatten(0, (batch, heads))
        if not bool(coresets.found.all()):  # bins that differ in entries, or have few keys
            # No room that no head uses; entries that exist first, in the order they have.
            most = min(total, int(coresets.found.sum(-1).max()))
            order = (~coresets.found).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
            coresets = Coresets(*(x.gather(-1, order) for x in coresets))
            mixed = rows_at(mixed_values[:, :, first : first + room], order)
            mixed_values = torch.cat(
                [mixed_values[:, :, :first], mixed, mixed_values[:, :, first + room :]], 2
            )
        is_pivot, chosen = coresets.found, coresets.pivots + first
        positions = torch.cat([sink, torch.where(is_pivot, chosen, 0), window], dim=-1)
        kept = CompressedKV(rows_at(layer.keys, positions), mixed_values, None, positions)
        inside = slice(first, first + is_pivot.shape[2])
        weights = torch.ones(positions.shape, device=device)
        weights[:, :, inside] = coresets.denominators
        log_weights = None
        if bool((coresets.shifts > 0).any() | ~is_pivot.all()):
            log_weights = torch.zeros(positions.shape, device=device)
            log_weights[:, :, inside] = torch.where(is_pivot, coresets.shifts, -math.inf)
            positions[:, :, inside] = torch.where(is_pivot, chosen, -1)
        low, high = (torch.cat(x).unflatten(0, (batch, heads)) for x in zip(*ends, strict=True))
        return replace(kept, log_weights=log_weights, denominators=weights, value_range=(low, high))

    def coreset(
        self, keys: Tensor, values: Tensor, uniforms: Tensor, bins: Bins, layer: LayerKV
    ) -> Coresets:
        """The coresets of the bins of some heads.

        Args:
            keys, values: [heads, bins, largest, dim] float32, keys centred; places beyond a bin's end
                hold anything finite.
            uniforms: [r, heads, bins, largest].
        """
        heads, count, largest = keys.shape[:3]
        sets, steps, device = heads * count, uniforms.shape[0], keys.device
        starts, sizes, wanted = (
            torch.tensor(x, device=device).repeat(heads)
            for x in (bins.edges[:-1], bins.tokens, bins.entries)
        )
        padded = min(bins.tokens) < largest
        real = torch.arange(largest, device=device) < sizes[:, None] if padded else None
        kernel = Gaussian(keys.view(sets, largest, -1))
        if real is not None:
            kernel.norms.masked_fill_(~real, 0.0)
        tau2 = self.tau2(kernel.norms.amax(-1).sqrt(), sizes, layer.scaling)
        kernel.factors = (layer.scaling / tau2).float()
        uneven = min(bins.entries) < steps
        pivots, factor, is_pivot = pivoted_cholesky(
            kernel, uniforms.flatten(1, 2), real, wanted if uneven else None
        )
        weights = nystroem(pivots, factor, is_pivot)
        if self.bins == "even":
            by_position = torch.where(is_pivot, pivots, largest).argsort(-1)
            pivots, is_pivot = pivots.gather(1, by_position), is_pivot.gather(1, by_position)
            weights = weights.gather(1, by_position[..., None].expand_as(weights))
        exponents = kernel.factors[:, None] * kernel.norms
        top, bottom = exponents.amax(-1, keepdim=True), exponents.amin(-1, keepdim=True)
        centre = (top + bottom) / 2  # splits them: neither factor overflows
        own = exponents.gather(-1, pivots)
        limit = math.log(torch.finfo(layer.values.dtype).max) / 2
        shifts = ((top - own) / 2 - limit).clamp(min=0)
        scale = ((centre - own) / 2 - shifts).exp()
        weights *= ((exponents - centre) / 2).exp_()[:, None]
        denominators = weights.sum(-1) * scale
        numerators = (weights @ values.flatten(0, 1)) * scale[..., None]
        if any(e >= size for e, size in zip(bins.entries, bins.tokens, strict=True)):
            whole, step = (wanted >= sizes)[:, None], torch.arange(steps, device=device)
            pivots, is_pivot = (
                torch.where(whole, step, pivots),
                torch.where(whole, step < sizes[:, None], is_pivot),
            )
            shifts, denominators = shifts * ~whole, torch.where(whole, 1.0, denominators)
            numerators = torch.where(whole[..., None], values.flatten(0, 1)[:, :steps], numerators)
        if self.normalise:
            mass = (denominators * shifts.exp() * is_pivot).sum(-1, keepdim=True)
            share = sizes[:, None] / mass
            denominators, numerators = denominators * share, numerators * share[..., None]
        parts = (pivots + starts[:, None], numerators, denominators, shifts, is_pivot)
        return Coresets(*(part.unflatten(0, (heads, count)) for part in parts))

    def tau2(self, key_norm: Tensor, sizes: Tensor, scaling: float) -> Tensor:
        """Squared temperature of every bin, float64, by its largest centred key norm and tokens."""
        largest = key_norm.double().clamp(min=1e-30)
        query = largest if self.query_norm is None else torch.full_like(largest, self.query_norm)
        if self.temperature == "constant":
            return CONSTANT * largest / query
        b = sizes.double().log() / (scaling * query * largest) + 2
        return largest / query * b / (2 * lambert_w(b / LAMBERT))
