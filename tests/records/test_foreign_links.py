"""A results folder from elsewhere makes nobody write, remove or wait for anything outside it: not
through symbolic links, hard links, pipes, or names in its own lists of files."""

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
from support.stores import fill, make_record

from kvbench.methods import build_method
from kvbench.records.durable import check_inside, make_folder, remove, replace
from kvbench.records.read import MANIFEST, StoreError, load_runs
from kvbench.records.store import RecordStore, run_folder, write_manifest
from kvbench.report.__main__ import main
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.wandb.log import log_runs
from kvbench.run.runner import run_job

PRECIOUS = b"what a person wrote\n"


def victims(root: Path) -> Path:
    """A folder outside the results, with a file and a folder in it."""
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


def experiment(root: Path, *, drawn: bool = False) -> Path:
    """Two runs; unless `drawn`, without a score, so that there is no figure to wait for."""
    for method in ("exact", "snapkv"):
        result = {"score": 1.0} if drawn else {"status": "error", "error": "no score"}
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


WRITTEN = ["report.html", ".report.html.new", ".report-files", "..report-files.new"]
TABLES = [
    "tables/t-recall_mini.csv",
    "tables/.t-recall_mini.csv.new",
    "tables/.t-recall_mini.md.new",
]
FIGURES = ["figures/t-recall_mini-difference.png", "figures/.t-recall_mini-difference.pdf.new"]


@pytest.mark.parametrize("name", [*WRITTEN, *TABLES, *FIGURES, "tables", "figures"])
def test_a_report_writes_through_no_link(tmp_path: Path, name: str) -> None:
    victim = victims(tmp_path)
    folder = experiment(tmp_path / "results", drawn=name in FIGURES)
    before = contents(victim)
    link = folder / name
    link.parent.mkdir(exist_ok=True)
    for target in ("thesis.doc", "inner", "nothing yet")[: 1 if name in FIGURES else 3]:
        link.symlink_to(victim / target)
        with pytest.raises(StoreError, match="is a symbolic link; below a results") as error:
            build_report(folder, for_print=True)
        assert "\n" not in str(error.value)
        assert link.name in str(error.value)
        assert contents(victim) == before
        link.unlink()


def test_the_names_above_are_those_that_a_report_writes(tmp_path: Path) -> None:
    folder = experiment(tmp_path, drawn=True)
    build_report(folder, for_print=True)
    for name in ("report.html", ".report-files", TABLES[0], FIGURES[0]):
        assert (folder / name).is_file(), name
    assert not list(folder.rglob("*.new"))


@pytest.mark.parametrize("listed", [list, dict])
def test_a_list_of_files_from_elsewhere_removes_nothing(tmp_path: Path, listed: type) -> None:
    """Neither through a link, nor what a person put beside the tables, nor above the folder."""
    victim, folder = victims(tmp_path), experiment(tmp_path / "results")
    (folder / "tables").mkdir()
    (folder / "tables" / "thesis.csv").write_bytes(PRECIOUS)
    (folder / "tables" / "thesis.doc").write_bytes(PRECIOUS)
    (folder / "tables" / "link.csv").symlink_to(victim / "thesis.csv")
    (folder / "tables" / "folder.csv").symlink_to(victim / "inner")
    (folder / "tables" / "up").symlink_to(victim)
    digest = sha256(PRECIOUS).hexdigest()
    names = {
        "tables/thesis.csv": "0" * 64,
        "tables/thesis.doc": digest,
        "tables/link.csv": digest,
        "tables/folder.csv": digest,
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
    assert {"thesis.csv", "thesis.doc", "link.csv", "folder.csv", "up"} <= left


def test_a_report_removes_its_own_files_and_only_as_it_wrote_them(tmp_path: Path) -> None:
    folder = experiment(tmp_path)
    build_report(folder)
    made = json.loads((folder / ".report-files").read_text())
    stale, changed = folder / "tables" / "old.csv", folder / "tables" / "notes.csv"
    for path in (stale, changed):
        path.write_bytes(PRECIOUS)
        made[f"tables/{path.name}"] = sha256(PRECIOUS).hexdigest()
    changed.write_bytes(PRECIOUS + b"and more")
    (folder / ".report-files").write_text(json.dumps(made))
    build_report(folder)
    assert not stale.exists()
    assert changed.read_bytes() == PRECIOUS + b"and more"


def run_folders(root: Path) -> tuple[Path, list[str]]:
    """Where the job below keeps its records, and the names on the way."""
    run_job(make_job(root / "probe", {"exact": build_method("exact")}, limit=1))
    (run,) = load_runs(root / "probe" / "e")
    inner = run.folder.relative_to(root / "probe")
    return inner, [str(Path(*inner.parts[: i + 1])) for i in range(len(inner.parts))]


def test_a_job_writes_through_no_link(tmp_path: Path) -> None:
    """Each folder on the way to the records, and each file of a run."""
    inner, above = run_folders(tmp_path)
    names = ["records.jsonl", "manifest.json", ".manifest.json.new", ".holder", "..holder.new"]
    names += [".lock", ".lock-manifest"]
    victim = victims(tmp_path)
    before = contents(victim)
    job = make_job(tmp_path / "results", {"exact": build_method("exact")}, limit=1)
    for name in [*above, *(str(inner / name) for name in names)]:
        for target in ("thesis.doc", "inner", "nothing yet"):
            link = tmp_path / "results" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.unlink(missing_ok=True)  # a lock of the job before
            link.symlink_to(victim / target)
            with pytest.raises((StoreError, OSError)) as error:
                run_job(job)
            refused = (
                "symbolic link",
                "Is a directory",
                "not JSON",
            )  # the last where it is read first
            assert any(words in str(error.value) for words in refused), (name, target)
            assert "\n" not in str(error.value)
            assert contents(victim) == before, (name, target)
            link.unlink()
    assert run_job(job).written == 1


def test_records_that_are_dropped_are_written_through_no_link(tmp_path: Path) -> None:
    victim, folder = victims(tmp_path), tmp_path / "run"
    with RecordStore(folder) as records:
        records.append(make_record("a", status="oom"))
        (folder / ".records.jsonl.new").symlink_to(victim / "thesis.doc")
        with pytest.raises(StoreError, match=r"\.records\.jsonl\.new: is a symbolic link"):
            records.drop_failed()
        assert records.done == {"a"}
    assert (victim / "thesis.doc").read_bytes() == PRECIOUS


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


def test_hard_links_keep_what_they_had(tmp_path: Path) -> None:
    """As backups are made of them: appending, dropping and reports change the run's own names alone."""
    folder = run_folder(tmp_path, "demo", "m", "t", "exact", "00000000")
    with RecordStore(folder) as records:
        records.append(make_record("a", status="oom", dataset="d"))
    write_manifest(folder, {"method": "exact", "model": "m", "task": "t"})
    build_report(tmp_path / "demo")
    backup = tmp_path / "backup"
    for path in [p for p in (tmp_path / "demo").rglob("*") if p.is_file()]:
        copy = backup / path.relative_to(tmp_path / "demo")
        copy.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, copy)
    before = contents(backup)
    fill(folder, ["b"])
    with RecordStore(folder) as records:
        assert records.done == {"a", "b"}
        records.drop_failed()
    write_manifest(folder, {"method": "exact", "model": "m", "task": "t", "seed": 1})
    build_report(tmp_path / "demo")
    assert contents(backup) == before
    assert (folder / "records.jsonl").stat().st_nlink == 1


