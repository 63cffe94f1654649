"""Teacher forcing: the rows of a prompt are fed given tokens, and the logits of these are read.

The last prompt token is not compressed but is the first token that is fed. Otherwise the first token of
a continuation, and so every answer of one token, would be scored by the exact prefill's logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.answer import NonFiniteLogits, Stopping
from kvbench.engine.decode import Feed, decode, feed_questions, refuse_crossing
from kvbench.engine.device import input_device
from kvbench.engine.prefill import Reading, forward_rows, prefill
from kvbench.engine.rotary import shares_table
from kvbench.engine.row import Row, rows_of
from kvbench.engine.steps import Steps
from kvbench.errors import UserError
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = 2**24
"""How many logits are computed at a time, whatever the length of a continuation: 64 MB in float32."""

Logits = Iterator[tuple[int, Tensor]]
"""An iterator of pairs: a place in the continuation, and logits [rows, tokens, vocab] in the model's
dtype that predict the continuation's tokens from that place on. The caller reads it to the end, since
the rows are audited after the last pair."""


@torch.inference_mode()
def read(
    model: PreTrainedModel,
    prompt_ids: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    *,
    seed: int,
    example_id: str,
    room: int,
    context_tokens: int | None = None,
    encoder: PromptEncoder | None = None,
) -> Reading:
    """Prefill all but the last token of a prompt exactly, and compress it by every method.

    Args:
        room: how many tokens will be fed after the prompt; memory for them is reserved.
        context_tokens: how many of the prompt's tokens are prefilled and compressed instead (the
            context); the others (the question) are fed before a continuation, and change nothing about
            the context. None for all but the last.
        encoder: see `kvbench.engine.prefill.prefill`.

    Raises:
        UserError: an empty prompt; a context that leaves nothing to be fed.
    """
    n = len(prompt_ids)
    head = n - 1 if context_tokens is None else context_tokens
    if n < 1 or not (0 < head < n or n == 1):
        raise UserError(
            f"the prompt has {n} tokens, of which {head} are to be compressed; allowed: at least one, "
            "and fewer than there are"
        )
    if context_tokens is None:
        rows = rows_of(methods, n, 1, seed, example_id, room)
        return prefill(model, prompt_ids, rows, held_back=1, encoder=encoder)
    rows = rows_of(methods, head, 0, seed, example_id, room + n - head)
    reading = prefill(model, prompt_ids[:head], rows, encoder=encoder)
    reading.lead = list(prompt_ids[head:])
    return reading


def chunks(rows: int, tokens: int, vocab: int) -> Iterator[range]:
    """Cut the places 0 .. tokens - 1 into runs that `CHUNK_LOGITS` allows."""
    step = max(1, CHUNK_LOGITS // (rows * vocab))
    for begin in range(0, tokens, step):
        yield range(begin, min(tokens, begin + step))


def vocabulary(model: PreTrainedModel) -> int:
    """The size of the model's vocabulary, which is the number of logits per row and token."""
    return int(model.config.get_text_config().vocab_size)


@torch.inference_mode()
def feed_continuations(
    model: PreTrainedModel, reading: Reading, fed: Sequence[tuple[Row, Sequence[int]]]
) -> Logits:
    """Feed every row its continuation, all in one batch, and yield the logits of every token.

    The tokens are added to the caches, which may evict entries, one token after the other. Shorter
    continuations are padded to the longest by repeating their last token, which changes no logits before
    it. (With Dynamic NTK it would, and tokens are fed one by one.) If a row fails, its logits are to be
    ignored; the others go on.

    Args:
        fed: pairs of a row and its continuation's token ids.
    """
    device = input_device(model)
    rows = [row for row, _ in fed]
    longest = max(len(tokens) for _, tokens in fed)
    lead = list(reading.lead)
    of_rows = [[*lead, *repeat_last(tokens, longest)[:-1]] for _, tokens in fed]
    ids = torch.tensor(of_rows, device=device).view(len(rows), -1)
    positions = reading.n + torch.arange(ids.shape[1], device=device)
    begin = 0
    first = 0  # the place in the continuation that the first pass predicts first
    if not lead:
        first = 1
        assert reading.logits is not None
        yield 0, reading.logits.expand(len(rows), 1, -1)
    for row in rows:
        refuse_crossing(model, row, ids.shape[1])
    parts = chunks(len(rows), longest - first, vocabulary(model))
    if not shares_table(model.config, reading.n + ids.shape[1]):
        parts = (range(i, i + 1) for i in range(longest - first))
    for part in parts:
        end = max(0, len(lead) - 1) + part.stop
        state = Feed(rows, positions[begin:end])
        logits = forward_rows(model, ids[:, begin:end], state.positions, state, keep=len(part))
        yield first + part.start, logits[:, -len(part) :]
        begin = end
    for row in rows:
        row.count_step(ids.shape[1])
        row.try_audit()


