"""The commands and the code of the READMEs work as they are written.

Every command is read by a shell and checked by the command line's own checks; the Python block, "Add
your own method" and "Add your own task" are executed here, the three commands by `.ci/run`. The tables
of the READMEs are those of results/.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.command import refusal_of

from kvbench.catalogue import catalogue
from kvbench.cli.items import experiment_called
from kvbench.cli.main import own_task

ROOT = Path(__file__).resolve().parents[1]
CONF = "conf/README.md"
YOUR_PAPER = ROOT / "conf/README-your-paper.md"
READMES = sorted(
    path
    for path in [ROOT / "README.md", *ROOT.glob("*/README*.md"), *ROOT.glob("kvbench/*/README.md")]
    if not path.parent.is_symlink()
)


def shell_blocks(path: Path) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", path.read_text(encoding="utf-8"), re.M | re.S)


def commands(path: Path) -> list[str]:
    """Every line of a shell block, and every `command` in the text that runs kvbench or make."""
    text = path.read_text(encoding="utf-8")
    found = [
        line
        for block in shell_blocks(path)
        for line in re.sub(
            r"^cat > .*?^END$\n|^echo .*?\n", "", block.replace("\\\n", ""), flags=re.M | re.S
        ).splitlines()
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
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 120
    assert max(map(len, lines)) <= 120


def block(section: str, language: str, file: str = "README.md") -> str:
    text = (ROOT / file).read_text(encoding="utf-8")
    found = re.search(rf"^## {section}\n.*?^```{language}\n(.*?)^```$", text, re.M | re.S)
    assert found, section
    return found[1]


def test_the_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """Its questions are such that a compressed cache answers them."""
    names: dict[str, Any] = {}
    exec(block("In Python", "python"), names)
    assert re.fullmatch(r"47478 \[0\.\d+\] \[\d+\]\n", capsys.readouterr().out)
    assert names["example"].answers == ("47478",)
    assert list(names["frame"].index) == ["exact", "snapkv", "balancekv"]
    assert names["answer"] == "47478", (
        "the context's, whose cache was compressed without the question"
    )


@pytest.mark.slow
def test_the_readers_own_task_runs(tmp_path: Path) -> None:
    """As a command, and as the file of conf/README.md."""
    here = f'kvbench() {{ "{sys.executable}" -m kvbench "$@" model=recall_mini logger=none; }}\n'
    script = here + block("Add your own task", "sh")
    script += (
        "kvbench task=mine compress_after=context budget.sink=4 budget.window=8 --config-dir=conf"
    )
    (tmp_path / "conf/task").mkdir(parents=True)
    file = block("Add your own task", "yaml", CONF)
    (tmp_path / "conf/task/mine.yaml").write_text(file)
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("report.html") == 2


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow)
        if path.parent.name == "conf" and path != YOUR_PAPER
        else path
        for path in READMES
    ],
    ids=[str(path.relative_to(ROOT)) for path in READMES],
)
def test_commands_work_as_typed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No pattern that zsh refuses to expand, no target or override that does not exist."""
    monkeypatch.setenv("ESSAYS", "essays")
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    experiments = catalogue("experiments")
    for command in commands(path):
        if "<" in outside_quotes(command) or re.search("knorm|valued", command):
            continue  # a placeholder; a method that the reader adds, see below
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
            if overrides[0] == "own":
                overrides = own_task(overrides[1:])
            keys = [word for word in overrides if word not in ("show", "-m")]
            if (
                "-m" in overrides
            ):  # a job of the sweep: outside brackets the first of several values
                keys = [re.sub(r",(?![^\[({]*[\])}]).*", "", key) for key in keys]
            assert refusal_of(keys) is None, command


@pytest.mark.slow
def test_the_readers_own_method_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(block("Add your own method", "python"))
    (tmp_path / "own/method").mkdir(parents=True)
    yaml = block("Add your own method", "yaml").replace("kvbench.methods.knorm", "mine")
    (tmp_path / "own/method/knorm.yaml").write_text(yaml)
    here = f'kvbench() {{ PYTHONPATH={ROOT}:. "{sys.executable}" -m kvbench logger=none "$@"; }}\n'
    command = block("Add your own method", "sh")
    script = here + command.replace("python -m kvbench", "kvbench --config-dir=own")
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "knorm" in done.stdout


def test_your_papers_commands_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    files = next(block for block in shell_blocks(YOUR_PAPER) if "cat >" in block)
    subprocess.run(["bash", "-euc", files], check=True)
    Path("my-model").mkdir()
    mine = f"hydra.searchpath=['file://{tmp_path}/mine']"
    runs = [line for line in commands(YOUR_PAPER) if line.startswith("python -m kvbench --conf")]
    assert len(runs) == 3
    for command in runs:
        keys = [word for word in shlex.split(command)[5:] if word != "-m"]
        first = [re.sub(r",(?![^\[({]*[\])}]).*", "", key) for key in keys]
        assert refusal_of([*first, mine]) is None, command


@pytest.mark.slow
def test_your_paper_runs_from_the_method_to_what_others_receive(tmp_path: Path) -> None:
    """In a folder that has what the commands read of the checkout, without its environment."""
    for name in ("Makefile", "conf", "kvbench", "results", "scripts", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = Path(sys.executable)
    script = f'make() {{ command make -o setup BIN="{python.parent}" "$@"; }}\n'
    script += f'python() {{ "{python}" "$@"; }}\n' + "".join(shell_blocks(YOUR_PAPER))
    env = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^my-model & valued & ", done.stdout, re.M)
    runs, received = tmp_path / "runs", tmp_path / "received" / "balancekv_table1"
    table = (runs / "balancekv_table1/tables/longbench-paper.tex").read_text()
    assert r"Llama-3.1-8B-Instruct, published (balancekv\_table1) & snapkv & " in table
    sweep = (runs / "sweep/tables/longeval_lines-paper.md").read_text()
    scored = r"%s .*\| \**([\d.]+) \["
    wide, narrow = (
        [float(score) for score in re.findall(scored % f"valued{width}", sweep)]
        for width in ("(?:, width 5)?", ", width 1")
    )
    assert [five > one for five, one in zip(wide, narrow, strict=True)] == [True, True]
    assert list((runs / "balancekv_table1/figures").glob("*.pdf"))
    assert (runs / "balancekv_table1/wandb/report.json").is_file()
    assert not (received / "wandb").exists()
    assert (received / "tables/longbench-paper.tex").read_text() == table


def test_the_tables_are_what_results_say() -> None:
    script = [sys.executable, str(ROOT / "scripts/readme_tables.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
