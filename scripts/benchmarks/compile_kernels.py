"""Compiles the Triton kernels for GPUs that need not be there, exactly as they would be launched.

    python scripts/benchmarks/compile_kernels.py 80 90         # each kernel at head dimension 80
    python scripts/benchmarks/compile_kernels.py 90 --every    # at every head dimension, in every dtype

It prints a line of JSON per launch: the kernels with the shared memory that they ask for, or the error.
The launchers run on tensors without storage under a driver that only names the target, so
every constant, type, alignment and option is the one a launch on that GPU would have. Nothing is
launched. With --every it also prints how many kernels an operation compiles for several lengths.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvbench.kernels import (
    _triton_clusters,
    _triton_decode,
    _triton_evict,
    _triton_mass,
    _triton_philox,
    _triton_walk,
)
from kvbench.kernels.decode import COLUMNS

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
DTYPES = {64: (BRAIN,), 80: (BRAIN, FULL), 96: (BRAIN,), 128: (BRAIN, HALF), 256: (BRAIN, FULL)}
"""By head dimension of the models that kvbench's papers and tasks name (80: OPT-2.7B, Phi-2; 96: Phi-3),
the dtypes that kernels are compiled in: what models are run in at each; float32, whose tiles are the
largest, at the largest and at one that is no power of two; float16, which differs from bfloat16 in
conversions alone, at one."""
Launch = Callable[[], object]


class NamedTarget:
    """A driver that knows which GPU to compile for and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        # Triton keeps what it has compiled by device.
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        return 0


def compiled(launch: Launch) -> list[Any]:
    """Compile the kernels that `launch` would start, and return each once."""
    kernels = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        kernels[kernel.hash] = kernel
        return kernel

    JITFunction.run = compile_only
    try:
        launch()
    finally:
        JITFunction.run = run
    return list(kernels.values())


def empty(*shape: int, dtype: torch.dtype = FULL) -> torch.Tensor:
    """A tensor without storage."""
    return torch.empty(*shape, dtype=dtype, device="meta")


LENGTHS = empty(8, dtype=torch.int32)


def decode(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    longest: int = 16640,
    lengths: torch.Tensor = LENGTHS,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    return_mass: bool = False,
) -> None:
    _triton_decode.attention(
        empty(8, heads, dim, dtype=dtype),
        empty(8, len(COLUMNS), dtype=torch.int64),
        lengths,
        kv_heads=kv_heads,
        value_dim=dim,
        longest=longest,
        chunk=512,
        aligned=True,
        scaling=dim**-0.5,
        softcap=softcap,
        sinks=sinks,
        return_mass=return_mass,
    )


def append(dim: int, dtype: torch.dtype, lengths: torch.Tensor = LENGTHS) -> None:
    new = empty(8, 8, dim, dtype=dtype)
    _triton_decode.append(empty(8, len(COLUMNS), dtype=torch.int64), lengths, new, new)


def evict(
    dim: int,
    dtype: torch.dtype,
    by_attention: bool,
    longest: int = 16640,
    lengths: torch.Tensor = LENGTHS,
) -> None:
    entries, count = empty(8, longest, dim, dtype=dtype), empty(8, dtype=torch.int64)
    _triton_evict.evict(
        empty(8, len(COLUMNS), dtype=torch.int64),
        lengths,
        empty(8, 8, longest) if by_attention else None,
        count,
        count,
        keys=entries,
        values=entries,
        longest=longest,
    )


