"""What an offline W&B run holds, and that its failures cost nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from support.report_runs import (
    NEEDLE_META,
    SKILL,
    needle_records,
    write_demo,
    write_run,
    write_sweep,
)
from support.wandb_files import history, isolated, metrics, offline_run, start_of, table_of, updates

from kvbench.records.read import Run, load_runs
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.scores import score_table
from kvbench.report.wandb import media as wandb_media
from kvbench.report.wandb.log import check_logger, comparison_id, log_runs, run_id
from kvbench.report.wandb.media import curves, field_tables, heatmap_figure, memory_lines
from kvbench.report.wandb.overview import log_overview, overview_id

CONF = Path(__file__).parents[2] / "conf" / "logger"


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    isolated(monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on one task, logged."""
    folder = write_demo(tmp_path_factory.mktemp("r"), ("exact", "snapkv"), ("needle",))
    with pytest.MonkeyPatch.context() as patch:
        isolated(patch, folder.parent)
        assert log_runs(load_runs(folder), project="p") == 2
    return folder


def of_method(runs: list[Run], method: str) -> Run:
    return next(run for run in runs if run.manifest["method"] == method)


def test_an_offline_run_holds_everything(experiment: Path) -> None:
    run = of_method(load_runs(experiment), "snapkv")
    folder, messages = offline_run(experiment, run_id(run.manifest))

    start = start_of(messages)
    assert (start.project, start.run_group, start.job_type) == ("p", "demo", "needle")
    assert start.run_id == run_id(run.manifest)
    assert start.display_name == "recall_mini/needle/snapkv rate 0.25/seed0"
    assert set(start.tags) == {"demo", "recall_mini", "needle", "snapkv", "rate 0.25"}
    assert run.manifest["command"] in start.notes

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

    table = table_of(folder, "predictions")
    assert len(table["prediction"]) == len(run.records)
    assert list(table)[:3] == ["example_id", "dataset", "length"]
    assert table["score"] == scores.tolist()
    assert list(folder.glob("files/media/images/heatmap*.png"))
    artifacts = [m.artifact for m in messages if m.WhichOneof("record_type") == "artifact"]
    (records,) = [a for a in artifacts if a.type == "records"]
    assert {entry.path for entry in records.manifest.contents} == {"records.jsonl", "manifest.json"}
    for artifact in artifacts:  # the offline run is whole: what it sends lies inside its folder
        for entry in artifact.manifest.contents:
            assert folder in Path(entry.local_path).parents


def test_scores_by_length_are_a_curve_with_its_own_axis(experiment: Path) -> None:
    run = of_method(load_runs(experiment), "snapkv")
    _, messages = offline_run(experiment, run_id(run.manifest))
    steps = [step for step in history(messages) if "by_length/length" in step]
    assert [step["by_length/length"] for step in steps] == [256, 512, 1024, 2048]
    means = run.records.groupby("length")["score"].mean()
    assert [step["by_length/score"] for step in steps] == pytest.approx(means.tolist())
    assert all(s["by_length/score_low"] <= s["by_length/score"] for s in steps)
    defined = metrics(messages)
    assert defined["by_length/score"].step_metric == "by_length/length"
    assert defined["by_length/score"].summary.none  # the last step's score is no summary
    assert "by_length/score" not in updates(messages, "summary")


def test_heatmaps_are_an_image_and_a_chart_with_the_same_numbers(experiment: Path) -> None:
    run = of_method(load_runs(experiment), "snapkv")
    folder, messages = offline_run(experiment, run_id(run.manifest))
    (file,) = folder.glob("files/media/plotly/heatmap_chart*.plotly.json")
    chart = json.loads(file.read_text())
    (heat,) = chart["data"]
    assert heat["type"] == "heatmap"
    assert heat["x"] == ["256", "512", "1024", "2048"]
    assert heat["y"] == ["0", "25", "50", "75", "100"]
    means = run.records.pivot_table(index="depth", columns="length", values="score") * 100
    assert heat["z"] == means.to_numpy().tolist()
    assert (chart["layout"]["coloraxis"]["cmin"], chart["layout"]["coloraxis"]["cmax"]) == (0, 100)
    logged = history(messages)[0]
    assert logged["heatmap_chart/_type"] == "plotly-file"
    assert logged["heatmap/_type"] == "image-file"


