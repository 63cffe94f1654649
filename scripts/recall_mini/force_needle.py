"""Which layer copies the needle's answer: SnapKV with the needle forced into its choice, layer by layer.

SnapKV at rate 0.25 finds the needle in no prompt of the shipped model. Here the needle's tokens are put
among the entries that SnapKV keeps (in place of its lowest-scored ones, so that the budget stays) at
one layer alone, at all layers but one, and at all of them; and SnapKV runs as it is with wider
pooling. Each line: what was changed, the share of prompts whose answer contains the expected one word
for word, the mean share of the expected words, and the number of prompts. Layers are numbered from 0, as
in the model.

    python scripts/recall_mini/force_needle.py [--lengths 512] [--depths 50] [--out FILE]

--out writes the lines as CSV (`make results-lines`: results/recall_mini/force_needle.csv, a table in
the model's README).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import pandas as pd
import torch
from shipped import ASSET, needle_task

from kvbench.engine.ask import Question, answer_each, read
from kvbench.engine.model import ModelSpec
from kvbench.kv import Budget, CompressedKV, LayerKV
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.methods.snapkv import SnapKV, keep_best, window_scores
from kvbench.run.session import Session
from kvbench.tasks.base import Example

KERNEL_SIZES = (5, 15, 31, 63)


@dataclass(frozen=True, kw_only=True)
class Forced(SnapKV):
    """SnapKV that keeps the positions start .. stop - 1 at some layers, whatever their score."""

    start: int
    stop: int
    layers: frozenset[int]

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        capacity = self.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        scores = window_scores(layer, budget.window, self.kernel_size, self.pooling)
        if layer.layer_index in self.layers:
            scores[:, :, self.start : self.stop] = torch.inf
        return keep_best(layer, scores, capacity - budget.window, budget.window, False)


def variants(example: Example, layers: int) -> Iterator[tuple[str, Method]]:
    """For one prompt of a model with so many layers: what is changed, and the method that does it."""
    start = int(example.fields["needle_start"])
    stop = start + int(example.fields["needle_tokens"])

    def forced(chosen: Iterable[int]) -> Forced:
        return Forced(start=start, stop=stop, layers=frozenset(chosen))

    yield "exact", build_method("exact")
    for size in KERNEL_SIZES:
        yield f"snapkv, kernel_size {size}", build_method("snapkv", kernel_size=size)
    for layer in range(layers):
        yield f"snapkv, needle kept at layer {layer} alone", forced([layer])
    for layer in range(layers):
        others = set(range(layers)) - {layer}
        yield f"snapkv, needle kept at all layers but {layer}", forced(others)
    yield "snapkv, needle kept at all layers", forced(range(layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ASSET))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--depths", type=float, nargs="+", default=[0, 25, 50, 75, 100])
    parser.add_argument("--examples", type=int, default=1, help="prompts per length and depth")
    parser.add_argument("--rate", type=float, default=0.25)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, help="a CSV file")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    task = needle_task(args.lengths, args.depths, args.examples)
    spec = ModelSpec(name="model", path=args.model)
    session = Session(spec, torch.device("cpu"), torch.float32)
    layers = session.model.config.num_hidden_layers
    budget = Budget(rate=args.rate)
    scores: dict[str, list[tuple[float, float]]] = defaultdict(list)
    examples = task.examples(session.encoder)
    for example in examples:
        methods = {label: (method, budget) for label, method in variants(example, layers)}
        ids = (*(example.context_ids or ()), *(example.question_ids or ()))
        question = Question((), session.stopping(example))
        room = example.max_new_tokens
        reading = read(session.model, ids, methods, seed=0, name=example.id, room=room)
        answers = answer_each(session.model, reading, question)
        for label, answer in answers.items():
            if answer.failure is not None:
                raise answer.failure
            score = task.score(session.encoder.decode(answer.tokens), example)
            scores[label].append((score["containment"], score["word_recall"]))
    span = f"{min(args.lengths)} to {max(args.lengths)} tokens, rate {args.rate:g}"
    print(f"needle in {len(examples)} prompts of {span}: answer contained, words recalled")
    rows = pd.DataFrame(
        {
            "variant": label,
            "containment": fmean(containment for containment, _ in pairs),
            "word_recall": fmean(recall for _, recall in pairs),
            "n": len(pairs),
        }
        for label, pairs in scores.items()
    )
    print(rows.to_string(index=False, float_format="%.2f"))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        rows.to_csv(args.out, index=False, float_format="%.4g")


if __name__ == "__main__":
    main()
