"""Prompts of unlike lengths, methods and ends, and what two generations are compared by."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from kvbench.engine.generate import Prompt
from kvbench.engine.stopping import Stopping
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


def unlike_prompts(budget: Budget = SMALL) -> list[Prompt]:
    """Of different lengths, methods and ends; one short enough to be kept whole."""
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
        Prompt(
            prompt_ids(n, seed=n)[: n - 11],
            prompt_ids(n, seed=n)[n - 11 + i :],  # questions of different lengths
            both if i != 1 else few,
            stop,
            f"p{i}",
        )
        for i, (n, stop) in enumerate(zip(lengths, stops, strict=True))
    ]


FACTS = attrgetter(
    *("tokens", "new_tokens", "entries", "compressed", "failure", "cache_bytes", "cache_bytes_end"),
    *("cache_bytes_peak", "cache_bytes_mean", "exact_bytes_mean", "exact_bytes"),
)


def facts(answer: dict[str, Any]) -> dict[str, Any]:
    """Of every method all that a generation is, but its times."""
    return {label: FACTS(generation) for label, generation in answer.items()}
