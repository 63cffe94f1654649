"""A compressed context as a safetensors file: tensors and JSON, all checked when they are read.

Nothing in a file is run or imported: the method is the reader's own, and must equal the one that the
file names. Shapes are checked against the model's layers before a tensor is read.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.engine.fork import Fork
from kvbench.engine.prefill import Prefill, compressible_layers, forward, input_device
from kvbench.engine.shared import changes
from kvbench.errors import disk_line, is_integer
from kvbench.kernels.quantize import Codec, Packed, Quantization, packed_bytes
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError
from kvbench.methods.base import Method

FORMAT = 1
_SAMPLED = 16
"""Numbers of each parameter that go into a model's fingerprint."""


@dataclass(frozen=True)
class Saved:
    """Contents of a file: the fork, its prefill, the tokens, and the messages of the chat so far."""

    fork: Fork
    start: Prefill
    token_ids: list[int]
    messages: list[dict[str, str]]


def model_fingerprint(model: PreTrainedModel) -> str:
    """A digest of the names, shapes, dtypes and a sample of the numbers of all parameters."""
    digest = hashlib.sha256(type(model).__name__.encode())
    for name, parameter in model.named_parameters():
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        if not parameter.is_meta and parameter.numel():
            places = torch.linspace(0, parameter.numel() - 1, _SAMPLED, dtype=torch.float64).long()
            places = places.to(parameter.device)
            at = torch.unravel_index(places, parameter.shape) if parameter.dim() else ()
            numbers = parameter.detach()[at].double().cpu()
            digest.update(numbers.contiguous().numpy().tobytes())
    return digest.hexdigest()


def _description(method: Method, budget: Budget) -> dict[str, Any]:
    """The method and its budget as they are written to a file.

    Raises:
        KVError: an option that JSON cannot hold.
    """
    kind = type(method)
    described = {
        "method": f"{kind.__module__}.{kind.__qualname__}",
        "version": kind.version,
        "options": asdict(method),
        "budget": asdict(budget),
    }
    try:
        return dict(json.loads(json.dumps(described)))
    except (TypeError, ValueError) as error:
        raise KVError(
            f"{kind.__name__} has an option that no file can hold ({error}); allowed: numbers and text"
        ) from error


_WEIGHTS = ("log_weights", "scores", "denominators")
_BESIDE = ("positions", *_WEIGHTS)
_RANGE = ("least_value", "largest_value")
_PACKED = ("codes", "scale", "zero")
_COUNTS = ("length", "first", "first_value", "keys_only", "capacity", "granted")


