"""``launcher=gpus``: the jobs of a sweep on the GPUs of this machine, one worker each."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.utils import JobReturn
from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher

from kvbench.cli.launch.base import Launcher, Parameters
from kvbench.cli.launch.devices import DeviceError, devices_of, see_only
from kvbench.errors import USAGE, complain

WORKERS_END_IN = 30.0
"""Seconds for workers to finish their examples when the command is interrupted."""


class GpuLauncher(Launcher):
    """One worker per GPU of this machine; whichever is free takes the next job."""

    _EXECUTOR = "local"
    poll_s = 0.2

    def submit(self, waiting: deque[tuple[int, Parameters]], running: dict[int, Any]) -> None:
        """A job for every free device, each in a process of its own."""
        if not hasattr(self, "_free"):
            self._free = deque(self._devices())
            self._workers = len(self._free)
            self._at: dict[int, str] = {}
        while waiting and self._free:
            index, job = waiting.popleft()
            device = self._free.popleft()
            # A folder for each: submitit names jobs by process ids, which come again.
            folder = f"{self.params['submitit_folder']}/{index}"
            where = (self._clean(), device, self._workers, os.getpid())
            with _interrupts_ignored():
                running[index] = self.executor(folder).submit(_run_on, *where, *job)
            self._at[index] = device

    def _clean(self) -> BaseSubmititLauncher:
        """What is sent to the worker: this launcher without the processes it has started."""
        plain = type(self)(**self.params)
        assert self.hydra_context is not None
        assert self.task_function is not None
        assert self.config is not None
        plain.setup(
            hydra_context=self.hydra_context, task_function=self.task_function, config=self.config
        )
        return plain

    def _devices(self) -> list[str]:
        assert self.config is not None
        try:
            return devices_of(self.config)
        except DeviceError as error:
            complain(str(error))
            raise SystemExit(USAGE) from error

    def release(self, index: int) -> None:
        """Its device takes the next."""
        self._free.append(self._at.pop(index))

    def ended(self, running: dict[int, Any]) -> dict[int, str]:
        """Processes that are no more."""
        return {index: "killed" for index, job in running.items() if job.state != "RUNNING"}

    def abandon(self, jobs: Sequence[Any]) -> None:
        """Nobody would wait for the workers: each finishes its example and ends."""
        patience = time.monotonic() + WORKERS_END_IN
        for _ in range(2):  # a second SIGTERM ends the example, too
            for job in jobs:
                if job.state == "RUNNING":
                    os.kill(int(job.job_id), signal.SIGTERM)
            while time.monotonic() < patience and any(job.state == "RUNNING" for job in jobs):
                time.sleep(0.1)


def _run_on(
    launcher: BaseSubmititLauncher, device: str, workers: int, command: int, *job: Any
) -> JobReturn:
    """Run a job that sees one device only. submitit calls this in the worker's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # submitit ignores it
    _end_when_gone(command)
    see_only(device, workers)
    return launcher(*job)


def _end_when_gone(command: int) -> None:
    """When that process is no more, however it died, let this one finish its example and end."""

    def watch() -> None:
        while _runs(command):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(WORKERS_END_IN)
        os._exit(1)  # what hangs hears no signal

    threading.Thread(target=watch, name="command", daemon=True).start()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Processes started here ignore the terminal's Ctrl-C: the command hears it and ends them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
