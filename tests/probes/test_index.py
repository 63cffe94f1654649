"""The INDEX instance: the limits by simulation and by closed form, and no method above it may know."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from support.jobs import records_of
from support.probing import SYNTHETIC, probe_job

from kvbench.kv import CompressedKV, keep_all
from kvbench.methods import build_method
from kvbench.probes.index import Index, IndexLayers, Limit, most_recovered
from kvbench.report.build import build_report
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

DATA = IndexLayers(n=256, head_dim=64)
PROBE = Index(synthetic=DATA, rates=(0.5, 0.125), layers=(1, 2, 3), seeds=2, exact=1)


def test_alices_rows_are_corners_of_norm_r_and_bits():
    layer = DATA.layer(0, 3)
    torch.testing.assert_close(layer.keys.norm(dim=-1), torch.full((1, 1, 256), DATA.key_norm))
    assert set(layer.values.unique().tolist()) == {-1.0, 1.0}
    assert torch.equal(layer.keys, DATA.layer(0, 3).keys)
    assert not torch.equal(layer.keys, DATA.layer(1, 3).keys)
    assert not torch.equal(layer.keys, layer.queries), "which row is asked for is not known"


def test_the_whole_cache_tells_every_bit_and_half_of_it_three_quarters():
    layer = DATA.layer(0, 3)
    _, read = PROBE._shown(layer)
    whole = read(keep_all(layer))
    assert whole["score"] == 1.0
    assert whole["epsilon"] == pytest.approx(0.0, abs=1e-12)
    kept = torch.arange(0, 256, 2)
    half = CompressedKV(
        layer.keys[:, :, kept], layer.values[:, :, kept], None, kept.expand(1, 1, -1)
    )
    found = read(half)
    assert found["score"] == pytest.approx(0.75, abs=0.02)
    assert found["bits_epsilon_sq"] == pytest.approx(8 * half.nbytes * found["epsilon"] ** 2)


def test_epsilon_is_the_least_for_which_equation_2_holds():
    """Against the equation written out, query by query."""
    layer = DATA.layer(1, 3)
    kept = torch.arange(40)
    held = CompressedKV(
        layer.keys[:, :, kept], layer.values[:, :, kept], None, kept.expand(1, 1, -1)
    )
    found = PROBE._shown(layer)[1](held)["epsilon"]
    keys, values = layer.keys[0, 0].double(), layer.values[0, 0].double()
    ratios = []
    for query in keys:
        weights = (keys @ query * layer.scaling).softmax(0)
        z = (keys[:40] @ query * layer.scaling).softmax(0) @ values[:40]
        ratios.append(float((z - weights @ values).norm() / (weights.norm() * values.norm())))
    assert found == pytest.approx(max(ratios))


@pytest.mark.parametrize("entries", [1, 16, 128, 256])
def test_the_limits_are_what_they_say(entries):
    layer = DATA.layer(0, 1)
    assert most_recovered("entries", entries, layer) == (1 + entries / 256) / 2
    p = most_recovered("bits", entries, layer)
    known = min(1.0, entries * 2 * 64 * 32 / (256 * 64))
    unsure = 0.0 if p == 1 else -p * math.log2(p) - (1 - p) * math.log2(1 - p)
    assert 1 - unsure == pytest.approx(known, abs=1e-9)
    assert p >= most_recovered("entries", entries, layer)


def test_methods_lie_on_their_limit(tmp_path):
    methods = {name: build_method(name) for name in ("uniform", "snapkv", "balancekv")}
    methods |= {"entries": Limit(of="entries"), "bits": Limit(of="bits")}
    result = run_job(probe_job(tmp_path, PROBE, methods))
    assert result.failed == 0
    frame = pd.DataFrame([r for found in records_of(result).values() for r in found])
    means = frame.groupby(["method", "rate"])["score"].mean()
    for rate in PROBE.rates:
        limit = means["entries", rate]
        for name in ("uniform", "snapkv"):  # whose choice tells nothing of the values
            assert means[name, rate] == pytest.approx(limit, abs=0.01)
        assert limit - 0.01 < means["balancekv", rate] < limit + 0.04
        assert means["bits", rate] == 1.0
    assert (frame.loc[frame["method"].eq("uniform"), "bits_epsilon_sq"] > 1).all()
    text = build_report(next(iter(result.folders.values())).parents[2]).page.read_text()
    assert "Theorem 3.2 says that no method gets below a constant" in text


def test_other_data_are_refused():
    with pytest.raises(
        TaskError, match=r"task.synthetic is a SyntheticLayers; allowed: IndexLayers"
    ):
        replace(PROBE, synthetic=SYNTHETIC)
