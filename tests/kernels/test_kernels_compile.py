"""The Triton kernels build for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreted import HAVE_TRITON
from support.paths import ROOT

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="the package triton is not installed")
SHARED_MEMORY = {
    80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10,
}  # fmt: skip
"""Bytes a program may ask for, by compute capability."""


NO_SPILLS = (
    "decode", "first come", "append bf16 d=128", "walk bf16 b=256 d=128", "mass",
    "kcentre bf16 d=128", "philox", "evict",
)  # fmt: skip
"""Launches whose kernels keep everything in registers, or all but a few numbers."""
KERNELS = 17
"""Triton kernels that there are."""
SPILLED = 64
"""Bytes per thread, in launches other than the main ones."""
WALK_ON_BLACKWELL = 112
"""What the walk's main launch spills at compute capability 120, as its assembler says."""


def build(capability: int, cache: Path, *options: str) -> list[dict]:
    """What `compile_kernels.py` prints for a GPU of this compute capability."""
    script = ROOT / "scripts" / "benchmarks" / "compile_kernels.py"
    # A process of its own: this one's triton is the interpreter.
    done = subprocess.run(
        [sys.executable, str(script), str(capability), *options],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict], capability: int) -> None:
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        # A multiprocessor has 65,536 registers; a program needs them all at once.
        assert kernel["registers"] * 32 * kernel["warps"] <= 65536, kernel
        if kernel["launch"].startswith(NO_SPILLS):
            most = (
                WALK_ON_BLACKWELL if capability == 120 and kernel["kernel"] == "walk_kernel" else 0
            )
            assert kernel["spills"] <= (most if "bf16" in kernel["launch"] else SPILLED), kernel
    products = {
        "walk_kernel", "normaliser_kernel", "column_kernel",
        "visit_kernel", "compare_kernel", "finish_kernel",
    }  # fmt: skip
    for kernel in kernels:
        if capability == 90 and kernel["kernel"] in products and "float32" not in kernel["launch"]:
            assert kernel["wgmma"], kernel  # Hopper's wide matrix instructions


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("chosen", ["--some", pytest.param("--every", marks=pytest.mark.slow)])
def test_every_kernel_compiles_whatever_the_head_dimension_and_dtype(chosen, capability, tmp_path):
    """The interpreter knows no types: what a compiler refuses (a value whose shape changes in a loop, at
    dimensions that are no power of two) passes there."""
    launches = build(capability, tmp_path, chosen)
    assert [(one["launch"], one["failure"]) for one in launches if one["failure"]] == []
    assert len({kernel for launch in launches for kernel in launch["kernels"]}) == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_configuration_builds(capability, tmp_path):
    told = build(capability, tmp_path)
    kernels = [kernel for kernel in told if "kernel" in kernel]
    check(kernels, capability)
    assert len({kernel["kernel"] for kernel in kernels}) == KERNELS
    if capability != 90:
        return
    split = next(kernel for kernel in kernels if kernel["kernel"] == "split_kernel")
    assert split["wide_loads"] >= 16  # 16 bytes at a time: the address table keeps its promise
    # Whatever the lengths: else a kernel is compiled in the middle of a measured example.
    variants = {one["launch"]: one["variants"] for one in told if "variants" in one}
    kernels_of = {"decoding": 8, "mass": 2, "kcentre": 4, "walk": 1, "cut": 1, "philox": 1}
    assert variants == kernels_of
