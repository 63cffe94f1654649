"""The same comparison in kvpress and in kvbench: six methods on the same prompts, seconds and answers.

    make bench-kvpress ARGS='--prompts 5'      (--lines, --new-tokens, --rate)

Both read LongEval lines with the shipped model, at the same number of entries, and generate as many
tokens greedily from the prompt as a whole. kvpress compresses inside transformers' `generate`, once per
method and prompt; kvbench prefills a prompt once for all methods and decodes them together. The two take
turns prompt by prompt; a warm-up is left out. Seconds are of processor time, on one thread. A third
turn is kvbench with `exact` alone: what kvpress takes over that bounds the ratio from above. kvpress
needs a transformers of its own, so this runs in the environment of `make test-references`. It prints a
table of right answers and bytes, and the ratio of the seconds; nothing is written.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import kvpress
import torch
from _shared import SHIPPED
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig

from kvbench.engine.answer import Stopping
from kvbench.engine.ask import Question, answer_each, read
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.run.encoding import encode_example
from kvbench.run.session import Session
from kvbench.tasks.longeval_lines import LongEvalLines

PRESSES: dict[str, tuple[str, dict[str, int]] | None] = {
    "exact": None,
    "streaming_llm": ("StreamingLLMPress", {"n_sink": 32}),
    "uniform": ("RandomPress", {}),
    "snapkv": ("SnapKVPress", {"window_size": 32}),
    "pyramidkv": ("PyramidKVPress", {"window_size": 32}),
    "h2o": ("ObservedAttentionPress", {}),
}
"""kvbench's methods, each with kvpress's class and its options. They differ where kvbench follows the
paper: uniform weights the entries that it keeps, h2o evicts while it decodes."""
NEEDS_EAGER = ("ObservedAttentionPress",)
"""Presses that read the attention matrix, which transformers' eager attention alone makes."""


@dataclass
class Tally:
    """Seconds of one way to compare, and right answers and bytes held at the end, by method."""

    seconds: float = 0.0
    right: dict[str, int] = field(default_factory=dict)
    held: dict[str, int] = field(default_factory=dict)


def load() -> Session:
    return Session(SHIPPED, torch.device("cpu"), torch.float32)


def with_kvpress(
    model: Any, ids: list[int], budget: Budget, new_tokens: int
) -> dict[str, tuple[list[int], int]]:
    """New tokens and bytes held, by method: one `generate` under each press."""
    n = len(ids)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
    )
    answers = {}
    for method, press in PRESSES.items():
        compressing: Any = nullcontext()
        model.set_attn_implementation("sdpa")
        if press is not None:
            name, options = press
            model.set_attn_implementation("eager" if name in NEEDS_EAGER else "sdpa")
            ratio = 1.0 - (budget.capacity(n) + 0.5) / n  # it keeps int(n * (1 - ratio))
            compressing = getattr(kvpress, name)(ratio, **options)(model)
        tokens = torch.tensor([ids])
        with torch.inference_mode(), compressing:
            output = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), generation_config=config
            )
        layers = output.past_key_values.layers
        nbytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
        answers[method] = (output.sequences[0, n:].tolist(), nbytes)
    return answers


def with_kvbench(
    model: Any, ids: list[int], budget: Budget, new_tokens: int, names: Iterable[str] = PRESSES
) -> dict[str, tuple[list[int], int]]:
    """New tokens and bytes held, by method: one prefill for all of them."""
    methods = {method: (build_method(method), budget) for method in names}
    reading = read(model, ids, methods, seed=0, name="bench", room=new_tokens)
    found = answer_each(model, reading, Question((), Stopping(new_tokens)))
    answers = {}
    for method, answer in found.items():
        if answer.failure is not None:
            raise RuntimeError(f"{method} failed") from answer.failure
        assert answer.cost.cache_bytes_end is not None
        answers[method] = (answer.tokens, answer.cost.cache_bytes_end)
    return answers


WAYS: Mapping[str, Callable[..., dict[str, tuple[list[int], int]]]] = {
    "kvpress": with_kvpress,
    "kvbench": with_kvbench,
    "kvbench, exact alone": partial(with_kvbench, names=["exact"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="kvpress and kvbench on the same prompts")
    parser.add_argument("--lines", type=int, default=100, help="of a record")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=8)
    parser.add_argument("--rate", type=float, default=0.25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    sessions = {way: load() for way in WAYS}
    encoder = sessions["kvbench"].encoder
    task = LongEvalLines(num_lines=[arguments.lines], num_examples=arguments.prompts + 1)
    budget = Budget(rate=arguments.rate)
    tallies = {way: Tally() for way in WAYS}
    for number, example in enumerate(task.examples(encoder)):
        encoded = encode_example(example, encoder)
        ids = [*encoded.context_ids, *encoded.question_ids]
        for way, generate in WAYS.items():
            start = time.process_time()
            answers = generate(sessions[way].model, ids, budget, arguments.new_tokens)
            if number == 0:  # the warm-up
                continue
            tally = tallies[way]
            tally.seconds += time.process_time() - start
            for method, (tokens, nbytes) in answers.items():
                text = encoder.decode(tokens)
                for stop in example.stop:
                    text = text.partition(stop)[0]
                right = int(task.score(text, example)["score"])
                tally.right[method] = tally.right.get(method, 0) + right
                tally.held[method] = nbytes
    title = f"{arguments.prompts} prompts of about {len(ids)} tokens, rate {arguments.rate}"
    table = Table("method", title=title)
    for way in ("kvpress", "kvbench"):
        table.add_column(f"{way}: right", justify="right")
        table.add_column(f"{way}: bytes", justify="right")
    theirs, ours = tallies["kvpress"], tallies["kvbench"]
    for method in PRESSES:
        cells = [theirs.right, theirs.held, ours.right, ours.held]
        table.add_row(method, *(f"{by_method[method]:,}" for by_method in cells))
    Console().print(table)
    alone = tallies["kvbench, exact alone"].seconds
    print(
        f"kvpress {theirs.seconds:.1f} s, kvbench {ours.seconds:.1f} s, `exact` alone {alone:.1f} s"
    )
    print(f"ratio {theirs.seconds / ours.seconds:.2f}; bound {theirs.seconds / alone:.2f}")


if __name__ == "__main__":
    main()
