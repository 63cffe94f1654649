"""The tests marked `cuda` on pretend GPUs: nothing that CUDA would refuse, or run on the wrong GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.pretended import TOOL

TESTS = Path(__file__).parent
METHODS = ("exact", "snapkv", "h2o", "balancekv", "subgen")


def needs_tool(test: Any) -> Any:
    absent = pytest.mark.skipif(not TOOL.exists(), reason="needs tools/pretend.py")
    return pytest.mark.slow(absent(test))


@pytest.mark.parametrize(
    ("batch", "thousands", "expected"),
    [(1, 32, 1.20), (1, 128, 1.67), (8, 32, 2.09), (16, 32, 2.60)],
)
def test_the_ceiling_of_a_decode_speed_up_is_that_of_the_bytes_read(
    batch, thousands, expected, monkeypatch
):
    monkeypatch.syspath_prepend(TESTS.parent / "scripts")
    import gpu_check as checks

    llama = checks.LLAMA_8B
    weights = checks.weight_bytes(llama)
    embedding = llama["vocab_size"] * llama["hidden_size"]
    assert weights == 2 * (8_030_261_248 - embedding), "Llama-3.1-8B's parameters"
    exact = checks.cache_bytes(llama, 1024 * thousands)
    assert round(checks.ceiling(weights, exact, 0.25 * exact, batch), 2) == expected


def pretending(*command: str, gpus: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        cwd=TESTS.parent,
        env={
            **os.environ,
            "KVBENCH_PRETEND": "1",
            "PRETEND_GPUS": str(gpus),
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
            "PYTEST_ADDOPTS": "",
        },
        capture_output=True,
        text=True,
    )


@needs_tool
def test_what_is_marked_cuda_passes_on_pretend_gpus():
    """The engine's, and each kernel on a GPU that is not the current one; every shape of a kernel runs
    without pretending."""
    done = pretending(
        *("-m", "pytest", "-m", "cuda", "-rs", "-p", "support.pretended"),
        *("-p", "no:cacheprovider", "tests/engine", "tests/kernels/test_kernels_cuda.py"),
        gpus=2,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) >= 12


def gpu_check(tmp_path: Path, *arguments: str) -> tuple[int, dict, str]:
    script = (
        "import runpy, sys, support.pretended\n"
        "for name in ('hydra', 'omegaconf', 'wandb', 'datasets', 'wonderwords', 'lm_eval'):\n"
        "    sys.modules[name] = None\n"  # importing one fails: not on the node
        "runpy.run_path('scripts/gpu_check.py', run_name='__main__')"
    )
    done = pretending("-c", script, "--small", "--out", str(tmp_path), *arguments, gpus=2)
    files = list(tmp_path.glob("*.json"))
    return (
        done.returncode,
        json.loads(files[0].read_text()) if files else {},
        done.stdout + done.stderr,
    )


def called(tmp_path: Path, only: str, *arguments: str) -> dict:
    """The sections of one call of gpu_check, all of which passed."""
    status, report, said = gpu_check(tmp_path, "--only", only, *arguments)
    assert status == 0, said
    assert list(report["sections"]) == only.split(",")
    assert all(section["passed"] for section in report["sections"].values()), said
    assert all(section["compiling_s"] == 0 for section in report["sections"].values())
    return report["sections"]


@needs_tool
def test_gpu_check_of_kernels(tmp_path):
    sections = called(tmp_path, "device,tokens,kernels,throughput")
    assert {"exact", "h2o", "balancekv", "subgen_streaming"} <= set(sections["tokens"]["methods"])
    shares = [name for name in sections["kernels"] if name.endswith("share of the floor")]
    assert len(shares) == 5
    assert set(sections["kernels"][shares[0]]) == {"measured", "at_least"}


@needs_tool
def test_gpu_check_of_decoding(tmp_path):
    sections = called(tmp_path, "decoding,capacity")
    for name in METHODS:
        assert sections["decoding"][f"{name} at 100, batch 2"]["peak_bytes"] > 0
        assert sections["capacity"][f"{name}: largest batch"] == 3
    assert sections["decoding"]["snapkv at 100, batch 2: speed-up"]["at_most"] > 1.0


@needs_tool
def test_gpu_check_of_tests_and_the_second_gpu(tmp_path):
    tests = "-p support.pretended -p no:cacheprovider tests/kernels/test_kernels_cuda.py -k draws"
    sections = called(tmp_path, "second,tests", "--pytest", tests)
    assert sections["second"]["captured steps"]["measured"] >= 1
    assert "all of it" not in sections["second"]["left_out"], "two GPUs"


@needs_tool
def test_gpu_check_says_what_failed(tmp_path):
    status, report, said = gpu_check(
        tmp_path, "--only", "tests", "--pytest", "tests/no_such_file.py"
    )
    assert status == 1
    sections = report["sections"]["tests"]
    assert sections["passed"] is False
    assert sections["tests passed"] == {"measured": 0, "at_least": 1}
    assert "FAILED" in said
    assert "tests passed: 0, at least 1" in said


@pytest.mark.slow
def test_gpu_check_does_not_start_without_a_gpu():
    done = subprocess.run(
        [sys.executable, "scripts/gpu_check.py"], cwd=TESTS.parent, capture_output=True, text=True
    )
    if done.returncode != 2:
        pytest.skip("there is a GPU")
    assert "needs a GPU" in done.stderr
