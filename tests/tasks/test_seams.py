"""Prompts of tokenizers that put a blank before every text: the tokens are those of the whole prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.encoders import LLAMA2, chat, sentencepiece, shipped
from support.paths import write_lines

from kvbench.engine.context import token_ids
from kvbench.prompts import PromptEncoder
from kvbench.run.encoding import encode_examples
from kvbench.tasks.base import Example
from kvbench.tasks.instructions import Instructions, encode_conversation
from kvbench.tasks.jsonl import Jsonl
from kvbench.tasks.longeval_lines import LongEvalLines
from kvbench.tasks.needle import Needle
from kvbench.tasks.retrieval import KeyValue, Passkey
from kvbench.tasks.ruler import Ruler
from kvbench.tasks.text import RunningText

ENCODERS = {
    f"{'legacy' if legacy else 'first'}, {'chat' if template else 'plain'}": sentencepiece(
        legacy, template
    )
    for legacy in (True, False)
    for template in (None, LLAMA2)
}
ASKED: Any = {"template": "{context}\nTell me. {question}", "question": "What is the number{name}?"}
PASSKEY: Any = {
    "needle": "The number{name} is {key}.",
    "answer_prefix": "The number",
    "noise": "The fox.",
}
NEEDLE: Any = {
    "needle": "The secret number is 4711.",
    "question": "What is the number?",
    "answer": "4711",
}
TASKS: dict[str, Any] = {
    "lines": lambda _: LongEvalLines(num_lines=[3], num_examples=2),
    "pairs": lambda _: KeyValue(
        template="The pairs: {pairs} What is {key}?", num_pairs=[3], num_examples=2, queries=2
    ),
    "passkey": lambda _: Passkey(**ASKED, **PASSKEY, lengths=[200], num_examples=1, queries=3),
    "needle": lambda _: Needle(**NEEDLE, lengths=[200], num_examples=1),
    "needle in a frame": lambda _: Needle(
        **NEEDLE,
        lengths=[200],
        num_examples=1,
        template="Tell me: {haystack}\n\n{question} Answer:",
    ),
    "ruler": lambda _: Ruler(tasks=["niah_single_1", "vt"], lengths=[1500], num_examples=1),
    "jsonl": lambda folder: Jsonl(files=[str(folder / "my.jsonl")]),
    "jsonl, blank": lambda folder: Jsonl(
        files=[str(folder / "my.jsonl")], template="{{ context }} {{ question }}"
    ),
    "instructions": lambda _: Instructions(num_examples=2),
}


def whole(encoder: PromptEncoder, text: str) -> list[int]:
    tokenizer: Any = encoder.tokenizer
    return list(tokenizer(text, add_special_tokens=not encoder.before)["input_ids"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = [
        {"context": "The quick fox.", "question": question, "answers": "fox"}
        for question in ("What is it?", "the river , or", "( a )")
    ]
    write_lines(tmp_path / "my.jsonl", rows)
    return tmp_path


@pytest.mark.parametrize("encoder", ENCODERS.values(), ids=ENCODERS)
@pytest.mark.parametrize("task", TASKS)
def test_a_prompt_has_the_tokens_of_its_whole_text(
    task: str, encoder: PromptEncoder, folder: Path
) -> None:
    """Decoded and encoded again at once, a prompt has the same tokens: no blank at any seam."""
    encoded = encode_examples(TASKS[task](folder).examples(encoder), encoder)
    tokenizer: Any = encoder.tokenizer
    for one in encoded:
        ids = [*one.context_ids, *one.question_ids]
        text = tokenizer.decode(ids).replace("<s> ", "<s>")  # a legacy tokenizer's own blank
        text = text.removeprefix("" if encoder.before else "<s>")
        assert ids == whole(encoder, text), text
        told = encoder.before + one.example.context + one.example.question
        without_lines = text.replace(encoder.after, "", 1).replace("\n", "")
        assert without_lines == told.replace("\n", ""), "no blank that is not in the text"
    by_context: dict[str, Any] = {}
    for one in encoded:
        assert by_context.setdefault(one.context, one.context_ids) == one.context_ids


def test_a_text_that_goes_on_has_no_blank_of_its_own() -> None:
    """A question to a cache, the next message of a conversation, and how a text goes on."""
    encoder, chats = ENCODERS["legacy, plain"], ENCODERS["legacy, chat"]
    tokenizer: Any = encoder.tokenizer
    question = token_ids("What is it?", tokenizer, "the question", special=False)
    assert whole(encoder, "The fox.What is it?") == [*whole(encoder, "The fox."), *question]
    between = chats.between_turns()
    assert tokenizer.convert_ids_to_tokens(between[:2]) == ["\u2581", "</s>"]
    system = encode_conversation(chats, "The fox.", "What is it?")
    text = "<s>[INST] The fox.\n\nWhat is it? [/INST]"
    assert [*system.system_ids, *system.request_ids] == whole(chats, text)
    task = RunningText(tokens=50, max_new_tokens=5, num_examples=1)
    (example,) = task.examples(encoder)
    assert (
        encoder.encode_after(".", example.answers[0])
        == whole(encoder, encoder.decode(example.context_ids or ()) + example.answers[0])[50:]
    )


@pytest.mark.parametrize("encoder", [shipped(), chat()])
def test_other_tokenizers_encode_the_parts_as_they_did(encoder: PromptEncoder) -> None:
    example = Example(
        id="e", context="a b\n", question="\nc", answers=(), max_new_tokens=1, dataset="d"
    )
    (encoded,) = encode_examples([example], encoder)
    assert encoded.context_ids == (*encoder.prefix_ids, *encoder.encode_text("a b\n"))
    assert encoded.question_ids == (*encoder.encode_text("\nc"), *encoder.suffix_ids)


def test_a_tokenizer_without_places_is_cut_by_the_encoding_of_the_beginning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so once, and the prompt's tokens are still those of the whole text."""
    fast = ENCODERS["legacy, plain"]
    slow: Any = Slow(fast.tokenizer)
    encoder = replace(fast, tokenizer=slow)
    parts = ["The quick ", "fox.\n", "What?"]
    assert encoder.encode_parts(parts) == fast.encode_parts(parts)
    assert caplog.text.count("does not tell which characters") == 1


class Slow:
    """A tokenizer that returns nothing but ids."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode, self.decode = tokenizer.encode, tokenizer.decode
        self.whole = tokenizer

    def __call__(self, text: str, **options: Any) -> Any:
        return {"input_ids": self.whole(text, **options)["input_ids"]}
