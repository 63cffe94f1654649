"""The throughput probe: what it measures and divides, batches, memory, baselines, experiments."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.configs import composed
from support.jobs import SMALL, make_job, records_of

from kvbench.cli.build import build_job
from kvbench.engine import generate as engine
from kvbench.engine import memory
from kvbench.engine import rows as engine_rows
from kvbench.engine.baselines import BASELINES, baselines_of
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.probes import throughput
from kvbench.probes.throughput import Throughput, largest_batch
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

METHODS = {name: build_method(name) for name in ("h2o", "exact", "balancekv")}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Collecting garbage takes longer than everything else here."""
    for module in ("probes.throughput", "run.batching"):
        monkeypatch.setattr(f"kvbench.{module}.free_memory", lambda device: None)


def job(tmp_path, probe, methods=METHODS):
    rows, _ = probe.rows()
    return make_job(tmp_path, {**methods, **rows}, plan=probe)


def rows_of(result):
    return records_of(result, times=True)


def test_a_batch_is_measured_as_a_whole(tmp_path):
    probe = Throughput(settings=[(60, 4, 1), (60, 4, 3)], runs=2, rates=(0.2, 0.5))
    result = run_job(job(tmp_path, probe))
    assert result.failed == 0
    records = rows_of(result)
    assert {len(rows) for rows in records.values()} == {2 * 2 * 2}
    for label, rows in records.items():
        for row in rows:
            total = row["prefill_s"] + row["compress_s"] + row["decode_s"]
            assert row["latency_s"] == pytest.approx(total)
            assert row["tokens_per_s"] == row["score"] == pytest.approx(4 * row["batch"] / total)
            decoded = 3 * row["batch"] / row["decode_s"]  # the first token comes from the prefill
            assert row["decode_tokens_per_s"] == pytest.approx(decoded)
            assert str(row["batch"]) == row["asked_batch"]
            entries = (
                60 if label == "exact" else replace(SMALL, rate=row["asked_rate"]).capacity(60)
            )
            assert row["entries"]["max"] == entries
    one, three = (
        next(r for r in records["h2o"] if r["batch"] == b and r["asked_rate"] == 0.2)
        for b in (1, 3)
    )
    assert three["cache_bytes"] == 3 * one["cache_bytes"]
    assert three["exact_bytes"] == 3 * one["exact_bytes"]
    assert three["ratio"] == one["ratio"]


def test_throughput_prefills_once_per_method_and_run(tmp_path):
    probe = Throughput(prompt_tokens=(60, 80), new_tokens=3, runs=2)
    made = job(tmp_path, probe)
    calls = []
    made.session.model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    result = run_job(made)
    assert result.failed == 0
    prefills = [n for n in calls if n > 1]
    # two runs and a warm-up, for each method and length
    assert sorted(prefills) == [60] * 9 + [80] * 9
    row = rows_of(result)["balancekv"][0]
    total = row["prefill_s"] + row["compress_s"] + row["decode_s"]
    assert row["tokens_per_s"] == row["score"] == pytest.approx(3 / total)
    assert row["new_tokens"] == 3
    assert row["cache_bytes"] < row["exact_bytes"]
    assert row["peak_bytes"] > 0
    records = rows_of(result)
    for rows in records.values():
        for row, exact in zip(rows, records["exact"], strict=True):
            assert row["speedup"] == pytest.approx(row["tokens_per_s"] / exact["tokens_per_s"])
            prefill = row["prefill_compress_s"] / exact["prefill_compress_s"]
            assert row["prefill_ratio"] == pytest.approx(prefill)


def short_memory(monkeypatch, entries, prompt=None):
    """As many rows as hold so many entries in the first layer; longer prompts than `prompt` fail."""
    real = engine_rows.forward

    def forward(model, ids, positions, state):
        n = ids.shape[1]
        if prompt is not None and n > prompt:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {n} tokens")
        forks = getattr(state, "forks", [])
        if n == 1 and sum(fork.layers[0].length for fork in forks) > entries:
            raise torch.OutOfMemoryError("CUDA out of memory: entries")
        return real(model, ids, positions, state)

    monkeypatch.setattr(engine_rows, "forward", forward)


