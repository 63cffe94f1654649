"""The two ways LongBench is run: as the benchmark does, and as BalanceKV's released code does.

A protocol turns a filled template into the model's tokens (chat template, truncation), says when an
answer ends, and cuts the answer before it is scored.

* `OfficialProtocol` (``longbench``): ``LongBench/pred.py`` of github.com/THUDM/LongBench at 2e00731f.
* `BalanceKVProtocol` (``balancekv``): the evaluation script of github.com/ksheth96/BalanceKV at
  4ccee30a, which made the paper's Table 1.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from kvbench.tasks.base import PromptEncoder, TaskError
from kvbench.tasks.longbench.metrics import FIRST_LINE

CODE = frozenset(("lcc", "repobench-p"))
FEW_SHOT_OR_CODE = FIRST_LINE | CODE
"""Datasets that LongBench gives to chat models without their chat template."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A whole prompt as the model sees it.

    Attributes:
        ids: its tokens, special ones included.
        cut: how many of them are context (what `compress_after=context` compresses).
        truncated: tokens that were left out of the middle.
    """

    ids: list[int]
    cut: int
    truncated: int


@dataclass(frozen=True)
class LongBenchProtocol(ABC):
    """How prompts and answers are treated."""

    name: ClassVar[str]

    @abstractmethod
    def encode(
        self,
        encoder: PromptEncoder,
        dataset: str,
        prompt: str,
        cut: int,
        *,
        new_tokens: int,
        limit: int | None,
    ) -> EncodedPrompt:
        """Tokens of a filled template.

        Args:
            cut: where in the prompt the context ends (characters).
            new_tokens: room that the answer needs.
            limit: prompt tokens (`task.max_input`), None for what the protocol says.
        """

    @abstractmethod
    def end_ids(self, encoder: PromptEncoder, dataset: str) -> tuple[frozenset[int] | None, bool]:
        """Tokens that end an answer (None: all that the model knows), and whether one may come first."""

    def answer(self, encoder: PromptEncoder, dataset: str, prediction: str) -> str:
        """The part of a prediction that is scored: all of it."""
        return prediction

    @abstractmethod
    def settled(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        """Whether nothing that may follow `text` changes `answer`."""


@dataclass(frozen=True)
class OfficialProtocol(LongBenchProtocol):
    """LongBench's own: chat template except on few-shot and code datasets, which go in plain.

    A prompt longer than the model's maximum is cut before the chat template goes around it: the
    texts of its first and of its last half of that many tokens are joined, and tokenised again.
    On samsum a newline ends the answer, though not as its first token.
    """

    name: ClassVar[str] = "longbench"

    def encode(
        self,
        encoder: PromptEncoder,
        dataset: str,
        prompt: str,
        cut: int,
        *,
        new_tokens: int,
        limit: int | None,
    ) -> EncodedPrompt:
        """See `LongBenchProtocol.encode`."""
        chat = encoder.chat and dataset not in FEW_SHOT_OR_CODE
        most = self._maximum(encoder, new_tokens, chat, limit)
        plain, _ = encoder.encode_prompt(prompt, cut, special=True)
        left_out = 0
        if len(plain) > most:
            half = most // 2
            left_out = len(plain) - 2 * half
            question = len(prompt) - cut
            prompt = encoder.decode(plain[:half]) + encoder.decode(plain[-half:])
            cut = max(0, len(prompt) - question)
        ids, boundary = _encoded(encoder, prompt, cut, chat=chat)
        return EncodedPrompt(ids, boundary, left_out)

    @staticmethod
    def _maximum(encoder: PromptEncoder, new_tokens: int, chat: bool, limit: int | None) -> int:
        """The model's maximum of prompt tokens, without those of the chat template."""
        known = [size for size in (limit, encoder.max_input) if size is not None]
        if known:
            return min(known)
        if encoder.max_positions is None:
            raise TaskError(
                "longbench: the model's config names no maximum length; allowed: model.max_input or "
                "task.max_input, in tokens"
            )
        around = (
            len(encoder.render_chat("")) if chat else 0
        )  # characters: at least as many as tokens
        return max(2, encoder.max_positions - new_tokens - around)

    def end_ids(self, encoder: PromptEncoder, dataset: str) -> tuple[frozenset[int] | None, bool]:
        """See `LongBenchProtocol.end_ids`."""
        if dataset == "samsum":
            return encoder.end_ids | {encoder.encode_text("\n")[-1]}, False
        return None, True

    def settled(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        """Only the first line of few-shot answers is scored, leading newlines apart."""
        return dataset in FIRST_LINE and "\n" in text.lstrip("\n")


@dataclass(frozen=True)
class BalanceKVProtocol(LongBenchProtocol):
    """BalanceKV's released evaluation.

    Up to 100,000 tokens, more are cut from the middle of the token ids, chat template included. Llama
    and Mistral models get the plain prompt on every dataset; Qwen models get their chat template, with
    its own default system message, on all but seven. An answer is stripped, then cut at the first
    newline and at the first double space, except that of other models than Llama to a code prompt.
    It ends at the tokenizer's end token and (Llama 3) at the end of a turn, nowhere else.
    """

    name: ClassVar[str] = "balancekv"
    max_input: ClassVar[int] = 100_000
    plain_for_qwen: ClassVar[frozenset[str]] = frozenset(
        ("gov_report", "multi_news", "trec", "triviaqa", "samsum", "lcc", "repobench-p")
    )

    def encode(
        self,
        encoder: PromptEncoder,
        dataset: str,
        prompt: str,
        cut: int,
        *,
        new_tokens: int,
        limit: int | None,
    ) -> EncodedPrompt:
        """See `LongBenchProtocol.encode`."""
        chat = self._chat(encoder, dataset)
        ids, boundary = _encoded(encoder, prompt, cut, chat=chat)
        known = [size for size in (limit, encoder.max_input) if size is not None]
        return truncate_middle(ids, boundary, min([self.max_input, *known]))

    def _chat(self, encoder: PromptEncoder, dataset: str) -> bool:
        family = encoder.family or ""
        if not encoder.chat or family in ("llama", "mistral", "ministral"):
            return False
        if family.startswith("qwen"):
            return dataset not in self.plain_for_qwen
        raise TaskError(
            f"longbench: protocol balancekv does not say how to prompt a chat model of type "
            f"{family!r}; allowed: Llama, Mistral and Qwen models, task.protocol=longbench, or "
            "model.chat_template=never"
        )

    def end_ids(self, encoder: PromptEncoder, dataset: str) -> tuple[frozenset[int] | None, bool]:
        """See `LongBenchProtocol.end_ids`."""
        return encoder.end_ids, True

    def answer(self, encoder: PromptEncoder, dataset: str, prediction: str) -> str:
        """See `LongBenchProtocol.answer`."""
        text = prediction.strip()
        if self._is_cut(encoder, dataset):
            text = text.split("\n")[0].split("  ")[0]
        return text

    def settled(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        """Once something follows a newline or a double space."""
        text = text.strip()
        return self._is_cut(encoder, dataset) and ("\n" in text or "  " in text)

    @staticmethod
    def _is_cut(encoder: PromptEncoder, dataset: str) -> bool:
        return dataset not in CODE or encoder.family == "llama"


PROTOCOLS: dict[str, LongBenchProtocol] = {
    protocol.name: protocol for protocol in (OfficialProtocol(), BalanceKVProtocol())
}


def _encoded(encoder: PromptEncoder, prompt: str, cut: int, *, chat: bool) -> tuple[list[int], int]:
    """Tokens of the prompt, in its chat template or with the tokenizer's own special tokens (BOS)."""
    if not chat:
        return encoder.encode_prompt(prompt, cut, special=True)
    text = encoder.render_chat(prompt)
    inner = prompt.strip()  # some templates strip what they are given
    start = text.find(inner)
    if start < 0:
        raise TaskError(
            "longbench: the model's chat template changes the user's text; allowed: templates that "
            "keep it, or model.chat_template=never"
        )
    lead = len(prompt) - len(prompt.lstrip())
    return encoder.encode_prompt(text, start + max(0, cut - lead), special=False)


def truncate_middle(ids: list[int], cut: int, limit: int) -> EncodedPrompt:
    """The first and the last `limit` // 2 tokens of a longer prompt; a shorter one as it is."""
    if len(ids) <= limit:
        return EncodedPrompt(ids, cut, 0)
    half = limit // 2
    gone = len(ids) - 2 * half
    boundary = cut if cut <= half else max(half, cut - gone)
    return EncodedPrompt(ids[:half] + ids[-half:], boundary, gone)
