"""Solved values: the least squares in float64, properties around kinds of inner methods, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from support.golden import assert_near
from support.jobs import Letters
from support.method_layers import attend, make_layer, rotary, run
from support.tiny import prompt_ids, tiny_model
from torch import Tensor

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.prefill import prefill
from kvbench.engine.row import Row
from kvbench.kernels.rotation import rotate
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods._reference_queries import FUTURE, as_after_prompt, evenly_spread
from kvbench.prompts import PromptEncoder

BUDGET = Budget(rate=0.3, sink=5, window=4)
REPEATED = {"queries": "repeat", "instructed": False}
INNER: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {}),
    ("snapkv", {"granularity": "query_head"}),
    ("h2o", {}),
    ("streaming_llm", {}),
    ("uniform", {}),
    ("balancekv", {"block_size": 8}),
    ("balancekv", {"block_size": 8, "gamma": 0.05, "selection": "algorithm2"}),
    ("balancekv", {"weights": "released"}),
    ("subgen", {}),
    ("pyramidkv", {}),
    ("expected_attention", {}),
    ("rkv", {"every": None, "window": 4}),
    ("pages", {"size": 5}),
    ("adakv", {"safeguard": 0.0}),
    ("adakv", {"of": "attention_matching", "safeguard": 0.0}),
]


def layer_of(n: int = 120, **shape: Any) -> LayerKV:
    return make_layer(n, scale=2.0, **shape)


def errors_of(layer: LayerKV, kept: CompressedKV) -> Tensor:
    """The squared errors for the reference queries by KV head, in float64: [batch, kv_heads, m]."""
    queries = as_after_prompt(layer, layer.keys.shape[1], 10**6)
    exact = attend(queries, keep_all(layer), layer.scaling)
    error = (attend(queries, kept, layer.scaling) - exact).square().sum(3)
    return error.unflatten(1, (layer.keys.shape[1], -1)).flatten(2)


@pytest.mark.parametrize(("name", "options"), INNER)
@pytest.mark.parametrize("log_weights", [True, False])
def test_no_head_answers_the_reference_queries_worse_than_the_inner_method(
    name: str, options: dict[str, Any], log_weights: bool
) -> None:
    layer = replace(layer_of(batch=2, group=4), rotary=rotary(8))
    inner = run(build_method(name, **options), layer, BUDGET)
    method = build_method("solved", of=name, options=options, log_weights=log_weights)
    kept = run(method, layer, BUDGET)
    for part in ("keys", "positions", "lengths", "scores"):
        before, after = getattr(inner, part), getattr(kept, part)
        assert before is after is None or torch.equal(before, after), part
    errors = errors_of(layer, inner)
    counts = 1 / (1 + errors / errors.mean(2, keepdim=True).clamp(min=1e-30))
    before, after = (counts * errors).sum(2), (counts * errors_of(layer, kept)).sum(2)
    assert (after <= before * (1 + 1e-5)).all()
    is_sink = (kept.positions < BUDGET.sink) & (kept.positions > 0)
    assert torch.equal(kept.values[is_sink], inner.values[is_sink])
    assert after.sum() < 0.9 * before.sum() or options.get("of") == "attention_matching"
    if not log_weights:
        assert inner.log_weights is None or torch.equal(kept.log_weights, inner.log_weights)
        return
    before = torch.zeros_like(kept.log_weights)
    if inner.log_weights is not None:
        before = inner.log_weights
    least = before.clamp(max=0.0)
    assert (kept.log_weights >= least - 1e-6).all(), "no token counts less than itself"
    is_fitted = not torch.equal(kept.log_weights, before)
    assert is_fitted or options.get("of") == "attention_matching"


def test_the_prompts_queries_stand_after_it() -> None:
    """By the rotation of their positions; a layer without a table has them as they are."""
    plain = layer_of(100)
    at = torch.arange(90)
    layer = replace(plain, rotary=rotary(8), withheld=10)
    layer = replace(
        layer, queries=rotate(plain.queries[:, :, :90].double(), *rotary(8)(at)).float()
    )
    later = rotate(plain.queries[:, :, :90].double(), *rotary(8)(100 + at * FUTURE // 90))
    assert_near(as_after_prompt(layer, 2, 10**6), later, 1e-4)
    assert as_after_prompt(plain, 2, 10**6) is plain.queries
    assert_near(as_after_prompt(layer, 2, 20), evenly_spread(later, 2, 20), 1e-4)


def test_values_by_definition() -> None:
    """Of the ridge towards the kept values by the pseudo-inverse in float64, the tenth left out: a
    query counts less the larger the inner method's error, and of the sink only the first moves."""
    layer, ridge = layer_of(kv_heads=1, group=3), 1e-2
    inner = run(build_method("streaming_llm"), layer, BUDGET)
    options = {"of": "streaming_llm", "log_weights": False, "ridge": ridge, "max_queries": 10**6}
    kept = run(build_method("solved", **options), layer, BUDGET)
    queries = layer.queries.double()[0].flatten(0, 1)
    keys, values = inner.keys[0, 0].double(), inner.values[0, 0].double()
    attention = (queries @ keys.mT * layer.scaling).softmax(-1)
    exact = attend(layer.queries, keep_all(layer), layer.scaling)[0].flatten(0, 1)
    missing = exact - attention @ values
    errors = missing.square().sum(1)
    roots = (1 + errors / errors.mean())[:, None] ** -0.5
    fitted = torch.arange(len(queries)) % 10 != 5
    columns = (attention * roots)[fitted]
    penalty = ridge**0.5 * torch.linalg.matrix_norm(columns, 2)
    free = (inner.positions[0, 0] >= BUDGET.sink) | (inner.positions[0, 0] == 0)
    count = int(free.sum())
    longer = torch.cat([columns[:, free], penalty * torch.eye(count).double()])
    below = torch.zeros(count, values.shape[1], dtype=torch.float64)
    expected = values.clone()
    expected[free] += torch.linalg.pinv(longer) @ torch.cat([(missing * roots)[fitted], below])
    assert_near(kept.values[0, 0], expected, 1e-3)


