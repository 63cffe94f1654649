"""Hydra's sweeper for sweeps of thousands of jobs: what jobs share is composed once, in the check of all
of them and when each starts; a dry run prints the first of many whole and the others in a line each."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.utils import JobReturn, JobStatus, env_override
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from kvbench.cli.compose import SharingLoader, job_config
from kvbench.cli.jobs import Jobs, names
from kvbench.run.progress import with_progress

WHOLE = 10
"""Jobs of a dry run that are printed with examples, tokens, memory and time."""


class SharingSweeper(BasicSweeper):
    """The basic sweeper, with a loader that shares."""

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Give the launcher, too, the loader that shares; nothing is launched in a dry run."""
        assert isinstance(task_function, Jobs)
        self.loader = SharingLoader(hydra_context.config_loader, task_function.compositions)
        context = HydraContext(self.loader, hydra_context.callbacks)
        super().setup(hydra_context=context, task_function=task_function, config=config)
        if config.dry_run:
            self.launcher = DryLauncher(self.loader)
            self.launcher.setup(hydra_context=context, task_function=task_function, config=config)

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Raise what composing any of the jobs would raise."""
        assert self.config is not None
        for overrides in with_progress(batch, "jobs composed"):
            self.loader.load_sweep_config(self.config, list(overrides))


class DryLauncher(BasicLauncher):
    """Shows what the jobs are, in this process."""

    def __init__(self, loader: SharingLoader) -> None:
        super().__init__()
        self.loader = loader

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Show the first of the sweep whole, the others in one line each."""
        whole = max(0, WHOLE - initial_job_idx)
        returns = list(super().launch(job_overrides[:whole], initial_job_idx))
        called = names(job_overrides)
        for place in range(whole, len(job_overrides)):
            returns.append(
                self._check(job_overrides[place], initial_job_idx + place, called[place])
            )
        return returns

    def _check(self, overrides: Sequence[str], number: int, name: str) -> JobReturn:
        assert self.config is not None
        assert isinstance(self.task_function, Jobs)
        config = self.loader.load_sweep_config(self.config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        with env_override(OmegaConf.to_container(config.hydra.job.env_set)):  # type: ignore[arg-type]
            self.task_function.check_briefly(job_config(config), number, name)
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED)
