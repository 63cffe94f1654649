"""A method is two files, and so is a task with a metric of its own; a measured field, a table, a figure
at most two: each is added in a copy of the package, as README.md and kvbench/README.md say, and one run
of the method and one of the task show them all."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

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
"""Those that see every method, task, table and figure."""
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


@pytest.mark.slow
def test_what_is_added_touches_two_files_at_most(tmp_path: Path) -> None:
    unread = shutil.ignore_patterns("__pycache__")
    for part in ("kvbench", "conf", "scripts", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part, symlinks=True, ignore=unread)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    added, (python, *arguments) = add_method(tmp_path)
    assert (len(added), python) == (2, "python")
    for what, files in CHANGES.items():
        assert len(files) <= 2, what
        for name, edits in files.items():
            text = (tmp_path / name).read_text()
            for before, after in edits:
                assert not before or text.count(before) == 1, (name, before)
                text = text.replace(before, after) if before else text + after
            (tmp_path / name).write_text(text)
    (tmp_path / "kvbench/tasks/colour.py").write_text(TASK)
    (tmp_path / "conf/task/colour.yaml").write_text(TASK_YAML)
    assert "knorm" in run_in(tmp_path, *arguments)
    task = ["task=colour", "model=recall_mini", "method=[exact,snapkv]", "results_dir=of_task"]
    assert "colour" in run_in(tmp_path, "-m", "kvbench", *task)
    run_in(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)
    (records,) = (tmp_path / "of_task").rglob("snapkv-*/records.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert [line["status"] for line in lines] == ["ok"] * 4
    assert all(0 <= line["score"] <= 1 and line["letters"] >= 0 for line in lines)
    (records,) = (tmp_path / "runs").rglob("knorm-*/records.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 4
    assert {(line["status"], line["spare"]) for line in lines} == {("ok", 42.0)}
    assert all(line["entries"]["max"] == line["capacity"] for line in lines)
    report = next((tmp_path / "runs").iterdir())
    page = (report / "report.html").read_text()
    assert "An extra table" in page
    assert "An extra figure" in page
    assert list((report / "tables").glob("extra-*.csv"))
    (scores,) = (p for p in (report / "tables").glob("*.csv") if "spare" in p.read_text())
    assert "42" in scores.read_text()
    # by default every run is copied to W&B, offline where there is no key
    assert len(list((report / "wandb").glob("offline-run-*"))) >= 2
