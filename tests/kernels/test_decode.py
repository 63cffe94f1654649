"""Attention of one new token per row against the definition in float64; the table of where entries lie,
and rows that it does not take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import (
    BRAIN,
    FLOAT,
    FULL_SIZE,
    HALF,
    OF_MODELS,
    needs_triton,
    put,
    relative,
)
from torch import Tensor

from kvbench.kernels import decode
from kvbench.kernels.decode import (
    RowPointers,
    _too_wide,
    append_entries,
    takes,
    weighted_decode_attention,
)

pytestmark = pytest.mark.cuda


def draw(
    heads: int,
    kv_heads: int,
    dim: int,
    value_dim: int,
    lengths: Sequence[int],
    reserved: Any,
    dtype: torch.dtype = torch.float32,
    weighted: bool = True,
) -> Any:
    """Queries [rows, heads, dim]; for each row keys and values [kv_heads, reserved, dim] and log-weights
    or None, with NaN beyond the row's length."""
    generator = torch.Generator().manual_seed(sum(lengths))

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    query = 2 * normal(len(lengths), heads, dim)
    keys = [normal(kv_heads, room, dim) for room in reserved]
    values = [normal(kv_heads, room, value_dim) for room in reserved]
    weights: list[Tensor | None] = [None] * len(lengths)
    if weighted:
        weights = [torch.randn(kv_heads, room, generator=generator) for room in reserved]
        weights[0] = None
        for weight, n in zip(weights[1:], lengths[1:], strict=True):
            weight[:, : n // 3] = -torch.inf
    for key, value, n in zip(keys, values, lengths, strict=True):
        key[:, n:], value[:, n:] = torch.nan, torch.nan  # what is beyond must not be read
    return query, keys, values, weights


def by_definition(
    query: Tensor,
    keys: list[Tensor],
    values: list[Tensor],
    weights: Any,
    lengths: Sequence[int],
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and the mean weight of each entry over the query heads of a group, in float64."""
    out, mass = [], []
    longest = max(key.shape[1] for key in keys)
    of_rows = [None] * len(lengths) if sinks is None else sinks.double()
    for q, key, value, weight, n, own_sinks in zip(
        query, keys, values, weights, lengths, of_rows, strict=True
    ):
        group = q.shape[0] // key.shape[0]
        k = key[:, :n].double().repeat_interleave(group, 0)
        v = value[:, :n].double().repeat_interleave(group, 0)
        logits = torch.einsum("hd,hnd->hn", q.double(), k) * scaling
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if weight is not None:
            logits = logits + weight[:, :n].double().repeat_interleave(group, 0)
        if own_sinks is not None:
            logits = torch.cat([logits, own_sinks[:, None]], -1)
        attention = logits.softmax(-1)[:, :n]
        out.append(torch.einsum("hn,hnd->hd", attention, v))
        received = attention.view(key.shape[0], group, n).mean(1)
        mass.append(torch.nn.functional.pad(received, (0, longest - n)))
    return torch.stack(out), torch.stack(mass)


def counts(lengths: Sequence[int]) -> Tensor:
    return torch.tensor(lengths, device=DEVICE)


def put_all(drawn: Any) -> Any:
    query, *entries = drawn
    return query.to(DEVICE), *(put(*part) for part in entries)


DECODE = [
    # heads, kv_heads, dim, value_dim, lengths, reserved
    (1, 1, 4, 4, [1], [1]),
    (4, 2, 16, 16, [3, 0, 130], [8, 2, 131]),
    (6, 1, 40, 24, [129, 257], [300, 257]),
    (40, 2, 16, 16, [70], [75]),
]
FULL_DECODE = [
    (32, 8, 128, 128, [16384, 4160, 0, 1, 4161, 16383, 100, 8000], 8 * [16640]),
    *((2 * group, 2, dim, dim, [1024, 700], [1025, 1024]) for dim, group in OF_MODELS),
]


@needs_triton
@pytest.mark.parametrize(
    ("dtype", "softcap", "weighted", "sinks"),
    [
        (FLOAT, None, True, False),
        (FLOAT, 3.0, False, True),
        (BRAIN, 3.0, True, False),
        (HALF, None, True, True),
    ],
)
@pytest.mark.parametrize("shape", DECODE + (FULL_DECODE if FULL_SIZE else []), ids=str)
def test_decode(shape, dtype, softcap, weighted, sinks):
    drawn = draw(*shape, dtype=dtype, weighted=weighted)
    query, *entries = put_all(drawn)
    lengths, dim = shape[4], shape[2]
    scaling = dim**-0.5
    options = {"scaling": scaling, "softcap": softcap}
    if sinks:
        options["sinks"] = torch.linspace(-3.0, 9.0, query[:, :, 0].numel(), device=DEVICE)
        options["sinks"] = options["sinks"].view(query.shape[:2]).to(dtype)
    table = RowPointers(*entries)
    held = counts(lengths)
    out, mass = weighted_decode_attention(query, table, held, return_mass=True, **options)
    expected = by_definition(query, *entries, lengths, scaling, softcap, options.get("sinks"))
    assert out.dtype == dtype
    assert relative(out, expected[0]) < {FLOAT: 1e-5, HALF: 2e-3, BRAIN: 1e-2}[dtype]
    assert relative(mass, expected[1]) < 1e-4, "float32, whatever the dtype"
    alone, none = weighted_decode_attention(query, table, held, **options)
    assert none is None
    assert torch.equal(alone, out)


@needs_triton
def test_decode_of_hidden_heads_and_of_views_of_one_pool():
    weights = torch.zeros(2, 300, device=DEVICE)
    weights[1] = -torch.inf
    ones = torch.ones(2, 300, 16, device=DEVICE)
    query = torch.ones(2, 4, 16, device=DEVICE)
    table = RowPointers([ones, ones[:, 250:]], [ones, ones[:, :50]], [weights, None])
    out, mass = weighted_decode_attention(
        query, table, counts([200, 50]), scaling=1.0, return_mass=True
    )
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0]).view(4, 1).expand(4, 16)
    torch.testing.assert_close(out[0].cpu(), expected)
    assert not mass[0, 1].any()
    assert not mass[0, 0, 200:].any()
    torch.testing.assert_close(mass[0, 0, :200].cpu(), torch.full((200,), 1 / 200))
    torch.testing.assert_close(out[1].cpu(), torch.ones(4, 16))


@needs_triton
def test_a_nan_logit_is_a_nan_answer():
    """Of its row and head alone; zeros would look like an answer."""
    keys, values = torch.ones(2, 1, 300, 16, device=DEVICE)
    keys[0, 290] = torch.nan
    query = torch.ones(1, 2, 16, device=DEVICE)
    both_heads = torch.cat([keys, torch.ones_like(keys)]), torch.cat([values, values])
    table = RowPointers([both_heads[0]], [both_heads[1]])
    out, mass = weighted_decode_attention(
        query, table, counts([300]), scaling=1.0, return_mass=True
    )
    assert out[0, 0].isnan().all()
    assert mass[0, 0].isnan().all()
    torch.testing.assert_close(out[0, 1].cpu(), torch.ones(16))


@needs_triton
@pytest.mark.parametrize("heads", [14, 16, 25])
def test_arguments_of_a_kernel_are_aligned_whatever_the_number_of_heads(heads, monkeypatch):
    """Triton compiles a kernel of its own for addresses that 16 does not divide."""
    from kvbench.kernels import _triton_decode

    addresses, reduce = [], _triton_decode.reduce_kernel

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                addresses.extend(x.data_ptr() for x in arguments if isinstance(x, torch.Tensor))
                reduce[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(_triton_decode, "reduce_kernel", Recorder())
    keys = torch.randn(1, 40, 16, device=DEVICE)
    query = torch.randn(1, heads, 16, device=DEVICE)
    table = RowPointers([keys], [keys])
    weighted_decode_attention(query, table, counts([40]), scaling=1.0)
    assert addresses
    assert not any(address % 16 for address in addresses)


@needs_triton
def test_append():
    keys = [torch.zeros(2, 3, 4, device=DEVICE), torch.zeros(2, 9, 4, device=DEVICE)]
    values = [torch.zeros(2, 3, 5, device=DEVICE), torch.zeros(2, 9, 5, device=DEVICE)]
    weights = [None, torch.full((2, 9), 7.0, device=DEVICE)]
    new_key, new_value = torch.randn(2, 2, 4, device=DEVICE), torch.randn(2, 2, 5, device=DEVICE)
    table = RowPointers(keys, values, weights)
    append_entries(table, counts([2, 0]), new_key, new_value)
    for row, n in enumerate([2, 0]):
        assert torch.equal(keys[row][:, n], new_key[row])
        assert torch.equal(values[row][:, n], new_value[row])
    assert keys[1][:, 1:].abs().sum() == 0
    assert weights[1].tolist() == [[0.0] + 8 * [7.0]] * 2
    before = keys[0].clone()
    append_entries(table, counts([3, 1]), new_key + 1, new_value)
    assert torch.equal(keys[1][:, 1], new_key[1] + 1)
    assert torch.equal(keys[0], before)  # a full row stays as it is


KEY = torch.zeros(2, 5, 4)
"""A row's keys, or its values: 2 KV heads, 5 entries, 4 numbers."""


def test_what_does_not_fit_a_step_or_a_table_is_refused():
    table = RowPointers([KEY], [KEY])
    with pytest.raises(ValueError, match="over 1 rows of 2 KV heads of dim 4"):
        weighted_decode_attention(torch.zeros(1, 3, 4), table, counts([5]), scaling=1.0)
    fits = torch.zeros(1, 2, 4)
    wrong = [(fits[:, :1], fits), (fits, fits[..., :3]), (fits, fits.half()), (KEY, KEY)]
    for key, value in wrong:  # heads, dim, dtype, rows
        with pytest.raises(ValueError, match=r"(key|value) is .*; allowed: \(1, 2, 4\)"):
            append_entries(table, counts([3]), key, value)


def test_groups_of_many_query_heads_run_in_triton_and_too_wide_ones_are_refused(monkeypatch):
    assert _too_wide(71, 64, 2) is None
    assert _too_wide(128, 128, 4) is None
    assert "160 query heads" in str(_too_wide(160, 64, 2))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    keys = torch.randn(1, 4, 256)
    query = torch.zeros(1, 128, 256)
    with pytest.raises(ValueError, match="128 query heads of dim 256 share a KV head"):
        weighted_decode_attention(query, RowPointers([keys], [keys]), counts([4]), scaling=1.0)
    assert not takes(keys[0], keys[0], 128)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="cannot run as a Triton kernel: tensors on cpu"):
        weighted_decode_attention(
            query[:, :4], RowPointers([keys], [keys]), counts([4]), scaling=1.0
        )


# --- the table of where entries lie ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("entries", "chunk"), [(100, 128), (8 * 128, 128), (8 * 128 + 1, 256), (10**6, 4096)]
)
def test_a_chunk_is_the_entries_of_a_program_rounded_up_to_a_power_of_two(
    entries: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode, "multiprocessors", lambda device: 4)  # 16 programs
    keys = torch.zeros(1, 1, 1).expand(2, entries, 1)
    assert RowPointers([keys], [keys]).chunk == chunk


@pytest.mark.parametrize(
    ("keys", "aligned"),
    [
        (torch.zeros(2, 5, 4), True),
        (torch.zeros(2, 5, 5), False),  # an entry of 20 bytes
        (torch.zeros(2, 5, 8)[..., 1:5], False),  # the first one is at byte 4
    ],
    ids=["aligned", "stride", "address"],
)
def test_entries_are_aligned_at_16_bytes(keys: torch.Tensor, aligned: bool) -> None:
    assert RowPointers([keys], [keys]).aligned is aligned


@pytest.mark.parametrize(
    ("keys", "values", "log_weights", "message"),
    [
        ([], [], (), "0 rows of keys"),
        ([KEY, KEY.half()], [KEY, KEY.half()], (), "keys differ"),
        ([KEY.mT.contiguous().mT], [KEY], (), "not adjacent"),
        ([KEY], [KEY], [torch.zeros(2, 4)], "row 0 has keys, values, log-weights"),
    ],
)
def test_rows_that_do_not_fit_a_table_are_refused(
    keys: list[torch.Tensor], values: list[torch.Tensor], log_weights: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        RowPointers(keys, values, log_weights)
