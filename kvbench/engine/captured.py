"""The rows of a decode batch as the kernels see them (`KernelBatch`), and its steps, which can be
captured: for CUDA, and for Triton's interpreter in tests. Elsewhere each row attends by its caches.

Rows hold different numbers of entries, in buffers of their own. At each layer, all rows that can go
through the same kernels do so together (`kvbench.kernels.decode`): two launches for any number
of rows, over exactly the entries that they hold. A step reads the positions and the numbers of entries
on the device and advances them there. The host counts and copies nothing, so that a step can be captured
(`kvbench.engine.steps`). Other rows, those with packed entries among them, attend one after the other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvbench.engine.architecture import head_shapes
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import Cache
from kvbench.engine.decode import Feed, Turn, draws_of, fail_late, pick, take
from kvbench.engine.device import input_device
from kvbench.engine.prefill import forward
from kvbench.engine.rotary import table_key
from kvbench.engine.row import Row
from kvbench.engine.steps import FIRST_STEPS, Steps
from kvbench.kernels._choice import VARIABLE
from kvbench.kernels.decode import (
    RowPointers,
    append_entries,
    evict_entries,
    takes,
    weighted_decode_attention,
)
from kvbench.kernels.philox import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_LIMIT = (1 << 31) - 2
"""The number of entries that stands for no limit: the largest int32 number to which 1 can be added."""


@dataclass
class Together:
    """The rows of one layer that go through the kernels together.

    Attributes:
        places: the places of the rows in the batch.
        caches: the caches of all rows, row by row. The kernels treat each as a row.
        pointers: where the entries of each cache lie.
        index: `places` as a tensor on the device; None where they are the whole batch.
        slots: the places of the caches in the device's `Counts`.
        kind: what they have in common (`_kind`).
    """

    places: list[int]
    caches: list[Cache]
    pointers: RowPointers
    index: Tensor | None
    slots: slice
    kind: Hashable

    @property
    def key(self) -> Hashable:
        """Everything about these rows that is constant in a captured step."""
        pointers = self.pointers
        launches = (pointers.longest, pointers.chunk, pointers.aligned)
        return (tuple(self.places), self.kind, *launches)

    @property
    def per_row(self) -> int:
        """1, or the number of KV heads where each head has a cache of its own."""
        return len(self.caches) // len(self.places)

    def slots_of(self, place: int) -> slice:
        """The places of a row's caches among `caches`."""
        first = self.places.index(place) * self.per_row
        return slice(first, first + self.per_row)


class Counts:
    """The positions of all rows and the numbers of entries of their caches, on one device. Every step
    advances them in place.

    Attributes:
        positions: [rows] int64, the position of the token to be fed.
        going: [rows] int64, what a step adds to `positions`: 1, or 0 for rows that have ended.
        entries: [caches] int32, before the step.
        growing: [caches] int32, what a step adds to `entries`.
        limits: [caches] int32, which `entries` never exceed.
        with_new: [caches] int32, `entries` + 1.
    """

    def __init__(self, positions: Tensor, caches: Sequence[Cache]) -> None:
        device = positions.device
        lengths = torch.tensor([cache.length for cache in caches], dtype=torch.int32)
        limits = [NO_LIMIT if cache.limit is None else cache.limit for cache in caches]
        self.positions = positions
        self.going = torch.ones_like(positions)
        self.entries = to_device(lengths, device)
        self.growing = torch.ones_like(self.entries)
        self.limits = to_device(torch.tensor(limits, dtype=torch.int32), device)
        self.with_new = self.entries + 1

    def advance(self) -> None:
        """Count the token that was fed."""
        self.positions += self.going
        self.entries.add_(self.growing).clamp_(max=self.limits)
        torch.add(self.entries, 1, out=self.with_new)


