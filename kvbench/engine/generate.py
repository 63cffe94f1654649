"""Greedy generation of many forks at once, of one prompt or of several.

Every prompt is prefilled alone and exactly (a long prompt fills a device by itself, and nothing is
padded); then the forks of all prompts decode together, one batch row each against its own cache. What
a prompt is answered does not depend on which others are in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.chunked import chunked_prefill
from kvbench.engine.decoding import DecodeState
from kvbench.engine.faults import NonFiniteLogits, choose, pick
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.graphs import FIRST_STEPS, StepGraphs
from kvbench.engine.limits import seconds_run
from kvbench.engine.prefill import (
    Prefill,
    compressible_layers,
    forward,
    input_device,
    prefill,
    synchronize,
)
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods.base import Method


@dataclass
class Generation:
    """What one fork produced, and what it cost.

    Attributes:
        tokens: new tokens, without the ending token.
        new_tokens: tokens produced, the ending token included.
        entries: prompt entries per layer and KV head after compression, mean and maximum.
        cache_bytes, exact_bytes: after compression, and of the exact cache at the same point.
        cache_bytes_end: after the last token.
        prefill_s, compress_s: seconds of this prompt's own prefill, and of this fork's compression.
        decode_s: seconds of the decode steps this fork took part in, divided by the rows of each
            (decoding is shared by methods and prompts; the throughput probe measures methods alone).
        batch: prompts that were decoded together.
        failure: what stopped the fork, None if it ended well.
        budget_preset: the preset that holds more than the budget, None where none does.
    """

    tokens: list[int]
    new_tokens: int
    entries: dict[str, float] | None
    cache_bytes: int | None
    cache_bytes_end: int | None
    exact_bytes: int
    compressed: bool
    prefill_s: float
    compress_s: float
    decode_s: float
    failure: Exception | None
    batch: int = 1
    budget_preset: str | None = None


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch.

    Attributes:
        context_ids, question_ids: the prompt is their concatenation.
        methods: by label, each with its budget; one fork each.
        stopping: when its generations end.
        example_id: what the methods' draws depend on, beside seed and layer.
        room: new tokens to reserve memory for, None: `stopping.max_new_tokens`.
    """

    context_ids: Sequence[int]
    question_ids: Sequence[int]
    methods: Mapping[str, tuple[Method, Budget]]
    stopping: Stopping
    example_id: str
    room: int | None = None


@dataclass
class DecodingRow:
    """One fork's generation in the making: a row of the decoding batch."""

    fork: Fork
    stopping: Stopping
    result: Generation
    prefilled: int  # tokens compressed, as the audit counts them
    position: int  # of the next token to be fed
    spent_s: float = 0.0  # wall seconds before the rows of all prompts were joined
    chosen: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def running(self) -> bool:
        """Whether there is something left to decode."""
        return self.fork.failure is None and not self.ended


def run_forks(
    model: PreTrainedModel,
    context_ids: Sequence[int],
    question_ids: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    stopping: Stopping,
    *,
    seed: int,
    example_id: str,
    compress_after: str = "prompt",
    chunk_tokens: int | None = None,
) -> dict[str, Generation]:
    """One prompt: one exact prefill, every method's fork, greedy decoding of all forks together.

    See `run_batch`, of which this is the case of one prompt.

    Returns:
        One `Generation` per label; a fork that failed says so and stops nothing else.
    """
    prompt = Prompt(context_ids, question_ids, methods, stopping, example_id)
    return run_batch(
        model, [prompt], seed=seed, compress_after=compress_after, chunk_tokens=chunk_tokens
    )[0]


