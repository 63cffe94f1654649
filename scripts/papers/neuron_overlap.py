"""Whether the heavy neurons of the MLPs are the same on other texts, or at other checkpoints of
training.

H2O (arXiv 2306.14048), Figure 12 (three kinds of text; code is ours) and Figure 13 (checkpoints: the
paper's OPT-2.7B has none that are public; here Pythia-2.8B). The figures print no numbers. The score is
the Jaccard index of two sets, a layer at a time; two sets of shares p and q that have nothing to do with
each other have p q / (p + q - p q), which is `chance`.

    kvbench reproduce h2o_figure12      OPT-1.3B, a GPU; also h2o_figure13
    kvbench reproduce h2o_figure12 model=recall_mini limit=1
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from _common import WIKITEXT, Run, started
from _neurons import as_many_others, counts_of, heavy_of
from torch import Tensor

TEXTS = {
    "wikitext": "",
    "penn_treebank": "task.dataset=mikasenghaas/ptb-text-only task.config=null "
    "task.column=sentence",
    "amazon": "task.dataset=fancyzhx/amazon_polarity task.config=null task.column=content",
    "code": "task.dataset=openai/openai_humaneval task.config=null task.column=canonical_solution",
}
"""The options in which a kind of text differs from WikiText-103; mirrors on the Hub."""


def overlap(first: Tensor, second: Tensor) -> dict[str, float | None]:
    """The Jaccard index of two sets of a layer's neurons ([neurons] bool each), the shares of neurons in
    them, and the index that such shares have by chance; None where neither set has a neuron."""
    p, q = float(first.double().mean()), float(second.double().mean())
    union = int((first | second).sum())
    return {
        "heavy": p,
        "heavy_other": q,
        "chance": p * q / (p + q - p * q) if union else None,
        "jaccard": int((first & second).sum()) / union if union else None,
    }


def main(arguments: Sequence[str]) -> None:
    """Write a row for each ordered pair of variants and layer: of the heavy neurons, and of as many that
    were drawn at random (column `which`).

    Keys of its own: above (the share of tokens at which a heavy neuron is active); variants (what
    changes, by name: options of task or model).
    """
    own: dict[str, Any] = {"limit": 4, "above": 0.2, "variants": TEXTS}
    run = Run(__file__, arguments, "model=opt_1_3b", WIKITEXT, **own)
    heavy: dict[str, dict[int, Tensor]] = {}
    for name, text in run.variants.items():
        overrides = text.split()
        model_run = run
        if "model." in text:
            model_run = Run(__file__, [*arguments, *overrides], "model=opt_1_3b", WIKITEXT, **own)
        texts = [ids for _, ids in run.prompts(*overrides)]
        counts = counts_of(model_run.session.model, texts)
        heavy[name] = heavy_of(counts, run.above * sum(map(len, texts)))
    drawn = {name: as_many_others(neurons, run.seed, name) for name, neurons in heavy.items()}
    rows = []
    for which, sets in (("heavy", heavy), ("random", drawn)):
        for (name, neurons), (other_name, others) in permutations(sets.items(), 2):
            for layer in neurons:
                pair = f"{name}, {other_name}"
                where = {"which": which, "pair": pair, "layer": layer, "of": "layers"}
                rows.append(where | overlap(neurons[layer], others[layer]))
    run.save(rows, y="jaccard", x="pair", by="which", panel="of")


if __name__ == "__main__":
    started(main)
