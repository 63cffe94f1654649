"""The W&B report of an experiment: built without a network, published to the stand-in server."""

from __future__ import annotations

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import SKILL, lines_records, write_demo, write_run, write_sweep
from support.wandb_files import isolated
from support.wandb_server import ENTITY, StandIn

from kvbench.report.experiment import load_experiment
from kvbench.report.figures.style import style_of
from kvbench.report.wandb import report as wandb_report
from kvbench.report.wandb.log import run_id

KEY = "fedcba9876543210" * 2 + "fedcba98"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    import wandb

    isolated(monkeypatch, tmp_path)
    wandb.teardown()
    yield
    wandb.teardown()


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("r"))


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


def blocks_of(spec: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [block for block in spec["spec"]["blocks"] if block["type"] == kind]


def grid_after(spec: dict[str, Any], heading: str) -> dict[str, Any]:
    """The first panel grid below a heading."""
    blocks = spec["spec"]["blocks"]
    at = next(
        i
        for i, block in enumerate(blocks)
        if block["type"] == "heading" and block["children"][0]["text"] == heading
    )
    grid = next(block for block in blocks[at:] if block["type"] == "panel-grid")
    metadata: dict[str, Any] = grid["metadata"]
    return metadata


def panels_of(grid: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    panels = grid["panelBankSectionConfig"]["panels"]
    return [panel["config"] for panel in panels if panel["viewType"] == kind]


@pytest.mark.usefixtures("no_network")
def test_building_needs_no_network_and_holds_every_part(
    experiment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wandb_report.main([str(experiment)]) == 0
    path = experiment / "wandb" / "report.json"
    out = capsys.readouterr().out
    assert out == f"{path}: built, not published; set WANDB_API_KEY (or `wandb login` and --send)\n"
    spec = json.loads(path.read_text())
    assert spec["displayName"] == "kvbench: demo"
    headings = [block["children"][0]["text"] for block in blocks_of(spec, "heading")]
    for task in ("longeval_lines", "needle", "throughput", "layer_error"):
        assert f"{task} on recall_mini" in headings

    grid = grid_after(spec, "needle on recall_mini")
    sets = {runs["name"]: runs for runs in grid["runSets"]}
    assert list(sets) == list(SKILL)
    asked = {f["key"]["name"]: f["value"] for f in sets["snapkv"]["filters"]["filters"]}
    assert asked == {
        "experiment": "demo",
        "model": "recall_mini",
        "task": "needle",
        "method": "snapkv",
    }
    runs = load_experiment(experiment).runs
    mine = {run.manifest["method"]: run for run in runs if run.manifest["task"] == "needle"}
    colors = grid["customRunColors"]
    assert colors[run_id(mine["snapkv"].manifest)] == style_of("snapkv").color
    media = [key for panel in panels_of(grid, "Media Browser") for key in panel["mediaKeys"]]
    assert media == ["heatmap", "heatmap_chart"]
    (scatter,) = panels_of(grid, "Scatter Plot")
    assert (scatter["xAxis"], scatter["yAxis"]) == ("summary:ratio", "summary:score")
    (line,) = panels_of(grid, "Run History Line Plot")
    assert (line["xAxis"], line["metrics"]) == ("by_length/length", ["by_length/score"])

    bars = panels_of(grid_after(spec, "throughput on recall_mini"), "Bar Chart")
    assert ["decode_tokens_per_s"] in [bar["metrics"] for bar in bars]
    side = grid_after(spec, "needle on recall_mini: all methods side by side")
    assert panels_of(side, "Media Browser")[0]["mediaKeys"] == ["heatmaps"]

    side = grid_after(spec, "layer_error on recall_mini: all methods side by side")
    assert panels_of(side, "Media Browser")[0]["mediaKeys"] == ["error_against_memory_figure"]

    tables = [block["content"] for block in blocks_of(spec, "markdown-block")]
    assert any("| snapkv" in text and "Δ exact" in text for text in tables)
    code = json.dumps(blocks_of(spec, "code-block"))
    assert runs[0].manifest["command"] in code
    assert "torch 2.13.0" in code


@pytest.mark.usefixtures("no_network")
def test_the_library_reads_its_own_report_back(experiment: Path) -> None:
    import wandb_workspaces.reports.v2 as wr
    from wandb_workspaces.reports.v2 import internal

    report = wandb_report.build_wandb_report(load_experiment(experiment), "p", "me")
    assert isinstance(report.blocks[0], wr.TableOfContents)
    dumped = report._to_model().model_dump(by_alias=True)
    again = wr.Report._from_model(internal.ReportViewspec.model_validate(dumped))
    assert [type(block) for block in again.blocks] == [type(block) for block in report.blocks]
    grids = [block for block in again.blocks if isinstance(block, wr.PanelGrid)]
    assert [runs.name for runs in grids[0].runsets] == list(SKILL)
    assert "method" in grids[0].runsets[3].filters
    assert "snapkv" in grids[0].runsets[3].filters


@pytest.mark.usefixtures("no_network")
def test_published_numbers_stand_beside_ours(tmp_path: Path) -> None:
    paper = tmp_path / "paper"
    paper.mkdir()
    (paper / "made_up.csv").write_text("method,longeval_lines\nexact,91.5\nsnapkv,64.25\n")
    for method in ("exact", "snapkv"):
        write_run(
            tmp_path,
            task="longeval_lines",
            method=method,
            records=lines_records(method),
            options={"paper_table": "made_up"},
        )
    assert wandb_report.main([str(tmp_path / "demo")]) == 0
    spec = json.loads((tmp_path / "demo" / "wandb" / "report.json").read_text())
    tables = [block["content"] for block in blocks_of(spec, "markdown-block")]
    (beside,) = [text for text in tables if "made_up" in text]
    assert "64.25" in beside
    assert "published" in beside


@pytest.mark.usefixtures("no_network")
def test_a_sweep_shows_its_curve(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, ("exact", "snapkv"))
    assert wandb_report.main([str(folder)]) == 0
    spec = json.loads((folder / "wandb" / "report.json").read_text())
    side = grid_after(spec, "longeval_lines on recall_mini: all methods side by side")
    assert panels_of(side, "Media Browser")[0]["mediaKeys"] == ["score_against_ratio_figure"]


def test_publishing_logs_the_runs_and_publishing_again_updates_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("throughput",))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with StandIn() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        for _ in range(2):
            assert wandb_report.main([str(folder), "--project", "p"]) == 0, (
                capsys.readouterr(),
                server.unknown,
            )
        assert server.unknown == []
    assert len(server.runs) == 3
    first, second = server.views
    assert (first["entityName"], first["projectName"]) == (ENTITY, "p")
    assert first["displayName"] == "kvbench: demo"
    assert first["id"] is None
    assert second["id"] == "view-0"
    sent = json.loads(first["spec"])
    assert [block["type"] for block in sent["blocks"]].count("panel-grid") == 2
    assert server.projects == {"p"}
    out = capsys.readouterr().out
    assert f"/{ENTITY}/p/reports/kvbench:-demo--view-0" in out
    published = json.loads((folder / "wandb" / "report-published.json").read_text())
    assert published["id"] == "view-0"
    assert KEY not in json.dumps(published) + out


def test_a_server_that_fails_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_demo(tmp_path, ("exact",), ("throughput",))
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    with StandIn("errors") as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert wandb_report.main([str(folder)]) == 1
    err = capsys.readouterr().err.splitlines()
    assert err == [f"error: the server {server.url} answers 500"]
    assert (folder / "wandb" / "report.json").exists()
    assert wandb_report.main([str(tmp_path / "nothing")]) == 1
    assert "no results in" in capsys.readouterr().err
