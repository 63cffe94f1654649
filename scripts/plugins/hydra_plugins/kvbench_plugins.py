"""Where Hydra looks for plugins: kvbench's launchers and sweeper, under names it accepts."""

from hydra._internal.core_plugins.basic_sweeper import BasicSweeperConf
from hydra.core.config_store import ConfigStore

from kvbench.cli import jobs

try:
    from kvbench.cli import slurm
except ModuleNotFoundError as error:  # the extra [slurm]: config.explain names it
    if (error.name or "").split(".")[-1] not in ("hydra_submitit_launcher", "submitit"):
        raise
else:

    class SlurmLauncher(slurm.SlurmLauncher):
        """launcher=slurm."""


class GpuLauncher(jobs.GpuLauncher):
    """launcher=gpus."""


class Sweeper(jobs.Sweeper):
    """The sweeper of every command."""


ConfigStore.instance().store(
    group="hydra/sweeper",
    name="kvbench",
    node=BasicSweeperConf(f"{__name__}.Sweeper"),
    provider="kvbench",
)
