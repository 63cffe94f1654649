"""Where the jobs of a sweep run: on the GPUs of this machine, or on Slurm.

A job that dies (killed, cancelled, its node lost) is one line and an exit status, and leaves the others
alone. ``python -m kvbench.cli.launchers`` is a worker of ``launcher=gpus``. Hydra imports this module at
every start, so that torch and submitit are imported where they are needed.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf

from kvbench.cli.config import hydra_of_conf, results_folder
from kvbench.cli.jobs import JobOutcome, Jobs, names
from kvbench.errors import FAILED, UserError, complain, first_line
from kvbench.records.durable import make_folder, replace
from kvbench.run.termination import Terminated, Termination

try:
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import BaseSubmititLauncher
except ModuleNotFoundError:  # without the extra [slurm]: config.explain names it
    BaseSubmititLauncher = Launcher


class Collected:
    """What the jobs of a launcher came to, told as they end.

    Args:
        task: gets the outcomes, in the order of the jobs.
    """

    def __init__(self, task: Jobs, job_overrides: Sequence[Sequence[str]]) -> None:
        self.task, self.overrides = task, [tuple(filter_overrides(o)) for o in job_overrides]
        self.names, self.outcomes = names(job_overrides), dict[int, JobOutcome]()

    def add(
        self, number: int, outcome: JobOutcome | None, ended: str = "", log: Path = Path()
    ) -> None:
        """One job's outcome; None: it ended without any, as `ended` says."""
        if outcome is None:
            where = (
                f"log: {log}" if log.exists() else f"no log: it never began, or cannot write {log}"
            )
            line = f"job {ended}; {where}"
            outcome = JobOutcome(self.overrides[number], error=line, status=FAILED)
        self.outcomes[number] = outcome
        said = outcome.error or f"{outcome.records} records, {outcome.failed} failed"
        complain(f"{len(self.outcomes)} done: {self.names[number]}: {said}")

    def returned(self) -> list[JobReturn]:
        """The outcomes as Hydra's sweepers take them; from here on the command has them, too."""
        found = [self.outcomes[number] for number in sorted(self.outcomes)]
        self.task.outcomes.extend(found)
        self.task.elsewhere = True
        returns = [JobReturn(overrides=outcome.overrides) for outcome in found]
        for each, outcome in zip(returns, found, strict=True):
            each.status, each.return_value = JobStatus.COMPLETED, outcome
        return returns


def _log_folder(config: DictConfig) -> Path:
    """The folder for the scripts and logs of a sweep's jobs, for this user alone.

    Raises:
        OSError: a link below the results folder would place it somewhere else.
    """
    root = results_folder(config.results_dir)
    folder = Path(config.hydra.sweep.dir).expanduser()
    make_folder(folder, root if folder.is_relative_to(root) else None)
    folder.chmod(0o700)
    return folder


# -- GPUs of this machine ------------------------------------------------------------------------

WORKERS_END_IN = 30.0
"""Seconds for workers to finish their examples when the command ends before them."""


def visible_gpus() -> list[str]:
    """The GPUs of this machine that CUDA_VISIBLE_DEVICES leaves, as that variable names them."""
    from torch.cuda import device_count

    count = device_count()  # asks the driver, and starts nothing on a GPU
    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    named = [name for name in named if name]
    if count and named[:1] and named[0].startswith("MIG-"):  # a process sees one of several
        return [name for name in named if name.startswith("MIG-")]
    return named[:count] if named else [str(index) for index in range(count)]


def devices_of(launcher: Mapping[str, Any], device: str) -> list[str]:
    """The GPUs of each worker as CUDA_VISIBLE_DEVICES names them; empty: the CPU. More workers than GPUs
    share them in turn.

    Args:
        launcher: the config of ``launcher=gpus``: `workers` (None: as many as the visible GPUs are enough
            for) and `gpus_per_worker` (more than one for a model that is spread over several).
        device: the config's device.

    Raises:
        UserError: no GPU and no number of workers on the CPU; a device that names one GPU; fewer GPUs
            than one worker needs.
    """
    workers, each = launcher["workers"], launcher["gpus_per_worker"]
    for key, value, most in (("workers", workers or 1, 1000), ("gpus_per_worker", each, 1000)):
        if not isinstance(value, int) or not 1 <= value <= most or workers == 0:
            raise UserError(
                f"launcher.{key} is {launcher[key]!r}; allowed: a positive integer up to {most}"
            )
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {device!r}; allowed with launcher=gpus: auto, cuda, cpu")
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus and (device == "cuda" or workers is None):
        raise UserError(
            "launcher=gpus finds no GPU; allowed: a machine with GPUs, or device=cpu and "
            "launcher.workers=N for N workers on its CPUs"
        )
    if not gpus:
        return [""] * workers
    if each > len(gpus):
        raise UserError(f"launcher.gpus_per_worker is {each}; this machine has {len(gpus)} GPUs")
    groups = [",".join(gpus[at : at + each]) for at in range(0, len(gpus) - each + 1, each)]
    return [groups[index % len(groups)] for index in range(workers or len(groups))]


