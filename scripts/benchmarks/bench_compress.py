"""Time the compression of one layer against its own unavoidable matrix products, on one thread.

    python scripts/benchmarks/bench_compress.py    # n = 16384, 8 KV heads, head_dim 128, rate 1/4
    python scripts/benchmarks/bench_compress.py --methods balancekv --key-scale 4
    python scripts/benchmarks/bench_compress.py --methods rkv,subgen_streaming --n 4096
    python scripts/benchmarks/bench_compress.py --methods h2o,spatten --n 4096,16384  # and the exponent

Compression is all that `compress` does, packing included for methods that store entries packed. The
yardstick of balancekv is the products of the kernel matrices alone, full b x b blocks of keys and of
values in both halvings (b = 256), of the others the products that they cannot go without; all into
memory allocated beforehand. H2O and SpAtten know the logarithm of every query's sum of exponentials, as
after a prefill, and cannot go without one more q.k^T over the causal half, its exponentials and the
sums of their columns, in tiles of 256 queries by 1,024 keys. `--key-scale 4`: keys whose exponentials
overflow float32. Both are timed in turn in seconds of processor time, which other programs of the
machine disturb less than the clock; the medians are compared.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.kv import NORMALISERS, Budget, LayerKV
from kvbench.methods import build_method

NAMES = "balancekv,wildcat,qjl,turboquant,expected_attention,snapkv,adakv,pages"
MASS = ("h2o", "spatten")
"""Methods whose compression is the attention mass and a choice by it."""


def block_products(
    n: int,
    heads: int,
    dim: int,
    b: int,
    halvings: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Callable[[], None]:
    """The matrix products of all of BalanceKV's blocks and halvings, keys and values."""
    blocks = heads * n // b
    x = torch.randn(blocks, b, dim, device=device).to(dtype)
    out = torch.empty(blocks, b, b, device=device, dtype=dtype)

    def run() -> None:
        for halving in range(halvings):
            part = blocks >> halving
            for _ in ("keys", "values"):
                torch.bmm(x[:part], x[:part].mT, out=out[:part])

    return run


def masses(queries: Tensor, keys: Tensor, normalisers: Tensor) -> Callable[[], None]:
    """One more q.k^T of each head over the causal half, its exponentials and the sums of their columns,
    of queries and keys [heads, n, dim] with normalisers [heads, n]."""
    heads, n, dim = queries.shape
    scaled, shares = queries * (dim**-0.5 / math.log(2.0)), (-normalisers).exp()
    scratch, sums = queries.new_empty(256 * 1024), queries.new_empty(1024)

    def run() -> None:
        for head in range(heads):
            for start in range(0, n, 256):
                stop = min(n, start + 256)
                for first in range(0, stop, 1024):
                    last = min(stop, first + 1024)
                    tile = scratch[: (stop - start) * (last - first)].view(stop - start, -1)
                    torch.mm(scaled[head, start:stop], keys[head, first:last].T, out=tile)
                    torch.mv(tile.exp2_().T, shares[head, start:stop], out=sums[: last - first])

    return run


