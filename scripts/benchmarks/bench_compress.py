"""Time the compression of one layer against its own unavoidable matrix products, on one thread.

    python scripts/benchmarks/bench_compress.py    # n = 16384, 8 KV heads, head_dim 128, rate 1/4
    python scripts/benchmarks/bench_compress.py --methods balancekv --key-scale 4
    python scripts/benchmarks/bench_compress.py --methods rkv,subgen_streaming --n 4096
    python scripts/benchmarks/bench_compress.py --methods h2o,spatten --n 4096,16384  # and the exponent

Compression is all that `compress` does, packing included for methods that store entries packed. The
yardstick of balancekv is the products of the kernel matrices alone, full b x b blocks of keys and of
values in both halvings (b = 256), of the others the products that they cannot go without; all into
memory allocated beforehand. Similarities of keys (rkv) and kernel matrices (balancekv_streaming) are
symmetric: half of them. SubGen compares every key with every centre. H2O and SpAtten know the logarithm
of every query's sum of exponentials, as after a prefill, and cannot go without one more q.k^T over the
causal half, its exponentials and the sums of their columns, in tiles of 256 queries by 1,024 keys.
`--key-scale 4`: keys whose exponentials overflow float32. Both are timed in turn in seconds of
processor time, which other programs of the machine disturb less than the clock; the medians are
compared.
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
from kvbench.methods.balancekv_streaming import largest_batch

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


def symmetric_products(x: Tensor, tile: int) -> Callable[[], None]:
    """Products of x [batch, n, dim] with itself, which are symmetric: tiles of `tile` by `tile` on and
    above the diagonal, one element of the batch after the other."""
    n = x.shape[1]
    scratch = x.new_empty(tile * tile)

    def run() -> None:
        for part in x:
            for start in range(0, n, tile):
                rows = part[start : start + tile]
                for first in range(start, n, tile):
                    columns = part[first : first + tile]
                    out = scratch[: len(rows) * len(columns)].view(len(rows), -1)
                    torch.mm(rows, columns.T, out=out)

    return run


def stream_products(keys: Tensor, values: Tensor, room: int) -> Callable[[], object]:
    """The products of `balancekv_streaming` over keys and values [heads, n, dim], all values of norms
    between the same two powers of two: in every batch of its two structures half of the float64 kernel
    matrix of the keys, in the numerator's also that of the values."""
    heads, n, _ = keys.shape
    t = largest_batch(values, room)
    batches, full = 0, n // t
    while full:  # batches of level 0, of level 1, ...
        batches, full = batches + full, full // 2
    run = symmetric_products(keys[:1, :t].double(), 256)
    return lambda: [run() for _ in range(3 * heads * batches)]


def centre_products(x: Tensor, count: int) -> Callable[[], object]:
    """Every point of x [heads, n, dim] with each of `count` centres, some points at a time."""
    heads, n, _ = x.shape
    centres, out = x[:, :count], x.new_empty(heads, 512, count)
    parts = [x[:, i : i + 512] for i in range(0, n, 512)]
    return lambda: [torch.bmm(part, centres.mT, out=out[:, : part.shape[1]]) for part in parts]


def products(
    name: str, layer: LayerKV, budget: Budget, normalisers: Tensor | None
) -> Callable[[], object]:
    """What a method cannot go without on a layer of one prompt; normalisers [heads, n] of its queries,
    for methods that need them."""
    x, kept = layer.keys[0], budget.capacity(layer.n)
    heads, n, dim = x.shape
    if normalisers is not None:
        assert layer.queries is not None
        return masses(layer.queries[0], x, normalisers)
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
        return symmetric_products(x, 512)
    if name == "subgen":
        return centre_products(x, kept - budget.window)
    if name == "balancekv_streaming":
        middle = slice(budget.sink, n - budget.window)
        return stream_products(x[:, middle], layer.values[0, :, middle], budget.middle_kept(n))
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
    needed = products(name, layer, budget, told)
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
