"""What the engine is asked to generate, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.engine.stopping import Stopping
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.tasks.base import PromptEncoder


@dataclass
class Generation:
    """What one fork produced, and what it cost.

    Attributes:
        tokens: new tokens, without the ending token.
        new_tokens: tokens produced, the ending token included.
        entries: prompt entries per layer and KV head after compression, mean and maximum.
        cache_bytes, exact_bytes: after compression, and of the exact cache at the same point.
        cache_bytes_end: after the last token.
        prefill_s, compress_s: seconds of this prompt's own prefill, and of this fork's compression;
            the same for all questions that are asked of one compressed prompt.
        decode_s: seconds of the decode steps this fork took part in, divided by the rows of each
            (decoding is shared by methods and prompts; the throughput probe measures methods alone).
        batch: prompts that were decoded together.
        failure: what stopped the fork, None if it ended well.
        budget_preset: the preset that holds more than the budget, None where none does.
        kept: what was held of the prompt after compression (`kvbench.engine.kept.strips_of`), where it
            was asked for.
    """

    tokens: list[int]
    new_tokens: int
    entries: dict[str, float] | None
    cache_bytes: int | None
    cache_bytes_end: int | None
    exact_bytes: int
    compressed: bool
    prefill_s: float
    compress_s: float
    decode_s: float
    failure: Exception | None
    batch: int = 1
    budget_preset: str | None = None
    kept: dict[str, Any] | None = None


@dataclass(frozen=True)
class Question:
    """One thing asked of a prompt that has been compressed.

    Attributes:
        ids: what is fed after the prompt; none where the prompt itself ends with the question.
        stopping: when the answer ends.
        name: what the draws of its tokens depend on beside the seed, where tokens are sampled.
        sample: which of several samples it is; each has draws of its own.
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
        example_id: what the methods' draws depend on, beside seed and layer.
        room: new tokens to reserve memory for, None: `stopping.max_new_tokens`.
        conversations: what is asked once context and question have been read and compressed, each
            conversation of a copy of that cache, and within one each question after the answer to
            the one before. None: one question, where `run_batch` says it is read.
        note_kept: whether to say what every method kept of it.
        encoder, inputs: see `kvbench.engine.prefill.prefill`.
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
    inputs: Mapping[str, Any] = field(default_factory=dict)
