"""The one door through which methods are called: what they share with others they leave as it was.

Methods of a job read the same keys, values, queries and shared results (`LayerKV.once`), and run in one
process. A method that writes to one of them, or leaves a setting of the process changed, would change
what every other method gets; here that is its own failure, and nobody else's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvbench.kv import Budget, CompressedKV, LayerKV, Seal, check_held
from kvbench.methods.base import Method


class SharedStateChanged(RuntimeError):
    """A method changed something that other methods use, in one line that names it.

    Attributes:
        tensors: whether tensors were written to that others go on reading.
    """

    def __init__(self, message: str, *, tensors: bool) -> None:
        super().__init__(message)
        self.tensors = tensors


@dataclass(frozen=True)
class Settings:
    """What a call could leave changed for everything that runs after it in this process.

    Attributes:
        values: by the name a message calls them.
        generators: states of the global random generators; empty where they are not looked at.
    """

    values: dict[str, Any]
    generators: dict[str, Any]

    @classmethod
    def now(cls, device: torch.device | None = None, *, generators: bool = True) -> Settings:
        """As they are.

        Args:
            device: whose generator is looked at beside the CPU's.
        """
        values = {
            "torch's default dtype": torch.get_default_dtype(),
            "torch's default device": torch.get_default_device(),
            "torch's grad mode": torch.is_grad_enabled(),
            "torch's float32 matmul precision": torch.get_float32_matmul_precision(),
            "torch's number of threads": torch.get_num_threads(),
        }
        states: dict[str, Any] = {}
        if generators:
            states = {
                "torch's global generator": torch.get_rng_state(),
                "numpy's global generator": np.random.get_state(legacy=False),
                "Python's global generator": random.getstate(),
            }
            if device is not None and device.type == "cuda":
                states["CUDA's global generator"] = torch.cuda.get_rng_state(device)
        return cls(values, states)

    def put_back(self, device: torch.device | None = None) -> list[str]:
        """Undo what was changed since; one phrase for each thing that was."""
        now = Settings.now(device, generators=bool(self.generators))
        changed = []
        for name, value in self.values.items():
            if now.values[name] != value:
                _SET[name](value)
                changed.append(f"{name} at {now.values[name]} (it was {value})")
        for name, state in self.generators.items():
            if not _same(now.generators[name], state):
                if name == "CUDA's global generator":
                    assert device is not None
                    torch.cuda.set_rng_state(state, device)
                else:
                    _SET[name](state)
                changed.append(f"{name} in another state")
        return changed


def _set_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


_SET: dict[str, Any] = {
    "torch's default dtype": torch.set_default_dtype,
    "torch's default device": _set_device,
    "torch's grad mode": torch.set_grad_enabled,
    "torch's float32 matmul precision": torch.set_float32_matmul_precision,
    "torch's number of threads": torch.set_num_threads,
    "torch's global generator": torch.set_rng_state,
    "numpy's global generator": np.random.set_state,
    "Python's global generator": random.setstate,
}


def _same(one: Any, other: Any) -> bool:
    """Whether two states of a generator are equal: tensors, arrays, or dictionaries of such."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else bool(one == other)


@contextmanager
def leaving_settings(
    label: str, settings: Settings, device: torch.device | None = None
) -> Iterator[None]:
    """A method's code runs here; afterwards every setting is as it was.

    Raises:
        SharedStateChanged: it was not, and the code raised nothing itself.
    """
    try:
        yield
    except BaseException:
        settings.put_back(device)
        raise
    changed = settings.put_back(device)
    if changed:
        hint = "its own generator" if "generator" in changed[0] else "to leave it as it was"
        raise SharedStateChanged(
            f"method {label!r} left {changed[0]}, which others use; allowed: {hint}", tensors=False
        )


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
    """

    def __init__(self, layer: LayerKV, *, restores: bool = False) -> None:
        self.layer = layer
        self.restores = restores
        self.tensors = tensors_of(layer)
        if restores and not layer.pristine:
            layer.pristine.update({name: x.clone() for name, x in self.tensors.items()})
        self.seals = {name: Seal(x) for name, x in self.tensors.items()}
        self.settings = Settings.now(layer.keys.device)

    def compress(
        self,
        label: str,
        method: Method,
        budget: Budget,
        generator: torch.Generator,
        carried: dict[str, Tensor],
    ) -> tuple[CompressedKV, int, float]:
        """What `method` holds instead of the layer, checked, the entries it may hold, and the seconds
        of its own work.

        Args:
            carried: what this method, and no other, noted at earlier layers.

        Raises:
            SharedStateChanged: it changed what others use; `tensors` says whether the layer's tensors
                are spoiled (unless this guard restores them).
            TypeError, ValueError: see `kvbench.kv.check_held`; and whatever the method raises.
        """
        layer, device = self.layer, self.layer.keys.device
        shared = dict(layer.shared)
        # Objects of its own, budget included: what is set on them reaches nobody else.
        own = replace(layer, carried=carried, pristine={})
        try:
            with leaving_settings(label, self.settings, device):
                capacity = method.layer_capacity(
                    replace(budget), layer.n, layer.layer_index, layer.num_layers
                )
                _wait(device)
                start = time.perf_counter()
                held = method.compress(own, replace(budget), generator)
                _wait(device)
                seconds = time.perf_counter() - start
            check_held(held, layer)
        except Exception as failure:
            changed = self._changed(shared)
            if changed:
                raise _wrote(label, changed, layer.layer_index) from failure
            raise
        changed = self._changed(shared)
        if changed:
            raise _wrote(label, changed, layer.layer_index)
        return held, capacity, seconds

    def _changed(self, before: dict[str, Any]) -> list[str]:
        """Names of the tensors that were written to; those that can be are put right."""
        changed = [name for name, seal in self.seals.items() if seal.broken(self.tensors[name])]
        shared = self.layer.shared
        replaced = [name for name, entry in before.items() if shared.get(name) is not entry]
        written = [name for name, entry in shared.items() if entry.seal.broken(entry.tensor)]
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _wrote(label: str, names: list[str], layer: int) -> SharedStateChanged:
    return SharedStateChanged(
        f"method {label!r} wrote to {', '.join(names)} of layer {layer}, which other methods read; "
        "allowed: to write to copies (clone() first)",
        tensors=True,
    )
