"""The probes: the error formula against brute force, records, refusals; timings are never shared."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from test_runner import SMALL, Echo, make_job, records_of

from kvbench.engine.cache import layer_generator
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.probes.layer_error import LayerError, SyntheticLayers, estimate
from kvbench.probes.throughput import Throughput
from kvbench.runner import run_job
from kvbench.tasks.base import TaskError

METHODS = {name: build_method(name) for name in ("exact", "streaming_llm", "uniform", "balancekv")}
SYNTHETIC = SyntheticLayers(n=320, heads=4, kv_heads=2, head_dim=16, clusters=8)


def probe_job(tmp_path, probe, methods=METHODS, **changes):
    return make_job(tmp_path, methods, plan=probe, **changes)


def test_estimate_sees_what_is_held_and_nothing_later():
    layer = SYNTHETIC.layer(0, 1)
    held = build_method("uniform").compress(
        layer, Budget(rate=0.25, sink=40, window=40), layer_generator(0, "x", 0)
    )
    first = layer.n - 40
    got = estimate(held, layer.queries[:, :, first:], first, layer)
    for head in range(4):
        for i in (0, 7, 39):
            total, z = 0.0, torch.zeros(16, dtype=torch.float64)
            for j in range(held.positions.shape[2]):
                if int(held.positions[0, head // 2, j]) > first + i:
                    continue
                q = layer.queries[0, head, first + i].double()
                k = held.keys[0, head // 2, j].double()
                weight = math.exp(
                    float(q @ k) * layer.scaling + float(held.log_weights[0, head // 2, j])
                )
                total += weight
                z += weight * held.values[0, head // 2, j].double()
            torch.testing.assert_close(got[0, head, i], z / total)


def test_estimate_of_everything_is_causal_attention():
    layer = SYNTHETIC.layer(1, 2)
    got = estimate(keep_all(layer), layer.queries, 0, layer)
    keys, values = (x.repeat_interleave(2, 1).double() for x in (layer.keys, layer.values))
    logits = layer.queries.double() @ keys.mT * layer.scaling
    future = torch.ones(layer.n, layer.n, dtype=torch.bool).triu(1)
    want = logits.masked_fill(future, float("-inf")).softmax(-1) @ values
    torch.testing.assert_close(got, want)


def test_one_record_per_prompt_layer_rate_seed_and_method(tmp_path):
    probe = LayerError(
        rates=(0.5, 0.25), layers=(1, 3), seeds=3, num_prompts=1, exact=32, synthetic=SYNTHETIC
    )
    result = run_job(probe_job(tmp_path, probe))
    assert result.failed == 0
    records = records_of(result)
    assert {len(rows) for rows in records.values()} == {2 * 2 * 3}
    first = records["balancekv"][0]
    assert first["score"] == first["relative_error"]
    assert first["score"] == pytest.approx((first["error_sq"] / first["norm_sq"]) ** 0.5)
    assert (first["layer"], first["rate"], first["draw"]) == (1, 0.5, 0)
    assert all(row["score"] == 0.0 for row in records["exact"])
    draws = [row["score"] for row in records["uniform"] if (row["layer"], row["rate"]) == (1, 0.5)]
    assert len(set(draws)) == 3
    same = [row["score"] for row in records["streaming_llm"] if row["rate"] == 0.5]
    assert len(set(same)) == 2, "a method that draws nothing gives one error per layer"
    assert run_job(probe_job(tmp_path, probe)).written == 0


def test_layer_error_on_a_models_layers(tmp_path):
    probe = LayerError(
        rates=(0.5,), layers=(1, 4), seeds=2, num_prompts=2, exact=20, prompts=Echo(count=3)
    )
    records = records_of(run_job(probe_job(tmp_path, probe)))
    assert len(records["uniform"]) == 2 * 2 * 2
    assert all(0 < row["score"] < 2 for row in records["uniform"])


def test_more_entries_mean_less_error_and_weights_matter():
    # flat attention, and a middle unlike its ends: without weights the ends are over-counted
    layer = replace(SYNTHETIC, n=2048, query_norm=1.0).layer(0, 1)
    layer.values[:, :, 64:-64] += 1.0
    first = layer.n - 64
    truth = estimate(keep_all(layer), layer.queries[:, :, first:], first, layer)

    def error(rate, **options):
        squares = []
        for seed in range(8):
            held = build_method("uniform", **options).compress(
                layer, Budget(rate=rate, sink=64, window=64), layer_generator(seed, "x", 0)
            )
            z = estimate(held, layer.queries[:, :, first:], first, layer)
            squares.append(float((z - truth).square().sum() / truth.square().sum()))
        return sum(squares) / len(squares)

    assert error(0.5) < error(0.25) < error(0.0625)
    assert error(0.0625) < error(0.0625, weighted=False)


def test_layer_error_refuses_what_makes_no_sense(tmp_path):
    with pytest.raises(TaskError, match="exactly one of them"):
        LayerError()
    with pytest.raises(TaskError, match=r"task.layers has 0; allowed: 1-based"):
        LayerError(layers=(0,), synthetic=SYNTHETIC)
    with pytest.raises(KVError, match=r"rate is 1.5; allowed"):
        LayerError(rates=(1.5,), synthetic=SYNTHETIC)
    probe = LayerError(exact=160, synthetic=SYNTHETIC)
    with pytest.raises(KVError, match="320 tokens; allowed: less than half"):
        run_job(probe_job(tmp_path, probe))
    missing = LayerError(layers=(9,), exact=20, prompts=Echo(count=1))
    result = run_job(probe_job(tmp_path, missing, {"exact": METHODS["exact"]}))
    assert "layer 8 does not exist" in records_of(result)["exact"][0]["error"]


def test_throughput_prefills_once_per_method_and_run(tmp_path):
    probe = Throughput(prompt_tokens=(60, 80), new_tokens=3, runs=2)
    job = probe_job(tmp_path, probe)
    calls = []
    job.session.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    result = run_job(job)
    assert result.failed == 0
    prefills = [n for n in calls if n > 1]
    # two runs and a warm-up, for each method and length
    assert sorted(prefills) == [60] * 12 + [80] * 12
    row = records_of(result, times=True)["uniform"][0]
    total = row["prefill_s"] + row["compress_s"] + row["decode_s"]
    assert row["tokens_per_s"] == row["score"] == pytest.approx(3 / total)
    assert row["new_tokens"] == 3
    assert row["cache_bytes"] < row["exact_bytes"]
    assert row["peak_bytes"] > 0


def test_throughput_refuses_prompts_shorter_than_sink_and_window(tmp_path):
    job = probe_job(tmp_path, Throughput(prompt_tokens=(50,), new_tokens=2, runs=1))
    wide = {name: (method, Budget(sink=40, window=40)) for name, (method, _) in job.methods.items()}
    with pytest.raises(KVError, match=r"window is 80; the prompt has 50 tokens"):
        run_job(replace(job, methods=wide))


def test_a_probe_records_a_method_that_fails(tmp_path):
    class Wrong(type(METHODS["uniform"])):
        def compress(self, layer: LayerKV, budget, generator) -> CompressedKV:
            return keep_all(layer)

    probe = LayerError(rates=(0.5,), layers=(1,), seeds=1, exact=32, synthetic=SYNTHETIC)
    result = run_job(probe_job(tmp_path, probe, {"wrong": Wrong(), **METHODS}))
    assert result.failed == 1
    assert records_of(result)["wrong"][0]["status"] == "over_budget"
    assert SMALL.capacity(320) < 320


def test_a_method_whose_error_lies_in_decoding_is_not_called_exact(tmp_path):
    probe = LayerError(rates=(0.5,), layers=(1,), seeds=1, exact=32, synthetic=SYNTHETIC)
    methods = {
        "topk": build_method("topk"),
        "packed": build_method("exact", quantize={"bits": 4}),
    }
    records = records_of(run_job(probe_job(tmp_path, probe, methods)))
    for label, rows in records.items():
        assert rows[0]["score"] is None, label
        assert "while decoding; allowed" in rows[0]["error"], label
