"""Every hot operation, its plain torch form and its Triton kernel, against a float64 definition: kernels
are interpreted on the CPU at small awkward shapes, and run on CUDA at full size as well."""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch
from support.attention import by_definition, draw
from support.interpreted import DEVICE, HAVE_TRITON
from support.method_layers import walk_by_definition

from kvbench.kernels import _choice, balanced_walk, kcentre, online_clusters
from kvbench.kernels import attention_mass as mass_module
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.decode_attention import (
    _too_wide,
    append_entries,
    entry_table,
    weighted_decode_attention,
)
from kvbench.kernels.kcentre import greedy_k_centre, nearest_centre
from kvbench.kernels.online_clusters import OnlineClusters
from kvbench.kernels.quantize import Quantization, pack, unpack

# gpu_sanitize.sh sets the variable: under a sanitizer full shapes take hours.
FULL_SIZE = DEVICE == "cuda" and not os.environ.get("KVBENCH_SMALL_SHAPES")
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
needs_triton = pytest.mark.skipif(not HAVE_TRITON, reason="the package triton is not installed")
both = pytest.mark.parametrize("how", ["torch", pytest.param("triton", marks=needs_triton)])


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def put(*tensors):
    return [None if x is None else x.to(DEVICE) for x in tensors]


def put_all(drawn):
    """What `draw` returns, on the device."""
    query, *entries = drawn
    return query.to(DEVICE), *(put(*part) for part in entries)


# --- the walk -----------------------------------------------------------------------------------


def check_walk(how, keys, values, index, uniforms, counts=None, weights=None, gamma=4.0, **options):
    """Each sign is the one that follows from the signs before it, in float64, unless it is too close
    to call in float32. (One such sign changes all later ones, so signs alone cannot be compared.)"""
    options = {"offset": 0.025, "centre": "mean", **options}
    placed = put(keys, values, index, uniforms)
    more = dict(zip(("counts", "weights"), put(counts, weights), strict=True))
    positive = balanced_walk.balanced_walk(
        *placed, gamma=gamma, implementation=how, **more, **options
    )
    assert positive.dtype == torch.bool
    assert positive.shape == index.shape
    close = total = 0
    heads = torch.cartesian_prod(*map(torch.arange, index.shape[:2])).tolist()
    for head in map(tuple, heads):
        part = [None if x is None else x[head] for x in (keys, values, index, uniforms)]
        mine = [None if x is None else x[head] for x in (counts, weights)]
        room, blur, real = rooms_of_walk(positive[head], *put(*part, *mine), gamma, **options)
        clear = real & (room.abs() > blur)
        clear[:, 0] = False  # the first sign has no choice
        assert not (positive[head] != (room > 0))[clear].any(), head
        assert positive[head][:, 0][real[:, 0]].all()
        close += int((real & (room.abs() <= blur))[:, 1:].sum())
        total += int(real.sum())
    assert close <= 0.02 * total + 1  # else the check would be empty


def rooms_of_walk(
    positive, keys, values, index, uniforms, counts, weights, gamma, *, offset, centre
):
    """By definition and in float64, of the blocks [blocks, b] of one head: the number whose sign is each
    entry's, given the signs before it; how far float32 may be from it; and which entries there are."""
    b = index.shape[1]
    lengths = torch.full(index.shape[:1], b) if counts is None else counts
    real = torch.arange(b, device=index.device) < lengths.to(index.device)[:, None]
    k = keys.double()[index] * real[..., None]
    if centre != "none":
        divisor = real.sum(1).clamp(min=1)[:, None, None] if centre == "mean" else b
        k = k - k.sum(1, keepdim=True) / divisor
    e = k @ k.mT / keys.shape[1] ** 0.5
    earlier = torch.ones(b, b, dtype=torch.bool, device=index.device).tril(-1)
    e = e.masked_fill(~(earlier & real[:, None]), -torch.inf)
    largest = e.amax(-1).clamp(min=0.0)
    g = (e - largest[..., None]).exp()
    if values is not None:
        v = values.double()[index]
        if weights is not None:
            v = v * weights[..., None].double()
        g = g * (v @ v.mT + offset)
    signs = 2.0 * positive.double() - 1.0
    inner = (g @ signs[..., None])[..., 0]
    room = (0.5 - uniforms.double()) / gamma * (-largest).exp() - inner
    blur = 2e-5 * (g.abs().sum(-1) + (-largest).exp() / gamma)
    return room, blur, real


def walk_inputs(heads, blocks, b, d, e, dtype, seed=0):
    g, n = generator(seed), blocks * b
    keys = torch.randn(1, heads, n, d, generator=g).to(dtype)
    values = torch.randn(1, heads, n, e, generator=g).to(dtype)
    index = torch.stack([torch.randperm(n, generator=g) for _ in range(heads)])
    uniforms = torch.rand(1, heads, blocks, b, generator=g)
    return keys, values, index.view(1, heads, blocks, b), uniforms


