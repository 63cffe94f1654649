"""Theory and ablation probes: formulas against direct computation, fits, studies, experiments."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.configs import composed
from support.jobs import records_of
from support.report_runs import write_run
from support.tables import frame, heads, shown

from kvbench.cli.build import build_job
from kvbench.engine.fork import layer_generator
from kvbench.engine.loading import ModelSpec
from kvbench.kernels.self_balancing import self_balancing_walk
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.methods.subgen_streaming import SubGenStream
from kvbench.probes.ablation import Ablation
from kvbench.probes.clusters import Clustering, SubGenClusters, key_distance, online_clusters
from kvbench.probes.discrepancy import UnitVectors, Walk, WalkDiscrepancy
from kvbench.probes.error_scaling import BoundedData, ErrorScaling, bound_scale
from kvbench.probes.layers import SyntheticLayers
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.scaling import scaling_of
from kvbench.report.tables.study import study_of
from kvbench.run.runner import run_job
from kvbench.run.session import Session
from kvbench.tasks.base import TaskError

SESSION = Session(ModelSpec(name="none", path="none"), torch.device("cpu"), torch.float32)
BUDGET = Budget()


def test_bounded_data_has_its_norms_and_is_the_same_every_time():
    data = BoundedData(
        head_dim=8, key_norm=3.0, query_norm=2.0, value_norm=1.5, heads=2, clusters=3
    )
    layer, queries = data.layer(50, 7, "x", 1)
    again, _ = data.layer(50, 7, "x", 1)
    other, _ = data.layer(50, 7, "x", 2)
    assert layer.keys.shape == (1, 2, 50, 8)
    assert queries.shape == (1, 2, 7, 8)
    for tensor, norm in ((layer.keys, 3.0), (layer.values, 1.5), (queries, 2.0)):
        torch.testing.assert_close(tensor.norm(dim=-1), torch.full(tensor.shape[:3], norm))
    assert torch.equal(layer.keys, again.keys)
    assert not torch.equal(layer.keys, other.keys)
    near = torch.pdist(layer.keys[0, 0]) < 2.5
    assert 0.2 < near.float().mean() < 0.6, "a third of the pairs share a cluster"


def test_the_error_is_that_of_equation_2():
    """Every query and head by loops, from nothing but the definition."""
    probe = ErrorScaling(n=40, kept=(10,), queries=3, draws=1, data={"d": BoundedData(head_dim=4)})
    methods = {"uniform": (build_method("uniform"), BUDGET)}
    (unit,) = probe.units(SESSION, methods)
    (outcome,) = probe.run(unit, methods, SESSION)
    layer, queries = probe.data["d"].layer(40, 3, "d", 0)
    generator = layer_generator(0, "d/draw0/10", 0)
    held = methods["uniform"][0].compress(layer, Budget(rate=0.25, sink=0, window=0), generator)
    keys, values = layer.keys[0, 0].double().numpy(), layer.values[0, 0].double().numpy()
    chosen = held.positions[0, 0].tolist()
    assert len(chosen) == 10
    errors = []
    for query in queries[0, 0].double().numpy():
        e = np.exp(keys @ query / 2.0)  # sqrt(d) = 2
        exact = e @ values / e.sum()
        part = e[chosen] * 4.0  # the weights cancel: there is neither sink nor window
        z = part @ values[chosen] / part.sum()
        scale = np.sqrt(np.square(e / e.sum()).sum()) * np.sqrt(np.square(values).sum())
        errors.append(np.linalg.norm(z - exact) / scale)
    assert outcome.fields["scaled_error"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert outcome.fields["held"] == 10
    assert outcome.fields["ratio"] == pytest.approx((10 * 9) / (40 * 8)), "the log-weights count"


def test_the_bounds_scale_with_grouped_queries():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 9, 4, generator=generator)
    queries = torch.randn(1, 6, 5, 4, generator=generator)
    layer = LayerKV(keys, values, None, 0, 1, 0.5)
    found = bound_scale(layer, queries)
    for head in range(6):
        for i in range(5):
            p = (queries[0, head, i].double() @ keys[0, head // 3].double().T * 0.5).softmax(-1)
            want = p.norm() * values[0, head // 3].double().norm()
            assert float(found[0, head, i]) == pytest.approx(float(want), rel=1e-12)


def test_options_that_grow_and_failures_that_are_records():
    probe = ErrorScaling(
        n=64,
        kept=(8, 16),
        queries=2,
        draws=1,
        data={"d": BoundedData(head_dim=4)},
        per_kept={"wide": {"block_size": 0.5}},
    )
    broken = build_method("balancekv", block_size=[16, 16])  # too short a list at rate 1/8
    methods = {"wide": (build_method("balancekv"), BUDGET), "broken": (broken, BUDGET)}
    assert probe._sized("wide", methods["wide"][0], 16) == build_method("balancekv", block_size=8)
    (unit,) = probe.units(SESSION, methods)
    outcomes = list(probe.run(unit, methods, SESSION))
    assert sorted(o.example_id for o in outcomes if o.method == "wide") == sorted(unit.record_ids)
    status = {(o.method, o.fields["kept"]): o.fields.get("status", "ok") for o in outcomes}
    assert status == {
        ("wide", 8): "ok", ("wide", 16): "ok", ("broken", 8): "error", ("broken", 16): "ok"
    }  # fmt: skip
    with pytest.raises(KVError, match=r"names 'wide'.*allowed: uniform"):
        probe.units(SESSION, {"uniform": (build_method("uniform"), BUDGET)})
    wrong = {"wide": (build_method("uniform"), BUDGET)}
    with pytest.raises(KVError, match=r"has 'block_size'.*allowed: .*weighted"):
        probe.units(SESSION, wrong)
    with pytest.raises(TaskError, match="exactly one of them"):
        ErrorScaling()
    with pytest.raises(TaskError, match=r"task.kept is \[65\]; allowed: at most task.n, 64"):
        ErrorScaling(n=64, kept=(65,), data={"d": BoundedData()})


def test_the_walk_is_the_direct_one():
    """Sums after each n: against vectors signed one by one, and against the kernel's walk."""
    probe = WalkDiscrepancy(steps=(5, 1500), walks=3, data={"v": UnitVectors(dim=3)})
    rules = [Walk(c=None), Walk(c=2.0), Walk(c=0), Walk()]
    sums = dict(probe.walked(UnitVectors(dim=3), rules, seed=7))
    vectors, uniforms = [], []
    for walk in range(3):
        generator = np.random.default_rng([7, walk])
        v, u = [], []
        for count in (1024, 476):
            v.append(UnitVectors(dim=3).draw(generator, count))
            u.append(generator.random(count))
        vectors.append(np.concatenate(v))
        uniforms.append(np.concatenate(u))
    for r, rule in enumerate(rules):
        for walk in range(3):
            total = np.zeros(3)
            for step in range(1500):
                chance = 0.5 - rule.pull(1500) * float(total @ vectors[walk][step])
                total += vectors[walk][step] * (1 if uniforms[walk][step] < chance else -1)
                if step + 1 in sums:
                    np.testing.assert_allclose(sums[step + 1][r, walk], total, atol=1e-9)
    signs, _ = self_balancing_walk(
        torch.tensor(np.stack(vectors)), torch.tensor(np.stack(uniforms)), radius=1.0, bound=2.0
    )
    total = torch.einsum("wn,wnd->wd", signs, torch.tensor(np.stack(vectors)))
    np.testing.assert_allclose(sums[1500][1], total.numpy(), atol=1e-9)


