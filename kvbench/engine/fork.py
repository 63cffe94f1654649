"""One method's caches of all layers, and several of them decoding together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache
from kvbench.engine.faults import release_frames
from kvbench.engine.ragged import RaggedCache
from kvbench.engine.recompress import Recompressor
from kvbench.engine.shared import attend_branches, branch_of, merged, rows_by_base
from kvbench.engine.states import PassingCache, State, clone_of, joined_cache, state_bytes
from kvbench.kernels.elapsed import Elapsed
from kvbench.kernels.philox import to_device
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV
from kvbench.methods.base import Method, allowed_entries


def prompt_name(ids: Sequence[int]) -> str:
    """The example id of a prompt that has no other name: a digest of its tokens, so that a method's
    draws depend on seed and prompt, not on the prompt's place in a batch."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def layer_generator(seed: int, example_id: str, layer: int) -> torch.Generator:
    """A CPU generator that depends on seed, example and layer only, so that neither the other
    methods of a job nor the order of its examples change a method's draws."""
    digest = hashlib.sha256(f"{seed}\0{example_id}\0{layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass
class Fork:
    """One method on one prompt: its layers, its audit, its seconds.

    Attributes:
        label: the method's name in this job.
        room: tokens that will be appended, if the caller knows.
        layers: filled by the prefill, by layer index; states: of the layers that hold no keys.
        carried: what the method noted at earlier layers of this prompt (`LayerKV.carried`).
        compress_s: seconds of compression; `clocks` are still to be read, by `read_clocks`.
        unaudited: layers whose entries are still to be counted, by `audit_prompt`.
        failure: what stopped this fork, if anything did; the other forks go on.
        budget_preset: see `kvbench.methods.base.allowed_entries`; known after the audit.
    """

    label: str
    method: Method
    budget: Budget
    seed: int
    example_id: str
    room: int
    layers: dict[int, LayerCache] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    compress_s: float = 0.0
    clocks: list[Elapsed] = field(default_factory=list)
    unaudited: list[int] = field(default_factory=list)
    compressed: bool = False
    appended: int = 0
    failure: Exception | None = None
    budget_preset: str | None = None

    def __post_init__(self) -> None:
        if self.method.masks_whole_pass:
            raise KVError(
                f"method {self.label!r} masks one pass over prompt and answer, and holds no cache to "
                "generate with; allowed: methods that do (likelihoods alone, as task=fidelity and "
                "task=lm_eval measure them, take it)"
            )

    def limit(self, n: int) -> int | None:
        """Entries per head that the cache of an n-token prompt may hold at any time, if the method is
        one that evicts; None where it grows."""
        evicts = self.method.evicts and self.method.uses_budget
        return self.budget.limit(n) if evicts else None

    @property
    def rescores(self) -> bool:
        """Whether the method is to see this prompt repeated before it compresses it."""
        return self.compressed and self.method.rescoring is not None

    @property
    def evicted(self) -> bool:
        """Whether entries have left while decoding."""
        return any(
            cache.evicts and cache.length < int(cache.prompt_entries.max()) + self.appended
            for cache in self.layers.values()
        )

    def read_clocks(self) -> None:
        """Add up the seconds of compression so far; waits for a GPU that is not done with it."""
        self.compress_s += sum(clock.seconds for clock in self.clocks)
        self.clocks = []

    def fail(self, failure: Exception) -> None:
        """This fork ends here; what it holds is given back, for the others to go on with."""
        self.failure = failure
        release_frames(failure)
        self.layers.clear()
        self.carried.clear()
        self.unaudited.clear()

    def clone(self) -> Fork:
        """A copy that goes on separately from here."""
        layers = {index: layer.clone() for index, layer in self.layers.items()}
        return replace(self, layers=layers, states=clone_of(self.states))

    def branch(self) -> Fork:
        """A copy that goes on from here, for as long as nothing is fed to this one: see
        `branch_of`."""
        layers = {index: branch_of(layer) for index, layer in self.layers.items()}
        return replace(
            self, layers=layers, states=clone_of(self.states), carried=dict(self.carried)
        )

    def merged(self) -> Fork:
        """Of a branch, a fork that holds all entries itself."""
        return replace(self, layers={index: merged(layer) for index, layer in self.layers.items()})

    def carry_to(self, device: torch.device) -> None:
        """What the method noted at earlier layers, on the device of the next."""
        for name, noted in self.carried.items():
            self.carried[name] = noted.to(device)

    def hold(
        self,
        layer: int,
        held: CompressedKV,
        capacity: int,
        *,
        compressible: bool = True,
        window: int | None = None,
        limit: int | None = None,
        prompt: LayerKV | None = None,
    ) -> None:
        """Take over what the method keeps of one layer, and audit it.

        Args:
            limit: of a prompt that is not compressed: where eviction begins.
            prompt: the whole layer, for a method that compresses again while decoding.

        Raises:
            BudgetExceeded: more than `capacity` entries (plus one of rounding) at some head, or on
                average where heads hold different numbers.
        """
        granted = capacity if limit is None else limit
        if compressible and self.method.uses_budget and not self.method.saves_memory:
            granted = self.budget.capacity(capacity)
        make = partial(
            LayerCache,
            room=self.room,
            method=self.method,
            capacity=capacity,
            granted=granted,
            sink=self.budget.sink,
            window=window,
            active=compressible and (self.compressed or limit is not None),
            quantization=self.method.quantization() if compressible else None,
            layer=layer,
            seed=self.seed,
        )
        cache = make(held) if held.lengths is None else RaggedCache(held, make)
        if compressible and prompt is not None:
            generator = layer_generator(self.seed, f"{self.example_id}\0while decoding", layer)
            cache.again = Recompressor.begin(
                self.label, self.method, self.budget, prompt, generator
            )
        self.layers[layer] = cache
        if compressible:
            self.unaudited.append(layer)
        if not cache.prompt_entries.is_cuda:
            self.audit_prompt()

    def audit_prompt(self) -> None:
        """Audit what the prompt's layers hold since the last time; waits for a GPU once.

        Raises:
            BudgetExceeded: see `hold`.
        """
        layers, self.unaudited = self.unaudited, []
        caches = [self.layers[layer] for layer in layers]
        if not caches:
            return
        counted = [cache.prompt_entries for cache in caches]
        together = torch.cat([counts.to(counted[0].device) for counts in counted]).cpu()
        parts = together.split([len(counts) for counts in counted])
        for layer, cache, counts in zip(layers, caches, parts, strict=True):
            cache.prompt_entries = counts
            if cache.prompt_charged > cache.capacity + 1:
                raise BudgetExceeded(self.label, layer, cache.capacity, cache.prompt_charged)

    def audit(self, n: int, compressible: Sequence[int]) -> None:
        """Count the entries of every layer again, after the last token. A cache that evicts holds no
        more than it was granted, or than compression left.

        Raises:
            BudgetExceeded: a layer holds more than its capacity and the tokens since, or all layers
                together hold more than the budget (one entry a layer of rounding).
        """
        total = 0
        for layer in compressible:
            cache = self.layers[layer]
            left, found = cache.prompt_charged, cache.charged
            allowed = cache.capacity + 1 + self.appended
            if self.limit(n) is not None:
                allowed = max(cache.granted, left)
            if found > allowed:
                raise BudgetExceeded(self.label, layer, allowed, found)
            total += left
        allowed, self.budget_preset = allowed_entries(
            self.method, self.budget, n, len(compressible)
        )
        if total > allowed + len(compressible):
            raise BudgetExceeded(self.label, -1, allowed, total)

    def prompt_counts(self, compressible: Sequence[int]) -> dict[str, float]:
        """Entries held after compression, per layer and KV head: mean and maximum."""
        entries = [self.layers[layer].prompt_entries.flatten() for layer in compressible]
        counts = torch.cat([one.to(entries[0].device) for one in entries])  # layers of other GPUs
        return {"mean": float(counts.float().mean()), "max": int(counts.max())}

    def cache_bytes(self) -> int:
        """Bytes held now, all layers and states."""
        held = sum(cache.entry_bytes() for cache in self.layers.values())
        return held + state_bytes(self.states)


class ForkBatch:
    """Attention state of a decode step: row i of the batch is fork ``forks[i]``.

    Args:
        forks: one per batch row.
        positions: position of each token fed in this step: [t], the same for every row, or [rows, t].
    """

    def __init__(self, forks: Sequence[Fork], positions: Tensor) -> None:
        self.forks = forks
        self.positions = positions

        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `Stateful`."""
        self._past = self._past or joined_cache(config, [fork.states for fork in self.forks])
        return self._past

    def attend(self, call: LayerCall) -> Tensor:
        """Each row against its own cache; a row whose fork failed attends to nothing. Rows that share
        entries read those together."""
        query = call.query
        if self.positions.device != query.device:  # once, not at every layer
            self.positions = to_device(self.positions, query.device)
        positions = self.positions.expand(len(self.forks), -1)
        out = query.new_zeros(*query.shape[:3], call.value.shape[-1])
        caches = [fork.layers.get(call.layer) for fork in self.forks]
        joined = rows_by_base(caches)
        for rows in joined:
            held = [cache for cache in (caches[row] for row in rows) if cache is not None]
            out[rows] = attend_branches(held, call.of_rows(rows), positions[rows])
        done = {row for rows in joined for row in rows}
        for i, fork in enumerate(self.forks):
            if fork.failure is not None or i in done:
                continue
            try:
                out[i] = fork.layers[call.layer].step(call.of_row(i), positions[i])
            except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                fork.fail(failure)
        return out
