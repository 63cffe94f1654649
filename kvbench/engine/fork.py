"""One method's caches of all layers, what they cost, and several of them decoding together."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedConfig

from kvbench.engine import memory
from kvbench.engine.architecture import gathered
from kvbench.engine.attention import LayerCall
from kvbench.engine.cache import LayerCache, RaggedCache, RecompressedCache
from kvbench.engine.faults import release_frames
from kvbench.engine.states import PassingCache, State, clone_of, joined_cache, state_bytes
from kvbench.errors import first_line, one_line
from kvbench.kernels.elapsed import Elapsed
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
class ExactBytes:
    """Bytes of the exact cache of one prompt, of any length.

    Attributes:
        layers: the bytes of a token and the window, None for all tokens, of each that holds keys.
        states: of the layers that hold none.
    """

    layers: list[tuple[int, int | None]] = field(default_factory=list)
    states: int = 0

    def at(self, tokens: int) -> int:
        """Bytes once so many tokens have been read."""
        held = sum(token * min(tokens, window or tokens) for token, window in self.layers)
        return held + self.states


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a method's cache of one prompt costs. Every record has these fields.

    Attributes:
        prompt_tokens: that were compressed.
        capacity: entries per layer and KV head that the budget allows the method.
        entries: held per layer and KV head after compression, mean and maximum; None, like the bytes,
            where a failure left none.
        cache_bytes, exact_bytes: after compression, and of the exact cache at the same point.
        cache_bytes_end: after the last token; None before, like the next three.
        cache_bytes_peak, cache_bytes_mean: the most, and the mean, of what is held at the end of the
            prompt and after each step of the generation. exact_bytes_mean: of the exact cache.
        compressed: False where the prompt is held as it is: it is within its capacity, or the method
            keeps and stores everything so. True once entries have left while decoding.
        compress_s: seconds of compression.
        budget_preset: the preset that holds more than the budget, if any.
        extras: further fields (`Method.extras`).
    """

    prompt_tokens: int
    capacity: int
    entries: dict[str, float] | None = None
    cache_bytes: int | None = None
    cache_bytes_end: int | None = None
    cache_bytes_peak: int | None = None
    cache_bytes_mean: float | None = None
    exact_bytes_mean: float | None = None
    exact_bytes: int
    compressed: bool = False
    compress_s: float = 0.0
    budget_preset: str | None = None
    extras: Mapping[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float | None:
        """Bytes held over the bytes of the exact cache, after compression."""
        return None if self.cache_bytes is None else self.cache_bytes / self.exact_bytes

    def record(self, *, long_answer: bool = False) -> dict[str, Any]:
        """The fields of a record, but for `prompt_tokens`; `budget_preset` only where there is one.

        Args:
            long_answer: the ratio is that of the means over the generation.
        """
        found = {field.name: getattr(self, field.name) for field in fields(Cost)}
        del found["prompt_tokens"]
        if self.budget_preset is None:
            del found["budget_preset"]
        found |= found.pop("extras")
        ratio = self.ratio
        if long_answer and self.cache_bytes_mean and self.exact_bytes_mean:
            ratio = self.cache_bytes_mean / self.exact_bytes_mean
        return found | {"ratio": ratio}


@dataclass
class Fork:
    """One method on one prompt: its layers, its audit, its cost.

    Attributes:
        label: the method's name in this job.
        room: tokens that will be appended, if the caller knows.
        layers: filled by the prefill, by layer index; states: of the layers that hold no keys.
        compressible: the layers that the method compresses. shapes: of what they hold of the prompt.
        carried: what the method noted at earlier layers of this prompt (`LayerKV.carried`).
        compressed: whether the method compresses this prompt. appended: tokens fed since.
        exact: of the prompt. exact_at: its bytes at the end of the prompt and after each step since.
        compress_s: seconds of compression; `clocks` are still to be read, by `read_clocks`.
        unaudited: layers whose entries are still to be counted, by `audit_prompt`.
        after_prompt: the cost at the end of the prefill. bytes_end: at the last `audit`.
        failure: what stopped this fork, if anything did; the other forks go on.
        ranks: processes with a fork each, of their own KV heads; each makes draws of its own.
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
    appended: int = 0
    exact: ExactBytes = field(default_factory=ExactBytes)
    exact_at: list[int] = field(default_factory=list)
    compress_s: float = 0.0
    clocks: list[Elapsed] = field(default_factory=list)
    unaudited: list[int] = field(default_factory=list)
    after_prompt: Cost | None = None
    bytes_end: int | None = None
    failure: Exception | None = None
    ranks: int = 1

    def __post_init__(self) -> None:
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

    def begin_prompt(self, n: int, ranks: int = 1) -> None:
        """Compress the prompt of n tokens that is about to be read, unless its capacity holds all."""
        self.ranks = ranks
        if ranks > 1:
            self.example_id += f"\0rank {dist.get_rank()}"
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
        """Tokens in the cache: those of the prompt, which was compressed, and those fed since."""
        assert self.after_prompt is not None, "the prompt has not been read"
        return self.after_prompt.prompt_tokens + self.appended

    def fed(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self.appended += tokens
        self.exact_at.append(self.exact.at(self.tokens))

    def read_clocks(self) -> None:
        """Add up the seconds of compression so far; waits for a GPU that is not done with it."""
        self.compress_s += sum(clock.seconds for clock in self.clocks)
        self.clocks = []

    def fail(self, failure: Exception) -> None:
        """This fork ends here; what it holds is given back, for the others to go on with."""
        self.failure, self.bytes_end = failure, None
        release_frames(failure)
        for held in (self.layers, self.compressible, self.carried, self.unaudited):
            held.clear()

    def agree(self) -> None:
        """Fail where any rank has, for the same reason, as ranks take every step together."""
        if self.ranks > 1:
            said = first_line if type(self.failure) is RuntimeError else one_line  # agreed before
            own = None if self.failure is None else said(self.failure)
            told = [reason for reason in gathered(own, self.ranks) if reason is not None]
            if told and not isinstance(self.failure, BudgetExceeded):
                self.fail(RuntimeError(min(told, key=lambda reason: "non-finite" in reason)))

    def clone(self) -> Fork:
        """A copy that goes on separately from here."""
        return replace(
            self,
            layers={index: layer.clone() for index, layer in self.layers.items()},
            states=clone_of(self.states),
            compressible=list(self.compressible),
            carried=dict(self.carried),
            exact_at=list(self.exact_at),
        )

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
        if self.method.uses_budget and not self.method.saves_memory:
            granted = self.budget.capacity(capacity)
        options: dict[str, Any] = {
            "capacity": capacity,
            "granted": granted,
            "sink": self.budget.sink,
            "active": self.compressed or limit is not None,
            "quantization": self.method.quantization(),
            "layer": layer,
            "seed": self.seed,
        }
        rule = self.method.recompression
        if rule is not None and prompt is not None and prompt.queries is not None:
            generator = layer_generator(self.seed, f"{self.example_id}\0while decoding", layer)
            options |= {"rule": rule, "label": self.label, "budget": self.budget}
            options |= {"prompt": prompt, "generator": generator}
        kind = RecompressedCache if "rule" in options else LayerCache
        self.shapes[layer] = HeldShape.of(held)

        def make(one: CompressedKV) -> LayerCache:
            return kind(one, self.room, self.method, **options)

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
        layers, self.unaudited = self.unaudited, []
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
        """Note what is held of the prompt's n tokens, which have been read and compressed."""
        self.agree()
        self.exact, self.exact_at = exact, [exact.at(n)]
        held: dict[str, Any] = {}
        if self.failure is None:
            layers = [self.layers[layer] for layer in self.compressible]
            own = torch.cat([cache.prompt_entries.cpu() for cache in layers])
            entries = torch.cat(gathered(own, self.ranks))
            counts = {"mean": float(entries.float().mean()), "max": int(entries.max())}
            held = {"entries": counts, "cache_bytes": sum(gathered(self.cache_bytes(), self.ranks))}
            held["extras"] = self.method.extras(n, self.shapes)
        self.after_prompt = Cost(
            prompt_tokens=n,
            capacity=self.budget.capacity(n) if self.method.saves_memory else n,
            exact_bytes=exact.at(n),
            compressed=self.compressed or self.method.quantize is not None,
            **held,
        )

    def cost(self) -> Cost:
        """What the cache costs, by what is known since the prefill and the last `audit`."""
        assert self.after_prompt is not None, "the prompt has not been read"
        self.agree()
        self.read_clocks()
        cost = replace(self.after_prompt, compress_s=self.compress_s)
        if self.bytes_end is None:
            return cost
        n, layers = cost.prompt_tokens, [self.layers[layer] for layer in self.compressible]
        left = any(
            int(cache.entries().max()) < int(cache.prompt_entries.max()) + self.appended
            for cache in layers
        )
        own = self.bytes_end, [cache.held_bytes() for cache in self.layers.values()]
        ends, every = zip(*gathered(own, self.ranks), strict=True)
        held = [layer for rank in every for layer in rank]
        states = state_bytes(self.states)
        return replace(
            cost,
            cache_bytes_end=sum(ends),
            cache_bytes_peak=sum(peak for peak, _ in held) + states,
            cache_bytes_mean=sum(mean for _, mean in held) + states,
            exact_bytes_mean=sum(self.exact_at) / len(self.exact_at),
            compressed=cost.compressed or left,
            budget_preset=allowed_entries(self.method, self.budget, n, len(layers))[1],
        )

    def audit(self) -> None:
        """Count the entries of every layer again, after the last token. A cache that evicts holds no
        more than it was granted, or than compression left.

        Raises:
            BudgetExceeded: a layer holds more than its capacity and the tokens since, or all layers
                together hold more than the budget (one entry a layer of rounding).
        """
        assert self.after_prompt is not None, "the prompt has not been read"
        n, total = self.after_prompt.prompt_tokens, 0
        for layer in self.compressible:
            cache = self.layers[layer]
            left, found = cache.charged(cache.prompt_entries), cache.charged(cache.entries())
            allowed = cache.capacity + 1 + self.appended
            if self.limit(n) is not None:
                allowed = max(cache.granted, left)
            if found > allowed:
                raise BudgetExceeded(self.label, layer, allowed, found)
            total += left
        count = len(self.compressible)
        allowed, _ = allowed_entries(self.method, self.budget, n, count)
        if total > allowed + count:
            raise BudgetExceeded(self.label, -1, allowed, total)
        self.bytes_end = self.cache_bytes()

    def cache_bytes(self) -> int:
        """Bytes held now, all layers and states."""
        held = sum(cache.entry_bytes() for cache in self.layers.values())
        return held + state_bytes(self.states)


def copies_at_once(forks: Sequence[Fork], most: int, device: torch.device) -> int:
    """How many copies of all of these forks, of `most`, half of the free memory has room for."""
    total, used = memory.total_bytes(device), memory.used_bytes(device)
    copy = sum(cache.reserved_bytes() for fork in forks for cache in fork.layers.values())
    if most == 1 or total is None or used is None or not copy:
        return most
    fits: list[int] = gathered((total - used) // (2 * copy), forks[0].ranks)
    return max(1, min(most, *fits))


class ForkBatch:
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
        """See `AttentionState`."""
        self._past = self._past or joined_cache(config, [fork.states for fork in self.forks])
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
