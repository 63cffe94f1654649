"""What the tests of compress, contexts and compare share: models, batches, a tokenizer."""

from __future__ import annotations

from typing import Any

import torch

from support.jobs import Letters as _Letters
from support.tiny import prompt_ids
from support.tiny import tiny_model as _tiny_model

SMALL: dict[str, Any] = {"sink": 4, "window": 4}
CONTEXT = prompt_ids(120)


def tiny_model(architecture: str) -> Any:
    """A tiny random model, untyped as its `generate` is, that no token ends."""
    model = _tiny_model(architecture)
    model.generation_config.eos_token_id = None
    return model


def batch(*lengths: int) -> dict[str, Any]:
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, length in enumerate(lengths):
        ids[i, ids.shape[1] - length :] = torch.tensor(prompt_ids(length, i))
        mask[i, ids.shape[1] - length :] = 1
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}


def state_of(model: Any) -> tuple:
    """What compress must leave as it was: attention, hooks, attributes, forward, generate."""
    return (
        model.config._attn_implementation,
        {name: len(part) for name, part in vars(model).items() if "_hooks" in name},
        sorted(vars(model)),
        model.forward,
        model.generate,
    )


class Letters(_Letters):
    """The tokenizer, as transformers' are called."""

    def __call__(self, text: str, **_: Any) -> dict:
        return {"input_ids": self.encode(text)}

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        return "|".join(message["content"] for message in messages) + ">"
