"""Every Triton kernel against its plain torch reference: interpreted on CPU at small awkward shapes,
on CUDA at full size as well. Low-precision inputs are compared with the reference on the same ones."""

from __future__ import annotations

import pytest
import torch
from support.interpreted import DEVICE, HAVE_TRITON

from kvbench.kernels import _choice
from kvbench.kernels.attention_mass import attention_mass
from kvbench.kernels.balanced_cut import halve
from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kernels.decode_attention import append_entries, entry_table, weighted_decode_attention
from kvbench.kernels.kcentre import greedy_k_centre
from kvbench.kernels.online_clusters import OnlineClusters

pytestmark = pytest.mark.skipif(not HAVE_TRITON, reason="the package triton is not installed")
ON_GPU = DEVICE == "cuda"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


# --- the walk -----------------------------------------------------------------------------------


def check_walk(keys, values, index, uniforms, counts=None, weights=None, gamma=4.0, **options):
    """Each sign is the one that follows from the signs before it, in float64, unless it is too close
    to call in float32. (One such sign changes all later ones, so signs alone cannot be compared.)"""
    options = {"offset": 0.025, "centre": "mean", **options}
    place = [x if x is None else x.to(DEVICE) for x in (keys, values, index, uniforms)]
    positive = balanced_walk(
        *place,
        gamma=gamma,
        counts=None if counts is None else counts.to(DEVICE),
        weights=None if weights is None else weights.to(DEVICE),
        implementation="triton",
        **options,
    ).cpu()
    assert positive.dtype == torch.bool
    assert positive.shape == index.shape
    batch, heads, blocks, b = index.shape
    signs = 2.0 * positive.double() - 1.0
    close = total = 0
    for at in torch.cartesian_prod(*map(torch.arange, (batch, heads, blocks))).tolist():
        n = b if counts is None else int(counts[tuple(at)])
        if not n:
            continue
        rows = index[tuple(at)][:n]
        k = keys[at[0], at[1], rows].double()
        if options["centre"] != "none":
            k = k - k.sum(0) / (n if options["centre"] == "mean" else b)
        e = k @ k.T / keys.shape[3] ** 0.5
        earlier = torch.ones(n, n, dtype=torch.bool).tril(-1)
        e = e.masked_fill(~earlier, -torch.inf)
        largest = e.amax(1).clamp(min=0.0)
        g = (e - largest[:, None]).exp()
        if values is not None:
            v = values[at[0], at[1], rows].double()
            if weights is not None:
                v = v * weights[tuple(at)][:n, None].double()
            g = g * (v @ v.T + options["offset"])
        s = signs[tuple(at)][:n]
        room = (0.5 - uniforms[tuple(at)][:n].double()) / gamma * (-largest).exp() - g @ s
        blur = 2e-5 * (g.abs().sum(1) + (-largest).exp() / gamma)
        expected = torch.where(room > 0, 1.0, -1.0)
        expected[0] = 1.0
        wrong = (s != expected) & (room.abs() > blur)
        assert not wrong.any(), (at, wrong.nonzero().flatten().tolist())
        close += int((room.abs() <= blur)[1:].sum())
        total += n
    assert close <= 0.02 * total + 1  # else the check would be empty


def walk_inputs(heads, blocks, b, d, e, dtype, seed=0):
    g = generator(seed)
    n = blocks * b
    keys = torch.randn(1, heads, n, d, generator=g).to(dtype)
    values = torch.randn(1, heads, n, e, generator=g).to(dtype)
    index = torch.stack([torch.randperm(n, generator=g) for _ in range(heads)])
    uniforms = torch.rand(1, heads, blocks, b, generator=g)
    return keys, values, index.view(1, heads, blocks, b), uniforms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("b", "d", "e"), [(1, 16, 16), (63, 5, 40), (64, 32, 32), (130, 64, 64), (256, 128, 128)]
)
def test_walk(b, d, e, dtype):
    check_walk(*walk_inputs(2 if b < 256 else 1, 2 if b < 256 else 1, b, d, e, dtype, seed=b))


@pytest.mark.parametrize("centre", ["mean", "released", "none"])
@pytest.mark.parametrize("gamma", [0.02, 4.0])
def test_walk_of_short_blocks_with_weights(centre, gamma):
    keys, values, index, uniforms = walk_inputs(2, 3, 70, 24, 24, torch.bfloat16)
    counts = torch.tensor([[[70, 64, 0], [70, 65, 1]]])
    weights = 2.0 ** torch.randint(0, 4, index.shape, generator=generator(1))
    check_walk(keys, values, index, uniforms, counts, weights, gamma, centre=centre)


