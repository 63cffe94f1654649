"""The order of a field's values in tables and figures."""

from __future__ import annotations

import random

from kvbench.report.runs import as_text, natural_order


def test_numbers_come_first_then_text_by_the_number_it_begins_with_then_other_text() -> None:
    expected = [-1, 2.5, 10, "0.5x", "9 lines", "10 lines", "200", "alpha", "lines 9"]
    for seed in range(5):
        mixed = random.Random(seed).sample(expected, len(expected))
        assert sorted(mixed, key=natural_order) == expected
    assert natural_order("9 lines", "b") > natural_order("10 lines", "a"), "what is sorted by first"


def test_a_whole_number_is_written_without_a_fraction() -> None:
    found = [as_text(value) for value in (200.0, 0.25, 3, "x")]
    assert found == ["200", "0.25", "3", "x"]
