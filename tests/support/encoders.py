"""Encoders that tests of tasks share."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from kvbench.engine.model import ModelSpec, prompt_encoder
from kvbench.prompts import PromptEncoder
from support.paths import ROOT


class Letters:
    """A tokenizer of one token per character."""

    def encode(self, text: Any, *, add_special_tokens: Any = False) -> Any:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: Any, *, skip_special_tokens: Any = True) -> Any:
        return "".join(map(chr, token_ids))


class Words(Letters):
    """A tokenizer of one token per word, as of a very large vocabulary."""

    def encode(self, text: Any, *, add_special_tokens: Any = False) -> Any:
        return [len(word) for word in re.findall(r"\w+|[^\w ]", text)]


def tokenizer(
    template: str | None = None, bos: str = "", eos: str | None = None, special: Sequence[str] = ()
) -> Any:
    """The shipped model's, with a chat template, a token that begins every text, and other new ones."""
    made = AutoTokenizer.from_pretrained(ROOT / "kvbench/assets/recall_mini")
    if bos or eos or special:
        inner = made.backend_tokenizer
        inner.add_special_tokens([token for token in (bos, eos, *special) if token])
        if bos:
            begin = [(bos, inner.token_to_id(bos))]
            inner.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=begin
            )
        ends = {"bos_token": bos or None, "eos_token": eos, "pad_token": eos}
        made = PreTrainedTokenizerFast(tokenizer_object=inner, **ends)
    made.chat_template = template
    return made


@cache
def shipped() -> PromptEncoder:
    """The shipped model's, without a chat template."""
    return PromptEncoder(tokenizer())


@cache
def chat() -> PromptEncoder:
    """The shipped model's in an invented chat template."""
    texts = {"before": "<user>", "after": "</user><model>"}
    before, after = (tuple(shipped().encode_text(text)) for text in texts.values())
    return replace(shipped(), prefix_ids=before, suffix_ids=after, chat=True, **texts)


def ids_of(example: Any) -> list[int]:
    """All tokens of a prompt."""
    return [*(example.context_ids or ()), *(example.question_ids or ())]


VOCABULARY = (
    "The quick brown fox jumps over the lazy dog near the old river , What is the secret number ? "
    "Answer : Tell me in line record content ( INST ) USER ASSISTANT [INST] [/INST] . "
)


@cache
def sentencepiece(legacy: bool, template: str | None = None) -> PromptEncoder:
    """The encoder of a tokenizer like Llama-2's: a blank before every text, no other pre-tokenizer, and
    bytes for unknown characters. A `legacy` one puts a blank behind special tokens, too."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    words = tokenizers.Tokenizer(models.BPE())
    words.pre_tokenizer = pre_tokenizers.Metaspace()
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=special + pieces, show_progress=False
    )
    words.train_from_iterator([VOCABULARY * 3, string.printable.replace("\n", "")], trainer)
    model = json.loads(words.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    made = tokenizers.Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    if legacy:
        made.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.chat_template = template
    return prompt_encoder(fast, ModelSpec(name="m", path="x"))


LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %} {{ m['content'] }} {{ eos_token }}{% endif %}{% endfor %}"
)
"""Llama-2's chat template, without system messages."""


GPT2_WORDS = None
"""The words of GPT-2's tokenizer: the regular expression that the library has built in."""
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def byte_level(words: str | None, template: str | None = None) -> PromptEncoder:
    """The encoder of a tokenizer of bytes like GPT-2's and Llama-3's, which differ in what a word is."""
    made = tokenizers.Tokenizer(models.BPE())
    if words is None:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(words), "isolated")
        as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, as_bytes])
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([VOCABULARY * 3, *["fox.\n\n", "fox 1234\n\n"] * 9], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    fast.chat_template = template
    return prompt_encoder(fast, ModelSpec(name="m", path="x"))
