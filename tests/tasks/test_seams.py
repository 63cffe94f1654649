"""Prompts of tokenizers that put a blank before every text: the tokens are those of the whole prompt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.encoders import (
    GPT2_WORDS,
    LLAMA2,
    LLAMA3_WORDS,
    byte_level,
    sentencepiece,
    tokenizer,
)
from support.paths import write_lines

from kvbench.engine.context import token_ids
from kvbench.engine.model import ModelSpec, model_encoder
from kvbench.kv import KVError
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


TURNS = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ALL_ENCODERS = ENCODERS | {
    f"{name}, {'chat' if template else 'plain'}": byte_level(words, template)
    for name, words in (("gpt2", GPT2_WORDS), ("llama3", LLAMA3_WORDS))
    for template in (None, TURNS)
}
SEAMS = [  # a context, and questions about it
    ("The quick fox.\n\n", ["What is it?", "( a )"]),
    ("The quick fox.\n", ["\nWhat is it?", "What?"]),
    ("The quick ", ["fox", "river"]),
    ("The quick bro", ["wn fox", "ther"]),
    ("The number is 12", ["34?", " is it?"]),
    ("The quick fox.", ["What is it?"]),
]


@pytest.mark.parametrize("encoder", ALL_ENCODERS.values(), ids=ALL_ENCODERS)
@pytest.mark.parametrize(("context", "questions"), SEAMS)
def test_the_context_is_the_longest_run_of_tokens_that_its_questions_share(
    context: str, questions: list[str], encoder: PromptEncoder
) -> None:
    """Of one's own task and of one's own rows; a token across the seam is the question's."""
    how: Any = {"answers": (), "max_new_tokens": 1, "dataset": "d", "context_id": "c"}
    examples = [
        Example(id=question, context=context, question=question, **how) for question in questions
    ]
    encoded = encode_examples(examples, encoder)
    shared = encoded[0].context_ids
    wholes = []
    for one, question in zip(encoded, questions, strict=True):
        assert one.context_ids == shared
        wholes.append([*one.context_ids, *one.question_ids])
        begin = [] if encoder.before else list(encoder.prefix_ids)
        text = encoder.before + context + question + encoder.after
        assert wholes[-1] == [*begin, *encoder.encode_text(text)]
    tokenizer: Any = encoder.tokenizer
    said = tokenizer.decode(shared).replace("<s> ", "<s>")
    head = (
        ("" if encoder.before else tokenizer.decode(encoder.prefix_ids)) + encoder.before + context
    )
    assert head.startswith(said.rstrip("\ufffd")), "nothing of a question"
    goes_on = {ids[len(shared)] for ids in wholes}
    longer = [tokenizer.decode([*shared, token]).replace("<s> ", "<s>") for token in goes_on]
    assert len(goes_on) > 1 or not head.startswith(longer[0]), "and all that they share"


def test_own_rows_of_a_tokenizer_like_gpt2s_have_the_tokens_of_their_text(folder: Path) -> None:
    """Its "\\n\\n" is one token at the end of a text and two before a word."""
    encoder = ALL_ENCODERS["gpt2, plain"]
    task = Jsonl(files=[str(folder / "my.jsonl")])
    for example in task.examples(encoder):
        ids = [*(example.context_ids or ()), *(example.question_ids or ())]
        text = f"The quick fox.\n\n{example.question}"
        in_parts = encoder.encode_text("The quick fox.\n\n") + encoder.encode_text(example.question)
        assert ids == encoder.encode_text(text)
        assert len(ids) == len(in_parts) + 1


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


@pytest.mark.parametrize(
    ("changes", "unknown"),
    [
        ({"context": "the river was wide"}, r"\d{3}"),  # the tokenizer has more tokens
        ({"context_ids": (3, 97), "question_ids": (5,)}, "97"),
        ({"context_ids": (3, 96), "question_ids": (-1,)}, "-1"),
        ({"context_ids": (3, 96), "question_ids": [5]}, None),  # a list, as of a tokenizer
        (
            {"context_ids": (), "question_ids": (5,), "history": "golden", "golden": "river"},
            r"\d{3}",
        ),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused_before_a_model_reads_them(
    changes: dict[str, Any], unknown: str | None
) -> None:
    config = {"model_type": "llama", "vocab_size": 97}
    encoder = model_encoder(tokenizer(), ModelSpec(name="m", path="none", architecture=config))
    one = Example(id="x1", context="", question="", answers=("a",), max_new_tokens=2, dataset="d")
    examples = [replace(one, context_id="c", id=name, **changes) for name in ("x1", "x2")]
    if unknown is None:
        assert len(encode_examples(examples, encoder)) == 2
        return
    allowed = r"allowed: 0\.\.96, the vocabulary of the llama model$"
    with pytest.raises(KVError, match=rf"^example 'x[12]' has token id {unknown}; {allowed}"):
        encode_examples(examples, encoder)