def save_context(
    path: Path,
    model: PreTrainedModel,
    fork: Fork,
    start: Prefill,
    token_ids: Sequence[int],
    messages: Sequence[Mapping[str, str]],
) -> None:
    """Write a fork, which must hold all its entries itself (not share them with a base).

    Raises:
        KVError: an option that no file can hold, or a file that cannot be written.
    """
    scheme = fork.method.quantization()
    if not isinstance(scheme, Quantization | None):
        raise KVError(
            f"the context is stored by the scheme {type(scheme).__name__}; allowed in a file: "
            "quantize null, or with bits and group_size"
        )
    if fork.states:
        raise KVError(
            "the context has the states of a hybrid model; allowed in a file: keys and values alone"
        )
    if any(changes(cache) for cache in fork.layers.values()):
        raise KVError(
            "the context has heads of different lengths or is compressed while decoding; allowed in a "
            "file: neither"
        )
    tensors = {"token_ids": torch.tensor(list(token_ids))}
    layers = {}
    for index, cache in fork.layers.items():
        n = cache.length
        parts = {
            "keys": cache.keys[:, : n - cache.first],
            "values": cache.values[:, : n - cache.first_value],
        }
        parts |= {name: getattr(cache, name) for name in _BESIDE}
        for name, packed in zip(("packed_keys", "packed_values"), cache.packed or (), strict=False):
            for block in packed.whole:
                parts |= {f"{name}.{part}": getattr(block, part) for part in _PACKED}
        parts |= dict(zip(_RANGE, cache.value_range or (), strict=False))
        for name, part in parts.items():
            if part is not None:
                held = part[:, :n] if name in _BESIDE else part
                tensors[f"{index}.{name}"] = held.detach().cpu().contiguous().clone()
        layers[str(index)] = {name: getattr(cache, name) for name in _COUNTS} | {
            "active": cache.active,
            "prompt_entries": cache.prompt_entries.tolist(),
        }
    known = {
        "format": FORMAT,
        **_description(fork.method, fork.budget),
        "model": model_fingerprint(model),
        "seed": fork.seed,
        "example_id": fork.example_id,
        "compressed_tokens": start.n,
        "appended": fork.appended,
        "exact_bytes": start.exact_bytes,
        "compressed": fork.compressed,
        "layers": layers,
        "messages": [dict(message) for message in messages],
    }
    unfinished = path.with_name(f"{path.name}.part")
    try:
        save_file(tensors, unfinished, {"kvbench": json.dumps(known)})
        os.replace(unfinished, path)
    except (OSError, SafetensorError) as error:
        unfinished.unlink(missing_ok=True)
        line = disk_line(error) if isinstance(error, OSError) else str(error)
        raise KVError(f"context cannot be saved: {line}") from error


class _LayerCalls:
    """Attention state that keeps each layer's call, for the shapes of its keys and values."""

    def __init__(self) -> None:
        self.calls: dict[int, LayerCall] = {}

    def attend(self, call: LayerCall) -> Tensor:
        """Exact attention."""
        self.calls[call.layer] = call
        return call.exact()


@torch.inference_mode(False)
@torch.no_grad()
def load_context(
    path: Path, model: PreTrainedModel, method: Method, budget: Budget, label: str
) -> Saved:
    """Read what `save_context` wrote.

    Raises:
        KVError: naming the file and what is wrong with it.
    """
    try:
        return _read(path, model, method, budget, label)
    except OSError as error:
        raise KVError(f"context cannot be loaded: {disk_line(error)}") from error
    except (
        # Errors that a damaged or forged file can cause in `_read`; nothing of it was used.
        *(SafetensorError, BudgetExceeded, KeyError, TypeError, AttributeError, IndexError),
        *(RecursionError, OverflowError, RuntimeError),
    ) as error:
        raise _foreign(path, f"{type(error).__name__}: {error}") from error
    except ValueError as error:
        if isinstance(error, KVError):
            raise
        raise _foreign(path, str(error)) from error


def _foreign(path: Path, why: str) -> KVError:
    return KVError(
        f"{path} is no context that kvbench saved ({' '.join(why.split())[:200]}); allowed: a file of "
        "context.save"
    )


def _read(path: Path, model: PreTrainedModel, method: Method, budget: Budget, label: str) -> Saved:
    state, device = _LayerCalls(), input_device(model)
    with safe_open(path, framework="pt") as file:
        known = json.loads((file.metadata() or {})["kvbench"])
        _check_origin(path, known, model, method, budget)
        token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        forward(model, token, torch.zeros(1, dtype=torch.int64, device=device), state)
        n, appended = (_count(known, name) for name in ("compressed_tokens", "appended"))
        ids = _tensor(file, "token_ids", None, torch.int64).tolist()
        if not n or not n + appended <= len(ids) <= n + appended + 1:
            raise _foreign(path, f"{len(ids)} tokens, {n} + {appended} in the cache")
        vocabulary = int(model.config.get_text_config().vocab_size)
        if not all(0 <= one < vocabulary for one in ids):
            raise _foreign(path, "token ids outside the vocabulary")
        if set(known["layers"]) != {str(index) for index in state.calls}:
            raise _foreign(path, f"{len(known['layers'])} layers")
        fork = Fork(label, method, budget, known["seed"], str(known["example_id"]), room=0)
        fork.compressed, fork.appended = bool(known["compressed"]), appended
        compressible = compressible_layers(model)
        for index, call in state.calls.items():
            said = known["layers"][str(index)]
            if call.sliding_window is not None and index in compressible:
                raise _foreign(path, "a sliding window")
            reader = _Layer(path, file, index, said, call, n + appended)
            fork.layers[index] = reader.cache(fork, index in compressible)
    fork.audit(n, compressible)
    messages = [
        {str(key): str(value) for key, value in message.items()} for message in known["messages"]
    ]
    exact_bytes = _count(known, "exact_bytes")
    if not exact_bytes:
        raise _foreign(path, "exact_bytes is 0")
    start = Prefill(torch.zeros(0), 0.0, exact_bytes, n)
    return Saved(fork, start, ids, messages)


