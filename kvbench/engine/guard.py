"""Every call of a method goes through here, so that no method changes what another one reads.

Methods of a job read the same keys, values, queries and shared results (`LayerKV.once`), and run in one
process. A method from outside `kvbench.methods` gets copies of the tensors. One from inside gets the
tensors themselves, and after every call it is checked that it wrote to none (`Seal`). A method that
leaves a setting of the process changed fails, and the setting is restored. While a method runs,
``os._exit`` and closing a standard stream raise, and a process that it forks ends where it comes back
(`kvbench.engine.process`).

Not contained are a Ctrl-C, a signal that ends the process, a crash of compiled code, and what code does
that looks for a way round: replaces functions of libraries, deletes files, lowers a limit of the system,
starts threads that write later, searches closures. They end the job, or harm it; its records are on
disk up to the example in progress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvbench.engine.process import (
    SETTINGS,
    MethodExit,
    Setting,
    interrupts_noted,
    process_protected,
    same,
)
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import NORMALISERS, Budget, CompressedKV, KVError, LayerKV, Shared
from kvbench.methods.base import HeldShape, Method, Repetition


class SharedStateChanged(RuntimeError):
    """A method left a setting of the process changed; the message names it in one line."""


class LayerDamaged(KVError):
    """A method wrote to tensors that other methods read: nothing that is computed from this layer is
    sound. A job then runs its methods apart (`kvbench.run.batching`), so that only this one fails."""


MOST_EXTRA = 2.0**63
"""Numbers of `Method.extras` are smaller: what reads records takes no others for integers."""

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
        shared: the results that methods share, by name.
    """

    tensors: dict[str, Tensor]
    versions: dict[str, int]
    samples: dict[str, Tensor]
    shared: dict[str, Shared]

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
            dict(layer.shared),
        )

    def broken(self, layer: LayerKV) -> str | None:
        """The name of a tensor that was written to since, or of a shared result that is another now or
        no tensor, if there is one."""
        for name, result in {**layer.shared, **self.shared}.items():
            same_one = result is layer.shared.get(name)
            if not same_one or not isinstance(getattr(result, "tensor", None), Tensor):
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
            LayerDamaged: naming the method `label` and the tensor that it wrote to.
        """
        written = self.broken(layer)
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
    kvbench's own methods those may change that imports change: they import the packages they adapt.

    Raises:
        SharedStateChanged: the code changed one, and raised nothing itself.
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
            if type(failure) not in (SystemExit, GeneratorExit):  # SIGTERM raises one of its own
                raise
            raise MethodExit(f"method {label!r} raised {type(failure).__name__}") from failure
        except KeyboardInterrupt as failure:
            if interrupted():
                raise
            raise MethodExit(f"method {label!r} raised {type(failure).__name__}") from failure
        finally:
            for name, setting in compared.items():
                now = setting.read()
                if not same(now, before[name]):
                    setting.write(before[name])
                    changed.append(_what_changed(name, now, before[name]))
    if changed:
        raise SharedStateChanged(f"method {label!r} left {changed[0]}")


def _settings_compared(method: Method) -> dict[str, Setting]:
    """The settings that are compared around a call of the method."""
    foreign = is_foreign(method)
    return {
        name: setting
        for name, setting in SETTINGS.items()
        if (foreign or not setting.imports_change_it)
        and (setting.is_there is None or setting.is_there())
    }


def _what_changed(name: str, now: object, before: object) -> str:
    """The setting, its values, and what is allowed."""
    setting = SETTINGS[name]
    state = f"at {now} (it was {before})" if setting.shown else "in another state"
    return f"{name} {state}, which others use; allowed: {setting.allowed}"


@contextmanager
def sealed(seal: Seal, label: str, layer: LayerKV) -> Iterator[None]:
    """A method's code runs within this context; afterwards, also after an exception, what it did to the
    layer is checked (`Seal.check`)."""
    try:
        yield
    finally:
        seal.check(label, layer)


def call(method: Method, hook: Callable[..., Any], *arguments: Any) -> Any:
    """A method's hook while decoding, whose arguments are of its own fork.

    Raises:
        SharedStateChanged: see `settings_unchanged`; and whatever the hook raises.
    """
    if not is_foreign(method):
        return hook(*arguments)
    with settings_unchanged(type(method).__name__, method):
        return hook(*arguments)


def extras(label: str, method: Method, n: int, shapes: Mapping[int, HeldShape]) -> dict[str, int]:
    """The further fields that `Method.extras` adds to a record.

    Raises:
        KVError: names that are no text, values that are no numbers; and whatever the method raises.
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
