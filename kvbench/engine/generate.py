"""Generation of many forks at once, of one prompt or of several, with one question each or many.

Every prompt is prefilled exactly, in a pass of its own, and compressed once for all its questions;
then the forks of all prompts decode together, one batch row each against its own cache. What a prompt
is answered does not depend on which others are in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from kvbench.engine.fork import Fork, copies_at_once
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.kept import strips_of
from kvbench.engine.prefill import Prefill, input_device, prefill
from kvbench.engine.rows import DecodingRow, Generation, decode_rows, feed_questions, picked
from kvbench.engine.sampling import GREEDY, Sampling
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder


@dataclass(frozen=True)
class Question:
    """One question about a compressed prompt.

    Attributes:
        ids: fed after the prompt; empty if the prompt itself ends with the question.
        stopping: when the answer ends.
        name: seeds the draws of sampled tokens, together with the job's seed.
        sample: its number among several samples; each has its own draws.
    """

    ids: Sequence[int]
    stopping: Stopping
    name: str = ""
    sample: int = 0


@dataclass(frozen=True)
class Prompt:
    """One prompt of a batch.

    Attributes:
        context_ids, question_ids: the prompt is their concatenation.
        methods: by label, each with its budget; one fork each.
        stopping: when its generations end.
        example_id: seeds the methods' draws, together with seed and layer.
        room: the number of new tokens to reserve memory for; None for `stopping.max_new_tokens`.
        conversations: asked once context and question have been read and compressed: each conversation
            continues a copy of that cache, and each of its questions follows the answer to the one
            before. Empty: one question, see `run_batch`.
        note_kept: whether to report what every method kept.
        encoder: see `kvbench.engine.prefill.prefill`.
    """

    context_ids: Sequence[int]
    question_ids: Sequence[int]
    methods: Mapping[str, tuple[Method, Budget]]
    stopping: Stopping
    example_id: str
    room: int | None = None
    conversations: Sequence[Sequence[Question]] = ()
    note_kept: bool = False
    encoder: PromptEncoder | None = None


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
    encoder: PromptEncoder | None = None,
) -> dict[str, Generation]:
    """One prompt: one exact prefill, every method's fork, greedy decoding of all forks together.

    See `run_batch`, of which this is the case of one prompt.

    Returns:
        One `Generation` per label; a fork that failed says so and stops nothing else.
    """
    prompt = Prompt(context_ids, question_ids, methods, stopping, example_id, encoder=encoder)
    return run_batch(model, [prompt], seed=seed, compress_after=compress_after)[0]


def run_batch(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    compress_after: str = "prompt",
    graphs: StepGraphs | None = None,
) -> list[dict[str, Generation]]:
    """Several prompts, of any lengths, each with the one question that it ends with, answered greedily.

    Args:
        compress_after: "prompt" (the papers' protocol: the question is in the prefill, so the first
            new token comes from exact attention) or "context" (the context is prefilled and
            compressed; the question's tokens then run through every fork).
        graphs: the captured decode steps; None makes new ones. Tokens are the same either way.

    Returns:
        For each prompt, one `Generation` per label; see `run_conversations`.
    """
    asked = []
    for prompt in prompts:
        after = prompt.question_ids if compress_after == "context" else ()
        before = () if compress_after == "context" else prompt.question_ids
        question = Question(after, prompt.stopping)
        asked.append(replace(prompt, question_ids=before, conversations=[[question]]))
    answers = run_conversations(model, asked, seed=seed, graphs=graphs)
    return [{label: of_label[0] for label, of_label in answer.items()} for answer in answers]


@torch.inference_mode()
def run_conversations(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    sampling: Sampling = GREEDY,
    graphs: StepGraphs | None = None,
) -> list[dict[str, list[Generation]]]:
    """Several prompts, each prefilled and compressed once, and all of its conversations, each from
    a copy of that one cache. Conversations decode in groups whose copies fill at most half of the free
    memory; no answer depends on the grouping.

    Args:
        sampling: how tokens are chosen.
        graphs: see `run_batch`.

    Returns:
        For each prompt and label, the answers to all questions in the order of
        `Prompt.conversations`; a fork that failed says so and stops nothing else. What stops a
        prefill as a whole (keys that are not finite, no memory) is raised.
    """
    readings = [_read(model, prompt, seed) for prompt in prompts]
    most = max(len(prompt.conversations) for prompt in prompts)
    forks = [fork for reading in readings for fork in reading.forks]
    at_once = copies_at_once(forks, most, input_device(model))
    conversations: list[_Conversation] = []
    for first in range(0, most, at_once):
        some = [
            _Conversation(reading, questions, reading.row(fork), [])
            for reading in readings
            for questions in reading.prompt.conversations[first : first + at_once]
            for fork in reading.forks
        ]
        for turn in range(max((len(talk.questions) for talk in some), default=0)):
            going_on = [talk for talk in some if turn < len(talk.questions)]
            _take_turn(model, readings, going_on, turn, seed, sampling, graphs or StepGraphs())
        conversations += some
    by_prompt: list[dict[str, list[Generation]]] = []
    for reading in readings:
        answers: dict[str, list[Generation]] = {label: [] for label in reading.prompt.methods}
        for talk in conversations:
            if talk.reading is reading:
                answers[talk.row.fork.label] += talk.answers
        by_prompt.append(answers)
    return by_prompt


def _take_turn(
    model: PreTrainedModel,
    readings: Sequence[_Reading],
    conversations: Sequence[_Conversation],
    turn: int,
    seed: int,
    sampling: Sampling,
    graphs: StepGraphs,
) -> None:
    """Ask one more question of each conversation, and decode all answers together."""
    for reading in readings:
        begun = time.perf_counter()
        about_prompt = [talk for talk in conversations if talk.reading is reading]
        _ask(model, about_prompt, turn, seed, sampling)
        reading.spent_s += time.perf_counter() - begun
        for talk in about_prompt:
            talk.row.spent_s = reading.spent_s
    begun = time.perf_counter()
    decode_rows(model, [talk.row for talk in conversations if talk.row.chosen], graphs)
    for reading in readings:
        reading.spent_s += time.perf_counter() - begun
    for talk in conversations:
        kept = talk.reading.kept.get(talk.row.fork.label)
        talk.answers.append(talk.row.finish(batch=len(readings), kept=kept))


@dataclass
class _Reading:
    """One prompt that has been read: prefilled, and compressed by every method.

    Attributes:
        start: what the prefill returned.
        spent_s: wall seconds that this prompt has taken so far. Seconds of decoding are every prompt's
            of the batch; those of other prompts' prefills and questions are left out.
        kept: which entries each method holds of the prompt (`strips_of`), where that is asked for.
    """

    prompt: Prompt
    forks: list[Fork]
    start: Prefill
    spent_s: float
    kept: dict[str, dict[str, Any]]

    def row(self, fork: Fork) -> DecodingRow:
        """The row with which a fork begins a conversation: with the fork itself where there is one
        conversation, else with a copy."""
        if len(self.prompt.conversations) > 1:
            fork = fork.clone()
        return DecodingRow(fork, self.prompt.stopping, self.start.prefill_s)


@dataclass
class _Conversation:
    """One method's part in one conversation.

    Attributes:
        row: the batch row of its latest question.
        answers: those to its questions so far.
    """

    reading: _Reading
    questions: Sequence[Question]
    row: DecodingRow
    answers: list[Generation]


def _read(model: PreTrainedModel, prompt: Prompt, seed: int) -> _Reading:
    """Prefill one prompt, and compress it by every method."""
    begun = time.perf_counter()
    room = max(_room_for(questions, prompt.room or 0) for questions in prompt.conversations)
    forks = [
        Fork(label, method, budget, seed, prompt.example_id, room=room)
        for label, (method, budget) in prompt.methods.items()
    ]
    ids = [*prompt.context_ids, *prompt.question_ids]
    start = prefill(model, ids, forks, encoder=prompt.encoder)
    spent_s = time.perf_counter() - begun
    kept = {
        fork.label: strips_of(fork, start.n, fork.compressible)
        for fork in forks
        if prompt.note_kept and fork.failure is None
    }
    return _Reading(prompt, forks, start, spent_s, kept)


def _room_for(questions: Sequence[Question], least: int) -> int:
    """New tokens of a conversation at most: its questions, and for each answer `least` or its limit."""
    return sum(
        len(question.ids) + max(least, question.stopping.max_new_tokens) for question in questions
    )


def _ask(
    model: PreTrainedModel,
    talks: Sequence[_Conversation],
    turn: int,
    seed: int,
    sampling: Sampling,
) -> None:
    """Feed one more question to each conversation, after its latest answer without the ending token;
    every row holds the first token of the new answer afterwards."""
    fed: list[DecodingRow] = []
    questions: list[list[int]] = []
    for talk in talks:
        question = talk.questions[turn]
        before = talk.row
        # The last token of an answer was chosen and not fed.
        unread = [token for token in before.chosen[-1:] if token not in before.stopping.end_ids]
        uniforms = sampling.uniforms(
            seed, question.name, question.sample, question.stopping.max_new_tokens
        )
        row = DecodingRow(before.fork, question.stopping, before.prefill_s, sampling, uniforms)
        talk.row = row
        ids = [*unread, *question.ids]
        if row.fork.failure is None and ids:
            fed.append(row)
            questions.append(ids)
        elif row.fork.failure is None:
            tokens, finite = picked([row], talk.reading.start.logits[None]).tolist()
            row.take(tokens[0], bool(finite[0]))
    if fed:
        feed_questions(model, fed, questions)
