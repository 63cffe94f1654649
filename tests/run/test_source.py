"""The code and the weights that a run's records are of: what is continued, and what is left aside."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command import FAST, main
from support.jobs import make_job, with_session
from support.paths import ROOT

from kvbench.cli.construct import constructed
from kvbench.methods import build_method
from kvbench.methods.base import Method
from kvbench.records.aside import _why, aside_of, lines_of
from kvbench.records.read import load_runs
from kvbench.records.store import write_manifest
from kvbench.report.runs import load_experiment
from kvbench.run import job as jobs
from kvbench.run import provenance, source
from kvbench.run.runner import run_job

CODE = """
from dataclasses import dataclass
from kvbench.methods.base import TokenScoringMethod
from {helper} import norm  # of a key

@dataclass(frozen=True, kw_only=True)
class Mine({base}):
    def token_scores(self, layer, budget):
        return norm(layer.keys)
"""
HELPER = "def norm(keys):\n    return keys.float().norm(dim=-1)\n"


@pytest.fixture
def imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Imports a module of `tmp_path` as a new process would."""
    known = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def fresh(name: str) -> Any:
        for module in set(sys.modules) - known:
            if getattr(sys.modules[module], "__file__", None) is None or str(
                sys.modules[module].__file__
            ).startswith(str(tmp_path)):
                del sys.modules[module]
        source._closure.cache_clear()
        source._digests.clear()
        importlib.invalidate_caches()
        return importlib.import_module(name)

    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # of one second they may be of either code
    yield fresh
    fresh("kvbench")


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


FOLDER = {"mine.py": CODE.format(helper="helper", base="TokenScoringMethod"), "helper.py": HELPER}
PACKAGE = {
    "lab/__init__.py": "",
    "lab/deep/__init__.py": "",
    "lab/deep/mine.py": CODE.format(helper="..helper", base="TokenScoringMethod"),
    "lab/helper.py": HELPER,
    "lab/fast.so": "a",
}
EDITS = [
    ("mine", FOLDER, "mine.py", "norm(layer.keys)", "-norm(layer.keys)", "mine"),
    ("mine", FOLDER, "helper.py", "dim=-1", "dim=-1, p=1", "helper"),
    ("lab.deep.mine", PACKAGE, "lab/helper.py", "dim=-1", "dim=-1, p=1", "lab.helper"),
    ("lab.deep.mine", PACKAGE, "lab/fast.so", "a", "b", "lab/fast.so"),
    # what changes nothing, and what the class does not import
    ("mine", FOLDER, "mine.py", "# of a key", "# of the key\n\n", None),
    ("mine", FOLDER | {"other.py": "x = 1"}, "other.py", "1", "2", None),
    ("lab.deep.mine", PACKAGE | {"lab/other.py": "x = 1"}, "lab/other.py", "1", "2", None),
]


@pytest.mark.parametrize(("module", "files", "file", "old", "new", "differs"), EDITS)
def test_what_an_edit_changes(
    tmp_path: Path,
    imported: Any,
    module: str,
    files: dict[str, str],
    file: str,
    old: str,
    new: str,
    differs: str | None,
) -> None:
    write(tmp_path, files)
    before = source.source_of(imported(module).Mine())
    text = (tmp_path / file).read_text()
    assert old in text
    (tmp_path / file).write_text(text.replace(old, new))
    after = source.source_of(imported(module).Mine())
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [differs] * bool(differs)


def test_a_base_class_and_a_wrapped_method_are_code_too(tmp_path: Path, imported: Any) -> None:
    base = "from kvbench.methods.base import TokenScoringMethod as T\nclass Base(T):\n    pass\n"
    write(tmp_path, {"parents/__init__.py": base, "helper.py": HELPER})
    code = CODE.format(helper="helper", base="Base")
    (tmp_path / "mine.py").write_text("from parents import Base\n" + code)
    mine = imported("mine").Mine()
    for thing in (mine, type(mine), [{"of": mine}]):
        own = {name for name in source.source_of(thing) if not name.startswith("kvbench.")}
        assert own == {"mine", "helper", "parents"}
    assert {"mine", "helper"} <= source.source_of(mine.token_scores.__func__).keys()


