"""kvbench's launchers, where Hydra looks for plugins: in the package hydra_plugins."""

from kvbench.cli import jobs, slurm


class GpuLauncher(jobs.GpuLauncher):
    """launcher=gpus."""


class SlurmLauncher(slurm.SlurmLauncher):
    """launcher=slurm."""
