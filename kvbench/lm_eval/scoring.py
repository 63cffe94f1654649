"""Requests of lm-evaluation-harness on compressed caches, several methods at once: one prefill per
context."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any, Literal

import lm_eval.models  # noqa: F401 - before a model is registered: it fills an empty registry only
from lm_eval.models.huggingface import HFLM

from kvbench.engine.fork import prompt_name
from kvbench.engine.loading import Model
from kvbench.engine.scoring import read, score
from kvbench.engine.tokenizer import Tokenizer
from kvbench.errors import UserError
from kvbench.probes.base import ReadCost, costs_of
from kvbench.run.plan import Methods
from kvbench.tasks.base import PromptEncoder

log = logging.getLogger(__name__)

Scoring = Literal["sum", "mean"]
"""Of a continuation: its log-probability, or that per token (H2O's released evaluation)."""
Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of what goes on from it."""


@contextmanager
def quietly() -> Iterator[None]:
    """Without that harness's bars and remarks about its own defaults; what fails is raised."""
    its = logging.getLogger("lm_eval")
    level = its.level
    its.setLevel(logging.ERROR)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        its.setLevel(level)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One likelihood request under one method.

    Attributes:
        logprob: of the whole continuation, or of its mean token. greedy: whether every token is the most
            likely one.
        tokens: of the continuation. context_tokens: of the context.
        cost: after compression; requests of one context have one.
        failure: what stopped the method, if anything did.
    """

    logprob: float
    greedy: bool
    tokens: int
    context_tokens: int
    cost: ReadCost
    failure: Exception | None


def held(answers: Sequence[Answer]) -> dict[str, Any]:
    """Record fields of what one method holds for some requests: of several contexts (choices in the
    context), all together."""
    costs = list({id(answer.cost): answer.cost for answer in answers}.values())
    mine = sum(cost.cache_bytes or 0 for cost in costs)
    exact = sum(cost.exact_bytes for cost in costs if cost.cache_bytes is not None)
    longest = max(answer.context_tokens for answer in answers)
    return {
        "prompt_tokens": longest,
        "compressed_tokens": longest - 1,  # the last is fed
        "new_tokens": sum(answer.tokens for answer in answers),
        "choices": len(answers),
        "contexts": len(costs),
        "entries": costs[0].entries,
        "cache_bytes": mine or None,
        "exact_bytes": exact or None,
        "ratio": mine / exact if mine and exact else None,
        "compressed": any(cost.compressed for cost in costs),
        **({"imagined": True} if costs[0].imagined else {}),
        "prefill_s": sum(cost.prefill_s for cost in costs),
        "compress_s": sum(cost.compress_s for cost in costs),
    }


def truncated(pair: Pair, max_length: int) -> Pair:
    """The request as HFLM cuts it: context and continuation to the last max_length + 1 tokens.

    Raises:
        UserError: a continuation that is empty or longer than the model.
    """
    context, continuation = pair
    if not 1 <= len(continuation) <= max_length:
        raise UserError(
            f"a continuation has {len(continuation)} tokens; allowed: 1..{max_length}, the "
            "model's positions"
        )
    room = max_length + 1 - len(continuation)
    return list(context)[-room:], list(continuation)


def answer_requests(
    model: Model,
    pairs: Sequence[Pair],
    methods: Methods,
    *,
    seed: int,
    max_length: int,
    scoring: Scoring = "sum",
    batch_rows: int = 32,
    encoder: PromptEncoder | None = None,
) -> list[dict[str, Answer]]:
    """The likelihood of every request under every method, in the order asked.

    Requests of one context share one prefill and one compression of all but its last token; each
    continuation is fed to a copy. Draws depend on the seed and the context's tokens, so that an answer
    depends neither on the order nor on the company of the requests. Contexts run longest first.
    """
    cut = [truncated(pair, max_length) for pair in pairs]
    longer = sum(len(mine[0]) < len(given[0]) for mine, given in zip(cut, pairs, strict=True))
    if longer:
        said = "%d of %d contexts are cut on the left to the model's %d tokens"
        log.warning(said, longer, len(pairs), max_length)
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, (context, _) in enumerate(cut):
        by_context.setdefault(tuple(context), []).append(number)
    answers: list[dict[str, Answer]] = [{} for _ in pairs]
    for context in sorted(by_context, key=len, reverse=True):
        members = by_context[context]
        tails = [cut[number][1] for number in members]
        room, name = max(map(len, tails)), prompt_name(context[:-1] or context)
        reading = read(
            model, context, methods, seed=seed, example_id=name, room=room, encoder=encoder
        )
        costs = costs_of(model, reading, len(context) + room)  # before continuations are fed
        for label, scored in score(model, reading, tails, batch_rows=batch_rows).items():
            for number, pieces in zip(members, scored, strict=True):
                answers[number][label] = Answer(
                    logprob=sum(pieces.logprobs)
                    / (len(pieces.logprobs) or 1 if scoring == "mean" else 1),
                    greedy=all(pieces.greedy),
                    tokens=len(cut[number][1]),
                    context_tokens=len(context),
                    cost=costs[label],
                    failure=pieces.failure,
                )
    return answers


class Requests(HFLM):
    """HFLM's way to encode requests, for a model of kvbench's."""

    def __init__(self, model: Model, tokenizer: Tokenizer, **options: Any) -> None:
        with quietly():
            super().__init__(model, backend="causal", tokenizer=tokenizer, **options)
        if self.prefix_token_id is None:
            raise UserError(
                f"tokenizer {self.tokenizer_name!r} has no BOS and no EOS token; allowed: one that has, "
                "since it stands before a text without a context"
            )

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[Any]:
        """Token ids of requests of likelihoods, which is what `loglikelihood` returns here."""
        return [(context, continuation) for _, context, continuation in requests]
