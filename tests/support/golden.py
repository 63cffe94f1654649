"""Golden values: files of arrays, inputs drawn again as they say, the tiny Llama of the likelihoods."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as t
from torch import Tensor

from kvbench.engine.attention import register


def golden_model(golden: Any) -> Any:
    """The model that fidelity and streaming perplexity were computed with."""
    register()
    config = t.LlamaConfig(**golden["config"])
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(golden["model_seed"])
    for name, weight in sorted(model.named_parameters()):
        if weight.ndim == 1:
            weight.data.fill_(1.0)
            continue
        scale = 0.2 if "proj" in name else 0.3 if "lm_head" in name else 1.0
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
    for name, (total, absolute) in golden.get("weight_checks", {}).items():
        weight = dict(model.named_parameters())[name].detach().double()
        assert abs(float(weight.sum()) - total) < 1e-3
        assert abs(float(weight.abs().sum()) - absolute) < 1e-3
    return model


def arrays_of(path: Path) -> dict[str, Any]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def cases_of(golden: Any, listing: str = "configs_json") -> dict[str, Any]:
    return {case["name"]: case for case in json.loads(str(golden[listing]))}


def checked(case: dict[str, Any], **arrays: np.ndarray) -> list[Tensor]:
    """The inputs of a case, redrawn; their hashes show whether the generator has changed."""
    for name, array in arrays.items():
        digest = case.get(f"{name}_sha256")
        assert digest in (None, hashlib.sha256(array.tobytes()).hexdigest()), name
    return [torch.from_numpy(array) for array in arrays.values()]


def assert_near(result: Tensor, expected: Any, tolerance: float) -> None:
    """Equal to within a share of the largest value."""
    expected = torch.from_numpy(np.asarray(expected)).double()
    assert float((result.double() - expected).abs().max() / expected.abs().max()) <= tolerance
