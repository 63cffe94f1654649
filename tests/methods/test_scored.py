"""Expected Attention, Ada-KV, pages, R-KV: golden values of the released codes, and properties."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from support.attention import step
from support.golden import arrays_of, cases_of, checked
from support.method_layers import attend, make_layer, rotary, run
from support.paths import GOLDEN
from support.tiny import GROUPED, prompt_ids, tiny_model
from torch import Tensor

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.attention import register
from kvbench.engine.cost import ExactBytes
from kvbench.engine.prefill import capture_layers, prefill
from kvbench.engine.row import Row
from kvbench.kernels.rotation import rotate
from kvbench.kv import Budget, KVError, LayerKV
from kvbench.methods import build_method
from kvbench.methods.adakv import best_of_all_heads
from kvbench.methods.base import Method, Schedule, TokenScoringMethod
from kvbench.methods.expected_attention import mean_rotation, plain_queries
from kvbench.methods.rkv import redundancy


@pytest.fixture
def golden() -> dict[str, Any]:
    return arrays_of(GOLDEN / "scores.npz")


def rotated(queries: Tensor, table: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
    cos, sin = table(torch.arange(queries.shape[2]))
    half = queries.shape[-1] // 2
    turned = torch.cat([-queries[..., half:], queries[..., :half]], dim=-1)
    return (queries.double() * cos + turned.double() * sin).float()


def expected(golden: Any, case: dict[str, Any]) -> tuple[LayerKV, Method]:
    hkv, hq, n, d = (case[k] for k in ("hkv", "hq", "n", "d"))
    g = np.random.default_rng(case["seed"])
    q = g.standard_normal((1, n, hq, d), dtype=np.float32)
    q = q + g.standard_normal((1, 1, hq, d), dtype=np.float32)
    k = g.standard_normal((1, hkv, n, d), dtype=np.float32)
    v = g.standard_normal((1, hkv, n, d), dtype=np.float32)
    k, v = checked(case, k=k, v=v)
    table = rotary(d)
    queries = rotated(torch.from_numpy(q).transpose(1, 2), table)
    options = {
        ours: case[theirs]
        for ours, theirs in (
            *(("future", "n_future_positions"), ("sink", "n_sink"), ("epsilon", "epsilon")),
            *(("covariance", "use_covariance"), ("value_norm", "use_vnorm")),
        )
    }
    layer = LayerKV(k, v, queries, 0, 1, d**-0.5, rotary=table)
    return layer, build_method("expected_attention", **options)


@pytest.mark.parametrize("name", ["default", "e2", "mean_only"])
def test_expected_attention_and_adakv_as_released(golden, name):
    case = cases_of(golden, "expected_attention_json")[name]
    layer, method = expected(golden, case)
    scores = method.token_scores(layer, Budget())
    wanted, sink = golden[f"ea_{name}_score"], case["n_sink"]
    np.testing.assert_allclose(scores[0, :, sink:], wanted[:, sink:], rtol=2e-4, atol=1e-7)
    budget = Budget(rate=1e-9, sink=case["n_kept"] - 1, window=1)
    kept = method.compress(layer, budget, torch.Generator())
    np.testing.assert_array_equal(kept.positions[0], golden[f"ea_{name}_kept"])
    stay = best_of_all_heads(scores, case["n_kept"], case["n_safe"])
    np.testing.assert_array_equal(stay[0], golden[f"ea_{name}_adakv_keep"])
    assert stay.sum(-1)[0].tolist() == case["adakv_kept_per_head"]


@pytest.mark.parametrize("name", ["budget64", "budget128", "first"])
def test_rkv_as_released(golden, name):
    case = cases_of(golden, "rkv_json")[name]
    hkv, hq, n, d, window = (case[k] for k in ("hkv", "hq", "n", "d", "window"))
    g = np.random.default_rng(case["seed"])
    k = g.standard_normal((1, hkv, n, d), dtype=np.float32)
    v = g.standard_normal((1, hkv, n, d), dtype=np.float32)
    q = g.standard_normal((1, hq, window, d), dtype=np.float32) * np.float32(case["query_scale"])
    quarter = k[:, :, n // 2 : n // 2 + n // 4]
    quarter[:] = k[:, :, n // 8 : n // 8 + n // 4] + np.float32(0.25) * quarter
    k, v, q = checked(case, k=k, v=v, q=q)
    options = {"mix": case["mix_lambda"], "kernel_size": case["kernel"]}
    method = build_method("rkv", window=window, retain=case["retain_direction"], **options)
    layer = LayerKV(k, v, q, 0, 1, d**-0.5)
    wanted = golden[f"rkv_{name}_score"]
    np.testing.assert_allclose(method.entry_scores(layer)[0], wanted, rtol=1e-4, atol=1e-6)
    budget = Budget(size=case["budget"], sink=0, window=window)
    kept = method.compress(layer, budget, torch.Generator())
    np.testing.assert_array_equal(kept.positions[0], golden[f"rkv_{name}_kept"])


def test_pages_by_definition():
    for case in json.loads((GOLDEN / "pages.json").read_text()):
        hkv, n = case["hkv"], case["n"]
        draws = np.random.default_rng(case["seed"]).random((hkv, n), dtype=np.float32)
        scores = torch.from_numpy(draws.astype(np.float64) ** 3)[None]
        budget = Budget(rate=case["rate"], sink=case["sink"], window=case["window"])
        assert budget.capacity(n) == case["capacity"]
        for tokens in ("max", "mean"):
            for heads in ("mean", "max"):
                method = build_method("pages", tokens=tokens, heads=heads)
                assert (
                    method.choose(scores, budget, budget.capacity(scores.shape[2]))[0].tolist()
                    == case[f"{tokens}_{heads}"]
                )
        layer = make_layer(n, kv_heads=hkv)
        kept = run(build_method("pages"), layer, budget)
        assert kept.positions.shape[2] <= case["capacity"]


@pytest.mark.parametrize(
    ("heads", "n", "kept", "safe"), [(2, 7, 3, 0), (3, 90, 40, 11), (1, 5, 5, 2), (2, 400, 130, 30)]
)
def test_the_best_of_all_heads_by_sorting(heads, n, kept, safe):
    """Each head's safe ones, then the largest of all; of equal scores the lower head and place."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 5, (1, heads, n), generator=generator).float()
    scores[:, 0] -= 10  # of which nothing stays but what is safe
    mask = best_of_all_heads(scores, kept, safe)[0]
    assert int(mask.sum()) == heads * kept
    ranked = [sorted(range(n), key=lambda i, h=h: -scores[0, h, i]) for h in range(heads)]
    first = {(h, i) for h in range(heads) for i in ranked[h][:safe]}
    places = [(h, i) for h in range(heads) for i in range(n)]
    places.sort(key=lambda place: (place not in first, -scores[0, place[0], place[1]]))
    assert {tuple(place) for place in mask.nonzero().tolist()} == set(places[: heads * kept])


