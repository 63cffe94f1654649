"""Failures while a model runs: non-finite logits, memory that runs out, a device that is unusable."""

from __future__ import annotations

import gc
import traceback

import torch


class NonFiniteLogits(ArithmeticError):
    """The model's logits are NaN or infinite, so that no token can be chosen."""

    def __init__(self, token: int) -> None:
        super().__init__(f"non-finite logits at new token {token}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that the device or the host ran out of memory."""
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
        words in text for words in ("out of memory", "can't allocate memory", "_alloc_failed")
    )


def release_frames(error: BaseException) -> None:
    """Release the tensors that the error's traceback keeps alive; the traceback stays readable."""
    seen: set[int] = set()
    link: BaseException | None = error
    # Contexts set by hand may go round in a circle.
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__context__


def free_memory(device: torch.device) -> None:
    """Collect garbage, and return cached blocks to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def device_is_usable(device: torch.device) -> bool:
    """False after an error that leaves a CUDA context unusable (an illegal access, an assertion in a
    kernel): everything that follows in this process would fail with it."""
    if device.type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return is_out_of_memory(error)
    return True
