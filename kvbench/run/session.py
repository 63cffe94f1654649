"""The model of a job, its tokenizer and its settings. Model and tokenizer are loaded when first used."""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from shutil import which
from typing import Any, Literal

import torch

from kvbench.engine.answer import GREEDY, Sampling, Stopping
from kvbench.engine.architecture import switch_to_kvbench
from kvbench.engine.fingerprint import fingerprint
from kvbench.engine.model import (
    Model,
    ModelSpec,
    Tokenizer,
    end_token_ids,
    load_config,
    load_generation_config,
    load_model,
    load_tokenizer,
    model_encoder,
)
from kvbench.engine.processors import acting_options
from kvbench.engine.steps import Steps, check_decode
from kvbench.errors.options import check_options
from kvbench.kv import KVError
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Session:
    """The model, the device and the settings that every example of a job shares.

    Attributes:
        seed: seeds the methods' draws (and random weights).
        compress_after: "all_but_last", "context" or "prompt"; see `kvbench.engine.ask`.
        decode: how decode steps run (`kvbench.engine.steps`); only "compiled" may round differently.
        sampling: how the tokens of an answer are chosen, and how many answers are given.
        generation_config: whether the logits processors of the model's generation config act.
        example_timeout: the seconds after which an example is recorded as a timeout; None: no limit.
        shared: what earlier sessions of this process have loaded, for `once`.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    seed: int = 0
    compress_after: Literal["all_but_last", "context", "prompt"] = "all_but_last"
    example_timeout: float | None = None
    decode: str = "auto"
    sampling: Sampling = GREEDY
    generation_config: bool = True
    shared: dict[str, tuple[str, Any]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_options(self, "", KVError)
        check_decode(self.decode, self.device)
        compiler = os.environ.get("CXX", "g++")  # the one that torch will call
        if self.decode == "compiled" and self.device.type == "cpu" and not which(compiler):
            raise KVError(
                f"decode is 'compiled' and there is no C++ compiler {compiler!r}; allowed: "
                "CXX=<a compiler> in the environment, or decode=auto"
            )

    def once(self, kind: str, settings: object, load: Callable[[], Any]) -> Any:
        """Load an object, or take the one that an earlier session with the same `shared` loaded. Only
        the last object of each kind is kept.

        Args:
            kind: "model", "tokenizer" or "examples".
            settings: what the object depends on beside the model's spec.
            load: loads the object, where the one that is kept has another spec or other settings.
        """
        key = repr((self.spec, settings))
        if self.shared.get(kind, ("", None))[0] != key:
            self.shared.pop(kind, None)
            self.shared[kind] = key, load()
        return self.shared[kind][1]

    @cached_property
    def weights(self) -> str | None:
        """The fingerprint of the model, whose files are fetched where they are not on this machine."""
        return self.once("weights", None, lambda: fingerprint(self.spec))

    @property
    def command_id(self) -> str:
        """A name that the jobs of this command have, and no other command's."""
        return str(self.shared.setdefault("command", ("", uuid.uuid4().hex[:12]))[1])

    def weights_are_here(self) -> bool:
        """Whether `weights` fetches nothing."""
        return "weights" in vars(self) or fingerprint(self.spec, fetch=False) is not None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.once("tokenizer", None, lambda: load_tokenizer(self.spec))

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Encodes text to token ids, with the tokens that this model has before and after a prompt."""
        load_config(
            self.spec
        )  # refuses a model that cannot be run, before its tokenizer is fetched
        return model_encoder(self.tokenizer, self.spec)

    @cached_property
    def model(self) -> Model:
        """The model, ready for kvbench's attention."""
        seed = self.seed if self.spec.random_weights else 0
        options: dict[str, Any] = {"device": self.device, "dtype": self.dtype, "seed": seed}

        def load() -> Model:
            model = load_model(self.spec, **options)
            switch_to_kvbench(model)  # for good: it is the jobs' own
            return model

        return self.once("model", options, load)

    @cached_property
    def steps(self) -> Steps:
        """Runs the model's decode steps in the way that `decode` names."""
        return Steps(self.decode)

    @cached_property
    def warmed(self) -> set[str]:
        """The labels of the methods that `kvbench.run.plan` has warmed up."""
        return set()

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an answer."""
        return end_token_ids(self.model, self.tokenizer) | self.encoder.end_ids

    @cached_property
    def processors(self) -> dict[str, Any]:
        """The options of the model's generation config by which the logits of its answers are processed
        (`acting_options`). They are read without its weights."""
        if not self.generation_config:
            return {}
        acting = acting_options(load_generation_config(self.spec))
        if acting:
            log.info(
                "answers follow the model's generation config: %s (generation_config=false: its logits "
                "as they are)",
                ", ".join(f"{name} {value}" for name, value in acting.items()),
            )
        return acting

    def stopping(self, example: Example, answers: int = 1) -> Stopping:
        """The rule by which this model's answer to an example ends.

        Args:
            answers: how many answers are decoded together; each of them may take the time of all.
        """
        seconds = self.example_timeout
        ends = self.end_ids if example.end_ids is None else example.end_ids
        return Stopping(
            example.max_new_tokens,
            ends,
            example.stop,
            self.encoder.decode,
            timeout_s=None if seconds is None else seconds * answers,
            may_be_empty=example.may_be_empty,
            is_final=example.is_final,
            thought=self.encoder.thought,
            thought_end_ids=ends & self.end_ids,  # a task's own end tokens are of its answer
            processors=self.processors,
        )
