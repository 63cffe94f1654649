"""Every call of a method goes through here, so that no method can change what another one reads.

Methods of a job read the same keys, values, queries and shared results (`LayerKV.once`), and run in one
process. A method that writes to one of them, or leaves a setting of the process changed, would change
the other methods' results; here only that method fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """A method changed something that other methods use; the message names it in one line.

    Attributes:
        tensors: whether it wrote to tensors that other methods read.
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
"""Process-wide settings that a call could leave changed: by name (as in messages), how each is read
and set."""

GENERATORS = tuple(name for name in _PROCESS if name.endswith("generator"))
SETTINGS = tuple(name for name in _PROCESS if name not in GENERATORS)
QUICK = SETTINGS[:-1]
"""Settings that are read in a microsecond, which are checked at every decoded token."""


@dataclass(frozen=True)
class Settings:
    """Values of some of the process's settings and generators at one moment."""

    values: dict[str, Any]

    @classmethod
    def now(cls, names: Sequence[str] = (*SETTINGS, *GENERATORS)) -> Settings:
        """The present values of these settings."""
        on_cuda = torch.cuda.is_initialized()
        return cls({n: _PROCESS[n][0]() for n in names if on_cuda or not n.startswith("CUDA")})

    def restore_changed(self) -> list[str]:
        """Restore what was changed since; returns a phrase for each change."""
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
def settings_unchanged(label: str, settings: Settings) -> Iterator[None]:
    """A method's code runs within this context; afterwards these settings are restored.

    Raises:
        SharedStateChanged: the code changed one, and raised nothing itself.
    """
    try:
        yield
    except BaseException:
        settings.restore_changed()
        raise
    changed = settings.restore_changed()
    if changed:
        hint = "its own generator" if "generator" in changed[0] else "to leave it as it was"
        raise SharedStateChanged(
            f"method {label!r} left {changed[0]}, which others use; allowed: {hint}", tensors=False
        )


def call(label: str, hook: Callable[..., Any], *arguments: Any, closely: bool) -> Any:
    """Call a method's hook while decoding. It is called at every token, so only the quick settings are
    checked each time; `closely` checks all, generators too.

    Raises:
        SharedStateChanged: see `settings_unchanged`.
    """
    if closely:
        with settings_unchanged(label, Settings.now()):
            return hook(*arguments)
    before = [_PROCESS[name][0]() for name in QUICK]
    try:
        answer = hook(*arguments)
    except BaseException:
        Settings(dict(zip(QUICK, before, strict=True))).restore_changed()
        raise
    if before != [_PROCESS[name][0]() for name in QUICK]:
        with settings_unchanged(label, Settings(dict(zip(QUICK, before, strict=True)))):
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
        restores: restore a layer that a method wrote to. Needs a copy of the layer, made once; a
            prefill that can run again needs none.
        closely: check everything after every call. Otherwise writes that torch does not count are
            checked once, after all calls, by `written_flags`, and the caller checks the global
            generators; a second run with `closely` finds the method.
    """

    def __init__(self, layer: LayerKV, *, restores: bool = False, closely: bool = True) -> None:
        self.layer = layer
        self.restores = restores
        self.closely = closely
        self.tensors = tensors_of(layer)
        if restores and not layer.pristine:
            layer.pristine.update({name: x.clone() for name, x in self.tensors.items()})
        self.seals = {name: Seal(x) for name, x in self.tensors.items()}

    def written_flags(self) -> list[Tensor | bool]:
        """For each tensor, whether any call wrote to it; on a GPU as a tensor there, without waiting."""
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
        """Compress the layer by `method`: the checked result, the entries it may hold, and the clock of
        the method's own work.

        Args:
            carried: what this method noted at earlier layers.

        Raises:
            SharedStateChanged: it changed what others use; `tensors` says whether it wrote to the
                layer's tensors (which this guard may have restored).
            TypeError, ValueError: see `check_held`; and whatever the method raises.
        """
        layer = self.layer
        # A copy of the layer and of the budget: attributes set on them reach no other method.
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
        """A method's code runs within this context, which checks that shared state stays unchanged."""
        shared = dict(self.layer.shared)
        # Read anew for each call: other threads may draw from a generator, too.
        settings = Settings.now() if self.closely else Settings.now(SETTINGS)
        try:
            with settings_unchanged(label, settings):
                yield
        except Exception as failure:
            changed = self._changed(shared)
            if changed:
                raise _write_error(label, changed, self.layer.layer_index) from failure
            raise
        changed = self._changed(shared)
        if changed:
            raise _write_error(label, changed, self.layer.layer_index)

    def _changed(self, before: dict[str, Any]) -> list[str]:
        """Names of the tensors that were written to; restores those it can."""
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
        # Keep shared results that existed before and are unchanged; others are computed again on demand.
        shared.clear()
        shared.update(
            {
                name: entry
                for name, entry in before.items()
                if not changed and not entry.seal.broken(entry.tensor)
            }
        )
        return [*changed, *dict.fromkeys([*replaced, *written])]


def _write_error(label: str, names: list[str], layer: int) -> SharedStateChanged:
    return SharedStateChanged(
        f"method {label!r} wrote to {', '.join(names)} of layer {layer}, which other methods read; "
        "allowed: to write to copies (clone() first)",
        tensors=True,
    )


def check_held(held: CompressedKV, layer: LayerKV) -> None:
    """Refuse a result that cannot replace the layer, before it is batched with other methods' rows.

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


def check_finite(layer: LayerKV, later: dict[int, Tensor] | None = None) -> None:
    """Refuse keys or values that are not finite, among which no method can choose.

    Args:
        later: on a GPU the host does not wait: what is not finite becomes 0, in place, and its counts by
            KV head are put here, by layer, for `refuse_non_finite`. None: refused at once.

    Raises:
        KVError: naming the layer and the first KV head concerned.
    """
    both = (layer.keys, layer.values)
    waits = later is None or not layer.keys.is_cuda
    # One pass: a sum is finite unless something in it is not (or it overflows: then look closer). Read
    # before the methods run, both at once: a choice among NaN need not end.
    if waits and bool(
        torch.isfinite(torch.stack([x.sum(dtype=torch.float32) for x in both])).all()
    ):
        return
    counts = {layer.layer_index: torch.stack([(~torch.isfinite(x)).sum((0, 2, 3)) for x in both])}
    if later is None or waits:
        refuse_non_finite(counts)
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
