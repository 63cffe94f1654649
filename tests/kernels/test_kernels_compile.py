"""The Triton kernels build for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.interpreted import HAVE_TRITON

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="the package triton is not installed")
SHARED_MEMORY = {90: 227 << 10, 80: 163 << 10}
"""Bytes a program may ask for, by compute capability."""


def build(capability: int, size: str, cache: Path) -> list[dict]:
    script = Path(__file__).parents[1] / "support" / "compile_kernels.py"
    # A process of its own: this one's triton is the interpreter.
    done = subprocess.run(
        [sys.executable, str(script), str(capability), size],
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
        if "bf16 d=128" in kernel["launch"] or "bf16 b=256 d=128" in kernel["launch"]:
            assert kernel["spills"] == 0, kernel
    products = {"walk_kernel", "normaliser_kernel", "column_kernel", "kcentre_kernel"}
    for kernel in kernels:
        single = "float32" in kernel["launch"] or kernel["launch"] == "ones"
        if capability == 90 and kernel["kernel"] in products and not single:
            assert kernel["wgmma"], kernel  # Hopper's wide matrix instructions


def test_the_main_configurations_build_for_hopper(tmp_path):
    kernels = build(90, "quick", tmp_path)
    assert {kernel["kernel"] for kernel in kernels} >= {
        "walk_kernel", "cut_kernel", "split_kernel", "reduce_kernel", "mass_kernel",
        "append_kernel", "normaliser_kernel", "column_kernel", "kcentre_kernel",
    }  # fmt: skip
    check(kernels, 90)
    split = next(kernel for kernel in kernels if kernel["kernel"] == "split_kernel")
    assert split["wide_loads"] >= 16  # 16 bytes at a time: the address table keeps its promise


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 80])
def test_every_configuration_builds(capability, tmp_path):
    check(build(capability, "full", tmp_path), capability)
