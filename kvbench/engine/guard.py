"""Every call of a method goes through this module, so that no method changes what another one reads.

The methods of a job read the same keys, values, queries and shared results (`LayerKV.once`), and run in
one process. A method from outside `kvbench.methods` is given copies of the tensors. A method from inside
is given the tensors themselves, and after every call it is checked that it wrote to none of them
(`Seal`). If a method leaves a setting of the process changed, the setting is restored and the method
fails. While a method runs, ``os._exit`` and closing a standard stream raise an exception, and a process
that the method forks ends before it returns from the method (`kvbench.engine.process`).

This module does not protect against a Ctrl-C, a signal that ends the process, a crash of compiled code,
or code that evades it on purpose: code that replaces functions of libraries, deletes files, lowers a
limit of the system, starts threads that write later, or searches closures. Such code may end or damage
the job. The records up to the example in progress are on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.process import (
    SETTINGS,
    MethodExit,
    Setting,
    are_equal,
    interrupts_noted,
    process_protected,
)
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import NORMALISERS, Budget, CompressedKV, KVError, LayerKV, Shared
from kvbench.methods.base import HeldShape, Method, Repetition


class SharedStateChanged(RuntimeError):
    """A method left a setting of the process changed; the message names it in one line."""


class LayerDamaged(KVError):
    """A method wrote to tensors that other methods read, so that results computed from this layer are
    wrong. A job then runs each method in a prefill of its own (`kvbench.run.batching`), and only this
    method fails."""


MOST_EXTRA = 2.0**63
"""The numbers of `Method.extras` must be smaller, since readers of records hold integers in 64 bits."""

SAMPLED_ROWS = 16
"""How many rows of each head of a tensor a `Seal` compares."""


@dataclass
class Seal:
    """The state of a layer's tensors before a method is called, by which it is found afterwards whether
    the method wrote to them.

    Every write through torch increments a tensor's version. Writes through numpy or ``.data`` do not, so
    on a CPU a sample of rows is compared, too. (On a GPU that would wait for the device at every layer.)

    Attributes:
        tensors: the layer's keys, values and queries, and the results that methods share, by name.
        versions: the versions of these tensors; inference tensors have none.
        samples: some rows of keys, values and queries, where they are on a CPU.
        shared: the results that methods share, by name.
    """

    tensors: dict[str, Tensor]
    versions: dict[str, int]
    samples: dict[str, Tensor]
    shared: dict[str, Shared]

    @classmethod
    def of(cls, layer: LayerKV) -> Seal:
        """Seal a layer as it is now."""
        inputs = {"keys": layer.keys, "values": layer.values}
        if layer.queries is not None:
            inputs["queries"] = layer.queries
        tensors = inputs | {name: result.tensor for name, result in layer.shared.items()}
        return cls(
            tensors,
            {name: x._version for name, x in tensors.items() if not x.is_inference()},
            {name: _sample(x).clone() for name, x in inputs.items() if x.device.type == "cpu"},
            dict(layer.shared),
        )

    def changed_tensor(self, layer: LayerKV) -> str | None:
        """The name of a tensor that has been written to since the seal was made, or of a shared result
        that has been replaced or is not a tensor; None if there is no such tensor."""
        for name, result in {**layer.shared, **self.shared}.items():
            is_unchanged = result is layer.shared.get(name)
            if not is_unchanged or not isinstance(getattr(result, "tensor", None), Tensor):
                return name
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
            LayerDamaged: the method `label` and the tensor that it wrote to.
        """
        name = self.changed_tensor(layer)
        if name is not None:
            raise LayerDamaged(
                f"method {label!r} wrote to the {name} of layer {layer.layer_index} in place, which "
                "other methods read; allowed: to write to copies (clone() first; float() copies no "
                "float32)"
            )


