"""Milliseconds per token along an answer of many tokens, and their growth: the shipped model.

python scripts/benchmarks/bench_long_answers.py [--tokens 8192] [method ...]

A method that evicts holds as many entries at the last token as at the first, so that its tokens all cost
the same; an exact cache grows, and a token costs what reading it takes. The last number of a line is the
time of the last quarter over that of the first.
"""

from __future__ import annotations

import argparse
import itertools
import time
from dataclasses import dataclass, field

import torch

from kvbench.engine.generate import run_batch
from kvbench.engine.loading import ModelSpec, load_model, resolve_device, resolve_dtype
from kvbench.engine.prompts import Prompt
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods import build_method

PROMPT, BUDGET = 256, Budget(size=256, sink=4, window=32)


@dataclass(frozen=True)
class Clocked(Stopping):
    """Notes when each token is there."""

    times: list[float] = field(default_factory=list)

    def reached(self, tokens: object) -> bool:
        """As `Stopping.reached`."""
        self.times.append(time.perf_counter())
        return super().reached(tokens)  # type: ignore[arg-type]


def main() -> None:
    """Print the time per token of each quarter of the answer, per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["exact", "snapkv", "h2o"])
    parser.add_argument("--tokens", type=int, default=8192)
    asked = parser.parse_args()
    device = resolve_device("auto")
    if device.type == "cpu":
        torch.set_num_threads(1)
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    model = load_model(spec, device=device, dtype=resolve_dtype("auto", device))
    model.set_attn_implementation("kvbench")
    ids = torch.randint(5, 100, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    for name in asked.methods:
        stopping = Clocked(asked.tokens, decode=lambda tokens: "", settled=lambda text: False)
        prompt = Prompt(ids, [], {name: (build_method(name), BUDGET)}, stopping, "x")
        (answer,) = run_batch(model, [prompt], seed=0)
        failure = answer[name].failure
        if failure is not None:
            raise failure
        steps = [b - a for a, b in itertools.pairwise(stopping.times)]
        quarter = len(steps) // 4
        each = [
            1000 * sum(steps[i : i + quarter]) / quarter for i in range(0, 4 * quarter, quarter)
        ]
        told = "  ".join(f"{ms:6.2f}" for ms in each)
        print(
            f"{name:16} ms per token by quarter {told}  ratio {each[3] / each[0]:.2f}", flush=True
        )


if __name__ == "__main__":
    main()
