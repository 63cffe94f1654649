"""Passes that feed tokens to rows (`feed`), and how the next tokens of their answers are chosen."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine.answer import Answer, NonFiniteLogits
from kvbench.engine.attention import LayerCall, Pass
from kvbench.engine.device import input_device
from kvbench.engine.prefill import forward
from kvbench.engine.rotary import crossing, table_key
from kvbench.engine.row import Row
from kvbench.engine.states import PassingCache, joined_cache
from kvbench.kernels.philox import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MOST_FED = 1 << 13
"""The largest number of tokens, of all rows, that are fed in one pass."""


class Feed(Pass):
    """A pass that feeds tokens to rows: row i of the batch is ``rows[i]``.

    Args:
        positions: of the tokens that are fed: [t], the same for every row, or [rows, t].
    """

    def __init__(self, rows: Sequence[Row], positions: Tensor) -> None:
        self.rows = rows
        self.positions = positions
        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """A cache of the states of all rows. The rows' states become views of it, so that the pass
        updates them."""
        if self._past is None:
            self._past = joined_cache(config, [row.states for row in self.rows])
        return self._past

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of each row over its own caches; 0 for a row that has failed."""
        if self.positions.device != call.query.device:
            # Kept, so that the layers that follow on this device need no copy.
            self.positions = to_device(self.positions, call.query.device)
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        positions = self.positions.expand(len(self.rows), -1)
        self.attend_alone(range(len(self.rows)), call, positions, out)
        return out

    def attend_alone(
        self, places: Iterable[int], call: LayerCall, positions: Tensor, out: Tensor
    ) -> None:
        """Feed the tokens of some rows, at positions [batch, t], to their caches, one row after the
        other, and write their attention into `out` [batch, heads, t, value_dim]."""
        for place in places:
            row = self.rows[place]
            if row.failure is None:
                try:
                    out[place] = row.attend(call.of_row(place), positions[place])
                except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                    row.fail(failure)


def feed(
    model: PreTrainedModel, rows: Sequence[Row], tokens: Sequence[Sequence[int]], keep: int = 1
) -> Iterator[tuple[list[int], Tensor]]:
    """Feed each row its tokens, at least one. Rows with equally many share a pass, which then needs no
    padding, if they share the rotary table (`table_key`).

    A row fails where its caches would mix LongRoPE's tables; the logits of a row that has failed mean
    nothing.

    Yields:
        for each pass the places of its rows, and the logits [rows, keep, vocab] after the last `keep`
        tokens of each.
    """
    device = input_device(model)
    passes: dict[tuple[int, Hashable], list[int]] = {}
    for place, (row, own) in enumerate(zip(rows, tokens, strict=True)):
        refuse_crossing(model, row, len(own))
        key = table_key(model.config, row.tokens, len(own), row.table_of)
        passes.setdefault((len(own), key), []).append(place)
    for (length, _), places in passes.items():
        at_once = max(1, MOST_FED // length)
        for begin in range(0, len(places), at_once):
            part = places[begin : begin + at_once]
            fed = [rows[place] for place in part]
            first = torch.tensor([row.tokens for row in fed], device=device)
            positions = first[:, None] + torch.arange(length, device=device)
            ids = torch.tensor([list(tokens[place]) for place in part], device=device)
            logits = forward(model, ids, positions, Feed(fed, positions), keep=keep)
            for row in fed:
                if row.failure is None:
                    row.count_step(length)
            yield part, logits[:, -keep:]


def refuse_crossing(model: PreTrainedModel, row: Row, fed: int) -> None:
    """Fail the row if its caches would mix LongRoPE's tables (`crossing`) after `fed` more tokens."""
    failure = crossing(model.config, row.tokens, fed, row.table_of)
    if failure is not None and row.failure is None:
        row.fail(failure)


@dataclass
class Turn:
    """A row, and the answer that it gives now, before which it reads the tokens `asked`."""

    row: Row
    answer: Answer
    asked: Sequence[int] = ()

    @property
    def running(self) -> bool:
        """Whether the answer goes on: it has not ended, and the row has not failed."""
        return self.row.failure is None and not self.answer.ended

    @property
    def unread(self) -> Sequence[int]:
        """The tokens that are fed to the row next."""
        return self.answer.chosen[-1:] or self.asked


def pick(turns: Sequence[Turn], logits: Tensor, draws: Tensor | None) -> Tensor:
    """Choose the next token of each answer from logits [turns, vocab]; returns what `Sampling.pick`
    does, [2, turns]."""
    if any(not turn.answer.chosen or turn.answer.stopping.processors for turn in turns):
        own = [logits[i : i + 1] for i in range(len(turns))]
        parts = [
            turn.answer.process(one) if turn.running else one
            for turn, one in zip(turns, own, strict=True)
        ]
        logits = torch.cat(parts)
    return turns[0].answer.sampling.pick(logits, draws)


def draws_of(turns: Sequence[Turn], device: torch.device) -> Tensor | None:
    """The random numbers of the next tokens, [turns]; None where tokens are not drawn."""
    if turns[0].answer.sampling.greedy:
        return None
    return torch.tensor([turn.answer.draw for turn in turns], device=device)


def take(turns: Sequence[Turn], picks: Tensor, begin_s: float) -> None:
    """Add to every answer that goes on the token that was chosen for it ([2, turns], see
    `Sampling.pick`), and its share of the seconds since `begin_s` by `time.perf_counter`. A row whose
    logits are not finite fails instead."""
    tokens, finite = picks.tolist()  # the step's only wait for the device
    seconds = (time.perf_counter() - begin_s) / len(turns)
    for turn, token, is_finite in zip(turns, tokens, finite, strict=True):
        if turn.running:
            turn.answer.decode_s += seconds
            if is_finite:
                turn.answer.take(token)
            else:
                turn.row.fail(NonFiniteLogits(len(turn.answer.chosen) + 1))


def fail_late(turns: Sequence[Turn]) -> None:
    """Fail the rows whose time is over."""
    now_s = time.perf_counter()
    for turn in turns:
        limit = turn.answer.stopping.timeout_s
        if limit is not None and turn.running and now_s - turn.answer.begin_s > limit:
            turn.row.fail(TimeoutError(f"the example took more than {limit:g} s"))