@pytest.mark.slow
def test_the_largest_batch_is_found_for_each_method(tmp_path, monkeypatch):
    short_memory(monkeypatch, entries=300)
    probe = Throughput(settings=[(80, 2, "largest")], runs=1, most_batch=8)
    records = rows_of(run_job(job(tmp_path, probe)))
    assert records["exact"][0]["batch"] == 3  # 300 // 80
    assert records["h2o"][0]["batch"] == 8  # 26 entries each: 11 would fit, most_batch ends it
    assert records["h2o"][0]["asked_batch"] == "largest"


def test_a_sweep_over_contexts_goes_on_after_one_that_does_not_fit(tmp_path, monkeypatch):
    short_memory(monkeypatch, entries=10**9)
    real = engine.prefill

    def prefill(model, ids, forks, **options):
        if len(ids) > 100 and forks[0].label == "exact":
            raise torch.OutOfMemoryError("CUDA out of memory: the cache")
        return real(model, ids, forks, **options)

    monkeypatch.setattr(engine, "prefill", prefill)
    probe = Throughput(prompt_tokens=(60, 120, 90), new_tokens=2, runs=2)
    result = run_job(job(tmp_path, probe))
    records = rows_of(result)
    assert [r["status"] for r in records["exact"]] == ["ok"] * 2 + ["oom"] * 2 + ["ok"] * 2
    assert {r["status"] for r in records["h2o"]} == {"ok"}
    assert result.failed == 2
    assert [r["speedup"] is None for r in records["h2o"]] == [False] * 2 + [True] * 2 + [False] * 2


@pytest.mark.parametrize(
    ("room", "most", "want"), [(1, 64, 1), (64, 64, 64), (100, 64, 64), (90, 1024, 88)]
)
def test_the_largest_batch_is_within_a_sixteenth(room, most, want):
    tried = []

    def trial(batch):
        tried.append(batch)
        if batch > room:
            raise torch.OutOfMemoryError("CUDA out of memory")

    assert largest_batch(trial, CPU, most) == want
    assert len(tried) == len(set(tried))
    assert max(tried) <= most
    assert want <= min(room, most) <= want + max(1, want // 16)


def test_no_batch_that_fits_other_failures_and_the_memory_of_a_cpu(monkeypatch):
    def failing(error):
        raise error

    none = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError, match="not even one prompt fits"):
        largest_batch(lambda batch: failing(none), CPU, 8)
    with pytest.raises(ValueError, match="a bug"):
        largest_batch(lambda batch: failing(ValueError("a bug")), CPU, 8)
    last = [0]
    monkeypatch.setattr(memory, "reset_peak", lambda device: True)
    monkeypatch.setattr(memory, "used_bytes", lambda device: 10)
    monkeypatch.setattr(memory, "peak_bytes", lambda device: 10 + 10 * last[0])
    monkeypatch.setattr(memory, "total_bytes", lambda device: 100)
    found = largest_batch(lambda batch: last.__setitem__(0, batch), CPU, 1024)
    assert found == 4, "eight would take 90 of 100"


