"""Philox's numbers against published ones, and the same on every device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import needs_triton

from kvbench.kernels.philox import philox

pytestmark = pytest.mark.cuda

CPU = torch.device("cpu")
KEY = 3 << 60
LARGEST = 2**64 - 1
DTYPES = (torch.int64, torch.float64, torch.float32)
KNOWN = {
    0: (0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B),
    LARGEST: (0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0),
}
"""Random123's known answers (kat_vectors, philox4x64 with 10 rounds): every word of counter and key is
this one."""


def rounds(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Ten rounds as the paper has them (section 3.2), in Python's integers."""
    a, b, c, d = counter
    k, m = key
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * a, 0xCA5A826395121157 * c
        a, b = (high >> 64) ^ b ^ k, high & LARGEST
        c, d = (low >> 64) ^ d ^ m, low & LARGEST
        k, m = (k + 0x9E3779B97F4A7C15) & LARGEST, (m + 0xBB67AE8584CAA73B) & LARGEST
    return a, b, c, d


def test_words_are_those_of_the_rounds_and_numbers_their_upper_bits():
    for word, answer in KNOWN.items():
        assert rounds((word,) * 4, (word,) * 2) == answer
    words = philox(KEY, 5, 3, dtype=torch.int64, device=CPU).flatten().numpy().view(np.uint64)
    words = words.tolist()
    expected = [word for block in range(1, 5) for word in rounds((block, 0, 0, 0), (KEY, 0))]
    assert words == expected[:15]
    doubles = philox(KEY, 9, dtype=torch.float64, device=CPU).tolist()
    singles = philox(KEY, 17, dtype=torch.float32, device=CPU).tolist()
    assert doubles == [(word >> 11) / 2**53 for word in words[:9]]
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)]
    assert singles == [(half >> 8) / 2**24 for half in halves[:17]]
    with pytest.raises(ValueError, match="float16"):
        philox(KEY, 3, dtype=torch.float16, device=CPU)


@needs_triton
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("key", "shape"), [(0, (1,)), (2**32, (3, 7)), (KEY, (2, 1025)), (1, (4, 0))]
)
def test_the_kernel_gives_the_same_bits(key, shape, dtype):
    here = philox(key, *shape, dtype=dtype, device=CPU, implementation="torch")
    there = philox(key, *shape, dtype=dtype, device=torch.device(DEVICE), implementation="triton")
    assert there.dtype == here.dtype == dtype
    assert there.shape == here.shape == shape
    assert torch.equal(there.cpu(), here)
