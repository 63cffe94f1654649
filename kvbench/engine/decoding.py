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
from kvbench.engine.fork import Fork
from kvbench.engine.shared import attend_branches, rows_by_base
from kvbench.engine.states import PassingCache, joined_cache
from kvbench.kernels.decode_attention import (
    EntryTable,
    append_entries,
    entry_table,
    weighted_decode_attention,
)


@dataclass
class _Group:
    """Rows of one layer that go through the kernel together.

    Attributes:
        rows: their places in the batch; index: the same on the device, None where it is every row.
        table: where their entries are.
        lengths: entries held before the step, [rows] int32 on the device.
        grows: what a step adds to them, [rows] int32: 0 where one leaves for every one that comes,
            and where the row has ended.
    """

    rows: list[int]
    caches: list[LayerCache]
    index: Tensor | None
    table: EntryTable
    lengths: Tensor
    grows: Tensor
    evicts: bool


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
        self.moves = torch.ones_like(positions)
        self.taken = 0
        self._past: PassingCache | None = None
        self._ended: set[int] = set()
        self._groups: dict[int, list[_Group]] = {}
        self._branches: dict[int, list[list[int]]] = {}
        self._alone: dict[int, list[int]] = {}
        first = positions.tolist()
        for layer in self.forks[0].layers:
            self._sort(layer, first, steps)

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
            if not cache.takes_one_by_kernel:
                alone.append(row)
                continue
            cache.expect(first[row], steps[row])
            keys, values = cache.keys, cache.values
            kind = (keys.shape[0], keys.shape[2], values.shape[2], keys.dtype, cache.evicts)
            together.setdefault(kind, []).append(row)
        self._alone[layer] = alone
        self._groups[layer] = [self._group(layer, rows) for rows in together.values()]

    def _group(self, layer: int, rows: list[int]) -> _Group:
        caches = [self.forks[row].layers[layer] for row in rows]
        device = caches[0].keys.device
        whole = len(rows) == len(self.forks)
        grows = [0 if cache.evicts else 1 for cache in caches]
        return _Group(
            rows,
            caches,
            None if whole else torch.tensor(rows, device=device),
            entry_table(
                [cache.keys for cache in caches],
                [cache.values for cache in caches],
                [cache.log_weights for cache in caches],
            ),
            torch.tensor([cache.length for cache in caches], dtype=torch.int32, device=device),
            torch.tensor(grows, dtype=torch.int32, device=device),
            caches[0].evicts,
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
        query, key, value = call.query, call.key, call.value
        out = query.new_zeros(*query.shape[:3], value.shape[-1])
        for group in groups:
            assert group.index is not None
            mixed = self._attend_group(group, call.of_rows(group.rows))
            out.index_copy_(0, group.index, mixed)
        for rows in branches:
            positions = self.positions[rows][:, None].to(query.device)
            caches = [self.forks[row].layers[call.layer] for row in rows]
            out[rows] = attend_branches(caches, call.of_rows(rows), positions)
        for row in alone:
            fork = self.forks[row]
            if fork.failure is not None:
                continue
            try:
                position = self.positions[row : row + 1].to(query.device)
                out[row] = fork.layers[call.layer].step(
                    query[row], key[row], value[row], position, call.scaling, call.softcap
                )
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)
        return out

    def _attend_group(self, group: _Group, call: LayerCall) -> Tensor:
        query, key, value = call.query, call.key, call.value
        repeats = group.table.kv_heads // key.shape[1]
        if repeats > 1:  # a method that repeats keys to query heads
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        append_entries(group.table, group.lengths, key[:, :, 0], value[:, :, 0])
        held = group.lengths + 1
        out, mass = weighted_decode_attention(
            query[:, :, 0],
            group.table,
            held,
            scaling=call.scaling,
            softcap=call.softcap,
            return_mass=group.evicts,
        )
        if mass is not None:
            for place, (row, cache) in enumerate(zip(group.rows, group.caches, strict=True)):
                self._evict(self.forks[row], cache, mass[place], row)
        group.lengths += group.grows
        return out[:, :, None]

    def _evict(self, fork: Fork, cache: LayerCache, mass: Tensor, row: int) -> None:
        if fork.failure is None:
            try:
                cache.evict_one(mass, self.positions[row].to(mass.device))
            except Exception as failure:
                if mass.is_cuda and torch.cuda.is_current_stream_capturing():
                    raise  # nothing has run yet: the step cannot be captured, no method failed
                fork.fail(failure)

    def move_on(self) -> None:
        """The next token has the next position; part of the step, on the device."""
        self.positions += self.moves

    def count(self) -> None:
        """A step is over."""
        self.taken += 1

    def end(self, row: int) -> None:
        """A row has ended and stays in the batch: from here on its steps come to nothing. It writes
        its token to the same free place every time, and its position does not move."""
        self._settle(row)
        self._ended.add(row)
        self.moves[row] = 0
        for group in self._groups_of(row):
            group.grows[group.rows.index(row)] = 0

    def _groups_of(self, row: int) -> list[_Group]:
        return [g for groups in self._groups.values() for g in groups if row in g.rows]

    def _settle(self, row: int) -> None:
        if row not in self._ended:
            for group in self._groups_of(row):
                if not group.evicts:
                    group.caches[group.rows.index(row)].length += self.taken

    def restore(self) -> None:
        """Undo what an attempt to capture a step left of itself on the host."""
        for groups in self._groups.values():
            for group in groups:
                if group.evicts:
                    for cache in group.caches:
                        cache.length = cache.granted

    def settle(self) -> None:
        """The rows part: tell every cache how many entries it holds by now."""
        for row in range(len(self.forks)):
            self._settle(row)
        self.taken = 0