def test_a_file_of_the_package_counts_where_it_is_not_as_in_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a checkout, and in an installed package whose RECORD has the hash of each file."""
    name = "kvbench.methods._select"
    file = Path(sys.modules[name].__file__ or "")
    ours = frozenset(source.PACKAGE.rglob("*.py"))
    snapkv = build_method("snapkv")
    for cached in ("_has_changes", "_is_shipped", "_installed"):
        monkeypatch.setattr(source, cached, getattr(source, cached).__wrapped__)
    for unmodified, found in ((ours, set()), (ours - {file}, {name}), (frozenset(), None)):
        monkeypatch.setattr(source, "_unmodified", lambda unmodified=unmodified: unmodified)
        names = source.source_of(snapkv).keys()
        assert names == found if found is not None else {name, "kvbench.methods.snapkv"} <= names
    monkeypatch.setattr(source, "_places", lambda: [source.PACKAGE.parent])
    monkeypatch.setattr(source, "_distributions", lambda: {"kvbench": ["kvbench"]})
    monkeypatch.setattr(source, "distribution", lambda package: type("D", (), {"version": "1"}))
    hashes = {f"kvbench/{path.relative_to(source.PACKAGE)}": source._hash(path) for path in ours}
    for installed, found in (
        (hashes, set()),
        ({**hashes, "kvbench/methods/_select.py": ""}, {name}),
    ):
        monkeypatch.setattr(source, "_recorded", lambda package, installed=installed: installed)
        assert source.source_of(snapkv).keys() == found


def test_an_installed_package_is_its_version() -> None:
    """Of a base class of torch's nothing is followed."""

    class Module(torch.nn.Module):
        pass

    own = {name: code for name, code in source.source_of(Module).items() if "kvbench" not in name}
    assert own.pop("torch") == version("torch")
    assert [name for name in own if name.startswith("torch")] == []


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """A function: commit these files of a repository, of which kvbench/ is the package; its commit."""

    def git(*words: str) -> str:
        author = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", "-C", str(tmp_path), *author, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def commit(files: dict[str, str]) -> str:
        write(tmp_path, files)
        git("init")
        git("add", ".")
        git("commit", "-m", "first")
        monkeypatch.setattr(source, "PACKAGE", tmp_path / "kvbench")
        return git("rev-parse", "HEAD")

    return commit


