"""kvbench in processes of its own without paying seconds of imports for each: a server that has
imported everything forks one child per command. The children can be killed like any process."""

from __future__ import annotations

import ctypes
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass
class Child:
    """A process that the server made."""

    server: ForkServer
    pid: int
    out: Path
    err: Path
    _status: int | None = None

    def signal(self, number: int) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Exit status, negative for a signal, as subprocess has it."""
        if self._status is None:
            self._status = int(self.server.ask({"wait": self.pid})["status"])
        return self._status

    def running(self) -> bool:
        """Whether it has not ended."""
        if self._status is None:
            self._status = self.server.ask({"poll": self.pid})["status"]
        return self._status is None


class ForkServer:
    """Use as a context manager; children are of the folder and the arguments they are given."""

    def __enter__(self) -> ForkServer:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._children = 0
        self.ask({"ready": True})  # imports take seconds
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, one answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def kvbench(
        self,
        folder: Path,
        *arguments: str,
        stall: tuple[str, int] | None = None,
        deaf: bool = False,
    ) -> Child:
        """The command line in `folder`.

        Args:
            stall: (name, k): print "stalled" and sleep in place of the k-th call (from 1) of the
                function of that name.
            deaf: sleep in code that runs no Python and so hears no signal; an example that does is
                given up half a second after its time.
        """
        return self._start(folder, {"main": list(arguments), "stall": stall, "deaf": deaf})

    def job(
        self, folder: Path, kill: tuple[int, float] | None = None, *, retry_failed: bool = False
    ) -> Child:
        """A small job on a tiny model, results below `folder`.

        Args:
            kill: (k, share): die at the k-th change of the disk (from 0), after that share of its
                bytes if it is a write.
        """
        return self._start(folder, {"job": str(folder), "kill": kill, "retry_failed": retry_failed})

    def _start(self, folder: Path, what: dict[str, Any]) -> Child:
        self._children += 1
        out, err = (folder / f".{name}-{self._children}" for name in ("out", "err"))
        files = {"cwd": str(folder), "out": str(out), "err": str(err)}
        return Child(self, int(self.ask({**what, **files})["pid"]), out, err)


def serve() -> None:
    """Answer requests until standard input ends."""
    import torch

    torch.set_num_threads(1)
    import kvbench.cli.build
    import kvbench.cli.main  # noqa: F401
    from kvbench.report.build import build_report
    from kvbench.run.runner import run_job
    from support import jobs

    # what running and reporting import when they need it
    with tempfile.TemporaryDirectory() as folder:
        run_job(jobs.make_job(Path(folder)))
        build_report(Path(folder) / "e")
    for line in sys.stdin:
        request = json.loads(line)
        if "ready" in request:
            answer: dict[str, Any] = {}
        elif "wait" in request or "poll" in request:
            pid = request.get("wait") or request["poll"]
            done, status = os.waitpid(pid, 0 if "wait" in request else os.WNOHANG)
            answer = {"status": os.waitstatus_to_exitcode(status) if done else None}
        else:
            pid = os.fork()
            if pid == 0:
                _child(request, jobs.make_job)
            answer = {"pid": pid}
        print(json.dumps(answer), flush=True)


def _child(request: dict[str, Any], make_job: Callable[..., Any]) -> None:
    """Run what is asked for and end; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        for number, name in ((1, "out"), (2, "err")):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, number)
        os.chdir(request["cwd"])
        if "main" in request:
            from kvbench.cli.main import main

            if request["stall"] is not None:
                stall(*request["stall"], request["deaf"])
            sys.argv = ["kvbench"]
            main(request["main"])
        else:
            if request["kill"] is not None:
                die_at(*request["kill"])
            from kvbench.run.runner import run_job

            run_job(make_job(Path(request["job"]), retry_failed=request["retry_failed"]))
            status = 0
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
    except BaseException:  # noqa: BLE001 - the test that asked for it reads what it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def stall(name: str, count: int, deaf: bool) -> None:
    """Make the `count`-th call of a function of the package come to no end."""
    from kvbench.engine import limits as interrupts

    place, _, function = name.rpartition(".")
    real, left = pkgutil.resolve_name(name), [count]

    def stalled(*arguments: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0]:
            return real(*arguments, **named)
        print("stalled", flush=True)
        if deaf:
            mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
            libc.pthread_mutex_lock(mutex)
            libc.pthread_mutex_lock(mutex)  # waits for itself
        time.sleep(600)

    if deaf:
        interrupts.HUNG_AFTER = 0.5
    setattr(pkgutil.resolve_name(place), function, stalled)


def die_at(count: int, share: float) -> None:
    """Make this process kill itself at the `count`-th change it makes to the disk."""
    left = [count]
    for name in ("write", "fsync", "ftruncate", "replace", "open", "mkdir"):
        _prepare(name, left, share)


def _prepare(name: str, left: list[int], share: float) -> None:
    real = getattr(os, name)

    def deadly(*arguments: Any, **named: Any) -> Any:
        if left[0] == 0:
            if name == "write":
                handle, data = arguments
                real(handle, data[: int(share * len(data))])
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return real(*arguments, **named)

    setattr(os, name, deadly)


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parent))
    serve()
