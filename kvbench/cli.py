"""The command line: Hydra composes model x methods x task; errors are one line and an exit status.

Exit status: 0 all well, 1 examples failed (their records say why), 2 wrong usage. This module imports
no torch, so that --help and usage errors come at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.overrides import explain, sample_overrides

if TYPE_CHECKING:
    from kvbench.runner import JobResult

USAGE, FAILED = 2, 1


def config_dir() -> Path:
    """The folder of the YAML files: the repository's conf/, which ships inside the package."""
    return Path(str(files("kvbench"))) / "conf"


def _complain(message: str) -> None:
    print(f"kvbench: {message}", file=sys.stderr)


def check_overrides(overrides: Sequence[str]) -> str | None:
    """Compose what the overrides ask for, every value of a sweep included; None, or what is wrong."""
    folder = str(config_dir().resolve())
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=folder, version_base="1.3"):
            try:
                for sample in sample_overrides(overrides):
                    compose("config", overrides=list(sample))
            except (HydraException, OmegaConfBaseException) as error:
                return explain(error, list(sample))
    finally:
        GlobalHydra.instance().clear()
    return None


def _is_override(argument: str) -> bool:
    return not argument.startswith("-")


class _Outcome:
    """What the jobs of this process came to."""

    def __init__(self) -> None:
        self.status = 0
        self.experiments: dict[Path, None] = {}

    def add(self, folder: Path, result: JobResult) -> None:
        self.experiments[folder] = None
        if result.failed:
            self.status = FAILED


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``kvbench`` and ``python -m kvbench``."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    problem = check_overrides([a for a in arguments if _is_override(a)])
    if problem is not None:
        _complain(problem)
        sys.exit(USAGE)
    outcome = _Outcome()

    @hydra.main(version_base="1.3", config_path=str(config_dir().resolve()), config_name="config")
    def run(config: DictConfig) -> int:
        from kvbench.app import run_config

        with one_line_errors():
            folder, result = run_config(config)
            outcome.add(folder, result)
            return result.failed

    sys.argv = [sys.argv[0], *arguments]
    try:
        run()
    except KeyboardInterrupt:
        _complain("interrupted; what is done is on disk, the same command goes on from there")
        outcome.status = 130
    finally:
        if outcome.experiments:
            from kvbench.app import finish

            for folder in outcome.experiments:
                finish(folder)
    sys.exit(outcome.status)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Errors that name a thing, its value and what is allowed end the process with status 2 (usage)
    or 1 (the disk, another process); anything else is a bug and keeps its traceback."""
    from hydra.errors import InstantiationException

    from kvbench.engine.attention import UnsupportedModel
    from kvbench.engine.loading import ModelError
    from kvbench.kv import KVError
    from kvbench.store import StoreError
    from kvbench.tasks.base import TaskError

    usage = (KVError, TaskError, ModelError, UnsupportedModel)
    try:
        yield
    except InstantiationException as error:
        cause = error.__cause__
        if os.environ.get("HYDRA_FULL_ERROR") == "1" or cause is None:
            raise
        _complain(str(cause))
        raise SystemExit(USAGE) from error
    except usage as error:
        _complain(str(error))
        raise SystemExit(USAGE) from error
    except StoreError as error:
        _complain(str(error))
        raise SystemExit(FAILED) from error


def resolved(config: DictConfig) -> dict[str, object]:
    """The config as plain values, interpolations resolved, Hydra's own part left out."""
    container = OmegaConf.to_container(config, resolve=True)
    assert isinstance(container, dict)
    return {str(key): value for key, value in container.items()}
