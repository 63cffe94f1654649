"""When a cache is compressed again while decoding, and to how many entries."""

from __future__ import annotations

import pytest

from kvbench.kv import Budget, KVError
from kvbench.methods import build_method
from kvbench.methods.base import Schedule

SMALL = Budget(rate=0.5, sink=3, window=5)


def test_a_share_is_of_all_tokens_and_at_least_one_more_than_sink_and_window() -> None:
    shares = Schedule(every=1, to=0.1, queries=1)
    assert shares.entries_to_keep(SMALL, 200, 50, 100) == 25
    assert shares.entries_to_keep(SMALL, 20, 5, 100) == 3 + 5 + 1
    assert shares.entries_to_keep(SMALL, 20, 5, 9) is None, "no more than that is held"


def test_a_number_is_what_is_left_every_so_many_steps() -> None:
    numbers = Schedule(every=4, to=30, queries=1)
    kept = [numbers.entries_to_keep(SMALL, 100, fed, 40) for fed in range(1, 9)]
    assert kept == [None, None, None, 30, None, None, None, 30]
    by_tokens = Schedule(every=4, to=30, queries=1, phase="tokens")
    kept = [by_tokens.entries_to_keep(SMALL, 98, fed, 40) for fed in range(1, 9)]
    assert kept == [None, None, 30, None, None, None, 30, None], "of the tokens before the step"


def test_the_prompt_is_not_repeated_while_decoding() -> None:
    with pytest.raises(KVError, match="with options that have the prompt repeated"):
        build_method("recompress", of="attention_matching", options={"queries": "repeat"})
