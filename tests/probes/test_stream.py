"""Streams as a task: records are the streams' own numbers, and what cannot be read is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.jobs import Letters, records_of
from support.probing import probe_job

from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.probes.stream import Stream
from kvbench.probes.streaming_ppl import streaming_nll
from kvbench.run.runner import run_job
from kvbench.tasks.base import TaskError

SIZE = Budget(size=16, sink=3, window=0)


def stream_job(tmp_path, probe, methods):
    job = probe_job(tmp_path, probe, methods, task="stream")
    return replace(
        job, methods={label: (method, SIZE) for label, (method, _) in job.methods.items()}
    )


def files(tmp_path):
    (tmp_path / "a.txt").write_text("a stitch in time saves nine " * 5)
    (tmp_path / "b.txt").write_text("the early bird catches the worm " * 3)
    return str(tmp_path / "*.txt")


@pytest.mark.parametrize("positions", ["cache", "absolute"])
def test_records(tmp_path, positions):
    probe = Stream(files=files(tmp_path), tokens=90, positions=positions, block=40)
    methods = {name: build_method(name) for name in ("exact", "streaming_llm", "local")}
    job = stream_job(tmp_path, probe, methods)
    records = records_of(run_job(job))
    ids = Letters().encode((tmp_path / "a.txt").read_text())[:90]
    for name, start, recent in (("exact", 0, 90), ("streaming_llm", 3, 13), ("local", 0, 16)):
        want = streaming_nll(job.session.model, ids, start, recent, positions)
        record = records[name][0]
        assert record["score"] == pytest.approx(sum(want) / 89, abs=1e-5)
        assert record["nll_blocks"][1] == pytest.approx(sum(want[40:80]) / 40, abs=1e-4)
        assert record["tokens 3–4"] == pytest.approx(sum(want[2:4]) / 2, abs=1e-5)
        assert record["entries"]["max"] == min(90, start + recent)
        assert record["ratio"] == pytest.approx(min(90, start + recent) / 90, abs=1e-3)
    assert [r["text"] for r in records["local"]] == ["a.txt", "b.txt"]


def test_methods_that_evict_read_with_their_own_positions(tmp_path):
    probe = Stream(files=files(tmp_path), tokens=80, positions="absolute", joined=True)
    rolling = replace(build_method("streaming_llm"), decode="evict")
    engine = type("Engine", (type(rolling),), {"band": lambda self, budget: None})(decode="evict")
    methods = {"streaming_llm": rolling, "engine": engine, "h2o": build_method("h2o")}
    records = records_of(run_job(stream_job(tmp_path, probe, methods)))
    (band,), (forked,), (h2o,) = (records[name] for name in methods)
    placed = records_of(
        run_job(stream_job(tmp_path / "placed", replace(probe, positions="cache"), methods))
    )
    assert placed["engine"][0]["score"] == pytest.approx(
        placed["streaming_llm"][0]["score"], abs=1e-5
    )
    assert placed["h2o"][0]["score"] != pytest.approx(h2o["score"], abs=1e-5)
    assert placed["h2o"][0]["ratio"] == pytest.approx(h2o["ratio"])
    assert forked["score"] == pytest.approx(band["score"], abs=1e-5)
    assert h2o["score"] != pytest.approx(band["score"], abs=1e-4)
    assert h2o["entries"]["max"] == 16
    assert [r["new_tokens"] for r in (band, h2o)] == [79, 79]


def test_refusals(tmp_path):
    for methods, options, words in (
        ({"snapkv": build_method("snapkv")}, {}, "cannot read a stream"),
        ({"uniform": build_method("uniform")}, {"positions": "absolute"}, "cannot read a stream"),
        ({"exact": build_method("exact")}, {"positions": "absolute"}, "at most 60"),
    ):
        job = stream_job(tmp_path, Stream(files=files(tmp_path), **options), methods)
        encoder = replace(job.session.encoder, max_positions=60)
        job.session.__dict__["encoder"] = encoder
        with pytest.raises(KVError, match=words):
            run_job(job)
    with pytest.raises(TaskError, match="one of them"):
        Stream(files=("a",), dataset_name="b")
    with pytest.raises(TaskError, match=r"task\.positions"):
        Stream(positions="own")


def test_generated_text_is_long_enough(tmp_path):
    job = stream_job(tmp_path, Stream(num_texts=1, tokens=120), {"local": build_method("local")})
    (record,) = records_of(run_job(job))["local"]
    assert record["prompt_tokens"] == 120
