"""WildCat: a weighted coreset of every bin of the middle, by randomly pivoted Cholesky."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
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
"""The value of tau^2 Q / K for ``temperature: constant``, where tau is the temperature and Q and K are
the largest query and key norm. Its origin is not known."""
LAMBERT = 6.383202050647408
"""The divisor 2 sqrt(1 + exp(W(2 / e^2) + 2)) of ``temperature: lambert``."""


class Bins(NamedTuple):
    """The bins into which the middle is cut.

    Attributes:
        edges: the place in the middle at which each bin begins, and the end of the last bin. Tokens
            after the last bin join the window.
        entries: how many entries each bin is to keep.
    """

    edges: tuple[int, ...]
    entries: tuple[int, ...]

    @property
    def tokens(self) -> list[int]:
        return [end - start for start, end in itertools.pairwise(self.edges)]


class Pivots(NamedTuple):
    """The keys that every bin keeps, with their weights; tensors [heads, bins, r].

    Attributes:
        places: int64, the place of the key in the middle.
        denominators: float32, the entry's factor in the softmax's denominator.
        shifts: float32, the entry's log-weight, which is 0 unless its exponents are large.
        present: bool, False where a bin has fewer than r pivots.
    """

    places: Tensor
    denominators: Tensor
    shifts: Tensor
    present: Tensor


@dataclass(frozen=True, kw_only=True)
class WildCat(Method):
    """Keeps sink and window, and of every bin of the middle a few keys (pivots) with weighted sums of
    the bin's values.

    Keys are centred by their mean over the whole prompt. A bin's pivots are drawn by randomly pivoted
    Cholesky of the exponential kernel, and the Nystroem weights W express every key of the bin through
    the pivots. The entry of a pivot holds the pivot's key, the weighted sum W v of the bin's values,
    and the sum of the weights W as its factor in the softmax's denominator, which may be negative.
    Attention over the entries is clamped to the range of the prompt's values
    (`CompressedKV.denominators`).

    Known weakness: W interpolates. For keys outside the span of the pivots the denominators of a bin
    sum to less than its number of tokens, so the middle counts too little against sink and window.
    `normalise` rescales a bin's sums to its number of tokens (an ablation).

    Departures from the authors' code (github.com/microsoft/wildcat), which was read and whose choices
    the golden values repeat:

    - Everything is computed in float32; the authors' code takes norms and weights in the model's dtype.
    - A triangular solve takes the place of a matrix inverse.
    - Large exponents become log-weights; in the authors' code they overflow.
    - A bin of few distinct keys keeps fewer entries; in the authors' code it turns to NaN.
    - The kept keys are those of the prompt, bit for bit.

    The kernel does not know of a bound on logits (softcap); models that have one apply it to the logits
    of the kept keys.

    Args:
        bin_size: about how many entries a bin keeps; 0 makes the middle one bin (the paper's algorithm,
            O(n r^2)).
        bins: ``even`` cuts the middle into bins of nearly equal size and spends the capacity exactly,
            except where a bin has fewer tokens than its share; entries are ordered by position.
            ``released`` makes floor(M (1 - ratio)) // r bins of equal size of the M middle tokens,
            where each bin keeps r = bin_size entries; the tokens that are left join the window, and the
            entries of a bin are in the order in which they were drawn.
        temperature: lambert | constant, the two rules in the released files.
        query_norm: the largest query norm that is assumed; None for the bin's largest centred key norm.
        normalise: whether the weights of a bin are rescaled to sum to its number of tokens.
    """

    paper: ClassVar[str] = "arXiv 2602.10056; github.com/microsoft/wildcat"
    version: ClassVar[int] = 2
    keeps_entries: ClassVar[bool] = False
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
        middle, kept = budget.middle(n), budget.middle_kept(n)
        if self.bins == "even":
            count = max(1, kept // self.bin_size) if self.bin_size else 1
            edges = tuple(b * middle // count for b in range(count + 1))
            entries = tuple((b + 1) * kept // count - b * kept // count for b in range(count))
            return Bins(edges, entries)
        rate = budget.rate_of(n)
        # The authors' code has the ratio 1 - rate, and rounds the same product in floating point.
        target = math.floor(middle * (1 - (1 - rate)))
        if target < 1:
            raise KVError(
                f"wildcat.bins is released and rate {rate:g} of {middle} tokens keeps none; "
                "allowed: a larger budget, or bins=even"
            )
        size = min(self.bin_size, target) if self.bin_size else target
        count = target // size
        edges = tuple(b * (middle // count) for b in range(count + 1))
        return Bins(edges, (size,) * count)

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        if self.bins == "even" or n <= budget.capacity(n):
            return [budget.capacity(n)] * num_layers
        bins = self.cut(budget, n)
        # As released, tokens after the last bin join the window, which may exceed the budget.
        joins_window = budget.middle(n) - bins.edges[-1]
        return [budget.sink + budget.window + joins_window + sum(bins.entries)] * num_layers

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Keep sink, the pivots of every bin, and window.

        The draws are one float32 tensor [r, kv_heads, bins, largest bin], row t for the t-th pivot of
        every bin. The rows of a batch share them.
        """
        bins = self.cut(budget, layer.n)
        shape = (max(bins.entries), layer.keys.shape[1], len(bins.entries), max(bins.tokens))
        uniforms = _draws.uniforms(generator, layer.keys.device, *shape)
        return self.select(layer, budget, uniforms[0][:, None])

    def select(self, layer: LayerKV, budget: Budget, uniforms: Tensor) -> CompressedKV:
        """Compress the layer, as a pure function of the draws.

        Args:
            uniforms: [r, batch, kv_heads, bins, largest bin] in [0, 1). All rows share a batch dimension
                of 1.
        """
        bins = self.cut(budget, layer.n)
        start, stop = budget.sink, budget.sink + bins.edges[-1]
        sink = positions_between(layer, 0, start)
        window = positions_between(layer, stop, layer.n)
        if not sum(bins.entries):
            return gather_entries(layer, torch.cat([sink, window], dim=-1))
        pivots, values, value_range = self._coresets(layer, bins, start, uniforms)
        if not bool(pivots.present.all()):
            pivots, values = _without_unused_room(pivots, values, start, sum(bins.entries))
        positions = torch.cat(
            [sink, torch.where(pivots.present, pivots.places + start, 0), window], dim=-1
        )
        keys = rows_at(layer.keys, positions)
        inside = slice(start, start + pivots.places.shape[2])
        denominators = torch.ones(positions.shape, device=keys.device)
        denominators[:, :, inside] = pivots.denominators
        log_weights = None
        if bool((pivots.shifts > 0).any() | ~pivots.present.all()):
            log_weights = torch.zeros(positions.shape, device=keys.device)
            log_weights[:, :, inside] = torch.where(pivots.present, pivots.shifts, -math.inf)
            positions[:, :, inside].masked_fill_(~pivots.present, -1)
        return CompressedKV(
            keys,
            values,
            log_weights,
            positions,
            denominators=denominators,
            value_range=value_range,
        )

    def _coresets(
        self, layer: LayerKV, bins: Bins, start: int, uniforms: Tensor
    ) -> tuple[Pivots, Tensor, tuple[Tensor, Tensor]]:
        """The coresets of all heads.

        Args:
            start: the prompt position of the middle's first token.
            uniforms: see `select`.

        Returns:
            the pivots, [batch, kv_heads, bins * r]; the values of all entries, sink and window included,
            [batch, kv_heads, entries, dim]; the least and the largest value of each channel.
        """
        batch, heads = layer.keys.shape[:2]
        device = layer.keys.device
        draws = to_device(uniforms, device).expand(-1, batch, -1, -1, -1).flatten(1, 2)
        keys, values = layer.keys.flatten(0, 1), layer.values.flatten(0, 1)
        stop = start + bins.edges[-1]
        end = start + len(bins.entries) * max(bins.entries)
        mixed = values.new_empty(batch * heads, end + layer.n - stop, values.shape[2])
        mixed[:, :start] = values[:, :start]
        mixed[:, end:] = values[:, stop:]
        # A CPU takes one head at a time, so that its tensors stay in the processor's cache; a GPU takes
        # all heads at once.
        together = batch * heads if device.type == "cuda" else 1
        parts, least, largest = [], [], []
        for head in range(0, batch * heads, together):
            part = slice(head, head + together)
            least.append(values[part].amin(1))
            largest.append(values[part].amax(1))
            mean_key = keys[part].mean(1, keepdim=True, dtype=torch.float32)
            pivots, numerators = self.coreset(
                in_bins(keys[part, start:stop], bins, mean_key),
                in_bins(values[part, start:stop], bins, None),
                draws[:, part],
                bins,
                layer,
            )
            mixed[part, start:end] = numerators.flatten(1, 2)
            parts.append(pivots)
        shape = (batch, heads)
        columns = (torch.cat(column).flatten(1, 2) for column in zip(*parts, strict=True))
        all_pivots = Pivots(*(column.unflatten(0, shape) for column in columns))
        value_range = torch.cat(least).unflatten(0, shape), torch.cat(largest).unflatten(0, shape)
        return all_pivots, mixed.unflatten(0, shape), value_range

    def coreset(
        self, keys: Tensor, values: Tensor, uniforms: Tensor, bins: Bins, layer: LayerKV
    ) -> tuple[Pivots, Tensor]:
        """The coresets of the bins of some heads.

        Args:
            keys, values: [heads, bins, largest bin, dim] float32, keys centred. Places beyond a bin's
                end hold any finite numbers.
            uniforms: [r, heads, bins, largest bin].

        Returns:
            the pivots, and their weighted sums of values [heads, bins, r, dim].
        """
        heads, count, largest = keys.shape[:3]
        steps, device = uniforms.shape[0], keys.device
        starts = torch.tensor(bins.edges[:-1], device=device).repeat(heads)
        sizes = torch.tensor(bins.tokens, device=device).repeat(heads)
        wanted = torch.tensor(bins.entries, device=device).repeat(heads)
        values = values.flatten(0, 1)
        kernel = Gaussian(keys.flatten(0, 1))
        real = None
        if min(bins.tokens) < largest:
            real = torch.arange(largest, device=device) < sizes[:, None]
            kernel.norms.masked_fill_(~real, 0.0)
        tau2 = self.tau2(kernel.norms.amax(-1).sqrt(), sizes, layer.scaling)
        kernel.factors = (layer.scaling / tau2).float()
        uneven = min(bins.entries) < steps
        places, factor, present = pivoted_cholesky(
            kernel, uniforms.flatten(1, 2), real, wanted if uneven else None
        )
        weights = nystroem(places, factor, present)
        if self.bins == "even":
            by_position = torch.where(present, places, largest).argsort(-1)
            places, present = places.gather(1, by_position), present.gather(1, by_position)
            weights = weights.gather(1, by_position[..., None].expand_as(weights))
        numerators, denominators, shifts = weighted_sums(
            kernel, places, weights, values, layer.values.dtype
        )
        if any(e >= size for e, size in zip(bins.entries, bins.tokens, strict=True)):
            # A bin that may keep all its tokens keeps them exactly.
            step = torch.arange(steps, device=device)
            exact = (wanted >= sizes)[:, None]
            places = torch.where(exact, step, places)
            present = torch.where(exact, step < sizes[:, None], present)
            shifts = shifts * ~exact
            denominators = torch.where(exact, 1.0, denominators)
            numerators = torch.where(exact[..., None], values[:, :steps], numerators)
        if self.normalise:
            total = (denominators * shifts.exp() * present).sum(-1, keepdim=True)
            correction = sizes[:, None] / total
            denominators = denominators * correction
            numerators = numerators * correction[..., None]
        pivots = (places + starts[:, None], denominators, shifts, present)
        by_head = Pivots(*(part.unflatten(0, (heads, count)) for part in pivots))
        return by_head, numerators.unflatten(0, (heads, count))

    def tau2(self, key_norm: Tensor, sizes: Tensor, scaling: float) -> Tensor:
        """The squared temperature of every bin, [bins] float64.

        Args:
            key_norm: [bins], the largest centred key norm.
            sizes: [bins], the number of tokens.
        """
        largest = key_norm.double().clamp(min=1e-30)
        query = largest if self.query_norm is None else torch.full_like(largest, self.query_norm)
        if self.temperature == "constant":
            return CONSTANT * largest / query
        b = sizes.double().log() / (scaling * query * largest) + 2
        return largest / query * b / (2 * lambert_w(b / LAMBERT))