def test_what_is_no_file_is_neither_read_nor_waited_for(tmp_path: Path) -> None:
    """Pipes, folders and devices in the place of each file that is read."""
    folder = experiment(tmp_path / "results")
    run = next(folder.glob("*/*/exact-*"))
    makers: dict[str, Callable[[Path], None]] = {
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "device": lambda path: path.symlink_to("/dev/zero"),
    }
    for name in ("records.jsonl", "manifest.json", "records-1of2.jsonl"):
        for what, make in makers.items():
            path = run / name
            kept = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            make(path)
            with no_waiting():
                found = ended([str(folder)], main=main)
            assert found.problem() is None, (name, what, found)
            assert found.status == 1
            assert f"{name}: " in found.err, (name, what)
            with no_waiting(), pytest.raises((StoreError, OSError), match=name):
                write_manifest(run, {}) if name == MANIFEST else fill(run, ["z"])
            path.rmdir() if what == "folder" else path.unlink()
            if kept is not None:
                path.write_bytes(kept)
    for name in (".report-files", "report.html", ".report.html.new"):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with no_waiting():
            found = ended([str(folder)], main=main)
        assert found.status == 1
        assert found.problem() is None, (name, found)
        (folder / name).unlink()


def test_wandb_writes_through_no_link(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    victim, folder = victims(tmp_path), experiment(tmp_path / "results")
    before = contents(victim)
    (folder / "wandb").symlink_to(victim)
    assert log_runs(load_experiment(folder).runs, mode="offline") == 0
    assert "is a symbolic link" in caplog.text
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
        assert "is a symbolic link" in found.err
        assert found.problem() is None, found
        assert contents(victim) == before
        link.unlink()


def test_files_are_made_anew_and_folders_checked_part_by_part(tmp_path: Path) -> None:
    """The module that all of the above goes through, on its own."""
    victim = victims(tmp_path)
    path = tmp_path / "a" / "b" / "file"
    make_folder(path.parent, tmp_path)
    replace(path, b"1")
    path.with_name(".file.new").write_bytes(b"half")  # a kill left it
    replace(path, b"2", sync=False)
    assert sorted(p.name for p in path.parent.iterdir()) == ["file"]
    assert path.read_bytes() == b"2"
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()
    for bad in (path.with_name(".file.new"), path):
        bad.unlink(missing_ok=True)
        bad.symlink_to(victim / "thesis.doc")
        with pytest.raises(OSError, match="symbolic link"):
            replace(path, b"3")
        with pytest.raises(OSError, match="symbolic link"):
            remove(bad)
        bad.unlink()
    (tmp_path / "a" / "c").symlink_to(victim)
    for inside in ("a/c", "a/c/d", "a/b/../../victim"):
        with pytest.raises(OSError, match=r"symbolic link|not a folder"):
            check_inside(tmp_path / inside, tmp_path)
    with pytest.raises(ValueError, match="subpath"):
        check_inside(victim, tmp_path / "a")
    assert (victim / "thesis.doc").read_bytes() == PRECIOUS


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
