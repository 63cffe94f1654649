"""What tests of engine and others share."""

from __future__ import annotations

from typing import Any

import torch

from kvbench.engine.answer import Stopping
from kvbench.kv import Budget
from support.asking import generate_one

SMALL = Budget(rate=0.25, sink=4, window=4)


def reference(model: Any, ids: list[int], new_tokens: int) -> list[int]:
    tokens = torch.tensor([ids])
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new_tokens, do_sample=False
    )
    return out[0, len(ids) :].tolist()


def generate(
    model: Any,
    ids: list[int],
    methods: dict[str, Any],
    *,
    split: int | None = None,
    new_tokens: int = 16,
    **kwargs: Any,
) -> Any:
    split = len(ids) - 10 if split is None else split
    stopping = kwargs.pop("stopping", Stopping(new_tokens))
    return generate_one(
        model, ids[:split], ids[split:], methods, stopping, seed=0, example_id="x", **kwargs
    )
