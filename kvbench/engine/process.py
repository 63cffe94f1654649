"""The process that a method's code runs in: what would end it, and settings that could be left changed.

`kvbench.engine.guard` compares the settings before and after every call of a method, and sets them
back. What is not here can be changed unnoticed: functions of libraries that are replaced, limits that
the system does not let a process raise again, what runs when the process ends.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NoReturn

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


class MethodExit(RuntimeError):
    """A method asked the program to end (by SystemExit, GeneratorExit or a KeyboardInterrupt of its
    own); only the method fails."""


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Within this context a Ctrl-C raises KeyboardInterrupt, as ever.

    Yields:
        a function that tells whether there was one: code may raise KeyboardInterrupt itself. Where the
        process answers Ctrl-C in a way of its own, that is not known, and every one counts.
    """
    if not in_main_thread():
        yield lambda: False  # signals come to the main thread
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: True
        return
    came: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        came.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_end_process, _close, _close_range = os._exit, os.close, os.closerange


class _Inside(threading.local):
    """Of each thread: the process in which it runs a method's code now, 0 where it runs none."""

    process = 0


_inside = _Inside()
_lock = threading.Lock()
_protected_calls = 0
"""How many threads are within `process_protected` now."""


def _exit_refused(status: int) -> NoReturn:
    if _inside.process == os.getpid():
        raise MethodExit(f"a method called os._exit({status}); allowed: to raise an exception")
    _end_process(status)


def _close_unless_standard(fd: int) -> None:
    if fd in (0, 1, 2) and _inside.process == os.getpid():
        raise MethodExit(
            f"a method called os.close({fd}), of a standard stream; allowed: to leave it open"
        )
    _close(fd)


def _close_range_refused(first: int, end: int) -> None:
    if _inside.process == os.getpid():
        raise MethodExit(
            f"a method called os.closerange({first}, {end}), of files that others opened; allowed: "
            "to close its own"
        )
    _close_range(first, end)


@contextmanager
def process_protected() -> Iterator[None]:
    """Within this context the process can neither be ended without a word nor lose its standard streams:
    the next file that is opened would get a closed stream's number, and what is printed would go into
    it. A process that the code forks can do both, and where it comes back from the code, it ends:
    it would write the job's records, too."""
    global _protected_calls
    process, outer = os.getpid(), _inside.process
    with _lock:
        _protected_calls += 1
        os._exit, os.close, os.closerange = (
            _exit_refused,
            _close_unless_standard,
            _close_range_refused,
        )
    _inside.process = process
    try:
        yield
    finally:
        if os.getpid() != process:
            _end_process(1)
        _inside.process = outer
        with _lock:
            _protected_calls -= 1
            if not _protected_calls:
                os._exit, os.close, os.closerange = _end_process, _close, _close_range


@dataclass(frozen=True)
class Setting:
    """A setting of the whole process.

    Attributes:
        read, write: how its value is read, and set again to what was read.
        shown: whether a message can show its values.
        allowed: what a method may do instead of changing it.
        imports_change_it: whether importing a package may change it.
        note: called with the value before the code runs, where `write` will need more than that value.
        is_there: tells whether there is anything to be read; None: there always is.
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
        _close(number)  # `os.close` refuses it while a method runs
    else:
        os.dup2(_copies[number][1], number)


@dataclass(frozen=True)
class NumpyGenerator:
    """The state of numpy's global generator at one moment.

    Attributes:
        numbers: the generator's memory, which takes a microsecond to copy; None where it is of a kind
            whose memory is not known here.
        state: as `np.random.get_state` tells it, which takes 30 microseconds.
    """

    numbers: bytes | None
    state: dict[str, Any]

    @classmethod
    def read(cls, known: NumpyGenerator | None) -> NumpyGenerator:
        """The state now. `known` is a state that was read earlier: if the generator has drawn nothing
        since, it is returned again."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
        numbers = None
        if isinstance(source, np.random.MT19937):  # 624 numbers of 32 bits and a place among them
            numbers = ctypes.string_at(source.ctypes.state_address, 625 * 4)
        # Normal numbers are drawn two at a time: where one is left, it goes without a draw.
        if known is None or known.state["has_gauss"] or numbers is None or numbers != known.numbers:
            return cls(numbers, np.random.get_state(legacy=False))
        return known

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumpyGenerator):
            return NotImplemented
        return self is other or same(self.state, other.state)


_numpy_generator_read: list[NumpyGenerator] = []
"""The state of numpy's global generator that was read or set last, if any was."""


def _numpy_generator() -> NumpyGenerator:
    """The state of numpy's global generator now."""
    known = _numpy_generator_read[0] if _numpy_generator_read else None
    _numpy_generator_read[:] = [NumpyGenerator.read(known)]
    return _numpy_generator_read[0]


def _set_numpy_generator(before: NumpyGenerator) -> None:
    np.random.set_state(before.state)
    _numpy_generator_read[:] = [before]


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
        _numpy_generator,
        _set_numpy_generator,
        shown=False,
        allowed=OWN_GENERATOR,
    ),
    "Python's global generator": Setting(
        random.getstate, random.setstate, shown=False, allowed=OWN_GENERATOR
    ),
}
"""Every setting that is compared, by its name in messages."""
