"""Rows of a decoding batch: each one fork and the answer that it gives."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvbench.engine.costs import Cost
from kvbench.engine.decoding import DecodeState
from kvbench.engine.faults import NonFiniteLogits
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.graphs import FIRST_STEPS, StepGraphs
from kvbench.engine.prefill import forward, input_device, synchronize
from kvbench.engine.sampling import GREEDY, Sampling
from kvbench.engine.stopping import Stopping


@dataclass(frozen=True, kw_only=True)
class Generation(Cost):
    """What one fork generated, and what it cost.

    Attributes:
        tokens: new tokens, without the ending token.
        new_tokens: tokens produced, the ending token included.
        prefill_s: seconds of this prompt's own prefill; the same, like `compress_s`, for all questions
            about one compressed prompt.
        decode_s: seconds of the decode steps this fork took part in, divided by the rows of each
            (decoding is shared by methods and prompts; the throughput probe measures methods alone).
        failure: what stopped the fork; None if it succeeded.
        batch: prompts that were decoded together.
        kept: what was held of the prompt after compression (`kvbench.engine.kept.strips_of`), if
            requested.
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
    """One fork's generation in the making: a row of the decoding batch.

    Attributes:
        prefill_s: seconds of its prompt's prefill.
        spent_s: wall seconds that its prompt took before the rows of all prompts were joined.
        decode_s: its share of the seconds of decoding since.
        chosen: the tokens of its answer so far, the ending token included.
        ended: whether the answer has ended.
        uniforms: [tokens] in [0, 1), the number that each token is drawn with; None where the most
            likely token is taken.
    """

    fork: Fork
    stopping: Stopping
    prefill_s: float = 0.0
    sampling: Sampling = GREEDY
    uniforms: Tensor | None = None
    spent_s: float = 0.0
    decode_s: float = 0.0
    chosen: list[int] = field(default_factory=list)
    ended: bool = False

    @property
    def draw(self) -> float:
        """The number that the next token is drawn with."""
        if self.uniforms is None or len(self.chosen) >= len(self.uniforms):
            return 0.0
        return float(self.uniforms[len(self.chosen)])

    @property
    def steps(self) -> int:
        """Tokens that will be fed to it at most."""
        return self.stopping.max_new_tokens - len(self.chosen) + 1

    @property
    def running(self) -> bool:
        """Whether there is something left to decode."""
        return self.fork.failure is None and not self.ended

    def take(self, token: int, finite: bool) -> None:
        """Go on with this token, unless the logits it came from mean nothing."""
        if self.fork.failure is None and not finite:
            self.fork.fail(NonFiniteLogits(len(self.chosen) + 1))
        if self.fork.failure is None:
            self.chosen.append(token)
            self.ended = self.stopping.reached(self.chosen)

    def finish(self, *, batch: int = 1, kept: dict[str, Any] | None = None) -> Generation:
        """Audit the fork, and say what it generated; see `Generation`."""
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
    """Every row's question through its fork, and the token it answers with. Questions of one length go
    together."""
    device = input_device(model)
    for length in {len(question): None for question in questions}:
        places = [i for i, question in enumerate(questions) if len(question) == length]
        fed = [rows[i] for i in places]
        ids = torch.tensor([questions[i] for i in places], device=device)
        first = torch.tensor([row.fork.tokens for row in fed], device=device)
        positions = first[:, None] + torch.arange(length, device=device)
        synchronize(device)
        since = time.perf_counter()
        logits = forward(model, ids, positions, ForkBatch([row.fork for row in fed], positions))
        _take(fed, length, picked(fed, logits), since)


def _take(rows: Sequence[DecodingRow], tokens: int, chosen: Tensor, since: float) -> None:
    """After a step that fed so many tokens to every row: give every row that has not ended the token it
    chose, by what `Sampling.pick` says, and its share of the seconds `since` the device was idle."""
    chosen, finite = chosen.tolist()  # the step's only wait for the device
    seconds = (time.perf_counter() - since) / len(rows)
    for row, token, sound in zip(rows, chosen, finite, strict=True):
        if row.running:
            row.fork.ledger.count_step(tokens)
            row.decode_s += seconds
            row.take(token, bool(sound))


