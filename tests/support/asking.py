"""Prompts with what is asked about each, for tests that ask several at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.answer import GREEDY, Answer, Sampling, Stopping
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.ask import Question, converse, read, room_of
from kvbench.engine.prefill import Reading
from kvbench.engine.steps import Steps
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.probes.fidelity import EXACT, Fidelity, fidelities_of
from kvbench.prompts import PromptEncoder

Methods = Mapping[str, tuple[Method, Budget]]


@dataclass(frozen=True)
class Prompt:
    """A prompt and the conversations about it (`converse`)."""

    ids: Sequence[int]
    methods: Methods
    example_id: str
    conversations: Sequence[Sequence[Question]]
    held_back: int = 0
    encoder: PromptEncoder | None = None

    @classmethod
    def of(
        cls,
        context_ids: Sequence[int],
        question_ids: Sequence[int],
        methods: Methods,
        stopping: Stopping,
        example_id: str,
        *,
        compress_after: str = "prompt",
        encoder: PromptEncoder | None = None,
    ) -> Prompt:
        """A prompt with one question, as a job with this `compress_after` asks it."""
        ids, question = [*context_ids, *question_ids], Question((), stopping)
        if compress_after == "context":
            ids, question = list(context_ids), Question(question_ids, stopping)
        held_back = int(compress_after == "all_but_last")
        return cls(ids, methods, example_id, [[question]], held_back, encoder)

    def read(self, model: Any, seed: int) -> Reading:
        room = room_of(self.conversations)
        how: Any = {"seed": seed, "held_back": self.held_back, "encoder": self.encoder}
        return read(model, self.ids, self.methods, name=self.example_id, room=room, **how)


def generate(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    seed: int,
    sampling: Sampling = GREEDY,
    steps: Steps | None = None,
) -> list[dict[str, list[Answer]]]:
    talks = [(prompt.read(model, seed), prompt.conversations) for prompt in prompts]
    return converse(model, talks, seed=seed, sampling=sampling, steps=steps)


def generate_each(
    model: Any, prompts: Sequence[Prompt], *, seed: int, steps: Steps | None = None
) -> list[dict[str, Answer]]:
    """For prompts with one question each."""
    by_prompt = generate(model, prompts, seed=seed, steps=steps)
    return [{label: only for label, (only,) in answers.items()} for answers in by_prompt]


def generate_one(
    model: Any,
    context_ids: Sequence[int],
    question_ids: Sequence[int],
    methods: Methods,
    stopping: Stopping,
    *,
    seed: int,
    example_id: str,
    **how: Any,
) -> dict[str, Answer]:
    asked = Prompt.of(context_ids, question_ids, methods, stopping, example_id, **how)
    return generate_each(model, [asked], seed=seed)[0]


def teacher_forced(
    model: Any, ids: Sequence[int], continuation: Sequence[int], methods: Methods, seed: int = 0
) -> dict[str, Fidelity]:
    """Every method against the exact cache on one continuation, all of the prompt but its last token
    compressed (`FidelityProbe`)."""
    how: Any = {"seed": seed, "name": "x", "held_back": 1, "room": len(continuation)}
    with kvbench_attention_on(model):
        reading = read(model, ids, {**EXACT, **methods}, **how)
        return fidelities_of(model, reading, continuation)
