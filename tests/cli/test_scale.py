"""Large sweeps and large experiments: what is counted is work done, not seconds."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from support.command import FAST, main

from kvbench.records import read as records
from kvbench.report.build import build_report

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "benchmarks" / "bench_scale.py"
sys.path.insert(0, str(SCRIPT.parent))

import bench_scale  # noqa: E402


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    for seed, name in enumerate(("first", "second")):
        bench_scale.write_experiment(folder, name, 320, seed)
    return folder


def test_a_report_reads_each_records_file_once(results, monkeypatch):
    read: Counter[Path] = Counter()
    real = records.whole_lines

    def counting(path):
        read[path] += 1
        return real(path)

    monkeypatch.setattr(records, "whole_lines", counting)
    build_report(results / "first")
    assert set(read.values()) == {1}
    assert len(read) == len(bench_scale.METHODS)


def test_a_large_dry_run_is_a_line_per_job_and_still_refuses(capsys, tmp_path):
    """The first ten jobs whole, five in a line, and five whose budget no prompt is long enough for."""
    words = [*FAST, "task.num_examples=1", "task.max_new_tokens=2", "dry_run=true"]
    words += ["budget.sink=1,2,3,100000", "seed=range(5)", "limit=1", f"results_dir={tmp_path}/r"]
    status, out, err = main(capsys, "-m", *words)
    assert status == 2
    assert out.count("dry run, nothing written") == 10
    for number in range(10, 15):
        line = f"job {number}: budget.sink=3 seed={number - 10}: 2 methods, 0 records on disk; default/"
        assert line in out
    assert err.count("budget.sink + budget.window is 100032; the longest prompt") == 5
    assert out.endswith("20 jobs; launcher=local\n")
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_the_benchmark_of_scale_prints_seconds_and_ratios(capsys):
    bench_scale.main(["records", "--most", "64"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines[:4]] == ["report", "comparison"] * 2
    assert all("times as long for 4 times as many records" in line for line in lines[4:])