def _sample(x: Tensor) -> Tensor:
    """About `SAMPLED_ROWS` evenly spread rows of each head of x [batch, heads, n, dim], as a view."""
    return x[:, :, :: max(1, x.shape[2] // SAMPLED_ROWS)]


def is_foreign(method: Method) -> bool:
    """Whether the method's class comes from outside kvbench."""
    return not type(method).__module__.startswith("kvbench.")


@contextmanager
def settings_unchanged(label: str, method: Method) -> Iterator[None]:
    """Run a method's code within this context, and restore the process's settings afterwards.

    kvbench's own methods may leave those settings changed that imports change (`Setting`), since they
    import the packages that they adapt.

    Raises:
        SharedStateChanged: the code left a setting changed and raised no exception.
        MethodExit: the code raised SystemExit or GeneratorExit, or KeyboardInterrupt without a Ctrl-C.
    """
    compared = _settings_compared(method)
    changed: list[str] = []
    with process_protected(), interrupts_noted() as interrupted:
        before = {name: setting.read() for name, setting in compared.items()}
        for name, setting in compared.items():
            if setting.note is not None:
                setting.note(before[name])
        try:
            yield
        except (SystemExit, GeneratorExit) as failure:
            if type(failure) not in (SystemExit, GeneratorExit):
                raise  # a subclass: kvbench's handler of SIGTERM raises one, to end the command
            raise MethodExit(f"method {label!r} raised {type(failure).__name__}") from failure
        except KeyboardInterrupt as failure:
            if interrupted():
                raise
            raise MethodExit(f"method {label!r} raised {type(failure).__name__}") from failure
        finally:
            for name, setting in compared.items():
                now = setting.read()
                if not are_equal(now, before[name]):
                    setting.write(before[name])
                    changed.append(_what_changed(name, now, before[name]))
    if changed:
        raise SharedStateChanged(f"method {label!r} left {changed[0]}")


def _settings_compared(method: Method) -> dict[str, Setting]:
    """The settings that are compared before and after a call of the method, by name."""
    foreign = is_foreign(method)
    return {
        name: setting
        for name, setting in SETTINGS.items()
        if (foreign or not setting.imports_change_it)
        and (setting.is_there is None or setting.is_there())
    }


def _what_changed(name: str, now: object, before: object) -> str:
    """The end of a message: the setting, its values, and what is allowed."""
    setting = SETTINGS[name]
    state = f"at {now} (it was {before})" if setting.shown else "in another state"
    return f"{name} {state}, which others use; allowed: {setting.allowed}"


@contextmanager
def sealed(seal: Seal, label: str, layer: LayerKV) -> Iterator[None]:
    """Run a method's code within this context, and check afterwards, also after an exception, that it
    wrote to none of the layer's tensors (`Seal.check`)."""
    try:
        yield
    finally:
        seal.check(label, layer)


def call(method: Method, hook: Callable[..., Any], *arguments: Any) -> Any:
    """Call a hook of a method whose arguments belong to the method's own fork, so that no tensor needs
    protection.

    The hooks of kvbench's own methods are called directly: some are called at every token and layer.

    Raises:
        SharedStateChanged: see `settings_unchanged`. Whatever the hook raises is raised, too.
    """
    if not is_foreign(method):
        return hook(*arguments)
    with settings_unchanged(type(method).__name__, method):
        return hook(*arguments)


def extras(label: str, method: Method, n: int, shapes: Mapping[int, HeldShape]) -> dict[str, int]:
    """The further fields that `Method.extras` adds to a record.

    Raises:
        KVError: a name that is not text, or a value that is not a number. Whatever the method raises is
            raised, too.
    """
    added = call(method, method.extras, n, shapes)
    for name, value in added.items():
        if not isinstance(name, str):
            raise KVError(f"the extras of method {label!r} have the name {name!r}; allowed: text")
        if not isinstance(value, int | float) or not abs(value) < MOST_EXTRA:
            raise KVError(
                f"the extras of method {label!r} have {name} of a value that is no number; allowed: "
                "numbers"
            )
    return dict(added)


def _layer_for(method: Method, layer: LayerKV, carried: dict[str, Tensor]) -> LayerKV:
    """The layer as it is shown to the method: with the method's own `carried`, and for a method from
    outside kvbench with copies of all tensors."""
    owner = f"{type(method).__module__}.{type(method).__qualname__}"
    if not is_foreign(method):
        return replace(layer, carried=carried, owner=owner)
    queries = None if layer.queries is None else layer.queries.clone()
    keys, values = layer.keys.clone(), layer.values.clone()
    own = replace(layer, keys=keys, values=values, queries=queries, carried=carried, shared={})
    if layer.log_weights is not None:
        own = replace(own, log_weights=layer.log_weights.clone())
    normalisers = layer.shared.get(NORMALISERS)
    if normalisers is not None:
        # Stored for the copied keys and queries, so that the copy may use them.
        own.once(NORMALISERS, normalisers.tensor.clone)
    return own


class Compressed(NamedTuple):
    """The result of `compress`.

    Attributes:
        kept: what the method keeps of the layer, checked by `check_held`.
        capacity: the entries per head that the method may keep.
        clock: the time of the method's own work, without that of the guard.
    """

    kept: CompressedKV
    capacity: int
    clock: Elapsed


def compress(
    label: str,
    method: Method,
    layer: LayerKV,
    budget: Budget,
    generator: torch.Generator,
    carried: dict[str, Tensor],
) -> Compressed:
    """Let `method` compress the layer.

    Args:
        label: what messages call the method.
        carried: the tensors that this method stored at earlier layers.

    Raises:
        SharedStateChanged: see `settings_unchanged`.
        LayerDamaged: see `Seal.check`.
        KVError: see `Budget.check_compresses`.
        TypeError, ValueError: see `check_held`. Whatever the method raises is raised, too.
    """
    if method.uses_budget:
        budget.check_compresses(layer.n)
    own_layer = _layer_for(method, layer, carried)
    with settings_unchanged(label, method), sealed(Seal.of(layer), label, layer):
        capacity = method.layer_capacity(
            replace(budget), layer.n, layer.layer_index, layer.num_layers
        )
        clock = Elapsed(layer.keys.device)
        kept = method.compress(own_layer, replace(budget), generator)
        clock.stop()
        check_held(kept, layer)
    return Compressed(kept, capacity, clock)


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
        LayerDamaged: see `Seal.check`. Whatever the method raises is raised, too.
    """
    if is_foreign(method):
        parts = (repeated.queries, repeated.keys, repeated.values)
        repeated = Repetition(repeated.start, repeated.stop, *(part.clone() for part in parts))
    with settings_unchanged(label, method), sealed(Seal.of(layer), label, layer):
        method.rescore(_layer_for(method, layer, carried), repeated, replace(budget))


def check_held(held: CompressedKV, layer: LayerKV) -> None:
    """Refuse what a method returned if it cannot replace the layer, before it is batched with the rows
    of other methods.

    Raises:
        TypeError: it is not a `CompressedKV`, or one of its tensors is not a tensor.
        ValueError: the tensor, its shape, dtype and device, and what is allowed.
    """
    if type(held) is not CompressedKV:  # a subclass could count its entries and bytes otherwise
        raise TypeError(f"compress returned a {type(held).__name__}; allowed: a CompressedKV")
    if not isinstance(held.keys, Tensor):
        raise TypeError(f"keys are a {type(held.keys).__name__}; allowed: a tensor")
    if held.keys.dim() == 4 and not held.keys.shape[2]:
        raise ValueError("compress kept no entry; allowed: at least one per KV head")
    heads = held.keys.shape[1] if held.keys.dim() == 4 else 0
    repeats = max(1, heads // layer.keys.shape[1])  # a method may repeat keys to query heads
    batch, kv_heads = layer.keys.shape[:2]
    entries = (batch, repeats * kv_heads, *held.keys.shape[2:3])
    most = held.keys.shape[2] if held.keys.dim() == 4 else 0
    if not isinstance(held.keys_only, int) or not 0 <= held.keys_only <= most:
        raise ValueError(f"keys_only is {held.keys_only!r}; allowed: 0 to {most}, the entries")
    with_value = (*entries[:2], *(c - held.keys_only for c in entries[2:]))
    allowed = {
        "keys": ((*entries, layer.keys.shape[-1]), layer.keys.dtype),
        "values": ((*with_value, layer.values.shape[-1]), layer.values.dtype),
        "positions": (entries, torch.int64),
        "log_weights": (entries, torch.float32),
        "scores": (entries, torch.float32),
        "denominators": (entries, torch.float32),
        "lengths": (entries[:2], torch.int64),
    }
    device = layer.keys.device
    for name, (shape, dtype) in allowed.items():
        part = getattr(held, name)
        if part is None and name in ("log_weights", "scores", "denominators", "lengths"):
            continue
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} are a {type(part).__name__}; allowed: a tensor")
        if tuple(part.shape) != shape or part.dtype != dtype or part.device != device:
            raise ValueError(
                f"{name} are {tuple(part.shape)} {part.dtype} on {part.device}; "
                f"allowed: {shape} {dtype} on {device}"
            )
    least_and_most = held.value_range
    if least_and_most is not None:
        ends = (*entries[:2], layer.values.shape[-1])
        if [getattr(end, "shape", None) for end in least_and_most] != [ends, ends]:
            raise ValueError(
                f"value_range is not of two tensors of the shape {ends}; allowed: that"
            )
    if held.lengths is not None and device.type == "cpu":  # a GPU would be waited for
        fewest, longest = map(int, held.lengths.aminmax())
        if fewest < 1 or longest > most:
            raise ValueError(
                f"lengths are {fewest} to {longest}; allowed: 1 to {most}, the entries"
            )


def check_finite(layer: LayerKV, later: dict[int, Tensor] | None = None) -> None:
    """Refuse keys or values that are not finite, among which no method can choose. A method might never
    return from such a choice, so this is called before the methods are.

    Args:
        later: None to refuse at once. A dictionary lets the check on a GPU wait for the end of the
            prefill: numbers that are not finite are replaced by 0 in place, and their counts are added
            to the dictionary under the layer's index, for `refuse_non_finite`.

    Raises:
        KVError: the layer and its first KV head with such a number.
    """
    both = (layer.keys, layer.values)
    counts = {layer.layer_index: torch.stack([(~torch.isfinite(x)).sum((0, 2, 3)) for x in both])}
    if later is None or not layer.keys.is_cuda:
        refuse_non_finite(counts)
        return
    later |= counts
    for tensor in both:
        tensor.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)


def refuse_non_finite(counts: Mapping[int, Tensor]) -> None:
    """Refuse layers whose keys or values are not finite. Waits for the device.

    Args:
        counts: by the layer's index [2, kv_heads], how many numbers of keys and of values are not
        finite.

    Raises:
        KVError: the first layer, and its first KV head, with such a number.
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
