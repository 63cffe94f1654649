"""Decoding at rate 0.25 over decoding with the exact cache: CPU seconds per token, one thread.

    python scripts/benchmarks/bench_decode.py [--tokens 16384] [--new 64] [--rounds 5] [method ...]

The shipped model reads one prompt once; then the methods take turns, each decoding from a copy of its
cache. Printed are milliseconds per token (median of the rounds), the same of a prompt of 64 tokens,
which no cache goes below, and last each method's speed over exact's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from kvbench.engine.fork import Fork
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.loading import ModelSpec, load_model
from kvbench.engine.prefill import prefill
from kvbench.engine.rows import DecodingRow, decode_rows, picked
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method

FLOOR = "(64 tokens)"


def read(model: PreTrainedModel, n: int, names: list[str], new: int) -> dict[str, DecodingRow]:
    """A random prompt of n tokens and each method's cache of it, with the first new token chosen."""
    ids = torch.randint(5, 100, (n,), generator=torch.Generator().manual_seed(0)).tolist()
    budget = Budget(rate=0.25)
    forks = [Fork(name, build_method(name), budget, 0, "x", room=new) for name in names]
    start = prefill(model, ids, forks)
    rows = {}
    for fork in forks:
        if fork.failure is not None:
            raise fork.failure
        row = DecodingRow(fork, Stopping(new), start.n, start.prefill_s)
        row.take(int(picked([row], start.logits[None])[0, 0]), finite=True)
        rows[fork.label] = row
    return rows


def seconds(model: PreTrainedModel, row: DecodingRow) -> float:
    """CPU seconds of the answer's other tokens, from a copy of the row."""
    copy = replace(row, fork=row.fork.clone(), chosen=list(row.chosen))
    begun = time.process_time()
    decode_rows(model, [copy], StepGraphs())
    taken = time.process_time() - begun
    if copy.fork.failure is not None:
        raise copy.fork.failure
    return taken


@torch.inference_mode()
def main() -> None:
    """Print the table, and the ratios last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "methods", nargs="*", default=["snapkv", "streaming_llm", "h2o", "balancekv"]
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    model = load_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    model.set_attn_implementation("kvbench")
    rows = read(model, asked.tokens, ["exact", *asked.methods], asked.new)
    rows[FLOOR] = read(model, 64, ["exact"], asked.new)["exact"]
    found: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(asked.rounds + 1):  # the first warms up
        for name, row in rows.items():
            found[name].append(seconds(model, row) / (asked.new - 1))
    each = {name: statistics.median(times[1:]) for name, times in found.items()}
    for name, taken in each.items():
        print(f"{name:16} {1000 * taken:7.2f} ms per token")
    print(f"most that any cache could gain: {each['exact'] / each[FLOOR]:.2f}")
    told = ", ".join(f"{name} {each['exact'] / each[name]:.2f}" for name in asked.methods)
    print(f"speed over exact's, {asked.tokens:,} + {asked.new} tokens: {told}")


if __name__ == "__main__":
    main()
