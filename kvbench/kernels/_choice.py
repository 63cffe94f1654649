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
"""Environment variable that says what `auto` means in this process: auto | triton | torch."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What the Triton kernels read; they compute in float32."""
LARGEST_DIM = 256
"""Widest head the kernels hold on chip."""


@functools.cache
def _say_once(message: str) -> None:
    log.warning(message)


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def _obstacle(tensors: tuple[Tensor, ...], rows_on_chip: bool) -> str | None:
    """Why the Triton kernels cannot take these tensors; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    for tensor in tensors:
        if not (tensor.is_cuda or _interpreted()):
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
    """True when `operation` on these tensors is to run as its Triton kernel.

    `auto` takes Triton on CUDA and torch elsewhere; where CUDA tensors cannot go through Triton it
    says so, once per reason, in the log.

    Args:
        rows_on_chip: the tensors are [..., dim] and the kernel holds whole rows of them.
        obstacle: why this kernel cannot take them, where its own shapes tell.

    Raises:
        ValueError: an unknown choice; or a forced `triton` that is not possible.
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
    _say_once(f"{operation} runs in plain torch on this GPU: {reason}")
    return False


def on_its_device(
    launcher: Callable[Concatenate[Tensor, P], R],
) -> Callable[Concatenate[Tensor, P], R]:
    """Decorator of every function that launches Triton kernels: makes the GPU of its first tensor the
    current one for the call. Triton launches on the current GPU, wherever its arguments lie."""

    @functools.wraps(launcher)
    def launch(first: Tensor, *args: P.args, **kwargs: P.kwargs) -> R:
        if not first.is_cuda:
            return launcher(first, *args, **kwargs)
        with torch.cuda.device(first.device):
            return launcher(first, *args, **kwargs)

    return launch


def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors of a CUDA device; 1 for a CPU, where Triton's interpreter runs."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
