"""A prompt that is prefilled and compressed once, and about which many questions are then asked
(``kvbench.compress(...).read(prompt)``)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeGuard

from transformers import PreTrainedTokenizerBase

from kvbench.engine.answer import Answer, Stopping
from kvbench.engine.architecture import kvbench_attention_on
from kvbench.engine.ask import Question, answer, copies_at_once, read, vocabulary
from kvbench.engine.cost import Cost
from kvbench.engine.device import input_device
from kvbench.engine.kept import frame_of
from kvbench.engine.live_cache import LiveCache
from kvbench.engine.model import end_token_ids, repeating_encoder
from kvbench.engine.prefill import Reading
from kvbench.engine.processors import acting_options
from kvbench.engine.row import Row, prompt_name
from kvbench.engine.steps import Steps
from kvbench.errors.options import Count, checked
from kvbench.kv import Budget, KVError
from kvbench.methods.base import Method
from kvbench.prompts import PromptEncoder, check_length, tokenizing

if TYPE_CHECKING:
    import pandas as pd
    from transformers import PreTrainedModel

PromptText = str | Sequence[int] | Mapping[str, Any] | Sequence[Mapping[str, str]]
"""A text, token ids, the output of a tokenizer for one text, or the messages of a chat, to which the
tokenizer's chat template is applied."""

log = logging.getLogger(__name__)


@cache
def _say_empty(label: str) -> None:
    log.warning(
        "%s: the model ended its answer at once. It is a chat model and its context a raw text: "
        "session.read([{'role': 'user', 'content': text}], tokenizer) puts its chat template around "
        "context and question",
        label,
    )


