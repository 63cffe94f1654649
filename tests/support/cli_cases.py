"""Runs of the command line in this process, which must end correctly or with an error of one line."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kvbench.cli import main as cli

BASE = ["logger=none", "model=tiny_random", "device=cpu", "limit=1", "dry_run=true"]


@dataclass(frozen=True)
class Ended:
    """The exit status and the output of a command line."""

    status: Any
    out: str
    err: str
    sweep: bool
    verbose: bool
    """Whether the libraries' own messages were asked for."""

    def problem(self) -> str | None:
        """Why this is neither a correct run nor an error of one line; None if it is."""
        text = self.out + self.err
        logged = ("WARNING: ", "INFO: ")
        shown = re.compile(r"kvbench: .* x .*: (\d+/\d+, |loading)")  # how far a job is
        lines = [line for line in self.err.splitlines() if line.strip() and not shown.match(line)]
        lines = [line for line in lines if not line.startswith(logged)]
        errors = [line for line in lines if line.startswith(("kvbench: ", "kvbench-report: "))]
        others = 0 if self.verbose else len(lines) - len(errors)
        bugs = ("Traceback", "Error executing job", "HYDRA_FULL_ERROR")
        wrong = {
            "a traceback": any(word in text for word in bugs),
            f"status {self.status!r}": self.status not in (0, 1, 2),
            "not one line": others or (len(errors) > 1 and not self.sweep),
            "a failure without a line": self.status != 0 and not errors,
            "a complaint and status 0": self.status == 0 and errors,
            "a line that nobody reads": any(len(line) > 2000 for line in errors),
        }
        return next((why for why, is_so in wrong.items() if is_so), None)


def ended(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    main: Callable[[list[str]], int | None] = cli.main,
) -> Ended:
    """Run the command line in this process, in an empty folder or the one given."""
    argv, handlers, level = sys.argv, list(logging.root.handlers), logging.root.level
    environment = dict(os.environ)
    status: Any = None
    with (
        tempfile.TemporaryDirectory() as empty,
        chdir(folder or empty),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
    ):
        try:
            status = main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        except Exception:  # noqa: BLE001 - what Python would have printed
            traceback.print_exc()
        finally:  # what Hydra changed
            sys.argv = argv
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
            os.environ.clear()
            os.environ.update(environment)
    sweep = bool({"-m", "--multirun"} & set(arguments)) or any(
        word.startswith(("experiment=", "shards=", "launcher=", "hydra.mode")) for word in arguments
    )
    verbose = any(text.startswith(("-v", "--verbose", "hydra.verbose")) for text in arguments)
    return Ended(status, out.getvalue(), err.getvalue(), sweep, verbose)
