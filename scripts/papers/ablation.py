"""BalanceKV's options, against a reference paired over the same prompts, layers and draws.

BalanceKV (arXiv 2502.07861), Figure 3 and appendix B:

- variants=figure3: error and seconds of layers 1 and 15 by block size and rate on TriviaQA, as the
  released notebook runs it;
- options (item balancekv_ablation): one option at a time;
- needle (balancekv_needle_ablation): options of the variant that protects tokens;
- confirm (balancekv_confirm): what was best at no cost, on other prompts.

The error is that of the last `exact` queries, which methods do not see (`kvbench.probes.layer_error`).
The published relative_error is released_error here (see `relative_errors`), and is of 10 draws.

    kvbench reproduce balancekv_figure3      Llama-3.1-8B, a GPU
    kvbench reproduce balancekv_figure3 model=recall_mini limit=1      16 s on one core
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
from _common import TRIVIAQA, Run, method_with, started

from kvbench.engine.row import layer_generator
from kvbench.errors import UserError
from kvbench.kv import Budget, LayerKV, keep_all
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import (
    SyntheticLayers,
    compress_measured,
    estimate,
    hold_out,
    relative_errors,
)

RELEASED = {"centre": "released", "order": "released", "weights": "released"}
NOTEBOOK: dict[str, dict[str, Any]] = {
    f"block_{size}": {**RELEASED, "temperature": 0.1, "block_size": size} for size in (256, 128, 64)
}
REFERENCES: dict[str, dict[str, Any]] = {"balancekv": {}, "uniform": {"name": "uniform"}}
SINGLE_OPTIONS: dict[str, list[Any]] = {
    "block_size": [64, 128, 512, 1024],
    "gamma": [0.0, 0.01, 0.1, 1.0, 16.0, 1e6],
    "weights": ["released", "none"],
    "centre": ["none", "released"],
    "value_offset": [0.0, 0.25, 1.0],
    "temperature": [0.5, 0.25],
    "use_values": [False],
    "normalise": [True],
    "selection": ["algorithm2"],
    "order": ["released"],
}
NEEDLE_OPTIONS: list[dict[str, Any]] = [
    {},
    {"threshold": -10.0},
    {"threshold": -20.0},
    {"threshold": -30.0},
    {"dilation": 0, "threshold": 0.0},
    {"dilation": 5, "threshold": 0.0},
    {"dilation": 0, "threshold": -10.0},
    {"dilation": 0, "threshold": -20.0},
]


def single_option_variants() -> dict[str, dict[str, Any]]:
    variants = dict(REFERENCES)
    for option, values in SINGLE_OPTIONS.items():
        for value in values:
            variants[f"{option} {value}"] = {option: value}
    variants["all released"] = {**RELEASED, "block_size": 128}
    for label, options in NOTEBOOK.items():
        variants[f"notebook {label}"] = options
    return variants


NEEDLE_VARIANTS = {
    f"needle {options}".removesuffix(" {}"): {"name": "balancekv_needle", **options}
    for options in NEEDLE_OPTIONS
}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "figure3": NOTEBOOK,
    "options": single_option_variants(),
    "needle": {**REFERENCES, **NEEDLE_VARIANTS},
    "confirm": {**REFERENCES, "temperature 0.5": {"temperature": 0.5}},
}
"""Options by label; ``name`` of the method where it is not balancekv. The first is the reference."""


def layers(run: Run) -> Iterator[tuple[str, int, LayerKV]]:
    """Prompt, number and tensors of each layer: of a model, or random."""
    if run.synthetic:
        for layer in run.layers:
            yield "synthetic", layer, SyntheticLayers().layer(layer - 1, max(run.layers))
        return
    yield from run.every_layer()


def errors_of_layer(run: Run, prompt: str, layer: int, kv: LayerKV) -> Iterator[dict[str, Any]]:
    """A row for each rate, draw and variant."""
    seen, queries, first = hold_out(kv, run.exact)
    exact = estimate(keep_all(kv), queries, first, kv)
    for rate in run.rates:
        budget = Budget(rate=rate, sink=run.exact, window=run.exact)
        for draw in range(run.draws):
            reference = None
            for label, options in VARIANTS[run.variants].items():
                method = method_with(options, "balancekv")
                generator = layer_generator(SEED_STRIDE * run.seed + draw, prompt, layer)
                compressed, cost = compress_measured(label, method, budget, generator, seen)
                errors = relative_errors(estimate(compressed, queries, first, kv), exact)
                reference = reference or errors[run.metric]
                yield {
                    "prompt": prompt,
                    "layer": layer,
                    "rate": rate,
                    "draw": draw,
                    **errors,
                    "variant": label,
                    "seconds": cost["compress_s"],
                    "change": errors[run.metric] / reference - 1,
                }


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer, rate, draw and variant: the three errors, the seconds of the
    compression, and `change`, the error over the reference's, less 1.

    Keys of its own: variants (of VARIANTS), metric (which error is drawn), rates, layers, draws, exact
    (tokens kept at both ends, whose last are the measured queries), synthetic (true: random layers).
    """
    run = Run(
        __file__,
        arguments,
        "model=llama31_8b_instruct",
        TRIVIAQA,
        limit=20,
        variants="figure3",
        metric="released_error",
        rates=[0.5, 0.25, 0.125],
        layers=[1, 15],
        draws=2,
        exact=256,
    )
    if run.variants not in VARIANTS:
        raise UserError(f"variants is {run.variants!r}; allowed: {', '.join(VARIANTS)}")
    rows: list[dict[str, Any]] = []
    for prompt, layer, kv in layers(run):
        rows += errors_of_layer(run, prompt, layer, kv)
    run.save(rows, y=run.metric, x="rate", by="variant", panel="layer")
    print(pd.DataFrame(rows).groupby("variant", sort=False)[["change", "seconds"]].mean())


if __name__ == "__main__":
    started(main)
