"""Likelihood requests on compressed caches, several methods at once: one prefill per context."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lm_eval.api.model import TemplateLM

from kvbench.engine.fork import Fork, prompt_name
from kvbench.engine.loading import Model, Tokenizer
from kvbench.engine.scoring import CompressedPrompt, masked_pass_cache, read, score
from kvbench.errors import UserError
from kvbench.kv import Budget
from kvbench.methods.base import Method
from kvbench.tasks.base import PromptEncoder

log = logging.getLogger(__name__)

SCORINGS = ("sum", "mean")
DEFAULT_LENGTH = 2048
"""Tokens of a model whose config names no number, as in lm-evaluation-harness."""

Pair = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context and of what goes on from it."""


@dataclass(frozen=True)
class Codec:
    """Text to token ids as lm-evaluation-harness's HFLM has it.

    Attributes:
        add_bos_token: whether the tokenizer adds its special tokens; None: its default.
    """

    tokenizer: Tokenizer
    add_bos_token: bool | None = None
    backend: str = "causal"

    @property
    def prefix_token_id(self) -> int:
        """The context of a text that has none: BOS where there is one, else EOS."""
        for token in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise UserError(
            f"tokenizer {self.tokenizer.name_or_path!r} has no BOS and no EOS token; allowed: one that "
            "has, since it stands before a text without a context"
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Token ids; by default with the tokenizer's special tokens, but not before a text that begins
        with the prefix token's own."""
        special = self.add_bos_token if add_special_tokens is None else add_special_tokens
        begins = string.startswith(str(self.tokenizer.decode([self.prefix_token_id])))
        if add_special_tokens is None and begins:
            special = False
        options: dict[str, Any] = {} if special is None else {"add_special_tokens": special}
        return list(self.tokenizer.encode(string, **options))

    def chat(
        self, history: list[dict[str, str]], add_generation_prompt: bool = True, **options: Any
    ) -> str:
        """The conversation as text, by the tokenizer's chat template."""
        tokenizer: Any = self.tokenizer
        return str(
            tokenizer.apply_chat_template(
                history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **options,
            )
        )

    def pair(self, context: str, continuation: str) -> Pair:
        """Ids of a request, the blanks at the context's end moved to the continuation."""
        if context:
            return TemplateLM._encode_pair(self, context, continuation)
        ids = self.tok_encode(continuation, add_special_tokens=False)
        if ids[:1] == [self.prefix_token_id]:
            return ids[:1], ids[1:]
        return [self.prefix_token_id], ids


def positions_of(model: Model) -> int:
    """Tokens that the model has positions for."""
    config = model.config.get_text_config()
    names = ("n_positions", "max_position_embeddings", "n_ctx")
    found = (getattr(config, name, None) for name in names)
    return next((int(value) for value in found if value is not None), DEFAULT_LENGTH)


@dataclass(frozen=True)
class Answer:
    """One request under one method.

    Attributes:
        logprob: of the whole continuation, or of its mean token. greedy: whether every token is the most
            likely one.
        tokens: of the continuation. prompt_tokens, compressed_tokens: of the context, and of what the
            method was given of it.
        compressed: whether the context was longer than the method's capacity.
        entries, cache_bytes, exact_bytes, prefill_s, compress_s: as in a record.
        imagined: a mask of a whole pass: entries and bytes are those of a cache that nobody holds.
    """

    logprob: float
    greedy: bool
    tokens: int
    prompt_tokens: int
    compressed_tokens: int
    compressed: bool
    entries: Mapping[str, float] | None
    cache_bytes: int | None
    exact_bytes: int
    prefill_s: float
    compress_s: float
    imagined: bool = False
    failure: Exception | None = None

    @property
    def record(self) -> dict[str, Any]:
        """What that harness's results have no place for."""
        shown = (
            "prompt_tokens",
            "compressed_tokens",
            "tokens",
            "compressed",
            "imagined",
            "entries",
        )
        held = self.cache_bytes
        return {name: getattr(self, name) for name in (*shown, "cache_bytes", "exact_bytes")} | {
            "ratio": None if held is None else held / self.exact_bytes
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
    methods: Mapping[str, tuple[Method, Budget]],
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
        log.warning(
            "%d of %d contexts are cut on the left to the model's %d tokens",
            longer,
            len(pairs),
            max_length,
        )
    by_context: dict[tuple[int, ...], list[int]] = {}
    for number, (context, _) in enumerate(cut):
        by_context.setdefault(tuple(context), []).append(number)
    answers: list[dict[str, Answer]] = [{} for _ in pairs]
    for context in sorted(by_context, key=len, reverse=True):
        members = by_context[context]
        tails = [cut[number][1] for number in members]
        reading = read(
            model,
            context,
            methods,
            seed=seed,
            example_id=prompt_name(context[:-1] or context),
            room=max(map(len, tails)),
            encoder=encoder,
        )
        held = {fork.label: _held(fork, reading) for fork in reading.forks}
        for label in reading.whole:
            pair = reading.whole[label]
            entries, ratio = masked_pass_cache(model, pair, len(context) + max(map(len, tails)))
            nothing = _nothing(reading)
            held[label] = replace(
                nothing,
                compressed=True,
                imagined=True,
                entries={"mean": entries, "max": entries},
                cache_bytes=round(ratio * nothing.exact_bytes),
            )
        for label, scored in score(model, reading, tails, batch_rows=batch_rows).items():
            for number, one in zip(members, scored, strict=True):
                total = sum(one.logprobs)
                if scoring == "mean":
                    total /= max(1, len(one.logprobs))
                answers[number][label] = replace(
                    held[label],
                    logprob=total,
                    greedy=all(one.greedy),
                    tokens=len(cut[number][1]),
                    failure=one.failure,
                )
    return answers


def _nothing(reading: CompressedPrompt) -> Answer:
    n = len(reading.prompt_ids)
    start = reading.start
    head = min(start.n, n - 1)
    return Answer(
        0.0, False, 0, n, head, False, None, None, start.exact_bytes, start.prefill_s, 0.0
    )


def _held(fork: Fork, reading: CompressedPrompt) -> Answer:
    """What a fork holds after compression, before anything is scored."""
    answer = _nothing(reading)
    if fork.failure is not None:
        return replace(answer, failure=fork.failure)
    cost = fork.cost()
    return replace(
        answer,
        compressed=cost.compressed,
        entries=cost.entries,
        cache_bytes=cost.cache_bytes,
        compress_s=cost.compress_s,
    )