def in_bins(rows: Tensor, bins: Bins, mean: Tensor | None) -> Tensor:
    """Rows of the middle by bin, [heads, bins, largest bin, dim] float32. A shorter bin is filled up
    with its first row.

    Args:
        rows: [heads, middle, dim].
        mean: [heads, 1, dim], subtracted from all rows; None for 0.
    """
    starts = torch.tensor(bins.edges[:-1], device=rows.device)[:, None]
    sizes = torch.tensor(bins.tokens, device=rows.device)[:, None]
    within = torch.arange(max(bins.tokens), device=rows.device)
    places = starts + within * (within < sizes)
    if places.numel() != rows.shape[1]:
        rows = rows.index_select(1, places.flatten())
    rows = rows.float() if mean is None else rows - mean
    return rows.unflatten(1, places.shape)


def weighted_sums(
    kernel: Gaussian, pivots: Tensor, weights: Tensor, values: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of values and of ones under the weights of the exponential kernel.

    `weights` belong to the Gaussian kernel. Those of the exponential kernel are larger by the factor
    exp((h_i - h_p) / 2) for token i and pivot p, where h is the exponent c |k|^2. The factor is split at
    the middle of the exponents' range, so that neither half overflows; what still exceeds the largest
    number of `dtype` becomes a log-weight.

    Args:
        pivots: [bins, r]. weights: [bins, r, n]. values: [bins, n, dim].

    Returns:
        numerators W v [bins, r, dim], denominators W 1 [bins, r], and log-weights [bins, r].
    """
    exponents = kernel.factors[:, None] * kernel.norms
    top = exponents.amax(-1, keepdim=True)
    centre = (top + exponents.amin(-1, keepdim=True)) / 2
    own = exponents.gather(-1, pivots)
    limit = math.log(torch.finfo(dtype).max) / 2
    shifts = ((top - own) / 2 - limit).clamp(min=0)
    scale = ((centre - own) / 2 - shifts).exp()
    weights *= ((exponents - centre) / 2).exp_()[:, None]
    denominators = weights.sum(-1) * scale
    numerators = (weights @ values) * scale[..., None]
    return numerators, denominators, shifts


def _without_unused_room(
    pivots: Pivots, values: Tensor, start: int, total: int
) -> tuple[Pivots, Tensor]:
    """Move the pivots that are present to the front of each head, in their order, and drop the columns
    that no head uses.

    Args:
        pivots: [batch, kv_heads, c].
        values: [batch, kv_heads, entries, dim]; those of the pivots begin at `start`.
        total: the largest number of pivots that a head may keep.
    """
    most = min(total, int(pivots.present.sum(-1).max()))
    order = (~pivots.present).to(torch.int8).argsort(dim=-1, stable=True)[..., :most]
    end = start + pivots.present.shape[-1]
    middle = rows_at(values[:, :, start:end], order)
    values = torch.cat([values[:, :, :start], middle, values[:, :, end:]], 2)
    return Pivots(*(column.gather(-1, order) for column in pivots)), values