def products(
    name: str, x: Tensor, kept: int, queries: Tensor, normalisers: Tensor | None
) -> Callable[[], object]:
    """What a method cannot go without on keys x [heads, n, dim]; normalisers [heads, n] of queries."""
    heads, n, dim = x.shape
    if normalisers is not None:
        return masses(queries, x, normalisers)
    if name == "balancekv":
        return block_products(n, heads, dim, 256, 2)
    if name == "wildcat":
        bins = kept * heads // 12
        size = heads * n // bins
        keys = x.reshape(-1, dim)[: bins * size].view(bins, size, dim)
        weights = x.new_ones(bins, 12, size)
        gram, mixed = x.new_empty(bins, size, size), x.new_empty(bins, 12, dim)
        return lambda: (torch.bmm(keys, keys.mT, out=gram), torch.bmm(weights, keys, out=mixed))
    if name == "qjl":  # the first layers': 512 projections of the inliers, 128 of the outliers
        sketch, out = x.new_ones(dim, 640), x.new_empty(heads * n, 640)
        return lambda: torch.mm(x.view(-1, dim), sketch, out=out)
    if name == "turboquant":
        turn, out = x.new_ones(dim, dim), x.new_empty(heads * n, dim)
        return lambda: [torch.mm(x.view(-1, dim), turn, out=out) for _ in ("keys", "values")]
    if name == "expected_attention":
        spread, wide = x.new_ones(heads, dim, dim), x.new_empty(heads, dim, dim)
        out = x.new_empty(x.shape)
        return lambda: (torch.bmm(x.mT, x, out=wide), torch.bmm(x, spread, out=out))
    if name == "rkv":
        out = x.new_empty(heads, 512, n)
        return lambda: [torch.bmm(x[:, i : i + 512], x.mT, out=out) for i in range(0, n, 512)]
    if name == "subgen_streaming":  # keys with representatives, once; and the draws
        s = (kept - 32) // 2
        centres, out = x[:, : s // 4], x.new_empty(heads, n, s // 4)
        return lambda: (torch.bmm(x, centres.mT, out=out), torch.rand(n, heads, 4 + s))
    window, out = x[:, -32:], x.new_empty(heads, 32, n)
    return lambda: torch.bmm(window, x.mT, out=out)


def seconds(run: Callable[[], object]) -> float:
    """Processor time of one call."""
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    """Print a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--n",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[16384],
        help="prompt tokens; of several numbers, the exponent between the last two is told as well",
    )
    parser.add_argument("--heads", type=int, default=8, help="KV heads; one query head each")
    parser.add_argument("--dim", type=int, default=128, help="head_dim")
    parser.add_argument("--key-scale", type=float, default=1.0, help="factor on normal keys")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default=NAMES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"load {os.getloadavg()[0]:.1f}; seconds of processor time, medians of {args.repeats}")
    for name in args.methods.split(","):
        totals = {n: bench(name, n, args) for n in args.n}
        if len(totals) > 1:
            (shorter, before), (longer, after) = list(totals.items())[-2:]
            exponent = math.log(after / before) / math.log(longer / shorter)
            print(f"{name:20} grows with exponent {exponent:.2f} from {shorter} to {longer} tokens")


def layer_of(n: int, args: argparse.Namespace) -> LayerKV:
    """A layer of n random tokens, one query head per KV head."""
    generator = torch.Generator().manual_seed(0)
    keys, values, queries = torch.randn(3, 1, args.heads, n, args.dim, generator=generator)

    def rotary(positions: Tensor) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(args.dim).view(2, -1).flatten() / args.dim
        angles = positions[:, None] * 1e4**-pairs
        return angles.cos(), angles.sin()

    scaling = args.dim**-0.5
    return LayerKV(args.key_scale * keys, values, queries, 0, 1, scaling, rotary=rotary)


def bench(name: str, n: int, args: argparse.Namespace) -> float:
    """Print a method's line for n tokens; the seconds of its compression."""
    layer = layer_of(n, args)
    queries, normalisers = layer.queries, None
    assert queries is not None
    if name in MASS:
        call = LayerCall(0, queries, layer.keys, layer.values, layer.scaling)
        normalisers = call.exact_with_normalisers()[1]
    # of balancekv the whole prompt is middle, so that both cover the same blocks
    ends = 0 if name == "balancekv" else 32
    budget, method = Budget(rate=0.25, sink=ends, window=ends), build_method(name)
    scheme = method.quantization()

    def compress() -> None:
        layer.shared.clear()  # what methods of one job would share
        if normalisers is not None:
            layer.once(NORMALISERS, lambda: normalisers)
        held = method.compress(layer, budget, torch.Generator().manual_seed(0))
        if scheme is not None:
            scheme.codecs(held.keys[0], held.values[0], layer=0, seed=0)

    told = None if normalisers is None else normalisers[0]
    needed = products(name, layer.keys[0], budget.capacity(n), queries[0], told)
    needed()
    compress()
    pairs = [(seconds(needed), seconds(compress)) for _ in range(args.repeats)]
    product, total = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{name:20} {n:6} tokens  products {product:7.3f}  compression {total:7.3f}"
        f"  {total / product:6.2f}"
    )
    return total


if __name__ == "__main__":
    main()
