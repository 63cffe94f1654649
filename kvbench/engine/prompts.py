"""Inputs and results of the engine: prompts, questions, generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.engine.fork import Cost
from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.tasks.base import PromptEncoder


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
        room: new tokens to reserve memory for; None: `stopping.max_new_tokens`.
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

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return [*self.context_ids, *self.question_ids]