def test_the_walk_balances_and_random_signs_do_not():
    probe = WalkDiscrepancy(steps=(4096,), walks=8, data={"v": UnitVectors(dim=4)})
    rules = [Walk(c=None), Walk(c=1.0), Walk(c=0)]
    ((_, sums),) = probe.walked(UnitVectors(dim=4), rules, seed=0)
    random, walk, greedy = np.abs(sums).max(-1).mean(-1)
    assert random > 20
    assert walk < 3
    assert greedy < 3
    assert Walk().pull(100) == pytest.approx(1 / (60 * math.log(100 / 0.01)))
    with pytest.raises(KVError, match=r"c is 'fast'"):
        Walk(c="fast")
    with pytest.raises(KVError, match=r"allowed: kvbench.probes.discrepancy.Walk"):
        probe.units(SESSION, {"uniform": (build_method("uniform"), BUDGET)})


@pytest.mark.parametrize("delta", [0.0, 0.8, 1.5, 100.0])
def test_clusters_are_those_of_the_algorithm(delta):
    keys = torch.randn(300, 3, generator=torch.Generator().manual_seed(1))
    counts = online_clusters(keys, delta, (1, 270, 300, 900))
    found: list[torch.Tensor] = []
    stream = SubGenStream(1, 3, 3, torch.tensor([delta]), t=1, s=1)
    for i, key in enumerate(keys.double()):
        if not found or min(float((key - other).norm()) for other in found) > delta:
            found.append(key)
        one = keys[i : i + 1].unsqueeze(0)
        stream.extend(one, one, torch.zeros(1, 1, 2))
        if i + 1 in counts:
            assert counts[i + 1] == len(found) == int(stream.found.clusters[0])
    assert set(counts) == {1, 270, 300}


