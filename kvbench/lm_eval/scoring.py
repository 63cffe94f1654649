"""Likelihood requests of lm-evaluation-harness on the compressed caches of several methods, with one
prefill per context."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass
from typing import Any, Literal

import lm_eval.models  # noqa: F401 - registers its models, which it does only before any other
from lm_eval.models.huggingface import HFLM

from kvbench.engine.ask import score
from kvbench.engine.context import read_prompt
from kvbench.engine.cost import Cost
from kvbench.engine.model import Model, Tokenizer
from kvbench.engine.row import prompt_name
from kvbench.errors import UserError
from kvbench.lm_eval.released_masks import imagined_cost, is_mask, masked_scores
from kvbench.run.plan import Methods

log = logging.getLogger(__name__)

Scoring = Literal["sum", "mean"]
"""The score of a continuation: its log-probability, or the mean over its tokens (H2O's released
evaluation)."""
Request = tuple[Sequence[int], Sequence[int]]
"""The token ids of a context and of its continuation."""


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the progress bars and warnings of lm-evaluation-harness."""
    harness_log = logging.getLogger("lm_eval")
    level = harness_log.level
    harness_log.setLevel(logging.ERROR)
    try:
        with nullcontext() if sys.stderr.isatty() else redirect_stderr(io.StringIO()):
            yield
    finally:
        harness_log.setLevel(level)


@dataclass(frozen=True, kw_only=True)
class Likelihood:
    """One method's answer to one request: the continuation's log-probability (or the mean over its
    tokens), whether each of its tokens is the most likely one, and the cost of the compressed context,
    which all requests of that context share."""

    logprob: float
    greedy: bool
    tokens: int
    context_tokens: int
    cost: Cost
    failure: Exception | None


def cost_fields(answers: Sequence[Likelihood]) -> dict[str, Any]:
    """Record fields of one method's cost for a document; where its choices are different contexts, their
    costs are added."""
    costs = list({id(answer.cost): answer.cost for answer in answers}.values())
    cache_bytes = sum(cost.cache_bytes or 0 for cost in costs)
    exact_bytes = sum(cost.exact_bytes for cost in costs if cost.cache_bytes is not None)
    longest = max(answer.context_tokens for answer in answers)
    fields = {
        "prompt_tokens": longest,
        "compressed_tokens": max(cost.prompt_tokens for cost in costs),
        "held_back": longest - max(cost.prompt_tokens for cost in costs),
        "new_tokens": sum(answer.tokens for answer in answers),
        "choices": len(answers),
        "contexts": len(costs),
        "entries": costs[0].entries,
        "cache_bytes": cache_bytes or None,
        "exact_bytes": exact_bytes or None,
        "ratio": cache_bytes / exact_bytes if cache_bytes and exact_bytes else None,
        "compressed": any(cost.compressed for cost in costs),
        "prefill_s": sum(cost.prefill_s or 0 for cost in costs),
        "compress_s": sum(cost.compress_s for cost in costs),
    }
    if costs[0].extras.get("imagined"):
        fields["imagined"] = True
    return fields


def truncated(pair: Request, max_length: int) -> Request:
    """Cut the context of a request on the left, so that context and continuation have at most
    max_length + 1 tokens, as HFLM does.
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
    pairs: Sequence[Request],
    methods: Methods,
    *,
    tokenizer: Tokenizer,
    seed: int,
    max_length: int,
    scoring: Scoring = "sum",
    batch_rows: int = 32,
) -> list[dict[str, Likelihood]]:
    """The likelihood of every request under every method, by label.

    The requests of one context share one prefill, and each method's compression of the context without
    its last token; every continuation is fed to a copy of the cache. Draws depend on the seed and the
    context's tokens, so that an answer does not depend on the other requests. Longer contexts run
    first, and `batch_rows` continuations are scored together.
    """
    cut = [truncated(pair, max_length) for pair in pairs]
    shortened = sum(
        len(context) < len(whole) for (context, _), (whole, _) in zip(cut, pairs, strict=True)
    )
    if shortened:
        log.warning(
            "%d of %d contexts are cut on the left to the model's %d tokens",
            shortened,
            len(pairs),
            max_length,
        )
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, (context, _) in enumerate(cut):
        by_context.setdefault(tuple(context), []).append(number)
    answers: list[dict[str, Likelihood]] = [{} for _ in pairs]
    # H2O's released masks are no cache: each continuation is a pass of its own.
    masks = {
        label: (method, budget) for label, (method, budget) in methods.items() if is_mask(method)
    }
    with_caches = {label: pair for label, pair in methods.items() if label not in masks}
    for context in sorted(by_context, key=len, reverse=True):
        members = by_context[context]
        continuations = [cut[number][1] for number in members]
        room = max(map(len, continuations))
        reading = read_prompt(
            model,
            tokenizer,
            context,
            with_caches,
            seed=seed,
            name=prompt_name(context[:-1] or context),
            held_back=1,
            room=room,
        )
        # Costs are those of the context, so they are taken before continuations are fed.
        costs = {row.label: row.cost() for row in reading.rows}
        scores = score(model, reading, continuations, batch_rows=batch_rows)
        for label, mask in masks.items():
            costs[label] = imagined_cost(model, reading, len(context) + room, *mask)
            scores[label] = masked_scores(model, context, continuations, *mask)
        for label, method_scores in scores.items():
            for number, tokens in zip(members, method_scores, strict=True):
                logprob = sum(tokens.logprobs)
                if scoring == "mean" and tokens.logprobs:
                    logprob /= len(tokens.logprobs)
                answers[number][label] = Likelihood(
                    logprob=logprob,
                    greedy=all(tokens.greedy),
                    tokens=len(cut[number][1]),
                    context_tokens=len(context),
                    cost=costs[label],
                    failure=tokens.failure,
                )
    return answers


class Requests(HFLM):
    """An HFLM that only encodes requests: its `loglikelihood` returns token ids."""

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
        return [(context, continuation) for _, context, continuation in requests]