def test_a_budget_that_pages_ask_for_is_enough():
    method, budget = build_method("pages", size=8), Budget(size=20, sink=9, window=9)
    with pytest.raises(KVError, match=r"take 4 pages of 8 .* a budget of at least 32 entries"):
        method.choose(torch.rand(1, 2, 128), budget, budget.capacity(128))
    assert method.choose(torch.rand(1, 2, 128), replace(budget, size=32), 32)[0].tolist() == [
        0,
        1,
        14,
        15,
    ]


# -- properties ----------------------------------------------------------------------------------

BUDGET = Budget(rate=0.3, sink=4, window=6)


def test_heads_share_the_budget_by_their_scores():
    layer = make_layer(200, kv_heads=2, group=1)
    keys = layer.keys.clone()
    keys[:, 0] *= 0.01  # attention of the first head is even, the second's is sharp
    keys[:, 1] *= 4
    kept = run(build_method("adakv"), replace(layer, keys=keys), BUDGET)
    assert kept.lengths[0, 0] > kept.lengths[0, 1]
    assert kept.lengths[0, 1] >= int(0.2 * BUDGET.capacity(200))
    real = (2 * 8 * 4) * int(kept.lengths.sum())
    assert kept.nbytes == real, "no padding is held"
    assert attend(layer.queries, kept, layer.scaling).isfinite().all()


@dataclass(frozen=True, kw_only=True)
class ByQueryHead(TokenScoringMethod):
    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        return layer.attention_mass()


