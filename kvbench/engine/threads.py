"""How many of the processor's threads a pass of the model runs on.

A prefill is large products, which all cores share. A decode step of a small model is a thousand small
ones: dividing each costs more than it saves, and much more where another process keeps a core from
one of the threads, for which the others wait. So a step whose products are small runs on one thread.
What the user has set (OMP_NUM_THREADS) is left alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig

SMALL = 1 << 24
"""Multiplications of a layer's largest product up to which a pass runs on one thread."""


@contextmanager
def threads_of(config: PreTrainedConfig, tokens: int) -> Iterator[None]:
    """The threads for a pass over so many tokens, of all rows, of a model with this text config."""
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
