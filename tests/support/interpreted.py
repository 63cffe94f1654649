"""Triton kernels in tests: on a GPU for real, elsewhere through Triton's interpreter.

conftest.py sets TRITON_INTERPRET=1 before anything imports triton. `DEVICE` is where tensors go.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAVE_TRITON = importlib.util.find_spec("triton") is not None


def _mend_interpreter() -> None:
    """Two things Triton 3.6's interpreter lacks: numpy >= 2.4 turns no array of one number into an
    int, which it asks for the bounds of a loop; and it multiplies the bit patterns of bfloat16."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    dot = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        numbers = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(numbers, tl.float32)

    def dot_of_numbers(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, widened(a), widened(b), *rest)

    interpreter._patch_lang_tensor = patch_and_mend
    interpreter.InterpreterBuilder.create_dot = dot_of_numbers


if HAVE_TRITON and DEVICE == "cpu":
    _mend_interpreter()