class Context:
    """A prompt that has been prefilled, and compressed before any question is known.

    `ask` does not change the cache, so that answers do not depend on earlier questions; with
    ``keep=True`` it adds the question and its answer to the cache. Of the messages of a chat, the last
    user's message goes on in the question: what the chat template writes after it is fed with each
    question, and with ``keep=True`` the next question is the user's next message. Random draws depend on
    the seed, the prompt and the layer alone, so that a document is always compressed to the same cache.

    Attributes:
        entries: the entries per layer and KV head after compression, under ``mean`` and ``max``.
        cache_bytes: the bytes of the cache after compression.
        exact_bytes: the bytes of the exact cache.
        prefill_s: the seconds of the exact prefill.
        compress_s: the seconds of compression.
        cost: all of what reading and compressing cost.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        method: Method,
        budget: Budget,
        prompt: PromptText,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        label: str = "method",
        seed: int = 0,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        # What the chat template writes after a question; None for a context that is no chat.
        self._closing: str | None = None
        if tokenizer is not None and are_messages(prompt):
            text, self._closing = PromptEncoder(tokenizer).around_question(prompt)
            with tokenizing(tokenizer):
                prompt = tokenizer(text, add_special_tokens=False)
        # The tokens of the prompt, and of the questions and answers that were added.
        self._ids = token_ids(prompt, tokenizer, "the context")
        self._turns = 0
        with kvbench_attention_on(model):
            methods = {label: (method, budget)}
            start = read_prompt(model, tokenizer, self._ids, methods, seed=seed)
        (row,) = start.rows
        if row.failure is not None:
            raise row.failure
        self._reading, self._row = start, row
        self._said: Answer | None = None  # that was added last
        # One object for all questions, so that a capture that fails is tried once. It keeps no captured
        # step, since the model may change between two questions.
        self._steps = Steps(most_kept=0)
        self.cost = row.cost()
        self.entries, self.cache_bytes = held_after_prompt(self.cost)
        self.exact_bytes = self.cost.exact_bytes
        self.compress_s = self.cost.compress_s
        self.prefill_s = start.prefill_s

    def __repr__(self) -> str:
        return f"<kvbench context: {self._row.label}, {self.tokens} tokens, ratio {self.ratio:.3g}>"

    @property
    def ratio(self) -> float:
        """`cache_bytes` over `exact_bytes`."""
        return self.cache_bytes / self.exact_bytes

    @property
    def tokens(self) -> int:
        """The number of tokens read: those of the prompt, and of questions and answers that were
        added."""
        return self._row.tokens

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the prompt, and of the questions and answers that were added. The last token
        of an answer is not in the cache yet; it is fed with the next question."""
        return list(self._ids)

    def ask(
        self,
        question: PromptText,
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        keep: bool = False,
        generation_config: bool = True,
    ) -> Any:
        """Answer one question greedily. The answer is a text if there is a tokenizer, else token ids.

        Args:
            question: what follows the context, as text (tokenised without special tokens) or ids. No
                blank is added.
            max_new_tokens: the largest number of tokens of the answer.
            stop: the string, or the strings, that end an answer and are cut from it; they need a
                tokenizer.
            keep: whether the question and its answer are added to the cache.
            generation_config: whether the logits processors of the model's generation config act, as in
                `generate` (``repetition_penalty`` and others; not those of sampling).

        Raises:
            KVError: an empty question, text without a tokenizer, a wrong `max_new_tokens`.
            BudgetExceeded, and whatever the method raises; the cache is then unchanged.
        """
        ids = self._question_ids(question)
        ((answer, row, said),) = self._answers([ids], max_new_tokens, stop, generation_config)
        if keep:
            self._ids += [*ids, *said.chosen]
            self._row, self._said = row, said
            self._turns += 1
        return answer

    def ask_all(
        self,
        questions: Sequence[PromptText],
        *,
        max_new_tokens: int = 64,
        stop: str | Sequence[str] = (),
        generation_config: bool = True,
    ) -> list[Any]:
        """Answer several questions as `ask` does. As many are decoded together as copies of the cache
        fit into half of the free memory."""
        if isinstance(questions, str):
            raise KVError(f"questions is the text {questions!r:.40}; allowed: a list of questions")
        ids = [self._question_ids(question) for question in questions]
        at_once = copies_at_once([self._row], len(ids), input_device(self.model))
        return [
            answer
            for first in range(0, len(ids), at_once)
            for answer, *_ in self._answers(
                ids[first : first + at_once], max_new_tokens, stop, generation_config
            )
        ]

    def kept(self) -> pd.DataFrame:
        """The entries that the cache holds now, as `kvbench.kept` lists them; those of questions and
        answers that were added have positions behind the prompt's."""
        tokenizer = self.tokenizer
        words: list[str | None] = [None] * len(self._ids)
        if tokenizer is not None:
            words = [str(tokenizer.decode([token])) for token in self._ids]
        return frame_of(self._row, words)

    def cache(self) -> LiveCache:
        """Make a cache for ``model.generate(input_ids, past_key_values=...)`` inside `compress`, which
        continues from here. ``input_ids`` must begin with all of `token_ids`, as transformers
        requires."""
        row = self._row.clone()
        return LiveCache(self.model, [row], [row.cost()], self.tokens)

    def _question_ids(self, question: PromptText) -> list[int]:
        """The tokens that are fed for a question; in a chat with the template's around it.

        Raises:
            KVError: see `token_ids` and `check_ids`.
        """
        if are_messages(question):
            raise KVError(
                "the question is the messages of a chat; allowed: its text (read takes messages, and "
                "each question is then the user's)"
            )
        before: list[int] = []
        after: list[int] = []
        if self._closing is not None and self.tokenizer is not None:
            encoder = PromptEncoder(self.tokenizer, chat=True)
            if self._turns:
                before = encoder.between_turns()
                if self._ids[-1] == before[0]:  # the answer has ended with it
                    before = before[1:]
            if isinstance(question, str):
                question = question + self._closing if question else ""
            else:
                after = encoder.encode_after(".", self._closing)
        ids = token_ids(question, self.tokenizer, "the question", special=False)
        check_ids(ids, vocabulary(self.model), "the question", type(self.model).__name__)
        return before + ids + after

    def _answers(
        self,
        questions: Sequence[Sequence[int]],
        max_new_tokens: int,
        stop: str | Sequence[str],
        generation_config: bool,
    ) -> list[tuple[Any, Row, Answer]]:
        """Decode the answers to several questions (token ids) together.

        Returns:
            for each question the answer's text or token ids, the row that decoded it (a copy of the
            context's, with question and answer added), and the answer.

        Raises:
            KVError: a wrong `max_new_tokens`, or `stop` without a tokenizer. What stopped a row is
                raised, too.
        """
        model, tokenizer = self.model, self.tokenizer
        stopping = stopping_of(model, tokenizer, max_new_tokens, stop, generation_config)
        # What ended the answer before belongs to the conversation.
        said = self._said
        end = [] if said is None else said.chosen[len(said.tokens) :]
        rows = [self._row.clone() for _ in questions]
        asked = [
            (self._reading, row, Question([*end, *ids], stopping, after=said))
            for row, ids in zip(rows, questions, strict=True)
        ]
        with kvbench_attention_on(model):
            given = answer(model, asked, steps=self._steps)
        answers: list[tuple[Any, Row, Answer]] = []
        for row, one in zip(rows, given, strict=True):
            if one.failure is not None:
                raise one.failure
            text: Any = one.tokens
            if tokenizer is not None:
                text = stopping.cut(text_of(tokenizer, one.tokens))
            if not text and self._closing is None and getattr(tokenizer, "chat_template", None):
                _say_empty(self._row.label)
            answers.append((text, row, one))
        return answers


