"""The command line: what it answers at once, what it refuses in one line, how it ends."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.command import SHORT, main, refusal_of

from kvbench.cli import check
from kvbench.cli import main as cli
from kvbench.cli.catalogue import KINDS, catalogue
from kvbench.run.progress import (
    _JobBar,
    _logs_above_the_bar,
    _scores,
    bar_columns,
    progress_display,
)
from kvbench.run.runner import Progress


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "kvbench", *arguments], capture_output=True, text=True, **options
    )


def test_help_list_and_show_need_no_torch_and_little_time(tmp_path: Any) -> None:
    script = (
        "import sys\nfrom kvbench.cli.main import main\n"
        "for words in (['--help'], ['list', 'methods'], ['show', 'method=snapkv']):\n"
        "    try: main(words)\n"
        "    except SystemExit as stop: assert stop.code == 0, words\n"
        "assert not {'torch', 'transformers', 'wandb', 'pandas'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for word in ("Usage", "Examples", "snapkv", "longeval_lines", "dry_run=true", "tab completion"):
        assert word in done.stdout
    assert "kernel_size: 5" in done.stdout
    # The best of a few: other work on the machine is not the command's fault.
    seconds = []
    for _ in range(3):
        start = os.times()
        assert run("--help").returncode == 0
        end = os.times()
        seconds.append(end.children_user + end.children_system - start[2] - start[3])
        if seconds[-1] < 2.0:
            break
    assert min(seconds) < 2.0


@pytest.mark.parametrize("kind", KINDS)
def test_everything_listed_has_a_line_about_it(capsys: Any, kind: Any) -> None:
    status, out, _ = main(capsys, "list", kind)
    assert status == 0
    lines = out.splitlines()
    assert {line.split()[0] for line in lines} >= set(catalogue(kind)) > set()
    for line in lines:
        name, _, text = line.partition(" ")
        assert len(text.strip()) > 10, name
        assert "\033" not in line
    assert main(capsys, "list", kind.removesuffix("s"))[1] == out


def test_show_resolves_and_version_is_ours(capsys: Any) -> None:
    status, out, _ = main(capsys, "show", "method=snapkv", "seed=7", "task=needle")
    assert status == 0
    assert "task_label: needle" in out
    assert out.count("seed: 7") == 2
    assert "${" not in out
    assert "hydra" not in out
    assert main(capsys, "--version")[1].startswith("kvbench 0.")


@pytest.mark.parametrize(
    ("typed", "offered"),
    [("kvbench task=nee", "task=needle"), ("kvbench budget.ra", "budget.rate=")],
)
def test_the_shell_completes(typed: str, offered: str) -> None:
    done = run("-sc", "query=bash", env={**os.environ, "COMP_LINE": typed})
    assert offered in done.stdout.split()


def test_overrides_that_are_right_are_let_through() -> None:
    fine: list[list[str]] = [
        [],
        ["method=snapkv", "methods.snapkv.kernel_size=7"],
        ["experiment=demo", "limit=1"],
        ["experiment=demo", "task=needle"],
        ["model=hf", "model.path=org/name", "model.revision=main"],
        ["+model.architecture.hidden_size=8"],
        ["hydra.verbose=true"],
        ["budget.rate=1"],
        ["task.files=['a b.jsonl',c.jsonl]"],
    ]
    fine += [[f"experiment={name}"] for name in catalogue("experiments")]
    for overrides in fine:
        assert refusal_of(overrides) is None, overrides
    assert refusal_of(["budget.rate=0.5,0.25", "seed=interval(0,3)"], sweep=True) is not None
    assert refusal_of(["budget.rate=0.5,0.25", "seed=1,2"], sweep=True) is None
    assert cli._own_options(["-v", "a=b"]) == ["a=b", "hydra.verbose=kvbench"]
    assert cli._own_options(["-v", "-v"]) == cli._own_options(["-vv"]) == ["hydra.verbose=true"]


def test_a_dry_run_says_what_would_be_and_leaves_nothing(
    capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = main(capsys, *SHORT, "-m", "budget.rate=0.5,0.25", "dry_run=true")
    assert (status, err) == (0, "")
    assert list(tmp_path.iterdir()) == []
    assert "\033" not in out
    assert out.count("tiny_random x longeval_lines: dry run, nothing written") == 2
    for word in ("2 examples, 2 of them to run", "prompt tokens (min", "median", "snapkv", "0/2"):
        assert word in out
    assert "runs/default/tiny_random/longeval_lines" in out
    assert "(100%)" in out


def test_failed_examples_are_status_1_and_a_log_stays_readable(
    capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    failing = [a.replace("tiny_random", "recall_mini") for a in SHORT]
    status, out, err = main(capsys, *failing, "example_timeout=1e-9", "-v")
    assert status == 1, err
    assert "Loading weights" not in err
    assert "\033" not in out + err
    assert "recall_mini x longeval_lines: 2/2" in err
    assert (tmp_path / "runs/default/report.html").exists()
    records = [
        json.loads(line)
        for path in tmp_path.glob("runs/**/records.jsonl")
        for line in path.read_text().splitlines()
    ]
    assert {record["status"] for record in records} == {"timeout"}
    assert len(records) == 4


def test_progress_in_a_log_is_a_line_now_and_then(capsys: Any) -> None:
    with progress_display("job") as show:
        for done in range(501):
            progress = Progress(total=500, done=done)
            progress.scores = {"snapkv": (done * 0.5, done or 1)}
            show(progress)
    err = capsys.readouterr().err
    assert err == "job: 500/500, about 0 s left; snapkv 0.50\n"


SCRIPT = """
import logging, sys
from types import SimpleNamespace
from kvbench.run.progress import progress_display
logging.basicConfig(stream=sys.stderr, format="%(message)s")
with progress_display("job") as show:
    show(SimpleNamespace(total=3, done=1, scores={}))
    logging.warning("a warning in the middle")
    show(SimpleNamespace(total=3, done=3, scores={}))
