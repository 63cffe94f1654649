"""The architectures and the layers that can be compressed; kvbench's attention function on a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from kvbench.engine.attention import IMPLEMENTATION, UnsupportedModel, register
from kvbench.engine.states import EMPTY, HYBRIDS, STATEFUL, check_hybrid


def check_serves_interface(config: PreTrainedConfig) -> None:
    """Refuse architectures that compute attention themselves, where nothing could be compressed.

    Raises:
        UnsupportedModel: naming the architecture.
    """
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        architecture = mapping[type(config)]
    except KeyError:
        return  # no causal language model: `from_pretrained` refuses it with a message of its own
    check_hybrid(config)
    known = config.model_type in HYBRIDS
    if not known and not getattr(architecture, "_supports_attention_backend", False):
        raise UnsupportedModel(
            f"model type {config.model_type!r} ({architecture.__name__}) computes its attention itself "
            "instead of through transformers' attention interface; allowed: models that use it "
            "(Llama, Qwen, Mistral, Gemma, OPT, GPT-NeoX ...)"
        )


def full_layers(config: PreTrainedConfig) -> list[int]:
    """The indices of the layers with full attention, by a text config. Other layers are not compressed:
    those with a sliding window, and those that hold a state (`kvbench.engine.states`).

    Raises:
        UnsupportedModel: there is none, or other layers hold what no fork does (chunks, keys shared
            between layers).
    """
    name, count = config.model_type, config.num_hidden_layers
    shared = getattr(config, "num_kv_shared_layers", 0)
    if shared or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise UnsupportedModel(
            f"model type {name!r} shares keys and values between layers; allowed: models whose layers "
            "have their own"
        )
    check_hybrid(config)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        window = getattr(config, "sliding_window", None)
        slides = window and getattr(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * count
    for kind in kinds[:count]:
        if kind not in ("full_attention", "sliding_attention", *STATEFUL, *EMPTY):
            raise UnsupportedModel(
                f"model type {name!r} has {kind} layers; allowed: full_attention, sliding_attention, "
                f"{', '.join(STATEFUL)}"
            )
    layers = [i for i, kind in enumerate(kinds[:count]) if kind in ("full_attention", "hybrid")]
    if not layers:
        raise UnsupportedModel(
            f"model type {name!r} has {', '.join(sorted(set(kinds)))} layers only; allowed: models with "
            "full-attention layers"
        )
    return layers


def compressible_layers(model: PreTrainedModel) -> list[int]:
    """`full_layers` of a model."""
    return full_layers(model.config.get_text_config())


def kv_heads(config: PreTrainedConfig) -> int:
    """KV heads of a model with this text config."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


@contextmanager
def kvbench_attention_on(model: PreTrainedModel) -> Iterator[None]:
    """Let the model use kvbench's attention function within this context, and its own afterwards. In a
    vision-language model only the language model does.

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
    text = model.config.get_text_config()
    if getattr(text, "use_bidirectional_attention", None):
        raise UnsupportedModel(
            f"{name} attends both ways within its prompt; allowed: causal models"
        )
    register()
    before = text._attn_implementation
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    try:
        holder = next((part for part in parts if part.config is text), None)
        if holder is not None:
            holder.set_attn_implementation(IMPLEMENTATION)
        if text._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModel(
                f"{name} does not use transformers' attention interface; allowed: models that do"
            )
        yield
    finally:
        text._attn_implementation = before
