"""Encoders that tests of tasks share."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from transformers import AutoTokenizer

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


@cache
def shipped() -> PromptEncoder:
    """The shipped model's, without a chat template."""
    return PromptEncoder(AutoTokenizer.from_pretrained(ROOT / "kvbench/assets/recall_mini"))


@cache
def chat() -> PromptEncoder:
    """The shipped model's in an invented chat template."""
    before, after = (tuple(shipped().encode_text(t)) for t in ("<user>", "</user><model>"))
    return replace(shipped(), prefix_ids=before, suffix_ids=after, chat=True)


def ids_of(example: Any) -> list[int]:
    """All tokens of a complete prompt."""
    return [*(example.context_ids or ()), *(example.question_ids or ())]
