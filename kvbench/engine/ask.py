"""Everything that is asked of a compressed prompt: one way in (`read`), one way on
(`kvbench.engine.decode.feed`), and two ways to judge: `answer` decodes, `score` takes given tokens.
Jobs, `compare`, ``session.read().ask()``, probes and lm-eval come through here.

`held_back` tokens at a prompt's end are not compressed but fed to every row's own cache before anything
is judged. With none, the first new token of an answer without a question is the exact prefill's
(``compress_after=prompt``); with one, every token that is judged comes from the compressed cache
(``all_but_last``). A context is read whole, and what is asked about it is a `Question`'s tokens
(``context``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvbench.engine import captured
from kvbench.engine.answer import GREEDY, Answer, NonFiniteLogits, Sampling, Stopping
from kvbench.engine.decode import Turn, draws_of, fail_late, feed, pick, refuse_crossing, take
from kvbench.engine.device import input_device, total_bytes, used_bytes
from kvbench.engine.prefill import Reading, prefill
from kvbench.engine.rotary import crossing, shares_table
from kvbench.engine.row import Row
from kvbench.engine.steps import Steps
from kvbench.errors import UserError
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.methods.exact import Exact
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

CHUNK_LOGITS = 2**24
"""How many logits are computed at a time, whatever the length of a continuation: 64 MB in float32."""


@dataclass(frozen=True)
class Question:
    """One question about a compressed prompt, or about what was said of it before.

    Attributes:
        ids: the tokens that are fed after the prompt; empty if the prompt ends with the question.
        stopping: when the answer ends.
        name: seeds the draws of sampled tokens, together with the job's seed and `sample`.
        sample: the number of the sample, where a question is answered several times.
        after: the row's answer to the question before; None for a first question.
    """

    ids: Sequence[int]
    stopping: Stopping
    name: str = ""
    sample: int = 0
    after: Answer | None = None


Conversations = Sequence[Sequence[Question]]
"""Conversations about one prompt. Each continues a copy of the compressed caches, and each of its
questions follows the answer to the question before it."""


def room_of(conversations: Conversations) -> int:
    """How many tokens the longest of these conversations feeds to a row, at most."""
    return max(
        sum(len(asked.ids) + asked.stopping.max_new_tokens for asked in questions)
        for questions in conversations
    )


def read(
    model: PreTrainedModel,
    ids: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    *,
    seed: int,
    name: str,
    held_back: int = 0,
    room: int = 0,
    encoder: PromptEncoder | None = None,
) -> Reading:
    """Prefill a prompt exactly, and compress all but its last `held_back` tokens by every method.

    Args:
        methods: by label, each with its budget; each gets a row.
        name: seeds the methods' draws, together with seed and layer.
        room: how many tokens will be fed after the prompt; memory for them is reserved.
        encoder: see `kvbench.engine.prefill.prefill`.

    Raises:
        UserError: an empty prompt. What stops a prefill for all methods, such as keys that are not
            finite, or no memory, is raised, too.
    """
    if not ids:
        raise UserError("the prompt has no tokens; allowed: at least one")
    begin_s = time.perf_counter()
    rows = []
    for label, (method, budget) in methods.items():
        # Where nothing is left to compress, every row is exact.
        method = method if held_back < len(ids) else Exact()
        rows.append(Row(label, method, budget, seed, name, held_back + room))
    reading = prefill(model, ids, rows, held_back=held_back, encoder=encoder)
    reading.spent_s = time.perf_counter() - begin_s
    return reading


@torch.inference_mode()
def answer(
    model: PreTrainedModel,
    asked: Sequence[tuple[Reading, Row, Question]],
    *,
    seed: int = 0,
    sampling: Sampling = GREEDY,
    steps: Steps | None = None,
) -> list[Answer]:
    """Answer a question by each of these rows, all rows together. An answer does not depend on the other
    rows.

    Args:
        steps: how decode steps run, with those captured so far; None for new ones. The tokens do not
            depend on it.

    Returns:
        the answers. A row that failed has its `Answer.failure`, and does not stop the others.
    """
    steps = steps or Steps()
    begin_s = time.perf_counter()
    turns = []
    for reading, row, question in asked:
        before, stopping = question.after, question.stopping
        said = [] if before is None else before.chosen
        # The last token of the answer before has not been fed yet. An ending token never is.
        unread = said[-1:] if before is not None and len(before.tokens) == len(said) else []
        ids = [*(() if row.fed else reading.lead), *unread, *question.ids]
        history = [*(reading.ids if before is None else before.before), *said[:-1], *ids]
        most = stopping.max_new_tokens
        draws = sampling.uniforms(seed, question.name, question.sample, most)
        own = Answer(stopping, sampling, draws, history, begin_s - reading.spent_s)
        turn = Turn(row, own, ids)
        turns.append(turn)
        if not ids and turn.running:
            logits = exact_logits(reading)
            take([turn], pick([turn], logits, draws_of([turn], logits.device)), time.perf_counter())
    _advance(model, [turn for turn in turns if turn.running and not turn.answer.chosen])
    for turn in turns:
        if turn.running:  # of the tokens to be chosen, the last is not fed
            refuse_crossing(model, turn.row, turn.answer.steps_left - 1)
    if captured.uses_kernels(input_device(model)):
        captured.decode(model, [turn for turn in turns if turn.running], steps)
    step_model = steps.model_for_steps(model)
    while True:
        fail_late(turns)
        running = [turn for turn in turns if turn.running]
        if not running:
            break
        _advance(step_model, running)
    prompts = len({id(reading) for reading, _, _ in asked})
    for turn in turns:
        turn.row.try_audit()
        own = turn.answer
        own.failure, cost = turn.row.failure, turn.row.cost()
        new = len(own.chosen)
        own.cost = replace(cost, decode_s=own.decode_s, new_tokens=new, batch=prompts)
    return [turn.answer for turn in turns]


def _advance(model: PreTrainedModel, turns: Sequence[Turn]) -> None:
    """Feed each row what it has not read, and add to its answer the token that follows."""
    rows, unread = [turn.row for turn in turns], [turn.unread for turn in turns]
    begin_s = time.perf_counter()
    for places, logits in feed(model, rows, unread):
        fed = [turns[place] for place in places]
        take(fed, pick(fed, logits[:, -1], draws_of(fed, logits.device)), begin_s)
        begin_s = time.perf_counter()


def exact_logits(reading: Reading) -> Tensor:
    """The logits [1, vocab] after a prompt of which no token was held back, and which predict the first
    token: those of the exact prefill, under every method."""
    assert not reading.lead
    assert reading.logits is not None
    return reading.logits[None]


def answer_each(
    model: PreTrainedModel,
    reading: Reading,
    question: Question,
    *,
    seed: int = 0,
    steps: Steps | None = None,
) -> dict[str, Answer]:
    """`answer` of one question by every row of a reading, greedily: by label."""
    asked = [(reading, row, question) for row in reading.rows]
    answers = answer(model, asked, seed=seed, steps=steps)
    return {row.label: own for row, own in zip(reading.rows, answers, strict=True)}


def converse(
    model: PreTrainedModel,
    talks: Sequence[tuple[Reading, Conversations]],
    *,
    seed: int,
    sampling: Sampling = GREEDY,
    steps: Steps | None = None,
) -> list[dict[str, list[Answer]]]:
    """Hold all conversations about several prompts by every method.

    As many conversations decode together as their copies of the caches fit into half of the free
    memory; no answer depends on that.

    Returns:
        for each prompt and label the answers to all questions, in the order of its conversations.
    """
    steps = steps or Steps()
    readings = [reading for reading, _ in talks]
    most = max(len(conversations) for _, conversations in talks)
    rows = [row for reading in readings for row in reading.rows]
    at_once = copies_at_once(rows, most, input_device(model))
    answers = [{row.label: list[Answer]() for row in reading.rows} for reading in readings]
    for first in range(0, most, at_once):
        parts = [
            (place, questions, row.clone() if len(conversations) > 1 else row, list[Answer]())
            for place, (reading, conversations) in enumerate(talks)
            for questions in conversations[first : first + at_once]
            for row in reading.rows
        ]
        for turn in range(max((len(questions) for _, questions, _, _ in parts), default=0)):
            now = [part for part in parts if turn < len(part[1])]
            begin_s = time.perf_counter()
            asked = [
                (readings[place], row, replace(questions[turn], after=own[-1] if own else None))
                for place, questions, row, own in now
            ]
            found = answer(model, asked, seed=seed, sampling=sampling, steps=steps)
            for (*_, own), one in zip(now, found, strict=True):
                own.append(one)
            for reading in readings:
                reading.spent_s += time.perf_counter() - begin_s
        for place, _, row, own in parts:
            answers[place][row.label] += own
    return answers


def copies_at_once(rows: Sequence[Row], most: int, device: torch.device) -> int:
    """How many copies of all these rows fit into half of the device's free memory: 1 to `most`, and
    `most` where the free memory is not known."""
    if most == 1:
        return 1
    total, used = total_bytes(device), used_bytes(device)
    caches = (cache for row in rows for own in row.caches.values() for cache in own)
    copy = sum(cache.reserved_bytes() for cache in caches)
    if total is None or used is None or not copy:
        return most
    return max(1, min(most, (total - used) // (2 * copy)))


# --- given tokens ---------------------------------------------------------------------------------


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


Logits = Iterator[tuple[int, Tensor]]
"""An iterator of pairs: a place in the continuation, and logits [rows, tokens, vocab] in the model's
dtype that predict the continuation's tokens from that place on. The caller reads it to the end, since
the rows are audited after the last pair."""


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
    longest = len(reading.lead) + max(map(len, continuations), default=1) - 1
    if any(crossing(model.config, row.tokens, longest, row.table_of) for row, _ in pairs[:1]):
        batch_rows = 1  # a continuation that crosses fails alone: none is padded to its length
    for begin in range(0, len(pairs), batch_rows):
        batch = [
            (row if len(continuations) == 1 else row.clone(), tokens)
            for row, tokens in pairs[begin : begin + batch_rows]
        ]
        fed = continuation_logits(model, reading, batch)
        logprobs = log_probabilities([tokens for _, tokens in batch], fed)
        for (row, tokens), of_row in zip(batch, logprobs, strict=True):
            results[row.label].append(scored_of(of_row[: len(tokens)], row.failure))
    for row in reading.rows:
        if not results[row.label]:  # the method failed while it compressed
            results[row.label] = [Scored([], [], row.failure)] * len(continuations)
    return results


@torch.inference_mode()
def continuation_logits(
    model: PreTrainedModel, reading: Reading, batch: Sequence[tuple[Row, Sequence[int]]]
) -> Logits:
    """Feed rows of one reading a continuation each, all in one batch, and yield the logits that predict
    its tokens.

    The tokens held back come first. Shorter continuations are padded to the longest by repeating their
    last token, which changes no logits before it. (With Dynamic NTK it would, and tokens are fed one by
    one.) If a row fails, its logits are to be ignored; the others go on.

    Args:
        batch: pairs of a row and its continuation's token ids, at least one, the last of which is not
            fed.
    """
    rows = [row for row, _ in batch]
    longest = max(len(tokens) for _, tokens in batch)
    fed = [[*reading.lead, *repeat_last(tokens, longest)[:-1]] for _, tokens in batch]
    first = 0  # the place in the continuation that the first pass predicts first
    if not reading.lead:  # a prompt of one token, which every row holds exactly
        first = 1
        yield 0, exact_logits(reading).expand(len(rows), 1, -1)
    for row in rows:
        refuse_crossing(model, row, len(fed[0]))
    parts = chunks(len(rows), longest - first, vocabulary(model))
    if not shares_table(model.config, reading.n + len(fed[0])):
        parts = (range(i, i + 1) for i in range(longest - first))
    begin = 0
    for part in parts:
        end = max(0, len(reading.lead) - 1) + part.stop
        tokens = [own[begin:end] for own in fed]
        # All rows are equally long, so that the places of the passes are in order.
        yield (
            first + part.start,
            torch.cat([own for _, own in feed(model, rows, tokens, len(part))]),
        )
        begin = end
    for row in rows:
        row.try_audit()


def chunks(rows: int, tokens: int, vocab: int) -> Iterator[range]:
    """Cut the places 0 .. tokens - 1 into runs that `CHUNK_LOGITS` allows."""
    step = max(1, CHUNK_LOGITS // (rows * vocab))
    for begin in range(0, tokens, step):
        yield range(begin, min(tokens, begin + step))


def vocabulary(model: PreTrainedModel) -> int:
    """The size of the model's vocabulary, which is the number of logits per row and token."""
    return int(model.config.get_text_config().vocab_size)


def repeat_last(tokens: Sequence[int], length: int) -> list[int]:
    """Pad `tokens` to `length` by repeating the last one."""
    missing = length - len(tokens)
    return list(tokens) + [tokens[-1]] * missing


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
