"""LongBench and LongBench-E: data, prompts, protocols and scores.

Y. Bai et al., "LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding",
arXiv 2308.14508; github.com/THUDM/LongBench.

Templates are taken from lm-eval's task files and restored to the originals: lm-eval's copies call the
field ``question`` instead of ``input``, lost the blank line before it in two few-shot datasets, and lost
white space at the end of four. Every restored template must have the sha256 of the original
(``LongBench/config/dataset2prompt.json`` at 2e00731f); otherwise the task stops. The Hub repository's
loading script no longer runs with current `datasets`; its archive ``data.zip`` holds one JSON-lines file
per dataset, which is read here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.resources import files
from itertools import chain, pairwise, zip_longest
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import yaml
from annotated_types import Ge

from kvbench.errors import nearest, needs_extra
from kvbench.errors.options import Count, Distinct, Several, Text, Whole, allowed, fits
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example, Task, TaskError
from kvbench.tasks.data import Source
from kvbench.tasks.metrics import METRICS, Key


class Dataset(NamedTuple):
    """A dataset's metric, its limit of new tokens, and how the sha256 of its template begins."""

    metric: str
    new_tokens: int
    sha256: str


DATASETS: Mapping[str, Dataset] = {
    "narrativeqa": Dataset("f1", 128, "aada7ed24b06abace5b0045ac3bcfe06"),
    "qasper": Dataset("f1", 128, "0fbdd123fe7f83d6d6a9c583ca28cb29"),
    "multifieldqa_en": Dataset("f1", 64, "20b4666a2de8a1f701bdb6c4e015fa9f"),
    "multifieldqa_zh": Dataset("f1_zh", 64, "344b3a4e557cd5470c661b3d6b374339"),
    "hotpotqa": Dataset("f1", 32, "9ec4ae308865bd0c62af20b3dc7b12b3"),
    "2wikimqa": Dataset("f1", 32, "9ec4ae308865bd0c62af20b3dc7b12b3"),
    "musique": Dataset("f1", 32, "9ec4ae308865bd0c62af20b3dc7b12b3"),
    "dureader": Dataset("rouge_l_zh", 128, "ae53329f51b17908e08b8c6bf3669872"),
    "gov_report": Dataset("rouge_l", 512, "91c25d585b189ced91c9280efcb4ecb5"),
    "qmsum": Dataset("rouge_l", 512, "dca23b678fe0183bbd9555b57947022a"),
    "multi_news": Dataset("rouge_l", 512, "2af3f28c40b902e6535d4910510d5165"),
    "vcsum": Dataset("rouge_l_zh", 512, "3e5d8241bc9b512eb4929c1ba80882a4"),
    "trec": Dataset("classification", 64, "0eff8bebdba99d91e9d7d91b6ab39455"),
    "triviaqa": Dataset("f1", 32, "00a802e6377e72fca39b169cf6c28893"),
    "samsum": Dataset("rouge_l", 128, "a68d884234907eefcaa0eacf7b2997f6"),
    "lsht": Dataset("classification", 64, "f3edabdf7fae53d6cadfa7a10f3574d1"),
    "passage_count": Dataset("count", 32, "986550b6c61009c629a4535766d94b7b"),
    "passage_retrieval_en": Dataset("retrieval", 32, "39b96b7fa52bdd2aa2bde34ea1991585"),
    "passage_retrieval_zh": Dataset("retrieval_zh", 32, "c1e2346e245eb365bc33a1503cde2e47"),
    "lcc": Dataset("code_similarity", 64, "6a1f24cf0bb83cd90f1fca8f0dd24801"),
    "repobench-p": Dataset("code_similarity", 64, "ee9ec182ea5ffeb70a7140d55baea972"),
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
"""The datasets of LongBench-E, in the order of its tables."""
CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
SPLITS = {"e": E_DATASETS, "full": tuple(name for name in DATASETS if name not in CHINESE)}
"""Datasets that are run by default; of the full benchmark the 16 in English and code."""
FIRST_LINE = frozenset(("trec", "triviaqa", "samsum", "lsht"))
"""Few-shot datasets: only the first line of a prediction is scored."""
CLASSIFIED = frozenset(("trec", "lsht"))
"""Datasets whose examples name the classes there are."""
CODE = frozenset(("lcc", "repobench-p"))
BUCKETS = ("0-4k", "4-8k", "8k+")
"""LongBench-E's length buckets, by the field `length` (words; characters for Chinese)."""


def bucket(length: int) -> str:
    """The length bucket of an example: below 4000, below 8000, the rest."""
    return BUCKETS[0] if length < 4000 else BUCKETS[1] if length < 8000 else BUCKETS[2]


def _known(dataset: str) -> Dataset:
    if dataset not in DATASETS:
        raise TaskError(f"longbench: dataset {dataset!r} unknown; allowed: {', '.join(DATASETS)}")
    return DATASETS[dataset]


def score(
    dataset: str,
    prediction: str,
    answers: Sequence[str],
    all_classes: Sequence[str] | None = None,
) -> float:
    """LongBench's score of one prediction, 0..1: the best over the answers.

    Of few-shot answers the first line is scored, behind leading newlines (lm-eval drops all white space
    at both ends).

    Args:
        dataset: one of LongBench's 21, without ``_e``.
        all_classes: the class names, for trec and lsht only.

    Raises:
        TaskError: an unknown dataset; trec or lsht without classes.
    """
    metric = METRICS[_known(dataset).metric]
    if dataset in CLASSIFIED and not all_classes:
        raise TaskError(f"longbench: {dataset} is scored by its classes; all_classes is empty")
    if dataset in FIRST_LINE:
        prediction = prediction.lstrip("\n").split("\n")[0]
    return metric(prediction, Key(tuple(answers), tuple(all_classes or ())))["score"]


# prompts

CONTEXT, INPUT = "{context}", "{input}"
_LOST_END = {"passage_count": " ", "passage_retrieval_en": " ", "lcc": "\n", "repobench-p": "\n"}
_LOST_BLANK_LINE = frozenset(("triviaqa", "samsum"))


class _Loader(yaml.SafeLoader):
    """YAML whose tags (lm-eval's ``!function``) are read as plain text."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: str(node.value))


@cache
def prompt_template(dataset: str) -> str:
    """LongBench's template, with the fields ``{context}`` and ``{input}``.

    Raises:
        TaskError: an unknown dataset; a template of the installed lm-eval that cannot be restored.
    """
    expected = _known(dataset).sha256
    template = _template_of_lm_eval(dataset)
    restored = template
    if dataset in _LOST_BLANK_LINE:
        restored = restored.replace(f"{CONTEXT}\n{INPUT}", f"{CONTEXT}\n\n{INPUT}")
    restored += _LOST_END.get(dataset, "")
    for candidate in (restored, template):
        if hashlib.sha256(candidate.encode()).hexdigest().startswith(expected):
            return candidate
    raise TaskError(
        f"longbench: the template of {dataset} in the installed lm-eval is not LongBench's "
        f"(sha256 of the restored one {hashlib.sha256(restored.encode()).hexdigest()[:16]}..., "
        f"expected {expected[:16]}...); allowed: lm-eval 0.4.13"
    )


def _template_of_lm_eval(dataset: str) -> str:
    """The template as lm-eval has it, its fields renamed."""
    try:
        file = files("lm_eval") / "tasks" / "longbench" / f"{dataset}.yaml"
    except ModuleNotFoundError as error:
        raise TaskError(f"longbench: {needs_extra('lm-eval', 'lm-eval')}") from error
    try:
        task: Any = yaml.load(file.read_text(encoding="utf-8"), Loader=_Loader)
        template = task["doc_to_text"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as problem:
        raise TaskError(
            f"longbench: the installed lm-eval has no template of {dataset} "
            f"({type(problem).__name__}); allowed: lm-eval 0.4.13"
        ) from problem
    return str(template).replace("{{context}}", CONTEXT).replace("{{question}}", INPUT)


def fill(template: str, context: str, text: str) -> tuple[str, int]:
    """The prompt, and where in it the context ends (characters): what follows is the question."""
    before, _, after = template.partition(CONTEXT)
    head = before + context
    return head + after.replace(INPUT, text), len(head)


# data

REPOSITORY, ARCHIVE = "THUDM/LongBench", "data.zip"
HUB = "hf://datasets/"
TEXTS = Several[str]
HINTS: Mapping[str, Any] = {
    "_id": Text,
    "context": Text,
    "input": str,
    "length": Whole,
    "answers": TEXTS,
    "all_classes": TEXTS,
}
"""What a row's fields must be."""
ANSWER_PATTERNS = {
    "passage_retrieval_en": re.compile(r"Paragraph \d+"),
    "passage_retrieval_zh": re.compile(r"段落\d+"),
}
"""What an answer must contain to be scored."""


def source_of(stem: str, data: str | None = None, revision: str | None = None) -> Source:
    """The source of a dataset's rows, e.g. of ``qasper_e``; see `LongBench.data`."""
    if data is not None and data.startswith(HUB):
        repository = data.removeprefix(HUB)
        return Source("longbench", dataset=repository, config=stem, revision=revision)
    return Source(
        "longbench",
        data=data,
        dataset=REPOSITORY,
        revision=revision,
        archive=ARCHIVE,
        file=f"data/{stem}.jsonl",
    )


def rows_of(source: Source, dataset: str) -> list[dict[str, Any]]:
    """The rows of a dataset, every field of `HINTS` checked, sorted by ``_id``.

    Raises:
        TaskError: one line naming the file, the row and the field that is wrong.
    """
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
    if "input" not in row and "question" in row:  # as parquet mirrors call it
        row["input"] = row["question"]
    if dataset not in CLASSIFIED:
        row["all_classes"] = ["none"]
    pattern = ANSWER_PATTERNS.get(dataset)
    for name, hint in HINTS.items():
        value = row.get(name)
        fitting = fits(hint, value) and not (hint is TEXTS and isinstance(value, str))
        if fitting and name == "answers" and pattern is not None:
            fitting = all(pattern.search(answer) for answer in row[name])
            hint = Annotated[str, f"text with {pattern.pattern}"]
        if not fitting:
            shown = repr(value)[:60] if name in row else "missing"
            raise TaskError(
                f"longbench: {place}: field {name} is {shown}; allowed: {allowed(hint)}"
            )
    return row


# protocols: from a filled template to the model's tokens, and from its answer to what is scored


class EncodedPrompt(NamedTuple):
    """A whole prompt as the model sees it.

    Attributes:
        ids: its tokens, special ones included.
        cut: how many of them are context (what `compress_after=context` compresses).
        truncated: tokens that were left out of the middle.
    """

    ids: list[int]
    cut: int
    truncated: int


class OfficialProtocol:
    """LongBench's own (``LongBench/pred.py`` at 2e00731f): chat template except on few-shot and code
    datasets, which go in plain.

    A prompt longer than the model's maximum is cut before the chat template goes around it: the
    texts of its first and of its last half of that many tokens are joined, and tokenised again.
    On samsum a newline ends the answer, though not as its first token.
    """

    def encode(
        self, encoder: PromptEncoder, dataset: str, prompt: str, cut: int, limit: int | None
    ) -> EncodedPrompt:
        """Tokens of a filled template.

        Args:
            cut: where in the prompt the context ends (characters).
            limit: prompt tokens (`task.max_input`), None for what the protocol says.

        Raises:
            TaskError: a model that the protocol cannot prompt, or whose maximum is not known.
        """
        chat = encoder.chat and dataset not in FIRST_LINE | CODE
        known = [size for size in (limit, encoder.max_input) if size is not None]
        if not known:
            if encoder.max_positions is None:
                raise TaskError(
                    "longbench: the model's config names no maximum length; allowed: model.max_input "
                    "or task.max_input, in tokens"
                )
            around = len(encoder.render_chat("")) if chat else 0  # characters: not less than tokens
            known = [max(2, encoder.max_positions - DATASETS[dataset].new_tokens - around)]
        most = min(known)
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

    def end_ids(self, encoder: PromptEncoder, dataset: str) -> tuple[frozenset[int] | None, bool]:
        """Tokens that end an answer (None: all that the model knows), and whether one may come first."""
        if dataset == "samsum":
            return encoder.end_ids | {encoder.encode_text("\n")[-1]}, False
        return None, True

    def answer(self, encoder: PromptEncoder, dataset: str, prediction: str) -> str:
        """The part of a prediction that is scored."""
        return prediction

    def settled(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        """Whether nothing that may follow `text` changes the score."""
        return dataset in FIRST_LINE and "\n" in text.lstrip("\n")


class BalanceKVProtocol(OfficialProtocol):
    """BalanceKV's released evaluation (github.com/ksheth96/BalanceKV at 4ccee30a), which made the
    paper's Table 1.

    Up to 100,000 tokens, more are cut from the middle of the token ids, chat template included. Llama
    and Mistral models get the plain prompt on every dataset; Qwen models get their chat template, with
    its own default system message, on all but seven. An answer is stripped, then cut at the first
    newline and at the first double space, except that of other models than Llama to a code prompt.
    It ends at the tokenizer's end token and (Llama 3) at the end of a turn, nowhere else.
    """

    max_input: ClassVar[int] = 100_000
    plain_for_qwen: ClassVar[frozenset[str]] = CODE | frozenset(
        ("gov_report", "multi_news", "trec", "triviaqa", "samsum")
    )

    def encode(
        self, encoder: PromptEncoder, dataset: str, prompt: str, cut: int, limit: int | None
    ) -> EncodedPrompt:
        """See `OfficialProtocol.encode`."""
        ids, boundary = _encoded(encoder, prompt, cut, chat=self._chat(encoder, dataset))
        known = [size for size in (limit, encoder.max_input, self.max_input) if size is not None]
        return truncate_middle(ids, boundary, min(known))

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
        """See `OfficialProtocol.end_ids`."""
        return encoder.end_ids, True

    def answer(self, encoder: PromptEncoder, dataset: str, prediction: str) -> str:
        """See `OfficialProtocol.answer`."""
        text = prediction.strip()
        if dataset not in CODE or encoder.family == "llama":
            text = text.split("\n")[0].split("  ")[0]
        return text

    def settled(self, encoder: PromptEncoder, dataset: str, text: str) -> bool:
        """Once something follows a newline or a double space."""
        return self.answer(encoder, dataset, text) != text.strip()


PROTOCOLS: dict[str, OfficialProtocol] = {
    "longbench": OfficialProtocol(),
    "balancekv": BalanceKVProtocol(),
}


def _encoded(encoder: PromptEncoder, prompt: str, cut: int, *, chat: bool) -> tuple[list[int], int]:
    """Tokens of the prompt, in its chat template or with the tokenizer's own special tokens (BOS)."""
    if not chat:
        return encoder.encode_prompt(prompt, cut, special=True)
    text = encoder.render_chat(prompt)
    start = text.find(prompt.strip())  # some templates strip what they are given
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


# the task


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
        protocol: "longbench" or "balancekv"; see `PROTOCOLS`.
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
        known = E_DATASETS if self.split == "e" else tuple(DATASETS)
        for name in names:
            if name not in known:
                raise TaskError(
                    f"task.datasets has {name!r}, which is not in split {self.split!r}"
                    f"{nearest(name, known)}; allowed: {', '.join(known)}"
                )
        object.__setattr__(self, "datasets", tuple(names))

    @cached_property
    def _sources(self) -> Mapping[str, Source]:
        """The source of each dataset, by the name of its file."""
        names = [name + "_e" * (self.split == "e") for name in self.datasets or ()]
        return {name: source_of(name, self.data, self.revision) for name in names}

    def digests(self) -> Mapping[str, str]:
        """sha256 of each dataset's file (of a mirror, its commit)."""
        return {name: " ".join(source.digests().values()) for name, source in self._sources.items()}

    def metric_name(self) -> str:
        """See `Task.metric_name`."""
        metrics = {DATASETS[name].metric for name in self.datasets or ()}
        if len(metrics) > 1:
            return "LongBench's metrics"
        (name,) = metrics
        return "ROUGE-L" if name.startswith("rouge_l") else name

    def examples(self, encoder: PromptEncoder) -> Sequence[LongBenchExample]:
        """One of each dataset in turn, each dataset sorted by ``_id``.

        Raises:
            TaskError: data that are missing or wrong; a template that is not LongBench's.
        """
        known: dict[int, int] = {}  # one object per token id: a set has tens of millions of tokens
        queues = []
        for name, source in zip(self.datasets or (), self._sources.values(), strict=True):
            make = partial(self._example, encoder, name, prompt_template(name), known)
            queues.append([make(row) for row in rows_of(source, name)[: self.per_dataset]])
        turns = chain.from_iterable(zip_longest(*queues))
        return [example for example in turns if example is not None]

    def _example(
        self,
        encoder: PromptEncoder,
        dataset: str,
        template: str,
        known: dict[int, int],
        row: Mapping[str, Any],
    ) -> LongBenchExample:
        protocol = PROTOCOLS[self.protocol]
        prompt, cut = fill(template, row["context"], row["input"])
        encoded = protocol.encode(encoder, dataset, prompt, cut, self.max_input)
        ids = [known.setdefault(token, token) for token in encoded.ids]
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
            settled=partial(protocol.settled, encoder, dataset),
            fields={
                "length": row["length"],
                "length_bucket": bucket(row["length"]),
                "truncated_tokens": encoded.truncated,
            },
            all_classes=tuple(row["all_classes"]),
            answer=partial(protocol.answer, encoder, dataset),
        )

    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """LongBench's score of what the protocol leaves of a prediction."""
        assert isinstance(example, LongBenchExample)
        text = example.answer(prediction)
        return {"score": score(example.dataset, text, example.answers, example.all_classes)}
