"""The device that a model runs on: its threads, how a CPU multiplies few tokens, and what becomes of a
device after a fault.

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
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from kvbench.kernels._choice import VARIABLE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SMALL = 1 << 24
"""A pass is small if the largest product of a layer has at most this many multiplications."""
SMALL_LAYER = 1 << 20
"""A layer whose keys are at most this many numbers is compressed on one thread: methods are mostly small
operations, too."""
LARGE = 1 << 18
"""A weight of fewer numbers stays in a core's cache; its product is left to torch, on one thread of a
small pass."""
FEW_TOKENS = 64
"""Up to this many tokens a CPU's library does not multiply them by the weights as fast as it could."""


def threads_are_ours() -> bool:
    """Whether the number of threads is more than one and the user has not set it."""
    return "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > 1


class FewTokens(Tensor):
    """The input of a linear module that is multiplied as W x^T, and on `threads` threads.

    For x W^T of a few tokens MKL packs the weights anew at every call. Results differ by rounding alone.
    """

    threads: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not linear:  # of a hook that somebody else has set
            return super().__torch_function__(func, types, args, kwargs or {})
        given, weight, bias = args
        x, before = given.as_subclass(Tensor), torch.get_num_threads()
        rows = x.reshape(-1, x.shape[-1])
        torch.set_num_threads(given.threads)
        try:
            if len(rows) == 1:
                return linear(x, weight, bias)
            # Contiguous, since what follows would read the transposed product with strides.
            out = torch.mm(weight, rows.T).T.contiguous()
        finally:
            torch.set_num_threads(before)
        return (out if bias is None else out.add_(bias)).view(*x.shape[:-1], -1)


@contextmanager
def small_pass(model: PreTrainedModel, tokens: int) -> Iterator[None]:
    """Within this context the model runs on so many tokens of all rows as is fastest on a CPU: see the
    module's text, and `FewTokens`. ``KVBENCH_KERNELS=torch`` leaves the products to torch."""
    if next(model.parameters()).device.type != "cpu":
        yield
        return
    config = model.config.get_text_config()
    hidden = getattr(config, "hidden_size", 0)
    intermediate = getattr(config, "intermediate_size", None) or 4 * hidden
    threads = torch.get_num_threads()
    on_one = threads_are_ours() and tokens * hidden * intermediate <= SMALL
    hooks = []
    if (on_one or 1 < tokens <= FEW_TOKENS) and os.environ.get(VARIABLE) != "torch":

        def mark(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not args:
                return None
            given = args[0].as_subclass(FewTokens)
            given.threads = threads
            return (given,)

        hooks = [module.register_forward_pre_hook(mark) for module in _large_products(model)]
    if on_one:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if on_one:
            torch.set_num_threads(threads)


def _large_products(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The modules that are torch's own linear module with a large weight in float32 on the CPU, and
    nothing that somebody else has put in their place. None of a compiled model."""
    for module in () if hasattr(model, "_orig_mod") else model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            weight = module.weight
            on_cpu = weight.device.type == "cpu" and weight.dtype == torch.float32
            if type(weight) is nn.Parameter and on_cpu and weight.numel() >= LARGE:
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
