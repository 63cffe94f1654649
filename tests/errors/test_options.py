"""Options of dataclasses, checked by their type hints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Gt, Lt

from kvbench.errors import UserError
from kvbench.errors.options import Count, Distinct, Odd, Several, Share, Text, allowed, checked


@dataclass(frozen=True)
class Inner:
    size: Count = 1


HINTS: list[tuple[Any, list[Any], list[Any], str]] = [  # hint, allowed, refused, of the last: words
    (Count, [1, 10**30], [True, "4", 1.0, None, [1, 2], 0], "greater than or equal to 1"),
    (Odd, [1, 5], [-1, 4], "an odd integer"),
    (Share, [0.5, 1], [True, "x", float("nan"), 0, 1.5], "less than or equal to 1"),
    (Annotated[float, Gt(0), Lt(1)], [0.5], [1, 0], "greater than 0"),
    (float, [3, -1.5], [10**400, False, float("inf")], "a finite number"),
    (bool, [True, False], ["true", None, 1], "a valid boolean"),
    (str, ["", "ä"], [None, 3], "a valid string"),
    (Text, ["a"], [3, " "], "text that is not empty"),
    (Literal["a", "b"], ["a"], [1, "c"], "'a' or 'b'"),
    (Literal["a"] | None, ["a", None], ["b"], "'a'"),
    (Literal["auto"] | Count, ["auto", 2], ["b", 0], "'auto' or greater than or equal to 1"),
    (
        Sequence[Count],
        [[], [1, 1], (2,), 3, None],
        ["x", [-1, 0, "x"]],
        "greater than or equal to 1",
    ),
    (Several[Count], [[1, 1]], [None, []], "Value should have at least 1 item after validation"),
    (Distinct[Count], [[1, 2], 1], [[], [1, 1]], "each value once"),
    (Annotated[int, Ge(2)] | Several[int], [2, [1]], [[], 1.5], "a valid integer"),
    (Share | Several[Share], [1, [1]], [[2], "x", [1, 0.5, 2], 2], "less than or equal to 1"),
    (Mapping[str, float], [{}, {"a": 1}], [[], {"a": "b"}], "a valid number"),
    (Mapping[str, float] | None, [None], ["x", 4], "{option: value}"),
    (Inner | None, [Inner(), None], [{"size": 1}, "x"], "an instance of Inner"),
    (Inner, [Inner()], [None], "an instance of Inner"),
    (Any, [object(), None], [], ""),
]


@pytest.mark.parametrize(
    ("hint", "right", "wrong", "words"), HINTS, ids=[words for *_, words in HINTS]
)
def test_what_a_hint_allows(hint: Any, right: list[Any], wrong: list[Any], words: str) -> None:
    assert not [value for value in right if allowed(hint, value)]
    assert all(allowed(hint, value) for value in wrong)
    for value in wrong[-1:]:
        with pytest.raises(UserError, match=re.escape(f"key is {value!r}; allowed: {words}")):
            checked("key", value, hint)
