"""The runner: records, failures, resuming, the hash that names a run, and dry runs."""

from __future__ import annotations

import json
import logging
import re
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from support.command import main
from support.jobs import SMALL, Echo, Letters, make_job, records_of, with_session
from support.tiny import Broken, Greedy

from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.probes.throughput import Throughput
from kvbench.prompts import PromptEncoder, Thought
from kvbench.records.read import COMMON_FIELDS, load_run, load_runs
from kvbench.records.store import config_hash
from kvbench.run import identity, provenance
from kvbench.run.identity import without_defaults
from kvbench.run.plan import TaskPlan
from kvbench.run.preview import print_dry_run
from kvbench.run.progress import Progress
from kvbench.run.runner import run_job
from kvbench.tasks.longeval_lines import QUESTION_START, LongEvalLines

EXACT = {"exact": build_method("exact")}


def test_one_record_per_example_and_method_with_every_field(tmp_path: Path) -> None:
    result = run_job(make_job(tmp_path))
    assert (result.failed, result.written) == (0, 12)
    records = records_of(result, times=True)
    assert all(set(COMMON_FIELDS) <= set(rows[0]) for rows in records.values())
    manifest = load_run(result.folders["snapkv"]).manifest
    assert manifest["task_meta"]["breakdown"] == ["length"]
    assert manifest["identity"]["budget"] == {"rate": 0.25}
    assert "sampling" not in manifest["identity"], "greedy runs keep the names they always had"


def test_a_record_says_what_was_asked_and_what_was_held(tmp_path: Path) -> None:
    records = records_of(run_job(make_job(tmp_path)))
    first = records["snapkv"][0]
    about_the_prompt = {"prompt_tokens": 64 + len("what next? "), "length": 64}
    about_the_cache = {"capacity": SMALL.capacity(74), "compressed": True, "saves_memory": True}
    about_the_cache["held_back"] = 1  # of all prompts, the last token
    assert {k: first[k] for k in about_the_prompt} == about_the_prompt
    assert {k: first[k] for k in about_the_cache} == about_the_cache
    assert first["entries"]["max"] == SMALL.capacity(74)
    assert first["ratio"] == pytest.approx(SMALL.capacity(74) / 74)
    assert first["letters"] == first["score"]
    assert first["prompt_tail"].endswith("what next? ")
    exact = records["exact"][0]
    assert (exact["ratio"], exact["compressed"]) == (1.0, False)
    assert records["uniform"][0]["ratio"] > first["ratio"], "its weights count"


def test_the_seconds_of_a_job_are_its_own_where_methods_share_a_second_pass(tmp_path: Path) -> None:
    methods = {f"kvzip{i}": build_method("kvzip") for i in range(8)}
    since = time.monotonic()
    result = run_job(make_job(tmp_path, methods | EXACT), since=since)
    records = records_of(result, times=True)
    compress = [record["compress_s"] for rows in records.values() for record in rows]
    assert 0 < result.seconds["compress"] < sum(compress)
    assert sum(result.seconds.values()) <= time.monotonic() - since


def test_progress_gets_the_scores(tmp_path: Path) -> None:
    received: list[Any] = []
    progress = Progress()
    progress.item_done = received.extend  # type: ignore[method-assign]
    job = make_job(tmp_path, EXACT)
    result = run_job(job, progress)
    modules = list(job.session.model.modules())
    assert not any(one._forward_pre_hooks or one._forward_hooks for one in modules), "as it was"
    scores = [row["score"] for row in records_of(result)["exact"]]
    assert [fields["score"] for fields in received] == scores


def test_a_second_run_writes_nothing_and_a_larger_limit_goes_on(tmp_path: Path) -> None:
    assert run_job(make_job(tmp_path, limit=2)).written == 6
    assert run_job(make_job(tmp_path, limit=2)).written == 0
    more = run_job(make_job(tmp_path))
    assert more.written == 6
    manifest = load_run(more.folders["snapkv"]).manifest
    assert len(manifest["earlier_starts"]) == 2, "a run that goes on remembers how it began"
    assert records_of(more) == records_of(run_job(make_job(tmp_path / "fresh")))


