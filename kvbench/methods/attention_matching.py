"""Attention matching: chosen keys, with log-weights and values solved for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, NonNegative, Odd, Whole, check_options
from kvbench.kernels.softcap import capped
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries, keep_all, rows_at
from kvbench.methods._select import positions_between, with_sink_and_window
from kvbench.methods.base import Method, Repetition, Rescoring
from kvbench.methods.kvzip import FIRST, FOLLOWING, OVERLAP
from kvbench.methods.pyramidkv import PyramidKV

LEAST_WEIGHT = 1e-12
"""Of an entry whose log-weight has no lower bound, and of one that `omp` has not yet fitted."""

BOUNDS = {"highest": (-3.0, 3.0), "omp": (math.log(LEAST_WEIGHT), 7.0)}
"""The least and the largest log-weight, where the options name none."""

REFINEMENTS = 3
"""How often `omp` looks for weights that are too small."""

ROWS = 256
"""Rows of exponentials that are gone over at a time: few enough that a CPU's cache holds them."""
BLOCK = 64
"""Columns of a normal matrix that are made at a time."""
JITTERS = (0.0, 1e-5, 1e-4, 1e-3)
"""What the diagonal of a normal matrix of unit columns grows by until it can be factored."""


# --- least squares --------------------------------------------------------------------------------


def least_squares(
    columns: Tensor, target: Tensor, ridge: float = 0.0, gram: Tensor | None = None
) -> Tensor:
    """The x of least ||columns x - target||^2 + ridge * ||columns||_2^2 * ||x||^2.

    By the normal equations, t x t; where there are fewer rows than columns by those of the x of least
    norm, m x m. They are factored after a scaling that gives them a diagonal of ones, which
    grows where they are singular (`JITTERS`). One step of refinement by the residual follows, since the
    products are in float32.

    Args:
        columns: [m, t] float32. target: [m, k] float32.
        gram: `gram_of` the columns, where it is known.

    Returns:
        [t, k] float32.

    Raises:
        KVError: numbers that are not finite.
    """
    rows, count = columns.shape
    wide = rows < count
    normal = gram_of(columns.mT if wide else columns) if gram is None or wide else gram.clone()
    penalty = ridge * largest_eigenvalue(normal) if ridge else normal.new_zeros(())
    normal.diagonal().add_(penalty)
    norms = normal.diagonal().sqrt().clamp(min=1e-30)[:, None]
    normal.div_(norms).div_(norms.mT)
    factor = cholesky(normal)

    def solve(right: Tensor) -> Tensor:
        return torch.cholesky_solve(right / norms, factor) / norms

    if wide:
        multipliers = solve(target)
        residual = target - columns @ (columns.mT @ multipliers) - penalty * multipliers
        return columns.mT @ (multipliers + solve(residual))
    solution = solve(columns.mT @ target)
    residual = columns.mT @ (target - columns @ solution) - penalty * solution
    return solution + solve(residual)


def gram_of(columns: Tensor) -> Tensor:
    """columns^T columns, [t, t] of [m, t]: the lower triangle, which the upper one repeats."""
    gram = columns.new_zeros(columns.shape[1], columns.shape[1])
    for start in range(0, len(gram), BLOCK):
        stop = start + BLOCK
        torch.mm(columns[:, start:].mT, columns[:, start:stop], out=gram[start:, start:stop])
    return gram.tril_().add_(gram.tril(-1).mT)


def bordered(gram: Tensor, columns: Tensor) -> Tensor:
    """`gram_of` the columns [m, t], where that of the first of them is known."""
    known = len(gram)
    border = columns.mT @ columns[:, known:]
    return torch.cat([torch.cat([gram, border[:known].mT]), border], dim=1)


def cholesky(gram: Tensor) -> Tensor:
    """The lower factor of a matrix [t, t] whose diagonal becomes one, or more if it must (`JITTERS`).

    Raises:
        KVError: numbers that are not finite.
    """
    for jitter in JITTERS:
        gram.diagonal().fill_(1.0 + jitter)
        factor, failed = torch.linalg.cholesky_ex(gram)
        if not failed:
            return factor
    raise KVError(
        "attention matching met keys, values or queries that are not finite; allowed: numbers"
    )