def test_walk_without_values():
    keys, _, index, uniforms = walk_inputs(2, 1, 90, 16, 16, torch.float32)
    check_walk(keys, None, index, uniforms, gamma=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [100.0, 1e3])
def test_walk_over_keys_of_any_norm(norm, dtype):
    keys, values, index, uniforms = walk_inputs(1, 2, 80, 128, 16, torch.float32)
    keys *= norm / keys.norm(dim=-1, keepdim=True)
    keys[:, :, ::3] *= 1e-2  # rows with and without scaling beside each other
    check_walk(keys.to(dtype), values.to(dtype), index, uniforms)


def test_walk_over_equal_keys():
    """All-equal keys are zero once centred: a fair coin pulled back by the count of signs alone."""
    keys = torch.full((1, 1, 100, 16), 3.25, dtype=torch.bfloat16)
    values = torch.ones(1, 1, 100, 16, dtype=torch.bfloat16)
    index, uniforms = torch.arange(100).view(1, 1, 1, 100), torch.rand(1, 1, 1, 100)
    check_walk(keys, values, index, uniforms, gamma=0.001)
    positive = balanced_walk(
        keys.to(DEVICE), values.to(DEVICE), index.to(DEVICE), uniforms.to(DEVICE),
        gamma=4.0, offset=0.025, implementation="triton",
    )  # fmt: skip
    assert int(positive.sum()) == 50


def test_walk_reads_strided_keys():
    """Keys as a model leaves them: [batch, n, heads, d] in memory."""
    keys, values, index, uniforms = walk_inputs(3, 1, 40, 16, 16, torch.float32)
    strided = keys.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(1, 3, 40, 20)
    wide[..., :16] = values
    arguments = (index.to(DEVICE), uniforms.to(DEVICE))
    options = {"gamma": 4.0, "offset": 0.025, "implementation": "triton"}
    found = balanced_walk(strided.to(DEVICE), wide.to(DEVICE)[..., :16], *arguments, **options)
    plain = balanced_walk(keys.to(DEVICE), values.to(DEVICE), *arguments, **options)
    assert torch.equal(found, plain)


@pytest.mark.skipif(not ON_GPU, reason="full size: needs CUDA")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("b", [64, 128, 256])
@pytest.mark.parametrize("d", [32, 64, 128, 256])
def test_walk_at_full_size(b, d, dtype):
    check_walk(*walk_inputs(8, 16384 // b, b, d, d, dtype))


# --- the cut ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("m", "held"), [(2, 2), (3, 3), (3, 5), (77, 80), (1025, 2100), (2048, 2048)]
)
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 1.0])
def test_cut(m, held, share):
    g = generator(m)
    positive = (torch.rand(2, 3, m + 3, generator=g) < share)[:, :, :m]  # not contiguous
    order = torch.randint(0, 9999, (2, 3, held), generator=g)
    weights = 2.0 ** torch.randint(0, 3, (2, 3, held), generator=g)
    expected = halve(positive, order, weights, implementation="torch")
    tensors = (x.to(DEVICE) for x in (positive, order, weights))
    found = halve(*tensors, implementation="triton")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


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
    (16, 16, 64, 64, [70000], [70000]),
    (8, 4, 256, 256, [5000, 129], [6000, 129]),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("shape", DECODE + (FULL_DECODE if ON_GPU else []))
def test_decode(shape, softcap, dtype):
    from support.attention import by_definition, draw

    query, keys, values, weights = draw(*shape, dtype=dtype)
    lengths, scaling = shape[4], shape[2] ** -0.5
    table = entry_table(
        [key.to(DEVICE) for key in keys],
        [value.to(DEVICE) for value in values],
        [None if weight is None else weight.to(DEVICE) for weight in weights],
    )
    out, mass = weighted_decode_attention(
        query.to(DEVICE),
        table,
        torch.tensor(lengths, device=DEVICE),
        scaling=scaling,
        softcap=softcap,
        return_mass=True,
        implementation="triton",
    )
    expected = by_definition(query, keys, values, weights, lengths, scaling, softcap)
    assert out.dtype == dtype
    bound = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert relative(out.cpu(), expected[0]) < bound
    assert relative(mass.cpu(), expected[1]) < 1e-4
    for row, n in enumerate(lengths):
        if n == 0:
            assert not out[row].any()


def test_decode_of_hidden_heads_and_host_lengths():
    weights = torch.zeros(2, 300, device=DEVICE)
    weights[1] = -torch.inf
    ones = torch.ones(2, 300, 16, device=DEVICE)
    out, mass = weighted_decode_attention(
        torch.ones(1, 4, 16, device=DEVICE),
        entry_table([ones], [ones], [weights]),
        [200],
        scaling=1.0,
        return_mass=True,
        implementation="triton",
    )
    expected = torch.tensor([1.0, 1.0, 0.0, 0.0]).view(1, 4, 1).expand(1, 4, 16)
    torch.testing.assert_close(out.cpu(), expected)
    assert not mass[0, 1].any()
    torch.testing.assert_close(mass[0, 0, :200].cpu(), torch.full((200,), 1 / 200))
    assert not mass[0, 0, 200:].any()


