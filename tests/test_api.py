"""compress() around transformers' own generate, and compare()."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from support.attention import step
from support.tiny import Broken, Everything, Greedy, prompt_ids
from support.tiny import tiny_model as _tiny_model

import kvbench
from kvbench import compare, compress
from kvbench.cli.catalogue import catalogue
from kvbench.engine.attention import UnsupportedModel
from kvbench.engine.cache import LayerCache
from kvbench.engine.live import UnsupportedGeneration
from kvbench.engine.loading import local_path
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError
from kvbench.methods import build_method

SMALL: dict[str, Any] = {"sink": 4, "window": 4}
LENGTHS = (50, 80, 33)


def tiny_model(architecture: str) -> Any:
    """A tiny random model, untyped as its `generate` is."""
    return _tiny_model(architecture)


def batch(*lengths: int) -> dict[str, Any]:
    """Prompts of these lengths, padded on the left."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, length in enumerate(lengths):
        ids[i, ids.shape[1] - length :] = torch.tensor(prompt_ids(length, i))
        mask[i, ids.shape[1] - length :] = 1
    return {"input_ids": ids, "attention_mask": mask, "max_new_tokens": 12, "do_sample": False}


def state_of(model: Any) -> tuple:
    """What compress must leave as it was: attention, hooks, attributes, forward, generate."""
    return (
        model.config._attn_implementation,
        {name: len(part) for name, part in vars(model).items() if name.endswith("_hooks")},
        {name: len(p) for name, p in vars(model).items() if name.endswith("hooks_with_kwargs")},
        sorted(vars(model)),
        model.forward,
        model.generate,
    )


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2", "gpt_neox", "opt"])
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


def test_exact_gives_the_same_samples_beams_scores_and_streams() -> None:
    model = tiny_model("llama")
    inputs = batch(*LENGTHS)

    class Tokens(t.generation.streamers.BaseStreamer):
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> Any:
            self.got.append(value.tolist())

        def end(self) -> Any:
            self.got.append("end")

    class AtLength(t.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 87)

    def everything() -> list:
        torch.manual_seed(0)
        sampled = {**inputs, "do_sample": True, "temperature": 0.8, "top_k": 20}
        streamer = Tokens()
        scored = model.generate(**inputs, return_dict_in_generate=True, output_scores=True)
        return [
            model.generate(**sampled, num_return_sequences=2).tolist(),
            model.generate(**inputs, num_beams=3, num_return_sequences=2).tolist(),
            model.generate(**sampled, num_beams=2).tolist(),
            model.generate(**inputs, stopping_criteria=[AtLength()]).tolist(),
            model.generate(**{**batch(40), "streamer": streamer}).tolist(),
            streamer.got,
            scored.sequences.tolist(),
            torch.stack(scored.scores).argmax(-1).tolist(),
            model.generate(torch.tensor([prompt_ids(30)]), max_new_tokens=5).tolist(),
            model.generate(
                inputs_embeds=model.get_input_embeddings()(inputs["input_ids"]),
                attention_mask=inputs["attention_mask"],
                max_new_tokens=5,
            ).tolist(),
        ]

    plain = everything()
    with compress(model, "exact"):
        compressed = everything()
    assert compressed == plain
    assert len(plain[3][0]) == 87


def test_a_prompt_is_compressed_alike_alone_and_in_a_batch() -> None:
    model = tiny_model("llama")
    inputs = batch(*LENGTHS)
    with compress(model, "uniform", **SMALL, seed=3) as session:
        together = model.generate(**inputs)
        single = model.generate(torch.tensor([prompt_ids(50, 0)]), max_new_tokens=12)
    assert together[0, 80:].tolist() == single[0, 50:].tolist()
    assert session.entries == [Budget(**SMALL).capacity(n) for n in (*LENGTHS, 50)]
    assert len(session.last) == 1
    first: Any = session.rows[0]
    assert first.compressed
    assert first.ratio == session.cache_bytes[0] / session.exact_bytes[0] < 0.5
    assert session.compress_s[0] > 0.0
    # growing by 11 tokens of 4 layers x 2 heads: 2 x 16 floats, and a weight each
    assert first.cache_bytes_end - first.cache_bytes == 11 * 4 * 2 * (32 + 1) * 4


