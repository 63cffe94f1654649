"""evict_entries against the rule, entry by entry."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from support.interpreted import DEVICE
from support.kernels import needs_triton

from kvbench.kernels.decode import Eviction, RowPointers, evict_entries

pytestmark = pytest.mark.cuda

DIM, VALUE_DIM = 16, 8
LIMITS, LENGTHS, RESERVED = [64, 7, 300, 9], [64, 3, 300, 9], [65, 12, 303, 10]
"""Four rows: full, not full, of several pieces of the kernel, and one that has ended."""
ENDED = 3


def by_hand(rule: Eviction, entries: list[Any], received: Iterable[float], limit: int) -> list[Any]:
    """A head's entries after the step; before, [(position, score, key, value, weight)], the new last."""
    entries = [
        (position, score + float(mass), *rest)
        for (position, score, *rest), mass in zip(entries, received, strict=True)
    ]
    if len(entries) <= limit:
        return entries
    newest = entries[-1][0]
    free = [i for i, (p, *_) in enumerate(entries) if rule.sink <= p <= newest - rule.recent]
    part, sign = {"oldest": (0, 1), "lightest": (1, 1), "heaviest": (1, -1)}[rule.leaves]
    leaving = min(free or [0], key=lambda i: sign * entries[i][part])
    last = entries.pop()
    if leaving < len(entries):
        entries[leaving] = last
    return entries


def rows(weighs: bool, heads: int, seed: int = 0) -> Any:
    """Buffers as they are after the new token was appended: its score and position are not yet there."""
    random = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    keys = [draw(heads, n, DIM).to(DEVICE) for n in RESERVED]
    values = [draw(heads, n, VALUE_DIM).to(DEVICE) for n in RESERVED]
    weights = [None, *(draw(heads, n).to(DEVICE) for n in RESERVED[1:])]
    positions = [
        torch.stack([torch.randperm(2 * n, generator=random)[:n] for _ in range(heads)]).to(DEVICE)
        for n in RESERVED
    ]
    scores = [
        # Few values, so that several entries are the lightest.
        torch.randint(-3, 2, (heads, n), generator=random).float().to(DEVICE) if weighs else None
        for n in RESERVED
    ]
    if weighs:
        scores[0][:, 7:9] = torch.tensor([torch.inf, -torch.inf])
    for weight, length in zip(weights, LENGTHS, strict=True):
        if weight is not None:
            weight[:, length] = 0.0
    return keys, values, weights, positions, scores


@pytest.mark.parametrize(("heads", "piece"), [(1, 128), (2, 32)])
@needs_triton
@pytest.mark.parametrize(
    "rule",
    [
        Eviction("oldest"),
        Eviction("oldest", sink=4),
        Eviction("lightest", recent=3),
        Eviction("heaviest", recent=3),
        Eviction("lightest", sink=2),
        Eviction("heaviest", sink=2990),  # the newest alone may leave, or none: then the first does
    ],
    ids=str,
)
def test_by_hand(rule, heads, piece, monkeypatch):
    monkeypatch.setattr("kvbench.kernels._triton_evict.BLOCK", piece)
    weighs = rule.leaves != "oldest"
    keys, values, weights, positions, scores = rows(weighs, heads)
    places = [2, 0, 3, 1]  # among the rows of a larger batch
    table = RowPointers(
        keys,
        values,
        weights,
        rules=[rule] * 4,
        limits=LIMITS,
        scores=scores,
        positions=positions,
        places=places,
    )
    fed = torch.tensor([100, 7, 190, 3000, 5], device=DEVICE)
    going = torch.tensor([1, int(places[ENDED] != 1), 1, 1, 1], device=DEVICE)
    mass = torch.randint(0, 3, (4, heads, table.longest)).float().to(DEVICE)

    def entries_of(row: int, head: int, count: int) -> list[Any]:
        parts = (positions[row], scores[row], keys[row], values[row], weights[row])
        return [
            tuple(0.0 if part is None else part[head, i].tolist() for part in parts)
            for i in range(count)
        ]

    before = [[entries_of(row, head, LENGTHS[row]) for head in range(heads)] for row in range(4)]
    new = [
        [entries_of(row, head, LENGTHS[row] + 1)[-1] for head in range(heads)] for row in range(4)
    ]
    lengths, received = torch.tensor(LENGTHS, device=DEVICE), mass if weighs else None
    evict_entries(table, lengths, received, fed, going)
    for row in range(4):
        for head in range(heads):
            if row == ENDED:
                assert entries_of(row, head, LENGTHS[row]) == before[row][head]
                continue
            joined = (int(fed[places[row]]), 0.0, *new[row][head][2:])
            count = LENGTHS[row] + 1
            received = mass[row, head, :count] if weighs else [0.0] * count
            expected = by_hand(rule, [*before[row][head], joined], received, LIMITS[row])
            assert entries_of(row, head, len(expected)) == expected, (row, head)


def evicting(rules: list[Eviction], limits: list[int], scores: Any, places: list[int]) -> Any:
    rows, positions = len(rules), torch.zeros(1, 4, dtype=torch.int64)
    entries = [torch.zeros(1, 4, 8)] * rows
    return RowPointers(
        entries,
        entries,
        rules=rules,
        limits=limits,
        scores=[scores] * rows,
        positions=[positions] * rows,
        places=places,
    )


def test_rules_of_two_kinds_or_without_scores_are_refused():
    rules = [Eviction("oldest"), Eviction("lightest")]
    with pytest.raises(ValueError, match="allowed: all by age, or all by attention"):
        evicting(rules, [3, 3], None, [0, 1])
    with pytest.raises(ValueError, match="a rule by attention has no scores"):
        evicting([Eviction("lightest")], [3], None, [0])


def test_a_table_says_which_entry_leaves():
    scores = torch.zeros(1, 4)
    rules = [Eviction("lightest", sink=1, recent=2), Eviction("heaviest", sink=3, recent=0)]
    table = evicting(rules, [3, 4], scores, [0, 5])
    assert table.pointers[:, 12:].tolist() == [[4, 3, 1, 2, 0, 0], [4, 4, 3, 0, 1, 5]]
    addresses = [scores.data_ptr(), table.positions[0].data_ptr()]
    assert table.pointers[0, 10:12].tolist() == addresses
