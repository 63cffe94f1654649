"""The number of CPU threads on which a pass of the model runs.

A prefill consists of large matrix products, which all cores share. A decode step of a small model
consists of about a thousand small ones. To divide a small product among threads takes more time than it
saves, and much more if another process delays one of the threads, since the others wait for it. So a
step whose products are small runs on one thread. A number that the user has set by OMP_NUM_THREADS is
not changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig

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
