"""Encoding of a prompt's context and question, and the search for prompts of a wanted length."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import TaskError

SplitIds = tuple[tuple[int, ...], tuple[int, ...]]
"""The token ids of a prompt's context, and of the rest of the prompt."""


def encode_split(encoder: PromptEncoder, context: str, question: str, prefix: str = "") -> SplitIds:
    """Encode a whole prompt (`Example.complete`) as its context and the rest.

    Context and question are tokenised together; a token across the boundary belongs to the question.

    Args:
        prefix: the text that begins the answer. It follows the chat template's end of the user's
            message; without a template it is tokenised together with the question.
    """
    text = context + question
    if not encoder.suffix_ids:
        text += prefix
    if callable(encoder.tokenizer):
        ids, cut = encoder.encode_prompt(text, len(context), special=False)
    else:
        head = encoder.encode_text(context)
        ids, cut = head + encoder.encode_text(text[len(context) :]), len(head)
    return (*encoder.prefix_ids, *ids[:cut]), (*ids[cut:], *_suffix_and(encoder, prefix))


def encode_context(encoder: PromptEncoder, context: str) -> tuple[int, ...]:
    """Encode a context alone, so that its tokens do not depend on the question."""
    return (*encoder.prefix_ids, *encoder.encode_text(context))


def encode_question(encoder: PromptEncoder, question: str, prefix: str = "") -> tuple[int, ...]:
    """Encode a question and the answer's `prefix`, after a context of `encode_context`. See
    `encode_split`."""
    text = question if encoder.suffix_ids else question + prefix
    return (*encoder.encode_text(text), *_suffix_and(encoder, prefix))


def _suffix_and(encoder: PromptEncoder, prefix: str) -> tuple[int, ...]:
    """The tokens of a chat template after the user's message, and of the answer's `prefix` behind them;
    none without a template."""
    if not encoder.suffix_ids:
        return ()
    # The prefix would become the beginning of a thought that the template has begun.
    begins_thought = encoder.thought is not None and not encoder.thought.start
    if not prefix or begins_thought:
        return encoder.suffix_ids
    return (*encoder.suffix_ids, *encoder.encode_text(prefix))


def split_template(template: str, field: str) -> tuple[str, str, str]:
    """Split a template at a field into the text before it, the white space after it, and the rest.

    White space before a question belongs to the context, so that the boundary lies between words.
    """
    before, _, after = template.partition(field)
    question = after.lstrip()
    return before, after[: len(after) - len(question)], question


def check_template(template: str, context: str, question: str) -> None:
    """Refuse a template that does not have the field `context` once and after it the field `question`
    once.

    Raises:
        TaskError: the template and the fields that it must have.
    """
    before, _, after = template.partition(context)
    if context in before + after or after.count(question) != 1 or question in before:
        raise TaskError(
            f"task.template is {template!r}; allowed: {context} and, after it, {question}, each once"
        )


def largest_fitting(
    tokens: Callable[[int], int], room: int, *, least: int, most: int, guess: int
) -> int | None:
    """Find the largest size whose prompt fits; None where the prompt of size `least` does not fit.

    The number of tokens grows about linearly with the size. The next size to try is where a line through
    the last two sizes reaches `room`; every fourth time it is the middle of the interval, since prompts
    of different sizes are different random draws. Mostly three or four prompts are measured, and at
    most about 2 log2(most).

    Args:
        tokens: a function that makes the prompt of a size and returns its number of tokens. It is called
            once for each size that is tried.
        room: the most tokens that the prompt may have.
        least, most: the least and the largest size.
        guess: the first size to try.
    """
    # The prompt of size `low` fits and that of size `high` does not, where they are in least .. most.
    low, high = least - 1, most + 1
    known: list[tuple[int, int]] = []
    size = min(max(guess, least), most)
    while high - low > 1:
        used = tokens(size)
        known.append((size, used))
        if used <= room:
            low = size
        else:
            high = size
        per_unit = _slope(known)
        if low >= least and 0 <= room - used < per_unit:
            break
        aim = size + math.floor((room - used) / per_unit)
        if low < least and len(known) > 2:
            # No size that was tried fits, so perhaps none does.
            aim = least
        elif len(known) % 4 == 0 and high <= most:
            aim = (low + high) // 2
        size = min(max(aim, low + 1), high - 1, 4 * size)
    return low if low >= least else None


def _slope(known: list[tuple[int, int]]) -> float:
    """The tokens per unit of size, by the last size of `known` (size, tokens) and the latest one before
    it that gives a positive slope; without such a size all tokens over the size."""
    (last_size, last_tokens), *earlier = reversed(known)
    for size, tokens in earlier:
        if size != last_size and (last_tokens - tokens) / (last_size - size) > 0:
            return (last_tokens - tokens) / (last_size - size)
    return max(last_tokens, 1) / last_size
