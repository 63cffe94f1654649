"""Turns the examples of a task into token ids, and groups examples about one context into
conversations."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvbench.engine.context import check_ids
from kvbench.kv import KVError
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example
from kvbench.tasks.encoding import encode_shared

MOST_EVIDENCE = 400
"""Characters that a record keeps of the part of a prompt which holds the answer."""

MOST_PIECE = 40
"""Characters that a record keeps of each piece of a prompt (`pieces_of`)."""


@dataclass(frozen=True)
class EncodedExample:
    """An example and the token ids of its prompt, which include the tokens that the model has before and
    after a prompt."""

    example: Example
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids of the whole prompt."""
        return self.context_ids + self.question_ids

    @property
    def n(self) -> int:
        """The number of prompt tokens."""
        return len(self.context_ids) + len(self.question_ids)

    def held_back(self, compress_after: str) -> int:
        """How many tokens at the prompt's end are not compressed but fed to every cache."""
        if compress_after == "context":
            return len(self.question_ids)
        return int(compress_after == "all_but_last" and self.n > 1)

    @property
    def context(self) -> str:
        """The id of the context, which other examples may share."""
        return self.example.context_id or self.example.id

    def fields(self, sample: int, samples: int) -> dict[str, Any]:
        """The fields that a record of this example has even where the method fails.

        Args:
            sample: the number, from 0, of the answer that the record is about.
            samples: how many answers each method gives.
        """
        example = self.example
        fields: dict[str, Any] = {"dataset": example.dataset, **example.fields}
        if example.context_id is not None or samples > 1:
            fields["context_id"] = self.context
        if example.evidence:
            fields["evidence"] = example.evidence[:MOST_EVIDENCE]
        if example.history != "none":
            fields["history"] = example.history
        if samples > 1:
            fields["sample"] = sample
        return fields


def encode_example(example: Example, encoder: PromptEncoder) -> EncodedExample:
    return encode_examples([example], encoder)[0]


def encode_examples(examples: Sequence[Example], encoder: PromptEncoder) -> list[EncodedExample]:
    """Encode all examples. A prompt has the tokens of its whole text, whatever `compress_after` says; a
    token across the seam of context and question is the question's (`encode_shared`).

    Where the history of an example is "golden", its question ids begin with the earlier questions about
    the context and their golden answers. Where it is "own", they begin with the tokens that come between
    the method's own answer and the next message.

    Raises:
        KVError: examples of one context_id have several contexts, or an example has token ids of its
            context or its question alone, or one that the model does not have.
    """
    encoded_examples: list[EncodedExample] = []
    first_of_context: dict[str, EncodedExample] = {}
    history_of_context: dict[str, tuple[int, ...]] = {}  # questions and golden answers so far
    has_turns = any(example.history != "none" for example in examples)
    between = tuple(encoder.between_turns()) if has_turns else ()
    for example, (context, question) in zip(examples, _tokenised(examples, encoder), strict=True):
        encoded = EncodedExample(example, context, question)
        name = encoded.context
        first = first_of_context.setdefault(name, encoded)
        if first.context_ids != encoded.context_ids:
            raise KVError(
                f"example {example.id!r} has context_id {name!r} and another context than the first "
                "of it; allowed: the same"
            )
        if example.history != "none":
            history = history_of_context.get(name, ())
            if example.history == "golden":
                encoded = replace(encoded, question_ids=(*history, *question))
            elif name in history_of_context:
                encoded = replace(encoded, question_ids=(*between, *question))
            golden = example.golden
            if golden is None:
                golden = next(iter(example.answers), "")
            answer = encoder.encode_text(golden) if golden else []
            history_of_context[name] = (*history, *question, *answer, *between)
        if encoder.vocabulary is not None:
            whose = f"the {encoder.family} model"
            check_ids(encoded.ids, encoder.vocabulary, f"example {example.id!r}", whose)
        encoded_examples.append(encoded)
    return encoded_examples


def _tokenised(
    examples: Sequence[Example], encoder: PromptEncoder
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The token ids of each example's context and question: its own, or those of its text, which is
    encoded with all others of its context."""
    found = [  # as tuples, since a tokenizer returns lists
        (tuple(example.context_ids or ()), tuple(example.question_ids or ()))
        for example in examples
    ]
    by_context: dict[tuple[str, str], list[int]] = {}
    for place, example in enumerate(examples):
        if (example.context_ids is None) != (example.question_ids is None):
            raise KVError(
                f"example {example.id!r} has token ids of context or question; allowed: of both"
            )
        if example.context_ids is None:
            context = (example.context_id or example.id, example.context)
            by_context.setdefault(context, []).append(place)
    for (_, text), places in by_context.items():
        questions = [(examples[place].question, "") for place in places]
        ids, rests = encode_shared(encoder, text, questions)
        for place, rest in zip(places, rests, strict=True):
            found[place] = ids, rest
    return found


def conversations_of(examples: Sequence[EncodedExample]) -> list[list[EncodedExample]]:
    """Group the examples about one context into conversations. Each conversation is an example and the
    examples that follow on from the method's own answer to it."""
    conversations: list[list[EncodedExample]] = []
    for encoded in examples:
        if conversations and encoded.example.history == "own":
            conversations[-1].append(encoded)
        else:
            conversations.append([encoded])
    return conversations


def pieces_of(encoded: EncodedExample, kept: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The texts of the pieces of a prompt, for the strips on a page that show how much of each was kept.

    Args:
        kept: the field ``kept`` of the record (`kvbench.engine.kept.strips_of`).

    Returns:
        ``texts``: the text of each piece. ``answer``, where the decoded prompt contains the example's
        evidence: the index of the first token of the evidence, and the index after its last one.
    """
    ids = encoded.ids[: kept["tokens"]]
    words = [str(tokenizer.decode([token])) for token in ids]
    width = kept["width"]
    texts = ["".join(words[start : start + width]) for start in range(0, len(words), width)]
    pieces: dict[str, Any] = {"texts": [text[:MOST_PIECE] for text in texts]}
    evidence = encoded.example.evidence
    first_character = "".join(words).find(evidence) if evidence else -1
    if first_character >= 0:
        last_character = first_character + len(evidence) - 1
        ends = list(accumulate(map(len, words)))  # the number of characters up to each token's end
        first_token = bisect_right(ends, first_character)
        pieces["answer"] = [first_token, bisect_right(ends, last_character) + 1]
    return pieces
