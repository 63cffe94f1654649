"""Configs and weights: the shipped model's, a local folder's, the Hub's, or random ones.

Nothing is unpickled: weights are read from safetensors files, or by transformers' own loader of GGUF
files; bitsandbytes packs the former while they are read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GenerationConfig,
    PreTrainedConfig,
)
from transformers.utils import cached_file
from transformers.utils import logging as library_logging

from kvbench.engine.architecture import check_supported
from kvbench.engine.model_spec import (
    ModelError,
    ModelSpec,
    gguf_options,
    local_path,
    one_line_failures,
    origin_of,
)
from kvbench.engine.packaged import unpacking

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Model: TypeAlias = "PreTrainedModel"


def load_config(spec: ModelSpec) -> PreTrainedConfig:
    """The config of a model that kvbench can run: that of `architecture`, or of its path."""
    config: PreTrainedConfig
    if spec.architecture is not None:
        with one_line_failures("model", spec):
            fields = {**spec.architecture, **(spec.config or {})}
            config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    else:
        path = Path(local_path(spec.path))
        if spec.quantization != "gguf" and path.is_dir() and not (path / "config.json").is_file():
            raise ModelError(
                f"model path {spec.path!r} has no config.json but GGUF files; allowed: "
                "model.quantization=gguf"
            )
        where = {**origin_of(spec.path, spec.revision), **gguf_options(spec)}
        with one_line_failures("model", spec):
            config = AutoConfig.from_pretrained(
                str(path), trust_remote_code=spec.trust_remote_code, **where, **(spec.config or {})
            )
        _check_fields(spec, config)
    check_supported(config)
    return config


def load_generation_config(spec: ModelSpec) -> GenerationConfig:
    """The generation config that the model will have, without its weights."""
    if not spec.random_weights:
        try:
            return GenerationConfig.from_pretrained(
                local_path(spec.path), **origin_of(spec.path, spec.revision)
            )
        except OSError:  # there is none
            pass
    return GenerationConfig.from_model_config(load_config(spec))


def check_config_class(spec: ModelSpec) -> str:
    """Check the fields that `ModelSpec.config` changes without reading a file; the name of the config's
    class, empty (and nothing checked) where `architecture` does not name the model type."""
    model_type = str((spec.architecture or {}).get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return ""
    config = CONFIG_MAPPING[model_type]()
    _check_fields(spec, config)
    return type(config).__name__


def _check_fields(spec: ModelSpec, config: PreTrainedConfig) -> None:
    for name in spec.config or {}:
        if not hasattr(config, name):
            raise ModelError(
                f"model.config names {name!r}, which {type(config).__name__} does not have; "
                "allowed: fields of the model's own config"
            )


def load_model(
    spec: ModelSpec, *, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> PreTrainedModel:
    """The model, in evaluation mode, with transformers' own attention; the seed is that of random
    weights."""
    # Weights that are read from files belong to the config beside them, not to `architecture`.
    config = load_config(spec if spec.random_weights else replace(spec, architecture=None))
    with one_line_failures("model", spec):
        if spec.random_weights:
            with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
                torch.manual_seed(seed)
                with device:
                    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        else:
            model = _with_weights(spec, config, device, dtype)
    placed_while_read = spec.device_map is not None or spec.quantization in ("bnb4", "bnb8")
    if spec.random_weights or not placed_while_read:
        model = model.to(device)
    return model.eval()


def _with_weights(
    spec: ModelSpec, config: PreTrainedConfig, device: torch.device, dtype: torch.dtype
) -> Any:
    """The model with the weights of its files. Files that lack some are refused: transformers would
    initialise these at random."""
    options_of_packing = _packing(spec, device, dtype)
    if "gguf_file" not in options_of_packing:
        _check_safetensors(spec, config)
    device_map = spec.device_map
    options: dict[str, Any] = {
        # Without a revision the library would convert other formats to safetensors on the Hub.
        **origin_of(spec.path, spec.revision or "main"),
        "device_map": dict(device_map) if isinstance(device_map, Mapping) else device_map,
        "max_memory": None if spec.max_memory is None else dict(spec.max_memory),
        **options_of_packing,
    }
    verbosity = library_logging.get_verbosity()
    library_logging.set_verbosity_error()  # what is wrong with the weights is raised below, in one line
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            local_path(spec.path),
            config=config,
            dtype=dtype,
            trust_remote_code=spec.trust_remote_code,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are in the report, and refused below
            output_loading_info=True,
            **options,
        )
    finally:
        library_logging.set_verbosity(verbosity)
    model, report = loaded
    if report["mismatched_keys"]:
        name, shape, wanted = min(report["mismatched_keys"], key=lambda entry: entry[0])
        raise ModelError(
            f"model {spec.path!r} holds {name} of shape {tuple(shape)}; allowed: {tuple(wanted)}, as "
            "its config says"
        )
    missing = report["missing_keys"]
    if missing:
        raise ModelError(
            f"model {spec.path!r} lacks {len(missing)} weights, e.g. {min(missing)}; allowed: a "
            "folder with all of them"
        )
    model_end_ids(model)
    return model


def _check_safetensors(spec: ModelSpec, config: PreTrainedConfig) -> None:
    """Refuse weight files that are not safetensors. transformers' ``use_safetensors`` checks the name of
    the first file only, and would unpickle the others."""
    named = getattr(config, "transformers_weights", None) or "model.safetensors.index.json"
    names = [named.removesuffix(".index.json")]
    index = cached_file(
        local_path(spec.path),
        named if named.endswith(".index.json") else "model.safetensors.index.json",
        **origin_of(spec.path, spec.revision or "main"),
        _raise_exceptions_for_gated_repo=False,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    if index is not None:
        names += json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()
    for file in names:
        if not file.endswith(".safetensors"):
            raise ModelError(
                f"model {spec.path!r} keeps weights in {file!r}; allowed: safetensors files, since "
                "others may run code when they are read"
            )


def _packing(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of `from_pretrained` for quantized weights.

    bitsandbytes packs weights while they are read, in 4 bits as "nf4" (QLoRA, 2305.14314, section 3),
    and computes in `dtype`. GGUF's blocks are unpacked to `dtype` at once, so that no kernel is fetched
    from the Hub.
    """
    if spec.quantization is None:
        return {}
    if spec.quantization == "gguf":
        return {**gguf_options(spec), **unpacking()}
    if spec.quantization == "bnb4":
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    else:
        config = BitsAndBytesConfig(load_in_8bit=True)
    options: dict[str, Any] = {"quantization_config": config}
    if spec.device_map is None:
        options["device_map"] = {"": str(device)}
    return options


def model_end_ids(model: PreTrainedModel) -> frozenset[int]:
    """The ids of the tokens that end a generation, by the model's generation config and its config."""
    ids: set[int] = set()
    for source in (model.generation_config, model.config):
        end = getattr(source, "eos_token_id", None)
        if end is None:
            continue
        tokens = list(end) if isinstance(end, list | tuple) else [end]
        if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
            raise ModelError(
                f"eos_token_id of model {model.name_or_path!r} is {end!r}; allowed: a token's number, "
                "or a list of them"
            )
        ids.update(tokens)
    return frozenset(ids)
