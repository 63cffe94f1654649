"""The Triton kernels build for GPUs that are not here, and fit them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from support.kernels import needs_triton
from support.paths import ROOT

SHARED_MEMORY = {
    80: 163 << 10,
    86: 99 << 10,
    90: 227 << 10,
    100: 227 << 10,
    120: 99 << 10,
}
"""The bytes of shared memory that a program may ask for, by compute capability."""
KERNELS = 12
"""How many Triton kernels there are."""


@needs_triton
@pytest.mark.parametrize(
    ("capabilities", "options"),
    [
        ((90,), ()),
        pytest.param((80, 86, 100, 120), (), marks=pytest.mark.slow),
        pytest.param((90,), ("--every",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_kernel_compiles_and_fits(capabilities, options, request, tmp_path):
    """The interpreter has no types: what a compiler refuses (a value whose shape changes in a loop, at
    dimensions that are no power of two) passes there."""
    script = ROOT / "scripts" / "benchmarks" / "compile_kernels.py"
    # What has been compiled once stays in pytest's cache. A process of its own: this one's triton is
    # the interpreter.
    cache = getattr(request.config, "cache", None)
    compiled = cache.mkdir("triton") if cache else tmp_path
    done = subprocess.run(
        [sys.executable, str(script), *map(str, capabilities), *options],
        env={**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(compiled)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line in lines if line.get("failure")] == []
    for capability in capabilities:
        launches = [x for x in lines if x["capability"] == capability and "launch" in x]
        kernels = [(x["launch"], *kernel) for x in launches for kernel in x["kernels"]]
        assert len({name for _, name, _ in kernels}) == KERNELS
        for launch, _, shared in kernels:
            assert shared <= SHARED_MEMORY[capability], launch
        # Whatever the lengths: else a kernel is compiled in the middle of a measured example.
        found = {
            x["operation"]: x["variants"]
            for x in lines
            if x["capability"] == capability and "variants" in x
        }
        expected = {"decoding": 6, "mass": 2, "walk": 1, "cut": 1, "philox": 1}
        assert found == (expected if options else {})
