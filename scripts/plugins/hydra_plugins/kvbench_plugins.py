"""kvbench's launchers, where Hydra looks for plugins: in the package hydra_plugins. Hydra makes no
launcher of another package, even one that was registered (`Plugins._instantiate`)."""

from kvbench.cli import jobs, slurm


class GpuLauncher(jobs.GpuLauncher):
    """launcher=gpus."""


class SlurmLauncher(slurm.SlurmLauncher):
    """launcher=slurm."""
