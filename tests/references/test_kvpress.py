"""Our methods against the presses of the kvpress package, and every press through the adapter."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from reference_layers import (
    BUDGETS,
    assert_same_entries,
    assert_same_positions,
    kept,
    queries_of,
    random_layer,
    shipped_layers,
    shipped_prompts,
    tally,  # noqa: F401 - a fixture
)
from support.asking import generate_one
from support.tiny import on_kvbench, prompt_ids, tiny_model

from kvbench.engine.answer import Stopping
from kvbench.engine.model import local_path
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV
from kvbench.methods import Method, build_method
from kvbench.methods._select import group_mean
from kvbench.methods.kvpress import REFUSED, available_presses, make_press, ratio_for
from kvbench.methods.pyramidkv import PyramidKV
from kvbench.methods.snapkv import keep_best, window_scores

kvpress = pytest.importorskip("kvpress", reason="needs the package kvpress: make test-references")

SNAP = {"press": "SnapKVPress"}
PLAIN = [
    f"{name}Press"
    for name in (
        *("CUR", "KeyDiff", "Knorm", "NonCausalAttn", "ObservedAttention", "PyramidKV", "Random"),
        *("SnapKV", "StreamingLLM", "TOVA"),
    )
]
RUNS: dict[str, dict[str, Any]] = {
    **{press: {} for press in PLAIN},
    **dict.fromkeys(("AdaKVPress", "CriticalAdaKVPress", "CriticalKVPress"), SNAP),
    **dict.fromkeys(("EntropyGatedChunkKVPress", "MergingPress"), SNAP),
    "BlockPress": {**SNAP, "block_size": 50},
    "ChunkKVPress": {**SNAP, "chunk_length": 10},
    "ChunkPress": {**SNAP, "chunk_length": 110},
    "LagKVPress": {"lag_size": 32},
}
"""Every press that runs, with options that suit a short prompt."""
WHOLE_CHUNKS = {"ChunkKVPress", "ChunkPress"}
"""Presses that keep whole chunks, or a whole number in each chunk: at most the capacity."""

each_budget = pytest.mark.parametrize("budget", BUDGETS, ids=str)


def press_method(press: str, /, **options: Any) -> Method:
    return build_method("kvpress", press=press, options=options)


# --- every press of the package's list --------------------------------------------------------------


def test_every_press_runs_or_is_refused_with_a_reason() -> None:
    assert set(available_presses()) == set(RUNS) | set(REFUSED)
    assert not set(RUNS) & set(REFUSED)
    for press, reason in REFUSED.items():
        with pytest.raises(KVError) as error:
            press_method(press)
        assert str(error.value) == f"press {press} cannot run as a method: {reason}"


@pytest.mark.parametrize("press", sorted(RUNS))
@pytest.mark.parametrize("shape", [(2, 2, 2, 300, 16), (1, 1, 4, 515, 32)], ids=str)
@each_budget
def test_running_presses_keep_the_prompts_own_entries_within_the_budget(
    press: Any, shape: Any, budget: Any
) -> None:
    method = press_method(press, **RUNS[press])
    capacity, num_layers, total = budget.capacity(shape[3]), 4, 0
    for index in range(num_layers):
        layer = random_layer(shape, index, layer_index=index, num_layers=num_layers)
        copies = [x.clone() for x in (layer.keys, layer.values, queries_of(layer))]
        held = (
            merged(method, layer, budget)
            if press == "MergingPress"
            else kept(method, layer, budget)
        )
        for before, after in zip(
            copies, (layer.keys, layer.values, queries_of(layer)), strict=True
        ):
            assert torch.equal(before, after), "the prefill's tensors are shared by other rows"
        found = held.charged
        total += found
        assert found <= method.layer_capacity(budget, layer.n, index, num_layers)
        if press not in WHOLE_CHUNKS | {"PyramidKVPress"}:
            assert found == capacity
        if press in ("AdaKVPress", "CriticalAdaKVPress"):
            assert held.lengths is not None
            assert int(held.lengths.sum()) == capacity * held.lengths.numel()
        if press in WHOLE_CHUNKS:
            assert found > 0.5 * capacity
        again = method.compress(layer, budget, torch.Generator().manual_seed(0))
        assert torch.equal(again.positions, held.positions), "one seed, one result"
    assert total <= method.total_capacity(budget, shape[3], num_layers) + num_layers


def merged(method: Any, layer: LayerKV, budget: Any) -> CompressedKV:
    """What a press keeps that merges values, which are then not the prompt's own."""
    held: CompressedKV = method.compress(layer, budget, torch.Generator().manual_seed(0))
    at = held.positions.unsqueeze(-1).expand_as(held.keys)
    assert torch.equal(held.keys, layer.keys.gather(2, at))
    assert not torch.equal(held.values, layer.values.gather(2, at))
    return held


