"""How the text of a prompt becomes token ids, with what a model puts around it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, pairwise, takewhile
from operator import eq
from typing import Any, Protocol

from kvbench.errors import UserError, one_line

log = logging.getLogger(__name__)


class PromptError(UserError, ValueError):
    """A text that cannot be encoded: one line that names it and what is allowed."""


MOST_CHARACTERS = 20_000_000
"""The most characters of a text that is tokenised: more than any model reads, in some seconds."""


def check_length(text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise PromptError(
            f"a prompt of {len(text)} characters, {text[:20]!r} ...; allowed: at most "
            f"{MOST_CHARACTERS}"
        )


def name_of(tokenizer: object) -> str:
    return str(getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__)


@contextmanager
def tokenizing(tokenizer: object) -> Iterator[None]:
    """Raise a failure of the tokenizer, which may be anything, as a PromptError of one line."""
    try:
        yield
    except (MemoryError, TimeoutError, UserError):
        raise
    except Exception as error:
        raise PromptError(
            f"tokenizer {name_of(tokenizer)!r} cannot encode a text: {one_line(error)}; allowed: one "
            "that can"
        ) from error


@cache
def _say_without_offsets(name: str) -> None:
    log.warning(
        "tokenizer %r does not tell which characters a token stands for: prompts are cut after the "
        "tokens that the text before the cut begins with when it is encoded alone",
        name,
    )


class Tokenizer(Protocol):
    """The methods of a tokenizer that tasks call. Every Hugging Face tokenizer has them."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True)
