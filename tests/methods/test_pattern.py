"""The patterns of H2O's Table 2, against their definitions."""

from __future__ import annotations

import itertools

import pytest

from kvbench.methods import build_method
from kvbench.methods.fixed import Fixed
from kvbench.methods.strided import Strided

SIZES = [
    (older, count) for older in (1, 2, 7, 60, 61) for count in (0, 1, 2, 5, 33) if count <= older
]


@pytest.mark.parametrize(("older", "count"), SIZES)
def test_strided_positions_end_parts_of_equal_length(older: int, count: int) -> None:
    method = build_method("strided")
    assert isinstance(method, Strided)
    found = method.pattern(older, count).tolist()
    assert found == [(part + 1) * older // count - 1 for part in range(count)]
    assert count == 0 or found[-1] == older - 1


@pytest.mark.parametrize("summary", [1, 3, 8])
@pytest.mark.parametrize(("older", "count"), SIZES)
def test_fixed_positions_are_the_last_of_each_block(older: int, count: int, summary: int) -> None:
    method = build_method("fixed", summary=summary)
    assert isinstance(method, Fixed)
    found = method.pattern(older, count).tolist()
    assert found == sorted(set(found))
    assert len(found) == count
    blocks = max(1, round(count / summary))
    edges = [part * older // blocks for part in range(blocks + 1)]
    from_end = {
        place: stop - place
        for start, stop in itertools.pairwise(edges)
        for place in range(start, stop)
    }
    left = [place for place in range(older) if place not in found]
    nearest = [(from_end[place], -place) for place in found]
    assert not left or not found or max(nearest) < min((from_end[p], -p) for p in left)
