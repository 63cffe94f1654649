"""LongBench and LongBench-E as a task. See `longbench_datasets` for the benchmark's rows, prompts and
scores, and `longbench_protocols` for how a model is prompted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, zip_longest
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from kvbench.errors import check_known
from kvbench.errors.options import Count, Distinct
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Task, TaskError
from kvbench.tasks.data import Source
from kvbench.tasks.longbench_datasets import (
    DATASETS,
    E_DATASETS,
    REPOSITORY,
    SPLITS,
    bucket,
    fill,
    prompt_templates,
    rows_of,
    score,
    source_of,
)
from kvbench.tasks.longbench_protocols import PROTOCOLS
from kvbench.tasks.metrics import check_metric


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
        names = SPLITS[self.split] if self.datasets is None else self.datasets
        known = E_DATASETS if self.split == "e" else tuple(DATASETS)
        for name in names:
            what = f"task.datasets has {name!r}, which is not in split {self.split!r}"
            check_known(what, name, known, TaskError)
        object.__setattr__(self, "datasets", tuple(names))

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        suffix = "_e" if self.split == "e" else ""
        files = [name + suffix for name in self.datasets or ()]
        return {file: source_of(file, self.data, self.dataset, self.revision) for file in files}

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
        # One object for each token id: the prompts of the benchmark have tens of millions of tokens.
        shared_ids: dict[int, int] = {}
        queues = []
        for name, source in zip(names, self._sources.values(), strict=True):
            rows = rows_of(source, name)[: self.per_dataset]
            queues.append([self._example(encoder, name, row, shared_ids) for row in rows])
        turns = chain.from_iterable(zip_longest(*queues))
        return [example for example in turns if example is not None]

    def _example(
        self,
        encoder: PromptEncoder,
        dataset: str,
        row: Mapping[str, Any],
        shared_ids: dict[int, int],
    ) -> LongBenchExample:
        protocol = PROTOCOLS[self.protocol]
        prompt, cut = fill(prompt_templates()[dataset], row["context"], row["input"])
        encoded = protocol.encode(encoder, dataset, prompt, cut, self.max_input)
        ids = [shared_ids.setdefault(token, token) for token in encoded.ids]
        end_ids, may_be_empty = protocol.end_ids(encoder, dataset)
        return LongBenchExample(
            id=f"{dataset}-{row['_id']}",
            context=prompt[:cut],
            question=prompt[cut:],
            answers=tuple(row["answers"]),
            max_new_tokens=DATASETS[dataset].new_tokens,
            dataset=dataset,
            context_ids=tuple(ids[: encoded.cut]),
            question_ids=tuple(ids[encoded.cut :]),
            complete=True,
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
