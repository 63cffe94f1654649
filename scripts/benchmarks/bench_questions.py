"""Ten questions on one compressed context of 4,096 tokens, over one question on it: the shipped model.

python scripts/benchmarks/bench_questions.py [method ...]

A question has 16 tokens and an answer of 16. The context is read and compressed in both; the ratio is
the last number of a line, the median of the runs.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from kvbench import compress
from kvbench.engine.loading import ModelSpec, load_model, resolve_device, resolve_dtype

CONTEXT, QUESTION, NEW_TOKENS, QUESTIONS, RUNS = 4096, 16, 16, 10, 3


def main() -> None:
    """Print the seconds for one question and for ten, and their ratio, per method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("methods", nargs="*", default=["exact", "snapkv", "balancekv"])
    device = resolve_device("auto")
    if device.type == "cpu":
        torch.set_num_threads(1)
    spec = ModelSpec(name="recall_mini", path="asset:recall_mini")
    model = load_model(spec, device=device, dtype=resolve_dtype("auto", device))
    model.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)

    def draw(tokens: int) -> list[int]:
        return torch.randint(5, 100, (tokens,), generator=generator).tolist()

    questions = [draw(QUESTION) for _ in range(QUESTIONS)]
    for method in parser.parse_args().methods:
        seconds: dict[int, list[float]] = {1: [], QUESTIONS: []}
        with compress(model, method, rate=0.25) as session:
            for run in range(RUNS + 1):  # the first warms up
                for count, found in seconds.items():
                    document = draw(CONTEXT)
                    start = time.perf_counter()
                    session.read(document).ask_all(questions[:count], max_new_tokens=NEW_TOKENS)
                    if run:
                        found.append(time.perf_counter() - start)
        one, ten = (statistics.median(found) for found in seconds.values())
        ratio = statistics.median(
            b / a for a, b in zip(seconds[1], seconds[QUESTIONS], strict=True)
        )
        print(f"{method:12} one {one:6.2f} s  {QUESTIONS} {ten:6.2f} s  ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
