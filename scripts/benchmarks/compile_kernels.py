"""Compiles the Triton kernels for GPUs that need not be there, exactly as they would be launched.

    python scripts/benchmarks/compile_kernels.py 90            # sm_90: resources of the main launches
    python scripts/benchmarks/compile_kernels.py 90 --every    # whether each dim and dtype compiles
    python scripts/benchmarks/compile_kernels.py 80 90 --some  # a part of these, for two GPUs

It prints a line of JSON per kernel, or with --every and --some per launch, with the compute capability.
The launchers run on tensors without storage under a driver that only names the target, so every
constant, type, alignment and option is the one a launch on that GPU would have. Nothing is launched.
`ptxas` (it comes with Triton) then reports registers and spills.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
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
from kvbench.kernels.entry_table import COLUMNS
from kvbench.kernels.eviction_table import RULE
from kvbench.kernels.quantize import Quantization


class NamedTarget:
    """A driver that knows which GPU to compile for and nothing else."""

    def __init__(self, target: GPUTarget) -> None:
        self.target = target

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """The compute capability in place of a device's number: Triton keeps what it has compiled by
        device."""
        return int(self.target.arch)

    def get_current_stream(self, device: int) -> int:
        """The default stream."""
        return 0


def compiled(launch: Callable[[], object]) -> list[Any]:
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


def resources(kernel: Any) -> dict[str, int | str]:
    """What ptxas says of the kernel's registers and spills; shared memory as Triton asks for it."""
    (arch,) = re.findall(r"\.target (\w+)", kernel.asm["ptx"])
    is_blackwell = int(re.findall(r"\d+", arch)[0]) >= 100  # which has an assembler of its own
    assembler = "ptxas-blackwell" if is_blackwell else "ptxas"
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / assembler
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(kernel.asm["ptx"])
        file.flush()
        command = [str(tool), "-v", f"--gpu-name={arch}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {
        "kernel": kernel.metadata.name,
        "shared": kernel.metadata.shared,
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spills": sum(map(int, re.findall(r"(\d+) bytes spill", report))),
        "stack": sum(map(int, re.findall(r"(\d+) bytes stack frame", report))),
        "warps": kernel.metadata.num_warps,
        "wgmma": kernel.asm["ptx"].count("wgmma.mma_async"),
        "mma": len(re.findall(r"\bmma\.sync", kernel.asm["ptx"])),
        "wide_loads": len(
            re.findall(r"ld\.global[.\w:]*\.v4|cp\.async[.\w]* .*0x10", kernel.asm["ptx"])
        ),
    }


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor without storage."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def decode(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    longest: int = 16640,
    lengths: torch.Tensor | None = None,
    **options: Any,
) -> None:
    """Launch a decoding step of eight rows over 16k entries each."""
    _triton_decode.attention(
        empty(8, heads, dim, dtype=dtype),
        empty(8, len(COLUMNS), dtype=torch.int64),
        empty(8, dtype=torch.int32) if lengths is None else lengths,
        kv_heads=kv_heads,
        value_dim=dim,
        longest=longest,
        chunk=512,
        aligned=True,
        scaling=dim**-0.5,
        **{
            "softcap": None,
            "return_mass": False,
            "longest_packed": 0,
            "quantization": None,
            **options,
        },
    )


def decode_packed(
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    bits: Literal[2, 4] = 4,
    longest_packed: int = 16384,
    **options: Any,
) -> None:
    """Launch a decoding step of eight rows over 16k packed entries each, and the entries of `decode`."""
    quantization = Quantization(bits=bits, group_size=64)
    more = {"longest_packed": longest_packed, "quantization": quantization, **options}
    decode(heads, kv_heads, dim, dtype, **more)


def append(dim: int, dtype: torch.dtype, lengths: torch.Tensor | None = None) -> None:
    """Launch the appending of a token to each of eight rows of 8 KV heads."""
    table = empty(8, len(COLUMNS), dtype=torch.int64)
    new = empty(8, 8, dim, dtype=dtype)
    lengths = empty(8, dtype=torch.int32) if lengths is None else lengths
    _triton_decode.append(table, lengths, new, new)


def evict(
    dim: int,
    dtype: torch.dtype,
    by_attention: bool,
    longest: int = 16640,
    lengths: torch.Tensor | None = None,
) -> None:
    """Launch the eviction of an entry from each of eight rows of 8 KV heads."""
    entries = empty(8, longest, dim, dtype=dtype)
    count = empty(8, dtype=torch.int64)
    _triton_evict.evict(
        empty(8, len(COLUMNS), dtype=torch.int64),
        empty(8, len(RULE), dtype=torch.int64),
        empty(8, dtype=torch.int32) if lengths is None else lengths,
        empty(8, 8, longest) if by_attention else None,
        count,
        count,
        keys=entries,
        values=entries,
        longest=longest,
    )


