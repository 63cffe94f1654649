"""README's "add your own method", executed exactly as written, in a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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
    assert len(list((tmp_path / "runs/default/wandb").glob("offline-run-*"))) == 3
