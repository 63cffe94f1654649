"""Which implementation of an operation runs."""

from __future__ import annotations

import pytest
import torch
from support.kernels import needs_triton

from kvbench.kernels import _choice

pytestmark = needs_triton
KEYS = torch.zeros(1, 1, 4, 8)


def test_triton_runs_where_it_can_and_a_variable_sets_what_auto_is(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not _choice.use_triton("x", "auto", KEYS)
    with pytest.raises(ValueError, match="x cannot run as a Triton kernel: tensors on cpu"):
        _choice.use_triton("x", "triton", KEYS)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _choice.use_triton("x", "triton", KEYS)
    assert not _choice.use_triton("x", "torch", KEYS)
    for tensor, message in (
        (KEYS.double(), r"x cannot .*float64: needs one of"),
        (torch.zeros(2, 300), "head_dim 300: at most 256"),
    ):
        with pytest.raises(ValueError, match=message):
            _choice.use_triton("x", "triton", tensor)
    monkeypatch.setenv("KVBENCH_KERNELS", "triton")
    assert _choice.use_triton("x", "auto", KEYS)
    monkeypatch.setenv("KVBENCH_KERNELS", "fast")
    with pytest.raises(ValueError, match="KVBENCH_KERNELS is 'fast'; allowed: auto, triton, torch"):
        _choice.use_triton("x", "auto", KEYS)