def largest_eigenvalue(gram: Tensor) -> Tensor:
    """The largest eigenvalue of a matrix [t, t] that is symmetric and without a negative element, by
    power iteration from a vector of ones."""
    vector = torch.ones_like(gram[0])
    for _ in range(8):
        vector = gram @ vector
        vector = vector / vector.norm().clamp(min=1e-30)
    return (vector @ (gram @ vector)).clamp(min=1e-12)


# --- one block ------------------------------------------------------------------------------------


class Block(NamedTuple):
    """Entries of one KV head that are to be replaced by fewer, as m reference queries see them.

    Attributes:
        mass: [n, m] float32, exp(logit - the query's largest logit).
        total: [m], the sum over the entries: the partition function.
        values: [n, dim] float32.
    """

    mass: Tensor
    total: Tensor
    values: Tensor

    @classmethod
    def of(
        cls,
        keys: Tensor,
        values: Tensor,
        queries: Tensor,
        scaling: float,
        softcap: float | None = None,
        log_weights: Tensor | None = None,
    ) -> Block:
        """The block of keys and values [n, dim], whose entries may have log_weights [n] already, as
        queries [m, dim] see it."""
        logits = capped(keys.float() @ (queries.float() * scaling).mT, softcap)
        if log_weights is not None:
            logits = logits + log_weights[:, None]
        top = logits.amax(0)
        total = torch.zeros_like(top)
        for rows in logits.split(ROWS):
            total += rows.sub_(top).exp_().sum(0)
        return cls(logits, total, values.float())


class Matched(NamedTuple):
    """What stands for a block: positions in it [heads, t] int64, log_weights [heads, t] and values
    [heads, t, dim], float32."""

    positions: Tensor
    log_weights: Tensor
    values: Tensor


