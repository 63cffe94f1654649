"""Attention matching of one block of entries: fewer of its keys are chosen, and log-weights and values
are solved for with which they answer reference queries as the whole block does.

`Matching` has the options and the steps: `Matching.select` chooses the keys, `Matching.solve` fits their
log-weights and values.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, NonNegative, Odd, Whole, check_options
from kvbench.kernels.logits import softcapped
from kvbench.kv import KVError
from kvbench.methods._least_squares import (
    extend_gram,
    gram_of,
    largest_eigenvalue,
    least_squares,
)

LEAST_WEIGHT = 1e-12
"""The least weight of an entry where no lower bound is set for `omp`; also the weight with which `omp`
counts an entry between its choice and the next fit."""

BOUNDS = {"highest": (-3.0, 3.0), "omp": (math.log(LEAST_WEIGHT), 7.0)}
"""For each value of `Matching.keys` the least and the largest log-weight, where no options set them."""

REFINEMENTS = 3
"""How many times `omp` may drop entries of too small a weight and choose others."""

ROWS = 256
"""How many rows of exponentials are processed at a time: few enough for a CPU's cache."""


class Block(NamedTuple):
    """The entries of one KV head that are to be replaced by fewer, and what m reference queries see of
    them.

    Attributes:
        mass: [n, m] float32, exp(logit - the query's largest logit).
        total: [m] float32, the softmax's partition function: the sum of `mass` over the entries, and
            `sinks`.
        values: [n, dim] float32.
        sinks: [m] float32 or 0, the mass of the query heads' attention sinks (`LayerKV.sinks`).
    """

    mass: Tensor
    total: Tensor
    values: Tensor
    sinks: Tensor | float = 0.0

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        scaling: float,
        softcap: float | None = None,
        log_weights: Tensor | None = None,
        sinks: Tensor | None = None,
    ) -> Block:
        """Compute the block of some entries.

        Args:
            keys, values: [n, dim].
            queries: [m, dim], the reference queries.
            scaling, softcap: as in `LayerKV`.
            log_weights: [n], the log-weights that the entries have already; None where all are 0.
            sinks: [m], the logit of each query's attention sink; None without.
        """
        logits = softcapped(keys.float() @ (queries.float() * scaling).mT, softcap)
        if log_weights is not None:
            logits = logits + log_weights[:, None]
        top = logits.amax(0)
        if sinks is not None:
            top = torch.maximum(top, sinks)
        total = torch.zeros_like(top)
        for rows in logits.split(ROWS):
            # In place: `logits` becomes the mass.
            total += rows.sub_(top).exp_().sum(0)
        if sinks is None:
            return cls(logits, total, values.float())
        sink_mass = (sinks - top).exp()
        return cls(logits, total + sink_mass, values.float(), sink_mass)


class Selection(NamedTuple):
    """The entries of a block whose keys are kept.

    Attributes:
        places: [t] int64, their places in the block, in the order in which they were chosen.
        weights: [t] float32, exp(log-weight) where the choice has determined them, else None.
    """

    places: Tensor
    weights: Tensor | None


