"""kvbench in processes of its own without paying seconds of imports for each: multiprocessing's fork
server has imported everything. The children can be killed like any process."""

from __future__ import annotations

import importlib
import itertools
import multiprocessing
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

PRELOADED = (
    *("kvbench.cli.main", "kvbench.cli.build", "kvbench.report.build", "kvbench.report.render"),
    *("kvbench.report.figures", "kvbench.report.page", "kvbench.tasks.longeval_lines"),
    *("kvbench.run.preview", "transformers.models.llama.modeling_llama"),
)


@dataclass
class Child:
    """A process that the server made."""

    process: Any
    out: Path
    err: Path

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        self.process.join()
        return self.process.exitcode

    def running(self) -> bool:
        return self.process.is_alive()


class ForkServer:
    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["support.fork_server"])
        path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        with patch.dict(os.environ, {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}):
            forkserver.ensure_running()
        self._children = 0

    def kvbench(
        self,
        folder: Path,
        *arguments: str,
        stall: tuple[str, int] | None = None,
        slow_exit: bool = False,
    ) -> Child:
        """The command line in `folder`; `stall` and `slow_exit` are those of the function `stall`."""
        self._children += 1
        out, err = (folder / f".{name}-{self._children}" for name in ("out", "err"))
        what = (arguments, folder, out, err, stall, slow_exit)
        process = self._context.Process(target=_child, args=what)
        process.start()
        return Child(process, out, err)


def _child(
    arguments: Sequence[str],
    folder: Path,
    out: Path,
    err: Path,
    stalled: tuple[str, int] | None,
    slow_exit: bool,
) -> None:
    """Run the command line and end; never returns."""
    status = 1
    try:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.chdir(folder)
        from kvbench.cli.main import main

        if stalled is not None:
            stall(*stalled, slow_exit)
        sys.argv = ["kvbench"]
        main(list(arguments))
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else 0
    except BaseException:  # noqa: BLE001 - the test that asked for it reads what it was
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def stall(name: str, count: int, slow_exit: bool) -> None:
    """Make the `count`-th call (from 1) of a function print "stalled" and sleep, and with `slow_exit`
    print "signal came" and sleep again when a signal ends the first sleep."""
    place, _, function = name.rpartition(".")
    real, calls = pkgutil.resolve_name(name), itertools.count(1)

    def stalled(*arguments: Any, **named: Any) -> Any:
        if next(calls) != count:
            return real(*arguments, **named)
        print("stalled", flush=True)
        try:
            time.sleep(600)
        finally:
            if slow_exit:
                print("signal came", flush=True)
                time.sleep(600)

    setattr(pkgutil.resolve_name(place), function, stalled)


if multiprocessing.current_process().name == "MainProcess" and "pytest" not in sys.modules:
    for module in PRELOADED:  # in the server, which imports this module
        importlib.import_module(module)
