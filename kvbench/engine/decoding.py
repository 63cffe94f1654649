"""The attention of decode steps, which feed one new token to every row of a batch. Each row is a fork.

Rows hold different numbers of entries, in buffers of their own. At each layer, all rows that can go
through the same kernels do so together (`kvbench.kernels.decode_attention`): two launches for any number
of rows, over exactly the entries that they hold. A step reads the positions and the numbers of entries
on the device and advances them there. The host counts and copies nothing, so that a step can be captured
in a CUDA graph. Other rows, those with packed entries among them, attend one after the other.

In: the forks of the rows, and each layer's query, key and value of the new tokens. Out: the attention
output of every row. At the end, `DecodeState.settle` updates the number of entries in the caches.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import GrowingCache
from kvbench.engine.entries import table_of
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.ragged_cache import RaggedCache
from kvbench.kernels.decode_attention import append_entries, weighted_decode_attention
from kvbench.kernels.eviction import evict_entries
from kvbench.kernels.eviction_table import EvictionTable
from kvbench.kernels.philox import to_device

NO_LIMIT = (1 << 31) - 2
"""The number of entries that stands for no limit: the largest int32 number to which 1 can be added."""


class _EntryCounts(NamedTuple):
    """The numbers of entries of some caches, [slots] int32 on a GPU or lists on a CPU: before the step,
    and including the token that is fed."""

    before: Tensor | list[int]
    with_new: Tensor | list[int]


class _Kind(NamedTuple):
    """What the caches of a group have in common. Caches of different kinds need launches of their own.

    Attributes:
        caches_per_row: 1, or the number of KV heads where each head has a cache of its own.
        kv_heads: the KV heads of a cache.
        key_dim, value_dim: the numbers in a key and in a value.
        dtype: of keys and values.
        evicts_oldest: whether the rule of eviction takes the oldest entry, which needs no scores; None
            where no entry is evicted.
    """

    caches_per_row: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    evicts_oldest: bool | None

    @classmethod
    def of(cls, caches: Sequence[GrowingCache]) -> _Kind:
        """The kind of the caches of one row, which are all alike."""
        store, rule = caches[0].store, caches[0].rule
        return cls(
            len(caches),
            store.keys.shape[0],
            store.keys.shape[2],
            store.values.shape[2],
            store.keys.dtype,
            None if rule is None else rule.leaves == "oldest",
        )


class _Counters:
    """The positions and the numbers of entries of all rows, on one device. Every step advances them in
    place.

    A slot is a cache of a group; the slots of the device's groups follow one another.

    Attributes:
        positions: [rows] int64, the position of the token to be fed.
        position_steps: [rows] int64, what a step adds to `positions`: 1, or 0 for rows that have ended.
        lengths: [slots] int32, the number of entries before the step.
        length_steps: [slots] int32, what a step adds to `lengths`: 1, or 0 for rows that have ended.
        limits: [slots] int32, the largest number of entries of a cache, which `lengths` never exceeds.
        with_new: [slots] int32, the number of entries including the token that is fed: `lengths` + 1.
        on_host: the same numbers as lists, on a CPU, whose kernels take lists; None on a GPU.
    """

    def __init__(self, positions: Tensor, groups: Sequence[_Group]) -> None:
        caches = [cache for group in groups for cache in group.caches]
        limits = [limit for group in groups for limit in group.limits]
        lengths = torch.tensor([cache.store.length for cache in caches], dtype=torch.int32)
        self.positions = positions
        self.position_steps = torch.ones_like(positions)
        self.lengths = to_device(lengths, positions.device)
        self.length_steps = torch.ones_like(self.lengths)
        self.limits = to_device(torch.tensor(limits, dtype=torch.int32), positions.device)
        self.with_new = self.lengths + 1
        self.on_host: _EntryCounts | None = None
        self._copy_to_host()

    def _copy_to_host(self) -> None:
        if not self.lengths.is_cuda:
            self.on_host = _EntryCounts(self.lengths.tolist(), self.with_new.tolist())

    def counts(self, slots: slice) -> _EntryCounts:
        """The numbers of entries of the caches in some slots."""
        counts = self.on_host or _EntryCounts(self.lengths, self.with_new)
        return _EntryCounts(counts.before[slots], counts.with_new[slots])

    def advance(self) -> None:
        """Advance positions and numbers of entries by one token, on the device."""
        self.positions += self.position_steps
        self.lengths.add_(self.length_steps).clamp_(max=self.limits)
        torch.add(self.lengths, 1, out=self.with_new)
        self._copy_to_host()


class _Group:
    """The rows of one layer that go through the kernels together.

    A row has one cache of the layer or, where its heads hold different numbers of entries, one for each
    head. The kernels treat each of these caches as a row with one KV head.

    Args:
        kind: the kind of all caches.
        caches_by_row: the caches of each row, by the row's index in the batch.
        batch: the number of rows in the batch.

    Attributes:
        rows: the indices of the rows in the batch.
        caches: the caches of all rows, those of a row one after the other.
        device: of the caches.
        index: `rows` as a tensor on the device; None where they are the whole batch.
        table: the addresses and strides of the rows' entries.
        limits: the largest number of entries of each cache.
        evictions: the rules by which entries are evicted; None where none are.
        slots: the slots of the caches in the device's `_Counters`.
        graph_key: everything about the rows that is constant in a captured step.
    """

    def __init__(
        self, kind: _Kind, caches_by_row: Mapping[int, Sequence[GrowingCache]], batch: int
    ) -> None:
        self.per_row = kind.caches_per_row
        self.rows = rows = list(caches_by_row)
        self.caches = caches = [cache for own in caches_by_row.values() for cache in own]
        self.device = caches[0].store.keys.device
        self.index = torch.tensor(rows, device=self.device) if len(rows) < batch else None
        self.limits = [NO_LIMIT if cache.limit is None else cache.limit for cache in caches]
        self.slots = slice(0)
        stores = [cache.store for cache in caches]
        self.table = table = table_of(stores)
        rules = [cache.rule for cache in caches if cache.rule is not None]
        self.evictions: EvictionTable | None = None
        if rules:
            scores = [store.scores for store in stores]
            positions = [store.positions for store in stores]
            self.evictions = EvictionTable(rules, self.limits, scores, positions, rows)
        launches = (table.longest, table.chunk, table.aligned)
        self.graph_key = (tuple(rows), kind, *launches)

    def caches_of(self, row: int) -> slice:
        """The indices in `caches` of a row's caches."""
        first = self.rows.index(row) * self.per_row
        return slice(first, first + self.per_row)


