"""How much memory there is, and how much was used at the peak.

On CUDA the numbers are the allocator's, summed over all GPUs (a model may lie on several; the sum of
peaks is no less than what was in use at once). On a CPU they are the process's resident memory,
weights and libraries included, from /proc (Linux); elsewhere nothing is measured, and nothing is
claimed.
"""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> bool:
    """Reset the peak; False where it cannot be measured."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.reset_peak_memory_stats(index)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """Most memory in use since `reset_peak`: allocated on the device, or resident on a CPU."""
    if device.type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return _kibibytes(_STATUS, "VmHWM")


def used_bytes(device: torch.device) -> int | None:
    """Memory in use now, counted as by `peak_bytes`."""
    if device.type == "cuda":
        return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
    return _kibibytes(_STATUS, "VmRSS")


def total_bytes(device: torch.device) -> int | None:
    """Memory that this process may use: what it holds and what is free."""
    if device.type == "cuda":
        reserved = [torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())]
        used_gpus = {i for i, size in enumerate(reserved) if size} | {device.index or 0}
        return sum(reserved[i] + torch.cuda.mem_get_info(i)[0] for i in used_gpus)
    used = _kibibytes(_STATUS, "VmRSS")
    free = _kibibytes(Path("/proc/meminfo"), "MemAvailable")
    if used is None or free is None:
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit of its own
        limit = used + free
    return min(limit, used + free)


def _kibibytes(path: Path, name: str) -> int | None:
    """The bytes in a line ``name: N kB`` of a file of /proc; None if there is no such line."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, rest = line.partition(":")
        if key == name:
            return int(rest.split()[0]) * 1024
    return None