def test_a_limit_below_the_number_of_datasets_says_which_are_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = LongEvalLines(num_lines=[2, 3, 4], num_examples=2, max_new_tokens=2)
    result = run_job(make_job(tmp_path, EXACT, echo=lines, limit=2))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning == "tiny x echo: limit is 2: no example is run of 4 lines"
    assert load_run(result.folders["exact"]).manifest["datasets_left_out"] == ["4 lines"]
    caplog.clear()
    result = run_job(make_job(tmp_path, EXACT, echo=lines, limit=3))
    assert not caplog.records
    assert load_run(result.folders["exact"]).manifest["datasets_left_out"] == []


def test_failures_are_records_and_the_rest_goes_on(tmp_path: Path, capsys: Any) -> None:
    methods = {"greedy": Greedy(), "broken": Broken(), "snapkv": build_method("snapkv")}
    result = run_job(make_job(tmp_path, methods, limit=2))
    assert result.failed == 4
    records = records_of(result)
    found = {label: rows[0]["status"] for label, rows in records.items()}
    assert found == {"greedy": "over_budget", "broken": "oom", "snapkv": "ok"}
    assert records["greedy"][0]["score"] is None
    assert "BudgetExceeded: method 'greedy' holds 74" in records["greedy"][0]["error"]
    mended = dict.fromkeys(methods, build_method("snapkv"))
    assert run_job(make_job(tmp_path, mended, limit=2)).written == 0, "a failure is a result, too"
    for retry_failed, waiting in ((False, 0), (True, 2)):
        again = make_job(tmp_path, mended, limit=2, retry_failed=retry_failed)
        print_dry_run(again, "again")
        assert f"2 examples, {waiting} of them to run" in capsys.readouterr().out
    retried = run_job(again)
    assert (retried.failed, retried.written) == (0, 4)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        (lambda found: [*found, *found], "has 2 examples with the id 'e0'; allowed: one"),
        (
            lambda found: [replace(each, fields={"status": "mine"}) for each in found],
            ", example 'e0': fields have 'status', which every",
        ),
    ],
)
def test_examples_that_cannot_be_recorded_are_refused(
    tmp_path: Path, changed: Any, says: str
) -> None:
    class Wrong(Echo):
        def examples(self, encoder: PromptEncoder) -> Any:
            return changed(super().examples(encoder))

    with pytest.raises(KVError, match=f"task echo.*{says}"):
        run_job(make_job(tmp_path, EXACT, echo=Wrong()))


@pytest.mark.parametrize("prefix", [(), (70, 71)])
def test_what_a_model_has_before_every_prompt_is_no_context(
    tmp_path: Path, prefix: tuple[int, ...]
) -> None:
    class Bare(Echo):
        def examples(self, encoder: PromptEncoder) -> Any:
            return [replace(each, context="") for each in super().examples(encoder)]

    job = make_job(tmp_path, EXACT, echo=Bare(), compress_after="context")
    job.session.__dict__["encoder"] = PromptEncoder(Letters(), prefix_ids=prefix)
    with pytest.raises(KVError, match="'e0' has no context"):
        run_job(job)


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (
            Budget(sink=60, window=40),
            r"is 100; the longest prompt of task echo has 99 tokens, so 'uniform' would compress no",
        ),
        (Budget(total_rate=0.1, sink=4, window=4), "0.1 of a prompt of 74 tokens is 7 entries"),
    ],
    ids=str,
)
def test_a_budget_that_leaves_nothing_to_compare_is_refused_before_a_model_runs(
    tmp_path: Path, budget: Budget, says: str
) -> None:
    job = make_job(tmp_path)
    with pytest.raises(KVError, match=says):
        run_job(replace(job, methods={"uniform": (build_method("uniform"), budget)}))
    assert replace(job, methods={"exact": (build_method("exact"), budget)}).items


def test_answers_end_at_the_models_tokens_and_at_the_encoders(tmp_path: Path) -> None:
    session = make_job(tmp_path, EXACT).session
    session.__dict__["encoder"] = PromptEncoder(Letters(), end_ids=frozenset({90}))
    model: Any = session.model
    model.generation_config.eos_token_id = [91]
    assert {90, 91} <= session.end_ids


