"""What one job runs on: a model and its tokenizer, loaded when first needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from kvbench.engine.graphs import StepGraphs, check_decode
from kvbench.engine.loading import (
    Model,
    ModelSpec,
    Tokenizer,
    end_token_ids,
    load_config,
    load_model,
    load_tokenizer,
    prompt_encoder,
    with_model_facts,
)
from kvbench.engine.sampling import GREEDY, Sampling
from kvbench.engine.stopping import Stopping
from kvbench.errors.options import check_options
from kvbench.kv import KVError
from kvbench.tasks.base import Example, PromptEncoder


@dataclass(frozen=True)
class Session:
    """Model, device and the settings every example of a job shares.

    Attributes:
        seed: of the methods' draws (and of random weights).
        compress_after: "prompt" or "context"; see `kvbench.engine.generate.run_batch`.
        decode: how decode steps run, see `kvbench.engine.graphs`; changes no answer.
        sampling: how the tokens of an answer are chosen, and how many answers are given.
        example_timeout: seconds; an example that takes longer is recorded as a timeout; None: no limit.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    compress_after: Literal["prompt", "context"] = "prompt"
    example_timeout: float | None = None
    decode: str = "eager"
    sampling: Sampling = GREEDY

    def __post_init__(self) -> None:
        check_options(self, "", KVError)
        check_decode(self.decode, self.device)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return load_tokenizer(self.spec)

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Text to token ids, with what this model puts around a prompt."""
        load_config(self.spec)  # before anything is fetched for a model that cannot be run
        encoder = prompt_encoder(self.tokenizer, self.spec)
        return with_model_facts(encoder, self.tokenizer, self.spec)

    @cached_property
    def model(self) -> Model:
        """The model, ready for kvbench's attention."""
        return load_model(self.spec, device=self.device, dtype=self.dtype, seed=self.seed)

    @cached_property
    def graphs(self) -> StepGraphs:
        """How the model's decode steps run."""
        return StepGraphs(self.decode)

    @cached_property
    def warmed(self) -> set[str]:
        """Methods whose kernels have been launched, by label; see `kvbench.run.plan.TaskPlan`."""
        return set()

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a generation."""
        return end_token_ids(self.model, self.tokenizer) | self.encoder.end_ids

    def stopping(self, example: Example, answers: int = 1) -> Stopping:
        """When the answer to an example ends, for this model.

        Args:
            answers: examples whose time it may take.
        """
        seconds = self.example_timeout
        return Stopping(
            example.max_new_tokens,
            self.end_ids if example.end_ids is None else example.end_ids,
            example.stop,
            self.encoder.decode,
            timeout_s=None if seconds is None else seconds * answers,
            may_be_empty=example.may_be_empty,
            settled=example.settled,
        )
