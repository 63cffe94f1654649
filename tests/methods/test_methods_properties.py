"""What every method must keep to, whatever the shapes; and the mathematics of each."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.method_layers import LAYERS, attend, make_layer, rotary, run
from support.variants import OTHERS, VARIANTS, label
from torch import Tensor

from kvbench.kernels.balanced_walk import balanced_walk
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods import available_methods, build_method
from kvbench.methods._select import top_positions
from kvbench.methods.balancekv_needle import needle_means
from kvbench.methods.base import Held, Method

INVARIANTS: dict[str, set[str]] = {
    "exact": {"sink", "window", "values"},
    "topk": {"sink", "window", "values"},
    "qjl": {"sink", "window", "values"},
    "turboquant": {"sink", "window", "values"},
    "local": {"window", "values", "count"},
    "streaming_llm": {"sink", "window", "values", "count"},
    "uniform": {"sink", "window", "values", "count"},
    "recompress": {"sink", "window", "values", "count"},  # of uniform
    "snapkv": {"window", "values", "count"},
    "pyramidkv": {"window", "values", "count"},
    "h2o": {"values", "count"},
    "subgen": {"values", "count"},
    "strided": {"values", "count"},
    "fixed": {"values", "count"},
    "spatten": {"values", "count"},
    "rkv": {"values", "count"},
    "expected_attention": {"sink", "values", "count"},
    "balancekv": {"sink", "window"},
    "balancekv_needle": {"sink", "window", "values"},
    "adakv": {"sink", "window", "values", "lengths"},
    "pages": {"sink", "window", "values"},
    "wildcat": {"sink", "window"},
    "attention_matching": {"sink", "window", "count"},
    "solved": set(),  # what the inner method promises
    "balancekv_streaming": {"repeats"},
    "subgen_streaming": {"repeats"},
}
"""Of each method: keeps sink, window; the prompt's values bit for bit; exactly the capacity per head, or
with `lengths` per layer; and `repeats`: positions may, so that nothing else is promised. A method that
is not named here promises what all methods do."""

ELSEWHERE = {"kvpress", "minference", "kvzip", "kvgrad"}
"""Other packages' methods, and what reads the prompt twice, have tests of their own."""

LISTED = [*VARIANTS, *OTHERS]
EVERY = [*LISTED]
for new in available_methods():
    if new not in ELSEWHERE and new not in {name for name, _ in LISTED}:
        EVERY.append((new, {}))
assert INVARIANTS.keys() <= {name for name, _ in EVERY}
each_variant = pytest.mark.parametrize(("name", "options"), EVERY, ids=map(label, EVERY))
shapes = st.fixed_dictionaries(
    {
        "n": st.integers(1, 150),
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 3),
        "group": st.integers(1, 8),
        "dim": st.sampled_from([2, 4, 8]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
        "seed": st.integers(0, 10**6),
        "layer_index": st.integers(0, LAYERS - 1),
    }
)
budgets = st.builds(
    Budget,
    rate=st.sampled_from([1.0, 0.9, 0.5, 0.4, 0.25, 0.2, 0.125, 1 / 16, 1e-3]),
    sink=st.integers(0, 9),
    window=st.integers(1, 9),
)


TWO_TOKENS = {
    "n": 2,
    "batch": 1,
    "kv_heads": 1,
    "group": 1,
    "dim": 2,
    "dtype": torch.float32,
    "seed": 0,
    "layer_index": 0,
}


@each_variant
@given(shape=shapes, budget=budgets)
@example(TWO_TOKENS, Budget(rate=0.5, sink=0, window=1))  # nothing of the middle is kept
@settings(max_examples=10, deadline=None)
def test_what_is_kept(
    name: str, options: dict[str, Any], shape: dict[str, Any], budget: Budget
) -> None:
    promised, method = INVARIANTS.get(name, set()), build_method(name, **options)
    if options.get("weights") in ("released", "values"):
        promised = promised - {"values"}
    if options.get("of") == "attention_matching":
        promised = promised - {"values"}
    if name in ("balancekv_needle", "spatten"):  # later layers need earlier ones; tested below
        shape = {**shape, "layer_index": 0}
    layer = replace(make_layer(**shape), rotary=rotary(shape["dim"]))
    before = [part.clone() for part in (layer.keys, layer.values, layer.queries)]
    try:
        kept = run(method, layer, budget)
    except KVError:  # no room for one page, one cluster, one bin
        assert name in ("pages", "wildcat", "subgen_streaming", "balancekv_streaming")
        return
    after = (layer.keys, layer.values, layer.queries)
    assert all(map(torch.equal, before, after)), "the layer is shared: nobody writes to it"
    check_shapes(kept, layer)
    check_count(kept, layer, method, budget, promised)
    check_positions_and_weights(kept, layer)
    if name != "subgen_streaming" or layer.n > 20:  # attention over padding and weights is finite
        assert layer.queries is not None
        assert attend(layer.queries[:, :, -1:], kept, layer.scaling).isfinite().all()
    if "repeats" not in promised:
        check_entries(kept, layer, budget, promised)


