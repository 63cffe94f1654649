"""The scripts of scripts/papers: what they compute against direct computation, and each of them run
small."""

from __future__ import annotations

import itertools
import math
import runpy
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support.paths import ROOT
from support.probing import SYNTHETIC
from support.tiny import tiny_model

from kvbench.cli.catalogue import paper_items
from kvbench.cli.reproduce import command_lines
from kvbench.errors import UserError
from kvbench.kv import CompressedKV, LayerKV, keep_all

SCRIPTS = ROOT / "scripts" / "papers"
sys.path.insert(0, str(SCRIPTS))

import _captions  # noqa: E402
import _neurons  # noqa: E402
import attention_sparsity  # noqa: E402
import clusterability  # noqa: E402
import joint_survival  # noqa: E402
import lower_bound  # noqa: E402
import neuron_dropping  # noqa: E402
import neuron_overlap  # noqa: E402
import norms  # noqa: E402
import subgen_clusters  # noqa: E402
import walk_discrepancy  # noqa: E402
from _common import Run  # noqa: E402
from attention_mass import sorted_mass  # noqa: E402

ITEMS = {name: item for name, item in paper_items().items() if item.script}
QUICK = ("balancekv_table3", "balancekv_theorem3_3", "h2o_figure2a")


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in sorted(ITEMS)]
)
def test_every_item_is_made_small(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    words = ["model=recall_mini", "limit=2" if "table12" in name else "limit=1", "device=cpu"]
    for line in command_lines(name, [*words, f"results_dir={tmp_path}"]):
        path = SCRIPTS / f"{line[0].removeprefix('script=')}.py"
        runpy.run_path(str(path))["main"](line[1:])
    folder = tmp_path / f"{name}_small"
    files = sorted(path.stem for path in folder.glob("*.csv"))
    assert files
    for stem in files:
        table = folder / f"{stem}.csv"
        assert table.read_text().startswith(
            "# A small run, not that of the paper: model recall_mini"
        )
        assert len(pd.read_csv(table, comment="#")) > 1
        assert (folder / f"{stem}.png").stat().st_size > 1000
    page = (folder / "report.html").read_text()
    assert page.count("A small run, not that of the paper") == 1
    assert page.count("data:image/png") == len(files)
    assert all(line.split("&")[0].split("'")[0] in page for line in ITEMS[name].differs)


def test_scripts_refuse_what_they_do_not_know() -> None:
    with pytest.raises(UserError, match="'walk=2' is unknown; allowed: model, task, limit"):
        Run("x.py", ["walk=2"], "", "", walks=1)
    run = Run(
        "x.py", ["task=b", "task.y=2", "z=[1]", "model.a=1"], "model=m", "task=a task.x=1", z=0
    )
    assert run.overrides == ["model=m", "task=b", "task.y=2", "model.a=1"]
    assert (run.name, run.z, run.synthetic) == ("x", [1], False)


def attention(layer: LayerKV) -> torch.Tensor:
    """[heads, n, n] float64, all at once."""
    keys = layer.keys[0].double().repeat_interleave(layer.group, 0)
    logits = layer.queries[0].double() @ keys.mT * layer.scaling
    if layer.softcap is not None:
        logits = layer.softcap * torch.tanh(logits / layer.softcap)
    n = layer.n
    return logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf).softmax(-1)


@pytest.mark.parametrize(("softcap", "block"), [(None, 1), (3.0, 700), (None, 1 << 22)])
def test_sparsity_is_what_the_whole_matrix_gives(monkeypatch, softcap, block) -> None:
    monkeypatch.setattr(attention_sparsity, "BLOCK", block)
    layer = replace(replace(SYNTHETIC, n=83, key_norm=20.0).layer(0, 1), softcap=softcap)
    weights, seen = attention(layer), torch.ones(83, 83, dtype=torch.bool).tril()
    shares = (0.001, 0.01, 0.3)
    for row, share in zip(attention_sparsity.sparsity(layer, shares), shares, strict=True):
        below = (weights < share * weights.amax(-1, keepdim=True)) & seen
        assert torch.equal(row, below.sum((-2, -1)).double() / (83 * 84 / 2))


def test_mass_is_the_column_sums_sorted() -> None:
    layer = replace(SYNTHETIC, n=83, key_norm=20.0).layer(1, 2)
    shares = attention(layer).sum(1) / 83
    for per, sums in (("head", shares), ("group", shares.unflatten(0, (2, 2)).mean(1))):
        want = sums.sort(-1, descending=True)[0].mean(0)
        torch.testing.assert_close(sorted_mass(layer, per), want, atol=1e-6, rtol=0)


