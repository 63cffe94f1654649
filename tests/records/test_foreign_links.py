"""A results folder from elsewhere makes nobody write, remove or wait for anything outside it: not
through links, pipes, or names in its own lists of files."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest
from support.cli_cases import ended
from support.jobs import make_job
from support.report_runs import LINES_META, write_run
from support.stores import fill

from kvbench.methods import build_method
from kvbench.records.durable import check_inside, make_folder, replace
from kvbench.records.read import StoreError, load_runs
from kvbench.report.__main__ import main
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.wandb.log import log_runs
from kvbench.run.runner import run_job

PRECIOUS = b"what a person wrote\n"


def victims(root: Path) -> Path:
    """A folder outside the results, with files and a folder in it."""
    folder = root / "victim"
    (folder / "inner").mkdir(parents=True)
    for name in ("thesis.doc", "thesis.csv", "records.jsonl", "manifest.json", "inner/deep.png"):
        (folder / name).write_bytes(PRECIOUS)
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything below a folder, links not followed."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def experiment(root: Path) -> Path:
    """Two runs without a score, so that there is no figure to wait for."""
    for method in ("exact", "snapkv"):
        result = {"status": "error", "error": "no score"}
        records = [{"example_id": f"e{i}", "num_lines": i, **result} for i in range(3)]
        write_run(root, task="t", method=method, records=records, task_meta=LINES_META)
    return root / "demo"


@contextmanager
def no_waiting(seconds: int = 60) -> Iterator[None]:
    """Whoever opens a pipe waits for its other end: not here."""

    def over(_signal: int, _frame: object) -> None:
        raise AssertionError("somebody waits")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("target", ["thesis.doc", "inner", "nothing yet"])
def test_a_report_changes_nothing_behind_a_link(tmp_path: Path, target: str) -> None:
    """A link in the place of a file is replaced; one in the place of a folder refused."""
    victim, folder = victims(tmp_path), experiment(tmp_path / "results")
    before = contents(victim)
    (folder / "tables").mkdir()
    for name in ("report.html", ".report.html.new", ".report-files", "tables/t-recall_mini.csv"):
        (folder / name).symlink_to(victim / target)
    build_report(folder)
    assert contents(victim) == before
    (folder / "figures").symlink_to(victim / target)
    with pytest.raises(StoreError, match="leads out of") as error:
        build_report(folder, for_print=True)
    assert "\n" not in str(error.value)
    assert contents(victim) == before


@pytest.mark.parametrize("listed", [list, dict])
def test_a_list_of_files_from_elsewhere_removes_nothing(tmp_path: Path, listed: type) -> None:
    """Neither through a link, nor what a person put beside the tables, nor above the folder."""
    victim, folder = victims(tmp_path), experiment(tmp_path / "results")
    (folder / "tables").mkdir()
    (folder / "tables" / "thesis.csv").write_bytes(PRECIOUS)
    (folder / "tables" / "thesis.doc").write_bytes(PRECIOUS)
    (folder / "tables" / "link.csv").symlink_to(victim / "thesis.csv")
    (folder / "tables" / "up").symlink_to(victim)
    digest = sha256(PRECIOUS).hexdigest()
    names = {
        "tables/thesis.csv": "0" * 64,
        "tables/thesis.doc": digest,
        "tables/link.csv": digest,
        "tables/up/thesis.csv": digest,
        "tables/../../../victim/thesis.csv": digest,
        "../../victim/thesis.csv": digest,
        str(victim / "thesis.csv"): digest,
        "tables/\0.csv": digest,
        "tables/\ud800.csv": digest,
        "tables/" + "x" * 5000 + ".csv": digest,
    }
    (folder / ".report-files").write_text(json.dumps(names if listed is dict else list(names)))
    before = contents(victim)
    build_report(folder)
    assert contents(victim) == before
    left = {path.name for path in (folder / "tables").iterdir()}
    assert {"thesis.csv", "thesis.doc", "link.csv", "up"} <= left


def test_a_job_writes_through_no_link(tmp_path: Path) -> None:
    """Each folder on the way to the records, and each file of a run."""
    run_job(make_job(tmp_path / "probe", {"exact": build_method("exact")}, limit=1))
    (run,) = load_runs(tmp_path / "probe" / "e")
    inner = run.folder.relative_to(tmp_path / "probe")
    above = [Path(*inner.parts[: i + 1]) for i in range(len(inner.parts))]
    files = ("records.jsonl", "records-1of2.jsonl", "manifest.json", ".manifest.json.new")
    victim = victims(tmp_path)
    before = contents(victim)
    job = make_job(tmp_path / "results", {"exact": build_method("exact")}, limit=1)
    for name in [*above, *(inner / name for name in (*files, ".holder", ".lock"))]:
        for target in ("thesis.doc", "inner", "nothing yet"):
            link = tmp_path / "results" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # a lock of the job before
            link.symlink_to(victim / target)
            with pytest.raises(StoreError) as error:
                run_job(job)
            assert "\n" not in str(error.value)
            assert contents(victim) == before, (name, target)
            link.unlink()
    assert run_job(job).written == 1


def test_the_results_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    """To a scratch disk, say: the user named it."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "results").symlink_to(tmp_path / "disk")
    methods = {"exact": build_method("exact")}
    assert run_job(make_job(tmp_path / "results", methods, limit=1)).written == 1
    paths = build_report(tmp_path / "results" / "e")
    assert paths.page.resolve() == tmp_path / "disk" / "e" / "report.html"
    (tmp_path / "shown").symlink_to(tmp_path / "disk" / "e")
    assert build_report(tmp_path / "shown").page.exists()


