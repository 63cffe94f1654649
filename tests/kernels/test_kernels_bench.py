"""scripts/benchmarks/bench_kernels.py on small sizes: every operation is timed against its floor."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    spec = importlib.util.spec_from_file_location("bench_kernels", SCRIPTS / "bench_kernels.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_kernels", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.Bench, "_copy_rate", lambda self: 1e9)
    monkeypatch.setattr(module.Bench, "_matmul_rate", lambda self: 1e12)
    return module


def test_every_case_runs_and_has_its_floor(script):
    bench = script.Bench(torch.device("cpu"), repeats=1)
    cases = [
        *script.halvings(bench, 256),
        *script.decoding(bench, 64, 2),
        *script.masses(bench, [(2, 40, 40), (2, 8, 40)]),
        *script.centres(bench, 100, 10),
        *script.compressions(bench, 300, 8),
    ]
    rows = [bench.measure(case) for case in cases]
    operations = "balanced_halving", "cut", "decode_attention", "attention_mass", "kcentre"
    assert {row.operation for row in rows} == {*operations, "compress"}
    for row in rows:
        assert row.torch_s > 0
        assert row.triton_s is None
    halving = next(row for row in rows if row.size == "n=256 b=64")
    # 8 heads, 256 tokens: keys and values of 128 float32 numbers, a draw and a sign each.
    assert halving.floor_by == "bytes"
    assert halving.floor_s == pytest.approx(8 * 256 * (2 * 128 * 4 + 4 + 1) / 1e9)
    mass = next(row for row in rows if row.size == "heads=2 queries=40 n=40")
    assert mass.floor_s >= 2 * 820 * 2 * 128 / 1e12  # 820 causal pairs
    assert mass.beside == "exact attention (sdpa)"
    text = script.table(rows)
    assert len(text.splitlines()) == len(rows) + 1


def test_the_report_names_device_commit_and_command(script, tmp_path, monkeypatch, capsys):
    command = ["bench_kernels.py", "--device=cpu", "--repeats=1", "--only=cut", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.setattr(script, "cases", lambda bench: script.halvings(bench, 256))
    script.main()
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert [row["operation"] for row in report["rows"]] == ["cut"]
    assert report["command"].startswith("python scripts/benchmarks/bench_kernels.py --device=cpu")
    assert report["hardware"]["device"] == "cpu"
    assert report["code_revision"]
    assert "no CUDA device" in report["triton"]
    assert "no CUDA device" in capsys.readouterr().out
