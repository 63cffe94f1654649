"""A probe of speed and memory: seconds, bytes and tokens per second of each method by itself.

It measures what two papers report. BalanceKV (arXiv 2502.07861), section 4.4, Table 2: seconds of
prefill and of decoding. H2O (arXiv 2306.14048), Tables 3 and 5: tokens per second, the largest batch
that fits, and latency at equal batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any, ClassVar, Literal

import torch

from kvbench.engine.answer import Stopping
from kvbench.engine.ask import Question, converse, read
from kvbench.engine.device import (
    free_memory,
    is_out_of_memory,
    peak_bytes,
    reset_peak,
    total_bytes,
    used_bytes,
)
from kvbench.errors.options import Count, Several, Share, check_options
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.probes.base import Probe
from kvbench.records.figures import TaskKind
from kvbench.run.plan import (
    Fields,
    Methods,
    Work,
    WorkItem,
    check_budgets,
    failure_fields,
    measured,
)
from kvbench.run.session import Session
from kvbench.tasks.base import Many, TaskError

log = logging.getLogger(__name__)

REFERENCE = "exact"
"""The method whose times and rates divide those of every method."""
RATIOS = {
    "speedup": "tokens_per_s",
    "decode_speedup": "decode_tokens_per_s",
    "prefill_ratio": "prefill_compress_s",
}
"""Record fields that are ratios, each with the field that is divided by the reference's in the same run;
null where that was not measured."""
SUMMED = (
    "prefill_s",
    "compress_s",
    "decode_s",
    "cache_bytes",
    "cache_bytes_end",
    "cache_bytes_peak",
    "cache_bytes_mean",
    "exact_bytes",
    "exact_bytes_mean",
)
"""Record fields of a batch that are sums over its prompts."""


@dataclass(frozen=True)
class Setting:
    """The size of one measurement; the batch "largest" is for each method as many prompts as fit into
    memory, the rate None that of the job's budget."""

    prompt_tokens: Count
    new_tokens: Count
    batch: Count | Literal["largest"]
    rate: Share | None = None

    def __post_init__(self) -> None:
        check_options(self, "task.settings: ", TaskError)

    def __str__(self) -> str:
        rate = "" if self.rate is None else f"/rate{self.rate:g}"
        return f"n{self.prompt_tokens}+{self.new_tokens}/b{self.batch}{rate}"


