"""Prompts: a tokenizer's own failures are one line, and which exceptions go on."""

from __future__ import annotations

import pytest
from support.encoders import Letters

from kvbench.prompts import PromptError, tokenizing
from kvbench.tasks.base import TaskError


def test_a_tokenizers_failure_is_one_line() -> None:
    with pytest.raises(PromptError) as caught, tokenizing(Letters()):
        raise ValueError("first\nsecond")
    message = "tokenizer 'Letters' cannot encode a text: ValueError: first; allowed: one that can"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "exception",
    [KeyboardInterrupt(), SystemExit(3), MemoryError(), TimeoutError(), TaskError("x")],
    ids=lambda exception: type(exception).__name__,
)
def test_what_ends_the_process_or_is_one_line_already_goes_on(exception: BaseException) -> None:
    with pytest.raises(type(exception)) as caught, tokenizing(Letters()):
        raise exception
    assert caught.value is exception
