"""The attention of decode steps: every row of the batch is a fork, and is fed one new token.

Rows hold different numbers of entries, in buffers of their own. All rows of a layer that can go
through one kernel do (`kvbench.kernels.decode_attention`): two launches for however many rows, three
where they hold packed entries, over the entries they hold and no others. A step reads positions and
numbers of entries on the device and advances them there; the host copies and counts nothing, so that a
step can be captured in a CUDA graph.

In: the forks of the rows, and each layer's query, key and value of the new tokens. Out: the attention
output of every row; when the rows part, `DecodeState.settle` tells the caches how many entries they
hold."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import GrowingCache
from kvbench.engine.entries import table_of
from kvbench.engine.fork import Fork, ForkBatch
from kvbench.engine.ragged_cache import RaggedCache
from kvbench.kernels.decode_attention import append_entries, weighted_decode_attention
from kvbench.kernels.eviction import EvictionTable, evict_entries
from kvbench.kernels.philox import to_device

NO_LIMIT = (1 << 31) - 2
"""The limit of entries of a cache that grows without one."""


class _Counters:
    """Positions and numbers of entries of the rows on one device, which every step advances in place.

    Attributes:
        positions: [rows] int64, of the token to be fed.
        position_steps: [rows] int64, what a step adds to `positions`: 1, or 0 for rows that have ended.
        lengths: [slots] int32, entries held before the step; a slot is a cache of a group, and the
            groups of the device stand one after the other.
        length_steps: [slots] int32, what a step adds to `lengths`, up to `limits`.
        limits: [slots] int32, the most entries that a cache may hold.
        with_new: [slots] int32, entries including the token that is fed: `lengths` + 1.
        on_host: copies of `lengths` and `with_new` as lists, on a CPU, whose kernels take numbers.
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
        self.on_host: tuple[list[int], list[int]] | None = None
        self._copy_to_host()

    def _copy_to_host(self) -> None:
        if not self.lengths.is_cuda:
            self.on_host = self.lengths.tolist(), self.with_new.tolist()

    def of(self, slots: slice) -> tuple[Tensor | Sequence[int], Tensor | Sequence[int]]:
        """Entries of a group's caches, without and with the token that is fed."""
        lengths, with_new = self.on_host or (self.lengths, self.with_new)
        return lengths[slots], with_new[slots]

    def advance(self) -> None:
        """Move positions and numbers of entries on to the next token, on the device."""
        self.positions += self.position_steps
        self.lengths.add_(self.length_steps).clamp_(max=self.limits)
        torch.add(self.lengths, 1, out=self.with_new)
        self._copy_to_host()


class _Group:
    """Rows of one layer that go through the kernels together.

    A row has one cache of the layer, or, where its heads hold different numbers of entries, one for each
    head. To the kernels such a row is as many rows of one KV head.

    Args:
        rows: their places in the batch.
        caches: the caches of this layer, those of a row one after the other.
        several: whether the batch has other rows.
        common: what the rows have in common: numbers of heads and channels, dtype, how entries are
            packed, rule of eviction.

    Attributes:
        per_row: caches of a row.
        index: `rows` as a tensor on the device; None where they are the whole batch.
        table: addresses and strides of the rows' entries.
        limits: the most entries that each cache may hold.
        evictions: the rules by which entries leave; None where none do.
        slots: the caches' places in the device's `_Counters`.
        graph_key: what a captured step has fixed of the rows.
    """

    def __init__(
        self, rows: list[int], caches: list[GrowingCache], several: bool, common: Hashable
    ) -> None:
        self.rows, self.caches, self.device = rows, caches, caches[0].store.keys.device
        self.per_row = len(caches) // len(rows)
        self.index = torch.tensor(rows, device=self.device) if several else None
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
        launches = (table.longest, table.longest_packed, table.chunk, table.aligned)
        self.graph_key = (tuple(rows), common, *launches)

    def caches_of(self, row: int) -> slice:
        """The places of a row's caches among `caches`."""
        first = self.rows.index(row) * self.per_row
        return slice(first, first + self.per_row)


