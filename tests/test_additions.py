"""A method is two files; a measured field, a table, a figure, a task with a metric at most two: each is
added in a copy of the package, as README.md and kvbench/README.md say, and one run shows them all."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

TABLE = '''

def extra_table(group: Group) -> Table:
    """Examples of every variant."""
    counts = group.good.groupby("variant", sort=False).size().rename("count").reset_index()
    columns = (Column("variant"), Column("count"))
    return Table(f"extra-{group.task}", "An extra table", counts, columns, data=counts)
'''
FIGURE = '''

def extra_figure(group: Group) -> Drawn:
    """Nothing but axes."""
    figure, _ = new_panels(1, 1, (3, 2), (0, 0))
    return Drawn(f"extra-{group.task}", "An extra figure", "Axes.", figure)
'''
CHANGES: dict[str, dict[str, list[tuple[str, str]]]] = {
    # what: file: what stands there, and what stands there then; "" is the end
    "measured field": {
        "kvbench/run/plan.py": [
            ('"batch": result.batch,\n', '"batch": result.batch,\n        "spare": 42.0,\n'),
        ],
        "kvbench/report/frame.py": [
            ('"self_bleu": ("self_bleu", "mean"),\n', '"self_bleu": ("self_bleu", "mean"),\n'
             '    "spare": ("spare", "mean"),\n'),
        ],
    },
    "table": {
        "kvbench/report/tables.py": [
            ("+ split + _splits(group, fields)",
             "+ split + _splits(group, fields) + [extra_table(group)]"),
            ("", TABLE),
        ],
    },
    "task with a metric": {
        "kvbench/tasks/metrics.py": [
            ('"rouge_2": _rouge_2,\n',
             '"rouge_2": _rouge_2,\n    "any_text": _best(lambda said, answer: 0.5),\n'),
        ],
        "conf/task/any_text.yaml": [("", "# Whatever is said, half of it.\n"
            "defaults: [jsonl, _self_]\nfiles: [tests/data/benchmarks/gsm8k.jsonl]\n"
            "fields: {context: question, answers: answer}\nmetric: any_text\n")],
    },
    "figure": {
        "kvbench/report/figures.py": [
            ('    wanted.append(("kept tokens",',
             '    wanted.append(("extra", partial(extra_figure, group)))\n'
             '    wanted.append(("kept tokens",'),
            ("", FIGURE),
        ],
    },
}  # fmt: skip


def blocks(section: str) -> list[tuple[str, str, str]]:
    """(text before, language, content) of every code block of a section of the README."""
    body = re.search(
        rf"^## {section}\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert body, section
    return re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", body.group(1), re.M | re.S)


def add_method(root: Path) -> tuple[set[str], list[str]]:
    """The README's own method: the files that are new, and the command that runs it."""
    added, commands = set(), []
    for before, language, content in blocks("Add your own method"):
        if language == "sh":
            commands += content.splitlines()
            continue
        path = re.findall(r"`([\w/.]+)`:\s*\Z", before)[-1]
        assert not (root / path).exists(), "the README adds files, it changes none"
        (root / path).write_text(content)
        added.add(path)
    (command,) = commands
    return added, shlex.split(command)


def changed(root: Path) -> None:
    """Make all of `CHANGES` below `root`."""
    for what, files in CHANGES.items():
        assert len(files) <= 2, what
        for name, edits in files.items():
            text = (root / name).read_text() if (root / name).exists() else ""
            for before, after in edits:
                assert not before or text.count(before) == 1, (name, before)
                text = text.replace(before, after) if before else text + after
            (root / name).write_text(text)


def run_there(root: Path, *arguments: str) -> str:
    """What a command of the copy prints, which ends well."""
    path = os.pathsep.join([str(root), str(root / "scripts/plugins")])
    environment = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "WANDB_API_KEY": ""}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=root,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def records_below(root: Path, run: str) -> list[dict[str, Any]]:
    """The records of the one run of this name."""
    (records,) = (root / "runs").rglob(f"{run}-*/records.jsonl")
    return [json.loads(line) for line in records.read_text().splitlines()]


def check_report(report: Path) -> None:
    """The page and the tables hold what was added."""
    page = (report / "report.html").read_text()
    assert "An extra table" in page
    assert "An extra figure" in page
    assert list((report / "tables").glob("extra-*.csv"))
    (scores,) = (p for p in (report / "tables").glob("*.csv") if "spare" in p.read_text())
    assert "42" in scores.read_text()
    # by default every run is copied to W&B, offline where there is no key
    assert len(list((report / "wandb").glob("offline-run-*"))) >= 2


TESTS = [
    "tests/methods/test_methods_properties.py",
    "tests/methods/test_methods_conf.py",
    "tests/report/test_figures.py",
    "tests/report/test_tables.py",
    "tests/tasks/test_metrics.py",
    "tests/tasks/test_every_task.py",
    "tests/test_imports.py",
]
"""Those that see every method, figure, table, metric and task."""


@pytest.mark.slow
def test_what_is_added_touches_two_files_at_most(tmp_path: Path) -> None:
    unread = shutil.ignore_patterns("__pycache__")
    for part in ("kvbench", "conf", "scripts", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=unread)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    added, (python, *arguments) = add_method(tmp_path)
    assert (len(added), python) == (2, "python")
    changed(tmp_path)
    assert "knorm" in run_there(tmp_path, *arguments)
    lines = records_below(tmp_path, "knorm")
    assert {(line["status"], line["spare"]) for line in lines} == {("ok", 42.0)}
    assert [line["entries"]["max"] for line in lines] == [line["capacity"] for line in lines]
    check_report(next((tmp_path / "runs").iterdir()))
    small = ["model=tiny_random", "device=cpu", "logger=none", "limit=1", "method=[exact]"]
    where = ["experiment_name=metric", "task.max_new_tokens=4"]
    run_there(tmp_path, "-m", "kvbench", "task=any_text", *small, *where)
    assert [line["score"] for line in records_below(tmp_path, "metric/**/exact")] == [0.5]
    run_there(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
