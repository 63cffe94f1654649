"""Storage schemes against golden values, theory, and their own byte counts."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support.attention import step
from support.golden import arrays_of, assert_near, cases_of, checked
from support.paths import GOLDEN

from kvbench.engine.cache import Cache
from kvbench.kernels import quantize
from kvbench.kernels import turboquant as tq
from kvbench.kernels.qjl import QJL, Signs, orthogonalised, pack_keys
from kvbench.kernels.quantize import Codec, Quantization, pack, pack_bits, unpack_bits
from kvbench.kernels.turboquant import TurboQuant, hadamard_rotation, lloyd_max
from kvbench.kv import CompressedKV


@pytest.fixture
def qjl_golden() -> Any:
    return arrays_of(GOLDEN / "qjl.npz")


@pytest.fixture
def turbo_golden() -> Any:
    return arrays_of(GOLDEN / "turboquant.npz")


RELEASED = ("rot_small", "rot_128", "gauss", "no_outliers")
"""The golden cases of the authors' QJL code."""


class Released(NamedTuple):
    """A golden case of the authors' QJL code, packed by ours: keys, values [heads, n, d], query [heads,
    group, d], the Gaussian projection [d, m] and the one that is used; all values but the newest."""

    case: dict[str, Any]
    keys: torch.Tensor
    values: torch.Tensor
    query: torch.Tensor
    drawn: torch.Tensor
    projection: torch.Tensor
    scheme: QJL
    codec: Codec[Signs]
    old_values: quantize.Rounded