WALKS = [
    # heads, blocks, b, d, e, dtype
    *((2, 2, b, d, e, FLOAT) for b, d, e in [(1, 16, 16), (63, 5, 40), (64, 32, 32)]),
    *((2, 2, 130, 64, 64, dtype) for dtype in (FLOAT, BRAIN, HALF)),
    (1, 1, 256, 128, 128, BRAIN),
    *((1, 2, 70, d, d, BRAIN) for d in (80, 96)),
]
FULL_WALKS = [
    (8, 16384 // b, b, d, d, dtype)
    for b, d, dtype in [
        *((64, 32, BRAIN), (64, 80, FLOAT), (64, 128, HALF), (64, 256, BRAIN)),
        *((128, 64, FLOAT), (128, 96, BRAIN), (128, 128, FLOAT), (128, 256, HALF)),
        *((256, 64, HALF), (256, 80, BRAIN), (256, 128, BRAIN), (256, 256, FLOAT)),
    ]
]
"""Of all blocks, dimensions and dtypes a third, each of them several times."""


@both
@pytest.mark.parametrize("shape", WALKS + (FULL_WALKS if FULL_SIZE else []), ids=str)
def test_walk(shape, how):
    check_walk(how, *walk_inputs(*shape, seed=shape[2]))


@both
@pytest.mark.parametrize(("centre", "gamma"), [("mean", 4.0), ("released", 0.02), ("none", 4.0)])
def test_walk_of_short_blocks_with_weights_and_without_values(centre, gamma, how):
    keys, values, index, uniforms = walk_inputs(2, 3, 70, 24, 24, BRAIN)
    counts = torch.tensor([[[70, 64, 0], [70, 65, 1]]])
    weights = 2.0 ** torch.randint(0, 4, index.shape, generator=generator(1))
    check_walk(how, keys, values, index, uniforms, counts, weights, gamma, centre=centre)
    check_walk(how, keys, None, index, uniforms, counts, gamma=0.1, centre=centre)


@both
@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_walk_over_keys_of_any_norm(dtype, how):
    """Far beyond float32's exponentials; rows with and without scaling beside each other."""
    keys, values, index, uniforms = walk_inputs(1, 2, 80, 128, 16, FLOAT)
    keys *= 1e3 / keys.norm(dim=-1, keepdim=True)
    keys[:, :, ::3] *= 1e-2
    check_walk(how, keys.to(dtype), values.to(dtype), index, uniforms)


@both
def test_walk_over_equal_keys_and_strided_ones(how):
    """All-equal keys are zero once centred: a fair coin pulled back by the count of signs alone."""
    keys = torch.full((1, 1, 100, 16), 3.25, dtype=BRAIN)
    ones, index = torch.ones_like(keys), torch.arange(100).view(1, 1, 1, 100)
    uniforms = torch.rand(1, 1, 1, 100, generator=generator(0))
    check_walk(how, keys, ones, index, uniforms, gamma=0.001)
    options = {"gamma": 4.0, "offset": 0.025, "implementation": how}
    positive = balanced_walk.balanced_walk(*put(keys, ones, index, uniforms), **options)
    assert int(positive.sum()) == 50
    keys, values, index, uniforms = put(*walk_inputs(3, 1, 40, 16, 16, FLOAT))
    wide = torch.zeros(1, 3, 40, 20, device=DEVICE)
    wide[..., :16] = values
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)  # as a model leaves them
    found = balanced_walk.balanced_walk(strided, wide[..., :16], index, uniforms, **options)
    assert torch.equal(found, balanced_walk.balanced_walk(keys, values, index, uniforms, **options))


@pytest.mark.parametrize("seed", range(8))
def test_walk_in_float64_is_the_definition(seed, monkeypatch):
    """Sign by sign, whatever the tiles."""
    dice, g = random.Random(seed), generator(seed)
    for _ in range(5):
        b, blocks, d = dice.randint(2, 40), dice.randint(1, 4), dice.randint(1, 9)
        centre = dice.choice(["mean", "released", "none"])
        scale = 0.6 * dice.choice([1.0, 30.0, 1e3])
        keys = scale * torch.randn(blocks * b, d, generator=g, dtype=torch.float64)
        values = 0.5 * torch.randn(blocks * b, d + 1, generator=g, dtype=torch.float64)
        values = values if dice.random() < 0.5 else None
        index = torch.randperm(blocks * b, generator=g).view(blocks, b)
        uniforms = torch.rand(blocks, b, generator=g)
        counts = torch.randint(0, b + 1, (blocks,), generator=g)
        weights = 2.0 ** torch.randint(0, 4, (blocks, b), generator=g).double()
        options = {"gamma": dice.choice([0.01, 0.1, 4.0]), "offset": 0.025, "centre": centre}
        options["temperature"] = dice.choice([0.0, 0.5, 1.0])
        options["beta"] = dice.choice([0.0, 0.7, -0.4])
        tiles = dice.choice([(1, 1, 1), (3, 2, 16), (128, 8, 64)])
        for name, value in zip(("GROUP", "CHUNK", "STRIP"), tiles, strict=True):
            monkeypatch.setattr(balanced_walk, name, value)
        more = {"counts": counts, "weights": weights, **options}
        positive = balanced_walk.balanced_walk(keys, values, index, uniforms, **more)
        for block, n in enumerate(counts.tolist()):
            if n:
                rows = index[block, :n]
                v = None if values is None else values[rows] * weights[block, :n, None]
                how = {"padded": b - n, **options}
                expected = walk_by_definition(keys[rows], v, uniforms[block], **how)
                np.testing.assert_array_equal(positive[block, :n].numpy(), expected)


