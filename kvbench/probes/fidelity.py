"""How far a compressed cache moves the model's next-token distribution, without any answers.

As a function of one prompt and continuation (`teacher_forced`), and as a task: prompts of any task or of
text files, one record per prompt and method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.fork import Cost
from kvbench.engine.loading import Model
from kvbench.engine.scoring import (
    CompressedPrompt,
    feed_continuations,
    greedy_continuation,
    read,
    run_masked_pass,
)
from kvbench.engine.stopping import Stopping
from kvbench.errors.options import Several, Share
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.methods.exact import Exact
from kvbench.probes.base import (
    Probe,
    Repeats,
    Tokens,
    budget_at,
    check_either,
    costs_of,
    failed,
    places,
)
from kvbench.records.figures import Distances, Figure
from kvbench.run.encoding import encode_example
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import PromptEncoder, Task, TaskError
from kvbench.tasks.data import file_digests, texts_of_files

REFERENCE = "(reference)"
"""The label of the exact fork that all are compared with."""
EXACT: Mapping[str, tuple[Method, Budget]] = {REFERENCE: (Exact(), Budget())}
"""Comes before the methods that a prompt is read with."""
ROUNDING = 1e-6
"""A KL divergence is not negative; in float32 it comes out as little as this below zero."""
SIGNIFICANT = 6
"""Digits of the numbers per token that a record keeps."""


class InfiniteDivergence(ArithmeticError):
    """The method gives probability 0 to a token that the exact model does not rule out."""

    def __init__(self, token: int) -> None:
        super().__init__(f"infinite KL divergence at token {token} of the continuation")


@dataclass(frozen=True, kw_only=True)
class Fidelity(Cost):
    """One method against the exact cache, token by token of one continuation, and what it costs.

    Attributes:
        kl: sum_v p_v (log p_v - log q_v) in nats; p is the exact, q the method's next-token
            distribution.
        agree: 1 where both have the same most likely token, else 0.
        nll_exact, nll: -log p and -log q of the continuation's token, in nats.
        difference: nll - nll_exact.
        top: the method's most likely token. top_exact: the exact one.
        failure: what stopped the method; the lists mean nothing then.
        imagined: a mask of a whole pass: entries and bytes are those of a cache that nobody holds.
    """

    kl: list[float] = field(default_factory=list)
    agree: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_exact: list[float] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    top_exact: list[int] = field(default_factory=list)
    failure: Exception | None = None
    imagined: bool = False
    prefill_s: float = 0.0

    @property
    def difference(self) -> list[float]:
        """nll - nll_exact."""
        return [mine - exact for mine, exact in zip(self.nll, self.nll_exact, strict=True)]


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of log-probabilities [tokens, vocab] float32: [tokens] float64.

    Where p is 0 the term is 0; what rounding leaves below zero is zero.
    """
    terms = exact.exp().double() * (exact.double() - other.double())
    kl = torch.where(exact == -torch.inf, 0.0, terms).sum(-1)
    return torch.where((kl < 0) & (kl > -ROUNDING), 0.0, kl)


class _CompareWithFirst:
    """A `LogitsHook` that sets every row after the first against the first."""

    def __init__(self, results: Sequence[Fidelity], continuation: Sequence[int]) -> None:
        self.results = results
        self.continuation = torch.tensor(list(continuation))

    def __call__(self, begin: int, logits: Tensor) -> None:
        target = self.continuation[begin : begin + logits.shape[1], None].to(logits.device)
        exact = logits[0].float().log_softmax(-1)
        top, nll = exact.argmax(-1), -exact.gather(-1, target)[:, 0]
        for result, row in zip(self.results, logits[1:], strict=True):
            other = row.float().log_softmax(-1)
            mine = other.argmax(-1)
            result.kl.extend(divergence(exact, other).tolist())
            result.agree.extend((mine == top).long().tolist())
            result.nll.extend((-other.gather(-1, target)[:, 0]).tolist())
            result.nll_exact.extend(nll.tolist())
            result.top.extend(mine.tolist())
            result.top_exact.extend(top.tolist())


