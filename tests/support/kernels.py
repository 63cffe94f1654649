"""What the tests of the hot operations share: dtypes, both implementations, and tensors on the device.

Kernels are interpreted on the CPU at small awkward shapes, and run on CUDA at full size as well.
"""

from __future__ import annotations

import os

import pytest
import torch

from support.interpreted import DEVICE, HAVE_TRITON
from support.pretended import PRETEND

# On a pretend GPU, and under compute-sanitizer (which the variable is for), full shapes take hours.
FULL_SIZE = DEVICE == "cuda" and not PRETEND and not os.environ.get("KVBENCH_SMALL_SHAPES")
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
OF_MODELS = [(64, 1), (80, 4), (96, 1), (128, 4), (128, 7), (256, 1)]
"""Head dimensions and query heads per KV head of most models, for tests at full size."""
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="the package triton is not installed")
both = pytest.mark.parametrize(
    "implementation", ["torch", pytest.param("triton", marks=needs_triton)]
)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def put(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if x is None else x.to(DEVICE) for x in tensors]
