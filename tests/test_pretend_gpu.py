"""The tests marked `cuda` on pretend GPUs: nothing that CUDA would refuse, or run on the wrong GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.pretended import TOOL

TESTS = Path(__file__).parent
METHODS = ("exact", "snapkv", "h2o", "balancekv", "subgen")


def needs_tool(test):
    """A slow test, of the tool beside the checkout."""
    absent = pytest.mark.skipif(not TOOL.exists(), reason="needs tools/pretend.py")
    return pytest.mark.slow(absent(test))


def test_the_ceiling_of_a_decode_speed_up_is_that_of_the_bytes_read(monkeypatch):
    monkeypatch.syspath_prepend(TESTS.parent / "scripts")
    import gpu_check as checks

    llama = checks.LLAMA_8B
    weights = checks.weight_bytes(llama)
    embedding = llama["vocab_size"] * llama["hidden_size"]
    assert weights == 2 * (8_030_261_248 - embedding), "Llama-3.1-8B's parameters"
    for batch, tokens, expected in ((1, 32, 1.20), (1, 128, 1.67), (8, 32, 2.09), (16, 32, 2.60)):
        exact = checks.cache_bytes(llama, 1024 * tokens)
        assert round(checks.ceiling(weights, exact, 0.25 * exact, batch), 2) == expected


def test_compute_sanitizer_that_is_not_there_is_one_line():
    done = subprocess.run(
        ["bash", "scripts/gpu_sanitize.sh"],
        cwd=TESTS.parent,
        env={**os.environ, "SANITIZER": "/no/such/compute-sanitizer"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_sanitize.sh needs compute-sanitizer")
    assert done.stderr.count("\n") == 1


def pretending(*command: str, gpus: int) -> subprocess.CompletedProcess[str]:
    """A process of its own: the tool makes torch believe in GPUs for good."""
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
    done = pretending(
        *("-m", "pytest", "-m", "cuda", "-rs", "-p", "support.pretended"),
        *("-p", "no:cacheprovider", "tests/engine", "tests/kernels", "tests/probes"),
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


@needs_tool
def test_gpu_check_goes_through_all_its_sections(tmp_path):
    tests = "-p support.pretended -p no:cacheprovider tests/kernels/test_kernels_cuda.py"
    status, report, said = gpu_check(tmp_path, "--pytest", tests)
    sections = report["sections"]
    assert status == 0, said
    assert list(sections) == [
        "device", "tests", "parity", "tokens", "kernels", "throughput", "decoding", "memory",
        "capacity", "second", "compiled",
    ]  # fmt: skip
    assert all(found["passed"] for found in sections.values()), said
    assert {"exact", "h2o", "balancekv", "subgen_streaming"} <= set(sections["tokens"]["methods"])
    figures = [name for name in sections["parity"] if " float16 " in name]
    assert len(figures) == 2 * 7, "seven figures at two shapes"
    assert set(sections["parity"][figures[0]]) == {"measured", "expected", "at_most"}
    decoding, capacity = sections["decoding"], sections["capacity"]
    for name in METHODS:
        assert decoding[f"{name} at 100"]["prefill_peak_bytes"] > 0
        assert decoding[f"{name} at 100, batch 2"]["peak_bytes"] > 0
        assert capacity[f"{name}: largest batch"] > 0
        if name != "exact":
            speedup = decoding[f"{name} at 100, batch 2: decode speed-up, the goal"]
            assert speedup["expected"] > 1.0
            assert set(speedup) == {"measured", "expected", "goal_at_least", "reached"}
            assert capacity[f"{name}: largest batch over exact's"]["measured"] > 1.0
    assert "all of it" not in sections["second"]["left_out"], "two GPUs"
    assert all(found["compiling_s"] == 0 for found in sections.values()), "nothing was"


@needs_tool
def test_gpu_check_says_what_failed(tmp_path):
    status, report, said = gpu_check(
        tmp_path, "--only", "tests", "--pytest", "tests/no_such_file.py"
    )
    assert status == 1
    sections = report["sections"]["tests"]
    assert sections["passed"] is False
    assert sections["tests passed"] == {"measured": 0, "expected": None, "at_least": 1}
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