class DecodeState(ForkBatch):
    """Attention state of steps of one token, for as long as the rows stay the same.

    Args:
        forks: one per batch row.
        steps: tokens that will be fed to each row at most: room for them is reserved here.
        device: where the token ids are.

    Attributes:
        positions: [rows] int64, of the token to be fed; moved on in place.
        taken: steps so far.
    """

    def __init__(self, forks: Sequence[Fork], steps: Sequence[int], device: torch.device) -> None:
        first = [fork.tokens for fork in forks]
        positions = to_device(torch.tensor(first), device)
        super().__init__(list(forks), positions)
        self.taken = 0
        self._ended: set[int] = set()
        self._groups: dict[int, list[_Group]] = {}
        self._alone: dict[int, list[int]] = {}
        for layer in self.forks[0].layers:
            self._sort(layer, first, steps)
        by_device: dict[torch.device, list[_Group]] = {positions.device: []}
        for group in self._all_groups():
            mine = by_device.setdefault(group.device, [])
            begin = mine[-1].slots.stop if mine else 0
            group.slots = slice(begin, begin + len(group.caches))
            mine.append(group)
        self._counters = {
            device: _Counters(positions.to(device), groups) for device, groups in by_device.items()
        }

    @property
    def graph_key(self) -> Hashable:
        """What a captured step has fixed of these rows: see `kvbench.engine.graphs`."""
        return tuple(
            (layer, *(group.graph_key for group in groups))
            for layer, groups in self._groups.items()
        )

    @property
    def tensors(self) -> list[Tensor]:
        """On a GPU, all tensors about the rows that a step reads or advances; as many, in the same
        order, for all rows of one `graph_key`."""
        parts = [part for counters in self._counters.values() for part in vars(counters).values()]
        for group in self._all_groups():
            parts += [group.index, group.table.pointers]
            if group.evictions is not None:
                parts.append(group.evictions.numbers)
        return [part for part in parts if isinstance(part, Tensor)]

    def _all_groups(self, row: int | None = None) -> list[_Group]:
        """The groups of all layers, or those with this row."""
        groups = [group for groups in self._groups.values() for group in groups]
        return [group for group in groups if row is None or row in group.rows]

    def _sort(self, layer: int, first: Sequence[int], steps: Sequence[int]) -> None:
        """Sort the rows of a layer into those that go through the kernels together, a group for each
        kind of buffers, and those that attend one by one."""
        together: dict[tuple[object, ...], dict[int, list[GrowingCache]]] = {}
        self._alone[layer] = []
        for row, fork in enumerate(self.forks):
            cache = fork.layers[layer]
            if not cache.steps_by_kernel:
                self._alone[layer].append(row)
                continue
            assert isinstance(cache, GrowingCache | RaggedCache)
            parts = cache.heads if isinstance(cache, RaggedCache) else [cache]
            for part in parts:
                part.expect(first[row], steps[row])
            keys, values, rule = parts[0].store.keys, parts[0].store.values, parts[0].rule
            leaves = None if rule is None else rule.leaves == "oldest"
            channels = (keys.shape[2], values.shape[2])
            packed = parts[0].store.packed
            scheme = None if packed is None else packed[0].quantization
            kind = (len(parts), keys.shape[0], *channels, keys.dtype, scheme, leaves)
            together.setdefault(kind, {})[row] = parts
        self._groups[layer] = [
            _Group(
                list(rows),
                [part for parts in rows.values() for part in parts],
                len(rows) < len(self.forks),
                kind,
            )
            for kind, rows in together.items()
        ]

    def attend(self, call: LayerCall) -> Tensor:
        """Each row against its own cache; a row whose fork failed attends to nothing."""
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
        query, key, value = (part[:, :, 0] for part in (call.query, call.key, call.value))
        evictions, stored_heads = group.evictions, group.table.kv_heads * group.per_row
        repeats = stored_heads // key.shape[1]
        if repeats > 1:  # a method that repeats keys to query heads
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        if group.per_row > 1:  # heads that hold different numbers of entries are rows of their own
            query, key, value = (
                part.reshape(len(group.caches), -1, part.shape[2]) for part in (query, key, value)
            )
        counters = self._counters[group.device]
        lengths, with_new = counters.of(group.slots)
        append_entries(group.table, lengths, key, value)
        out, mass = weighted_decode_attention(
            query,
            group.table,
            with_new,
            scaling=call.scaling,
            softcap=call.softcap,
            return_mass=evictions is not None and evictions.weighs,
        )
        if evictions is not None:
            evict_entries(
                group.table,
                evictions,
                lengths,
                mass,
                counters.positions,
                counters.position_steps,
            )
        return out.reshape(len(group.rows), call.query.shape[1], 1, -1)

    def move_on(self) -> None:
        """Advance positions and numbers of entries to the next token; part of the step, on the
        devices."""
        for counters in self._counters.values():
            counters.advance()

    def end(self, row: int) -> None:
        """Freeze a row that has ended and stays in the batch: its position and number of entries no
        longer change, and its steps write their token to a free place that is never attended to."""
        self._settle(row)
        self._ended.add(row)
        for counters in self._counters.values():
            counters.position_steps[row] = 0
        for group in self._all_groups(row):
            counters = self._counters[group.device]
            counters.length_steps[group.slots][group.caches_of(row)] = 0

    def _settle(self, row: int) -> None:
        for group in self._all_groups(row) if row not in self._ended else ():
            for cache in group.caches[group.caches_of(row)]:
                cache.count_steps_by_kernel(self.taken)

    def settle(self) -> None:
        """End this run of steps: every cache is told how many entries it holds by now."""
        for row in range(len(self.forks)):
            self._settle(row)
        self.taken = 0
