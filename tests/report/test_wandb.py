"""A copy of results in W&B: runs as they are written offline, and what is said where none was sent."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.report_runs import LINES_META, NEEDLE_META, lines_records, needle_records, write_run
from support.wandb_files import history, isolated, offline_run, start_of, table_of, updates

from kvbench.records.read import load_runs
from kvbench.report import wandb as ours
from kvbench.report.build import build_report
from kvbench.report.wandb import log_overview, log_runs, not_sent

LOGGER = {"name": "wandb", "mode": "offline", "project": "p", "entity": None, "timeout_s": 30}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolated(monkeypatch, tmp_path)
    monkeypatch.setattr(ours, "_unsent", set())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.message for r in caplog.records if (r.name, r.levelname) == (ours.__name__, "WARNING")
    ]


def write(folder: Path, *methods: str, rates: tuple[float, ...] = (0.25,)) -> Path:
    for method in methods or ("exact", "snapkv"):
        for rate in rates if method != "exact" else rates[:1]:
            about: Any = {"task": "needle", "method": method, "task_meta": NEEDLE_META}
            about["options"] = {"logger": LOGGER, "budget.rate": rate}
            write_run(folder, records=needle_records(method), **about)
    return folder / "demo"


def logged(folder: Path) -> dict[tuple[str, str], tuple[Path, list[Any]]]:
    found = {}
    for place in (folder / "wandb").glob("offline-run-*"):
        place, messages = offline_run(folder, place.name.rpartition("-")[2])
        start = start_of(messages)
        found[start.run_group, start.display_name] = place, messages
    return found


GROUP = "recall_mini/needle/rate 0.25/seed 0"
SNAPKV = GROUP, "recall_mini/needle/snapkv/rate 0.25, ratio 0.37"


def test_logging_again_replaces_the_copies(tmp_path: Path) -> None:
    folder = write(tmp_path / "results", "snapkv")
    runs = load_runs(folder)
    assert log_runs(runs, predictions=True) == 1
    assert "prediction" in table_of(logged(folder)[SNAPKV][0], "records")
    assert log_runs(runs) == 1
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 1
    assert "prediction" not in table_of(logged(folder)[SNAPKV][0], "records")


def test_a_method_at_a_rate_is_one_run_and_exact_is_in_every_rates_group(tmp_path: Path) -> None:
    folder = write(tmp_path / "results", rates=(0.25, 0.5))
    runs = load_runs(folder)
    assert log_runs(runs) == 4
    found = logged(folder)
    other = GROUP.replace("0.25", "0.5")
    assert {group for group, name in found if name == "recall_mini/needle/exact"} == {GROUP, other}
    snapkv = next(run for run in runs if run.manifest["config"]["budget"]["rate"] == 0.25
                  and run.manifest["method"] == "snapkv")  # fmt: skip
    start, config = start_of(found[SNAPKV][1]), updates(found[SNAPKV][1], "config")
    assert start.job_type == "needle"
    assert (config["method"], config["rate"], config["task"]) == ("snapkv", 0.25, "needle")
    assert config["config"] == snapkv.manifest["config"], "the whole config"
    assert "difference" in updates(found[SNAPKV][1], "summary")
    job = [run for run in runs if run.manifest["config"]["budget"]["rate"] == 0.5]
    exact = [run for run in runs if run.manifest["method"] == "exact"]
    assert log_runs([*exact, *job]) == 2, "a sweep's job logs its own runs"
    assert set(logged(folder)) == set(found)


def test_a_run_has_means_tables_and_figures(tmp_path: Path) -> None:
    folder = write(tmp_path / "results", "snapkv")
    (run,) = load_runs(folder)
    records = run.records
    log_runs([run])
    place, messages = logged(folder)[SNAPKV]
    scores = list(records["score"])
    summary = updates(messages, "summary")
    for name in ("score", "ratio"):
        assert summary[name] == pytest.approx(records[name].mean())
    assert {"examples": len(scores), "failed": 0}.items() <= summary.items()
    *rows, last = history(messages)
    assert len(rows) == ours.MOST_STEPS
    assert rows[-1]["examples"] == len(scores)
    for row in rows:
        count = row["examples"]
        assert row["score"] == pytest.approx(sum(scores[:count]) / count)
    assert {"scores", "records", "heatmap"} <= {key.split("/")[0] for key in last}
    assert set(table_of(place, "scores")["variant"]) == {"snapkv"}
    assert table_of(place, "records")["score"] == scores
    (heatmap,) = (place / "files/media/html").glob("heatmap_*.html")
    assert "0.50</td>" in heatmap.read_text()


def test_a_method_that_lacks_a_dataset_has_no_score_in_the_summary(tmp_path: Path) -> None:
    """As in tables: the mean of its other datasets is no score beside those of all."""
    for method in ("exact", "snapkv"):
        records = [
            {"example_id": f"{name}{i}", "dataset": name, "score": 0.5}
            | ({"score": None, "status": "oom"} if name == "y" and method == "snapkv" else {})
            for name in "xy"
            for i in range(3)
        ]
        write_run(tmp_path, method=method, records=records)
    log_runs(load_runs(tmp_path / "demo"))
    scores = {
        name.split("/")[2]: updates(messages, "summary")["score"]
        for (_, name), (_, messages) in logged(tmp_path / "demo").items()
    }
    assert scores["exact"] == 0.5
    assert scores["snapkv"] != 0.5, "not a number"


def test_heatmaps_of_all_methods_have_one_scale(tmp_path: Path) -> None:
    """The darkest colour is the best score of any method: snapkv's, half of exact's, have none of it."""
    for method, factor in (("exact", 1.0), ("snapkv", 0.5)):
        records = [one | {"score": factor * one["score"]} for one in needle_records("exact")]
        about: Any = {"task": "needle", "method": method, "task_meta": NEEDLE_META}
        write_run(tmp_path, records=records, **about)
    log_runs(load_runs(tmp_path / "demo"))
    darkest = {}
    for (_, name), (place, _) in logged(tmp_path / "demo").items():
        (heatmap,) = (place / "files/media/html").glob("heatmap_*.html")
        darkest[name.split("/")[2]] = "#00441b" in heatmap.read_text()
    assert darkest == {"exact": True, "snapkv": False}


def test_a_table_has_the_types_that_wandb_takes_from_every_cell() -> None:
    import wandb

    cells = [["a", None, 1, None], [None, 0.5, 2, None], ["b", 1.0, 3, None]]
    frame = pd.DataFrame(cells, columns=["method", "score", "n", "error"])
    for rows in (0, 1, 3):
        own = wandb.Table(columns=list(frame), data=cells[:rows])
        assert ours._table(frame.iloc[:rows]) == own


def test_a_probe_has_its_score_at_every_rate_in_the_summary(tmp_path: Path) -> None:
    records = [
        record | {"rate": rate, "example_id": f"{record['example_id']}-{rate}"}
        for record in lines_records("snapkv")
        for rate in (0.5, 0.25)
    ]
    about = {"task_meta": LINES_META | {"breakdown": ["rate"]}, "options": {"logger": LOGGER}}
    write_run(tmp_path, task="lines", method="snapkv", records=records, **about)
    assert log_runs(load_runs(tmp_path / "demo")) == 1
    ((_, messages),) = logged(tmp_path / "demo").values()
    assert updates(messages, "config")["rate"] is None
    summary = updates(messages, "summary")
    for measure in ("score", "ratio"):
        assert {f"{measure} at rate 0.25", f"{measure} at rate 0.5"} <= set(summary)


@pytest.mark.slow
def test_an_experiment_has_a_run_with_its_page_and_charts(tmp_path: Path) -> None:
    folder = write(tmp_path / "results")
    for method, rate in (("exact", 0.25), ("snapkv", 0.25), ("snapkv", 0.5)):
        options = {"logger": LOGGER, "budget.rate": rate}
        records = [  # a hundred prompts, which tell what is enough
            {**record, "score": 1.0, "example_id": f"{record['example_id']}-{i}"}
            for i in range(2)
            for record in lines_records(method, rate)
        ]
        about: Any = {"task": "lines", "method": method, "options": options}
        write_run(tmp_path / "results", records=records, **about)
    paths = build_report(folder)
    assert log_overview(folder, paths)
    ((place, messages),) = logged(folder).values()
    table = table_of(place, "task_by_method")
    variants = ["exact", "snapkv", "snapkv, rate 0.25", "snapkv, rate 0.5"]
    assert sorted(table["variant"]) == variants
    enough = dict(zip(table["variant"], table["lines: ratio_at_95"], strict=True))
    assert enough["snapkv"] == pytest.approx(0.37, abs=0.01), "at the lower rate, too"
    assert {"needle: score", "lines: score", "needle: ratio"} <= set(table)
    charts = {path.name.rsplit("_", 2)[0] for path in (place / "files/media/images").iterdir()}
    assert {"needle-recall_mini-ratio", "needle-recall_mini-heatmap"} <= charts
    (page,) = (place / "files/media/html").glob("page_*.html")
    assert page.read_text() == paths.page.read_text()
    assert set(table_of(place, "scores")["measure"]) == {
        *("score", "difference", "ratio", "ratio_at_95")
    }
    assert not [key for key in updates(messages, "summary") if "snapkv" in key]
    config = {**paths.manifest["config"], "logger": {**LOGGER, "mode": "disabled"}}
    none = dataclasses.replace(paths, manifest={**paths.manifest, "config": config})
    assert not log_overview(folder, none)


def test_a_failure_is_one_warning_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "results", "exact")

    def broken(*_: Any) -> None:
        raise RuntimeError("no room\nat all")

    monkeypatch.setattr(ours, "_table", broken)
    assert log_runs(load_runs(folder)) == 0
    (said,) = warnings_of(caplog)
    assert "was not logged: " in said
    assert "\n" not in said
    assert not list((folder / "wandb").glob("offline-run-*"))
    (folder / "wandb").rename(tmp_path / "gone")
    (folder / "wandb").touch()
    assert log_runs(load_runs(folder)) == 0


@pytest.mark.parametrize("ends", ["sent", "refused", "in no time"])
def test_what_was_not_sent_is_one_warning_and_asked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    """By `wandb sync` of all runs at once, which marks those that it has sent."""
    folder = write(tmp_path / "results", "snapkv")
    calls: list[list[str]] = []

    def run(words: list[str], *, timeout: float, env: Any, **_: Any) -> None:
        assert (timeout, env["WANDB_MODE"], env["WANDB_DIR"]) == (3, "online", str(folder))
        calls.append(words)
        if ends == "in no time":
            raise subprocess.TimeoutExpired(words, timeout)
        for place in words[words.index("sync") + 1 :] if ends == "sent" else ():
            (Path(place) / "run.wandb.synced").touch()

    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    monkeypatch.setattr(ours.subprocess, "run", run)
    runs = load_runs(folder)
    for _ in range(2):
        assert log_runs(runs, timeout_s=3) == 1
    said = warnings_of(caplog)
    assert (len(calls), len(said)) == ((2, 0) if ends == "sent" else (1, 1))
    assert all("1 of 1 runs were not sent" in line and "wandb sync" in line for line in said)
    assert bool(not_sent(list((folder / "wandb").glob("offline-run-*")))) == bool(said)


def test_a_report_is_built_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="needs kvbench[wandb-report]")
    folder = write(tmp_path / "results")
    assert ours.main([str(folder), "--no-send"]) == 0
    blocks = json.loads((folder / "wandb" / "report.json").read_text())["blocks"]
    text = json.dumps(blocks)
    for part in ("needle on recall_mini", "| snapkv |", "task_by_method", "0123abcd"):
        assert part in text, part
    assert ours.main([str(tmp_path / "nowhere")]) == 1
