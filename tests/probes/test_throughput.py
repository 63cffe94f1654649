"""The throughput probe: what it measures and divides, batches, memory, baselines, experiments."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.configs import composed
from support.jobs import SMALL, make_job, records_of
from support.tables import frame

from kvbench.cli.build import build_job
from kvbench.engine import generate as engine
from kvbench.engine import rows as engine_rows
from kvbench.engine.baselines import BASELINES, KvpressBaseline, baselines_of
from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.probes import throughput
from kvbench.probes.throughput import Throughput, largest_batch
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.timings import timing_table
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

METHODS = {name: build_method(name) for name in ("h2o", "exact", "balancekv")}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_collection(monkeypatch):
    """Collecting garbage takes longer than everything else here."""
    for module in ("probes.throughput", "run.attempts", "run.batching"):
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


def test_throughput_refuses_prompts_shorter_than_sink_and_window(tmp_path):
    made = job(tmp_path, Throughput(prompt_tokens=(50,), new_tokens=2, runs=1))
    wide = {
        name: (method, Budget(sink=40, window=40)) for name, (method, _) in made.methods.items()
    }
    with pytest.raises(KVError, match=r"window is 80; the prompt has 50 tokens"):
        run_job(replace(made, methods=wide))


def test_ratios_are_to_the_exact_cache_of_the_same_run(tmp_path):
    probe = Throughput(prompt_tokens=(60,), new_tokens=3, runs=2)
    records = rows_of(run_job(job(tmp_path, probe)))
    for label, rows in records.items():
        for row, exact in zip(rows, records["exact"], strict=True):
            assert row["run"] == exact["run"]
            assert row["speedup"] == pytest.approx(row["tokens_per_s"] / exact["tokens_per_s"])
            decode = row["decode_tokens_per_s"] / exact["decode_tokens_per_s"]
            assert row["decode_speedup"] == pytest.approx(decode)
            prefill = row["prefill_compress_s"] / exact["prefill_compress_s"]
            assert row["prefill_ratio"] == pytest.approx(prefill)
            if label == "exact":
                assert row["speedup"] == 1.0
    alone = rows_of(run_job(job(tmp_path / "alone", probe, {"h2o": METHODS["h2o"]})))
    assert {row["speedup"] for row in alone["h2o"]} == {None}


def test_every_run_begins_with_another_method(tmp_path, monkeypatch):
    """By what is generated, warm-ups left out: each method has each turn once in three runs."""
    order = []
    real = throughput._Row.generate

    def generate(row, batch, new_tokens=None):
        if new_tokens is None:
            order.append(row.label)
        return real(row, batch, new_tokens)

    monkeypatch.setattr(throughput._Row, "generate", generate)
    probe = Throughput(prompt_tokens=(60,), new_tokens=2, runs=4)
    records = rows_of(run_job(job(tmp_path, probe)))
    runs = [order[i : i + 3] for i in range(0, 12, 3)]
    assert all(sorted(run) == sorted(METHODS) for run in runs)
    assert all({run[turn] for run in runs[:3]} == set(METHODS) for turn in range(3))
    assert runs[3] == runs[0]
    assert runs[0][0] == "exact"
    for label, rows in records.items():
        assert [row["turn"] for row in rows] == [run.index(label) for run in runs]


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
    ("room", "most", "want"), [(1, 64, 1), (7, 64, 7), (64, 64, 64), (100, 64, 64), (90, 1024, 88)]
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


def test_the_largest_batch_of_none_is_out_of_memory_and_other_failures_are_told():

    def never(batch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError, match="not even one prompt fits"):
        largest_batch(never, CPU, 8)

    def broken(batch):
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug"):
        largest_batch(broken, CPU, 8)


def test_on_a_cpu_nothing_is_tried_that_would_take_most_of_the_memory(monkeypatch):
    from kvbench.engine import memory

    last = [0]
    monkeypatch.setattr(memory, "reset_peak", lambda device: True)
    monkeypatch.setattr(memory, "used_bytes", lambda device: 10)
    monkeypatch.setattr(memory, "peak_bytes", lambda device: 10 + 10 * last[0])
    monkeypatch.setattr(memory, "total_bytes", lambda device: 100)

    def trial(batch):
        last[0] = batch

    assert largest_batch(trial, CPU, 1024) == 4  # eight would take 90 of 100


def test_transformers_own_caches_run_beside_ours(tmp_path):
    probe = Throughput(
        settings=[(60, 5, 2)], runs=1, baselines=("hf_dynamic", "hf_static", "hf_quantized")
    )
    rows, left_out = probe.rows()
    made = job(tmp_path, probe)
    records = rows_of(run_job(made))
    for label in ("hf_dynamic", "hf_static"):
        (row,) = records[label]
        assert row["status"] == "ok", row["error"]
        assert (row["new_tokens"], row["batch"]) == (5, 2)
        assert row["prefill_s"] > 0 < row["decode_s"]
        assert row["tokens_per_s"] == pytest.approx(10 / (row["prefill_s"] + row["decode_s"]))
        assert row["speedup"] > 0
    exact = records["exact"][0]
    # one token fewer is in the cache than was generated, both ways
    assert records["hf_dynamic"][0]["cache_bytes_end"] == exact["cache_bytes_end"]
    assert records["hf_static"][0]["cache_bytes_end"] >= exact["cache_bytes_end"]
    model = made.session.model
    assert model.config._attn_implementation == "kvbench", "left as it was found"
    assert ("hf_quantized" in rows) != ("hf_quantized" in left_out)


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


def test_a_baseline_that_cannot_run_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setattr("kvbench.engine.baselines._found", lambda package: False)
    probe = Throughput(baselines=("hf_dynamic", "hf_quantized", "kvpress_snapkv"))
    rows, left_out = probe.rows()
    assert list(rows) == ["hf_dynamic"]
    assert left_out == probe.meta()["left_out"]
    assert left_out["hf_quantized"].endswith(
        "needs the package optimum.quanto or hqq, not installed here"
    )
    with pytest.raises(KVError, match="not installed here"):
        BASELINES["hf_quantized"].generate(None, None, 1, SMALL)
    with pytest.raises(TaskError, match=r"task.baselines has 'vllm'; allowed: hf_dynamic"):
        baselines_of(["vllm"])


def test_kvpress_is_asked_for_our_capacity(monkeypatch):
    import types

    asked = []

    def press(ratio):
        asked.append(ratio)
        return lambda model: "context"

    monkeypatch.setitem(sys.modules, "kvpress", types.SimpleNamespace(SnapKVPress=press))
    baseline = BASELINES["kvpress_snapkv"]
    assert isinstance(baseline, KvpressBaseline)
    assert baseline.around(None, SMALL, 200) == "context"
    assert int((1 - asked[0]) * 200) == SMALL.capacity(200)  # as kvpress counts


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


def test_prompts_longer_than_the_model_reads_are_refused(tmp_path):
    made = job(tmp_path, Throughput(settings=[(60, 5, 1)], runs=1))
    spec = replace(made.session.spec, architecture={"max_position_embeddings": 64})
    with pytest.raises(KVError, match="60 prompt and 5 new tokens are 65; model tiny has 64 posi"):
        made.plan.units(replace(made.session, spec=spec), made.methods)


LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 97}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
OPT = {"hidden_size": 64, "ffn_dim": 96, "num_hidden_layers": 2, "vocab_size": 97}
OPT |= {"num_attention_heads": 4, "word_embed_proj_dim": 64}
SMALLER = {
    "balancekv_table2": (LLAMA, ["task.prompt_tokens=[256]", "task.new_tokens=4"]),
    "throughput_context": (LLAMA, ["task.prompt_tokens=[128,256]", "task.new_tokens=4"]),
    "h2o_table3": (OPT, ["task.settings=[[96,4,largest]]", "task.most_batch=2"]),
    "h2o_table4": (OPT, ["task.settings=[[96,4,2,0.3]]"]),
    "h2o_table5": (OPT, ["task.settings=[[96,4,1],[64,6,2]]"]),
    "h2o_table7": (OPT, ["task.settings=[[96,4,2,0.3]]", "model.random_weights=true"]),
}


def test_every_experiment_of_this_task_is_among_them():
    said = ("override /task: throughput\n", "- _h2o_throughput\n")
    files = (Path(__file__).parents[2] / "conf/experiment").glob("[!_]*.yaml")
    found = {file.stem for file in files if any(one in file.read_text() for one in said)}
    assert found == set(SMALLER)


EVERY_ROW = {"exact", "hf_dynamic", "hf_static", "h2o", "balancekv"}


@pytest.mark.parametrize("experiment", SMALLER)
def test_every_experiment_runs_small(experiment, tmp_path):
    """Its own model made tiny, on a CPU: the whole way from the config to the table."""
    architecture, smaller = SMALLER[experiment]
    overrides = [f"experiment={experiment}", "device=cpu", "task_label=throughput", *smaller]
    overrides += [f"model.architecture.{name}={value}" for name, value in architecture.items()]
    overrides += ["task.runs=1", "budget.sink=8", "budget.window=8", f"results_dir={tmp_path}"]
    result = run_job(build_job(composed(*overrides)))
    assert result.failed == 0
    (group,) = load_experiment(tmp_path / experiment).groups
    table = frame(timing_table(group))
    rows = {"exact", "h2o"} if experiment == "h2o_table7" else EVERY_ROW
    assert set(table["method"]) >= rows
    assert (table["runs"] == 1).all()
    ratios = ["tokens_per_s_over_exact", "decode_tokens_per_s_over_exact"]
    assert (table[[*ratios, "prefill_compress_s_over_exact", "peak_bytes"]] > 0).all(axis=None)
    settings = len(smaller[0].split("],")) if "settings" in smaller[0] else 1
    assert table.groupby("method").size().min() >= settings
    assert not table.duplicated(["variant", "prompt_and_new_tokens"]).any()