class GpuLauncher(Launcher):
    """``launcher=gpus``: one worker per GPU; whichever is free takes the next job."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        """As `hydra.plugins.launcher.Launcher`."""
        self.jobs: Jobs = task_function
        self.config = config

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run the jobs, each in a process of its own."""
        collected = Collected(self.jobs, job_overrides)
        folder = _log_folder(self.config)
        free = deque(devices_of(self.config.launcher, self.config.device))
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        threads = str(max(1, cores // len(free)))
        waiting = deque(enumerate(job_overrides))
        running: dict[int, tuple[subprocess.Popen[str], str]] = {}
        try:
            while waiting or running:
                while waiting and free:
                    number, overrides = waiting.popleft()
                    device = free.popleft()
                    environment = {"OMP_NUM_THREADS": threads, **os.environ}
                    environment["CUDA_VISIBLE_DEVICES"] = device
                    running[number] = (
                        self._started(folder / str(number), overrides, environment),
                        device,
                    )
                for number, (worker, device) in list(running.items()):
                    status = worker.poll()
                    if status is None:
                        continue
                    del running[number]
                    free.append(device)
                    told, log = folder / f"{number}.json", folder / f"{number}.log"
                    outcome = JobOutcome(**json.loads(told.read_text())) if told.exists() else None
                    how = "killed" if status < 0 else f"exit status {status}"
                    collected.add(number, outcome, f"{number} ended without a result ({how})", log)
                time.sleep(0.2)
        except BaseException:
            _end([worker for worker, _ in running.values()])
            raise
        return collected.returned()

    def _started(
        self, place: Path, overrides: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """A worker in a process group of its own: of the terminal's Ctrl-C the command tells it."""
        own = OmegaConf.to_container(self.config.hydra.overrides.hydra, resolve=False)
        job = {
            "argv": self.jobs.argv,
            "overrides": [*own, *overrides, "hydra.mode=RUN"],  # type: ignore[misc]
            "outcome": f"{place}.json",
        }
        with open(f"{place}.log", "w") as log:
            worker = subprocess.Popen(
                [sys.executable, "-m", "kvbench.cli.launchers"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
                text=True,
                process_group=0,
            )
        assert worker.stdin is not None
        worker.stdin.write(json.dumps(job) + "\n")
        worker.stdin.flush()
        return worker


def _end(workers: Sequence[subprocess.Popen[str]]) -> None:
    """Let each finish its example; a second SIGTERM ends the example, too."""
    patience = time.monotonic() + WORKERS_END_IN
    for _ in range(2):
        for worker in workers:
            if worker.poll() is None:
                worker.terminate()
        while time.monotonic() < patience and any(worker.poll() is None for worker in workers):
            time.sleep(0.1)


def work() -> None:
    """A worker: runs the job that standard input names, and ends after its example when the command does,
    however it died: then standard input ends."""
    job = json.loads(sys.stdin.readline())

    def watch() -> None:
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(WORKERS_END_IN)
        os._exit(1)  # what hangs hears no signal

    threading.Thread(target=watch, name="command", daemon=True).start()
    jobs = Jobs(job["argv"])
    with Termination(), hydra_of_conf() as hydra:
        hydra.run("config", jobs, job["overrides"])
    replace(Path(job["outcome"]), json.dumps(asdict(jobs.outcomes[0])).encode())


# -- Slurm ---------------------------------------------------------------------------------------

ENDED = ("COMPLETED", "BOOT_FAIL", "CANCELLED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY")
ENDED += ("PREEMPTED", "REVOKED", "TIMEOUT")
"""States of Slurm's after which a job writes no result any more. One that was preempted and goes back
into the queue is PENDING."""
GONE = "gone"
"""Slurm remembers no such job."""
ARRAY = 1000
"""Jobs of one array that Slurm takes by default."""
LATE = 60.0
"""Seconds by which a network file system may show a file late."""


def states_of(arrays: Sequence[str]) -> dict[str, tuple[str, str]] | None:
    """State and reason, in Slurm's words, by job id of what is in job arrays; None if Slurm does not
    answer. squeue, unlike sacct, needs no accounting."""
    command = ["squeue", "--noheader", "--array", "--states=all", "--format=%i %T %r"]
    found: dict[str, tuple[str, str]] = {}
    for array in arrays:
        said = subprocess.run(
            [*command, f"--jobs={array}"], capture_output=True, text=True, check=False
        )
        if said.returncode and "Invalid job id" not in said.stderr:
            return None
        for line in said.stdout.splitlines():
            job_id, state, *reason = line.split(maxsplit=2)
            found[job_id] = state, " ".join(reason)
    return found


def waiting_line(states: Sequence[tuple[str, str]]) -> str | None:
    """One line on jobs that wait in the queue, e.g. "3 run, 5 wait: Resources"; None if none waits for a
    reason."""
    counts = Counter(state == "PENDING" for state, _ in states if state not in (*ENDED, GONE))
    reasons = {reason for state, reason in states if state == "PENDING"} - {"", "None"}
    if not reasons:
        return None
    return f"{counts[False]} run, {counts[True]} wait: {', '.join(sorted(reasons))}"


class SlurmLauncher(BaseSubmititLauncher):
    """``launcher=slurm``: hydra-submitit-launcher's, which submits and runs the jobs as arrays. Added are
    that one which dies leaves the others alone, that it is found dead without Slurm's accounting, and that
    a job whose time is over loses no example."""

    _EXECUTOR = "slurm"

    def __call__(self, *job: Any) -> JobReturn:
        """Run the job, in the process that Slurm started."""
        os.environ.setdefault("OMP_NUM_THREADS", os.environ.get("SLURM_CPUS_PER_TASK", "1"))
        with requeued_in_time():
            return super().__call__(*job)

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit the jobs; wait until each has a result or can have none any more."""
        assert self.config is not None
        collected = Collected(self.task_function, job_overrides)
        folder = _log_folder(self.config)
        jobs = self._submitted(folder, job_overrides)
        arrays = sorted({job.job_id.partition("_")[0] for job in jobs})
        count = f"{len(jobs)} job{'s' * (len(jobs) > 1)}"
        complain(f"{count} in Slurm: {' '.join(arrays)}; logs: {folder}")
        since: dict[int, float] = {}
        waited = None
        poll_s = float(self.config.launcher.poll_s)
        try:
            while len(collected.outcomes) < len(jobs):
                time.sleep(poll_s)
                list(folder.iterdir())  # refreshes a network file system's view
                left = {n: job for n, job in enumerate(jobs) if n not in collected.outcomes}
                told = [n for n, job in left.items() if job.paths.result_pickle.exists()]
                states = states_of(arrays)
                for number in told:
                    collected.add(number, *_result(left.pop(number)))
                if states is None:
                    continue
                now = {n: states.get(job.job_id, (GONE, "")) for n, job in left.items()}
                line = waiting_line(list(now.values()))
                if line and line.partition(": ")[2] != waited:
                    complain(line)
                    waited = line.partition(": ")[2]
                for number in ended_for_good({n: s for n, (s, _) in now.items()}, since, poll_s):
                    job, how = left[number], now[number][0]
                    said = f"{job.job_id} ended without a result ({how})"
                    collected.add(number, None, said, job.paths.stderr)
        except BaseException:
            results = Path(self.config.results_dir) / self.config.experiment_name
            complain(
                f"Slurm goes on with {count}; to end that: scancel {' '.join(arrays)}; "
                f"to see what came of it: kvbench-report {results}"
            )
            raise
        return collected.returned()

    def _submitted(self, folder: Path, job_overrides: Sequence[Sequence[str]]) -> list[Any]:
        """The jobs in Slurm's queue.

        Raises:
            UserError: there is no Slurm here, or it refuses them.
        """
        import submitit  # not above: Hydra imports plugins at every start
        from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
        from submitit.core.utils import FailedJobError

        assert self.config is not None
        everywhere = set(OmegaConf.structured(BaseQueueConf).keys())
        options = {k: v for k, v in self.params.items() if v is not None and k != "submitit_folder"}
        timeouts, cpus = options.pop("max_num_timeout"), options.get("cpus_per_task")
        options["additional_parameters"] |= OmegaConf.to_container(
            self.config.launcher.sbatch or OmegaConf.create()
        )
        # since Slurm 22.05, srun takes no CPUs from sbatch
        options["srun_args"] = [] if cpus is None else [f"--cpus-per-task={cpus}"]
        state, jobs, said = Singleton.get_state(), [], io.StringIO()
        arguments = [
            (list(o), "hydra.run.dir", n, f"job_{n}", state) for n, o in enumerate(job_overrides)
        ]
        try:
            executor = submitit.AutoExecutor(
                folder=folder, cluster="slurm", slurm_max_num_timeout=timeouts
            )
            executor.update_parameters(
                **{k if k in everywhere else f"slurm_{k}": v for k, v in options.items()}
            )
            with redirect_stderr(said), _outside_a_job():
                for at in range(0, len(arguments), ARRAY):
                    some = arguments[at : at + ARRAY]
                    jobs += executor.map_array(self, *zip(*some, strict=True))
        except FailedJobError as error:  # what sbatch said is in it
            why = re.findall(r"^sbatch: error: (.*)", str(error), re.MULTILINE)
            raise UserError(
                f"Slurm refused the jobs: {why[0] if why else first_line(error)}"
            ) from error
        except RuntimeError as error:
            raise UserError(
                f"launcher=slurm: {first_line(error)}; allowed: a machine with sbatch and srun"
            ) from error
        print(said.getvalue(), end="", file=sys.stderr)
        return jobs


def _result(job: Any) -> tuple[JobOutcome | None, str, Path]:
    """What a job of submitit's wrote, and words for one that wrote an error."""
    try:
        value = job.results()[0].return_value
    except Exception as error:  # noqa: BLE001 - submitit's, with the job's traceback in it
        lines = [
            line for line in str(error).splitlines() if re.match(r"[\w.]+(Error|Exit)\b", line)
        ]
        return None, f"{job.job_id} {lines[-1] if lines else 'failed'}", job.paths.stderr
    assert isinstance(value, JobOutcome)
    return value, "", job.paths.stderr


def ended_for_good(states: Mapping[int, str], since: dict[int, float], poll_s: float) -> list[int]:
    """Jobs without a result that Slurm has seen the end of. A file system may show a result late: they
    count when Slurm has said so for three looks, or for `LATE` if the job ended well or is forgotten.

    Args:
        states: Slurm's, by job.
        since: when each was first seen ended; changed.
    """
    found = []
    for number, state in states.items():
        if state not in (*ENDED, GONE):
            since.pop(number, None)
            continue
        waited = time.monotonic() - since.setdefault(number, time.monotonic())
        patience = 2 * poll_s
        if state in ("COMPLETED", GONE):
            patience = max(LATE, patience)
        if waited >= patience:
            found.append(number)
    return found


@contextmanager
def _outside_a_job() -> Iterator[None]:
    """Without the variables of an interactive job that this may run in: sbatch takes them for wishes.
    SLURM_CONF and the user's own SBATCH_* stay."""
    hidden = {}
    if "SLURM_JOB_ID" in os.environ:
        own = [n for n in os.environ if n.startswith(("SLURM", "SRUN_")) and n != "SLURM_CONF"]
        hidden = {name: os.environ.pop(name) for name in own}
    try:
        yield
    finally:
        os.environ.update(hidden)


@contextmanager
def requeued_in_time() -> Iterator[None]:
    """In a job of submitit's: what happens when Slurm announces the end of its time. submitit puts the job
    back into the queue and exits, or raises an error if it cannot: neither may pass for a failure of the
    example that runs.

    Raises:
        Terminated: the job is back in the queue, or cannot go there, which its log says.
    """
    from submitit import JobEnvironment

    number = signal.Signals[f"SIG{JobEnvironment.USR_SIG}"]
    requeue: Any = signal.getsignal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            requeue(number, frame)
        except SystemExit as done:
            raise Terminated from done
        except Exception as error:
            complain(f"out of time: {first_line(error)}")
            raise Terminated from error

    signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, requeue)


if __name__ == "__main__":
    work()
