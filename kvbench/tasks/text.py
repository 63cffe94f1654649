"""Running text: a prompt is a piece of a text, and the answer is the continuation of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from kvbench.errors.options import check_options
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, NewTokens, Task, TaskError, Tokens
from kvbench.tasks.data import file_digests, texts_of_dataset, texts_of_files
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.metrics_text import Key


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """The source of texts: files, a data set, or generated sentences if neither is given.

    Attributes:
        files: globs of text files.
        dataset_name, dataset_config, dataset_split, dataset_column: a Hugging Face data set and its
            column.
        tokens: the least number of tokens of a generated text.
    """

    files: Sequence[str] = ()
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "test"
    dataset_column: str = "text"
    tokens: Tokens = 1024

    def __post_init__(self) -> None:
        check_options(self, "task.", TaskError)
        if self.files and self.dataset_name:
            raise TaskError("task.files and task.dataset_name: one of them at most may be given")

    def texts(self, kind: str, rows: int, count: int) -> Sequence[tuple[str, str]]:
        """The name and text of each document.

        Args:
            kind: a word that enters the seed of generated documents.
            rows: how many of a data set's first rows are read.
            count: how many documents are generated.
        """
        if self.files:
            return texts_of_files("files", self.files)
        if self.dataset_name:
            return texts_of_dataset(
                "files",
                self.dataset_name,
                self.dataset_config,
                self.dataset_split,
                self.dataset_column,
                rows,
            )
        documents = []
        for number in range(count):
            # As many sentences as tokens are enough, since every sentence has several tokens.
            sentences = islice(generated_haystack(f"{kind} {number}"), self.tokens)
            documents.append((f"generated {number}", " ".join(sentences)))
        return documents


@dataclass(frozen=True, kw_only=True)
class RunningText(TextSource, Task):
    """Prompts that are pieces of texts, for probes that observe a model while it reads.

    As a task, its score is the word F1 of an answer against the continuation of the text. Only the
    special tokens of the tokenizer (BOS) stand before a piece. The pieces of a text do not overlap.
    Examples begin with the first piece of every text, then come the second pieces, and so on.

    Attributes:
        rows: how many of a data set's first rows are joined to one text.
        label: the name of the data set in tables.
        tokens: the exact number of tokens of a prompt.
        num_examples: the most pieces.
        max_new_tokens: the number of tokens of the continuation.
    """

    name: ClassVar[str] = "text"
    unhashed: ClassVar[tuple[str, ...]] = ("num_examples",)

    rows: Many = 2000
    label: str = "text"
    num_examples: Many = 16
    max_new_tokens: NewTokens = 64

    def digests(self) -> Mapping[str, str]:
        return file_digests(self.files)

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        begin = encoder.begin_ids
        room = self.tokens - len(begin)
        documents = self.texts("text", self.rows, self.num_examples)
        if self.dataset_name:
            documents = [(self.dataset_name, "".join(text for _, text in documents))]
        texts = {name: encoder.encode_text(text) for name, text in documents}
        longest = max(map(len, texts.values()), default=0)
        examples = []
        for start in range(0, max(0, longest - room + 1), max(1, room)):
            for name, ids in texts.items():
                end = start + room
                piece = ids[start:end]
                if len(piece) < room:
                    continue
                continuation = encoder.decode(ids[end : end + self.max_new_tokens])
                if (
                    encoder.adds_blank
                ):  # decoded alone it would lose the blank before its first word
                    whole = encoder.decode(ids[start : end + self.max_new_tokens])
                    continuation = whole[len(encoder.decode(piece)) :]
                examples.append(
                    Example(
                        id=f"{name}/{start}",
                        context="",
                        question="",
                        context_ids=(*begin, *piece),
                        question_ids=(),
                        complete=True,
                        answers=(continuation,),
                        max_new_tokens=self.max_new_tokens,
                        dataset=self.label,
                        fields={"text": name},
                    )
                )
        if not examples:
            raise TaskError(
                f"task.tokens is {self.tokens} and the longest text has {longest} tokens; allowed: "
                "fewer"
            )
        return examples[: self.num_examples]

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        return METRICS["f1"](prediction, Key(example.answers))