@pytest.mark.parametrize("press", sorted(RUNS))
def test_a_prompt_is_compressed_by_itself_whatever_batch_it_travels_in(press: Any) -> None:
    method, layer = press_method(press, **RUNS[press]), random_layer((2, 2, 2, 300, 16), 0)
    together = method.compress(layer, BUDGETS[0], torch.Generator().manual_seed(3))
    for row in range(2):
        parts = {
            name: getattr(layer, name)[row : row + 1] for name in ("keys", "values", "queries")
        }
        alone = method.compress(
            replace(layer, **parts, shared={}), BUDGETS[0], torch.Generator().manual_seed(3)
        )
        assert torch.equal(alone.entries[0], together.entries[row])
        count = alone.positions.shape[-1]
        assert torch.equal(alone.positions[0], together.positions[row, :, :count])
        real = alone.positions[0] >= 0
        assert torch.equal(alone.values[0][real], together.values[row, :, :count][real])


def test_presses_run_in_the_engine_beside_other_methods() -> None:
    model, budget = on_kvbench(tiny_model("llama")), Budget(rate=0.25, sink=4, window=4)
    methods = {
        name: (press_method(name, **options), budget)
        for name, options in RUNS.items()
        if name != "ChunkPress"
    } | {"exact": (build_method("exact"), budget), "snapkv": (build_method("snapkv"), budget)}
    ids = prompt_ids(160)
    results = generate_one(
        model, ids[:150], ids[150:], methods, Stopping(6), seed=0, example_id="x"
    )
    for label, result in results.items():
        assert result.failure is None, f"{label}: {result.failure}"
        if label != "exact":
            assert result.cost.compressed
    assert results["SnapKVPress"].tokens == results["snapkv"].tokens
    assert results["SnapKVPress"].cost.cache_bytes == results["snapkv"].cost.cache_bytes


def test_the_package_wraps_attention_functions_and_kvbench_generates_the_same() -> None:
    """Imported after kvbench registered its function, kvpress wraps it with the others."""
    from kvpress.attention_patch import patch_attention_functions
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    for architecture in ("llama", "gemma3", "gpt_neox", "opt"):
        model, ids = on_kvbench(tiny_model(architecture)), prompt_ids(60)
        methods = {name: (build_method(name), BUDGETS[0]) for name in ("exact", "snapkv")}
        before = dict(FUNCTIONS._local_mapping)
        tokens = []
        try:
            for _ in range(2):
                run = generate_one(
                    model, ids[:50], ids[50:], methods, Stopping(8), seed=0, example_id="x"
                )
                assert all(result.failure is None for result in run.values())
                tokens.append({label: result.tokens for label, result in run.items()})
                patch_attention_functions()
        finally:
            FUNCTIONS._local_mapping.clear()
            FUNCTIONS._local_mapping.update(before)
        assert tokens[0] == tokens[1]


# --- budgets ----------------------------------------------------------------------------------------


def test_sink_and_window_come_from_the_budget_unless_given() -> None:
    layer = random_layer((1, 1, 1, 300, 8), 0)
    budget = Budget(rate=0.25, sink=8, window=16)
    held = kept(press_method("StreamingLLMPress"), layer, budget).positions[0, 0].tolist()
    assert held[:8] == list(range(8))
    assert held[8:] == list(range(300 - len(held) + 8, 300))
    held = kept(press_method("StreamingLLMPress", n_sink=4), layer, budget).positions[0, 0].tolist()
    assert held[4] == 300 - len(held) + 4
    wider = keep_best(layer, window_scores(layer, 30, 5, "avgpool"), len(held) - 30, 30, False)
    assert_same_entries(kept(press_method("SnapKVPress", window_size=30), layer, budget), wider)


# --- beside ours: the same entries are golden values (tests/methods), and on the shipped model below ---


