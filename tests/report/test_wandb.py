"""A copy of results in W&B: runs as they are written offline, and as a server gets them or does not."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import LINES_META, NEEDLE_META, lines_records, needle_records, write_run
from support.wandb_files import history, isolated, offline_run, start_of, table_of, updates
from support.wandb_server import Fault, StandIn

from kvbench.errors import UserError
from kvbench.records.read import load_run, load_runs
from kvbench.report import wandb as ours
from kvbench.report import wandb_client, wandb_report
from kvbench.report.build import build_report
from kvbench.report.wandb import check_logger, log_overview, log_runs, run_id, run_names

LOGGER = {"name": "wandb", "mode": "offline", "project": "p", "entity": None, "timeout_s": 30}


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolated(monkeypatch, tmp_path)
    monkeypatch.setattr(wandb_client, "_FAILED", set())


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What kvbench said; W&B keeps a log of its own."""
    names = (ours.__name__, wandb_client.__name__)
    return [r.message for r in caplog.records if r.name in names and r.levelname == "WARNING"]


def write(folder: Path, methods: tuple[str, ...] = ("exact", "snapkv")) -> Path:
    """An experiment of one needle task."""
    for method in methods:
        records = needle_records(method)
        write_run(folder, task="needle", method=method, records=records, task_meta=NEEDLE_META,
                  options={"logger": LOGGER})  # fmt: skip
    return folder / "demo"


def ids(folder: Path) -> dict[str, str]:
    """By method the ids of an experiment's W&B runs."""
    manifests = [run.manifest for run in load_runs(folder)]
    return {str(m["method"]): run_id(*run_names(m)) for m in manifests}


def test_logging_again_replaces_the_copies(tmp_path: Path) -> None:
    folder = write(tmp_path / "results")
    runs = load_runs(folder)
    assert log_runs(runs, predictions=True) == 2
    assert table_of(offline_run(folder, ids(folder)["snapkv"])[0], "predictions")["snapkv: score"]
    assert log_runs(runs) == 2
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 2


def test_a_method_at_a_rate_is_one_run_with_names_and_config_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path / "results")
    runs = load_runs(folder)
    snapkv = next(run for run in runs if run.manifest["method"] == "snapkv")
    assert log_runs(runs) == 2
    _, messages = offline_run(folder, ids(folder)["snapkv"])
    start = start_of(messages)
    assert start.display_name == "recall_mini/needle/snapkv/rate 0.25, ratio 0.37/seed0"
    assert start.run_group == "recall_mini/needle/rate 0.25 of the middle/seed0"
    assert start_of(offline_run(folder, ids(folder)["exact"])[1]).run_group == start.run_group
    assert start.job_type == "needle"
    assert list(start.tags) == ["recall_mini", "needle", "snapkv", "rate 0.25"]
    config = updates(messages, "config")
    assert (config["method"], config["rate"], config["task"]) == ("snapkv", 0.25, "needle")
    assert config["config"] == snapkv.manifest["config"], "the whole config"


def test_a_run_has_means_tables_and_figures(tmp_path: Path) -> None:
    folder = write(tmp_path / "results")
    runs = load_runs(folder)
    records = next(run for run in runs if run.manifest["method"] == "snapkv").records
    log_runs(runs)
    place, messages = offline_run(folder, ids(folder)["snapkv"])
    scores = list(records["score"])
    means = [sum(scores[: n + 1]) / (n + 1) for n in range(len(scores))]
    summary = updates(messages, "summary")
    for name in ("score", "ratio"):
        assert summary[name] == pytest.approx(records[name].mean())
    assert {"examples": len(scores), "failed": 0}.items() <= summary.items()
    assert "difference" in summary
    *rows, last = history(messages)
    assert [row["score"] for row in rows] == pytest.approx(means)
    assert {"scores", "records", "heatmap"} <= {key.split("/")[0] for key in last}
    assert set(table_of(place, "scores")["variant"]) == {"snapkv"}
    assert table_of(place, "records")["score"] == scores
    assert list((place / "files/media/images").glob("heatmap_*.png"))


def test_a_probe_has_its_score_at_every_rate_in_the_summary(tmp_path: Path) -> None:
    records = [
        record | {"rate": rate, "example_id": f"{record['example_id']}-{rate}"}
        for record in lines_records("snapkv")
        for rate in (0.5, 0.25)
    ]
    about = {"task_meta": LINES_META | {"breakdown": ["rate"]}, "options": {"logger": LOGGER}}
    name = "m" * 70
    write_run(tmp_path, task="lines", method="snapkv", model=name, records=records, **about)
    assert log_runs(load_runs(tmp_path / "demo")) == 1
    _, messages = offline_run(tmp_path / "demo", ids(tmp_path / "demo")["snapkv"])
    assert start_of(messages).tags[0] == "m" * 64, "W&B takes no longer tag"
    assert updates(messages, "config")["rate"] is None
    summary = updates(messages, "summary")
    for measure in ("score", "ratio"):
        assert {f"{measure} at rate 0.25", f"{measure} at rate 0.5"} <= set(summary)