def padding_of(kept: CompressedKV) -> Tensor:
    if kept.log_weights is None:
        return torch.zeros_like(kept.positions, dtype=torch.bool)
    return kept.log_weights == -math.inf


def check_shapes(kept: CompressedKV, layer: LayerKV) -> None:
    assert layer.queries is not None
    assert kept.positions.shape[1] in (layer.keys.shape[1], layer.queries.shape[1])
    assert kept.keys.shape == (*kept.positions.shape, layer.keys.shape[-1])
    assert kept.keys.dtype == kept.values.dtype == layer.keys.dtype
    assert kept.positions.dtype == torch.int64


def check_count(
    kept: CompressedKV, layer: LayerKV, method: Method, budget: Budget, promised: set[str]
) -> None:
    """No more than the budget allows, and as many as are promised."""
    of_layers = [method.layer_capacity(budget, layer.n, i, LAYERS) for i in range(LAYERS)]
    assert sum(of_layers) <= method.total_capacity(budget, layer.n, LAYERS)
    if layer.n <= budget.capacity(layer.n):
        return
    capacity = of_layers[layer.layer_index]
    assert kept.charged <= capacity
    if "lengths" in promised:
        assert (kept.entries.sum(-1) == kept.positions.shape[1] * capacity).all()
    if "count" in promised:
        assert kept.entries.unique().tolist() == [capacity]


def check_positions_and_weights(kept: CompressedKV, layer: LayerKV) -> None:
    """Entries are of the prompt; log-weights are numbers."""
    positions = kept.positions[~padding_of(kept)]
    assert (positions >= 0).all()
    assert (positions < layer.n).all()
    if kept.log_weights is not None:
        assert kept.log_weights.dtype == torch.float32
        assert kept.log_weights.shape == kept.positions.shape
        assert not kept.log_weights.isnan().any()


def check_entries(kept: CompressedKV, layer: LayerKV, budget: Budget, promised: set[str]) -> None:
    """Each position once, sink and window among them, with the prompt's keys and values."""
    padded, n = padding_of(kept), layer.n
    batch, heads = kept.positions.shape[:2]
    for row, head in itertools.product(range(batch), range(heads)):
        real, source = ~padded[row, head], head // (heads // layer.keys.shape[1])
        positions = kept.positions[row, head][real]
        unique = set(positions.tolist())
        assert len(unique) == len(positions)
        assert "sink" not in promised or set(range(min(n, budget.sink))) <= unique
        assert "window" not in promised or set(range(max(0, n - budget.window), n)) <= unique
        assert torch.equal(kept.keys[row, head][real], layer.keys[row, source, positions])
        if "values" in promised:
            assert torch.equal(kept.values[row, head][real], layer.values[row, source, positions])


@each_variant
def test_same_seed_same_result_on_any_batch(name, options):
    method, order = build_method(name, **options), [2, 0]
    budget = Budget(rate=0.3, sink=3, window=5)
    whole = replace(make_layer(90, batch=3, group=3, seed=5), rotary=rotary(8))
    rows = {part: getattr(whole, part)[order] for part in ("keys", "values", "queries")}
    part = replace(whole, **rows, shared={})
    kept, again, permuted = (
        run(method, layer, budget, seed=11) for layer in (whole, replace(whole, shared={}), part)
    )
    for field in ("keys", "values", "positions", "log_weights", "scores", "denominators"):
        first, second, third = (getattr(one, field) for one in (kept, again, permuted))
        assert (first is None) == (second is None)
        if first is None or (field == "values" and kept.keys_only):
            continue
        assert torch.equal(first, second), field
        if name == "balancekv_streaming":  # its levels are those that fit every row
            continue
        for (row, source), head in itertools.product(enumerate(order), range(first.shape[1])):
            one = first[source, head, kept.positions[source, head] >= 0]
            other = third[row, head, permuted.positions[row, head] >= 0]  # padding may differ
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


