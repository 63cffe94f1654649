"""Likelihood of prompts without the heavy neurons of the MLPs, or without as many others.

H2O (arXiv 2306.14048), Table 12: perplexity of WikiText-103. Departure: the paper trains a GPT-2 on it
and tunes it again after pruning; here a model as it was published and no tuning, so that what tuning
recovers is not shown. Which neurons are heavy is counted on the first `calibration` prompts; the others
are judged.

    kvbench reproduce h2o_table12      GPT-2, a GPU
    kvbench reproduce h2o_table12 model=recall_mini limit=2
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from _common import WIKITEXT, Run, started
from _neurons import as_many_others, counts_of, heavy_of, logits_of, watched
from torch import Tensor

from kvbench.errors import UserError


def mean_nll(model: Any, ids: Sequence[int], dropped: dict[int, Tensor]) -> float:
    """Mean negative log-likelihood, in nats, of every token but the first, where the activations of the
    neurons `dropped` ([neurons] bool, by layer from 1) are set to 0."""

    def drop(layer: int, activations: Tensor) -> Tensor | None:
        neurons = dropped.get(layer + 1)
        if neurons is None:
            return None
        return activations.masked_fill(neurons.to(activations.device), 0.0)

    with watched(model, drop):
        logits = logits_of(model, ids)
    targets = torch.tensor(list(ids[1:]), device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), targets).double())


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt and set of neurons: the likelihood without them.

    Keys of its own: calibration (how many prompts are counted), above (the share of tokens at which a
    heavy neuron is active).
    """
    run = Run(__file__, arguments, "model=gpt2", WIKITEXT, limit=12, calibration=4, above=0.2)
    model = run.session.model
    prompts = list(run.prompts())
    if len(prompts) <= run.calibration:
        raise UserError(
            f"calibration is {run.calibration}; allowed: fewer than {len(prompts)} prompts"
        )
    texts = [ids for _, ids in prompts[: run.calibration]]
    heavy = heavy_of(counts_of(model, texts), run.above * sum(map(len, texts)))
    sets: dict[str, dict[int, Tensor]] = {
        "none": {},
        "heavy": heavy,
        "as many others": as_many_others(heavy, run.seed, "neurons"),
    }
    rows = []
    for prompt, ids in prompts[run.calibration :]:
        for label, dropped in sets.items():
            nll = mean_nll(model, ids, dropped)
            shares = [float(neurons.double().mean()) for neurons in dropped.values()]
            rows.append(
                {
                    "prompt": prompt,
                    "dropped": label,
                    "nll": nll,
                    "tokens": len(ids),
                    "of": "prompts",
                    "perplexity": math.exp(min(nll, 700.0)),
                    "share": sum(shares) / max(1, len(shares)),
                }
            )
    run.save(rows, y="nll", x="prompt", by="dropped", panel="of")


if __name__ == "__main__":
    started(main)
