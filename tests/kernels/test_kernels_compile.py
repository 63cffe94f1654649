"""The Triton kernels build for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.kernels import needs_triton
from support.paths import ROOT

pytestmark = needs_triton
SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    89: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""The bytes of shared memory that a program may ask for, by compute capability."""
NO_SPILLS = (
    "decode",
    "first come",
    "append bf16 d=128",
    "walk bf16 b=256 d=128",
    "mass",
    "philox",
    "evict",
)
"""How the names of launches begin whose kernels keep all but a few numbers in registers."""
MATRIX_KERNELS = (
    "walk_kernel",
    "normaliser_kernel",
    "column_kernel",
)
"""Kernels whose products must run on Hopper's wide matrix instructions."""
KERNELS = 13
"""How many Triton kernels there are."""
SPILLED = 64
"""The bytes that a thread of a launch in float32, or in float16 with the widest group, may spill."""
WALK_ON_BLACKWELL = 112
"""The bytes that a thread of the walk's main launch may spill at compute capability 120."""


def build(capabilities: Iterable[int], cache: Path, *options: str) -> list[dict[str, Any]]:
    """What `compile_kernels.py` prints for GPUs of these compute capabilities."""
    script = ROOT / "scripts" / "benchmarks" / "compile_kernels.py"
    # A process of its own: this one's triton is the interpreter.
    done = subprocess.run(
        [sys.executable, str(script), *map(str, capabilities), *options],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(kernels: list[dict[str, Any]], capability: int) -> None:
    """Assert that the kernels fit a GPU of this compute capability and spill no more than is known."""
    for kernel in kernels:
        assert kernel["shared"] <= SHARED_MEMORY[capability], kernel
        # A multiprocessor has 65,536 registers; a program needs them all at once.
        assert kernel["registers"] * 32 * kernel["warps"] <= 65536, kernel
        if kernel["launch"].startswith(NO_SPILLS):
            is_walk_on_blackwell = capability == 120 and kernel["kernel"] == "walk_kernel"
            spilled = WALK_ON_BLACKWELL if is_walk_on_blackwell else 0
            if "bf16" not in kernel["launch"]:
                spilled = SPILLED
            assert kernel["spills"] <= spilled, kernel
    if capability == 90:
        for kernel in kernels:
            if kernel["kernel"] in MATRIX_KERNELS and "float32" not in kernel["launch"]:
                assert kernel["wgmma"], kernel


@pytest.mark.parametrize("chosen", ["--some", pytest.param("--every", marks=pytest.mark.slow)])
def test_every_kernel_compiles_whatever_the_head_dimension_and_dtype(chosen, tmp_path):
    """The interpreter has no types: what a compiler refuses (a value whose shape changes in a loop, at
    dimensions that are no power of two) passes there."""
    launches = build((80, 90), tmp_path, chosen)
    failures = [launch for launch in launches if launch["failure"]]
    assert failures == []
    for capability in (80, 90):
        compiled = [launch for launch in launches if launch["capability"] == capability]
        assert any(launch["launch"].startswith("walk torch.bfloat16 d=80") for launch in compiled)
        assert len({kernel for launch in compiled for kernel in launch["kernels"]}) == KERNELS


@pytest.mark.slow
@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_every_configuration_builds(capability, tmp_path):
    lines = build([capability], tmp_path)
    kernels = [line for line in lines if "kernel" in line]
    check(kernels, capability)
    assert len({kernel["kernel"] for kernel in kernels}) == KERNELS
    if capability != 90:
        return
    split = next(kernel for kernel in kernels if kernel["kernel"] == "split_kernel")
    # 16 bytes at a time: the compiler knows that entries are aligned.
    assert split["wide_loads"] >= 16
    # Whatever the lengths: else a kernel is compiled in the middle of a measured example.
    variants = {line["launch"]: line["variants"] for line in lines if "variants" in line}
    kernels_of = {"decoding": 8, "mass": 2, "walk": 1, "cut": 1, "philox": 1}
    assert variants == kernels_of
