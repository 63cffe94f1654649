"""A fork: one method's caches of all layers, made from a shared prefill (`Fork`). Several forks decode
together as the rows of a batch (`ForkBatch`)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine import memory
from kvbench.engine.attention import AttentionState, LayerCall, UnsupportedModel
from kvbench.engine.cache import GrowingCache, LayerCache, cache_of, store_of
from kvbench.engine.costs import Cost, ExactBytes, Ledger
from kvbench.engine.faults import release_frames
from kvbench.engine.ragged_cache import RaggedCache
from kvbench.engine.recompressed_cache import RecompressedCache
from kvbench.engine.states import PassingCache, State, clone_of, joined_cache, state_bytes
from kvbench.kernels.philox import to_device
from kvbench.kv import Budget, BudgetExceeded, CompressedKV, KVError, LayerKV
from kvbench.methods.base import HeldShape, Method, allowed_entries
from kvbench.methods.exact import Exact


def prompt_name(ids: Sequence[int]) -> str:
    """The example id of a prompt that has no other name: a digest of its tokens. A method's draws then
    depend on the seed and the prompt, and not on the prompt's place in a batch."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()


def layer_generator(seed: int, example_id: str, layer: int) -> torch.Generator:
    """The random generator of a method at one layer, on the CPU. It depends on seed, example and layer
    alone, so that neither the other methods of a job nor the order of its examples change the draws."""
    digest = hashlib.sha256(f"{seed}\0{example_id}\0{layer}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@dataclass
class Fork:
    """One method on one prompt: the caches of all layers, and their audit.

    A fork goes through `begin_prompt`, `hold` for every layer, `end_prompt`, then decoding steps, and
    `audit`; `cost` may be asked from `end_prompt` on.

    Attributes:
        label: the method's name in this job.
        example_id: seeds the method's draws, together with `seed` and the layer.
        room: how many tokens will be added after the prompt, 0 if the caller does not know.
        layers: the cache of each layer that holds keys, by the layer's index in the model; filled by the
            prefill.
        states: the state of each layer that holds one in place of keys, by the layer's index.
        compressible: the indices of the layers that the method compresses.
        shapes: the sizes of these layers' caches after the prompt, by the layer's index.
        carried: the tensors that the method stored at earlier layers of this prompt
            (`LayerKV.carried`).
        compressed: whether the method compresses this prompt.
        unaudited: the indices of layers whose entries `audit_prompt` still has to count.
        ledger: the cost of the fork so far.
        failure: the exception that stopped this fork, or None; the other forks go on.

    Raises:
        KVError: the method holds no cache (`Method.holds_a_cache`).
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

    def __post_init__(self) -> None:
        if not self.method.holds_a_cache:
            raise KVError(
                f"method {self.label!r} masks one pass over prompt and answer, and holds no cache to "
                "decode with; allowed: task=lm_eval, which takes likelihoods alone"
            )

    def limit(self, n: int) -> int | None:
        """The entries per head that the cache may hold at any time after a prompt of n tokens, for a
        method that evicts; None where the cache grows."""
        evicts = self.method.evicts and self.method.uses_budget
        return self.budget.limit(n) if evicts else None

    def begin_prompt(self, n: int) -> None:
        """Begin to read a prompt of n tokens, anew if it was begun before. It will be compressed if it
        is longer than its capacity and the method uses the budget."""
        self._release()
        self.ledger = Ledger()
        self.compressed = self.method.uses_budget and n > self.budget.capacity(n)

    @property
    def steps_by_kernel(self) -> bool:
        """Whether the decoding steps of every layer go through the kernels
        (`LayerCache.steps_by_kernel`) and so never wait for the device. Otherwise some layers attend row
        by row."""
        return all(cache.steps_by_kernel for cache in self.layers.values())

    @property
    def rescores(self) -> bool:
        """Whether the model repeats this prompt for the method before the method compresses it."""
        return self.compressed and self.method.rescoring is not None

    @property
    def tokens(self) -> int:
        """The number of tokens read so far, of the prompt and since, whether or not their entries are
        still held. It is also the position of the next token."""
        return self.ledger.tokens

    def fail(self, failure: Exception) -> None:
        """End this fork with a failure, and release its memory for the other forks."""
        self.failure = failure
        self.ledger.bytes_end = None
        release_frames(failure)
        self._release()

    def _release(self) -> None:
        self.layers.clear()
        self.compressible.clear()
        self.shapes.clear()
        self.carried.clear()
        self.unaudited.clear()

    def clone(self) -> Fork:
        """A copy with caches, states and costs of its own, which can decode another continuation."""
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
        """Move the tensors that the method stored at earlier layers to the device of the next layer."""
        for name, tensor in self.carried.items():
            self.carried[name] = tensor.to(device)

    def hold(
        self,
        layer: int,
        compressed: CompressedKV,
        capacity: int,
        *,
        limit: int | None = None,
        prompt: LayerKV | None = None,
    ) -> None:
        """Make the cache of one layer, and audit it.

        Args:
            layer: the layer's index in the model.
            compressed: what the method keeps of the layer.
            capacity: the entries per head that it may keep.
            limit: where the prompt is not compressed and the method evicts, the entries per head beyond
                which it evicts (`limit`); else None.
            prompt: the layer after the prefill, for a method that compresses again while decoding.

        Raises:
            BudgetExceeded: more than `capacity` entries (plus one of rounding) at some head, or on
                average where heads hold different numbers.
        """
        granted = capacity if limit is None else limit
        if self.method.uses_budget and not self.method.saves_memory:
            # The cache is whole: its capacity is the prompt, and the budget says what a query may see.
            granted = self.budget.capacity(capacity)
        recompression = self.method.recompression
        self.shapes[layer] = HeldShape.of(compressed)

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

        is_ragged = compressed.lengths is not None
        cache = RaggedCache(compressed, make) if is_ragged else make(compressed)
        self.layers[layer] = cache
        self.compressible.append(layer)
        self.unaudited.append(layer)
        if not cache.prompt_entries.is_cuda:
            self.audit_prompt()

    def audit_prompt(self) -> None:
        """Audit the layers that were made since the last audit. Waits for a GPU, once for all layers.

        Raises:
            BudgetExceeded: see `hold`.
        """
        layers = self.unaudited
        self.unaudited = []
        caches = [self.layers[layer] for layer in layers]
        if not caches:
            return
        on_devices = [cache.prompt_entries for cache in caches]
        device = on_devices[0].device
        on_host = torch.cat([counts.to(device) for counts in on_devices]).cpu()
        counts_by_layer = on_host.split([len(counts) for counts in on_devices])
        for layer, cache, counts in zip(layers, caches, counts_by_layer, strict=True):
            cache.prompt_entries = counts
            if cache.charged(counts) > cache.capacity + 1:
                raise BudgetExceeded(self.label, layer, cache.capacity, cache.charged(counts))

    def end_prompt(self, n: int, exact: ExactBytes) -> None:
        """Note the cost at the end of the prefill, when the prompt's n tokens have been read and
        compressed.

        Args:
            exact: the bytes of the exact cache.
        """
        extras: Mapping[str, int] = {}
        if self.failure is None:
            try:
                extras = self.method.extras(n, self.shapes)
            except Exception as failure:  # noqa: BLE001 - this method's failure is its own record
                self.fail(failure)
        cost = Cost(
            prompt_tokens=n,
            capacity=self.budget.capacity(n) if self.method.saves_memory else n,
            exact_bytes=exact.at(n),
            compressed=self.compressed or self.method.quantize is not None,
        )
        if self.failure is None:
            entries = torch.cat(
                [self.layers[layer].prompt_entries.cpu() for layer in self.compressible]
            )
            cost = replace(
                cost,
                entries={"mean": float(entries.float().mean()), "max": int(entries.max())},
                cache_bytes=self.cache_bytes(),
                extras=extras,
            )
            is_exact = isinstance(self.method, Exact) and self.method.quantize is None
            if is_exact and cost.cache_bytes != cost.exact_bytes:
                self.fail(
                    UnsupportedModel(
                        f"the exact cache holds {cost.cache_bytes} bytes, and the model's keys and "
                        f"values of {n} tokens have {cost.exact_bytes}; allowed: models of which it "
                        "holds all"
                    )
                )
        self.ledger.begin(cost, exact)

    def cost(self) -> Cost:
        """The cost of the cache, as of the prefill and, if there was one, the last `audit`. Waits for
        the device, whose clocks it reads."""
        ledger = self.ledger
        ledger.read_clocks()
        cost = replace(ledger.prompt, compress_s=ledger.compress_s)
        if ledger.bytes_end is None:
            return cost
        caches = [self.layers[layer] for layer in self.compressible]
        entries_left = any(
            int(cache.entries().max()) < int(cache.prompt_entries.max()) + ledger.appended
            for cache in caches
        )
        layers = [cache.bytes_over_time() for cache in self.layers.values()]
        states = state_bytes(self.states)
        return replace(
            cost,
            cache_bytes_end=ledger.bytes_end,
            cache_bytes_peak=sum(layer.peak for layer in layers) + states,
            cache_bytes_mean=sum(layer.mean for layer in layers) + states,
            exact_bytes_mean=ledger.exact_bytes_mean,
            compressed=cost.compressed or entries_left,
            budget_preset=allowed_entries(
                self.method, self.budget, cost.prompt_tokens, len(caches)
            ).preset,
        )

    def audit(self) -> None:
        """Count the entries of every layer again, after the last token, and compare them with what the
        cache and the budget allow (`LayerCache.allowed`, `allowed_entries`).

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
        allowed_total = allowed_entries(self.method, self.budget, n, layers).entries
        if total_after_prompt > allowed_total + layers:
            raise BudgetExceeded(self.label, -1, allowed_total, total_after_prompt)
        self.ledger.bytes_end = self.cache_bytes()

    def cache_bytes(self) -> int:
        """The bytes that all layers and states hold now."""
        entries = sum(cache.entry_bytes() for cache in self.layers.values())
        return entries + state_bytes(self.states)


def copies_at_once(forks: Sequence[Fork], most: int, device: torch.device) -> int:
    """How many copies of all these forks fit into half of the device's free memory: 1 to `most`, and
    `most` where the free memory is not known."""
    total, used = memory.total_bytes(device), memory.used_bytes(device)
    copy = sum(cache.reserved_bytes() for fork in forks for cache in fork.layers.values())
    if most == 1 or total is None or used is None or not copy:
        return most
    return max(1, min(most, (total - used) // (2 * copy)))


class ForkBatch(AttentionState):
    """The attention state of a pass that feeds tokens to forks: row i of the batch is ``forks[i]``.

    Args:
        forks: one per batch row.
        positions: the positions of the tokens that are fed: [t], the same for every row, or [rows, t].
    """

    def __init__(self, forks: Sequence[Fork], positions: Tensor) -> None:
        self.forks = forks
        self.positions = positions
        self._past: PassingCache | None = None

    def past(self, config: PreTrainedConfig) -> PassingCache:
        """See `AttentionState.past`: a cache of the states of all forks. The forks' states become views
        of it, so that the pass updates them."""
        if self._past is None:
            self._past = joined_cache(config, [fork.states for fork in self.forks])
        return self._past

    def attend(self, call: LayerCall) -> Tensor:
        """Attention of each row over its own cache; 0 for a row whose fork has failed."""
        if self.positions.device != call.query.device:
            # Kept, so that the layers that follow on this device need no copy.
            self.positions = to_device(self.positions, call.query.device)
        rows = range(len(self.forks))
        out = call.query.new_zeros(*call.query.shape[:3], call.value.shape[-1])
        self.attend_rows(rows, call, self.positions.expand(len(rows), -1), out)
        return out

    def attend_rows(
        self, rows: Sequence[int], call: LayerCall, positions: Tensor, out: Tensor
    ) -> None:
        """Feed the tokens of some rows to their caches, one row after the other.

        Args:
            rows: the indices of these rows in the batch.
            positions: [batch, t].
            out: [batch, heads, t, value_dim], into which the attention of these rows is written.
        """
        for row in rows:
            fork = self.forks[row]
            if fork.failure is None:
                try:
                    out[row] = fork.layers[call.layer].step(call.of_row(row), positions[row])
                except Exception as failure:  # noqa: BLE001 - one method's failure is its own record
                    fork.fail(failure)
