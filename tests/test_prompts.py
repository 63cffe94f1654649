"""Prompts: a tokenizer's own failures are one line, and which exceptions go on."""

from __future__ import annotations

import pytest
from support.encoders import Letters

from kvbench.prompts import PromptError, tokenizing
from kvbench.tasks.base import TaskError


class PanicException(BaseException):
    """What Rust code of a tokenizer raises; no Exception."""


def test_a_tokenizers_failure_is_one_line_and_a_wish_to_stop_goes_on() -> None:
    said = "tokenizer 'Letters' cannot encode a text: {}; allowed: one that can"
    for failure, line in (
        (PanicException("called `unwrap()`\non a None"), "PanicException: called `unwrap()`"),
        (ValueError(""), "ValueError: no message"),
    ):
        with pytest.raises(PromptError) as caught, tokenizing(Letters()):
            raise failure
        assert str(caught.value) == said.format(line)
    for wish in (KeyboardInterrupt(), SystemExit(3), MemoryError(), TimeoutError(), TaskError("x")):
        with pytest.raises(type(wish)) as stopped, tokenizing(Letters()):
            raise wish
        assert stopped.value is wish