def test_the_comparison_sets_every_method_side_by_side(experiment: Path) -> None:
    runs = load_runs(experiment)
    (group,) = load_experiment(experiment).groups
    folder, messages = offline_run(experiment, comparison_id("demo", group))
    start = start_of(messages)
    assert (start.run_group, start.job_type) == ("demo", "comparison")
    assert start.display_name == "recall_mini/needle/comparison"
    scalars = updates(messages, "summary")
    assert scalars["snapkv/score"] == pytest.approx(score_table(group).rows[1].total.score.value)
    assert {"exact/score", "snapkv/ratio", "snapkv/difference"} <= set(scalars)
    assert set(start.tags) == {"demo", "recall_mini", "needle", "comparison"}
    table = table_of(folder, "predictions")
    exact = of_method(runs, "exact").records.set_index("example_id")
    for i, example in enumerate(table["example_id"]):
        assert table["exact: prediction"][i] == exact.loc[example, "prediction"]
        assert table["exact: score"][i] == exact.loc[example, "score"]
        assert table["exact: ratio"][i] == 1.0
        assert table["snapkv: ratio"][i] < 1.0
    assert table["prompt_tail"][0].startswith("What is")
    assert len(table["answer"]) == len(exact)
    assert table_of(folder, "scores")["method"] == ["exact", "snapkv"]
    assert list(folder.glob("files/media/images/heatmaps_*.png"))
    (file,) = folder.glob("files/media/plotly/heatmap_chart*.plotly.json")
    assert len(json.loads(file.read_text())["data"]) == 2


def test_a_rate_sweep_has_curves_of_score_against_ratio(tmp_path: Path) -> None:
    folder = write_sweep(tmp_path, ("exact", "snapkv"))
    runs = load_runs(folder)
    assert log_runs(runs[:1]) == 1  # the others beside it are in the comparison all the same
    (group,) = load_experiment(folder).groups
    lines = memory_lines(group, score_table(group))
    ratios = [ratio for ratio, _ in lines["snapkv"]]
    assert ratios == sorted(ratios)
    assert len(ratios) == 3
    place, messages = offline_run(folder, comparison_id("sweep", group))
    table = table_of(place, "score_against_ratio_table")
    drawn = [
        (x, y)
        for x, y, name in zip(table["step"], table["lineVal"], table["lineKey"], strict=True)
        if name == "snapkv"
    ]
    assert drawn == [(ratio, 100 * score) for ratio, score in lines["snapkv"]]
    assert list(place.glob("files/media/images/score_against_ratio_figure*.png"))
    config = updates(messages, "config")
    assert any("visualize/score_against_ratio" in key for key in config)


def test_error_against_memory_within_one_run(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("uniform", "balancekv"), ("layer_error",))
    (group,) = load_experiment(folder).groups
    variant = next(variant for variant in group.variants if variant.method == "balancekv")
    (curve,) = curves(group, field_tables(group), variant)
    assert (curve.section, curve.x) == ("by_rate", "ratio")
    mine = group.records[group.records["variant"] == variant.label].groupby("ratio")["score"].mean()
    assert [point["ratio"] for point in curve.points] == mine.index.tolist()
    assert [point["score"] for point in curve.points] == pytest.approx(mine.tolist())
    lines = memory_lines(group, score_table(group))
    assert lines["balancekv"] == [(p["ratio"], p["score"]) for p in curve.points]
    runs = load_runs(folder)
    log_runs(runs)
    place, _ = offline_run(folder, run_id(runs[0].manifest))
    table = table_of(place, "records")
    assert "prediction" not in table
    assert table["score"] == runs[0].records["score"].head(500).tolist()
    place, _ = offline_run(folder, comparison_id("demo", group))
    assert list(place.glob("files/media/images/error_against_memory_figure*.png"))
    table = table_of(place, "score_against_ratio_table")
    assert set(table["lineKey"]) == {"uniform", "balancekv"}