def released(golden, name) -> Released:
    case = cases_of(golden)[name]
    hkv, hq, n, d, m, m_out = (case[k] for k in ("hkv", "hq", "n", "d", "m", "m_out"))
    g = np.random.default_rng(case["seed"])
    keys = g.standard_normal((1, hkv, n, d), dtype=np.float32) * np.float32(case["key_scale"])
    values = g.standard_normal((1, hkv, n, d), dtype=np.float32)
    query = g.standard_normal((1, hq, 1, d), dtype=np.float32)
    drawn = g.standard_normal((d, m), dtype=np.float32)
    keys[..., : case["boosted_channels"]] *= 4
    keys, values, query, drawn = checked(case, keys=keys, values=values, query=query, proj=drawn)
    projection = torch.from_numpy(golden[f"{name}_sketch"]) if case["rot"] else drawn
    buffer = case["buffer"]
    options = {
        k: case[k] for k in ("m", "m_out", "outliers", "buffer", "value_bits", "value_group")
    }
    scheme = QJL(**options, first_layers=0, group=32, orthogonal=case["rot"])
    codec = Codec(
        lambda x: pack_keys(x, projection=projection, m_out=m_out, scheme=scheme),
        due=lambda _, exact: exact - exact % buffer,
    ).take(keys[0])
    value_quantization = Quantization(case["value_bits"], case["value_group"])
    old_values = pack(values[0, :, : n - buffer], value_quantization, by_channel=False)
    grouped = query[0, :, 0].view(hkv, hq // hkv, d)
    return Released(case, keys[0], values[0], grouped, drawn, projection, scheme, codec, old_values)


@pytest.mark.parametrize("name", ["rot_small", "rot_128"])
def test_qjl_sketches_are_orthogonal_as_released(qjl_golden, name):
    """Up to the signs of columns, which change no estimate."""
    example = released(qjl_golden, name)
    sketch = orthogonalised(example.drawn)
    torch.testing.assert_close(sketch.abs(), example.projection.abs(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", RELEASED)
def test_qjl_keys_as_released(qjl_golden, name):
    assert set(cases_of(qjl_golden)) == set(RELEASED)
    example = released(qjl_golden, name)
    assert example.codec.count == example.case["n_quantised_keys"]
    (block,) = example.codec.blocks
    np.testing.assert_array_equal(block.bits, qjl_golden[f"{name}_bits"])
    np.testing.assert_array_equal(block.outlier_bits, qjl_golden[f"{name}_outlier_bits"])
    outliers = block.outliers.sort(-1).values
    np.testing.assert_array_equal(outliers, np.sort(qjl_golden[f"{name}_outliers"], -1))
    assert_near(block.norms, qjl_golden[f"{name}_key_norm"], 1e-5)


@pytest.mark.parametrize("name", RELEASED)
def test_qjl_attention_as_released(qjl_golden, name):
    example = released(qjl_golden, name)
    case, old = example.case, example.old_values
    heads, n, d = example.keys.shape
    codes = unpack_bits(old.codes, case["value_bits"], d)
    codes = codes.unflatten(-1, (-1, case["value_group"]))
    np.testing.assert_array_equal(codes, qjl_golden[f"{name}_value_codes"])
    exact = example.query @ example.keys[:, example.codec.count :].mT
    scores = torch.cat([example.codec.dot(example.query), exact], -1)
    assert_near(scores.flatten(0, 1), qjl_golden[f"{name}_score"], 1e-4)
    weights = (scores * d**-0.5).softmax(-1)
    out = old.mix(weights[..., : old.count])
    out = out + weights[..., old.count :] @ example.values[:, old.count :]
    assert_near(out.flatten(0, 1), qjl_golden[f"{name}_out"], 1e-4)
    sides = case["bytes_per_kv_head_float16_side"]
    nbytes = heads * (sides["keys"] + sides["values"])
    assert example.scheme.nbytes(heads, n, d, 2, 20) == nbytes


@pytest.mark.parametrize(
    "name", ["qr_mse3", "hadamard_mse2", "qr_prod3", "hadamard_prod4", "hadamard_prod1"]
)
def test_turboquant_by_the_papers_formulas(turbo_golden, name):
    golden, case = turbo_golden, cases_of(turbo_golden)[name]
    assert len(cases_of(turbo_golden)) == 5
    n, d = case["n"], case["d"]
    g = np.random.default_rng(case["seed"])
    scale = np.linspace(0.5, 3, n).astype(np.float32)[:, None]
    x = g.standard_normal((n, d), dtype=np.float32) * scale
    q = g.standard_normal((5, d), dtype=np.float32)
    if case["rotation"] == "qr":
        g.standard_normal((d, d))
        rotation = torch.from_numpy(golden[f"{name}_rotation"])
    else:
        signs = 2 * g.integers(0, 2, d) - 1
        np.testing.assert_array_equal(signs, golden[f"{name}_hadamard_signs"])
        rotation = hadamard_rotation(torch.from_numpy(signs))
    projection = None
    if case["stage"] == "prod":
        projection = torch.from_numpy(g.standard_normal((d, d), dtype=np.float32))
    bits = case["codebook_bits"]
    coder = tq.Coder(
        rotation, torch.from_numpy(lloyd_max(d, bits, "beta")).float(), projection, bits
    )
    x, q = checked(case, x=x, q=q)
    block = tq.pack_vectors(x[None], coders=(coder,), order=None)
    codes = unpack_bits(block.parts[0][0], bits, d) if bits else torch.zeros(1, n, d)
    np.testing.assert_array_equal(codes[0], golden[f"{name}_codes"])
    assert_near(block.parts[0][1][0], golden[f"{name}_norm"], 1e-5)
    if projection is not None:
        np.testing.assert_array_equal(block.parts[0][2][0], golden[f"{name}_signs"])
        assert_near(block.parts[0][3][0], golden[f"{name}_gamma"], 1e-5)
    assert_near(block.dot(q[None])[0], golden[f"{name}_dot"], 1e-5)
    assert_near(block.mix(torch.eye(n)[None])[0], golden[f"{name}_restored"], 1e-5)
    parts = case["bytes_per_vector"]
    assert tq.vector_bytes(d, case["bits"], case["stage"], 2) == sum(parts.values())


def test_codebooks():
    tables = json.loads((GOLDEN / "turboquant_codebooks.json").read_text())
    for table in tables["codebooks"]:
        d = table["d"] or 128
        centroids = lloyd_max(d, table["bits"], table["marginal"]) * math.sqrt(d)
        np.testing.assert_allclose(centroids, table["centroids_times_sqrt_d"], atol=1e-7)
    assert len(lloyd_max(48, 3, "beta")) == 8


@pytest.mark.parametrize(
    ("orthogonal", "unbias", "bias"),
    [(False, False, 1.0), (True, False, 1.00391), (True, True, 1.0)],
)
def test_qjl_inner_products(orthogonal, unbias, bias):
    """Means and variances over many sketches; a key's scale and a column's sign change nothing."""
    d, m, draws = 64, 64, 600
    generator = torch.Generator().manual_seed(0)
    key = torch.randn(1, 32, d, generator=generator)
    query = key[:, :1] + torch.randn(1, 1, d, generator=generator)
    query = 3 * torch.nn.functional.normalize(query, dim=-1)
    scheme = QJL(m=m, m_out=0, outliers=0, orthogonal=orthogonal, unbias=unbias, buffer=32)
    products = []
    for _ in range(draws):
        projection = torch.randn(d, m, generator=generator)
        projection = orthogonalised(projection) if orthogonal else projection
        block = pack_keys(key, projection=projection, m_out=0, scheme=scheme)
        products.append(block.dot(query)[0, 0])
    estimates = torch.stack(products)
    exact = (query @ key.mT)[0, 0]
    error = estimates.std(0) / math.sqrt(draws)
    assert ((estimates.mean(0) - bias * exact).abs() < 4.5 * error).all()
    bound = math.pi / 2 * query.square().sum() * key.square().sum(-1)[0] / m
    assert (estimates.var(0) < (0.9 if orthogonal else 1.2) * bound).all()
    scaled = pack_keys(2 * key, projection=projection, m_out=0, scheme=scheme)
    assert torch.equal(scaled.bits, block.bits)
    flipped = projection * (2 * torch.randint(0, 2, (m,)) - 1)
    other = pack_keys(key, projection=flipped, m_out=0, scheme=scheme)
    torch.testing.assert_close(other.dot(query), block.dot(query))


@pytest.mark.parametrize("orthogonal", [False, True])
@pytest.mark.parametrize("unbias", [False, True])
def test_the_bias_of_orthogonal_sketches_is_divided_out_only_with_unbias(orthogonal, unbias):
    """sqrt(d / 2) Gamma(d / 2) / Gamma((d + 1) / 2), which goes to 1 for large d."""
    keys, projection = torch.randn(1, 4, 16), torch.randn(16, 16)
    scheme = QJL(m=16, m_out=8, outliers=0, group=4, buffer=4, orthogonal=orthogonal, unbias=unbias)
    block = pack_keys(keys, projection=projection, m_out=0, scheme=scheme)
    bias = math.sqrt(8) * math.gamma(8) / math.gamma(8.5) if orthogonal and unbias else 1
    assert block.bias == pytest.approx(bias, rel=1e-12)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5])
def test_bits(bits):
    codes = torch.randint(0, 2**bits, (3, 21), dtype=torch.uint8)
    packed = pack_bits(codes, bits)
    assert packed.shape == (3, math.ceil(21 * bits / 8))
    assert torch.equal(unpack_bits(packed, bits, 21), codes)
    whole = sum(int(code) << (bits * j) for j, code in enumerate(codes[0]))
    assert packed[0].tolist() == [*whole.to_bytes(packed.shape[1], "little")]
    # A slice may begin at an address that no wider number has.
    part = torch.cat([codes.new_zeros(5), codes.flatten()])[5:].view(3, 21)
    assert torch.equal(pack_bits(part, bits), packed)
    assert torch.equal(pack_bits(part.T, bits), pack_bits(codes.T.clone(), bits))


def restored_turbo(block: tq.Rotated) -> torch.Tensor:
    """Vectors [heads, n, d] float64 of a block, code by code."""
    sets = []
    for coder, (packed, norms, *residual) in zip(block.coders, block.parts, strict=True):
        size = len(coder.rotation)
        codes = packed.new_zeros(*norms.shape, size)
        if coder.bits:
            codes = unpack_bits(packed, coder.bits, size)
        vectors = coder.centroids.double()[codes.long()] @ coder.rotation.double()
        if coder.projection is not None:
            signed = 2.0 * unpack_bits(residual[0], 1, size).double() - 1
            scale = math.sqrt(math.pi / 2) / size * residual[1].double()[..., None]
            vectors = vectors + scale * (signed @ coder.projection.double())
        sets.append(vectors * norms.double()[..., None])
    together = torch.cat(sets, dim=-1)
    if block.order is None:
        return together
    return torch.empty_like(together).scatter_(
        -1, block.order[:, None].expand_as(together), together
    )


def restored_qjl(block: Signs) -> torch.Tensor:
    """The vectors [heads, n, d] float64 whose products with a query are the estimates of a block."""
    m, m_out = 8 * block.bits.shape[-1], 8 * block.outlier_bits.shape[-1]
    projection = block.projection.double()
    inner = (2.0 * unpack_bits(block.bits, 1, m).double() - 1) @ projection.T
    norms = block.norms.double()
    if m_out:
        outer = 2.0 * unpack_bits(block.outlier_bits, 1, m_out).double() - 1
        outer_norms = block.outlier_norms.double()
        norms = (norms**2 - outer_norms**2).clamp(min=0).sqrt()
        outer = outer @ projection[:, :m_out].T * (outer_norms / m_out)[..., None]
        outlying = torch.zeros_like(inner[:, :, :1])
        outlying.scatter_(-1, block.outliers.long()[:, :, None], 1.0)
        vectors = inner * (norms / m)[..., None] * (1 - outlying) + outer * outlying
    else:
        vectors = inner * (norms / m)[..., None]
    return vectors.flatten(1, 2) * math.sqrt(math.pi / 2) / block.bias


READ = {
    **{f"turbo_{bits}": TurboQuant(bits=bits) for bits in (1, 2, 3, 4, 5)},
    "turbo_prod": TurboQuant(bits=1, keys="prod", values="prod"),
    "turbo_two_widths": TurboQuant(bits=2, outlier_bits=3, keys="prod", values="prod"),
    "turbo_odd_sets": TurboQuant(bits=3, outlier_bits=5, outlier_share=0.3),
    "qjl": QJL(),
    "qjl_narrow": QJL(first_m=64, first_m_out=8, outliers=3, group=8, buffer=8, value_bits=4),
    "qjl_plain": QJL(outliers=0, unbias=True, value_group=24),
    "per_channel": Quantization(2, 48),
    "per_channel_odd": Quantization(4, 7),
    "per_entry": Quantization(4, 64, keys="entry"),
}


@pytest.mark.parametrize("dim", [48, 128])
@pytest.mark.parametrize("name", READ)
def test_what_is_packed_is_read_as_it_would_be_restored(name, dim, monkeypatch):
    """In float64; the pieces that are read at a time do not fit the number of rows."""
    monkeypatch.setattr(quantize, "CACHED", 3 * dim * 50)
    generator = torch.Generator().manual_seed(dim)
    keys, values = torch.randn(2, 3, 416, dim, generator=generator)
    query = torch.randn(3, 5, dim, generator=generator)
    for codec, rows in zip(
        READ[name].codecs(keys, values, layer=0, seed=1), (keys, values), strict=True
    ):
        (block,) = codec.blocks
        if isinstance(block, Signs):
            vectors = restored_qjl(block)
        elif isinstance(block, tq.Rotated):
            vectors = restored_turbo(block)
        else:
            vectors = quantize.unpack(block).double()
        assert vectors.shape == (3, block.count, dim)
        expected = query.double() @ vectors.mT
        size = query.norm(dim=-1)[..., None] * vectors.norm(dim=-1)[:, None]
        assert ((block.dot(query) - expected).abs() / size).max() < 2e-6
        if rows is values:
            weights = torch.rand(3, 5, block.count, generator=generator).softmax(-1)
            mixed = block.mix(weights)
            torch.testing.assert_close(
                mixed.double(), weights.double() @ vectors, rtol=0, atol=2e-6
            )


SCHEMES = {
    "qjl": QJL(m=64, m_out=32, first_layers=0, outliers=2, group=8, buffer=16, value_group=8),
    "qjl_first": QJL(first_m=64, first_m_out=16, outliers=1, group=4, buffer=8, value_bits=4),
    "turbo": TurboQuant(),
    "turbo_two": TurboQuant(bits=2, outlier_bits=3, keys="prod", buffer=5),
    "turbo_layer": TurboQuant(bits=3, per="layer", rotation="hadamard", values="prod"),
}


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_packs_as_it_grows(name, dtype):
    """Prefill of all tokens and decoding to them hold the same codes and bytes; clones part."""
    torch.manual_seed(0)
    scheme, d, n = SCHEMES[name], 16, 52
    keys, values = torch.randn(1, 2, n, d).to(dtype), torch.randn(1, 2, n, d).to(dtype)

    def cache(count: int) -> Any:
        at = torch.arange(count).expand(1, 2, count)
        held = CompressedKV(keys[:, :, :count], values[:, :, :count], None, at)
        how = {"capacity": count, "scheme": scheme, "layer": 2, "seed": 7}
        return Cache(held, n - count, **how)

    whole, grown = cache(n), cache(33)
    query = torch.randn(4, n - 33, d).to(dtype)
    twin = grown.clone()
    for t in range(33, n):
        one = slice(t, t + 1)
        at = torch.tensor([t])
        step(grown, query[:, t - 33 : t - 32], keys[0, :, one], values[0, :, one], at, 0.25)
    step(twin, query, keys[0, :, 33:], values[0, :, 33:], torch.arange(33, n), 0.25)
    assert grown.length == whole.length == twin.length == n
    assert grown.nbytes() == whole.nbytes() == twin.nbytes()
    if name != "turbo_two":  # outlier channels are those of the prompt, which differs
        assert whole.nbytes() == scheme.nbytes(2, n, d, keys.element_size(), 2)
        q, k = torch.randn(4, 1, d).to(dtype), torch.randn(2, 1, d).to(dtype)
        first, second = (step(c, q, k, k, torch.tensor([n]), 0.25) for c in (whole, grown))
        near = (
            {"rtol": 1e-4, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        )
        torch.testing.assert_close(first, second, **near)


def test_a_token_that_completes_the_buffer_attends_to_packed_keys():
    """As the released code, fed one by one or with others; the tokens before it to exact keys."""
    torch.manual_seed(0)
    scheme, d, n = SCHEMES["qjl"], 16, 40
    keys, values, query = torch.randn(1, 2, n, d), torch.randn(1, 2, n, d), torch.randn(4, n, d)
    at = torch.arange(n)
    how = {"capacity": 20, "scheme": scheme, "layer": 2, "seed": 7}
    start = [part[:, :, :20] for part in (keys, values)]
    held = CompressedKV(*start, None, at[:20].expand(1, 2, -1))
    alone, together = (Cache(held, 20, **how) for _ in range(2))
    out = step(together, query[:, 20:], keys[0, :, 20:], values[0, :, 20:], at[20:], 0.25)
    for t in range(20, n):
        one = slice(t, t + 1)
        result = step(alone, query[:, one], keys[0, :, one], values[0, :, one], at[one], 0.25)
        packed, _ = scheme.codecs(keys[0, :, : t + 1], values[0], layer=2, seed=7)
        assert packed.count == (t + 1) // 16 * 16
        _, stored = scheme.codecs(keys[0], values[0, :, : max(20, t)], layer=2, seed=7)
        grouped = query[:, one].view(2, 2, d)
        exact = grouped @ keys[0, :, packed.count : t + 1].mT
        weights = (torch.cat([packed.dot(grouped), exact], -1) * 0.25).softmax(-1)
        expected = weights[..., stored.count :] @ values[0, :, stored.count : t + 1]
        expected += stored.mix(weights[..., : stored.count])
        torch.testing.assert_close(result, expected.view(4, 1, d))
        if packed.count == t + 1:
            torch.testing.assert_close(out[:, t - 20 : t - 19], result)


@pytest.mark.parametrize(
    ("scheme", "channels", "message"),
    [
        (QJL(outliers=1), 16, r"norm is more than torch\.float16 holds"),
        (TurboQuant(), 16, r"norm is more than torch\.float16 holds"),
        (TurboQuant(rotation="hadamard"), 12, "a set has 12 channels; allowed: a power of two"),
    ],
)
def test_keys_that_cannot_be_stored_are_refused(scheme, channels, message):
    keys = torch.full((1, 128, 16), 3e4, dtype=torch.float16)
    with pytest.raises(ValueError, match=message):
        scheme.codecs(keys[..., :channels], keys, layer=0, seed=0)


@pytest.mark.parametrize("scheme", [TurboQuant(keys="prod"), QJL(outliers=1)], ids=["prod", "qjl"])
def test_keys_of_zero_have_products_of_zero(scheme):
    zeros = torch.zeros(1, 128, 16)
    keys, _ = scheme.codecs(zeros, zeros, layer=0, seed=0)
    assert keys.dot(torch.ones(1, 1, 16)).eq(0).all()
