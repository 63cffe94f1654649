"""Time the random draws of a layer of 131,072 tokens on the CPU, of both versions.

    OMP_NUM_THREADS=1 python scripts/benchmarks/bench_draws.py

CPU seconds of what `uniform` (places without replacement) and `balancekv` (all uniforms of two halvings)
draw for 8 KV heads at rate 0.25, the least of some turns. On a GPU v1 costs the host this much while the
GPU waits for the copy, v2 one launch for each tensor of draws. The ratios of v2 to v1 are printed last.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from kvbench.methods._draws import Drawing
from kvbench.methods.balancekv import BalanceKV
from kvbench.methods.uniform import Uniform

CPU = torch.device("cpu")
HEADS = 8


def places(method: Drawing, n: int) -> None:
    """What `uniform` draws of n tokens."""
    method.places(torch.Generator().manual_seed(0), HEADS, n, n // 4, CPU)


def halvings(method: Drawing, n: int) -> None:
    """What `balancekv` draws of n tokens, in blocks of 256."""
    generator = torch.Generator().manual_seed(0)
    for size in (n, n // 2):
        method.uniforms(generator, CPU, HEADS, size // 256, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=131_072, help="tokens")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    cases: dict[str, tuple[Drawing, Callable[[Drawing, int], None]]] = {
        "uniform": (Uniform(), places),
        "balancekv": (BalanceKV(), halvings),
    }
    for name, (method, draw) in cases.items():
        least = {"v1": float("inf"), "v2": float("inf")}
        for _ in range(args.repeats):
            for version in least:
                start = time.process_time()
                draw(method.drawing(version), args.n)
                least[version] = min(least[version], time.process_time() - start)
        told = ", ".join(f"{version} {1000 * s:.1f} ms" for version, s in least.items())
        print(f"{name}: {told}")
        print(f"{least['v2'] / least['v1']:.2f}")


if __name__ == "__main__":
    main()
