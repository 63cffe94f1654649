"""The process in which a method's code runs: its protection against calls that would end it, and its
settings that the code could leave changed (`SETTINGS`).

`kvbench.engine.guard` compares the settings before and after every call of a method, and restores them.
Changes to anything else are not noticed: replaced functions of libraries, limits that the system does
not let a process raise again, functions that run when the process ends.
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
"""What messages allow in place of a global generator."""

_SMALLEST = 5e-324
"""The smallest positive float64. Where the processor flushes such numbers to 0, its product with 1 is
0."""

STREAMS = {"stdout": 1, "stderr": 2}
"""The standard streams for output, and their file descriptors."""


class MethodExit(RuntimeError):
    """A method tried to end the program, by raising SystemExit, GeneratorExit or KeyboardInterrupt, or
    by a call that `process_protected` refuses. Only the method fails."""


@contextmanager
def interrupts_noted() -> Iterator[Callable[[], bool]]:
    """Tell within this context a KeyboardInterrupt of the user's Ctrl-C from one that code raises
    itself.

    A Ctrl-C raises KeyboardInterrupt, as without the context.

    Yields:
        a function that returns whether there was a Ctrl-C. Where the process has a handler of its own
        for Ctrl-C, this cannot be known, and the function returns True.
    """
    if not in_main_thread():
        yield lambda: False  # the main thread alone receives signals
        return
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: True
        return
    interrupts: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield lambda: bool(interrupts)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


_end_process, _close, _close_range = os._exit, os.close, os.closerange


class _Inside(threading.local):
    """Whether the current thread runs a method's code.

    Attributes:
        process: the id of the process in which it does; 0 where it does not. In a process that the code
            has forked, the id is another than the process's own, and nothing is refused there.
    """

    process = 0


_inside = _Inside()
_lock = threading.Lock()
_protected_calls = 0
"""How many calls of methods are within `process_protected` now, in all threads."""


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
    """Refuse calls within this context that end the process at once or close a standard stream.

    (After a standard stream is closed, the next file that is opened gets its descriptor, and what is
    printed goes into that file.) A process that the code forks may call both. If it returns from the
    code, it ends here; otherwise it would go on with the job and write the same records.
    """
    global _protected_calls
    process, outer_process = os.getpid(), _inside.process
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
        _inside.process = outer_process
        with _lock:
            _protected_calls -= 1
            if not _protected_calls:
                os._exit, os.close, os.closerange = _end_process, _close, _close_range


@dataclass(frozen=True)
class Setting:
    """A setting of the whole process that a method's code could leave changed.

    Attributes:
        read: returns the value.
        write: restores a value that `read` returned.
        shown: whether messages show the values.
        allowed: what messages allow a method to do instead of changing the setting.
        imports_change_it: whether importing a package may change it.
        note: called with the value before the code runs; None where `write` needs nothing but the value.
        is_there: returns whether the setting exists now; None where it always does.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    shown: bool = True
    allowed: str = "to leave it as it was"
    imports_change_it: bool = False
    note: Callable[[Any], None] | None = None
    is_there: Callable[[], bool] | None = None


def are_equal(now: Any, before: Any) -> bool:
    """Whether two values are equal: numbers, tensors, arrays, or dictionaries and lists of these."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(are_equal(now[key], before[key]) for key in now)
    if isinstance(now, list):
        return len(now) == len(before) and all(map(are_equal, now, before))
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, before))
    return bool(now == before)


# --- functions that read or write a setting by more than one call ---------------------------------


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
    """Whether the process's alarm is set, and its period in seconds. The time that is left is not part
    of the value, since it changes by itself."""
    left, period = signal.getitimer(signal.ITIMER_REAL)
    return left > 0, period


def _set_alarm(before: tuple[bool, float]) -> None:
    is_set, period = before
    signal.setitimer(signal.ITIMER_REAL, period if is_set else 0.0, period)


def _stream(name: str) -> tuple[Any, bool]:
    """The object in ``sys`` for the standard stream `name`, and whether it is open."""
    stream = getattr(sys, name)
    return stream, not getattr(stream, "closed", True)


def _set_stream(name: str, before: tuple[Any, bool]) -> None:
    """Restore the object of a standard stream; if it has been closed, open a new object on the same
    descriptor."""
    stream, was_open = before
    if was_open and stream.closed:
        stream = open(STREAMS[name], "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    setattr(sys, name, stream)


_copies: dict[int, tuple[tuple[int, int], int]] = {}
"""By the descriptor of a standard stream: the device and inode of the file that it was when it was
copied last, and the descriptor of the copy, from which the stream can be opened again."""


def _file_of(number: int) -> tuple[int, int] | None:
    """The device and inode of the file behind a descriptor; None where it is closed."""
    try:
        status = os.fstat(number)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _keep_copy(number: int, file: tuple[int, int] | None) -> None:
    """Copy the descriptor of a standard stream, unless there is a copy that goes to the same `file`."""
    copied = _copies.get(number)
    if file is None or (copied is not None and copied[0] == file):
        return
    if copied is not None:
        os.close(copied[1])
    _copies[number] = file, os.dup(number)


def _reopen(number: int, before: tuple[int, int] | None) -> None:
    """Let a standard stream go to the file to which it went, by its copy; close it if it was closed."""
    if before is None:
        _close(number)  # `os.close` refuses it while a method runs
    else:
        os.dup2(_copies[number][1], number)


@dataclass(frozen=True)
class NumpyGenerator:
    """The state of numpy's global generator at one moment.

    Attributes:
        memory: the generator's memory, which takes a microsecond to copy; None for a kind of generator
            whose layout is not known here.
        state: what `np.random.get_state` returns, which takes 30 microseconds.
    """

    memory: bytes | None
    state: dict[str, Any]

    @classmethod
    def read(cls, known: NumpyGenerator | None) -> NumpyGenerator:
        """Read the state. `known` is a state that was read earlier, or None; it is returned again if the
        generator has drawn nothing since, which its memory tells."""
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]  # not in its stubs
        memory = None
        if isinstance(source, np.random.MT19937):
            # 624 numbers of 32 bits, and the index of the next one.
            memory = ctypes.string_at(source.ctypes.state_address, 625 * 4)
        # Normal numbers are drawn two at a time. While the second is left, a call may return it without
        # a draw, and the memory does not show that.
        if known is None or known.state["has_gauss"] or memory is None or memory != known.memory:
            return cls(memory, np.random.get_state(legacy=False))
        return known

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, NumpyGenerator):
            return NotImplemented
        return self is other or are_equal(self.state, other.state)


_numpy_generator_read: list[NumpyGenerator] = []
"""The state of numpy's global generator that was read or set last; empty before the first."""


def _numpy_generator() -> NumpyGenerator:
    """The state of numpy's global generator now."""
    known = _numpy_generator_read[0] if _numpy_generator_read else None
    _numpy_generator_read[:] = [NumpyGenerator.read(known)]
    return _numpy_generator_read[0]


def _set_numpy_generator(before: NumpyGenerator) -> None:
    np.random.set_state(before.state)
    _numpy_generator_read[:] = [before]


SETTINGS: dict[str, Setting] = {
    # In the order in which they are restored. The first four come first because with a low recursion
    # limit, on another device or within a mode of torch the others could not even be read.
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