def _check_origin(
    path: Path, known: Mapping[str, Any], model: PreTrainedModel, method: Method, budget: Budget
) -> None:
    if known["format"] != FORMAT:
        raise KVError(f"{path} has format {known['format']!r}; allowed: {FORMAT}")
    mine = _description(method, budget)
    for name in ("method", "version", "options", "budget"):
        if known[name] != mine[name]:
            raise KVError(
                f"{path} holds a context whose {name} is {str(known[name])[:300]}; allowed here: "
                f"{mine[name]}, as compress was told"
            )
    if known["model"] != model_fingerprint(model):
        raise KVError(
            f"{path} holds a context of another model than {type(model).__name__} "
            f"{model.name_or_path!r} (or of it in another dtype); allowed: the model that read it"
        )
    if not is_integer(known["seed"]):
        raise _foreign(path, "a seed that is no integer")


def _count(known: Mapping[str, Any], name: str) -> int:
    value = known[name]
    if not is_integer(value, 0, 2**48):
        raise ValueError(f"{name} is {str(value)[:40]}")
    return int(value)


def _tensor(
    file: Any, name: str, shape: tuple[int, ...] | None, dtype: torch.dtype, device: Any = "cpu"
) -> Tensor:
    """A tensor of the file, of this shape (None: one-dimensional) and dtype.

    Raises:
        ValueError: it has another; nothing of it is read then.
    """
    found = tuple(file.get_slice(name).get_shape())
    if found != shape if shape is not None else len(found) != 1:
        raise ValueError(f"{name} has shape {found}, expected {shape}")
    tensor: Tensor = file.get_tensor(name)
    if tensor.dtype != dtype:
        raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
    return tensor.to(device)


