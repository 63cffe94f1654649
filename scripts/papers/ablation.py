"""BalanceKV's options, against a reference paired over the same prompts, layers and draws.

BalanceKV (arXiv 2502.07861), Figure 3 (variants=figure3: error and seconds of layers 1 and 15 by block
size and rate on TriviaQA, as the released notebook runs it) and appendix B (variants=options, one at a
time; needle: of the variant that protects tokens; confirm: what was best at no cost, on other prompts).
The error is `kvbench.probes.layer_error`'s, of the last `exact` queries, which methods do not see. The
published relative_error is released_error here (see `relative_errors`), and is of 10 draws.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd
from _common import Run, started

from kvbench.engine.fork import layer_generator
from kvbench.errors import UserError
from kvbench.kv import Budget, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import SyntheticLayers, compress_measured, estimate, relative_errors

RELEASED: dict[str, Any] = {"centre": "released", "order": "released", "weights": "released"}
NOTEBOOK = {f"block_{b}": {**RELEASED, "temperature": 0.1, "block_size": b} for b in (256, 128, 64)}
NEEDLE: list[dict[str, Any]] = [{"threshold": t} for t in (-10.0, -20.0, -30.0)]
NEEDLE += [{"dilation": d, "threshold": t} for d, t in ((0, 0.0), (5, 0.0), (0, -10.0), (0, -20.0))]
OPTIONS: dict[str, list[Any]] = {
    "block_size": [64, 128, 512, 1024],
    "gamma": [0.0, 0.01, 0.1, 1.0, 16.0, 1e6],
    "weights": ["released", "none"],
    "centre": ["none", "released"],
    "value_offset": [0.0, 0.25, 1.0],
    "temperature": [0.5, 0.25],
}
OPTIONS |= {"use_values": [False], "normalise": [True]}
OPTIONS |= {"selection": ["algorithm2"], "order": ["released"]}
WHOLE: dict[str, dict[str, Any]] = {"balancekv": {}, "uniform": {"name": "uniform"}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "figure3": NOTEBOOK,
    "options": {
        **WHOLE,
        **{f"{key} {one}": {key: one} for key, values in OPTIONS.items() for one in values},
        "all released": {**RELEASED, "block_size": 128},
        **{f"notebook {label}": options for label, options in NOTEBOOK.items()},
    },
    "needle": WHOLE
    | {"needle": {"name": "balancekv_needle"}}
    | {f"needle {options}": {"name": "balancekv_needle", **options} for options in NEEDLE},
    "confirm": {**WHOLE, "temperature 0.5": {"temperature": 0.5}},
}
"""Options by label; ``name`` of the method where it is not balancekv. The first is the reference."""


def layers(run: Run) -> Iterator[tuple[str, int, LayerKV]]:
    """Prompt, number and tensors of each layer: of a model, or random."""
    for layer in run.layers if run.synthetic else ():
        yield "synthetic", layer, SyntheticLayers().layer(layer - 1, max(run.layers))
    for prompt, ids in () if run.synthetic else run.prompts():
        yield from ((prompt, layer, kv) for layer, kv in run.captured(ids, run.layers))


def main(given: Sequence[str]) -> None:
    """A row for each prompt, layer, rate, draw and variant; `change`: error / the reference's - 1. Own
    keys: variants (of VARIANTS), metric, rates, layers, draws, exact, synthetic (random layers)."""
    own: dict[str, Any] = {"limit": 20, "variants": "figure3", "metric": "released_error"}
    own |= {"rates": [0.5, 0.25, 0.125], "layers": [1, 15], "draws": 2, "exact": 256}
    model, task = "model=llama31_8b_instruct", "task=longbench task.datasets=[triviaqa]"
    run = Run(__file__, given, model, task, **own)
    if run.variants not in VARIANTS:
        raise UserError(f"variants is {run.variants!r}; allowed: {', '.join(VARIANTS)}")
    rows = []
    for prompt, layer, kv in layers(run):
        first = kv.n - run.exact
        assert kv.queries is not None
        queries = kv.queries[:, :, first:]
        exact = estimate(keep_all(kv), queries, first, kv)
        seen = replace(kv, queries=kv.queries[:, :, :first], withheld=run.exact)
        for rate in run.rates:
            budget = Budget(rate=rate, sink=run.exact, window=run.exact)
            for draw in range(run.draws):
                reference = None
                for label, options in VARIANTS[run.variants].items():
                    method = build_method(**{"name": "balancekv", **options})
                    generator = layer_generator(SEED_STRIDE * run.seed + draw, prompt, layer)
                    held, cost = compress_measured(label, method, budget, generator, seen)
                    found = relative_errors(estimate(held, queries, first, kv), exact)
                    reference = reference or found[run.metric]
                    row = {"prompt": prompt, "layer": layer, "rate": rate, "draw": draw, **found}
                    row |= {"variant": label, "seconds": cost["compress_s"]}
                    rows.append(row | {"change": found[run.metric] / reference - 1})
    run.save(rows, y=run.metric, x="rate", by="variant", panel="layer")
    print(pd.DataFrame(rows).groupby("variant", sort=False)[["change", "seconds"]].mean())


if __name__ == "__main__":
    started(main)
