"""A fork: one method's caches of all layers, made from a shared prefill; and several forks that decode
together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine import guard, memory
from kvbench.engine.attention import AttentionState, LayerCall
from kvbench.engine.cache import GrowingCache, LayerCache, cache_of, store_of
from kvbench.engine.costs import Cost, ExactBytes, Ledger
from kvbench.engine.faults import release_frames
from kvbench.engine.ragged_cache import RaggedCache
from kvbench.engine.ranks import Ranks
from kvbench.engine.recompressed_cache import RecompressedCache
from kvbench.engine.states import PassingCache, State, clone_of, joined_cache, state_bytes
from kvbench.kernels.philox import to_device
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV
from kvbench.methods.base import HeldShape, Method, allowed_entries


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
    """One method on one prompt: what it holds, layer by layer, and the audit of that.

    Attributes:
        label: the method's name in this job.
        example_id: seeds the method's draws, together with seed and layer.
        room: tokens that will be appended, if the caller knows.
        layers: the cache of each layer that holds keys, by layer index; filled by the prefill.
        states: the state of each layer that holds one in place of keys, by layer index.
        compressible: the layers that the method compresses.
        shapes: how many entries, of which kinds, those layers hold of the prompt.
        carried: what the method noted at earlier layers of this prompt (`LayerKV.carried`).
        compressed: whether the method compresses this prompt.
        unaudited: layers whose entries `audit_prompt` still has to count.
        ledger: what the fork has cost so far.
        failure: what stopped this fork, if anything did; the other forks go on.
        ranks: the processes that share the model; each has a fork of its own KV heads.
    """

    label: str
    method: Method
    budget: Budget
    seed: int
    example_id: str
    room: int
    layers: dict[int, LayerCache] = field(default_factory=dict)
    states: dict[int, State] = field(default_factory=dict)
    compressible: list[int] = field(default_factory=list)
    shapes: dict[int, HeldShape] = field(default_factory=dict)
    carried: dict[str, Tensor] = field(default_factory=dict)
    compressed: bool = False
    unaudited: list[int] = field(default_factory=list)
    ledger: Ledger = field(default_factory=Ledger)
    failure: Exception | None = None
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        if getattr(self.method, "decoded_by", "kvbench") != "kvbench":
            raise KVError(
                f"method {self.label!r} is decoded by {self.method.decoded_by}, a witness of seconds; "
                "allowed: task=throughput, or exact, which is the same cache"
            )
        if self.method.whole_pass is not None:
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

    def begin_prompt(self, n: int, ranks: Ranks | None = None) -> None:
        """A prompt of n tokens is about to be read: decide whether it is compressed, which it is unless
        its capacity holds all of it."""
        self.ranks = ranks or Ranks()
        self.example_id = self.ranks.name_of_draws(self.example_id)
        self.compressed = self.method.uses_budget and n > self.budget.capacity(n)

    @property
    def steps_by_kernel(self) -> bool:
        """Whether single tokens join every layer through a kernel: then a step asks the host for
        nothing. A fork of which this is not so decodes alone in some layers."""
        return all(cache.steps_by_kernel for cache in self.layers.values())

    @property
    def rescores(self) -> bool:
        """Whether the method is to see this prompt repeated before it compresses it."""
        return self.compressed and self.method.rescoring is not None

    @property
    def tokens(self) -> int:
        """Tokens read so far, of the prompt and since, whether or not their entries are still held."""
        return self.ledger.tokens

    def fail(self, failure: Exception) -> None:
        """This fork ends here; its memory is given back, for the others to go on with."""
        self.failure = failure
        self.ledger.bytes_end = None
        release_frames(failure)
        self.layers.clear()
        self.compressible.clear()
        self.carried.clear()
        self.unaudited.clear()

    def agree(self) -> None:
        """Fail where this fork has failed on any rank. Waits for the other ranks, which all call it."""
        failure = self.ranks.agree_on(self.failure)
        if failure is not None and failure is not self.failure:
            self.fail(failure)

    def clone(self) -> Fork:
        """A copy with caches, states and costs of its own, to decode another continuation with."""
        return replace(
            self,
            layers={index: layer.clone() for index, layer in self.layers.items()},
            states=clone_of(self.states),
            compressible=list(self.compressible),
            carried=dict(self.carried),
            unaudited=list(self.unaudited),
            ledger=self.ledger.clone(),
        )

    def carry_to(self, device: torch.device) -> None:
        """Move what the method noted at earlier layers to the device of the next layer."""
        for name, tensor in self.carried.items():
            self.carried[name] = tensor.to(device)

    def hold(
        self,
        layer: int,
        held: CompressedKV,
        capacity: int,
        *,
        limit: int | None = None,
        prompt: LayerKV | None = None,
    ) -> None:
        """Make the cache of one layer from what the method keeps of it, and audit it.

        Args:
            held: what the method keeps.
            capacity: entries per head that it may keep.
            limit: for a prompt that is not compressed, and a method that evicts: the entries per head
                beyond which it evicts.
            prompt: the whole layer, for a method that compresses again while decoding.

        Raises:
            BudgetExceeded: more than `capacity` entries (plus one of rounding) at some head, or on
                average where heads hold different numbers.
        """
        granted = capacity if limit is None else limit
        if self.method.uses_budget and not self.method.saves_memory:
            granted = self.budget.capacity(capacity)
        recompression = self.method.recompression
        self.shapes[layer] = HeldShape.of(held)

        def make(part: CompressedKV) -> GrowingCache:
            if recompression is not None and prompt is not None and prompt.queries is not None:
                return RecompressedCache(
                    store_of(part, self.room),
                    capacity=capacity,
                    method=self.method,
                    recompression=recompression,
                    label=self.label,
                    budget=self.budget,
                    prompt=prompt,
                    generator=layer_generator(
                        self.seed, f"{self.example_id}\0while decoding", layer
                    ),
                )
            return cache_of(
                part,
                self.room,
                self.method,
                capacity=capacity,
                granted=granted,
                sink=self.budget.sink,
                active=self.compressed or limit is not None,
                scheme=self.method.quantization(),
                layer=layer,
                seed=self.seed,
            )

        cache = make(held) if held.lengths is None else RaggedCache(held, make)
        self.layers[layer] = cache
        self.compressible.append(layer)
        self.unaudited.append(layer)
        if not cache.prompt_entries.is_cuda:
            self.audit_prompt()

    def audit_prompt(self) -> None:
        """Audit what the prompt's layers hold since the last time; waits for a GPU once.

        Raises:
            BudgetExceeded: see `hold`.
        """
        layers = self.unaudited
        self.unaudited = []
        caches = [self.layers[layer] for layer in layers]
        if not caches:
            return
        counted = [cache.prompt_entries for cache in caches]
        together = torch.cat([counts.to(counted[0].device) for counts in counted]).cpu()
        parts = together.split([len(counts) for counts in counted])
        for layer, cache, counts in zip(layers, caches, parts, strict=True):
            cache.prompt_entries = counts
            if cache.charged(counts) > cache.capacity + 1:
                raise BudgetExceeded(self.label, layer, cache.capacity, cache.charged(counts))

    def end_prompt(self, n: int, exact: ExactBytes) -> None:
        """The prompt's n tokens have been read and compressed: note what is held of them. Waits for the
        other ranks."""
        extras: dict[str, int] = {}
        if self.failure is None:
            try:
                extras = guard.extras(self.label, self.method, n, self.shapes)
            except Exception as failure:  # noqa: BLE001 - this method's failure is its own record
                self.fail(failure)
        self.agree()
        cost = Cost(
            prompt_tokens=n,
            capacity=self.budget.capacity(n) if self.method.saves_memory else n,
            exact_bytes=exact.at(n),
            compressed=self.compressed or self.method.quantize is not None,
        )
        if self.failure is None:
            own_entries = [self.layers[layer].prompt_entries.cpu() for layer in self.compressible]
            entries = torch.cat(self.ranks.gather(torch.cat(own_entries)))
            cost = replace(
                cost,
                entries={"mean": float(entries.float().mean()), "max": int(entries.max())},
                cache_bytes=sum(self.ranks.gather(self.cache_bytes())),
                extras=extras,
            )
        self.ledger.begin(cost, exact)

    def _allowed_entries(self, n: int, layers: int) -> tuple[int, str | None]:
        """See `kvbench.methods.base.allowed_entries`, which asks the method."""
        return guard.call(self.method, allowed_entries, self.method, self.budget, n, layers)

    def cost(self) -> Cost:
        """What the cache costs, by what is known since the prefill and the last `audit`. Waits for the
        device, whose clocks it reads, and for the other ranks, which must all call it."""
        ledger = self.ledger
        self.agree()
        ledger.read_clocks()
        cost = replace(ledger.prompt, compress_s=ledger.compress_s)
        if ledger.bytes_end is None:
            return cost
        caches = [self.layers[layer] for layer in self.compressible]
        entries_left = any(
            int(cache.entries().max()) < int(cache.prompt_entries.max()) + ledger.appended
            for cache in caches
        )
        own_peaks_and_means = [cache.held_bytes() for cache in self.layers.values()]
        of_ranks = self.ranks.gather((ledger.bytes_end, own_peaks_and_means))
        states = state_bytes(self.states)
        _, preset = self._allowed_entries(cost.prompt_tokens, len(caches))
        return replace(
            cost,
            cache_bytes_end=sum(bytes_end for bytes_end, _ in of_ranks),
            cache_bytes_peak=sum(peak for _, rank in of_ranks for peak, _ in rank) + states,
            cache_bytes_mean=sum(mean for _, rank in of_ranks for _, mean in rank) + states,
            exact_bytes_mean=ledger.exact_bytes_mean,
            compressed=cost.compressed or entries_left,
            budget_preset=preset,
        )

    def audit(self) -> None:
        """Count the entries of every layer again, after the last token. A cache that evicts holds no
        more than it was granted, or than compression left.

        Raises:
            BudgetExceeded: a layer holds more than its capacity and the tokens since, or all layers
                together hold more than the budget (one entry a layer of rounding).
        """
        total_after_prompt = 0
        for layer in self.compressible:
            cache = self.layers[layer]
            after_prompt = cache.charged(cache.prompt_entries)
            now = cache.charged(cache.entries())
            allowed = cache.allowed(after_prompt, self.ledger.appended)
            if now > allowed:
                raise BudgetExceeded(self.label, layer, allowed, now)
            total_after_prompt += after_prompt
        layers = len(self.compressible)
        n = self.ledger.prompt.prompt_tokens
        allowed, _ = self._allowed_entries(n, layers)
        if total_after_prompt > allowed + layers:
            raise BudgetExceeded(self.label, -1, allowed, total_after_prompt)
        self.ledger.bytes_end = self.cache_bytes()

    def cache_bytes(self) -> int:
        """Bytes held now, all layers and states."""
        entries = sum(cache.entry_bytes() for cache in self.layers.values())
        return entries + state_bytes(self.states)


def copies_at_once(forks: Sequence[Fork], most: int, device: torch.device) -> int:
    """How many copies of all of these forks half of the device's free memory holds: 1 to `most`, and
    `most` where the free memory is not known. Waits for the other ranks, which have as many."""
    total, used = memory.total_bytes(device), memory.used_bytes(device)
    copy = sum(cache.reserved_bytes() for fork in forks for cache in fork.layers.values())
    if most == 1 or total is None or used is None or not copy:
        return most
    fits = forks[0].ranks.gather((total - used) // (2 * copy))
    return max(1, min(most, *fits))


class ForkBatch(AttentionState):
    """Attention state of a pass: row i of the batch is fork ``forks[i]``.

    Args:
        forks: one per batch row.
        positions: position of each token fed: [t], the same for every row, or [rows, t].
    """

    def __init__(self, forks: Sequence[Fork], positions: Tensor) -> None:
        self.forks = forks
        self.positions = positions
        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `AttentionState`: a cache of the forks' states, which become views of it."""
        if self._past is None:
            self._past = joined_cache(config, [fork.states for fork in self.forks])
        return self._past

    def attend(self, call: LayerCall) -> Tensor:
        """Each row against its own cache; a row whose fork failed attends to nothing."""
        if self.positions.device != call.query.device:  # once, not at every layer
            self.positions = to_device(self.positions, call.query.device)
        rows = range(len(self.forks))
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        self.attend_rows(rows, call, self.positions.expand(len(rows), -1), out)
        return out

    def attend_rows(
        self, rows: Sequence[int], call: LayerCall, positions: Tensor, out: Tensor
    ) -> None:
        """Feed some rows' tokens, at positions [rows, t], to their caches, and put the attention into
        out [rows, heads, t, value_dim]."""
        for row in rows:
            fork = self.forks[row]
            if fork.failure is None:
                try:
                    out[row] = fork.layers[call.layer].step(call.of_row(row), positions[row])
                except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                    fork.fail(failure)
                    out[row] = torch.nan  # ends the row on other ranks, too
