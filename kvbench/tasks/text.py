"""Running text: prompts are pieces of it, and the answer is how it goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import ClassVar

from kvbench.errors.options import check_options
from kvbench.tasks.base import Example, Many, NewTokens, PromptEncoder, Task, TaskError, Tokens
from kvbench.tasks.data import file_digests, texts_of_dataset, texts_of_files
from kvbench.tasks.haystack import generated_haystack
from kvbench.tasks.metrics import METRICS, Key


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Texts of files, of a data set, or generated.

    Attributes:
        files: globs of text files. dataset_name, dataset_config, dataset_split, dataset_column: a
            Hugging Face data set. Neither: generated sentences.
        tokens: of a text that is generated, at least.
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
        """Name and text of each file, of the first `rows` rows, or of `count` documents of this kind."""
        if self.files:
            return texts_of_files(self.files)
        if self.dataset_name:
            where = (self.dataset_name, self.dataset_config, self.dataset_split)
            return texts_of_dataset(*where, self.dataset_column, rows)
        made = (generated_haystack(f"{kind} {i}") for i in range(count))
        few = (
            islice(sentences, self.tokens) for sentences in made
        )  # sentences, of more than one token each
        return [(f"generated {i}", " ".join(sentences)) for i, sentences in enumerate(few)]


@dataclass(frozen=True, kw_only=True)
class RunningText(TextSource, Task):
    """Pieces of `tokens` tokens of texts; the first `rows` rows of a data set are one text.

    For probes, which look at a model that reads; as a task, the score is the word F1 of an answer
    against the text that follows the piece. Nothing but the tokenizer's own first tokens (BOS) is put
    before a piece. Pieces that follow each other in a text do not overlap; every text gives its first
    before any gives its second.

    Attributes:
        label: what tables call it: the data set of its examples.
        tokens: of a prompt, exactly. num_examples: pieces, at most.
        max_new_tokens: of the text that follows.
    """

    name: ClassVar[str] = "text"
    unhashed: ClassVar[tuple[str, ...]] = ("num_examples",)

    rows: Many = 2000
    label: str = "text"
    num_examples: Many = 16
    max_new_tokens: NewTokens = 64

    def digests(self) -> Mapping[str, str]:
        """See `Task.digests`."""
        return file_digests(self.files)

    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """See `Task.examples`.

        Raises:
            TaskError: texts that cannot be had, or of which none is long enough.
        """
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
                piece, after = ids[start : start + room], ids[start + room :]
                if len(piece) < room:
                    continue
                follows = encoder.decode(after[: self.max_new_tokens])
                examples.append(
                    Example(
                        id=f"{name}/{start}",
                        context="",
                        question="",
                        context_ids=(*begin, *piece),
                        question_ids=(),
                        complete=True,
                        answers=(follows,),
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
        """See `Task.score`."""
        return METRICS["f1"](prediction, Key(example.answers))
