"""What a user sees of a run in a terminal of 80 and of 120 columns, by a terminal emulator."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

pyte = pytest.importorskip("pyte", reason="needs the pyte package: pip install 'kvbench[test]'")

COMMAND = [
    *("task=longeval_lines", "task.num_lines=[20]", "method=[exact,snapkv,streaming_llm]"),
    *("model=tiny_random", "task.max_new_tokens=4"),
    *("limit=4", "logger=none", "device=cpu", "experiment_name=e"),
]
BAR = re.compile(r"[━╸╺─]{5,} .*\b(\d)/4 \S+ left \S+")


def screens(folder: Path, columns: int) -> tuple[list[list[str]], int]:
    """What the screen showed after each piece of output, and the exit status."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 200, columns, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, "-m", "kvbench", *COMMAND, f"results_dir={folder}"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm-256color"},
        close_fds=True,
    )
    os.close(theirs)
    screen = pyte.Screen(columns, 200)
    stream = pyte.ByteStream(screen)
    shown: list[list[str]] = []
    while True:
        ready, _, _ = select.select([ours], [], [], 300)
        try:
            data = os.read(ours, 1 << 16) if ready else b""
        except OSError:  # the other side is closed
            data = b""
        if not data:
            break
        for piece in re.split(rb"(?=\r\x1b\[2K)", data):  # a new picture of the bar
            stream.feed(piece)
            shown.append([line.rstrip() for line in screen.display])
    os.close(ours)
    return shown, process.wait()


@pytest.mark.parametrize("columns", [80, 120])
def test_a_run_at_the_width_of_a_terminal(tmp_path: Path, columns: int) -> None:
    shown, status = screens(tmp_path, columns)
    last = [line for line in shown[-1] if line]
    assert status == 0, "\n".join(last)
    bars = [
        (found, screen[number + 1])
        for screen in shown
        for number, line in enumerate(screen[:-1])
        if (found := BAR.search(line))
    ]
    assert bars, "no line has bar, counts and time left"
    assert any(re.match(r"exact.\d\.\d\d  snapkv.\d", below) for _, below in bars), bars[-1]
    assert not any(BAR.search(line) for line in last)  # gone when the run is over

    text = "\n".join(last)
    assert last[0].startswith("kvbench ")
    assert "…" not in text
    rows = {
        line.split()[0]: line for line in last if re.match(r"(exact|snapkv|streaming_llm) ", line)
    }
    assert set(rows) == {"exact", "snapkv", "streaming_llm"}
    for name in ("snapkv", "streaming_llm"):
        score = r"\d+\.\d \[\d+\.\d, \d+\.\d\]"
        change = r"[+−]?\d+\.\d \[[+−]?\d+\.\d, [+−]?\d+\.\d\]"
        assert re.search(rf"{score}[ ≈]+{change} +0\.\d+", rows[name]), rows[name]
    assert any("ms/token" in line for line in last[:12]) == (columns == 120)
    assert ("On a wider terminal also:" in text) == (columns == 80)
    page = text.replace("\n", "").partition("page: ")[2]
    assert page.startswith(str(tmp_path / "e" / "report.html"))
