"""Calls of a method, and what is checked around them: that the method wrote to nothing that the others
read, and that what it returns can replace the layer.

A method may be wrong, and then it fails alone. Nothing here guards against code that means harm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kvbench.engine.device import SMALL_LAYER, threads_are_ours
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods.base import Method, Replay


class LayerDamaged(KVError):
    """The method `label` wrote to tensors that other methods read. Whoever made these tensors makes them
    anew for the others (`kvbench.engine.prefill.prefill`)."""

    def __init__(self, label: str, what: str, layer: int) -> None:
        super().__init__(
            f"method {label!r} wrote to the {what} of layer {layer} in place, which other methods read; "
            "allowed: to write to copies (clone() first; float() copies no float32)"
        )
        self.label = label


@contextmanager
def settings_restored() -> Iterator[None]:
    """Put back what a method's code may change: the global generators of torch and numpy, and torch's
    default dtype, grad mode and number of threads."""
    numpy_state = np.random.get_state()
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(gpus), torch.set_grad_enabled(torch.is_grad_enabled()):
        try:
            yield
        finally:
            np.random.set_state(numpy_state)
            torch.set_default_dtype(dtype)
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)


@contextmanager
def unwritten(label: str, layer: LayerKV, **others: Tensor) -> Iterator[None]:
    """Refuse writes to the layer's tensors, to the results that methods share and to `others`. A write
    through torch raises a tensor's version; one through numpy or ``.data`` goes unnoticed.

    Raises:
        LayerDamaged: also where the code within failed.
    """
    tensors = {"keys": layer.keys, "values": layer.values}
    if layer.queries is not None:
        tensors["queries"] = layer.queries
    tensors |= {name: result.tensor for (name, _), result in layer.shared.items()}
    tensors |= {f"repeated {name}": tensor for name, tensor in others.items()}
    versions = {
        name: tensor._version for name, tensor in tensors.items() if not tensor.is_inference()
    }
    try:
        yield
    finally:
        for name, version in versions.items():
            if tensors[name]._version != version:
                raise LayerDamaged(label, name, layer.layer_index)


def compress(
    label: str,
    method: Method,
    layer: LayerKV,
    budget: Budget,
    generator: torch.Generator,
    carried: dict[str, Tensor],
) -> tuple[CompressedKV, int, Elapsed]:
    """Let `method`, which messages call `label`, compress the layer. `carried` are the tensors that it
    stored at earlier layers.

    Returns:
        the entries that it keeps, how many it may keep per head, and the time of its own work.

    Raises:
        LayerDamaged: see `unwritten`.
        KVError: see `Budget.check_compresses`.
        TypeError, ValueError: see `check_compressed`. Whatever the method raises is raised, too.
    """
    if method.uses_budget:
        budget.check_compresses(layer.n)
    with settings_restored(), unwritten(label, layer):
        if threads_are_ours() and layer.keys.numel() <= SMALL_LAYER:
            torch.set_num_threads(1)
        capacity = method.layer_capacity(budget, layer.n, layer.layer_index, layer.num_layers)
        clock = Elapsed(layer.keys.device)
        compressed = method.compress(replace(layer, carried=carried), budget, generator)
        clock.stop()
    check_compressed(compressed, layer)
    return compressed, capacity, clock


def observe(
    label: str,
    method: Method,
    layer: LayerKV,
    replay: Replay,
    budget: Budget,
    carried: dict[str, Tensor],
) -> None:
    """Show `method` the layer while the model repeats its prompt (`Method.observe`).

    Raises:
        LayerDamaged: see `unwritten`. Whatever the method raises is raised, too.
    """
    parts = {name: part for name, part in vars(replay).items() if isinstance(part, Tensor)}
    with settings_restored(), unwritten(label, layer, **parts):
        method.observe(replace(layer, carried=carried), replay, budget)


def check_compressed(compressed: CompressedKV, layer: LayerKV) -> None:
    """Refuse what a method returned if it cannot replace the layer, before it is batched with the rows
    of other methods.

    Raises:
        TypeError: it is not a `CompressedKV`, or one of its tensors is not a tensor.
        ValueError: the tensor, its shape, dtype and device, and what is allowed.
    """
    # A subclass could count its entries and bytes otherwise.
    if type(compressed) is not CompressedKV:
        raise TypeError(f"compress returned a {type(compressed).__name__}; allowed: a CompressedKV")
    if not isinstance(compressed.keys, Tensor):
        raise TypeError(f"keys are a {type(compressed.keys).__name__}; allowed: a tensor")
    if compressed.keys.dim() == 4 and not compressed.keys.shape[2]:
        raise ValueError("compress kept no entry; allowed: at least one per KV head")
    heads = compressed.keys.shape[1] if compressed.keys.dim() == 4 else 0
    repeats = max(1, heads // layer.keys.shape[1])  # a method may repeat keys to query heads
    batch, kv_heads = layer.keys.shape[:2]
    entries = (batch, repeats * kv_heads, *compressed.keys.shape[2:3])
    most = compressed.keys.shape[2] if compressed.keys.dim() == 4 else 0
    if not isinstance(compressed.keys_only, int) or not 0 <= compressed.keys_only <= most:
        raise ValueError(
            f"keys_only is {compressed.keys_only!r}; allowed: 0 to {most}, the entries"
        )
    with_value = (*entries[:2], *(c - compressed.keys_only for c in entries[2:]))
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
        part = getattr(compressed, name)
        if part is None and name in ("log_weights", "scores", "denominators", "lengths"):
            continue
        if not isinstance(part, Tensor):
            raise TypeError(f"{name} are a {type(part).__name__}; allowed: a tensor")
        if tuple(part.shape) != shape or part.dtype != dtype or part.device != device:
            raise ValueError(
                f"{name} are {tuple(part.shape)} {part.dtype} on {part.device}; "
                f"allowed: {shape} {dtype} on {device}"
            )
    least_and_most = compressed.value_range
    if least_and_most is not None:
        ends = (*entries[:2], layer.values.shape[-1])
        if [getattr(end, "shape", None) for end in least_and_most] != [ends, ends]:
            raise ValueError(
                f"value_range is not of two tensors of the shape {ends}; allowed: that"
            )
    if compressed.lengths is not None and device.type == "cpu":  # a GPU would be waited for
        fewest, longest = map(int, compressed.lengths.aminmax())
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
