"""Time BalanceKV's compression of one layer against its own unavoidable block products.

    python scripts/benchmarks/bench_compress.py  # n = 16384, 8 KV heads, head_dim 128, b = 256, T = 2
    python scripts/benchmarks/bench_compress.py --key-scale 4  # keys whose exponentials overflow float32

Compression is everything `BalanceKV.compress` does, from drawing the uniforms to the gathered
entries. The yardstick is the batched matrix products of the kernel matrices alone, full b x b blocks
of keys and of values in both halvings, on contiguous tensors, into memory allocated beforehand. Both
are timed in turn, `--repeats` times; the medians are compared and the ratio is printed last.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from kvbench.kv import Budget, LayerKV
from kvbench.methods import build_method


def block_products(
    n: int,
    heads: int,
    dim: int,
    b: int,
    halvings: int,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Callable[[], None]:
    """The matrix products of all blocks and halvings, keys and values."""
    blocks = heads * n // b
    x = torch.randn(blocks, b, dim, device=device).to(dtype)
    out = torch.empty(blocks, b, b, device=device, dtype=dtype)

    def run() -> None:
        for halving in range(halvings):
            part = blocks >> halving
            for _ in ("keys", "values"):
                torch.bmm(x[:part], x[:part].mT, out=out[:part])

    return run


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=16384, help="prompt tokens")
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--dim", type=int, default=128, help="head_dim")
    parser.add_argument("--block", type=int, default=256, help="block_size")
    parser.add_argument("--halvings", type=int, default=2)
    parser.add_argument("--key-scale", type=float, default=1.0, help="factor on normal keys")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    shape = (1, args.heads, args.n, args.dim)
    layer = LayerKV(
        args.key_scale * torch.randn(shape), torch.randn(shape), None, 0, 1, args.dim**-0.5
    )
    # The whole prompt is middle, so that compression and yardstick cover the same blocks.
    budget = Budget(rate=0.5**args.halvings, sink=0, window=0)
    method = build_method("balancekv", block_size=args.block)

    def compress() -> None:
        kept = method.compress(layer, budget, torch.Generator().manual_seed(0))
        assert kept.keys.shape[2] == args.n >> args.halvings

    products = block_products(args.n, args.heads, args.dim, args.block, args.halvings)
    products()  # warm-up
    compress()
    pairs = [(seconds(products), seconds(compress)) for _ in range(args.repeats)]
    product, total = (statistics.median(column) for column in zip(*pairs, strict=True))
    for name, column in zip(("products", "compress"), zip(*pairs, strict=True), strict=True):
        print(f"{name} seconds: {' '.join(f'{value:.3f}' for value in column)}")
    print(f"block products {product:.3f} s, compression {total:.3f} s (medians)")
    print(f"{total / product:.2f}")


if __name__ == "__main__":
    main()
