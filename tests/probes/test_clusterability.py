"""k-centre radii against brute force, Gaussian likes, and the picture that a page shows of them."""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace

import pytest
import torch
from support.jobs import Echo, records_of
from support.probing import SYNTHETIC, probe_job, shipped

from kvbench.kv import KVError
from kvbench.methods import build_method
from kvbench.probes.clusterability import Clusterability, Embedding, in_the_plane, k_centre_radii
from kvbench.report.build import build_report
from kvbench.report.figures.scatter import plane_of
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

METHODS = {
    "keys": Embedding(),
    "values": Embedding(of="values"),
    "keys_gaussian": Embedding(gaussian=True),
}


def radius(points, centres):
    return max(min(float((p - points[c]).norm()) for c in centres) for p in points)


def test_radii_are_those_of_the_centres_and_within_twice_the_best():
    points = torch.randn(11, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    centres, radii = k_centre_radii(points, 4)
    assert len(set(centres.tolist())) == 4
    assert centres[0] == 0
    for k in range(1, 5):
        assert float(radii[k - 1]) == pytest.approx(radius(points, centres[:k]))
        best = min(radius(points, c) for c in itertools.combinations(range(11), k))
        assert best - 1e-9 <= float(radii[k - 1]) <= 2 * best + 1e-9


def test_the_gaussian_has_the_mean_and_covariance_and_no_clusters():
    layer = replace(SYNTHETIC, n=4000, head_dim=4, clusters=3, spread=0.01).layer(0, 1)
    keys = Embedding().vectors(layer, 0, torch.Generator())
    like = Embedding(gaussian=True).vectors(layer, 0, torch.Generator().manual_seed(1))
    assert keys.shape == like.shape == (2, 4000, 4)
    for a, b in zip(keys, like, strict=True):
        scale = float(a.T.cov().diagonal().mean())
        assert float((a.mean(0) - b.mean(0)).abs().max()) < 0.1 * scale**0.5
        assert float((a.T.cov() - b.T.cov()).abs().max()) < 0.1 * scale
        assert k_centre_radii(a, 3)[1][2] < 0.6 * k_centre_radii(b, 3)[1][2], "three clusters"


def test_records_and_picture_of_the_tokens_that_are_generated(tmp_path):
    probe = Clusterability(
        generate=40, counts=(1, 4, 16), centres=4, most_layers=2, num_prompts=2,
        prompts=Echo(count=2),
    )  # fmt: skip
    result = run_job(probe_job(tmp_path, probe, METHODS, session=shipped()))
    assert result.failed == 0
    records = records_of(result)
    rows = records["keys"]
    assert [row["example_id"] for row in rows[:4]] == [
        "e0/layer1/k1", "e0/layer1/k4", "e0/layer1/k16", "e0/layer4/k1",
    ]  # fmt: skip
    for one, four, sixteen in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert one["radius"] >= four["radius"] >= sixteen["radius"]
    shown = [row["example_id"] for label in METHODS for row in records[label] if row["plane"]]
    assert shown == ["e0/layer1/k4", "e0/layer4/k4"] * 2, "keys and values of the first prompt"
    points, marked = plane_of(rows[1]["plane"])
    assert points.shape == (40, 2)
    assert len(set(marked)) == 4
    page = build_report(next(iter(result.folders.values())).parents[2]).page.read_text()
    assert "t-SNE of 40 vectors of one head and one prompt; stars: 4 centres" in page
    assert "Mean slope of radius over the distance of two vectors" in page


def test_the_prompts_own_vectors_are_taken_where_nothing_is_generated(tmp_path):
    probe = Clusterability(
        generate=0, counts=(1, 8), centres=8, drawn=0, layers=(1,), synthetic=SYNTHETIC
    )
    records = records_of(run_job(probe_job(tmp_path, probe, {"v": Embedding(of="values")})))["v"]
    layer = SYNTHETIC.layer(0, 1)
    vectors = layer.values[0].double()
    spread = [float((2 * (x - x.mean(0)).square().sum(-1).mean()).sqrt()) for x in vectors]
    wanted = (
        sum(float(k_centre_radii(x, 8)[1][7]) / s for x, s in zip(vectors, spread, strict=True)) / 2
    )
    assert records[1]["radius"] == pytest.approx(wanted)
    assert records[1]["plane"] is None


def test_what_cannot_be_met_is_refused(tmp_path):
    with pytest.raises(
        TaskError, match=r"task.centres is 3; allowed: one of task.counts, \[1, 2\]"
    ):
        Clusterability(counts=(1, 2), centres=3, prompts=Echo())
    with pytest.raises(TaskError, match=r"task.generate is 9 and task.prompts is null; allowed: 0"):
        Clusterability(generate=9, synthetic=SYNTHETIC)
    probe = Clusterability(generate=9, counts=(16,), centres=16, layers=(1,), prompts=Echo())
    with pytest.raises(KVError, match=r"task.counts has 16 and prompt 'e0' 9 vectors"):
        run_job(probe_job(tmp_path, probe, METHODS))
    with pytest.raises(KVError, match="task clusterability has method 'exact'; allowed"):
        run_job(probe_job(tmp_path, probe, {"exact": build_method("exact")}))


def test_without_scikit_learn_there_is_one_line(monkeypatch):
    assert len(in_the_plane(torch.randn(9, 3), 0)) == 9
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.delitem(sys.modules, "sklearn.manifold")
    with pytest.raises(KVError, match=r"^scikit-learn is not installed; allowed: pip install 'kvb"):
        in_the_plane(torch.zeros(4, 2), 0)


@pytest.mark.parametrize(
    "value",
    [
        None, 3, {}, {"points": [], "marked": []}, {"points": [[1, 2, 3]], "marked": []},
        {"points": [[1, "x"]], "marked": []}, {"points": [[1, 2]], "marked": [1]},
        {"points": [[1, 2]], "marked": ["0"]}, {"points": [[float("nan"), 2]], "marked": []},
    ],
)  # fmt: skip
def test_what_is_no_plane_is_not_drawn(value):
    assert plane_of(value) is None
