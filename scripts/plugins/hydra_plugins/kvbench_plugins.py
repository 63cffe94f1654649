"""kvbench's launchers and sweeper, where Hydra looks for plugins: in the package hydra_plugins."""

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore

from kvbench.cli import jobs, slurm


class GpuLauncher(jobs.GpuLauncher):
    """launcher=gpus."""


class SlurmLauncher(slurm.SlurmLauncher):
    """launcher=slurm."""


class Sweeper(jobs.Sweeper):
    """The sweeper of every command."""


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="kvbench",
    node=BasicSweeperConf(f"{__name__}.Sweeper"),
    provider="kvbench",
)
