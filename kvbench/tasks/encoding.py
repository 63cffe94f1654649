"""From a prompt's text to the tokens of its context and its question, and prompts of a wanted length."""

from __future__ import annotations

import math
from collections.abc import Callable

from kvbench.tasks.base import PromptEncoder, TaskError

SplitIds = tuple[tuple[int, ...], tuple[int, ...]]
"""Token ids of a prompt's context, and of what follows."""


def encode_split(encoder: PromptEncoder, context: str, question: str, prefix: str = "") -> SplitIds:
    """Tokens of a whole prompt (`Example.complete`): of its context, and of what follows.

    Context and question are tokenised in one piece; a token across the boundary belongs to the
    question. The text that begins the answer, `prefix`, follows what the chat template puts behind the
    user's message, or, without a template, the question, in the same piece.
    """
    text = context + question + ("" if encoder.suffix_ids else prefix)
    if callable(encoder.tokenizer):
        ids, cut = encoder.encode_prompt(text, len(context), special=False)
    else:
        head = encoder.encode_text(context)
        ids, cut = head + encoder.encode_text(text[len(context) :]), len(head)
    return (*encoder.prefix_ids, *ids[:cut]), (*ids[cut:], *_behind(encoder, prefix))


def encode_context(encoder: PromptEncoder, context: str) -> tuple[int, ...]:
    """Tokens of a context by itself: those of several questions are the same, whatever they ask."""
    return (*encoder.prefix_ids, *encoder.encode_text(context))


def encode_question(encoder: PromptEncoder, question: str, prefix: str = "") -> tuple[int, ...]:
    """Tokens of what follows a context that was tokenised by itself; see `encode_split`."""
    text = question + ("" if encoder.suffix_ids else prefix)
    return (*encoder.encode_text(text), *_behind(encoder, prefix))


def _behind(encoder: PromptEncoder, prefix: str) -> tuple[int, ...]:
    """What a chat template puts behind the user's message, and how the answer begins."""
    if not encoder.suffix_ids:
        return ()
    return (*encoder.suffix_ids, *(encoder.encode_text(prefix) if prefix else ()))


def parted(template: str, field: str) -> tuple[str, str, str]:
    """What stands before a template's field, the white space behind it, and the rest.

    White space that begins a question belongs to the context, so that the boundary is one between words.
    """
    before, _, after = template.partition(field)
    question = after.lstrip()
    return before, after[: len(after) - len(question)], question


def check_template(template: str, context: str, question: str) -> None:
    """Refuse a prompt's template that does not hold two fields once each, in this order.

    Raises:
        TaskError: it does not.
    """
    before, _, after = template.partition(context)
    if context in before + after or after.count(question) != 1 or question in before:
        raise TaskError(
            f"task.template is {template!r}; allowed: {context} and, after it, {question}, each once"
        )


def largest_fitting(
    tokens: Callable[[int], int], room: int, *, least: int, most: int, guess: int
) -> int | None:
    """The largest size whose prompt fits; None where not even the least does.

    A prompt's tokens grow about evenly with its size, but every size may be another random draw. So the
    next size to try is where a line through the last two meets the room, and the middle where that
    gains little: mostly three or four prompts are measured, and at most some twice log2(most).

    Args:
        tokens: of the prompt of a size; asked once for each size.
        room: tokens that it may have.
        least, most: sizes that are allowed; least <= most.
        guess: where to begin.
    """
    low, high = least - 1, most + 1  # fits, does not fit
    known: list[tuple[int, int]] = []
    size = min(max(guess, least), most)
    while high - low > 1:
        used = tokens(size)
        known.append((size, used))
        low, high = (size, high) if used <= room else (low, size)
        per_unit = _slope(known)
        if low >= least and 0 <= room - used < per_unit:
            break
        aim = size + math.floor((room - used) / per_unit)
        if low < least and len(known) > 2:
            aim = least  # does anything fit?
        elif len(known) % 4 == 0 and high <= most:
            aim = (low + high) // 2
        size = min(max(aim, low + 1), high - 1, 4 * size)
    return low if low >= least else None


def _slope(known: list[tuple[int, int]]) -> float:
    """Tokens per unit, of the last two sizes, or of the only one as if all its tokens were units'."""
    (last, used), *before = reversed(known)
    for size, tokens in before:
        if size != last and (used - tokens) / (last - size) > 0:
            return (used - tokens) / (last - size)
    return max(used, 1) / last