def test_logging_again_replaces_and_the_report_ignores_it(experiment: Path) -> None:
    runs = load_runs(experiment)
    log_runs(runs[:1])
    assert len(list((experiment / "wandb").glob(f"*-{run_id(runs[0].manifest)}"))) == 1
    (group,) = load_experiment(experiment).groups
    assert len(list((experiment / "wandb").glob(f"*-{comparison_id('demo', group)}"))) == 1
    assert len(load_experiment(experiment).runs) == 2


def test_long_tables_are_capped_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_media, "MAX_PREDICTIONS", 7)
    write_run(tmp_path, task="needle", records=needle_records("exact"), task_meta=NEEDLE_META)
    (run,) = load_runs(tmp_path / "demo")
    log_runs([run])
    folder, messages = offline_run(tmp_path / "demo", run_id(run.manifest))
    assert len(table_of(folder, "predictions")["score"]) == 7
    note = updates(messages, "summary")["predictions_note"]
    assert note == f"7 of 40 are shown; all are in the artifact records-{run_id(run.manifest)}"
    assert note in start_of(messages).notes
    assert len(list((tmp_path / "demo" / "wandb").glob("offline-run-*"))) == 1  # nothing to compare


def test_failed_examples_are_tagged_and_do_not_stop_a_chart(tmp_path: Path) -> None:
    records = needle_records("h2o")
    failed = {"status": "oom", "score": None, "prediction": None, "error": "out of memory"}
    some = [record | failed if i < 2 else record for i, record in enumerate(records)]
    all_failed = [record | failed for record in records]
    for method, made in (("exact", needle_records("exact")), ("h2o", some), ("subgen", all_failed)):
        write_run(tmp_path, task="needle", method=method, records=made, task_meta=NEEDLE_META)
    folder = tmp_path / "demo"
    runs = load_runs(folder)
    assert log_runs(runs) == 3
    place, messages = offline_run(folder, run_id(of_method(runs, "h2o").manifest))
    table = table_of(place, "predictions")
    assert (table["status"][0], table["error"][0], table["score"][0]) == (
        "oom",
        "out of memory",
        None,
    )
    assert "failures" in start_of(messages).tags
    assert updates(messages, "summary")["failures"] == {"oom": 2}
    place, messages = offline_run(folder, run_id(of_method(runs, "subgen").manifest))
    assert updates(messages, "summary")["failures"] == {"oom": 40}
    assert not list(place.glob("files/media/plotly/*"))
    (group,) = load_experiment(folder).groups
    place, _ = offline_run(folder, comparison_id("demo", group))
    table = table_of(place, "predictions")
    assert table["subgen: prediction"][0] == "(oom) out of memory"
    (file,) = place.glob("files/media/plotly/*")
    heat = json.loads(file.read_text())["data"]
    assert len(heat) == 2
    assert heat[1]["z"][0][0] is None  # both needles of that cell failed


def test_many_methods_share_one_scale(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, tuple(SKILL), ("needle",))
    (group,) = load_experiment(folder).groups
    spec: Any = group.meta.figure("heatmap")
    assert len(heatmap_figure(group, group.variants * 13, spec).data) == 104  # a large sweep
    figure = heatmap_figure(group, group.variants, spec)
    assert len(figure.data) == 8
    assert {trace.coloraxis for trace in figure.data} == {"coloraxis"}
    titles = [annotation.text for annotation in figure.layout.annotations]
    assert [variant.label for variant in group.variants] == titles[:8]


def test_a_failure_is_one_warning(
    experiment: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    import wandb

    def refuse(**_options: object) -> None:
        raise OSError("no service\nand a second line")

    runs = load_runs(experiment)
    monkeypatch.setattr(wandb, "init", refuse)
    with caplog.at_level(logging.WARNING):
        assert log_runs(runs[:1]) == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"W&B: {runs[0].folder.name} was not logged: no service",
        "W&B: the comparison of needle on recall_mini was not logged: no service",
    ]
    assert capfd.readouterr() == ("", "")


