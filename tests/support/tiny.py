"""Tiny random models of the architectures kvbench is tested on, and methods that tests need."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import transformers as t

from kvbench.engine.architecture import switch_to_kvbench
from kvbench.engine.attention import register
from kvbench.kv import Budget, CompressedKV, LayerKV, keep_all
from kvbench.methods.base import Method

_COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GROUPED = {**_COMMON, "num_key_value_heads": 2}
_SLIDING = {**GROUPED, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24}

_MIXED = {
    **GROUPED,
    "head_dim": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}

WITH_SINKS = {
    "gpt_oss": lambda: t.GptOssConfig(
        **_MIXED,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "granite_swa": lambda: t.GraniteSWAConfig(**_MIXED),
    "granitemoe_swa": lambda: t.GraniteMoeSWAConfig(
        **_MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
    "mimo_v2_flash": lambda: t.MiMoV2FlashConfig(
        **_MIXED, **_EXPERTS, v_head_dim=8, n_routed_experts=4, n_group=1, topk_group=1
    ),
    "flint": lambda: t.FlintConfig(
        **_MIXED, **_EXPERTS, num_experts=4, shared_expert_intermediate_size=32
    ),
}
"""The models with attention sinks. Some are not in the earliest transformers that kvbench allows."""

CONFIGS = {
    "llama": lambda: t.LlamaConfig(**GROUPED),
    "qwen2": lambda: t.Qwen2Config(**GROUPED),
    "qwen3": lambda: t.Qwen3Config(**GROUPED, head_dim=16),
    "mistral": lambda: t.MistralConfig(**GROUPED, sliding_window=None),
    "gemma2": lambda: t.Gemma2Config(**_SLIDING),
    "gemma3": lambda: t.Gemma3TextConfig(
        **_SLIDING, layer_types=["sliding_attention", "full_attention"] * 2
    ),
    "opt": lambda: t.OPTConfig(
        **{k: v for k, v in _COMMON.items() if k not in ("intermediate_size", "initializer_range")},
        ffn_dim=96,
        word_embed_proj_dim=64,
        init_std=0.2,
    ),
    "gpt_neox": lambda: t.GPTNeoXConfig(**_COMMON, rotary_pct=0.25),
    "gpt_oss": WITH_SINKS["gpt_oss"],
    # Takes a view of attention's output.
    "afmoe": lambda: t.AfmoeConfig(**_MIXED, **_EXPERTS, num_experts=4, num_dense_layers=3),
    "deepseek_v3": lambda: t.DeepseekV3Config(
        **GROUPED | {"num_key_value_heads": 4},
        **_EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    # The heads of a layer are those of its type.
    "gemma4": lambda: t.Gemma4TextConfig(
        **_MIXED, global_head_dim=32, hidden_size_per_layer_input=8, vocab_size_per_layer_input=97
    ),
}
if not hasattr(t, "Gemma4TextConfig"):
    del CONFIGS["gemma4"]


def tiny_model(architecture: str, seed: int = 0, layers: int | None = None) -> t.PreTrainedModel:
    register()
    torch.manual_seed(seed)
    config = {**WITH_SINKS, **CONFIGS}[architecture]()
    if layers is not None:
        config.num_hidden_layers = layers
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, part in model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.uniform_(part, 0.0, 3.0)  # of more weight than an entry
    return model


CHANGE = 64
"""The number of tokens beyond which the rotary table of some models is another."""


def model_with_table(kind: str) -> t.PreTrainedModel:
    """A tiny model whose rotary table is another beyond `CHANGE` tokens, or ("default") is not."""
    register()
    torch.manual_seed(0)
    if kind == "longrope":
        factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope = {"rope_type": kind, "original_max_position_embeddings": CHANGE, **factors}
        config = t.Phi3Config(
            **GROUPED, original_max_position_embeddings=CHANGE, rope_parameters=rope
        )
    elif kind == "default":
        config = t.LlamaConfig(**GROUPED)
    else:
        rope = {"rope_type": kind, "rope_theta": 10000.0, "factor": 4.0}
        positions = {**GROUPED, "max_position_embeddings": CHANGE}
        config = t.LlamaConfig(**positions, rope_parameters=rope)
    model = t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    return model


def on_kvbench(model: t.PreTrainedModel) -> t.PreTrainedModel:
    """The model on kvbench's attention for good, as a job's is."""
    switch_to_kvbench(model)
    return model


def prompt_ids(n: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (n,), generator=generator).tolist()


@dataclass(frozen=True, kw_only=True)
class Everything(Method):
    """A method like any other that keeps every entry, and says so."""

    saves_memory: ClassVar[bool] = False

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return keep_all(layer)


@dataclass(frozen=True, kw_only=True)
class Greedy(Method):
    """Keeps everything and does not say so: the audit must catch it."""

    saves_memory: ClassVar[bool] = True

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return keep_all(layer)


@dataclass(frozen=True, kw_only=True)
class Broken(Method):
    """Fails at its second layer."""

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        if layer.layer_index == 1:
            raise RuntimeError("out of memory: tried to allocate everything")
        return keep_all(layer)

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return n
