"""Every call of a method goes through here, so that no method changes what another one reads.

Methods of a job read the same keys, values, queries and shared results (`LayerKV.once`), and run in one
process. A method from outside `kvbench.methods` gets copies of the tensors. One from inside gets the
tensors themselves, and after every call it is checked that it wrote to none (`Seal`). A method that
leaves a setting of the process changed fails, and the setting is restored. While a method runs,
``os._exit`` raises, and so does ``os.close`` of a standard stream. A signal that ends the process and a
KeyboardInterrupt are not contained: they end the job, whose records are on disk up to the example in
progress.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import NORMALISERS, Budget, CompressedKV, KVError, LayerKV
from kvbench.methods.base import Method, Repetition


class SharedStateChanged(RuntimeError):
    """A method left a setting of the process changed; the message names it in one line."""


class LayerDamaged(KVError):
    """A method wrote to tensors that other methods read: nothing that is computed from this layer is
    sound. A job then runs its methods apart (`kvbench.run.batching`), so that only this one fails."""


class MethodExit(RuntimeError):
    """A method asked the program to end (SystemExit, GeneratorExit); only the method fails."""


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


def _stream_of(name: str) -> tuple[Any, bool]:
    """The object that stands for a standard stream, and whether it is open."""
    stream = getattr(sys, name)
    return stream, not getattr(stream, "closed", True)


def _restore_stream(name: str, before: tuple[Any, bool]) -> None:
    """Put the object back that stood there; where it was closed, a new one of the same stream."""
    stream, was_open = before
    if was_open and stream.closed:
        number = {"stdout": 1, "stderr": 2}[name]
        stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - it stays open
    setattr(sys, name, stream)


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
    def read(cls, known: NumpyGenerator | None = None) -> NumpyGenerator:
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
        return isinstance(other, NumpyGenerator) and (
            self is other or _same(self.state, other.state)
        )


_numpy_generators: list[NumpyGenerator] = []
"""The state of numpy's global generator that was read last."""


def _numpy_generator() -> NumpyGenerator:
    """The state of numpy's global generator now."""
    now = NumpyGenerator.read(_numpy_generators[-1] if _numpy_generators else None)
    _numpy_generators[:] = [now]
    return now


def _set_numpy_generator(generator: NumpyGenerator) -> None:
    np.random.set_state(generator.state)
    _numpy_generators[:] = [generator]


_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "torch's deterministic algorithms": (
        torch.get_deterministic_debug_mode,
        torch.set_deterministic_debug_mode,
    ),
    "the standard output": (partial(_stream_of, "stdout"), partial(_restore_stream, "stdout")),
    "the standard error": (partial(_stream_of, "stderr"), partial(_restore_stream, "stderr")),
    "the working directory": (os.getcwd, os.chdir),
    "the environment": (partial(dict, os.environ), _set_environment),
    "torch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "CUDA's global generator": (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    "numpy's global generator": (_numpy_generator, _set_numpy_generator),
    "Python's global generator": (random.getstate, random.setstate),
    **{
        f"torch's {name} attention": (
            getattr(torch.backends.cuda, f"{name}_sdp_enabled"),
            getattr(torch.backends.cuda, f"enable_{name}_sdp"),
        )
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
}
"""Process-wide settings that a call could leave changed: by name (as in messages), how each is read
and set."""


def _same(now: Any, before: Any) -> bool:
    """Whether two values are equal: numbers, tensors, arrays, or dictionaries and lists of such."""
    if isinstance(now, dict):
        return now.keys() == before.keys() and all(_same(now[key], before[key]) for key in now)
    if isinstance(now, list):
        return len(now) == len(before) and all(map(_same, now, before))
    if isinstance(now, Tensor):
        return torch.equal(now, before)
    if isinstance(now, np.ndarray):
        return bool(np.array_equal(now, before))
    return bool(now == before)


SAMPLED_ROWS = 16
"""Rows of each head of a tensor that a `Seal` compares."""


@dataclass
class Seal:
    """What tells afterwards whether a method wrote to a layer's tensors.

    Every write through torch counts a tensor's version up. Writes through numpy or ``.data`` do not: on
    a processor a sample of rows is compared, too. (On a GPU that would wait for it at every layer.)

    Attributes:
        tensors: the layer's own, and the results that methods share, by name.
        versions: of these tensors, where they count one.
        samples: rows of the layer's own tensors.
    """

    tensors: dict[str, Tensor]
    versions: dict[str, int]
    samples: dict[str, Tensor]

    @classmethod
    def of(cls, layer: LayerKV) -> Seal:
        """The seal of a layer as it is now."""
        own = {"keys": layer.keys, "values": layer.values}
        if layer.queries is not None:
            own["queries"] = layer.queries
        tensors = own | {name: result.tensor for name, result in layer.shared.items()}
        return cls(
            tensors,
            {name: x._version for name, x in tensors.items() if not x.is_inference()},
            {name: _sample(x).clone() for name, x in own.items() if x.device.type == "cpu"},
        )

    def broken(self) -> str | None:
        """The name of a tensor that was written to since, if there is one."""
        for name, version in self.versions.items():
            if self.tensors[name]._version != version:
                return name
        for name, sample in self.samples.items():
            if not torch.equal(_sample(self.tensors[name]), sample):
                return name
        return None

    def check(self, label: str, layer: LayerKV) -> None:
        """Refuse tensors that have been written to since the seal was made.

        Raises:
            LayerDamaged: naming the method `label` and the tensor that it wrote to.
        """
        written = self.broken()
        if written is not None:
            raise LayerDamaged(
                f"method {label!r} wrote to the {written} of layer {layer.layer_index} in place, which "
                "other methods read; allowed: to write to copies (clone() first; float() copies no "
                "float32)"
            )


