"""The engine against transformers' own generation, brute force, and its own promises."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as t
from support.forward import SMALL, generate, reference
from support.tiny import (
    CONFIGS,
    GROUPED,
    WITH_SINKS,
    Everything,
    on_kvbench,
    prompt_ids,
    tiny_model,
)

from kvbench.engine.answer import Stopping
from kvbench.engine.architecture import cache_bytes, compressible_layers, head_shapes
from kvbench.engine.attention import LayerCall, UnsupportedModel, exact_attention, register
from kvbench.engine.cache import Cache
from kvbench.engine.check import check_finite, refuse_non_finite
from kvbench.engine.prefill import capture_layers, layer_kv
from kvbench.engine.row import Row
from kvbench.kv import NORMALISERS, Budget, CompressedKV, KVError, LayerKV
from kvbench.methods import build_method


@pytest.mark.parametrize("compress_after", ["all_but_last", "prompt", "context"])
@pytest.mark.parametrize("architecture", sorted(CONFIGS))
def test_exact_and_keep_everything_generate_what_transformers_generates(
    architecture, compress_after
):
    """And compressed rows beside them hold their budget, weights of entries included."""
    model = tiny_model(architecture)
    ids = prompt_ids(80)
    expected = reference(model, ids, 16)
    assert len(set(expected)) >= 5, "a degenerate continuation would test nothing"
    on_kvbench(model)
    names = ("exact", "streaming_llm", "uniform", "snapkv", "h2o")
    methods = {name: (build_method(name), SMALL) for name in names}
    methods["everything"] = (Everything(), SMALL)
    results = generate(model, ids, methods, new_tokens=16, compress_after=compress_after)
    assert {label: result.failure for label, result in results.items()} == dict.fromkeys(methods)
    n = {"prompt": 80, "all_but_last": 79, "context": 70}[compress_after]
    exact_bytes = cache_bytes(CONFIGS[architecture](), torch.float32, n, n)
    assert not results["exact"].cost.compressed
    for whole in (results.pop("exact"), results.pop("everything")):
        assert whole.tokens == expected
        assert whole.cost.cache_bytes == whole.cost.exact_bytes == exact_bytes
    layers = compressible_layers(model)
    for label, result in results.items():
        assert result.cost.entries == {"mean": SMALL.capacity(n), "max": SMALL.capacity(n)}, label
        held = 0
        for index, (_, heads, key_dim, value_dim) in enumerate(head_shapes(model.config)):
            # sliding-window layers are left whole: their last 24 entries
            entries = SMALL.capacity(n) if index in layers else 24
            weighted = index in layers and label in ("uniform", "h2o")
            held += entries * heads * (key_dim + value_dim + weighted) * 4
        assert result.cost.cache_bytes == held, label


class ByHead(Everything):
    def compress(self, layer: LayerKV, *rest: Any) -> CompressedKV:
        kept = super().compress(layer, *rest)
        return replace(kept, lengths=torch.full(kept.keys.shape[:2], layer.n))


@pytest.mark.parametrize("architecture", sorted(WITH_SINKS))
def test_sinks_have_their_share_in_every_cache_and_cost_nothing(architecture):
    try:
        model = tiny_model(architecture)
    except AttributeError as missing:
        pytest.skip(str(missing))
    ids = prompt_ids(80)
    expected = reference(model, ids, 24)
    on_kvbench(model)
    room = Budget(size=200, sink=4, window=4)
    methods = {
        "exact": (build_method("exact"), SMALL),
        "by head": (ByHead(), SMALL),
        "evicts": (build_method("h2o", decode="evict"), room),
        "restricts": (build_method("topk"), room),
    }
    for label, result in generate(model, ids, methods, new_tokens=24).items():
        assert result.failure is None, label
        assert result.tokens == expected, label
        assert result.cost.entries == {"mean": 80, "max": 80}, label


@pytest.mark.parametrize("sinks", [None, [0.5, -3.0, 9.0, 40.0]])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 7, 600])
@pytest.mark.parametrize("heads", [(4, 4), (4, 1)])
def test_exact_attention_equals_brute_force_in_float64(softcap, window, heads, sinks):
    torch.manual_seed(0)
    n, (h, kv) = 530, heads  # more than one query block
    q, k, v = torch.randn(1, h, n, 8), torch.randn(1, kv, n, 8), torch.randn(1, kv, n, 8)
    options = {"softcap": softcap, "sliding_window": window}
    output = exact_attention(
        q, k, v, scaling=0.5, **options, sinks=None if sinks is None else torch.tensor(sinks)
    )
    q, k, v = q.double(), *(x.double().repeat_interleave(h // kv, 1) for x in (k, v))
    logits = q @ k.transpose(-1, -2) * 0.5
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    at = torch.arange(n)
    hidden = at[None] > at[:, None]
    if window is not None:
        hidden |= at[None] <= at[:, None] - window
    logits = logits.masked_fill(hidden, float("-inf"))
    if sinks is not None:  # one more key, of value 0
        column = torch.tensor(sinks).double()[:, None, None].expand(1, h, n, 1)
        logits, v = torch.cat([logits, column], -1), torch.cat([v, 0 * v[:, :, :1]], 2)
    expected = logits.softmax(-1) @ v
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-5)


def test_generation_ends_at_any_end_token_and_is_cut_at_stop_strings():
    model = tiny_model("llama")
    ids = prompt_ids(60)
    expected = reference(model, ids, 16)
    model.set_attn_implementation("kvbench")
    exact = {"exact": (build_method("exact"), SMALL)}
    third = expected[2]
    ends = Stopping(16, frozenset({third, 9999}))
    result = generate(model, ids, exact, stopping=ends)["exact"]
    assert result.tokens == expected[: expected.index(third)]
    assert result.cost.new_tokens == len(result.tokens) + 1

    def decode(tokens: list[int]) -> str:
        return " ".join(f"t{token}" for token in tokens)

    stop = f"t{third}"
    strings = Stopping(16, frozenset(), (stop,), decode)
    result = generate(model, ids, exact, stopping=strings)["exact"]
    assert len(result.tokens) <= expected.index(third) + 1
    assert stop not in strings.cut(decode(result.tokens))


@pytest.mark.parametrize(
    ("strings", "text", "left"),
    [
        (("and", "\n"), "one and two", "one "),
        (("and", "\n"), "two", "two"),
        (("and", "\n"), "and", ""),
        (("and", "\n"), "x\n and", "x"),
        ((), "and", "and"),
    ],
)
def test_a_text_is_cut_at_its_first_stop_string(strings, text, left):
    assert Stopping(4, strings=strings).cut(text) == left


def test_what_methods_note_goes_to_the_device_of_each_layer(monkeypatch):
    went = []
    real = Row.carry_to
    monkeypatch.setattr(
        Row, "carry_to", lambda row, device: (went.append(device), real(row, device))
    )
    generate(
        on_kvbench(tiny_model("llama")), prompt_ids(60), {"m": (build_method("snapkv"), SMALL)}
    )
    assert went == [torch.device("cpu")] * 4
    row = Row("m", build_method("snapkv"), SMALL, 0, "x", room=0)
    row.carried["noted"] = torch.zeros(3)
    row.carry_to(torch.device("meta"))
    assert row.carried["noted"].is_meta


REFUSED_IN_THE_PASS = [
    # The second is said of transformers before 5.3, whose DiffLlama calls no registered function.
    (t.DiffLlamaConfig, {}, "layer 0 twice in a pass|its attention itself"),
    (t.RobertaConfig, {"is_decoder": False}, "attends both ways within its prompt"),
]


@pytest.mark.parametrize(("kind", "fields", "message"), REFUSED_IN_THE_PASS)
def test_what_the_cache_would_get_wrong_is_refused_by_what_happens_in_the_pass(
    kind, fields, message
):
    register()
    config = kind(**GROUPED, **fields)
    model = t.AutoModelForCausalLM.from_config(config).eval()
    model.set_attn_implementation("kvbench")
    with pytest.raises(UnsupportedModel, match=message):
        generate(model, prompt_ids(20), {"exact": (build_method("exact"), SMALL)})


def test_exact_whose_bytes_are_not_the_models_fails(monkeypatch):
    monkeypatch.setattr(Cache, "nbytes", lambda cache: 7)
    exact = {"exact": (build_method("exact"), SMALL)}
    result = generate(on_kvbench(tiny_model("llama")), prompt_ids(20), exact)["exact"]
    assert "the exact cache holds 28 bytes" in str(result.failure)


def test_captured_layers_are_what_they_saw_and_attention_refuses_what_it_does_not_compute():
    model = on_kvbench(tiny_model("qwen3"))
    captured = capture_layers(model, prompt_ids(40), [0, 3])
    assert sorted(captured) == [0, 3]
    assert captured[3].keys.shape == (1, 2, 40, 16)
    assert captured[3].queries.shape == (1, 4, 40, 16)
    with pytest.raises(UnsupportedModel, match=r"layer 4 .* allowed: 0\.\.3"):
        capture_layers(model, prompt_ids(40), [4])
    model = tiny_model("llama")
    model.set_attn_implementation("kvbench")
    with pytest.raises(UnsupportedModel, match="outside kvbench's engine"):
        model(torch.tensor([prompt_ids(8)]))
    sliding = t.MistralConfig(num_hidden_layers=2, sliding_window=8)
    windowed = type("M", (), {"config": sliding})()
    with pytest.raises(UnsupportedModel, match="has sliding_attention layers only"):
        compressible_layers(windowed)


def test_keys_that_are_not_finite_are_refused_by_layer_and_head():
    keys = torch.randn(1, 2, 9, 4)
    layer = LayerKV(keys, torch.randn(1, 2, 9, 4), None, 3, 4, 0.5)
    check_finite(layer)
    keys[0, 1, 5, 2] = float("nan")
    with pytest.raises(KVError, match=r"keys of layer 3, KV head 1"):
        check_finite(layer)
    huge = LayerKV(torch.full((1, 1, 9, 4), 1e38), keys[:, :1], None, 0, 1, 0.5)
    check_finite(huge)  # the sum overflows, the entries do not


class OnGpu(torch.Tensor):
    is_cuda = property(lambda self: True)


def test_on_a_gpu_what_is_not_finite_is_counted_first_and_refused_later():
    keys, values = (torch.randn(1, 2, 9, 4).as_subclass(OnGpu) for _ in "kv")
    values[0, 1, 5] = torch.tensor([1.0, -1.0, 0.0, 1.0]) / 0.0
    layer, counts = LayerKV(keys, values, None, 3, 4, 0.5), {}
    check_finite(layer, counts)
    assert {layer: part.tolist() for layer, part in counts.items()} == {3: [[0, 0], [0, 4]]}
    assert values[0, 1, 5].tolist() == [0.0] * 4
    with pytest.raises(KVError, match="values of layer 3, KV head 1"):
        refuse_non_finite(counts)
    keys[0, 0, 2, 1] = float("nan")
    on_cpu = LayerKV(torch.Tensor(keys), torch.Tensor(values), None, 3, 4, 0.5)
    for arguments in ((on_cpu, {}), (layer, None)):
        with pytest.raises(KVError, match="keys of layer 3, KV head 0"):
            check_finite(*arguments)


def test_shared_work_is_charged_to_every_method_that_uses_it():
    layer = LayerKV(torch.randn(1, 1, 4, 4), torch.randn(1, 1, 4, 4), None, 0, 1, 0.5)
    computed = []

    def ask(number: float) -> torch.Tensor:
        return layer.once("slow", lambda: computed.append(number) or torch.full((3,), number))

    for number in (1.0, 2.0):
        assert ask(number).sum() == 3
    (key,) = layer.charged
    assert layer.charged == {key: None}, "its seconds are in the method's own"
    layer.charged.clear()
    assert ask(3.0).sum() == 3
    assert layer.charged == {key: layer.shared[key].clock}
    assert layer.shared[key].clock.seconds > 0.0
    assert computed == [1.0]
    assert layer.once("slow", lambda: torch.zeros(3)).sum() == 0, "another method's, of that name"


def test_seconds_of_compression_are_not_the_prefills(monkeypatch):
    """By a clock that only compression moves on: a second a layer."""
    now = [0.0]

    class Slow(Everything):
        def compress(self, layer: LayerKV, *rest: Any) -> CompressedKV:
            now[0] += 1.0
            return super().compress(layer, *rest)

    model = tiny_model("llama")
    on_kvbench(model)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    cost = generate(model, prompt_ids(40), {"slow": (Slow(), SMALL)}, new_tokens=1)["slow"].cost
    assert (cost.prefill_s, cost.decode_s) == (0.0, 0.0)
    assert cost.compress_s == model.config.num_hidden_layers


def call(
    heads: int, kv_heads: int, n: int, dim: int, dtype: torch.dtype = torch.float32
) -> LayerCall:
    counts, generator = (heads, kv_heads, kv_heads), torch.Generator().manual_seed(n)
    parts = (torch.randn(1, h, n, dim, generator=generator).to(dtype) for h in counts)
    return LayerCall(0, *parts, dim**-0.5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "n", "dim"),
    [(4, 4, 1, 8), (8, 2, 700, 32), (6, 3, 129, 5), (8, 1, 64, 64)],
)
@pytest.mark.parametrize("sinks", [False, True])
def test_output_is_bit_by_bit_that_of_exact_and_mass_that_of_the_definition(
    heads: int, kv_heads: int, n: int, dim: int, sinks: bool
) -> None:
    one = call(heads, kv_heads, n, dim)
    if sinks:
        one = replace(one, sinks=torch.linspace(-1.0, 5.0, heads))
    out, normalisers = one.exact_with_normalisers()
    bound = 1e-6 if sinks else 0.0
    torch.testing.assert_close(out, one.exact(), rtol=bound, atol=bound)
    assert normalisers is not None
    keys = one.key.double().repeat_interleave(heads // kv_heads, 1)
    logits = one.query.double() @ keys.mT * one.scaling
    logits.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    if one.sinks is not None:
        column = one.sinks.double()[None, :, None, None].expand(1, heads, n, 1)
        logits = torch.cat([logits, column], -1)
    torch.testing.assert_close(normalisers.double(), logits.logsumexp(-1), rtol=1e-5, atol=1e-5)
    expected = logits.softmax(-1)[..., :n].sum(2)
    for known in (normalisers, None):
        mass = layer_kv(one, 0, 1, None, known).attention_mass()
        torch.testing.assert_close(mass.double(), expected, rtol=1e-4, atol=1e-5)


def test_a_layer_with_tensors_of_its_own_does_not_take_another_layers_normalisers() -> None:
    """A method makes a layer of this one (fewer tokens, other keys): what is known is not of it."""
    one = call(4, 2, 60, 8)
    _, normalisers = one.exact_with_normalisers()
    layer = layer_kv(one, 0, 1, None, normalisers)
    assert NORMALISERS in layer.shared
    other = replace(layer, keys=layer.keys.flip(2), values=layer.values.clone())
    alone = replace(other, shared={})
    assert torch.equal(other.attention_mass(), alone.attention_mass())
    assert not torch.allclose(other.attention_mass(), layer.attention_mass())
    withheld = replace(layer, queries=one.query[:, :, :-5], withheld=5)
    alone = replace(withheld, shared={})
    assert torch.equal(withheld.attention_mass(), alone.attention_mass())