@each_budget
@pytest.mark.parametrize("num_layers", [2, 5, 16])
def test_pyramidkv_selects_alike_given_the_same_count(budget: Any, num_layers: Any) -> None:
    """The package's pyramid spreads the whole capacity, ours what is left besides the window, as the
    paper does; the package steps down by fractions and rounds each layer, ours sums to the budget
    exactly. So the counts differ; given a count, both choose the same entries. Below one window in
    the last layer the package gives every layer the same."""
    theirs, n = press_method("PyramidKVPress"), 700
    counts = []
    for index in range(num_layers):
        layer = random_layer((1, 2, 2, n, 16), index, layer_index=index, num_layers=num_layers)
        held = kept(theirs, layer, budget)
        count = int(held.entries.max())
        assert count == theirs.layer_capacity(budget, n, index, num_layers)
        counts.append(count)
        scores = window_scores(layer, budget.window, 5, "avgpool")
        ours = keep_best(layer, scores, count - budget.window, budget.window, False)
        assert_same_entries(ours, held, group_mean(scores, 2))
    assert counts == sorted(counts, reverse=True)
    capacity = budget.capacity(n)
    assert abs(sum(counts) - num_layers * capacity) <= num_layers / 2
    mine = PyramidKV().layer_capacities(budget, n, num_layers)
    assert sum(mine) == num_layers * capacity


# --- the shipped model, the package run as its users run it -----------------------------------------


@torch.no_grad()
def native_prefill(press: Any, ids: tuple[int, ...], attention: str = "sdpa") -> tuple[Any, Any]:
    """The shipped model's cache after a prefill under the press's own hooks, and what of each layer the
    press has masked: heads and positions, or None."""
    from transformers import AutoModelForCausalLM, DynamicCache

    path, cache = local_path("asset:recall_mini"), DynamicCache()
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention).eval()
    with press(model):
        model.model(input_ids=torch.tensor([ids]), past_key_values=cache)
        layers = model.model.layers
        masked = [getattr(layer.self_attn, "masked_key_indices", None) for layer in layers]
    return cache, masked


EXPECTED = "ExpectedAttentionPress"
OURS = {
    "SnapKVPress": "snapkv",
    "StreamingLLMPress": "streaming_llm",
    EXPECTED: "expected_attention",
}
"""Presses that keep the same entries as a method of ours."""
NATIVE = sorted({*PLAIN, "CriticalKVPress", EXPECTED, "LagKVPress"} - {"RandomPress"})


def package_press(press: str, options: dict[str, Any], budget: Budget, n: int) -> Any:
    """A press as the package's users make it, for n tokens; EXPECTED is refused as a method."""
    if EXPECTED in (press, options.get("press")):
        made = kvpress.ExpectedAttentionPress(n_sink=budget.sink)
        made = made if press == EXPECTED else getattr(kvpress, press)(press=made)
    else:
        made = make_press(press, options, budget)
    made.compression_ratio = ratio_for(n, budget.capacity(n))
    return made


@pytest.mark.parametrize("press", NATIVE)
@pytest.mark.parametrize("prompt", range(3))
def test_on_the_shipped_model_the_packages_own_hooks_keep_the_same_entries(
    press: Any, prompt: Any
) -> None:
    """The package hooks into transformers' model and computes queries from hidden states; kvbench
    captures queries, keys and values in its own prefill. Keys agree to rounding, entries exactly."""
    name, options = OURS.get(press), RUNS.get(press, {})
    budget, ids = BUDGETS[0], shipped_prompts()[prompt]
    method = build_method(name) if press == EXPECTED else press_method(press, **options)
    native = package_press(press, options, budget, len(ids))
    attention = "eager" if press == "ObservedAttentionPress" else "sdpa"
    cache, _ = native_prefill(native, ids, attention)
    for layer, own in zip(shipped_layers(prompt), cache.layers, strict=True):
        keys, values = own.keys, own.values
        held = kept(method, layer, budget)
        # The nearest of the prompt's keys: rounding is far smaller than any two keys' distance.
        distance = torch.cdist(keys.double(), layer.keys.double())
        nearest, at = distance.min(-1)
        assert float(nearest.max()) < 1e-3
        assert_same_positions(at.sort(-1).values, held.positions)
        index = at.unsqueeze(-1).expand_as(keys)
        torch.testing.assert_close(keys, layer.keys.gather(2, index), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, layer.values.gather(2, index), rtol=1e-4, atol=1e-4)
        if name is not None:
            assert_same_entries(kept(build_method(name), layer, budget), held)


