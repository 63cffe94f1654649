"""Errors of single layers: the formula against brute force, records, budgets, refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.jobs import Echo, records_of
from support.probing import METHODS, SYNTHETIC, probe_job

from kvbench.engine.row import layer_generator
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.probes import layer_error
from kvbench.probes.layer_error import LayerError, estimate, relative_errors
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError


def test_estimate_sees_what_is_held_and_nothing_later():
    layer = SYNTHETIC.layer(0, 1)
    compressed = build_method("uniform").compress(
        layer, Budget(rate=0.25, sink=40, window=40), layer_generator(0, "x", 0)
    )
    first = layer.n - 40
    outputs = estimate(compressed, layer.queries[:, :, first:], first, layer)
    for head, i in itertools.product(range(4), (0, 7, 39)):
        total, z = 0.0, torch.zeros(16, dtype=torch.float64)
        entries = zip(
            compressed.positions[0, head // 2],
            compressed.keys[0, head // 2],
            compressed.values[0, head // 2],
            compressed.log_weights[0, head // 2],
            strict=True,
        )
        for position, k, v, log_weight in entries:
            if position <= first + i:
                logit = layer.queries[0, head, first + i].double() @ k.double() * layer.scaling
                weight = math.exp(float(logit) + float(log_weight))
                total += weight
                z += weight * v.double()
        torch.testing.assert_close(outputs[0, head, i], z / total)


def test_one_record_per_prompt_layer_rate_seed_and_method(tmp_path):
    probe = LayerError(
        rates=(0.5, 0.25), layers=(1, 3), seeds=3, num_prompts=1, exact=32, synthetic=SYNTHETIC
    )
    result = run_job(probe_job(tmp_path, probe))
    assert result.failed == 0
    records = records_of(result)
    assert {len(rows) for rows in records.values()} == {2 * 2 * 3}
    first = records["balancekv"][0]
    assert (first["layer"], first["rate"], first["draw"]) == (1, 0.5, 0)
    assert all(row["score"] == 0.0 for row in records["exact"])
    draws = [row["score"] for row in records["uniform"] if (row["layer"], row["rate"]) == (1, 0.5)]
    assert len(set(draws)) == 3
    same = [row["score"] for row in records["streaming_llm"] if row["rate"] == 0.5]
    assert len(set(same)) == 2, "a method that draws nothing gives one error per layer"
    assert run_job(probe_job(tmp_path, probe)).written == 0


def test_a_failure_of_all_layers_says_of_which_it_is(tmp_path, monkeypatch):
    def fails(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(layer_error, "capture_layers", fails)
    probe = LayerError(rates=(0.5,), layers=(1, 3), seeds=1, exact=8, prompts=Echo(count=1))
    rows = records_of(run_job(probe_job(tmp_path, probe)))["uniform"]
    assert [(row["status"], row["layer"], row["rate"], row["draw"]) for row in rows] == [
        ("oom", 1, 0.5, 0),
        ("oom", 3, 0.5, 0),
    ]


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def errors_by_definition(layer: LayerKV, kept: list[list[int]], exact: int) -> dict[str, float]:
    """The three relative errors of the last `exact` queries, by loops over heads and queries."""
    q, k, v = (x[0].double().numpy() for x in (layer.queries, layer.keys, layer.values))
    per_query, released = [], []
    squares = norms = 0.0
    for head in range(len(q)):
        keys, values = k[head // 2], v[head // 2]
        for j in range(layer.n - exact, layer.n):
            seen = [i for i in kept[head // 2] if i <= j]
            a = softmax(keys[: j + 1] @ q[head, j] * layer.scaling) @ values[: j + 1]
            z = softmax(keys[seen] @ q[head, j] * layer.scaling) @ values[seen]
            distance = math.sqrt(sum((z - a) ** 2))
            per_query.append(distance / math.sqrt(sum(a**2)))
            released.append(distance / math.sqrt(sum(max(x, 1e-8) ** 2 for x in a)))
            squares += sum((z - a) ** 2)
            norms += sum(a**2)
    return {
        "per_query": sum(per_query) / len(per_query),
        "pooled": math.sqrt(squares / norms),
        "released": sum(released) / len(released),
    }


@pytest.mark.parametrize("held_out", [True, False])
def test_layer_error_by_definition(tmp_path, held_out):
    """Errors from the definition, of what methods choose by the queries before the measured ones, or,
    where asked for, by all of them, which gives other numbers."""
    exact, n = 32, SYNTHETIC.n
    methods = {name: build_method(name) for name in ("h2o", "snapkv", "streaming_llm")}
    probe = LayerError(
        synthetic=SYNTHETIC, rates=(0.25,), layers=(2,), seeds=1, exact=exact, held_out=held_out
    )
    rows = records_of(run_job(probe_job(tmp_path, probe, methods)))
    layer, budget = SYNTHETIC.layer(1, 2), Budget(rate=0.25, sink=exact, window=exact)

    def errors(name: str, withheld: int) -> dict[str, float]:
        queries = layer.queries[:, :, : n - withheld]
        shown = replace(layer, queries=queries, withheld=withheld, shared={})
        kept = methods[name].compress(shown, budget, torch.Generator()).positions[0].tolist()
        return errors_by_definition(layer, kept, exact)

    for name in methods:
        expected, row = errors(name, exact if held_out else 0), rows[name][0]
        assert row["score"] == row["relative_error"]
        assert row["relative_error"] == pytest.approx(expected["per_query"], rel=1e-6)
        assert row["pooled_error"] == pytest.approx(expected["pooled"], rel=1e-6)
        assert row["released_error"] == pytest.approx(expected["released"], rel=1e-6)
        assert 1.3 < expected["released"] / expected["per_query"] < 2, "the clamp's factor"
        if name != "streaming_llm":
            leaked = errors(name, 0 if held_out else exact)
            assert abs(leaked["per_query"] / expected["per_query"] - 1) > 1e-3


def test_an_output_of_zero_met_exactly_is_no_error():
    exact = torch.tensor([[[[0.0, 0.0], [3.0, 4.0]]]], dtype=torch.float64)
    off = exact + torch.tensor([0.0, 1.0], dtype=torch.float64)
    half = torch.stack((exact[0, 0, 0], off[0, 0, 1]))[None, None]
    for z, error in ((exact, 0.0), (off, math.inf), (half, 0.1)):
        assert relative_errors(z, exact)["relative_error"] == pytest.approx(error)


@pytest.mark.parametrize(
    ("options", "layers"),
    [({}, (1, 2, 4)), ({"preset": "released"}, (4,)), ({"beta": 5}, (1, 2, 3, 4))],
)
def test_methods_that_share_a_budget_out_hold_the_same_at_the_layers_probed(
    tmp_path, options, layers
):
    probe = LayerError(rates=(0.25,), layers=layers, seeds=1, exact=16, prompts=Echo(count=1))
    methods = {name: build_method(name) for name in ("snapkv", "spatten")}
    methods["pyramidkv"] = build_method("pyramidkv", **options)
    records = records_of(run_job(probe_job(tmp_path, probe, methods)))
    if layers == (4,):
        assert "spatten sees layer 3 first" in records.pop("spatten")[0]["error"]
    capacity = 32 + round(0.25 * (75 - 32))
    for rows in records.values():
        assert [row["entries"]["max"] for row in rows] == [row["capacity"] for row in rows]
        mean = sum(row["entries"]["mean"] for row in rows) / len(layers)
        # PyramidKV's last layer alone jumps from next to nothing to the whole capacity.
        assert (17 if layers == (4,) else capacity - 2) <= mean <= capacity
    assert {row["entries"]["mean"] for row in records["snapkv"]} == {capacity}
    if layers == (1, 2, 4):
        first = [row["entries"]["max"] for row in records["pyramidkv"]]
        assert first[0] > first[1] > first[2], "a pyramid still"


class Heavy(type(METHODS["uniform"])):
    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return min(n, 2 * budget.capacity(n) + 100)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return keep_all(layer)


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(TaskError, match="exactly one of them"):
        LayerError()
    with pytest.raises(KVError, match="320 tokens; allowed: less than half"):
        run_job(probe_job(tmp_path, LayerError(exact=160, synthetic=SYNTHETIC)))
    probe = LayerError(layers=(1, 2), exact=16, prompts=Echo(count=1))
    with pytest.raises(KVError, match=r"task.layers is \[1, 2\] and Heavy holds 268 entries there"):
        probe.budget_of(Heavy(), 0.25, 300, 4)
    even = probe.budget_of(METHODS["uniform"], 0.25, 300, 4)
    assert (even.rate, even.sink, even.window, even.size) == (0.25, 16, 16, None)
    missing = LayerError(layers=(9,), exact=20, prompts=Echo(count=1))
    result = run_job(probe_job(tmp_path, missing, {"exact": METHODS["exact"]}))
    assert "layer 8 does not exist" in records_of(result)["exact"][0]["error"]


def test_a_method_whose_error_lies_in_decoding_is_not_called_exact(tmp_path):
    probe = LayerError(
        rates=(0.5,), layers=(1,), seeds=1, exact=32, synthetic=SYNTHETIC, held_out=False
    )
    assert probe.meta()["score_unit"] == "relative error, measured on the queries that chose"
    four, two = ({"bits": bits, "group_size": 16} for bits in (4, 2))
    methods = {
        "topk": build_method("topk"),
        "packed": build_method("exact", quantize=four),
        "coarse": build_method("exact", quantize=two),
        "both": build_method("snapkv", quantize=four),
        "snapkv": build_method("snapkv"),
    }
    rows = records_of(run_job(probe_job(tmp_path, probe, methods)))
    records = {label: records_of_label[0] for label, records_of_label in rows.items()}
    assert records["topk"]["score"] is None
    assert "while decoding; allowed" in records["topk"]["error"]
    error = {label: row["score"] for label, row in records.items()}
    assert 0 < error["packed"] < error["coarse"]
    assert error["both"] > error["snapkv"]
    assert records["both"]["ratio"] < 0.6 * records["snapkv"]["ratio"]
    assert records["packed"]["ratio"] < 0.3


def test_sketches_and_rotations_are_drawn_anew(tmp_path):
    """For every draw, layer and prompt; rounding to integers draws nothing."""
    schemes = {
        "qjl": {"scheme": "qjl", "buffer": 32, "m": 64, "m_out": 32, "first_layers": 0},
        "turboquant": {"scheme": "turboquant", "bits": 2, "rotation": "hadamard"},
        "integers": {"bits": 4, "group_size": 16},
    }
    methods = {label: build_method("exact", quantize=scheme) for label, scheme in schemes.items()}
    probe = LayerError(rates=(0.5,), layers=(1,), seeds=3, exact=32, synthetic=SYNTHETIC)
    records = records_of(run_job(probe_job(tmp_path, probe, methods)))
    errors = {label: {row["score"] for row in rows} for label, rows in records.items()}
    counts = {label: len(different) for label, different in errors.items()}
    assert counts == {"qjl": 3, "turboquant": 3, "integers": 1}
