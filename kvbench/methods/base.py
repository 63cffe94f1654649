"""The contract of a compression method: the base class `Method` and the data that its hooks receive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from kvbench.errors import nearest, one_line
from kvbench.errors.options import check_options
from kvbench.kernels.eviction import Eviction
from kvbench.kernels.qjl import QJL
from kvbench.kernels.quantize import Quantization, Scheme, SchemeError
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV

SCHEMES: Mapping[str, type[Quantization] | type[QJL] | type[TurboQuant]] = {
    "affine": Quantization,
    "qjl": QJL,
    "turboquant": TurboQuant,
}
"""The schemes of packed storage that `Method.quantize` may name, and their classes."""

SEED_STRIDE = 1_000_003
"""Scripts that repeat a random method give draw number d of seed s the seed ``SEED_STRIDE * s + d``. The
stride is larger than any number of draws, so that no two draws of two seeds are the same."""


def check_known(what: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is not among the known ones.

    Args:
        what: the beginning of the message, such as ``unknown method 'snapvk'``.

    Raises:
        KVError: one line of `what`, the nearest known name, and all known names.
    """
    if name not in known:
        raise KVError(f"{what}{nearest(name, known)}; allowed: {', '.join(known) or 'none'}")


# --- what a method may do while decoding ----------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """The entries that a fork's cache holds at one layer while decoding, the newest entry last.

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
        heads: the number of KV heads.
        entries: the number of entries of each head.
        dim: the numbers in a key.
        value_dim: the numbers in a value.
        itemsize: the bytes of a number.
    """

    heads: int
    entries: int
    dim: int
    value_dim: int
    itemsize: int

    @classmethod
    def of(cls, cache: CompressedKV) -> HeldShape:
        """The size of the cache of one layer."""
        _, heads, entries, dim = cache.keys.shape
        return cls(heads, entries, dim, cache.values.shape[3], cache.keys.element_size())


@dataclass(frozen=True)
class Recompression:
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
        """Decide to how many entries per head a cache is compressed at this step.

        Args:
            prompt_tokens: the tokens of the prompt.
            fed_tokens: the tokens fed since the prompt.
            entries: the entries that each head holds now.

        Returns:
            the number of entries, or None where the cache is not compressed at this step.
        """
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
    """The least number of entries to which a cache is compressed: sink, window and one more."""
    return budget.sink + budget.window + 1


# --- a second look at the prompt ------------------------------------------------------------------


@dataclass(frozen=True)
class Rescoring:
    """A second pass over the prompt before compression, in which the model is asked to repeat the
    prompt.

    The prompt is repeated chunk by chunk. Every chunk attends to the exact cache of the whole prompt,
    and the keys and values of the repetition are dropped.

    Attributes:
        chunk: how many prompt tokens after the sink one chunk repeats; the last chunk may be shorter.
        first: the instruction before the first chunk, plain text; empty for none.
        following: the instruction before each later chunk; the last `overlap` tokens of the previous
            chunk follow the instruction.
        overlap: see `following`.
    """

    chunk: int
    first: str = ""
    following: str = ""
    overlap: int = 0


@dataclass(frozen=True)
class Repetition:
    """One layer's queries, keys and values while the model repeats the prompt tokens start .. stop - 1.

    The model reads a sequence of t tokens, the instruction and then the repeated tokens, at the
    positions that follow the prompt.

    Attributes:
        queries: [batch, heads, t, head_dim], after position encoding.
        keys, values: [batch, kv_heads, t, head_dim], keys after position encoding.
    """

    start: int
    stop: int
    queries: Tensor
    keys: Tensor
    values: Tensor


class WholePass(Protocol):
    """A method that masks attention in a single pass over prompt and continuation. It can score the
    continuation's likelihood, but it holds no cache and cannot generate."""

    def mask(self, layer: LayerKV, budget: Budget) -> Tensor:
        """The keys that each query sees, [heads, n, n] bool, False above the diagonal. `layer` has the
        queries and keys of all n tokens of prompt and continuation."""
        ...

    def masked_entries(self, budget: Budget, n: int) -> int:
        """The largest number of keys that a query of an n-token pass sees. Records report it as the
        entries of the cache, although the pass holds all n keys."""
        ...