# -- options -------------------------------------------------------------------------------------

REFUSED: list[tuple[str, str, Any, str]] = [
    ("snapkv", "kernel_size", 4, "snapkv.kernel_size is 4; allowed: an odd integer"),
    ("snapkv", "pooling", "sum", "snapkv.pooling is 'sum'; allowed: 'avgpool' or 'maxpool'"),
    ("pyramidkv", "beta", 0, "pyramidkv.beta is 0; allowed: greater than or equal to 1"),
    ("h2o", "heavy_fraction", 1.5, "h2o.heavy_fraction is 1.5; allowed: less than or equal to 1"),
    ("subgen", "recent", -1, "subgen.recent is -1; allowed: greater than or equal to 0"),
    (
        "balancekv",
        "block_size",
        [],
        "balancekv.block_size is []; allowed: a valid integer or Value should",
    ),
    ("balancekv", "gamma", [1.0, "x"], "balancekv.gamma is [1.0, 'x']; allowed: a valid number"),
    ("balancekv", "blocksize", 4, "did you mean 'block_size'"),
    ("balancekv_needle", "weights", "released", "balancekv_needle.weights is 'released'"),
    ("wildcat", "query_norm", 0, "wildcat.query_norm is 0; allowed: greater than 0"),
    (
        "adakv",
        "of",
        "uniform",
        "adakv.of is 'uniform'; allowed: attention_matching, expected_attention, h2o",
    ),
    ("pages", "of", "snapkvv", "unknown method 'snapkvv'"),
    (
        "recompress",
        "of",
        "wildcat",
        "recompress.of is 'wildcat'; allowed: attention_matching, local",
    ),
    ("h2o", "keeps", "least", "h2o.keeps is 'least'; allowed: 'heaviest' or 'lightest'"),
]


@pytest.mark.parametrize(("name", "option", "value", "message"), REFUSED)
def test_wrong_options_are_refused_in_one_line(
    name: str, option: str, value: Any, message: str
) -> None:
    with pytest.raises(KVError) as refusal:
        build_method(name, **{option: value})
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


BLIND = replace(make_layer(60, layer_index=3), queries=None)
CANNOT = [
    ("snapkv", {}, make_layer(60), {"window": 0}, r"budget\.window is 0"),
    ("subgen", {"recent": 40}, make_layer(60), {"rate": 0.1}, "recent is 40; allowed: at most"),
    ("balancekv", {"gamma": [4.0, 2.0]}, make_layer(60), {"rate": 0.125}, "3 values at this rate"),
    ("snapkv", {}, BLIND, {}, "layer 3 holds 0 prompt queries"),
    ("h2o", {}, BLIND, {}, "layer 3 holds 0 prompt queries"),
    ("expected_attention", {}, make_layer(60), {}, "has no rotary table of the usual kind"),
    (
        "expected_attention",
        {"sink": 14},
        make_layer(60),
        {},
        "sink is 14; allowed: at most the cap",
    ),
    ("spatten", {}, replace(BLIND, queries=make_layer(60).queries), {}, "sees layer 3 first"),
    ("balancekv_needle", {}, BLIND, {}, r"balancekv_needle\.layer is 1, a layer that was not seen"),
    ("kvzip", {}, BLIND, {}, "has not seen the prompt repeated"),
    ("wildcat", {"bins": "released"}, BLIND, {"rate": 1e-3}, "bins is released and rate 0.001 of"),
    ("pages", {"size": 16}, make_layer(60), {"rate": 0.01}, "sink and window take 2 pages of 16"),
    ("subgen_streaming", {}, BLIND, {"rate": 1e-9}, r"s is 2; allowed: an s that leaves t = 4"),
    ("balancekv_streaming", {}, BLIND, {"rate": 1e-9}, "the rate leaves 0 entries"),
]


@pytest.mark.parametrize(("name", "options", "layer", "budget", "message"), CANNOT)
def test_methods_that_cannot_work_say_so(name, options, layer, budget, message):
    with pytest.raises(KVError, match=message):
        run(
            build_method(name, **options),
            replace(layer, carried={}, shared={}),
            Budget(**{"rate": 0.1, "sink": 4, "window": 4, **budget}),
        )


