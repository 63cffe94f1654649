"""What tests of methods properties and others share."""

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


def label(variant: tuple[str, dict[str, object]]) -> str:
    name, options = variant
    return "-".join([name, *(f"{key}={value}" for key, value in options.items())])
