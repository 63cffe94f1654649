"""A method is two files, and so is a task with a metric of its own; a measured field, a table, a figure
at most two: all of them are added in one copy of the package, as README.md and kvbench/README.md say. A
run of the method and a run of the task show them."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
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
TASK = '''"""A colour that stands in the middle of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, Task


@dataclass(frozen=True, kw_only=True)
class Colour(Task):
    """Texts that name one colour; the score is the share of its letters that the answer holds."""

    name = "colour"
    measures = ("score", "letters")
    num_examples: Many = 4

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """See `Task.examples`."""
        grass = "The grass is long. " * 40
        return [
            Example(
                id=f"colour-{number}",
                context=f"{grass}The door of house {number} is green. {grass}",
                question=f"Which colour has the door of house {number}?",
                answers=("green",),
                max_new_tokens=4,
                dataset="colour",
            )
            for number in range(self.num_examples)
        ]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """See `Task.score`; beside it the number of letters."""
        letters = [letter in prediction for letter in example.answers[0]]
        return {"score": sum(letters) / len(letters), "letters": float(len(prediction))}
'''
TASK_YAML = """# A colour in the middle of a text.
defaults:
  - override /model@_global_.model: smollm2_135m
  - _self_
_target_: kvbench.tasks.colour.Colour
num_examples: 4
"""
TESTS = [
    "tests/methods/test_methods_properties.py",
    "tests/methods/test_methods_conf.py",
    "tests/report/test_figures.py",
    "tests/report/test_tables.py",
    "tests/tasks/test_every_task.py",
    "tests/cli/test_cli.py::test_a_task_says_which_model_it_runs_on",
    "tests/test_imports.py",
]
"""The tests that see every method, task, table and figure."""
CHANGES: dict[str, dict[str, list[tuple[str, str]]]] = {
    # What is added: the files that are changed, and for each the text that is replaced and its
    # replacement. An empty text is the end of the file.
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
    "figure": {
        "kvbench/report/figures.py": [
            ('    to_draw.append(("kept tokens",',
             '    to_draw.append(("extra", partial(extra_figure, group)))\n'
             '    to_draw.append(("kept tokens",'),
            ("", FIGURE),
        ],
    },
}  # fmt: skip


def blocks(section: str) -> list[tuple[str, str, str]]:
    """For every code block of a section of the README the text before it, its language, its content."""
    body = re.search(
        rf"^## {section}\n(.*?)(?=^## |\Z)", (ROOT / "README.md").read_text(), re.M | re.S
    )
    assert body, section
    return re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", body.group(1), re.M | re.S)


def add_method(root: Path) -> tuple[set[str], list[str]]:
    """Add the README's own method; returns the new files, and the command that runs the method."""
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


def run_in(root: Path, *arguments: str) -> str:
    """What Python prints when it is run in the copy at `root`, which must end well."""
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
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Copy:
    """A copy of the package to which everything has been added.

    Attributes:
        method_files: the files of the README's method.
        method_output, task_output: what the runs of the method and of the task printed.
    """

    root: Path
    method_files: set[str]
    method_output: str
    task_output: str

    @property
    def report(self) -> Path:
        """The folder of the method's run."""
        return next((self.root / "runs").iterdir())


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    root = tmp_path_factory.mktemp("copy")
    unread = shutil.ignore_patterns("__pycache__")
    for part in ("kvbench", "conf", "scripts", "tests"):
        shutil.copytree(ROOT / part, root / part, symlinks=True, ignore=unread)
    shutil.copy(ROOT / "pyproject.toml", root)
    method_files, (_, *arguments) = add_method(root)
    for files in CHANGES.values():
        for name, edits in files.items():
            text = (root / name).read_text()
            for before, after in edits:
                assert not before or text.count(before) == 1, (name, before)
                text = text.replace(before, after) if before else text + after
            (root / name).write_text(text)
    (root / "kvbench/tasks/colour.py").write_text(TASK)
    (root / "conf/task/colour.yaml").write_text(TASK_YAML)
    method_output = run_in(root, *arguments)
    task = ["task=colour", "model=recall_mini", "method=[exact,snapkv]", "results_dir=of_task"]
    return Copy(root, method_files, method_output, run_in(root, "-m", "kvbench", *task))


def records_in(folder: Path, pattern: str) -> list[dict[str, Any]]:
    """The records of the only file that the pattern matches."""
    (records,) = folder.rglob(pattern)
    return [json.loads(line) for line in records.read_text().splitlines()]


def test_what_is_added_touches_two_files_at_most() -> None:
    for addition, files in CHANGES.items():
        assert len(files) <= 2, addition


@pytest.mark.slow
def test_the_tests_that_see_everything_pass(copy: Copy) -> None:
    run_in(copy.root, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)


@pytest.mark.slow
def test_an_added_method_runs_within_its_budget(copy: Copy) -> None:
    assert len(copy.method_files) == 2
    assert "knorm" in copy.method_output
    records = records_in(copy.root / "runs", "knorm-*/records.jsonl")
    assert [record["status"] for record in records] == ["ok"] * 4
    assert all(record["entries"]["max"] == record["capacity"] for record in records)


@pytest.mark.slow
def test_an_added_task_is_scored_by_its_own_metric(copy: Copy) -> None:
    assert "colour" in copy.task_output
    records = records_in(copy.root / "of_task", "snapkv-*/records.jsonl")
    assert [record["status"] for record in records] == ["ok"] * 4
    assert all(0 <= record["score"] <= 1 and record["letters"] >= 0 for record in records)


@pytest.mark.slow
def test_an_added_field_is_in_records_and_tables(copy: Copy) -> None:
    records = records_in(copy.root / "runs", "knorm-*/records.jsonl")
    assert {record["spare"] for record in records} == {42.0}
    tables = (copy.report / "tables").glob("*.csv")
    (scores,) = (table for table in tables if "spare" in table.read_text())
    assert "42" in scores.read_text()


@pytest.mark.slow
def test_an_added_table_and_figure_are_on_the_page(copy: Copy) -> None:
    page = (copy.report / "report.html").read_text()
    assert "An extra table" in page
    assert "An extra figure" in page
    assert list((copy.report / "tables").glob("extra-*.csv"))


@pytest.mark.slow
def test_the_run_is_copied_to_wandb(copy: Copy) -> None:
    """By default, and offline where there is no key."""
    assert len(list((copy.report / "wandb").glob("offline-run-*"))) >= 2
