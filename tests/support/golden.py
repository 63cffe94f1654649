"""The tiny Llama of the golden likelihoods: weights drawn as their files say."""

from __future__ import annotations

import torch
import transformers as t

from kvbench.engine.attention import register


def golden_model(golden):
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
