"""KVzip and the pass over the prompt that it asks for: golden values, brute force, properties."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from support.encoders import tokenizer
from support.golden import arrays_of, cases_of
from support.jobs import Letters
from support.paths import GOLDEN
from support.tiny import GROUPED, prompt_ids, tiny_model
from torch import Tensor

from kvbench import compress, kept, load_model
from kvbench.engine.architecture import compressible_layers, kvbench_attention_on
from kvbench.engine.kept import entries_of, frame_of
from kvbench.engine.live_cache import UnsupportedGeneration
from kvbench.engine.model import ModelSpec, prompt_encoder
from kvbench.engine.prefill import capture_layers, prefill
from kvbench.engine.row import Row, prompt_name
from kvbench.engine.second_pass import chunks_of
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods import build_method
from kvbench.methods.base import Method, Replay, SecondPass
from kvbench.methods.kvzip import largest_attention, threshold
from kvbench.prompts import PromptEncoder

WORDS = PromptEncoder(Letters(), suffix_ids=(7, 8))
BUDGET = Budget(rate=0.3, sink=5, window=4)


@pytest.mark.parametrize("name", ["two_chunks", "group4"])
def test_scores_and_choice_as_released(name):
    golden = arrays_of(GOLDEN / "scores.npz")
    case = cases_of(golden, "kvzip_json")[name]
    layers, hkv, hq, n, d, sink = (case[k] for k in ("layers", "hkv", "hq", "n", "d", "sink"))
    g, digests = np.random.default_rng(case["seed"]), []

    def drawn(*shape: int, scale: float = 1.0) -> Tensor:
        array = g.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        digests.append(hashlib.sha256(array.tobytes()).hexdigest())
        return torch.from_numpy(array)

    keys = drawn(layers, hkv, n, d)
    start, found = sink, []
    for chunk, length in zip(case["chunks"], case["repeat_lengths"], strict=True):
        own = drawn(layers, hkv, length, d)
        queries = drawn(layers, hq, length, d, scale=case["query_scale"])
        replay = Replay(start, start + chunk, queries, own, own)
        kv = LayerKV(keys, keys, None, 0, layers, d**-0.5)
        found.append(largest_attention(kv, replay, sink))
        start += chunk
    assert digests == [case["keys_sha256"], *case["repeat_sha256"]]
    scores = torch.cat(found, -1)
    np.testing.assert_allclose(scores, golden[f"kvzip_{name}_score"], rtol=1e-5, atol=1e-7)
    stacked = scores[:, None]
    above = stacked > threshold(stacked, int(stacked.numel() * case["ratio"]))
    np.testing.assert_array_equal(above[:, 0], golden[f"kvzip_{name}_kept_pair"])
    assert int(above.sum()) == case["pairs_kept"]
    best = scores.topk(int(scores.shape[-1] * case["ratio"]), dim=-1).indices
    uniform = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    np.testing.assert_array_equal(uniform, golden[f"kvzip_{name}_kept_uniform"])


def read(
    method: Method,
    ids: list[int],
    architecture: str = "llama",
    budget: Budget = BUDGET,
    encoder: Any = WORDS,
    others: Sequence[Method] = (),
) -> tuple[Any, ...]:
    model = tiny_model(architecture)
    rows = [Row(f"o{i}", other, budget, 0, "x", room=0) for i, other in enumerate(others)]
    row = Row("kvzip", method, budget, 0, "x", room=0)
    with kvbench_attention_on(model):
        start = prefill(model, ids, [*rows, row], encoder=encoder)
    return model, row, start, rows


def weights_by_definition(kv: LayerKV, n: int, sink: int, start: int, stop: int) -> Tensor:
    """Attention [kv_heads, group, t, stop - start] of the tokens after the first n of a layer."""
    t = kv.n - n
    columns = torch.tensor([*range(sink), *range(start, stop), *range(n, kv.n)])
    hidden = columns > torch.arange(n, kv.n)[:, None]
    keys, queries = kv.keys[0].double()[:, columns], kv.queries[0, :, n:].double()
    logits = queries @ keys.repeat_interleave(kv.group, 0).mT * kv.scaling
    if kv.softcap is not None:
        logits = kv.softcap * torch.tanh(logits / kv.softcap)
    logits = logits.masked_fill(hidden, -torch.inf)
    if kv.sinks is not None:
        logits = torch.cat([logits, kv.sinks.double()[:, None, None].expand(-1, t, 1)], -1)
    return logits.softmax(-1)[..., sink : sink + stop - start].unflatten(0, (-1, kv.group))


def by_definition(
    model: Any, ids: list[int], asked: SecondPass, sink: int, score: str, encoder: Any = WORDS
) -> list[Tensor]:
    """Scores of every layer by forward passes over prompt and repetition together, in float64."""
    n, layers = len(ids), compressible_layers(model)
    scores: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    for start, stop, sequence in chunks_of(asked, ids, sink, encoder):
        factors = {} if score == "attention" else factors_by_definition(model, ids, sequence, score)
        with kvbench_attention_on(model):
            seen = capture_layers(model, [*ids, *sequence], layers)
        for layer, kv in seen.items():
            weights = weights_by_definition(kv, n, sink, start, stop)
            if factors:
                values = kv.values[0, :, start:stop].double()
                mix = kv.output().double().unflatten(1, (*weights.shape[:2], -1))
                norms = torch.einsum("okgd,kcd->kgco", mix, values).norm(dim=-1)
                weights = weights * norms[:, :, None] * factors[layer][:, None]
            scores[layer].append(weights.amax((1, 2)))
    return [torch.cat(scores[layer], -1) for layer in layers]


def factors_by_definition(
    model: Any, ids: list[int], sequence: list[int], score: str
) -> dict[int, Tensor]:
    """What the attention of each token of `sequence` is multiplied by, by the layer's index: [t]. By
    transformers alone: its attention, one pass over prompt and sequence, `torch.autograd.grad` with
    respect to zeros that are added to what the attention blocks return."""
    n, hidden, zeros, last, hooks = len(ids), {}, {}, [], []

    def enters(layer: int, block: Any, args: Any, given: Any) -> None:
        hidden[layer] = given["hidden_states"][0, n:].norm(dim=-1)

    def returns(layer: int, block: Any, args: Any, output: Any) -> Any:
        zeros[layer] = torch.zeros_like(output[0]).requires_grad_()
        return output[0] + zeros[layer], *output[1:]

    for index, layer in enumerate(model.model.layers):
        if hasattr(layer, "self_attn"):
            block = layer.self_attn
            hooks.append(block.register_forward_pre_hook(partial(enters, index), with_kwargs=True))
            hooks.append(block.register_forward_hook(partial(returns, index)))
    hooks.append(model.model.norm.register_forward_pre_hook(lambda _, args: last.append(args[0])))
    model(input_ids=torch.tensor([[*ids, *sequence]]), use_cache=False)
    for hook in hooks:
        hook.remove()
    if score == "plus":
        return {layer: 1 / norm.detach() for layer, norm in hidden.items()}
    found = torch.autograd.grad(last[0][0, n:].square().sum(), [*zeros.values()])
    return {layer: part[0, n:].norm(dim=-1) for layer, part in zip(zeros, found, strict=True)}


def hybrid() -> Any:
    torch.manual_seed(0)
    config = t.OlmoHybridConfig(**GROUPED, layer_types=["linear_attention", "full_attention"] * 2)
    return t.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gemma2", "gpt_oss", "hybrid"])
@pytest.mark.parametrize("score", ["plus", "gradient"])
def test_scores_are_those_of_a_plain_forward_and_backward_pass_in_float64(architecture, score):
    """Grouped heads; sliding windows and norms behind the projection; bounded logits; attention sinks
    and experts; recurrent states."""
    model = hybrid() if architecture == "hybrid" else tiny_model(architecture)
    ids, method = prompt_ids(120), build_method("kvzip", score=score, chunk=50)
    row = Row("x", method, BUDGET, 0, "x")
    with kvbench_attention_on(model):
        prefill(model, ids, [row], encoder=WORDS)
    assert row.failure is None, row.failure
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the other takes no float64
    expected = by_definition(exact, ids, method.second_pass, BUDGET.sink, score)
    for index, scores in enumerate(expected):
        found = row.carried[f"scores {index}"][0].double()
        torch.testing.assert_close(found, scores, rtol=2e-4, atol=0)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "opt"])
@pytest.mark.parametrize(("chunk", "words"), [(30, True), (200, True), (41, False)])
def test_what_is_kept_is_what_a_whole_forward_pass_says(architecture, chunk, words):
    ids, encoder = prompt_ids(120), WORDS if words else None
    method = build_method("kvzip", chunk=chunk, instructed=words)
    model, row, start, _ = read(method, ids, architecture, encoder=encoder)
    assert row.failure is None
    asked = method.second_pass
    scores = torch.stack(by_definition(model, ids, asked, BUDGET.sink, "attention", encoder))
    middle = scores[..., : 120 - BUDGET.window - BUDGET.sink]
    ordered = middle.flatten().sort(descending=True).values
    pairs = len(middle.flatten()) // middle.shape[-1] * BUDGET.middle_kept(120)
    level = ordered[pairs - 1]
    clear = (middle - level).abs() > 1e-6 * level
    layers = compressible_layers(model)
    kept = 0
    held = entries_of(row, layers)
    for (_, shown, _), expected, sure in zip(held, middle > level, clear, strict=True):
        stays = torch.zeros(len(shown), 121, dtype=torch.bool).scatter(1, shown % 121, True)
        assert stays[:, : BUDGET.sink].all()
        assert stays[:, 120 - BUDGET.window : 120].all()
        inside = stays[:, BUDGET.sink : 120 - BUDGET.window]
        assert torch.equal(inside[sure], expected[sure])
        kept += int(inside.sum())
    assert kept == pairs - 1, "strictly above the threshold"
    row.audit()
    assert row.cache_bytes() < start.exact_bytes
    _, row, *_ = read(replace(method, level="uniform"), ids, architecture, encoder=encoder)
    best = middle.topk(BUDGET.middle_kept(120), -1).indices.sort(-1).values + BUDGET.sink
    for layer, expected in zip(layers, best, strict=True):
        (cache,) = row.caches[layer]
        held = cache.positions[:, : cache.length]
        assert torch.equal(held[:, BUDGET.sink : -BUDGET.window], expected)


@pytest.mark.parametrize("quantize", [None, {"bits": 4, "group_size": 8}])
def test_a_context_answers_questions_and_generate_is_refused(quantize):
    model = tiny_model("llama")
    model.generation_config.eos_token_id = None
    ids, options = prompt_ids(120), {"chunk": 64, "instructed": False, "quantize": quantize}
    with compress(model, "kvzip", rate=0.3, sink=5, window=4, **options) as session:
        context = session.read(ids)
        assert context.entries["mean"] < BUDGET.capacity(120)
        question = prompt_ids(9, seed=3)
        assert context.ask(question, max_new_tokens=5) == context.ask(question, max_new_tokens=5)
        with pytest.raises(UnsupportedGeneration, match=r"session\.read"):
            model.generate(torch.tensor([ids]), max_new_tokens=2)
    with (
        compress(model, "kvzip", rate=0.3) as session,
        pytest.raises(KVError, match="no tokenizer"),
    ):
        session.read(ids)


def test_the_words_the_last_tokens_and_the_template_come_before_a_chunk():
    ids = list(range(50, 93))
    rule = SecondPass(20, "ab", "cd", overlap=3)
    ab, cd = WORDS.encode_text("ab"), WORDS.encode_text("cd")
    found = list(chunks_of(rule, ids, 2, WORDS))
    assert found == [
        (2, 22, [*ab, 7, 8, *ids[2:22]]),
        (22, 42, [*cd, *ids[19:22], 7, 8, *ids[22:42]]),
        (42, 43, [*cd, *ids[39:42], 7, 8, *ids[42:]]),
    ]
    assert [piece[2] for piece in chunks_of(SecondPass(30), ids, 0, None)] == [ids[:30], ids[30:]]
    assert [piece[2] for piece in chunks_of(SecondPass(30), ids, 0, WORDS)] == [ids[:30], ids[30:]]


@pytest.mark.parametrize("words", [("ab", ""), ("", "cd")], ids=["first", "later"])
def test_words_before_one_chunk_alone_need_a_tokenizer_too(words):
    ids = list(range(50, 93))
    with pytest.raises(KVError, match="asks the model to repeat the prompt and there is no"):
        next(chunks_of(SecondPass(20, *words), ids, 2, None))
    assert next(chunks_of(SecondPass(50, *words), ids, 0, WORDS))[2][-45:] == [7, 8, *ids]


@dataclass(frozen=True, kw_only=True)
class Looks(Method):
    """Any method may ask for the pass: it notes what it is shown, and keeps everything."""

    fails: bool = False

    @property
    def second_pass(self) -> SecondPass:
        return SecondPass(50)

    def observe(self, layer: LayerKV, replay: Any, budget: Budget) -> None:
        if self.fails and layer.layer_index == 2:
            raise RuntimeError("not this layer")
        assert layer.queries is None
        layer.carried[f"{layer.layer_index} {replay.start}"] = replay.queries

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        assert len(layer.carried) == 4 * 3, (
            "every layer, every chunk, before the first is compressed"
        )
        return keep_all(layer)

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        return n


@pytest.mark.parametrize("fails", [True, False])
def test_a_method_that_fails_during_the_repetition_fails_alone(fails):
    ids, kvzip = prompt_ids(120), build_method("kvzip", chunk=50)
    _, expected, _, _ = read(kvzip, ids)
    _, row, _, (bad,) = read(kvzip, ids, others=[Looks(fails=fails)])
    assert str(bad.failure) == ("not this layer" if fails else "None")
    assert row.failure is None
    for layer in expected.caches:
        assert torch.equal(expected.held_entries(layer), row.held_entries(layer))


CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("is_chat", [True, False])
def test_every_door_repeats_a_chat_as_the_models_own_message_and_a_text_as_text(
    is_chat: bool,
) -> None:
    model, _ = load_model("recall_mini")
    made = tokenizer(CHAT)
    prompt: Any = "".join(
        f"line {name}: REGISTER_CONTENT is <{i}>\n" for i, name in enumerate("abcd")
    )
    plain, chat = PromptEncoder(made), prompt_encoder(made, ModelSpec(name="m", path="x"))
    ids = made(prompt)["input_ids"]
    if is_chat:
        prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}]
        ids = plain.encode_text(plain.render(prompt, answer=True))

    def positions(frame: Any) -> list[int]:
        return frame["position"].tolist()

    by_job = []  # with and without what opens an answer
    for encoder in (chat, plain):
        row = Row("kvzip", build_method("kvzip"), BUDGET, 0, prompt_name(ids))
        with kvbench_attention_on(model):
            prefill(model, ids, [row], encoder=encoder)
        by_job.append(positions(frame_of(row, [""] * len(ids))))
    assert by_job[0] != by_job[1]
    expected = by_job[0 if is_chat else 1]
    budget: Any = {"rate": 0.3, "sink": 5, "window": 4}
    shown = kept(model, made, prompt, "kvzip", compress_after="prompt", **budget)
    assert positions(shown) == expected
    with compress(model, "kvzip", rate=0.3, sink=5, window=4) as session:
        for given in [ids] if is_chat else [ids, prompt]:
            assert positions(session.read(given, made).kept()) == expected
        if is_chat:  # the context is the message so far
            ids = plain.encode_text(plain.around_question(prompt)[0])
            assert session.read(prompt, made).token_ids == ids
            shown = session.read(prompt, made).kept()
            row = Row("kvzip", build_method("kvzip"), BUDGET, 0, prompt_name(ids))
            with kvbench_attention_on(model):
                prefill(model, ids, [row], encoder=chat)
            assert positions(shown) == positions(frame_of(row, [""] * len(ids)))


@dataclass(frozen=True, kw_only=True)
class Asks(Looks):
    """Notes what it is handed of what it asks for."""

    asked: SecondPass

    @property
    def second_pass(self) -> SecondPass:
        return self.asked

    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        parts = {"norms": replay.hidden_norms, "gradients": replay.gradients}
        for name, part in parts.items():
            if part is not None:
                assert not part.requires_grad
                layer.carried[f"{name} {layer.layer_index} {replay.start}"] = part

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        return keep_all(layer)


def test_a_method_is_handed_what_it_asks_for_and_nothing_else_is_computed(monkeypatch):
    model, ids = tiny_model("llama"), prompt_ids(120)
    trained = [part.requires_grad for part in model.parameters()]
    graphs: list[Any] = []
    gradient = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a: graphs.append(a) or gradient(*a))

    def handed(**asked: bool) -> set[tuple[int, ...]]:
        row = Row("x", Asks(asked=SecondPass(50, **asked)), BUDGET, 0, "x")
        with kvbench_attention_on(model):
            prefill(model, ids, [row])
        assert row.failure is None, row.failure
        assert len(row.carried) % (4 * 3) == 0, "every layer, every chunk"
        return {tuple(part.shape) for part in row.carried.values()}

    assert handed() == set()
    assert handed(hidden_norms=True) == {(1, 50), (1, 15)}
    assert not graphs
    assert handed(gradients=True) == {(1, 50, 64), (1, 15, 64)}
    assert len(graphs) == 3
    assert not any(module._forward_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [part.requires_grad for part in model.parameters()] == trained


def test_chunks_are_halved_where_a_gradient_does_not_fit_into_memory(monkeypatch, caplog):
    """As on a GPU whose memory suffices for 40 tokens; the scores are those of the smaller chunks."""
    ids, sizes, gradient = prompt_ids(300), [], torch.autograd.grad

    def grad(norm: Tensor, outputs: list[Tensor]) -> Any:
        sizes.append(outputs[0].shape[1])
        if sizes[-1] > 40:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient(norm, outputs)

    asked = {"instructed": False}
    _, expected, *_ = read(build_method("kvgrad", chunk=37, **asked), ids)
    monkeypatch.setattr(torch.autograd, "grad", grad)
    kvzip = build_method("kvzip", chunk=150, **asked)
    _, row, _, (other,) = read(build_method("kvgrad", chunk=150, **asked), ids, others=[kvzip])
    assert row.failure is other.failure is None
    assert sizes == [150, 75, *[37] * 7, 36]
    assert "of 150 tokens do not fit into memory; chunks of 75" in caplog.text
    for layer in expected.caches:
        assert torch.equal(expected.held_entries(layer), row.held_entries(layer))
    sizes.clear()
    _, row, *_ = read(build_method("kvgrad", chunk=60, **asked), ids)
    assert isinstance(row.failure, torch.OutOfMemoryError)
    assert sizes == [60], "no chunk below 32 tokens"


def kvgrad_scores(model: Any, ids: list[int]) -> tuple[Row, Tensor]:
    row = Row("x", build_method("kvgrad"), BUDGET, 0, "x")
    with kvbench_attention_on(model):
        prefill(model, ids, [row], encoder=WORDS)
    scores = [tensor for name, tensor in row.carried.items() if name.startswith("scores")]
    return row, torch.cat(scores or [torch.empty(0)])


def test_gradients_in_16_bits_are_near_those_of_32_and_may_overflow():
    model, ids = tiny_model("llama"), prompt_ids(120)
    _, expected = kvgrad_scores(model, ids)
    for dtype in (torch.bfloat16, torch.float16):
        _, found = kvgrad_scores(copy.deepcopy(model).to(dtype), ids)
        assert 0.95 < float((found / expected).median()) < 1.05
    with torch.no_grad():
        model.model.layers[3].mlp.down_proj.weight.mul_(3e4)
    row, _ = kvgrad_scores(model.half(), ids)
    assert "hidden states of layer 0 are not finite" in str(row.failure)


def test_kvgrad_is_kvzip_by_another_name_and_refuses_what_it_cannot_read():
    ids, same = prompt_ids(120), build_method("kvzip", score="gradient", chunk=512)
    assert vars(build_method("kvgrad")) == vars(same)
    assert build_method("kvzip_plus") == build_method("kvzip", score="plus")
    model = tiny_model("llama")
    packed = model.model.layers[1].self_attn.o_proj
    packed.weight = torch.nn.Parameter(packed.weight.detach()[None].flatten(1), requires_grad=False)
    packed.forward = lambda x: torch.nn.functional.linear(x, packed.weight.view(64, 64))
    row = Row("x", build_method("kvgrad"), BUDGET, 0, "x")
    with kvbench_attention_on(model):
        prefill(model, ids, [row], encoder=WORDS)
    assert "the output projection of layer 1 cannot be read" in str(row.failure)