def walk(b: int, dim: int, dtype: torch.dtype, n: int = 16384, **options: Any) -> None:
    """Launch the walk over n tokens of 8 KV heads in blocks of b, as in a second halving: with entries
    that are gathered and weighted, and a short last block."""
    index = empty(1, 8, n // b, b, dtype=torch.int64)
    _triton_walk.walk(
        empty(1, 8, n, dim, dtype=dtype),
        empty(1, 8, n, dim, dtype=dtype),
        index,
        empty(*index.shape),
        scale=dim**-0.5,
        offset=0.025,
        reach=0.25,
        **{
            "counts": empty(*index.shape[:3], dtype=torch.int64),
            "weights": empty(*index.shape),
            "centre": "mean",
            **options,
        },
    )


def cut(n: int = 16384) -> None:
    """Launch BalanceKV's cut of n tokens of 8 KV heads."""
    positive, order = empty(8, n, dtype=torch.bool), empty(8, n, dtype=torch.int64)
    _triton_walk.cut(positive, order, empty(8, n))


def mass(
    m: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    softcap: Any = None,
    n: int = 16384,
) -> None:
    """Launch the attention mass of the last m queries over n keys."""
    queries = empty(1, heads, m, dim, dtype=dtype)
    keys = empty(1, kv_heads, n, dim, dtype=dtype)
    _triton_mass.attention_mass(queries, keys, scaling=dim**-0.5, softcap=softcap)


def first_come(b: int, heads: int = 8, dim: int = 128) -> None:
    """Launch the two kernels of the online clusters: which of b points become representatives, and which
    of 900 representatives is nearest to each point."""
    points = empty(heads, b, dim)
    free = empty(heads, b, dtype=torch.bool)
    _triton_clusters.first_come(points, empty(heads), free, empty(heads, dtype=torch.int64))
    among = empty(heads, 1, 900, dtype=torch.bool)
    _triton_clusters.nearest(points, empty(heads, 900, dim), among)


def philox(dtype: torch.dtype, n: int = 16384, key: int = 2**61) -> None:
    """Launch n random draws for each of 8 heads."""
    _triton_philox.fill(empty(8, n, dtype=dtype), key)


def variants() -> Iterator[tuple[str, int]]:
    """How many kernels each operation compiles for several lengths.

    The lengths differ in what Triton makes constants of (1, multiples of 16) and in nothing else; those
    of decoding go from 1k to 128k entries, and the tensor of lengths begins anywhere in memory.
    """
    half = torch.float16
    many_lengths = torch.zeros(64, dtype=torch.int32)

    def decoding(n: int) -> None:
        lengths = many_lengths[n % 7 :][:8]
        decode(8, 2, 64, half, longest=n, return_mass=True, lengths=lengths)
        decode_packed(8, 2, 64, half, longest=n, longest_packed=n, lengths=lengths)
        append(64, half, lengths)
        evict(64, half, True, longest=n, lengths=lengths)

    launch_of_length: dict[str, Callable[[int], object]] = {
        "mass": lambda n: mass(n - 900, 4, 4, 64, half, n=n),
        "walk": lambda n: walk(16, 64, half, n=16 * (n - 900)),
        "cut": lambda n: cut(n - 900),
        "philox": lambda n: philox(torch.float32, n, 2**32 + n),
        "decoding": decoding,
    }
    for name, launch in launch_of_length.items():
        lengths = [902, 916, 917, 1008]
        if name == "decoding":
            lengths += [1024, 4096, 16400, 131072]
        hashes = set()
        for n in lengths:
            hashes |= {kernel.hash for kernel in compiled(partial(launch, n))}
        yield name, len(hashes)


DIMS = (64, 80, 96, 128, 256)
"""Head dimensions of the models that kvbench's papers and tasks name; 80: OPT-2.7B, Phi-2; 96: Phi-3."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
Launch = Callable[[], object]


def every_launch() -> Iterator[tuple[str, Launch]]:
    """Every kernel at every head dimension and dtype that it takes."""
    launch_of_dim: dict[str, Callable[[int, torch.dtype], object]] = {
        "walk": lambda dim, dtype: walk(256, dim, dtype),
        "walk of values and released centre": lambda dim, dtype: walk(
            256, dim, dtype, counts=None, weights=None, centre="released"
        ),
        "decode": lambda dim, dtype: decode(32, 8, dim, dtype),
        "decode with mass and softcap": lambda dim, dtype: decode(
            14, 2, dim, dtype, return_mass=True, softcap=50.0
        ),
        "decode 4 bits": lambda dim, dtype: decode_packed(32, 8, dim, dtype),
        "decode 2 bits and softcap": lambda dim, dtype: decode_packed(
            14, 2, dim, dtype, bits=2, softcap=50.0
        ),
        "append": append,
        "evict by attention": lambda dim, dtype: evict(dim, dtype, True),
        "evict by age": lambda dim, dtype: evict(dim, dtype, False),
        "mass": lambda dim, dtype: mass(16384, 32, 8, dim, dtype),
        "mass of the last queries, softcap": lambda dim, dtype: mass(
            64, 14, 2, dim, dtype, softcap=50.0
        ),
    }
    for dim in DIMS:
        for dtype in DTYPES:
            for name, launch in launch_of_dim.items():
                yield f"{name} {dtype} d={dim}", partial(launch, dim, dtype)
        # Online clusters hold float32 copies of the points.
        yield f"first come d={dim}", partial(first_come, 256, dim=dim)
    yield "cut", cut
    for dtype in (torch.float32, torch.float64, torch.int64):
        yield f"philox {dtype}", partial(philox, dtype)


def some_launches(capability: int) -> Iterator[tuple[str, Launch]]:
    """A part of `every_launch` for the default tests: each kernel in bfloat16 at a dimension that is no
    power of two, and the kernels that take no dimension; from capability 90 also each at one that is a
    power of two. Tiles of the two dimensions, 80 and 128, differ in the masks of 80 alone."""
    dims = (80, 128) if capability >= 90 else (80,)
    for name, launch in every_launch():
        is_some = name.endswith(tuple(f"{torch.bfloat16} d={dim}" for dim in dims))
        is_some = is_some and not name.startswith("decode 2 bits")
        if is_some or " d=" not in name or name == "first come d=80":
            yield name, launch


def outcome(launch: Launch) -> dict[str, Any]:
    """What `launch` compiles, in how many seconds, and the end of the error's text if it does not."""
    begun = time.perf_counter()
    kernels: list[Any] = []
    reason: BaseException | None = None
    try:
        kernels = compiled(launch)
    except Exception as failure:  # noqa: BLE001 - a compiler may raise anything; all is reported
        reason = failure
        while reason.__cause__ is not None:
            reason = reason.__cause__
    return {
        "kernels": sorted({kernel.metadata.name for kernel in kernels}),
        "failure": None if reason is None else " ".join(str(reason).split())[-300:],
        "seconds": round(time.perf_counter() - begun, 2),
    }


def launches() -> Iterator[tuple[str, Launch]]:
    """The main launches, whose registers and spills are watched, and the widest."""
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    yield "decode bf16 d=128", lambda: decode(32, 8, 128, brain, return_mass=True)
    yield "decode packed bf16 d=128", lambda: decode_packed(32, 8, 128, brain)
    yield "decode packed bf16 2 bits d=128", lambda: decode_packed(32, 8, 128, brain, bits=2)
    yield "append bf16 d=128", lambda: append(128, brain)
    yield "evict bf16 by attention", lambda: evict(128, brain, True)
    yield "evict bf16 by age", lambda: evict(128, brain, False)
    yield "walk bf16 b=256 d=128", lambda: walk(256, 128, brain)
    yield "cut", cut
    for dtype in (full, torch.float64, torch.int64):
        yield f"philox {dtype}", partial(philox, dtype)
    yield "mass bf16 d=128", lambda: mass(16384, 32, 8, 128, brain)
    yield "first come", lambda: first_come(256)
    # The widest: a group of 128 query heads, and float32 rows of 256 numbers.
    yield f"decode {half} group=128", lambda: decode(128, 1, 128, half)
    yield f"decode packed {half} group=128", lambda: decode_packed(128, 1, 128, half)
    yield f"decode packed {full} d=128", lambda: decode_packed(16, 16, 128, full, softcap=30.0)
    yield f"decode {full} d=256", lambda: decode(16, 16, 256, full, softcap=30.0)
    yield f"mass {full} d=256", lambda: mass(16384, 8, 8, 256, full, softcap=50.0)
    yield f"walk {full} b=64 d=256", lambda: walk(64, 256, full)


def outcome_line(name: str, launch: Launch) -> dict[str, Any]:
    """What is printed of a launch with --every and --some."""
    return {"launch": name, **outcome(launch)}


def resource_lines(capability: int) -> Iterator[dict[str, Any]]:
    """What is printed of the main launches' kernels, and at capability 90 of the variants."""
    for name, launch in launches():
        for kernel in compiled(launch):
            yield {"launch": name, **resources(kernel)}
    if capability == 90:
        for name, count in variants():
            yield {"launch": name, "variants": count}


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "capabilities", type=int, nargs="+", help="of the GPUs: 80, 86, 89, 90, 100, 120"
    )
    parser.add_argument("--every", action="store_true", help="whether each dim and dtype compiles")
    parser.add_argument("--some", action="store_true", help="a part of these")
    arguments = parser.parse_args()
    for capability in arguments.capabilities:
        driver.set_active(NamedTarget(GPUTarget("cuda", capability, 32)))
        lines: Iterator[dict[str, Any]]
        if arguments.every:
            lines = (outcome_line(*named) for named in every_launch())
        elif arguments.some:
            lines = (outcome_line(*named) for named in some_launches(capability))
        else:
            lines = resource_lines(capability)
        for line in lines:
            print(json.dumps({"capability": capability, **line}), flush=True)


if __name__ == "__main__":
    main()