class Solution(NamedTuple):
    """The solved log_weights [t] and values [t, dim] of t chosen entries of a block, both float32."""

    log_weights: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How a block is matched; the options of `AttentionMatching` that `match` takes, with the released
    code's defaults.

    Args:
        keys: which keys are kept: ``highest``, those of the highest attention within the block; or
            ``omp``, orthogonal matching pursuit of the partition function: one key after the other, the
            one whose mass has the largest product with what the keys so far leave of it.
        score: rms | max | mean: for `highest`, how a key's attention is combined over the queries.
        pooling: null | avgpool | maxpool: how these scores are pooled along `kernel_size` positions.
        choose: how many keys `omp` takes in one round.
        interval: after how many rounds `omp` fits the weights again.
        drop: the log-weight below which `omp` drops an entry and chooses another; null: it drops none.
        steps: the number of projected gradient steps that follow the least squares of the weights.
        low, high: the least and the largest log-weight; null: those of `keys` in `BOUNDS`.
        log_weights: ``fitted``, so that the mass of the entries is that of the block; or ``zero``.
        values: ``fitted``, so that the output of the entries is that of the block; or ``kept``.
        ridge: the penalty of the values' least squares, as a share of the normal matrix's spectral norm.
        queries_per_entry: the least number of reference queries for each entry that is solved for. The
            entries are solved for in groups of neighbours that are small enough for it; a group stands
            for the part of the block from its first entry to the first entry of the next group. With
            few queries for each entry, least squares reproduce the output for these queries and for no
            others. 0 solves for all entries at once.
    """

    keys: Literal["highest", "omp"] = "highest"
    score: Literal["rms", "max", "mean"] = "rms"
    pooling: Literal["avgpool", "maxpool"] | None = None
    kernel_size: Odd = 7
    choose: Count = 1
    interval: Count = 1
    drop: float | None = None
    steps: Whole = 0
    low: float | None = None
    high: float | None = None
    log_weights: Literal["fitted", "zero"] = "fitted"
    values: Literal["fitted", "kept"] = "fitted"
    ridge: NonNegative = 0.0
    queries_per_entry: Whole = 0

    def __post_init__(self) -> None:
        check_options(self, "match.", KVError)

    def select(self, block: Block, entries: int) -> Selection:
        if self.keys == "omp":
            return self.pursue(block, entries)
        return Selection(best_first(self.key_scores(block), entries), None)

    def key_scores(self, block: Block) -> Tensor:
        """The attention of the queries to each key within the block, combined as `score` and `pooling`
        say: [n]."""
        per_query = 1 / block.total
        pieces = block.mass.split(ROWS)
        if self.score == "max":
            scores = torch.cat([(rows * per_query).amax(1) for rows in pieces])
        elif self.score == "mean":
            scores = block.mass @ per_query / len(per_query)
        else:
            squares = torch.cat([rows.square() @ per_query.square() for rows in pieces])
            scores = (squares / len(per_query)).sqrt()
        if self.pooling is None:
            return scores
        pool = F.max_pool1d if self.pooling == "maxpool" else F.avg_pool1d
        return pool(scores[None], self.kernel_size, stride=1, padding=self.kernel_size // 2)[0]

    def weight_bounds(self) -> tuple[float, float]:
        """The least and the largest weight, exp(log-weight)."""
        low, high = BOUNDS[self.keys]
        return (
            math.exp(low if self.low is None else self.low),
            math.exp(high if self.high is None else self.high),
        )

    def fit_weights(self, columns: Tensor, total: Tensor, gram: Tensor | None = None) -> Tensor:
        """Fit weights [t] with which columns [m, t] sum to the total [m]: least squares, clamped to the
        bounds, then `steps` projected gradient steps.

        Args:
            gram: `gram_of` the columns, if the caller has computed it.
        """
        least, most = self.weight_bounds()
        gram = gram_of(columns) if gram is None else gram
        weights = least_squares(columns, total[:, None], gram=gram)[:, 0].clamp(least, most)
        if self.steps:
            step = 1 / largest_eigenvalue(gram)
            product = columns.mT @ total
            for _ in range(self.steps):
                weights = (weights - step * (gram @ weights - product)).clamp(least, most)
        return weights

    def pursue(self, block: Block, entries: int) -> Selection:
        """Choose entries by orthogonal matching pursuit of the partition function.

        Entries whose log-weight is below `drop` are replaced by others, at most `REFINEMENTS` times.
        """
        pursuit = Pursuit(self, block)
        pursuit.fill(entries)
        if self.drop is None:
            if self.interval > 1:
                pursuit.fit()  # the last rounds may have chosen entries without a fit
            return pursuit.selection
        for _ in range(REFINEMENTS):
            pursuit.fit()
            if not pursuit.drop_below(self.drop):
                break
            pursuit.fill(entries)
        return pursuit.selection

    def solve(self, block: Block, selection: Selection) -> Solution:
        places, weights = selection
        if not len(places):
            return Solution(block.total[:0], block.values[:0])
        groups = 1
        if self.queries_per_entry:
            at_once = max(1, block.mass.shape[1] // self.queries_per_entry)
            groups = math.ceil(len(places) / at_once)
        order = torch.arange(len(places), device=places.device)
        if groups > 1:  # a part of the block is what lies between two places
            order = places.argsort()
            places = places[order]
            weights = None if weights is None else weights[order]
        edges = [group * len(places) // groups for group in range(groups + 1)]
        solved: list[Solution] = []
        start = 0
        for first, last in itertools.pairwise(edges):
            stop = len(block.mass) if last == len(places) else int(places[last])
            mass = block.mass[start:stop]
            part = Block(mass, mass.sum(0), block.values[start:stop])
            known_weights = None if weights is None else weights[first:last]
            in_part = Selection(places[first:last] - start, known_weights)
            solved.append(self.solve_part(part, block.total, in_part))
            start = stop
        log_weights, values = zip(*solved, strict=True)
        as_selected = order.argsort()
        return Solution(torch.cat(log_weights)[as_selected], torch.cat(values)[as_selected])

    def solve_part(self, part: Block, block_total: Tensor, selection: Selection) -> Solution:
        """`solve` for a part of a block.

        A query counts in the least squares of the values by the share of its attention that the part
        receives.

        Args:
            block_total: [m], the partition function of the whole block.
            selection: places in the part.
        """
        places, weights = selection
        rows = part.mass[places]
        if self.log_weights == "zero":
            weights = torch.ones_like(rows[:, 0])
        elif weights is None:
            weights = self.fit_weights(rows.mT, part.total)
        if self.values == "kept":
            return Solution(weights.log(), part.values[places])
        rows.mul_(weights[:, None])
        rows.mul_(part.total / block_total / rows.sum(0).clamp(min=1e-30))
        output = (part.values.mT @ part.mass).mT / block_total[:, None]
        return Solution(weights.log(), least_squares(rows.mT, output, self.ridge))


@dataclass
class Pursuit:
    """The state of `Matching.pursue`.

    Attributes:
        places: [t] int64, the entries chosen so far, in their order.
        weights: [t] float32, their weights by the last fit.
        columns: [m, t], their mass.
        gram: [t, t], `gram_of` the columns.
        reached: [m], the part of the partition function that the weighted columns make up.
        may_choose: [n] bool, False for entries that have been chosen, also for those that have been
            dropped since.
        rounds: how many times entries were chosen or dropped.
        fitted: whether the weights have been fitted since entries were dropped last.
    """

    options: Matching
    block: Block
    places: Tensor = field(init=False)
    weights: Tensor = field(init=False)
    columns: Tensor = field(init=False)
    gram: Tensor = field(init=False)
    reached: Tensor = field(init=False)
    may_choose: Tensor = field(init=False)
    rounds: int = 0
    fitted: bool = False

    def __post_init__(self) -> None:
        mass, total = self.block.mass, self.block.total
        self.places = torch.empty(0, dtype=torch.int64, device=mass.device)
        self.weights = total.new_empty(0)
        self.columns = mass[self.places].mT
        self.gram = total.new_empty(0, 0)
        self.reached = torch.zeros_like(total)
        self.may_choose = torch.ones(len(mass), dtype=torch.bool, device=mass.device)

    @property
    def selection(self) -> Selection:
        return Selection(self.places, self.weights)

    def fill(self, entries: int) -> None:
        while len(self.places) < entries:
            missing = entries - len(self.places)
            count = min(self.options.choose, missing, int(self.may_choose.sum()))
            if not count:
                # Only dropped entries are left, so these may be chosen again.
                self.may_choose[:] = True
                self.may_choose[self.places] = False
                continue
            self._choose(count)

    def _choose(self, count: int) -> None:
        mass, total = self.block.mass, self.block.total
        product = (mass @ (total - self.reached)).masked_fill(~self.may_choose, -torch.inf)
        chosen = best_first(product, count)
        self.may_choose[chosen] = False
        self.places = torch.cat([self.places, chosen])
        self.columns = mass[self.places].mT
        self.gram = extend_gram(self.gram, self.columns)
        if not self.fitted or self.rounds % self.options.interval == 0:
            self.fit()
            self.fitted = True
        else:
            least, _ = self.options.weight_bounds()
            self.weights = torch.cat([self.weights, self.weights.new_full((count,), least)])
        self.reached = self.columns @ self.weights
        self.rounds += 1

    def fit(self) -> None:
        self.weights = self.options.fit_weights(self.columns, self.block.total, self.gram)

    def drop_below(self, log_weight: float) -> bool:
        """Drop the entries whose log-weight is below `log_weight`; returns whether there were any."""
        stays = self.weights.log() >= log_weight
        if bool(stays.all()):
            return False
        self.places, self.columns = self.places[stays], self.columns[:, stays]
        self.gram = self.gram[stays][:, stays]
        self.reached = torch.zeros_like(self.block.total)
        if len(self.places):
            refitted = self.options.fit_weights(self.columns, self.block.total, self.gram)
            self.reached = self.columns @ refitted
        self.weights = self.weights[stays]
        self.fitted = False
        self.rounds += 1
        return True


def best_first(scores: Tensor, count: int) -> Tensor:
    """The places of the `count` highest of scores [n], the highest first: [count] int64. Of equal scores
    the one at the lower place comes first."""
    return scores.argsort(descending=True, stable=True)[:count]
