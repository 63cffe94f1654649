"""Accuracy of recall_mini with its whole cache, greedy decoding, on seeds it was not trained on.

    python scripts/recall_mini/evaluate.py [--lines 20 50] [--needle 512] [--examples 100] [--out FILE]

It uses transformers alone for the model and kvbench's tasks for prompts and scores, so that it also
checks the engine's ``exact`` method from outside. It prints a line for each number of lines, and for
each length and depth of the needle, and writes them as CSV where --out names a file
(`make results-lines`: results/recall_mini/accuracy.csv, the table in the model's README).
"""

from __future__ import annotations

import argparse
import csv
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from shipped import ASSET, needle_task
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Task
from kvbench.tasks.longeval_lines import LongEvalLines


@torch.no_grad()
def evaluate(
    model: Any, encoder: PromptEncoder, task: Task, by: tuple[str, ...]
) -> dict[str, tuple[float, int]]:
    """Mean score and number of examples, by the values of the record fields `by`."""
    scores: dict[str, list[float]] = defaultdict(list)
    for example in task.examples(encoder):
        context = example.context_ids or encoder.encode_text(example.context)
        question = example.question_ids or encoder.encode_text(example.question)
        ids = torch.tensor([[*context, *question]], device=model.device)
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=example.max_new_tokens,
        )
        text = encoder.decode(output[0, ids.shape[1] :].tolist())
        group = " ".join(f"{name}={example.fields[name]}" for name in by)
        scores[group].append(task.score(text, example)["score"])
    return {group: (sum(values) / len(values), len(values)) for group, values in scores.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ASSET))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--examples", type=int, default=100, help="per number of lines")
    parser.add_argument("--lines", type=int, nargs="*", default=[20, 50, 100, 200])
    parser.add_argument("--files", nargs="*", default=[], help="official LongEval test cases")
    parser.add_argument("--needle", type=int, nargs="*", default=[512, 1024, 2048, 4096])
    parser.add_argument("--depths", type=int, nargs="*", default=list(range(0, 101, 10)))
    parser.add_argument("--needle-examples", type=int, default=5, help="per length and depth")
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--out", type=Path, help="a CSV file")
    args = parser.parse_args(arguments)
    logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model).eval()
    encoder = PromptEncoder(tokenizer=AutoTokenizer.from_pretrained(args.model))
    jobs: list[tuple[str, Task, tuple[str, ...]]] = []
    if args.lines:
        lines = LongEvalLines(num_lines=args.lines, num_examples=args.examples, seed=args.seed)
        jobs.append(("longeval_lines", lines, ("num_lines",)))
    if args.files:
        jobs.append(("longeval_lines official", LongEvalLines(files=args.files), ("num_lines",)))
    if args.needle:
        needle = needle_task(args.needle, args.depths, args.needle_examples, args.seed)
        jobs.append(("needle", needle, ("length", "depth")))
    rows = []
    for name, task, by in jobs:
        start = time.time()
        for group, (score, count) in sorted(evaluate(model, encoder, task, by).items()):
            rows.append({"task": name, "group": group, "score": round(score, 4), "n": count})
            print(json.dumps(rows[-1]))
        print(f"# {name}: {time.time() - start:.0f} s", flush=True)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, ["task", "group", "score", "n"], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
