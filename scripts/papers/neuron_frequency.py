"""How often the neurons of MLPs are active, the most active first, and the power law through it.

H2O (arXiv 2306.14048), Figure 11: on WikiText-103. The figure prints no numbers.

    kvbench reproduce h2o_figure11      OPT-6.7B, a GPU
    kvbench reproduce h2o_figure11 model=recall_mini limit=1
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import WIKITEXT, Run, started
from _neurons import counts_of, heavy_of


def main(arguments: Sequence[str]) -> None:
    """Write a row for each prompt, layer and rank: the share of tokens at which the neuron of this rank
    is active, and the share of the layer's neurons that are heavy.

    Keys of its own: ranks, above (the share of tokens at which a heavy neuron is active), layers.
    """
    run = Run(
        __file__,
        arguments,
        "model=opt_6_7b",
        WIKITEXT,
        ranks=[1, 2, 4, 8, 16, 32, 64, 128, 256, 512],
        above=0.2,
        layers=4,
    )
    rows = []
    for prompt, ids in run.prompts():
        counts = counts_of(run.session.model, [ids])
        heavy = heavy_of(counts, run.above * len(ids))
        for layer in run.layer_numbers(run.layers):
            frequencies = (counts[layer].double() / len(ids)).sort(descending=True).values
            for rank in run.ranks:
                rows.append(
                    {
                        "prompt": prompt,
                        "layer": layer,
                        "rank": rank,
                        "frequency": float(frequencies[rank - 1]),
                        "of": "prompts",
                        "heavy": float(heavy[layer].double().mean()),
                    }
                )
    run.save(rows, y="frequency", x="rank", by="layer", panel="of", fit=(1, max(run.ranks)))


if __name__ == "__main__":
    started(main)
