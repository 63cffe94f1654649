"""Methods that read one token at a time: the invariants of their papers, and their estimates."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from method_layers import attend, make_layer, run
from scipy.stats import chisquare

from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.methods.subgen_streaming import SubGenStream

# -- SubGen, Algorithm 1 -------------------------------------------------------------------------


def read(keys, values, delta, t, s, seed=0):
    """A stream after all of keys, values [heads, n, dim], and the draws it was given."""
    heads, n, dim = keys.shape
    stream = SubGenStream(heads, dim, values.shape[2], torch.full((heads,), delta), t, s)
    generator = torch.Generator().manual_seed(seed)
    draws = []
    for token in range(n):
        draws.append(tuple(torch.rand(heads, size, generator=generator) for size in (t, s)))
        stream.update(keys[:, token], values[:, token], *draws[-1])
    return stream, draws


def data(heads, n, dim, seed=0, scale=1.0):
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
    delta=st.floats(0.0, 4.0),
    t=st.integers(1, 3),
    s=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_subgen_stream_is_the_algorithm(heads, n, dim, delta, t, s, seed):
    """Against a plain loop per head over dictionaries, with the same draws; and the invariants."""
    keys, values = data(heads, n, dim, seed)
    stream, draws = read(keys, values, delta, t, s, seed)
    for head in range(heads):
        clusters: list[dict] = []
        mu, sampled = 0.0, [-1] * s
        for token in range(n):
            key, value = keys[head, token], values[head, token]
            distances = [float((c["key"] - key).square().sum().sqrt()) for c in clusters]
            if distances and min(distances) <= delta:
                cluster = clusters[distances.index(min(distances))]
                cluster["count"] += 1
            else:
                cluster = {"key": key, "count": 1, "slots": [token] * t}
                clusters.append(cluster)
            for slot in range(t):
                if float(draws[token][0][head, slot]) < 1 / cluster["count"]:
                    cluster["slots"][slot] = token
            weight = float(value.double().square().sum())
            mu += weight
            for slot in range(s):
                if float(draws[token][1][head, slot]) < weight / mu:
                    sampled[slot] = token
        m = len(clusters)
        assert int(stream.clusters[head]) == m
        assert stream.counts[head, :m].tolist() == [c["count"] for c in clusters]
        assert stream.counts[head].sum() == n
        assert stream.slots[head, :m].tolist() == [c["slots"] for c in clusters]
        assert stream.sampled[head].tolist() == sampled
        assert float(stream.mu[head]) == pytest.approx(mu)
        for index, position in enumerate(sampled):
            assert torch.equal(stream.sampled_keys[head, index], keys[head, position])
            assert torch.equal(stream.sampled_values[head, index], values[head, position])
        assert torch.equal(stream.slot_keys[head, :m], keys[head][stream.slots[head, :m]])
        representatives = stream.representatives[head, :m]
        apart = torch.cdist(representatives.double(), representatives.double())
        apart.fill_diagonal_(math.inf)
        assert apart.min() > delta * (1 - 1e-6)
        covered = torch.cdist(keys[head].double(), representatives.double()).amin(1)
        assert covered.max() <= delta * (1 + 1e-6) + 1e-6
        held = stream.denominator()[0][head]
        assert (held >= 0).sum() + s <= m * t + s


def test_subgen_numerator_samples_follow_value_norms():
    keys, values = data(1, 40, 2, seed=3)
    stream, _ = read(keys, values, 1.0, 1, 40_000)
    found = torch.bincount(stream.sampled[0], minlength=40).double()
    norms = values[0].double().square().sum(-1)
    expected = norms / norms.sum() * found.sum()
    assert chisquare(found.numpy(), expected.numpy()).pvalue > 0.01


def test_subgen_cluster_samples_are_uniform():
    keys = torch.zeros(1, 50, 2)
    stream, _ = read(keys, torch.ones(1, 50, 1), 1.0, 30_000, 1)
    found = torch.bincount(stream.slots[0, 0], minlength=50).double()
    assert chisquare(found.numpy()).pvalue > 0.01


def test_subgen_stream_is_unbiased():
    """Numerator and denominator, mean over 2,000 streams (as heads) against the exact sums."""
    seeds, n, dim = 2000, 50, 3
    keys, values = (part.expand(seeds, -1, -1) for part in data(1, n, dim, seed=4))
    stream, _ = read(keys, values, 1.2, 2, 6, seed=5)
    assert 1 < int(stream.clusters[0]) < n / 2
    query = torch.tensor([0.7, -1.0, 0.4])
    exponentials = (keys[0] @ query).exp().double()

    def check(estimates, exact):
        error = estimates.mean(0) - exact
        assert (error.abs() < 3 * estimates.std(0) / seeds**0.5).all()

    positions, weights = stream.numerator()
    terms = weights.exp().double() * exponentials[positions]
    exact_values = values[0].double()
    check((terms.unsqueeze(-1) * exact_values[positions]).sum(1), exponentials @ exact_values)
    positions, weights = stream.denominator()
    check((weights.exp() * exponentials[positions.clamp(min=0)]).sum(1), exponentials.sum())
    above, below = terms.unsqueeze(-1) * values[0].double()[stream.numerator()[0]], weights
    quotient = above.sum(1) / (below.exp() * exponentials[positions.clamp(min=0)]).sum(
        1, keepdim=True
    )
    found = stream.query(query.expand(seeds, -1), 1.0)
    torch.testing.assert_close(found.double(), quotient, rtol=1e-4, atol=1e-4)


def test_subgen_stream_works_in_log_space():
    keys, values = data(2, 30, 4, scale=1e3)
    stream, _ = read(keys, values, 1.0, 2, 5)
    assert stream.query(torch.full((2, 4), 10.0), 1.0).isfinite().all()


def test_subgen_values_of_zero():
    keys, _ = data(1, 10, 2)
    stream, _ = read(keys, torch.zeros(1, 10, 2), 0.5, 1, 3)
    assert stream.numerator()[1].eq(-math.inf).all()
    assert stream.query(torch.ones(1, 2), 1.0).eq(0).all()


STREAMING = [
    ("subgen_streaming", {}),
    ("subgen_streaming", {"t": 1, "s": 3, "recent": 0}),
]


@pytest.mark.parametrize(("name", "options"), STREAMING)
@given(
    n=st.integers(1, 100),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    rate=st.sampled_from([0.2, 0.25, 0.5, 0.9]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_streaming_methods_keep_their_budget(name, options, n, kv_heads, group, rate, dtype, seed):
    layer = make_layer(n, kv_heads=kv_heads, group=group, dtype=dtype, seed=seed)
    method, budget = build_method(name, **options), Budget(rate=rate, sink=4, window=6)
    try:
        kept = run(method, layer, budget, seed)
    except KVError:  # no room for one cluster; tested below
        return
    assert int(kept.entries.max()) <= budget.capacity(n)
    assert kept.keys.dtype == kept.values.dtype == dtype
    assert int(kept.positions.max()) < n
    again = run(method, layer, budget, seed)
    assert torch.equal(kept.positions, again.positions)
    if kept.log_weights is not None:
        real = kept.log_weights > -math.inf
        assert (kept.positions[real] >= 0).all()
        assert layer.queries is not None
        assert attend(layer.queries[:, :, -2:], kept, layer.scaling).isfinite().all()


def test_subgen_compressed_attends_as_its_stream():
    """`compress` holds the stream's estimate, recent tokens added, up to the 2^-10 mixture."""
    layer = make_layer(400, kv_heads=2, group=1, seed=7)
    budget = Budget(rate=0.5, sink=0, window=20)
    method = build_method("subgen_streaming", t=2)
    kept = run(method, layer, budget, seed=3)
    stream = method.stream(layer, budget, torch.Generator().manual_seed(3))
    assert stream.seen == 380
    assert layer.queries is not None
    query = layer.queries[0, :, -1]
    logits = (layer.keys[0, :, 380:] @ query.unsqueeze(-1)).squeeze(-1).double() * layer.scaling
    above = (logits.exp().unsqueeze(-1) * layer.values[0, :, 380:]).sum(1)
    below = logits.exp().sum(-1, keepdim=True)
    for (positions, weights), values in ((stream.numerator(), True), (stream.denominator(), False)):
        index = positions.clamp(min=0).unsqueeze(-1).expand(-1, -1, 8)
        logits = (layer.keys[0].gather(1, index) @ query.unsqueeze(-1)).squeeze(-1).double()
        terms = (logits * layer.scaling + weights).exp()
        if values:
            above = above + (terms.unsqueeze(-1) * layer.values[0].gather(1, index)).sum(1)
        else:
            below = below + terms.sum(-1, keepdim=True)
    found = attend(layer.queries[:, :, -1:], kept, layer.scaling)[0, :, 0]
    torch.testing.assert_close(found, above / below, rtol=3e-3, atol=1e-4)


def test_subgen_delta_uses_the_room_there_is():
    layer, budget = make_layer(600, kv_heads=2), Budget(rate=0.5, sink=4, window=6)
    kept = run(build_method("subgen_streaming", t=2), layer, budget)
    assert int(kept.entries.min()) > 0.8 * budget.capacity(600)


def test_subgen_without_room_says_so():
    layer, budget = make_layer(60), Budget(rate=1e-9, sink=0, window=6)
    with pytest.raises(KVError, match=r"subgen_streaming\.s is 1; allowed: an s that leaves t = 4"):
        run(build_method("subgen_streaming"), layer, budget)
