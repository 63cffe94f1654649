"""How Ctrl-C and SIGTERM end a command, and how long an example may take."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.compiler import is_compiling
from torch.nn import Module, ModuleList

TERMINATED = 143
"""Exit status after SIGTERM, as a shell reports it."""


class Terminated(SystemExit):
    """SIGTERM came."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


@contextmanager
def terminable() -> Iterator[None]:
    """Within this context SIGTERM raises `Terminated`, as Ctrl-C raises KeyboardInterrupt. A second
    signal of either kind ends the process at once.

    The example in progress is given up; a record is written whole or not at all.
    Nothing is changed outside the main thread, and where SIGTERM has a handler already: in a job on
    Slurm that handler puts a preempted job back into the queue.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not in_main_thread or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, _frame: FrameType | None) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)
        raise Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in handlers:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is stop:
                signal.signal(number, handler)


@contextmanager
def time_limit(model: Module, seconds: float) -> Iterator[None]:
    """Raise TimeoutError between two layers of a prefill that is still running after `seconds`. Decoding
    steps are left to `Stopping.timeout_s`, which stops one method's answer at a time."""
    end = time.monotonic() + seconds

    def check(_: Module, arguments: tuple[Any, ...]) -> None:
        is_prefill = bool(arguments) and arguments[0].dim() == 3 and arguments[0].shape[1] > 1
        if is_prefill and not is_compiling() and time.monotonic() > end:
            raise TimeoutError(f"the example took more than {seconds:g} s")

    hooks = [layer.register_forward_pre_hook(check) for layer in decoder_layers(model)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def decoder_layers(model: Module) -> ModuleList:
    """The layers of the model: its longest list of modules."""
    lists = [module for module in model.modules() if isinstance(module, ModuleList)]
    return max(lists, key=len)