MAKERS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path, kind: str) -> None:
    folder = experiment(tmp_path / "results")
    run = next(folder.glob("*/*/exact-*"))
    for name in ("records.jsonl", "manifest.json", "records-1of2.jsonl"):
        path = run / name
        kept = path.read_bytes() if path.exists() else None
        path.unlink(missing_ok=True)
        MAKERS[kind](path)
        with no_waiting():
            found = ended([str(folder)], main=main)
        assert found.problem() is None, (name, found)
        assert found.status == 1
        assert f"{name}: " in found.err, name
        if name != "manifest.json":
            with no_waiting(), pytest.raises(StoreError, match=name):
                fill(run, ["z"])
        path.rmdir() if kind == "folder" else path.unlink()
        if kept is not None:
            path.write_bytes(kept)


def test_wandb_writes_through_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim, folder = victims(tmp_path), experiment(tmp_path / "results")
    before = contents(victim)
    (folder / "wandb").symlink_to(victim)
    assert log_runs(load_experiment(folder).runs, mode="offline") == 0
    assert "leads out of" in caplog.text
    assert contents(victim) == before


def test_a_sweep_elsewhere_writes_through_no_link(tmp_path: Path) -> None:
    """Hydra and the launchers leave scripts and logs below the experiment."""
    victim = victims(tmp_path)
    before = contents(victim)
    (tmp_path / "runs").mkdir()
    words = ["-m", "launcher=slurm", "logger=none", "model=tiny_random", "task.num_examples=1"]
    for name in ("default", "default/.submitit"):
        link = tmp_path / "runs" / name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(victim)
        found = ended([*words, "task=longeval_lines", "seed=0,1"], folder=tmp_path)
        assert found.status == 1
        assert "leads out of" in found.err
        assert found.problem() is None, found
        assert contents(victim) == before
        link.unlink()


def test_files_are_made_anew_and_folders_stay_inside(tmp_path: Path) -> None:
    victim = victims(tmp_path)
    path = tmp_path / "a" / "b" / "file"
    make_folder(path.parent, tmp_path)
    replace(path, b"1")
    path.with_name(".file.new").symlink_to(victim / "thesis.doc")
    replace(path, b"2", sync=False)
    assert sorted(p.name for p in path.parent.iterdir()) == ["file"]
    assert path.read_bytes() == b"2"
    (tmp_path / "a" / "c").symlink_to(victim)
    for outside in ("a/c", "a/c/d", "a/b/../../victim"):
        with pytest.raises(OSError, match="leads out of"):
            check_inside(tmp_path / outside, tmp_path / "a")
    assert (victim / "thesis.doc").read_bytes() == PRECIOUS
