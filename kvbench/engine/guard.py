"""The one door through which methods are called: what they share with others they leave as it was.

Methods of a job read the same keys, values, queries and shared results (`LayerKV.once`), and run in one
process. A method that writes to one of them, or leaves a setting of the process changed, would change
what every other method gets; here that is its own failure, and nobody else's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.kernels.elapsed import Elapsed
from kvbench.kernels.seal import Seal
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods.base import Method, Repetition

Carried = dict[str, Tensor]


class SharedStateChanged(RuntimeError):
    """A method changed something that other methods use, in one line that names it.

    Attributes:
        tensors: whether tensors were written to that others go on reading.
    """

    def __init__(self, message: str, *, tensors: bool) -> None:
        super().__init__(message)
        self.tensors = tensors


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


_PROCESS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's float32 matmul precision": (
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
    ),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's default device": (torch.get_default_device, _set_device),
    "torch's global generator": (torch.get_rng_state, torch.set_rng_state),
    "CUDA's global generator": (torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all),
    "numpy's global generator": (partial(np.random.get_state, legacy=False), np.random.set_state),
    "Python's global generator": (random.getstate, random.setstate),
}
"""What a call could leave changed for everything that runs after it in this process: by the name that
a message calls it, how it is read and set."""

GENERATORS = tuple(name for name in _PROCESS if name.endswith("generator"))
SETTINGS = tuple(name for name in _PROCESS if name not in GENERATORS)
QUICK = SETTINGS[:-1]
"""What is read in a microsecond, so that it can be at every decoded token."""


@dataclass(frozen=True)
class Settings:
    """Some of the process's settings and generators as they were."""

    values: dict[str, Any]

    @classmethod
    def now(cls, names: Sequence[str] = (*SETTINGS, *GENERATORS)) -> Settings:
        """Those of these names."""
        on_cuda = torch.cuda.is_initialized()
        return cls({n: _PROCESS[n][0]() for n in names if on_cuda or not n.startswith("CUDA")})

    def put_back(self) -> list[str]:
        """Undo what was changed since; one phrase for each thing that was."""
        changed = []
        for name, value in self.values.items():
            read, write = _PROCESS[name]
            now = read()
            if not _same(now, value):
                write(value)
                how = "in another state" if name in GENERATORS else f"at {now} (it was {value})"
                changed.append(f"{name} {how}")
        return changed


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal: numbers, tensors, arrays, or dictionaries and lists of such."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@contextmanager
def leaving_settings(label: str, settings: Settings) -> Iterator[None]:
    """A method's code runs here; afterwards every one of these settings is as it was.

    Raises:
        SharedStateChanged: it was not, and the code raised nothing itself.
    """
    try:
        yield
    except BaseException:
        settings.put_back()
        raise
    changed = settings.put_back()
    if changed:
        hint = "its own generator" if "generator" in changed[0] else "to leave it as it was"
        raise SharedStateChanged(
            f"method {label!r} left {changed[0]}, which others use; allowed: {hint}", tensors=False
        )


def call(label: str, hook: Callable[..., Any], *arguments: Any, closely: bool) -> Any:
    """What a method's hook answers while decoding; it is asked at every token, so that only what is
    read at once is looked at each time, and the generators only `closely`.

    Raises:
        SharedStateChanged: see `leaving_settings`.
    """
    if closely:
        with leaving_settings(label, Settings.now()):
            return hook(*arguments)
    before = [_PROCESS[name][0]() for name in QUICK]
    try:
        answer = hook(*arguments)
    except BaseException:
        Settings(dict(zip(QUICK, before, strict=True))).put_back()
        raise
    if before != [_PROCESS[name][0]() for name in QUICK]:
        with leaving_settings(label, Settings(dict(zip(QUICK, before, strict=True)))):
            pass
    return answer


def tensors_of(layer: LayerKV) -> dict[str, Tensor]:
    """A layer's own tensors by field."""
    found = {part.name: getattr(layer, part.name) for part in fields(layer)}
    return {name: value for name, value in found.items() if isinstance(value, Tensor)}