def test_walk_of_large_values_is_that_in_float64():
    """What the keys alone keep finite, e^55, overflows with values of 1e8, beside tiny ones."""
    keys, values, index, uniforms = walk_inputs(2, 3, 40, 16, 16, FLOAT)
    keys = 220**0.5 * torch.nn.functional.normalize(1 + 0.02 * keys, dim=-1)
    values = torch.nn.functional.normalize(values, dim=-1) * 1e8
    values[:, :, ::3] *= 1e-20
    options = {"gamma": 4.0, "offset": 0.025, "centre": "none", "implementation": "torch"}
    one, other = (
        balanced_walk.balanced_walk(keys.to(kind), values.to(kind), index, uniforms, **options)
        for kind in (torch.float32, torch.float64)
    )
    assert torch.equal(one, other)


def test_a_walk_that_is_forced_onto_a_gpu_says_that_there_is_none(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    keys, values, index, uniforms = walk_inputs(1, 1, 8, 4, 4, FLOAT)
    with pytest.raises(ValueError, match="balanced_walk cannot run as a Triton kernel"):
        balanced_walk.balanced_walk(
            keys, values, index, uniforms, gamma=4.0, offset=0.0, implementation="triton"
        )


def test_walk_without_gamma_is_a_fair_coin():
    keys, values, index, uniforms = walk_inputs(2, 3, 40, 8, 8, FLOAT)
    signs = balanced_walk.balanced_walk(keys, values, index, uniforms, gamma=0.0, offset=0.025)
    assert signs[..., 0].all()
    assert torch.equal(signs[..., 1:], uniforms[..., 1:] < 0.5)


@needs_triton
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize(("m", "held"), [(2, 2), (3, 5), (77, 80), (1025, 2100), (2048, 2048)])
def test_cut(m, held, share):
    """The torch form is compared with the definition in the tests of BalanceKV."""
    g = generator(m)
    positive = (torch.rand(2, 3, m + 3, generator=g) < share)[:, :, :m]  # not contiguous
    order = torch.randint(0, 9999, (2, 3, held), generator=g)
    weights = 2.0 ** torch.randint(0, 3, (2, 3, held), generator=g)
    expected = halve(positive, order, weights, implementation="torch")
    found = halve(*put(positive, order, weights), implementation="triton")
    assert all(torch.equal(one.cpu(), other) for one, other in zip(found, expected, strict=True))


# --- decode attention ---------------------------------------------------------------------------

DECODE = [
    # heads, kv_heads, dim, value_dim, lengths, reserved
    (1, 1, 4, 4, [1], [1]),
    (4, 2, 16, 16, [3, 0, 130], [8, 2, 131]),
    (6, 1, 40, 24, [129, 257], [300, 257]),
    (40, 2, 16, 16, [70], [75]),
]
FULL_DECODE = [
    (32, 8, 128, 128, [16384, 4160, 0, 1, 4161, 16383, 100, 8000], 8 * [16640]),
]


@both
@pytest.mark.parametrize(
    ("dtype", "softcap", "weighted"),
    [(FLOAT, None, True), (FLOAT, 3.0, False), (BRAIN, 3.0, True), (HALF, None, True)],
)
@pytest.mark.parametrize("shape", DECODE + (FULL_DECODE if FULL_SIZE else []), ids=str)
def test_decode(shape, dtype, softcap, weighted, how):
    query, keys, values, weights = draw(*shape, dtype=dtype, weighted=weighted)
    lengths, options = shape[4], {"scaling": shape[2] ** -0.5, "softcap": softcap}
    table = entry_table(put(*keys), put(*values), put(*weights))
    counts, options["implementation"] = torch.tensor(lengths, device=DEVICE), how
    out, mass = weighted_decode_attention(
        query.to(DEVICE), table, counts, return_mass=True, **options
    )
    entries = (put(*keys), put(*values), put(*weights))
    (query_there,) = put(query)
    expected = by_definition(query_there, *entries, lengths, options["scaling"], softcap)
    assert out.dtype == dtype
    bound = {FLOAT: 1e-5, HALF: 2e-3, BRAIN: 1e-2}[dtype]
    assert relative(out, expected[0]) < bound
    assert relative(mass, expected[1]) < (1e-4 if how == "triton" or dtype == FLOAT else bound)
    alone, none = weighted_decode_attention(query.to(DEVICE), table, lengths, **options)
    assert none is None
    assert torch.equal(alone, out)


PACKED = [
    # bits, group_size, heads, kv_heads, dim, value_dim, packed entries, entries of every row
    (4, 64, 4, 2, 16, 16, [130, 37, 256], [150, 38, 256]),
    (2, 16, 6, 1, 40, 24, [129, 257, 1], [129, 400, 2]),
    (4, 8, 2, 2, 80, 80, [300, 17], [301, 80]),
    (2, 128, 20, 1, 64, 33, [5], [9]),
]
FULL_PACKED = [(4, 64, 32, 8, 128, 128, [16384, 4161, 1], [16400, 4161, 2])]


@both
@pytest.mark.parametrize(
    ("dtype", "softcap", "weighted"), [(FLOAT, None, True), (BRAIN, 3.0, False), (HALF, None, True)]
)
@pytest.mark.parametrize("shape", PACKED + (FULL_PACKED if FULL_SIZE else []), ids=str)
def test_decode_of_packed_entries_followed_by_others(shape, dtype, softcap, weighted, how):
    """As over the numbers that the codes stand for; what lies behind a row's entries is not read."""
    bits, group_size, heads, kv_heads, dim, value_dim, counts, lengths = shape
    restored = draw(heads, kv_heads, dim, value_dim, lengths, lengths, dtype, weighted)
    query, keys, values, weights = put_all(restored)
    quantization, packed, buffers = Quantization(bits, group_size), [], []
    for row, count in enumerate(counts):
        sides = []
        for part, by_channel in ((keys[row], True), (values[row], False)):
            side = pack(part[:, :count], quantization, by_channel=by_channel)
            part[:, :count] = unpack(side)
            sides.append(side)
        packed.append(tuple(sides))
        room = torch.full((kv_heads, 3, 1), torch.nan, device=DEVICE, dtype=dtype)
        buffers.append(
            [
                torch.cat([part[row][:, count:], room.expand(-1, -1, part[row].shape[2])], 1)
                for part in (keys, values)
            ]
        )
    more = [None if x is None else torch.cat([x, x[:, :1].expand(-1, 3)], 1) for x in weights]
    table = entry_table(*zip(*buffers, strict=True), more, packed=packed, longest_packed=500)
    options = {"scaling": dim**-0.5, "softcap": softcap}
    out, _ = weighted_decode_attention(query, table, lengths, **options, implementation=how)
    expected, _ = by_definition(query, keys, values, weights, lengths, *options.values())
    assert out.dtype == dtype
    assert relative(out, expected) < {FLOAT: 1e-5, HALF: 2e-3, BRAIN: 1e-2}[dtype]


@both
def test_decode_of_hidden_heads_and_of_views_of_one_pool(how):
    weights = torch.zeros(2, 300, device=DEVICE)
    weights[1] = -torch.inf
    ones = torch.ones(2, 300, 16, device=DEVICE)
    query = torch.ones(2, 4, 16, device=DEVICE)
    table = entry_table([ones, ones[:, 250:]], [ones, ones[:, :50]], [weights, None])
    out, mass = weighted_decode_attention(
        query, table, [200, 50], scaling=1.0, return_mass=True, implementation=how
    )
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0]).view(4, 1).expand(4, 16)
    torch.testing.assert_close(out[0].cpu(), expected)
    assert not mass[0, 1].any()
    assert not mass[0, 0, 200:].any()
    torch.testing.assert_close(mass[0, 0, :200].cpu(), torch.full((200,), 1 / 200))
    torch.testing.assert_close(out[1].cpu(), torch.ones(4, 16))


