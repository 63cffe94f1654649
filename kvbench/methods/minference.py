"""The adapter to the MInference package, whose compression methods are called cache clusters."""

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
"""For each cluster the file in the package's folder ``modules`` and the class in that file."""


@cache
def _module(name: str) -> ModuleType:
    """Load ``minference/modules/<name>.py`` as a file, since the package itself can only be imported
    with CUDA.
    """
    missing = KVError(
        f"method 'minference' needs the package minference 0.1.6; install it: {INSTALL}"
    )
    package = importlib.util.find_spec("minference")
    if package is None or package.origin is None:
        raise missing
    file = Path(package.origin).parent / "modules" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"_kvbench_minference_{name}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise missing
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True, kw_only=True)
class MInference(Method):
    """A cache cluster of the MInference package, run as the package runs it.

    Keys and values are first repeated to query heads, and every query head chooses for itself. The
    result is [batch, heads, c, head_dim], so its bytes are heads / kv_heads times those of a method
    that chooses per KV head. The package's own classes choose the entries. The capacity includes the
    observation window. The cluster `streaming_llm` keeps `budget.sink` first tokens.

    Departure: the package divides logits by sqrt(head_dim) for every model. Queries are scaled so that
    the layer's own scaling holds.

    Args:
        cluster: snapkv | pyramidkv | streaming_llm.
        kernel_size: over how many positions scores are pooled; odd. `streaming_llm` does not read it.
        pooling: avgpool | maxpool. `streaming_llm` does not read it.
        beta: how steeply the capacity falls from layer to layer; only `pyramidkv` reads it.
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
        if self.cluster == "pyramidkv":
            # The package's formula, which exceeds the budget.
            released = PyramidKV(beta=self.beta, budgets="released")
            return released.layer_capacities(budget, n, num_layers)
        return [budget.capacity(n)] * num_layers

    def _make(self, layer: LayerKV, budget: Budget) -> Any:
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
            options["num_hidden_layers"] = layer.num_layers
            options["layer_idx"] = layer.layer_index
            options["beta"] = self.beta
        return cluster(**options)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        if budget.capacity(layer.n) >= layer.n:
            return keep_all(layer)
        cluster = self._make(layer, budget)
        queries = scaled_queries(layer, f"minference's {self.cluster}")
        keys = layer.keys.repeat_interleave(layer.group, dim=1)
        values = layer.values.repeat_interleave(layer.group, dim=1)
        missing = layer.n - queries.shape[2]
        if missing:
            # The package expects a query for every token, but reads only those of the window.
            if queries.shape[2] < budget.window and self.cluster != "streaming_llm":
                raise KVError(
                    f"layer {layer.layer_index} holds {queries.shape[2]} prompt queries; "
                    f"the observation window needs {budget.window}"
                )
            queries = torch.nn.functional.pad(queries, (0, 0, missing, 0))
        kept_keys, kept_values = cluster.update_kv(keys, queries, values, None, layer.group)
        return locate_entries(kept_keys, kept_values, layer)
