from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kvbench.errors.options import Count, NonNegative, Text
from kvbench.kernels.decode import Eviction
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods._least_squares import bounded_least_squares, least_squares, squared_norm
from kvbench.methods._matching import Block, Solution
from kvbench.methods._reference_queries import (
    as_after_prompt,
    carried_queries,
    carry_queries,
    evenly_spread,
    for_kv_heads,
)
from kvbench.methods._wrapped import Wrapper
from kvbench.methods.base import HeldShape, Method, Replay, SecondPass
from kvbench.methods.kvzip import KVzip
from kvbench.methods.recompress import Recompress

HELD_OUT = 10
"""One of so many reference queries is held out of the fit and decides whether it helps."""
LARGEST = 3.0
"""By how much a log-weight may exceed the inner method's."""
WEIGHT_STEPS = 50
"""The steps of the weights' least squares."""
RIDGE_OF_REPEAT = 3e-4
RIDGE_OF_PROMPT = 0.1
"""The ridge where none is given, by the reference queries. Hardly any of the prompt's own looks for a
fact: they may move values less than those of a repeated prompt, each of which looks for what follows."""


@dataclass(frozen=True, kw_only=True)
class Solved(Wrapper):
    """Keeps the entries of another method, with the values and log-weights that fit best.

    A head's log-weights are solved for so that the attention of its entries sums to that of the whole
    prompt, then its values so that its output is that of the whole prompt, for reference queries. The
    ridge is on the distance from what the inner method returned, so a value keeps its token's content
    except where the reference queries ask for more. No log-weight falls below the smaller of 0 and the
    inner method's: no kept token comes to count less than itself.

    Two rules are there for facts, which few reference queries look for. A query counts 1 / (1 + r),
    where r is the error that the inner method leaves it over the mean of all: what the inner method
    answers, since it kept what the query looks for, is not given up for what it cannot answer. And of
    the sink's values, of which every query sees something, only the first token's is solved for: it
    makes up for what all queries miss, and a fact at the very start of a prompt stays.

    A tenth of the reference queries is held out. A head whose error, so counted, the solution does not
    lower, for these and for all, keeps what the inner method returned.

    The solve is that of attention matching (arXiv 2602.16284) with these departures: the window and the
    first token are solved for, too, since in heads with few other entries only they can make up for what
    was dropped; the squared error is that of the head's output, there of the middle's alone; queries
    count by the inner method's error; and the ridge is on the distance from the kept values, there on
    the values' size.

    Args:
        of: the inner method, which must keep entries of the prompt.
        options: the options of the inner method. `quantize` is an option of this method alone.
        queries: which queries are the reference queries: ``prompt``, the prompt's own, position encoded
            as though they followed it (`as_after_prompt`); ``repeat``, those of a second pass in which
            the model repeats the prompt, as for `kvzip`; null: ``repeat`` where the inner method has
            such a pass, else ``prompt``. With a second pass and prompt queries, whoever reads these,
            they are held for all layers until it is over.
        log_weights: whether log-weights are solved for; they take a number for every entry.
        ridge: the penalty, as a share of the spectral norm of all entries' normal matrix; null:
            `RIDGE_OF_REPEAT` or `RIDGE_OF_PROMPT`, by the reference queries.
        max_queries: the largest number of reference queries per KV head, evenly spread.
    """

    own_version: ClassVar[int] = 3
    paper: ClassVar[str] = "kvbench's own; least squares as in arXiv 2602.16284"

    of: Text = "kvzip"
    queries: Literal["prompt", "repeat"] | None = None
    log_weights: bool = True
    ridge: NonNegative | None = None
    max_queries: Count = 600

    @classmethod
    def can_wrap(cls, inner: type[Method]) -> bool:
        return (
            inner.keeps_entries
            and inner.saves_memory
            and inner.uses_budget
            and inner.evict is Method.evict
            and inner.restrict is Method.restrict
            and not issubclass(inner, (Solved, Recompress))
        )

    def _check_inner(self, inner: Method) -> None:
        super()._check_inner(inner)
        inner.check_decodes()
        if inner.schedule is not None:
            raise KVError(
                f"solved.of is {self.of!r} with options that compress again while decoding; allowed: "
                "options that do not (of rkv: every=null)"
            )
        if inner.quantize is not None:
            raise KVError(
                f"solved.options.quantize is {inner.quantize!r}; allowed: null, and solved.quantize"
            )

    # --- what is the inner method's ---------------------------------------------------------------

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return self.inner.layer_capacity(budget, n, layer_index, num_layers)

    def total_capacity(self, budget: Budget, n: int, num_layers: int) -> int:
        return self.inner.total_capacity(budget, n, num_layers)

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        return self.inner.eviction(capacity, sink)

    def extras(self, n: int, held: Mapping[int, HeldShape]) -> dict[str, int]:
        return self.inner.extras(n, held) | super().extras(n, held)

    @property
    def second_pass(self) -> SecondPass | None:
        inner = self.inner.second_pass
        if inner is None:
            # The inner method may read the prompt's queries.
            wanted = self.queries == "repeat"
            return replace(KVzip().second_pass, prompt_queries=True) if wanted else None
        return replace(inner, prompt_queries=True) if self.queries == "prompt" else inner

    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        if self.inner.second_pass is not None:
            self.inner.observe(layer, replay, budget)
        if self.queries != "prompt":
            carry_queries("solved", layer, replay, budget, self.max_queries)

    @property
    def reads_the_prompts_queries(self) -> bool:
        """Whether the reference queries are the prompt's own, not those of a second pass."""
        return self.queries == "prompt" or self.second_pass is None

    # --- the solve --------------------------------------------------------------------------------

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        kept = self.inner.compress(layer, budget, generator)
        if kept.lengths is None and kept.positions.shape[2] == layer.n:
            return kept
        before = kept.log_weights
        log_weights = (
            torch.zeros_like(kept.positions, dtype=torch.float32)
            if before is None
            else before.clone()
        )
        is_entry = log_weights > -math.inf
        if (
            kept.keys_only
            or kept.denominators is not None
            or bool((kept.positions[is_entry] < 0).any())
        ):
            raise KVError(
                f"solved.of is {self.of!r}, which keeps what are no entries of the prompt; allowed: a "
                "method that chooses entries"
            )
        batch, heads, _, _ = kept.keys.shape
        if self.reads_the_prompts_queries:
            queries = as_after_prompt(layer, heads, self.max_queries)
        else:
            queries = carried_queries("solved", layer)
        if queries is None:
            raise KVError(
                f"solved has no reference queries of layer {layer.layer_index}; allowed: queries=prompt "
                "where queries are held, repeat where whole prompts are read"
            )
        queries = evenly_spread(queries, heads, self.max_queries)
        sinks = None
        if layer.sinks is not None:
            sinks = layer.sinks.view(heads, -1, 1).expand(-1, -1, queries.shape[2]).flatten(1)
        queries = for_kv_heads(queries, heads)
        order, fitted = held_out_last(queries.shape[2])
        order = order.to(queries.device)
        copies = heads // layer.keys.shape[1]  # of a KV head, where a method chooses per query head
        values = kept.values.clone()
        for row, head in itertools.product(range(batch), range(heads)):
            here = (row, head, is_entry[row, head])
            if not len(kept.positions[here]):
                continue
            block = Block.of(
                layer.keys[row, head // copies],
                layer.values[row, head // copies],
                queries[row, head, order],
                layer.scaling,
                layer.softcap,
                sinks=None if sinks is None else sinks[head, order],
            )
            start = Solution(log_weights[here], values[here].float())
            solution = self.solve(block, fitted, kept.positions[here], start, budget.sink)
            log_weights[here] = solution.log_weights
            values[here] = solution.values.to(values.dtype)
        return replace(kept, values=values, log_weights=log_weights if self.log_weights else before)

    def solve(
        self, block: Block, fitted: int, places: Tensor, start: Solution, sink: int
    ) -> Solution:
        """Solve for the log-weights and values of some entries of a head.

        Args:
            block: the whole prompt. Its queries after the first `fitted` are held out.
            places: [t], the entries.
            start: what the inner method gave them.
            sink: of so many first entries of the prompt all values but the first stay.
        """
        ridge = self.ridge
        if ridge is None:
            ridge = RIDGE_OF_PROMPT if self.reads_the_prompts_queries else RIDGE_OF_REPEAT
        shares = block.mass[places].div_(block.total)
        sinks = block.sinks / block.total
        output = (block.values.mT @ block.mass / block.total).mT
        weights = first_weights = start.log_weights.exp()
        first_total = (weights @ shares + sinks).clamp(min=1e-30)
        first_output = (shares.mT @ (weights[:, None] * start.values)) / first_total[:, None]
        first_errors = (output - first_output).square().sum(1)
        counts = 1 / (1 + first_errors / first_errors.mean().clamp(min=1e-30))
        if self.log_weights:
            weights = bounded_least_squares(
                shares[:, :fitted].mT,
                (1 - sinks)[:fitted],
                start=first_weights,
                least=first_weights.clamp(max=1.0),
                most=first_weights * math.exp(LARGEST),
                ridge=ridge,
                steps=WEIGHT_STEPS,
            )
        mass = shares.mul_(weights[:, None])
        attention = mass.div_((mass.sum(0) + sinks).clamp(min=1e-30)).mT
        missing = output - attention @ start.values
        roots = counts[:fitted, None].sqrt()
        columns = attention[:fitted] * roots
        free = (places >= sink) | (places == 0)
        change = torch.zeros_like(start.values)
        change[free] = least_squares(
            columns[:, free],
            missing[:fitted] * roots,
            penalty=ridge * squared_norm(columns),
        )
        errors = (missing - attention @ change).square().sum(1) * counts
        first_errors = first_errors * counts
        helps = errors[fitted:].sum() < first_errors[fitted:].sum()
        helps &= errors.sum() < first_errors.sum()
        return Solution(
            torch.where(helps, weights.log(), start.log_weights),
            torch.where(helps, start.values + change, start.values),
        )


def held_out_last(count: int) -> tuple[Tensor, int]:
    """An order [count] of so many queries in which every `HELD_OUT`-th comes last, and the number of the
    others."""
    is_held_out = torch.arange(count) % HELD_OUT == HELD_OUT // 2
    return is_held_out.to(torch.uint8).argsort(stable=True), count - int(is_held_out.sum())
