"""The largest batch that fits: doubled until memory is short, then narrowed down."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from kvbench.engine import memory
from kvbench.engine.faults import free_memory, is_out_of_memory

log = logging.getLogger(__name__)

SAFE = 0.85
"""Share of a CPU's memory a trial may be expected to take: there, running out ends the process."""


def largest_batch(trial: Callable[[int], object], device: torch.device, most: int) -> int:
    """The largest batch, up to `most`, for which ``trial(batch)`` does not run out of memory; found
    to within a sixteenth.

    On a CPU a trial is not begun when twice what the last one took would not fit.

    Raises:
        torch.OutOfMemoryError: not even one prompt fits.
    """
    fits, too_many, size = 0, most + 1, 1
    while size < too_many:
        measured = memory.reset_peak(device)
        before = memory.used_bytes(device)
        if not _fits(trial, size, device):
            too_many = size
            break
        fits, size = size, min(2 * size, most) if size < most else most + 1
        if device.type == "cpu" and measured and size <= most:
            peak, total = memory.peak_bytes(device), memory.total_bytes(device)
            if before is None or peak is None or total is None:
                break
            if before + (peak - before) * size / fits > SAFE * total:
                log.info("batch %d is not tried: it would take most of the memory", size)
                break
    while too_many <= most and too_many - fits > max(1, fits // 16):
        middle = (fits + too_many) // 2
        if _fits(trial, middle, device):
            fits = middle
        else:
            too_many = middle
    if not fits:
        raise torch.OutOfMemoryError("out of memory: not even one prompt fits")
    return fits


def _fits(trial: Callable[[int], object], batch: int, device: torch.device) -> bool:
    try:
        trial(batch)
    except Exception as failure:
        if not is_out_of_memory(failure):
            raise
        out_of_memory = True
    else:
        out_of_memory = False
    free_memory(device)
    log.info("batch %d %s", batch, "is too large" if out_of_memory else "fits")
    return not out_of_memory