@dataclass(frozen=True, kw_only=True)
class Throughput(Probe):
    """Seconds and memory of each method on random prompts, with a fixed number of new tokens.

    Methods share nothing: each one prefills the prompts itself. The prompts of a batch differ, and are
    prefilled and decoded together. End tokens do not end an answer. The device is synchronised before
    the clock is read. A warm-up run of each method and setting is not counted.

    Each run measures all methods in turn, and begins with another method than the run before. So neither
    a drift of the machine nor the method that ran before favours one of them. Ratios divide values of
    the same run. conf/task/throughput.yaml tells the options; the rate of a setting is a share of the
    middle, or of the whole prompt where the job's budget has a `total_rate`.
    """

    name: ClassVar[str] = "throughput"
    version: ClassVar[int] = 3
    score_unit: ClassVar[str] = "tokens/s"
    kind: ClassVar[TaskKind] = "throughput"
    reads_whole_prompts: ClassVar[bool] = True  # as Table 2

    prompt_tokens: Several[Count] = (16384,)
    new_tokens: Several[Count] = (1024,)
    batch: Several[Count | Literal["largest"]] = (1,)
    settings: Sequence[Sequence[int | float | str]] = ()
    runs: Many = 10
    most_batch: Many = 1024
    _known: dict[tuple[Setting, str], int | dict[str, Any]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """By setting and method, after the warm-up: the size of the batch or, if the method failed, the
    record fields of its failure."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._settings()

    def _settings(self) -> list[Setting]:
        for values in self.settings:
            if len(values) not in (3, 4):
                raise TaskError(
                    f"task.settings has {list(values)}; allowed: [prompt tokens, new tokens, batch], or "
                    "with a rate as the fourth"
                )
        settings: Any = self.settings or product(self.prompt_tokens, self.new_tokens, self.batch)
        return [Setting(*values) for values in settings]

    def meta(self) -> dict[str, Any]:
        return super().meta() | {
            "breakdown": ["prompt_tokens"] if len(self._settings()) > 1 else [],
            "reference": REFERENCE,
        }

    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        limit = (session.spec.architecture or {}).get("max_position_embeddings")
        for setting in self._settings():
            n, new = setting.prompt_tokens, setting.new_tokens
            if isinstance(limit, int) and n + new > limit:
                raise KVError(
                    f"{n} prompt and {new} new tokens are {n + new}; model {session.spec.name} has "
                    f"{limit} positions (random weights may have more: "
                    "model.architecture.max_position_embeddings)"
                )
            at_rate = {
                label: (method, budget.with_share(setting.rate))
                for label, (method, budget) in methods.items()
            }
            check_budgets(at_rate, n, n, "the prompt")
        return [
            WorkItem(f"{s}/run{run}", (f"{s}/run{run}",), (s, run))
            for s, run in product(self._settings(), range(self.runs))
        ]

    def run(self, work: Sequence[Work], session: Session) -> Iterator[Fields]:
        # Of n methods, run i begins with method i modulo n; exact is the first.
        ((item, methods),) = work
        setting, run = item.payload
        n = setting.prompt_tokens
        labels = sorted(methods, key=lambda label: label != REFERENCE)
        start = run % len(labels)
        measurements: dict[str, dict[str, Any]] = {}
        for label in labels[start:] + labels[:start]:
            method, job_budget = methods[label]
            budget = job_budget.with_share(setting.rate)
            capacity = budget.capacity(n) if method.saves_memory else n
            measurement = self._measure(session, setting, label, (method, budget))
            measurements[label] = {"capacity": capacity, **measurement}
        for turn, (label, fields) in enumerate(measurements.items()):
            settings_of_run = {
                "dataset": str(setting),
                "prompt_tokens": n,
                "asked_new_tokens": setting.new_tokens,
                "asked_batch": str(setting.batch),
                "asked_rate": setting.rate,
                "run": run,
                "runs": self.runs,
                "turn": turn,
                "held_back": 0,
            }
            is_exact = REFERENCE in methods and methods[REFERENCE][0].is_exact  # not of few bits
            of_reference = measurements[REFERENCE] if is_exact else {}
            ratios = {
                ratio: _over(fields.get(name), of_reference.get(name))
                for ratio, name in RATIOS.items()
            }
            yield {"method": label, "example_id": item.id, **settings_of_run, **fields, **ratios}

    def _measure(
        self, session: Session, setting: Setting, label: str, pair: tuple[Method, Budget]
    ) -> dict[str, Any]:
        """The record fields of one measured run of a method, after its warm-up if this is its first run.
        A method that failed in a setting has the fields of that failure in all later runs."""
        device = session.device
        key = (setting, label)
        known: Any = self._known.get(key)
        generate = partial(_generate_batch, session, setting, label, pair)
        try:
            if known is None:
                batch = setting.batch
                if batch == "largest":
                    session.steps.kept.clear()
                    batch = largest_batch(lambda size: generate(size, 2), device, self.most_batch)
                generate(batch, 32)  # warms up: compiles kernels, allocates memory
                known = self._known[key] = batch
            if isinstance(known, int):
                free_memory(device)
                peak_is_known = reset_peak(device)
                bytes_before = used_bytes(device)
                fields = generate(known, setting.new_tokens)
        except Exception as failure:  # noqa: BLE001 - the record has the failure's status
            known = self._known[key] = failure_fields(failure)
        if not isinstance(known, int):
            session.steps.kept.clear()
            free_memory(device)  # not in the except block, whose traceback would keep tensors alive
            return dict(known)
        prefill = fields["prefill_s"] + (fields["compress_s"] or 0.0)
        rate = known * fields["new_tokens"] / (prefill + fields["decode_s"])
        return fields | {
            "batch": known,
            "latency_s": prefill + fields["decode_s"],
            "prefill_compress_s": prefill,
            "tokens_per_s": rate,
            "score": rate,
            "decode_tokens_per_s": _over(known * (fields["new_tokens"] - 1), fields["decode_s"]),
            "peak_bytes": peak_bytes(device) if peak_is_known else None,
            "bytes_before": bytes_before,
            "peak_is": "allocated" if device.type == "cuda" else "resident",
        }


def _generate_batch(
    session: Session,
    setting: Setting,
    label: str,
    pair: tuple[Method, Budget],
    batch: int,
    most: int,
) -> dict[str, Any]:
    """Record fields of answers of at most `most` tokens to a batch of random prompts: those of the
    first, but for `SUMMED`."""
    vocabulary = session.model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(session.seed)
    # A larger batch begins with the prompts of a smaller one.
    ids = torch.randint(vocabulary, (batch, setting.prompt_tokens), generator=generator).tolist()
    encoder = None if pair[0].second_pass is None else session.encoder
    how: Any = {"seed": session.seed, "room": setting.new_tokens, "encoder": encoder}
    question = Question((), Stopping(min(most, setting.new_tokens)))
    talks = [
        (read(session.model, each, {label: pair}, name=f"throughput{i}", **how), [[question]])
        for i, each in enumerate(ids)
    ]
    answers = converse(session.model, talks, seed=session.seed, steps=session.steps)
    results = [one for answer in answers for one in answer[label]]
    for result in results:
        if result.failure is not None:
            raise result.failure
    sums = {name: sum(getattr(result.cost, name) for result in results) for name in SUMMED}
    return measured(results[0]) | sums


def _over(dividend: float | None, divisor: float | None) -> float | None:
    """`dividend` / `divisor`; None where one of them was not measured or the divisor is 0."""
    return None if dividend is None or not divisor else dividend / divisor


def largest_batch(trial: Callable[[int], object], device: torch.device, most: int) -> int:
    """The largest batch, up to `most`, for which ``trial(batch)`` does not run out of memory.

    The size is doubled until a batch is too large, and then found by bisection between the last two
    sizes. Bisection stops at a sixteenth of the result, by which the result may be too small.

    On a CPU, running out of memory would end the process. Doubling therefore stops before a batch that
    is expected, from the memory of the one before, to take more than 85 % of all memory. Where not even
    one prompt fits, it is a torch.OutOfMemoryError.
    """

    def fitting(batch: int) -> bool:
        try:
            trial(batch)
            it_fits = True
        except Exception as failure:
            if not is_out_of_memory(failure):
                raise
            it_fits = False
        free_memory(device)
        log.info("batch %d %s", batch, "fits" if it_fits else "is too large")
        return it_fits

    fits = 0
    too_large = most + 1
    size = 1
    while size < too_large:
        peak_is_known = reset_peak(device)
        bytes_before = used_bytes(device)
        if not fitting(size):
            too_large = size
            break
        fits = size
        size = min(2 * size, most) if size < most else most + 1
        if device.type == "cpu" and peak_is_known and size <= most:
            peak, total = peak_bytes(device), total_bytes(device)
            if bytes_before is None or peak is None or total is None:
                break
            if bytes_before + (peak - bytes_before) * size / fits > 0.85 * total:
                log.info("batch %d is not tried: it would take most of the memory", size)
                break
    while too_large <= most and too_large - fits > max(1, fits // 16):
        middle = (fits + too_large) // 2
        if fitting(middle):
            fits = middle
        else:
            too_large = middle
    if not fits:
        raise torch.OutOfMemoryError("out of memory: not even one prompt fits")
    return fits
