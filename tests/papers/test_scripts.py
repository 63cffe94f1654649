"""The scripts of scripts/papers: what they compute against direct computation, and each of them run
small."""

from __future__ import annotations

import itertools
import math
import re
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
from support.report_runs import write_run
from support.tiny import tiny_model

from kvbench.cli.items import paper_items
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
import self_bleu  # noqa: E402
import softmax_discrepancy  # noqa: E402
import subgen_clusters  # noqa: E402
import walk_discrepancy  # noqa: E402
from _common import Run  # noqa: E402
from _item import RunNote, write_item_page  # noqa: E402
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
    for script, *arguments in command_lines(name, [*words, f"results_dir={tmp_path}"]):
        path = SCRIPTS / f"{script.removeprefix('script=')}.py"
        runpy.run_path(str(path))["main"](arguments)
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
        expected = sums.sort(-1, descending=True)[0].mean(0)
        torch.testing.assert_close(sorted_mass(layer, per), expected, atol=1e-6, rtol=0)


def test_norms_are_those_of_plain_loops() -> None:
    layer = SYNTHETIC.layer(0, 1)
    for head in range(layer.keys.shape[1]):
        keys, values = layer.keys[0, head].double(), layer.values[0, head].double()
        queries = layer.queries[0, head * layer.group : (head + 1) * layer.group].double()
        vectors = {"queries": queries.flatten(0, 1), "keys": keys, "values": values}
        vectors["keys_shifted"] = keys - keys.mean(0)
        expected = {kind: [math.sqrt(float(x @ x)) for x in rows] for kind, rows in vectors.items()}
        expected["bound"] = [max(*expected["queries"], *expected["keys_shifted"])]
        for kind, numbers in expected.items():
            assert norms.norms_of(layer, kind)[head].tolist() == pytest.approx(numbers, rel=1e-9)


def test_the_walk_is_the_direct_one() -> None:
    """Sums after each n, against vectors signed one by one."""
    constants = [None, 2.0, 0, "theory"]
    sums = dict(walk_discrepancy.signed_sums(3, constants, (5, 1500), 3, seed=7))
    for walk in range(3):
        generator = np.random.default_rng([7, walk])
        parts = [
            (generator.standard_normal((count, 3)), generator.random(count))
            for count in (1024, 476)
        ]
        drawn, uniforms = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        vectors = drawn / np.linalg.norm(drawn, axis=-1, keepdims=True)
        for rule, constant in enumerate(constants):
            inverse = walk_discrepancy.inverse_constant(constant, 1500)
            total = np.zeros(3)
            for n, (vector, uniform) in enumerate(zip(vectors, uniforms, strict=True), start=1):
                total += vector if uniform < 0.5 - inverse * float(total @ vector) else -vector
                if n in sums:
                    np.testing.assert_allclose(sums[n][rule, walk], total, atol=1e-9)


def test_random_signs_go_farther_than_walks() -> None:
    sums = dict(walk_discrepancy.signed_sums(3, [None, 2.0, 0], (1500,), 3, seed=7))
    random, walk, greedy = np.abs(sums[1500]).max(-1).mean(-1)
    assert random > 10 > 4 > max(walk, greedy)
    theory = walk_discrepancy.inverse_constant("theory", 100)
    assert theory == pytest.approx(1 / (60 * math.log(100 / 0.01)))


@pytest.mark.parametrize("delta", [0.0, 0.3, 0.6, 100.0])
def test_clusters_are_those_of_the_algorithm(delta: float) -> None:
    keys = torch.randn(1, 300, 3, generator=torch.Generator().manual_seed(1))
    pairs = (keys[0, :, None] - keys[0]).double().square().sum(-1)
    distance = float(subgen_clusters.key_distance(keys)[0])
    assert distance == pytest.approx(float(pairs.mean().sqrt()))
    counts = subgen_clusters.clusters(keys, delta, (1, 270, 300))
    centres: list[torch.Tensor] = []
    for n, key in enumerate(keys[0].double(), start=1):
        if not centres or (torch.stack(centres) - key).norm(dim=1).min() > delta * distance:
            centres.append(key)
        assert counts.get(n, len(centres)) == len(centres)


