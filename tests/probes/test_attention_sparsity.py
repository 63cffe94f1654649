"""Attention sparsity, accumulated attention: against float64 brute force, closed forms, in records."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from support.jobs import Echo, records_of
from support.probing import SYNTHETIC, probe_job, shipped

from kvbench.kv import KVError, LayerKV
from kvbench.methods import build_method
from kvbench.probes import attention_sparsity as probes
from kvbench.probes.attention_sparsity import (
    Accumulated,
    AttentionMass,
    AttentionSparsity,
    Threshold,
    sorted_mass,
    sparsity,
)
from kvbench.report.build import build_report
from kvbench.run.runner import run_job


def attention(layer):
    """[heads, n, n] float64, all at once."""
    keys = layer.keys[0].double().repeat_interleave(layer.group, 0)
    logits = layer.queries[0].double() @ keys.mT * layer.scaling
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    n = layer.n
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


def page_of(result):
    return build_report(next(iter(result.folders.values())).parents[2]).page.read_text()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("block", [1, 700, 1 << 22])
def test_sparsity_is_what_the_whole_matrix_gives(monkeypatch, softcap, block):
    monkeypatch.setattr(probes, "_BLOCK", block)
    layer = replace(SYNTHETIC, n=83, key_norm=20.0).layer(0, 1)
    layer = replace(layer, softcap=softcap)
    weights = attention(layer)
    seen = torch.ones(83, 83, dtype=torch.bool).tril()
    shares = (0.001, 0.01, 0.3)
    found = sparsity(layer, shares)
    assert found.shape == (3, 4)
    for row, share in zip(found, shares, strict=True):
        below = (weights < share * weights.amax(-1, keepdim=True)) & seen
        assert torch.equal(row, below.sum((-2, -1)).double() / (83 * 84 / 2))
    assert 0.05 < found[1].mean() < 0.95, "the data tell the thresholds apart"


def test_mass_is_the_column_sums_sorted():
    layer = replace(SYNTHETIC, n=83, key_norm=20.0).layer(1, 2)
    shares = attention(layer).sum(1) / 83
    heads = sorted_mass(layer, per_group=False)
    torch.testing.assert_close(
        heads, shares.sort(-1, descending=True)[0].mean(0), atol=1e-6, rtol=0
    )
    assert float(heads.sum()) == pytest.approx(1.0)
    means = shares.unflatten(0, (2, 2)).mean(1).sort(-1, descending=True)[0].mean(0)
    torch.testing.assert_close(sorted_mass(layer, per_group=True), means, atol=1e-6, rtol=0)
    assert heads[0] >= means[0], "heads that disagree are flatter together"


def test_equal_keys_are_not_sparse_and_one_far_key_takes_all():
    n, dim = 40, 8
    keys = torch.zeros(1, 1, n, dim)
    queries = torch.ones(1, 1, n, dim)
    flat = LayerKV(keys, keys, queries, 0, 1, 1.0)
    assert float(sparsity(flat, (0.99,))) == 0.0
    keys = keys.clone()
    keys[:, :, 0] = 5.0
    peaked = LayerKV(keys, keys, queries, 0, 1, 1.0)
    assert float(sparsity(peaked, (0.01,))) == pytest.approx(1 - n / (n * (n + 1) / 2))
    assert float(sorted_mass(peaked, per_group=False)[0]) == pytest.approx(1.0)


def test_records_and_page_of_sparsity(tmp_path):
    probe = AttentionSparsity(num_prompts=2, prompts=Echo(count=3))
    methods = {"below_1": Threshold(), "below_10": Threshold(share=0.1)}
    result = run_job(probe_job(tmp_path, probe, methods, session=shipped()))
    assert result.failed == 0
    records = records_of(result)
    assert [row["example_id"] for row in records["below_1"]] == [
        f"e{i}/layer{layer}" for i in range(2) for layer in range(1, 5)
    ], "every layer of the shipped model"
    for one, ten in zip(records["below_1"], records["below_10"], strict=True):
        assert 0 <= one["sparsity_least"] <= one["score"] <= one["sparsity_most"] <= 1
        assert one["score"] < ten["score"]
    page = page_of(result)
    assert "score by layer" in page
    assert "is better" not in page, "thresholds are not ranked"
    assert "nothing is compared" not in page
    with pytest.raises(
        KVError, match=r"task attention_sparsity has method 'exact'; allowed: kvbench"
    ):
        run_job(probe_job(tmp_path, probe, {"exact": build_method("exact")}))


def test_a_power_law_is_found_with_its_exponent(tmp_path, monkeypatch):
    law = torch.arange(1, 200, dtype=torch.float64) ** -0.8
    monkeypatch.setattr(probes, "sorted_mass", lambda layer, per_group: law / law.sum())
    probe = AttentionMass(ranks=(1, 2, 4, 8, 16), layers=(1,), synthetic=SYNTHETIC)
    result = run_job(probe_job(tmp_path, probe, {"per_head": Accumulated()}))
    rows = records_of(result)["per_head"]
    assert [row["rank"] for row in rows] == [1, 2, 4, 8, 16]
    page = page_of(result)
    assert "Power law y = C x^slope of share of accumulated attention" in page
    assert "slope −0.80 (no interval), R² 1.000" in page


def test_layers_are_spread_and_prompts_must_be_long_enough(tmp_path):
    probe = AttentionMass(ranks=(1, 2), most_layers=2, num_prompts=1, prompts=Echo(count=1))
    job = probe_job(tmp_path, probe, {"a": Accumulated(per="group")}, session=shipped())
    records = records_of(run_job(job))["a"]
    assert [(row["layer"], row["rank"]) for row in records] == [(1, 1), (1, 2), (4, 1), (4, 2)]
    assert math.isclose(records[0]["score"], records[0]["attention"])
    with pytest.raises(KVError, match=r"task.ranks has 5000 and prompt 'e0' has \d+ tokens"):
        run_job(replace(job, plan=replace(probe, ranks=(1, 5000))))