@dataclass(frozen=True, kw_only=True)
class OfOneHead(TokenScoringMethod):
    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        return layer.keys[:, 0].norm(dim=-1)


@dataclass(frozen=True, kw_only=True)
class WithoutReturn(TokenScoringMethod):
    def token_scores(self, layer: LayerKV, budget: Budget) -> Any:
        layer.keys.norm(dim=-1)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            WithoutReturn(),
            r"WithoutReturn.token_scores are None; allowed: \(1, 2, 40\), one score ",
        ),
        (
            ByQueryHead(),
            r"ByQueryHead.token_scores are \(1, 4, 40\); allowed: \(1, 2, 40\), one score per KV head "
            r"and token: scores.unflatten\(1, \(2, -1\)\).mean\(2\)$",
        ),
        (OfOneHead(), r"OfOneHead.token_scores are \(1, 40\); allowed: \(1, 2, 40\), .* token$"),
    ],
)
def test_scores_of_another_shape_are_refused_with_the_right_one(method: Any, message: str) -> None:
    layer = make_layer(40, kv_heads=2, group=2)
    with pytest.raises(KVError, match=message):
        run(method, layer, Budget(rate=0.25, sink=3, window=5))


@pytest.mark.parametrize("retain", ["last", "first"])
def test_redundancy_is_the_same_whatever_the_tiles(retain, monkeypatch):
    places = torch.randint(0, 40, (1, 2, 60), generator=torch.Generator().manual_seed(0))
    keys = torch.eye(64)[places]  # like no other but for copies, in the same tile and in others
    expected = redundancy(keys, retain)
    monkeypatch.setattr("kvbench.methods.rkv.TILE", 7)
    torch.testing.assert_close(redundancy(keys, retain), expected)


_MIXED = {
    **GROUPED,
    "head_dim": 16,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
}
_LATENT = {
    **{**GROUPED, "num_key_value_heads": 4},
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 4,
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
LONG |= {"original_max_position_embeddings": 32}
ROTATIONS = [
    (t.LlamaConfig(**GROUPED), "q_proj", 16),
    (t.Gemma2Config(**{**_MIXED, "query_pre_attn_scalar": 16}), "q_proj", 16),
    (t.Gemma3TextConfig(**_MIXED), "q_norm", 16),
    (
        t.Gemma4TextConfig(**_MIXED, num_kv_shared_layers=0, vocab_size_per_layer_input=97),
        "q_norm",
        512,
    ),
    (t.Olmo3Config(**_MIXED), "q_norm", 16),
    (t.LagunaConfig(**_MIXED), "q_norm", 8),
    (t.MellumConfig(**_MIXED), "q_norm", 16),
    (t.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1, 0]), "q_proj", 0),
    (t.Exaone4Config(**_MIXED), "q_norm", 0),
    (
        t.LlamaConfig(
            **{**GROUPED, "max_position_embeddings": 32},
            rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        ),
        "q_proj",
        16,
    ),
    (t.LlamaConfig(**GROUPED, rope_parameters={**LONG, "rope_theta": 1e4}), "q_proj", 16),
    (t.GlmConfig(**GROUPED, head_dim=16), "q_proj", None),
    (t.DeepseekV3Config(**_LATENT), "q_b_proj", None),
]
"""Of layer 1 of a model: the module that makes the queries before encoding, and how many of their
channels are rotated; None where they are not those of two halves at the beginning."""


