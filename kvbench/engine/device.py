"""The device that a model runs on: its threads, its memory, and what becomes of it after a fault.

A prefill consists of large matrix products, which all cores share. A decode step of a small model is
two hundred products that read every weight, and about a thousand small operations. The products gain
from every core, the small operations lose: to divide one among threads takes more time than it saves,
and much more if another process delays one of the threads, since the others wait for it. So in such a
step the large products run on all threads and the rest on one (`small_pass`). A number that the user
has set by OMP_NUM_THREADS is not changed.
"""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL = 1 << 24
"""A pass is small if the largest product of a layer has at most this many multiplications."""
SMALL_LAYER = 1 << 20
"""A layer whose keys are at most this many numbers is compressed on one thread: methods are mostly small
operations, too."""
LARGE = 1 << 18
"""A weight of fewer numbers stays in a core's cache; its product runs on one thread of a small pass."""


def threads_are_ours() -> bool:
    """Whether the number of threads is more than one and the user has not set it."""
    return "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > 1


@contextmanager
def small_pass(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Within this context the model runs on so many tokens of all rows, and in a small pass on a CPU on
    one thread but for its large products (see the module's text). These are torch's own, which round as
    in transformers' `generate`."""
    config = model.config.get_text_config()
    hidden = getattr(config, "hidden_size", 0)
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    on_cpu = next(model.parameters()).device.type == "cpu"
    if not on_cpu or not threads_are_ours() or tokens * hidden * intermediate > SMALL:
        yield
        return
    threads = torch.get_num_threads()
    hooks = []
    for module in _large_products(model):
        hooks.append(module.register_forward_pre_hook(lambda *_: torch.set_num_threads(threads)))
        hooks.append(module.register_forward_hook(lambda *_: torch.set_num_threads(1)))
    torch.set_num_threads(1)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        torch.set_num_threads(threads)


def _large_products(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The linear modules with a large weight on the CPU; none of a compiled model."""
    for module in () if hasattr(model, "_orig_mod") else model.modules():
        if isinstance(module, nn.Linear):
            weight = module.weight
            if weight.device.type == "cpu" and weight.numel() >= LARGE:
                yield module


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


# --- memory ---------------------------------------------------------------------------------------
#
# On CUDA the numbers are those of torch's allocator, summed over all GPUs, since a model may be on
# several. (The sum of their peaks is an upper bound on the memory in use at one time.) On a CPU they are
# the resident memory of the process, weights and libraries included, read from /proc on Linux; on other
# systems they are not known.

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
    return _bytes_in_line(_STATUS, "VmHWM")


def used_bytes(device: torch.device) -> int | None:
    """The number of bytes in use now; None where it is not known."""
    if device.type == "cuda":
        return sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
    return _bytes_in_line(_STATUS, "VmRSS")


def total_bytes(device: torch.device) -> int | None:
    """The number of bytes that this process may use, those in use included; None where it is not
    known."""
    if device.type == "cuda":
        reserved = [torch.cuda.memory_reserved(i) for i in range(torch.cuda.device_count())]
        used_gpus = {i for i, size in enumerate(reserved) if size} | {device.index or 0}
        return sum(reserved[i] + torch.cuda.mem_get_info(i)[0] for i in used_gpus)
    used = _bytes_in_line(_STATUS, "VmRSS")
    free = _bytes_in_line(Path("/proc/meminfo"), "MemAvailable")
    if used is None or free is None:
        return None
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit of its own
        limit = used + free
    return min(limit, used + free)


def _bytes_in_line(path: Path, name: str) -> int | None:
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
