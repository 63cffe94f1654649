"""What sharing one prefill saves: seconds of a job with eight methods over seconds of `exact` alone.

    python scripts/benchmarks/bench_sharing.py

A random-weight Llama (6 layers, hidden 256, 8 heads, 2 KV heads), one thread. Both jobs run in the
same process, in turn; a warm-up is left out and the medians are compared, in seconds of processor time,
which other programs of the machine disturb less than the clock (the table's are the clock's). Prints a
table; the last line is the ratio.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from kvbench.engine.attention import IMPLEMENTATION, register
from kvbench.engine.generate import Generation, run_forks
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method

METHODS = (
    *("exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "subgen", "balancekv"),
)


def build_model() -> LlamaForCausalLM:
    """The model of the measurement."""
    register()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=131072,
    )
    model = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def job(
    model: LlamaForCausalLM, ids: list[int], names: list[str], new_tokens: int, rate: float
) -> tuple[float, dict[str, Generation]]:
    """Processor seconds of one job over `names`, and what each generated."""
    methods = {name: (build_method(name), Budget(rate=rate)) for name in names}
    start = time.process_time()
    results = run_forks(model, ids, [], methods, Stopping(new_tokens), seed=0, example_id="bench")
    seconds = time.process_time() - start
    for name, result in results.items():
        if result.failure is not None:
            raise RuntimeError(f"{name} failed") from result.failure
    return seconds, results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.25)
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model()
    ids = torch.randint(2048, (arguments.tokens,)).tolist()
    seconds: dict[str, list[float]] = {"exact": [], "all": []}
    results: dict[str, Generation] = {}
    for run in range(arguments.runs + 1):
        for key, names in (("exact", ["exact"]), ("all", list(METHODS))):
            spent, results = job(model, ids, names, arguments.new_tokens, arguments.rate)
            if run:
                seconds[key].append(spent)
    table = Table(title=f"n = {arguments.tokens}, {arguments.new_tokens} new tokens, one thread")
    for column in ("method", "prefill s", "compress s", "decode s"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, result in results.items():
        cells = (result.prefill_s, result.compress_s, result.decode_s)
        table.add_row(name, *(f"{value:.3f}" for value in cells))
    Console().print(table)
    alone, together = (statistics.median(seconds[key]) for key in ("exact", "all"))
    print(f"exact alone {alone:.3f} s; {len(METHODS)} methods in one job {together:.3f} s")
    print(f"ratio {together / alone:.2f}")


if __name__ == "__main__":
    main()
