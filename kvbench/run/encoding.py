"""A task's examples as token ids, those that ask the same context together."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from kvbench.kv import KVError
from kvbench.tasks.base import Example, PromptEncoder

MOST_EVIDENCE, MOST_PIECE = 400, 40
"""Characters that a record keeps of the part of a prompt which holds the answer, and of a piece."""


@dataclass(frozen=True)
class EncodedExample:
    """An example and its prompt's token ids, with what the model puts around a prompt."""

    example: Example
    context_ids: tuple[int, ...]
    question_ids: tuple[int, ...]

    @property
    def n(self) -> int:
        """Prompt tokens."""
        return len(self.context_ids) + len(self.question_ids)

    @property
    def context(self) -> str:
        """The name of its context among those of the task."""
        return self.example.context_id or self.example.id

    def fields(self, sample: int, samples: int) -> dict[str, Any]:
        """What a record of it says whatever becomes of it.

        Args:
            sample: of so many `samples` of its answer, counted from 0.
        """
        example = self.example
        found: dict[str, Any] = {"dataset": example.dataset, **example.fields}
        if example.context_id is not None or samples > 1:
            found["context_id"] = self.context
        if example.evidence:
            found["evidence"] = example.evidence[:MOST_EVIDENCE]
        if example.history != "none":
            found["history"] = example.history
        return found | ({"sample": sample} if samples > 1 else {})


def encode_example(
    example: Example,
    encoder: PromptEncoder,
    contexts: dict[Any, tuple[int, ...]] | None = None,
) -> EncodedExample:
    """Token ids of an example's context and question; the boundary is a token boundary, so that a
    prompt is the same tokens whatever `compress_after` says.

    Args:
        contexts: token ids of the contexts that were encoded before; takes those of this one.
    """
    contexts = {} if contexts is None else contexts
    context = (example.context, example.context_ids, example.complete)
    prefix, suffix = ((), ()) if example.complete else (encoder.prefix_ids, encoder.suffix_ids)

    def ids(text: str, known: tuple[int, ...] | None) -> tuple[int, ...]:
        return tuple(encoder.encode_text(text)) if known is None else known

    if context not in contexts:
        contexts[context] = (*prefix, *ids(example.context, example.context_ids))
    question = ids(example.question, example.question_ids)
    return EncodedExample(example, contexts[context], (*question, *suffix))


def encode_examples(examples: Sequence[Example], encoder: PromptEncoder) -> list[EncodedExample]:
    """Token ids of all examples; the question of one with a history of golden answers begins with it,
    and that of one with its method's own answers with what comes between an answer and a message.

    Raises:
        KVError: examples of one context id that have different contexts.
    """
    found: list[EncodedExample] = []
    contexts: dict[Any, tuple[int, ...]] = {}
    firsts: dict[str, EncodedExample] = {}
    golden: dict[str, tuple[int, ...]] = {}
    told = any(example.history != "none" for example in examples)
    between = tuple(encoder.between_turns()) if told else ()
    for example in examples:
        encoded = encode_example(example, encoder, contexts)
        name, question = encoded.context, encoded.question_ids
        if firsts.setdefault(name, encoded).context_ids != encoded.context_ids:
            raise KVError(
                f"example {example.id!r} has context_id {name!r} and another context than the first "
                "of it; allowed: the same"
            )
        if example.history != "none":
            if example.history == "golden":
                encoded = replace(encoded, question_ids=(*golden.get(name, ()), *question))
            elif name in golden:
                encoded = replace(encoded, question_ids=(*between, *question))
            said = next(iter(example.answers), "") if example.golden is None else example.golden
            answer = encoder.encode_text(said) if said else []
            golden[name] = (*golden.get(name, ()), *question, *answer, *between)
        found.append(encoded)
    return found


def conversations_of(examples: Sequence[EncodedExample]) -> list[list[EncodedExample]]:
    """The examples of one context, each with those that go on from the answer to it."""
    found: list[list[EncodedExample]] = []
    for each in examples:
        if found and each.example.history == "own":
            found[-1].append(each)
        else:
            found.append([each])
    return found


def pieces_of(encoded: EncodedExample, kept: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """The text of each piece of a prompt (`kvbench.engine.kept.strips_of`), and from which token to
    before which the answer stands, where the task knows it and the tokens say it."""
    ids = [*encoded.context_ids, *encoded.question_ids][: kept["tokens"]]
    words = [str(tokenizer.decode([token])) for token in ids]
    width = kept["width"]
    texts = ["".join(words[at : at + width]) for at in range(0, len(words), width)]
    found: dict[str, Any] = {"texts": [text[:MOST_PIECE] for text in texts]}
    ends = list(accumulate(map(len, words)))
    begin = "".join(words).find(encoded.example.evidence) if encoded.example.evidence else -1
    if begin >= 0:
        last = begin + len(encoded.example.evidence) - 1
        found["answer"] = [bisect_right(ends, begin), bisect_right(ends, last) + 1]
    return found
