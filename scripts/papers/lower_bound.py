"""The INDEX instance behind BalanceKV's lower bound: which bits are read from what a method holds.

BalanceKV (arXiv 2502.07861), Theorem 3.2 and appendix C. Alice has n random bits, in n / d groups of d.
Everybody knows a key for each group, a random corner of a cube of norm r, and a random sign for each
bit. For a bit that is 1 she writes a pair: its group's key, and as value its sign times the unit vector
of its place in the group; the pairs come in random order. Bob asks with the key of a bit's group and
says 1 where the bit's coordinate of the attention, times its sign, is above exp(r^2 / sqrt(d)) / (40
max{d exp(r^2 / sqrt(d)), |U|}), of |U| pairs. The theorem: memory of the order of min{1 / eps^2,
d exp(2 r^2 / sqrt(d))} bits is needed for equation (2), ||z - a|| <= eps ||softmax|| ||V||_F.

Here r^2 = d, so that the minimum is 1 / eps^2 for every n that can be run, and the instance is that of
eps = 1 / sqrt(n). The paper's n is a small constant times as large; without it the exact cache (rate 1)
misreads some bits, too. An entry takes 64 d bits, so that no method comes near the bound.

    kvbench reproduce balancekv_theorem3_2      random data, no model
    kvbench reproduce balancekv_theorem3_2 model=recall_mini      smaller
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from _bounded import bound_scale
from _common import Run, started
from torch import Tensor

from kvbench.engine.row import layer_generator
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import compress_measured, estimate


@dataclass(frozen=True)
class Index:
    """Alice's bits and the pairs that she writes.

    Attributes:
        layer: the pairs, of one head.
        keys: [1, 1, groups, d], which are Bob's queries.
        bits: [groups, d] bool.
        signs: [groups, d], of -1 and 1.
    """

    layer: LayerKV
    keys: Tensor
    bits: Tensor
    signs: Tensor

    @classmethod
    def drawn(cls, n: int, dim: int, norm: float, index: int, count: int) -> Index:
        """Draw n bits (a multiple of dim), as layer `index` of `count`.

        The queries that methods see are drawn as the keys are, and none of them is a key: which bit Bob
        wants is not known when the pairs are compressed.
        """
        generator = layer_generator(0, "index", index)

        def fair(*shape: int) -> Tensor:
            return torch.randint(2, shape, generator=generator).float() * 2 - 1

        groups = n // dim
        scale = norm / dim**0.5
        keys = scale * fair(1, 1, groups, dim)
        bits, signs = fair(groups, dim) > 0, fair(groups, dim)
        written = bits.flatten().nonzero().squeeze(-1)
        written = written[torch.randperm(len(written), generator=generator)]
        values = torch.zeros(1, 1, len(written), dim)
        values[0, 0, torch.arange(len(written)), written % dim] = signs.flatten()[written]
        queries = scale * fair(1, 1, len(written), dim)
        layer = LayerKV(keys[:, :, written // dim], values, queries, index, count, dim**-0.5)
        return cls(layer, keys, bits, signs)

    def read(self, compressed: CompressedKV) -> dict[str, float]:
        """The share of bits that Bob reads right; the least eps for which equation (2) holds for every
        key; and the bits of memory over what the theorem asks for, min{1 / eps^2, d exp(2 r^2 /
        sqrt(d)), n} (of an instance of n bits nothing can ask for more)."""
        n, pairs, dim = self.bits.numel(), self.layer.n, self.bits.shape[1]
        exponent = float(self.keys[0, 0, 0].double().square().sum()) / dim**0.5
        threshold = math.exp(exponent) / max(dim * math.exp(exponent), pairs) / 40
        z, exact = (
            estimate(held, self.keys, pairs, self.layer)
            for held in (compressed, keep_all(self.layer))
        )
        error = (z - exact).norm(dim=-1) / bound_scale(self.layer, self.keys)
        epsilon = float(error.max())
        asked_for = min(1 / max(epsilon, n**-0.5) ** 2, dim * math.exp(2 * exponent))
        return {
            "share": float(((self.signs * z[0, 0] > threshold) == self.bits).double().mean()),
            "epsilon": epsilon,
            "bits_over_bound": 8 * compressed.nbytes / asked_for,
        }

    def limit(self, entries: int) -> float:
        """The share of bits that are right where Bob finds so many of the pairs and no others: those of
        all zeros, and of the ones that are found."""
        return 1 - max(0, self.layer.n - entries) / self.bits.numel()


def main(arguments: Sequence[str]) -> None:
    """Write a row for each draw of the bits (a layer) and of the method, rate and method; and a row for
    each layer and rate with the limit of as many pairs.

    Keys of its own: rates, layers (how many), draws, methods, n (bits), dim, norm (r; at most sqrt(dim)
    in the theorem).
    """
    run = Run(
        __file__,
        arguments,
        "",
        "",
        rates=[1.0, 0.5, 0.25, 0.125, 0.0625, 0.015625],
        methods=["uniform", "snapkv", "subgen", "balancekv", "wildcat", "turboquant"],
        layers=4,
        draws=2,
        n=4096,
        dim=64,
        norm=8.0,
    )
    rows: list[dict[str, Any]] = []
    for number in range(run.layers):
        index = Index.drawn(run.n, run.dim, run.norm, number, run.layers)
        for rate in run.rates:
            budget = Budget(rate=rate, sink=1, window=1)
            where = {"n": run.n, "layer": number + 1, "rate": rate}
            for name in run.methods:
                method = build_method(name)
                for draw in range(run.draws):
                    seed = SEED_STRIDE * run.seed + draw
                    generator = layer_generator(seed, "synthetic", number + 1)
                    held, _ = compress_measured(name, method, budget, generator, index.layer)
                    rows.append({**where, "draw": draw, "method": name, **index.read(held)})
            limit = index.limit(budget.capacity(index.layer.n))
            rows.append({**where, "method": "limit of pairs", "share": limit})
    run.save(rows, y="share", x="rate", by="method", panel="n")


if __name__ == "__main__":
    started(main)
