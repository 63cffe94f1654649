"""What one job runs on: a model and its tokenizer, loaded when first needed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from shutil import which
from typing import Any, Literal

import torch

from kvbench.engine.graphs import StepGraphs, check_decode
from kvbench.engine.loading import Model, load_config, load_model
from kvbench.engine.model_spec import ModelSpec
from kvbench.engine.sampling import GREEDY, Sampling
from kvbench.engine.stopping import Stopping
from kvbench.engine.tokenizer import Tokenizer, end_token_ids, load_tokenizer, model_encoder
from kvbench.errors.options import check_options
from kvbench.kv import KVError
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example


@dataclass(frozen=True)
class Session:
    """The model, the device and the settings that every example of a job shares.

    Attributes:
        seed: seeds the methods' draws (and random weights).
        compress_after: "prompt" or "context"; see `kvbench.engine.generate.run_batch`.
        decode: how decode steps run, see `kvbench.engine.graphs`; "compiled" alone may round otherwise.
        sampling: how the tokens of an answer are chosen, and how many answers are given.
        example_timeout: seconds; an example that takes longer is recorded as a timeout; None: no limit.
        shared: tokenizers and models that the sessions of a process hand on, see `once`.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    compress_after: Literal["prompt", "context"] = "prompt"
    example_timeout: float | None = None
    decode: str = "auto"
    sampling: Sampling = GREEDY
    shared: dict[str, tuple[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_options(self, "", KVError)
        check_decode(self.decode, self.device)
        compiler = os.environ.get("CXX", "g++")  # as torch does
        if self.decode == "compiled" and self.device.type == "cpu" and not which(compiler):
            raise KVError(
                f"decode is 'compiled' and there is no C++ compiler {compiler!r}; allowed: "
                "CXX=<a compiler> in the environment, or decode=auto"
            )

    def once(self, what: str, settings: object, make: Callable[[], Any]) -> Any:
        """Make a tokenizer, a model or the like, or take the one that an earlier session with this
        `shared` made. Only the last one of a kind is kept.

        Args:
            what: its kind.
            settings: what it depends on beside the model's spec; where they differ, a new one is made.
            make: makes it.
        """
        key = repr((self.spec, settings))
        if self.shared.get(what, ("", None))[0] != key:
            self.shared.pop(what, None)
            self.shared[what] = key, make()
        return self.shared[what][1]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.once("tokenizer", None, lambda: load_tokenizer(self.spec))

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Encodes text to token ids, with the tokens that this model has before and after a prompt."""
        load_config(self.spec)  # before anything is fetched for a model that cannot be run
        return model_encoder(self.tokenizer, self.spec)

    @cached_property
    def model(self) -> Model:
        """The model, ready for kvbench's attention."""
        seed = self.seed if self.spec.random_weights else 0
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "seed": seed}
        return self.once("model", options, lambda: load_model(self.spec, **options))

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
        """Ids of the tokens that end an answer."""
        return end_token_ids(self.model, self.tokenizer) | self.encoder.end_ids

    def stopping(self, example: Example, answers: int = 1) -> Stopping:
        """The rule by which this model's answer to an example ends.

        Args:
            answers: examples that are answered together; they may take so many times the example's
                time.
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
