"""How far a compressed cache moves the model's next-token distribution, on the prompts of any task and
without any answers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from kvbench.engine.answer import Stopping
from kvbench.engine.ask import Question, answer, continuation_logits
from kvbench.engine.cost import Cost
from kvbench.engine.model import Model
from kvbench.engine.prefill import Reading
from kvbench.errors.options import Several, Share
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.methods.exact import Exact
from kvbench.probes.base import Probe, encoded_prompts, places
from kvbench.prompts import PromptEncoder
from kvbench.records.figures import TaskKind
from kvbench.run.plan import (
    Fields,
    Methods,
    Work,
    WorkItem,
    check_context,
    failure_fields,
    reading_of,
)
from kvbench.run.session import Session
from kvbench.tasks.base import Many, Task, TaskError, Tokens

EXACT_LABEL = "(reference)"
EXACT: Mapping[str, tuple[Method, Budget]] = {EXACT_LABEL: (Exact(), Budget())}
"""The row that all are compared with; a prompt is read with it before all methods."""


@dataclass(frozen=True, kw_only=True)
class Fidelity:
    """One method against the exact cache, token by token of one continuation, and what it costs.

    Attributes:
        kl: sum_v p_v (log p_v - log q_v) in nats; p is the exact, q the method's next-token
            distribution.
        agree: 1 where both have the same most likely token, else 0.
        nll_exact, nll: -log p and -log q of the continuation's token, in nats.
        difference: nll - nll_exact.
        top: the method's most likely token.
        failure: the error that stopped the method; the lists mean nothing then.
    """

    cost: Cost
    kl: list[float] = field(default_factory=list)
    agree: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    nll_exact: list[float] = field(default_factory=list)
    top: list[int] = field(default_factory=list)
    failure: Exception | None = None

    @property
    def difference(self) -> list[float]:
        return [nll - exact for nll, exact in zip(self.nll, self.nll_exact, strict=True)]


def divergence(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of log-probabilities [tokens, vocab] float32: [tokens] float64.

    A term is 0 where the exact probability is 0. Rounding leaves sums that are a little below zero, in
    float32 some 1e-7; they count as zero.
    """
    terms = exact.exp().double() * (exact.double() - other.double())
    kl = torch.where(exact == -torch.inf, 0.0, terms).sum(-1)
    return torch.where((kl < 0) & (kl > -1e-6), 0.0, kl)


@torch.inference_mode()
def fidelities_of(
    model: Model, reading: Reading, continuation: Sequence[int]
) -> dict[str, Fidelity]:
    """Every method of a reading against its first row, which is exact, on a continuation."""
    results = {row.label: Fidelity(cost=row.cost()) for row in reading.rows}
    sound = [row for row in reading.rows if row.failure is None]
    fed = continuation_logits(model, reading, [(row, continuation) for row in sound])
    tokens = torch.tensor(list(continuation))
    for begin, logits in fed:  # [rows, tokens, vocab] of a piece of the continuation
        target = tokens[begin : begin + logits.shape[1], None].to(logits.device)
        exact = logits[0].float().log_softmax(-1)
        exact_top, exact_nll = exact.argmax(-1), -exact.gather(-1, target)[:, 0]
        for row, row_logits in zip(sound[1:], logits[1:], strict=True):
            result = results[row.label]
            log_probabilities = row_logits.float().log_softmax(-1)
            top = log_probabilities.argmax(-1)
            result.kl.extend(divergence(exact, log_probabilities).tolist())
            result.agree.extend((top == exact_top).long().tolist())
            result.nll.extend((-log_probabilities.gather(-1, target)[:, 0]).tolist())
            result.nll_exact.extend(exact_nll.tolist())
            result.top.extend(top.tolist())
    for row in reading.rows:  # a cache that evicts while decoding may be compressed only now
        cost = replace(results[row.label].cost, compressed=row.cost().compressed)
        results[row.label] = replace(results[row.label], failure=row.failure, cost=cost)
    del results[EXACT_LABEL]
    for label, result in results.items():  # a method may give probability 0 to a possible token
        infinite = [i for i, kl in enumerate(result.kl, start=1) if not math.isfinite(kl)]
        if infinite and result.failure is None:
            reason = f"infinite KL divergence at token {infinite[0]} of the continuation"
            results[label] = replace(result, failure=ArithmeticError(reason))
    return results