# -- each method ---------------------------------------------------------------------------------


def test_uniform_is_unbiased_by_its_weights():
    """Mean over 2,000 seeds of the weighted sum of exp(q.k) against the exact sum."""
    layer = make_layer(60, kv_heads=2, group=1, seed=3)
    method, budget = build_method("uniform"), Budget(rate=0.3, sink=2, window=3)
    logits = (layer.queries[:, :, -1:] @ layer.keys.mT).squeeze(2).double() * layer.scaling
    exact = logits.exp().sum(-1)[0]
    estimates = []
    for seed in range(2000):
        kept = run(method, layer, budget, seed)
        estimates.append((logits.gather(-1, kept.positions) + kept.log_weights).exp().sum(-1)[0])
    samples = torch.stack(estimates)
    assert ((samples.mean(0) - exact).abs() < 3 * samples.std(0) / 2000**0.5).all()
    weights, kept_middle = kept.log_weights[0, 0], budget.middle_kept(60)
    assert weights[[0, 1, -3, -2, -1]].eq(0).all()
    torch.testing.assert_close(weights[2:-3].exp(), torch.full((kept_middle,), 55 / kept_middle))
    assert not torch.equal(kept.positions[0, 0], kept.positions[0, 1]), "independent heads"
    assert run(build_method("uniform", weighted=False), layer, budget).log_weights is None


