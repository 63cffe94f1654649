"""What the READMEs tell a reader to type works as typed.

"Add your own method" is executed exactly as written, in a copy of the package; every other command is
read by a shell and checked by the command line's own checks. `.ci/run` executes the three commands.
"""

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
from support.command import refusal_of

from kvbench.cli.catalogue import catalogue, experiment_called

ROOT = Path(__file__).resolve().parents[1]
READMES = sorted(
    path
    for path in [ROOT / "README.md", *ROOT.glob("*/README.md"), *ROOT.glob("kvbench/*/README.md")]
    if not path.parent.is_symlink()
)


def commands(path: Path) -> list[str]:
    """Every line of a shell block, and every `command` in the text that runs kvbench or make."""
    text = path.read_text(encoding="utf-8")
    found = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", text, re.M | re.S)
        for line in block.splitlines()
    ]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    spans = re.findall(r"`([^`]+)`", text)
    return found + [
        span for span in spans if re.match(r"(python -m kvbench|kvbench|make) \S", span)
    ]


def outside_quotes(command: str) -> str:
    """What a shell may expand: neither quoted nor in a comment."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\s#.*", "", command)


def test_the_readme_is_read_in_three_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 130


@pytest.mark.parametrize("path", READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_work_as_typed(path: Path) -> None:
    """No pattern that zsh refuses to expand, no target or override that does not exist."""
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    experiments = catalogue("experiments")
    for command in commands(path):
        if "<" in outside_quotes(command) or "knorm" in command:
            continue  # a placeholder; a method that the reader adds, executed below
        assert not re.search(r"[\[\]{}*?]", outside_quotes(command)), (command, "needs quotes")
        words = shlex.split(command, comments=True)
        if words and words[0] == "make":
            named = words[1].removeprefix("reproduce-").replace("-", "_")
            assert words[1] in targets or experiment_called(named) in experiments, command
            for word in words:
                if word.startswith("EXPERIMENT="):
                    assert word.partition("=")[2] in experiments, command
        overrides = words[words.index("kvbench") + 1 :] if "kvbench" in words[:3] else []
        if overrides and "=" in overrides[-1]:
            sweep = "-m" in overrides
            keys = [word for word in overrides if word not in ("show", "-m")]
            assert refusal_of(keys, sweep=sweep) is None, command


def blocks(section: str) -> list[tuple[str, str, str]]:
    """(text before, language, content) of every code block of a section of the README."""
    text = (ROOT / "README.md").read_text()
    body = re.search(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    assert body, section
    found = re.findall(r"(.*?)^```(\w+)\n(.*?)^```$", body.group(1), re.M | re.S)
    return found


def test_add_your_own_method_as_written(tmp_path):
    for part in ("kvbench", "conf"):
        shutil.copytree(
            ROOT / part,
            tmp_path / part,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    commands = []
    for before, language, content in blocks("Add your own method"):
        if language == "sh":
            commands += content.splitlines()
            continue
        path = re.findall(r"`([\w/.]+)`:\s*\Z", before)[-1]
        assert not (tmp_path / path).exists(), "the README adds files, it changes none"
        (tmp_path / path).write_text(content)
    assert len(commands) == 1
    arguments = shlex.split(commands[0])
    assert arguments[0] == "python"
    done = subprocess.run(
        [sys.executable, *arguments[1:]],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path),
            "OMP_NUM_THREADS": "1",
            "WANDB_API_KEY": "",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "knorm" in done.stdout
    (records,) = (tmp_path / "runs").rglob("knorm-*/records.jsonl")
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len(lines) == 4
    assert {line["status"] for line in lines} == {"ok"}
    assert all(line["entries"]["max"] == line["capacity"] for line in lines)
    assert (tmp_path / "runs/default/report.html").is_file()
    # by default every run is copied to W&B, and both side by side; offline where there is no key
    assert len(list((tmp_path / "runs/default/wandb").glob("offline-run-*"))) == 4