def test_key_distance_is_the_mean_square_one():
    keys = torch.randn(30, 4, generator=torch.Generator().manual_seed(2))
    pairs = (keys[:, None] - keys[None]).double().square().sum(-1)
    assert key_distance(keys) == pytest.approx(float(pairs.mean().sqrt()))
    probe = SubGenClusters(steps=(16, 64), draws=2, data={"d": BoundedData(head_dim=4)})
    methods = {"delta_1": (Clustering(delta=1.0), BUDGET)}
    outcomes = [
        o for unit in probe.units(SESSION, methods) for o in probe.run(unit, methods, SESSION)
    ]
    assert [o.fields["n"] for o in outcomes] == [16, 64, 16, 64]
    assert all(1 <= o.fields["clusters"] <= o.fields["n"] for o in outcomes)


def scaling_records(slope: float, noise: float, draws: int = 6) -> list[dict]:
    rng = np.random.default_rng([3, int(100 * abs(slope))])
    return [
        {
            "example_id": f"{name}/kept{m}/draw{draw}",
            "dataset": name,
            "kept": m,
            "held": float(m),
            "replicate": f"draw{draw}",
            "scaled_error": (e := float(m**slope * math.exp(noise * rng.normal()))),
            "score": e,
        }
        for name in ("a", "b")
        for m in (64, 128, 256, 512, 1024, 2048)
        for draw in range(draws)
    ]


def write_scaling(results: Path, slopes: dict[str, float], noise: float) -> Path:
    meta = ErrorScaling(
        n=4096,
        kept=(64,),
        data={"a": BoundedData()},
        expected={"uniform": -0.5, "balancekv": -1.0},
    ).meta()
    for method, slope in slopes.items():
        write_run(
            results,
            experiment="theory",
            task="error_scaling",
            method=method,
            records=scaling_records(slope, noise),
            task_meta=meta,
        )
    return results / "theory"


def test_fits_recover_the_slopes_they_were_made_with(tmp_path):
    folder = write_scaling(tmp_path, {"uniform": -0.5, "balancekv": -1.0}, 0.0)
    (group,) = load_experiment(folder).groups
    scaling = scaling_of(group)
    assert scaling is not None
    fits = scaling.fits
    assert len(fits) == 4
    for fit in fits:
        want = {"uniform": -0.5, "balancekv": -1.0}[fit.curve.variant.method]
        for slope in (fit.slope, fit.lower, fit.upper):
            assert slope.value == pytest.approx(want)
            assert slope.low == pytest.approx(want)
        assert (fit.least, fit.split, fit.most) == (64, 256, 1024), "kept / n is at most 1/4"
        assert fit.verdict == "as predicted"
    at = next(f for f in fits if f.curve.variant.method == "balancekv").ratio
    assert at.value == pytest.approx(1024**-0.5)


def test_intervals_of_slopes_cover_the_truth_and_shrink_with_noise(tmp_path):
    covered = 0
    for noise in (0.05, 0.4):
        folder = write_scaling(tmp_path / str(noise), {"uniform": -0.5, "balancekv": -0.9}, noise)
        (group,) = load_experiment(folder).groups
        scaling = scaling_of(group)
        assert scaling is not None
        widths = []
        for fit in scaling.fits:
            covered += (
                fit.slope.low
                <= {"uniform": -0.5, "balancekv": -0.9}[fit.curve.variant.method]
                <= fit.slope.high
            )
            widths.append(fit.slope.high - fit.slope.low)
        assert max(widths) < noise
    assert covered >= 6