def test_norms_are_those_of_plain_loops() -> None:
    layer = SYNTHETIC.layer(0, 1)
    for head in range(layer.keys.shape[1]):
        keys, values = layer.keys[0, head].double(), layer.values[0, head].double()
        queries = layer.queries[0, head * layer.group : (head + 1) * layer.group].double()
        vectors = {"queries": queries.flatten(0, 1), "keys": keys, "values": values}
        vectors["keys_shifted"] = keys - keys.mean(0)
        expected = {kind: [math.sqrt(float(x @ x)) for x in each] for kind, each in vectors.items()}
        expected["bound"] = [max(*expected["queries"], *expected["keys_shifted"])]
        for kind, numbers in expected.items():
            assert norms.norms_of(layer, kind)[head].tolist() == pytest.approx(numbers, rel=1e-9)


def test_the_walk_is_the_direct_one() -> None:
    """Sums after each n, against vectors signed one by one."""
    rules = [None, 2.0, 0, "theory"]
    sums = dict(walk_discrepancy.walked(3, rules, (5, 1500), 3, seed=7))
    vectors, uniforms = [], []
    for walk in range(3):
        generator, v, u = np.random.default_rng([7, walk]), [], []
        for count in (1024, 476):
            v.append(generator.standard_normal((count, 3)))
            u.append(generator.random(count))
        drawn = np.concatenate(v)
        vectors.append(drawn / np.linalg.norm(drawn, axis=-1, keepdims=True))
        uniforms.append(np.concatenate(u))
    for (r, rule), walk in itertools.product(enumerate(rules), range(3)):
        total = np.zeros(3)
        for step in range(1500):
            chance = 0.5 - walk_discrepancy.pull(rule, 1500) * float(total @ vectors[walk][step])
            total += vectors[walk][step] * (1 if uniforms[walk][step] < chance else -1)
            if step + 1 in sums:
                np.testing.assert_allclose(sums[step + 1][r, walk], total, atol=1e-9)
    random, walk, greedy = np.abs(sums[1500]).max(-1).mean(-1)[:3]
    assert random > 10 > 4 > max(walk, greedy)
    assert walk_discrepancy.pull("theory", 100) == pytest.approx(1 / (60 * math.log(100 / 0.01)))


@pytest.mark.parametrize("delta", [0.0, 0.3, 0.6, 100.0])
def test_clusters_are_those_of_the_algorithm(delta: float) -> None:
    keys = torch.randn(1, 300, 3, generator=torch.Generator().manual_seed(1))
    pairs = (keys[0, :, None] - keys[0]).double().square().sum(-1)
    apart = float(subgen_clusters.key_distance(keys)[0])
    assert apart == pytest.approx(float(pairs.mean().sqrt()))
    counts = subgen_clusters.clusters(keys, delta, (1, 270, 300))
    found: list[torch.Tensor] = []
    for i, key in enumerate(keys[0].double()):
        if not found or min(float((key - other).norm()) for other in found) > delta * apart:
            found.append(key)
        assert counts.get(i + 1, len(found)) == len(found)


