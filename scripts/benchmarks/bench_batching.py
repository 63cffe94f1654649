"""Decoding rate by batch size: the shipped model, prompts of 16 lengths, one method, without prefills.

python scripts/benchmarks/bench_batching.py
"""

from __future__ import annotations

import statistics

import torch

from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.loading import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.stopping import Stopping
from kvbench.engine.weights import load_model
from kvbench.kv import Budget
from kvbench.methods import build_method

PROMPTS, NEW_TOKENS, RUNS = 16, 60, 3


def main() -> None:
    """Print tokens per second of decoding at each batch size, median of the runs."""
    device = resolve_device("auto")
    if device.type == "cpu":
        torch.set_num_threads(1)
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    model = load_model(spec, device=device, dtype=resolve_dtype("auto", device))
    methods = {"balancekv": (build_method("balancekv"), Budget(rate=0.25))}
    generator = torch.Generator().manual_seed(0)
    prompts = [
        Prompt(
            torch.randint(5, 100, (300 + 20 * i,), generator=generator).tolist(),
            [],
            methods,
            Stopping(NEW_TOKENS),
            str(i),
        )
        for i in range(PROMPTS)
    ]
    rates: dict[int, list[float]] = {1: [], 4: [], 16: []}
    for _ in range(RUNS):
        for batch, found in rates.items():
            seconds = sum(
                result.decode_s
                for start in range(0, PROMPTS, batch)
                for answer in run_batch(model, prompts[start : start + batch], seed=0)
                for result in answer.values()
            )
            found.append(PROMPTS * (NEW_TOKENS - 1) / seconds)
    for batch, found in rates.items():
        print(f"batch {batch:2}: {statistics.median(found):6.0f} tokens/s")


if __name__ == "__main__":
    main()
