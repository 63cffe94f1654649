"""How far a compressed cache moves the model's next-token distribution, without any answers.

As a function of one prompt and continuation (`teacher_forced`), and as a task: prompts of any task, one
record per prompt and method.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.loading import Model
from kvbench.engine.scoring import (
    CompressedPrompt,
    Logits,
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
    ReadCost,
    Repeats,
    costs_of,
    encoded_prompts,
    failed,
    places,
)
from kvbench.prompts import PromptEncoder
from kvbench.records.figures import TaskKind
from kvbench.run.plan import Methods, Outcome, Unit
from kvbench.run.session import Session
from kvbench.tasks.base import Task, TaskError, Tokens

REFERENCE = "(reference)"
EXACT: Mapping[str, tuple[Method, Budget]] = {REFERENCE: (Exact(), Budget())}
"""The fork that all are compared with; it comes before the methods that a prompt is read with."""


@dataclass(frozen=True, kw_only=True)
class Fidelity(ReadCost):
    """One method against the exact cache, token by token of one continuation, and what it costs.

    Attributes:
        kl: sum_v p_v (log p_v - log q_v) in nats; p is the exact, q the method's next-token
            distribution.
        agree: 1 where both have the same most likely token, else 0.
        nll_exact, nll: -log p and -log q of the continuation's token, in nats.
        difference: nll - nll_exact.
        top: the method's most likely token.
        failure: what stopped the method; the lists mean nothing then.
    """

    kl: list[float] = field(default_factory=list)
    agree: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_exact: list[float] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def difference(self) -> list[float]:
        """nll - nll_exact."""
        return [mine - exact for mine, exact in zip(self.nll, self.nll_exact, strict=True)]


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of log-probabilities [tokens, vocab] float32: [tokens] float64.

    Where p is 0 the term is 0; what rounding leaves below zero, in float32 some 1e-7, is zero.
    """
    terms = exact.exp().double() * (exact.double() - other.double())
    kl = torch.where(exact == -torch.inf, 0.0, terms).sum(-1)
    return torch.where((kl < 0) & (kl > -1e-6), 0.0, kl)