@pytest.mark.parametrize("name", ["pyramidkv", "spatten"])
@given(
    n=st.integers(2, 3000),
    layers=st.integers(1, 60),
    beta=st.integers(1, 30),
    rate=st.floats(0.01, 1.0),
    window=st.integers(1, 40),
)
@settings(max_examples=150, deadline=None)
def test_shares_of_layers_fall_and_sum_to_the_budget(name, n, layers, beta, rate, window):
    budget = Budget(rate=rate, sink=5, window=window)
    method = build_method(name, **({"beta": beta} if name == "pyramidkv" else {}))
    found = [method.layer_capacity(budget, n, i, layers) for i in range(layers)]
    assert sum(found) == layers * budget.capacity(n) == method.total_capacity(budget, n, layers)
    assert found == sorted(found, reverse=True)
    assert max(found) <= n
    if name == "pyramidkv":
        assert min(found) >= min(n, window)
        steps = {a - b for a, b in itertools.pairwise(found)}
        assert not steps or max(steps) - min(steps) <= 1, "linear up to rounding"
    else:
        assert min(found) >= budget.capacity(n) // 2
        after = found[-(-layers // 3) - 1 :]
        assert max(after) - min(after) <= 1, "constant after the first third"


def test_subgen_keeps_far_apart_keys_and_counts_clusters():
    hubs = 20 * torch.randn(7, 8, generator=torch.Generator().manual_seed(0))
    layer = make_layer(147, kv_heads=1, scale=0.1)
    layer = replace(layer, keys=layer.keys + hubs.repeat(21, 1))
    budget = Budget(rate=1e-9, sink=7, window=7)
    kept = run(build_method("subgen", weights="cluster"), layer, budget)
    positions = kept.positions[0, 0]
    assert positions[7:].tolist() == list(range(140, 147))
    assert sorted((positions[:7] % 7).tolist()) == list(range(7)), "one centre in each cluster"
    expected = torch.tensor([20.0] * 7 + [1.0] * 7)
    torch.testing.assert_close(kept.log_weights[0, 0].exp(), expected)
    wide = run(build_method("subgen", recent=10), layer, budget).positions[0, 0]
    assert wide[4:].tolist() == list(range(137, 147))


@pytest.mark.parametrize(("name", "options"), [("strided", {}), ("fixed", {"summary": 5})])
def test_heavy_hitters_beside_a_pattern_and_of_topk(name, options):
    layer, budget = make_layer(100), Budget(rate=1e-9, sink=20, window=20)
    mass = layer.attention_mass().view(1, 2, 2, 100).mean(2)[0]
    method = build_method(name, heavy_hitters=True, **options)
    kept = run(method, layer, budget).positions[0]
    pattern = set(method.pattern(80, 10).tolist())
    for head in range(2):
        by_mass = mass[head, :80].argsort(descending=True).tolist()
        heavy = [position for position in by_mass if position not in pattern][:10]
        assert kept[head].tolist() == [*sorted(pattern | set(heavy)), *range(80, 100)]
    marks = run(build_method("topk", heavy_hitters=True), layer, budget).scores
    heaviest = mass.argsort(-1, descending=True)[:, :20].sort(-1).values
    assert torch.equal(marks[0].nonzero()[:, 1].view(2, -1), heaviest)


@given(older=st.integers(1, 120), count=st.integers(0, 60), summary=st.integers(1, 9))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_the_patterns_by_definition(older, count, summary):
    count = min(count, older)
    blocks = max(1, round(count / summary))
    ends = [math.floor(Fraction(i * older, blocks)) for i in range(1, blocks + 1)]  # exclusive
    distance = [min(end - 1 - p for end in ends if end > p) for p in range(older)]
    nearest = sorted(range(older), key=lambda p: (distance[p], -p))[:count]
    assert build_method("fixed", summary=summary).pattern(older, count).tolist() == sorted(nearest)
    every = [math.floor(Fraction(i * older, count)) - 1 for i in range(1, count + 1)]
    assert build_method("strided").pattern(older, count).tolist() == every
    assert len(set(every)) == count


# -- BalanceKV -----------------------------------------------------------------------------------


def halved(
    signs: list[bool], weights: list[float], selection: str, b: int
) -> tuple[list[int], list[float]]:
    """Survivors (places) of one head and their weights, in order of place."""
    n, half = len(signs), len(signs) // 2
    if selection == "algorithm2":  # of each block the smaller class, the +1 class on a tie
        kept = []
        for start in range(0, n, b):
            block = range(start, min(n, start + b))
            plus = [p for p in block if signs[p]]
            kept += plus if 2 * len(plus) <= len(block) else [p for p in block if not signs[p]]
        return kept, [2 * weights[p] for p in kept]
    if not half:
        return [], []
    ends = []  # where each class has its half-th member
    for sign in (True, False):
        places = [place for place in range(n) if signs[place] == sign]
        ends.append(places[half - 1] if len(places) >= half else -1)
    cut = max(ends)
    kept = [p for p in range(n) if p > cut or signs[p] != signs[cut]][:half]
    return kept, [weights[p] * (2 if p <= cut else 1) for p in kept]


@pytest.mark.parametrize("selection", ["cut", "algorithm2"])
@given(
    n=st.integers(1, 90),
    b=st.integers(2, 40),
    halvings=st.integers(1, 4),
    gamma=st.sampled_from([0.02, 4.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=30, deadline=None)
def test_balancekv_select_is_the_definition(selection, n, b, halvings, gamma, seed):
    """Each block's walk alone, which tests/kernels compares with its definition."""
    halvings = halvings if selection == "cut" else 1  # then heads differ in what is left
    layer = make_layer(n, kv_heads=2, dim=6, seed=seed, scale=0.8)
    keys, values = layer.keys.double(), layer.values.double()
    generator = torch.Generator().manual_seed(seed)
    uniforms = [
        torch.rand(1, 2, math.ceil((n >> t) / b), b, generator=generator) for t in range(halvings)
    ]
    method = build_method("balancekv", block_size=b, gamma=gamma, selection=selection)
    positions, weights = method.select(keys, values, uniforms)
    for head in range(2):
        order, weight = list(range(n)), [1.0] * n
        for draws in uniforms:
            signs: list[bool] = []
            for block in range(math.ceil(len(order) / b)):
                rows = order[block * b : (block + 1) * b]
                w = torch.tensor(weight[block * b : (block + 1) * b], dtype=torch.float64)
                k, v = keys[0, head, rows], values[0, head, rows] * w[:, None]
                places, u = torch.arange(len(rows))[None], draws[0, head, block, None, : len(rows)]
                signs += balanced_walk(k, v, places, u, gamma=gamma, offset=0.025)[0].tolist()
            kept, weight = halved(signs, weight, selection, b)
            order = [order[place] for place in kept]
        real = positions[0, head] >= 0
        assert selection == "algorithm2" or real.all()
        assert positions[0, head][real].tolist() == order
        assert weights[0, head][real].tolist() == weight
        assert weights[0, head][~real].eq(0).all()


@given(n=st.integers(1, 400), rate=st.floats(0.01, 1.0), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_balancekv_count_at_any_rate(n, rate, seed):
    layer, budget = make_layer(n, kv_heads=1, dim=2, seed=seed), Budget(rate=rate, sink=2, window=3)
    if n <= budget.capacity(n):
        return
    mantissa, exponent = math.frexp(rate)
    halvings = 1 - exponent if mantissa == 0.5 else -exponent
    floor = budget.middle(n) >> halvings
    expected = floor if mantissa == 0.5 else min(budget.middle_kept(n), floor)
    kept = run(build_method("balancekv", block_size=16), layer, budget)
    assert kept.positions.shape[2] == 5 + expected
    assert kept.log_weights.exp()[0, 0].sum() <= n + 1e-3
    if rate > 0.5 and expected > floor / 2:  # half a halving: the most recent are not touched
        recent = 2 * expected - budget.middle(n) - 1
        assert recent <= 0 or kept.log_weights[0, 0, -3 - recent :].eq(0).all()


@pytest.mark.parametrize("selection", ["cut", "algorithm2"])
@pytest.mark.parametrize("n", [12, 14, 64, 66])
def test_balancekv_keeps_sink_and_window_alone_where_a_share_grants_no_more(selection, n):
    window = n // 4 - 1
    budget = Budget(total_rate=0.25, sink=round(n / 4) - window, window=window)
    layer = make_layer(n, kv_heads=2, dim=2, seed=n)
    kept = run(build_method("balancekv", selection=selection), layer, budget)
    ends = [*range(budget.sink), *range(n - window, n)]
    assert kept.positions[0].tolist() == [ends, ends]


def test_balancekv_weights_of_each_kind():
    layer, inside = make_layer(300, scale=0.5), slice(4, -8)
    budget = Budget(rate=0.25, sink=4, window=8)
    options = [{"weights": kind} for kind in ("entry", "released", "none")]
    entry, released, none, counted = (
        run(build_method("balancekv", block_size=32, **each), layer, budget)
        for each in (*options, {"normalise": True})
    )
    assert torch.equal(entry.positions, released.positions)
    assert torch.equal(entry.positions, none.positions)
    assert none.log_weights is None
    weights = entry.log_weights.exp()[:, :, inside]
    assert set(weights.round(decimals=4).unique().tolist()) <= {1.0, 2.0, 4.0}
    assert released.log_weights[:, :, inside].exp().sub(4).abs().max() < 1e-5
    scaled = none.values[:, :, inside] * weights.unsqueeze(-1) / 4
    torch.testing.assert_close(released.values[:, :, inside], scaled)
    sums = counted.log_weights.exp()[:, :, inside].sum(-1)
    torch.testing.assert_close(sums, torch.full_like(sums, 288.0))
    # whatever is left over; at rates between powers of two it is the middle over what stays of it
    layer, method = make_layer(301, scale=0.5), build_method("balancekv", weights="released")
    for rate, weight in ((0.5, 2), (0.25, 4), (0.125, 8), (0.0625, 16), (0.7, 289 / 202)):
        kept = run(method, layer, Budget(rate=rate, sink=4, window=8))
        middle = kept.log_weights[:, :, 4:-8].exp()
        torch.testing.assert_close(middle, torch.full_like(middle, weight))


@pytest.mark.parametrize("kept", [0, 2, 3, 4, 5, 6, 7, 12])
def test_balancekv_keeps_from_half_to_all_of_what_its_last_halving_finds(kept):
    """Of 12 keys in one block, of which a first halving finds 6."""
    method = build_method("balancekv", block_size=12, use_values=False)
    uniforms = [torch.rand(1, 1, 1, 12), torch.rand(1, 1, int(3 <= kept < 6), 12)]
    if 3 <= kept <= 6:
        positions, _ = method.select(torch.randn(1, 1, 12, 4), None, uniforms, kept=kept)
        assert positions.shape[2] == kept
        return
    with pytest.raises(KVError, match=rf"kept is {kept}; allowed: from half of 6 to all"):
        method.select(torch.randn(1, 1, 12, 4), None, uniforms, kept=kept)


# -- BalanceKV with protected tokens -------------------------------------------------------------


def needle_layer(layer_index: int = 1, needles: tuple[int, ...] = (60, 61, 150)) -> LayerKV:
    """Keys around one direction, but for the needles, which point the other way."""
    layer = make_layer(200, kv_heads=2, dim=8, layer_index=layer_index)
    keys = 0.3 * layer.keys + torch.eye(8)[0]
    keys[:, 0, list(needles)] -= 3 * torch.eye(8)[0]
    return replace(layer, keys=keys)


@given(
    n=st.integers(1, 60), b=st.integers(2, 20), dilation=st.integers(0, 5), seed=st.integers(0, 99)
)
@settings(max_examples=30, deadline=None)
def test_needle_means_by_definition(n, b, dilation, seed):
    keys = make_layer(n, kv_heads=2, seed=seed).keys
    found = needle_means(keys, b, dilation)
    for head, rows in enumerate(keys[0]):
        means = [float((rows[i // b * b : i // b * b + b] @ rows[i]).mean()) for i in range(n)]
        least = [min(means[max(0, i - dilation) : i + dilation + 1]) for i in range(n)]
        assert found[0, head].tolist() == pytest.approx(least, abs=1e-4)


def test_needles_are_kept_exactly_in_every_later_layer_and_share_the_budget():
    budget, expected = Budget(rate=0.25, sink=4, window=6), {*range(58, 64), *range(148, 153)}
    method = build_method("balancekv_needle", block_size=32, dilation=2)
    carried: dict[str, torch.Tensor] = {}
    for index in range(LAYERS):
        # Only layer 1 has needles: the others must take its word.
        layer = needle_layer(layer_index=index, needles=(60, 61, 150) if index == 1 else ())
        layer = replace(layer, carried=carried)
        kept = run(method, layer, budget)
        positions = [kept.positions[0, head].tolist() for head in range(2)]
        if index == 0:
            plain = run(build_method("balancekv", block_size=32), layer, budget)
            assert torch.equal(kept.positions, plain.positions)
            continue
        assert expected <= set(positions[0])
        places = torch.tensor([positions[0].index(p) for p in sorted(expected)])
        assert kept.log_weights[0, 0, places].eq(0).all()
        assert not expected <= set(positions[1]), "the other head has no needles"
        # A head without needles is compressed as balancekv would with the same number to keep.
        padding = kept.positions == -1
        assert padding[0].sum(-1).tolist() == [0, 1], "190 // 4 entries, not round(190 / 4)"
        assert torch.equal(padding, kept.log_weights == -torch.inf)
        assert int(kept.entries[0, 0]) >= budget.capacity(200) - 1
    # Where there are too many, the lowest are kept.
    method = build_method("balancekv_needle", block_size=32, dilation=0, threshold=1e9)
    layer, count = needle_layer(), budget.middle_kept(200)
    kept = run(method, layer, budget)
    lowest = needle_means(layer.keys[:, :, 4:194], 32, 0)[0].argsort()[:, :count].sort().values + 4
    assert torch.equal(kept.positions[0, :, 4 : 4 + count], lowest)


# -- SpAtten -------------------------------------------------------------------------------------


def test_spatten_cascades():
    layers, budget, method = 9, Budget(rate=0.2, sink=2, window=2), build_method("spatten")
    carried: dict[str, torch.Tensor] = {}
    alive, importance = set(range(100)), torch.zeros(100)
    for index in range(layers):
        layer = make_layer(100, seed=index, num_layers=layers, layer_index=index)
        kept = run(method, replace(layer, carried=carried), budget)
        importance = importance + layer.attention_mass()[0].sum(0)
        count = method.layer_capacity(budget, 100, index, layers)
        alive = set(sorted(alive, key=lambda p: -float(importance[p]))[:count])
        assert kept.positions[0].tolist() == [sorted(alive)] * 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.data())
def test_of_equal_scores_the_lower_positions_are_kept(scores, data):
    """`topk` orders ties as the device likes: what max-pooling makes equal would be chosen otherwise on
    a GPU. Compared with a stable sort."""
    values = torch.tensor([scores, scores[::-1]], dtype=torch.float32)
    count = data.draw(st.integers(0, len(scores)))
    expected = values.argsort(dim=-1, descending=True, stable=True)[..., :count].sort(-1).values
    assert torch.equal(top_positions(values, count), expected)
    with pytest.raises(KVError, match="NaN"):
        top_positions(values.index_fill(1, torch.tensor(0), math.nan), 1)
    held = Held(None, torch.arange(len(scores)).expand(2, -1), max(count, 1), 0)
    seen = ~build_method("topk").restrict(held, values[:, None])
    first = values.argsort(dim=-1, descending=True, stable=True)[..., : max(count, 1)]
    assert torch.equal(seen[:, 0], torch.zeros_like(seen[:, 0]).scatter_(-1, first, True))
