"""The command line in this process, and configs as it composes them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

import pytest
from omegaconf import DictConfig, open_dict

from kvbench.cli import main as cli
from kvbench.cli.config import Settings, expanded, hydra_of_conf
from kvbench.cli.config import composed as compose
from kvbench.errors import UserError

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


def refusal_of(overrides: Sequence[str]) -> str | None:
    """The line that refuses these overrides before anything is made of them, None without one."""
    try:
        with hydra_of_conf() as hydra:
            Settings.of(compose(hydra, expanded(overrides)))
    except UserError as error:
        return str(error)
    return None


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