@both
def test_a_nan_logit_is_a_nan_answer(how):
    """Of its row and head alone; zeros would look like an answer."""
    keys, values = torch.ones(2, 1, 300, 16, device=DEVICE)
    keys[0, 290] = torch.nan
    query = torch.ones(1, 2, 16, device=DEVICE)
    both_heads = torch.cat([keys, torch.ones_like(keys)]), torch.cat([values, values])
    table = entry_table([both_heads[0]], [both_heads[1]])
    out, mass = weighted_decode_attention(
        query, table, [300], scaling=1.0, return_mass=True, implementation=how
    )
    assert out[0, 0].isnan().all()
    assert mass[0, 0].isnan().all()
    torch.testing.assert_close(out[0, 1].cpu(), torch.ones(16))


@needs_triton
@pytest.mark.parametrize("heads", [14, 16, 25])
def test_what_a_kernel_is_given_is_aligned_whatever_the_number_of_heads(heads, monkeypatch):
    """Triton compiles a kernel of its own for addresses that 16 does not divide."""
    from kvbench.kernels import _triton_decode

    given, reduce = [], _triton_decode.reduce_kernel

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, **options):
                given.extend(x.data_ptr() % 16 for x in arguments if isinstance(x, torch.Tensor))
                reduce[grid](*arguments, **options)

            return launch

    monkeypatch.setattr(_triton_decode, "reduce_kernel", Recorder())
    keys = torch.randn(1, 40, 16, device=DEVICE)
    query = torch.randn(1, heads, 16, device=DEVICE)
    table = entry_table([keys], [keys])
    weighted_decode_attention(query, table, [40], scaling=1.0, implementation="triton")
    assert given
    assert not any(given)


