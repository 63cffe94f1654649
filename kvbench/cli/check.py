"""A command line, checked before anything runs: every value of every sweep is composed."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from kvbench.cli.aliases import expand_aliases
from kvbench.cli.catalogue import config_dir
from kvbench.cli.compose import Compositions, SharingLoader, job_config, plain_values
from kvbench.cli.overrides import (
    COMPOSING,
    check_groups,
    check_syntax,
    check_values,
    explain,
    job_count,
    sample_overrides,
)
from kvbench.errors import UserError, first_line
from kvbench.run.progress import with_progress


@contextmanager
def composer(kept: Compositions | None = None) -> Iterator[None]:
    """Hydra, ready to compose configs from conf/."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(config_dir().resolve()), version_base="1.3"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            hydra.config_loader = SharingLoader(hydra.config_loader, kept or Compositions())
            yield
    finally:
        GlobalHydra.instance().clear()


@dataclass(frozen=True)
class Checked:
    """What the overrides ask for, once every value of every sweep was found to be allowed.

    Attributes:
        first: the config (Hydra's own part included) of the first value of each.
        samples: overrides, each key with one value, that together have every value in them.
        shards: the values of the key.
        jobs: how many jobs the values make, shards apart.
        kept: what composing them left for others.
    """

    first: DictConfig
    samples: list[list[str]]
    shards: set[int | None]
    jobs: int
    kept: Compositions


def check_command(
    overrides: Sequence[str], *, sweep: bool, kept: Compositions | None = None
) -> Checked:
    """Compose every value of every sweep, and check it.

    Raises:
        UserError: what is wrong, and what is allowed.
    """
    kept = kept or Compositions()
    overrides = expand_aliases(overrides)
    first: DictConfig | None = None
    shards: set[int | None] = set()
    with composer(kept):
        # An experiment may bring a sweep of its own, and launchers run sweeps: what they ask for is
        # known once they are composed. Values are checked like those of the command line, which go
        # before them.
        asking = ("experiment=", "launcher=", "hydra.searchpath=")
        chosen = [text for text in overrides if text.startswith(asking)]
        check_syntax(chosen, sweep=sweep)
        check_groups(chosen)
        try:
            mode, params = _own_sweep(chosen)
        except COMPOSING as error:
            raise UserError(explain(error, chosen)) from error
        check_syntax(overrides, sweep=sweep or mode == "MULTIRUN")
        given = {text.partition("=")[0] for text in overrides}
        params = [text for text in params if text.partition("=")[0] not in given]
        samples = list(sample_overrides([*params, *overrides]))
        jobs = job_count([*params, *overrides])
        for sample in with_progress(samples, "values checked"):
            check_groups(sample)
            try:
                whole = compose("config", overrides=sample, return_hydra_config=True)
                check_values(job_config(whole))
                _check_hydra(whole)
            except COMPOSING as error:
                raise UserError(explain(error, sample)) from error
            first = first or whole
            shards.add(OmegaConf.select(whole, "shards"))
    assert first is not None
    return Checked(first, samples, shards, jobs, kept)


def _check_hydra(config: DictConfig) -> None:
    """Check what Hydra itself would fail on: its verbosity, its folder (it reads these two where
    interpolations lead nowhere yet), and the launcher's options, which have types of their own.

    Raises:
        UserError: naming the option.
    """
    verbose = plain_values(config.hydra._get_node("verbose"))
    chdir = plain_values(config.hydra.job._get_node("chdir"))
    names = verbose if isinstance(verbose, list) else [verbose]
    if chdir is not None and not isinstance(chdir, bool):
        raise UserError(f"hydra.job.chdir is {chdir!r}; allowed: true or false")
    if not isinstance(verbose, bool) and not all(
        isinstance(name, str) and "${" not in name for name in names
    ):
        raise UserError(
            f"hydra.verbose is {verbose!r}; allowed: true, false, or names of loggers, e.g. kvbench"
        )
    launcher = copy.deepcopy(config.hydra.launcher)
    launcher._set_parent(config.hydra)
    OmegaConf.set_readonly(launcher, False)
    for key in launcher:
        try:
            launcher[key] = launcher[key]
        except OmegaConfBaseException as error:
            raise UserError(f"launcher.{key} cannot be used: {first_line(error)}") from error


def _own_sweep(chosen: Sequence[str]) -> tuple[str, list[str]]:
    """Hydra's mode and the swept keys that an experiment or a launcher sets in its YAML."""
    if not chosen or any("," in text for text in chosen):
        return "RUN", []
    config = compose("config", overrides=list(chosen), return_hydra_config=True)
    params = config.hydra.sweeper.get("params") or {}
    return str(config.hydra.mode).rpartition(".")[2], [f"{k}={v}" for k, v in params.items()]


def resolved(config: DictConfig) -> dict[str, object]:
    """The config as plain values, interpolations resolved, Hydra's own part left out."""
    try:
        values = plain_values(config, resolve=True, without=("hydra",))
    except OmegaConfBaseException:  # once more, for words that name the key
        others = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
        values = OmegaConf.to_container(others, resolve=True)
    return {str(key): value for key, value in values.items()}
