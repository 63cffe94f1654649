"""The contract of a compression method: the base class `Method`, the data that its hooks receive and
return, and the entries that the audit allows a method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvbench.errors import check_known
from kvbench.errors.options import check_options
from kvbench.kernels.decode import Eviction
from kvbench.kernels.qjl import QJL
from kvbench.kernels.quantize import Quantization, Scheme, SchemeError
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV, gather_entries
from kvbench.methods._select import top_positions, with_sink_and_window

SCHEMES: Mapping[str, type[Quantization] | type[QJL] | type[TurboQuant]] = {
    "affine": Quantization,
    "qjl": QJL,
    "turboquant": TurboQuant,
}
"""The schemes of packed storage that `Method.quantize` may name, and their classes."""

SEED_STRIDE = 1_000_003
"""Scripts that repeat a random method give draw number d of seed s the seed ``SEED_STRIDE * s + d``. The
stride is larger than any number of draws, so that no two draws of two seeds are the same."""


def build_scheme(method: str, options: Mapping[str, Any]) -> Scheme:
    """Make the scheme of packed storage that `Method.quantize` describes.

    Args:
        method: the method's name, with which messages begin.
        options: ``scheme``, a name in `SCHEMES` (``affine`` if it is left out), and that scheme's
            options.
    """
    scheme_options = dict(options)
    scheme = str(scheme_options.pop("scheme", "affine"))
    check_known(f"{method}.quantize.scheme is {scheme!r}", scheme, [*SCHEMES], KVError)
    known = [option.name for option in fields(SCHEMES[scheme])]
    for option in scheme_options:
        check_known(f"{method}.quantize has no option {option!r}", str(option), known, KVError)
    try:
        return SCHEMES[scheme](**scheme_options)
    except SchemeError as error:
        raise KVError(f"{method}.{error}") from error


# --- what hooks receive and return while decoding --------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The entries that a row's cache holds at one layer while decoding, the newest entry last.

    Attributes:
        scores: [kv_heads, c] float32, `CompressedKV.scores` as the last `Method.evict` returned them; a
            new entry starts at 0. None where `compress` returned no scores.
        positions: [kv_heads, c] int64, the prompt or generation position of each entry.
        capacity: the entries per head that the budget grants this layer: `Method.layer_capacity`, or
            `Budget.capacity` for a method that holds the whole cache.
        sink: how many of the prompt's first tokens are always kept.
    """

    scores: Tensor | None
    positions: Tensor
    capacity: int
    sink: int


class HeldShape(NamedTuple):
    """The size of one layer's compressed cache.

    Attributes:
        heads: KV heads, of `entries` entries each.
        itemsize: the bytes of a number.
    """

    heads: int
    entries: int
    dim: int
    value_dim: int
    itemsize: int