"""


def test_progress_on_a_terminal_is_a_bar_and_logs_stay_whole(tmp_path: Any) -> None:
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT], stderr=slave, stdout=slave, env=environment
    )
    os.close(slave)
    text = b""
    while True:
        try:
            block = os.read(master, 4096)
        except OSError:
            break
        if not block:
            break
        text += block
    os.close(master)
    assert process.wait() == 0
    shown = text.decode()
    assert "\033" in shown
    assert "job" in shown
    lines = [line.rpartition("\033[2K")[2].strip() for line in shown.splitlines()]
    assert "a warning in the middle" in lines


def test_at_80_columns_bar_count_and_time_share_a_line_and_scores_have_their_own() -> None:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=True, color_system=None)
    scores = dict.fromkeys((*"abcdefgh", "streaming_llm", "balancekv_needle"), (0.5, 1))
    name = "Llama-3.1-8B-Instruct x longeval_lines_context"
    for title in (name, "job"):
        bar = _JobBar(*bar_columns(), console=console)
        told = _scores(Progress(48, 12, scores))
        bar.add_task("", total=48, completed=12, name=title, scores=told)
        console.print(*bar.get_renderables(), sep="\n")
    assert "…" not in out.getvalue()
    lines = [line.strip() for line in out.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert lines[0] == name
    assert [bool(re.search(r"━.* 12/48 .* left", line)) for line in lines[:2]] == [False, True]
    assert lines[2].startswith("a\N{NO-BREAK SPACE}0.50  b")
    assert "balancekv_needle\N{NO-BREAK SPACE}0.50" in lines[3]
    assert re.match(r"job ━.* 12/48 .* left", lines[4])


def test_the_first_line_comes_before_torch() -> None:
    """Importing it takes longer than anybody likes to look at nothing."""
    told = "import builtins, sys\nreal = builtins.__import__\n"
    told += "def spy(name, *rest):\n    if name == 'torch' and 'torch' not in sys.modules:\n"
    told += "        print('IMPORTED', flush=True); sys.exit(9)\n    return real(name, *rest)\n"
    told += "builtins.__import__ = spy\nfrom kvbench.cli.main import main\nmain(sys.argv[1:])\n"
    command = [sys.executable, "-c", told, "-m", "task=needle,longeval_lines", "limit=1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    assert lines[-1] == "IMPORTED", done.stderr
    assert "2 jobs, the first: recall_mini x needle, 8 methods -> runs/default" in lines[0]
    assert lines[1].startswith("loading torch")


def test_what_was_meant_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    for words, meant in {
        "dtype=bf16": "dtype is 'bf16' (did you mean 'bfloat16'?)",
        "rate=0.5": "(did you mean budget.rate?)",
        "num_lines=[20]": "(did you mean task.num_lines?)",
        "methods=snapkv": "(did you mean method=[snapkv]?)",
        "methods=[snapkv,h2o]": "(did you mean method=[snapkv,h2o]?)",
    }.items():
        assert meant in str(refusal_of([words])), words


def test_a_hub_id_or_a_folder_is_a_model(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    hub = "Qwen/Qwen2.5-0.5B-Instruct"
    for value, path, name in (
        (hub, hub, hub),
        ("./mine", "./mine", "mine"),
        ("mine", "mine", "mine"),
        (str(tmp_path / "mine"), str(tmp_path / "mine"), "mine"),
    ):
        model = check.check_command([f"model={value}"], sweep=False).first.model
        assert (model.path, model.name) == (path, name)
    swept = check.check_command([f"model={hub},org/other"], sweep=True)
    assert swept.jobs == 2
    assert {s for one in swept.samples for s in one if "path" in s} == {
        f"model.path={hub}",
        "model.path=org/other",
    }
    assert "unknown model 'nosuch'" in str(refusal_of(["model=nosuch"]))


def test_kvbench_alone_is_a_short_help_and_no_run(
    capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = main(capsys)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) < 20
    assert "kvbench --help" in out
    for line in re.findall(r"^  kvbench ((?:-m )?\S*=.*?)(?:  .*)?$", out, re.M):
        words = shlex.split(line)
        assert refusal_of([w for w in words if w != "-m"], sweep="-m" in words) is None
    assert not list(tmp_path.iterdir())


def test_log_handlers_come_back_from_behind_the_bar() -> None:
    handler = logging.StreamHandler(sys.__stderr__)
    logging.getLogger("kvbench.test_cli").addHandler(handler)
    try:
        with _logs_above_the_bar():
            assert handler.stream is sys.stderr
        assert handler.stream is sys.__stderr__
    finally:
        logging.getLogger("kvbench.test_cli").removeHandler(handler)
