"""Settings of the process that code could leave changed: how each is read, and how it is set back.

`kvbench.engine.guard` compares them before and after every call of a method. What is not here can be
changed unnoticed: functions of libraries that are replaced, limits that the system does not let a
process raise again, what runs when the process ends.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.limits import in_main_thread

_Handler = Callable[..., Any] | int | None

OWN_GENERATOR = "its own generator"
"""What a method may draw from, beside the generator that it is given."""

_SMALLEST = 5e-324
"""The smallest positive number; times one it is 0 where a processor takes such numbers for 0."""

STREAMS = {"stdout": 1, "stderr": 2}
"""The standard streams that are written to, and their numbers in the process."""


@dataclass(frozen=True)
class Setting:
    """A setting of the whole process.

    Attributes:
        read, write: how its value is read, and set again to what was read.
        shown: whether a message can show its values.
        allowed: what a method may do instead of changing it.
        imports_change_it: whether importing a package may change it.
        note: called with the value before the code runs, where `write` needs more than the value.
        is_there: whether there is anything to be read; None: there always is.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    shown: bool = True
    allowed: str = "to leave it as it was"
    imports_change_it: bool = False
    note: Callable[[Any], None] | None = None
    is_there: Callable[[], bool] | None = None


def same(now: Any, before: Any) -> bool:
    """Whether two values are equal: numbers, tensors, arrays, or dictionaries and lists of such."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(same(now[key], before[key]) for key in now)
    if isinstance(now, list):
        return len(now) == len(before) and all(map(same, now, before))
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, before))
    return bool(now == before)


# --- what is read and written by more than one call ----------------------------------------------


def _set_environment(variables: Mapping[str, str]) -> None:
    """Set the environment to these variables alone."""
    os.environ.clear()
    os.environ.update(variables)


def _set_search_path(folders: list[str]) -> None:
    sys.path[:] = folders


def _set_collection(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()


def _leave_function_modes(count: int) -> None:
    while torch._C._len_torch_function_stack() > count:
        torch._C._pop_torch_function_stack()


def _leave_dispatch_modes(count: int) -> None:
    while torch._C._len_torch_dispatch_stack() > count:
        torch._C._pop_torch_dispatch_stack(None)


def _set_onednn(enabled: bool) -> None:
    torch.backends.mkldnn.enabled = enabled  # type: ignore[assignment]


def _flushes_small_numbers() -> bool:
    return _SMALLEST * 1.0 == 0.0


def _warnings_as_errors() -> list[Any]:
    return [rule for rule in warnings.filters if rule[0] == "error"]


def _set_warnings_as_errors(before: list[Any]) -> None:
    rules: Any = warnings.filters
    rules[:] = [rule for rule in rules if rule[0] != "error" or rule in before]


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


def _handlers() -> list[_Handler]:
    return [signal.getsignal(number) for number in _SIGNALS]


def _set_handlers(handlers: list[_Handler]) -> None:
    for number, handler in zip(_SIGNALS, handlers, strict=True):
        signal.signal(number, handler)


def _alarm() -> tuple[bool, float]:
    """Whether the process's alarm is set, and the seconds after which it comes again."""
    left, period = signal.getitimer(signal.ITIMER_REAL)
    return left > 0, period


def _set_alarm(before: tuple[bool, float]) -> None:
    is_set, period = before
    signal.setitimer(signal.ITIMER_REAL, period if is_set else 0.0, period)


def _stream(name: str) -> tuple[Any, bool]:
    """The object that stands for a standard stream, and whether it is open."""
    stream = getattr(sys, name)
    return stream, not getattr(stream, "closed", True)