def repeat_last(tokens: Sequence[int], length: int) -> list[int]:
    """Pad `tokens` to `length` by repeating the last one."""
    missing = length - len(tokens)
    return list(tokens) + [tokens[-1]] * missing


@dataclass(frozen=True)
class Scored:
    """The score of a continuation under one method.

    Attributes:
        logprobs: the natural logarithm of every token's probability.
        greedy: for every token whether it is the most likely one.
        failure: the exception that stopped the method, or None. After a failure both lists are empty.
    """

    logprobs: list[float]
    greedy: list[bool]
    failure: Exception | None = None


def score(
    model: PreTrainedModel,
    reading: Reading,
    continuations: Sequence[Sequence[int]],
    *,
    batch_rows: int = 32,
) -> dict[str, list[Scored]]:
    """Compute the log-probabilities of every token of every continuation under every method.

    Each continuation is fed to a copy of the row; a single one is fed to the row itself.

    Args:
        continuations: the token ids of each continuation.
        batch_rows: how many pairs of a method and a continuation are fed together, which changes results
            only in their last digits.

    Returns:
        by label the scores, in the order of `continuations`.
    """
    results: dict[str, list[Scored]] = {row.label: [] for row in reading.rows}
    pairs = [
        (row, tokens) for row in reading.rows if row.failure is None for tokens in continuations
    ]
    for begin in range(0, len(pairs), batch_rows):
        batch = [
            (row if len(continuations) == 1 else row.clone(), tokens)
            for row, tokens in pairs[begin : begin + batch_rows]
        ]
        fed = feed_continuations(model, reading, batch)
        logprobs = log_probabilities([tokens for _, tokens in batch], fed)
        for (row, tokens), of_row in zip(batch, logprobs, strict=True):
            results[row.label].append(scored_of(of_row[: len(tokens)], row.failure))
    for row in reading.rows:
        if not results[row.label]:  # the method failed while it compressed
            results[row.label] = [Scored([], [], row.failure)] * len(continuations)
    return results


def log_probabilities(continuations: Sequence[Sequence[int]], fed: Logits) -> Tensor:
    """For each token of each continuation its log-probability, and 1 where it is the most likely token,
    else 0: [rows, tokens, 2], on the CPU. Shorter continuations are padded (`repeat_last`)."""
    longest = max(map(len, continuations))
    tokens = torch.tensor([repeat_last(continuation, longest) for continuation in continuations])
    parts = []
    for begin, logits in fed:
        targets = tokens[:, begin : begin + logits.shape[1]].to(logits.device)[..., None]
        logprobs = logits.float().log_softmax(-1).gather(-1, targets)[..., 0]
        greedy = logits.argmax(-1) == targets[..., 0]
        parts.append(torch.stack([logprobs, greedy.to(logprobs.dtype)], dim=-1).cpu())
    return torch.cat(parts, dim=1)


def scored_of(row: Tensor, failure: Exception | None) -> Scored:
    """The score of a row [tokens, 2] of `log_probabilities`; if the row failed, or a log-probability
    is NaN, that failure."""
    not_numbers = row[:, 0].isnan().nonzero()
    if failure is None and len(not_numbers):
        failure = NonFiniteLogits(int(not_numbers[0]) + 1)
    if failure is not None:
        return Scored([], [], failure)
    return Scored(row[:, 0].tolist(), row[:, 1].bool().tolist())


@torch.inference_mode()
def greedy_continuation(
    model: PreTrainedModel, reading: Reading, row: Row, stopping: Stopping
) -> list[int]:
    """Decode a copy of the row greedily, and return the answer's token ids, the ending token included.

    Raises:
        Exception: what stopped the copy.
    """
    twin = row.clone()
    twin.begin_answer(stopping)
    feed_questions(model, [twin], [list(reading.lead)])
    decode(model, [twin], Steps())
    if twin.failure is not None:
        raise twin.failure
    return twin.answer.chosen