@pytest.mark.parametrize(
    ("config", "made_by", "width"), ROTATIONS, ids=[config.model_type for config, _, _ in ROTATIONS]
)
def test_queries_before_encoding_are_what_the_model_projected(config, made_by, width) -> None:
    """The layer's rotation, and its inverse, on real models; LongRoPE's tables are longer than 1."""
    register()
    torch.manual_seed(0)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    index = 1  # a layer with full attention
    projected: list[torch.Tensor] = []
    attention = model.base_model.layers[index].self_attn
    hook = getattr(attention, made_by).register_forward_hook(
        lambda *found: projected.append(found[2])
    )
    with kvbench_attention_on(model), torch.inference_mode():
        capture_layers(model, prompt_ids(90), [index])  # an earlier prompt changes nothing
        layer = capture_layers(model, prompt_ids(40), [index])[index]
    hook.remove()
    if width is None:
        with pytest.raises(KVError, match="rotated by halves, or none"):
            plain_queries(layer)
        return
    mean_rotation(layer, 40, 60)  # of later positions, which change nothing either
    plain = plain_queries(layer)
    assert plain_queries(replace(layer, queries=layer.queries.half())).dtype == torch.float32
    expected = projected[-1]
    if expected.dim() == 3:
        expected = expected.view(1, 40, -1, plain.shape[-1])
    if expected.shape[1] == 40:
        expected = expected.transpose(1, 2)
    torch.testing.assert_close(plain, expected, atol=1e-5, rtol=1e-5)
    # averaged over one position, the rotation is that position's
    cos, sin = layer.rotary(torch.tensor([7]))
    assert cos.shape == (1, width)
    query = expected[0, 0, 3]
    turned = mean_rotation(layer, 7, 1) @ query
    torch.testing.assert_close(turned, rotate(query, cos[0], sin[0]), atol=1e-5, rtol=1e-5)


SIZED = Budget(size=50, sink=0, window=8)
HELD = [
    ("h2o", {}, SIZED, lambda held, fed: min(held, 50)),
    ("rkv", {}, SIZED, lambda held, fed: 44 if held > 50 else held),
    ("rkv", {"every": 3}, SIZED, lambda held, fed: 47 if held > 50 else held),
    ("rkv", {}, Budget(rate=0.25, sink=4, window=8), lambda n, fed: 74 if n > 84 else n),
    ("rkv_released", {"every": 16}, SIZED, lambda n, fed: n if (299 + fed) % 16 else 50),
    (
        "rkv",
        {"to": 0.2, "every": 4},
        SIZED,
        lambda n, fed: n if (299 + fed) % 4 else (300 + fed) / 5,
    ),
    ("recompress", {"to": None, "every": 5}, SIZED, lambda held, fed: held if fed % 5 else 50),
    (
        "recompress",
        {"to": 0.2, "every": 5},
        SIZED,
        lambda n, fed: n if fed % 5 else (300 + fed) / 5,
    ),
]
"""Of a prompt of 300 tokens: how many entries stay of those there would be after so many tokens more."""


