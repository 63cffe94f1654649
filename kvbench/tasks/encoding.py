"""Encoding of a prompt's context and question, and the search for prompts of a wanted length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import takewhile

from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import TaskError


@cache
def _one(token: int) -> int:
    return token


def compact(ids: Iterable[int]) -> tuple[int, ...]:
    """The ids as a tuple, in which there is one object for each token id: the prompts of a benchmark
    have tens of millions of tokens."""
    return tuple(map(_one, ids))


def encode_start(encoder: PromptEncoder, text: str) -> list[int]:
    if encoder.adds_blank and encoder.before:
        return encoder.encode_text(encoder.before + text)
    return [*encoder.prefix_ids, *encoder.encode_text(text)]


def encode_shared(
    encoder: PromptEncoder, context: str, questions: Sequence[tuple[str, str]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The token ids of a context, which are the same for all its questions, and of the rest of each
    prompt.

    Each question has the prefix of its answer, which follows the template's end of the user's message,
    or without a template the question. A prompt has the tokens of its whole text. The context is the
    longest run of tokens that all its questions share, and a token across the seam is the question's.
    """
    if not callable(encoder.tokenizer):  # it cannot say which characters a token stands for
        rests = []
        for question, prefix in questions:
            if encoder.suffix_ids:
                begun = _answer_prefix(encoder, prefix)
                rest = [*encoder.encode_text(question), *encoder.suffix_ids]
                rest += encoder.encode_text(begun) if begun else ()
            else:
                rest = encoder.encode_text(question + prefix)
            rests.append(tuple(rest))
        return tuple(encode_start(encoder, context)), rests
    prompts = [_encode_whole(encoder, context, *question) for question in questions]
    # What a question changes of the tokens before it belongs to it.
    columns = zip(*(ids for ids, _ in prompts), strict=False)
    shared = tuple(same[0] for same in takewhile(lambda tokens: len(set(tokens)) == 1, columns))
    return shared, [(*ids[len(shared) :], *rest) for ids, rest in prompts]


def _encode_whole(
    encoder: PromptEncoder, context: str, question: str, prefix: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The token ids of the context and of the rest of a prompt, which is encoded as one text with all
    that the model has around it."""
    head = encoder.before + context
    text = head + question + encoder.after + _answer_prefix(encoder, prefix)
    ids, cut = encoder.encode_prompt(text, len(head), special=False)
    begin = () if encoder.before else encoder.prefix_ids
    return (*begin, *ids[:cut]), tuple(ids[cut:])


def _answer_prefix(encoder: PromptEncoder, prefix: str) -> str:
    """The answer's prefix; empty where the template has begun a thought, in which it would stand."""
    begins_thought = encoder.thought is not None and not encoder.thought.start
    return "" if encoder.suffix_ids and begins_thought else prefix


def split_template(template: str, field: str) -> tuple[str, str, str]:
    """The text before a field, the white space after it, and the rest: white space before a question
    belongs to the context, so that the boundary lies between words."""
    before, _, after = template.partition(field)
    question = after.lstrip()
    return before, after[: len(after) - len(question)], question


def check_template(template: str, context: str, question: str) -> None:
    """Refuse a template without `context` once and, after it, `question` once."""
    before, _, after = template.partition(context)
    if context in before + after or after.count(question) != 1 or question in before:
        raise TaskError(
            f"task.template is {template!r}; allowed: {context} and, after it, {question}, each once"
        )


def largest_fitting(
    tokens: Callable[[int], int], room: int, *, least: int, most: int, guess: int
) -> int | None:
    """The largest size in least .. most whose prompt fits; None where that of size `least` does not.

    The number of tokens grows about linearly with the size. The next size to try is where a line through
    the last two sizes reaches `room`; every fourth time it is the middle of the interval, since prompts
    of different sizes are different random draws. Mostly three or four prompts are measured, and at
    most about 2 log2(most). `tokens` makes the prompt of a size, once, and counts its tokens.
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
    """Tokens per unit of size, by the last of `known` (size, tokens) and the latest one before it that
    gives a positive slope; else all tokens over the size."""
    (last_size, last_tokens), *earlier = reversed(known)
    for size, tokens in earlier:
        if size != last_size and (last_tokens - tokens) / (last_size - size) > 0:
            return (last_tokens - tokens) / (last_size - size)
    return max(last_tokens, 1) / last_size