def test_the_page_says_what_the_numbers_say(tmp_path):
    folder = write_scaling(tmp_path, {"uniform": -0.5, "balancekv": -0.6}, 0.02)
    paths = build_report(folder, for_print=True)
    (group,) = load_experiment(folder).groups
    study = study_of(group, folder)
    assert study is not None
    text = " ".join(study.findings)
    assert "the whole interval below −0.90: balancekv on 0 of 2 data sets" in text
    assert "the whole interval below −0.40: uniform on 2 of 2 data sets" in text
    assert "balancekv, predicted −1.00: Shallower on a (−0.6" in text
    page = paths.page.read_text()
    for finding in study.findings:
        assert finding.split("'")[0].replace("<", "&lt;") in page
    frame = pd.read_csv(folder / "tables" / "error_scaling-synthetic_tensors-slopes.csv")
    assert set(frame["variant"]) == {"uniform", "balancekv"}
    assert frame["slope"].between(frame["slope_low"], frame["slope_high"]).all()
    markdown = (folder / "tables" / "error_scaling-synthetic_tensors-slopes.md").read_text()
    assert "| uniform " in markdown
    names = {path.name for path in paths.figures}
    assert {
        "error_scaling-synthetic-tensors-scaling.png",
        "error_scaling-synthetic-tensors-slopes.png",
    } <= names
    before = paths.page.read_bytes()
    assert build_report(folder).page.read_bytes() == before, "the same records give the same page"


def ablation_records(factor: float) -> list[dict]:
    return [
        {
            "example_id": f"p{prompt}/layer{layer}/rate{rate}/seed0",
            "prompt": f"p{prompt}",
            "rate": rate,
            "layer": layer,
            "draw": 0,
            "relative_error": (e := 0.1 / rate * (1 + prompt) * factor * (1 + 0.01 * (prompt % 2))),
            "released_error": 1.4 * e,
            "score": e,
            "compress_s": 0.01 * factor,
        }
        for prompt in range(4)
        for rate in (0.5, 0.25, 0.125)
        for layer in (1, 2)
    ]


def test_an_ablation_is_paired_over_prompts(tmp_path):
    synthetic = SyntheticLayers(n=256)
    parts = {"gamma": ["worse", "better"]}
    probe = Ablation(synthetic=synthetic, parts=parts, grid={256: "balancekv"}, layers=(1, 2))
    for method, factor in (("balancekv", 1.0), ("worse", 1.2), ("better", 0.9)):
        write_run(
            tmp_path,
            experiment="ablation",
            task="balancekv_ablation",
            method=method,
            records=ablation_records(factor),
            task_meta=probe.meta(),
        )
    folder = tmp_path / "ablation"
    (group,) = load_experiment(folder).groups
    study = study_of(group, folder)
    assert study is not None
    lines = frame(study.tables[0])
    change = lines[lines["rate"] == "all"].set_index("variant")["change"]
    assert change["worse"] == pytest.approx(0.2)
    assert change["better"] == pytest.approx(-0.1)
    assert len(lines) == 2 * (1 + 6)
    text = " ".join(study.findings)
    assert "over 4 prompts" in text
    assert "Less relative error: better −10.0 [−10.0, −10.0] %" in text
    assert "Better at no cost on these tensors: better (−10.0" in text
    assert [heads(table)[0] for table in study.tables] == ["variant", "layer"]
    beside = study.tables[1]
    assert any(row[0] == "published, layer 15" for row in shown(beside))
    # Four prompts at rate 0.5: 1.4 * 0.2 * (1, 2.02, 3, 4.04), in the published figure's metric.
    assert shown(beside)[0][2].startswith(f"{1.4 * 0.2 * 10.06 / 4:.4f} ±")
    for named in ("below 1e-8", "temperature 0.1", "TriviaQA", "10 seeds", "drawn at random"):
        assert named in beside.notes[-1]
    assert build_report(folder).page.exists()
    methods = {"balancekv": (build_method("balancekv"), BUDGET)}
    with pytest.raises(KVError, match="names 'worse'"):
        probe.units(SESSION, methods)


