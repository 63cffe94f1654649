"""When a generation is over, and what of its first token is left out."""

from __future__ import annotations

import pytest
import torch

from kvbench.engine.answer import Answer, Stopping
from kvbench.prompts import Thought


def text_of(tokens: list[int]) -> str:
    return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("tokens", "over"),
    [
        ([], False),
        ([99] * 4, False),
        ([99] * 5, True),
        ([99, 7], True),
        ([7, 99], False),
        ([99, 97, 98], True),
        ([97, 98, 99], True),
        ([98, 97], False),
    ],
)
def test_a_generation_is_over_at_its_length_an_end_token_or_a_stop_string(
    tokens: list[int], over: bool
) -> None:
    assert Stopping(5, frozenset({7}), ("ab",), text_of).reached(tokens) == over


@pytest.mark.parametrize(
    ("start", "text", "over"),
    [
        ("<t>", "<t>a x\nb</t>\n\n12x34", "<t>a x\nb</t>\n\n12x"),
        ("<t>", " <t>a x</t>\n12\n34", " <t>a x</t>\n12\n"),
        ("<t>", "12x34", "12x"),
        ("<t>", "<t>a x b", None),
        ("<t>", "<t>a x\x07b", "<t>a x\x07"),
        ("", "a x\nb</t>12;34", "a x\nb</t>12;"),
        ("", "a x\nb 12;", None),
    ],
)
def test_within_a_thought_only_the_models_own_end_ends_it(
    start: str, text: str, over: str | None
) -> None:
    """x settles the score, a line end and the stop string ; end an answer, \x07 ends everything."""
    stopping = Stopping(
        100,
        frozenset({7, 10}) if start else frozenset({7}),
        (";",) if start else (";", "\n"),
        text_of,
        is_final=lambda answer: "x" in answer,
        thought=Thought("</t>", start),
        thought_end_ids=frozenset({7}),
    )
    answer = Answer(stopping)
    taken = ""
    for letter in text:
        answer.take(ord(letter))
        taken += letter
        if answer.ended:
            break
    assert (taken if answer.ended else None) == over


@pytest.mark.parametrize(
    ("start", "text", "parts"),
    [
        ("<t>", "<t>why</t>\n\n12", ("<t>why", "12")),
        ("<t>", "12</t>", ("", "12</t>")),
        ("<t>", "<t>is it 12?", ("<t>is it 12?", "")),
        ("", "is it 12?", ("is it 12?", "")),
        ("", "is it</t> 12", ("is it", "12")),
    ],
)
def test_an_answer_is_what_follows_the_thought(
    start: str, text: str, parts: tuple[str, str]
) -> None:
    assert Thought("</t>", start).split(text) == parts


def test_a_stop_string_is_looked_for_in_the_last_tokens() -> None:
    seen: list[int] = []

    def decode(tokens: list[int]) -> str:
        seen.append(len(tokens))
        return text_of(tokens)

    stopping = Stopping(10**6, strings=("a", "xyz"), decode=decode)
    assert not stopping.reached([99] * 1000)
    assert seen == [3 + 8], "the longest string's characters, and a margin"


def test_what_is_final_is_asked_at_every_token_and_later_at_every_128th_part() -> None:
    asked: list[int] = []

    def is_final(text: str) -> bool:
        asked.append(len(text))
        return len(text) == 600

    stopping = Stopping(10**6, decode=text_of, is_final=is_final)
    ended = [n for n in range(1, 620) if stopping.reached([99] * n)]
    assert ended == [600]
    due = [*range(1, 257), *range(258, 384, 2), *range(384, 512, 3), *range(512, 620, 4)]
    assert asked == due


def test_an_answer_that_may_not_be_empty_does_not_begin_with_an_end() -> None:
    logits = torch.zeros(2, 5)
    stopping = Stopping(5, frozenset({3, 9, -1}), may_be_empty=False)
    assert stopping.mask_first(logits).isinf().nonzero().tolist() == [[0, 3], [1, 3]]
    assert torch.equal(Stopping(5, frozenset({3})).mask_first(logits), logits)
