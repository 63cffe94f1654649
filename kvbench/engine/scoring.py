"""Teacher forcing: the forks of a prompt are fed given tokens, and the logits of these are read.

The last prompt token is not compressed but is the first token that is fed. Otherwise the first token of
a continuation, and so every answer of one token, would be scored by the exact prefill's logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine.faults import NonFiniteLogits
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.prefill import Prefill, forward_rows, input_device, prefill
from kvbench.engine.rotary import crossing, shares_table
from kvbench.engine.rows import DecodingRow, decode_rows, feed_questions
from kvbench.engine.stopping import Stopping
from kvbench.errors import UserError
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.methods.exact import Exact
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = 2**24
"""How many logits are computed at a time, whatever the length of a continuation: 64 MB in float32."""

Logits = Iterator[tuple[int, Tensor]]
"""An iterator of pairs: a place in the continuation, and logits [rows, tokens, vocab] in the model's
dtype that predict the continuation's tokens from that place on. The caller reads it to the end, since
the forks are audited after the last pair."""


@dataclass(frozen=True)
class CompressedPrompt:
    """A prompt that has been prefilled, and compressed by every method, up to its last tokens.

    Attributes:
        forks: one per method that compresses, in the order of the methods.
        lead: the last tokens of the prompt, which are fed before a continuation; the logits after the
            last of them predict the continuation's first token. Empty for a prompt of one token, which
            leaves nothing to compress; the prefill's logits then predict that token.
        start: the result of the prefill.
    """

    forks: Sequence[Fork]
    lead: Sequence[int]
    start: Prefill


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
) -> CompressedPrompt:
    """Prefill all but the last token of a prompt exactly, and compress it by every method.

    Args:
        room: how many tokens will be fed after the prompt; memory for them is reserved.
        context_tokens: how many of the prompt's tokens are prefilled and compressed instead (the
            context); the others (the question) are fed with the last one. None for all but the last.
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
    head = max(1, head)
    forks = [
        Fork(label, method if n > 1 else Exact(), budget, seed, example_id, room=room + n - head)
        for label, (method, budget) in methods.items()
    ]
    start = prefill(model, prompt_ids[:head], forks, encoder=encoder)
    return CompressedPrompt(forks, list(prompt_ids[head:]), start)


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
    model: PreTrainedModel,
    reading: CompressedPrompt,
    rows: Sequence[tuple[Fork, Sequence[int]]],
) -> Logits:
    """Feed every fork its continuation, all in one batch, and yield the logits of every token.

    The tokens are added to the caches, which may evict entries, one token after the other. Shorter
    continuations are padded to the longest by repeating their last token, which changes no logits before
    it. (With Dynamic NTK it would, and tokens are fed one by one.) If a fork fails, its logits are to be
    ignored; the others go on.

    Args:
        rows: pairs of a fork and its continuation's token ids.
    """
    device = input_device(model)
    forks = [fork for fork, _ in rows]
    longest = max(len(tokens) for _, tokens in rows)
    lead = list(reading.lead)
    fed = [[*lead, *repeat_last(tokens, longest)[:-1]] for _, tokens in rows]
    ids = torch.tensor(fed, device=device).view(len(rows), -1)
    positions = reading.start.n + torch.arange(ids.shape[1], device=device)
    begin = 0
    first = 0  # the place in the continuation that the first pass predicts first
    if not lead:
        first = 1
        yield 0, reading.start.logits.expand(len(rows), 1, -1)
    fed_tokens = ids.shape[1]
    for fork in forks:
        failure = crossing(model.config, fork.tokens, fed_tokens)
        if failure is not None and fork.failure is None:
            fork.fail(failure)
    parts = chunks(len(rows), longest - first, vocabulary(model))
    if not shares_table(model.config, reading.start.n + fed_tokens):
        parts = (range(i, i + 1) for i in range(longest - first))
    for part in parts:
        end = max(0, len(lead) - 1) + part.stop
        state = ForkBatch(forks, positions[begin:end])
        logits = forward_rows(model, ids[:, begin:end], state.positions, state, keep=len(part))
        yield first + part.start, logits[:, -len(part) :]
        begin = end
    for fork in forks:
        fork.ledger.count_step(len(fed[0]))
        if fork.failure is None:
            try:
                fork.audit()
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)


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
    reading: CompressedPrompt,
    continuations: Sequence[Sequence[int]],
    *,
    batch_rows: int = 32,
) -> dict[str, list[Scored]]:
    """Compute the log-probabilities of every token of every continuation under every method.

    Each continuation is fed to a copy of the fork; a single one is fed to the fork itself.

    Args:
        continuations: the token ids of each continuation.
        batch_rows: how many pairs of a method and a continuation are fed together, which changes results
            only in their last digits.

    Returns:
        by label the scores, in the order of `continuations`.
    """
    results: dict[str, list[Scored]] = {fork.label: [] for fork in reading.forks}
    pairs = [
        (fork, tokens) for fork in reading.forks if fork.failure is None for tokens in continuations
    ]
    for begin in range(0, len(pairs), batch_rows):
        batch = [
            (fork if len(continuations) == 1 else fork.clone(), tokens)
            for fork, tokens in pairs[begin : begin + batch_rows]
        ]
        fed = feed_continuations(model, reading, batch)
        logprobs = log_probabilities([tokens for _, tokens in batch], fed)
        for (fork, tokens), row in zip(batch, logprobs, strict=True):
            results[fork.label].append(scored_of(row[: len(tokens)], fork.failure))
    for fork in reading.forks:
        if not results[fork.label]:  # the method failed while it compressed
            results[fork.label] = [Scored([], [], fork.failure)] * len(continuations)
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
    """The score of a row [tokens, 2] of `log_probabilities`; if the fork failed, or a log-probability
    is NaN, that failure."""
    not_numbers = row[:, 0].isnan().nonzero()
    if failure is None and len(not_numbers):
        failure = NonFiniteLogits(int(not_numbers[0]) + 1)
    if failure is not None:
        return Scored([], [], failure)
    return Scored(row[:, 0].tolist(), row[:, 1].bool().tolist())


@torch.inference_mode()
def greedy_continuation(
    model: PreTrainedModel, reading: CompressedPrompt, fork: Fork, stopping: Stopping
) -> list[int]:
    """Decode a copy of the fork greedily, and return the answer's token ids, the ending token included.

    Raises:
        Exception: what stopped the copy.
    """
    twin = fork.clone()
    row = DecodingRow(twin, stopping)
    feed_questions(model, [row], [list(reading.lead)])
    decode_rows(model, [row], StepGraphs())
    if twin.failure is not None:
        raise twin.failure
    return row.chosen
