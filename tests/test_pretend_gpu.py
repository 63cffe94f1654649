"""The tests marked `cuda` on pretend GPUs: nothing that CUDA would refuse, or run on the wrong GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pretended import TOOL

TESTS = Path(__file__).parent


@pytest.mark.skipif(not TOOL.exists(), reason="needs tools/pretend.py of the shared folder")
def test_what_is_marked_cuda_passes_on_pretend_gpus():
    """In a process of its own: the tool makes torch believe in GPUs for good."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-m", "cuda", "-rs", "-p", "support.pretended"),
            *("-p", "no:cacheprovider", "tests/engine", "tests/kernels", "tests/probes"),
        ],
        cwd=TESTS.parent,
        env={
            **os.environ,
            "KVBENCH_PRETEND": "1",
            "PRETEND_GPUS": "2",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 5
