"""What an offline W&B run holds, and that its failures cost nothing."""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from report_runs import NEEDLE_META, needle_records, write_demo, write_run

from kvbench.report import wandb_log
from kvbench.report.data import load_experiment
from kvbench.report.wandb_log import log_runs, run_id
from kvbench.store import load_runs

CONF = Path(__file__).parents[1] / "conf" / "logger"


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No key, and nothing outside the test's folder."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_DATA_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def read_offline(path: Path) -> Iterator[Any]:
    """The protocol messages of a .wandb file: a LevelDB log after a 7-byte header."""
    from wandb.proto import wandb_internal_pb2 as messages

    content, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if 32768 - at % 32768 < 7:  # too short for a header: padding up to the next block
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if kind == 0:
            break
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # the whole message, or its last part
            yield messages.Record.FromString(parts)  # type: ignore[attr-defined]
            parts = b""


def offline_run(experiment: Path, manifest: dict[str, Any]) -> tuple[Path, list[Any]]:
    """A run's folder and its messages, once W&B's own process has written the last one."""
    (folder,) = (experiment / "wandb").glob(f"offline-run-*-{run_id(manifest)}")
    (file,) = folder.glob("*.wandb")
    for _ in range(200):
        messages = list(read_offline(file))
        if messages and messages[-1].WhichOneof("record_type") == "exit":
            return folder, messages
        time.sleep(0.1)
    raise AssertionError(f"{file} has no last message")


def updates(messages: list[Any], kind: str) -> dict[str, Any]:
    """Config or summary, as the messages leave it."""
    found: dict[str, Any] = {}
    for message in messages:
        sources = {"config": [message.config], "summary": [message.summary]}[kind]
        if message.WhichOneof("record_type") == "run" and kind == "config":
            sources.append(message.run.config)
        for source in sources:
            for item in source.update:
                key = item.key or "/".join(item.nested_key)
                found[key] = json.loads(item.value_json)
    return found


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("r"), ("exact", "snapkv"), ("needle",))


def test_an_offline_run_holds_everything(experiment: Path) -> None:
    runs = load_runs(experiment)
    assert log_runs(runs, project="p") == 2
    run = next(run for run in runs if run.manifest["method"] == "snapkv")
    folder, messages = offline_run(experiment, run.manifest)

    (start,) = [m.run for m in messages if m.WhichOneof("record_type") == "run"]
    assert (start.project, start.run_group, start.job_type) == ("p", "demo", "needle")
    assert start.run_id == run_id(run.manifest)
    assert start.display_name == "needle/snapkv/seed0"
    assert set(start.tags) == {"demo", "recall_mini", "needle", "snapkv", "rate 0.25"}

    config = updates(messages, "config")
    assert config["method"] == "snapkv"
    assert config["config_hash"] == run.manifest["config_hash"]
    assert config["run"]["budget"] == {"rate": 0.25, "sink": 32, "window": 32}
    assert config["versions"]["torch"] == "2.13.0"

    summary = updates(messages, "summary")
    scores = run.records["score"]
    assert summary["needle/score"] == pytest.approx(scores.mean())
    assert summary["needle/score_low"] < summary["score"] < summary["needle/score_high"]
    assert summary["needle/difference"] < 0
    assert summary["baseline"] == "exact"
    assert summary["ratio"] == pytest.approx(run.records["ratio"].mean())
    assert "predictions_note" not in summary

    table = json.loads(next(folder.glob("files/media/table/predictions*.json")).read_text())
    assert len(table["data"]) == len(run.records)
    assert table["columns"][:3] == ["example_id", "dataset", "length"]
    assert list(folder.glob("files/media/images/heatmap*.png"))
    artifacts = [m.artifact for m in messages if m.WhichOneof("record_type") == "artifact"]
    (records,) = [a for a in artifacts if a.type == "records"]
    assert {entry.path for entry in records.manifest.contents} == {"records.jsonl", "manifest.json"}
    for artifact in artifacts:  # the offline run is whole: what it sends lies inside its folder
        for entry in artifact.manifest.contents:
            assert folder in Path(entry.local_path).parents


def test_logging_again_replaces_and_the_report_ignores_it(experiment: Path) -> None:
    runs = load_runs(experiment)
    for _ in range(2):
        log_runs(runs[:1])
    assert len(list((experiment / "wandb").glob(f"*-{run_id(runs[0].manifest)}"))) == 1
    assert len(load_experiment(experiment).runs) == 2


def test_long_tables_are_capped_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_log, "MAX_PREDICTIONS", 7)
    write_run(
        tmp_path,
        task="needle",
        method="exact",
        records=needle_records("exact"),
        task_meta=NEEDLE_META,
    )
    (run,) = load_runs(tmp_path / "demo")
    log_runs([run])
    folder, messages = offline_run(tmp_path / "demo", run.manifest)
    table = json.loads(next(folder.glob("files/media/table/predictions*.json")).read_text())
    assert len(table["data"]) == 7
    assert updates(messages, "summary")["predictions_note"].startswith("the first 7 of 40")


def test_a_failure_is_one_warning(
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import wandb

    def refuse(**_options: object) -> None:
        raise OSError("no service\nand a second line")

    monkeypatch.setattr(wandb, "init", refuse)
    runs = load_runs(experiment)
    with caplog.at_level(logging.WARNING):
        assert log_runs(runs[:1]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"W&B: {runs[0].folder.name} was not logged: no service"
    ]
    assert capfd.readouterr() == ("", "")


def test_a_silent_server_is_asked_once(
    experiment: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried = []

    def unreachable(*_arguments: object, online: bool) -> None:
        tried.append(online)
        if online:
            raise ConnectionError("no answer")

    monkeypatch.setattr(wandb_log, "_log_run", unreachable)
    monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
    with caplog.at_level(logging.WARNING):
        assert log_runs(load_runs(experiment)) == 2
    assert tried == [True, False, False]
    assert len(caplog.records) == 1
    assert "going offline" in caplog.text


def test_disabled_logs_nothing_and_unknown_modes_are_refused(experiment: Path) -> None:
    assert log_runs(load_runs(experiment), mode="disabled") == 0
    with pytest.raises(ValueError, match=r"logger\.mode is 'on'; allowed: auto, online"):
        log_runs([], mode="on")  # type: ignore[arg-type]


def test_the_configs_name_what_the_function_takes() -> None:
    config = OmegaConf.load(CONF / "wandb.yaml")
    assert OmegaConf.to_container(config) == {
        "name": "wandb",
        "project": "kvbench",
        "entity": None,
        "mode": "auto",
    }
    for name in ("wandb", "none"):
        assert (CONF / f"{name}.yaml").read_text().startswith("# @package logger\n")
