"""What a user would otherwise run: transformers' own generation with its caches.

Rows of the throughput probe beside kvbench's methods. They generate by code of their own, so they have
no `compress`; on anything but that probe they say so.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel

from kvbench.engine.prefill import synchronize
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods.base import Method
from kvbench.tasks.base import TaskError


@dataclass(frozen=True, kw_only=True)
class Baseline(Method):
    """`model.generate` with one of transformers' caches.

    Attributes:
        cache: transformers' ``cache_implementation``.
    """

    saves_memory: ClassVar[bool] = False
    uses_budget: ClassVar[bool] = False

    name: str
    cache: str | None = None

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Refused: a baseline generates by code of its own."""
        raise KVError(f"{self.name} is a baseline of the throughput probe; allowed: methods")

    @torch.inference_mode()
    def generate(self, model: PreTrainedModel, ids: Tensor, new_tokens: int) -> dict[str, Any]:
        """Generate exactly `new_tokens` greedily from prompts ids [batch, n] of one length.

        Returns:
            Record fields of the whole batch: prefill_s (until the logits of the first new token),
            decode_s, new_tokens, and cache_bytes_end (keys and values as reserved).
        """
        config = GenerationConfig(
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
        )
        config.cache_implementation = self.cache
        clock = _FirstToken()
        generate: Any = model.generate
        before = model.config._attn_implementation
        model.set_attn_implementation("sdpa")  # which a user would have
        try:
            synchronize(ids.device)
            start = time.perf_counter()
            output = generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=config,
                logits_processor=LogitsProcessorList([clock]),
            )
            synchronize(ids.device)
            end = time.perf_counter()
        finally:
            model.set_attn_implementation(before)
        assert clock.at is not None
        parts = [part for x in output.past_key_values.layers for part in (x.keys, x.values)]
        return {
            "prefill_s": clock.at - start,
            "compress_s": None,
            "decode_s": end - clock.at,
            "new_tokens": output.sequences.shape[1] - ids.shape[1],
            "cache_bytes_end": sum(part.nbytes for part in parts),
        }


BASELINES = {
    "hf_dynamic": Baseline(name="hf_dynamic"),
    "hf_static": Baseline(name="hf_static", cache="static"),
}
"""Baselines by name."""


def baselines_of(names: Sequence[str]) -> dict[str, Baseline]:
    """The baselines of these names.

    Raises:
        TaskError: a name that is none.
    """
    for name in names:
        if name not in BASELINES:
            raise TaskError(f"task.baselines has {name!r}; allowed: {', '.join(BASELINES)}")
    return {name: BASELINES[name] for name in names}


class _FirstToken(LogitsProcessor):
    """Notes when the logits of the first new token were there."""

    at: float | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.at is None:
            synchronize(input_ids.device)
            self.at = time.perf_counter()
        return scores
