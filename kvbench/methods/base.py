"""The contract of a compression method."""

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
from kvbench.kernels.quantize import Quantization, Scheme
from kvbench.kernels.turboquant import TurboQuant
from kvbench.kv import Budget, CompressedKV, KVError, LayerKV

SCHEMES: Mapping[str, type[Quantization] | type[QJL] | type[TurboQuant]] = {
    "affine": Quantization,
    "qjl": QJL,
    "turboquant": TurboQuant,
}
"""What `Method.quantize` may name as its scheme."""

SEED_STRIDE = 1_000_003
"""Draws of two seeds lie this far apart: more than any seed has draws."""


def check_known(what: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is not among the known ones.

    Raises:
        KVError: `what` it is, the nearest known name, and all that are allowed.
    """
    if name not in known:
        raise KVError(f"{what}{nearest(name, known)}; allowed: {', '.join(known) or 'none'}")


# --- what a method may do while decoding ----------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a fork's cache holds at one layer while decoding, the newest entry last.

    Attributes:
        scores: [kv_heads, c] float32, `CompressedKV.scores` brought up to date by `Method.evict`;
            a new entry starts at 0. None where the method gave none.
        positions: [kv_heads, c] int64, the prompt or generation position of each entry.
        capacity: entries the budget grants this layer per head: `Method.layer_capacity`, or for a
            method that holds everything `Budget.capacity`.
        sink: leading tokens of the prompt that are always kept.
    """

    scores: Tensor | None
    positions: Tensor
    capacity: int
    sink: int


class HeldShape(NamedTuple):
    """The size of what a layer holds of a prompt after compression.

    Attributes:
        heads: KV heads.
        entries: per head.
        dim, value_dim: numbers of a key and of a value.
        itemsize: bytes of a number.
    """

    heads: int
    entries: int
    dim: int
    value_dim: int
    itemsize: int

    @classmethod
    def of(cls, held: CompressedKV) -> HeldShape:
        """The size of `held`."""
        _, heads, entries, dim = held.keys.shape
        return cls(heads, entries, dim, held.values.shape[3], held.keys.element_size())


@dataclass(frozen=True)
class Recompression:
    """When what is held is compressed again while decoding.

    Attributes:
        every: tokens from one time to the next.
        to: entries per KV head that stay; below 1: a share of the tokens so far; None: the budget's.
        queries: of the last tokens that `compress` is shown.
        phase: steps (after every so many steps) | tokens (when prompt and tokens fed were a multiple of
            `every` before the step).
        inside: the tokens up to the next time have their place in the budget, too: whenever it is full,
            room is made for `every` tokens, or an eighth of it; `phase` says nothing. With `to` None.
    """

    every: int
    to: float | None
    queries: int
    phase: str = "steps"
    inside: bool = False

    def stays(self, budget: Budget, prompt: int, fed: int, held: int) -> int | None:
        """The number of entries to which a cache is compressed at this step; None: it is not compressed.

        Args:
            prompt: tokens of the prompt.
            fed: tokens fed since.
            held: entries that the cache holds now, per head.
        """
        if self.to is None:
            full = budget.limit(prompt)
            if full is None:
                return None
        else:
            full = int(self.to) if self.to >= 1 else round(self.to * (prompt + fed))
        if self.to is None or self.to < 1:
            full = max(full, budget.sink + budget.window + 1)  # the least that a budget grants
        if held <= full:
            return None
        if self.inside:
            return max(budget.sink + budget.window + 1, full - max(1, min(self.every, full // 8)))
        counted = prompt + fed - 1 if self.phase == "tokens" else fed
        return None if counted % self.every else full


# --- a second look at the prompt ------------------------------------------------------------------


@dataclass(frozen=True)
class Rescoring:
    """One more pass over a prompt before it is compressed: the model is asked to repeat it, chunk by
    chunk, each time against the exact cache of all of it, and nothing of that is kept.

    Attributes:
        chunk: prompt tokens after the sink that one sequence repeats; the last may be shorter.
        first: the words that ask for the first chunk, with nothing around them; empty: none.
        following: for the others, which go on with the last `overlap` tokens of the chunk before.
    """

    chunk: int
    first: str = ""
    following: str = ""
    overlap: int = 0


@dataclass(frozen=True)
class Repetition:
    """What a layer computes while the model repeats the prompt's tokens start .. stop - 1.

    Attributes:
        queries: [batch, heads, t, head_dim] after position encoding, of the whole sequence: the words
            that ask, then the tokens repeated; at the positions after the prompt.
        keys, values: [batch, kv_heads, t, head_dim], the sequence's own.
    """

    start: int
    stop: int
    queries: Tensor
    keys: Tensor
    values: Tensor


class WholePass(Protocol):
    """A rule for one pass over prompt and continuation, which scores likelihoods, holds no cache and
    cannot generate."""

    def mask(self, layer: LayerKV, budget: Budget) -> Tensor:
        """Which key each query sees: [heads, n, n] bool, False above the diagonal; `layer` has queries
        and keys of all n tokens, those of the continuation included."""
        ...

    def masked_entries(self, budget: Budget, n: int) -> int:
        """Keys that a query of an n-token pass sees at most: the entries of a cache that is imagined,
        since all of them are held."""
        ...


# --- how a method reads a stream of tokens --------------------------------------------------------


@dataclass(frozen=True)
class Band:
    """A token sees the first and the last tokens before it, and no others; `last` None: all.

    Attributes:
        recomputed: no cache is held, and every token comes from a fresh pass over those it sees.
    """

    first: int
    last: int | None
    recomputed: bool = False


# --- the method -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Method:
    """A KV-cache compression method: a frozen dataclass whose fields are the paper's knobs.

    A subclass implements `compress`, and nothing else unless it must. One method is one file in
    kvbench/methods (the file's name is the method's) and one YAML of the same name in conf/method.
    """

    paper: ClassVar[str] = ""
    """Where the method comes from: arXiv number and section."""
    version: ClassVar[int] = 1
    """Raised when the same options come to hold something else: then old records are not taken up."""
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Named sets of options, e.g. ``{"released": {"order": "released"}}``."""
    saves_memory: ClassVar[bool] = True
    """False when the cache stays whole (exact, topk): no budget applies, and the record says so."""
    uses_budget: ClassVar[bool] = True
    """False when `compress` does not look at the budget (exact): one record serves every rate."""
    recompresses: ClassVar[bool] = False
    """True where `compress` may be called again on what is held (`LayerKV` of entries in the order of
    their positions, with the queries of the last tokens): it chooses entries by their keys, values and
    those queries, or by chance, and its weights multiply."""

    decoded_by: ClassVar[str] = "kvbench"
    """Whose code reads the prompt and decodes. Another library's name: a witness of the exact cache's
    seconds, which only the plans run that name it (`kvbench.run.plan.Plan.decoders`)."""

    by_head: ClassVar[bool] = True
    """False where what a KV head keeps depends on the layer's others: then no process has only some."""

    quantize: Scheme | Mapping[str, Any] | None = None
    """How the kept entries are stored: ``{bits: 4, group_size: 64}``, or ``{scheme: qjl}`` with that
    scheme's options (`SCHEMES`); None: as they are."""

    def __post_init__(self) -> None:
        """Check the options by their hints; a subclass with more to check calls this first.

        Raises:
            KVError: one line that names the option, its value and what is allowed.
        """
        check_options(self, type(self).__module__.rpartition(".")[2] + ".", KVError)

    def compress(self, layer: LayerKV, budget: Budget, generator: torch.Generator) -> CompressedKV:
        """What `layer` holds instead.

        Called only for prompts longer than `layer_capacity`. Must be a pure function of its
        arguments: all randomness from `generator` (a CPU generator; move the draws, not it), and
        the layer's tensors, which other methods read, are not written to (``clone()`` first;
        ``float()`` copies no float32). A method from outside kvbench is given copies.
        """
        raise NotImplementedError(f"{type(self).__name__}.compress")

    def token_scores(self, layer: LayerKV, budget: Budget) -> Tensor:
        """How much each token of the prompt is worth keeping: [batch, kv_heads, n] float32 >= 0, with
        heads on one scale; 0 for tokens that `compress` keeps whatever their score. For methods that
        choose by such scores; others (`adakv`, `pages`) then choose by them, too."""
        raise NotImplementedError(f"{type(self).__name__}.token_scores")

    def settle(self, layer: LayerKV, kept: CompressedKV, budget: Budget) -> CompressedKV:
        """What is held of the entries `kept` that another method (`adakv`, `pages`) chose by
        `token_scores`: as they are, unless the method solves for their weights or values."""
        return kept

    def layer_capacity(self, budget: Budget, n: int, layer_index: int, num_layers: int) -> int:
        """Entries per KV head the method may hold at this layer after prefill of n tokens.

        The audit holds the method to it, and holds its sum over the layers to
        ``num_layers * budget.capacity(n)`` (see `total_capacity`).
        """
        return self.layer_capacities(budget, n, num_layers)[layer_index]

    def layer_capacities(self, budget: Budget, n: int, num_layers: int) -> Sequence[int]:
        """`layer_capacity` of every layer, where they depend on one another."""
        return [budget.capacity(n) if self.saves_memory else n] * num_layers

    def total_capacity(self, budget: Budget, n: int, num_layers: int) -> int:
        """Entries per KV head summed over the layers that the audit allows.

        More than the budget is granted to a named preset only (one that reproduces a released code's
        own split), and records and reports say so.
        """
        return sum(self.layer_capacities(budget, n, num_layers))

    def quantization(self) -> Scheme | None:
        """How the kept entries are stored, checked.

        Raises:
            KVError: unknown bits or group size, or a method that evicts while decoding with a scheme
                that packs entries together.
        """
        if self.quantize is None:
            return None
        name = f"{type(self).__name__}.quantize"
        if self.recompression is not None:
            raise KVError(
                f"{name} is set and the method compresses again while decoding; allowed: one or the "
                "other"
            )
        scheme = self.quantize
        if isinstance(scheme, Mapping):
            options = dict(scheme)
            kind = str(options.pop("scheme", "affine"))
            check_known(f"{name}.scheme is {kind!r}", kind, [*SCHEMES])
            known = [field.name for field in fields(SCHEMES[kind])]
            for option in options:
                check_known(f"{name} has no option {option!r}", str(option), known)
            try:
                scheme = SCHEMES[kind](**options)
            except (TypeError, ValueError) as error:
                raise KVError(f"{name} is {self.quantize}: {error}") from error
        if self.evicts and not scheme.by_entry:
            raise KVError(
                f"{name} packs entries together and the method evicts while decoding; allowed: "
                "decode=grow, or entries packed one by one: quantize.keys=entry, "
                "quantize.scheme=turboquant"
            )
        return scheme

    def extras(self, n: int, held: Mapping[int, HeldShape]) -> dict[str, int]:
        """Further fields of a record, of a prompt of n tokens of which each layer holds so much: with a
        scheme that draws them ``scheme_bytes``, of the sketches and rotations that a model has once."""
        scheme = self.quantization()
        dims = {layer: (shape.dim, shape.value_dim) for layer, shape in held.items()}
        drawn = 0 if scheme is None else scheme.model_bytes(dims)
        return {"scheme_bytes": drawn} if drawn else {}

    # What few methods do beside: each of these is all that such a method adds.

    def eviction(self, capacity: int, sink: int) -> Eviction | None:
        """The rule by which one entry leaves for each decoded token, so that a cache of `capacity`
        entries per head, whose first `sink` tokens are always kept, does not grow. None: it grows, or
        goes by an `evict` of the method's own."""
        return None

    def evict(self, held: Held, attention: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """After one decoded token: new scores, and which entry leaves. By `eviction`, unless a method
        with a rule that cannot be said so overrides this: it is then asked at every token.

        Args:
            held: what the layer holds, the new token's entry last.
            attention: [kv_heads, c] the step's softmax attention, mean over the group's queries.

        Returns:
            scores [kv_heads, c] (None: no scores; ``held.scores`` itself where they were changed in
            place), and the index [kv_heads] of the entry that leaves each head (None: nothing
            leaves). Called only when `evicts`.
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
        """Which entries a decoding query does not attend to, for a method that holds more than a query
        sees.

        Args:
            held: what the layer holds, the tokens fed in this step last.
            logits: [kv_heads, queries, c], -inf where causality hides an entry.

        Returns:
            [kv_heads, queries, c] bool, True for hidden. Called only when `restricts`.
        """
        raise NotImplementedError(f"{type(self).__name__}.restrict")

    @property
    def evicts(self) -> bool:
        """True where there is an `eviction`, or an `evict` of the method's own: the cache does not grow
        while decoding."""
        return type(self).evict is not Method.evict or self.eviction(1, 0) is not None

    @property
    def restricts(self) -> bool:
        """True where there is a `restrict`: a decoding query sees part of what is held."""
        return type(self).restrict is not Method.restrict

    @property
    def recompression(self) -> Recompression | None:
        """When `compress` is called again while decoding; None: never."""
        return None

    @property
    def rescoring(self) -> Rescoring | None:
        """The pass over the prompt that `rescore` looks at; None: none."""
        return None

    def rescore(self, layer: LayerKV, repeated: Repetition, budget: Budget) -> None:
        """Look at one layer while the model repeats a chunk of its prompt, and note in `layer.carried`
        what `compress` will ask for, under a name of the layer's own.

        `compress` is called once every layer has seen every chunk; `layer` is then, as here, without the
        prompt's own queries. Called only where there is a `rescoring` and the prompt is compressed.
        """
        raise NotImplementedError(f"{type(self).__name__}.rescore")

    @property
    def whole_pass(self) -> WholePass | None:
        """For a method that holds no cache: the rule by which it masks one pass over prompt and
        continuation, in place of `compress`. None: the method has a `compress`."""
        return None

    def reading(self, budget: Budget) -> Band | None:
        """Which earlier tokens a token of an endless stream sees (probe `stream`). None: a method that
        evicts reads a stream with its own cache; any other method cannot read one."""
        return None


ASKED: Mapping[str, tuple[type, ...]] = {
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
"""What a job asks a method about itself (properties, where a class makes them so), and of which type an
answer is."""


@contextmanager
def asking(label: str, question: str = "description of itself") -> Iterator[None]:
    """A method is asked about itself within this context, before its job begins.

    Raises:
        KVError: naming the method, what it was asked and what it raised.
    """
    try:
        yield
    except KVError:
        raise
    except (Exception, SystemExit, GeneratorExit) as failure:
        raise KVError(
            f"method {label!r}: its {question} raises {one_line(failure)}; allowed: a value"
        ) from failure


def check_answers(label: str, method: Method) -> dict[str, Any]:
    """What a method answers to every question of `ASKED`, and its `Method.quantization`. A job goes by
    these answers, so that a property that raises later does not end it.

    Raises:
        KVError: an answer of another kind; see `asking` and `Method.quantization`.
    """
    answers: dict[str, Any] = {}
    for name, kind in ASKED.items():
        with asking(label, name):
            answers[name] = getattr(method, name)
        if not isinstance(answers[name], kind):
            raise KVError(
                f"method {label!r}: its {name} is a {type(answers[name]).__name__}; allowed: "
                f"{' or '.join(one.__name__ for one in kind)}"
            )
    with asking(label, "quantization"):
        answers["quantization"] = method.quantization()
    return answers


def allowed_entries(
    method: Method, budget: Budget, n: int, num_layers: int
) -> tuple[int, str | None]:
    """Entries per KV head that the audit allows in all layers together, and the name of the preset that
    holds more than the budget, None where none does: one whose options the method has, whatever its
    others are. A method is not its own judge: what it asks for beyond the budget without such a name, or
    by a class from outside kvbench, is not granted."""
    granted = num_layers * (budget.capacity(n) if method.saves_memory else n)
    asked = method.total_capacity(replace(budget), n, num_layers)
    if asked <= granted:
        return asked, None
    if not type(method).__module__.startswith("kvbench."):
        return granted, None  # a class from elsewhere could name a preset of its own for anything
    for name, options in type(method).presets.items():
        made = type(method)(**options)
        if options and all(getattr(method, key) == getattr(made, key) for key in options):
            return asked, name
    return granted, None


def rule_of(method: Method, capacity: int, sink: int) -> Eviction | None:
    """`Method.eviction`, unless the method has an `evict` of its own."""
    return method.eviction(capacity, sink) if type(method).evict is Method.evict else None