def test_radii_are_within_twice_the_best_and_gaussians_have_no_clusters() -> None:
    points = torch.randn(11, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    centres, radii = clusterability.k_centre_radii(points, 4)

    def radius(chosen: Any) -> float:
        return max(min(float((p - points[c]).norm()) for c in chosen) for p in points)

    for k in range(1, 5):
        assert float(radii[k - 1]) == pytest.approx(radius(centres[:k]))
        best = min(radius(c) for c in itertools.combinations(range(11), k))
        assert best - 1e-9 <= float(radii[k - 1]) <= 2 * best + 1e-9
    layer = replace(SYNTHETIC, n=4000, head_dim=4, clusters=3, spread=0.01).layer(0, 1)
    generator = torch.Generator().manual_seed(1)
    keys, like = (clusterability.vectors(layer, "keys", 0, generator, g) for g in (False, True))
    for a, b in zip(keys, like, strict=True):
        scale = float(a.T.cov().diagonal().mean())
        assert float((a.mean(0) - b.mean(0)).abs().max()) < 0.1 * scale**0.5
        assert float((a.T.cov() - b.T.cov()).abs().max()) < 0.1 * scale
        few = (clusterability.k_centre_radii(x, 3)[1][2] for x in (a, b))
        assert next(few) < 0.6 * next(few), "three clusters"


def test_bob_reads_every_bit_of_the_whole_and_three_quarters_of_half() -> None:
    layer = lower_bound.index_layer(256, 64, 8.0, 1, 3)
    torch.testing.assert_close(layer.keys.norm(dim=-1), torch.full((1, 1, 256), 8.0))
    read = lower_bound.reader(layer)
    whole = read(keep_all(layer))
    assert (whole["share"], whole["epsilon"]) == (1.0, pytest.approx(0.0, abs=1e-12))
    kept = torch.arange(0, 256, 2)
    keys, values = layer.keys[0, 0].double(), layer.values[0, 0].double()
    held = [x[:, :, kept] for x in (layer.keys, layer.values)]
    found = read(CompressedKV(*held, None, kept.expand(1, 1, -1)))
    assert found["share"] == pytest.approx(0.75, abs=0.02)
    ratios = []  # equation (2) written out, query by query
    for query in keys:
        weights = (keys @ query * layer.scaling).softmax(0)
        z = (keys[kept] @ query * layer.scaling).softmax(0) @ values[kept]
        ratios.append(float((z - weights @ values).norm() / (weights.norm() * values.norm())))
    assert found["epsilon"] == pytest.approx(max(ratios))
    for entries in (1, 16, 128, 256):
        limit = lower_bound.limits(entries, layer)
        p, known = limit["limit of bits"], min(1.0, entries * 2 * 64 * 32 / (256 * 64))
        unsure = 0.0 if p == 1 else -p * math.log2(p) - (1 - p) * math.log2(1 - p)
        assert 1 - unsure == pytest.approx(known, abs=1e-9)
        assert p >= limit["limit of entries"] == (1 + entries / 256) / 2


@pytest.mark.parametrize(
    ("kind", "into", "out"), [("llama", "gate", "down"), ("opt", "fc1", "fc2")]
)
def test_neurons_are_counted_and_dropped_by_hooks(kind: str, into: str, out: str) -> None:
    model, ids = tiny_model(kind), list(range(5, 45))
    linears = [
        [m for path, m in model.named_modules() if path.split(".")[-1].split("_")[0] == part]
        for part in (into, out)
    ]
    seen: list[Any] = []
    for linear in linears[0]:
        linear.register_forward_hook(lambda _, __, x: seen.append((x.flatten(0, -2) > 0).sum(0)))
    counts = _neurons.counts_of(model, [ids])
    assert all(torch.equal(counts[i + 1], wanted) for i, wanted in enumerate(seen))
    dropped = {i + 1: torch.rand(m.in_features) < 0.4 for i, m in enumerate(linears[1])}
    whole, found = (neuron_dropping.mean_nll(model, ids, d) for d in ({}, dropped))
    for layer, linear in enumerate(linears[1]):
        linear.weight.data[:, dropped[layer + 1]] = 0.0
    assert found == pytest.approx(neuron_dropping.mean_nll(model, ids, {}), rel=1e-6)
    assert abs(found - whole) > 1e-4
    heavy, drawn = (_neurons.heavy_of(counts, 20, how) for how in (None, (0, "x")))
    for layer, part in heavy.items():
        assert part.sum() == drawn[layer].sum()


def test_overlap_is_the_jaccard_index_and_its_chance() -> None:
    one, other = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    found = neuron_overlap.overlap(one, other)
    assert (found["jaccard"], found["chance"]) == (pytest.approx(1 / 3), pytest.approx(0.25 / 0.75))
    assert neuron_overlap.overlap(one & False, other & False)["jaccard"] is None


def test_joint_survival_is_one_by_independence_and_numbers_are_runs_of_digits() -> None:
    kept = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0)) < 0.25
    first = torch.arange(199_000)
    assert joint_survival.joint_survival(kept, first, 3) == pytest.approx(1.0, abs=0.03)
    runs = (first // 2 % 4 == 0).expand(1, -1)
    assert joint_survival.joint_survival(runs, first[:-1:2], 1) == pytest.approx(4.0, rel=0.01)
    assert joint_survival.joint_survival(~runs & runs, first[:9], 1) is None
    assert joint_survival.number_pairs(["1", "2", "a", "3", "4", "5", " 6"], 2) == [3]


def test_caption_metrics_by_hand() -> None:
    references = [["a man rides a horse", "a person riding"], ["two dogs play", "dogs running"]]
    cider = _captions.CiderD(references)
    assert cider.score(references[1][0], [references[1][0]]) == pytest.approx(10.0 * 3 / 4)
    assert cider.score("an unknown thing", references[0]) == 0.0
    # precision 2/2, recall 2/4, beta 1.2
    assert _captions.rouge_l("red disc", ["a red disc here"]) == pytest.approx(1.22 / 1.94)
    assert _captions.rouge_l("", ["a disc"]) == 0.0
    one = _captions.bleu(["the the the"], [["the disc", "the the wall"]])
    assert one == pytest.approx([2 / 3, (2 / 3 * 1 / 2) ** 0.5, 0.0, 0.0])
    assert _captions.bleu([""], [["a disc"]]) == [0.0] * 4