def _set_stream(name: str, before: tuple[Any, bool]) -> None:
    """Put the object back that stood there; where it was closed, a new one of the same stream."""
    stream, was_open = before
    if was_open and stream.closed:
        stream = open(STREAMS[name], "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    setattr(sys, name, stream)


_copies: dict[int, tuple[tuple[int, int], int]] = {}
"""By the number of a standard stream: the file that it was (device and inode) when it was copied last,
and the number of the copy, from which the stream can be opened again."""


def _file_of(number: int) -> tuple[int, int] | None:
    """The file that a standard stream goes to, as device and inode; None where the stream is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _keep_copy(number: int, file: tuple[int, int] | None) -> None:
    """See that there is a copy of the standard stream, which goes to `file`."""
    known = _copies.get(number)
    if file is None or (known is not None and known[0] == file):
        return
    if known is not None:
        os.close(known[1])
    _copies[number] = file, os.dup(number)


def _reopen(number: int, before: tuple[int, int] | None) -> None:
    """Let the standard stream go where it went, from its copy; close it where it was closed."""
    if before is None:
        os.close(number)
    else:
        os.dup2(_copies[number][1], number)


SETTINGS: dict[str, Setting] = {
    # In the order in which they are set back: with a low limit or within a mode of torch others cannot
    # even be read.
    "Python's recursion limit": Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "torch's default device": Setting(
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "the number of torch's function modes": Setting(
        torch._C._len_torch_function_stack, _leave_function_modes
    ),
    "the number of torch's dispatch modes": Setting(
        torch._C._len_torch_dispatch_stack, _leave_dispatch_modes
    ),
    "torch's default dtype": Setting(torch.get_default_dtype, torch.set_default_dtype),
    "torch's grad mode": Setting(torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's float32 matmul precision": Setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch's number of threads": Setting(torch.get_num_threads, torch.set_num_threads),
    "torch's deterministic algorithms": Setting(
        torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode
    ),
    "torch's autocast": Setting(
        partial(torch.is_autocast_enabled, "cpu"), partial(torch.set_autocast_enabled, "cpu")
    ),
    "torch's oneDNN": Setting(lambda: torch.backends.mkldnn.enabled, _set_onednn),
    **{
        f"torch's {name} attention": Setting(
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    "the flushing of the smallest numbers": Setting(
        _flushes_small_numbers, torch.set_flush_denormal
    ),
    "numpy's handling of errors": Setting(np.geterr, lambda before: np.seterr(**before)),
    "Python's garbage collection": Setting(gc.isenabled, _set_collection),
    "warnings that are errors": Setting(_warnings_as_errors, _set_warnings_as_errors, shown=False),
    "the handlers of signals": Setting(
        _handlers, _set_handlers, shown=False, is_there=in_main_thread
    ),
    "the alarm": Setting(_alarm, _set_alarm, shown=False, is_there=in_main_thread),
    **{
        f"the file of the standard {kind}": Setting(
            partial(_file_of, STREAMS[name]),
            partial(_reopen, STREAMS[name]),
            shown=False,
            note=partial(_keep_copy, STREAMS[name]),
        )
        for name, kind in (("stdout", "output"), ("stderr", "error"))
    },
    "the standard output": Setting(
        partial(_stream, "stdout"), partial(_set_stream, "stdout"), shown=False
    ),
    "the standard error": Setting(
        partial(_stream, "stderr"), partial(_set_stream, "stderr"), shown=False
    ),
    "the working directory": Setting(os.getcwd, os.chdir),
    "the environment": Setting(
        partial(dict, os.environ), _set_environment, shown=False, imports_change_it=True
    ),
    "the search path of modules": Setting(
        lambda: list(sys.path), _set_search_path, shown=False, imports_change_it=True
    ),
    "torch's global generator": Setting(
        torch.get_rng_state, torch.set_rng_state, shown=False, allowed=OWN_GENERATOR
    ),
    "CUDA's global generator": Setting(
        torch.cuda.get_rng_state_all,
        torch.cuda.set_rng_state_all,
        shown=False,
        allowed=OWN_GENERATOR,
        is_there=torch.cuda.is_initialized,
    ),
    "numpy's global generator": Setting(
        partial(np.random.get_state, legacy=False),
        np.random.set_state,
        shown=False,
        allowed=OWN_GENERATOR,
    ),
    "Python's global generator": Setting(
        random.getstate, random.setstate, shown=False, allowed=OWN_GENERATOR
    ),
}
"""Every setting that is compared, by its name in messages."""
