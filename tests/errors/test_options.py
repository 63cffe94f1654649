"""Options of dataclasses, checked by their type hints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Lt

from kvbench.errors.options import (
    Count,
    Distinct,
    Odd,
    Several,
    Share,
    Text,
    fitted,
    refusal,
)


@dataclass(frozen=True)
class Inner:
    size: Count = 1


HINTS: list[tuple[Any, list[Any], list[Any], str]] = [  # hint, allowed values, refused ones, words
    (Count, [1, 10**30], [0, True, "4", 1.0, None, [1, 2]], "an integer >= 1"),
    (Odd, [1, 5], [4, -1], "an odd integer >= 1"),
    (Share, [0.5, 1], [0, 1.5, True, "x", float("nan")], "a number in (0, 1]"),
    (Annotated[float, Gt(0), Lt(1)], [0.5], [0, 1], "a number in (0, 1)"),
    (float, [3, -1.5], [float("inf"), 10**400, False], "a finite number"),
    (bool, [True, False], [1, "true", None], "true | false"),
    (str, ["", "ä"], ["\ud800", 3], "text"),
    (Text, ["a"], [" ", 3], "text that is not empty"),
    (Literal["a", "b"], ["a"], ["c", 1], "a | b"),
    (Literal["a"] | None, ["a", None], ["b"], "a, or null"),
    (Sequence[Count], [[], [1, 1], (2,), 3], [[0], "x"], "a list of integers >= 1"),
    (Several[Count], [[1, 1]], [[]], "a list of integers >= 1"),
    (Distinct[Count], [[1, 2]], [[1, 1], []], "a list of integers >= 1, each once"),
    (Annotated[int, Ge(2)] | Several[int], [2, [1]], [1.5, []], "an integer >= 2 or a list"),
    (Mapping[str, float], [{}, {"a": 1}], [{"a": "b"}, []], "a mapping from texts to finite"),
    (Inner | None, [Inner(), None], [{"size": 1}, "x"], "an instance of Inner, or null"),
    (Inner, [Inner()], [None], "an instance of Inner"),
    (Any, [object(), None], [], "anything"),
]


@pytest.mark.parametrize(
    ("hint", "allowed", "refused", "words"), HINTS, ids=[words for *_, words in HINTS]
)
def test_what_a_hint_allows(hint: Any, allowed: list[Any], refused: list[Any], words: str) -> None:
    for value in allowed:
        fitted(hint, value)
    for value in refused:
        with pytest.raises(ValueError, match=r"."):
            fitted(hint, value)
    assert refusal("key", None, hint).startswith(f"key is None; allowed: {words}")