class KernelBatch(Feed):
    """The rows of a decode batch as the kernels see them: the pass of steps of one token, for as long as
    the rows stay the same.

    Args:
        model: of which the number of query heads is read.
        tokens: for each row the largest number of tokens that will be fed to it. Room for them is
            reserved here.
        device: where the token ids are.

    Attributes:
        positions: [rows] int64, the position of the token to be fed; every step advances it in place.
        taken: the number of steps so far.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        rows: Sequence[Row],
        tokens: Sequence[int],
        device: torch.device,
    ) -> None:
        first = [row.tokens for row in rows]
        super().__init__(list(rows), to_device(torch.tensor(first), device))
        self.taken = 0
        self._ended: set[int] = set()
        self._together: dict[int, list[Together]] = {}
        self._alone: dict[int, list[int]] = {}
        # The device of the token ids is among them even if no caches are there, for its positions.
        caches_on: dict[torch.device, list[Cache]] = {device: []}
        shapes = head_shapes(model.config.get_text_config())
        for layer in rows[0].caches:
            by_kind: dict[Hashable, list[int]] = {}
            self._alone[layer] = []
            for place, row in enumerate(rows):
                caches = row.caches[layer]
                group = shapes[layer].heads // sum(cache.keys.shape[0] for cache in caches)
                if not all(
                    cache.steps_by_kernel and takes(cache.keys, cache.values, group)
                    for cache in caches
                ):
                    self._alone[layer].append(place)
                    continue
                for cache in caches:
                    cache.prepare_steps(first[place], tokens[place])
                by_kind.setdefault(_kind(caches), []).append(place)
            self._together[layer] = [
                self._group(layer, kind, places, caches_on) for kind, places in by_kind.items()
            ]
        self._counts = {
            each: Counts(self.positions.to(each), caches) for each, caches in caches_on.items()
        }

    def _group(
        self,
        layer: int,
        kind: Hashable,
        places: list[int],
        caches_on: dict[torch.device, list[Cache]],
    ) -> Together:
        caches = [cache for place in places for cache in self.rows[place].caches[layer]]
        device = caches[0].keys.device
        on_device = caches_on.setdefault(device, [])
        slots = slice(len(on_device), len(on_device) + len(caches))
        on_device += caches
        pointers = pointers_in(caches, places)
        is_whole = len(places) == len(self.rows)
        index = None if is_whole else torch.tensor(places, device=device)
        return Together(places, caches, pointers, index, slots, kind)

    @property
    def key(self) -> Hashable:
        """Everything about these rows that is constant in a captured step."""
        return tuple(
            (layer, *(group.key for group in groups)) for layer, groups in self._together.items()
        )

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors about the rows that a step on a GPU reads or advances. For the same `key` there
        are equally many, in the same order and of the same shapes."""
        tensors: list[Any] = []
        for counts in self._counts.values():
            tensors += vars(counts).values()
        for group in self._groups():
            tensors += [group.index, group.pointers.pointers]
        return [tensor for tensor in tensors if isinstance(tensor, Tensor)]

    def _groups(self, place: int | None = None) -> list[Together]:
        """The groups of all layers, or those that contain a row."""
        groups = [group for groups in self._together.values() for group in groups]
        return [group for group in groups if place is None or place in group.places]

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of all rows of a group at once, then of the other rows one by one."""
        groups, query = self._together[call.layer], call.query
        if len(groups) == 1 and groups[0].index is None:
            return self._attend_together(groups[0], call)
        out = query.new_zeros(*query.shape[:3], call.value.shape[-1])
        for group in groups:
            assert group.index is not None
            out.index_copy_(0, group.index, self._attend_together(group, call.of_rows(group.index)))
        alone = self._alone[call.layer]
        if alone:
            self.attend_alone(alone, call, self.positions[:, None].to(query.device), out)
        return out

    def _attend_together(self, group: Together, call: LayerCall) -> Tensor:
        """Add the new tokens of a group's rows to their caches, attend, and evict by the rules:
        [rows, heads, 1, value_dim]. `call` has the rows of the group alone."""
        query, key, value = call.query[:, :, 0], call.key[:, :, 0], call.value[:, :, 0]
        pointers, per_row, rows = group.pointers, group.per_row, len(group.caches)
        repeats = pointers.kv_heads * per_row // key.shape[1]
        if repeats > 1:  # the methods have repeated keys to query heads
            key = key.repeat_interleave(repeats, dim=1)
            value = value.repeat_interleave(repeats, dim=1)
        if per_row > 1:  # each head has a cache, which the kernels treat as a row
            query, key, value = (
                part.reshape(rows, -1, part.shape[2]) for part in (query, key, value)
            )
        counts = self._counts[pointers.keys[0].device]
        before = counts.entries[group.slots]
        append_entries(pointers, before, key, value)
        sinks = call.sinks
        if sinks is not None:
            sinks = sinks.view(per_row, -1).repeat(len(group.places), 1)
        output, mass = weighted_decode_attention(
            query,
            pointers,
            counts.with_new[group.slots],
            scaling=call.scaling,
            softcap=call.softcap,
            sinks=sinks,
            return_mass=pointers.weighs,
        )
        if pointers.rules:
            evict_entries(pointers, before, mass, counts.positions, counts.going)
        return output.reshape(len(group.places), call.query.shape[1], 1, -1)

    def move_on(self) -> None:
        """Advance positions and numbers of entries by one token, on the devices. This is the end of a
        step, and is captured with it."""
        for counts in self._counts.values():
            counts.advance()

    def end(self, place: int) -> None:
        """Stop a row that has ended but stays in the batch. Its position and its number of entries no
        longer change. Later steps write its token to the same free place of the buffers every time, and
        their output is not used."""
        if place in self._ended:
            return
        self._write_back_row(place)
        self._ended.add(place)
        for counts in self._counts.values():
            counts.going[place] = 0
        for group in self._groups(place):
            growing = self._counts[group.pointers.keys[0].device].growing
            growing[group.slots][group.slots_of(place)] = 0

    def _write_back_row(self, place: int) -> None:
        for group in self._groups(place) if place not in self._ended else ():
            for cache in group.caches[group.slots_of(place)]:
                cache.count_steps(self.taken)

    def write_back(self) -> None:
        """End these steps: update the number of entries in every cache, which the steps counted on the
        device alone."""
        for place in range(len(self.rows)):
            self._write_back_row(place)
        self.taken = 0


def _kind(caches: Sequence[Cache]) -> Hashable:
    """The sizes, dtype and kind of rule that the caches of rows in one launch must share."""
    keys, values, rule = caches[0].keys, caches[0].values, caches[0].rule
    by_age = None if rule is None else rule.leaves == "oldest"
    return len(caches), keys.shape[0], keys.shape[2], values.shape[2], keys.dtype, by_age


def pointers_in(caches: Sequence[Cache], places: Sequence[int]) -> RowPointers:
    """Where the kernels find the entries of these caches, each of which `steps_by_kernel`; `places`: see
    `RowPointers`.

    The kernels' grids are as large as the longest cache, rounded up to a power of two, so that a
    captured step can be replayed for caches of about the same length.
    """
    longest = max(cache.keys.shape[1] for cache in caches)
    evicting = caches[0].rule is not None
    return RowPointers(
        [cache.keys for cache in caches],
        [cache.values for cache in caches],
        [cache.log_weights for cache in caches],
        longest=1 << (longest - 1).bit_length() if longest else 0,
        rules=[cache.rule for cache in caches if cache.rule] if evicting else (),
        limits=[cache.limit or 0 for cache in caches] if evicting else (),
        scores=[cache.scores for cache in caches] if evicting else (),
        positions=[cache.positions for cache in caches] if evicting else (),
        places=places if evicting else (),
    )


def uses_kernels(device: torch.device) -> bool:
    """Whether rows on this device decode by the kernels: on CUDA, and where ``KVBENCH_KERNELS`` asks for
    Triton."""
    asked = os.environ.get(VARIABLE, "auto")
    return asked == "triton" or (asked == "auto" and device.type == "cuda")


def decode(model: PreTrainedModel, turns: Sequence[Turn], steps: Steps) -> None:
    """Decode until every answer has ended or its row has failed.

    All rows decode together, with two exceptions. A captured step contains only rows that go through the
    kernels, so these decode first, and then the others. And rows with other rotary tables (`table_key`)
    decode apart.
    """
    most = max((turn.answer.steps_left for turn in turns), default=0)
    captures = steps.should_capture(model, most, _options(turns))
    batches: dict[tuple[bool, Hashable], list[Turn]] = {}
    for turn in turns:
        row = turn.row
        key = table_key(model.config, row.tokens, turn.answer.steps_left, row.table_of)
        batches.setdefault((not (captures and row.steps_by_kernel), key), []).append(turn)
    for _, batch in sorted(batches.items(), key=lambda batch: batch[0][0]):
        _decode_batch(model, batch, steps)


def _options(turns: Sequence[Turn]) -> list[str]:
    """The names of the options by which logits of these answers are processed."""
    return sorted({name for turn in turns for name in turn.answer.stopping.processors})


def _decode_batch(model: PreTrainedModel, turns: Sequence[Turn], steps: Steps) -> None:
    """Decode some rows together until all have ended or failed.

    A row that has ended is removed from the batch. Where steps are replayed, rows are removed only when
    half of them have ended, since a smaller batch needs a captured step of its own.
    """
    batch: Batch | None = None
    while True:
        # Before the batch is made: making it and capturing its step are part of the decoding time.
        step_begin_s = time.perf_counter()
        fail_late(turns)
        running = [turn for turn in turns if turn.running]
        if batch is None or batch.should_shrink(running):
            if batch is not None:
                batch.kernel_batch.write_back()
            if not running:
                return
            turns = running
            batch = Batch(model, running, steps)
        batch.step(step_begin_s)


class Batch:
    """Answers whose rows take their steps together.

    Attributes:
        kernel_batch: the rows as the kernels see them.
        ids: [rows, 1] int64, the token that is fed to each row; every step writes the next one.
        draws: [rows], the random number of each row's next token; None where tokens are not drawn.
        replay: runs a captured step; None where the step is run as it is.
    """

    def __init__(self, model: PreTrainedModel, turns: list[Turn], steps: Steps) -> None:
        self.model, self.turns, self.steps = model, turns, steps
        self.step_model = steps.model_for_steps(model)
        device = input_device(model)
        rows, left = [turn.row for turn in turns], [turn.answer.steps_left for turn in turns]
        self.kernel_batch = KernelBatch(model, rows, left, device)
        self.ids = torch.tensor([[turn.answer.chosen[-1]] for turn in turns], device=device)
        self.draws = draws_of(turns, device)
        self.replay: Callable[[], Tensor] | None = None
        by_kernel = all(row.steps_by_kernel for row in rows)
        self._may_capture = by_kernel and steps.should_capture(model, max(left), _options(turns))
        if self._may_capture:
            self.replay = steps.recall(*self._captured_by())

    def _captured_by(self) -> tuple[Hashable, list[Tensor]]:
        """The key of a captured step, and all tensors that it reads and writes (`Steps.capture`)."""
        own = [self.ids] if self.draws is None else [self.ids, self.draws]
        sampling = self.turns[0].answer.sampling
        return (sampling, self.kernel_batch.key), [*own, *self.kernel_batch.tensors]

    def _run(self) -> Tensor:
        """Run one step, which returns what `Sampling.pick` does. All of it is on the device, and on the
        same tensors every time, so that it can be captured."""
        positions = self.kernel_batch.positions[:, None]
        logits = forward(self.step_model, self.ids, positions, self.kernel_batch, keep=1)
        picks = pick(self.turns, logits[:, -1], self.draws)
        self.ids.copy_(picks[0, :, None])
        self.kernel_batch.move_on()
        return picks

    def step(self, begin_s: float) -> None:
        """Decode one token for every row that has not ended, in a step that began at `begin_s` by
        `time.perf_counter`."""
        if self._may_capture and self.replay is None and self.kernel_batch.taken == FIRST_STEPS:
            self._may_capture = False
            self.replay = self.steps.capture(self.model, self._run, *self._captured_by())
        for place, turn in enumerate(self.turns):
            if not turn.running:
                self.kernel_batch.end(place)
        if self.draws is not None:
            self.draws.copy_(torch.tensor([turn.answer.draw for turn in self.turns]))
        run_step = self.replay or self._run
        picks = run_step()
        for turn in self.turns:
            if turn.running:
                turn.row.count_step(1)
        take(self.turns, picks, begin_s)
        self.kernel_batch.taken += 1

    def should_shrink(self, running: Sequence[Turn]) -> bool:
        """Whether a new batch of the running rows alone should take this one's place."""
        if self.replay is None:
            return len(running) < len(self.turns)
        return len(running) <= len(self.turns) // 2
