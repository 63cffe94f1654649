"""Requests of lm-evaluation-harness on compressed caches, several methods at once: one prefill per
context."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from typing import Any

import lm_eval.models  # noqa: F401 - before a model is registered: it fills an empty registry only
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs

from kvbench.engine.fork import Cost, prompt_name
from kvbench.engine.generate import Prompt
from kvbench.engine.loading import Model, Tokenizer
from kvbench.engine.scoring import CompressedPrompt, masked_pass_cache, read, score
from kvbench.engine.stopping import Stopping
from kvbench.errors import UserError
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.tasks.base import PromptEncoder

log = logging.getLogger(__name__)

SCORINGS = ("sum", "mean")
Methods = Mapping[str, tuple[Method, Budget]]
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
class Answer(Cost):
    """One likelihood request under one method, and what it cost (of `prompt_tokens`, the context's
    tokens that the method was given).

    Attributes:
        logprob: of the whole continuation, or of its mean token. greedy: whether every token is the most
            likely one.
        tokens: of the continuation. context_tokens: of the context.
        imagined: a mask of a whole pass: entries and bytes are those of a cache that nobody holds.
        failure: what stopped the method, if anything did.
    """

    context_tokens: int
    prefill_s: float
    logprob: float = 0.0
    greedy: bool = False
    tokens: int = 0
    imagined: bool = False
    failure: Exception | None = None

    def record(self) -> dict[str, Any]:
        """What that harness's results have no place for."""
        shown = (
            "tokens",
            "compressed",
            "imagined",
            "entries",
            "cache_bytes",
            "exact_bytes",
            "ratio",
        )
        names = {"prompt_tokens": self.context_tokens, "compressed_tokens": self.prompt_tokens}
        return names | {name: getattr(self, name) for name in shown}


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
    scoring: str = "sum",
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
        held = _held(model, reading, len(context) + room)
        for label, scored in score(model, reading, tails, batch_rows=batch_rows).items():
            for number, tail, one in zip(members, tails, scored, strict=True):
                total = sum(one.logprobs) / (len(one.logprobs) or 1 if scoring == "mean" else 1)
                found: dict[str, Any] = {
                    "logprob": total,
                    "greedy": all(one.greedy),
                    "failure": one.failure,
                }
                answers[number][label] = replace(held[label], tokens=len(tail), **found)
    return answers


def _held(model: Model, reading: CompressedPrompt, tokens: int) -> dict[str, Answer]:
    """What every method of a reading holds after compression, before anything is scored; of one that
    masks a whole pass, what it would hold at the end of `tokens`."""
    n, start = len(reading.prompt_ids), reading.start
    nothing = Answer(
        prompt_tokens=min(start.n, n - 1),
        capacity=start.n,
        exact_bytes=start.exact_bytes,
        context_tokens=n,
        prefill_s=start.prefill_s,
    )
    held = dict.fromkeys((fork.label for fork in reading.forks), nothing)
    for fork in reading.forks:
        if fork.failure is None:
            cost = fork.cost()
            shown = ("capacity", "entries", "cache_bytes", "compressed", "compress_s")
            held[fork.label] = replace(nothing, **{name: getattr(cost, name) for name in shown})
    for label, pair in reading.whole.items():
        entries, ratio = masked_pass_cache(model, pair, tokens)
        held[label] = replace(
            nothing,
            compressed=True,
            imagined=True,
            entries={"mean": entries, "max": entries},
            cache_bytes=round(ratio * start.exact_bytes),
        )
    return held


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

    def pair(self, context: str, continuation: str) -> Pair:
        """Ids of a request, the blanks at the context's end moved to the continuation."""
        if context:
            return self._encode_pair(context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        if ids[:1] == [self.prefix_token_id]:
            return ids[:1], ids[1:]
        return [self.prefix_token_id], ids

    def prompt(
        self, context: str, given: Mapping[str, Any], methods: Methods, stopping: Stopping
    ) -> Prompt:
        """A generation request; all but its last token are the context.

        Args:
            stopping: when its answer ends, but for the number of tokens and the texts that end it.

        Raises:
            UserError: sampling, or more new tokens than the model has positions.
        """
        options = normalize_gen_kwargs(dict(given), self.max_gen_toks)
        if options.get("do_sample") or options.get("temperature"):
            raise UserError(
                f"generation kwargs ask for sampling ({dict(given)}); allowed: greedy decoding"
            )
        most = int(options["max_gen_toks"])
        if most >= self.max_length:
            raise UserError(
                f"max_gen_toks is {most} and the model has {self.max_length} positions; allowed: fewer"
            )
        ids = self.tok_encode(context)[-(self.max_length - most) :]
        until = tuple(stop for stop in options.get("until") or () if stop)
        ends = replace(stopping, max_new_tokens=most, strings=until)
        encoder = PromptEncoder(self.tokenizer)
        return Prompt(ids[:-1], ids[-1:], methods, ends, prompt_name(ids), encoder=encoder)