def decode_rows(model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs) -> None:
    """Decode until every row has ended: where steps are to be captured, first the rows that go through
    the kernels, then those that decode alone.

    A row that has ended leaves the batch; where steps are replayed, when half of the batch has.
    """
    begun = time.perf_counter()
    parts = [rows]
    if graphs.wanted(model, max((row.steps for row in rows), default=0)):
        by_kernel = [row for row in rows if row.fork.steps_by_kernel]
        alone = [row for row in rows if not row.fork.steps_by_kernel]
        parts = [by_kernel, alone]
    for part in parts:
        batch: _Batch | None = None
        while part:
            # Making a batch and capturing its step are part of what decoding takes.
            since = time.perf_counter()
            for row in part:  # of its own prefill, and of all decoding since
                limit = row.stopping.timeout_s
                if limit is not None and row.spent_s + since - begun > limit:
                    row.fork.fail(TimeoutError(f"the example took more than {limit:g} s"))
            running = [row for row in part if row.running]
            if batch is None or batch.is_over(running):
                if batch is not None:
                    batch.state.settle()
                part = running
                if not running:
                    break
                batch = _Batch(model, running, graphs)
            batch.step(since)


class _Batch:
    """Rows that take their steps together, until some of them leave."""

    def __init__(self, model: PreTrainedModel, rows: list[DecodingRow], graphs: StepGraphs) -> None:
        self.model, self.stepping = model, graphs.stepping(model)
        self.rows = rows
        device = input_device(model)
        left = [row.steps for row in rows]
        self.state = DecodeState([row.fork for row in rows], left, device)
        self.ids = torch.tensor([[row.chosen[-1]] for row in rows], device=device)
        self.draws = _draws(rows, device)
        self.replay: Callable[[], Tensor] | None = None
        self.ended: set[int] = set()
        self.graphs = graphs
        alone = not all(row.fork.steps_by_kernel for row in rows)
        self.may_capture = not alone and graphs.wanted(model, max(left))
        if self.may_capture:
            self.replay = graphs.recall(*self._fixed())

    def _fixed(self) -> tuple[Hashable, list[Tensor]]:
        """The key of the batch's captured step, and the tensors that the step works on."""
        own = [part for part in (self.ids, self.draws) if part is not None]
        return (self.rows[0].sampling, self.state.graph_key), [*own, *self.state.tensors]

    def _run(self) -> Tensor:
        """One step, all of it on the device and on the same tensors every time."""
        positions = self.state.positions[:, None]
        logits = forward(self.stepping, self.ids, positions, self.state)
        picked = self.rows[0].sampling.pick(logits, self.draws)
        self.ids.copy_(picked[0, :, None])
        self.state.move_on()
        return picked

    def step(self, since: float) -> None:
        """One token for every row that has not ended; its clock has run `since` then."""
        if self.may_capture and self.replay is None and self.state.taken == FIRST_STEPS:
            self.may_capture = False
            self.replay = self.graphs.capture(self.model, self._run, *self._fixed())
        for place, row in enumerate(self.rows):
            if not row.running and place not in self.ended:
                self.ended.add(place)
                self.state.end(place)
        if self.draws is not None:
            self.draws.copy_(torch.tensor([row.draw for row in self.rows]))
        _take(self.rows, 1, (self.replay or self._run)(), since)
        self.state.taken += 1

    def is_over(self, running: Sequence[DecodingRow]) -> bool:
        """Whether a new batch, of the running rows alone, should take over."""
        few = len(self.rows) // 2 if self.replay is not None else len(self.rows) - 1
        return len(running) <= few


def picked(rows: Sequence[DecodingRow], logits: Tensor) -> Tensor:
    """[2, rows]: the first token of each row's answer, from logits [rows, vocab], as `Sampling.pick`
    says it."""
    allowed = [row.stopping.first(logits[i : i + 1]) for i, row in enumerate(rows)]
    return rows[0].sampling.pick(torch.cat(allowed), _draws(rows, logits.device))


def _draws(rows: Sequence[DecodingRow], device: torch.device) -> Tensor | None:
    """What the rows' next tokens are drawn with, [rows]; None where they are greedy."""
    if rows[0].sampling.greedy:
        return None
    return torch.tensor([row.draw for row in rows], device=device)
