"""Running text: a prompt is a piece of a text, and the answer is the continuation of the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Many, NewTokens, Task, TaskError, Tokens
from kvbench.tasks.data import Source, file_digests, texts_of_files
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.metrics_text import Key


@dataclass(frozen=True, kw_only=True)
class RunningText(Task):
    """Prompts that are pieces of texts, for probes that observe a model while it reads. The texts are
    files, a data set of the Hub whose first `rows` are joined, or else generated.

    As a task, its score is the word F1 of an answer against the continuation of the text. Only the
    special tokens of the tokenizer (BOS) stand before a piece. The pieces of a text do not overlap.
    Examples begin with the first piece of every text, then come the second pieces, and so on.
    """

    name: ClassVar[str] = "text"
    version: ClassVar[int] = 2
    unhashed: ClassVar[tuple[str, ...]] = ("num_examples",)

    files: Sequence[str] = ()
    dataset: str | None = None
    config: str | None = None
    split: str = "test"
    column: str = "text"
    rows: Many = 2000
    label: str = "text"
    tokens: Tokens = 1024
    num_examples: Many = 16
    max_new_tokens: NewTokens = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.files and self.dataset:
            raise TaskError("task.files and task.dataset: one of them at most may be given")

    def texts(self, kind: str, rows: int, count: int) -> Sequence[tuple[str, str]]:
        """The name and text of each file, of each of a data set's first `rows`, or of `count` generated
        documents of at least `tokens` tokens, whose seed is the word `kind`."""
        if self.files:
            return texts_of_files("files", self.files)
        if self.dataset:
            found = self._source.hub_rows(rows)
            for row in found:
                if self.column not in row:
                    raise TaskError(
                        f"task.column is {self.column!r}, which {self.dataset} has not; allowed: "
                        f"{', '.join(row)}"
                    )
            return [(f"row {n}", str(row[self.column])) for n, row in enumerate(found)]
        documents = []
        for number in range(count):
            # As many sentences as tokens are enough, since every sentence has several tokens.
            sentences = islice(generated_haystack(f"{kind} {number}"), self.tokens)
            documents.append((f"generated {number}", " ".join(sentences)))
        return documents

    @property
    def _source(self) -> Source:
        return Source("text", dataset=self.dataset, config=self.config, split=self.split)

    def digests(self) -> Mapping[str, str]:
        return self._source.digests() if self.dataset else file_digests(self.files)

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        begin = encoder.begin_ids
        room = self.tokens - len(begin)
        documents = self.texts("text", self.rows, self.num_examples)
        if self.dataset:
            documents = [(self.dataset, "".join(text for _, text in documents))]
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
