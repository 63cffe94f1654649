"""Seconds to generate RULER's prompts: 100 samples of each task at 32k tokens, on one core.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_ruler.py [--samples 100] [--length 32768] [--tasks]

It prints the processor seconds of each task for 100 samples, with the shipped tokenizer, and in the last
line the slowest task's; nothing is written.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from transformers import AutoTokenizer

import kvbench
from kvbench.prompts import PromptEncoder
from kvbench.tasks.ruler import GENERATED, Ruler


def main() -> None:
    """Measure each task and print a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--length", type=int, default=32_768)
    parser.add_argument("--tasks", nargs="+", default=list(GENERATED))
    options = parser.parse_args()
    shipped = Path(kvbench.__file__).parent / "assets" / "recall_mini"
    encoder = PromptEncoder(AutoTokenizer.from_pretrained(shipped))
    Ruler(tasks=["niah_single_2"], lengths=[2048], num_examples=1).examples(
        encoder
    )  # reads word lists
    slowest = 0.0
    for name in options.tasks:
        task = Ruler(tasks=[name], lengths=[options.length], num_examples=options.samples)
        start = time.process_time()
        examples = task.examples(encoder)
        seconds = (time.process_time() - start) * 100 / len(examples)
        tokens = [len(e.context_ids or ()) + len(e.question_ids or ()) for e in examples]
        share = sum(tokens) / len(tokens) / (options.length - examples[0].max_new_tokens)
        print(
            f"{name:18} {seconds:6.1f} s CPU per 100 samples, {100 * share:.2f} % of the room used"
        )
        slowest = max(slowest, seconds)
    print(f"{slowest:.1f}")


if __name__ == "__main__":
    main()
