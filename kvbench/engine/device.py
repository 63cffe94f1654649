"""The device that a model runs on: its threads, and what becomes of it after a fault.

A prefill consists of large matrix products, which all cores share. A decode step of a small
model consists of about a thousand small ones. To divide a small product among threads takes more time
than it saves, and much more if another process delays one of the threads, since the others wait for it.
So a step whose products are small runs on one thread. A number that the user has set by OMP_NUM_THREADS
is not changed.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL = 1 << 24
"""A pass runs on one thread if the largest product of a layer has at most this many multiplications."""


@contextmanager
def threads_of(config: PreTrainedConfig, tokens: int) -> Iterator[None]:
    """Set the number of threads within this context, for a pass of a model with this text config.

    Args:
        tokens: the number of tokens of all rows.
    """
    threads = torch.get_num_threads()
    hidden = getattr(config, "hidden_size", 0)
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    largest_product = tokens * hidden * intermediate
    if "OMP_NUM_THREADS" in os.environ or threads == 1 or largest_product > SMALL:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work, so that a clock that is read afterwards includes
    it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def input_device(model: PreTrainedModel) -> torch.device:
    """The device on which token ids must be: that of the embedding. Where accelerate offloads the
    embedding's weights between two passes, it is the device on which they are used."""
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)
    return next(embedding.parameters()).device if device is None else torch.device(device)


# --- faults ---------------------------------------------------------------------------------------


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
