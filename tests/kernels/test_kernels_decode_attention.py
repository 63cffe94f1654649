"""weighted_decode_attention against the definition, in float64."""

from __future__ import annotations

import pytest
import torch
from support.attention import by_definition, draw

from kvbench.kernels.decode_attention import (
    _too_wide,
    append_entries,
    entry_table,
    weighted_decode_attention,
)

SHAPES = [
    # heads, kv_heads, dim, value_dim, lengths, reserved
    (1, 1, 4, 4, [1], [1]),
    (4, 2, 16, 16, [3, 0, 130], [8, 2, 131]),
    (6, 1, 40, 24, [65, 257], [300, 257]),
    (8, 8, 64, 64, [31, 32, 33], [40, 40, 40]),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("weighted", [True, False])
def test_definition(shape, softcap, weighted):
    query, keys, values, weights = draw(*shape, weighted=weighted)
    lengths = shape[4]
    out, mass = weighted_decode_attention(
        query,
        entry_table(keys, values, weights),
        torch.tensor(lengths),
        scaling=0.3,
        softcap=softcap,
        return_mass=True,
    )
    expected = by_definition(query, keys, values, weights, lengths, 0.3, softcap)
    torch.testing.assert_close(out.double(), expected[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mass.double(), expected[1], rtol=1e-4, atol=1e-6)
    alone, none = weighted_decode_attention(
        query, entry_table(keys, values, weights), lengths, scaling=0.3, softcap=softcap
    )
    assert none is None
    assert torch.equal(alone, out)


def test_a_head_whose_entries_are_all_hidden_gives_zeros():
    weights = torch.zeros(2, 5)
    weights[1] = -torch.inf
    table = entry_table([torch.ones(2, 5, 4)], [torch.ones(2, 5, 4)], [weights])
    out, mass = weighted_decode_attention(
        torch.ones(1, 4, 4), table, [5], scaling=1.0, return_mass=True
    )
    assert torch.equal(out, torch.tensor([1.0, 1.0, 0.0, 0.0]).view(1, 4, 1).expand(1, 4, 4))
    assert torch.equal(mass, torch.tensor([0.2, 0.0]).view(1, 2, 1).expand(1, 2, 5))


def test_rows_of_one_pool():
    """Rows may be views of one buffer."""
    pool = torch.randn(2, 50, 8, generator=torch.Generator().manual_seed(0))
    parts = [pool[:, :20], pool[:, 20:]]
    query = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(1))
    out, _ = weighted_decode_attention(query, entry_table(parts, parts), [20, 7], scaling=0.5)
    expected, _ = by_definition(query, parts, parts, [None, None], [20, 7], 0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def test_append():
    keys = [torch.zeros(2, 3, 4), torch.zeros(2, 9, 4)]
    values = [torch.zeros(2, 3, 5), torch.zeros(2, 9, 5)]
    weights = [None, torch.full((2, 9), 7.0)]
    new_key, new_value = torch.randn(2, 2, 4), torch.randn(2, 2, 5)
    lengths = torch.tensor([2, 0])
    append_entries(entry_table(keys, values, weights), lengths, new_key, new_value)
    for row, n in enumerate(lengths.tolist()):
        assert torch.equal(keys[row][:, n], new_key[row])
        assert torch.equal(values[row][:, n], new_value[row])
        assert float(keys[row].abs().sum()) == pytest.approx(float(new_key[row].abs().sum()))
    assert weights[1].tolist() == [[0.0] + 8 * [7.0]] * 2
    with pytest.raises(ValueError, match="row 0 has length 3; its buffers hold 3"):
        append_entries(entry_table(keys, values), [3, 0], new_key, new_value)


def test_what_does_not_fit_is_refused():
    key = torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match="0 rows of keys"):
        entry_table([], [])
    with pytest.raises(ValueError, match="keys differ"):
        entry_table([key, key.half()], [key, key.half()])
    with pytest.raises(ValueError, match="not adjacent"):
        entry_table([key.mT.contiguous().mT], [key])
    with pytest.raises(ValueError, match="row 0 has log-weights"):
        entry_table([key], [key], [torch.zeros(2, 4)])
    table = entry_table([key], [key])
    with pytest.raises(ValueError, match="over 1 rows of 2 KV heads of dim 4"):
        weighted_decode_attention(torch.zeros(1, 3, 4), table, [5], scaling=1.0)
    with pytest.raises(ValueError, match="row 0 has length 6"):
        weighted_decode_attention(torch.zeros(1, 4, 4), table, [6], scaling=1.0)
    with pytest.raises(ValueError, match="implementation is 'cuda'; allowed: auto, triton, torch"):
        weighted_decode_attention(
            torch.zeros(1, 4, 4), table, [5], scaling=1.0, implementation="cuda"
        )


def test_a_group_that_no_program_holds_is_told(monkeypatch):
    """128 query heads of one KV head do run as a kernel; wider ones say what they are."""
    assert _too_wide(71, 64, 2) is None
    assert _too_wide(128, 128, 4) is None
    assert "128 query heads of dim 256" in str(_too_wide(128, 256, 4))
    assert "160 query heads" in str(_too_wide(160, 64, 2))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    keys = torch.randn(1, 4, 256)
    with pytest.raises(ValueError, match="128 query heads of dim 256 share a KV head"):
        weighted_decode_attention(
            torch.zeros(1, 128, 256), entry_table([keys], [keys]), [4],
            scaling=1.0, implementation="triton",
        )  # fmt: skip
