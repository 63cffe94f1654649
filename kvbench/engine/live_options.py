"""The options of transformers' `generate` that are possible with a compressed cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.engine.live_cache import LiveCache, UnsupportedGeneration
from kvbench.engine.rotary import crossing

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def left_padding(mask: Tensor | None, batch: int, count: int) -> list[int]:
    """Count the leading padding tokens of each row.

    Args:
        mask: [batch, count], the attention mask of the prompt; None for no padding.
        batch: the number of rows.
        count: the number of tokens of each row, padding included.

    Raises:
        UnsupportedGeneration: padding elsewhere, or a row of padding only.
    """
    if mask is None:
        return [0] * batch
    if tuple(mask.shape) != (batch, count):
        raise UnsupportedGeneration(
            f"attention_mask has shape {tuple(mask.shape)}; allowed: {(batch, count)}, the prompt's"
        )
    padding = []
    for row, shown in enumerate(mask.to("cpu", torch.bool)):
        start = count - int(shown.sum())
        if start == count or not bool(shown[start:].all()):
            raise UnsupportedGeneration(
                f"attention_mask of row {row} hides tokens after the first shown one, or all; allowed: "
                "padding on the left (tokenizer.padding_side = 'left')"
            )
        padding.append(start)
    return padding


def check_mask(mask: Tensor | None, cache: LiveCache, count: int) -> None:
    """Check the attention mask of a pass that feeds `count` tokens to every row of a cache.

    Args:
        mask: [batch, tokens], of all tokens or of the new ones alone; None for no mask.

    Raises:
        UnsupportedGeneration: it hides another token than the padding before the prompt, which the cache
            does not hold. (`generate` makes a mask that hides every token with the pad token's id.)
    """
    if mask is None:
        return
    if mask.shape[1] > count:
        padding = left_padding(mask, *mask.shape)
        held = [cache.seen - row.tokens for row in cache.rows]
        if mask.shape[1] == cache.seen + count and padding != held:
            row = next(
                i for i, (now, then) in enumerate(zip(padding, held, strict=True)) if now != then
            )
            raise UnsupportedGeneration(
                f"attention_mask of row {row} hides {padding[row]} tokens, and it hid {held[row]} of "
                "the first turn; allowed: the padding of the first turn, and ones"
            )
    elif not bool(mask.all()):
        raise UnsupportedGeneration("attention_mask hides new tokens; allowed: left padding")


def foreign_cache(cache: Any) -> UnsupportedGeneration:
    """Make the error for a cache that kvbench did not fill."""
    return UnsupportedGeneration(
        f"past_key_values is a {type(cache).__name__} that was not filled under compress, without the "
        "queries that methods choose by; allowed: none, or a cache that compress made of this model "
        "(the past_key_values of an earlier output, context.cache())"
    )


_ALLOWED: dict[str, tuple[Any, ...]] = {
    "assistant_model": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "cache_implementation": (None, "dynamic"),
    "prefill_chunk_size": (None,),
    "guidance_scale": (None, 1),
    "use_cache": (None, True),
    "output_attentions": (None, False),
    "token_type_ids": (None,),
}
"""Options of `generate`, and the values of each that are possible. A compressed cache cannot remove
tokens (assisted decoding does), is made in one forward pass over the whole prompt, computes no attention
matrix, and is causal: no token sees a later one."""


def refused(name: str, value: Any) -> UnsupportedGeneration:
    """Make the error for the value of an option."""
    shown = value if isinstance(value, bool | int | float | str) else type(value).__name__
    allowed = " or ".join(map(repr, _ALLOWED.get(name, (None,))))
    return UnsupportedGeneration(
        f"{name} is {shown!r}, which a compressed cache cannot serve; allowed: {allowed}"
    )


def check_options(model: PreTrainedModel, given: Mapping[str, Any]) -> None:
    """Refuse, before anything runs, options of `generate` that a compressed cache cannot serve."""
    past = given.get("past_key_values")
    if past is not None and not isinstance(past, LiveCache):
        raise foreign_cache(past)
    ids = given.get("inputs") if given.get("inputs") is not None else given.get("input_ids")
    if past is not None and ids is not None:
        mask = given.get("attention_mask")
        whole = ids.shape[1] if mask is None else max(ids.shape[1], mask.shape[1])
        if whole <= past.seen:
            raise UnsupportedGeneration(
                f"input_ids have {whole} tokens and past_key_values holds {past.seen}; allowed: the "
                "whole conversation, new tokens included"
            )
        # `generate` would read the conversation again without the cache.
        failure = crossing(model.config, past.seen, whole - past.seen)
        if failure is not None:
            raise UnsupportedGeneration(str(failure))
    sources = (given.get("generation_config"), model.generation_config)
    for name, allowed in _ALLOWED.items():
        values = [given.get(name), *(getattr(source, name, None) for source in sources)]
        value = next((value for value in values if value is not None), None)
        if value not in allowed:
            raise refused(name, value)