@pytest.mark.parametrize(("name", "options", "budget", "stays"), HELD)
def test_what_is_held_while_decoding(name, options, budget, stays):
    """Within the budget, and beside it the queries that the method says it keeps."""
    torch.manual_seed(0)
    method, layer = build_method(name, **options), make_layer(300, kv_heads=2, num_layers=1)
    row = Row(name, method, budget, 0, "x", room=0)
    row.compresses = True
    row._hold(0, run(method, layer, budget), budget.capacity(300), None, layer)
    (cache,), queries = row.caches[0], method.schedule and method.schedule.queries
    most = cache.length
    for fed in range(1, 201):
        wanted = min(cache.length + 1, round(stays(cache.length + 1, fed)))
        query, key, value = torch.randn(4, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        step(cache, query, key, value, torch.tensor([299 + fed]), layer.scaling)
        assert cache.length == wanted
        most = max(most, wanted)
    if queries is not None:
        assert cache.bytes_peak == 4 * (2 * 2 * 8 * most + 4 * 8 * queries)
    row.end_prompt(300, ExactBytes(), {})
    row.fed = 200
    row.audit()


def test_a_share_is_of_all_tokens_and_at_least_one_more_than_sink_and_window():
    shares, budget = Schedule(every=1, to=0.1, queries=1), Budget(rate=0.5, sink=3, window=5)
    assert shares.entries_to_keep(budget, 200, 50, 100) == 25
    assert shares.entries_to_keep(budget, 20, 5, 100) == 3 + 5 + 1
    assert shares.entries_to_keep(budget, 20, 5, 9) is None, "no more than that is held"


def test_what_cannot_be_compressed_again_is_refused_before_decoding():
    method, layer = build_method("rkv", to=8), make_layer(300, kv_heads=2, num_layers=1)
    row = Row("rkv", method, SIZED, 0, "x", room=0)
    with pytest.raises(KVError, match=r"budget\.size is 8; allowed: more than"):
        row._hold(0, run(method, layer, SIZED), 50, None, layer)
    with pytest.raises(KVError, match="with options that have the prompt repeated"):
        build_method("recompress", of="attention_matching", options={"queries": "repeat"})
    assert build_method("rkv", every=None).schedule is None
    assert build_method("rkv", every=16).schedule.every == 16


def test_importance_is_of_the_logits_that_the_model_bounds():
    layer = make_layer(60, kv_heads=2, scale=4.0)
    scores = build_method("rkv", mix=1.0, window=1, kernel_size=1).entry_scores
    logits = (layer.queries[:, :, -1:] @ layer.keys.repeat_interleave(2, 1).mT)[:, :, 0, :-1]
    capped = 2 * torch.tanh(logits * layer.scaling / 2)
    wanted = capped.view(1, 2, 2, 59).amax(2).softmax(-1)
    torch.testing.assert_close(scores(replace(layer, softcap=2.0)), wanted)


@pytest.mark.parametrize(("name", "options"), [("adakv", {}), ("pages", {"size": 1})])
def test_the_layer_budgets_of_the_other_method_are_kept(name, options):
    method, budget = (
        build_method(name, of="pyramidkv", **options),
        Budget(rate=0.2, sink=0, window=8),
    )
    shares = [build_method("pyramidkv").layer_capacity(budget, 200, i, 4) for i in range(4)]
    assert shares[0] > shares[-1]
    assert [method.layer_capacity(budget, 200, i, 4) for i in range(4)] == shares
    assert method.total_capacity(budget, 200, 4) == sum(shares) == 4 * budget.capacity(200)
    for index, share in enumerate(shares):
        assert run(method, make_layer(200, layer_index=index), budget).charged == share
    tight = Budget(rate=0.1, sink=30, window=8)  # the last layers have less than sink and window
    last = build_method("adakv", of="pyramidkv")
    kept = run(last, make_layer(400, layer_index=3), tight)
    assert kept.charged == last.layer_capacity(tight, 400, 3, 4) < 38
    for head, length in zip(kept.positions[0], kept.lengths[0], strict=True):
        assert head[:length].tolist()[-8:] == list(range(392, 400)), "the window stays"


QJL = {"scheme": "qjl", "m": 64, "first_m": 32, "m_out": 8, "first_m_out": 8, "first_layers": 1}
EXTRAS = [
    ("pages", {}, {"page_bytes": 4 * 3 * 16 * 2 * 32 * 4, "blocks_freed": 4 * (7 - 3)}),
    ("qjl", {"quantize": QJL}, {"scheme_bytes": 4 * 16 * (64 + 32)}),
    ("turboquant", {}, {"scheme_bytes": 4 * (16 * 16 + 2**4)}),
    ("exact", {"quantize": {"scheme": "turboquant", "per": "layer", "keys": "prod"}},
     {"scheme_bytes": 4 * 4 * (16 * 16 + 2**4 + 2 * 16 * 16 + 2**3)}),
    ("snapkv", {"quantize": {"bits": 4}}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "expected"), EXTRAS)
def test_records_count_pages_sketches_and_rotations(name, options, expected):
    """Of a model of 4 layers with 2 KV heads of 16 numbers, and a prompt of 100 tokens."""
    model, budget = tiny_model("llama"), Budget(size=52, sink=2, window=8)
    config = model.config
    assert (config.num_hidden_layers, config.num_key_value_heads, config.head_dim) == (4, 2, 16)
    row = Row(name, build_method(name, **options), budget, 0, "x", room=0)
    with kvbench_attention_on(model):
        prefill(model, prompt_ids(100), [row])
    found = row.cost().record()
    assert {key: found[key] for key in expected} == expected
    assert {"page_bytes", "blocks_freed", "scheme_bytes"} & found.keys() == expected.keys()


def test_expected_attention_keeps_its_own_sink_where_the_budget_has_none() -> None:
    layer = replace(make_layer(60), rotary=rotary(8))
    method, budget = build_method("expected_attention", sink=5), Budget(rate=0.3, sink=0, window=4)
    for head in run(method, layer, budget).positions[0].tolist():
        assert set(range(5)) <= set(head)