@dataclass(frozen=True, kw_only=True)
class Matching:
    """How a block is matched; the options of `AttentionMatching` that `match` takes, with the released
    code's defaults.

    Args:
        keys: highest (by attention within the block) | omp (orthogonal matching pursuit: one after the
            other, by the product with what is left of the partition function).
        score: rms | max | mean of a key's attention over queries, for `highest`.
        pooling: null | avgpool | maxpool of these along `kernel_size` positions.
        choose, interval: keys that `omp` takes at once, and after how many of its rounds it fits again.
        drop: log-weight below which `omp` gives an entry up; null: none.
        steps: projected gradient steps after the least squares.
        low, high: bounds of the log-weights; null: those of `keys` (`BOUNDS`).
        log_weights: fitted (so that the entries' mass is the block's) | zero.
        values: fitted (so that their output is the block's) | kept.
        ridge: of the values' least squares, as a share of the normal matrix's spectral norm.
        queries_per_entry: reference queries, at least, for each of the entries that are solved for at a
            time: neighbours, for the part of the block from the first of them to the next's first. With
            few queries to an entry least squares repeat these and no others. 0: all at once.
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

    def select(self, block: Block, entries: int) -> tuple[Tensor, Tensor | None]:
        """The places of the keys in the block, in the order chosen, [t] int64, and their weights [t]
        where these are known by then."""
        if self.keys == "omp":
            return self.pursue(block, entries)
        return best_first(self.key_scores(block), entries), None

    def key_scores(self, block: Block) -> Tensor:
        """How much the queries look at each key within the block: [n]."""
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

    def bounds(self) -> tuple[float, float]:
        """The least and the largest weight."""
        low, high = BOUNDS[self.keys]
        return (
            math.exp(low if self.low is None else self.low),
            math.exp(high if self.high is None else self.high),
        )

    def fit_weights(self, columns: Tensor, total: Tensor, gram: Tensor | None = None) -> Tensor:
        """Weights [t] with which columns [m, t] sum to the total [m]: least squares, clamped, then
        projected gradient steps. `gram` is `gram_of` the columns, where it is known."""
        least, most = self.bounds()
        gram = gram_of(columns) if gram is None else gram
        weights = least_squares(columns, total[:, None], gram=gram)[:, 0].clamp(least, most)
        if self.steps:
            step = 1 / largest_eigenvalue(gram)
            product = columns.mT @ total
            for _ in range(self.steps):
                weights = (weights - step * (gram @ weights - product)).clamp(least, most)
        return weights

    def pursue(self, block: Block, entries: int) -> tuple[Tensor, Tensor]:
        """Orthogonal matching pursuit of the partition function: places [t] and weights [t].

        Keys whose log-weight is below `drop` leave for good and others follow, a few times over; keys
        that have left return only where no others are there.
        """
        mass, total = block.mass, block.total
        least, _ = self.bounds()
        chosen = torch.empty(0, dtype=torch.int64, device=mass.device)
        weights, fitted = total.new_empty(0), False
        columns, gram = mass[chosen].mT, total.new_empty(0, 0)
        free = torch.ones(len(mass), dtype=torch.bool, device=mass.device)
        current = torch.zeros_like(total)
        round_number = refinements = 0
        while True:
            if len(chosen) < entries:
                count = min(self.choose, entries - len(chosen), int(free.sum()))
                if not count:
                    free[:] = True
                    free[chosen] = False
                    continue
                product = (mass @ (total - current)).masked_fill(~free, -torch.inf)
                new = best_first(product, count)
                free[new] = False
                chosen = torch.cat([chosen, new])
                columns = mass[chosen].mT
                gram = bordered(gram, columns)
                if not fitted or round_number % self.interval == 0:
                    weights, fitted = self.fit_weights(columns, total, gram), True
                else:
                    weights = torch.cat([weights, weights.new_full((count,), least)])
                current = columns @ weights
                round_number += 1
                continue
            refinements += 1
            if self.drop is None:
                if self.interval > 1:
                    weights = self.fit_weights(columns, total, gram)
                return chosen, weights
            if refinements > REFINEMENTS:
                return chosen, weights
            weights = self.fit_weights(columns, total, gram)
            stay = weights.log() >= self.drop
            if bool(stay.all()):
                return chosen, weights
            chosen, columns, gram = chosen[stay], columns[:, stay], gram[stay][:, stay]
            current = torch.zeros_like(total)
            if len(chosen):
                current = columns @ self.fit_weights(columns, total, gram)
            weights, fitted = weights[stay], False
            round_number += 1

    def solve(
        self, block: Block, chosen: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-weights [t] and values [t, dim] of the entries at the places `chosen`, whose `weights` may
        be known already.

        The places are ascending where `queries_per_entry` parts them.
        """
        if not len(chosen):
            return block.total[:0], block.values[:0]
        count = 1
        if self.queries_per_entry:
            at_once = max(1, block.mass.shape[1] // self.queries_per_entry)
            count = math.ceil(len(chosen) / at_once)
        edges = [i * len(chosen) // count for i in range(count + 1)]
        solved: list[tuple[Tensor, Tensor]] = []
        start = 0
        for first, last in itertools.pairwise(edges):
            stop = len(block.mass) if last == len(chosen) else int(chosen[last])
            mass = block.mass[start:stop]
            part = Block(mass, mass.sum(0), block.values[start:stop])
            known = None if weights is None else weights[first:last]
            solved.append(self.solve_part(part, block.total, chosen[first:last] - start, known))
            start = stop
        log_weights, values = zip(*solved, strict=True)
        return torch.cat(log_weights), torch.cat(values)

    def solve_part(
        self, part: Block, whole: Tensor, chosen: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`solve` for a part of a block whose partition function is `whole`, at places in the part. A
        query counts by the part's share of its attention."""
        rows = part.mass[chosen]
        if self.log_weights == "zero":
            weights = torch.ones_like(rows[:, 0])
        elif weights is None:
            weights = self.fit_weights(rows.mT, part.total)
        if self.values == "kept":
            return weights.log(), part.values[chosen]
        rows.mul_(weights[:, None])
        rows.mul_(part.total / whole / rows.sum(0).clamp(min=1e-30))
        output = (part.values.mT @ part.mass).mT / whole[:, None]
        return weights.log(), least_squares(rows.mT, output, self.ridge)


def best_first(scores: Tensor, count: int) -> Tensor:
    """Places of the `count` highest scores [n], the highest first; of equal ones the lower place."""
    return scores.argsort(descending=True, stable=True)[:count]


def match(
    key_rows: Tensor,
    value_rows: Tensor,
    query_rows: Tensor,
    /,
    entries: int,
    scaling: float,
    **options: Any,
) -> Matched:
    """Fewer entries that answer reference queries as a block does: keys of it, with log-weights and
    values solved for.

    Args:
        key_rows, value_rows: [heads, n, dim]. query_rows: [heads, m, dim]. entries: t, at most n.
        options: those of `Matching`, among them `keys` and `values`.

    Returns:
        positions in the order chosen, log_weights, values, in float32.

    Raises:
        KVError: an option's value that is not allowed.
    """
    how = Matching(**options)
    matched = []
    for keys, values, queries in zip(key_rows, value_rows, query_rows, strict=True):
        block = Block.of(keys, values, queries, scaling)
        chosen, weights = how.select(block, entries)
        matched.append((chosen, *how.solve(block, chosen, weights)))
    return Matched(*(torch.stack(part) for part in zip(*matched, strict=True)))


# --- the method -----------------------------------------------------------------------------------


def evenly_spread(queries: Tensor, kv_heads: int, most: int) -> Tensor:
    """At most `most` of the queries [batch, heads, m, dim] for each KV head. Every head's are evenly
    spread along m, and the heads of a group take places that lie between each other's."""
    batch, heads, m, _ = queries.shape
    group = heads // kv_heads
    count = max(1, most // group)
    if m <= count:
        return queries
    device = queries.device
    in_group = torch.arange(heads, device=device)[:, None] % group
    places = (torch.arange(count, device=device) * group + in_group) * m // (count * group)
    return rows_at(queries, places.expand(batch, -1, -1))


@dataclass(frozen=True, kw_only=True)
class AttentionMatching(Method, Matching):
    """Keeps sink and window, and of the middle entries whose attention is matched to the middle's.

    Keys are chosen; the log-weight of each is solved for so that the entries' mass is the middle's for
    reference queries, then its value, so that their output is. All in float32, rows of exponentials
    shifted by their maximum; least squares as `least_squares` has them.

    It costs one product of reference queries and keys, one of their attention and the values, and two
    systems of equations for each part of the entries (`queries_per_entry`), t x t of t entries.
    `adakv` and `pages` choose by its scores; log-weights and values are then solved for what they chose.

    ``keys=omp`` is nearer and takes many times as long: of three essays of 1,024 tokens on SmolLM2, 64
    tokens given, KL is .017 at a quarter (`highest` .025, `h2o` .030), at an eighth .027 (.050, .094);
    with four keys at once, fitted every other round, .021 and .034 (``task=fidelity
    task@task.prompts=text task.num_prompts=3 task.rates=[0.25,0.125] task.continuation=given``).

    Args:
        queries: prompt (the prompt's own, those before a key too) | repeat (of a second pass that
            repeats the prompt, as `kvzip` has it).
        max_queries: reference queries per KV head, evenly spread over the prompt. Of 4,096 tokens 300
            take a seventh of the prefill's time, and are too few: what is solved for fits them alone.
        pyramid: null (every layer holds as much) | the beta by which layers share as in `pyramidkv`.
        chunk: tokens repeated at a time.
        instructed: ask for the repetition in words, which takes a tokenizer.

    The others are those of `Matching`.
    """

    paper: ClassVar[str] = "arXiv 2602.16284; github.com/adamzweiger/compaction"
    recompresses: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"repeat": {"queries": "repeat"}}

    queries: Literal["prompt", "repeat"] = "prompt"
    max_queries: Count = 1200
    drop: float | None = -7.0
    steps: Whole = 2
    ridge: NonNegative = 1e-6
    queries_per_entry: Whole = 4
    pyramid: Count | None = None
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
        shown = evenly_spread(repeated.queries, layer.keys.shape[1], self.max_queries)
        layer.carried[name] = torch.cat([*before, shown], dim=2)

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        """The budget's, or `pyramidkv`'s shares of it, where sink and window stay in every layer."""
        if self.pyramid is None:
            return [budget.capacity(n)] * num_layers
        always = replace(budget, sink=0, window=budget.sink + budget.window)
        return PyramidKV(beta=self.pyramid).layer_capacities(always, n, num_layers)

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """See `Method.token_scores`: what `highest` goes by."""
        scores = [self.key_scores(block) for block in self.blocks(layer, budget)]
        middle = torch.stack(scores).view(*layer.keys.shape[:2], -1)
        return F.pad(middle, (budget.sink, budget.window))

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Sink, the matched entries by position, window.

        Raises:
            KVError: the layer has no queries, or nobody had the model repeat the prompt.
        """
        capacity = self.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        count = capacity - budget.sink - budget.window
        if count < 1:
            nothing = positions_between(layer, 0, 0)
            return gather_entries(layer, with_sink_and_window(layer, budget, nothing))
        if capacity == layer.n:
            return keep_all(layer)
        places, solved = [], []
        for block in self.blocks(layer, budget):
            chosen, weights = self.select(block, count)
            ascending = chosen.argsort()
            if weights is not None:
                weights = weights[ascending]
            places.append(chosen[ascending])
            solved.append(self.solve(block, places[-1], weights))
        middle = torch.stack(places).view(*layer.keys.shape[:2], -1) + budget.sink
        kept = gather_entries(layer, with_sink_and_window(layer, budget, middle))
        return with_solved(kept, in_middle(kept, layer, budget), solved)

    def settle(self, layer: LayerKV, kept: CompressedKV, budget: Budget) -> CompressedKV:
        """See `Method.settle`: log-weights and values are solved for what is kept of the middle."""
        inside = in_middle(kept, layer, budget)
        rows = zip(kept.positions.flatten(0, 1), inside.flatten(0, 1), strict=True)
        solved = [
            self.solve(block, positions[here] - budget.sink)
            for block, (positions, here) in zip(self.blocks(layer, budget), rows, strict=True)
        ]
        return with_solved(kept, inside, solved)

    def blocks(self, layer: LayerKV, budget: Budget) -> Iterator[Block]:
        """The middle of each head of each prompt, as its reference queries see it.

        Raises:
            KVError: the layer has no queries, or nobody had the model repeat the prompt.
        """
        name = f"queries {layer.layer_index}"
        queries = layer.queries if self.queries == "prompt" else layer.carried.get(name)
        if queries is None:
            raise KVError(
                f"attention_matching.queries is {self.queries} and layer {layer.layer_index} has none; "
                "allowed: prompt where queries are held, repeat where whole prompts are read"
            )
        batch, heads, n, _ = layer.keys.shape
        queries = evenly_spread(queries, heads, self.max_queries)
        queries = queries.unflatten(1, (heads, -1)).flatten(2, 3)
        middle = slice(budget.sink, n - budget.window)
        for row, head in itertools.product(range(batch), range(heads)):
            weights = layer.log_weights
            yield Block.of(
                layer.keys[row, head, middle],
                layer.values[row, head, middle],
                queries[row, head],
                layer.scaling,
                layer.softcap,
                None if weights is None else weights[row, head, middle],
            )


def in_middle(kept: CompressedKV, layer: LayerKV, budget: Budget) -> Tensor:
    """Which entries are of the prompt's middle: [batch, kv_heads, c] bool."""
    return (kept.positions >= budget.sink) & (kept.positions < layer.n - budget.window)


def with_solved(
    kept: CompressedKV, inside: Tensor, solved: Sequence[tuple[Tensor, Tensor]]
) -> CompressedKV:
    """What is kept, with the log-weights and values solved for each head in place of those `inside`."""
    logs, mixed = zip(*solved, strict=True)
    if kept.log_weights is None:
        log_weights = torch.zeros(inside.shape, device=inside.device)
    else:
        log_weights = kept.log_weights.clone()
    log_weights[inside] = torch.cat(logs)
    values = kept.values.clone()
    values[inside] = torch.cat(mixed).to(values.dtype)
    return replace(kept, values=values, log_weights=log_weights)
