"""Switching a model to kvbench's attention function and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedModel

from kvbench.engine.attention import IMPLEMENTATION, UnsupportedModel, register


def _of_text(model: PreTrainedModel) -> str | dict[str, str]:
    """The implementation to set: kvbench's, for the language model alone where there is a vision tower.

    Raises:
        UnsupportedModel: some tokens of a prompt attend to later ones.
    """
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            f"{type(model).__name__} attends both ways within its prompt; allowed: causal models"
        )
    if text is model.config:
        return IMPLEMENTATION
    (part,) = (key for key in model.config.sub_configs if getattr(model.config, key, None) is text)
    return {part: IMPLEMENTATION}


@contextmanager
def kvbench_attention_on(model: PreTrainedModel) -> Iterator[None]:
    """The model uses kvbench's attention function within the context, and its own again afterwards.

    Raises:
        UnsupportedModel: the model is no causal language model that can be switched.
    """
    name = type(model).__name__
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"model is a {name}; allowed: a transformers PreTrainedModel (of a pipeline, pipe.model; "
            "of a PEFT model, model.get_base_model())"
        )
    offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    if not offloaded and any(part.is_meta for part in model.parameters()):
        raise UnsupportedModel(
            f"{name} lies on the device meta, which holds no weights; allowed: a model that was loaded"
        )
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder; allowed: decoder-only models")
    if not hasattr(model, "generate"):
        raise UnsupportedModel(f"{name} has no language-model head; allowed: a ...ForCausalLM")
    register()
    configs = {id(model.config): model.config}
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            configs.setdefault(id(module.config), module.config)
    before = [(config, config._attn_implementation) for config in configs.values()]
    try:
        model.set_attn_implementation(_of_text(model))
        if model.config.get_text_config()._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModel(
                f"{name} does not use transformers' attention interface; allowed: models that do"
            )
        yield
    finally:
        for config, implementation in before:  # parents first: setting one sets what it contains
            config._attn_implementation = implementation
