"""Whether the heavy neurons of the MLPs are the same on other texts, or at other checkpoints of
training.

H2O (arXiv 2306.14048), Figure 12 (three kinds of text; code is ours) and Figure 13 (checkpoints: the
paper's OPT-2.7B has none that are public; here Pythia-2.8B). The figures print no numbers. The score is
the Jaccard index of two sets, a layer at a time; two sets of shares p and q that have nothing to do with
each other have p q / (p + q - p q), which is `chance`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import Any

from _common import Run, started
from _neurons import WIKITEXT, counts_of, heavy_of
from torch import Tensor

TEXTS = {
    "wikitext": "",
    "penn_treebank": "task.dataset_name=mikasenghaas/ptb-text-only task.dataset_config=null "
    "task.dataset_column=sentence",
    "amazon": "task.dataset_name=fancyzhx/amazon_polarity task.dataset_config=null "
    "task.dataset_column=content",
    "code": "task.dataset_name=openai/openai_humaneval task.dataset_config=null "
    "task.dataset_column=canonical_solution",
}
"""What differs from WikiText-103, by kind of text; mirrors on the Hub."""


def overlap(one: Tensor, other: Tensor) -> dict[str, float | None]:
    """The Jaccard index of two sets of a layer's neurons ([neurons] bool each), the shares of neurons in
    them, and the index that such shares have by chance; None where neither set has a neuron."""
    p, q = (float(part.double().mean()) for part in (one, other))
    either = int((one | other).sum())
    return {
        "heavy": p,
        "heavy_other": q,
        "chance": p * q / (p + q - p * q) if either else None,
        "jaccard": int((one & other).sum()) / either if either else None,
    }


def main(given: Sequence[str]) -> None:
    """A row for each ordered pair, layer, and whether the sets were drawn at random. Own keys: above
    (the share of tokens); variants (what changes, by name: options of task or model)."""
    own: dict[str, Any] = {"limit": 4, "above": 0.2, "variants": TEXTS}
    run = Run(__file__, given, "model=opt_1_3b", WIKITEXT, **own)
    sets: dict[str, dict[str, dict[int, Tensor]]] = {"heavy": {}, "random": {}}
    for name, words in run.variants.items():
        one = run
        if "model." in words:
            one = Run(__file__, [*given, *words.split()], "model=opt_1_3b", WIKITEXT, **own)
        texts = [ids for _, ids in run.prompts(*words.split())]
        counts, least = counts_of(one.session.model, texts), run.above * sum(map(len, texts))
        sets["heavy"][name] = heavy_of(counts, least)
        sets["random"][name] = heavy_of(counts, least, (run.seed, name))
    rows = []
    for which, found in sets.items():
        for (a, one_of), (b, other) in permutations(found.items(), 2):
            for layer in one_of:
                where = {"which": which, "pair": f"{a}, {b}", "layer": layer, "of": "layers"}
                rows.append(where | overlap(one_of[layer], other[layer]))
    run.save(rows, y="jaccard", x="pair", by="which", panel="of")


if __name__ == "__main__":
    started(main)
