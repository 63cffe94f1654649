"""What the adapters to other packages promise where those packages are absent.

What they do where the packages are installed is in tests/references.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.method_layers import make_layer

from kvbench.kv import KVError, LayerKV
from kvbench.methods import build_method
from kvbench.methods._adapters import find_rows, locate_entries, scaled_queries
from kvbench.methods.kvpress import ratio_for
from kvbench.methods.minference import _module


@pytest.fixture
def _no_packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "kvpress", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _module.cache_clear()
    yield
    _module.cache_clear()


@pytest.mark.usefixtures("_no_packages")
@pytest.mark.parametrize(
    ("method", "install"),
    [
        ("kvpress", "pip install 'kvbench[kvpress]'"),
        ("minference", "MINFERENCE_SKIP_CUDA_BUILD=TRUE MINFERENCE_FORCE_BUILD=TRUE pip install"),
    ],
)
def test_an_absent_package_is_one_line_that_says_how_to_install_it(
    method: str, install: str
) -> None:
    with pytest.raises(KVError) as error:
        build_method(method)
    assert f"method {method!r} needs the package {method}" in str(error.value)
    assert install in str(error.value)
    assert "\n" not in str(error.value)


def test_options_are_checked_even_where_the_package_is_absent() -> None:
    with pytest.raises(KVError, match=r"minference\.cluster is 'snap'"):
        build_method("minference", cluster="snap")
    with pytest.raises(KVError, match=r"kvpress\.options is 3"):
        build_method("kvpress", options=3)


@pytest.mark.parametrize(("copies", "dim"), [(1, 1), (4, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_found_by_their_bits(dtype: torch.dtype, copies: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = (torch.arange(3000.0).view(2, 3, 500, 1) / 2048 + torch.zeros(dim)).to(dtype)
    extra = torch.randn(2, 3, 500, 16, generator=generator).to(dtype)  # bfloat16 rows repeat
    where = torch.stack([torch.randperm(500, generator=generator)[:90] for _ in range(6 * copies)])
    where = where.view(2, 3 * copies, 90)
    kept = tuple(
        torch.take_along_dim(part.repeat_interleave(copies, 1), where[..., None], 2)
        for part in (rows, extra)
    )
    assert torch.equal(find_rows(kept, (rows, extra)), where)
    kept[1][0, 1, 7] += 1
    found = find_rows(kept, (rows, extra))
    assert found[0, 1, 7] == -1
    assert (found == where).sum() == where.numel() - 1


def test_equal_rows_are_assigned_in_order() -> None:
    rows = torch.tensor([[[[1.0, 2.0], [3.0, 4.0], [1.0, 2.0], [1.0, 2.0]]]])
    assert find_rows((rows[:, :, [3, 1, 0]],), (rows,)).tolist() == [[[0, 1, 2]]]
    layer = LayerKV(rows, rows, None, 0, 1, 1.0)
    held = locate_entries(rows[:, :, [2, 1]], rows[:, :, [2, 1]] * 2, layer)
    assert held.positions.tolist() == [[[0, 1]]], "values that were changed: found by the keys"
    assert held.values.tolist() == [[[[2.0, 4.0], [6.0, 8.0]]]]
    layer = make_layer(6, kv_heads=1, dim=2)  # of equal keys the value decides
    layer = replace(layer, keys=torch.ones_like(layer.keys))
    found = locate_entries(layer.keys[:, :, :3], layer.values[:, :, [4, 1, 5]], layer)
    assert found.positions.tolist() == [[[1, 4, 5]]]
    assert torch.equal(found.values, layer.values[:, :, [1, 4, 5]])


@given(n=st.integers(1, 200_000), data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_ratio_keeps_exactly_what_is_asked(n: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(0, n))
    ratio = ratio_for(n, kept)
    assert int(n * (1 - ratio)) == round(n * (1 - ratio)) == kept
    assert abs(ratio - (1 - kept / n)) < 1e-3


def test_queries_carry_the_layers_scaling() -> None:
    layer = make_layer(20, dim=16)
    assert layer.queries is not None
    assert scaled_queries(layer, "x") is layer.queries
    torch.testing.assert_close(scaled_queries(replace(layer, scaling=1.0), "x"), layer.queries * 4)
    with pytest.raises(KVError, match="softcap"):
        scaled_queries(replace(layer, softcap=50.0), "x")