def _compare_with_first(
    results: Sequence[Fidelity], continuation: Sequence[int], fed: Logits
) -> None:
    """Add to each result how its own row of logits differs from the first row, the exact cache's.

    Args:
        results: of the rows after the first. fed: logits [rows, tokens, vocab], piece by piece.
    """
    tokens = torch.tensor(list(continuation))
    for begin, logits in fed:
        target = tokens[begin : begin + logits.shape[1], None].to(logits.device)
        exact = logits[0].float().log_softmax(-1)
        top, nll = exact.argmax(-1), -exact.gather(-1, target)[:, 0]
        for result, row in zip(results, logits[1:], strict=True):
            other = row.float().log_softmax(-1)
            mine = other.argmax(-1)
            result.kl.extend(divergence(exact, other).tolist())
            result.agree.extend((mine == top).long().tolist())
            result.nll.extend((-other.gather(-1, target)[:, 0]).tolist())
            result.nll_exact.extend(nll.tolist())
            result.top.extend(mine.tolist())


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
    costs = costs_of(model, reading, len(reading.prompt_ids) + len(continuation))
    results = {label: Fidelity(**vars(cost)) for label, cost in costs.items()}
    sound = [fork for fork in reading.forks if fork.failure is None]
    fed = feed_continuations(model, reading, [(fork, continuation) for fork in sound])
    _compare_with_first([results[fork.label] for fork in sound[1:]], continuation, fed)
    for fork in reading.forks:  # a cache that evicts may be compressed only now
        now: dict[str, Any] = {"failure": fork.failure, "compressed": fork.cost().compressed}
        results[fork.label] = replace(results[fork.label], **now)
    for label, pair in reading.whole.items():
        fed = run_masked_pass(model, reading.prompt_ids, continuation, [None, pair])
        _compare_with_first([results[label]], continuation, fed)
    del results[REFERENCE]
    for label, result in results.items():  # a method may rule out what the exact model does not
        wrong = next((i for i, kl in enumerate(result.kl, start=1) if not math.isfinite(kl)), None)
        if wrong is not None and result.failure is None:
            reason = f"infinite KL divergence at token {wrong} of the continuation"
            results[label] = replace(result, failure=ArithmeticError(reason))
    return results


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
        prompts: a task whose first `num_prompts` prompts are used; of one's own texts: ``text``.
        continuation: greedy (the exact model's own answer, its end token included) | given (the task's
            first reference answer, of ``text`` how it goes on).
        tokens: of the continuation, at most; fewer where the model has no more positions.
        rates: shares to compress to, from one prefill; null: the job's budget alone.
    """

    name: ClassVar[str] = "fidelity"
    score_unit: ClassVar[str] = "KL in nats"
    repetition: ClassVar[str] = "prompt"
    kind: ClassVar[TaskKind] = "fidelity"
    lower_is_better: ClassVar[bool] = True

    prompts: Task
    num_prompts: Repeats = 16
    continuation: Literal["greedy", "given"] = "greedy"
    tokens: Tokens = 64
    rates: Several[Share] | None = None

    def meta(self) -> dict[str, Any]:
        """See `Probe.meta`."""
        return super().meta() | {
            "data": dict(self.prompts.digests()),
            "breakdown": ["rate"] if self.rates else [],
            "measures": list(places(self.tokens, self.tokens)),
        }

    def units(self, session: Session, methods: Methods) -> Sequence[Unit]:
        """One unit per prompt; all methods and rates share its prefill.

        Raises:
            KVError, TaskError: a prompt that leaves the model no position, a budget that a prompt is
                too short for, no continuation to be given.
        """
        positions = session.encoder.max_positions
        rates = self.rates or (None,)
        units = []
        for encoded in encoded_prompts(self.prompts, session, self.num_prompts):
            name, n = encoded.example.id, encoded.n
            if positions is not None and n >= positions:
                raise KVError(
                    f"prompt {name!r} has {n} tokens and the model {positions} positions; "
                    "allowed: fewer, since the continuation needs some"
                )
            given = "".join(encoded.example.answers[:1]) if self.continuation == "given" else None
            if given == "":
                raise TaskError(
                    f"task.continuation is 'given' and prompt {name!r} has no text to go on with; "
                    "allowed: greedy"
                )
            head = len(encoded.context_ids) if session.compress_after == "context" else n - 1
            for (_, budget), rate in product(methods.values(), rates):
                budget.with_share(rate).capacity(head)
            ids = tuple(_at_rate(name, rate, "/rate") for rate in rates)
            units.append(Unit(name, ids, (encoded, given)))
        return units

    def run(self, unit: Unit, methods: Methods, session: Session) -> Iterator[Outcome]:
        """One prefill, one continuation, every method at every rate beside the exact cache."""
        encoded, given = unit.payload
        encoder = session.encoder
        after_context = session.compress_after == "context"
        most, rates = self.tokens, self.rates or (None,)
        if encoder.max_positions is not None:
            most = min(most, encoder.max_positions - encoded.n)
        forks = dict(EXACT)
        for label, (method, budget) in methods.items():
            for rate in rates if method.uses_budget else rates[:1]:
                forks[_at_rate(label, rate, " at rate ")] = method, budget.with_share(rate)
        reading = read(
            session.model,
            (*encoded.context_ids, *encoded.question_ids),
            forks,
            seed=session.seed,
            example_id=unit.id,
            room=most,
            context_tokens=len(encoded.context_ids) if after_context else None,
            encoder=encoder,
        )
        reference = reading.forks[0]
        if reference.failure is not None:
            raise reference.failure
        if given is None:
            stopping = Stopping(most, session.end_ids, timeout_s=session.example_timeout)
            tokens = greedy_continuation(session.model, reading, reference, stopping)
        else:
            tokens = encoder.encode_text(given)[:most]
        distances = compare(session.model, reading, tokens)
        text = encoded.example.context + encoded.example.question
        shared = {
            "prompt": unit.id,
            "prompt_tokens": encoded.n,
            "compressed_tokens": reading.start.n,
            "compress_after": session.compress_after,
            "continuation": self.continuation,
            "continuation_ids": tokens,
            "new_tokens": len(tokens),
            "answers": [encoder.decode(tokens)],
            "prompt_tail": text[-200:],
            "cut": most < self.tokens and len(tokens) == most,
        }
        for label, (method, _) in methods.items():
            for rate in rates:
                key = _at_rate(label, rate if method.uses_budget else rates[0], " at rate ")
                fields = {
                    **shared,
                    **({} if rate is None else {"rate": rate}),
                    **self._measured(distances[key], tokens, encoder),
                }
                yield Outcome(label, _at_rate(unit.id, rate, "/rate"), fields)

    def _measured(
        self, distances: Fidelity, tokens: Sequence[int], encoder: PromptEncoder
    ) -> dict[str, Any]:
        """Record fields of one method on one prompt. It diverges where its most likely token first is
        another than the exact model's: the prediction ends there, with that token."""
        if distances.failure is not None:
            return distances.record() | failed(distances.failure)
        names = ("kl", "nll", "nll_exact", "difference")
        means = {name: math.fsum(getattr(distances, name)) / len(tokens) for name in names}
        agreed = distances.agree.index(0) if 0 in distances.agree else None
        prediction = tokens if agreed is None else [*tokens[:agreed], distances.top[agreed]]
        return {
            **distances.record(),
            **means,
            "score": means["kl"],
            "max_kl": max(distances.kl),
            "agreement": sum(distances.agree) / len(tokens),
            "perplexity_ratio": math.exp(min(means["difference"], 700.0)),
            **{
                name: math.fsum(distances.kl[at]) / len(distances.kl[at])
                for name, at in places(len(tokens), self.tokens).items()
            },
            "per_token": {  # six significant digits
                "kl": [float(f"{value:.6g}") for value in distances.kl],
                "agree": distances.agree,
                "difference": [float(f"{value:.6g}") for value in distances.difference],
            },
            "diverges_at": None if agreed is None else agreed + 1,
            "prediction": encoder.decode(prediction),
        }


def _at_rate(name: str, rate: float | None, between: str) -> str:
    """A record's id, or a method's label, at one of the rates."""
    return name if rate is None else f"{name}{between}{rate:g}"
