"""The attention of decode steps: every row of the batch a fork, one new token each.

Rows hold different numbers of entries, in buffers of their own. All rows of a layer that can go
through one kernel do (`kvbench.kernels.decode_attention`): two launches for however many rows, over
the entries they hold and no others. What such a step needs to know, it reads on the device: nothing is
copied, nothing is counted on the host, so that a step can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.engine.fork import Fork, attend_rows
from kvbench.engine.shared import rows_by_base
from kvbench.engine.states import PassingCache, joined_cache
from kvbench.kernels.decode_attention import (
    EntryTable,
    append_entries,
    entry_table,
    weighted_decode_attention,
)
from kvbench.kernels.eviction import EvictionTable, evict_entries, eviction_table

ENDLESS = (1 << 31) - 2
"""Entries that no cache reaches."""


class _Counters:
    """What a step reads of its rows, on one device, and moves on there.

    Attributes:
        positions: [rows] int64, of the token that is fed; moves: what a step adds, 0 for rows that have
            ended.
        lengths: entries held before the step by the rows of all groups of the device, one after the
            other, int32; grows: what a step adds, up to `limits`. held: one more than `lengths`.
    """

    def __init__(self, positions: Tensor) -> None:
        self.positions, self.moves = positions, torch.ones_like(positions)
        self._begin: list[int] = []
        self._grows: list[int] = []
        self._limits: list[int] = []

    def join(self, lengths: Sequence[int], grows: int, limits: Sequence[int]) -> slice:
        """A group's rows: where their lengths are."""
        first = len(self._begin)
        self._begin += lengths
        self._grows += [grows] * len(lengths)
        self._limits += limits
        return slice(first, len(self._begin))

    def begin(self) -> None:
        """All groups have joined."""
        self.lengths, self.grows, self.limits = (
            torch.tensor(numbers, dtype=torch.int32, device=self.positions.device)
            for numbers in (self._begin, self._grows, self._limits)
        )
        self.held = self.lengths + 1
        self._tell()

    def _tell(self) -> None:
        on_host = not self.lengths.is_cuda  # there they are wanted as numbers
        self.told = (self.lengths.tolist(), self.held.tolist()) if on_host else None

    def of(self, rows: slice) -> tuple[Tensor | Sequence[int], Tensor | Sequence[int]]:
        """Entries of a group's rows before and with the token that is fed."""
        lengths, held = self.told or (self.lengths, self.held)
        return lengths[rows], held[rows]

    def move_on(self) -> None:
        """The next token has the next position; all of it on the device."""
        self.positions += self.moves
        self.lengths.add_(self.grows).clamp_(max=self.limits)
        torch.add(self.lengths, 1, out=self.held)
        self._tell()


@dataclass
class _Group:
    """Rows of one layer that go through the kernels together.

    Attributes:
        rows: their places in the batch; index: the same on the device, None where it is every row.
        table: where their entries are.
        counters: of their device; slots: where in them their lengths are.
        limits: entries that each holds at most.
        evictions: the rules by which entries leave, None where none do or the methods are asked.
        asks: whether each row's method is asked which entry leaves, at every token.
    """

    rows: list[int]
    caches: list[LayerCache]
    index: Tensor | None
    table: EntryTable
    counters: _Counters
    slots: slice
    limits: list[int]
    evictions: EvictionTable | None
    asks: bool


