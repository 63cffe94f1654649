"""Methods that read one token at a time: the invariants of their papers, and their estimates."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention import step
from support.method_layers import attend, make_layer, run
from torch import Tensor

from kvbench.engine.cache import Cache
from kvbench.engine.check import check_compressed
from kvbench.kernels.online_clusters import BLOCK
from kvbench.kernels.quantize import unpack
from kvbench.kernels.self_balancing import softmax_balance
from kvbench.kv import Budget
from kvbench.methods import build_method
from kvbench.methods.balancekv_streaming import (
    BalanceFailure,
    BalanceKVStreaming,
    MergeAndReduce,
    structures,
)
from kvbench.methods.subgen_streaming import SubGenStream

# -- SubGen, Algorithm 1 -------------------------------------------------------------------------


def read(
    keys: Tensor,
    values: Tensor,
    delta: float,
    t: int,
    s: int,
    seed: int = 0,
    blocks: Sequence[int] = (BLOCK,),
    most: int | None = None,
) -> tuple[SubGenStream, Tensor]:
    """A stream after all of keys, values [heads, n, dim], read in blocks of these sizes in turn, and the
    draws it was given, [n, heads, t + s]."""
    heads, n, dim = keys.shape
    stream = SubGenStream(heads, dim, torch.full((heads,), delta), t, s, most)
    draws = torch.rand(n, heads, t + s, generator=torch.Generator().manual_seed(seed))
    start = 0
    for size in itertools.cycle(blocks):
        part = slice(start, start + size)
        stream.read(keys[:, part], values[:, part], draws[part])
        start += size
        if start >= n:
            return stream, draws


def data(heads: int, n: int, dim: int, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        scale * torch.randn(heads, n, dim, generator=generator),
        torch.randn(heads, n, dim + 1, generator=generator)
        * torch.rand(heads, n, 1, generator=generator),
    )


@given(
    heads=st.integers(1, 3),
    n=st.integers(1, 60),
    dim=st.integers(1, 4),
    delta=st.floats(0.0, 4.0) | st.sampled_from([0.0, 1.0, 2.0]),
    t=st.integers(1, 3),
    s=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    blocks=st.lists(st.sampled_from([1, 2, 7, BLOCK]), min_size=1, max_size=3),
    most=st.none() | st.integers(1, 9),
    kind=st.sampled_from(["spread", "lattice", "far from the origin"]),
)
@settings(max_examples=60, deadline=None)
def test_subgen_stream_is_the_algorithm(heads, n, dim, delta, t, s, seed, blocks, most, kind):
    """Against a plain loop per head over dictionaries, with the same draws; and the invariants. On a
    lattice distances tie and are equal to delta; far from the origin products lose them in rounding."""
    keys, values = data(heads, n, dim, seed)
    if kind == "lattice":
        keys = keys.round()
    if kind == "far from the origin":
        keys = (4 * keys).round() / 4 + 3000
    stream, draws = read(keys, values, delta, t, s, seed, blocks, most)
    slot_draws, value_draws = draws.split([t, s], dim=-1)
    for head in range(heads):
        clusters: list[dict] = []
        mu, sampled, reach = 0.0, [-1] * s, float(stream.clustering.delta[head])
        for token in range(n):
            key, value = keys[head, token], values[head, token]
            distances = [float((c["key"] - key).square().sum().sqrt()) for c in clusters]
            if distances and (min(distances) <= reach or len(clusters) == most):
                cluster = clusters[distances.index(min(distances))]
                cluster["count"] += 1
            else:
                cluster = {"key": key, "count": 1, "slots": [token] * t}
                clusters.append(cluster)
            for slot in range(t):
                if float(slot_draws[token, head, slot]) < 1 / cluster["count"]:
                    cluster["slots"][slot] = token
            weight = float(value.double().square().sum())
            mu += weight
            for slot in range(s):
                if float(value_draws[token, head, slot]) < weight / mu:
                    sampled[slot] = token
        m = len(clusters)
        assert int(stream.clustering.clusters[head]) == m
        assert stream.counts[head, :m].tolist() == [c["count"] for c in clusters]
        assert stream.counts[head].sum() == n
        assert stream.slots[head, :m].tolist() == [c["slots"] for c in clusters]
        assert stream.sampled[head].tolist() == sampled
        assert float(stream.mu[head]) == pytest.approx(mu)
        representatives = stream.clustering.points[head, :m]
        assert torch.equal(representatives, torch.stack([c["key"] for c in clusters]))
        check_cover(stream, head, keys[head], delta, most)


def check_cover(
    stream: SubGenStream, head: int, keys: Tensor, delta: float, most: int | None
) -> None:
    """Representatives lie more than delta apart, and within delta of every key if there may be as many
    as that takes."""
    m = int(stream.clustering.clusters[head])
    representatives = stream.clustering.points[head, :m].double()
    apart = torch.cdist(representatives, representatives)
    apart.fill_diagonal_(math.inf)
    assert apart.min() > delta * (1 - 1e-6)
    if most is not None:
        assert m <= most
        return
    covered = torch.cdist(keys.double(), representatives).amin(1)
    assert covered.max() <= delta * (1 + 1e-6) + 1e-6
    held = stream.denominator()[0][head]
    assert (held >= 0).sum() <= m * stream.slots.shape[-1]


def test_subgen_stream_is_unbiased():
    """Numerator and denominator, mean over 2,000 streams (as heads) against the exact sums."""
    seeds, n, dim = 2000, 50, 3
    keys, values = (part.expand(seeds, -1, -1) for part in data(1, n, dim, seed=4))
    stream, _ = read(keys, values, 1.2, 2, 6, seed=5)
    assert 1 < int(stream.clustering.clusters[0]) < n / 2
    exponentials = (keys[0] @ torch.tensor([0.7, -1.0, 0.4])).exp().double()

    def sums(sample: tuple[Tensor, Tensor], values: Tensor) -> Tensor:
        positions = sample[0].clamp(min=0)
        terms = sample[1].exp().double() * exponentials[positions]
        return (terms.unsqueeze(-1) * values[positions]).sum(1)

    ones, exact_values = torch.ones(n, 1).double(), values[0].double()
    above, below = sums(stream.numerator(), exact_values), sums(stream.denominator(), ones)
    for found, of in ((above, exact_values), (below, ones)):
        error = found.mean(0) - exponentials @ of
        assert (error.abs() < 3 * found.std(0) / seeds**0.5).all()
    exact = exponentials @ exact_values / exponentials.sum()
    assert ((above / below).mean(0) - exact).norm() < 0.1 * exact.norm()
    stream, _ = read(keys[:1], torch.zeros(1, n, 2), 0.5, 1, 3)
    assert stream.numerator()[1].eq(-math.inf).all(), "of values that are all zero"


def test_subgen_compressed_attends_as_its_stream():
    """`compress` holds the stream's estimate, recent tokens added, up to the 2^-10 mixture; and uses
    the room there is."""
    layer = make_layer(400, kv_heads=2, group=1, seed=7)
    budget = Budget(rate=0.5, sink=0, window=20)
    method = build_method("subgen_streaming", t=2)
    kept = run(method, layer, budget, seed=3)
    assert int(kept.entries.min()) > 0.8 * budget.capacity(400)
    stream = method.stream(layer, budget, torch.Generator().manual_seed(3))
    assert stream.seen == 380
    logits = (layer.keys[0] @ layer.queries[0, :, -1, :, None])[..., 0].double() * layer.scaling
    values = layer.values[0].double()
    above = torch.einsum("hn,hnd->hd", logits[:, 380:].exp(), values[:, 380:])
    below = logits[:, 380:].exp().sum(-1, keepdim=True)
    for (places, weights), weighs_values in (
        (stream.numerator(), True),
        (stream.denominator(), False),
    ):
        at = places.clamp(min=0)
        terms = (logits.gather(1, at) + weights).exp()
        if weighs_values:
            rows = values.gather(1, at.unsqueeze(-1).expand(-1, -1, 8))
            above = above + torch.einsum("hn,hnd->hd", terms, rows)
        else:
            below = below + terms.sum(-1, keepdim=True)
    found = attend(layer.queries[:, :, -1:], kept, layer.scaling)[0, :, 0]
    torch.testing.assert_close(found, above / below, rtol=3e-3, atol=1e-4)


# -- The Self-Balancing Walk, and BalanceKV, Algorithms 1, 2 and 4 -------------------------------


@given(
    n=st.integers(1, 40),
    with_values=st.booleans(),
    exact_half=st.booleans(),
    scale=st.floats(0.1, 30),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_softmax_balance_is_the_walk_on_its_kernel(n, with_values, exact_half, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = scale * torch.randn(n, 3, generator=generator).double()
    values = torch.randn(n, 2, generator=generator).double()
    uniforms = torch.rand(n, generator=generator)
    key_radius, value_radius = float(keys.norm(dim=1).max()), float(values.norm(dim=1).max())
    radii = {"key_radius": key_radius, "value_radius": value_radius if with_values else 1.0}
    how = {**radii, "bound": 2.0, "exact_half": exact_half}
    kept = softmax_balance(keys, values if with_values else None, uniforms, **how)
    signs: list[float] = []
    for i in range(n):
        inner = 0.0
        for j in range(i):
            term = math.exp((float(keys[i] @ keys[j]) - key_radius**2) / 3**0.5)
            if with_values:
                term *= float(values[i] @ values[j]) / value_radius**2
            inner += term * signs[j]
        if abs(inner) > 2.0:
            assert kept is None
            return
        signs.append(1.0 if float(uniforms[i]) < 0.5 - inner / 4 else -1.0)
    assert kept is not None
    positive = torch.tensor(signs) > 0
    smaller = positive if 2 * positive.sum() <= n else ~positive
    if not exact_half:
        assert torch.equal(kept, smaller)
        return
    assert int(kept.sum()) == n // 2
    assert (smaller <= kept).all()
    larger = (~smaller).nonzero().squeeze(-1).tolist()
    added = (kept & ~smaller).nonzero().squeeze(-1).tolist()
    assert added == larger[len(larger) - len(added) :]


def structure(
    t: int, n: int, seed: int = 0, bound: float = 50.0, with_values: bool = True, **options: Any
) -> MergeAndReduce:
    keys, values = (part[0] for part in data(1, n, 3, seed, scale=0.4))
    radii = float(keys.norm(dim=1).max()) * 1.001, float(values.norm(dim=1).max())
    options = BalanceKVStreaming(**options)
    of = values if with_values else None
    return MergeAndReduce(
        keys, of, t, radii if with_values else (radii[0], 1.0), options, bound, seed
    )


@given(
    half=st.integers(1, 8),
    n=st.integers(1, 150),
    halve=st.sampled_from(["even", "smaller"]),
    seed=st.integers(0, 999),
)
@settings(max_examples=30, deadline=None)
def test_levels_and_weights_of_merge_and_reduce(half, n, halve, seed):
    t = 2 * half
    tree = structure(t, n, seed, halve=halve)
    for token in range(n):
        tree.read(torch.tensor([token]))
        assert tree.seen == token + 1
        sizes = [len(level) for level in tree.levels]
        assert sizes[0] == tree.seen % t
        assert all(size <= half for size in sizes[1:]), "a level after 0 rests at t / 2 at most"
        assert len(sizes) <= 1 + max(1, tree.seen // t).bit_length()
        assert sum(sizes) <= tree.seen % t + half * (tree.seen // t).bit_count()
        filled = [level for level, size in enumerate(sizes[1:]) if size]
        assert all(tree.batches >> level & 1 for level in filled)
        if halve == "even":
            assert all(size in (0, half) for size in sizes[1:])
        places, weights = tree.sample()
        assert len(set(places.tolist())) == len(places)
        total = float(weights.exp().sum())
        assert total == pytest.approx(tree.seen, rel=1e-4) or halve != "even"
        assert total <= tree.seen * 1.0001
    whole = structure(t, n, seed, halve=halve).read(torch.arange(n))
    assert torch.equal(whole.sample()[0], tree.sample()[0]), "in one call as one by one"


@pytest.mark.parametrize("options", [{"bound": 0.05}, {"bound": 0.9, "with_values": False}])
def test_failed_walks_raise_or_restart(options):
    tree = structure(16, 64, **options)
    with pytest.raises(BalanceFailure, match=rf"exceeded its bound {options['bound']}"):
        tree.read(torch.arange(64))
    again = structure(16, 64, **{"with_values": False, **options, "bound": 0.9}, on_fail="restart")
    assert again.read(torch.arange(64)).batches == 4


@pytest.mark.parametrize(
    ("largest", "kept"),
    [
        (99.0, {6: 1, 0: 2, -1: 1}),  # the threshold is just below 1, the upper end of [1/2, 1)
        (100.0, {6: 1, 0: 2}),
        (101.0, {6: 1, 0: 2}),  # between the ends of [1, 2): what it holds may still matter
        (199.0, {7: 1, 0: 2}),
        (200.0, {7: 1}),
    ],
)
def test_buckets_by_norm_are_erased_by_their_upper_end(largest, kept):
    """With keys of zero the threshold is eps / (2 n) v_max, here v_max / 100."""
    values = torch.zeros(50, 2)
    values[:5, 0] = torch.tensor([1.75, 0.75, 1.0, 0.0, largest])
    options = BalanceKVStreaming(eps=1.0)
    buckets, whole = structures(torch.zeros(50, 4), values, options, 64, 0.0, 0)
    assert {i: bucket.seen for i, bucket in buckets.items()} == kept
    assert whole.seen == 50


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("name", ["balancekv_streaming", "subgen_streaming"])
def test_denominator_samples_hold_keys_only(name, bits):
    """Bytes as held, and attention while decoding against sums over the streams' samples."""
    n, dim, window = 300, 8, 12
    layer = make_layer(n, kv_heads=2, group=2, dim=dim, seed=5, scale=0.4)
    method = build_method(name, quantize=bits and {"bits": bits, "group_size": 8})
    kept = run(method, layer, Budget(rate=0.5, sink=0, window=window), seed=2)
    count, without = kept.keys.shape[2], kept.keys_only
    assert 0 < without < count - window
    assert kept.values.shape[2] == count - without
    with pytest.raises(ValueError, match="values are"):
        check_compressed(replace(kept, keys_only=0), layer)
    cache = Cache(kept, 4, capacity=count, scheme=method.quantization())
    held_keys, held_values = kept.keys[0].double(), kept.values[0].double()
    if bits is None:
        assert cache.nbytes() == 2 * 4 * (count * dim + (count - without) * dim + count)
    else:
        held_keys, held_values = (unpack(part.blocks[0]).double() for part in cache.packed)
        assert cache.nbytes() == sum(x.nbytes for x in cache.packed) + 2 * 4 * count
    held_values = torch.cat([torch.zeros(2, without, dim, dtype=torch.float64), held_values], 1)
    weights, generator = kept.log_weights[0].double(), torch.Generator().manual_seed(9)
    for tokens in (1, 3, 2):  # the last has to grow the buffers
        q = torch.randn(4, tokens, dim, generator=generator)
        k, v = torch.randn(2, 2, tokens, dim, generator=generator)
        output = step(cache, q, k, v, torch.arange(n, n + tokens), 0.35)
        held_keys = torch.cat([held_keys, k.double()], 1)
        held_values = torch.cat([held_values, v.double()], 1)
        weights = torch.cat([weights, torch.zeros(2, tokens, dtype=torch.float64)], 1)
        grouped = q.double().view(2, 2, tokens, dim)
        logits = grouped @ held_keys[:, None].mT * 0.35 + weights[:, None, None]
        later = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
        logits[..., -tokens:].masked_fill_(later, -torch.inf)
        expected = (logits.softmax(-1) @ held_values[:, None]).view(4, tokens, dim)
        torch.testing.assert_close(output.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n", [1, 60, 127, 128, 200, 255, 256, 300])
def test_balancekv_streams_answers(n):
    """Exact while nothing has been halved, and of bounded error after."""
    keys, values = (part[0] for part in data(1, 300, 4, seed=2, scale=0.3))
    radius, query = float(keys.norm(dim=-1).max()), torch.tensor([0.5, -0.2, 0.9, 0.1])
    options = BalanceKVStreaming(eps=1e-3)
    buckets, whole = structures(keys[:n], values[:n], options, 128, radius, 0)
    weights, (below, level) = (keys[:n] @ query).softmax(0), whole.sample()
    total = (keys[below] @ query + level).exp().sum()
    error = -weights @ values[:n]
    for places, level in (bucket.sample() for bucket in buckets.values()):
        error += (keys[places] @ query + level).exp() @ values[places] / total
    if n < 128:
        torch.testing.assert_close(error, torch.zeros(5), atol=1e-5, rtol=0)
    else:  # equation (2)
        assert error.norm() < 2.0 * weights.norm() * values[:n].norm()