@dataclass(frozen=True, kw_only=True)
class FidelityProbe(Probe):
    """KL divergence, agreement and likelihood of a continuation under every method's cache.

    No labels are needed: the continuation is what the exact model answers, or a text that the task has.
    Every method reads the same tokens, so that no method's own mistakes feed back and differences are
    paired by token. A record's score is the mean KL divergence from the exact model over the
    continuation's tokens, in nats. Tables have the mean of the records' scores; intervals resample
    prompts.

    All but the last prompt token are compressed (with ``compress_after=context``: the context), and the
    rest is fed, so that the first token of the continuation counts like any other
    (``compress_after=prompt`` is refused).
    conf/task/fidelity.yaml tells the options; a continuation has fewer than `tokens` tokens where the
    model has no more positions, and a greedy one ends with the end token.
    """

    name: ClassVar[str] = "fidelity"
    score_unit: ClassVar[str] = "KL in nats"
    unit: ClassVar[str] = "prompt"
    kind: ClassVar[TaskKind] = "fidelity"
    lower_is_better: ClassVar[bool] = True

    prompts: Task
    num_prompts: Many = 16
    continuation: Literal["greedy", "given"] = "greedy"
    tokens: Tokens = 64
    rates: Several[Share] | None = None

    def meta(self) -> dict[str, Any]:
        return super().meta() | {
            "data": dict(self.prompts.digests()),
            "breakdown": ["rate"] if self.rates else [],
            "measures": list(places(self.tokens, self.tokens)),
        }

    def items(self, session: Session, methods: Methods) -> Sequence[WorkItem]:
        if session.compress_after == "prompt":
            raise KVError(
                "compress_after is 'prompt', whose first token is the exact cache's, and fidelity "
                "compares every token; allowed: all_but_last, context"
            )
        positions = session.encoder.max_positions
        rates = self.rates or (None,)
        items = []
        for encoded in encoded_prompts(self.prompts, session, self.num_prompts):
            name = encoded.example.id
            n = encoded.n
            if session.compress_after == "context":
                check_context(encoded, session, "prompt")
            if positions is not None and n >= positions:
                raise KVError(
                    f"prompt {name!r} has {n} tokens and the model {positions} positions; "
                    "allowed: fewer, since the continuation needs some"
                )
            text = None  # the exact model's own answer
            if self.continuation == "given":
                text = "".join(encoded.example.answers[:1])
            if text == "":
                raise TaskError(
                    f"task.continuation is 'given' and prompt {name!r} has no text to go on with; "
                    "allowed: greedy"
                )
            compressed = n - encoded.held_back(session.compress_after)
            for (_, budget), rate in product(methods.values(), rates):
                budget.with_share(rate).capacity(compressed)  # raises if these tokens are too few
            fields = {
                _at_rate(name, rate, "/rate"): {"prompt": name}
                | ({} if rate is None else {"rate": rate})
                for rate in rates
            }
            items.append(WorkItem(name, tuple(fields), (encoded, text), fields))
        return items

    def run(self, work: Sequence[Work], session: Session) -> Iterator[Fields]:
        ((item, methods),) = work
        encoded, text = item.payload
        encoder = session.encoder
        rates = self.rates or (None,)
        longest = self.tokens
        if encoder.max_positions is not None:
            longest = min(longest, encoder.max_positions - encoded.n)
        by_label = dict(EXACT)
        for label, (method, budget) in methods.items():
            for rate in rates if method.uses_budget else rates[:1]:
                by_label[_at_rate(label, rate, " at rate ")] = method, budget.with_share(rate)
        later = encoded.question_ids if session.compress_after == "context" else ()
        room = longest + len(later)
        reading = reading_of(encoded, by_label, session, name=item.id, room=room)
        if later:
            reading.lead = later
        reference = reading.rows[0]
        if reference.failure is not None:
            raise reference.failure
        if text is None:
            stopping = Stopping(longest, session.end_ids, timeout_s=session.example_timeout)
            question = Question((), stopping)
            (exact,) = answer(session.model, [(reading, reference.clone(), question)])
            if exact.failure is not None:
                raise exact.failure
            tokens = exact.chosen
        else:
            tokens = encoder.encode_after(".", text)[:longest]
        fidelities = fidelities_of(session.model, reading, tokens)
        prompt = encoded.example.context + encoded.example.question
        shared = {
            "prompt": item.id,
            "prompt_tokens": encoded.n,
            "compressed_tokens": reading.n,
            "held_back": encoded.n - reading.n,
            "compress_after": session.compress_after,
            "continuation": self.continuation,
            "continuation_ids": tokens,
            "new_tokens": len(tokens),
            "answers": [encoder.decode(tokens)],
            "prompt_tail": prompt[-200:],
            "cut": longest < self.tokens and len(tokens) == longest,
        }
        for label, (method, _) in methods.items():
            for rate in rates:
                rate_of_row = rate if method.uses_budget else rates[0]
                fidelity = fidelities[_at_rate(label, rate_of_row, " at rate ")]
                record_id = _at_rate(item.id, rate, "/rate")
                fields = {**shared, **item.fields[record_id]}
                fields |= self._measured(fidelity, tokens, encoder)
                yield {"method": label, "example_id": record_id, **fields}

    def _measured(
        self, fidelity: Fidelity, tokens: Sequence[int], encoder: PromptEncoder
    ) -> dict[str, Any]:
        """Record fields of one method on one prompt. It diverges at the first token of which its most
        likely one is another than the exact model's; the field `prediction` ends there, with its own."""
        if fidelity.failure is not None:
            return fidelity.cost.record() | failure_fields(fidelity.failure)
        names = ("kl", "nll", "nll_exact", "difference")
        means = {name: math.fsum(getattr(fidelity, name)) / len(tokens) for name in names}
        diverges_at = None  # counted from 1
        prediction = list(tokens)
        if 0 in fidelity.agree:
            first = fidelity.agree.index(0)
            diverges_at = first + 1
            prediction = [*tokens[:first], fidelity.top[first]]
        by_place = {}
        for name, place in places(len(tokens), self.tokens).items():
            by_place[name] = math.fsum(fidelity.kl[place]) / len(fidelity.kl[place])
        return {
            **fidelity.cost.record(),
            **means,
            "score": means["kl"],
            "max_kl": max(fidelity.kl),
            "agreement": sum(fidelity.agree) / len(tokens),
            "perplexity_ratio": math.exp(min(means["difference"], 700.0)),
            **by_place,
            "per_token": {  # six significant digits
                "kl": [float(f"{kl:.6g}") for kl in fidelity.kl],
                "agree": fidelity.agree,
                "difference": [float(f"{value:.6g}") for value in fidelity.difference],
            },
            "diverges_at": diverges_at,
            "prediction": encoder.decode(prediction),
        }


def _at_rate(name: str, rate: float | None, between: str) -> str:
    """A record's id, or a row's label, with the rate behind it; unchanged where there is none."""
    return name if rate is None else f"{name}{between}{rate:g}"