@both
def test_append(how):
    keys = [torch.zeros(2, 3, 4, device=DEVICE), torch.zeros(2, 9, 4, device=DEVICE)]
    values = [torch.zeros(2, 3, 5, device=DEVICE), torch.zeros(2, 9, 5, device=DEVICE)]
    weights = [None, torch.full((2, 9), 7.0, device=DEVICE)]
    new_key, new_value = torch.randn(2, 2, 4, device=DEVICE), torch.randn(2, 2, 5, device=DEVICE)
    table = entry_table(keys, values, weights)
    append_entries(table, [2, 0], new_key, new_value, implementation=how)
    for row, n in enumerate([2, 0]):
        assert torch.equal(keys[row][:, n], new_key[row])
        assert torch.equal(values[row][:, n], new_value[row])
    assert keys[1][:, 1:].abs().sum() == 0
    assert weights[1].tolist() == [[0.0] + 8 * [7.0]] * 2
    before = keys[0].clone()
    if how == "torch":
        with pytest.raises(
            ValueError, match="row 0 has length 3 before a new entry; allowed: 0 to 2"
        ):
            append_entries(table, [3, 1], new_key, new_value, implementation=how)
    else:
        append_entries(table, [3, 1], new_key + 1, new_value, implementation=how)
        assert torch.equal(keys[1][:, 1], new_key[1] + 1)
    assert torch.equal(keys[0], before)  # a full row stays as it is


@both
def test_append_behind_packed_entries(how):
    """Places count packed entries, the buffers do not."""
    prompt, new = torch.randn(2, 5, 4, device=DEVICE), torch.randn(1, 2, 4, device=DEVICE)
    sides = [
        pack(prompt, Quantization(4, 4), by_channel=by_channel) for by_channel in (True, False)
    ]
    keys, values = torch.zeros(2, 2, 3, 4, device=DEVICE)
    weights = torch.ones(2, 8, device=DEVICE)
    table = entry_table([keys], [values], [weights], packed=[tuple(sides)])
    append_entries(table, [6], new, new + 1, implementation=how)
    for buffer, token in ((keys, new), (values, new + 1)):
        assert torch.equal(buffer[:, 1], token[0])
        assert not buffer[:, ::2].any()
    assert weights.tolist() == [[1, 1, 1, 1, 1, 1, 0, 1]] * 2
    if how == "torch":
        for place in (4, 8):
            with pytest.raises(ValueError, match=f"row 0 has length {place} before a new entry"):
                append_entries(table, [place], new, new, implementation=how)


