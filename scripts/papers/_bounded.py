"""Random layers whose norms are the bounds of theorems, and the scale of equation (2) of BalanceKV."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvbench.engine.row import layer_generator
from kvbench.errors.options import Fraction, Positive, Whole, check_options
from kvbench.kv import LayerKV
from kvbench.probes.layer_error import clustered, logits_of
from kvbench.tasks.base import Many, TaskError


@dataclass(frozen=True, kw_only=True)
class BoundedData:
    """Random keys, values and queries on spheres: every norm is its bound exactly.

    Directions are uniform, or with `clusters` a uniform centre plus noise (keys and values of a
    cluster share theirs; queries stay uniform).

    Attributes:
        key_norm, query_norm, value_norm: l2 norms. The logits q.k / sqrt(d) lie within
            +- key_norm * query_norm / sqrt(d), whose exponential the bounds carry as a factor.
            The default value_norm is no power of two: those part the buckets of BalanceKV's
            Algorithm 1, and rounding would spread equal norms over two of them.
        heads: KV heads, each with a query head of its own and data of its own.
        spread: share of the squared norm that is noise around the centre (before rescaling).
    """

    head_dim: Many = 64
    key_norm: Positive = 4.0
    query_norm: Positive = 4.0
    value_norm: Positive = 1.5
    heads: Many = 1
    clusters: Whole = 0
    spread: Fraction = 0.1

    def __post_init__(self) -> None:
        check_options(self, "", TaskError)

    def layer(self, n: int, queries: int, name: str, draw: int) -> tuple[LayerKV, Tensor]:
        """A layer of n entries, and the queries [1, heads, queries, head_dim] after them; name and draw
        seed the generator."""
        generator = layer_generator(draw, f"bounded/{name}", 0)

        def directions(count: int) -> Tensor:
            return _unit(torch.randn(1, self.heads, count, self.head_dim, generator=generator))

        keys, values = clustered(directions, n, self.clusters, self.spread, generator)
        if self.clusters:
            keys, values = _unit(keys), _unit(values)
        all_queries = self.query_norm * directions(n + queries)
        layer = LayerKV(
            self.key_norm * keys,
            self.value_norm * values,
            all_queries[:, :, :n],
            layer_index=0,
            num_layers=1,
            scaling=self.head_dim**-0.5,
        )
        return layer, all_queries[:, :, n:]


def _unit(x: Tensor) -> Tensor:
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def bound_scale(layer: LayerKV, queries: Tensor) -> Tensor:
    """||softmax(K q * scaling)||_2 * ||V||_F of every query: [1, heads, m] float64.

    The Frobenius norm is of the values of the query's own KV head.
    """
    weights = logits_of(layer.keys, queries, layer).softmax(-1)
    values_norm = torch.linalg.vector_norm(layer.values.double().flatten(2), dim=-1)
    scale = torch.linalg.vector_norm(weights, dim=-1) * values_norm[:, :, None, None]
    return scale.view(queries.shape[:3])