def test_baselines_run_beside_ours_or_say_why_not(tmp_path, monkeypatch):
    """Every run begins with another row; the model is left as it was found."""
    names = ("hf_dynamic", "hf_static", "kvpress_snapkv")
    monkeypatch.setattr("kvbench.engine.baselines._found", lambda package: False)
    probe = Throughput(settings=[(60, 5, 2)], runs=3, baselines=names)
    rows, left_out = probe.rows()
    assert (list(rows), list(left_out)) == (["hf_dynamic", "hf_static"], ["kvpress_snapkv"])
    assert left_out == probe.meta()["left_out"]
    with pytest.raises(KVError, match="not installed here"):
        BASELINES["hf_quantized"].generate(None, None, 1, SMALL)
    with pytest.raises(TaskError, match=r"task.baselines has 'vllm'; allowed: hf_dynamic"):
        baselines_of(["vllm"])
    made = job(tmp_path, probe, {"exact": METHODS["exact"]})
    records = rows_of(run_job(made))
    for label in ("hf_dynamic", "hf_static"):
        row, exact = records[label][0], records["exact"][0]
        assert (row["status"], row["new_tokens"], row["batch"]) == ("ok", 5, 2), row["error"]
        assert row["tokens_per_s"] == pytest.approx(10 / (row["prefill_s"] + row["decode_s"]))
        assert row["cache_bytes_end"] >= exact["cache_bytes_end"]
        assert sorted(row["turn"] for row in records[label]) == [0, 1, 2]
    assert made.session.model.config._attn_implementation == "kvbench"


def test_baselines_generate_what_the_exact_cache_generates(tmp_path):
    """The same work is timed: token for token the same continuation."""
    made = make_job(tmp_path, {"exact": METHODS["exact"]})
    model, ids = made.session.model, throughput._random_ids(made.session, 50, 2)
    seen = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].tolist()), with_kwargs=True
    )
    BASELINES["hf_dynamic"].generate(model, ids, 6, SMALL)
    theirs, seen[:] = list(seen), []
    prompts = [
        engine.Prompt(row, [], {"exact": (METHODS["exact"], SMALL)}, engine.Stopping(6), "x")
        for row in ids.tolist()
    ]
    engine.run_batch(model, prompts, seed=0)
    assert theirs[1:] == seen[2:]  # before it is the prefill: of each prompt, or a batch
    assert len(theirs) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": [0]}, r"task.batch is \[0\]; allowed: a list of integers >= 1 or largest"),
        ({"batch": ["most"]}, r"task.batch is \['most'\]"),
        ({"settings": [(512, 32)]}, r"task.settings has \[512, 32\]; allowed: \[prompt tokens"),
        ({"new_tokens": [4, 0]}, r"task.new_tokens is \[4, 0\]"),
        ({"most_batch": 0}, "task.most_batch is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(options, message):
    with pytest.raises(TaskError, match=message):
        Throughput(**options)


def test_prompts_that_are_too_short_or_too_long_are_refused(tmp_path):
    made = job(tmp_path, Throughput(settings=[(60, 5, 1)], runs=1))
    wide = {
        name: (method, Budget(sink=40, window=40)) for name, (method, _) in made.methods.items()
    }
    with pytest.raises(KVError, match=r"window is 80; the prompt has 60 tokens"):
        made.plan.units(made.session, wide)
    spec = replace(made.session.spec, architecture={"max_position_embeddings": 64})
    with pytest.raises(KVError, match="60 prompt and 5 new tokens are 65; model tiny has 64 posi"):
        made.plan.units(replace(made.session, spec=spec), made.methods)


@pytest.mark.parametrize(
    ("experiment", "setting"),
    [
        ("balancekv_table2", ["task.prompt_tokens=[128]", "task.new_tokens=4"]),
        pytest.param("h2o_table5", ["task.settings=[[96,4,1],[64,6,2]]"], marks=pytest.mark.slow),
    ],
)
def test_an_experiment_runs_small(experiment, setting, tmp_path):
    """Its own rows on the tiny model, on a CPU: the whole way from the config to the records."""
    words = [f"experiment={experiment}", "device=cpu", "model=tiny_random", *setting]
    words += ["task_label=throughput"]
    words += ["task.runs=1", "budget.sink=8", "budget.window=8", f"results_dir={tmp_path}"]
    result = run_job(build_job(composed(*words)))
    assert result.failed == 0
    records = rows_of(result)
    assert set(records) >= {"exact", "hf_dynamic", "hf_static", "h2o", "balancekv"}
    assert all(row["tokens_per_s"] > 0 for rows in records.values() for row in rows)
