"""transformers' own generate under compress()."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import transformers as t
from support.generation import SMALL, batch, state_of, tiny_model
from support.tiny import Broken, Everything, Greedy, prompt_ids

from kvbench import compress
from kvbench.engine import live_cache
from kvbench.engine.answer import NonFiniteLogits
from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.live_cache import UnsupportedGeneration
from kvbench.kv import Budget, BudgetExceeded, KVError
from kvbench.methods.base import Held

LENGTHS = (50, 80, 33)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt_neox", "opt", "gpt_oss"])
def test_exact_gives_what_generate_gives_without_it(architecture: str) -> None:
    model = tiny_model(architecture)
    inputs = batch(*LENGTHS)
    before = state_of(model)
    plain = model.generate(**inputs)
    with compress(model, "exact") as session:
        assert torch.equal(model.generate(**inputs), plain)
    assert [row.prompt_tokens for row in session.rows] == list(LENGTHS)
    assert session.ratio == [1.0, 1.0, 1.0]
    with compress(model, Everything(), **SMALL):
        assert torch.equal(model.generate(**inputs), plain)
    assert state_of(model) == before
    assert torch.equal(model.generate(**inputs), plain)


def test_exact_gives_the_same_samples_beams_and_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_cache, "GROWTH", 5)  # room that 12 tokens fill twice
    model = tiny_model("llama")
    inputs = batch(*LENGTHS)

    def everything() -> list:
        torch.manual_seed(0)
        sampled = {**inputs, "do_sample": True, "temperature": 0.8, "top_k": 20}
        scored = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
        return [
            model.generate(**sampled, num_return_sequences=2).tolist(),
            model.generate(**inputs, num_beams=3, num_return_sequences=2).tolist(),
            model.generate(**sampled, num_beams=2).tolist(),
            torch.stack(scored.scores).argmax(-1).tolist(),
        ]

    plain = everything()
    with compress(model, "exact"):
        assert everything() == plain


def test_a_prompt_is_compressed_alike_alone_and_in_a_batch() -> None:
    model = tiny_model("llama")
    with compress(model, "uniform", **SMALL, seed=3) as session:
        together = model.generate(**batch(*LENGTHS))
        single = model.generate(torch.tensor([prompt_ids(50, 0)]), max_new_tokens=12)
    assert together[0, 80:].tolist() == single[0, 50:].tolist()
    assert session.entries == [Budget(**SMALL).capacity(n) for n in (*LENGTHS, 50)]


def test_a_row_says_what_was_held_and_for_how_long() -> None:
    model = tiny_model("llama")
    with compress(model, "uniform", **SMALL, seed=3) as session:
        model.generate(**batch(*LENGTHS))
    first: Any = session.rows[0]
    assert first.compressed
    assert first.ratio == session.cache_bytes[0] / session.exact_bytes[0] < 0.5
    assert session.compress_s[0] > 0.0
    # growing by 11 tokens of 4 layers x 2 heads: 2 x 16 floats, and a weight each
    assert first.cache_bytes_end - first.cache_bytes == 11 * 4 * 2 * (32 + 1) * 4
    with compress(model, "snapkv", compression_ratio=0.7, **SMALL) as session:
        model.generate(**batch(100))
    assert session.ratio == pytest.approx([0.3], abs=0.01), "the share that is removed is 0.7"
    assert session.budget.total_rate == 0.3, "1 - 0.7 is a little more"
    with compress(model, "h2o", **SMALL) as session:
        model.generate(**batch(*LENGTHS), num_beams=3)
    assert len(session.rows) == 9, "every beam"
    assert all(row.cache_bytes_end == row.cache_bytes for row in session.rows), "it evicts"


def test_only_the_compressed_entries_are_in_memory_while_decoding() -> None:
    model, n = tiny_model("llama"), 400
    sizes: list[int] = []

    class Look(t.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            held = {
                x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in gc.get_objects()
                if type(x) is torch.Tensor and x.dim() in (3, 4) and x.shape[-1] == 16
            }
            sizes.append(sum(size for place, size in held.items() if place not in others))
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    ids = torch.tensor([prompt_ids(n)])
    gc.collect()
    others = {  # of tests that ran before
        x.untyped_storage().data_ptr() for x in gc.get_objects() if type(x) is torch.Tensor
    }
    options = {"max_new_tokens": 4, "stopping_criteria": [Look()], "do_sample": False}
    model.generate(ids, **options)
    whole = sizes[0]
    sizes.clear()
    with compress(model, "snapkv", rate=0.1, **SMALL):
        output = model.generate(ids, **options, return_dict_in_generate=True)
        assert len(output.past_key_values.layers) == 0
    capacity = Budget(rate=0.1, **SMALL).capacity(n)
    layer = 2 * 16 * 4 * 2  # kv heads, head_dim, float32, keys and values
    assert whole >= 4 * n * layer
    # before the first token is appended there is no room to grow; then some is made once
    assert sizes[0] == 4 * capacity * layer
    assert max(sizes) < 4 * (capacity + 260) * layer


def test_a_loop_of_ones_own_compresses_the_context_and_asks_later() -> None:
    model = tiny_model("llama")
    context, question = torch.tensor([prompt_ids(60)]), torch.tensor([prompt_ids(9, 1)])
    with torch.no_grad():
        expected = model(torch.cat([context, question], 1)).logits[:, -1]
        with compress(model, "exact"):
            cache = model(context).past_key_values
            assert cache.get_seq_length() == 60
            for piece in question.split([1, 1, 4, 1, 1, 1], 1):
                logits = model(piece, past_key_values=cache).logits[:, -1]
            for tokens, says in ((1, "hides new tokens"), (70, "of row 0 hides tokens after")):
                with pytest.raises(UnsupportedGeneration, match=f"attention_mask {says}"):
                    model(piece, attention_mask=torch.zeros(1, tokens), past_key_values=cache)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        with compress(model, "snapkv", **SMALL) as session:
            cache = model(context).past_key_values
            model(question, past_key_values=cache)
    assert session.rows[0].prompt_tokens == 60


class Bang(t.StoppingCriteria):
    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("bang")


@pytest.mark.parametrize(
    ("method", "options", "error", "says"),
    [
        ("snapkv", {"stopping_criteria": [Bang()]}, ZeroDivisionError, "bang"),
        (Broken(), {}, RuntimeError, "out of memory"),
        (Greedy(), {}, BudgetExceeded, "Greedy"),
    ],
)
def test_an_exception_inside_leaves_the_model_as_it_was(
    method: Any, options: Any, error: type[Exception], says: str
) -> None:
    model = tiny_model("qwen3")
    before = state_of(model)
    plain = model.generate(**batch(40, 30))
    with pytest.raises(error, match=says), compress(model, method, **SMALL):
        model.generate(**batch(40, 30), **options)
    assert state_of(model) == before
    assert torch.equal(model.generate(**batch(40, 30)), plain)
    with compress(model, "snapkv", **SMALL) as session:  # after a failure, the next call is fine
        with pytest.raises(ZeroDivisionError, match="bang"):
            model.generate(**batch(40), stopping_criteria=[Bang()])
        model.generate(**batch(40))
    assert session.rows[-1].cache_bytes_end is not None


NOTHING = torch.zeros(1, 40, dtype=torch.long)
REFUSED: list[tuple[dict[str, Any], str]] = [  # options of generate, what is said
    ({"past_key_values": t.DynamicCache()}, "DynamicCache that was not filled under compress"),
    ({"assistant_model": "another"}, "assistant_model is .* cannot serve; allowed: None"),
    ({"assistant_early_exit": 2}, "assistant_early_exit is 2, .*; allowed: None"),
    ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens is 3, .*; allowed: None"),
    ({"cache_implementation": "static"}, "is 'static', .*; allowed: None or 'dynamic'"),
    ({"prefill_chunk_size": 16}, "prefill_chunk_size is 16"),
    ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
    ({"use_cache": False}, "use_cache is False"),
    ({"output_attentions": True}, "output_attentions is True, .*; allowed: None or False"),
    ({"token_type_ids": NOTHING}, "token_type_ids is 'Tensor', .*; allowed: None"),
    ({"generation_config": t.GenerationConfig(use_cache=False)}, "use_cache is False"),
    (
        {"attention_mask": batch(40)["attention_mask"].cumsum(1) < 30},
        "row 0 .* padding on the left",
    ),
    ({"attention_mask": NOTHING}, "row 0 hides tokens .*, or all; allowed: padding on the left"),
]


@dataclass(frozen=True)
class Generated:
    """A model under `compress`, and what it has generated there of a prompt of 40 tokens."""

    model: Any
    ids: torch.Tensor
    past: Any


@pytest.fixture(scope="module")
def generated() -> Iterator[Generated]:
    model, inputs = tiny_model("llama"), batch(40)
    with compress(model, "snapkv", **SMALL):
        output = model.generate(**inputs, return_dict_in_generate=True)
        with pytest.raises(UnsupportedGeneration, match="does not keep gradients; allowed: gen"):
            model(inputs["input_ids"])
        yield Generated(model, inputs["input_ids"], output.past_key_values)
        model.generate(**inputs)  # still works after every refusal, and so it does outside
    model.generate(**inputs)
    with pytest.raises(UnsupportedGeneration, match="whose generation is over"):
        model.generate(output.sequences, past_key_values=output.past_key_values)


def filled(model: Any, ids: torch.Tensor) -> t.DynamicCache:
    cache = t.DynamicCache(config=model.config)
    states = torch.zeros(1, 2, ids.shape[1], 16)
    cache.update(states, states, 0)
    return cache


CALLS: list[tuple[Callable[[Any, torch.Tensor, Any], Any], str]] = [
    # of a model, its ids and the cache of an earlier generation
    (
        lambda model, ids, past: model.generate(**batch(40), past_key_values=past),
        "40 tokens and past_key_values holds 51",
    ),
    (
        lambda model, ids, past: model(
            ids, past_key_values=t.StaticCache(config=model.config, max_cache_len=64)
        ),
        "is a StaticCache",
    ),
    (
        lambda model, ids, past: model(ids, past_key_values=filled(model, ids)),
        "DynamicCache that was not filled under compress",
    ),
    (
        lambda model, ids, past: model(inputs_embeds=torch.zeros(1, 40, 64)),
        "inputs_embeds without input_ids; allowed: input_ids",
    ),
    (
        lambda model, ids, past: model(ids, attention_mask=torch.ones(1, 39)),
        r"attention_mask has shape \(1, 39\); allowed: \(1, 40\), the prompt's",
    ),
    (
        lambda model, ids, past: model(ids[:, :1].repeat(2, 1), past_key_values=past),
        "the batch has 2 rows and the cache 1; allowed: as many",
    ),
    (lambda model, ids, past: model(ids, use_cache=False), "use_cache is False"),
    (lambda model, ids, past: compress(model, "exact").__enter__(), "allowed: one at a time"),
    (lambda model, ids, past: past.crop(-12), "cannot be cropped; call generate again"),
    (
        lambda model, ids, past: model.generate_batch([prompt_ids(9)]),
        "generate_batch has a paged cache of its own",
    ),
]


@pytest.mark.parametrize(("call", "message"), [*REFUSED, *CALLS])
def test_what_a_compressed_cache_cannot_serve_is_refused_in_one_line(
    generated: Generated, call: Any, message: str
) -> None:
    if isinstance(call, dict):
        call = partial(generated.model.generate, **{**batch(40), **call})
    else:
        call = partial(call, generated.model, generated.ids, generated.past)
    with torch.no_grad(), pytest.raises(UnsupportedGeneration, match=message) as error:
        call()
    assert "\n" not in str(error.value)


def test_a_later_turn_may_hide_the_first_turns_padding_and_nothing_else() -> None:
    model = tiny_model("llama")
    inputs = batch(40, 30)
    with compress(model, "snapkv", **SMALL):
        first = model.generate(**inputs, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.tensor([prompt_ids(9, 1)] * 2)], 1)
        mask = torch.ones_like(ids)
        mask[1, :10] = 0
        how = {"max_new_tokens": 4, "do_sample": False}
        for row, hidden, says in (
            (0, slice(20, 25), "row 0 hides tokens after the first shown one"),
            (1, slice(40, 50), "row 1 hides tokens after the first shown one"),
            (
                0,
                slice(0, 3),
                "row 0 hides 3 tokens, and it hid 0 of the first turn; allowed: the pad",
            ),
            (1, slice(0, 12), "row 1 hides 12 tokens, and it hid 10 of the first turn"),
        ):
            wrong = mask.clone()
            wrong[row, hidden] = 0
            past = copy.deepcopy(first.past_key_values)
            with pytest.raises(UnsupportedGeneration, match=says):
                model.generate(ids, attention_mask=wrong, past_key_values=past, **how)
        past = copy.deepcopy(first.past_key_values)
        given = model.generate(ids, attention_mask=mask, past_key_values=past, **how)
        assert given.shape[1] == ids.shape[1] + 4
        model.generation_config.pad_token_id = int(ids[0, 20])  # a mask is made of it
        with pytest.raises(UnsupportedGeneration, match="row 0 hides tokens after the first shown"):
            model.generate(ids, past_key_values=first.past_key_values, **how)


@dataclass(frozen=True, kw_only=True)
class HidesAll(Everything):
    def restrict(self, held: Held, logits: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(logits, dtype=torch.bool)


def test_no_token_is_chosen_from_logits_that_are_not_numbers() -> None:
    model = tiny_model("llama")
    with (
        compress(model, HidesAll(), **SMALL) as session,
        pytest.raises(NonFiniteLogits, match="at new token 2"),
    ):
        model.generate(**batch(50, 80))
    assert len(session.rows) == 2
    with (
        compress(model, "topk", rate=1e-9, sink=0, window=0),
        pytest.raises(KVError, match="is 0 "),
    ):
        model.generate(**batch(50))


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("snapkv", {"compress_after": "context"}, "generate does not know where the context of"),
        ("kvzip", {}, "method 'kvzip' has the model repeat its prompt before it compresses"),
    ],
)
def test_what_generate_cannot_say_is_left_to_read(
    method: str, options: dict[str, Any], message: str
) -> None:
    model = tiny_model("llama")
    refused = pytest.raises(UnsupportedGeneration, match=message)
    with refused as error, compress(model, method, **SMALL, **options):
        model.generate(**batch(40))
    assert "allowed: session.read(context" in str(error.value)


def test_models_that_cannot_be_compressed_are_refused() -> None:
    tiny = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    drops: Any = t.StableLmForCausalLM(
        t.StableLmConfig(**tiny, num_attention_heads=2, num_key_value_heads=2)
    ).eval()
    with torch.device("meta"):
        nothing = t.LlamaForCausalLM(tiny_model("llama").config)
    both_ways = tiny_model("llama")
    both_ways.config.use_bidirectional_attention = True
    encoder = t.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    wrongs: list[tuple[Any, str]] = [
        (t.T5ForConditionalGeneration(encoder), "encoder-decoder"),
        (torch.nn.Linear(2, 2), "a transformers PreTrainedModel"),
        (tiny_model("llama").model, "no language-model head"),
        (nothing, "LlamaForCausalLM lies on the device meta, which holds no weights"),
        (drops, "does not pass keyword"),
        (both_ways, "attends both ways within its prompt; allowed: causal models"),
        (t.BloomForCausalLM(t.BloomConfig(vocab_size=9, hidden_size=8, n_head=2)), "Bloom"),
    ]
    for wrong, message in wrongs:
        with pytest.raises(UnsupportedModel, match=message), compress(wrong, "exact"):
            wrong.generate(**batch(20))
    drops.generate(**batch(20))


def test_two_models_a_deep_copy_and_a_compiled_model_are_apart() -> None:
    model, second = tiny_model("llama"), tiny_model("qwen3")
    inputs = batch(60)
    with compress(model, "snapkv", **SMALL) as session, compress(second, "uniform") as other:
        twin = copy.deepcopy(model)
        torch.nn.init.zeros_(twin.lm_head.weight)  # now it says nothing but token 0
        assert twin.generate(**inputs)[0, 60:].unique().tolist() == [0]
        assert session.rows == [], "the copy's rows are its own"
        expected = model.generate(**inputs)
        second.generate(**batch(80, 33))
    assert [row.prompt_tokens for row in session.rows] == [60]
    assert [row.prompt_tokens for row in other.rows] == [80, 33]
    assert "generate" not in vars(model)
    copied = twin.generate.__self__
    twin.generate(**inputs)
    assert [row.prompt_tokens for row in copied.rows] == [60, 60], "the copy goes on"
    compiled: Any = torch.compile(model, backend="eager")
    with compress(compiled, "snapkv", **SMALL):
        assert torch.equal(compiled.generate(**inputs), expected)


def test_the_text_part_of_a_vision_language_model_is_compressed() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "image_size": 8}
    vision = t.CLIPVisionConfig(**sizes, num_attention_heads=2, patch_size=4, projection_dim=16)
    text = tiny_model("llama").config
    config = t.LlavaConfig(vision_config=vision, text_config=text, image_token_index=96)
    model: Any = t.LlavaForConditionalGeneration(config).eval()
    ids = torch.tensor([[min(i, 95) for i in prompt_ids(55)] + [96] * 4 + [5]])
    image = torch.randn(1, 3, 8, 8)
    inputs = {"input_ids": ids, "pixel_values": image, "max_new_tokens": 5, "do_sample": False}
    plain, before = model.generate(**inputs), state_of(model)
    with compress(model, "exact"):
        assert torch.equal(model.generate(**inputs), plain)
    with compress(model, "snapkv", **SMALL) as session:
        model.generate(**inputs)
    assert (session.rows[0].prompt_tokens, session.ratio[0] < 0.5) == (60, True)
    assert state_of(model) == before
    model.create_masks_for_generate = None  # an image's tokens see each other both ways
    for name in ("token_type_ids", "mm_token_type_ids"):
        with compress(model, "exact"), pytest.raises(UnsupportedGeneration, match=f"^{name} is"):
            model(ids, pixel_values=image, **{name: ids})
    model.config = copy.deepcopy(config)  # not the one that its text part reads
    with pytest.raises(UnsupportedModel, match="attention interface"):
        compress(model, "exact").__enter__()


def test_two_threads_do_not_generate_inside_one_compress() -> None:
    model = tiny_model("llama")
    said: list[str] = []

    def other() -> None:
        try:
            model.generate(**batch(60))
        except UnsupportedGeneration as error:
            said.append(str(error))

    class Meanwhile(t.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    with compress(model, "snapkv", **SMALL) as session:
        alone = model.generate(**batch(60))
        assert torch.equal(model.generate(**batch(60), stopping_criteria=[Meanwhile()]), alone)
    assert len(session.rows) == 2
    assert said[0].startswith("another thread generates inside the same compress; allowed: one ")