class DecodeState(ForkBatch):
    """The attention state of steps of one token, for as long as the rows of the batch stay the same.

    Args:
        forks: one per batch row.
        steps: for each row the largest number of tokens that will be fed to it. Room for them is
            reserved here.
        device: where the token ids are.

    Attributes:
        positions: [rows] int64, the position of the token to be fed; every step advances it in place.
        taken: the number of steps so far.
    """

    def __init__(self, forks: Sequence[Fork], steps: Sequence[int], device: torch.device) -> None:
        first_positions = [fork.tokens for fork in forks]
        positions = to_device(torch.tensor(first_positions), device)
        super().__init__(list(forks), positions)
        self.taken = 0
        self._ended: set[int] = set()
        self._groups: dict[int, list[_Group]] = {}
        self._alone: dict[int, list[int]] = {}
        for layer in self.forks[0].layers:
            self._sort_rows(layer, first_positions, steps)
        # The device of the token ids is among them even if no group is there, since `attend_rows` needs
        # its positions.
        by_device: dict[torch.device, list[_Group]] = {positions.device: []}
        for group in self._all_groups():
            groups_there = by_device.setdefault(group.device, [])
            begin = groups_there[-1].slots.stop if groups_there else 0
            group.slots = slice(begin, begin + len(group.caches))
            groups_there.append(group)
        self._counters = {
            device: _Counters(positions.to(device), groups) for device, groups in by_device.items()
        }

    @property
    def graph_key(self) -> Hashable:
        """Everything about these rows that is constant in a captured step (`kvbench.engine.graphs`)."""
        return tuple(
            (layer, *(group.graph_key for group in groups))
            for layer, groups in self._groups.items()
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors about the rows that a step on a GPU reads or advances. For the same `graph_key`
        there are equally many, in the same order and of the same shapes."""
        tensors: list[Any] = []
        for counters in self._counters.values():
            tensors += vars(counters).values()
        for group in self._all_groups():
            tensors += [group.index, group.table.pointers]
            if group.evictions is not None:
                tensors.append(group.evictions.numbers)
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    def _all_groups(self, row: int | None = None) -> list[_Group]:
        """The groups of all layers, or those that contain the row."""
        groups = [group for groups in self._groups.values() for group in groups]
        return [group for group in groups if row is None or row in group.rows]

    def _sort_rows(self, layer: int, first_positions: Sequence[int], steps: Sequence[int]) -> None:
        """Sort the rows of a layer into those that go through the kernels, a group for each kind of
        caches, and those that attend one after the other; prepare the caches of the former.

        Args:
            first_positions: for each row the position of the first token that will be fed.
            steps: as in `DecodeState`.
        """
        by_kind: dict[_Kind, dict[int, Sequence[GrowingCache]]] = {}
        self._alone[layer] = []
        for row, fork in enumerate(self.forks):
            cache = fork.layers[layer]
            if not cache.steps_by_kernel:
                self._alone[layer].append(row)
                continue
            assert isinstance(cache, GrowingCache | RaggedCache)
            caches = cache.heads if isinstance(cache, RaggedCache) else [cache]
            for own_cache in caches:
                own_cache.prepare_steps(first_positions[row], steps[row])
            by_kind.setdefault(_Kind.of(caches), {})[row] = caches
        self._groups[layer] = [
            _Group(kind, caches_by_row, len(self.forks)) for kind, caches_by_row in by_kind.items()
        ]

    def attend(self, call: LayerCall) -> Tensor:
        """See `ForkBatch.attend`: all rows of a group at once, then the other rows one by one."""
        groups, query = self._groups[call.layer], call.query
        if len(groups) == 1 and groups[0].index is None:
            return self._attend_group(groups[0], call)
        out = query.new_zeros(*query.shape[:3], call.value.shape[-1])
        for group in groups:
            assert group.index is not None
            out.index_copy_(0, group.index, self._attend_group(group, call.of_rows(group.index)))
        alone = self._alone[call.layer]
        if alone:
            self.attend_rows(alone, call, self.positions[:, None].to(query.device), out)
        return out

    def _attend_group(self, group: _Group, call: LayerCall) -> Tensor:
        """Add the new tokens of a group's rows to their caches, attend, and evict by the rules:
        [group rows, heads, 1, value_dim]. `call` has the rows of the group alone."""
        query, key, value = call.query[:, :, 0], call.key[:, :, 0], call.value[:, :, 0]
        evictions = group.evictions
        stored_heads = group.table.kv_heads * group.per_row
        repeats = stored_heads // key.shape[1]
        if repeats > 1:  # the methods have repeated keys to query heads
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        if group.per_row > 1:  # each head has a cache, which the kernels treat as a row
            rows = len(group.caches)
            query = query.reshape(rows, -1, query.shape[2])
            key = key.reshape(rows, -1, key.shape[2])
            value = value.reshape(rows, -1, value.shape[2])
        counters = self._counters[group.device]
        counts = counters.counts(group.slots)
        append_entries(group.table, counts.before, key, value)
        sinks = call.sinks
        if sinks is not None:
            sinks = sinks.view(group.per_row, -1).repeat(len(group.rows), 1)
        output, mass = weighted_decode_attention(
            query,
            group.table,
            counts.with_new,
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=sinks,
            return_mass=evictions is not None and evictions.weighs,
        )
        if evictions is not None:
            evict_entries(
                group.table,
                evictions,
                counts.before,
                mass,
                counters.positions,
                counters.position_steps,
            )
        return output.reshape(len(group.rows), call.query.shape[1], 1, -1)

    def move_on(self) -> None:
        """Advance positions and numbers of entries by one token, on the devices. This is the end of a
        step, and is captured with it."""
        for counters in self._counters.values():
            counters.advance()

    def end(self, row: int) -> None:
        """Stop a row that has ended but stays in the batch. Its position and its number of entries no
        longer change. Later steps write its token to the same free place of the buffers every time, and
        their output is not used."""
        self._settle_row(row)
        self._ended.add(row)
        for counters in self._counters.values():
            counters.position_steps[row] = 0
        for group in self._all_groups(row):
            counters = self._counters[group.device]
            counters.length_steps[group.slots][group.caches_of(row)] = 0

    def _settle_row(self, row: int) -> None:
        """Update the number of entries in the caches of a row, unless it has ended before."""
        for group in self._all_groups(row) if row not in self._ended else ():
            for cache in group.caches[group.caches_of(row)]:
                cache.count_steps_by_kernel(self.taken)

    def settle(self) -> None:
        """End these steps: update the number of entries in every cache, which the steps counted on the
        device alone."""
        for row in range(len(self.forks)):
            self._settle_row(row)
        self.taken = 0
