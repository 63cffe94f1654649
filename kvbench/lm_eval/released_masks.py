"""H2O's released evaluation on lm-eval tasks: one pass over prompt and answer, in which every layer
masks its attention (`released_mask`). No cache is held."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from kvbench.engine.architecture import head_shapes
from kvbench.engine.ask import (
    Scored,
    chunks,
    log_probabilities,
    scored_of,
    vocabulary,
)
from kvbench.engine.attention import LayerCall, Pass, exact_attention
from kvbench.engine.cost import Cost
from kvbench.engine.device import input_device
from kvbench.engine.model import Model
from kvbench.engine.prefill import Reading, forward, layer_kv
from kvbench.kernels.logits import softcapped, softmax
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods.base import Method
from kvbench.methods.h2o import H2O

QUERY_ROWS = 512
"""How many rows of the attention matrix are in memory at a time."""


@dataclass
class MaskedPass(Pass):
    """Sliding-window layers are not masked."""

    method: H2O
    budget: Budget
    num_layers: int

    def attend(self, call: LayerCall) -> Tensor:
        if call.sliding_window is not None:
            return call.exact()
        layer = layer_kv(call, call.layer, self.num_layers)
        return exact_attention(
            call.query,
            call.key.repeat_interleave(layer.group, dim=1),
            call.value.repeat_interleave(layer.group, dim=1),
            scaling=call.scaling,
            softcap=call.softcap,
            seen=self.seen(layer),
            sinks=call.sinks,
        )

    def seen(self, layer: LayerKV) -> Tensor:
        """See `released_mask`. Every query head of a group chooses for itself."""
        assert layer.queries is not None
        heavy, recent = released_ratios(self.method, self.budget)
        return released_mask(
            layer.queries[0].float(),
            layer.keys[0].repeat_interleave(layer.group, dim=0).float(),
            semantics=self.method.semantics.removeprefix("released_"),
            heavy_ratio=heavy,
            recent_ratio=recent,
            scaling=layer.scaling,
            softcap=layer.softcap,
            sinks=layer.sinks,
        )


def released_ratios(method: H2O, budget: Budget) -> tuple[float, float]:
    """The shares of the sequence that are heavy hitters and recent tokens.

    Raises:
        KVError: the budget is a number of entries.
    """
    if budget.share is None:
        raise KVError(
            f"h2o.semantics is {method.semantics!r} and budget.size is {budget.size}; allowed: a "
            "share of the sequence, as budget.total_rate"
        )
    return method.heavy_fraction * budget.share, (1.0 - method.heavy_fraction) * budget.share


def is_mask(method: Method) -> TypeGuard[H2O]:
    """Whether a method is one of the released masks, and no cache."""
    return isinstance(method, H2O) and method.semantics != "paper"


def masked_entries(method: H2O, budget: Budget, n: int) -> int:
    """The number of heavy and recent keys. With ``released_global`` a query sees its own key beside
    them."""
    heavy, recent = (int(ratio * n) for ratio in released_ratios(method, budget))
    own = 1 if method.semantics == "released_global" else 0
    return min(n, heavy + recent + own)


def _largest(scores: Tensor, count: int) -> Tensor:
    """Mark the `count` largest scores of each head, those of lower index on a tie: [heads, n] bool."""
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)


def released_mask(
    queries: Tensor,
    keys: Tensor,
    semantics: str = "global",
    heavy_ratio: float = 0.1,
    recent_ratio: float = 0.1,
    scaling: float = 1.0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The keys that each query sees in H2O's released evaluation (FMInference/H2O,
    h2o_hf/utils_lm_eval).

    Prompt and answer are n tokens, of which heavy = int(heavy_ratio n) are heavy hitters and recent =
    int(recent_ratio n) are recent. Every row of attention is masked, those of the prompt too.

    ``global``: the heavy hitters are the keys with the largest column sums of attention over all rows,
    the same for all rows. Row i sees the keys j <= i that are heavy hitters or have i - j <= recent.

    ``sequential``: the scores begin as the column sums of the first `heavy` rows, which see all keys
    before them. Each later row sees its own key and the heavy - 1 keys with the largest scores; it adds
    its unmasked attention to the scores of the keys that it sees, and sets all other scores to 0. Every
    row also sees the keys with i - j <= recent.

    Ties go to the lower index. Attention and sums are float32; the release sums in half precision, with
    results that differ from kernel to kernel.

    Args:
        queries, keys: [heads, n, d] float32, after position encoding.
        semantics: global | sequential.

    Returns:
        [heads, n, n] bool, True where query i sees key j; False above the diagonal.
    """
    if semantics not in ("global", "sequential"):
        raise KVError(f"semantics is {semantics!r}; allowed: global, sequential")
    heads, n, _ = queries.shape
    heavy, recent = int(heavy_ratio * n), int(recent_ratio * n)
    index = torch.arange(n, device=queries.device)
    distance = index[:, None] - index[None]
    seen = ((distance >= 0) & (distance <= recent)).expand(heads, n, n).clone()
    scores = torch.zeros(heads, n, dtype=torch.float32, device=queries.device)
    if heavy == 0:
        return seen
    for begin in range(0, n, QUERY_ROWS):
        block = slice(begin, begin + QUERY_ROWS)
        logits = softcapped(queries[:, block].float() @ keys.float().mT * scaling, softcap)
        logits = logits.masked_fill(distance[block] < 0, -torch.inf)
        rows = softmax(logits, None if sinks is None else sinks[:, None])
        if semantics == "global":
            scores += rows.sum(1)
            continue
        for i, row in enumerate(rows.unbind(1), begin):
            if i < heavy:
                scores[:, :heavy] += row[:, :heavy]
                seen[:, i, : i + 1] = True
                continue
            kept = _largest(scores, heavy - 1)
            kept[:, i] = True
            seen[:, i] |= kept
            scores = torch.where(kept, scores + row, 0.0)
    if semantics == "global":
        seen |= _largest(scores, heavy)[:, None]
    return seen & (distance >= 0)


