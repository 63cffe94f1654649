"""Attention matching: chosen keys, with log-weights and values solved for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, NonNegative, Odd, Whole
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries, rows_at
from kvbench.methods._select import positions_between, with_sink_and_window
from kvbench.methods.base import Method, Repetition, Rescoring
from kvbench.methods.kvzip import FIRST, FOLLOWING, OVERLAP

LEAST_WEIGHT = 1e-12
"""The weight of an entry that `omp` has chosen and not yet fitted; its least weight, too."""

REFINEMENTS = 3
"""How often `omp` looks for weights that are too small."""


class Matched(NamedTuple):
    """Entries of a block: positions in it [heads, t] int64, log_weights [heads, t] and values
    [heads, t, dim], float32."""

    positions: Tensor
    log_weights: Tensor
    values: Tensor


def match(
    keys: Tensor,
    values: Tensor,
    queries: Tensor,
    entries: int,
    scaling: float,
    *,
    chosen_by: str = "highest",
    score: str = "rms",
    pooling: str | None = None,
    kernel_size: int = 7,
    choose: int = 1,
    interval: int = 1,
    drop: float | None = None,
    steps: int = 0,
    low: float | None = -3.0,
    high: float | None = 3.0,
    log_weights: str = "fitted",
    values_are: str = "fitted",
    ridge: float = 0.0,
    softcap: float | None = None,
) -> Matched:
    """A block of entries that answers reference queries as a longer block does.

    Args:
        keys, values: [heads, n, dim]. queries: [heads, m, dim]. entries: t, at most n.
        chosen_by, score, pooling, kernel_size, choose, interval, drop, steps, low, high,
            log_weights, values_are, ridge: see `AttentionMatching`.

    Positions come in the order chosen. Least squares go by the t x t normal equations, in float64 with
    columns of unit norm; where these are singular their diagonal grows by 1e-6.
    """
    matched = []
    for k, v, q in zip(keys.float(), values.float(), queries.float(), strict=True):
        logits = q @ k.mT * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        mass = (logits - logits.amax(-1, keepdim=True)).exp_()
        target = mass.sum(-1)
        if chosen_by == "omp":
            chosen, weights = pursue(
                mass, target, entries, choose, interval, drop, steps, low, high
            )
        else:
            scores = key_scores(mass / target[:, None], score, pooling, kernel_size)
            chosen = scores.topk(entries).indices
            weights = None
        columns = mass[:, chosen]
        if log_weights == "zero":
            weights = torch.ones(len(chosen), device=k.device)
        elif weights is None:
            weights = fit_weights(columns, target, steps, low, high)
        held = v[chosen]
        if values_are == "fitted":
            shares = columns * weights
            shares = shares / shares.sum(-1, keepdim=True).clamp(min=1e-30)
            held = least_squares(shares, mass @ v / target[:, None], ridge)
        matched.append((chosen, weights.log(), held))
    positions, logs, mixed = (torch.stack(part) for part in zip(*matched, strict=True))
    return Matched(positions, logs, mixed)


def key_scores(attention: Tensor, score: str, pooling: str | None, kernel_size: int) -> Tensor:
    """How much queries look at each key, by their attention [m, n]: [n]."""
    if score == "max":
        scores = attention.amax(0)
    elif score == "mean":
        scores = attention.mean(0)
    else:
        scores = attention.square().mean(0).sqrt()
    if pooling is None:
        return scores
    pool = F.max_pool1d if pooling == "maxpool" else F.avg_pool1d
    return pool(scores[None], kernel_size, stride=1, padding=kernel_size // 2)[0]


def least_squares(columns: Tensor, target: Tensor, ridge: float = 0.0) -> Tensor:
    """The x of least ||columns x - target||^2 + ridge * ||columns||_2^2 * ||x||^2: [t, ...] float32."""
    gram = (columns.mT @ columns).double()
    if ridge:
        gram.diagonal().add_(ridge * largest_eigenvalue(gram))
    norms = gram.diagonal().sqrt().clamp(min=1e-30)
    unit = gram / norms / norms[:, None]
    factor, failed = torch.linalg.cholesky_ex(unit)
    if failed:
        unit.diagonal().add_(1e-6)
        factor, failed = torch.linalg.cholesky_ex(unit)
    wanted = (columns.mT @ target).double().view(len(norms), -1) / norms[:, None]
    solution = torch.cholesky_solve(wanted, factor) / norms[:, None]
    return solution.view(-1, *target.shape[1:]).float()


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """Of a matrix without negative elements, by power iteration from the vector of ones."""
    vector = torch.ones_like(gram[0])
    for _ in range(8):
        vector = gram @ vector
        vector = vector / vector.norm().clamp(min=1e-30)
    return (vector @ gram @ vector).clamp(min=1e-12)


def fit_weights(
    columns: Tensor, target: Tensor, steps: int, low: float | None, high: float | None
) -> Tensor:
    """Weights [t] with which columns [m, t] sum to the target [m]: least squares, clamped to
    [e^low, e^high], then so many projected gradient steps."""
    least = LEAST_WEIGHT if low is None else math.exp(low)
    most = None if high is None else math.exp(high)
    weights = least_squares(columns, target).clamp(least, most)
    if steps:
        gram, wanted = columns.mT @ columns, columns.mT @ target
        step = 1 / largest_eigenvalue(gram)
        for _ in range(steps):
            weights = (weights - step * (gram @ weights - wanted)).clamp(least, most)
    return weights


def pursue(
    mass: Tensor,
    target: Tensor,
    entries: int,
    choose: int,
    interval: int,
    drop: float | None,
    steps: int,
    low: float | None,
    high: float | None,
) -> tuple[Tensor, Tensor]:
    """Orthogonal matching pursuit of the partition function: columns of mass [m, n] and their weights.

    Keys whose log-weight is below `drop` leave for good and others follow, a few times over; keys that
    have left return only where no others are there.
    """
    least = LEAST_WEIGHT if low is None else math.exp(low)
    chosen = torch.empty(0, dtype=torch.int64, device=mass.device)
    weights, fitted = target.new_empty(0), False
    free = torch.ones(mass.shape[1], dtype=torch.bool, device=mass.device)
    current = torch.zeros_like(target)
    round_number = refinements = 0
    while True:
        if len(chosen) < entries:
            product = ((target - current) @ mass).masked_fill(~free, -torch.inf)
            count = min(choose, entries - len(chosen), int(free.sum()))
            if not count:
                free[:] = True
                free[chosen] = False
                continue
            new = product.topk(count).indices
            free[new] = False
            chosen = torch.cat([chosen, new])
            if not fitted or round_number % interval == 0:
                weights, fitted = fit_weights(mass[:, chosen], target, steps, low, high), True
            else:
                weights = torch.cat([weights, weights.new_full((count,), least)])
            current = mass[:, chosen] @ weights
            round_number += 1
            continue
        refinements += 1
        if drop is None or refinements > REFINEMENTS:
            if drop is None and interval > 1:
                weights = fit_weights(mass[:, chosen], target, steps, low, high)
            return chosen, weights
        weights = fit_weights(mass[:, chosen], target, steps, low, high)
        stay = weights.log() >= drop
        if bool(stay.all()):
            return chosen, weights
        chosen = chosen[stay]
        current = torch.zeros_like(target)
        if len(chosen):
            current = mass[:, chosen] @ fit_weights(mass[:, chosen], target, steps, low, high)
        weights, fitted = weights[stay], False
        round_number += 1


def evenly_spread(queries: Tensor, count: int) -> Tensor:
    """At most `count` of the queries [batch, heads, m, dim], evenly spread along m."""
    m = queries.shape[2]
    if m <= count:
        return queries
    return queries[:, :, torch.arange(count, device=queries.device) * m // count]


@dataclass(frozen=True, kw_only=True)
class AttentionMatching(Method):
    """Keeps sink and window, and of the middle entries whose attention is matched to the middle's.

    Keys are chosen; the log-weight of each is solved for so that the entries' mass is the middle's for
    reference queries, then its value, so that their output is.

    Args:
        queries: prompt (the prompt's own, those before a key too) | repeat (of a second pass that
            repeats the prompt, as `kvzip` has it).
        max_queries: reference queries per KV head, evenly spread.
        keys: highest (by attention within the middle) | omp (one after the other, by the product with
            what is left of the partition function).
        score: rms | max | mean of a key's attention over queries, for `highest`.
        pooling: null | avgpool | maxpool of these along `kernel_size` positions.
        choose, interval: keys that `omp` takes at once, and after how many of its rounds it fits again.
        drop: log-weight below which `omp` gives an entry up; null: none.
        steps: projected gradient steps after the least squares.
        low, high: bounds of the log-weights; null: the least is log(1e-12), there is no largest.
        log_weights: fitted | zero.
        values: fitted | kept.
        ridge: of the values' least squares, as a share of the normal matrix's spectral norm.
        chunk: tokens repeated at a time.
        instructed: ask for the repetition in words, which takes a tokenizer.
    """

    paper: ClassVar[str] = "arXiv 2602.16284; github.com/adamzweiger/compaction"

    queries: Literal["prompt", "repeat"] = "prompt"
    max_queries: Count = 2048
    keys: Literal["highest", "omp"] = "highest"
    score: Literal["rms", "max", "mean"] = "rms"
    pooling: Literal["avgpool", "maxpool"] | None = None
    kernel_size: Odd = 7
    choose: Count = 1
    interval: Count = 1
    drop: float | None = None
    steps: Whole = 2
    low: float | None = -3.0
    high: float | None = 3.0
    log_weights: Literal["fitted", "zero"] = "fitted"
    values: Literal["fitted", "kept"] = "fitted"
    ridge: NonNegative = 1e-6
    chunk: Count = 2000
    instructed: bool = True

    @property
    def rescoring(self) -> Rescoring | None:
        """See `Method.rescoring`."""
        if self.queries == "prompt":
            return None
        if not self.instructed:
            return Rescoring(self.chunk)
        return Rescoring(self.chunk, FIRST, FOLLOWING, OVERLAP)

    def rescore(self, layer: LayerKV, repeated: Repetition, budget: Budget) -> None:
        """Note the chunk's queries."""
        name = f"queries {layer.layer_index}"
        before = [layer.carried[name]] if repeated.start > budget.sink else []
        queries = evenly_spread(repeated.queries, self.max_queries).clone()
        layer.carried[name] = torch.cat([*before, queries], dim=2)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, the matched entries by position, window.

        Raises:
            KVError: the layer has no queries, or nobody had the model repeat the prompt.
        """
        if not budget.middle_kept(layer.n):
            nothing = positions_between(layer, 0, 0)
            return gather_entries(layer, with_sink_and_window(layer, budget, nothing))
        name = f"queries {layer.layer_index}"
        queries = layer.queries if self.queries == "prompt" else layer.carried.get(name)
        if queries is None:
            raise KVError(
                f"attention_matching.queries is {self.queries} and layer {layer.layer_index} has none; "
                "allowed: prompt where queries are held, repeat where whole prompts are read"
            )
        batch, heads, n, dim = layer.keys.shape
        group = queries.shape[1] // heads
        queries = evenly_spread(queries, max(1, self.max_queries // group))
        middle = slice(budget.sink, n - budget.window)
        matched = match(
            layer.keys[:, :, middle].flatten(0, 1),
            layer.values[:, :, middle].flatten(0, 1),
            queries.reshape(batch * heads, -1, dim),
            budget.middle_kept(n),
            layer.scaling,
            chosen_by=self.keys,
            score=self.score,
            pooling=self.pooling,
            kernel_size=self.kernel_size,
            choose=self.choose,
            interval=self.interval,
            drop=self.drop,
            steps=self.steps,
            low=self.low,
            high=self.high,
            log_weights=self.log_weights,
            values_are=self.values,
            ridge=self.ridge,
            softcap=layer.softcap,
        )
        by_position = matched.positions.argsort(-1)
        chosen, logs = (
            part.gather(-1, by_position).unflatten(0, (batch, heads))
            for part in (matched.positions, matched.log_weights)
        )
        mixed = rows_at(matched.values.unflatten(0, (batch, heads)), by_position.view_as(chosen))
        positions = with_sink_and_window(layer, budget, chosen + budget.sink)
        inside = slice(budget.sink, budget.sink + chosen.shape[2])
        held = rows_at(layer.values, positions)
        held[:, :, inside] = mixed.to(held.dtype)
        log_weights = torch.zeros(positions.shape, device=layer.keys.device)
        log_weights[:, :, inside] = logs
        return CompressedKV(rows_at(layer.keys, positions), held, log_weights, positions)