def test_radii_are_within_twice_the_best() -> None:
    points = torch.randn(11, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    centres, radii = clusterability.k_centre_radii(points, 4)

    def radius(chosen: Any) -> float:
        return max(min(float((p - points[c]).norm()) for c in chosen) for p in points)

    for k in range(1, 5):
        assert float(radii[k - 1]) == pytest.approx(radius(centres[:k]))
        best = min(radius(chosen) for chosen in itertools.combinations(range(11), k))
        assert best - 1e-9 <= float(radii[k - 1]) <= 2 * best + 1e-9


def test_gaussian_vectors_have_mean_and_covariance_but_no_clusters() -> None:
    layer = replace(SYNTHETIC, n=4000, head_dim=4, clusters=3, spread=0.01).layer(0, 1)
    generator = torch.Generator().manual_seed(1)
    keys = clusterability.vectors(layer, "keys", 0, generator, gaussian=False)
    gaussians = clusterability.vectors(layer, "keys", 0, generator, gaussian=True)
    for head, gaussian in zip(keys, gaussians, strict=True):
        variance = float(head.T.cov().diagonal().mean())
        assert float((head.mean(0) - gaussian.mean(0)).abs().max()) < 0.1 * variance**0.5
        assert float((head.T.cov() - gaussian.T.cov()).abs().max()) < 0.1 * variance
        of_three, of_gaussian = (
            clusterability.k_centre_radii(x, 3)[1][2] for x in (head, gaussian)
        )
        assert of_three < 0.6 * of_gaussian, "three clusters"


def test_bob_reads_the_instance_of_appendix_c_by_its_threshold() -> None:
    index = lower_bound.Index.drawn(1024, 64, 8.0, 1, 3)
    layer = index.layer
    torch.testing.assert_close(index.keys.norm(dim=-1), torch.full((1, 1, 16), 8.0))
    assert layer.n == int(index.bits.sum()), "a pair for each bit that is 1"
    assert layer.values.abs().sum(-1).eq(1).all(), "signed unit vectors"
    exact = index.read(keep_all(layer))
    assert (exact["share"], exact["epsilon"]) == (1.0, pytest.approx(0.0, abs=1e-12))
    kept = torch.arange(0, layer.n, 2)
    half = CompressedKV(
        layer.keys[:, :, kept], layer.values[:, :, kept], None, kept.expand(1, 1, -1)
    )
    measured = index.read(half)
    keys, values = layer.keys[0, 0].double(), layer.values[0, 0].double()
    right, ratios = 0, []  # the threshold and equation (2) written out, key by key
    for group, query in enumerate(index.keys[0, 0].double()):
        weights = (keys @ query / 8).softmax(0)
        z = (keys[kept] @ query / 8).softmax(0) @ values[kept]
        ratios.append(float((z - weights @ values).norm() / (weights.norm() * values.norm())))
        says = index.signs[group] * z > math.exp(8) / max(64 * math.exp(8), layer.n) / 40
        right += int((says == index.bits[group]).sum())
    assert measured["share"] == right / 1024
    assert measured["share"] == pytest.approx(index.limit(len(kept)), abs=0.01)
    assert measured["epsilon"] == pytest.approx(max(ratios))
    asked_for = min(1024, max(ratios) ** -2)
    assert measured["bits_over_bound"] == pytest.approx(8 * half.nbytes / asked_for)


def test_the_difference_of_theorem_3_3_is_that_of_plain_sums() -> None:
    generator = torch.Generator().manual_seed(4)
    keys, values, queries = (
        torch.randn(n, d, generator=generator).double() for n, d in ((9, 4), (9, 3), (2, 4))
    )
    kept = torch.arange(9) % 2 == 0
    found = softmax_discrepancy.difference(keys, values, queries, kept)
    for query, norm in zip(queries, found, strict=True):
        total = torch.zeros(3, dtype=torch.float64)
        for key, value, inside in zip(keys, values, kept.tolist(), strict=True):
            total += (1 if inside else -1) * math.exp(float(key @ query) / 2) * value
        scale = math.exp(float(query @ query) / 4) * max(math.exp(float(k @ k) / 4) for k in keys)
        scale *= max(float(value.norm()) for value in values)
        assert float(norm) == pytest.approx(float(total.norm()) / scale)


@pytest.mark.parametrize(
    ("kind", "into", "out"), [("llama", "gate", "down"), ("opt", "fc1", "fc2")]
)
def test_neurons_are_counted_and_dropped_by_hooks(kind: str, into: str, out: str) -> None:
    model, ids = tiny_model(kind), list(range(5, 45))

    def linears(part: str) -> list[Any]:
        modules = model.named_modules()
        return [m for path, m in modules if path.split(".")[-1].split("_")[0] == part]

    active: list[Any] = []
    for linear in linears(into):
        linear.register_forward_hook(lambda _, __, x: active.append((x.flatten(0, -2) > 0).sum(0)))
    counts = _neurons.counts_of(model, [ids])
    assert all(torch.equal(counts[layer], count) for layer, count in enumerate(active, start=1))
    dropped = {i: torch.rand(m.in_features) < 0.4 for i, m in enumerate(linears(out), start=1)}
    nll = neuron_dropping.mean_nll(model, ids, {})
    nll_without = neuron_dropping.mean_nll(model, ids, dropped)
    for layer, linear in enumerate(linears(out), start=1):
        linear.weight.data[:, dropped[layer]] = 0.0
    assert nll_without == pytest.approx(neuron_dropping.mean_nll(model, ids, {}), rel=1e-6)
    assert abs(nll_without - nll) > 1e-4


def test_as_many_others_are_drawn_as_there_are_heavy_neurons() -> None:
    counts = {1: torch.arange(40), 2: torch.arange(40) // 2}
    heavy = _neurons.heavy_of(counts, 15)
    drawn = _neurons.as_many_others(heavy, 0, "x")
    for layer, size in ((1, 24), (2, 8)):
        assert heavy[layer].sum() == drawn[layer].sum() == size
        assert not torch.equal(heavy[layer], drawn[layer])


def test_overlap_is_the_jaccard_index_and_its_chance() -> None:
    first, second = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]]).bool()
    overlap = neuron_overlap.overlap(first, second)
    assert overlap["jaccard"] == pytest.approx(1 / 3)
    assert overlap["chance"] == pytest.approx(0.25 / 0.75)
    empty = torch.zeros(4, dtype=torch.bool)
    assert neuron_overlap.overlap(empty, empty)["jaccard"] is None