def walk(b: int, dim: int, dtype: torch.dtype, n: int = 16384, first: bool = False) -> None:
    """The walk over n tokens of 8 KV heads in blocks of b: the first halving with the released centre,
    or a second one, with entries that are gathered and weighted, and a short last block."""
    tokens = empty(1, 8, n, dim, dtype=dtype)
    index = empty(1, 8, n // b, b, dtype=torch.int64)
    _triton_walk.walk(
        tokens,
        tokens,
        index,
        empty(*index.shape),
        scale=dim**-0.5,
        offset=0.025,
        reach=0.25,
        counts=None if first else empty(*index.shape[:3], dtype=torch.int64),
        weights=None if first else empty(*index.shape),
        centre="released" if first else "mean",
    )


def cut(n: int = 16384) -> None:
    positive, order = empty(8, n, dtype=torch.bool), empty(8, n, dtype=torch.int64)
    _triton_walk.cut(positive, order, empty(8, n))


def mass(
    m: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    softcap: float | None = None,
    n: int = 16384,
) -> None:
    queries, keys = empty(1, heads, m, dim, dtype=dtype), empty(1, kv_heads, n, dim, dtype=dtype)
    _triton_mass.attention_mass(queries, keys, scaling=dim**-0.5, softcap=softcap)


def first_come(dim: int) -> None:
    """The two kernels of the online clusters: which of 256 points of 8 heads become representatives,
    and which of 900 representatives is nearest to each point."""
    points, free = empty(8, 256, dim), empty(8, 256, dtype=torch.bool)
    _triton_clusters.first_come(points, empty(8), free, empty(8, dtype=torch.int64))
    _triton_clusters.nearest_points(points, empty(8, 900, dim), empty(8, 1, 900, dtype=torch.bool))


def philox(dtype: torch.dtype, n: int = 16384, key: int = 2**61) -> None:
    _triton_philox.fill(empty(8, n, dtype=dtype), key)


OF_DIM: dict[str, Callable[[int, torch.dtype], object]] = {
    "walk": lambda dim, dtype: walk(256, dim, dtype),
    "walk of a first halving": lambda dim, dtype: walk(256, dim, dtype, first=True),
    "decode": lambda dim, dtype: decode(32, 8, dim, dtype),
    "decode with mass, softcap and sinks": lambda dim, dtype: decode(
        14, 2, dim, dtype, softcap=50.0, sinks=empty(8, 14), return_mass=True
    ),
    "append": append,
    "evict by attention": lambda dim, dtype: evict(dim, dtype, True),
    "evict by age": lambda dim, dtype: evict(dim, dtype, False),
    "mass": lambda dim, dtype: mass(16384, 32, 8, dim, dtype),
    "mass of the last queries": lambda dim, dtype: mass(64, 14, 2, dim, dtype, softcap=50.0),
}
"""What is launched at each head dimension and dtype."""


def launches(every: bool) -> Iterator[tuple[str, Launch]]:
    """Each kernel at head dimension 80 (no power of two, which only masks tell) in bfloat16, or at every
    one of `DTYPES`; and the widest group of query heads."""
    for dim, dtypes in DTYPES.items() if every else ((80, (BRAIN,)),):
        for dtype in dtypes:
            for name, launch in OF_DIM.items():
                yield f"{name} {dtype} d={dim}", partial(launch, dim, dtype)
        yield f"first come d={dim}", partial(first_come, dim)  # float32 copies of the points
    yield "cut", cut
    for dtype in (FULL, torch.float64, torch.int64):
        yield f"philox {dtype}", partial(philox, dtype)
    yield "decode of 128 query heads in a group", lambda: decode(128, 1, 128, HALF)


def variants() -> Iterator[tuple[str, int]]:
    """How many kernels each operation compiles for several lengths. They differ in what Triton makes
    constants of (1, multiples of 16), and the tensor of lengths begins anywhere in memory."""
    many_lengths = torch.zeros(64, dtype=torch.int32)

    def decoding(n: int) -> None:
        lengths = many_lengths[n % 7 :][:8]
        decode(8, 2, 64, HALF, longest=n, return_mass=True, lengths=lengths)
        append(64, HALF, lengths)
        evict(64, HALF, True, longest=n, lengths=lengths)

    of_length: dict[str, Callable[[int], object]] = {
        "mass": lambda n: mass(n - 900, 4, 4, 64, HALF, n=n),
        "walk": lambda n: walk(16, 64, HALF, n=16 * (n - 900)),
        "cut": lambda n: cut(n - 900),
        "philox": lambda n: philox(FULL, n, 2**32 + n),
        "decoding": decoding,
    }
    for name, launch in of_length.items():
        lengths = [902, 916, 917, 1008] + [4096, 16400, 131072] * (name == "decoding")
        hashes = {kernel.hash for n in lengths for kernel in compiled(partial(launch, n))}
        yield name, len(hashes)


def outcome(launch: Launch) -> dict[str, Any]:
    """The shared memory, in bytes, of the kernels that `launch` compiles, or the end of the error."""
    try:
        kernels = [kernel.metadata for kernel in compiled(launch)]
        return {"kernels": [[kernel.name, kernel.shared] for kernel in kernels], "failure": None}
    except Exception as failure:  # noqa: BLE001 - a compiler may raise anything; all is reported
        return {"kernels": [], "failure": repr(failure.__cause__ or failure)[-300:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("capabilities", type=int, nargs="+", help="80, 86, 89, 90, 100, 120")
    parser.add_argument(
        "--every", action="store_true", help="every head dimension, and every dtype"
    )
    arguments = parser.parse_args()
    for capability in arguments.capabilities:
        driver.set_active(NamedTarget(GPUTarget("cuda", capability, 32)))
        for name, launch in launches(arguments.every):
            line = {"capability": capability, "launch": name, **outcome(launch)}
            print(json.dumps(line), flush=True)
        for name, count in variants() if arguments.every else ():
            print(json.dumps({"capability": capability, "operation": name, "variants": count}))


if __name__ == "__main__":
    main()
