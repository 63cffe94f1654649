"""The Python interface: compare(), and what compress, compare and contexts refuse."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from support.encoders import tokenizer
from support.generation import CONTEXT, SMALL, Letters, state_of, tiny_model
from support.tiny import Broken, Everything, Greedy
from transformers import AutoModelForCausalLM

from kvbench import compare, compress, kept, load_model
from kvbench.engine.context import Context, token_ids
from kvbench.engine.model import local_path
from kvbench.errors import UserError
from kvbench.kv import Budget, CompressedKV
from kvbench.methods import build_method


def _compress(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: compress(model, *arguments, **options)


def _compare(*arguments: Any, **options: Any) -> Callable[[Any], Any]:
    return lambda model: compare(model, Letters(), *arguments, **options)


def _read(prompt: Any, after: str | None = None) -> Callable[[Any], Any]:
    return lambda model: compress(model, "exact", compress_after=after).__enter__().read(prompt)


def _ask(question: Any, **options: Any) -> Callable[[Any], Any]:
    context: Any = {"input_ids": torch.tensor([CONTEXT])}
    return lambda model: Context(model, build_method("exact"), Budget(), context).ask(
        question, **options
    )


CHAT = {"role": "user", "content": "hello"}
ALTERNATES = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    "{% if not loop.last or m.role == 'user' %}:{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (_compress("snapkvv"), r"unknown method 'snapkvv' \(did you mean 'snapkv'\?\)"),
    (_compress("SnapKVPress"), r"unknown method 'SnapKVPress' \(did you mean 'snapkv'\?\)"),
    (_compress("StreamingLLM"), r"\(did you mean 'streaming_llm'\?\)"),
    (_compress("KnormPress"), r"unknown method 'KnormPress'; allowed: "),
    (_compress("released"), r"unknown method 'released'"),
    *(
        (call("snapkv", rate=1.5), r"budget.rate is 1.5; allowed: less than or equal to 1$")
        for call in (_compress, partial(_compare, "x"))
    ),
    (_compress("snapkv", window=-1), r"budget.window is -1; allowed: greater than or equal to 0$"),
    (_compress("snapkv", kernel=3), "has no option 'kernel'"),
    (_compress("snapkv", rat=0.5), "has no option 'rat'.*did you mean 'rate'"),
    (_compress("snapkv", rate=0.25, size=100), "rate is 0.25 and size is 100; allowed: one of"),
    (
        _compress("snapkv", rate=0.25, compression_ratio=0.75),
        r"rate is 0.25 and compression_ratio is 0.75; allowed: one of rate, t",
    ),
    (
        _compare("x", ["exact"], answers=["a"]),
        r"no argument 'answers' \(did you mean 'reference'\?",
    ),
    (_compare("x", ["exact"], press=1), r"no argument 'press' \(did you mean 'methods'\?\)"),
    (
        _compare("x", ["exact"], compression_ratio=0.5),
        r"did you mean 'total_rate', which is 1 - compression_ratio\?",
    ),
    (
        lambda model: kept(model, Letters(), "x", "snapkv", compression_ratio=0.5),
        r"no option 'compression_ratio' \(did you mean 'total_rate'",
    ),
    (_compare("x", ["exact"], reference=7), "reference is 7; allowed: a text, or texts"),
    (_compare("x", ["exact"], reference=[7]), r"reference is \[7\]; allowed: a text, or texts"),
    (_compare("x", ["exact"], score="f1"), "score is 'f1'; allowed: a function of text and ref"),
    (
        lambda _: load_model("recall_mini", torch_dtype="float16"),
        r"load_model has no option 'torch_dtype' \(did you mean 'dtype'\?\); allowed: name, ",
    ),
    (_compress(Everything(), kernel=3), "made already"),
    (_compress(7), "a name or a kvbench Method"),
    (_compress("snapkv", compression_ratio=1), "compression_ratio is 1; allowed: less than 1"),
    (
        _compress("snapkv", compression_ratio=0.5, total_rate=0.5),
        "total_rate is 0.5 and compression",
    ),
    (_compress("snapkv", compress_after=0), "compress_after is 0; allowed: 'prompt'"),
    (_compare(["a", 1], ["exact"]), r"prompt is a \w+; allowed: one text, or the messages"),
    (
        _compare({"role": "user", "content": "x"}, ["exact"]),
        r"prompt is one message of a chat; allowed: a list of messages, \[\{'role': 'user', ",
    ),
    (
        lambda model: compare(model, tokenizer(), [CHAT], ["exact"]),
        r"tokenizer '.*recall_mini' has no chat template; allowed: a text, or tokenizer.chat_templ",
    ),
    (
        lambda model: compare(model, tokenizer(ALTERNATES), [CHAT, CHAT], ["exact"]),
        r"tokenizer '.*' refuses the messages: TemplateError: roles must alternate; allowed: mess",
    ),
    (
        lambda model: compare(model, tokenizer(ALTERNATES), [{"content": "x"}], ["exact"]),
        r"message \{'content': 'x'\} of the prompt has no 'role'; allowed: \{'role': 'user', 'con",
    ),
    (_compare("x", []), r"methods is \[\]; allowed: one or more"),
    (_compare("x", {}), r"methods is \[\]; allowed: one or more"),
    (_compare("x", ["exact", "exact"]), r"methods is \['exact', 'exact'\]; allowed: "),
    (_compare("x", ["exat"]), "did you mean 'exact'"),
    (_compare("", ["exact"]), "prompt has no token ids"),
    (_compare(["x", "y"], ["exact"], reference=["a"]), "2 prompts; allowed: one of each"),
    (_compare({"a": "x"}, ["exact"], reference={"A": "y"}), "reference names 'A'; allowed: a, the"),
    (_read([]), "the context has no token ids"),
    (_read(None), "the context has no token ids"),
    (_read({"role": "user", "content": "x"}), "the context has no token ids"),
    (_read("text"), "there is no tokenizer"),
    (
        _read([3, 9999, 4]),
        r"the prompt has token id 9999; allowed: 0..\d+, the vocabulary of Llama",
    ),
    (_ask([-1]), r"the question has token id -1; allowed: 0..\d+, the vocabulary of Llama"),
    (
        lambda model: compare(model, tokenizer(), "the river was wide", ["exact"]),
        r"the prompt has token id \d+; allowed: 0..96, the vocabulary of Llama",
    ),
    (_read({"input_ids": [[1, 2], [3, 4]]}), "has 2 texts"),
    (_read(CONTEXT, "prompt"), "a context is compressed before its questions"),
    (_ask([]), "the question has no token ids"),
    (_ask([CHAT]), "the question is the messages of a chat; allowed: its text"),
    (_ask([1], max_new_tokens=0), "max_new_tokens is 0"),
    (_ask([1], stop=["x"]), "there is no tokenizer"),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_wrong_arguments_are_refused_in_one_line(call: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        call(tiny_model("llama"))
    assert "\n" not in str(error.value)


def test_compare_gives_what_compress_gives_from_one_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recall_mini").mkdir()  # as a folder of results has one
    shipped, tokenizer = load_model("recall_mini")  # by the command line's name
    assert (shipped.config.num_hidden_layers, tokenizer.eos_token_id is None) == (4, False)
    model = tiny_model("llama")
    before = state_of(model)
    prompt = "the quick brown fox jumps over the lazy dog " * 2
    names = ["exact", "snapkv", "uniform", "h2o"]
    papers: dict[str, Any] = {"compress_after": "prompt"}  # as compress around generate does
    frame: Any = compare(model, Letters(), prompt, names, **SMALL, max_new_tokens=10, **papers)
    assert state_of(model) == before
    assert list(frame.columns) == ["text", "score", "bytes", "ratio", "seconds"]
    assert list(frame.index) == names
    ids = torch.tensor([Letters()(prompt)["input_ids"]])
    for name in names:
        with compress(model, name, **SMALL) as session:
            new = model.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
        assert frame.loc[name, "text"] == Letters().decode(new.tolist()), name
        assert frame.loc[name, "bytes"] == session.cache_bytes[0]
        assert frame.loc[name, "ratio"] == session.ratio[0]
    text = frame.loc["exact", "text"]
    with compress(model, "snapkv", **SMALL):  # inside it, too
        again: Any = compare(model, Letters(), prompt, "exact", max_new_tokens=10, reference=text)
    assert again.loc["exact"][["score", "ratio"]].tolist() == [1.0, 1.0]


FOUR_TOKENS: dict[str, Any] = {**SMALL, "max_new_tokens": 4}


def test_compare_takes_several_rates_and_prompts() -> None:
    model, names = tiny_model("llama"), ["exact", "snapkv"]
    prompts = {"fox": "the quick brown fox jumps over the lazy dog " * 2, "hen": "a hen " * 20}
    reference = {"fox": "a", "hen": "b"}
    rates: Any = np.array([0.5, 0.25])
    many: Any = compare(
        model,
        Letters(),
        prompts,
        names,
        rate=rates,
        reference=reference,
        **FOUR_TOKENS,
    )
    assert many.index.names == ["prompt", "rate", "method"]
    assert len(many) == 8
    many = many.sort_index()
    for name, prompt in prompts.items():
        alone: Any = compare(model, Letters(), prompt, names, rate=0.5, **FOUR_TOKENS)
        for column in ("text", "bytes", "ratio"):
            assert many.loc[name, 0.5][column].tolist() == alone[column].tolist()


def test_compare_takes_a_chat_and_labels_and_shows_failures() -> None:
    chat = [{"role": "user", "content": "hello " * 10}]
    methods: dict[str, Any] = {"mine": Everything(), "over": Greedy(), "name": "snapkv"}
    model = tiny_model("llama")
    frame: Any = compare(model, Letters(), chat, methods, **FOUR_TOKENS, stop=["\0"])
    assert frame.loc["mine", "ratio"] == 1.0
    assert "holds 60 entries" in frame.loc["over", "error"]
    assert frame["text"].isna().tolist() == [False, True, False]


def test_a_chat_opens_the_answer_and_an_answer_that_was_begun_goes_on() -> None:
    made = tokenizer(ALTERNATES)
    for messages, text in (
        ([CHAT], "<user>hello:<assistant>"),
        ([CHAT, {"role": "assistant", "content": "line 7"}], "<user>hello:<assistant>line 7"),
    ):
        assert made.decode(token_ids(messages, made, "prompt")) == text


class Bang(t.StoppingCriteria):
    """Ends a generation as Ctrl-C does."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt


@dataclass(frozen=True, kw_only=True)
class Interrupted(Everything):
    def compress(self, *_: Any) -> CompressedKV:
        raise KeyboardInterrupt


def test_load_models_model_generates_as_transformers_own_before_and_after_everything() -> None:
    model, tokenizer = load_model("recall_mini", dtype=torch.float32)
    own = AutoModelForCausalLM.from_pretrained(local_path("asset:recall_mini")).eval()
    prompt = "line calm-heron: REGISTER_CONTENT is <12903>\n" * 9
    inputs = tokenizer(prompt, return_tensors="pt")
    expected = own.generate(**inputs, max_new_tokens=9, do_sample=False)
    before = state_of(model)

    def check(what: str) -> None:
        assert state_of(model) == before, what
        found = model.generate(**inputs, max_new_tokens=9, do_sample=False)
        assert torch.equal(found, expected), what

    check("at first")
    compare(model, tokenizer, prompt, ["exact", "snapkv"], max_new_tokens=2)
    check("after compare")
    kept(model, tokenizer, prompt, "snapkv")
    check("after kept")
    with compress(model, "snapkv") as session:
        model.generate(**inputs, max_new_tokens=2)
        compare(model, tokenizer, prompt, ["exact"], max_new_tokens=2)
        context = session.read(prompt, tokenizer)
        context.ask("?", max_new_tokens=2)
        assert session.ratio[0] < 1
    check("after compress, and compare and read inside it")
    context.ask("?", max_new_tokens=2)
    check("after a question asked outside")
    with pytest.raises(KeyboardInterrupt), compress(model, "snapkv"):
        model.generate(**inputs, stopping_criteria=[Bang()])
    check("after Ctrl-C")
    for interrupted in (
        lambda: compare(model, tokenizer, prompt, {"m": Interrupted()}),
        lambda: Context(model, Interrupted(), Budget(), prompt, tokenizer),
    ):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        check("after Ctrl-C while a method compresses")
    failed = compare(model, tokenizer, prompt, {"broken": Broken(), "exact": "exact"}, **SMALL)
    assert "out of memory" in failed.loc["broken", "error"]
    check("after a method that failed")
    with pytest.raises(UserError):
        compare(model, tokenizer, "", ["exact"])
    check("after a refusal")


@pytest.mark.parametrize(
    ("budget", "whole"),
    [
        ({}, 49),
        ({"size": 60, **SMALL}, 49),
        ({"rate": 1.0}, None),
        ({"size": 30, **SMALL}, None),
        (SMALL, None),
    ],
)
def test_a_prompt_that_nothing_compresses_is_said(
    budget: Any, whole: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = {"short": "a fox and " * 5, "long": "a fox and " * 20}
    compare(
        tiny_model("llama"), Letters(), prompts, ["exact", "snapkv"], max_new_tokens=2, **budget
    )
    said = [message for message in caplog.messages if "nothing of it is compressed" in message]
    assert len(said) == (whole is not None)
    if whole is not None:
        assert said[0].startswith(
            f"prompt 'short' has {whole} tokens to compress, no more than the "
        )
    caplog.clear()
    compare(tiny_model("llama"), Letters(), prompts, ["exact"], max_new_tokens=2)
    assert not caplog.messages, "no method that a budget changes"
