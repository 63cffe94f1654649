"""Every method, and those of its options that change what is kept."""

from __future__ import annotations

VARIANTS: list[tuple[str, dict[str, object]]] = [
    ("exact", {}),
    ("topk", {}),
    ("topk", {"heavy_hitters": True}),
    ("local", {}),
    ("streaming_llm", {}),
    ("uniform", {}),
    ("uniform", {"weighted": False}),
    ("snapkv", {}),
    ("snapkv", {"granularity": "query_head", "pooling": "maxpool", "kernel_size": 1}),
    ("pyramidkv", {}),
    ("pyramidkv", {"budgets": "released", "granularity": "query_head", "beta": 3}),
    ("h2o", {}),
    ("h2o", {"heavy_fraction": 1.0, "decode": "grow"}),
    ("h2o", {"heavy_fraction": 0.0}),
    ("subgen", {}),
    ("subgen", {"recent": 0, "weights": "cluster"}),
    ("strided", {}),
    ("strided", {"heavy_hitters": True}),
    ("fixed", {}),
    ("fixed", {"summary": 3, "heavy_hitters": True}),
    ("balancekv", {"block_size": 16}),
    ("balancekv", {"block_size": 8, "gamma": 0.0, "normalise": True, "centre": "none"}),
    ("balancekv", {"block_size": 8, "gamma": 0.05, "order": "released", "weights": "released"}),
    ("balancekv", {"block_size": 8, "gamma": 0.05, "order": "released", "weights": "values"}),
    ("balancekv", {"block_size": 8, "gamma": 0.05, "selection": "algorithm2"}),
    ("balancekv", {"block_size": 3, "selection": "algorithm2", "weights": "none"}),
    ("spatten", {}),
    ("balancekv_needle", {"layer": 0, "block_size": 16, "dilation": 1}),
    ("balancekv_needle", {"layer": 0, "block_size": 8, "dilation": 0, "selection": "algorithm2"}),
    ("balancekv_needle", {"layer": 3, "block_size": 16, "normalise": True}),
]

OTHERS: list[tuple[str, dict[str, object]]] = [
    ("adakv", {}),
    ("adakv", {"of": "h2o", "safeguard": 0.5}),
    ("adakv", {"of": "expected_attention"}),
    ("pages", {"size": 5}),
    ("pages", {"of": "h2o", "size": 1, "tokens": "mean"}),
    ("expected_attention", {}),
    ("rkv", {"window": 1}),
    ("recompress", {"of": "uniform"}),
    ("wildcat", {}),
    ("wildcat", {"bins": "released", "bin_size": 3}),
    ("wildcat", {"bin_size": 3, "normalise": True}),
    ("wildcat", {"bin_size": 0}),
    ("attention_matching", {}),
    ("attention_matching", {"keys": "omp", "choose": 4, "interval": 2, "pyramid": 3}),
    ("adakv", {"of": "attention_matching"}),
    ("pages", {"of": "attention_matching", "size": 5}),
    ("balancekv_streaming", {}),
    ("balancekv_streaming", {"eps": 1e6, "on_fail": "restart", "halve": "smaller"}),
    ("subgen_streaming", {}),
    ("subgen_streaming", {"t": 1, "s": 3, "recent": 0}),
    ("qjl", {}),
    ("turboquant", {}),
    ("solved", {"of": "h2o"}),
    ("solved", {"of": "adakv", "log_weights": False}),
    ("solved", {"of": "balancekv", "options": {"block_size": 16}}),
]
"""Those that need a rotary table, hold heads of different lengths, mixed values or entries twice, or
store what they hold in few bits."""


def label(variant: tuple[str, dict[str, object]]) -> str:
    name, options = variant
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])
