"""Weights of few bits, through transformers' own loaders: bitsandbytes, and files of GGUF."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import BitsAndBytesConfig

from kvbench.engine.loading import ModelError, ModelSpec, local_path
from kvbench.errors import needs_extra

PACKAGES = {"bnb4": "bitsandbytes", "bnb8": "bitsandbytes", "gguf": "gguf"}
"""What each choice of `ModelSpec.quantization` needs beside transformers."""

BNB_DEVICES = ("cuda", "cpu", "xpu")
"""Where bitsandbytes has kernels for both of its kinds."""


def gguf_options(spec: ModelSpec) -> dict[str, Any]:
    """What transformers' loaders of config, tokenizer and weights are told; nothing without GGUF.

    Raises:
        ModelError: the package is missing, or there is no one file.
    """
    if spec.quantization != "gguf":
        return {}
    check_package(spec)
    if spec.gguf_file is not None:
        return {"gguf_file": spec.gguf_file}
    there = sorted(path.name for path in Path(local_path(spec.path)).glob("*.gguf"))
    if len(there) != 1:
        of = ", ".join(there) or "those of the model's repository"
        raise ModelError(
            f"model.quantization is gguf and model {spec.path!r} has {len(there) or 'no'} such files "
            f"on this machine; allowed: model.gguf_file=<one of: {of}>"
        )
    return {"gguf_file": there[0]}


def weight_options(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_pretrained` is told beside that. bitsandbytes packs the weights while it reads them, as
    its 4 bits "nf4" (QLoRA, 2305.14314, section 3), and computes in `dtype`; GGUF's blocks are unpacked
    to `dtype` at once, so that no kernel is fetched from the Hub.

    Raises:
        ModelError: the package is missing, or it cannot be used on this device.
    """
    if spec.quantization is None:
        return {}
    check_package(spec)
    if spec.quantization == "gguf":
        unpacked: Any = getattr(transformers, "GgufConfig", None)  # older ones always unpack
        plan = {} if unpacked is None else {"quantization_config": unpacked(dequantize=True)}
        return {**gguf_options(spec), **plan}
    if device.type not in BNB_DEVICES:
        raise ModelError(
            f"model.quantization is {spec.quantization} and device is {str(device)!r}, for which "
            f"bitsandbytes has no kernels; allowed: {', '.join(BNB_DEVICES)}"
        )
    if spec.quantization == "bnb4":
        how = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    else:
        how = BitsAndBytesConfig(load_in_8bit=True)
    placed = {} if spec.device_map is not None else {"device_map": {"": str(device)}}
    return {"quantization_config": how, **placed}


def check_package(spec: ModelSpec) -> None:
    """Raises:
    ModelError: the package that the quantization needs is not installed.
    """
    package = PACKAGES[str(spec.quantization)]
    if find_spec(package) is None:
        raise ModelError(
            f"model.quantization is {spec.quantization}: {needs_extra(package, 'quantized')}"
        )
