"""The data sets of LongBench and LongBench-E: their rows, their prompts and their scores.

Y. Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding",
arXiv 2308.14508; github.com/THUDM/LongBench.

The prompts are in ``longbench_prompts.yaml`` beside this file. The Hub repository's loading script
does not run with current `datasets`; its archive ``data.zip`` holds one JSON-lines file per data set,
which is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import pairwise
from typing import Any, NamedTuple

import yaml

from kvbench.errors.options import Several, Text, Whole, allowed
from kvbench.tasks.base import TaskError
from kvbench.tasks.data import Source
from kvbench.tasks.metrics import METRICS
from kvbench.tasks.metrics_text import Key


class Dataset(NamedTuple):
    metric: str
    new_tokens: int


DATASETS: Mapping[str, Dataset] = {
    "narrativeqa": Dataset("qa_f1", 128),
    "qasper": Dataset("qa_f1", 128),
    "multifieldqa_en": Dataset("qa_f1", 64),
    "multifieldqa_zh": Dataset("f1_zh", 64),
    "hotpotqa": Dataset("qa_f1", 32),
    "2wikimqa": Dataset("qa_f1", 32),
    "musique": Dataset("qa_f1", 32),
    "dureader": Dataset("rouge_l_zh", 128),
    "gov_report": Dataset("rouge_l", 512),
    "qmsum": Dataset("rouge_l", 512),
    "multi_news": Dataset("rouge_l", 512),
    "vcsum": Dataset("rouge_l_zh", 512),
    "trec": Dataset("classification", 64),
    "triviaqa": Dataset("qa_f1", 32),
    "samsum": Dataset("rouge_l", 128),
    "lsht": Dataset("classification", 64),
    "passage_count": Dataset("count", 32),
    "passage_retrieval_en": Dataset("retrieval", 32),
    "passage_retrieval_zh": Dataset("retrieval_zh", 32),
    "lcc": Dataset("code_similarity", 64),
    "repobench-p": Dataset("code_similarity", 64),
}
E_DATASETS = (
    "qasper",
    "multifieldqa_en",
    "hotpotqa",
    "2wikimqa",
    "gov_report",
    "multi_news",
    "trec",
    "triviaqa",
    "samsum",
    "passage_count",
    "passage_retrieval_en",
    "lcc",
    "repobench-p",
)
"""The data sets of LongBench-E, in the order of its tables."""
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
RUN_BY_DEFAULT = {"e": E_DATASETS, "full": tuple(name for name in DATASETS if name not in CHINESE)}
"""The data sets that are run by default, by split: of the full benchmark the 16 that are not
Chinese."""
FEW_SHOT = frozenset(("trec", "triviaqa", "samsum", "lsht"))
"""Data sets whose prompts hold solved examples. Only the first line of a prediction is scored."""
CLASSIFIED = frozenset(("trec", "lsht"))
"""Data sets whose rows name the classes of which one is the answer."""
CODE = frozenset(("lcc", "repobench-p"))
"""Data sets whose prompts are source code to be continued."""
BUCKETS = ("0-4k", "4-8k", "8k+")
"""LongBench-E's length buckets, by a row's field `length` (words; characters for Chinese)."""


def bucket(length: int) -> str:
    """Below 4000, below 8000, or the rest."""
    if length < 4000:
        return BUCKETS[0]
    if length < 8000:
        return BUCKETS[1]
    return BUCKETS[2]


def score(
    dataset: str,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] = (),
) -> float:
    """LongBench's score of one prediction, 0 to 1: the best over the answers; `all_classes` are those of
    trec and lsht.

    Few-shot data sets score the first line of a prediction, after its leading line ends are dropped
    (lm-eval drops all white space at both ends).
    """
    if dataset in FEW_SHOT:
        prediction = prediction.lstrip("\n").split("\n")[0]
    metric = METRICS[DATASETS[dataset].metric]
    return metric(prediction, Key(tuple(answers), tuple(all_classes)))["score"]


# prompts

CONTEXT, INPUT = "{context}", "{input}"
"""The fields of a prompt template."""


@cache
def prompt_templates() -> Mapping[str, str]:
    file = files(__package__) / "longbench_prompts.yaml"
    templates: Mapping[str, str] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return templates


def fill(template: str, context: str, question: str) -> tuple[str, int]:
    """The prompt, and the number of its characters up to the end of the context. Braces in the texts
    themselves are left as they are."""
    before, _, after = template.partition(CONTEXT)
    head = before + context
    return head + after.replace(INPUT, question), len(head)


# rows

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"
REVISION = "5e628be450b7e67fb7ae6e201bd6d8f7056f7672"
"""The authors' repository on the Hub, the archive in it, and its commit."""
TEXTS = Several[str]
HINTS: Mapping[str, Any] = {
    "_id": Text,
    "context": Text,
    "input": str,
    "length": Whole,
    "answers": TEXTS,
    "all_classes": TEXTS,
}
"""The fields that a row must have, with the type of each."""
ANSWER_PATTERNS = {
    "passage_retrieval_en": re.compile(r"Paragraph \d+"),
    "passage_retrieval_zh": re.compile(r"段落\d+"),
}
"""Data sets whose metric finds nothing in an answer without this text."""


def longbench_source(
    file: str, data: str | None = None, dataset: str = REPOSITORY, revision: str | None = None
) -> Source:
    """The rows of `file` in the folder or zip `data`, or on the Hub: in the authors' archive, or as
    `datasets` reads them from another repository."""
    if data is None and dataset != REPOSITORY:
        return Source("longbench", dataset=dataset, config=file, revision=revision)
    return Source(
        "longbench",
        data=data,
        dataset=REPOSITORY,
        revision=revision or REVISION,
        archive=ARCHIVE,
        file=f"data/{file}.jsonl",
    )


def rows_of(source: Source, dataset: str) -> list[dict[str, Any]]:
    """The rows of a data set, each with all fields of `HINTS`, sorted by ``_id``."""
    rows = [_checked(dict(row), dataset, place) for place, _, row in source.rows()]
    name = f"{source.data or source.dataset} {dataset}"
    if not rows:
        raise TaskError(f"longbench: {name} holds no example")
    rows.sort(key=lambda row: str(row["_id"]))
    for row, following in pairwise(rows):
        if row["_id"] == following["_id"]:
            raise TaskError(f"longbench: {name} has _id {row['_id']!r} twice; allowed: once")
    return rows


def _checked(row: dict[str, Any], dataset: str, place: str) -> dict[str, Any]:
    """A row under the names of `HINTS`, with a placeholder for classes that no metric reads."""
    if "input" not in row and "question" in row:  # the name of the field in parquet mirrors
        row["input"] = row["question"]
    if dataset not in CLASSIFIED:
        row["all_classes"] = ["none"]
    for name, hint in HINTS.items():
        value = row.get(name)
        words = allowed(hint, value)
        if hint is TEXTS and isinstance(value, str):
            words = words or "a list of texts"
        if words:
            shown = repr(value)[:60] if name in row else "missing"
            raise _wrong_field(place, name, shown, words)
    pattern = ANSWER_PATTERNS.get(dataset)
    if pattern is not None and not all(pattern.search(answer) for answer in row["answers"]):
        shown = repr(row["answers"])[:60]
        raise _wrong_field(place, "answers", shown, f"text with {pattern.pattern}")
    return row


def _wrong_field(place: str, name: str, shown: str, allowed_values: str) -> TaskError:
    return TaskError(f"longbench: {place}: field {name} is {shown}; allowed: {allowed_values}")