def test_only_what_follows_a_thought_is_scored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thought is in the record and its tokens count; an unfinished one is an empty answer."""
    job, thinking = (make_job(tmp_path / name, EXACT) for name in ("plain", "thinking"))
    plain = records_of(run_job(job))["exact"]
    end = plain[0]["prediction"][1]
    encoder = replace(job.session.encoder, thought=Thought(end))
    thinking.session.__dict__["encoder"] = encoder
    records = records_of(run_job(thinking))["exact"]
    for before, after in zip(plain, records, strict=True):
        thought, _, answer = before["prediction"].partition(end)
        answer = answer.lstrip()
        assert (after["thought"], after["prediction"]) == (thought, answer)
        assert after["new_tokens"] == before["new_tokens"]
        assert after["score"] == sum(c.isalpha() for c in answer) / max(1, len(answer))
    assert "thought" not in plain[0]
    assert job.folders["exact"].name != thinking.folders["exact"].name
    assert f"only what follows {end!r} is scored, and a thought that is not over" in caplog.text


def test_the_hardware_of_a_run_on_a_gpu_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="A GPU", total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    facts = provenance.hardware(torch.device("cuda"))
    assert (facts["gpu"], facts["gpu_memory_gib"]) == ("A GPU", 80.0)


# What names a run.


def test_whatever_changes_a_score_changes_the_hash_and_nothing_else_does(tmp_path: Path) -> None:
    class Changed(type(build_method("uniform"))):  # type: ignore[misc]
        version: ClassVar[int] = 99

    job = make_job(tmp_path)

    def folder(label: str = "snapkv", **changes: Any) -> Path:
        return replace(job, **changes).folders[label]

    same = [{}, {"limit": 1}, {"batch_size": 4}, {"retry_failed": True}, {"extra": {"a": 1}}]
    assert len({folder(**changes) for changes in same}) == 1
    halves = {label: own._replace(budget={"rate": 0.5}) for label, own in job.configs.items()}
    other = [{"configs": halves}, {"task_config": {"name": "x"}}]
    other += [{"session": with_session(job, seed=1).session}]
    other += [{"session": with_session(job, compress_after="context").session}]
    other += [{"session": with_session(job, decode="eager").session}]
    assert len({folder(**changes) for changes in [{}, *other]}) == 6
    # exact does not look at the budget: one run serves every rate
    assert folder("exact", configs=halves) == folder("exact")
    changed = {**job.methods, "uniform": (Changed(), SMALL)}
    assert folder("uniform", methods=changed) != folder("uniform")
    assert folder(methods=changed) == folder()


@dataclass(frozen=True)
class Before:
    size: int
    rate: float = 0.5


@dataclass(frozen=True)
class After(Before):
    shapes: tuple[int, ...] = (1, 2)
    names: list[str] = field(default_factory=lambda: ["a"])


def test_an_option_that_is_added_with_its_default_changes_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lean(kind: type, **options: Any) -> str:
        monkeypatch.setattr(identity, "locate", lambda name: kind)
        named = {"model": {"name": "m", "path": "p"}, "task": {"_target_": "t"}, "seed": 0}
        return config_hash(without_defaults({**named, "method": {"_target_": "m", **options}}))

    before = lean(Before, size=3, rate=0.5)
    assert lean(Before, size=3) == before
    assert lean(After, size=3, rate=0.5, shapes=[1, 2]) == before
    assert lean(After, size=3, names=["a"]) == before
    assert lean(After, size=3, names=[]) != before
    assert lean(After, size=3, shapes=[2, 1]) != before
    assert lean(Before, size=4) != before
    assert lean(Before, size=3, rate=0.25) != before
    model = {"name": "m", "path": "p", "dtype": "auto", "random_weights": True}
    named = without_defaults({"model": model, "method": {}, "task": {}, "seed": 0})
    assert named["model"] == {"name": "m", "path": "p", "random_weights": True}


def test_another_file_under_the_same_name_is_another_run(tmp_path: Path) -> None:
    file = tmp_path / "1_lines.jsonl"
    task = LongEvalLines(files=[str(file)], max_new_tokens=2)
    folders = set()
    for number in (17, 18, 17):
        prompt = f"line a-b: REGISTER_CONTENT is <{number}>\n{QUESTION_START}Which?"
        row = {"prompt": prompt, "expected_number": number, "random_idx": ["a-b", 0]}
        file.write_text(json.dumps(row) + "\n")
        job = make_job(tmp_path, EXACT, plan=TaskPlan(task))
        folders.add(run_job(job).folders["exact"])
    assert len(folders) == 2


# A dry run, and prompts that are too long.


def test_a_dry_run_predicts_the_bytes_that_the_run_then_measures(
    tmp_path: Path, capsys: Any
) -> None:
    words = ["model=recall_mini", "device=cpu", "logger=none", f"results_dir={tmp_path}", "limit=1"]
    packed = "{bits: 2, group_size: 16}"
    words += ["task.num_lines=[20]", "method=[exact,snapkv]", f"methods.snapkv.quantize={packed}"]
    status, out, _ = main(capsys, *words, "dry_run=true")
    assert status == 0
    assert main(capsys, *words)[0] == 0
    for run in load_runs(next(tmp_path.glob("longeval_lines-*"))):
        name, record = run.manifest["method"], run.records.iloc[0]
        (line,) = (text for text in out.splitlines() if text.strip().startswith(f"{name} "))
        assert f"{record['cache_bytes'] / 2**20:.3f} MiB ({record['ratio']:.0%})" in line
        assert f"{record['exact_bytes'] / 2**20:.3f} MiB" in line


def beyond(job: Any, positions: int | None) -> Any:
    """The job on a model that has so many positions."""
    job.session.__dict__["encoder"] = PromptEncoder(Letters(), max_positions=positions)
    return job


def test_prompts_beyond_the_models_positions_are_logged_and_recorded(
    tmp_path: Path, caplog: Any, capsys: Any
) -> None:
    """Of prompts of 75, 83, 91 and 99 tokens those above the limit, with both numbers."""
    with caplog.at_level(logging.WARNING):
        for number, positions in enumerate((None, 10_000)):
            run_job(beyond(make_job(tmp_path / str(number), EXACT), positions))
        assert not caplog.records
        result = run_job(beyond(make_job(tmp_path, EXACT), 83))
    warning = (
        "2 of 4 prompts are longer than the model's positions: up to 99 tokens, and tiny has 83;"
    )
    assert [warning in record.message for record in caplog.records] == [True]
    flags = [
        (row.get("beyond_positions"), row.get("max_positions"))
        for row in records_of(result)["exact"]
    ]
    assert flags == [(None, None)] * 2 + [(True, 83)] * 2
    print_dry_run(beyond(make_job(tmp_path / "dry"), 50))
    text = capsys.readouterr().out
    assert re.search(r"warning.*4 of 4 prompts .* up to \d+ tokens, and tiny has 50;", text)
    assert not (tmp_path / "dry").exists()


def test_a_dry_run_shows_the_capacity_of_each_method_at_the_median_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = [row["prompt_tokens"] for row in records_of(run_job(make_job(tmp_path)))["exact"]]
    median = int(statistics.median(prompts)) - 1  # without the token that is held back
    print_dry_run(make_job(tmp_path / "dry"))
    out = capsys.readouterr().out
    capacities = dict(re.findall(r"^ *(exact|snapkv|uniform) +(\d+)", out, re.M))
    expected = {
        "exact": median,
        "snapkv": SMALL.capacity(median),
        "uniform": SMALL.capacity(median),
    }
    assert capacities == {label: str(capacity) for label, capacity in expected.items()}
    assert "as the task says" not in out
    print_dry_run(make_job(tmp_path, EXACT, plan=Throughput(settings=[(60, 4, 1, 0.5)], runs=1)))
    assert "tokens as the task says" in capsys.readouterr().out


def test_a_dry_run_fetches_no_weights_and_a_rerun_runs_all(tmp_path: Path, capsys: Any) -> None:
    job = make_job(tmp_path, EXACT)
    run_job(job)
    print_dry_run(replace(job, rerun="now"))
    assert "4 examples, 4 of them to run" in capsys.readouterr().out
    del vars(job.session)["weights"]  # nor are they on the Hub
    print_dry_run(replace(job))
    out = capsys.readouterr().out
    assert "the weights are not on this machine: what they have on disk is not known" in out
    assert "4 examples, 4 of them to run" in out
