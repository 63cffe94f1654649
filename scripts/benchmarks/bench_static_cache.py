"""Decoding by transformers alone (its StaticCache; torch.compile on a GPU) beside kvbench's exact cache.

    python scripts/benchmarks/bench_static_cache.py --tokens 2048 --new 64 [--attention sdpa] [--runs 3]

Tables compare methods with kvbench's own `exact`, and would flatter them if `exact` were slow; here the
same weights (recall_mini) read the same random tokens. What is compared runs in turn after a warm-up;
medians of the seconds are printed, prefill included, and their ratio.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from _shared import SHIPPED
from bench_engine import medians, random_tokens
from transformers import GenerationConfig, StaticCache

from kvbench.engine.answer import Stopping
from kvbench.engine.architecture import switch_to_kvbench
from kvbench.engine.ask import Question, answer_each, read
from kvbench.engine.attention import IMPLEMENTATION
from kvbench.engine.device import synchronize
from kvbench.engine.model import load_model
from kvbench.kv import Budget
from kvbench.methods import build_method


def by_transformers(model: Any, ids: Sequence[int], new: int, attention: str) -> None:
    tokens = torch.tensor([list(ids)], device=model.device)
    cache = StaticCache(config=model.config, max_cache_len=len(ids) + new)
    never_ends = model.config.get_text_config().vocab_size
    settings = GenerationConfig(
        max_new_tokens=new, do_sample=False, eos_token_id=never_ends, pad_token_id=0
    )
    model.set_attn_implementation(attention)
    with torch.inference_mode():
        model.generate(tokens, past_key_values=cache, generation_config=settings)
    synchronize(model.device)
    model.set_attn_implementation(IMPLEMENTATION)


def by_kvbench(model: Any, ids: Sequence[int], new: int) -> None:
    methods = {"exact": (build_method("exact"), Budget())}
    reading = read(model, ids, methods, seed=0, name="x", room=new)
    answer_each(model, reading, Question((), Stopping(new)))
    synchronize(model.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--attention", default="sdpa", help="transformers' name of a backend")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = load_model(SHIPPED, device=device, dtype=dtype)
    switch_to_kvbench(model)
    ids = random_tokens(options.tokens)
    runs = {
        "transformers": partial(by_transformers, model, ids, options.new, options.attention),
        "exact": partial(by_kvbench, model, ids, options.new),
    }
    seconds = medians(runs, options.runs, time.perf_counter)
    for name, median in seconds.items():
        print(f"{name:14} {median:.3f} s for {options.tokens} + {options.new} tokens")
    print(f"exact over transformers: {seconds['exact'] / seconds['transformers']:.2f}")


if __name__ == "__main__":
    main()
