"""Error against memory: formulas against direct computation, and the experiments."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.command import job_of
from support.jobs import records_of

from kvbench.engine.model import ModelSpec
from kvbench.engine.row import layer_generator
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.probes.error_scaling import BoundedData, ErrorScaling, bound_scale
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
    (item,) = probe.items(SESSION, methods)
    (outcome,) = probe.run(item, methods, SESSION)
    layer, queries = probe.data["d"].layer(40, 3, "d", 0)
    generator = layer_generator(0, "d/draw0/10", 0)
    compressed = methods["uniform"][0].compress(
        layer, Budget(rate=0.25, sink=0, window=0), generator
    )
    keys, values = layer.keys[0, 0].double().numpy(), layer.values[0, 0].double().numpy()
    chosen = compressed.positions[0, 0].tolist()
    assert len(chosen) == 10
    errors = []
    for query in queries[0, 0].double().numpy():
        e = np.exp(keys @ query / 2.0)  # sqrt(d) = 2
        exact = e @ values / e.sum()
        part = e[chosen] * 4.0  # the weights cancel: there is neither sink nor window
        z = part @ values[chosen] / part.sum()
        scale = np.sqrt(np.square(e / e.sum()).sum()) * np.sqrt(np.square(values).sum())
        errors.append(np.linalg.norm(z - exact) / scale)
    assert outcome["scaled_error"] == pytest.approx(np.mean(errors), rel=1e-9)
    assert outcome["held"] == 10
    assert outcome["ratio"] == pytest.approx((10 * 9) / (40 * 8)), "the log-weights count"


def test_the_bounds_scale_with_grouped_queries():
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 2, 9, 4, generator=generator)
    queries = torch.randn(1, 6, 5, 4, generator=generator)
    scale = bound_scale(LayerKV(keys, values, None, 0, 1, 0.5), queries)
    for head in range(6):
        p = (queries[0, head].double() @ keys[0, head // 3].double().T * 0.5).softmax(-1)
        expected = p.norm(dim=-1) * values[0, head // 3].double().norm()
        torch.testing.assert_close(scale[0, head], expected, rtol=1e-12, atol=0)


SMALL_PROBE = {"n": 64, "kept": (8, 16), "queries": 2, "draws": 1}
DATA = {"d": BoundedData(head_dim=4)}


def test_a_method_that_fails_is_a_record_and_stops_no_other():
    probe = ErrorScaling(**SMALL_PROBE, data=DATA)
    broken = build_method("balancekv", block_size=[16, 16])  # too short a list at rate 1/8
    methods = {"sound": (build_method("uniform"), BUDGET), "broken": (broken, BUDGET)}
    (item,) = probe.items(SESSION, methods)
    outcomes = list(probe.run(item, methods, SESSION))
    ids = sorted(outcome["example_id"] for outcome in outcomes if outcome["method"] == "sound")
    assert ids == sorted(item.record_ids)
    status = {(o["method"], o["kept"]): o.get("status", "ok") for o in outcomes}
    assert status == {
        ("sound", 8): "ok",
        ("sound", 16): "ok",
        ("broken", 8): "error",
        ("broken", 16): "ok",
    }


def test_names_and_numbers_that_mean_nothing_are_refused():
    probe = ErrorScaling(**SMALL_PROBE, data=DATA, per_kept={"wide": {"block_size": 0.5}})
    sized = probe._sized("wide", build_method("balancekv"), 16)
    assert sized == build_method("balancekv", block_size=8), "options grow with the memory"
    with pytest.raises(KVError, match=r"task.per_kept names 'wide'.*allowed: uniform"):
        probe.items(SESSION, {"uniform": (build_method("uniform"), BUDGET)})
    without_blocks = {"wide": (build_method("uniform"), BUDGET)}
    with pytest.raises(KVError, match=r"per_kept.wide names 'block_size'.*allowed: .*weighted"):
        probe.items(SESSION, without_blocks)
    with pytest.raises(TaskError, match="exactly one of them"):
        ErrorScaling()
    with pytest.raises(TaskError, match=r"task.kept is \[65\]; allowed: at most task.n, 64"):
        ErrorScaling(n=64, kept=(65,), data=DATA)


PROMPTS = ["task.num_prompts=1", "task.prompts.num_lines=[25]", "task.layers=[1,4]"]
SMALL = ["task.n=256", "task.kept=[64]", "task.queries=4", "task.draws=1"]


@pytest.mark.parametrize(
    ("task", "small"),
    [("error_scaling_streaming", SMALL), ("error_scaling_streaming_model", [*PROMPTS, *SMALL])],
)
def test_an_experiment_runs_small(task, small, tmp_path):
    overrides = ["experiment=error_scaling_streaming", f"task={task}", f"task_label={task}"]
    result = run_job(job_of(*overrides, f"results_dir={tmp_path}", *small))
    records = [record for rows in records_of(result).values() for record in rows]
    assert records
    assert not result.failed, [record["error"] for record in records if record["error"]][:1]