@torch.inference_mode()
def masked_scores(
    model: Model,
    prompt_ids: Sequence[int],
    continuations: Sequence[Sequence[int]],
    method: H2O,
    budget: Budget,
) -> list[Scored]:
    """Score every continuation in a masked pass of its own (one for every chunk of logits)."""
    device = input_device(model)
    layers = model.config.get_text_config().num_hidden_layers

    def logits_of(continuation: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        ids = torch.tensor([[*prompt_ids, *continuation]], device=device)
        positions = torch.arange(ids.shape[1], device=device)
        first = len(prompt_ids) - 1
        for part in chunks(1, len(continuation), vocabulary(model)):
            wanted = torch.arange(first + part.start, first + part.stop, device=device)
            state = MaskedPass(method, budget, layers)
            yield part.start, forward(model, ids, positions, state, keep=wanted)

    return [
        scored_of(log_probabilities([tokens], logits_of(tokens))[0], None)
        for tokens in continuations
    ]


def imagined_cost(model: Model, reading: Reading, tokens: int, method: H2O, budget: Budget) -> Cost:
    """The cost of the cache that a masked pass of `tokens` tokens would need. Each query head chooses
    its own entries, so that keys would be repeated to query heads."""
    shapes = head_shapes(model.config.get_text_config())
    entries = masked_entries(method, budget, tokens)
    repeated = sum(shape.heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    exact = sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
    return Cost(
        prompt_tokens=reading.n,
        capacity=budget.capacity(reading.n),
        entries={"mean": entries, "max": entries},
        cache_bytes=round(entries * repeated / (tokens * exact) * reading.exact_bytes),
        exact_bytes=reading.exact_bytes,
        compressed=True,
        prefill_s=reading.prefill_s,
        extras={"imagined": True},
    )