@torch.inference_mode()
def run_batch(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    compress_after: str = "prompt",
    chunk_tokens: int | None = None,
    graphs: StepGraphs | None = None,
) -> list[dict[str, Generation]]:
    """Several prompts, of any lengths: each prefilled alone, all forks decoded together.

    Args:
        compress_after: "prompt" (the papers' protocol: the question is in the prefill, so the first
            new token comes from exact attention) or "context" (the context is prefilled and
            compressed; the question's tokens then run through every fork).
        chunk_tokens: read each prompt in chunks of so many tokens, each method through its own
            bounded cache (`kvbench.engine.chunked`), in place of the shared prefill.
        graphs: whether steps are captured, None: no; changes no token.

    Returns:
        For each prompt, one `Generation` per label; a fork that failed says so and stops nothing
        else. What stops a prefill as a whole (keys that are not finite, no memory) is raised.
    """
    batch = [_read(model, prompt, seed, compress_after, chunk_tokens) for prompt in prompts]
    rows = [row for answers in batch for row in answers]
    decode_rows(model, [row for row in rows if row.chosen], graphs or StepGraphs())
    compressible = compressible_layers(model)
    for row in rows:
        row.result.batch = len(prompts)
        close_row(row, compressible)
    return [{row.fork.label: row.result for row in answers} for answers in batch]


def _read(
    model: PreTrainedModel,
    prompt: Prompt,
    seed: int,
    compress_after: str,
    chunk_tokens: int | None,
) -> list[DecodingRow]:
    """Prefill one prompt, and feed its question where that comes after compression; every row holds
    its first new token afterwards."""
    begun = seconds_run()
    question = list(prompt.question_ids)
    head, tail = [*prompt.context_ids, *question], list[int]()
    if compress_after == "context":
        head, tail = list(prompt.context_ids), question
    room = len(tail) + max(prompt.room or 0, prompt.stopping.max_new_tokens)
    forks = [
        Fork(label, method, budget, seed, prompt.example_id, room=room)
        for label, (method, budget) in prompt.methods.items()
    ]
    if chunk_tokens is None:
        starts = [prefill(model, head, forks)] * len(forks)
    else:
        starts = [chunked_prefill(model, head, fork, chunk_tokens) for fork in forks]
    compressible = compressible_layers(model)
    rows = []
    for fork, start in zip(forks, starts, strict=True):
        row = open_row(fork, start, prompt.stopping, compressible)
        rows.append(row)
        if not tail and fork.failure is None:
            (first,), (finite,) = choose(prompt.stopping.first(start.logits[None]))
            _take(row, first, finite)
    if tail:
        sound = [row for row in rows if row.fork.failure is None]
        feed_questions(model, sound, [list(tail)] * len(sound))
    for row in rows:
        row.spent_s = seconds_run() - begun
    return rows


def open_row(
    fork: Fork, start: Prefill, stopping: Stopping, compressible: Sequence[int]
) -> DecodingRow:
    """A row at the end of its prefill, with what can be told by now."""
    healthy = fork.failure is None
    result = Generation(
        tokens=[],
        new_tokens=0,
        entries=fork.prompt_counts(compressible) if healthy else None,
        cache_bytes=fork.cache_bytes() if healthy else None,
        cache_bytes_end=None,
        exact_bytes=start.exact_bytes,
        compressed=fork.compressed or fork.method.quantize is not None,
        prefill_s=start.prefill_s,
        compress_s=fork.compress_s,
        decode_s=0.0,
        failure=None,
    )
    return DecodingRow(fork, stopping, result, start.n, start.n)


def close_row(row: DecodingRow, compressible: Sequence[int]) -> None:
    """Count the entries again, and complete the row's result."""
    fork, result = row.fork, row.result
    if fork.failure is None:
        try:
            fork.audit(row.prefilled, compressible)
            result.compressed |= fork.evicted  # an uncompressed prompt may not stay so
            result.cache_bytes_end = fork.cache_bytes()
            result.budget_preset = fork.budget_preset
        except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
            fork.fail(failure)
    result.failure = fork.failure
    result.new_tokens = len(row.chosen)
    result.tokens = list(row.chosen)
    if result.tokens and result.tokens[-1] in row.stopping.end_ids:
        result.tokens.pop()


def feed_questions(
    model: PreTrainedModel, rows: Sequence[DecodingRow], questions: Sequence[Sequence[int]]
) -> None:
    """Every row's question through its fork of one prompt, and the token it answers with. Questions of
    one length go together."""
    device = input_device(model)
    for length in {len(question): None for question in questions}:
        fed = [i for i, question in enumerate(questions) if len(question) == length]
        _feed(
            model, [rows[i] for i in fed], torch.tensor([questions[i] for i in fed], device=device)
        )


