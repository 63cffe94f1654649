"""A model's layers by its config: which can be compressed, their heads, the bytes of a cache. kvbench's
attention function on a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from kvbench.engine.attention import IMPLEMENTATION, UnsupportedModel, register
from kvbench.engine.states import EMPTY, HYBRIDS, STATEFUL, check_hybrid
from kvbench.kernels.quantize import Scheme

if TYPE_CHECKING:  # importing it takes longer than all else, here and in the other files
    from transformers import PreTrainedModel


def check_supported(config: PreTrainedConfig) -> None:
    """Refuse a model, by its config alone, that kvbench cannot run: one that computes its attention
    itself, that is not causal (`check_causal`), or whose layers cannot be compressed (`full_layers`).

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
    text = config.get_text_config()
    check_causal(text)
    full_layers(text)


def check_causal(config: PreTrainedConfig) -> None:
    """Refuse models whose text config says that a token attends to later ones, too.

    Raises:
        UnsupportedModel: naming the model type.
    """
    name, kind = config.model_type, type(config)
    # In Gemma 4 the value "vision" is of images alone, which no prompt here holds.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise UnsupportedModel(
            f"model type {name!r} attends both ways within its prompt; allowed: causal models"
        )
    # BERT's kin, which are encoders unless their config says otherwise. (GPT-NeoX has the first of the
    # two fields and does not read it.)
    may_be_encoder = hasattr(kind, "is_decoder") and hasattr(kind, "add_cross_attention")
    if may_be_encoder and not config.is_decoder:
        raise UnsupportedModel(
            f"model type {name!r} attends both ways within its prompt, as is_decoder of its config is "
            f"{config.is_decoder}; allowed: causal models"
        )


def full_layers(config: PreTrainedConfig) -> list[int]:
    """The indices of the layers with full attention, by a text config. Other layers are not compressed:
    those with a sliding window, and those that hold a state (`kvbench.engine.states`).

    Raises:
        UnsupportedModel: there is none, or other layers hold what no row does (chunks, keys shared
            between layers).
    """
    name = config.model_type
    shared = getattr(config, "num_kv_shared_layers", 0)
    if shared or "reuse" in (getattr(config, "kv_sharing_modes", None) or ()):
        raise UnsupportedModel(
            f"model type {name!r} shares keys and values between layers; allowed: models whose layers "
            "have their own"
        )
    check_hybrid(config)
    kinds = layer_kinds(config)
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention", *STATEFUL, *EMPTY):
            raise UnsupportedModel(
                f"model type {name!r} has {kind} layers; allowed: full_attention, sliding_attention, "
                f"{', '.join(STATEFUL)}"
            )
    layers = [i for i, kind in enumerate(kinds) if kind in ("full_attention", "hybrid")]
    if not layers:
        raise UnsupportedModel(
            f"model type {name!r} has {', '.join(sorted(set(kinds)))} layers only; allowed: models with "
            "full-attention layers"
        )
    return layers


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """transformers' name of the type of each layer, by a text config."""
    count = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return list(kinds[:count])
    window = getattr(config, "sliding_window", None)
    slides = window and getattr(config, "use_sliding_window", True)
    return ["sliding_attention" if slides else "full_attention"] * count


def compressible_layers(model: PreTrainedModel) -> list[int]:
    """`full_layers` of a model."""
    return full_layers(model.config.get_text_config())


class HeadShape(NamedTuple):
    """The heads of a layer.

    Attributes:
        heads, kv_heads: the numbers of query heads and of KV heads.
        key_dim, value_dim: the numbers in a key and in a value.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int


def head_shapes(config: PreTrainedConfig) -> list[HeadShape]:
    """The heads of each layer of a model with this text config, in which they may differ (Gemma 4)."""
    by_layer = getattr(config, "per_layer_config", None)
    layers = range(config.num_hidden_layers)
    return [_heads_of(config if by_layer is None else by_layer[layer]) for layer in layers]


def _heads_of(layer: PreTrainedConfig) -> HeadShape:
    """The heads of a layer with this config."""
    heads = layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):
        # Latent attention: transformers holds keys and values of all heads, as attention reads them.
        key_dim = layer.qk_nope_head_dim + layer.qk_rope_head_dim
        return HeadShape(heads, heads, key_dim, layer.v_head_dim)
    key_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    value_dim = getattr(layer, "v_head_dim", None) or key_dim
    return HeadShape(
        heads, getattr(layer, "num_key_value_heads", None) or heads, key_dim, value_dim
    )


def cache_bytes(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    tokens: int,
    entries: int,
    quantization: Scheme | None = None,
) -> int:
    """The bytes of the cache of a prompt, computed from the model's config alone.

    Args:
        config: the model's text config.
        tokens: the length of the prompt.
        entries: the entries per head of layers with full attention.
        quantization: how these entries are packed; None for `dtype`. Sliding-window layers are never
            packed.
    """
    total = 0
    number = 0  # of the layer among those with full attention
    for (_, kv_heads, key_dim, value_dim), kind in zip(
        head_shapes(config), layer_kinds(config), strict=True
    ):
        entry = kv_heads * (key_dim + value_dim) * dtype.itemsize
        if kind == "sliding_attention":
            total += entry * min(config.sliding_window, tokens)
        elif kind in ("full_attention", "hybrid"):
            if quantization is None:
                total += entry * entries
            else:
                # A scheme counts keys and values of one size; of two sizes this is the mean.
                of_each = [
                    quantization.nbytes(kv_heads, entries, dim, dtype.itemsize, number)
                    for dim in (key_dim, value_dim)
                ]
                total += sum(of_each) // 2
            number += 1
    return total


@contextmanager
def kvbench_attention_on(model: PreTrainedModel) -> Iterator[None]:
    """Let the model use kvbench's attention function within this context, and its own afterwards.

    Raises:
        UnsupportedModel: see `switch_to_kvbench`.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    before = getattr(text, "_attn_implementation", None)
    try:
        switch_to_kvbench(model)
        yield
    finally:
        if text is not None:
            text._attn_implementation = before


def switch_to_kvbench(model: PreTrainedModel) -> None:
    """Let the model use kvbench's attention function from now on. In a vision-language model only the
    language model does. `generate` then works inside `compress` alone.

    Raises:
        UnsupportedModel: the model is no causal language model that can be switched.
    """
    from transformers import PreTrainedModel

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
    check_causal(text)
    register()
    parts = (part for part in model.modules() if isinstance(part, PreTrainedModel))
    holder = next((part for part in parts if part.config is text), None)
    if holder is not None:
        holder.set_attn_implementation(IMPLEMENTATION)
    if text._attn_implementation != IMPLEMENTATION:
        raise UnsupportedModel(
            f"{name} does not use transformers' attention interface; allowed: models that do"
        )
