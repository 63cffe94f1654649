"""The INDEX instance behind BalanceKV's lower bound: what any method of a given size must lose.

BalanceKV (arXiv 2502.07861), Theorem 3.2 and appendix C. Alice has n times d bits and writes them as
values in {-1, +1}^d behind keys that everybody knows: random corners of a cube, all of norm r and nearly
orthogonal. Bob wants bit j of row i and asks with the query k_i: exp(r^2 / sqrt(d)) lifts row i above
the rest, and the sign of coordinate j of the attention is the bit. epsilon is the least for which
equation (2) holds for all queries, ||z - a|| <= epsilon ||softmax|| ||V||_F; the theorem says that
memory in bits times epsilon^2 is at least a constant. Beside the methods stands the share of bits that
no method of the size can exceed.

    kvbench reproduce balancekv_theorem3_2      random data, no model
    kvbench reproduce balancekv_theorem3_2 model=recall_mini      smaller:      18 s on one core
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _common import Run, started
from scipy.optimize import brentq
from torch import Tensor

from kvbench.engine.fork import layer_generator
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import SEED_STRIDE
from kvbench.probes.layer_error import compress_measured, estimate


def index_layer(n: int, dim: int, norm: float, index: int, count: int) -> LayerKV:
    """Layer `index` of `count`, of one head: n keys of this norm, and bits as values.

    The queries that methods see are drawn as the keys are, and none of them is a key: which row Bob
    wants is not known when the layer is compressed.
    """
    generator = layer_generator(0, "index", index)

    def corners() -> Tensor:
        return torch.randint(2, (1, 1, n, dim), generator=generator).float() * 2 - 1

    scale = norm / dim**0.5
    keys = scale * corners()
    queries = scale * corners()
    values = corners()
    return LayerKV(keys, values, queries, index, count, dim**-0.5)


def limits(entries: int, layer: LayerKV) -> dict[str, float]:
    """Shares of bits that no method exceeds on average, of `entries` entries, c of n.

    Returns:
        ``limit of entries``: of methods that keep c rows as they are, chosen without looking at the
        values: (1 + c / n) / 2. ``limit of bits``: of any method in as many bits M as c entries take: of
        N bits a share p with N (1 - H(p)) <= M, H the binary entropy (Fano's inequality).
    """
    n, dim = layer.keys.shape[2:]
    bits_of_entries = entries * 2 * dim * layer.keys.element_size() * 8
    known = bits_of_entries / (n * dim)

    def lacking(p: float) -> float:
        return 1 + p * math.log2(p) + (1 - p) * math.log2(1 - p) - known

    share = 1.0 if known >= 1 else float(brentq(lacking, 0.5, 1 - 1e-15))
    return {"limit of entries": (1 + entries / n) / 2, "limit of bits": share}


def reader(layer: LayerKV) -> Callable[[CompressedKV], dict[str, float]]:
    """A function of what a method holds of the layer: the share of bits that Bob reads right, epsilon,
    and bits of memory times epsilon squared."""
    queries, bits = layer.keys, layer.values.double()
    exact = estimate(keep_all(layer), queries, layer.n, layer)
    weights = (queries.double() @ queries.double().mT * layer.scaling).softmax(-1)
    scale = weights.norm(dim=-1) * bits.norm(dim=(-2, -1))[..., None]

    def read(compressed: CompressedKV) -> dict[str, float]:
        z = estimate(compressed, queries, layer.n, layer)
        epsilon = float(((z - exact).norm(dim=-1) / scale).max())
        return {
            "share": float(((z >= 0) == (bits > 0)).double().mean()),
            "epsilon": epsilon,
            "bits_epsilon_sq": 8 * compressed.nbytes * epsilon**2,
        }

    return read


def main(arguments: Sequence[str]) -> None:
    """Write a row for each draw of the data (a layer) and of the method, rate and method; and a row for
    each layer, rate and limit.

    Keys of its own: rates, layers (how many), draws, methods, n, dim, norm (r; at most sqrt(dim) in the
    theorem).
    """
    run = Run(
        __file__,
        arguments,
        "",
        "",
        rates=[0.5, 0.25, 0.125, 0.0625, 0.015625, 0.00390625],
        methods=["uniform", "snapkv", "subgen", "balancekv", "wildcat", "turboquant"],
        layers=4,
        draws=2,
        n=1024,
        dim=64,
        norm=8.0,
    )
    rows: list[dict[str, Any]] = []
    for index in range(run.layers):
        layer = index_layer(run.n, run.dim, run.norm, index, run.layers)
        read = reader(layer)
        for rate in run.rates:
            budget = Budget(rate=rate, sink=1, window=1)
            where = {"n": run.n, "layer": index + 1, "rate": rate}
            for name in run.methods:
                method = build_method(name)
                for draw in range(run.draws):
                    seed = SEED_STRIDE * run.seed + draw
                    generator = layer_generator(seed, "synthetic", index + 1)
                    compressed, _ = compress_measured(name, method, budget, generator, layer)
                    rows.append({**where, "draw": draw, "method": name, **read(compressed)})
            for name, share in limits(budget.capacity(run.n), layer).items():
                rows.append({**where, "method": name, "share": share})
    run.save(rows, y="share", x="rate", by="method", panel="n")


if __name__ == "__main__":
    started(main)