@pytest.mark.parametrize(("queries", "ridge"), [("prompt", 0.1), ("repeat", 3e-4)])
def test_the_ridge_is_that_of_the_reference_queries(queries: str, ridge: float) -> None:
    layer = layer_of()
    layer.carried["solved: queries 0"] = layer.queries
    options: dict[str, Any] = {"of": "snapkv", "queries": queries}
    default = run(build_method("solved", **options), layer, BUDGET)
    given = run(build_method("solved", **options, ridge=ridge), layer, BUDGET)
    assert torch.equal(default.values, given.values)


@pytest.mark.parametrize(("name", "options"), INNER[3:7])
def test_a_large_ridge_gives_back_what_the_inner_method_keeps(name, options) -> None:
    layer = layer_of()
    inner = run(build_method(name, **options), layer, BUDGET)
    kept = run(build_method("solved", of=name, options=options, ridge=1e9), layer, BUDGET)
    assert_near(kept.values, inner.values, 1e-5)
    weights = torch.zeros_like(kept.log_weights) if inner.log_weights is None else inner.log_weights
    torch.testing.assert_close(kept.log_weights, weights, atol=1e-5, rtol=0)


def test_queries_that_are_held_out_decide_for_each_head() -> None:
    """In head 0 the fitted queries look for token 20, which leaves, and find token 100 in its place; the
    held-out queries look for token 100, whose value would be lost."""
    layer = layer_of(group=1)
    one, other = 10 * torch.eye(8)[:2]
    keys, queries = layer.keys.clone(), layer.queries.clone()
    keys[0, 0, 20], keys[0, 0, 100] = one + other, other
    queries[0, 0] = one + other
    queries[0, 0, 5::10] = other - one
    layer = replace(layer, keys=keys, queries=queries)
    inner = run(build_method("streaming_llm"), layer, BUDGET)
    kept = run(build_method("solved", of="streaming_llm"), layer, BUDGET)
    assert torch.equal(kept.values[0, 0], inner.values[0, 0])
    assert not kept.log_weights[0, 0].any()
    assert not torch.equal(kept.values[0, 1], inner.values[0, 1])


def test_the_attention_sink_of_a_head_is_part_of_the_exact_output() -> None:
    """As one more key, of a channel that only it has, without a value."""
    sinks = torch.tensor([0.5, 2.0, -1.0, 4.0])
    layer = replace(layer_of(), sinks=sinks)

    def with_sinks(kept: CompressedKV) -> CompressedKV:
        keys, values = (torch.nn.functional.pad(x, (0, 1)) for x in (kept.keys, kept.values))
        one = torch.zeros_like(keys[:, :, :1])
        one[..., -1] = 1 / layer.scaling
        weights = kept.log_weights
        if weights is not None:
            weights = torch.nn.functional.pad(weights, (0, 1))
        keys, values = torch.cat([keys, one], 2), torch.cat([values, 0 * one], 2)
        return replace(kept, keys=keys, values=values, log_weights=weights)

    channel = sinks[None, :, None, None].expand(1, -1, layer.n, 1)
    queries = torch.cat([layer.queries, channel], -1)

    def error(kept: CompressedKV) -> float:
        parts = (with_sinks(kept), with_sinks(keep_all(layer)))
        output, exact = (attend(queries, part, layer.scaling) for part in parts)
        return float((output - exact).square().sum())

    inner = run(build_method("snapkv"), layer, BUDGET)
    method = build_method("solved", of="snapkv", log_weights=False, ridge=3e-4)
    kept, blind = (run(method, seen, BUDGET) for seen in (layer, replace(layer, sinks=None)))
    assert error(kept) < 0.9 * error(inner)
    assert error(kept) < error(blind)


