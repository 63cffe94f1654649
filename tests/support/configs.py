"""What tests of experiments and others share."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir

from kvbench.cli.aliases import expand_experiments
from kvbench.cli.catalogue import config_dir


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(config_dir().resolve()), version_base=None):
        return compose("config", overrides=expand_experiments(overrides))
