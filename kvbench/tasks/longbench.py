"""LongBench and LongBench-E as a task, whose rows, prompts and scores are in `longbench_datasets`.

A model is prompted by the benchmark's own protocol, or by that of BalanceKV's release. A protocol turns
a filled prompt template into token ids (chat template or plain text, and what is cut from a prompt that
is too long), says which tokens end an answer, and which part of an answer is scored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from annotated_types import Ge

from kvbench.errors import check_known
from kvbench.errors.options import Count, Distinct
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Task, TaskError, in_turn
from kvbench.tasks.data import Source
from kvbench.tasks.encoding import compact
from kvbench.tasks.longbench_datasets import (
    CODE,
    DATASETS,
    E_DATASETS,
    FEW_SHOT,
    REPOSITORY,
    RUN_BY_DEFAULT,
    bucket,
    fill,
    longbench_source,
    prompt_templates,
    rows_of,
    score,
)
from kvbench.tasks.metrics import check_metric


class EncodedPrompt(NamedTuple):
    """All token ids that the model sees, how many of them are context, and how many were left out of the
    middle."""

    ids: list[int]
    cut: int
    truncated: int


class OfficialProtocol:
    """The protocol of ``LongBench/pred.py`` at 2e00731f.

    The chat template is used except on few-shot and code data sets, whose prompts are plain text. A
    prompt longer than the model's maximum is cut before it is put into the chat template: the texts of
    its first and of its last half of that many tokens are joined and tokenised again. On samsum a line
    end ends the answer, except as its first token.
    """

    def encode(
        self, encoder: PromptEncoder, dataset: str, prompt: str, cut: int, limit: int | None
    ) -> EncodedPrompt:
        """Encode a filled template, whose first `cut` characters are context.

        Args:
            limit: the most tokens of a prompt (`task.max_input`); None for the protocol's own limit.
        """
        chat = encoder.chat and dataset not in FEW_SHOT | CODE
        most_tokens = self._most_tokens(encoder, dataset, chat, limit)
        ids, _ = encoder.encode_prompt(prompt, cut, special=True)
        truncated = 0
        if len(ids) > most_tokens:
            half = most_tokens // 2
            truncated = len(ids) - 2 * half
            question_characters = len(prompt) - cut
            prompt = encoder.decode(ids[:half]) + encoder.decode(ids[-half:])
            cut = max(0, len(prompt) - question_characters)
        ids, context_tokens = _encoded(encoder, prompt, cut, chat=chat)
        return EncodedPrompt(ids, context_tokens, truncated)

    @staticmethod
    def _most_tokens(encoder: PromptEncoder, dataset: str, chat: bool, limit: int | None) -> int:
        """The most tokens of a prompt: the smaller of the two limits that the user and the model's
        config give, or else what the model's positions leave beside the answer and the chat
        template."""
        limits = [size for size in (limit, encoder.max_input) if size is not None]
        if limits:
            return min(limits)
        if encoder.max_positions is None:
            raise TaskError(
                "longbench: the model's config names no maximum length; allowed: model.max_input "
                "or task.max_input, in tokens"
            )
        # The characters of an empty chat are at least as many as its tokens.
        around = len(encoder.render_chat("")) if chat else 0
        return max(2, encoder.max_positions - DATASETS[dataset].new_tokens - around)

    def end_ids(self, encoder: PromptEncoder, dataset: str) -> tuple[frozenset[int] | None, bool]:
        """The tokens that end an answer (None for all end tokens of the model), and whether the first
        generated token may be one of them."""
        if dataset == "samsum":
            return encoder.end_ids | {encoder.encode_text("\n")[-1]}, False
        return None, True

    def answer(self, encoder: PromptEncoder, dataset: str, prediction: str) -> str:
        return prediction

    def is_final(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        """Whether no continuation of the generated text can change its score."""
        return dataset in FEW_SHOT and "\n" in text.lstrip("\n")


class BalanceKVProtocol(OfficialProtocol):
    """The protocol of BalanceKV's released evaluation (github.com/ksheth96/BalanceKV at 4ccee30a), by
    which the paper's Table 1 was made.

    A prompt has at most 100,000 tokens; what is more is cut from the middle of the token ids, chat
    template included. Llama and Mistral models get the plain prompt on every data set. Qwen models get
    their chat template, with its own default system message, except on the seven data sets of
    `plain_for_qwen`. An answer is stripped, then cut at the first line end and at the first double
    space; on the code data sets only a Llama model's answer is cut. An answer ends at the tokenizer's
    end token and (Llama 3) at the end of a turn, nowhere else.
    """

    max_input: ClassVar[int] = 100_000
    plain_for_qwen: ClassVar[frozenset[str]] = CODE | frozenset(
        ("gov_report", "multi_news", "trec", "triviaqa", "samsum")
    )

    def encode(
        self, encoder: PromptEncoder, dataset: str, prompt: str, cut: int, limit: int | None
    ) -> EncodedPrompt:
        chat = self._uses_chat(encoder, dataset)
        ids, context_tokens = _encoded(encoder, prompt, cut, chat=chat)
        limits = [size for size in (limit, encoder.max_input, self.max_input) if size is not None]
        return truncate_middle(ids, context_tokens, min(limits))

    def _uses_chat(self, encoder: PromptEncoder, dataset: str) -> bool:
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
        return encoder.end_ids, True

    def answer(self, encoder: PromptEncoder, dataset: str, prediction: str) -> str:
        text = prediction.strip()
        if dataset not in CODE or encoder.family == "llama":
            text = text.split("\n")[0].split("  ")[0]
        return text

    def is_final(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        return self.answer(encoder, dataset, text) != text.strip()


PROTOCOLS: dict[str, OfficialProtocol] = {
    "longbench": OfficialProtocol(),
    "balancekv": BalanceKVProtocol(),
}
"""The protocols by their names in `LongBench.protocol`."""


def _encoded(encoder: PromptEncoder, prompt: str, cut: int, *, chat: bool) -> tuple[list[int], int]:
    """Token ids in the chat template, or with the tokenizer's own special tokens (BOS), and how many lie
    before `cut`, a number of characters."""
    if not chat:
        return encoder.encode_prompt(prompt, cut, special=True)
    text = encoder.render_chat(prompt)
    # Some templates strip white space at both ends of a message.
    start = text.find(prompt.strip())
    if start < 0:
        raise TaskError(
            "longbench: the model's chat template changes the user's text; allowed: templates that "
            "keep it, or model.chat_template=never"
        )
    stripped = len(prompt) - len(prompt.lstrip())
    return encoder.encode_prompt(text, start + max(0, cut - stripped), special=False)


def truncate_middle(ids: list[int], cut: int, limit: int) -> EncodedPrompt:
    """Keep the first and the last `limit` // 2 tokens of a prompt that has more than `limit`; the first
    `cut` are context."""
    if len(ids) <= limit:
        return EncodedPrompt(ids, cut, 0)
    half = limit // 2
    truncated = len(ids) - 2 * half
    kept_cut = cut if cut <= half else max(half, cut - truncated)
    return EncodedPrompt(ids[:half] + ids[-half:], kept_cut, truncated)


@dataclass(frozen=True, kw_only=True)
class LongBenchExample(Example):
    all_classes: tuple[str, ...]
    answer: Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """LongBench: prompts and metrics of the original, by one of two protocols (`PROTOCOLS`).
    conf/task/longbench.yaml tells the options. A prompt of more than `max_input` tokens loses its
    middle."""

    name: ClassVar[str] = "longbench"
    breakdown: ClassVar[tuple[str, ...]] = ("length_bucket",)
    unhashed: ClassVar[tuple[str, ...]] = ("data", "dataset", "revision", "per_dataset")

    split: Literal["e", "full"] = "e"
    datasets: Distinct[str] | None = None
    protocol: Literal["longbench", "balancekv"] = "balancekv"
    data: str | None = None
    dataset: str = REPOSITORY
    revision: str | None = None
    max_input: Annotated[int, Ge(2)] | None = None
    per_dataset: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = RUN_BY_DEFAULT[self.split] if self.datasets is None else self.datasets
        known = E_DATASETS if self.split == "e" else tuple(DATASETS)
        for name in names:
            what = f"task.datasets has {name!r}, which is not in split {self.split!r}"
            check_known(what, name, known, TaskError)
        object.__setattr__(self, "datasets", tuple(names))

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        suffix = "_e" if self.split == "e" else ""
        files = [name + suffix for name in self.datasets or ()]
        return {
            file: longbench_source(file, self.data, self.dataset, self.revision) for file in files
        }

    def digests(self) -> Mapping[str, str]:
        return {name: " ".join(source.digests().values()) for name, source in self._sources.items()}

    def metric_name(self) -> str:
        metrics = {DATASETS[name].metric for name in self.datasets or ()}
        if len(metrics) > 1:
            return "LongBench's metrics"
        (metric,) = metrics
        return "ROUGE-L" if metric.startswith("rouge_l") else metric

    def examples(self, encoder: PromptEncoder) -> Sequence[LongBenchExample]:
        names = self.datasets or ()
        for name in names:
            check_metric(DATASETS[name].metric)
        queues = []
        for name, source in zip(names, self._sources.values(), strict=True):
            rows = rows_of(source, name)[: self.per_dataset]
            queues.append([self._example(encoder, name, row) for row in rows])
        return in_turn(queues)

    def _example(
        self,
        encoder: PromptEncoder,
        dataset: str,
        row: Mapping[str, Any],
    ) -> LongBenchExample:
        protocol = PROTOCOLS[self.protocol]
        prompt, cut = fill(prompt_templates()[dataset], row["context"], row["input"])
        encoded = protocol.encode(encoder, dataset, prompt, cut, self.max_input)
        ids = compact(encoded.ids)
        end_ids, may_be_empty = protocol.end_ids(encoder, dataset)
        return LongBenchExample(
            id=f"{dataset}-{row['_id']}",
            context=prompt[:cut],
            question=prompt[cut:],
            answers=tuple(row["answers"]),
            max_new_tokens=DATASETS[dataset].new_tokens,
            dataset=dataset,
            context_ids=ids[: encoded.cut],
            question_ids=ids[encoded.cut :],
            end_ids=end_ids,
            may_be_empty=may_be_empty,
            is_final=self.if_scored_by(LongBench, partial(protocol.is_final, encoder, dataset)),
            fields={
                "length": row["length"],
                "length_bucket": bucket(row["length"]),
                "truncated_tokens": encoded.truncated,
            },
            all_classes=tuple(row["all_classes"]),
            answer=partial(protocol.answer, encoder, dataset),
        )

    def first(self, contexts: int) -> Task:
        if type(self).examples is not LongBench.examples:  # which may have another order
            return self
        return replace(self, per_dataset=min(contexts, self.per_dataset or contexts))

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        assert isinstance(example, LongBenchExample)
        text = example.answer(prediction)
        return {"score": score(example.dataset, text, example.answers, example.all_classes)}