def test_append():
    keys = [torch.zeros(2, 3, 4, device=DEVICE), torch.zeros(2, 9, 4, device=DEVICE)]
    values = [torch.zeros(2, 3, 5, device=DEVICE), torch.zeros(2, 9, 5, device=DEVICE)]
    weights = [None, torch.full((2, 9), 7.0, device=DEVICE)]
    new_key, new_value = torch.randn(2, 2, 4, device=DEVICE), torch.randn(2, 2, 5, device=DEVICE)
    table = entry_table(keys, values, weights)
    append_entries(table, [2, 0], new_key, new_value, implementation="triton")
    for row, n in enumerate([2, 0]):
        assert torch.equal(keys[row][:, n], new_key[row])
        assert torch.equal(values[row][:, n], new_value[row])
    assert keys[1][:, 1:].abs().sum() == 0
    assert weights[1].tolist() == [[0.0] + 8 * [7.0]] * 2
    before = keys[0].clone()
    append_entries(table, [3, 1], new_key + 1, new_value, implementation="triton")
    assert torch.equal(keys[0], before)  # a full row stays as it is
    assert torch.equal(keys[1][:, 1], new_key[1] + 1)


# --- attention mass -----------------------------------------------------------------------------

MASS = [
    # batch, heads, kv_heads, m, n, dim
    (1, 1, 1, 1, 1, 4),
    (2, 4, 2, 33, 33, 8),
    (1, 2, 1, 201, 201, 16),
    (2, 6, 2, 7, 100, 5),
    (1, 2, 2, 130, 190, 40),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("shape", MASS + ([(1, 8, 2, 5000, 5000, 128)] if ON_GPU else []))
def test_mass(shape, softcap, dtype):
    batch, heads, kv_heads, m, n, dim = shape
    g = generator(m * n)
    # As a model leaves them: heads inside positions in memory.
    queries = (3 * torch.randn(batch, m, heads, dim, generator=g)).to(DEVICE, dtype).transpose(1, 2)
    keys = torch.randn(batch, n, kv_heads, dim, generator=g).to(DEVICE, dtype).transpose(1, 2)
    found, expected = (
        attention_mass(queries, keys, scaling=0.4, softcap=softcap, implementation=implementation)
        for implementation in ("triton", "torch")
    )
    assert relative(found, expected) < 1e-4
    torch.testing.assert_close(found.sum(-1).cpu(), torch.full((batch, heads), float(m)))


@pytest.mark.parametrize("shape", MASS)
def test_mass_of_known_normalisers_takes_one_launch(shape, monkeypatch):
    from kvbench.kernels import _triton_mass

    batch, heads, kv_heads, m, n, dim = shape
    g = generator(m + n)
    queries = torch.randn(batch, heads, m, dim, generator=g).to(DEVICE)
    keys = torch.randn(batch, kv_heads, n, dim, generator=g).to(DEVICE)
    logits = queries.double() @ keys.double().repeat_interleave(heads // kv_heads, 1).mT * 0.4
    future = torch.ones(m, n, dtype=torch.bool, device=DEVICE).triu(n - m + 1)
    known = logits.masked_fill(future, -torch.inf).logsumexp(-1).float()
    expected = attention_mass(queries, keys, scaling=0.4, implementation="torch")
    monkeypatch.setattr(_triton_mass, "normaliser_kernel", None)
    found = attention_mass(queries, keys, scaling=0.4, normalisers=known, implementation="triton")
    assert relative(found, expected) < 1e-4


def test_mass_of_a_window_over_shared_out_keys(monkeypatch):
    """Few queries over many keys: the first pass is split over the keys."""
    from kvbench.kernels import _triton_mass

    monkeypatch.setattr(_triton_mass, "multiprocessors", lambda device: 6)
    g = generator(0)
    queries = torch.randn(1, 2, 40, 16, generator=g).to(DEVICE)
    keys = torch.randn(1, 1, 3000, 16, generator=g).to(DEVICE)
    found = attention_mass(queries, keys, scaling=1.0, implementation="triton")
    expected = attention_mass(queries, keys, scaling=1.0, implementation="torch")
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not ON_GPU, reason="full size: needs CUDA")
def test_mass_at_128k_fits_where_a_matrix_would_not():
    torch.cuda.reset_peak_memory_stats()
    queries = torch.randn(1, 2, 131072, 128, device="cuda", dtype=torch.bfloat16)
    keys = torch.randn(1, 1, 131072, 128, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    mass = attention_mass(queries, keys, scaling=128**-0.5, implementation="triton")
    assert torch.cuda.max_memory_allocated() - before < 64 << 20
    torch.testing.assert_close(mass.sum(-1), torch.full_like(mass[..., 0], 131072.0))


# --- k-centre -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "n", "dim", "count"),
    [(1, 1, 4, 1), (2, 65, 3, 65), (2, 150, 40, 30)] + ([(8, 16384, 128, 4000)] if ON_GPU else []),
)
def test_kcentre(batch, n, dim, count, dtype):
    """The greedy choice: every centre is as far from those before it as any point is."""
    g = generator(n)
    points = (torch.randn(batch, n, dim, generator=g) + 2.0).to(dtype)
    first = torch.randint(0, n, (batch,), generator=g)
    centres = greedy_k_centre(
        points.to(DEVICE), count, first.to(DEVICE), implementation="triton"
    ).cpu()
    assert centres.shape == (batch, count)
    assert torch.equal(centres[:, 0], first)
    for head in range(batch):
        assert centres[head].unique().numel() == count
        x = points[head].to(DEVICE).double()
        distance = (x - x[centres[head, 0]]).square().sum(1)
        for step in centres[head, 1:].tolist():
            assert float(distance[step]) >= float(distance.max()) * (1 - 1e-4) - 1e-6
            distance = distance.minimum((x - x[step]).square().sum(1))


@pytest.mark.parametrize("passes", [5, 20])
@pytest.mark.parametrize("kind", ["spread", "clustered"])
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
    g = generator(1)
    points = torch.randn(2, 150, 5, generator=g)
    if kind == "clustered":
        hubs = 4 * torch.randn(2, 6, 5, generator=g)
        points = hubs[:, torch.randint(6, (150,), generator=g)] + 0.3 * points
    first = torch.tensor([3, 149])
    found = greedy_k_centre(points.to(DEVICE), 24, first.to(DEVICE), implementation="triton").cpu()
    assert torch.equal(found, greedy_k_centre(points, 24, first, implementation="torch"))
    assert filled == [24, 24] if passes == 20 else 1 < max(filled) < 24


def test_kcentre_of_equal_points():
    centres = greedy_k_centre(
        torch.ones(1, 70, 3, device=DEVICE), 70, torch.tensor([7], device=DEVICE),
        implementation="triton",
    )  # fmt: skip
    assert torch.equal(centres.sort(-1).values.cpu(), torch.arange(70).expand(1, 70))


# --- online clusters ----------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "n", "most"), [(1, 1, None), (3, 300, None), (2, 90, 7)])
def test_online_clusters(heads, n, most, monkeypatch):
    points = torch.randn(heads, n, 3, generator=generator(n)).to(DEVICE)
    delta = torch.linspace(0.8, 1.2, heads, device=DEVICE)
    where = {}
    for implementation in ("torch", "triton"):
        monkeypatch.setenv(_choice.VARIABLE, implementation)
        found = OnlineClusters(heads, 3, delta, most)
        where[implementation] = torch.cat([found.read(part) for part in points.split(64, 1)], 1)
    assert torch.equal(where["triton"], where["torch"])
    assert most is None or int(found.clusters.max()) == most


# --- the switch ---------------------------------------------------------------------------------


def test_the_switch(monkeypatch, caplog):
    keys = torch.zeros(1, 1, 4, 8)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert not _choice.use_triton("x", "auto", keys)
    with pytest.raises(ValueError, match="x cannot run as a Triton kernel: tensors on cpu"):
        _choice.use_triton("x", "triton", keys)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert _choice.use_triton("x", "triton", keys)
    assert not _choice.use_triton("x", "torch", keys)
    with pytest.raises(ValueError, match=r"x cannot .*float64: needs one of"):
        _choice.use_triton("x", "triton", keys.double())
    with pytest.raises(ValueError, match="head_dim 300: at most 256"):
        _choice.use_triton("x", "triton", torch.zeros(2, 300))
    with pytest.raises(ValueError, match="implementation is 'cuda'; allowed: auto, triton, torch"):
        _choice.use_triton("x", "cuda", keys)
    monkeypatch.setenv("KVBENCH_KERNELS", "triton")
    assert _choice.use_triton("x", "auto", keys)
    monkeypatch.setenv("KVBENCH_KERNELS", "fast")
    with pytest.raises(ValueError, match="KVBENCH_KERNELS is 'fast'; allowed: auto, triton, torch"):
        _choice.use_triton("x", "auto", keys)
