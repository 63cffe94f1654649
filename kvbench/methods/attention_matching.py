from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.errors.options import Count, NonNegative, Whole
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries, keep_all
from kvbench.methods._matching import Block, Matching, Selection, Solution
from kvbench.methods._reference_queries import (
    carried_queries,
    carry_queries,
    evenly_spread,
    for_kv_heads,
)
from kvbench.methods._select import positions_between, with_sink_and_window
from kvbench.methods.base import Replay, SecondPass, TokenScoringMethod
from kvbench.methods.kvzip import FIRST, FOLLOWING, OVERLAP
from kvbench.methods.pyramidkv import PyramidKV


@dataclass(frozen=True, kw_only=True)
class AttentionMatching(TokenScoringMethod, Matching):
    """Keeps sink, window and some entries of the middle that answer reference queries as the whole
    middle does.

    Some keys of the middle are chosen. Their log-weights are then solved for so that the entries have
    the middle's mass for the reference queries, and their values so that the entries have the middle's
    output. Everything is computed in float32, every query's exponentials relative to the largest one.

    A head costs one product of reference queries and keys, one of their attention and the values, and
    two systems of t equations for every group of t entries (`queries_per_entry`). `adakv` and `pages`
    choose other entries by the scores of this method, which then solves for their log-weights and
    values (`fit`).

    ``keys=omp`` is more exact and takes many times as long. For three essays of 1,024 tokens on SmolLM2
    with 64 given tokens, the KL divergence at a quarter is .017 (`highest` .025, `h2o` .030), and at an
    eighth .027 (.050, .094); with four keys in a round and a fit every second round .021 and .034
    (``task=fidelity task@task.prompts=text task.num_prompts=3 task.rates=[0.25,0.125]
    task.continuation=given``).

    Args:
        queries: which queries are the reference queries: ``prompt``, the prompt's own, which also see
            the keys that follow them; ``repeat``, those of a second pass in which the model repeats the
            prompt, as for `kvzip`.
        max_queries: the largest number of reference queries per KV head, evenly spread over the prompt.
            Of 4,096 tokens, 300 queries take a seventh of the prefill's time and are too few: what is
            solved for then fits these queries alone.
        pyramid: null gives every layer the same capacity; a number is the beta by which the layers
            divide the budget as in `pyramidkv`.
        chunk: the number of tokens repeated at a time.
        instructed: whether the model is asked in words to repeat the prompt, which needs a tokenizer.

    The other options are those of `Matching`.
    """

    paper: ClassVar[str] = "arXiv 2602.16284; github.com/adamzweiger/compaction"
    can_compress_again: ClassVar[bool] = True
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
    def second_pass(self) -> SecondPass | None:
        if self.queries == "prompt":
            return None
        if not self.instructed:
            return SecondPass(self.chunk)
        return SecondPass(self.chunk, FIRST, FOLLOWING, OVERLAP)

    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        carry_queries("attention_matching", layer, replay, budget, self.max_queries)

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        if self.pyramid is None:
            return [budget.capacity(n)] * num_layers
        # PyramidKV keeps the window alone in every layer; here every layer keeps the sink, too.
        sink_in_window = replace(budget, sink=0, window=budget.sink + budget.window)
        return PyramidKV(beta=self.pyramid).layer_capacities(sink_in_window, n, num_layers)

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        scores = [self.key_scores(block) for block in self.blocks(layer, budget)]
        middle = torch.stack(scores).view(*layer.keys.shape[:2], -1)
        return F.pad(middle, (budget.sink, budget.window))

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        capacity = self.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        count = capacity - budget.sink - budget.window
        if count < 1:
            no_positions = positions_between(layer, 0, 0)
            return gather_entries(layer, with_sink_and_window(layer, budget, no_positions))
        if capacity == layer.n:
            return keep_all(layer)
        places: list[Tensor] = []
        solutions: list[Solution] = []
        for block in self.blocks(layer, budget):
            selection = self.select(block, count)
            order = selection.places.argsort()
            weights = None if selection.weights is None else selection.weights[order]
            ascending = Selection(selection.places[order], weights)
            places.append(ascending.places)
            solutions.append(self.solve(block, ascending))
        middle = torch.stack(places).view(*layer.keys.shape[:2], -1) + budget.sink
        compressed = gather_entries(layer, with_sink_and_window(layer, budget, middle))
        return with_solutions(compressed, in_middle(compressed, layer, budget), solutions)

    def fit(self, layer: LayerKV, compressed: CompressedKV, budget: Budget) -> CompressedKV:
        is_middle = in_middle(compressed, layer, budget)
        heads = zip(
            self.blocks(layer, budget),
            compressed.positions.flatten(0, 1),
            is_middle.flatten(0, 1),
            strict=True,
        )
        solutions = []
        for block, positions, head_is_middle in heads:
            places = positions[head_is_middle] - budget.sink
            solutions.append(self.solve(block, Selection(places, None)))
        return with_solutions(compressed, is_middle, solutions)

    def blocks(self, layer: LayerKV, budget: Budget) -> Iterator[Block]:
        """The middle of each KV head of each prompt, as its reference queries see it."""
        queries = layer.queries
        if self.queries == "repeat":
            queries = carried_queries("attention_matching", layer)
        if queries is None:
            raise KVError(
                f"attention_matching.queries is {self.queries} and layer {layer.layer_index} has none; "
                "allowed: prompt where queries are held, repeat where whole prompts are read"
            )
        batch, kv_heads, n, _ = layer.keys.shape
        queries = for_kv_heads(evenly_spread(queries, kv_heads, self.max_queries), kv_heads)
        middle = slice(budget.sink, n - budget.window)
        for row, head in itertools.product(range(batch), range(kv_heads)):
            weights = layer.log_weights
            yield Block.of(
                layer.keys[row, head, middle],
                layer.values[row, head, middle],
                queries[row, head],
                layer.scaling,
                layer.softcap,
                None if weights is None else weights[row, head, middle],
            )


def in_middle(compressed: CompressedKV, layer: LayerKV, budget: Budget) -> Tensor:
    """Which entries are of the prompt's middle: [batch, kv_heads, c] bool."""
    return (compressed.positions >= budget.sink) & (compressed.positions < layer.n - budget.window)


def with_solutions(
    compressed: CompressedKV, is_middle: Tensor, solutions: Sequence[Solution]
) -> CompressedKV:
    """The entries `compressed` with new log-weights and values for those of the middle.

    Args:
        is_middle: [batch, kv_heads, c] bool.
        solutions: one for each KV head of each prompt, in the order of the flattened heads.
    """
    solved_log_weights, solved_values = zip(*solutions, strict=True)
    if compressed.log_weights is None:
        log_weights = torch.zeros(is_middle.shape, device=is_middle.device)
    else:
        log_weights = compressed.log_weights.clone()
    log_weights[is_middle] = torch.cat(solved_log_weights)
    values = compressed.values.clone()
    values[is_middle] = torch.cat(solved_values).to(values.dtype)
    return replace(compressed, values=values, log_weights=log_weights)