class Thought:
    """The text that a model writes before its answer.

    Attributes:
        end: the text that ends it.
        start: the text that it begins with; what begins otherwise is an answer without a thought. Empty
            where the prompt has begun the thought, or every answer is expected to have one.
    """

    end: str
    start: str = ""

    def split(self, text: str) -> tuple[str, str]:
        """The thought and the answer in a generated text. An unfinished thought has no answer."""
        if not self._begins(text):
            return "", text
        thought, _, answer = text.partition(self.end)
        return thought, answer.lstrip()

    def answer_from(
        self, tokens: Sequence[int], decode: Callable[[Sequence[int]], str]
    ) -> int | None:
        """The number of tokens before the answer; None until it begins. To be called after each
        token."""
        # A text of c characters spans at most c tokens; the others are a margin for white space.
        if not self._begins(decode(tokens[: len(self.start) + 16])):
            return 0
        behind = decode(tokens[-(len(self.end) + 16) :]).partition(self.end)[2]
        return len(tokens) - 1 if behind.strip() else None

    def _begins(self, text: str) -> bool:
        """Whether the text begins with the thought, or is too short to tell."""
        return self.start.startswith(text.lstrip()[: len(self.start)])


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts for one model: its tokenizer, and the tokens around a user's text (BOS, a chat
    template).

    Attributes:
        prefix_ids, suffix_ids: the tokens before and after the user's text.
        before, after: the texts of a chat template around the user's text.
        family: the model's architecture ("llama", "qwen2" ...), for protocols that depend on it.
        chat: whether the tokenizer has a chat template and the model's config allows its use.
        max_input: the most prompt tokens by the model's config; None for no limit.
        max_positions: the most tokens of prompt and answer together; None if unknown.
        vocabulary: the number of token ids that the model has; None if unknown.
        end_ids: the tokenizer's end token and those of the model's config (end of turn).
        enable_thinking: passed to the chat template under this name; None: the template's own default.
        thought: what the model writes before its answer; None for a model that answers at once.
    """

    tokenizer: Tokenizer
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    before: str = ""
    after: str = ""
    family: str | None = None
    chat: bool = False
    max_input: int | None = None
    max_positions: int | None = None
    vocabulary: int | None = None
    end_ids: frozenset[int] = frozenset()
    enable_thinking: bool | None = None
    thought: Thought | None = None

    def encode_text(self, text: str) -> list[int]:
        """Encode `text` without special tokens."""
        check_length(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"text {text[max(0, error.start - 20) : error.end + 20]!r} holds half a character "
                f"({error.reason}); allowed: text that has a UTF-8 form"
            ) from error
        with tokenizing(self.tokenizer):
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids` without special tokens, unless one of them ends a thought."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not self._marks_specially))

    @cached_property
    def _marks_specially(self) -> bool:
        # Whether the end of a thought has special tokens, which decoding would leave out.
        if self.thought is None:
            return False
        marker = self.encode_text(self.thought.end)
        return self.thought.end not in self.tokenizer.decode(marker, skip_special_tokens=True)

    @cached_property
    def adds_blank(self) -> bool:
        """Whether the tokenizer puts a blank before every text, as SentencePiece does. The parts of a
        prompt must then be encoded together (`encode_parts`), or there is one at each seam."""
        alone, inside = self.encode_text("a"), self.encode_text("\u00a7a")
        return callable(self.tokenizer) and inside[-len(alone) :] != alone

    def encode_parts(self, parts: Sequence[str]) -> list[list[int]]:
        """The token ids of each part of a text, which a tokenizer that `adds_blank` encodes whole, any
        other part by part."""
        if not self.adds_blank:
            return [self.encode_text(part) for part in parts]
        ids: list[int] = []
        cuts = [0]
        for end in accumulate(map(len, parts)):
            ids, cut = self.encode_prompt("".join(parts), end, special=False)
            cuts.append(cut)
        return [ids[start:end] for start, end in pairwise(cuts)]

    def encode_after(self, before: str, text: str) -> list[int]:
        """Encode a text that follows another one; see `encode_parts`."""
        return self.encode_parts([before, text])[1] if self.adds_blank else self.encode_text(text)

    def encode_prompt(self, text: str, cut: int, *, special: bool) -> tuple[list[int], int]:
        """Encode a whole prompt at once, and count the tokens before `cut`.

        Args:
            cut: in characters. A token across the cut counts as after it, so that a compressed context
                knows nothing of the question.
            special: whether the tokenizer adds its special tokens (BOS).
        """
        check_length(text)
        tokenizer: Any = self.tokenizer
        with tokenizing(tokenizer):
            encoded = tokenizer(text, add_special_tokens=special, verbose=False)
        ids = list(encoded["input_ids"])
        if getattr(encoded, "is_fast", False):
            for character in range(cut, len(text)):
                token = encoded.char_to_token(character)
                if token is not None:
                    return ids, token
            return ids, len(ids)
        # A slow tokenizer does not know the characters of a token: the tokens before the cut are those
        # that begin the encoding of the text before the cut as well.
        _say_without_offsets(name_of(tokenizer))
        head = tokenizer(text[:cut], add_special_tokens=special, verbose=False)["input_ids"]
        return ids, sum(1 for _ in takewhile(bool, map(eq, ids, head)))

    def render_chat(self, text: str) -> str:
        """`text` as a user's message in the chat template, up to the beginning of the answer."""
        return self.render([{"role": "user", "content": text}], answer=True)

    def render(self, messages: Sequence[Mapping[str, str]], *, answer: bool) -> str:
        """Render messages in the tokenizer's chat template; with `answer` the beginning of the model's
        next message follows, or the last message stays open, where that is the model's.

        Raises:
            PromptError: there is no template, or it refuses the messages.
        """
        tokenizer: Any = self.tokenizer
        name = name_of(tokenizer)
        if not getattr(tokenizer, "chat_template", True):
            raise PromptError(
                f"the prompt is a chat and tokenizer {name!r} has no chat template; allowed: a text, or "
                "tokenizer.chat_template = <a template>"
            )
        for message in messages:  # most templates print nothing for what is missing
            for part in ("role", "content"):
                if part not in message and "tool_calls" not in message:
                    raise PromptError(
                        f"message {dict(message)!r:.60} of the prompt has no {part!r}; allowed: "
                        "{'role': 'user', 'content': ...}"
                    )
        goes_on = answer and messages[-1].get("role") == "assistant"
        options: dict[str, Any] = {
            "tokenize": False,
            "add_generation_prompt": answer and not goes_on,
        }
        if goes_on:
            options["continue_final_message"] = True
        if self.enable_thinking is not None:
            options["enable_thinking"] = self.enable_thinking
        try:
            return str(tokenizer.apply_chat_template(list(messages), **options))
        except Exception as error:  # a template is a program of the model's author
            raise PromptError(
                f"the chat template of tokenizer {name!r} refuses the messages: {one_line(error)}; "
                "allowed: messages with a role and a content each, as this model takes them"
            ) from error

    def around_question(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
        """The texts of the chat template before and after a question that ends the last of `messages`,
        where that is the user's, or is the user's next message.

        Raises:
            PromptError: see `render_around`.
        """
        mark = "KVBENCH_QUESTION"
        *earlier, last = messages
        asked = [*messages, {"role": "user", "content": mark}]
        if last.get("role") == "user":
            said = last.get("content", "")
            if not isinstance(said, str):
                raise PromptError(
                    f"content of the last message is a {type(said).__name__}; allowed: text, which the "
                    "question goes on"
                )
            asked = [*earlier, {**last, "content": said + mark}]
        before, after = self.render_around([mark], asked)
        return before, after

    def render_around(
        self, marks: Sequence[str], messages: Sequence[Mapping[str, str]], *, answer: bool = True
    ) -> list[str]:
        """The texts that the chat template writes before, between and after these parts of the messages'
        contents.

        Raises:
            PromptError: see `render`; the template prints one of them not once.
        """
        text = self.render(messages, answer=answer)
        around = []
        for mark in marks:
            if text.count(mark) != 1:
                times = text.count(mark)
                raise PromptError(
                    f"the chat template of tokenizer {name_of(self.tokenizer)!r} prints a message "
                    f"{times} times{'' if times else ', or changes it'}; allowed: once, as it is "
                    "(or, for jobs, model.chat_template=never)"
                )
            before, _, text = text.partition(mark)
            around.append(before)
        return [*around, text]

    def between_turns(self) -> list[int]:
        """The tokens between an answer and the user's next message: those of the chat template, or of a
        blank line without a template."""
        if not self.chat:
            return self.encode_text("\n\n")
        marks = [f"KVBENCH_TURN_{number}" for number in range(3)]
        roles = ("user", "assistant", "user")
        messages = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]
        _, _, between, _ = self.render_around(marks, messages, answer=False)
        return self.encode_after(marks[1], between)

    @property
    def begin_ids(self) -> list[int]:
        """The special tokens that the tokenizer puts before every text (BOS)."""
        plain = self.encode_text("a")
        with_special = self.tokenizer.encode("a", add_special_tokens=True)
        if not plain or plain[0] not in with_special:
            return []
        return list(with_special[: with_special.index(plain[0])])