LINES = "task.prompts.num_lines=[12]"
LAYER = ["task.layers=[1]", "task.exact=16", "task.rates=[0.25]"]
ONE_PROMPT = ["task.num_prompts=1", "task.prompts.num_lines=[25]"]
TINY = {
    "error_scaling": ["task.draws=2", "task.n=512", "task.kept=[32,128]", "task.queries=4"],
    "error_scaling_model": [
        *ONE_PROMPT, "task.draws=2", "task.n=256", "task.kept=[32,64]", "task.queries=8",
    ],
    "error_scaling_streaming": [
        "task.draws=1", "task.n=512", "task.kept=[64,128]", "task.queries=4",
    ],
    "error_scaling_streaming_model": [
        *ONE_PROMPT, "task.n=256", "task.kept=[64]", "task.queries=8",
    ],
    "walk_discrepancy": ["task.steps=[16,64]", "task.walks=2"],
    "subgen_clusters": ["task.steps=[16,64]", "task.draws=1"],
    "subgen_clusters_model": [*ONE_PROMPT, "task.steps=[16,64]"],
    "balancekv_ablation": ["task.num_prompts=1", LINES, *LAYER],
    "balancekv_ablation_synthetic": ["task.synthetic.n=256", *LAYER],
    "balancekv_needle_ablation": ["task.num_prompts=1", LINES, "task.exact=16", "task.rates=[0.5]"],
    "balancekv_confirm": ["task.num_prompts=1", LINES, *LAYER],
}  # fmt: skip
EXPERIMENTS = {
    "error_scaling": ("error_scaling", "error_scaling_model"),
    "error_scaling_streaming": ("error_scaling_streaming", "error_scaling_streaming_model"),
    "walk_discrepancy": ("walk_discrepancy",),
    "subgen_clusters": ("subgen_clusters", "subgen_clusters_model"),
    "balancekv_ablation": ("balancekv_ablation", "balancekv_ablation_synthetic"),
    "balancekv_needle_ablation": ("balancekv_ablation",),
    "balancekv_confirm": ("balancekv_ablation",),
}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_runs_small(experiment, tmp_path):
    folders = set()
    for task in EXPERIMENTS[experiment]:
        alone = len(EXPERIMENTS[experiment]) == 1
        small = TINY[experiment if alone else task]
        overrides = [f"experiment={experiment}", f"task={task}", f"task_label={task}"]
        overrides += [f"results_dir={tmp_path}", *small]
        job = build_job(composed(*overrides))
        result = run_job(job)
        records = [record for rows in records_of(result).values() for record in rows]
        assert records
        assert not result.failed, [r["error"] for r in records if r["error"]][:1]
        folders.add(tmp_path / job.experiment)
    (folder,) = folders
    for group in load_experiment(folder).groups:
        study = study_of(group, folder, draw=False)
        assert study is not None
        assert study.findings
        scaling = scaling_of(group)
        if scaling is not None:  # draws of one prompt are one repetition
            draws = 2 if group.task in ("walk_discrepancy", "error_scaling") else 1
            assert {curve.units for curve in scaling.curves} == {draws}


UNIFORM_ALONE = ["method=[uniform]", "~task.per_kept", "~methods.subgen_weighted"]
UNIFORM_ALONE += ["~methods.balancekv_wide"]


def test_what_another_seed_draws_anew_is_another_repetition(tmp_path):
    """Bounded data of another seed are other data. A prompt counts once whatever the seed: a task may
    give the same prompts for every seed, and averages over seeds are as good as one."""
    jobs = {
        "error_scaling": [*TINY["error_scaling"], "task.kept=[32]"],
        "error_scaling_model": [*TINY["error_scaling_model"], "task.kept=[32]", "task.layers=[1]"],
    }
    for task, small in jobs.items():
        for seed in (0, 1):
            overrides = ["experiment=error_scaling", f"task={task}", f"task_label={task}"]
            overrides += [f"results_dir={tmp_path}", f"seed={seed}", *small, *UNIFORM_ALONE]
            run_job(build_job(composed(*overrides)))
    units = {
        group.task: {curve.units for curve in scaling.curves}
        for group in load_experiment(tmp_path / "theory").groups
        if (scaling := scaling_of(group)) is not None
    }
    assert units == {"error_scaling": {4}, "error_scaling_model": {1}}
