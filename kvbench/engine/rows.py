"""The rows of a decoding batch (`DecodingRow`): each is a fork and the answer that it generates."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.engine.costs import Cost
from kvbench.engine.decoding import DecodeState
from kvbench.engine.faults import NonFiniteLogits
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.graphs import FIRST_STEPS, StepGraphs
from kvbench.engine.prefill import forward, input_device, synchronize
from kvbench.engine.rotary import crossing, table_key
from kvbench.engine.sampling import GREEDY, Sampling
from kvbench.engine.stopping import Stopping

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Generation(Cost):
    """What one fork generated, and its cost.

    Attributes:
        tokens: the new tokens, without the ending token.
        new_tokens: the number of new tokens, the ending token included.
        prefill_s: the seconds of this prompt's own prefill. Like `compress_s`, it is the same for all
            questions about one compressed prompt.
        decode_s: the seconds of the decode steps in which the fork took part, each divided by the number
            of its rows. (Methods and prompts share the steps; the throughput probe measures a method
            alone.)
        failure: the exception that stopped the fork; None if it succeeded.
        batch: the number of prompts that were decoded together.
        kept: how much of each part of the prompt was held after compression
            (`kvbench.engine.kept.strips_of`); None unless it was asked for.
    """

    tokens: list[int]
    new_tokens: int
    prefill_s: float
    decode_s: float
    failure: Exception | None
    batch: int = 1
    kept: dict[str, Any] | None = None


@dataclass
class DecodingRow:
    """A row of the decoding batch: a fork, and its answer so far.

    Attributes:
        stopping: when the answer ends.
        prefill_s: the seconds of the prompt's prefill.
        sampling: how tokens are chosen.
        uniforms: [tokens] in [0, 1), the random number by which each token is drawn; None where the most
            likely token is taken.
        spent_s: the wall-clock seconds that the prompt took before the rows of all prompts were joined.
        decode_s: the row's share of the seconds of decoding since then.
        chosen: the tokens of the answer so far, the ending token included.
        answer_from: the number of tokens before the answer; None within a thought.
        ended: whether the answer has ended.
    """

    fork: Fork
    stopping: Stopping
    prefill_s: float = 0.0
    sampling: Sampling = GREEDY
    uniforms: Tensor | None = None
    spent_s: float = 0.0
    decode_s: float = 0.0
    chosen: list[int] = field(default_factory=list)
    answer_from: int | None = None
    ended: bool = False

    @property
    def draw(self) -> float:
        """The random number by which the next token is drawn; 0 where it is not drawn."""
        if self.uniforms is None or len(self.chosen) >= len(self.uniforms):
            return 0.0
        return float(self.uniforms[len(self.chosen)])

    @property
    def steps(self) -> int:
        """The largest number of tokens that will still be fed to the fork."""
        return self.stopping.max_new_tokens - len(self.chosen) + 1

    @property
    def running(self) -> bool:
        """Whether the answer goes on: it has not ended, and the fork has not failed."""
        return self.fork.failure is None and not self.ended

    def take(self, token: int, finite: bool) -> None:
        """Add a token to the answer. If the logits from which it was chosen are not finite, the fork
        fails instead."""
        if self.fork.failure is None and not finite:
            self.fork.fail(NonFiniteLogits(len(self.chosen) + 1))
        if self.fork.failure is None:
            self.chosen.append(token)
            if self.answer_from is None:
                self.answer_from = self.stopping.answer_from(self.chosen)
            self.ended = self.stopping.reached(self.chosen, self.answer_from)

    def finish(self, *, batch: int = 1, kept: dict[str, Any] | None = None) -> Generation:
        """Audit the fork, and return what it generated. `batch` and `kept`: see `Generation`."""
        fork, tokens = self.fork, list(self.chosen)
        if fork.failure is None:
            try:
                fork.audit()
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)
        if tokens and tokens[-1] in self.stopping.end_ids:
            tokens.pop()
        return Generation(
            **vars(fork.cost()),
            tokens=tokens,
            new_tokens=len(self.chosen),
            prefill_s=self.prefill_s,
            decode_s=self.decode_s,
            failure=fork.failure,
            batch=batch,
            kept=kept,
        )


def feed_questions(
    model: PreTrainedModel, rows: Sequence[DecodingRow], questions: Sequence[Sequence[int]]
) -> None:
    """Feed every row its question, and choose the first token of its answer. Questions of the same
    length are fed in one pass, whose rows then need no padding, if they share the rotary table
    (`table_key`)."""
    device = input_device(model)
    passes: dict[tuple[int, Hashable], list[int]] = {}  # the indices of the rows of each pass
    for i, (row, question) in enumerate(zip(rows, questions, strict=True)):
        _refuse_crossing(model, row, len(question))
        key = table_key(model.config, row.fork.tokens, len(question))
        passes.setdefault((len(question), key), []).append(i)
    for (length, _), indices in passes.items():
        rows_fed = [rows[i] for i in indices]
        ids = torch.tensor([questions[i] for i in indices], device=device)
        first = torch.tensor([row.fork.tokens for row in rows_fed], device=device)
        positions = first[:, None] + torch.arange(length, device=device)
        synchronize(device)
        begin_s = time.perf_counter()
        state = ForkBatch([row.fork for row in rows_fed], positions)
        logits = forward(model, ids, positions, state)
        _finish_step(rows_fed, length, pick_first(rows_fed, logits), begin_s)


def _refuse_crossing(model: PreTrainedModel, row: DecodingRow, fed_tokens: int) -> None:
    """Fail the row's fork if its cache would mix LongRoPE's tables (`crossing`) after `fed_tokens` more
    tokens."""
    failure = crossing(model.config, row.fork.tokens, fed_tokens)
    if failure is not None and row.fork.failure is None:
        row.fork.fail(failure)


def _finish_step(
    rows: Sequence[DecodingRow], fed_tokens: int, picks: Tensor, begin_s: float
) -> None:
    """Give every row that is running the token that a step chose for it, and its share of the seconds.

    Args:
        fed_tokens: how many tokens the step fed to every row.
        picks: [2, rows], as `Sampling.pick` returns them.
        begin_s: the time by `time.perf_counter` at which the step began.
    """
    tokens, finite = picks.tolist()  # the step's only wait for the device
    seconds = (time.perf_counter() - begin_s) / len(rows)
    for row, token, is_finite in zip(rows, tokens, finite, strict=True):
        if row.running:
            row.fork.ledger.count_step(fed_tokens)
            row.decode_s += seconds
            row.take(token, bool(is_finite))


def decode_rows(model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs) -> None:
    """Decode until every row has ended or failed.

    All rows decode together, with two exceptions. A captured step contains only rows that go through the
    kernels, so these decode first, and then the others. And rows with other rotary tables (`table_key`)
    decode apart. A row whose longest answer would mix two tables fails (`crossing`).

    A row that has ended is removed from the batch. Where steps are replayed, rows are removed only when
    half of them have ended, since a smaller batch needs a captured step of its own.
    """
    begin_s = time.perf_counter()
    captures = graphs.should_capture(model, max((row.steps for row in rows), default=0))
    batches: dict[tuple[bool, Hashable], list[DecodingRow]] = {}
    for row in rows:
        if row.running:
            # Of the tokens still to be chosen, the last is not fed.
            _refuse_crossing(model, row, row.stopping.max_new_tokens - len(row.chosen))
        by_kernel = captures and row.fork.steps_by_kernel
        key = table_key(model.config, row.fork.tokens, row.steps)
        batches.setdefault((not by_kernel, key), []).append(row)
    for _, batch_rows in sorted(batches.items(), key=lambda batch: batch[0][0]):
        _decode_batch(model, batch_rows, graphs, begin_s)


def _decode_batch(
    model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs, begin_s: float
) -> None:
    """Decode some rows together until all have ended or failed; see `decode_rows`.

    Args:
        begin_s: the time by `time.perf_counter` at which the decoding of all rows began.
    """
    batch: _Batch | None = None
    while rows:
        # Before the batch is made: making it and capturing its step are part of the decoding time.
        step_begin_s = time.perf_counter()
        for row in rows:
            limit = row.stopping.timeout_s
            # A prompt's time is that of its own prefill, and of the decoding of all prompts.
            if limit is not None and row.spent_s + step_begin_s - begin_s > limit:
                row.fork.fail(TimeoutError(f"the example took more than {limit:g} s"))
        running = [row for row in rows if row.running]
        if batch is None or batch.should_shrink(running):
            if batch is not None:
                batch.state.settle()
            rows = running
            if not running:
                break
            batch = _Batch(model, running, graphs)
        batch.step(step_begin_s)


class _Batch:
    """Rows that take their steps together.

    Attributes:
        step_model: the model as its steps run it (`StepGraphs.model_for_steps`).
        ids: [rows, 1] int64, the token that is fed to each row; every step writes the next one.
        draws: [rows], the random number of each row's next token; None where tokens are not drawn.
        replay: runs a captured step; None where the step is run as it is.
        ended: the indices of rows that have ended and are still in the batch.
        may_capture: whether a step is to be captured, once the first ones have run.
    """

    def __init__(self, model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs) -> None:
        self.model = model
        self.step_model = graphs.model_for_steps(model)
        self.rows = rows
        self.graphs = graphs
        device = input_device(model)
        steps = [row.steps for row in rows]
        self.state = DecodeState([row.fork for row in rows], steps, device)
        self.ids = torch.tensor([[row.chosen[-1]] for row in rows], device=device)
        self.draws = _draws(rows, device)
        self.replay: Callable[[], Tensor] | None = None
        self.ended: set[int] = set()
        by_kernel = all(row.fork.steps_by_kernel for row in rows)
        self.may_capture = by_kernel and graphs.should_capture(model, max(steps))
        if self.may_capture:
            self.replay = graphs.recall(self._graph_key(), self._tensors())

    def _graph_key(self) -> Hashable:
        """The key of the batch's captured step (`StepGraphs.capture`)."""
        return self.rows[0].sampling, self.state.graph_key

    def _tensors(self) -> list[Tensor]:
        """The tensors that the step reads and writes."""
        own_tensors = [self.ids] if self.draws is None else [self.ids, self.draws]
        return [*own_tensors, *self.state.tensors]

    def _run(self) -> Tensor:
        """Run one step, which returns what `Sampling.pick` does. All of it is on the device, and on the
        same tensors every time, so that it can be captured."""
        positions = self.state.positions[:, None]
        logits = forward(self.step_model, self.ids, positions, self.state)
        picks = self.rows[0].sampling.pick(logits, self.draws)
        self.ids.copy_(picks[0, :, None])
        self.state.move_on()
        return picks

    def step(self, begin_s: float) -> None:
        """Decode one token for every row that has not ended.

        Args:
            begin_s: the time by `time.perf_counter` at which the step began.
        """
        if self.may_capture and self.replay is None and self.state.taken == FIRST_STEPS:
            self.may_capture = False
            self.replay = self.graphs.capture(
                self.model, self._run, self._graph_key(), self._tensors()
            )
        for index, row in enumerate(self.rows):
            if not row.running and index not in self.ended:
                self.ended.add(index)
                self.state.end(index)
        if self.draws is not None:
            self.draws.copy_(torch.tensor([row.draw for row in self.rows]))
        run_step = self.replay or self._run
        _finish_step(self.rows, 1, run_step(), begin_s)
        self.state.taken += 1

    def should_shrink(self, running: Sequence[DecodingRow]) -> bool:
        """Whether a new batch of the running rows alone should take this one's place."""
        if self.replay is None:
            return len(running) < len(self.rows)
        return len(running) <= len(self.rows) // 2


def pick_first(rows: Sequence[DecodingRow], logits: Tensor) -> Tensor:
    """Choose the first token of each row's answer from logits [rows, vocab]; returns what
    `Sampling.pick` does, [2, rows]."""
    allowed = [row.stopping.mask_first(logits[i : i + 1]) for i, row in enumerate(rows)]
    return rows[0].sampling.pick(torch.cat(allowed), _draws(rows, logits.device))


def _draws(rows: Sequence[DecodingRow], device: torch.device) -> Tensor | None:
    """The random numbers of the rows' next tokens, [rows]; None where tokens are not drawn."""
    if rows[0].sampling.greedy:
        return None
    return torch.tensor([row.draw for row in rows], device=device)