def test_a_run_that_fails_while_it_is_logged_leaves_no_half_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import wandb

    folder = write_demo(tmp_path, ("exact",), ("needle",))

    def full(*_: object, **__: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(wandb.Run, "log_artifact", full)
    with caplog.at_level(logging.WARNING):
        assert log_runs(load_runs(folder)) == 0
    assert "was not logged: No space left on device" in caplog.text
    assert not list((folder / "wandb").glob("offline-run-*"))


@pytest.mark.slow
def test_processes_that_log_one_experiment_at_once_leave_one_copy_of_each_run(
    tmp_path: Path,
) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv"), ("needle",))
    script = (
        "import sys\nfrom pathlib import Path\nfrom kvbench.report.wandb.log import log_runs\n"
        "from kvbench.records.read import load_runs\n"
        "assert log_runs(load_runs(Path(sys.argv[1]))) == 2\n"
    )
    command = [sys.executable, "-c", script, str(folder)]
    for process in [subprocess.Popen(command) for _ in range(3)]:
        assert process.wait() == 0
    runs = load_runs(folder)
    assert len(list((folder / "wandb").glob("offline-run-*"))) == 3
    for run in runs:
        _, messages = offline_run(folder, run_id(run.manifest))
        assert updates(messages, "summary")["ratio"] == pytest.approx(run.records["ratio"].mean())


def test_a_run_of_the_users_own_goes_on(experiment: Path, tmp_path: Path) -> None:
    import wandb

    mine = wandb.init(mode="offline", dir=str(tmp_path), project="mine", settings={"silent": True})
    try:
        assert log_runs(load_runs(experiment)[:1]) == 1
        assert wandb.run is mine
        mine.log({"loss": 1.0})
    finally:
        mine.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    _, messages = offline_run(tmp_path, folder.name.split("-")[-1])
    assert history(messages)[0]["loss"] == 1.0


def test_disabled_logs_nothing_and_wrong_options_are_refused(
    experiment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert log_runs(load_runs(experiment), mode="disabled") == 0
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert log_runs(load_runs(experiment)) == 0
    with pytest.raises(ValueError, match=r"logger\.mode is 'on'; allowed: auto, online"):
        log_runs([], mode="on")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logger\.timeout_s is 0; allowed: a positive number"):
        check_logger("auto", 0)


WANDB = {"name": "wandb", "project": "kvbench", "entity": None, "mode": "auto", "timeout_s": 120}


def test_the_configs_name_what_the_function_takes() -> None:
    config = OmegaConf.load(CONF / "wandb.yaml")
    assert OmegaConf.to_container(config) == WANDB
    for name in ("wandb", "none"):
        assert (CONF / f"{name}.yaml").read_text().startswith("# @package logger\n")


def test_an_experiment_has_an_overview_of_task_by_method(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv", "uniform"))
    paths = build_report(folder)
    manifest = {**paths.manifest, "config": {"logger": WANDB | {"mode": "offline"}}}
    assert log_overview(folder, paths.scores, manifest)
    assert log_overview(folder, paths.scores, manifest)  # again: in the place of the first
    place, messages = offline_run(folder, overview_id("demo"))
    start = start_of(messages)
    assert (start.display_name, start.run_group, start.job_type) == (
        "demo/overview",
        "demo",
        "overview",
    )
    tasks = [table.task for table in paths.scores]
    assert len(tasks) > 1
    wide = table_of(place, "task_by_method")
    assert sorted(wide["method"]) == ["exact", "snapkv", "uniform"]
    summary = updates(messages, "summary")
    for table in paths.scores:
        for i, name in enumerate(wide["method"]):
            row = next((row for row in table.rows if row.variant.label == name), None)
            score = None if row is None else pytest.approx(row.total.score.value)
            assert wide[f"{table.task}: score"][i] == score
            if row is not None:
                assert wide[f"{table.task}: ratio"][i] == pytest.approx(row.ratio)
                assert summary[f"{table.task}/{name}/score"] == score
    long = table_of(place, "scores")
    assert len(long["score"]) == sum(len(table.rows) for table in paths.scores)
    for config in ({"logger": {"name": "none"}}, {"logger": WANDB | {"mode": "disabled"}}, {}):
        assert not log_overview(folder, paths.scores, {**paths.manifest, "config": config})