def test_joint_survival_is_one_by_independence() -> None:
    kept = torch.rand(2, 200_000, generator=torch.Generator().manual_seed(0)) < 0.25
    first = torch.arange(199_000)
    assert joint_survival.joint_survival(kept, first, 3) == pytest.approx(1.0, abs=0.03)
    runs = (first // 2 % 4 == 0).expand(1, -1)
    assert joint_survival.joint_survival(runs, first[:-1:2], 1) == pytest.approx(4.0, rel=0.01)
    assert joint_survival.joint_survival(~runs & runs, first[:9], 1) is None


def test_caption_metrics_by_hand() -> None:
    references = [["a man rides a horse", "a person riding"], ["two dogs play", "dogs running"]]
    cider = _captions.CiderD(references)
    assert cider.score(references[1][0], [references[1][0]]) == pytest.approx(10.0 * 3 / 4)
    assert cider.score("an unknown thing", references[0]) == 0.0
    # precision 2/2, recall 2/4, beta 1.2
    assert _captions.rouge_l("red disc", ["a red disc here"]) == pytest.approx(1.22 / 1.94)
    assert _captions.rouge_l("", ["a disc"]) == 0.0
    scores = _captions.bleu(["the the the"], [["the disc", "the the wall"]])
    assert scores == pytest.approx([2 / 3, (2 / 3 * 1 / 2) ** 0.5, 0.0, 0.0])
    assert _captions.bleu([""], [["a disc"]]) == [0.0] * 4


def test_self_bleu_is_1_for_answers_that_are_alike_and_stands_beside_the_published(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for method, ending in (("exact", "home"), ("h2o", "")):
        texts = ["the dog ran off", f"the dog ran off {ending}".strip()]
        records = [{"example_id": f"e{i}", "prediction": text} for i, text in enumerate(texts)]
        of_xsum = [record | {"dataset": "xsum", "score": 1.0} for record in records]
        write_run(tmp_path, method=method, records=of_xsum)
    self_bleu.main(str(tmp_path / "demo"))
    table = pd.read_csv(tmp_path / "demo" / "self_bleu.csv").set_index("method")
    assert table["self_bleu"]["h2o"] == 1.0
    assert table["self_bleu"]["exact"] < 1.0
    assert dict(table["published"]) == {"exact": 0.0057, "h2o": 0.0051}
    with pytest.raises(UserError, match="two or more"):
        self_bleu.self_bleu(["the dog ran off"])


def test_the_page_of_a_script_keeps_the_order_of_its_runs_and_shows_what_the_paper_printed(
    tmp_path: Any,
) -> None:
    note = RunNote("a model", "make it", y="error", x="rate", by="method", panel="layer")
    rows = [
        {"layer": 1, "rate": rate, "method": method, "error": 1.0}
        for rate in (0.5, 0.25)
        for method in ("uniform", "balancekv")
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "run.csv", index=False)
    (tmp_path / "run.png").touch()
    note.write(tmp_path / "run")
    about: Any = {"title": "balancekv_table1", "paper": "", "shows": "", "differs": []}
    text = write_item_page(tmp_path, **about).read_text()
    heads = re.findall('<button type="button">(.*?)</button>', text)
    assert heads[:4] == ["layer", "rate", "uniform", "balancekv"]
    assert "balancekv_table1, as printed" in text
