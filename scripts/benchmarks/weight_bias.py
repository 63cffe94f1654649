"""Are the weights of sampled entries unbiased? The mean, over draws, of the weighted exp-sum.

    python scripts/benchmarks/weight_bias.py [--draws 300] [--rate 0.25]

For each method: sum over kept entries of w exp(q.k) divided by the exact sum over all entries, for
the last 16 queries and all heads, averaged over the draws; 1 is unbiased. Synthetic layers
(`SyntheticLayers`) and the layers of the shipped model on one LongEval record. It prints the mean of the
ratios, their standard error over draws, and the smallest and largest mean of a head; nothing is written.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from _shared import SHIPPED
from rich.console import Console
from rich.table import Table

from kvbench.engine.fork import layer_generator
from kvbench.engine.loading import load_model
from kvbench.engine.prefill import capture_layers
from kvbench.engine.tokenizer import load_tokenizer, prompt_encoder
from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.probes.layer_error import SyntheticLayers
from kvbench.run.encoding import encode_example
from kvbench.tasks.longeval_lines import LongEvalLines

METHODS: dict[str, Method] = {
    "uniform": build_method("uniform"),
    "balancekv": build_method("balancekv"),
    "balancekv, normalise": build_method("balancekv", normalise=True),
    "balancekv, gamma 0": build_method("balancekv", gamma=0.0),
    "balancekv, gamma 0, normalise": build_method("balancekv", gamma=0.0, normalise=True),
}
QUERIES = 16


def layers() -> Iterator[tuple[str, LayerKV]]:
    """The layers that are measured, by name."""
    yield "synthetic, 64 clusters", SyntheticLayers(n=2048).layer(0, 1)
    yield "synthetic, no clusters", SyntheticLayers(n=2048, clusters=0).layer(0, 1)
    encoder = prompt_encoder(load_tokenizer(SHIPPED), SHIPPED)
    model = load_model(SHIPPED, device=torch.device("cpu"), dtype=torch.float32)
    example = LongEvalLines(num_lines=[150], num_examples=1).examples(encoder)[0]
    encoded = encode_example(example, encoder)
    ids = [*encoded.context_ids, *encoded.question_ids]
    for index, layer in capture_layers(model, ids, [0, 1, 2, 3]).items():
        yield f"recall_mini, layer {index + 1}", layer


def exp_sums(layer: LayerKV, keys: torch.Tensor, log_weights: torch.Tensor | None) -> torch.Tensor:
    """Log of the weighted exp-sums of the last queries over these entries, [heads, QUERIES] float64."""
    assert layer.queries is not None
    queries = layer.queries[0, :, -QUERIES:].double().unflatten(0, (keys.shape[1], -1))
    logits = queries @ keys[0].double()[:, None].mT * layer.scaling
    if log_weights is not None:
        logits = logits + log_weights[0].double()[:, None, None]
    return logits.logsumexp(-1).flatten(0, 1)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--rate", type=float, default=0.25)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    budget = Budget(rate=arguments.rate)
    table = Table(title=f"weighted exp-sum / exact, rate {arguments.rate}, {arguments.draws} draws")
    for column in ("layer", "method", "mean", "standard error", "heads"):
        table.add_column(column)
    for name, layer in layers():
        exact = exp_sums(layer, layer.keys, None)
        for label, method in METHODS.items():
            ratios = []
            for draw in range(arguments.draws):
                entries = method.compress(layer, budget, layer_generator(draw, "bias", 0))
                sums = exp_sums(layer, entries.keys, entries.log_weights)
                ratios.append((sums - exact).exp().mean(-1))
            by_draw_and_head = torch.stack(ratios)
            by_draw, by_head = by_draw_and_head.mean(1), by_draw_and_head.mean(0)
            mean = float(by_draw.mean())
            error = float(by_draw.std() / arguments.draws**0.5)
            low, high = float(by_head.min()), float(by_head.max())
            table.add_row(name, label, f"{mean:.3f}", f"{error:.3f}", f"{low:.3f} .. {high:.3f}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
