"""Loading a model's weights, from safetensors files or drawn at random; incomplete files are refused."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import cached_file

from kvbench.engine.attention import IMPLEMENTATION, register
from kvbench.engine.loading import (
    ModelError,
    ModelSpec,
    _config_of_path,
    _only_local,
    check_serves_interface,
    load_config,
    local_path,
    one_line_failures,
)
from kvbench.engine.memory import total_bytes
from kvbench.engine.quantized import weight_options
from kvbench.engine.quiet import without_reports
from kvbench.engine.tokenizer import model_end_ids

Model = PreTrainedModel


def load_model(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """The model, in evaluation mode, with kvbench's attention function.

    Args:
        seed: of the random weights; not used otherwise.

    Raises:
        ModelError: what cannot be loaded, and what to do.
    """
    register()
    config = load_config(spec) if spec.random_weights else _config_of_path(spec)
    check_serves_interface(config)
    with one_line_failures("model", spec):
        if spec.random_weights:
            _check_fits(config, spec, device, dtype)
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                with device:
                    model = AutoModelForCausalLM.from_config(
                        config, dtype=dtype, attn_implementation=IMPLEMENTATION
                    )
        else:
            packed = weight_options(spec, device, dtype)
            if "gguf_file" not in packed:
                _check_safetensors(spec, config)
            with without_reports():
                place = spec.device_map
                options: dict[str, Any] = {
                    "device_map": dict(place) if isinstance(place, Mapping) else place,
                    "max_memory": None if spec.max_memory is None else dict(spec.max_memory),
                    **packed,
                }
                loaded: Any = AutoModelForCausalLM.from_pretrained(
                    local_path(spec.path),
                    config=config,
                    revision=spec.revision or "main",  # else the library converts other formats
                    dtype=dtype,
                    attn_implementation=IMPLEMENTATION,
                    trust_remote_code=spec.trust_remote_code,
                    local_files_only=_only_local(spec.path),
                    use_safetensors=True,
                    ignore_mismatched_sizes=True,  # reported in `found`, and refused below
                    output_loading_info=True,
                    **options,
                )
            model, found = loaded
            _check_shapes(found["mismatched_keys"], spec)
            _check_whole(found["missing_keys"], spec)
            model_end_ids(model)
    placed = spec.device_map is not None or spec.quantization in ("bnb4", "bnb8")
    if spec.random_weights or not placed:
        model = model.to(device)
    return model.eval()


def _check_safetensors(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """Refuse a model whose index or config names weight files that are not safetensors. The library's
    ``use_safetensors`` checks only the name of the first file, and would unpickle the others.

    Raises:
        ModelError: naming the file.
    """
    named = getattr(config, "transformers_weights", None) or "model.safetensors.index.json"
    files = [named.removesuffix(".index.json")]
    index = cached_file(
        local_path(spec.path),
        named if named.endswith(".index.json") else "model.safetensors.index.json",
        revision=spec.revision or "main",
        local_files_only=_only_local(spec.path),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if index is not None:
        files += json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    for file in files:
        if not file.endswith(".safetensors"):
            raise ModelError(
                f"model {spec.path!r} keeps weights in {file!r}; allowed: safetensors files, since "
                "others may run code when they are read"
            )


def _check_fits(
    config: PreTrainedConfig, spec: ModelSpec, device: torch.device, dtype: torch.dtype
) -> None:
    """Refuse random weights that the device cannot hold, before any is drawn.

    Raises:
        ModelError: naming the bytes needed and the bytes available.
    """
    with torch.device("meta"):
        shape = AutoModelForCausalLM.from_config(config, dtype=dtype)
    needed = sum(part.numel() * part.element_size() for part in shape.parameters())
    there = total_bytes(device)
    if there is not None and needed > there:
        raise ModelError(
            f"model {spec.name!r} has {needed / 1e9:.0f} GB of weights and {device} {there / 1e9:.0f} "
            "GB of memory; allowed: a smaller model, or dtype=bfloat16"
        )


def _check_shapes(mismatched: Collection[tuple[str, Any, Any]], spec: ModelSpec) -> None:
    """Refuse weights whose shapes are not the config's: the library would draw them at random.

    Raises:
        ModelError: naming the first of them.
    """
    for name, found, wanted in sorted(mismatched, key=lambda one: one[0])[:1]:
        raise ModelError(
            f"model {spec.path!r} holds {name} of shape {tuple(found)}; allowed: {tuple(wanted)}, as "
            "its config says"
        )


def _check_whole(missing: Collection[str], spec: ModelSpec) -> None:
    """Refuse a model with missing weights: the library would draw them at random.

    Raises:
        ModelError: naming the first of them.
    """
    if missing:
        raise ModelError(
            f"model {spec.path!r} lacks {len(missing)} weights, e.g. {min(missing)}; allowed: a "
            "folder with all of them"
        )
