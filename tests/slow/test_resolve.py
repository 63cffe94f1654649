"""pip resolves the project and its pins beside a CPU build and a CUDA build of torch, without
installing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = re.search(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.M)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["cpu", "cuda"])
def test_the_pins_resolve_beside(build, tmp_path):
    """`===` takes the version without a suffix alone, which on Linux is the CUDA build."""
    assert TORCH is not None
    version = TORCH.group(1)
    wanted = f"torch=={version}+cpu" if build == "cpu" else f"torch==={version}"
    pip = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*pip, "--report", str(report), "-c", "constraints.txt", wanted, ".[test]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    if "No matching distribution found for torch" in done.stderr:
        pytest.skip(f"pip's indexes do not offer {wanted}")
    if "Temporary failure in name resolution" in done.stderr:
        pytest.skip("no package index can be reached")
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        entry["metadata"]["name"]: entry["metadata"]["version"]
        for entry in json.loads(report.read_text())["install"]
    }
    assert found["torch"] in (version, f"{version}+cpu")
    assert ("nvidia-cublas" in found) == (build == "cuda")
