"""Likelihood of prompts without the heavy neurons of the MLPs, or without as many others.

H2O (arXiv 2306.14048), Table 12: perplexity of WikiText-103. Departure: the paper trains a GPT-2 on it
and tunes it again after pruning; here a model as it was published and no tuning, so that what tuning
recovers is not shown. Which neurons are heavy is counted on the first `calibration` prompts; the others
are judged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from _common import Run, started
from _neurons import WIKITEXT, counts_of, heavy_of, logits_of, watched
from torch import Tensor

from kvbench.errors import UserError


def mean_nll(model: Any, ids: Sequence[int], dropped: dict[int, Tensor]) -> float:
    """Mean negative log-likelihood in nats of every token but the first; `dropped`: by layer, from 1,
    [neurons] bool, whose activations are set to 0."""

    def drop(layer: int, out: Tensor) -> Tensor | None:
        mask = dropped.get(layer + 1)
        return None if mask is None else out.masked_fill(mask.to(out.device), 0.0)

    with watched(model, drop):
        logits = logits_of(model, ids)
    at = torch.tensor(list(ids[1:]), device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[:-1].float(), at).double())


def main(given: Sequence[str]) -> None:
    """A row for each prompt and set of neurons. Own keys: calibration (prompts), above (the share of
    tokens)."""
    own: dict[str, Any] = {"limit": 12, "calibration": 4, "above": 0.2}
    run = Run(__file__, given, "model=gpt2", WIKITEXT, **own)
    prompts = list(run.prompts())
    if len(prompts) <= run.calibration:
        raise UserError(
            f"calibration is {run.calibration}; allowed: fewer than {len(prompts)} prompts"
        )
    texts = [ids for _, ids in prompts[: run.calibration]]
    counts, least = counts_of(run.session.model, texts), run.above * sum(map(len, texts))
    sets: dict[str, dict[int, Tensor]] = {"none": {}, "heavy": heavy_of(counts, least)}
    sets["as many others"] = heavy_of(counts, least, (run.seed, "neurons"))
    rows = []
    for prompt, ids in prompts[run.calibration :]:
        for label, dropped in sets.items():
            nll = mean_nll(run.session.model, ids, dropped)
            share = [float(part.double().mean()) for part in dropped.values()]
            row = {
                "prompt": prompt,
                "dropped": label,
                "nll": nll,
                "tokens": len(ids),
                "of": "prompts",
            }
            row |= {
                "perplexity": math.exp(min(nll, 700.0)),
                "share": sum(share) / max(1, len(share)),
            }
            rows.append(row)
    run.save(rows, y="nll", x="prompt", by="dropped", panel="of")


if __name__ == "__main__":
    started(main)
