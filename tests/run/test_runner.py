"""The runner: records, failures, resuming, and the hash that names a run."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import ClassVar

import pytest
from support.jobs import SMALL, Echo, make_job, records_of
from support.tiny import Broken, Greedy, tiny_model

from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.records.read import COMMON_FIELDS, load_run
from kvbench.report.build import build_report
from kvbench.run.plan import TaskPlan
from kvbench.run.runner import run_job
from kvbench.tasks.longeval_lines import LongEvalLines


def test_a_method_that_came_to_hold_something_else_takes_up_no_old_records(tmp_path):
    class Changed(type(build_method("uniform"))):
        version: ClassVar[int] = type(build_method("uniform")).version + 1

    methods = {"snapkv": build_method("snapkv"), "uniform": build_method("uniform")}
    before = make_job(tmp_path, methods)
    after = make_job(tmp_path, {**methods, "uniform": Changed()})
    assert before.folder("snapkv") == after.folder("snapkv")
    assert before.folder("uniform") != after.folder("uniform")
    assert "method_version" not in before.identity("snapkv"), "other records keep their hash"


def test_one_record_per_example_and_method_with_every_field(tmp_path):
    result = run_job(make_job(tmp_path))
    assert (result.failed, result.written) == (0, 12)
    records = records_of(result, times=True)
    assert all(set(COMMON_FIELDS) <= set(rows[0]) for rows in records.values())
    first = records["snapkv"][0]
    assert first["prompt_tokens"] == 64 + len("what next? ")
    assert first["capacity"] == first["entries"]["max"] == SMALL.capacity(75)
    assert first["ratio"] == pytest.approx(SMALL.capacity(75) / 75)
    assert first["compressed"]
    assert first["saves_memory"]
    assert first["letters"] == first["score"]
    assert first["length"] == 64
    assert first["prompt_tail"].endswith("what next? ")
    assert records["exact"][0]["ratio"] == 1.0
    assert not records["exact"][0]["compressed"]
    assert records["uniform"][0]["ratio"] > records["snapkv"][0]["ratio"]  # its weights count
    manifest = load_run(result.folders["snapkv"]).manifest
    assert manifest["task_meta"]["breakdown"] == ["length"]
    assert manifest["identity"]["budget"] == {"rate": 0.25}


def test_a_limit_below_the_number_of_datasets_says_which_are_missing(tmp_path, caplog):
    lines = LongEvalLines(num_lines=[2, 3, 4], num_examples=2, max_new_tokens=2)
    methods = {"exact": build_method("exact")}
    result = run_job(make_job(tmp_path, methods, echo=lines, limit=2))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "limit is 2 and echo has 3 datasets: none is run of 4 lines"
    manifest = load_run(result.folders["exact"]).manifest
    assert manifest["datasets_left_out"] == ["4 lines"]
    page = build_report(tmp_path / "e").page
    assert "Left out by limit: 4 lines." in page.read_text()
    caplog.clear()
    result = run_job(make_job(tmp_path, methods, echo=lines, limit=3))
    assert not caplog.records
    assert load_run(result.folders["exact"]).manifest["datasets_left_out"] == []
    assert "Left out by limit" not in build_report(tmp_path / "e").page.read_text()


def test_a_second_run_writes_nothing_and_a_larger_limit_goes_on(tmp_path):
    few = run_job(make_job(tmp_path, limit=2))
    assert few.written == 6
    again = run_job(make_job(tmp_path, limit=2))
    assert again.written == 0
    more = run_job(make_job(tmp_path))
    assert more.written == 6
    manifest = load_run(more.folders["snapkv"]).manifest
    assert len(manifest["earlier_starts"]) == 2, "a run that goes on remembers how it began"
    fresh = run_job(make_job(tmp_path / "fresh"))
    assert records_of(more) == records_of(fresh)


def test_failures_are_records_and_the_rest_goes_on(tmp_path):
    methods = {"greedy": Greedy(), "broken": Broken(), "snapkv": build_method("snapkv")}
    result = run_job(make_job(tmp_path, methods))
    assert result.failed == 8
    records = records_of(result)
    assert {r["status"] for r in records["greedy"]} == {"over_budget"}
    assert {r["status"] for r in records["broken"]} == {"oom"}
    assert {r["status"] for r in records["snapkv"]} == {"ok"}
    assert records["greedy"][0]["score"] is None
    assert "BudgetExceeded: method 'greedy' holds 75" in records["greedy"][0]["error"]
    mended = {**methods, "broken": build_method("snapkv"), "greedy": build_method("snapkv")}
    assert run_job(make_job(tmp_path, mended)).written == 0, "a failure is a result, too"
    retried = run_job(make_job(tmp_path, mended, retry_failed=True))
    assert (retried.failed, retried.written) == (0, 8)


class Generous(Greedy):
    """Says of every layer that it may hold all."""

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return n


def test_layers_may_share_the_budget_but_not_enlarge_it(tmp_path):
    result = run_job(make_job(tmp_path, {"generous": Generous()}, limit=1))
    (record,) = records_of(result)["generous"]
    assert record["status"] == "over_budget"
    layers = tiny_model("llama").config.num_hidden_layers
    allowed = layers * SMALL.capacity(75)
    assert record["error"].endswith(
        f"'generous' holds {layers * 75} entries in all layers; its budget allows {allowed}"
    )


def test_a_budget_whose_ends_fill_the_longest_prompt_is_the_last_that_runs(tmp_path):
    methods = {"snapkv": build_method("snapkv")}
    longest = 8 * 11 + len("what next? ")
    for window, allowed in ((longest - 4, True), (longest - 3, False)):
        job = make_job(tmp_path, methods)
        job = replace(job, methods={"snapkv": (methods["snapkv"], Budget(sink=4, window=window))})
        if allowed:
            assert run_job(job).failed == 0
            continue
        with pytest.raises(KVError, match=rf"is {longest + 1}; .* at most {longest}$"):
            run_job(job)


def test_whatever_changes_a_score_changes_the_hash_and_nothing_else_does(tmp_path):
    job = make_job(tmp_path)
    folders = {job.limit: run_job(job).folders["snapkv"]}
    folders[1] = run_job(replace(job, limit=1, retry_failed=True)).folders["snapkv"]
    assert len(set(folders.values())) == 1
    seeded = replace(job, session=replace(job.session, seed=1))
    seeded.session.__dict__.update(
        {k: job.session.__dict__[k] for k in ("model", "tokenizer", "encoder")}
    )
    budget = replace(job, budget_config={"rate": 0.5})
    other = {run_job(changed).folders["snapkv"] for changed in (seeded, budget)}
    assert len(other | set(folders.values())) == 3
    # exact does not look at the budget: one run serves every rate
    assert run_job(budget).folders["exact"] == run_job(job).folders["exact"]


def test_context_compression_splits_at_the_question(tmp_path):
    result = run_job(make_job(tmp_path, compress_after="context"))
    record = records_of(result)["snapkv"][0]
    assert record["capacity"] == SMALL.capacity(64)
    assert record["prompt_tokens"] == 75
    with pytest.raises(KVError, match="has no question; allowed: prompt"):
        run_job(make_job(tmp_path, echo=Echo(question=""), compress_after="context"))


def test_another_file_under_the_same_name_is_another_run(tmp_path):
    from kvbench.tasks.longeval_lines import QUESTION_START, LongEvalLines

    def case(number):
        line = f"line a-b: REGISTER_CONTENT is <{number}>\n"
        row = {
            "prompt": f"{line}{QUESTION_START}Which?",
            "expected_number": number,
            "random_idx": ["a-b", 0],
        }
        return json.dumps(row) + "\n"

    file = tmp_path / "1_lines.jsonl"
    task = LongEvalLines(files=[str(file)], max_new_tokens=2)
    folders = set()
    for number in (17, 18, 17):
        file.write_text(case(number))
        job = make_job(tmp_path, {"exact": build_method("exact")}, plan=TaskPlan(task))
        folders.add(run_job(job).folders["exact"])
    assert len(folders) == 2
