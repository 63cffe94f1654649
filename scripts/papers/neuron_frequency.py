"""How often the neurons of MLPs are active, the most active first, and the power law through it.

H2O (arXiv 2306.14048), Figure 11: on WikiText-103. The figure prints no numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

from _common import Run, spread, started
from _neurons import WIKITEXT, counts_of, heavy_of

from kvbench.engine.architecture import compressible_layers


def main(given: Sequence[str]) -> None:
    """A row for each prompt, layer and rank: the share of tokens at which the neuron is active, and the
    share of the layer's neurons that are heavy. Own keys: ranks, above (the share of tokens), layers."""
    ranks = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
    own = {"ranks": ranks, "above": 0.2, "layers": 4}
    run = Run(__file__, given, "model=opt_6_7b", WIKITEXT, **own)
    rows = []
    for prompt, ids in run.prompts():
        counts = counts_of(run.session.model, [ids])
        heavy = heavy_of(counts, run.above * len(ids))
        every = [layer + 1 for layer in compressible_layers(run.session.model)]
        for layer in spread(every, run.layers):
            often = (counts[layer].double() / len(ids)).sort(descending=True).values
            for rank in run.ranks:
                row = {"prompt": prompt, "layer": layer, "rank": rank}
                row |= {"frequency": float(often[rank - 1]), "of": "prompts"}
                rows.append(row | {"heavy": float(heavy[layer].double().mean())})
    run.save(rows, y="frequency", x="rank", by="layer", panel="of", fit=(1, max(run.ranks)))


if __name__ == "__main__":
    started(main)