MASKING = [(press, "SnapKVPress") for press in ("AdaKVPress", "CriticalAdaKVPress")]


@pytest.mark.parametrize(("press", "inner"), [*MASKING, ("AdaKVPress", EXPECTED)])
@pytest.mark.parametrize("prompt", range(3))
def test_entries_that_the_package_masks_are_really_evicted(
    press: Any, inner: Any, prompt: Any
) -> None:
    ids = shipped_prompts()[prompt]
    budget = replace(BUDGETS[0], window=0) if inner == EXPECTED else BUDGETS[0]
    native = package_press(press, {"press": inner}, budget, len(ids))
    ours = build_method("adakv", of="expected_attention")
    method = ours if inner == EXPECTED else press_method(press, press=inner)
    differ, total, (_, masked) = 0, 0, native_prefill(native, ids)
    for layer, (_, heads, tokens) in zip(shipped_layers(prompt), masked, strict=True):
        held = kept(method, layer, budget)
        assert held.lengths is not None
        mask, stays = torch.zeros(2, layer.keys.shape[1], layer.n, dtype=torch.bool).unbind()
        mask[heads, tokens] = True
        for head, count in enumerate(held.lengths[0].tolist()):
            stays[head, held.positions[0, head, :count]] = True
        assert int(stays.sum()) == int((~mask).sum()) == budget.capacity(len(ids)) * len(mask)
        differ += int((stays == mask).sum())
        total += mask.numel()
    assert differ <= 1e-3 * total, "ties and rounding only"


# --- what is refused --------------------------------------------------------------------------------

QUERIES = queries_of(random_layer((1, 2, 2, 300, 16), 0))
# press, options, parts of the layer, what is said
CASES: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("SnapKVPress", {}, {"queries": None}, "has no queries"),
    ("SnapKVPress", {}, {"softcap": 30.0}, "softcap 30.0"),
    ("NonCausalAttnPress", {}, {"queries": QUERIES[:, :, -20:]}, "holds 20 of 300"),
    ("SnapKVPress", {}, {"queries": QUERIES[:, :, -9:]}, "holds 9 of 300"),
    ("ObservedAttentionPress", {}, {"queries": QUERIES[:, :, -20:]}, "needs the last 300"),
    ("CriticalKVPress", SNAP, {"output": None}, "shows none"),
    ("ChunkPress", {"press": "ObservedAttentionPress"}, {}, "does not support attentions"),
    ("ChunkPress", {**SNAP, "chunk_length": 4}, {}, "greater than the window"),
    ("SnapKVPres", {}, {}, "unknown press 'SnapKVPres' .did you mean 'SnapKVPress'"),
    ("SnapKVPress", {"kernel": 3}, {}, "no option 'kernel' .did you mean 'kernel_size'"),
    ("SnapKVPress", {"compression_ratio": 0.5}, {}, "from budget.rate"),
    ("SnapKVPress", {"window_size": 0}, {}, "window_size is 0"),
    ("ChunkKVPress", {}, {}, "wraps another"),
    ("ChunkKVPress", {"press": "ThinKPress"}, {}, "ThinKPress cannot run"),
    ("MergingPress", {**SNAP, "merge_fraction": 2.0}, {}, "rejects its options"),
]


def test_presses_options_and_layers_that_do_not_fit_are_refused_in_one_line() -> None:
    for press, options, parts, message in CASES:
        layer = replace(random_layer((1, 2, 2, 300, 16), 0), **parts, shared={})
        with pytest.raises(KVError, match=message) as error:
            press_method(press, **options).compress(layer, BUDGETS[0], torch.Generator())
        assert "\n" not in str(error.value)
    nested = press_method("ChunkKVPress", press={"press": "SnapKVPress", "kernel_size": 7})
    assert nested != press_method("ChunkKVPress", press="SnapKVPress")
    assert hash(nested)


def test_a_press_that_asks_for_more_than_a_method_sees_is_refused_by_name(monkeypatch: Any) -> None:
    """Presses of later releases: the stand-in says what was asked for."""
    layer = random_layer((1, 2, 2, 300, 16), 0)
    monkeypatch.setattr("kvbench.methods.kvpress.REFUSED", {})
    for press, asked in [("CapPress", "rotary_emb"), ("LeverageScorePress", "k_proj")]:
        with pytest.raises(KVError, match=asked):
            press_method(press).compress(layer, BUDGETS[0], torch.Generator().manual_seed(0))