@pytest.mark.slow
def test_an_experiment_has_a_run_with_its_page_and_charts(tmp_path: Path) -> None:
    folder = write(tmp_path / "results")
    write_run(tmp_path / "results", task="lines", method="snapkv", records=lines_records("snapkv"),
              options={"logger": LOGGER})  # fmt: skip
    paths = build_report(folder)
    assert log_overview(folder, paths)
    place, messages = offline_run(folder, run_id("demo", "overview"))
    table = table_of(place, "task_by_method")
    assert table["variant"] == ["snapkv", "exact"]
    assert {"needle: score", "lines: score", "needle: ratio"} <= set(table)
    charts = {path.name.rsplit("_", 2)[0] for path in (place / "files/media/images").iterdir()}
    assert {"needle-recall_mini-ratio", "needle-recall_mini-heatmap"} <= charts
    logged = [a for m in messages for a in (m.request.log_artifact.artifact, m.artifact)]
    (page,) = [artifact for artifact in logged if artifact.type == "report"]
    assert [entry.path for entry in page.manifest.contents] == ["report.html"]
    summary = updates(messages, "summary")
    assert summary["recall_mini/needle/snapkv/score"] == pytest.approx(0.875)
    config = {**paths.manifest["config"], "logger": {**LOGGER, "mode": "disabled"}}
    none = dataclasses.replace(paths, manifest={**paths.manifest, "config": config})
    assert not log_overview(folder, none)


def test_a_failure_is_one_warning_and_leaves_nothing_behind(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "results", ("exact",))

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


@pytest.mark.parametrize(("mode", "timeout"), [("sometimes", 1.0), ("auto", 0.0), ("auto", "x")])
def test_a_logger_that_cannot_be_is_refused(mode: str, timeout: Any) -> None:
    with pytest.raises(UserError, match="allowed: "):
        check_logger(mode, timeout)


def test_the_real_client_sends_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "results", ("snapkv",))
    with StandIn() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        (run,) = load_runs(folder)
        assert log_runs([run], project="p", timeout_s=60) == 1
        assert server.unknown == []
        name = ids(folder)["snapkv"]
        assert server.runs[name]["displayName"].startswith("recall_mini/needle/snapkv/rate")
        assert server.summary[name]["score"] == pytest.approx(run.records["score"].mean())
        assert any("scores" in path for path in server.uploads)
        assert not wandb_client.not_taken(list((folder / "wandb").glob("offline-run-*")))


@pytest.mark.slow
def test_a_job_shows_its_means_while_it_runs(tmp_path: Path, monkeypatch: Any) -> None:
    job = {"experiment": "demo", "model": "m", "task": "t"}
    names = [
        job | {"method": "exact", "config_hash": "0123abcd"},
        job | {"method": "snapkv", "config_hash": "4567abcd"},
    ]
    logger = {"project": "p", "entity": None, "mode": "auto"}
    with StandIn() as server, ours.Live(tmp_path / "demo", names, logger) as offline:
        offline.log({"exact/score": 1.0})
        assert not (tmp_path / "demo").exists(), "nobody looks at it"
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        with ours.Live(tmp_path / "demo", names, logger) as live:
            end = time.monotonic() + 60
            while len(server.summary) < 2 and time.monotonic() < end:
                live.log({"exact/score": 0.5, "snapkv/score": 0.25})
                time.sleep(0.1)
        exact, snapkv = (server.summary[run_id(*run_names(one))] for one in names)
        assert (exact["score"], snapkv["score"]) == (0.5, 0.25)
        assert server.unknown == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["errors", "silent", "dies"])
def test_a_server_that_fails_loses_nothing_and_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: Fault
) -> None:
    folder = write(tmp_path / "results", ("snapkv",))
    run = load_run(next(folder.glob("*/*/*")))
    with StandIn(fault) as server, caplog.at_level(logging.WARNING):
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        for _ in range(2):
            assert log_runs([run], timeout_s=3) == 1
    (said,) = warnings_of(caplog)
    assert "1 of 1 runs were not sent" in said
    assert "wandb sync" in said
    assert "x" * 40 not in said
    assert wandb_client.not_taken(list((folder / "wandb").glob("offline-run-*")))


def test_a_report_is_built_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="needs kvbench[wandb-report]")
    folder = write(tmp_path / "results")
    assert wandb_report.main([str(folder), "--no-send"]) == 0
    blocks = json.loads((folder / "wandb" / "report.json").read_text())["blocks"]
    text = json.dumps(blocks)
    for part in (
        "needle on recall_mini",
        "| snapkv |",
        "task_by_method",
        "0123abcd",
    ):
        assert part in text, part
    assert wandb_report.main([str(tmp_path / "nowhere")]) == 1