class DecodeState:
    """Attention state of steps of one token, for as long as the rows stay the same.

    Args:
        forks: one per batch row.
        positions: [rows] int64, of the first token to be fed; kept, and moved on in place.
        steps: tokens that will be fed to each row at most: room for them is reserved here.
    """

    def __init__(self, forks: Sequence[Fork], positions: Tensor, steps: Sequence[int]) -> None:
        self.forks = list(forks)
        self.positions = positions
        self.taken = 0
        self._past: PassingCache | None = None
        self._ended: set[int] = set()
        self._counters = {positions.device: _Counters(positions)}
        self._groups: dict[int, list[_Group]] = {}
        self._branches: dict[int, list[list[int]]] = {}
        self._alone: dict[int, list[int]] = {}
        first = positions.tolist()
        for layer in self.forks[0].layers:
            self._sort(layer, first, steps)
        for counters in self._counters.values():
            counters.begin()

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `kvbench.engine.states.Stateful`."""
        self._past = self._past or joined_cache(config, [fork.states for fork in self.forks])
        return self._past

    def _sort(self, layer: int, first: Sequence[int], steps: Sequence[int]) -> None:
        """Which rows of a layer go through the kernel together, and which go alone."""
        together: dict[tuple[object, ...], list[int]] = {}
        alone = []
        caches = [fork.layers[layer] for fork in self.forks]
        self._branches[layer] = rows_by_base(caches)
        joined = {row for rows in self._branches[layer] for row in rows}
        for row, cache in enumerate(caches):
            if row in joined:
                continue
            if not (cache.takes_one_by_kernel or cache.fills_by_kernel):
                alone.append(row)
                continue
            cache.expect(first[row], steps[row])
            keys, values = cache.keys, cache.values
            how = cache.evicts if cache.rule is None else cache.rule.leaves == "oldest"
            kind = (
                keys.shape[0],
                keys.shape[2],
                values.shape[2],
                keys.dtype,
                how,
                cache.rule is None,
            )
            together.setdefault(kind, []).append(row)
        self._alone[layer] = alone
        self._groups[layer] = [self._group(layer, rows) for rows in together.values()]

    def _group(self, layer: int, rows: list[int]) -> _Group:
        caches = [self.forks[row].layers[layer] for row in rows]
        device = caches[0].keys.device
        if device not in self._counters:
            self._counters[device] = _Counters(self.positions.to(device))
        counters = self._counters[device]
        asks = caches[0].evicts and caches[0].rule is None
        rules = [cache.rule for cache in caches if cache.rule is not None]
        limits = [max(c.granted, c.length) if c.evicts else ENDLESS for c in caches]
        return _Group(
            rows,
            caches,
            None if len(rows) == len(self.forks) else torch.tensor(rows, device=device),
            entry_table(
                [cache.keys for cache in caches],
                [cache.values for cache in caches],
                [cache.log_weights for cache in caches],
            ),
            counters,
            counters.join([cache.length for cache in caches], int(not asks), limits),
            limits,
            eviction_table(
                rules,
                limits,
                [cache.scores for cache in caches],
                [cache.positions for cache in caches],
                rows,
            )
            if rules
            else None,
            asks,
        )

    @property
    def all_together(self) -> bool:
        """Whether no row of any layer goes alone: then a step asks the host for nothing."""
        return not any(self._alone.values()) and not any(self._branches.values())

    @property
    def outgrown(self) -> bool:
        """Whether a row that goes alone need not any longer: its cache has filled up, and evicts."""
        return any(
            self.forks[row].failure is None and self.forks[row].layers[layer].takes_one_by_kernel
            for layer, rows in self._alone.items()
            for row in rows
        )

    def attend(self, call: LayerCall) -> Tensor:
        """Each row against its own cache; a row whose fork failed attends to nothing."""
        groups, alone = self._groups[call.layer], self._alone[call.layer]
        branches = self._branches[call.layer]
        if not alone and not branches and len(groups) == 1:
            return self._attend_group(groups[0], call)
        query = call.query
        out = query.new_zeros(*query.shape[:3], call.value.shape[-1])
        for group in groups:
            assert group.index is not None
            out.index_copy_(0, group.index, self._attend_group(group, call.of_rows(group.index)))
        if branches or alone:
            positions = self.positions[:, None].to(query.device)
            attend_rows(self.forks, branches, alone, call, positions, out)
        return out

    def _attend_group(self, group: _Group, call: LayerCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        repeats = group.table.kv_heads // key.shape[1]
        if repeats > 1:  # a method that repeats keys to query heads
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        counters, evictions = group.counters, group.evictions
        lengths, held = counters.of(group.slots)
        append_entries(group.table, lengths, key[:, :, 0], value[:, :, 0])
        out, mass = weighted_decode_attention(
            query[:, :, 0],
            group.table,
            held,
            scaling=call.scaling,
            softcap=call.softcap,
            return_mass=group.asks or (evictions is not None and evictions.weighs),
        )
        if evictions is not None:
            evict_entries(group.table, evictions, lengths, mass, counters.positions, counters.moves)
        elif mass is not None:
            for place, (row, cache) in enumerate(zip(group.rows, group.caches, strict=True)):
                self._evict(self.forks[row], cache, mass[place], counters.positions[row])
        return out[:, :, None]

    def _evict(self, fork: Fork, cache: LayerCache, mass: Tensor, position: Tensor) -> None:
        if fork.failure is None:
            try:
                cache.evict_one(mass, position)
            except Exception as failure:
                if mass.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise  # nothing has run yet: the step cannot be captured, no method failed
                fork.fail(failure)

    def move_on(self) -> None:
        """The next token is to come; part of the step, on the devices."""
        for counters in self._counters.values():
            counters.move_on()

    def count(self) -> None:
        """A step is over."""
        self.taken += 1

    def end(self, row: int) -> None:
        """A row has ended and stays in the batch: from here on its steps come to nothing. It writes
        its token to the same free place every time, and its position does not move."""
        self._settle(row)
        self._ended.add(row)
        for counters in self._counters.values():
            counters.moves[row] = 0
        for group in self._groups_of(row):
            group.counters.grows[group.slots.start + group.rows.index(row)] = 0

    def _groups_of(self, row: int) -> list[_Group]:
        return [g for groups in self._groups.values() for g in groups if row in g.rows]

    def _settle(self, row: int) -> None:
        if row not in self._ended:
            for group in self._groups_of(row):
                if not group.asks:
                    place = group.rows.index(row)
                    cache = group.caches[place]
                    cache.length = min(cache.length + self.taken, group.limits[place])

    def restore(self) -> None:
        """Undo what an attempt to capture a step left of itself on the host."""
        for groups in self._groups.values():
            for group in groups:
                if group.asks:
                    for cache in group.caches:
                        cache.length = cache.granted

    def settle(self) -> None:
        """The rows part: tell every cache how many entries it holds by now."""
        for row in range(len(self.forks)):
            self._settle(row)
        self.taken = 0