@dataclass(frozen=True)
class Schedule:
    """The times at which a compressed cache is compressed again while decoding, and to how many entries.

    Attributes:
        every: the number of tokens between two compressions.
        to: the entries per KV head that a compression leaves. A number below 1 is a share of the tokens
            of prompt and generation so far; None stands for what the budget grants.
        queries: the number of last tokens whose queries `compress` is shown.
        phase: ``steps`` compresses after every `every` decoding steps, ``tokens`` whenever the number of
            tokens before the step is a multiple of `every`.
        inside: True where the cache never exceeds the budget between two compressions. A full cache is
            then compressed to leave room for `every` tokens, at most an eighth of the budget; `phase` is
            not read, and `to` must be None.
    """

    every: int
    to: float | None
    queries: int
    phase: str = "steps"
    inside: bool = False

    def entries_to_keep(
        self, budget: Budget, prompt_tokens: int, fed_tokens: int, entries: int
    ) -> int | None:
        """To how many entries per head a cache of `entries` is compressed at this step; None where it is
        not."""
        full = self._entries_when_full(budget, prompt_tokens, fed_tokens)
        if full is None or entries <= full:
            return None
        if self.inside:
            room = max(1, min(self.every, full // 8))
            return max(_least_entries(budget), full - room)
        count = prompt_tokens + fed_tokens - 1 if self.phase == "tokens" else fed_tokens
        return None if count % self.every else full

    def _entries_when_full(self, budget: Budget, prompt_tokens: int, fed_tokens: int) -> int | None:
        """The entries per head above which a cache is compressed; None where the budget grants all."""
        if self.to is None:
            limit = budget.limit(prompt_tokens)
            return None if limit is None else max(limit, _least_entries(budget))
        if self.to >= 1:
            return int(self.to)
        return max(round(self.to * (prompt_tokens + fed_tokens)), _least_entries(budget))


def _least_entries(budget: Budget) -> int:
    return budget.sink + budget.window + 1


# --- what hooks receive and return of a second pass -------------------------------------------------


@dataclass(frozen=True)
class SecondPass:
    """A second pass over the prompt before compression, in which the model is asked to repeat the
    prompt.

    The prompt is repeated chunk by chunk. Every chunk attends to the exact cache of the whole prompt,
    and the keys and values of the repetition are dropped. Methods with equal passes share one.

    Attributes:
        chunk: how many prompt tokens after the sink one chunk repeats; the last chunk may be shorter.
        first: the instruction before the first chunk, plain text; empty for none.
        following: the instruction before each later chunk; the last `overlap` tokens of the previous
            chunk follow the instruction.
        gradients: whether `Method.observe` is shown `Replay.gradients`. Each chunk then takes a backward
            pass and the memory of its graph, and chunks are halved where that does not suffice.
        hidden_norms: whether it is shown `Replay.hidden_norms`. It changes nothing of the pass.
        prompt_queries: whether the method is shown the prompt's queries, too; those of all layers are
            then held until the second pass is over. Else `LayerKV.queries` is None. It changes nothing
            of the pass.
    """

    chunk: int
    first: str = ""
    following: str = ""
    overlap: int = 0
    gradients: bool = False
    hidden_norms: bool = field(default=False, compare=False, repr=False)
    prompt_queries: bool = field(default=False, compare=False, repr=False)


@dataclass(frozen=True)
class Replay:
    """One layer while the model repeats the prompt tokens start .. stop - 1.

    The model reads a sequence of t tokens, the instruction and then the repeated tokens, at the
    positions that follow the prompt.

    Attributes:
        queries: [batch, heads, t, head_dim], after position encoding.
        keys, values: [batch, kv_heads, t, head_dim], keys after position encoding.
        hidden_norms: [batch, t] float32, the Euclidean norms of the hidden states that enter the
            attention block, after the norm before it. None unless `SecondPass.hidden_norms`.
        gradients: [batch, t, hidden], the gradient of Phi with respect to what the attention block
            returns after its output projection. Phi is the squared norm of what the last decoder layer
            returns, before the final norm, summed over the t tokens. Parameters and the prompt's keys
            and values are constants. None unless `SecondPass.gradients`.
    """

    start: int
    stop: int
    queries: Tensor
    keys: Tensor
    values: Tensor
    hidden_norms: Tensor | None = None
    gradients: Tensor | None = None


# --- the method -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """A KV-cache compression method: a frozen dataclass whose fields are the method's options.

    A subclass must implement `compress`; every other hook has a default. One method is one file in
    kvbench/methods (the file's name is the method's) and one YAML of the same name in conf/method.

    `restrict` and `observe` are the two hooks whose default raises. They are not in base classes of
    their own, as `TokenScoringMethod.token_scores` is, since an option of a method may decide whether
    it needs them (`attention_matching.queries` decides about `observe`), and a class cannot depend on
    an option.
    """

    paper: ClassVar[str] = ""
    """The source of the method: arXiv number and section."""
    version: ClassVar[int] = 1
    """To be raised by one when a change makes the same options keep other entries. A run does not resume
    records of another version."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of options, e.g. ``{"released": {"order": "released"}}``."""
    saves_memory: ClassVar[bool] = True
    """False when the method holds the whole cache (exact, topk). No budget applies then, and the record
    says so."""
    uses_budget: ClassVar[bool] = True
    """False when `compress` does not read the budget (exact). One record then serves every rate."""
    keeps_entries: ClassVar[bool] = True
    """False where what `compress` returns are no entries of the prompt with weights of their own: keys
    without values, or factors in the denominator (streaming estimators, wildcat)."""
    can_compress_again: ClassVar[bool] = False
    """True where `compress` may be called again on a compressed cache. `LayerKV` then holds the cache's
    entries in the order of their positions and the queries of the last tokens only; the log-weights that
    `compress` returns are added to those of the entries."""

    quantize: Scheme | Mapping[str, Any] | None = None
    """The packed storage of the kept entries: ``{bits: 4, group_size: 64}``, or ``{scheme: qjl}`` with
    the options of that scheme (`SCHEMES`). None stores entries in the model's dtype."""

    def __post_init__(self) -> None:
        """Check the options by their type hints. A subclass with further checks calls this first."""
        check_options(self, f"{self.method_name()}.", KVError)

    @classmethod
    def method_name(cls) -> str:
        """The name of the file that defines the method, as messages and build_method call it."""
        return cls.__module__.rpartition(".")[2]

    @abstractmethod
    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Choose or compute the entries that replace the layer's keys and values.

        Called only for prompts longer than `layer_capacity`. It must be a pure function of its
        arguments: all randomness comes from `generator`, a CPU generator whose draws may be moved to
        another device, and the layer's tensors are never written to, since other methods read them.
        (``float()`` does not copy a float32 tensor; ``clone()`` does.)
        """

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        """The entries per KV head that the method may hold at this layer after prefill of n tokens.

        The audit fails a method that holds more. It also compares the sum over the layers with
        ``num_layers * budget.capacity(n)``; see `total_capacity`.
        """
        return self.layer_capacities(budget, n, num_layers)[layer_index]

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> Sequence[int]:
        """The `layer_capacity` of every layer. A method whose layers differ overrides this."""
        return [budget.capacity(n) if self.saves_memory else n] * num_layers

    def total_capacity(self, budget: Budget, n: int, num_layers: int) -> int:
        """The sum of `layer_capacity` over the layers, which the audit compares with the budget.

        Only a preset that reproduces released code may exceed the budget (`allowed_entries`); records
        and reports then say so.
        """
        return sum(self.layer_capacities(budget, n, num_layers))

    def quantization(self) -> Scheme | None:
        if self.quantize is None:
            return None
        name = f"{self.method_name()}.quantize"
        if self.schedule is not None:
            raise KVError(
                f"{name} is set and the method compresses again while decoding; allowed: one or the "
                "other"
            )
        scheme = self.quantize
        if isinstance(scheme, Mapping):
            scheme = build_scheme(self.method_name(), scheme)
        if self.evicts and not scheme.by_entry:
            raise KVError(
                f"{name} packs entries together and the method evicts while decoding; allowed: "
                "decode=grow, or entries packed one by one: quantize.keys=entry, "
                "quantize.scheme=turboquant"
            )
        return scheme

    def extras(self, n: int, held: Mapping[int, HeldShape]) -> dict[str, int]:
        """Fields that the method adds to the record of a prompt of n tokens, by each layer's `held`.

        The default adds ``scheme_bytes``, the bytes of the random sketches and rotations that all
        prompts of a model share, for a scheme that has any.
        """
        scheme = self.quantization()
        if scheme is None:
            return {}
        dims = {layer: (shape.dim, shape.value_dim) for layer, shape in held.items()}
        scheme_bytes = scheme.model_bytes(dims)
        return {"scheme_bytes": scheme_bytes} if scheme_bytes else {}

    # --- hooks that few methods need; each stands alone -------------------------------------------

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        """The rule that chooses the entry to evict for each decoded token, so that the cache does not
        grow. None for a cache that grows, and for a method that overrides `evict`.

        Args:
            capacity: the entries per head that the cache may hold.
            sink: how many of the prompt's first tokens are never evicted.
        """
        return None

    def evict(self, held: Held, attention: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Update the scores after one decoded token and choose the entry to evict.

        The default follows the rule of `eviction`, so a method overrides either that rule or, where
        `Eviction` cannot express it, this hook. Called only when `evicts`.

        Args:
            attention: [kv_heads, c], this step's softmax attention to each entry, averaged over the
                queries of the group.

        Returns:
            the new scores [kv_heads, c], or None for a method without scores; ``held.scores`` may be
            changed in place and returned. Then the index [kv_heads] of each head's entry to evict, or
            None to evict nothing.
        """
        rule = self.eviction(held.capacity, held.sink)
        if rule is None:
            raise KVError(
                f"{type(self).__name__} evicts while decoding and has no rule; allowed: an `eviction` "
                "that gives one, or an `evict` of its own"
            )
        scores = held.scores
        if rule.leaves != "oldest":
            if scores is None:
                raise KVError(
                    f"{type(self).__name__} lets entries go by their scores and compress gave none; "
                    "allowed: CompressedKV.scores"
                )
            scores.add_(attention)
        full = held.positions.shape[-1] > held.capacity
        return scores, rule.choose(scores, held.positions) if full else None

    def restrict(self, held: Held, logits: Tensor) -> Tensor:
        """Choose the entries that a decoding query does not attend to although the cache holds them.

        Called only when `restricts`.

        Args:
            logits: [kv_heads, queries, c], -inf where causality hides an entry.

        Returns:
            [kv_heads, queries, c] bool, True for an entry to hide.
        """
        raise KVError(f"{type(self).__name__} has no restrict; allowed: to override it")

    @property
    def evicts(self) -> bool:
        """Whether the method evicts entries while decoding: it has a rule in `eviction`, or overrides
        `evict`."""
        return type(self).evict is not Method.evict or self.eviction(1, 0) is not None

    @property
    def restricts(self) -> bool:
        """Whether a decoding query attends to only some of the held entries: the method overrides
        `restrict`."""
        return type(self).restrict is not Method.restrict

    @property
    def schedule(self) -> Schedule | None:
        """The times at which `compress` is called again while decoding; None for never."""
        return None

    @property
    def second_pass(self) -> SecondPass | None:
        """The second pass over the prompt, during which `observe` is called; None for no such pass."""
        return None

    def observe(self, layer: LayerKV, replay: Replay, budget: Budget) -> None:
        """Look at one layer while the model repeats a chunk of the prompt, and store what `compress`
        needs in `layer.carried`, under a name that contains the layer's index.

        Called for every chunk and every layer before `compress` is called, and only where `second_pass`
        is not None and the prompt is compressed. A chunk that starts at the sink begins anew: what was
        stored before it is to be replaced. Whether `layer.queries` is there in both calls, see
        `SecondPass.prompt_queries`.
        """
        raise KVError(
            f"{type(self).__name__} has a second_pass and no observe; allowed: both, or neither"
        )

    @property
    def inner(self) -> Method | None:
        """The method around which this one is put; None for a method that is no wrapper."""
        return None

    @property
    def is_exact(self) -> bool:
        """Whether the method holds the model's own cache: every entry, in the model's dtype."""
        return False

    def check_decodes(self) -> None:  # noqa: B027 - most methods have no such options
        """Refuse options with which the method holds no cache that could decode.

        Raises:
            KVError: the option, and what is allowed.
        """


@dataclass(frozen=True, kw_only=True)
class TokenScoringMethod(Method):
    """A method that chooses entries by a score of every token: `token_scores` is all that it needs.
    `adakv`, `pages` and `solved` can be put around it."""

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Keep sink and window, and of the middle the tokens of the highest scores, those at lower
        positions on a tie."""
        scores = self.checked_scores(layer, budget)[:, :, budget.sink : layer.n - budget.window]
        middle = budget.sink + top_positions(scores, budget.middle_kept(layer.n))
        return gather_entries(layer, with_sink_and_window(layer, budget, middle))

    @abstractmethod
    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """Score every prompt token by how much it is worth keeping: [batch, kv_heads, n] float32 >= 0.

        Scores of different heads must be comparable. Tokens that `compress` keeps in any case may score
        0.
        """

    def checked_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """`token_scores`, refused where they have another shape."""
        scores = self.token_scores(layer, budget)
        shape, allowed = tuple(getattr(scores, "shape", ())), tuple(layer.keys.shape[:3])
        if shape != allowed:
            per_query_head = len(shape) == 3 and shape[::2] == allowed[::2]
            how = f": scores.unflatten(1, ({allowed[1]}, -1)).mean(2)" if per_query_head else ""
            raise KVError(
                f"{type(self).__name__}.token_scores are {shape or scores}; allowed: {allowed}, one "
                f"score per KV head and token{how}"
            )
        return scores

    def fit(self, layer: LayerKV, compressed: CompressedKV, budget: Budget) -> CompressedKV:
        """Fit the weights or values of entries that `adakv` or `pages` chose by this method's
        `token_scores`. The default returns them unchanged."""
        return compressed


class AllowedEntries(NamedTuple):
    """How many entries the audit allows a method.

    Attributes:
        entries: entries per KV head, summed over the layers.
        preset: the name of the preset that exceeds the budget, or None.
    """

    entries: int
    preset: str | None


def allowed_entries(method: Method, budget: Budget, n: int, num_layers: int) -> AllowedEntries:
    """Decide how many entries the audit allows a method after a prompt of n tokens.

    A method cannot grant itself more than the budget. Only a class of kvbench whose options include all
    those of one of its presets may exceed it, and a class of kvbench around such a method.
    """
    granted = num_layers * (budget.capacity(n) if method.saves_memory else n)
    requested = method.total_capacity(replace(budget), n, num_layers)
    if requested <= granted:
        return AllowedEntries(requested, None)
    chooses: Method | None = method
    # A class from outside kvbench could declare a preset for anything.
    while chooses is not None and type(chooses).__module__.startswith("kvbench."):
        for name, options in type(chooses).presets.items():
            preset = type(chooses)(**options)
            if options and all(getattr(chooses, key) == getattr(preset, key) for key in options):
                return AllowedEntries(requested, name)
        chooses = chooses.inner
    return AllowedEntries(granted, None)


def rule_of(method: Method, capacity: int, sink: int) -> Eviction | None:
    """The method's `Method.eviction`; None where the method overrides `Method.evict` instead."""
    return method.eviction(capacity, sink) if type(method).evict is Method.evict else None