def teacher_forced(
    model: Model,
    prompt_ids: Sequence[int],
    continuation: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    seed: int = 0,
    example_id: str = "x",
) -> dict[str, Fidelity]:
    """Every method against the exact cache on one continuation, from one prefill.

    All but the last prompt token are compressed; that one and the continuation are fed to every fork,
    the exact one among them, in one batch. Pure: nothing is drawn but by the methods, nothing written.

    Args:
        continuation: at least one token; the last is predicted and never fed.
        methods: by label, with their budgets; "exact" need not be among them.

    Returns:
        label -> `Fidelity`, its lists as long as the continuation.
    """
    with kvbench_attention_on(model):
        both, room = {**EXACT, **methods}, len(continuation)
        reading = read(model, prompt_ids, both, seed=seed, example_id=example_id, room=room)
        return compare(model, reading, continuation)


@torch.inference_mode()
def compare(
    model: Model, reading: CompressedPrompt, continuation: Sequence[int]
) -> dict[str, Fidelity]:
    """Every method of a reading against its first fork, which is exact."""
    seconds, tokens = reading.start.prefill_s, len(reading.prompt_ids) + len(continuation)
    results = {
        label: Fidelity(**vars(cost), imagined=label in reading.whole, prefill_s=seconds)
        for label, cost in costs_of(model, reading, tokens).items()
    }
    sound = [fork for fork in reading.forks if fork.failure is None]
    on_logits = _CompareWithFirst([results[fork.label] for fork in sound[1:]], continuation)
    feed_continuations(model, reading, [(fork, continuation) for fork in sound], on_logits)
    for fork in reading.forks:
        compressed = fork.cost().compressed  # a cache that evicts, only now perhaps
        results[fork.label] = replace(
            results[fork.label], failure=fork.failure, compressed=compressed
        )
    for label, pair in reading.whole.items():
        on_logits = _CompareWithFirst([results[label]], continuation)
        run_masked_pass(model, reading.prompt_ids, continuation, [None, pair], on_logits)
    del results[REFERENCE]
    for label, result in results.items():  # what is no number is averaged with nothing
        wrong = next((i for i, kl in enumerate(result.kl, start=1) if not math.isfinite(kl)), None)
        if wrong is not None and result.failure is None:
            results[label] = replace(result, failure=InfiniteDivergence(wrong))
    return results


@torch.inference_mode()
def noise_floor(
    model: Model, reading: CompressedPrompt, continuation: Sequence[int]
) -> list[float]:
    """The KL divergence of the exact fork from itself, fed a second time in a batch of another size:
    what kernels alone make of rounding. To be called before `compare`, which uses the forks up."""
    both: list[list[Tensor]] = [[], []]
    for found, rows in zip(both, (1, 2), strict=True):
        pairs = [(reading.forks[0].clone(), continuation) for _ in range(rows)]

        def keep(_: int, logits: Tensor, found: list[Tensor] = found) -> None:
            found.append(logits[0])

        feed_continuations(model, reading, pairs, keep)
    floor = [
        divergence(*(logits.float().log_softmax(-1) for logits in pair))
        for pair in zip(*both, strict=False)
    ]
    return torch.cat(floor).tolist()


@dataclass(frozen=True)
class Prompt:
    """A prompt, of whose tokens the first so many are its context; and the tokens of a text that goes on
    from it, if there is one."""

    ids: tuple[int, ...]
    context_tokens: int
    given: tuple[int, ...]
    text: str


