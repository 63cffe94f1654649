"""The command line in this process, and configs as it composes them."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from omegaconf import DictConfig, open_dict

from kvbench.cli import main as cli
from kvbench.cli.build import build_job
from kvbench.cli.config import Settings, expanded, hydra_of_conf
from kvbench.cli.config import composed as compose
from kvbench.errors import UserError
from kvbench.run.job import Job

FAST = ["logger=none", "model=tiny_random", "method=[exact,snapkv]", "task=longeval_lines"]
FAST += ["task.num_lines=[20]"]
SHORT = [*FAST, "task.num_examples=2", "task.max_new_tokens=2"]


def composed(*overrides: str) -> DictConfig:
    """The config of these overrides without Hydra's part."""
    with hydra_of_conf() as hydra:
        config = compose(hydra, expanded(overrides))
        with open_dict(config):
            config.task_label = str(config.task_label)  # asks Hydra
            del config["hydra"]
    return config


def job_of(*overrides: str, shared: dict[str, Any] | None = None) -> Job:
    """The job of these overrides."""
    return build_job(Settings.of(composed(*overrides)), shared)


def refusal_of(overrides: Sequence[str]) -> str | None:
    """The line that refuses these overrides before anything is made of them, None without one."""
    try:
        with hydra_of_conf() as hydra:
            Settings.of(compose(hydra, expanded(overrides)))
    except UserError as error:
        return str(error)
    return None


class Ended(NamedTuple):
    """The exit status and the output of a command line."""

    status: Any
    out: str
    err: str


def ended(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    main: Callable[[list[str]], int | None] = cli.main,
) -> Ended:
    """Run the command line in this process, in an empty folder or the one given; what Hydra changes is
    put back."""
    handlers, level = list(logging.root.handlers), logging.root.level
    status: Any = None
    with (
        tempfile.TemporaryDirectory() as empty,
        chdir(folder or empty),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
        patch.object(sys, "argv", sys.argv),
        patch.dict(os.environ),
    ):
        try:
            status = main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        except Exception:  # noqa: BLE001 - what Python would have printed
            traceback.print_exc()
        finally:
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
    return Ended(status, out.getvalue(), err.getvalue())


def main(capsys: Any, *arguments: str) -> Ended:
    """The command in this folder; what its processes print comes after its own."""
    status, out, err = ended(arguments, folder=Path.cwd())
    said = capsys.readouterr()
    return Ended(status, out + said.out, err + said.err)