def test_only_the_compressed_entries_are_in_memory_while_decoding() -> None:
    model = tiny_model("llama")
    n = 400
    sizes: list[int] = []

    class Look(t.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            held = {
                x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in gc.get_objects()
                if type(x) is torch.Tensor and x.dim() in (3, 4) and x.shape[-1] == 16
            }
            held = {place: size for place, size in held.items() if place not in others}
            sizes.append(sum(held.values()))
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


def test_an_evicting_method_under_beam_search_keeps_its_budget_in_every_row() -> None:
    model = tiny_model("llama")
    with compress(model, "h2o", **SMALL) as session:
        model.generate(**batch(*LENGTHS), num_beams=3)
    assert len(session.rows) == 9
    assert all(row.cache_bytes_end == row.cache_bytes for row in session.rows)


def test_a_cache_grows_when_it_is_full_and_a_copy_goes_its_own_way() -> None:
    torch.manual_seed(0)
    kept = CompressedKV(
        torch.randn(1, 2, 5, 8),
        torch.randn(1, 2, 5, 8),
        torch.randn(1, 2, 5),
        torch.arange(5).expand(1, 2, 5),
    )
    tight = LayerCache(kept, 0, build_method("exact"), capacity=5)
    roomy = LayerCache(kept, 9, build_method("exact"), capacity=5)
    for i in range(6):
        q, k, v = torch.randn(4, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 1, 8)
        at = torch.tensor([5 + i])
        twin = tight.clone()
        expected = step(roomy, q, k, v, at, 0.3)
        assert torch.equal(step(tight, q, k, v, at, 0.3), expected)
        step(twin, q, k, -v, at, 0.3)
    assert tight.length == 11
    assert torch.equal(tight.values[:, :11], roomy.values[:, :11])


def test_a_new_entry_starts_at_score_zero_in_the_place_of_one_that_left() -> None:
    held: list[torch.Tensor] = []

    class Spy(Everything):
        evicts = True

        def evict(self, now: Any, attention: Any) -> Any:
            held.append(now.scores.clone())
            return now.scores + attention, torch.zeros(2, dtype=torch.int64)

    keys = torch.randn(1, 2, 5, 8)
    kept = CompressedKV(keys, keys, None, torch.arange(5).expand(1, 2, 5), torch.ones(1, 2, 5))
    cache = LayerCache(kept, 4, Spy(), capacity=5)
    for i in range(3):
        new = torch.randn(2, 1, 8)
        step(cache, new, new, new, torch.tensor([5 + i]), 0.3)
    assert [scores[:, -1].tolist() for scores in held] == [[0.0, 0.0]] * 3


def test_a_loop_of_ones_own_compresses_the_context_and_asks_later() -> None:
    model = tiny_model("llama")
    context, question = torch.tensor([prompt_ids(60)]), torch.tensor([prompt_ids(9, 1)])
    with torch.no_grad():
        expected = model(torch.cat([context, question], 1)).logits[:, -1]
        with compress(model, "exact"):
            cache = model(context).past_key_values
            assert cache.get_seq_length() == 60
            got = model(question, past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        with compress(model, "snapkv", **SMALL) as session:
            cache = model(context).past_key_values
            model(question, past_key_values=cache)
    row: Any = session.rows[0]
    assert row.prompt_tokens == 60
    assert row.cache_bytes_end > row.cache_bytes


def test_an_exception_inside_leaves_the_model_as_it_was() -> None:
    model = tiny_model("qwen3")
    before = state_of(model)
    plain = model.generate(**batch(40, 30))

    class Bang(t.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            raise RuntimeError("bang")

    with pytest.raises(RuntimeError, match="bang"), compress(model, "snapkv", **SMALL):
        model.generate(**batch(40, 30), stopping_criteria=[Bang()])
    assert state_of(model) == before
    with pytest.raises(ZeroDivisionError), compress(model, "snapkv", **SMALL):
        raise ZeroDivisionError
    with pytest.raises(RuntimeError, match="out of memory"), compress(model, Broken(), **SMALL):
        model.generate(**batch(40, 30))
    with pytest.raises(BudgetExceeded, match="Greedy"), compress(model, Greedy(), **SMALL):
        model.generate(**batch(40, 30))
    assert state_of(model) == before
    assert torch.equal(model.generate(**batch(40, 30)), plain)
    with compress(model, "snapkv", **SMALL) as session:  # after a failure, the next call is fine
        with pytest.raises(RuntimeError, match="bang"):
            model.generate(**batch(40), stopping_criteria=[Bang()])
        model.generate(**batch(40))
    assert session.last[0].cache_bytes_end is not None
    model.set_attn_implementation("kvbench")
    with compress(model, "snapkv", **SMALL):
        model.generate(**batch(40))
    assert model.config._attn_implementation == "kvbench"


def test_what_a_compressed_cache_cannot_serve_is_refused_in_one_line() -> None:
    model = tiny_model("llama")
    inputs = batch(40)
    with compress(model, "snapkv", **SMALL):
        output = model.generate(**inputs, return_dict_in_generate=True)
        refused = [
            ({"past_key_values": output.past_key_values}, "40 tokens and past_key_values holds 51"),
            (
                {"past_key_values": t.DynamicCache()},
                "DynamicCache that was not filled under compress",
            ),
            ({"assistant_model": tiny_model("llama")}, "assistant_model asks for assisted"),
            ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens asks for assisted"),
            ({"cache_implementation": "static"}, "'static'; allowed: none"),
            ({"cache_implementation": "quantized"}, "'quantized'; allowed: none"),
            ({"prefill_chunk_size": 16}, "whole prompt at once"),
            ({"guidance_scale": 1.5}, "guidance_scale is 1.5"),
            ({"cache_implementation": "offloaded"}, "'offloaded'; allowed: none"),
            ({"use_cache": False}, "no cache to compress"),
            ({"output_attentions": True}, "computes none"),
            ({"generation_config": t.GenerationConfig(use_cache=False)}, "no cache to compress"),
        ]
        for options, message in refused:
            with pytest.raises(UnsupportedGeneration, match=message) as error:
                model.generate(**inputs, **options)
            assert "\n" not in str(error.value)
        right = batch(40, 30)
        right["attention_mask"] = right["attention_mask"].flip(1)
        with pytest.raises(UnsupportedGeneration, match=r"row 1 .* padding on the left"):
            model.generate(**right)
        static = t.StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad(), pytest.raises(UnsupportedGeneration, match="is a StaticCache"):
            model(inputs["input_ids"], past_key_values=static)
        with pytest.raises(UnsupportedGeneration, match=r"allowed: generate"):
            model(inputs["input_ids"])
        with pytest.raises(UnsupportedGeneration, match="one at a time"), compress(model, "exact"):
            pass
        with pytest.raises(UnsupportedGeneration, match="cannot be cropped; call generate again"):
            output.past_key_values.crop(-12)
        with pytest.raises(UnsupportedGeneration, match="a paged cache of its own"):
            model.generate_batch([prompt_ids(9)])
        model.generate(**inputs)  # still works, and so it does outside
    model.generate(**inputs)
    with pytest.raises(UnsupportedGeneration, match="whose generation is over"):
        model.generate(output.sequences, past_key_values=output.past_key_values)


class Letters:
    """A tokenizer of 94 printable characters."""

    eos_token_id = None

    def __call__(self, text: str) -> dict:
        return {"input_ids": [3 + (ord(c) - 32) % 94 for c in text]}

    def apply_chat_template(self, messages: Any, **options: Any) -> dict:
        return self("|".join(message["content"] for message in messages) + ">")

    def decode(self, tokens: Any, **options: Any) -> str:
        return "".join(chr(29 + i) for i in tokens if i >= 3)


def _compress(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: compress(model, *arguments, **options)


def _compare(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: compare(model, Letters(), *arguments, **options)


CHAT = r"prompt is a \w+; allowed: one text, or the messages"
WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (_compress("snapkvv"), r"unknown method 'snapkvv' \(did you mean 'snapkv'\?\)"),
    (_compress("snapkv", rate=1.5), r"rate is 1.5; allowed: a number in \(0, 1\]"),
    (_compress("snapkv", kernel=3), "has no option 'kernel'"),
    (_compress(Everything(), kernel=3), "made already"),
    (_compress(7), "a name or a kvbench Method"),
    (_compress("snapkv", compression_ratio=1), "compression_ratio is 1; allowed: the share"),
    (_compress("snapkv", compression_ratio=0.5, total_rate=0.5), "allowed: one of the two"),
    (lambda model: compress("snapkv", model), "model is 'snapkv'; allowed: first the model"),
    (lambda model: compare(Letters(), model, "a", ["exact"]), "model and tokenizer are swapped"),
    *((_compare(thing, ["exact"]), CHAT) for thing in (["a", 1], {"ids": [1]}, torch.ones(1, 3))),
    (_compare("x", []), "methods is empty"),
    (_compare("x", ["exact", "exact"]), "names 'exact' twice"),
    (_compare("x", ["exat"]), "did you mean 'exact'"),
    (_compare("", ["exact"]), "prompt is empty"),
    (_compare("x", ["exact"], max_new_tokens=0), "max_new_tokens is 0"),
    (_compare(["x", "y"], ["exact"], reference=["a"]), "2 prompts; allowed: one of each"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:30] for _, message in WRONG])
def test_wrong_arguments_are_refused_before_anything_is_touched(
    call: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(KVError, match=message):
        call(tiny_model("llama"))


def test_models_that_cannot_be_compressed_are_refused() -> None:
    encoder = t.T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    for wrong, message in [
        (t.T5ForConditionalGeneration(encoder), "encoder-decoder"),
        (torch.nn.Linear(2, 2), "a transformers PreTrainedModel"),
        (tiny_model("llama").model, "no language-model head"),
    ]:
        with pytest.raises(UnsupportedModel, match=message), compress(wrong, "exact"):
            pass


def test_compare_gives_what_compress_gives_from_one_prefill() -> None:
    model = tiny_model("llama")
    before = state_of(model)
    prompt = "the quick brown fox jumps over the lazy dog " * 2
    names = ["exact", "snapkv", "uniform", "h2o"]
    frame: Any = compare(model, Letters(), prompt, names, **SMALL, max_new_tokens=10)
    assert state_of(model) == before
    assert list(frame.columns) == ["text", "score", "bytes", "ratio", "seconds"]
    assert list(frame.index) == names
    assert frame["score"].isna().all()
    assert frame.loc["exact", "ratio"] == 1.0
    ids = torch.tensor([Letters()(prompt)["input_ids"]])
    for name in names:
        with compress(model, name, **SMALL) as session:
            new = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
        assert frame.loc[name, "text"] == Letters().decode(new.tolist()), name
        assert frame.loc[name, "bytes"] == session.cache_bytes[0]
        assert frame.loc[name, "ratio"] == session.ratio[0]
    again: Any = compare(
        model, Letters(), prompt, ["exact"], max_new_tokens=10, reference=frame.loc["exact", "text"]
    )
    assert again.loc["exact", "score"] == 1.0


def test_compare_takes_several_rates_and_prompts() -> None:
    model, names = tiny_model("llama"), ["exact", "snapkv"]
    prompts = {"fox": "the quick brown fox jumps over the lazy dog " * 2, "hen": "a hen " * 20}
    many: Any = compare(
        model, Letters(), prompts, names, rate=[0.5, 0.25], **SMALL, max_new_tokens=4,
        reference={"fox": "a", "hen": "b"},
    )  # fmt: skip
    assert many.index.names == ["prompt", "rate", "method"]
    assert len(many) == 8
    for name, prompt in prompts.items():
        for rate in (0.5, 0.25):
            one: Any = compare(
                model, Letters(), prompt, names, rate=rate, **SMALL, max_new_tokens=4
            )
            for method in names:
                for column in ("text", "bytes", "ratio"):
                    assert many.loc[name, rate, method][column] == one.loc[method, column]
    rates: Any = compare(
        model, Letters(), prompts["fox"], ["snapkv"], rate=[0.5, 0.25], **SMALL, max_new_tokens=2
    )
    assert list(rates.index.names) == ["rate", "method"]


def test_compression_ratio_is_the_share_removed_and_a_session_is_one_line() -> None:
    model = tiny_model("llama")
    ids = torch.tensor([prompt_ids(100)])
    with compress(model, "snapkv", compression_ratio=0.7, **SMALL) as session:
        assert repr(session).startswith("<kvbench session: snapkv, Budget(")
        model.generate(ids, max_new_tokens=1, do_sample=False)
    assert session.ratio == pytest.approx([0.3], abs=0.01)
    assert "1 rows, ratio of the last 0.3>" in repr(session)
    assert "\n" not in repr(session)


def test_variants_have_the_names_of_the_command_line() -> None:
    assert kvbench.build_method("balancekv_released") == build_method("balancekv", "released")
    changed = build_method("pyramidkv_released", kernel_size=7)
    assert (type(changed).__name__, changed.kernel_size, changed.budgets) == (  # type: ignore[attr-defined]
        "PyramidKV",
        7,
        "released",
    )
    for name in catalogue("methods"):
        if not name.startswith(("kvpress", "minference")):
            assert build_method(name), name
    assert kvbench.Budget is Budget
    with pytest.raises(KVError, match="did you mean 'balancekv_released'"):
        build_method("balancekv_releasd")


def test_compare_takes_chats_labels_and_failures() -> None:
    model = tiny_model("llama")
    chat = [{"role": "user", "content": "hello " * 10}]
    methods: dict[str, Any] = {"mine": Everything(), "over": Greedy(), "name": "snapkv"}
    frame: Any = compare(model, Letters(), chat, methods, **SMALL, max_new_tokens=3, stop=["\0"])
    assert frame.loc["mine", "ratio"] == 1.0
    assert "holds 61 entries" in frame.loc["over", "error"]
    assert frame["text"].isna().tolist() == [False, True, False]
    with compress(model, "snapkv", **SMALL):  # one inside the other
        assert (
            compare(model, Letters(), "x" * 50, "exact", max_new_tokens=3).loc["exact", "ratio"]
            == 1
        )


@pytest.fixture
def shipped() -> tuple[Any, Any]:
    """The shipped model and its tokenizer, as transformers loads them."""
    path = local_path("asset:recall_mini")
    model = t.AutoModelForCausalLM.from_pretrained(path, device_map="cpu").eval()
    return model, t.AutoTokenizer.from_pretrained(path, padding_side="left")


def test_a_pipeline_batches_pads_and_stops_as_usual(shipped: Any) -> None:
    model, tokenizer = shipped
    pipe = t.pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["line one: the value is 7. " * 8, "a short one: " * 3, "and another " * 5]
    options = {"max_new_tokens": 6, "do_sample": False, "return_full_text": False}
    plain = pipe(prompts, batch_size=2, **options)
    with compress(model, "exact") as session:
        assert pipe(prompts, batch_size=2, **options) == plain
    assert len(session.rows) == 3
    with compress(model, "balancekv", **SMALL) as session:
        pipe(prompts, **options)
    assert session.ratio[0] < 0.5
    assert pipe(prompts, batch_size=2, **options) == plain


def test_a_text_streamer_in_a_thread_gives_the_text_as_it_comes(shipped: Any) -> None:
    model, tokenizer = shipped
    inputs = tokenizer("line one: the value is 7. " * 8, return_tensors="pt")
    options = {"max_new_tokens": 6, "do_sample": False}
    with compress(model, "snapkv", **SMALL) as session:
        whole = model.generate(**inputs, **options)[0, inputs["input_ids"].shape[1] :]
        streamer = t.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
        thread = threading.Thread(
            target=model.generate, kwargs={**inputs, **options, "streamer": streamer}
        )
        thread.start()
        pieces = list(streamer)
        thread.join()
    assert "".join(pieces) == tokenizer.decode(whole)
    assert len(pieces) > 1
    assert len(session.rows) == 2
    with compress(model, "snapkv", **SMALL):
        pipe = t.pipeline("text-generation", model=model, tokenizer=tokenizer)  # made inside
        made = pipe("line one: the value is 7. " * 8, return_full_text=False, **options)
    assert made[0]["generated_text"] == "".join(pieces)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_its_type(dtype: torch.dtype) -> None:
    model = tiny_model("llama").to(dtype)
    inputs = batch(*LENGTHS)
    with compress(model, "balancekv", **SMALL) as session:
        model.generate(**inputs)
    kept = Budget(**SMALL).capacity(80)
    assert session.entries[1] == kept
    assert (
        session.exact_bytes[1] == 4 * 2 * 80 * 2 * 16 * 2
    )  # layers, heads, n, k and v, dim, bytes


def test_hidden_states_stop_strings_and_decorators_work() -> None:
    model = tiny_model("llama")
    inputs = batch(50) | {"max_new_tokens": 4}

    @compress(model, "snapkv", **SMALL)
    def generated() -> Any:
        return model.generate(
            **inputs, output_hidden_states=True, output_logits=True, return_dict_in_generate=True
        )

    before = state_of(model)
    for _ in range(2):
        output = generated()
        assert [len(states) for states in output.hidden_states] == [5] * 4
        assert len(output.logits) == 4
        assert state_of(model) == before
    with torch.inference_mode(), compress(model, "snapkv", **SMALL):
        assert torch.equal(model.generate(**inputs), output.sequences)


def test_two_models_are_compressed_at_once_each_its_own_way() -> None:
    first, second = tiny_model("llama"), tiny_model("qwen3")
    with compress(first, "snapkv", **SMALL) as one, compress(second, "uniform", **SMALL) as other:
        first.generate(**batch(50))
        second.generate(**batch(80, 33))
        with pytest.raises(UnsupportedGeneration, match="one at a time"), compress(first, "exact"):
            pass
        first.generate(**batch(50))
    assert [row.prompt_tokens for row in one.rows] == [50, 50]
    assert [row.prompt_tokens for row in other.rows] == [80, 33]


def test_a_deep_copy_made_inside_generates_with_itself_and_compressed() -> None:
    model = tiny_model("llama")
    inputs = batch(60)
    with compress(model, "snapkv", rate=0.25, **SMALL) as session:
        twin = copy.deepcopy(model)
        torch.nn.init.zeros_(twin.lm_head.weight)  # now it says nothing but token 0
        assert twin.generate(**inputs)[0, 60:].unique().tolist() == [0]
        assert session.rows == [], "the copy's rows are its own"
        wanted = model.generate(**inputs)
        assert len(session.rows) == 1
        twins = twin.generate.compression
        assert twins.model is twin
        assert [row.entries for row in twins.rows] == [row.entries for row in session.rows]
        with pytest.raises(UnsupportedGeneration, match="one at a time"), compress(twin, "h2o"):
            pass
        assert torch.equal(wanted, model.generate(**inputs)), "and changed nothing here"
    assert "generate" not in vars(model)


def test_chats_work_in_pipelines_and_in_compare(shipped: Any) -> None:
    model, tokenizer = shipped
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    chat = [{"role": "user", "content": "line one: the value is 7. " * 8}]
    pipe = t.pipeline("text-generation", model=model, tokenizer=tokenizer)
    with compress(model, "snapkv", **SMALL) as session:
        answer = pipe(chat, max_new_tokens=4, do_sample=False)[0]["generated_text"][-1]
    frame = compare(model, tokenizer, chat, ["snapkv"], **SMALL, max_new_tokens=4)
    assert answer == {"role": "assistant", "content": frame.loc["snapkv", "text"]}
    assert frame.loc["snapkv", "ratio"] == session.ratio[0]


def test_a_compiled_model_gives_what_the_plain_one_gives() -> None:
    model = tiny_model("llama")
    inputs = batch(60)
    with compress(model, "snapkv", **SMALL):
        expected = model.generate(**inputs)
    compiled: Any = torch.compile(model, backend="eager")
    with compress(compiled, "snapkv", **SMALL) as session:
        assert torch.equal(compiled.generate(**inputs), expected)
    assert session.ratio[0] < 0.5
    frame = compare(compiled, Letters(), "x" * 50, "snapkv", **SMALL, max_new_tokens=3)
    assert frame.loc["snapkv", "ratio"] < 1
    assert "generate" not in vars(model)


def test_a_model_that_drops_keyword_arguments_is_refused() -> None:
    config = t.StableLmConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    model: Any = t.StableLmForCausalLM(config).eval()
    with pytest.raises(UnsupportedModel, match="does not pass keyword"), compress(model, "snapkv"):
        model.generate(**batch(20))
    model.generate(**batch(20))


def test_the_text_part_of_a_vision_language_model_is_compressed() -> None:
    vision = t.CLIPVisionConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=8,
        patch_size=4,
        projection_dim=16,
    )
    model: Any = t.LlavaForConditionalGeneration(
        t.LlavaConfig(
            vision_config=vision, text_config=tiny_model("llama").config, image_token_index=96
        )
    ).eval()
    ids = torch.tensor([[min(i, 95) for i in prompt_ids(55)] + [96] * 4 + [5]])
    image = torch.randn(1, 3, 8, 8)
    inputs = {"input_ids": ids, "pixel_values": image, "max_new_tokens": 5, "do_sample": False}
    plain = model.generate(**inputs)
    before = state_of(model)
    with compress(model, "exact"):
        assert torch.equal(model.generate(**inputs), plain)
    with compress(model, "snapkv", **SMALL) as session:
        model.generate(**inputs)
    assert session.rows[0].prompt_tokens == 60
    assert session.ratio[0] < 0.5
    assert state_of(model) == before
    marked = torch.zeros_like(ids)
    with compress(model, "exact"), pytest.raises(UnsupportedGeneration, match="both ways"):
        model(ids, pixel_values=image, token_type_ids=marked)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        *(("rate", value, "a number in (0, 1]") for value in ("x", True, None, 0, 1.5, [0.5])),
        ("rate", float("nan"), "a number in (0, 1]"),
        *(("window", value, "an integer >= 0") for value in (1.5, "4", True, None, -1)),
        *(("sink", value, "an integer >= 0") for value in (2.0, False)),
    ],
)
def test_a_budget_that_is_none_is_one_line(option: str, value: Any, allowed: str) -> None:
    line = f"budget.{option} is {value!r}; allowed: {allowed}"
    with pytest.raises(KVError) as error, compress(None, "snapkv", **{option: value}):
        pass
    assert str(error.value) == line
    if value != [0.5]:  # several rates
        with pytest.raises(KVError) as error:
            compare(None, None, "text", ["exact"], **{option: value})
        assert str(error.value) == line
    with pytest.raises(KVError, match=r"budget\.size is 65\.5; allowed: an integer"):
        Budget(size=65.5)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    budget = Budget(rate=np.float64(0.25), sink=np.int64(4), window=np.int32(4))  # type: ignore[arg-type]
    assert budget.capacity(80) == 8 + 18


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model: Any = t.LlamaForCausalLM(tiny_model("llama").config)
    with pytest.raises(UnsupportedModel) as error, compress(model, "snapkv"):
        model.generate(**batch(20))
    assert str(error.value) == (
        "LlamaForCausalLM lies on the device meta, which holds no weights; allowed: a model that was "
        "loaded"
    )
    with pytest.raises(UnsupportedModel, match="lies on the device meta"):
        compare(model, Letters(), "x" * 50, ["exact"])


def test_two_threads_do_not_generate_inside_one_compress() -> None:
    model = tiny_model("llama")
    inputs = batch(60)
    inside, over = threading.Event(), threading.Event()
    said: list[str] = []

    class Waits(t.StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            inside.set()
            over.wait(60)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def other() -> None:
        inside.wait(60)
        try:
            model.generate(**inputs)
        except UnsupportedGeneration as error:
            said.append(str(error))
        over.set()

    with compress(model, "snapkv", **SMALL) as session:
        alone = model.generate(**inputs)
        thread = threading.Thread(target=other)
        thread.start()
        beside = model.generate(**inputs, stopping_criteria=[Waits()])
        thread.join()
        assert torch.equal(beside, alone)
        assert len(session.rows) == 2
        later = threading.Thread(target=lambda: said.append(str(model.generate(**inputs).shape)))
        later.start()
        later.join()  # one after the other they may
    assert said[0].startswith("another thread generates inside the same compress; allowed: one ")
    assert said[1] == str(alone.shape)


def test_importing_kvbench_imports_no_torch() -> None:
    script = (
        "import sys, kvbench; assert 'compress' in dir(kvbench); "
        "assert not {'torch', 'pandas', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
