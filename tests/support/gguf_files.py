"""GGUF files of Llama models, written with the gguf package as llama.cpp's converter lays them out."""

from __future__ import annotations

import string
from pathlib import Path

import gguf
import numpy as np
import transformers as t


def write_gguf(model: t.PreTrainedModel, path: Path, quant: str = "F32") -> Path:
    """The model as one file; its matrices in `quant` (a name of gguf's quantisation types)."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, config.vocab_size)
    kind = gguf.GGMLQuantizationType[quant]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, weight in model.state_dict().items():
        found = names.get_name(name, try_suffixes=(".weight",))
        if found is None or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        data = weight.float().numpy()
        for which, heads in (
            ("attn_q", config.num_attention_heads),
            ("attn_k", config.num_key_value_heads),
        ):
            if which in found:
                data = _interleaved(data, heads)
        packed = data.ndim == 2 and quant != "F32"
        writer.add_tensor(
            found,
            gguf.quants.quantize(data, kind) if packed else np.ascontiguousarray(data),
            raw_dtype=kind if packed else None,
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp rotates them: a pair beside each other, not half a head apart."""
    out, width = weight.shape
    return weight.reshape(heads, 2, out // heads // 2, width).swapaxes(1, 2).reshape(out, width)


def _add_tokenizer(writer: gguf.GGUFWriter, size: int) -> None:
    letters = ["▁", *(c for c in string.printable if not c.isspace())]
    tokens = ["<unk>", "<s>", "</s>", *letters][:size]
    tokens += [f"<extra_{i}>" for i in range(size - len(tokens))]
    kind = gguf.TokenType
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([-float(i) for i in range(size)])
    writer.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.NORMAL] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
