"""Generation for one prompt or several, with one question about each or many, by all methods at once.

Every prompt is prefilled exactly, in a pass of its own, and compressed once for all its questions. Then
the forks of all prompts decode together; each is a batch row with its own cache. An answer does not
depend on which other prompts are in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from kvbench.engine.fork import Fork, copies_at_once
from kvbench.engine.graphs import StepGraphs
from kvbench.engine.kept import strips_of
from kvbench.engine.prefill import Prefill, input_device, prefill
from kvbench.engine.rows import DecodingRow, Generation, decode_rows, feed_questions, pick_first
from kvbench.engine.sampling import GREEDY, Sampling
from kvbench.engine.stopping import Stopping
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
    """One prompt of a batch.

    Attributes:
        context_ids, question_ids: the token ids of the prompt, which is their concatenation.
        methods: the methods by label, each with its budget; each gets a fork.
        stopping: when the answer to the prompt's own question ends (`run_batch`).
        example_id: seeds the methods' draws, together with seed and layer.
        room: the least number of new tokens per answer to reserve memory for; None for the answers'
            limits alone.
        conversations: the conversations about the compressed prompt. Each one continues a copy of the
            compressed cache, and each of its questions follows the answer to the question before it.
            `run_batch` sets them.
        note_kept: whether the answers report how much of each part of the prompt was held.
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
    """Answer one prompt greedily by every method: `run_batch` for a single prompt.

    Returns:
        one `Generation` per label. A fork that failed has its `Generation.failure`, and does not stop
        the others.
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
    """Answer several prompts greedily by every method. The prompts may have different lengths.

    Args:
        compress_after: ``prompt`` (the papers' protocol) prefills and compresses context and question,
            so that the first new token comes from exact attention; ``context`` prefills and compresses
            the context alone, and then feeds the question's tokens to every fork.
        graphs: how decode steps run, with the steps captured so far; None for new ones. The tokens do
            not depend on it.

    Returns:
        for each prompt one `Generation` per label; see `run_conversations`.
    """
    with_questions = []
    for prompt in prompts:
        question = Question((), prompt.stopping)
        compressed_question_ids = prompt.question_ids
        if compress_after == "context":
            question = Question(prompt.question_ids, prompt.stopping)
            compressed_question_ids = ()
        with_questions.append(
            replace(prompt, question_ids=compressed_question_ids, conversations=[[question]])
        )
    answers = run_conversations(model, with_questions, seed=seed, graphs=graphs)
    return [{label: only for label, (only,) in by_label.items()} for by_label in answers]


@torch.inference_mode()
def run_conversations(
    model: PreTrainedModel,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    sampling: Sampling = GREEDY,
    graphs: StepGraphs | None = None,
) -> list[dict[str, list[Generation]]]:
    """Hold all conversations about several prompts by every method.

    Each prompt is prefilled and compressed once; every conversation continues a copy of the compressed
    cache. As many conversations decode together as their copies fit into half of the free memory; no
    answer depends on that.

    Args:
        sampling: how tokens are chosen.
        graphs: see `run_batch`.

    Returns:
        for each prompt and label the answers to all questions, in the order of `Prompt.conversations`.
        A fork that failed has its `Generation.failure`, and does not stop the others.

    Raises:
        Exception: what stops a prefill for all methods, such as keys that are not finite, or no memory.
    """
    readings = [_read(model, prompt, seed) for prompt in prompts]
    most = max(len(prompt.conversations) for prompt in prompts)
    forks = [fork for reading in readings for fork in reading.forks]
    at_once = copies_at_once(forks, most, input_device(model))
    conversations: list[_Conversation] = []
    for first in range(0, most, at_once):
        together = [
            _Conversation(reading, questions, reading.row(fork), [])
            for reading in readings
            for questions in reading.prompt.conversations[first : first + at_once]
            for fork in reading.forks
        ]
        for turn in range(
            max((len(conversation.questions) for conversation in together), default=0)
        ):
            with_question = [
                conversation for conversation in together if turn < len(conversation.questions)
            ]
            _take_turn(model, readings, with_question, turn, seed, sampling, graphs or StepGraphs())
        conversations += together
    by_prompt: list[dict[str, list[Generation]]] = []
    for reading in readings:
        answers: dict[str, list[Generation]] = {label: [] for label in reading.prompt.methods}
        for conversation in conversations:
            if conversation.reading is reading:
                answers[conversation.row.fork.label] += conversation.answers
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
    """Ask the question number `turn` of each conversation, and decode all answers together."""
    for reading in readings:
        begin_s = time.perf_counter()
        about_prompt = [
            conversation for conversation in conversations if conversation.reading is reading
        ]
        _ask(model, about_prompt, turn, seed, sampling)
        reading.spent_s += time.perf_counter() - begin_s
        for conversation in about_prompt:
            conversation.row.spent_s = reading.spent_s
    begin_s = time.perf_counter()
    # A row without a first token has failed.
    rows = [conversation.row for conversation in conversations if conversation.row.chosen]
    decode_rows(model, rows, graphs)
    for reading in readings:
        reading.spent_s += time.perf_counter() - begin_s
    for conversation in conversations:
        kept = conversation.reading.kept.get(conversation.row.fork.label)
        answer = conversation.row.finish(batch=len(readings), kept=kept)
        conversation.answers.append(answer)


@dataclass
class _Reading:
    """A prompt that has been prefilled, and compressed by every method.

    Attributes:
        start: the result of the prefill.
        spent_s: the wall-clock seconds that this prompt has taken so far: its own prefill and questions,
            and the decoding of all prompts of the batch.
        kept: by label, how much of each part of the prompt the method holds (`strips_of`), if
            `Prompt.note_kept`.
    """

    prompt: Prompt
    forks: list[Fork]
    start: Prefill
    spent_s: float
    kept: dict[str, dict[str, Any]]

    def row(self, fork: Fork) -> DecodingRow:
        """Make the row in which a fork begins a conversation. It decodes with a copy of the fork, or
        with the fork itself where there is a single conversation."""
        if len(self.prompt.conversations) > 1:
            fork = fork.clone()
        return DecodingRow(fork, self.prompt.stopping, self.start.prefill_s)


@dataclass
class _Conversation:
    """One method's part in one conversation.

    Attributes:
        row: the batch row of the latest question.
        answers: the answers so far.
    """

    reading: _Reading
    questions: Sequence[Question]
    row: DecodingRow
    answers: list[Generation]


def _read(model: PreTrainedModel, prompt: Prompt, seed: int) -> _Reading:
    """Prefill one prompt, and compress it by every method."""
    begin_s = time.perf_counter()
    room = max(_room_for(questions, prompt.room or 0) for questions in prompt.conversations)
    forks = [
        Fork(label, method, budget, seed, prompt.example_id, room=room)
        for label, (method, budget) in prompt.methods.items()
    ]
    ids = [*prompt.context_ids, *prompt.question_ids]
    start = prefill(model, ids, forks, encoder=prompt.encoder)
    spent_s = time.perf_counter() - begin_s
    kept: dict[str, dict[str, Any]] = {}
    for fork in forks:
        if prompt.note_kept and fork.failure is None:
            try:
                kept[fork.label] = strips_of(fork, start.n, fork.compressible)
            except KVError as failure:  # the method holds positions that the prompt does not have
                fork.fail(failure)
    return _Reading(prompt, forks, start, spent_s, kept)


def _room_for(questions: Sequence[Question], least: int) -> int:
    """The largest number of tokens of a conversation: its questions, and for each answer its limit or
    `least`, if that is more."""
    return sum(
        len(question.ids) + max(least, question.stopping.max_new_tokens) for question in questions
    )


def _ask(
    model: PreTrainedModel,
    conversations: Sequence[_Conversation],
    turn: int,
    seed: int,
    sampling: Sampling,
) -> None:
    """Begin the rows of the questions number `turn`: feed each question to its fork, and choose the
    first token of the answer."""
    rows_to_feed: list[DecodingRow] = []
    ids_to_feed: list[list[int]] = []
    for conversation in conversations:
        question = conversation.questions[turn]
        before = conversation.row
        # The last token of the answer before has not been fed yet. An ending token never is.
        unread = [token for token in before.chosen[-1:] if token not in before.stopping.end_ids]
        uniforms = sampling.uniforms(
            seed, question.name, question.sample, question.stopping.max_new_tokens
        )
        row = DecodingRow(before.fork, question.stopping, before.prefill_s, sampling, uniforms)
        conversation.row = row
        ids = [*unread, *question.ids]
        if row.fork.failure is None and ids:
            rows_to_feed.append(row)
            ids_to_feed.append(ids)
        elif row.fork.failure is None:
            # The prompt ends with the question, so the prefill's logits predict the first token.
            tokens, finite = pick_first([row], conversation.reading.start.logits[None]).tolist()
            row.take(tokens[0], bool(finite[0]))
    if rows_to_feed:
        feed_questions(model, rows_to_feed, ids_to_feed)
