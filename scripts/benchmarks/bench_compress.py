"""Times the compression of one layer beside its own unavoidable matrix products, on one thread.

    python scripts/benchmarks/bench_compress.py    # n = 16384, 8 KV heads, head_dim 128, rate 1/4
    python scripts/benchmarks/bench_compress.py --methods balancekv --key-scale 4
    python scripts/benchmarks/bench_compress.py --methods rkv,subgen_streaming --n 4096
    python scripts/benchmarks/bench_compress.py --methods h2o,spatten --n 4096,16384  # and the exponent

Compression is all that `compress` does, packing included for methods that store entries packed. It is
compared with the matrix products that the method cannot go without, into memory allocated beforehand:

- balancekv: the kernel matrices, full b x b blocks of keys and of values in both halvings (b = 256);
- rkv (similarities of keys), balancekv_streaming (kernel matrices): half of them, they are symmetric;
- subgen: every key with every centre;
- h2o, spatten: one more q.k^T over the causal half, its exponentials and the sums of their columns, in
  tiles of 256 queries by 1,024 keys; the logarithm of every query's sum of exponentials is known, as
  after a prefill.

`--key-scale 4`: keys whose exponentials overflow float32. Both are timed in turn in seconds of
processor time, which other programs of the machine disturb less than the clock; the medians of
`--repeats` are printed, nothing is written.
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
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import NORMALISERS, Budget, LayerKV, Shared
from kvbench.methods import build_method
from kvbench.methods.balancekv_streaming import largest_batch

DEFAULT_METHODS = "balancekv,wildcat,qjl,turboquant,expected_attention,snapkv,adakv,pages"
BY_MASS = ("h2o", "spatten")
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
    """The matrix products of all of BalanceKV's blocks of b tokens in all halvings, of keys and of
    values."""
    blocks = heads * n // b
    x = torch.randn(blocks, b, dim, device=device).to(dtype)
    out = torch.empty(blocks, b, b, device=device, dtype=dtype)

    def run() -> None:
        for halving in range(halvings):
            part = blocks >> halving
            for _ in ("keys", "values"):
                torch.bmm(x[:part], x[:part].mT, out=out[:part])

    return run


def mass_products(queries: Tensor, keys: Tensor, normalisers: Tensor) -> Callable[[], None]:
    """One more q.k^T of each head over the causal half, its exponentials and the sums of their columns,
    of queries and keys [heads, n, dim] with normalisers [heads, n]."""
    heads, n, dim = queries.shape
    scaled = queries * (dim**-0.5 / math.log(2.0))
    inverse_sums = (-normalisers).exp()
    scratch = queries.new_empty(256 * 1024)
    sums = queries.new_empty(1024)

    def run() -> None:
        for head in range(heads):
            for start in range(0, n, 256):
                stop = min(n, start + 256)
                for first in range(0, stop, 1024):
                    last = min(stop, first + 1024)
                    tile = scratch[: (stop - start) * (last - first)].view(stop - start, -1)
                    torch.mm(scaled[head, start:stop], keys[head, first:last].T, out=tile)
                    torch.mv(
                        tile.exp2_().T, inverse_sums[head, start:stop], out=sums[: last - first]
                    )

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
    batches = 0
    batches_of_level = n // t
    while batches_of_level:
        batches += batches_of_level
        batches_of_level //= 2
    run = symmetric_products(keys[:1, :t].double(), 256)
    return lambda: [run() for _ in range(3 * heads * batches)]


def centre_products(x: Tensor, count: int) -> Callable[[], object]:
    """The products of every point of x [heads, n, dim] with each of `count` centres, 512 points at a
    time."""
    heads, n, _ = x.shape
    centres = x[:, :count]
    out = x.new_empty(heads, 512, count)
    parts = [x[:, i : i + 512] for i in range(0, n, 512)]
    return lambda: [torch.bmm(part, centres.mT, out=out[:, : part.shape[1]]) for part in parts]


def products(
    name: str, layer: LayerKV, budget: Budget, normalisers: Tensor | None
) -> Callable[[], object]:
    """The products that a method cannot go without on a layer of one prompt.

    Args:
        normalisers: [heads, n], the logarithm of every query's sum of exponentials, of methods in
            `BY_MASS`; else None.
    """
    x = layer.keys[0]
    kept = budget.capacity(layer.n)
    heads, n, dim = x.shape
    if normalisers is not None:
        assert layer.queries is not None
        return mass_products(layer.queries[0], x, normalisers)
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
        sketch = x.new_ones(dim, 640)
        out = x.new_empty(heads * n, 640)
        return lambda: torch.mm(x.view(-1, dim), sketch, out=out)
    if name == "turboquant":
        rotation = x.new_ones(dim, dim)
        out = x.new_empty(heads * n, dim)
        return lambda: [torch.mm(x.view(-1, dim), rotation, out=out) for _ in ("keys", "values")]
    if name == "expected_attention":
        matrix = x.new_ones(heads, dim, dim)
        covariance = x.new_empty(heads, dim, dim)
        out = x.new_empty(x.shape)
        return lambda: (torch.bmm(x.mT, x, out=covariance), torch.bmm(x, matrix, out=out))
    if name == "rkv":
        return symmetric_products(x, 512)
    if name == "subgen":
        return centre_products(x, kept - budget.window)
    if name == "balancekv_streaming":
        middle = slice(budget.sink, n - budget.window)
        return stream_products(x[:, middle], layer.values[0, :, middle], budget.middle_kept(n))
    if name == "subgen_streaming":  # keys with representatives, once; and the draws
        samples = (kept - 32) // 2
        centres = x[:, : samples // 4]
        out = x.new_empty(heads, n, samples // 4)
        return lambda: (torch.bmm(x, centres.mT, out=out), torch.rand(n, heads, 4 + samples))
    window = x[:, -32:]  # snapkv, adakv, pages: the window's queries with all keys
    out = x.new_empty(heads, 32, n)
    return lambda: torch.bmm(window, x.mT, out=out)


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--n",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[16384],
        help="prompt tokens; with several numbers, the exponent between the last two is printed, too",
    )
    parser.add_argument("--heads", type=int, default=8, help="KV heads; one query head each")
    parser.add_argument("--dim", type=int, default=128, help="head_dim")
    parser.add_argument("--key-scale", type=float, default=1.0, help="factor on normal keys")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", default=DEFAULT_METHODS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"load {os.getloadavg()[0]:.1f}; seconds of processor time, medians of {args.repeats}")
    for name in args.methods.split(","):
        totals = {n: bench(name, n, args) for n in args.n}
        if len(totals) > 1:
            shorter, longer = args.n[-2:]
            growth = totals[longer] / totals[shorter]
            exponent = math.log(growth) / math.log(longer / shorter)
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
    """Print a method's line for n tokens; returns the seconds of its compression."""
    layer = layer_of(n, args)
    queries = layer.queries
    normalisers = None
    assert queries is not None
    if name in BY_MASS:
        call = LayerCall(0, queries, layer.keys, layer.values, layer.scaling)
        normalisers = call.exact_with_normalisers()[1]
    # The whole prompt is balancekv's middle, so that its blocks are those of the products.
    ends = 0 if name == "balancekv" else 32
    budget = Budget(rate=0.25, sink=ends, window=ends)
    method = build_method(name)
    scheme = method.quantization()

    def compress() -> None:
        layer.shared.clear()  # what another method of a job would have left there
        if normalisers is not None:
            clock = Elapsed(layer.keys.device).stop()
            inputs = (layer.keys, layer.values, layer.queries)
            layer.shared[NORMALISERS] = Shared(normalisers, clock, inputs)
        compressed = method.compress(layer, budget, torch.Generator().manual_seed(0))
        if scheme is not None:
            scheme.codecs(compressed.keys[0], compressed.values[0], layer=0, seed=0)

    run_products = products(name, layer, budget, None if normalisers is None else normalisers[0])
    run_products()
    compress()
    pairs = [(seconds(run_products), seconds(compress)) for _ in range(args.repeats)]
    product, total = (statistics.median(column) for column in zip(*pairs, strict=True))
    print(
        f"{name:20} {n:6} tokens  products {product:7.3f}  compression {total:7.3f}"
        f"  {total / product:6.2f}"
    )
    return total


if __name__ == "__main__":
    main()
