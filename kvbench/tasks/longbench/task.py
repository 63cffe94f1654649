"""LongBench and LongBench-E as a task.

Y. Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding",
arXiv 2308.14508; github.com/THUDM/LongBench.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, zip_longest
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from kvbench.errors import nearest
from kvbench.errors.options import Count, Distinct
from kvbench.tasks.base import Example, PromptEncoder, Task, TaskError
from kvbench.tasks.longbench.data import Row, Source
from kvbench.tasks.longbench.metrics import bucket, score
from kvbench.tasks.longbench.prompts import PINNED, fill, max_new_tokens, prompt_template
from kvbench.tasks.longbench.protocol import PROTOCOLS, LongBenchProtocol

E_DATASETS = (
    *("qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec"),
    *("triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
"""The datasets of LongBench-E, in the order of its tables."""
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
SPLITS = {
    "e": E_DATASETS,
    "full": tuple(name for name in PINNED if name not in CHINESE),
}
"""Datasets that are run by default; of the full benchmark the 16 in English and code."""


@dataclass(frozen=True, kw_only=True)
class LongBenchExample(Example):
    """An example with what its score needs.

    Attributes:
        all_classes: class names (trec, lsht).
        answer: the part of a prediction that is scored.
    """

    all_classes: tuple[str, ...]
    answer: Callable[[str], str]


@dataclass(frozen=True, kw_only=True)
class LongBench(Task):
    """LongBench: prompts and metrics of the original, by one of two protocols.

    Attributes:
        split: "e" (LongBench-E, even over length buckets) or "full".
        datasets: which of the split; None for all of LongBench-E, or the 16 of the full benchmark
            that are not Chinese (those can be named).
        protocol: "longbench" or "balancekv"; see `kvbench.tasks.longbench.protocol`.
        data: None for the Hub's archive, a folder or zip with the JSON-lines or parquet files, or
            ``hf://datasets/<owner>/<name>`` for a parquet mirror.
        revision: of the Hub repository, None for its main branch.
        max_input: prompt tokens; longer prompts lose their middle. None for what protocol and model say.
        per_dataset: run the first so many examples of every dataset only.
    """

    name: ClassVar[str] = "longbench"
    breakdown: ClassVar[tuple[str, ...]] = ("length_bucket",)
    unhashed: ClassVar[tuple[str, ...]] = ("data", "revision", "per_dataset")

    split: Literal["e", "full"] = "e"
    datasets: Distinct[str] | None = None
    protocol: Literal["longbench", "balancekv"] = "balancekv"
    data: str | None = None
    revision: str | None = None
    max_input: Annotated[int, Ge(2)] | None = None
    per_dataset: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        names = SPLITS[self.split] if self.datasets is None else self.datasets
        allowed = E_DATASETS if self.split == "e" else tuple(PINNED)
        for name in names:
            if name not in allowed:
                raise TaskError(
                    f"task.datasets has {name!r}, which is not in split {self.split!r}"
                    f"{nearest(name, allowed)}; allowed: {', '.join(allowed)}"
                )
        object.__setattr__(self, "datasets", tuple(names))

    @property
    def names(self) -> tuple[str, ...]:
        """The datasets that are run."""
        return tuple(self.datasets or ())

    @property
    def source(self) -> Source:
        """Where the data come from."""
        return Source(self.data, self.revision)

    @cached_property
    def _digests(self) -> Mapping[str, str]:
        source = self.source
        return {self._stem(name): source.digest(self._stem(name)) for name in self.names}

    def _stem(self, dataset: str) -> str:
        return f"{dataset}_e" if self.split == "e" else dataset

    def digests(self) -> Mapping[str, str]:
        """sha256 of each dataset's file (of a mirror, its commit)."""
        return self._digests

    def examples(self, encoder: PromptEncoder) -> Sequence[LongBenchExample]:
        """One of each dataset in turn, each dataset sorted by ``_id``.

        Raises:
            TaskError: data that are missing or wrong; a template that is not LongBench's.
        """
        source = self.source
        protocol = PROTOCOLS[self.protocol]
        known: dict[int, int] = {}  # one object per token id: a set has tens of millions of tokens
        queues = []
        for name in self.names:
            template = prompt_template(name)
            rows = source.rows(self._stem(name))[: self.per_dataset]
            make = partial(self._example, encoder, protocol, name, template, known)
            queues.append([make(row) for row in rows])
        turns = chain.from_iterable(zip_longest(*queues))
        return [example for example in turns if example is not None]

    def _example(
        self,
        encoder: PromptEncoder,
        protocol: LongBenchProtocol,
        dataset: str,
        template: str,
        known: dict[int, int],
        row: Row,
    ) -> LongBenchExample:
        prompt, cut = fill(template, row.context, row.input)
        limit = max_new_tokens(dataset)
        encoded = protocol.encode(
            encoder, dataset, prompt, cut, new_tokens=limit, limit=self.max_input
        )
        ids = [known.setdefault(token, token) for token in encoded.ids]
        end_ids, may_be_empty = protocol.end_ids(encoder, dataset)
        return LongBenchExample(
            id=f"{dataset}-{row.id}",
            context=prompt[:cut],
            question=prompt[cut:],
            answers=row.answers,
            max_new_tokens=limit,
            dataset=dataset,
            context_ids=tuple(ids[: encoded.cut]),
            question_ids=tuple(ids[encoded.cut :]),
            complete=True,
            end_ids=end_ids,
            may_be_empty=may_be_empty,
            settled=partial(protocol.settled, encoder, dataset),
            fields={
                "length": row.length,
                "length_bucket": bucket(row.length),
                "truncated_tokens": encoded.truncated,
            },
            all_classes=row.all_classes,
            answer=partial(protocol.answer, encoder, dataset),
        )

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """LongBench's score of what the protocol leaves of a prediction."""
        assert isinstance(example, LongBenchExample)
        text = example.answer(prediction)
        return {"score": score(example.dataset, text, example.answers, example.all_classes or None)}
