"""What tests of cli and others share."""

from __future__ import annotations

import logging
import sys
from typing import Any

import pytest

from kvbench.cli import main as cli

FAST = ["logger=none", "model=tiny_random", "method=[exact,snapkv]", "task=longeval_lines"]
FAST += ["task.num_lines=[20]"]


SHORT = [*FAST, "task.num_examples=2", "task.max_new_tokens=2"]


def main(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """The command in this process: exit status, stdout, stderr."""
    argv, handlers, level = sys.argv, list(logging.root.handlers), logging.root.level
    try:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(arguments))
    finally:  # what Hydra changed
        sys.argv = argv
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    said = capsys.readouterr()
    assert isinstance(stop.value.code, int)
    return stop.value.code, said.out, said.err