class Guard:
    """Calls methods on one layer, one after the other.

    Args:
        layer: what they read.
        restores: put a changed layer right again. Needs a copy of the layer, made once; a prefill
            that can run again needs none.
        closely: look at everything after every call. Otherwise writes that torch does not count are
            asked for once, after all calls, by `suspicions`, and the global generators are the caller's
            to look at; who it was, a second run under a close look tells.
    """

    def __init__(self, layer: LayerKV, *, restores: bool = False, closely: bool = True) -> None:
        self.layer = layer
        self.restores = restores
        self.closely = closely
        self.tensors = tensors_of(layer)
        if restores and not layer.pristine:
            layer.pristine.update({name: x.clone() for name, x in self.tensors.items()})
        self.seals = {name: Seal(x) for name, x in self.tensors.items()}

    def suspicions(self) -> list[Tensor | bool]:
        """Of each tensor whether some call wrote to it, nobody being blamed; what a GPU has to say comes
        as a tensor on it."""
        tensors = [(self.tensors[name], seal) for name, seal in self.seals.items()]
        tensors += [(entry.tensor, entry.seal) for entry in self.layer.shared.values()]
        return [seal.written(tensor) for tensor, seal in tensors]

    def compress(
        self,
        label: str,
        method: Method,
        budget: Budget,
        generator: torch.Generator,
        carried: Carried,
    ) -> tuple[CompressedKV, int, Elapsed]:
        """What `method` holds instead of the layer, checked, the entries it may hold, and the clock of
        its own work.

        Args:
            carried: what this method, and no other, noted at earlier layers.

        Raises:
            SharedStateChanged: it changed what others use; `tensors` says whether the layer's tensors
                are spoiled (unless this guard restores them).
            TypeError, ValueError: see `check_held`; and whatever the method raises.
        """
        layer = self.layer
        # Objects of its own, budget included: what is set on them reaches nobody else.
        own = replace(layer, carried=carried, pristine={})
        with self._watched(label):
            capacity = method.layer_capacity(
                replace(budget), layer.n, layer.layer_index, layer.num_layers
            )
            clock = Elapsed(layer.keys.device)
            held = method.compress(own, replace(budget), generator)
            clock.stop()
            check_held(held, layer)
        return held, capacity, clock

    def rescore(
        self, label: str, method: Method, repeated: Repetition, budget: Budget, carried: Carried
    ) -> None:
        """Show `method` the layer while the model repeats its prompt (`Method.rescore`).

        Raises:
            SharedStateChanged: as `compress`; and whatever the method raises.
        """
        own = replace(self.layer, carried=carried, pristine={})
        with self._watched(label):
            method.rescore(own, repeated, replace(budget))

    @contextmanager
    def _watched(self, label: str) -> Iterator[None]:
        """A method's code runs here, and leaves what others use as it was."""
        shared = dict(self.layer.shared)
        # Read anew for each call: other threads may draw from a generator, too.
        settings = Settings.now() if self.closely else Settings.now(SETTINGS)
        try:
            with leaving_settings(label, settings):
                yield
        except Exception as failure:
            changed = self._changed(shared)
            if changed:
                raise _wrote(label, changed, self.layer.layer_index) from failure
            raise
        changed = self._changed(shared)
        if changed:
            raise _wrote(label, changed, self.layer.layer_index)

    def _changed(self, before: dict[str, Any]) -> list[str]:
        """Names of the tensors that were written to; those that can be are put right."""
        closely = self.closely
        changed = [n for n, seal in self.seals.items() if seal.broken(self.tensors[n], closely)]
        shared = self.layer.shared
        replaced = [name for name, entry in before.items() if shared.get(name) is not entry]
        written = [n for n, entry in shared.items() if entry.seal.broken(entry.tensor, closely)]
        if not (changed or replaced or written):
            return []
        if self.restores:
            for name in changed:
                self.tensors[name].copy_(self.layer.pristine[name])
            self.seals = {name: Seal(x) for name, x in self.tensors.items()}
        # Only what was there before and is whole stays; the rest is computed again when it is wanted.
        shared.clear()
        shared.update(
            {
                name: entry
                for name, entry in before.items()
                if not changed and not entry.seal.broken(entry.tensor)
            }
        )
        return [*changed, *dict.fromkeys([*replaced, *written])]


def _wrote(label: str, names: list[str], layer: int) -> SharedStateChanged:
    return SharedStateChanged(
        f"method {label!r} wrote to {', '.join(names)} of layer {layer}, which other methods read; "
        "allowed: to write to copies (clone() first)",
        tensors=True,
    )


def check_held(held: CompressedKV, layer: LayerKV) -> None:
    """Refuse what cannot stand in the layer's place, before other methods' rows meet it.

    Raises:
        TypeError: no `CompressedKV`.
        ValueError: naming the tensor, its shape, dtype and device, and what is allowed.
    """
    if not isinstance(held, CompressedKV):
        raise TypeError(f"compress returned a {type(held).__name__}; allowed: a CompressedKV")
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


def check_finite(layer: LayerKV) -> None:
    """Refuse keys or values that are not finite: no method can choose among them.

    Raises:
        KVError: naming the layer and the first KV head concerned.
    """
    # One pass: a sum is finite unless something in it is not (or it overflows: then look closer). Read
    # before the methods run, both at once: a choice among NaN need not end.
    both = torch.stack([x.sum(dtype=torch.float32) for x in (layer.keys, layer.values)])
    if bool(torch.isfinite(both).all()):
        return
    for name, tensor in (("keys", layer.keys), ("values", layer.values)):
        bad = ~torch.isfinite(tensor).flatten(2).all(-1).all(0)
        if bad.any():
            head = int(bad.nonzero()[0])
            raise KVError(
                f"{name} of layer {layer.layer_index}, KV head {head} are not finite; "
                "allowed: finite numbers (try dtype=float32)"
            )
