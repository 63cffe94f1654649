"""Prompts of unlike lengths, methods and ends, and what two generations are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from kvbench.engine.answer import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method
from support.jobs import SMALL
from support.tiny import prompt_ids

EVERY_METHOD = {
    "exact": ("exact", {}),
    "exact_4bit": ("exact", {"quantize": {"bits": 4, "group_size": 16}}),
    "streaming_llm": ("streaming_llm", {"decode": "evict"}),
    "local": ("local", {"decode": "evict"}),
    "strided": ("strided", {}),
    "uniform": ("uniform", {}),
    "snapkv": ("snapkv", {}),
    "snapkv_2bit": ("snapkv", {"quantize": {"bits": 2, "group_size": 16}}),
    "pyramidkv": ("pyramidkv", {}),
    "h2o": ("h2o", {}),
    "h2o_grow": ("h2o", {"decode": "grow"}),
    "topk": ("topk", {}),
    "subgen": ("subgen", {}),
    "subgen_streaming": ("subgen_streaming", {}),
    "balancekv": ("balancekv", {}),
    "balancekv_streaming": ("balancekv_streaming", {}),
}


def methods() -> dict[str, object]:
    return {label: build_method(name, **options) for label, (name, options) in EVERY_METHOD.items()}


def unlike_prompts(budget: Budget = SMALL) -> list[dict[str, Any]]:
    """Arguments of `Prompt.of`, of different lengths, methods and ends; one prompt is short enough to be
    kept whole."""
    both = {label: (method, budget) for label, method in methods().items()}
    few = {label: both[label] for label in ("h2o", "balancekv")}

    def decode(tokens: Sequence[int]) -> str:
        return " ".join(f"t{token}" for token in tokens)

    stops = (
        Stopping(9),
        Stopping(12, strings=("3",), decode=decode),
        Stopping(12, end_ids=frozenset(range(3, 20))),
        Stopping(1),
    )
    lengths = (130, 67, 180, 75)
    return [
        {
            "context_ids": prompt_ids(n, seed=n)[: n - 11],
            "question_ids": prompt_ids(n, seed=n)[n - 11 + i :],  # of different lengths
            "methods": both if i != 1 else few,
            "stopping": stop,
            "example_id": f"p{i}",
        }
        for i, (n, stop) in enumerate(zip(lengths, stops, strict=True))
    ]


COSTS = (
    *("new_tokens", "entries", "compressed", "cache_bytes", "cache_bytes_end"),
    *("cache_bytes_peak", "cache_bytes_mean", "exact_bytes_mean", "exact_bytes"),
)
FACTS = attrgetter("tokens", "failure", *(f"cost.{name}" for name in COSTS))


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    return {label: FACTS(one) for label, one in answer.items()}