@dataclass(frozen=True, kw_only=True)
class FidelityProbe(Probe):
    """KL divergence, agreement and likelihood of a continuation under every method's cache.

    No labels are needed: the continuation is what the exact model answers, or a text that is given.
    Every method reads the same tokens, so that no method's own mistakes feed back and differences are
    paired by token. The score is the mean KL divergence from the exact model over the continuation's
    tokens, in nats; over prompts it is the mean of their means, and prompts are what intervals
    resample.

    All but the last prompt token are compressed (with ``compress_after=context``: the context), and the
    rest is fed, so that the first token of the continuation counts like any other.

    Attributes:
        prompts: a task whose first `num_prompts` prompts are used; None with `files`.
        files: glob or list of globs of plain text files, cut into prompts of `prompt_tokens` tokens.
        continuation: greedy (the exact model's own answer, its end token included) | given (a task's
            first reference answer; of files the text that follows).
        tokens: of the continuation, at most; fewer where the model has no more positions.
        rates: shares to compress to, from one prefill; null: the job's budget alone.
        floor: measure what rounding alone comes to (the exact cache fed twice, in another batch).
    """

    name: ClassVar[str] = "fidelity"
    score_unit: ClassVar[str] = "KL in nats"
    repetition: ClassVar[str] = "prompt"
    figures: ClassVar[tuple[Figure, ...]] = (Distances(),)
    lower_is_better: ClassVar[bool] = True

    prompts: Task | None = None
    files: Sequence[str] = ()
    prompt_tokens: Tokens = 1024
    num_prompts: Repeats = 16
    continuation: Literal["greedy", "given"] = "greedy"
    tokens: Tokens = 64
    rates: Several[Share] | None = None
    floor: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_either("task.prompts and task.files", self.prompts, self.files)

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        data = file_digests(self.files) if self.prompts is None else self.prompts.digests()
        return super().meta() | {
            "data": dict(data),
            "breakdown": ["rate"] if self.rates else [],
            "measures": list(places(self.tokens, self.tokens)),
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prompt; all methods and rates share its prefill.

        Raises:
            KVError, TaskError: a prompt that leaves the model no position, a budget that a prompt is
                too short for, no continuation to be given, no text in the files.
        """
        positions = session.encoder.max_positions
        units = []
        for name, case in self._cases(session.encoder):
            n = len(case.ids)
            head = case.context_tokens if session.compress_after == "context" else n - 1
            if head < 1 or head >= n:
                raise KVError(
                    f"prompt {name!r} has {n} tokens, of which {head} would be compressed; "
                    "allowed: at least one, and fewer than there are"
                )
            if positions is not None and n >= positions:
                raise KVError(
                    f"prompt {name!r} has {n} tokens and the model {positions} positions; "
                    "allowed: fewer, since the continuation needs some"
                )
            if self.continuation == "given" and not case.given:
                raise TaskError(
                    f"task.continuation is 'given' and prompt {name!r} has no text to go on with; "
                    "allowed: greedy"
                )
            rates = self.rates or (None,)
            for (_, budget), rate in product(methods.values(), rates):
                budget_at(budget, rate).capacity(head)
            units.append(Unit(name, tuple(_at_rate(name, r, "/rate") for r in rates), case))
        return units

    def _cases(self, encoder: PromptEncoder) -> Iterator[tuple[str, Prompt]]:
        """Prompts by name. Of files the first stretch of each, then the second of each, and so on; what
        is shorter than a whole stretch is left out."""
        if self.prompts is not None:
            for example in list(self.prompts.examples(encoder))[: self.num_prompts]:
                found = encode_example(example, encoder)
                given = encoder.encode_text(example.answers[0]) if example.answers else []
                ids = (*found.context_ids, *found.question_ids)
                text = example.context + example.question
                after = tuple(given[: self.tokens])
                yield example.id, Prompt(ids, len(found.context_ids), after, text)
            return
        step = self.prompt_tokens + self.tokens
        texts = [(name, encoder.encode_text(text)) for name, text in texts_of_files(self.files)]
        longest = max(len(ids) for _, ids in texts)
        if longest < step:
            raise TaskError(
                f"task.files={list(self.files)} hold no stretch of task.prompt_tokens + task.tokens = "
                f"{step} tokens; the longest text has {longest}"
            )
        stretches = (
            (f"{name}-{turn}", ids[turn * step : (turn + 1) * step])
            for turn in range(longest // step)
            for name, ids in texts
        )
        whole = ((name, part) for name, part in stretches if len(part) == step)
        for name, part in islice(whole, self.num_prompts):
            head, after = part[: self.prompt_tokens], tuple(part[self.prompt_tokens :])
            ids = (*encoder.prefix_ids, *head)
            yield name, Prompt(ids, len(ids) - 1, after, encoder.decode(head))

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """One prefill, one continuation, every method at every rate beside the exact cache."""
        case: Prompt = unit.payload
        encoder = session.encoder
        most, rates = self.tokens, self.rates or (None,)
        if encoder.max_positions is not None:
            most = min(most, encoder.max_positions - len(case.ids))
        forks = dict(EXACT)
        for label, (method, budget) in methods.items():
            for rate in rates if method.uses_budget else rates[:1]:
                forks[_at_rate(label, rate, " at rate ")] = method, budget_at(budget, rate)
        reading = read(
            session.model,
            case.ids,
            forks,
            seed=session.seed,
            example_id=unit.id,
            room=most,
            context_tokens=case.context_tokens if session.compress_after == "context" else None,
            encoder=encoder,
        )
        reference = reading.forks[0]
        if reference.failure is not None:
            raise reference.failure
        tokens = list(case.given[:most])
        if self.continuation == "greedy":
            stopping = Stopping(most, session.end_ids, timeout_s=session.example_timeout)
            tokens = greedy_continuation(session.model, reading, reference, stopping)
        floor = noise_floor(session.model, reading, tokens) if self.floor else None
        found = compare(session.model, reading, tokens)
        shared = {
            "prompt": unit.id,
            "prompt_tokens": len(case.ids),
            "compressed_tokens": reading.start.n,
            "compress_after": session.compress_after,
            "continuation": self.continuation,
            "continuation_ids": tokens,
            "new_tokens": len(tokens),
            "answers": [encoder.decode(tokens)],
            "prompt_tail": case.text[-200:],
            "cut": most < self.tokens and len(tokens) == most,
            "kl_floor": None if floor is None else max(floor),
        }
        for label, (method, _) in methods.items():
            for rate in rates:
                key = _at_rate(label, rate if method.uses_budget else rates[0], " at rate ")
                fields = {
                    **shared,
                    **({} if rate is None else {"rate": rate}),
                    **self._measured(found[key], tokens, case.text, encoder),
                }
                yield Outcome(label, _at_rate(unit.id, rate, "/rate"), fields)

    def _measured(
        self, found: Fidelity, tokens: Sequence[int], text: str, encoder: PromptEncoder
    ) -> dict[str, Any]:
        """Record fields of one method on one prompt."""
        held = {**found.record(), "prefill_s": found.prefill_s}
        held |= {"imagined": True} if found.imagined else {}
        if found.failure is not None:
            return held | failed(found.failure)
        means = {n: _mean(getattr(found, n)) for n in ("kl", "nll", "nll_exact", "difference")}
        return {
            **held,
            **means,
            "score": means["kl"],
            "max_kl": max(found.kl),
            "agreement": _mean(found.agree),
            "perplexity_ratio": math.exp(min(means["difference"], 700.0)),
            **{k: _mean(found.kl[at]) for k, at in places(len(tokens), self.tokens).items()},
            "per_token": {
                "kl": rounded(found.kl),
                "agree": found.agree,
                "difference": rounded(found.difference),
            },
            **_divergence(found, tokens, text, encoder),
        }


def _divergence(
    found: Fidelity, tokens: Sequence[int], text: str, encoder: PromptEncoder
) -> dict[str, Any]:
    """Where the method's most likely token first is another than the exact model's: the place (from 1),
    the text before it, both tokens. The prediction is the continuation up to there and that token."""
    if all(found.agree):
        return {"diverges_at": None, "prediction": encoder.decode(tokens)}
    first = found.agree.index(0)
    return {
        "diverges_at": first + 1,
        "diverges": {
            "before": (text + encoder.decode(tokens[:first]))[-80:],
            "exact": encoder.tokenizer.decode([found.top_exact[first]]),
            "method": encoder.tokenizer.decode([found.top[first]]),
            "kl": found.kl[first],
        },
        "prediction": encoder.decode([*tokens[:first], found.top[first]]),
    }


def _at_rate(name: str, rate: float | None, between: str) -> str:
    """A record's id, or a method's label, at one of the rates."""
    return name if rate is None else f"{name}{between}{rate:g}"


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def rounded(values: Sequence[float]) -> list[float]:
    """To `SIGNIFICANT` digits."""
    return [float(f"{value:.{SIGNIFICANT}g}") for value in values]
