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
from kvbench.tasks.base import Example, PromptEncoder


@dataclass(frozen=True)
class Session:
    """Model, device and the settings every example of a job shares.

    Attributes:
        seed: of the methods' draws (and of random weights).
        compress_after: "prompt" or "context"; see `kvbench.engine.generate.run_batch`.
        decode: how decode steps run, see `kvbench.engine.graphs`; "compiled" alone may round otherwise.
        sampling: how the tokens of an answer are chosen, and how many answers are given.
        example_timeout: seconds; an example that takes longer is recorded as a timeout; None: no limit.
        shared: what the sessions of a process have in common, see `once`.
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
            said = f"decode is 'compiled' and there is no C++ compiler {compiler!r}"
            raise KVError(f"{said}; allowed: CXX=<one> in the environment, or decode=auto")

    def once(self, what: str, of: object, make: Callable[[], Any]) -> Any:
        """The last of its kind that a session with this `shared` made, if it is of the same model and
        `of` the same; else it is let go, and another one is made."""
        key = repr((self.spec, of))
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
        """Text to token ids, with what this model puts around a prompt."""
        load_config(self.spec)  # before anything is fetched for a model that cannot be run
        return model_encoder(self.tokenizer, self.spec)

    @cached_property
    def model(self) -> Model:
        """The model, ready for kvbench's attention."""
        seed = self.seed if self.spec.random_weights else 0
        how: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "seed": seed}
        return self.once("model", how, lambda: load_model(self.spec, **how))

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
