"""scripts/benchmarks/bench_kernels.py on small sizes: every operation is timed against its floor."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

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


def test_the_report_has_every_operation_beside_its_floor(script, tmp_path, monkeypatch):
    command = ["bench_kernels.py", "--device=cpu", "--repeats=1", f"--out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", command)

    def cases(bench):
        return [
            *script.halvings(bench, 256),
            *script.decoding(bench, 64, 2),
            *script.masses(bench, [(2, 40, 40), (2, 8, 40)]),
            *script.centres(bench, 100, 10),
            *script.compressions(bench, 300, 8),
        ]

    monkeypatch.setattr(script, "cases", cases)
    script.main()
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert report["command"].startswith("python scripts/benchmarks/bench_kernels.py --device=cpu")
    assert "no CUDA device" in report["triton"]
    rows = {(row["operation"], row["size"]): row for row in report["rows"]}
    names = "balanced_halving", "cut", "decode_attention", "attention_mass", "kcentre", "compress"
    assert {operation for operation, _ in rows} == {*names}
    assert all(row["torch_s"] > 0 and row["triton_s"] is None for row in rows.values())
    # 8 heads, 256 tokens: keys and values of 128 float32 numbers, a draw and a sign each.
    floor = rows["balanced_halving", "n=256 b=64"]["floor_s"]
    assert floor == pytest.approx(8 * 256 * (2 * 128 * 4 + 4 + 1) / 1e9)
