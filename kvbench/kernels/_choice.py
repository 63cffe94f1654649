"""Which implementation of a hot operation runs: its Triton kernel or its torch reference."""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

CHOICES = ("auto", "triton", "torch")
VARIABLE = "KVBENCH_KERNELS"
"""The environment variable that sets what `auto` is in this process: auto | triton | torch."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the Triton kernels read; they compute in float32."""
LARGEST_DIM = 256
"""The most numbers of a row for which the kernels have room in registers and shared memory."""


@functools.cache
def _warn_once(message: str) -> None:
    log.warning(message)


def _obstacle(tensors: tuple[Tensor, ...], rows_on_chip: bool) -> str | None:
    """Why the Triton kernels cannot take these tensors, as part of a message; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"  # the kernels run on a CPU
    for tensor in tensors:
        if not (tensor.is_cuda or interpreted):
            return f"tensors on {tensor.device}: needs CUDA, or TRITON_INTERPRET=1 to test"
        if tensor.dtype not in DTYPES:
            return f"{tensor.dtype}: needs one of {', '.join(map(str, DTYPES))}"
        if rows_on_chip and tensor.shape[-1] > LARGEST_DIM:
            return f"head_dim {tensor.shape[-1]}: at most {LARGEST_DIM}"
    return None


def use_triton(
    operation: str,
    choice: str,
    *tensors: Tensor,
    rows_on_chip: bool = True,
    obstacle: str | None = None,
) -> bool:
    """Decide whether an operation on these tensors runs as its Triton kernel (else in torch).

    Args:
        choice: auto | triton | torch. `auto` is what `VARIABLE` is set to; where that is not set, or
            is `auto`, it is Triton for CUDA tensors and torch for others. CUDA tensors that Triton
            cannot take then run in torch, and a warning says why, once for each reason.
        rows_on_chip: whether the tensors are [..., dim] and the kernel holds rows of them on chip.
        obstacle: a reason, which only the caller knows, why this kernel cannot take these shapes.

    Raises:
        ValueError: an unknown choice, or `triton` where the kernel cannot run.
    """
    for name in ("implementation", VARIABLE):
        if name == VARIABLE and choice == "auto":
            choice = os.environ.get(VARIABLE, "auto")
        if choice not in CHOICES:
            raise ValueError(f"{name} is {choice!r}; allowed: {', '.join(CHOICES)}")
    if choice == "torch" or (choice == "auto" and not tensors[0].is_cuda):
        return False
    reason = _obstacle(tensors, rows_on_chip) or obstacle
    if reason is None:
        return True
    if choice == "triton":
        raise ValueError(f"{operation} cannot run as a Triton kernel: {reason}")
    _warn_once(f"{operation} runs in plain torch on this GPU: {reason}")
    return False


def on_its_device(
    launcher: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Make the GPU of the first argument the current one for the call: Triton launches on the current
    GPU, wherever the kernel's arguments lie."""

    @functools.wraps(launcher)
    def launch(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        if not first.is_cuda:
            return launcher(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return launcher(first, *args, **kwargs)

    return launch


def multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1  # Triton's interpreter runs
    return torch.cuda.get_device_properties(device).multi_processor_count