def test_a_head_that_keeps_nothing_is_left_alone() -> None:
    layer, scores = layer_of(60), torch.rand(1, 2, 60)
    scores[:, 1] *= 0.01
    carried = {"scores 0": scores, "solved: queries 0": layer.queries}
    layer = replace(layer, num_layers=1, queries=None, carried=carried)
    kept = run(build_method("solved"), layer, Budget(rate=0.2, sink=0, window=0))
    assert kept.lengths[0, 1] == 0 < kept.lengths[0, 0]
    assert kept.values.isfinite().all()


def test_a_change_of_either_part_is_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = [build_method("solved", of=of) for of in ("h2o", "subgen")]
    versions = [method.version for method in methods]
    monkeypatch.setattr(type(methods[0]), "own_version", 4)
    versions += [method.version for method in methods]
    assert versions[:2] == [201, 200 + build_method("subgen").version]
    assert len(set(versions)) == 4


def test_a_method_that_evicts_goes_on_doing_so() -> None:
    inner, method = build_method("h2o"), build_method("solved", of="h2o")
    assert method.evicts
    assert method.eviction(40, 4) == inner.eviction(40, 4)
    layer = layer_of(60)
    whole = method.compress(layer, Budget(rate=1.0, sink=0, window=0), torch.Generator())
    assert torch.equal(whole.values, layer.values)
    assert whole.scores is not None


@pytest.mark.parametrize("options", [{}, {"quantize": {"bits": 4, "group_size": 4}}])
@pytest.mark.parametrize(
    "inner",
    [
        {"of": "kvzip", "options": {"instructed": False, "chunk": 70}},
        {"of": "kvzip", "options": {"instructed": False}, "queries": "prompt"},
        {"of": "adakv", "options": {"of": "attention_matching", "options": REPEATED}},
        {"of": "h2o", "options": {"decode": "grow"}, "queries": "repeat"},
        {"of": "pyramidkv", "options": {"budgets": "released", "granularity": "query_head"}},
    ],
)
def test_the_engine_holds_what_was_solved_for(inner, options) -> None:
    """For the queries of the prompt or of the pass that repeats it, whichever of them the inner method
    reads; beside a method of whose preset a wrapper may hold as much."""
    ids, model = prompt_ids(120), tiny_model("llama")
    method = build_method("solved", **inner, quantize=options.get("quantize"))
    plain = build_method(inner["of"], **inner.get("options", {}))
    rows = [Row("s", method, BUDGET, 0, "x"), Row("i", plain, BUDGET, 0, "x")]
    with kvbench_attention_on(model):
        prefill(model, ids, rows, encoder=PromptEncoder(Letters(), suffix_ids=(7,)))
    assert [row.failure for row in rows] == [None, None]
    held, without = (row.cost().record() for row in rows)
    assert held["entries"] == without["entries"]
    assert (held["cache_bytes"] < without["cache_bytes"]) == bool(options)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"of": "exact"}, "solved.of is 'exact'; allowed: adakv, attention_matching, balancekv, "),
    ({"of": "topk"}, "solved.of is 'topk'; allowed: "),
    ({"of": "solved"}, "solved.of is 'solved'; allowed: "),
    ({"of": "wildcat"}, "solved.of is 'wildcat'; allowed: "),
    ({"of": "subgen_streaming"}, "solved.of is 'subgen_streaming'; allowed: "),
    ({"of": "recompress"}, "solved.of is 'recompress'; allowed: "),
    ({"of": "h2o", "options": {"semantics": "released_global"}}, "holds no cache to decode with"),
    ({"of": "h2o", "options": {"quantize": {"bits": 4}}}, "solved.options.quantize is {'bits': 4}"),
    ({"of": "rkv"}, "solved.of is 'rkv' with options that compress again while decoding"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_what_cannot_be_solved_for_is_refused_in_one_line(options, message) -> None:
    with pytest.raises(KVError) as refusal:
        build_method("solved", **options)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("inner", ["kvzip", "streaming_llm"])
def test_without_a_tokenizer_the_prompt_is_not_repeated_in_words(inner) -> None:
    method = build_method("solved", of=inner, queries="repeat")
    rows = [Row("s", method, BUDGET, 0, "x") for _ in range(2)]
    model = tiny_model("llama")
    with kvbench_attention_on(model):
        prefill(model, prompt_ids(60), rows[:1])
        prefill(model, prompt_ids(60), rows[1:], encoder=PromptEncoder(Letters(), suffix_ids=(7,)))
    assert "there is no tokenizer; allowed: " in str(rows[0].failure)
    assert rows[1].failure is None
