"""Decoding rate by batch size, and what short prompts gain by sharing a pass of the model.

The shipped model. The first of prompts of 16 lengths, one method, without prefills. The second is the
processor seconds of a batch of 32 prompts (prefill, three methods, 8 new tokens), each in a pass of its
own, over those with several in one pass.

python scripts/benchmarks/bench_batching.py
"""

from __future__ import annotations

import statistics
import time

import torch
from transformers import PreTrainedModel

from kvbench.engine import packing
from kvbench.engine.generate import Prompt, run_batch
from kvbench.engine.loading import ModelSpec, resolve_device, resolve_dtype
from kvbench.engine.stopping import Stopping
from kvbench.engine.weights import load_model
from kvbench.kv import Budget
from kvbench.methods import build_method

PROMPTS, NEW_TOKENS, RUNS = 16, 60, 3
SHORT, SHORT_RUNS = 32, 5


def packing_ratio(model: PreTrainedModel, tokens: int, generator: torch.Generator) -> float:
    """Seconds without packing over those with it, of prompts of `tokens` to 1.2 times as many."""
    methods = {name: (build_method(name), Budget(rate=0.25)) for name in ("exact", "snapkv", "h2o")}
    prompts = [
        Prompt(
            torch.randint(5, 100, (tokens + i * tokens // 160,), generator=generator).tolist(),
            [],
            methods,
            Stopping(8),
            str(i),
        )
        for i in range(SHORT)
    ]
    shared = packing.PACK_TOKENS
    spent: dict[bool, list[float]] = {True: [], False: []}
    for run in range(SHORT_RUNS + 1):
        for packed, found in spent.items():
            packing.PACK_TOKENS = shared if packed else {}
            start = time.process_time()
            run_batch(model, prompts, seed=0)
            if run:
                found.append(time.process_time() - start)
    packing.PACK_TOKENS = shared
    return statistics.median(spent[False]) / statistics.median(spent[True])


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
    for tokens in (20, 50, 100, 200):
        ratio = packing_ratio(model, tokens, generator)
        print(f"prompts of {tokens} tokens, alone over in one pass: ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
