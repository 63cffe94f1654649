"""BalanceKV's exact halving as a Triton kernel, against torch, which BalanceKV's tests compare with the
definition."""

from __future__ import annotations

import pytest
import torch
from support.kernels import generator, needs_triton, put

from kvbench.kernels.balanced_cut import halve

pytestmark = pytest.mark.cuda


@needs_triton
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("m", "entries"), [(2, 2), (3, 5), (77, 80), (1025, 2100), (2048, 2048)])
def test_cut(m, entries, share):
    g = generator(m)
    positive = (torch.rand(2, 3, m + 3, generator=g) < share)[:, :, :m]  # not contiguous
    order = torch.randint(0, 9999, (2, 3, entries), generator=g)
    weights = 2.0 ** torch.randint(0, 3, (2, 3, entries), generator=g)
    expected = halve(positive, order, weights, implementation="torch")
    survivors = halve(*put(positive, order, weights), implementation="triton")
    for result, reference in zip(survivors, expected, strict=True):
        assert torch.equal(result.cpu(), reference)
