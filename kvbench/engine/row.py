"""One method on one prompt (`Row`): its caches and states, what they cost, its failure.

Several rows decode together; each is a row of the batch with caches of its own.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from kvbench.engine import check
from kvbench.engine.attention import LayerCall, UnsupportedModel
from kvbench.engine.cache import GROW, Cache, Hook
from kvbench.engine.cost import Cost, ExactBytes
from kvbench.engine.device import release_frames
from kvbench.engine.hooks import PeriodicCompression, hook_of
from kvbench.engine.states import State, clone_of, state_bytes
from kvbench.kernels.elapsed import Elapsed
from kvbench.kv import WHOLE, Budget, BudgetExceeded, CompressedKV, KVError, LayerKV, keep_all
from kvbench.methods.base import HeldShape, Method, allowed_entries

log = logging.getLogger(__name__)


def prompt_name(ids: Sequence[int]) -> str:
    """The example id of a prompt that has no other name: a digest of its tokens. A method's draws then
    depend on the seed and the prompt, and not on the prompt's place in a batch."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def layer_generator(seed: int, example_id: str, layer: int) -> torch.Generator:
    """The random generator of a method at one layer, on the CPU. It depends on seed, example and layer
    alone, so that neither the other methods of a job nor the order of its examples change the draws."""
    digest = hashlib.sha256(f"{seed}\0{example_id}\0{layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@cache
def _say_repeated(label: str, position: int) -> None:
    log.warning(
        "method %r holds position %d twice in one head: each counts as an entry, and attention weighs "
        "both",
        label,
        position,
    )


@dataclass
class Row:
    """One method on one prompt. The prefill calls `begin_prompt`, `compress` or `keep` for every layer,
    and `end_prompt`; then passes feed tokens; `audit` ends them.

    Attributes:
        label: the method's name in this job.
        example_id: seeds the method's draws, together with `seed` and the layer.
        room: how many tokens will be added after the prompt, 0 if the caller does not know.
        caches: the caches of each layer that holds keys, by the layer's index in the model: one, or one
            for each KV head where heads hold different numbers of entries.
        states: the state of each layer that holds one in place of keys, by the layer's index.
        entries: for each layer that the method compresses, [kv_heads] int64, the entries that each head
            holds of the prompt. Counts made on a GPU stay there until `finish_audit`.
        carried: the tensors that the method stored at earlier layers of this prompt.
        compresses: whether the method compresses this prompt.
        failure: the exception that stopped this row, or None; the other rows go on.
        clocks: the clocks of compression.
        prompt_cost: the cost at the end of the prefill; None before.
        end_cost: the cost as of the last audit; None before, and after a failure.
        exact: the bytes of the exact cache of the same prompt, by the number of tokens.
        exact_over_time: these bytes after the prompt and after every step since.
        table_of: the number of tokens of the pass that read the prompt, whose rotary table the keys
            have: more than the prompt's where tokens that are held back were in it (`prefill`).
        fed: the number of tokens fed since the prompt.

    Raises:
        KVError: see `Method.check_decodes`.
    """

    label: str
    method: Method
    budget: Budget
    seed: int
    example_id: str
    room: int = 0
    caches: dict[int, tuple[Cache, ...]] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    entries: dict[int, Tensor] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    compresses: bool = False
    failure: Exception | None = None
    clocks: list[Elapsed] = field(default_factory=list)
    prompt_cost: Cost | None = None
    end_cost: Cost | None = None
    exact: ExactBytes = field(default_factory=ExactBytes)
    exact_over_time: list[int] = field(default_factory=list)
    table_of: int = 0
    fed: int = 0

    def __post_init__(self) -> None:
        self.method.check_decodes()

    # --- the prompt -------------------------------------------------------------------------------

    def begin_prompt(self, n: int) -> None:
        """Begin to read a prompt of n tokens, anew if it was begun before. It will be compressed if it
        is longer than its capacity and the method uses the budget."""
        self._release()
        self.clocks, self.fed, self.end_cost = [], 0, None
        self.compresses = self.method.uses_budget and n > self.budget.capacity(n)

    @property
    def has_second_pass(self) -> bool:
        """Whether the model repeats this prompt for the method before the method compresses it."""
        return self.compresses and self.method.second_pass is not None

    def compress(
        self, layer: int, kv: LayerKV, on_compress: Callable[[str], None] = lambda label: None
    ) -> None:
        """Let the method compress a layer, and hold the result.

        A prompt that is within its capacity is not compressed. A method that evicts is called all the
        same, for the scores by which it evicts once the cache is full.

        Raises:
            check.LayerDamaged: the row has failed, and what the other methods read is wrong.
        """
        if self.failure is not None:
            return
        kv.charged.clear()
        limit = None
        if not self.compresses and self.method.evicts and self.method.uses_budget:
            limit = self.budget.limit(kv.n)
        try:
            if self.compresses or limit is not None:
                on_compress(self.label)
                self.carry_to(kv.keys.device)
                generator = layer_generator(self.seed, self.example_id, layer)
                budget = self.budget if limit is None else WHOLE
                compressed, capacity, clock = check.compress(
                    self.label, self.method, kv, budget, generator, self.carried
                )
                self.clocks.append(clock)
            else:
                compressed, capacity = keep_all(kv), kv.n
            clock = Elapsed(kv.keys.device)
            self._hold(layer, compressed, capacity, limit, kv)
            self.clocks.append(clock.stop())
        except check.LayerDamaged as failure:
            self.fail(failure)
            raise
        except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
            self.fail(failure)
        self.clocks += [clock for clock in kv.charged.values() if clock is not None]

    def carry_to(self, device: torch.device) -> None:
        """Move the tensors that the method stored at earlier layers to the device of the next layer."""
        for name, tensor in self.carried.items():
            self.carried[name] = tensor.to(device)

    def _hold(
        self,
        layer: int,
        compressed: CompressedKV,
        capacity: int,
        limit: int | None,
        prompt: LayerKV,
    ) -> None:
        """Make the caches of a layer, and audit them; a GPU's counts at `finish_audit`.

        Args:
            capacity: the entries per head that the method may keep.
            limit: where the prompt is not compressed and the method evicts, the entries per head beyond
                which it evicts; else None.

        Raises:
            BudgetExceeded: more than `capacity` entries (plus one of rounding) at some head, or on
                average where heads hold different numbers.
            KVError: the method does two things while decoding that exclude each other.
        """
        hook = self._hook(layer, capacity, limit, prompt)
        acts = f"{type(self.method).__name__} acts on its entries while decoding, and holds"
        if hook is not GROW and compressed.lengths is not None:
            raise KVError(f"{acts} heads of different lengths; allowed: one or the other")
        if hook.granted is not None and compressed.keys_only:
            raise KVError(
                f"{acts} {compressed.keys_only} without a value; allowed: one or the other"
            )
        scheme = self.method.quantization()
        self.caches[layer] = caches = tuple(
            Cache(
                part,
                self.room,
                hook,
                capacity=capacity,
                scheme=scheme,
                layer=layer,
                seed=self.seed,
            )
            for part in heads_of(compressed)
        )
        lengths = compressed.lengths
        self.entries[layer] = caches[0].count() if lengths is None else lengths[0].cpu()
        if not self.entries[layer].is_cuda:
            self._check_prompt(layer)

    def _hook(self, layer: int, capacity: int, limit: int | None, prompt: LayerKV) -> Hook:
        """Choose how the method acts on a layer's entries while decoding."""
        method = self.method
        schedule = method.schedule
        if schedule is not None and prompt.queries is not None:
            name = f"{self.example_id}\0while decoding"
            generator = layer_generator(self.seed, name, layer)
            return PeriodicCompression(method, schedule, self.label, self.budget, prompt, generator)
        if not self.compresses and limit is None:
            return GROW
        granted = capacity if limit is None else limit
        if method.uses_budget and not method.saves_memory:
            # The cache is whole: its capacity is the prompt, and the budget says what a query may see.
            granted = self.budget.capacity(capacity)
        return hook_of(method, granted, self.budget.sink)

    def keep(self, layer: int, compressed: CompressedKV, window: int | None) -> None:
        """Hold a layer that is not compressed: its sliding window, or all of it."""
        if self.failure is None:
            cache = Cache(compressed, self.room, capacity=compressed.keys.shape[2], window=window)
            self.caches[layer] = (cache,)

    def charged(self, layer: int, entries: Tensor) -> int:
        """The number of entries per head of a layer that is charged to the budget, by the number of each
        head [kv_heads]: the largest head's, or the mean rounded up where heads have caches of their
        own."""
        heads = len(self.caches[layer])
        return int(entries.max()) if heads == 1 else -int(-entries.sum() // heads)

    def _check_prompt(self, layer: int) -> None:
        capacity = self.caches[layer][0].capacity
        charged = self.charged(layer, self.entries[layer])
        if charged > capacity + 1:
            raise BudgetExceeded(self.label, layer, capacity, charged)

    def finish_audit(self) -> None:
        """Audit the layers whose entries a GPU has counted, waiting for it once. Say so where a head of
        the first layer holds a position of the prompt twice."""
        on_device = [layer for layer, counts in self.entries.items() if counts.is_cuda]
        if on_device:
            device = self.entries[on_device[0]].device
            counts = [self.entries[layer] for layer in on_device]
            on_host = torch.cat([each.to(device) for each in counts]).cpu()
            try:
                for layer, count in zip(
                    on_device, on_host.split([len(each) for each in counts]), strict=True
                ):
                    self.entries[layer] = count
                    self._check_prompt(layer)
            except BudgetExceeded as failure:
                self.fail(failure)
        if self.compresses and self.method.keeps_entries and self.failure is None:
            repeated = self._first_repeated()
            if repeated is not None:
                _say_repeated(self.label, repeated)

    def _first_repeated(self) -> int | None:
        """The first position that a head of the first compressed layer holds twice; None without one."""
        for held in self.caches[next(iter(self.entries))]:
            positions = held.positions[:, : held.length]
            if held.log_weights is not None:  # padding
                is_padding = held.log_weights[:, : held.length] == -torch.inf
                positions = positions.masked_fill(is_padding, -1)
            positions = positions.sort().values
            twice = (positions[:, 1:] == positions[:, :-1]) & (positions[:, 1:] >= 0)
            if twice.any():
                return int(positions[:, 1:][twice][0])
        return None

    def end_prompt(
        self, n: int, exact: ExactBytes, states: dict[int, State], prefill_s: float | None = None
    ) -> None:
        """Note the states and the cost when the prompt's n tokens have been read and compressed. Waits
        for a GPU that is still compressing.

        Args:
            exact: the bytes of the exact cache.
            prefill_s: see `Cost`.
        """
        self.states, self.exact, self.exact_over_time, self.fed = states, exact, [exact.at(n)], 0
        self.prompt_cost = cost = Cost(
            prompt_tokens=n,
            capacity=self.budget.capacity(n) if self.method.saves_memory else n,
            exact_bytes=exact.at(n),
            compressed=self.compresses or self.method.quantize is not None,
            compress_s=sum(clock.seconds for clock in self.clocks),
            prefill_s=prefill_s,
        )
        if self.failure is not None:
            return
        try:
            extras: Any = self.method.extras(n, self._shapes())
        except Exception as failure:  # noqa: BLE001 - this method's failure is its own record
            self.fail(failure)
            return
        entries = torch.cat([counts.cpu() for counts in self.entries.values()])
        self.prompt_cost = cost = replace(
            cost,
            entries={"mean": float(entries.float().mean()), "max": int(entries.max())},
            cache_bytes=self.cache_bytes(),
            extras=extras,
        )
        if self.method.is_exact and cost.cache_bytes != cost.exact_bytes:
            self.fail(
                UnsupportedModel(
                    f"the exact cache holds {cost.cache_bytes} bytes, and the model's keys and values "
                    f"of {n} tokens have {cost.exact_bytes}; allowed: models of which it holds all"
                )
            )

    def _shapes(self) -> dict[int, HeldShape]:
        """The sizes of the caches of the layers that the method compresses, by the layer's index."""
        shapes = {}
        for layer in self.entries:
            caches = self.caches[layer]
            keys, values = caches[0].keys, caches[0].values
            heads = sum(cache.keys.shape[0] for cache in caches)
            longest = max(cache.length for cache in caches)
            shapes[layer] = HeldShape(
                heads, longest, keys.shape[2], values.shape[2], keys.element_size()
            )
        return shapes

    # --- tokens after it --------------------------------------------------------------------------

    @property
    def tokens(self) -> int:
        """The number of tokens read so far, of the prompt and since, whether or not their entries are
        still held. It is also the position of the next token."""
        assert self.prompt_cost is not None, "the prompt has not been read"
        return self.prompt_cost.prompt_tokens + self.fed

    @property
    def steps_by_kernel(self) -> bool:
        """Whether the decoding steps of every layer go through the kernels and so never wait for the
        device. Otherwise some layers attend row by row."""
        return all(cache.steps_by_kernel for caches in self.caches.values() for cache in caches)

    def attend(self, call: LayerCall, positions: Tensor) -> Tensor:
        """Feed the t tokens of a call of this row alone, at positions [t], to the caches of its layer:
        their attention, [heads, t, value_dim]."""
        caches = self.caches[call.layer]
        if len(caches) == 1:
            return caches[0].step(call, positions)
        count = len(caches)
        parts = [part.chunk(count, 1) for part in (call.query, call.key, call.value)]
        sinks = [None] * count if call.sinks is None else call.sinks.chunk(count)
        outputs = [
            cache.step(replace(call, query=q, key=k, value=v, sinks=own_sinks), positions)
            for cache, q, k, v, own_sinks in zip(caches, *parts, sinks, strict=True)
        ]
        return torch.cat(outputs)

    def count_step(self, tokens: int) -> None:
        """Note a step that fed `tokens` tokens."""
        self.fed += tokens
        self.exact_over_time.append(self.exact.at(self.tokens))

    def clone(self) -> Row:
        """A copy with caches, states and costs of its own, which can decode another continuation."""
        return replace(
            self,
            caches={i: tuple(cache.clone() for cache in own) for i, own in self.caches.items()},
            states=clone_of(self.states),
            entries=dict(self.entries),
            carried=dict(self.carried),
            exact_over_time=list(self.exact_over_time),
        )

    def fail(self, failure: Exception) -> None:
        """End this row with a failure, and release its memory for the other rows."""
        self.failure = failure
        self.end_cost = None
        release_frames(failure)
        self._release()

    def _release(self) -> None:
        for held in (self.caches, self.entries, self.carried):
            held.clear()

    # --- cost and audit ---------------------------------------------------------------------------

    def cache_bytes(self) -> int:
        """The bytes that all layers and states hold now."""
        entries = sum(cache.nbytes() for caches in self.caches.values() for cache in caches)
        return entries + state_bytes(self.states)

    def held_entries(self, layer: int) -> Tensor:
        """The entries that each head of a layer holds now, without padding: [kv_heads] on the host."""
        return torch.cat([cache.count().cpu() for cache in self.caches[layer]])

    def audit(self) -> None:
        """Count the entries of every layer again, after the last token, and compare them with what the
        caches and the budget allow (`Cache.allowed`, `allowed_entries`). Then note the cost.

        Raises:
            BudgetExceeded: a layer holds more than its capacity and the tokens since, or all layers
                together hold more than the budget (one entry a layer of rounding).
        """
        assert self.prompt_cost is not None
        total, entries_left = 0, False
        for layer, entries in self.entries.items():
            after_prompt, held = self.charged(layer, entries), self.held_entries(layer)
            now = self.charged(layer, held)
            allowed = self.caches[layer][0].allowed(after_prompt, self.fed)
            if now > allowed:
                raise BudgetExceeded(self.label, layer, allowed, now)
            total += after_prompt
            entries_left |= int(held.max()) < int(entries.max()) + self.fed
        layers, n = len(self.entries), self.prompt_cost.prompt_tokens
        allowed, preset = allowed_entries(self.method, self.budget, n, layers)
        if total > allowed + layers:
            raise BudgetExceeded(self.label, -1, allowed, total)
        all_caches = [cache for caches in self.caches.values() for cache in caches]
        states = state_bytes(self.states)
        self.end_cost = replace(
            self.prompt_cost,
            cache_bytes_end=self.cache_bytes(),
            cache_bytes_peak=sum(cache.bytes_peak for cache in all_caches) + states,
            cache_bytes_mean=sum(cache.bytes_mean for cache in all_caches) + states,
            exact_bytes_mean=fmean(self.exact_over_time),
            compressed=self.prompt_cost.compressed or entries_left,
            budget_preset=preset,
        )

    def try_audit(self) -> None:
        """`audit`; the row fails where it raises."""
        if self.failure is None:
            try:
                self.audit()
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                self.fail(failure)

    def cost(self) -> Cost:
        """The cost as of the last `audit`, or of the prefill."""
        assert self.prompt_cost is not None, "the prompt has not been read"
        return self.end_cost or self.prompt_cost


def heads_of(compressed: CompressedKV) -> Iterable[CompressedKV]:
    """Split what a method keeps of a layer by heads, without padding, where these hold different numbers
    of entries; else yield it whole.

    Raises:
        KVError: heads of different lengths have scores, signed weights or entries without values.
    """
    if compressed.lengths is None:
        yield compressed
        return
    if compressed.keys_only or compressed.scores is not None or compressed.denominators is not None:
        raise KVError(
            "heads of different lengths hold scores, signed weights or keys without values; "
            "allowed: keys, values and log_weights"
        )
    for head, length in enumerate(compressed.lengths[0].tolist()):
        own = (slice(None), slice(head, head + 1), slice(length))
        weights = None if compressed.log_weights is None else compressed.log_weights[own]
        if weights is not None and not weights.any():
            weights = None  # zeros are not stored, as `CompressedKV.nbytes` counts
        yield CompressedKV(
            compressed.keys[own], compressed.values[own], weights, compressed.positions[own]
        )