# --- how a method reads a stream of tokens --------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """The earlier tokens that a token of a stream sees.

    Attributes:
        first: how many of the stream's first tokens it sees.
        last: how many of the most recent tokens it sees; None for all.
        recomputed: True where no cache is held, and every token is computed by a fresh pass over the
            tokens that it sees.
    """

    first: int
    last: int | None
    recomputed: bool = False


def build_scheme(method: str, options: Mapping[str, Any]) -> Scheme:
    """Make the scheme of packed storage that `Method.quantize` describes.

    Args:
        method: the method's name, with which messages begin.
        options: ``scheme``, a name in `SCHEMES` (``affine`` if it is left out), and that scheme's
            options.

    Raises:
        KVError: an unknown scheme or option, or a value that the scheme does not allow.
    """
    scheme_options = dict(options)
    scheme = str(scheme_options.pop("scheme", "affine"))
    check_known(f"{method}.quantize.scheme is {scheme!r}", scheme, [*SCHEMES])
    known = [field.name for field in fields(SCHEMES[scheme])]
    for option in scheme_options:
        check_known(f"{method}.quantize has no option {option!r}", str(option), known)
    try:
        return SCHEMES[scheme](**scheme_options)
    except SchemeError as error:
        raise KVError(f"{method}.{error}") from error


# --- the method -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """A KV-cache compression method: a frozen dataclass whose fields are the method's options.

    A subclass must implement `compress`; every other hook has a default. One method is one file in
    kvbench/methods (the file's name is the method's) and one YAML of the same name in conf/method.
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
    recompresses: ClassVar[bool] = False
    """True where `compress` may be called again on a compressed cache. `LayerKV` then holds the cache's
    entries in the order of their positions and the queries of the last tokens only; the log-weights that
    `compress` returns are added to those of the entries."""

    decoded_by: ClassVar[str] = "kvbench"
    """The library whose code prefills and decodes. A method decoded by another library times the exact
    cache there, as a check; only the plans that list the library in `Plan.decoders` run such a
    method."""

    by_head: ClassVar[bool] = True
    """False where the entries that one KV head keeps depend on the layer's other heads. A layer's heads
    are then never divided among processes."""

    quantize: Scheme | Mapping[str, Any] | None = None
    """The packed storage of the kept entries: ``{bits: 4, group_size: 64}``, or ``{scheme: qjl}`` with
    the options of that scheme (`SCHEMES`). None stores entries in the model's dtype."""

    def __post_init__(self) -> None:
        """Check the options by their type hints. A subclass with further checks calls this first.

        Raises:
            KVError: one line that names the option, its value and what is allowed.
        """
        check_options(self, f"{self.method_name()}.", KVError)

    @classmethod
    def method_name(cls) -> str:
        """The name of the file that defines the method, as messages and build_method call it."""
        return cls.__module__.rpartition(".")[2]

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """Choose or compute the entries that replace the layer's keys and values.

        Called only for prompts longer than `layer_capacity`. It must be a pure function of its
        arguments: all randomness comes from `generator`, a CPU generator whose draws may be moved to
        another device, and the layer's tensors are never written to, since other methods read them.
        (``float()`` does not copy a float32 tensor; ``clone()`` does.) A method from outside kvbench is
        given copies.
        """
        raise NotImplementedError(f"{type(self).__name__}.compress")

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """Score every prompt token by how much it is worth keeping: [batch, kv_heads, n] float32 >= 0.

        Scores of different heads must be comparable. Tokens that `compress` keeps in any case may score
        0. Only methods that choose entries by such scores implement this hook; `adakv` and `pages` can
        then use their scores.
        """
        raise NotImplementedError(f"{type(self).__name__}.token_scores")

    def settle(self, layer: LayerKV, kept: CompressedKV, budget: Budget) -> CompressedKV:
        """Fit the weights or values of the entries `kept`, which a wrapper (`adakv`, `pages`) chose by
        this method's `token_scores`. The default returns the entries unchanged."""
        return kept

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
        """The scheme that `quantize` describes, or None.

        Raises:
            KVError: an unknown scheme or option, a value that the scheme does not allow, or a scheme
                that this method cannot be combined with.
        """
        if self.quantize is None:
            return None
        name = f"{self.method_name()}.quantize"
        if self.recompression is not None:
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
        """Fields that the method adds to a record.

        The default adds ``scheme_bytes``, the bytes of the random sketches and rotations that all
        prompts of a model share, for a scheme that has any.

        Args:
            n: the tokens of the prompt.
            held: the size of each layer's compressed cache, by layer.
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

        The default follows the rule of `eviction`. A method overrides it only for a rule that `Eviction`
        cannot express. Called only when `evicts`.

        Args:
            held: the layer's entries, the new token's last.
            attention: [kv_heads, c], this step's softmax attention to each entry, averaged over the
                queries of the group.

        Returns:
            the new scores [kv_heads, c], or None for a method without scores; ``held.scores`` may be
            changed in place and returned. Then the index [kv_heads] of each head's entry to evict, or
            None to evict nothing.
        """
        rule = self.eviction(held.capacity, held.sink)
        if rule is None:
            raise NotImplementedError(f"{type(self).__name__}.evict")
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
            held: the layer's entries, the tokens fed in this step last.
            logits: [kv_heads, queries, c], -inf where causality hides an entry.

        Returns:
            [kv_heads, queries, c] bool, True for an entry to hide.
        """
        raise NotImplementedError(f"{type(self).__name__}.restrict")

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
    def recompression(self) -> Recompression | None:
        """The times at which `compress` is called again while decoding; None for never."""
        return None

    @property
    def rescoring(self) -> Rescoring | None:
        """The second pass over the prompt, during which `rescore` is called; None for no such pass."""
        return None

    def rescore(self, layer: LayerKV, repeated: Repetition, budget: Budget) -> None:
        """Score the prompt's entries at one layer while the model repeats a chunk of the prompt, and
        store the scores in `layer.carried` for `compress`, under a name that contains the layer's
        index.

        Called for every chunk and every layer before `compress` is called, and only where `rescoring` is
        not None and the prompt is compressed. In both calls `layer.queries` is None.
        """
        raise NotImplementedError(f"{type(self).__name__}.rescore")

    @property
    def whole_pass(self) -> WholePass | None:
        """The masking of a method that scores likelihoods in a single pass and holds no cache; None for
        a method that implements `compress`."""
        return None

    def reading(self, budget: Budget) -> Band | None:
        """The earlier tokens that a token of an endless stream sees (probe `stream`). With None, a
        method that evicts reads the stream with its own cache; any other method cannot read a
        stream."""
        return None


SELF_DESCRIPTION: Mapping[str, tuple[type, ...]] = {
    "version": (int,),
    "saves_memory": (bool,),
    "uses_budget": (bool,),
    "recompresses": (bool,),
    "by_head": (bool,),
    "evicts": (bool,),
    "restricts": (bool,),
    "recompression": (Recompression, type(None)),
    "rescoring": (Rescoring, type(None)),
    "whole_pass": (object,),
}
"""The attributes by which a method describes itself to a job, and the types that each may have; a class
may define them as properties."""


@contextmanager
def asking(label: str, question: str = "description of itself") -> Iterator[None]:
    """Within this context a method is asked about itself, before its job begins.

    Args:
        label: what the message calls the method.
        question: the attribute that is read.

    Raises:
        KVError: one line that names the method, the attribute and the exception that reading it raised.
    """
    try:
        yield
    except KVError:
        raise
    except (Exception, SystemExit, GeneratorExit) as failure:
        raise KVError(
            f"method {label!r}: its {question} raises {one_line(failure)}; allowed: a value"
        ) from failure


def describe_itself(label: str, method: Method) -> dict[str, Any]:
    """A method's `SELF_DESCRIPTION` and its `Method.quantization`, by name. A job goes by these values,
    so that a property that raises later does not end it.

    Raises:
        KVError: a value of another type; see `asking` and `Method.quantization`.
    """
    description: dict[str, Any] = {}
    for name, types in SELF_DESCRIPTION.items():
        with asking(label, name):
            description[name] = getattr(method, name)
        if not isinstance(description[name], types):
            raise KVError(
                f"method {label!r}: its {name} is a {type(description[name]).__name__}; allowed: "
                f"{' or '.join(kind.__name__ for kind in types)}"
            )
    with asking(label, "quantization"):
        description["quantization"] = method.quantization()
    return description


def allowed_entries(
    method: Method, budget: Budget, n: int, num_layers: int
) -> tuple[int, str | None]:
    """Decide how many entries per KV head, summed over the layers, the audit allows a method.

    A method cannot grant itself more than the budget. Only a class of kvbench whose options include all
    those of one of its presets may exceed it.

    Returns:
        the number of entries, and the name of the preset that exceeds the budget, or None.
    """
    granted = num_layers * (budget.capacity(n) if method.saves_memory else n)
    requested = method.total_capacity(replace(budget), n, num_layers)
    if requested <= granted:
        return requested, None
    # A class from outside kvbench could declare a preset for anything.
    if not type(method).__module__.startswith("kvbench."):
        return granted, None
    for name, options in type(method).presets.items():
        preset = type(method)(**options)
        if options and all(getattr(method, key) == getattr(preset, key) for key in options):
            return requested, name
    return granted, None


def rule_of(method: Method, capacity: int, sink: int) -> Eviction | None:
    """The method's `Method.eviction`; None where the method overrides `Method.evict` instead."""
    return method.eviction(capacity, sink) if type(method).evict is Method.evict else None
