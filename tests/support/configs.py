"""What tests of experiments and others share."""

from __future__ import annotations

from typing import Any

from hydra import compose, initialize_config_dir

from kvbench.cli.catalogue import config_dir
from kvbench.cli.meant import with_experiments


def composed(*overrides: str) -> Any:
    with initialize_config_dir(str(config_dir().resolve()), version_base=None):
        return compose("config", overrides=with_experiments(overrides))