def are_messages(given: Any) -> TypeGuard[Sequence[Mapping[str, str]]]:
    """Whether something is the messages of a chat."""
    is_list = isinstance(given, list | tuple) and len(given) > 0
    return is_list and all(isinstance(part, Mapping) for part in given)


def held_after_prompt(cost: Cost) -> tuple[dict[str, float], int]:
    """The entries and the bytes of a cost whose row has not failed, for which neither is None."""
    assert cost.entries is not None
    assert cost.cache_bytes is not None
    return cost.entries, cost.cache_bytes


def read_prompt(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    ids: Sequence[int],
    methods: Mapping[str, tuple[Method, Budget]],
    *,
    seed: int,
    name: str = "",
    held_back: int = 0,
    room: int = 0,
) -> Reading:
    """`read` of a prompt that is no task's example: its tokens name it unless there is a `name`, and the
    model repeats it in the tokenizer's chat template (`repeating_encoder`).

    Raises:
        KVError: a token id that the model does not have.
    """
    check_ids(ids, vocabulary(model), "the prompt", type(model).__name__)
    encoder = None
    if tokenizer is not None:
        encoder = repeating_encoder(tokenizer, ids, [method for method, _ in methods.values()])
    return read(
        model,
        ids,
        methods,
        seed=seed,
        name=name or prompt_name(ids),
        held_back=held_back,
        room=room,
        encoder=encoder,
    )


def check_ids(ids: Sequence[int], size: int, what: str, whose: str) -> None:
    """Refuse token ids that a model with a vocabulary of `size` does not have, as of another model's
    tokenizer."""
    if ids and not 0 <= min(ids) <= max(ids) < size:
        unknown = next(token for token in ids if not 0 <= token < size)
        raise KVError(
            f"{what} has token id {unknown}; allowed: 0..{size - 1}, the vocabulary of {whose}"
        )


def stopping_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    max_new_tokens: int,
    stop: str | Sequence[str],
    generation_config: bool,
) -> Stopping:
    """When an answer ends, by the options of `compare` and `Context.ask`."""
    checked("max_new_tokens", max_new_tokens, Count, KVError)
    if stop and tokenizer is None:
        raise KVError("stop is given and there is no tokenizer; allowed: read(..., tokenizer)")
    return Stopping(
        max_new_tokens,
        end_token_ids(model, tokenizer),
        tuple(one for one in ([stop] if isinstance(stop, str) else stop) if one),
        None if tokenizer is None else partial(text_of, tokenizer),
        processors=acting_options(model.generation_config if generation_config else None),
    )


def text_of(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int]) -> str:
    """The text of an answer, without special tokens."""
    return str(tokenizer.decode(list(tokens), skip_special_tokens=True))


def token_ids(
    given: PromptText, tokenizer: PreTrainedTokenizerBase | None, what: str, *, special: bool = True
) -> list[int]:
    """The token ids of a text, of a sequence of ids, of a tokenizer's output, or of the messages of a
    chat up to the beginning of the answer, or to the end of a last message that is the model's.

    Args:
        what: what messages call the text.
        special: whether the tokenizer adds its special tokens to a text.

    Raises:
        KVError: no tokens, several texts, or text where there is no tokenizer.
        PromptError: the tokenizer's chat template cannot take the messages, or there is none.
    """
    if are_messages(given):
        if tokenizer is None:
            raise KVError(
                f"{what} is a chat and there is no tokenizer; allowed: ids, or a tokenizer"
            )
        text = PromptEncoder(tokenizer).render(given, answer=True)
        with tokenizing(tokenizer):
            given = tokenizer(text, add_special_tokens=False)
    if isinstance(given, str):
        if tokenizer is None:
            raise KVError(f"{what} is text and there is no tokenizer; allowed: ids, or a tokenizer")
        check_length(given)
        with tokenizing(tokenizer):
            given = (
                tokenizer(given) if special else PromptEncoder(tokenizer).encode_after(".", given)
            )
    ids: Any = given.get("input_ids") if isinstance(given, Mapping) else given
    ids = ids.tolist() if hasattr(ids, "tolist") else ids
    ids = list(ids) if isinstance(ids, Iterable) else []
    if ids and isinstance(ids[0], list):
        if len(ids) > 1:
            raise KVError(f"{what} has {len(ids)} texts; allowed: one")
        ids = ids[0]
    if not ids or not all(isinstance(token, int) for token in ids):
        raise KVError(f"{what} has no token ids; allowed: text, or at least one token id")
    return ids
