"""The memory that there is, that is in use, and that was in use at the peak.

On CUDA the numbers are those of torch's allocator, summed over all GPUs, since a model may be on
several. (The sum of their peaks is an upper bound on the memory in use at one time.) On a CPU they are
the resident memory of the process, weights and libraries included, read from /proc on Linux; on other
systems they are not known.
"""

from __future__ import annotations

from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


def reset_peak(device: torch.device) -> bool:
    """Reset the peak. Returns False where it cannot be measured."""
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
    """The largest number of bytes in use since `reset_peak`; None where it is not known."""
    if device.type == "cuda":
        return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count())))
    return _kibibytes(_STATUS, "VmHWM")


def used_bytes(device: torch.device) -> int | None:
    """The number of bytes in use now; None where it is not known."""
    if device.type == "cuda":
        return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
    return _kibibytes(_STATUS, "VmRSS")


def total_bytes(device: torch.device) -> int | None:
    """The number of bytes that this process may use, those in use included; None where it is not
    known."""
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