def _sample(x: Tensor) -> Tensor:
    """`SAMPLED_ROWS` rows of each head, evenly spread, of [batch, heads, n, dim]."""
    return x[:, :, :: max(1, x.shape[2] // SAMPLED_ROWS)]


def is_foreign(method: Method) -> bool:
    """Whether the method's class comes from outside kvbench."""
    return not type(method).__module__.startswith("kvbench.")


@contextmanager
def settings_unchanged(label: str, method: Method) -> Iterator[None]:
    """A method's code runs within this context; afterwards the process's settings are restored. Of
    kvbench's own methods the environment may change: they import the packages they adapt.

    Raises:
        SharedStateChanged: the code changed one, and raised nothing itself.
        MethodExit: the code raised SystemExit or GeneratorExit.
    """
    left_out = set() if torch.cuda.is_initialized() else {"CUDA's global generator"}
    left_out |= set() if is_foreign(method) else {"the environment"}
    before = {name: read() for name, (read, _) in _PROCESS.items() if name not in left_out}
    changed: list[str] = []
    end_process, close = os._exit, os.close
    os._exit, os.close = _refuse_exit, partial(_close_unless_standard, close)
    try:
        yield
    except (SystemExit, GeneratorExit) as failure:
        if type(failure) not in (SystemExit, GeneratorExit):  # SIGTERM raises one of its own
            raise
        raise MethodExit(f"method {label!r} raised {type(failure).__name__}") from failure
    finally:
        os._exit, os.close = end_process, close
        for name, value in before.items():
            read, write = _PROCESS[name]
            now = read()
            if not _same(now, value):
                write(value)
                unprinted = name.endswith(("generator", "environment", "output", "error"))
                state = "in another state" if unprinted else f"at {now} (it was {value})"
                changed.append(f"{name} {state}")
    if changed:
        hint = "its own generator" if "generator" in changed[0] else "to leave it as it was"
        raise SharedStateChanged(
            f"method {label!r} left {changed[0]}, which others use; allowed: {hint}"
        )


@contextmanager
def sealed(seal: Seal, label: str, layer: LayerKV) -> Iterator[None]:
    """A method's code runs within this context; afterwards, also after an exception, what it did to the
    layer is checked (`Seal.check`)."""
    try:
        yield
    finally:
        seal.check(label, layer)


def _refuse_exit(status: int) -> NoReturn:
    """Stands for `os._exit` while a method's code runs; the real one would end the job without a
    word."""
    raise MethodExit(f"a method called os._exit({status}); allowed: to raise an exception")


def _close_unless_standard(close: Callable[[int], None], descriptor: int) -> None:
    """Stands for `os.close` while a method's code runs, and refuses standard streams: the next file that
    the job opens would get the closed stream's number, and what is printed would go into it."""
    if descriptor in (0, 1, 2):
        raise MethodExit(
            f"a method called os.close({descriptor}), of a standard stream; allowed: to leave it open"
        )
    close(descriptor)


def call(method: Method, hook: Callable[..., Any], *arguments: Any) -> Any:
    """A method's hook while decoding, whose arguments are of its own fork.

    Raises:
        SharedStateChanged: see `settings_unchanged`; and whatever the hook raises.
    """
    if not is_foreign(method):
        return hook(*arguments)
    with settings_unchanged(type(method).__name__, method):
        return hook(*arguments)


def _own(method: Method, layer: LayerKV, carried: dict[str, Tensor]) -> LayerKV:
    """The layer as this method may see it."""
    owner = f"{type(method).__module__}.{type(method).__qualname__}"
    if not is_foreign(method):
        return replace(layer, carried=carried, owner=owner)
    queries = None if layer.queries is None else layer.queries.clone()
    keys, values = layer.keys.clone(), layer.values.clone()
    own = replace(layer, keys=keys, values=values, queries=queries, carried=carried, shared={})
    if layer.log_weights is not None:
        own = replace(own, log_weights=layer.log_weights.clone())
    known = layer.shared.get(NORMALISERS)
    if known is not None:
        own.once(NORMALISERS, known.tensor.clone)
    return own


def compress(
    label: str,
    method: Method,
    layer: LayerKV,
    budget: Budget,
    generator: torch.Generator,
    carried: dict[str, Tensor],
) -> tuple[CompressedKV, int, Elapsed]:
    """Compress the layer by `method`: the checked result, the entries it may hold, and the clock of the
    method's own work.

    Args:
        carried: what this method noted at earlier layers.

    Raises:
        SharedStateChanged: see `settings_unchanged`.
        LayerDamaged: see `Seal.check`.
        TypeError, ValueError: see `check_held`; and whatever the method raises.
    """
    own = _own(method, layer, carried)
    with settings_unchanged(label, method), sealed(Seal.of(layer), label, layer):
        capacity = method.layer_capacity(
            replace(budget), layer.n, layer.layer_index, layer.num_layers
        )
        clock = Elapsed(layer.keys.device)
        held = method.compress(own, replace(budget), generator)
        clock.stop()
        check_held(held, layer)
    return held, capacity, clock


def rescore(
    label: str,
    method: Method,
    layer: LayerKV,
    repeated: Repetition,
    budget: Budget,
    carried: dict[str, Tensor],
) -> None:
    """Show `method` the layer while the model repeats its prompt (`Method.rescore`).

    Raises:
        SharedStateChanged: see `settings_unchanged`.
        LayerDamaged: see `Seal.check`; and whatever the method raises.
    """
    if is_foreign(method):
        parts = (repeated.queries, repeated.keys, repeated.values)
        repeated = Repetition(repeated.start, repeated.stop, *(part.clone() for part in parts))
    with settings_unchanged(label, method), sealed(Seal.of(layer), label, layer):
        method.rescore(_own(method, layer, carried), repeated, replace(budget))


def check_held(held: CompressedKV, layer: LayerKV) -> None:
    """Refuse a result that cannot replace the layer, before it is batched with other methods' rows.

    Raises:
        TypeError: no `CompressedKV`.
        ValueError: naming the tensor, its shape, dtype and device, and what is allowed.
    """
    if not isinstance(held, CompressedKV):
        raise TypeError(f"compress returned a {type(held).__name__}; allowed: a CompressedKV")
    if held.keys.dim() == 4 and not held.keys.shape[2]:
        raise ValueError("compress kept no entry; allowed: at least one per KV head")
    heads = held.keys.shape[1] if held.keys.dim() == 4 else 0
    repeats = max(1, heads // layer.keys.shape[1])  # a method may repeat keys to query heads
    batch, kv_heads = layer.keys.shape[:2]
    entries = (batch, repeats * kv_heads, *held.keys.shape[2:3])
    with_value = (*entries[:2], *(c - held.keys_only for c in entries[2:]))
    allowed = {
        "keys": ((*entries, layer.keys.shape[-1]), layer.keys.dtype),
        "values": ((*with_value, layer.values.shape[-1]), layer.values.dtype),
        "positions": (entries, torch.int64),
        "log_weights": (entries, torch.float32),
        "scores": (entries, torch.float32),
        "denominators": (entries, torch.float32),
    }
    device = layer.keys.device
    for name, (shape, dtype) in allowed.items():
        part = getattr(held, name)
        if part is None and name in ("log_weights", "scores", "denominators"):
            continue
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} are a {type(part).__name__}; allowed: a tensor")
        if tuple(part.shape) != shape or part.dtype != dtype or part.device != device:
            raise ValueError(
                f"{name} are {tuple(part.shape)} {part.dtype} on {part.device}; "
                f"allowed: {shape} {dtype} on {device}"
            )


def check_finite(layer: LayerKV, later: dict[int, Tensor] | None = None) -> None:
    """Refuse keys or values that are not finite, among which no method can choose.

    Args:
        later: on a GPU the host does not wait: what is not finite becomes 0, in place, and its counts by
            KV head are put here, by layer, for `refuse_non_finite`. None: refused at once.

    Raises:
        KVError: naming the layer and the first KV head concerned.
    """
    both = (layer.keys, layer.values)
    counts = {layer.layer_index: torch.stack([(~torch.isfinite(x)).sum((0, 2, 3)) for x in both])}
    if later is None or not layer.keys.is_cuda:
        refuse_non_finite(counts)  # before the methods run: a choice among NaN need not end
        return
    later |= counts
    for tensor in both:
        tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def refuse_non_finite(counts: Mapping[int, Tensor]) -> None:
    """Refuse layers of which keys or values are not finite; by layer, [2, kv_heads] of how many.

    Raises:
        KVError: naming the first layer and the first KV head concerned.
    """
    if not counts:
        return
    device = next(iter(counts.values())).device
    totals = torch.stack([part.sum().to(device) for part in counts.values()]).tolist()
    for layer, total in zip(counts, totals, strict=True):
        if total:
            kind, head = counts[layer].nonzero()[0].tolist()
            raise KVError(
                f"{('keys', 'values')[kind]} of layer {layer}, KV head {head} are not finite; "
                "allowed: finite numbers (try dtype=float32)"
            )
