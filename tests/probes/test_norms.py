"""Norms by head against plain loops, the bound of the theorems, and the published table beside ours."""

from __future__ import annotations

import math

import pandas as pd
import pytest
import torch
from support.jobs import records_of
from support.probing import SYNTHETIC, probe_job

from kvbench.kv import KVError
from kvbench.methods import build_method
from kvbench.probes.norms import Norm, Norms, norms_of
from kvbench.report.build import build_report
from kvbench.run.runner import run_job

KINDS = ("queries", "keys", "keys_shifted", "values", "bound")


def test_norms_are_those_of_plain_loops():
    layer = SYNTHETIC.layer(0, 1)
    kv_heads, n = layer.keys.shape[1:3]
    for head in range(kv_heads):
        keys, values = layer.keys[0, head].double(), layer.values[0, head].double()
        queries = layer.queries[0, head * layer.group : (head + 1) * layer.group].double()
        mean = keys.mean(0)
        expected = {
            "queries": [math.sqrt(float(q @ q)) for part in queries for q in part],
            "keys": [math.sqrt(float(k @ k)) for k in keys],
            "keys_shifted": [math.sqrt(float((k - mean) @ (k - mean))) for k in keys],
            "values": [math.sqrt(float(v @ v)) for v in values],
        }
        expected["bound"] = [max(*expected["queries"], *expected["keys_shifted"])]
        for kind, numbers in expected.items():
            found = norms_of(layer, kind)
            assert found.shape[0] == kv_heads
            assert found[head].tolist() == pytest.approx(numbers, rel=1e-9)
    assert norms_of(layer, "queries").shape == (kv_heads, layer.group * n)


def test_a_shift_of_all_keys_changes_neither_shifted_norms_nor_attention():
    layer = SYNTHETIC.layer(0, 1)
    moved = type(layer)(layer.keys + 3.0, layer.values, layer.queries, 0, 1, layer.scaling)
    one, other = norms_of(layer, "keys_shifted"), norms_of(moved, "keys_shifted")
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(norms_of(layer, "keys"), norms_of(moved, "keys"))


def test_records_by_head_and_the_factor_of_the_theorem(tmp_path):
    methods = {kind: Norm(of=kind) for kind in KINDS}
    result = run_job(probe_job(tmp_path, Norms(layers=(1, 2), synthetic=SYNTHETIC), methods))
    assert result.failed == 0
    records = records_of(result)
    for kind in KINDS:
        found = pd.DataFrame(list(records[kind]))
        assert sorted(zip(found["layer"], found["head"], strict=True)) == [
            (layer, head) for layer in (1, 2) for head in (1, 2)
        ]
        for _, row in found.iterrows():
            norms = norms_of(SYNTHETIC.layer(int(row["layer"]) - 1, 2), kind)[int(row["head"]) - 1]
            assert row["score"] == row["norm_mean"] == pytest.approx(float(norms.mean()))
            assert row["norm_max"] == pytest.approx(float(norms.max()))
            if kind == "bound":
                factor = math.exp(2 * row["norm_max"] ** 2 / math.sqrt(SYNTHETIC.head_dim))
                assert 10 ** row["log10_factor"] == pytest.approx(factor, rel=1e-9)
    page = build_report(next(iter(result.folders.values())).parents[2])
    text = page.page.read_text()
    assert "exp(2 r^2 / sqrt(d)), r being the bound here: by ten to the power of" in text
    assert "heatmap" in text


def test_only_norms_are_measured(tmp_path):
    probe = Norms(layers=(1,), synthetic=SYNTHETIC)
    with pytest.raises(KVError, match=r"task norms has method 'uniform'; allowed: "):
        run_job(probe_job(tmp_path, probe, {"uniform": build_method("uniform")}))