def test_what_does_not_fit_is_refused(monkeypatch):
    key, query = torch.zeros(2, 5, 4), torch.zeros(1, 4, 4)
    table = entry_table([key], [key])
    for arguments, message in [
        (([], []), "0 rows of keys"),
        (([key, key.half()], [key, key.half()]), "keys differ"),
        (([key.mT.contiguous().mT], [key]), "not adjacent"),
        (([key], [key], [torch.zeros(2, 4)]), "row 0 has keys, values, log-weights"),
    ]:
        with pytest.raises(ValueError, match=message):
            entry_table(*arguments)
    of_keys, of_values = (pack(key, Quantization(4, 4), by_channel=side) for side in (True, False))
    odd = tuple(pack(key, Quantization(4, 3), by_channel=side) for side in (True, False))
    for packed, message in [
        ([(of_keys, of_values)] * 2, "2 rows have packed entries; allowed: none, or 1"),
        (
            [(of_values, of_keys)],
            "row 0 is packed by .*; allowed: keys by channel, values by entry",
        ),
        ([odd], "group_size=3.*; allowed: .*groups of a power of two"),
        (
            [(pack(key[:1], Quantization(4, 4), by_channel=True), of_values)],
            "row 0 has packed keys",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            entry_table([key], [key], packed=packed)
    with pytest.raises(ValueError, match="return_mass is True and entries are packed"):
        weighted_decode_attention(
            query,
            entry_table([key], [key], packed=[(of_keys, of_values)]),
            [6],
            scaling=1.0,
            return_mass=True,
        )
    for q, lengths, how, message in [
        (query[:, :3], [5], "auto", "over 1 rows of 2 KV heads of dim 4"),
        (query, [6], "auto", "row 0 has length 6"),
        (query, [5], "cuda", "implementation is 'cuda'; allowed: auto, triton, torch"),
    ]:
        with pytest.raises(ValueError, match=message):
            weighted_decode_attention(q, table, lengths, scaling=1.0, implementation=how)
    fits = torch.zeros(1, 2, 4)
    for new in ((fits[:, :1], fits), (fits, fits[..., :3]), (fits, fits.half()), (key, key)):
        with pytest.raises(ValueError, match=r"(key|value) is .*; allowed: \(1, 2, 4\)"):
            append_entries(table, [3], *new)
    with pytest.raises(ValueError, match="5 queries of 2 heads over 4 keys"):
        attention_mass(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 4, 8), scaling=1.0)
    with pytest.raises(ValueError, match="4 centres of 3 points"):
        greedy_k_centre(torch.zeros(1, 3, 2), 4, torch.tensor([0]))
    # 128 query heads of one KV head do run as a kernel; wider ones say what they are.
    assert _too_wide(71, 64, 2) is None
    assert _too_wide(128, 128, 4) is None
    assert "160 query heads" in str(_too_wide(160, 64, 2))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    keys = torch.randn(1, 4, 256)
    wide, table = torch.zeros(1, 128, 256), entry_table([keys], [keys])
    with pytest.raises(ValueError, match="128 query heads of dim 256 share a KV head"):
        weighted_decode_attention(wide, table, [4], scaling=1.0, implementation="triton")


# --- attention mass -----------------------------------------------------------------------------


def mass_by_definition(queries, keys, scaling, softcap=None):
    """Column sums and logarithms of the normalisers, float64."""
    m, n, group = queries.shape[2], keys.shape[2], queries.shape[1] // keys.shape[1]
    logits = queries.double() @ keys.double().repeat_interleave(group, 1).mT * scaling
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    future = torch.ones(m, n, dtype=torch.bool, device=keys.device).triu(n - m + 1)
    logits = logits.masked_fill(future, -torch.inf)
    return logits.softmax(-1).sum(2), logits.logsumexp(-1)


MASS = [
    # batch, heads, kv_heads, m, n, dim, dtype, softcap
    (1, 1, 1, 1, 1, 4, FLOAT, None),
    (2, 4, 2, 33, 33, 8, BRAIN, 2.0),
    (1, 2, 1, 201, 201, 16, HALF, None),
    (1, 8, 1, 90, 90, 16, FLOAT, 2.0),
    (2, 6, 2, 7, 100, 5, FLOAT, 2.0),
    (1, 2, 2, 130, 190, 40, BRAIN, None),
]
FULL_MASS = [(1, 8, 2, 5000, 5000, 128, BRAIN, 2.0)]


@both
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("shape", MASS + (FULL_MASS if FULL_SIZE else []), ids=str)
def test_mass(shape, known, how, monkeypatch):
    *_, m, n, dim, dtype, softcap = shape
    g, (batch, heads, kv_heads) = generator(m * n), shape[:3]
    # As a model leaves them: heads inside positions in memory.
    queries = (3 * torch.randn(batch, m, heads, dim, generator=g)).to(DEVICE, dtype).transpose(1, 2)
    keys = torch.randn(batch, n, kv_heads, dim, generator=g).to(DEVICE, dtype).transpose(1, 2)
    expected, normalisers = mass_by_definition(queries, keys, 0.4, softcap)
    options = {"normalisers": normalisers.float()} if known else {}
    if known and how == "triton":
        from kvbench.kernels import _triton_mass

        monkeypatch.setattr(_triton_mass, "normaliser_kernel", None)  # one launch is enough
    found = attention_mass(
        queries, keys, scaling=0.4, softcap=softcap, implementation=how, **options
    )
    assert found.dtype == torch.float32
    assert relative(found, expected) < 3e-4
    torch.testing.assert_close(
        found.sum(-1).cpu(), torch.full((batch, heads), float(m)), rtol=3e-4, atol=0
    )


@pytest.mark.parametrize("tile", [(1, (7, 64)), (1 << 10, (64, 7)), (1 << 19, (256, 2048))])
def test_mass_whatever_the_tiles_and_the_size_of_logits(tile, monkeypatch):
    monkeypatch.setattr(mass_module, "TILE_ELEMENTS", tile[0])
    monkeypatch.setattr(mass_module, "TILE", tile[1])
    queries = 30.0 * torch.randn(2, 6, 90, 5, generator=generator(0))
    keys = torch.randn(2, 2, 90, 5, generator=generator(1))
    expected, normalisers = mass_by_definition(queries, keys, 0.7)
    for known in (None, normalisers.float()):
        found = attention_mass(queries, keys, scaling=0.7, normalisers=known)
        torch.testing.assert_close(found.double(), expected, rtol=3e-4, atol=1e-5)
    huge = 1e3 * keys
    found = attention_mass(huge, huge, scaling=1.0)
    torch.testing.assert_close(found.double(), mass_by_definition(huge, huge, 1.0)[0])


def test_mass_where_some_tiles_need_a_shift_and_others_do_not(monkeypatch):
    """Blocks of queries whose normalisers lie on both sides of `UNSHIFTED`, and far below zero."""
    monkeypatch.setattr(mass_module, "TILE", (32, 64))
    queries = torch.randn(1, 4, 300, 8, generator=generator(0))
    keys = torch.randn(1, 2, 300, 8, generator=generator(1))
    queries[:, :, 100:200] *= 40.0
    queries[:, :, 0] = -30.0 * keys.repeat_interleave(2, 1)[:, :, 0]  # sees itself alone: e^-200
    expected, normalisers = mass_by_definition(queries, keys, 1.0)
    blocks = (normalisers.abs() > mass_module.UNSHIFTED).split(32, -1)
    assert {bool(block.any()) for block in blocks} == {True, False}
    assert normalisers.min() < -mass_module.UNSHIFTED
    found = attention_mass(queries, keys, scaling=1.0, normalisers=normalisers.float())
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@needs_triton
def test_mass_of_a_window_over_shared_out_keys(monkeypatch):
    """Few queries over many keys: the first pass is split over the keys."""
    from kvbench.kernels import _triton_mass

    monkeypatch.setattr(_triton_mass, "multiprocessors", lambda device: 6)
    queries, keys = put(
        torch.randn(1, 2, 40, 16, generator=generator(0)), torch.randn(1, 1, 3000, 16)
    )
    found = attention_mass(queries, keys, scaling=1.0, implementation="triton")
    expected, _ = mass_by_definition(queries, keys, 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not FULL_SIZE, reason="full size: needs CUDA")
def test_mass_at_128k_fits_where_a_matrix_would_not():
    torch.cuda.reset_peak_memory_stats()
    queries = torch.randn(1, 2, 131072, 128, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, 1, 131072, 128, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    mass = attention_mass(queries, keys, scaling=128**-0.5, implementation="triton")
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    torch.testing.assert_close(mass.sum(-1), torch.full_like(mass[..., 0], 131072.0))


# --- k-centre and online clusters ---------------------------------------------------------------


def check_centres(points, centres, first):
    """The greedy choice: every centre is as far from those before it as any point is."""
    assert torch.equal(centres[:, :1], first[: len(centres), None][:, : centres.shape[1]])
    for x, head in zip(points.to(DEVICE).double(), centres, strict=True):
        assert head.unique().numel() == len(head)
        distance = (x - x[head[:1]]).square().sum(1) if len(head) else x[:, 0]
        for step in head[1:].tolist():
            assert float(distance[step]) >= float(distance.max()) * (1 - 1e-4) - 1e-6
            distance = distance.minimum((x - x[step]).square().sum(1))


def points_of(kind, batch, n, dim):
    if kind == "equal":
        return torch.ones(batch, n, dim)
    g = generator(1)
    points = torch.randn(batch, n, dim, generator=g) + 2.0
    if kind == "clustered":
        hubs = 4 * torch.randn(batch, 6, dim, generator=g)
        points = hubs[:, torch.randint(6, (n,), generator=g)] + 0.3 * points
    if kind == "far neighbours":
        points[:, 48:72] *= 20
    return points


CENTRES = [
    # batch, n, dim, count, dtype, kind
    (1, 1, 4, 1, FLOAT, "spread"),
    (2, 65, 3, 65, BRAIN, "spread"),
    (2, 150, 40, 30, HALF, "spread"),
    (2, 150, 5, 24, FLOAT, "clustered"),
    (1, 30, 3, 30, FLOAT, "equal"),
]


@both
@pytest.mark.parametrize(
    "case", CENTRES + ([(8, 16384, 128, 4000, BRAIN, "spread")] if FULL_SIZE else []), ids=str
)
def test_kcentre(case, how):
    batch, n, dim, count, dtype, kind = case
    points = points_of(kind, batch, n, dim).to(dtype)
    first = torch.randint(0, n, (batch,), generator=generator(n))
    centres = greedy_k_centre(*put(points), count, *put(first), implementation=how).cpu()
    assert centres.shape == (batch, count)
    check_centres(points, centres, first)


@pytest.mark.parametrize("seed", range(8))
def test_kcentre_in_passes_of_any_size(seed, monkeypatch):
    dice = random.Random(seed)
    for _ in range(6):
        batch, n, dim = dice.randint(1, 3), dice.randint(1, 150), dice.randint(1, 6)
        points = torch.randn(batch, n, dim, generator=generator(n))
        first = torch.randint(0, n, (batch,), generator=generator(n))
        monkeypatch.setattr(kcentre, "CANDIDATES", dice.choice([1, 3, 128]))
        centres = greedy_k_centre(points, dice.randint(0, n), first)
        check_centres(points, centres, first)
        if centres.shape[1]:
            rows = points.gather(1, centres.unsqueeze(-1).expand(-1, -1, dim))
            nearest = nearest_centre(points, centres)
            apart = (points.unsqueeze(2) - rows.unsqueeze(1)).double().norm(dim=-1)
            found = apart.gather(2, nearest.unsqueeze(-1)).squeeze(-1)
            torch.testing.assert_close(
                found, apart.amin(-1), atol=2e-3, rtol=0
            )  # near ties may swap


def test_a_centre_is_nearest_to_itself():
    same = torch.ones(1, 5, 2)
    assert nearest_centre(same, torch.tensor([[1, 3]]))[0, [1, 3]].tolist() == [0, 1]


@needs_triton
@pytest.mark.parametrize(
    ("kind", "passes"),
    [("spread", 5), ("far neighbours", 8), pytest.param("clustered", 20, marks=pytest.mark.slow)],
)
def test_kcentre_by_passes_of_many_programs(kind, passes, monkeypatch):
    """The same centres in the same order, whether the passes find all or one program has to finish."""
    from kvbench.kernels import _triton_kcentre

    options, finish, filled = _triton_kcentre.kcentre_options, _triton_kcentre.finish_kernel, []

    class Finish:
        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                filled.extend(args[4].tolist())
                finish[grid](*args, **kwargs)

            return launch

    small = {"POINTS": 16, "CENTRES": 16}
    monkeypatch.setattr(_triton_kcentre, "kcentre_options", lambda *a: {**options(*a), **small})
    monkeypatch.setattr(_triton_kcentre, "passes", lambda count, candidates: passes)
    monkeypatch.setattr(_triton_kcentre, "finish_kernel", Finish())
    points, first = points_of(kind, 2, 150, 5), torch.tensor([3, 149])
    found = greedy_k_centre(*put(points), 24, *put(first), implementation="triton").cpu()
    assert torch.equal(found, greedy_k_centre(points, 24, first, implementation="torch"))
    assert filled == [24, 24] if passes >= 8 else 1 < max(filled) < 24


@needs_triton
@pytest.mark.parametrize(("heads", "n", "most"), [(1, 1, None), (3, 300, None), (2, 90, 7)])
def test_online_clusters(heads, n, most, monkeypatch):
    """The torch form is compared with the algorithm in the tests of SubGen."""
    points = torch.randn(heads, n, 3, generator=generator(n)).to(DEVICE)
    delta, where = torch.linspace(0.8, 1.2, heads, device=DEVICE), {}
    for implementation in ("torch", "triton"):
        monkeypatch.setenv(_choice.VARIABLE, implementation)
        found = OnlineClusters(heads, 3, delta, most)
        where[implementation] = torch.cat([found.read(part) for part in points.split(64, 1)], 1)
    assert torch.equal(where["triton"], where["torch"])
    assert most is None or int(found.clusters.max()) == most


@pytest.mark.parametrize("size", [1.0, 1e3, 1e4])
def test_far_from_clusters_is_what_differences_say_where_products_round(size):
    """Points at 1 +- 1e-4 times delta from one of the clusters, whose norms are 0 to `size`."""
    g = generator(3)
    others = size * torch.randn(2, 6, 8, generator=g)
    others[:, 0] = 0.0
    place = torch.randint(0, 6, (2, 200), generator=g)
    steps = torch.nn.functional.normalize(torch.randn(2, 200, 8, generator=g), dim=-1)
    delta, factor = torch.tensor([0.5, 2.0]), 1 + 1e-4 * torch.randn(2, 200, 1, generator=g)
    points = (
        others.gather(1, place[..., None].expand(-1, -1, 8)) + delta[:, None, None] * steps * factor
    )
    among = torch.ones(2, 1, 6, dtype=torch.bool)
    among[1, 0, 3] = False
    far = online_clusters._farther(points, others, among, delta)
    apart = (points[:, :, None] - others[:, None]).square().sum(-1).sqrt()
    wanted = apart.masked_fill(~among, math.inf).amin(-1) > delta[:, None]
    assert torch.equal(far, wanted)
    assert 0.2 < far.float().mean() < 0.8


# --- the switch ---------------------------------------------------------------------------------


@needs_triton
def test_the_switch(monkeypatch):
    keys = torch.zeros(1, 1, 4, 8)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not _choice.use_triton("x", "auto", keys)
    with pytest.raises(ValueError, match="x cannot run as a Triton kernel: tensors on cpu"):
        _choice.use_triton("x", "triton", keys)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _choice.use_triton("x", "triton", keys)
    assert not _choice.use_triton("x", "torch", keys)
    for tensor, message in [
        (keys.double(), r"x cannot .*float64: needs one of"),
        (torch.zeros(2, 300), "head_dim 300: at most 256"),
    ]:
        with pytest.raises(ValueError, match=message):
            _choice.use_triton("x", "triton", tensor)
    monkeypatch.setenv("KVBENCH_KERNELS", "triton")
    assert _choice.use_triton("x", "auto", keys)
    monkeypatch.setenv("KVBENCH_KERNELS", "fast")
    with pytest.raises(ValueError, match="KVBENCH_KERNELS is 'fast'; allowed: auto, triton, torch"):
        _choice.use_triton("x", "auto", keys)
