"""H2O's selection and eviction against a plain loop."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.method_layers import make_layer, run

from kvbench.kv import Budget
from kvbench.methods import Held, build_method


def test_heavy_hitters_and_recent():
    layer, budget = make_layer(80, kv_heads=2, group=3), Budget(rate=0.25, sink=4, window=4)
    capacity = budget.capacity(80)
    kept = run(build_method("h2o"), layer, budget)
    heavy = round(0.5 * capacity)
    recent = capacity - heavy
    assert layer.queries is not None
    logits = layer.queries.double() @ layer.keys.double().repeat_interleave(3, 1).mT * layer.scaling
    future = torch.ones(80, 80, dtype=torch.bool).triu(1)
    mass = logits.masked_fill(future, -torch.inf).softmax(-1).sum(2)
    mass = mass.view(1, 2, 3, 80).mean(2)
    for head in range(2):
        best = mass[0, head, : 80 - recent].argsort(descending=True)[:heavy]
        expected = [*sorted(best.tolist()), *range(80 - recent, 80)]
        assert kept.positions[0, head].tolist() == expected
        assert kept.scores is not None
        torch.testing.assert_close(
            kept.scores[0, head].double(), mass[0, head, expected], rtol=1e-4, atol=1e-5
        )


def test_grow_keeps_no_scores():
    layer, budget = make_layer(80), Budget(rate=0.25, sink=4, window=4)
    growing = build_method("h2o", decode="grow")
    assert not growing.evicts
    assert build_method("h2o").evicts
    assert run(growing, layer, budget).scores is None
    assert torch.equal(
        run(growing, layer, budget).positions, run(build_method("h2o"), layer, budget).positions
    )


def test_fractions_of_table_9():
    layer, budget = make_layer(80), Budget(rate=0.25, sink=4, window=4)
    capacity = budget.capacity(80)
    local = run(build_method("h2o", heavy_fraction=0.0), layer, budget).positions
    assert torch.equal(local, run(build_method("local"), layer, budget).positions)
    heavy = run(build_method("h2o", heavy_fraction=1.0), layer, budget).positions
    mass = layer.attention_mass().view(1, 2, 2, 80).mean(2)
    assert torch.equal(heavy, mass.topk(capacity).indices.sort(-1).values)


@given(
    capacity=st.integers(1, 12),
    heads=st.integers(1, 3),
    steps=st.integers(1, 25),
    fraction=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    start=st.integers(0, 12),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_eviction(capacity, heads, steps, fraction, start, seed):
    """The cache of a simulated decode, step by step; entries stay in arbitrary slots."""
    method = build_method("h2o", heavy_fraction=fraction)
    heavy = round(fraction * capacity)
    recent = capacity - heavy
    generator = torch.Generator().manual_seed(seed)
    held = min(start, capacity)
    positions = torch.arange(held).expand(heads, held).clone()
    scores = torch.rand(heads, held, generator=generator)
    plain = [dict(enumerate(scores[head].tolist())) for head in range(heads)]
    for step in range(steps):
        newest = held + step  # as in a cache: one position after the other
        positions = torch.cat([positions, torch.full((heads, 1), newest)], 1)
        scores = torch.cat([scores, torch.zeros(heads, 1)], 1)
        attention = torch.rand(heads, positions.shape[1], generator=generator)
        scores, leaving = method.evict(Held(scores, positions, capacity, sink=0), attention)
        for head in range(heads):
            plain[head][newest] = 0.0
            for slot, position in enumerate(positions[head].tolist()):
                plain[head][position] += float(attention[head, slot])
        if leaving is None:
            assert positions.shape[1] <= capacity
        else:
            assert leaving.shape == (heads,)
            for head in range(heads):
                newest_first = sorted(plain[head], reverse=True)
                candidates = newest_first[recent:]
                lightest = min(candidates, key=lambda position: plain[head][position])
                assert int(positions[head, leaving[head]]) == lightest
                del plain[head][lightest]
            # The newest entry takes the slot that became free, as a cache may do.
            slots = leaving.unsqueeze(1)
            positions = positions.scatter(1, slots, positions[:, -1:])[:, :-1]
            scores = scores.scatter(1, slots, scores[:, -1:])[:, :-1]
            # (when the newest itself left, the slot was the last one and is cut off)
        for head in range(heads):
            found = dict(zip(positions[head].tolist(), scores[head].tolist(), strict=True))
            assert found.keys() == plain[head].keys()
            assert found == pytest.approx(plain[head], rel=1e-4)
        assert positions.shape[1] <= capacity