def test_an_untracked_and_an_edited_file_are_not_shipped(
    tmp_path: Path, checkout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "kvbench"
    files = {"a.py": "1", "b.py": "1", "sub/c.py": "1", "e.py": "x = 1"}
    checkout({f"kvbench/{name}": text for name, text in files.items()})
    write(package, {"a.py": "2", "d.py": "1", "e.py": "\nx = 1  # one\n"})
    shipped = {package / name for name in ("b.py", "sub/c.py", "e.py")}
    assert source._unmodified.__wrapped__() == shipped
    monkeypatch.setattr(source, "PACKAGE", tmp_path.parent)
    assert source._unmodified.__wrapped__() == frozenset()


def test_the_revision_says_whether_code_or_configs_have_changes(
    tmp_path: Path, checkout: Any
) -> None:
    suffixes = dict.fromkeys(("kvbench/run/a.py", "kvbench/b.py", "conf/c.yaml"), "+dirty")
    suffixes["d"] = ""
    commit = checkout(dict.fromkeys(suffixes, ""))
    for file, suffix in suffixes.items():
        write(tmp_path, {file: "changed"})
        assert provenance.code_revision.__wrapped__() == commit + suffix
        write(tmp_path, {file: ""})
    write(tmp_path, {"kvbench/new.py": ""})
    assert provenance.code_revision.__wrapped__() == f"{commit}+dirty", "an untracked file"


@pytest.fixture
def edited(tmp_path: Path, imported: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command with a method of one's own, after an edit of it."""
    write(
        tmp_path, {**FOLDER, "method/mine.yaml": "# @package methods.mine\n_target_: mine.Mine\n"}
    )
    monkeypatch.chdir(tmp_path)

    def run(capsys: Any, *words: str, norm: str = "norm(layer.keys)") -> Any:
        code = FOLDER["mine.py"].replace("norm(layer.keys)", norm)
        (tmp_path / "mine.py").write_text(code)
        imported("mine")
        methods = [word for word in FAST if not word.startswith("method=")]
        return main(
            capsys, *methods, "--config-dir", ".", "method=[mine]", "task.max_new_tokens=2", *words
        )

    return run


def test_edited_code_keeps_no_old_scores(capsys: Any, tmp_path: Path, edited: Any) -> None:
    assert edited(capsys, "limit=2").status == 0
    assert (
        "left aside: 2 records of an earlier mine.py"
        in edited(capsys, "limit=4", "dry_run=true", norm="-norm(layer.keys)").out
    )
    assert edited(capsys, "limit=4", norm="-norm(layer.keys)").status == 0
    (experiment,) = tmp_path.glob("runs/*")
    (run,) = load_runs(experiment)
    assert len(run.records) == 4, "of the edited code alone"
    (aside,) = aside_of(experiment)
    assert (aside.records, aside.why) == (2, "an earlier mine.py")
    assert aside.folder != run.folder
    # The first code again: its records count, and the others are left aside.
    assert edited(capsys, "limit=4").status == 0
    (run,) = load_runs(experiment)
    assert (run.folder, len(run.records)) == (aside.folder, 4)
    assert [one.records for one in aside_of(experiment)] == [4]
    listed = main(capsys, "prune", str(experiment))
    assert "4 records of an earlier mine.py" in listed.out
    assert "yes=true" in listed.err
    assert len(list(experiment.rglob("records.jsonl"))) == 2
    assert main(capsys, "prune", str(experiment), "yes=true").status == 0
    assert [path.parent for path in experiment.rglob("records.jsonl")] == [run.folder]


def test_the_code_is_that_which_was_imported(
    tmp_path: Path, imported: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is edited while the command loads its data is not what its records are of."""
    write(tmp_path, FOLDER)
    imported("helper")
    made = constructed({"_target_": "mine.Mine"}, "methods.mine", Method)
    first = source._digests["mine"][1]
    (tmp_path / "mine.py").write_text(FOLDER["mine.py"].replace("norm(", "-norm("))
    assert source.source_of(made)["mine"] == first


def test_a_class_without_a_file_is_never_continued(tmp_path: Path, caplog: Any) -> None:
    class InNotebook(type(build_method("uniform"))):  # type: ignore[misc]
        pass

    InNotebook.__module__ = "__main__"
    folders = set()
    for _ in range(2):
        result = run_job(make_job(tmp_path, {"mine": InNotebook()}, limit=1))
        assert result.written == 1
        folders.add(result.folders["mine"])
    assert len(folders) == 2
    assert "__main__ has no file that could be compared later" in caplog.text
    assert len(load_runs(tmp_path / "e")) == 1
    assert [one.why for one in aside_of(tmp_path / "e")] == ["an earlier __main__.py"]


def test_what_is_current_is_current_for_all_settings_and_methods(tmp_path: Path) -> None:
    """A rate, or a method, that was not run again since an edit is no neighbour of what was."""

    def start(method: str, hash_: str, weights: str, source: dict[str, str], started: str) -> None:
        folder = tmp_path / "e/m/t" / f"{method}-{hash_}"
        identity = {"weights": weights, "source": source, "task_version": len(hash_)}
        own = {"method": method, "settings_hash": hash_, "started": f"2026-11-{started}"}
        write_manifest(folder, {**own, "identity": identity})
        (folder / "records.jsonl").write_text(json.dumps({"example_id": started}) + "\n")

    start("mine", "a", "w", {"mine": "1", "helper": "1"}, "01")
    start("other", "b", "w", {"other": "1", "helper": "1"}, "02")
    start("exact", "cc", "w", {}, "03")  # of another version of the task, with its settings
    assert lines_of(aside_of(tmp_path / "e")) == []
    start("mine", "d", "w", {"mine": "2", "helper": "1"}, "04")
    (line,) = lines_of(aside_of(tmp_path / "e"))
    assert line == "1 record of an earlier mine.py, 1 Nov 2026"
    start("other", "e", "w", {"other": "1", "helper": "2"}, "05")
    found = {run.folder.name: run.why for run in aside_of(tmp_path / "e")}
    assert found == {"mine-a": "an earlier helper.py and mine.py"} | dict.fromkeys(
        ("other-b", "mine-d"), "an earlier helper.py"
    )
    assert _why({"source": {"lab/fast.so": "1"}}, {}) == "an earlier lab/fast.so"
    start("snapkv", "g", "w", {}, "05T01")  # as shipped, then edited, then put back
    for code, hash_, started, why in (
        ({"kvbench.methods.snapkv": "1"}, "h", "05T02", {"snapkv-g": "an earlier snapkv.py"}),
        ({}, "i", "05T03", {"snapkv-h": "an earlier snapkv.py"}),
    ):
        start("snapkv", hash_, "w", code, started)
        own = {run.folder.name: run.why for run in aside_of(tmp_path / "e")}
        assert {name: own[name] for name in own if "snapkv" in name} == why
    start("exact", "f", "x", {}, "06")
    assert len(aside_of(tmp_path / "e")) == 8, "all of the other weights"
    for code, started in (("1", "someday"), ("2", "sometime")):  # manifests that somebody wrote
        start("mine", f"k{code}", "x", {"mine": code}, started)
    dates = {run.folder.name: run.date for run in aside_of(tmp_path / "e")}
    assert dates["mine-k1"] == "no date"


def test_rerun_moves_records_away_and_shards_move_their_own(tmp_path: Path) -> None:
    from kvbench.records.shards import Shard

    methods = {"exact": build_method("exact")}
    folder = run_job(make_job(tmp_path, methods)).folders["exact"]
    first = (folder / "records.jsonl").read_text().splitlines()
    one = make_job(tmp_path, methods, shard=Shard(1, 2), rerun="now")
    result = run_job(one)
    own = {record_id for item in one.items for record_id in item.record_ids}
    assert (result.written, result.complete) == (2, True)
    moved = (folder / "earlier/now/records-1of2.jsonl").read_text().splitlines()
    assert moved == [line for line in first if json.loads(line)["example_id"] in own]
    assert (folder / "earlier/now/manifest.json").is_file()
    assert run_job(one).written == 0, "put back into a queue, it goes on"
    assert run_job(replace(one, shard=Shard(2, 2))).written == 2
    assert (folder / "records.jsonl").read_text() == ""
    (run,) = load_runs(tmp_path / "e")
    assert len(run.records) == 4
    assert run_job(make_job(tmp_path, methods, rerun="later")).written == 4
    files = sorted(path.read_text() for path in (folder / "earlier/later").glob("records*"))
    assert [text.count("\n") for text in files] == [4]


def test_a_shard_of_other_code_says_so(tmp_path: Path, caplog: Any) -> None:
    from kvbench.records.shards import Shard

    first = make_job(tmp_path, {"exact": build_method("exact")}, shard=Shard(1, 2))
    run_job(first)
    second = replace(first, shard=Shard(2, 2))
    second.settings["exact"]["source"]["mine"] = "edited"
    assert run_job(second).complete is False
    assert (
        "shard 2/2 is of other code or weights than 2 records of an earlier mine.py" in caplog.text
    )


def test_replaced_weights_are_another_run_and_another_path_is_not(tmp_path: Path) -> None:
    job = make_job(tmp_path, {"exact": build_method("exact")}, limit=2)
    moved = with_session(job, spec=replace(job.session.spec, path="elsewhere", revision="main"))
    assert moved.folders == job.folders
    run_job(job)
    trained = with_session(job)
    vars(trained.session)["weights"] = "b"
    assert run_job(replace(trained, limit=4)).written == 4
    (run,) = load_runs(tmp_path / "e")
    assert (len(run.records), run.manifest["identity"]["weights"]) == (4, "b")
    assert lines_of(aside_of(tmp_path / "e"))[0].startswith("2 records of other weights, ")


def test_two_revisions_of_one_model_are_no_replacement_of_each_other(tmp_path: Path) -> None:
    """A sweep over `model.revision` keeps the records of all, in rows of their own."""
    job = make_job(tmp_path, {"exact": build_method("exact")}, limit=2)
    for revision, weights in (("step1000", "a"), ("step2000", "b")):
        other = with_session(job, spec=replace(job.session.spec, revision=revision))
        vars(other.session)["weights"] = weights
        run_job(other)
    assert aside_of(tmp_path / "e") == []
    variants = {label for group in load_experiment(tmp_path / "e").groups for label in group.labels}
    assert variants == {"exact, weights a", "exact, weights b"}


def test_without_git_a_line_says_why_a_run_begins_anew(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    for changed in (False, True, True):
        monkeypatch.setattr(source, "_has_changes", lambda changed=changed: changed)
        if changed:
            monkeypatch.setattr(source, "_unmodified", frozenset)
            monkeypatch.setattr(source, "_is_shipped", lambda file: False)
        run_job(make_job(tmp_path, {"exact": build_method("exact")}, limit=1))
    assert [line.count("git does not answer") for line in caplog.messages].count(1) == 1
    assert len(aside_of(tmp_path / "e")) == 1


def test_a_changed_commit_of_one_version_is_said(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(jobs, "changed_since", lambda commit, *code: [f"{commit}/exact.py"])
    methods = {name: build_method(name) for name in ("exact", "h2o", "snapkv")}
    for commit in ("old", "old+dirty", "new"):
        run_job(make_job(tmp_path, methods, extra={"code_revision": commit}))
    (line,) = [line for line in caplog.messages if "on with records" in line]
    assert "exact and 2 more go on with records of commit old, where old/exact.py had other" in line


def test_records_of_an_older_kvbench_are_neither_continued_nor_averaged(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """Two records of 0.2.0, of a model with random weights and of methods that are unmodified."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "_has_changes", lambda: False)
    shutil.copytree(ROOT / "tests/data/records_0.2.0", tmp_path / "runs")
    (experiment,) = tmp_path.glob("runs/*")
    assert [len(run.records) for run in load_runs(experiment)] == [2, 2], "alone they are as ever"
    assert aside_of(experiment) == []
    words = [*FAST, "compress_after=prompt", "task.num_examples=2", "task.max_new_tokens=2"]
    for dry in (True, False):
        ended = main(capsys, *words, f"dry_run={dry}")
        assert ended.status == 0
        line = (
            "4 records of a kvbench before 0.3 (their code and weights are not known), 28 Nov 2026"
        )
        assert line in ended.out
    runs = load_runs(experiment)
    assert [len(run.records) for run in runs] == [2, 2]
    assert all(run.manifest["format"] == 2 for run in runs)
    assert lines_of(aside_of(experiment)) == [line]
