"""How the text of a prompt becomes token ids, with what a model puts around it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from operator import eq
from typing import Any, Protocol

from kvbench.errors import UserError


class PromptError(UserError, ValueError):
    """A text that cannot be encoded: one line that names it and what is allowed."""


MOST_CHARACTERS = 20_000_000
"""The most characters of a text that is tokenised: more than any model reads, in some seconds."""


def check_length(text: str) -> None:
    """Refuse a text that would be tokenised for minutes.

    Raises:
        PromptError: the text has more than `MOST_CHARACTERS` characters.
    """
    if len(text) > MOST_CHARACTERS:
        raise PromptError(
            f"a prompt of {len(text)} characters, {text[:20]!r} ...; allowed: at most "
            f"{MOST_CHARACTERS}"
        )


@contextmanager
def tokenizing(tokenizer: object) -> Iterator[None]:
    """Raise a failure of the tokenizer inside the block as a PromptError of one line. A tokenizer may
    fail on a text that a pattern in its files cannot handle."""
    try:
        yield
    except (MemoryError, TimeoutError, UserError):
        raise
    except Exception as error:
        line = (str(error).strip().splitlines() or ["no message"])[0]
        name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
        raise PromptError(
            f"tokenizer {name!r} cannot encode a text: {type(error).__name__}: {line}; allowed: "
            "one that can"
        ) from error


class Tokenizer(Protocol):
    """The methods of a tokenizer that tasks call. Every Hugging Face tokenizer has them."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True)
class PromptEncoder:
    """Encodes prompts for one model: its tokenizer, and the tokens around a user's text (BOS, a chat
    template).

    Attributes:
        tokenizer: the model's tokenizer.
        prefix_ids: the tokens before the user's text, empty for base models.
        suffix_ids: the tokens after the user's text, empty for base models.
        family: the model's architecture ("llama", "qwen2" ...), for protocols that depend on it.
        chat: whether the tokenizer has a chat template and the model's config allows its use.
        max_input: the most prompt tokens by the model's config; None for no limit.
        max_positions: the most tokens of prompt and answer together; None if unknown.
        end_ids: the tokenizer's end token and those of the model's config (end of turn).
    """

    tokenizer: Tokenizer
    prefix_ids: tuple[int, ...] = ()
    suffix_ids: tuple[int, ...] = ()
    family: str | None = None
    chat: bool = False
    max_input: int | None = None
    max_positions: int | None = None
    end_ids: frozenset[int] = frozenset()

    def encode_text(self, text: str) -> list[int]:
        """Encode `text` without special tokens.

        Raises:
            PromptError: the text holds half of a surrogate pair, is too long (`check_length`), or the
                tokenizer fails.
        """
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
        """Decode `ids` without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode_prompt(self, text: str, cut: int, *, special: bool) -> tuple[list[int], int]:
        """Encode a whole prompt at once, and count the tokens before `cut`.

        Args:
            cut: the number of characters before the cut. A token across the cut counts as after it.
            special: whether the tokenizer adds its special tokens (BOS).

        Returns:
            the token ids, and how many of them lie before the cut.
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
        head = tokenizer(text[:cut], add_special_tokens=special, verbose=False)["input_ids"]
        return ids, sum(1 for _ in takewhile(bool, map(eq, ids, head)))

    def render_chat(self, text: str) -> str:
        """Render `text` as a user's message in the tokenizer's chat template, up to the beginning of the
        answer. A template with a default system message adds it.
        """
        tokenizer: Any = self.tokenizer
        message = [{"role": "user", "content": text}]
        return str(
            tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        )

    def between_turns(self) -> list[int]:
        """The tokens between an answer and the user's next message: those of the chat template, or of a
        blank line without a template.

        Raises:
            PromptError: the template does not print every message once.
        """
        if not self.chat:
            return self.encode_text("\n\n")
        marks = [f"KVBENCH_TURN_{number}" for number in range(3)]
        roles = ("user", "assistant", "user")
        messages = [
            {"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)
        ]
        tokenizer: Any = self.tokenizer
        with tokenizing(tokenizer):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        if [text.count(mark) for mark in marks] != [1, 1, 1]:
            raise PromptError(
                "the model's chat template prints the messages of a conversation not once each; "
                "allowed for tasks of several turns: one that does, or model.chat_template=never"
            )
        return self.encode_text(text.partition(marks[1])[2].partition(marks[2])[0])

    @property
    def begin_ids(self) -> list[int]:
        """The special tokens that the tokenizer puts before every text (BOS)."""
        plain = self.encode_text("a")
        with_special = self.tokenizer.encode("a", add_special_tokens=True)
        if not plain or plain[0] not in with_special:
            return []
        return list(with_special[: with_special.index(plain[0])])

    @property
    def overhead(self) -> int:
        """The number of tokens around the user's text, which a prompt of exact length must include."""
        return len(self.prefix_ids) + len(self.suffix_ids)
