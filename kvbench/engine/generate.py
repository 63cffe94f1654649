"""Generation for one prompt or several, with one question about each or many, by all methods at once.

Every prompt is prefilled exactly, in a pass of its own, and compressed once for all its questions. Then
the rows of all prompts decode together. An answer does not depend on which other prompts are in the
batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvbench.engine import memory
from kvbench.engine.answer import GREEDY, Answer, Sampling, Stopping
from kvbench.engine.decode import decode, feed_questions, pick_first
from kvbench.engine.device import input_device
from kvbench.engine.kept import strips_of
from kvbench.engine.prefill import Reading, prefill
from kvbench.engine.row import Row, rows_of
from kvbench.engine.steps import Steps
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Question:
    """One question about a compressed prompt.

    Attributes:
        ids: the tokens that are fed after the prompt; empty if the prompt ends with the question.
        stopping: when the answer ends.
        name: seeds the draws of sampled tokens, together with the job's seed and `sample`.
        sample: the number of the sample, where a question is answered several times.
    """

    ids: Sequence[int]
    stopping: Stopping
    name: str = ""
    sample: int = 0


@dataclass(frozen=True)
class Prompt:
    """What is prefilled and compressed once, and asked about.

    Attributes:
        ids: the token ids.
        held_back: how many of them, the last ones, are not compressed but fed to every cache before
            anything is asked (`kvbench.engine.prefill.prefill`). Where none are and there is no question
            either, the first new token is the exact prefill's.
        methods: the methods by label, each with its budget; each gets a row.
        example_id: seeds the methods' draws, together with seed and layer.
        conversations: each continues a copy of the compressed caches, and each of its questions follows
            the answer to the question before it.
        room: the least number of new tokens per answer to reserve memory for.
        note_kept: whether the answers report how much of each part of the prompt was held.
        encoder: see `kvbench.engine.prefill.prefill`.
    """

    ids: Sequence[int]
    methods: Mapping[str, tuple[Method, Budget]]
    example_id: str
    conversations: Sequence[Sequence[Question]]
    room: int = 0
    held_back: int = 0
    note_kept: bool = False
    encoder: PromptEncoder | None = None

    @classmethod
    def of(
        cls,
        context_ids: Sequence[int],
        question_ids: Sequence[int],
        methods: Mapping[str, tuple[Method, Budget]],
        stopping: Stopping,
        example_id: str,
        *,
        compress_after: str = "prompt",
        room: int = 0,
        encoder: PromptEncoder | None = None,
    ) -> Prompt:
        """A prompt with one question. With `compress_after` ``all_but_last`` context and question are
        prefilled and compressed without the last token, which is fed to every row; with ``context`` the
        context alone, and the question is fed to every row; with ``prompt`` (the papers' protocol) all
        of it, so that the first new token comes from exact attention."""
        ids, question = [*context_ids, *question_ids], Question((), stopping)
        if compress_after == "context":
            ids, question = list(context_ids), Question(question_ids, stopping)
        held_back = int(compress_after == "all_but_last")
        return cls(ids, methods, example_id, [[question]], room, held_back, encoder=encoder)


class Talk(NamedTuple):
    """A row's part in one conversation about the prompt with the number `place`, and the answers so
    far."""

    place: int
    questions: Sequence[Question]
    row: Row
    answers: list[Answer]


@torch.inference_mode()
def generate(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    sampling: Sampling = GREEDY,
    steps: Steps | None = None,
) -> list[dict[str, list[Answer]]]:
    """Hold all conversations about several prompts by every method.

    As many conversations decode together as their copies of the caches fit into half of the free
    memory; no answer depends on that.

    Args:
        steps: how decode steps run, with those captured so far; None for new ones. The tokens do not
            depend on it.

    Returns:
        for each prompt and label the answers to all questions, in the order of `Prompt.conversations`.
        A row that failed has its `Answer.failure`, and does not stop the others.

    Raises:
        Exception: what stops a prefill for all methods, such as keys that are not finite, or no memory.
    """
    steps = steps or Steps()
    readings: list[Reading] = []
    spent_s: list[float] = []  # by prompt: its own prefill and questions, and all decoding
    for prompt in prompts:
        begin_s = time.perf_counter()
        readings.append(_read(model, prompt, seed))
        spent_s.append(time.perf_counter() - begin_s)
    most = max(len(prompt.conversations) for prompt in prompts)
    rows = [row for reading in readings for row in reading.rows]
    at_once = copies_at_once(rows, most, input_device(model))
    answers: list[dict[str, list[Answer]]] = [
        {label: [] for label in prompt.methods} for prompt in prompts
    ]
    for first in range(0, most, at_once):
        talks = [
            Talk(place, questions, row.clone() if len(prompt.conversations) > 1 else row, [])
            for place, (prompt, reading) in enumerate(zip(prompts, readings, strict=True))
            for questions in prompt.conversations[first : first + at_once]
            for row in reading.rows
        ]
        for turn in range(max((len(talk.questions) for talk in talks), default=0)):
            asked = [talk for talk in talks if turn < len(talk.questions)]
            for place, reading in enumerate(readings):
                begin_s = time.perf_counter()
                own = [(talk.row, talk.questions[turn]) for talk in asked if talk.place == place]
                _ask(model, reading, own, seed, sampling)
                spent_s[place] += time.perf_counter() - begin_s
                for row, _ in own:
                    row.spent_s = spent_s[place]
            begin_s = time.perf_counter()
            # A row without a first token has failed.
            decode(model, [talk.row for talk in asked if talk.row.answer.chosen], steps)
            decoding_s = time.perf_counter() - begin_s
            spent_s = [seconds + decoding_s for seconds in spent_s]
            for talk in asked:
                talk.answers.append(talk.row.finish(batch=len(prompts)))
        for talk in talks:
            answers[talk.place][talk.row.label] += talk.answers
    return answers


def generate_each(
    model: PreTrainedModel, prompts: Sequence[Prompt], *, seed: int, steps: Steps | None = None
) -> list[dict[str, Answer]]:
    """`generate` greedily for prompts with one question each: for each prompt one answer per label."""
    by_prompt = generate(model, prompts, seed=seed, steps=steps)
    return [{label: only for label, (only,) in answers.items()} for answers in by_prompt]


def generate_one(
    model: PreTrainedModel,
    context_ids: Sequence[int],
    question_ids: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    stopping: Stopping,
    *,
    seed: int,
    example_id: str,
    compress_after: str = "prompt",
    encoder: PromptEncoder | None = None,
) -> dict[str, Answer]:
    """Answer one prompt greedily by every method (`Prompt.of`): one answer per label."""
    asked = Prompt.of(
        context_ids,
        question_ids,
        methods,
        stopping,
        example_id,
        compress_after=compress_after,
        encoder=encoder,
    )
    return generate_each(model, [asked], seed=seed)[0]


def copies_at_once(rows: Sequence[Row], most: int, device: torch.device) -> int:
    """How many copies of all these rows fit into half of the device's free memory: 1 to `most`, and
    `most` where the free memory is not known."""
    if most == 1:
        return 1
    total, used = memory.total_bytes(device), memory.used_bytes(device)
    caches = (cache for row in rows for own in row.caches.values() for cache in own)
    copy = sum(cache.reserved_bytes() for cache in caches)
    if total is None or used is None or not copy:
        return most
    return max(1, min(most, (total - used) // (2 * copy)))


def _read(model: PreTrainedModel, prompt: Prompt, seed: int) -> Reading:
    """Prefill one prompt, and compress it by every method."""
    room = max(
        sum(len(asked.ids) + max(prompt.room, asked.stopping.max_new_tokens) for asked in questions)
        for questions in prompt.conversations
    )
    rows = rows_of(prompt.methods, len(prompt.ids), prompt.held_back, seed, prompt.example_id, room)
    held_back = prompt.held_back
    reading = prefill(model, prompt.ids, rows, held_back=held_back, encoder=prompt.encoder)
    for row in rows:
        if prompt.note_kept and row.failure is None:
            try:
                row.kept = strips_of(row, reading.n)
            except KVError as failure:  # the method holds positions that the prompt does not have
                row.fail(failure)
    return reading


def _ask(
    model: PreTrainedModel,
    reading: Reading,
    asked: Sequence[tuple[Row, Question]],
    seed: int,
    sampling: Sampling,
) -> None:
    """Begin the answers of rows of one prompt to a question each: feed the question, and choose the
    first token of the answer."""
    rows_to_feed: list[Row] = []
    ids_to_feed: list[list[int]] = []
    for row, question in asked:
        # The last token of the answer before has not been fed yet. An ending token never is.
        before = row.answer
        unread = [token for token in before.chosen[-1:] if token not in before.stopping.end_ids]
        if not row.fed:
            unread = [*reading.lead, *unread]
        uniforms = sampling.uniforms(
            seed, question.name, question.sample, question.stopping.max_new_tokens
        )
        ids = [*unread, *question.ids]
        so_far = [*(before.before or reading.ids), *before.chosen[:-1], *ids]
        row.begin_answer(question.stopping, sampling, uniforms, so_far)
        if row.failure is None and ids:
            rows_to_feed.append(row)
            ids_to_feed.append(ids)
        elif row.failure is None:
            # Nothing was held back and nothing is asked: the prefill's logits predict the first token.
            assert reading.logits is not None
            tokens, finite = pick_first([row], reading.logits[None]).tolist()
            row.take(tokens[0], bool(finite[0]))
    if rows_to_feed:
        feed_questions(model, rows_to_feed, ids_to_feed)
