"""What tests of cli and others share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from kvbench.cli import main as cli
from kvbench.cli.check import check_command
from kvbench.cli.compose import Compositions
from kvbench.errors import UserError

FAST = ["logger=none", "model=tiny_random", "method=[exact,snapkv]", "task=longeval_lines"]
FAST += ["task.num_lines=[20]"]


COMPOSED = Compositions()
"""What the refusals that tests ask for have in common."""


def refusal_of(overrides: Sequence[str], *, sweep: bool = False) -> str | None:
    """The line that refuses these overrides, None where they are let through."""
    try:
        check_command(overrides, sweep=sweep, kept=COMPOSED)
    except UserError as error:
        return str(error)
    return None


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