class _Layer:
    """One layer of a file, checked against the model's own layer."""

    def __init__(
        self, path: Path, file: Any, index: int, said: Mapping[str, Any], call: LayerCall, seen: int
    ) -> None:
        self.path, self.file, self.index, self.call, self.seen = path, file, index, call, seen
        self.said = said
        self.counts = {name: _count(said, name) for name in _COUNTS}
        self.heads = len(said["prompt_entries"])
        self.names = set(file.keys())

    def _part(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return _tensor(self.file, f"{self.index}.{name}", shape, dtype, self.call.key.device)

    def cache(self, fork: Fork, compressible: bool) -> LayerCache:
        """The layer's cache as it was saved."""
        call, counts = self.call, self.counts
        length, first, first_value = (counts[n] for n in ("length", "first", "first_value"))
        stored, query_heads = call.key.shape[1], call.query.shape[1]
        if not self.heads or self.heads % stored or query_heads % self.heads:
            raise ValueError(f"layer {self.index} has {self.heads} heads")
        quantization = fork.method.quantization() if compressible else None
        packed = first if quantization is not None else 0
        only = counts["keys_only"]
        if not only <= length or (first, first_value) != (packed, packed or only) or first > length:
            raise ValueError(f"layer {self.index} has counts {counts}")
        dtype, dims = call.key.dtype, (call.key.shape[-1], call.value.shape[-1])
        keys = self._part("keys", (self.heads, length - first, dims[0]), dtype)
        values = self._part("values", (self.heads, length - first_value, dims[1]), dtype)
        positions = self._part("positions", (self.heads, length), torch.int64)
        if positions.numel() and not -1 <= int(positions.min()) <= int(positions.max()) < self.seen:
            raise ValueError(f"positions of layer {self.index} are not of {self.seen} tokens")
        weights = {
            name: self._part(name, (self.heads, length), torch.float32)
            for name in _WEIGHTS
            if f"{self.index}.{name}" in self.names
        }
        ends = [
            self._part(name, (self.heads, dims[1]), dtype)
            for name in _RANGE
            if f"{self.index}.{name}" in self.names
        ]
        log_weights = weights.pop("log_weights", None)
        for name, part in {"keys": keys, "values": values, **weights}.items():
            if not torch.isfinite(part).all():
                raise ValueError(f"{name} of layer {self.index} are not finite")
        if len(ends) not in (0, 2) or any(bool(part.isnan().any()) for part in ends):
            raise ValueError(f"layer {self.index} has a range of values that is none")
        # Neither infinite nor NaN; -inf hides an entry.
        if log_weights is not None and not bool((log_weights < float("inf")).all()):
            raise ValueError(f"log_weights of layer {self.index} are not numbers below infinity")
        empty = CompressedKV(keys[None, :, :0], values[None, :, :0], None, positions[None, :, :0])
        cache = LayerCache(
            empty,
            0,
            fork.method,
            capacity=counts["capacity"],
            granted=counts["granted"],
            sink=fork.budget.sink,
            window=call.sliding_window,
            active=compressible and bool(self.said["active"]),
        )
        cache.length, cache.keys_only = length, only
        cache.first, cache.first_value = first, first_value
        cache.keys, cache.values, cache.positions = keys, values, positions
        cache.log_weights, cache.bias = log_weights, call.bias
        cache.scores = weights.get("scores") if cache.evicts or cache.restricts else None
        cache.denominators = weights.get("denominators")
        cache.value_range = (ends[0], ends[1]) if ends else None
        if isinstance(quantization, Quantization):
            held, with_value = (self.heads, first), (self.heads, first - only)
            cache.packed = (
                self._packed(
                    "packed_keys", (*held, dims[0]), quantization, not quantization.by_entry
                ),
                self._packed("packed_values", (*with_value, dims[1]), quantization, False),
            )
        cache.prompt_entries = torch.tensor(self.said["prompt_entries"], dtype=torch.int64)
        if bool((cache.prompt_entries > length).any()) or bool((cache.prompt_entries < 0).any()):
            raise ValueError(f"layer {self.index} has {length} entries")
        return cache

    def _packed(
        self,
        name: str,
        shape: tuple[int, int, int],
        quantization: Quantization,
        by_channel: bool,
    ) -> Codec:
        heads, n, d = shape
        rows, columns = (d, n) if by_channel else (n, d)
        codes = -(-columns * quantization.bits // 8)
        groups = -(-columns // min(quantization.group_size, columns)) if columns else 0
        dtype = self.call.key.dtype
        packed = Packed(
            self._part(f"{name}.codes", (heads, rows, codes), torch.uint8),
            self._part(f"{name}.scale", (heads, rows, groups), dtype),
            self._part(f"{name}.zero", (heads, rows, groups), dtype),
            shape,
            by_channel,
            quantization,
        )
        if packed.nbytes != packed_bytes(
            shape, quantization, dtype.itemsize, by_channel=by_channel
        ):
            raise ValueError(
                f"{name} of layer {self.index} are not {quantization.bits}-bit numbers"
            )
        if not all(torch.isfinite(part).all() for part in (packed.scale, packed.zero)):
            raise ValueError(f"{name} of layer {self.index} are not finite")
        return quantization.codec(packed)