def _feed(model: PreTrainedModel, rows: Sequence[DecodingRow], ids: Tensor) -> None:
    """`ids` of shape [rows, tokens] through the rows' forks, which are at one position."""
    first_token, first = rows[0].stopping.first, rows[0].position
    positions = torch.arange(first, first + ids.shape[1], device=ids.device).expand_as(ids)
    state = ForkBatch([row.fork for row in rows], positions)
    _step(
        model, rows, ids.shape[1], lambda: pick(first_token(forward(model, ids, positions, state)))
    )


def _step(
    model: PreTrainedModel, rows: Sequence[DecodingRow], tokens: int, step: Callable[[], Tensor]
) -> None:
    """Run a step that feeds so many tokens to every row, and give every row that has not ended the
    token it chose and its share of the seconds. `step` returns what `pick` says of its logits."""
    synchronize(input_device(model))
    start = time.perf_counter()
    chosen, finite = step().tolist()  # the step's only wait for the device
    seconds = (time.perf_counter() - start) / len(rows)
    for row, token, sound in zip(rows, chosen, finite, strict=True):
        if row.running:
            row.fork.appended += tokens
            row.position += tokens
            row.result.decode_s += seconds
            _take(row, token, bool(sound))


def _take(row: DecodingRow, token: int, finite: bool) -> None:
    """A row goes on with this token, unless the logits it came from mean nothing."""
    if row.fork.failure is None and not finite:
        row.fork.fail(NonFiniteLogits(len(row.chosen) + 1))
    if row.fork.failure is None:
        row.chosen.append(token)
        row.ended = row.stopping.reached(row.chosen)


def decode_rows(model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs) -> None:
    """Decode greedily until every row has ended.

    A row that has ended leaves the batch; where steps are replayed, when half of the batch has.
    """
    batch: _Batch | None = None
    begun = seconds_run()
    while True:
        _time_out(rows, seconds_run() - begun)
        running = [row for row in rows if row.running]
        if batch is None or batch.is_over(running):
            if batch is not None:
                batch.state.settle()
            if not running:
                return
            batch, rows = _Batch(model, running, graphs), running
        batch.step()


class _Batch:
    """Rows that take their steps together, until some of them leave."""

    def __init__(self, model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs) -> None:
        self.model = model
        self.rows = rows
        device = input_device(model)
        positions = torch.tensor([row.position for row in rows], device=device)
        left = [row.stopping.max_new_tokens - len(row.chosen) + 1 for row in rows]
        self.state = DecodeState([row.fork for row in rows], positions, left)
        self.ids = torch.tensor([[row.chosen[-1]] for row in rows], device=device)
        self.replay: Callable[[], Tensor] | None = None
        self.ended: set[int] = set()
        self.graphs = graphs
        self.may_capture = graphs.wanted(model, self.state, max(left))

    def _run(self) -> Tensor:
        """One step, all of it on the device and on the same tensors every time."""
        positions = self.state.positions[:, None]
        picked = pick(forward(self.model, self.ids, positions, self.state))
        self.ids.copy_(picked[0, :, None])
        self.state.move_on()
        return picked

    def step(self) -> None:
        """One token for every row that has not ended."""
        if self.may_capture and self.state.taken == FIRST_STEPS:
            self.may_capture = False
            self.replay = self.graphs.capture(self.model, self.state, self._run)
        for place, row in enumerate(self.rows):
            if not row.running and place not in self.ended:
                self.ended.add(place)
                self.state.end(place)
        _step(self.model, self.rows, 1, self.replay or self._run)
        self.state.count()

    def is_over(self, running: Sequence[DecodingRow]) -> bool:
        """Whether a new batch should take over: of the running rows alone, or because a cache is
        full."""
        few = len(self.rows) // 2 if self.replay is not None else len(self.rows) - 1
        return len(running) <= few or self.state.outgrown


def _time_out(rows: Sequence[DecodingRow], elapsed: float) -> None:
    """Fail the rows whose prompt took longer than it may: its own prefill, and all decoding since."""
    for row in rows:
        limit = row.stopping.timeout_s
        if limit is not None and row.spent_s + elapsed > limit:
            row.fork.fail(TimeoutError(f"the example took more than {limit:g} s"))
