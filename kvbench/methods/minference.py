"""The cache clusters of the MInference package."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal

import torch

from kvbench.errors.options import Count, Odd
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods._adapters import locate_entries, scaled_queries
from kvbench.methods.base import Method
from kvbench.methods.pyramidkv import PyramidKV

INSTALL = (
    "MINFERENCE_SKIP_CUDA_BUILD=TRUE MINFERENCE_FORCE_BUILD=TRUE "
    "pip install --no-build-isolation --no-deps minference"
)
CLUSTERS = {
    "snapkv": ("snapkv", "SnapKVCluster"),
    "pyramidkv": ("pyramidkv", "PyramidKVCluster"),
    "streaming_llm": ("snapkv", "StreamingLLMKVCluster"),
}
"""File of the package's folder ``modules``, and the class in it."""


@cache
def _module(name: str) -> ModuleType:
    """``minference/modules/<name>.py``, loaded by file: the package itself imports only with CUDA.

    Raises:
        KVError: the package, or that file of it, is absent.
    """
    package = importlib.util.find_spec("minference")
    file = Path((package and package.origin) or "").parent / "modules" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_kvbench_minference_{name}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise KVError(
            f"method 'minference' needs the package minference 0.1.6; install it: {INSTALL}"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class MInference(Method):
    """A cache cluster of the MInference package, run as the package runs it.

    Keys and values are repeated to query heads first and every query head chooses for itself:
    the result is [batch, heads, c, head_dim] and its bytes, measured as stored, are (heads /
    kv_heads) times those of a method that chooses per KV head. The package's own classes choose;
    here is only what surrounds them. The capacity counts the observation window; `streaming_llm`
    keeps `budget.sink` leading tokens.

    Departure: the package divides logits by sqrt(head_dim) whatever the model says; queries are
    scaled so that the layer's own scaling holds.

    Args:
        cluster: snapkv | pyramidkv | streaming_llm.
        kernel_size: positions the score is pooled over; odd. Not read by `streaming_llm`.
        pooling: avgpool | maxpool. Not read by `streaming_llm`.
        beta: `pyramidkv` only: how steep.
    """

    paper: ClassVar[str] = "package minference (MInference, arXiv 2407.02490): its cache clusters"
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "snapkv": {"cluster": "snapkv"},
        "pyramidkv": {"cluster": "pyramidkv"},
    }

    cluster: Literal["snapkv", "pyramidkv", "streaming_llm"] = "snapkv"
    kernel_size: Odd = 5
    pooling: Literal["avgpool", "maxpool"] = "avgpool"
    beta: Count = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        _module(CLUSTERS[self.cluster][0])

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> list[int]:
        """Entries per query head; of `pyramidkv` by the package's formula, more than the budget."""
        if self.cluster == "pyramidkv":
            released = PyramidKV(beta=self.beta, budgets="released")
            return released.layer_capacities(budget, n, num_layers)
        return [budget.capacity(n)] * num_layers

    def _make(self, layer: LayerKV, budget: Budget) -> Any:
        """The package's cluster for this layer.

        Raises:
            KVError: a budget or a model its classes have no answer for.
        """
        file, name = CLUSTERS[self.cluster]
        cluster = getattr(_module(file), name)
        capacity = budget.capacity(layer.n)
        options: dict[str, Any] = {"max_capacity_prompt": capacity, "window_size": budget.window}
        if self.cluster == "streaming_llm":
            if budget.sink < 1:
                raise KVError("budget.sink is 0; minference's streaming_llm allows: 1 or more")
            return cluster(**options | {"window_size": capacity - budget.sink})
        if not 1 <= budget.window < capacity:
            raise KVError(
                f"budget.window is {budget.window} and the capacity {capacity}; minference's "
                f"{self.cluster} allows: a window of 1 or more, less than the capacity"
            )
        options |= {"kernel_size": self.kernel_size, "pooling": self.pooling}
        if self.cluster == "pyramidkv":
            if layer.num_layers < 2:
                raise KVError(
                    "minference's pyramidkv divides by the number of layers less one; "
                    "allowed: models with two or more full-attention layers"
                )
            place = {"num_hidden_layers": layer.num_layers, "layer_idx": layer.layer_index}
            options |= {**place, "beta": self.beta}
        return cluster(**options)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """What the package's cluster keeps, ascending: [batch, heads, c, head_dim].

        Raises:
            KVError: the layer lacks its queries, bounds its logits, or the budget has no window.
        """
        if budget.capacity(layer.n) >= layer.n:
            return keep_all(layer)
        cluster = self._make(layer, budget)
        queries = scaled_queries(layer, f"minference's {self.cluster}")
        keys, values = (
            entries.repeat_interleave(layer.group, dim=1) for entries in (layer.keys, layer.values)
        )
        missing = layer.n - queries.shape[2]
        if missing:  # the package wants a row for every token and reads those of the window
            if queries.shape[2] < budget.window and self.cluster != "streaming_llm":
                raise KVError(
                    f"layer {layer.layer_index} holds {queries.shape[2]} prompt queries; "
                    f"the observation window needs {budget.window}"
                )
            queries = torch.nn.functional.pad(queries, (0, 0, missing, 0))
        kept_keys, kept_values = cluster.update_kv(keys, queries, values, None, layer.group)
        return locate_entries(kept_keys, kept_values, layer)
