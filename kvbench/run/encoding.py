"""A task's examples as token ids, those that ask the same context together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvbench.kv import KVError
from kvbench.prompts import PromptEncoder
from kvbench.tasks.base import Example

MOST_EVIDENCE = 400
"""Characters that a record keeps of the part of a prompt which holds the answer."""

MOST_PIECE = 40
"""Characters that a record keeps of each piece of a prompt (`pieces_of`)."""


@dataclass(frozen=True)
class EncodedExample:
    """An example and the token ids of its prompt, the model's tokens before and after it included."""

    example: Example
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]

    @property
    def n(self) -> int:
        """Prompt tokens."""
        return len(self.context_ids) + len(self.question_ids)

    @property
    def context(self) -> str:
        """The id of its context, which other examples may share."""
        return self.example.context_id or self.example.id

    def fields(self, sample: int, samples: int) -> dict[str, Any]:
        """The fields that a record of this example has even where its method fails.

        Args:
            sample: which of the `samples` answers it is, from 0.
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


def encode_example(
    example: Example,
    encoder: PromptEncoder,
    contexts: dict[Any, tuple[int, ...]] | None = None,
) -> EncodedExample:
    """Token ids of an example's context and question. They are encoded apart, so that no token spans
    both and a prompt has the same tokens whatever `compress_after` says.

    Args:
        contexts: token ids of the contexts that were encoded before, to which this one's are added.
    """
    if contexts is None:
        contexts = {}
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    if not example.complete:
        prefix, suffix = encoder.prefix_ids, encoder.suffix_ids

    def ids(text: str, known: tuple[int, ...] | None) -> tuple[int, ...]:
        """The token ids of a text, where the example does not bring them."""
        return tuple(encoder.encode_text(text)) if known is None else known

    context = (example.context, example.context_ids, example.complete)
    if context not in contexts:
        contexts[context] = (*prefix, *ids(example.context, example.context_ids))
    question = ids(example.question, example.question_ids)
    return EncodedExample(example, contexts[context], (*question, *suffix))


def encode_examples(examples: Sequence[Example], encoder: PromptEncoder) -> list[EncodedExample]:
    """Token ids of all examples. The question of an example whose history is golden answers begins with
    that history; that of an example whose history is its method's own answers begins with the tokens
    that come between an answer and the next message.

    Raises:
        KVError: examples of one context id that have different contexts.
    """
    encoded_examples: list[EncodedExample] = []
    contexts: dict[Any, tuple[int, ...]] = {}
    first_of_context: dict[str, EncodedExample] = {}
    history_of_context: dict[str, tuple[int, ...]] = {}  # questions and golden answers so far
    has_turns = any(example.history != "none" for example in examples)
    between = tuple(encoder.between_turns()) if has_turns else ()
    for example in examples:
        encoded = encode_example(example, encoder, contexts)
        name = encoded.context
        question = encoded.question_ids
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
        encoded_examples.append(encoded)
    return encoded_examples


def conversations_of(examples: Sequence[EncodedExample]) -> list[list[EncodedExample]]:
    """The conversations about one context: each is an example, followed by those that go on from the
    answer to it."""
    conversations: list[list[EncodedExample]] = []
    for encoded in examples:
        if conversations and encoded.example.history == "own":
            conversations[-1].append(encoded)
        else:
            conversations.append([encoded])
    return conversations


def pieces_of(encoded: EncodedExample, kept: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The texts of a prompt's pieces (`kvbench.engine.kept.strips_of`), for the strips on a page.

    Returns:
        ``texts``: of each piece; ``answer``: the first token of the answer in the prompt, and the token
        after its last one, where the task says what the answer is and the decoded tokens contain it.
    """
    ids = [*encoded.context_ids, *encoded.question_ids][: kept["tokens"]]
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
