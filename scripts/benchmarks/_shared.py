"""The models that several benchmarks measure."""

from __future__ import annotations

from kvbench.engine.model import ModelSpec

SHIPPED = ModelSpec(name="recall_mini", path="asset:recall_mini")
"""The small model that ships with kvbench."""
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 262144,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""The shape of Llama-3.1-8B, for random weights, with room for 128k tokens and an answer."""
