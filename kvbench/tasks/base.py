"""The contract of a task: examples in, scores out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from math import gcd, lcm
from operator import eq
from typing import Annotated, Any, ClassVar, Literal, Protocol

from annotated_types import Ge, Le

from kvbench.errors import UserError
from kvbench.errors.options import check_options


class TaskError(UserError, ValueError):
    """A user-facing error: one line that names the thing, its value and what is allowed."""


Many = Annotated[int, Ge(1), Le(1_000_000)]
"""Examples, fillers, facts; these bounds are far above what finishes, so that a typing error ends in
one line."""
Repeats = Annotated[int, Ge(1), Le(1000)]
"""Copies of one thing in a prompt."""
Tokens = Annotated[int, Ge(1), Le(10_000_000)]
"""Tokens of a prompt."""
NewTokens = Annotated[int, Ge(1), Le(100_000)]
"""Tokens of an answer."""

MOST_CHARACTERS = 20_000_000
"""Of one text to be tokenised: some seconds of work, and more tokens than any model reads."""


def check_length(text: str) -> None:
    """Refuse a text that would be tokenised for minutes.

    Raises:
        TaskError: more than `MOST_CHARACTERS`.
    """
    if len(text) > MOST_CHARACTERS:
        raise TaskError(
            f"a prompt of {len(text)} characters, {text[:20]!r} ...; allowed: at most "
            f"{MOST_CHARACTERS}"
        )


@contextmanager
def tokenizing(tokenizer: object) -> Iterator[None]:
    """A tokenizer's own failures as one line: its files may hold a pattern that some text breaks.

    Raises:
        TaskError: whatever the library raised, a panic of its Rust code included.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        wish_to_stop = not panic and not isinstance(error, Exception)
        if wish_to_stop or isinstance(error, MemoryError | TimeoutError | TaskError):
            raise
        line = (str(error).strip().splitlines() or ["no message"])[0]
        name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
        raise TaskError(
            f"tokenizer {name!r} cannot encode a text: {type(error).__name__}: {line}; allowed: "
            "one that can"
        ) from error


class Tokenizer(Protocol):
    """What tasks need of a tokenizer (every Hugging Face tokenizer has it)."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]: ...
    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = ...) -> Any: ...


@dataclass(frozen=True)
class PromptEncoder:
    """Text to token ids, with what the model puts around a prompt (BOS, a chat template).

    Attributes:
        tokenizer: the model's.
        prefix_ids, suffix_ids: tokens before and after the user's text; empty for base models.
        family: the model's architecture ("llama", "qwen2" ...), for protocols that depend on it.
        chat: whether the tokenizer has a chat template, and the model's config lets it be used.
        max_input: prompt tokens that the model's config allows, None where it does not say.
        max_positions: tokens that the model has positions for, prompt and answer; None if unknown.
        end_ids: the tokenizer's end token, and those that the model's config adds (end of turn).
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
        """Token ids of `text` alone, no special tokens.

        Raises:
            TaskError: text that is no text, as half of a surrogate pair; see `check_length`; a
                tokenizer that fails.
        """
        check_length(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TaskError(
                f"text {text[max(0, error.start - 20) : error.end + 20]!r} holds half a character "
                f"({error.reason}); allowed: text that has a UTF-8 form"
            ) from error
        with tokenizing(self.tokenizer):
            return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens dropped."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))

    def encode_prompt(self, text: str, cut: int, *, special: bool) -> tuple[list[int], int]:
        """Token ids of a whole prompt in one piece, and how many of them are text before `cut`.

        Args:
            cut: a place in the text (characters); the token across it counts as after it.
            special: whether the tokenizer adds its special tokens (BOS).
        """
        check_length(text)
        tokenizer: Any = self.tokenizer
        with tokenizing(tokenizer):
            encoded = tokenizer(text, add_special_tokens=special, verbose=False)
        ids = list(encoded["input_ids"])
        if getattr(encoded, "is_fast", False):
            after = (encoded.char_to_token(place) for place in range(cut, len(text)))
            return ids, next((token for token in after if token is not None), len(ids))
        head = tokenizer(text[:cut], add_special_tokens=special, verbose=False)["input_ids"]
        return ids, sum(1 for _ in takewhile(bool, map(eq, ids, head)))

    def render_chat(self, text: str) -> str:
        """`text` as a user's message in the tokenizer's chat template, up to where the answer begins.

        The template adds its own default system message, if it has one.
        """
        tokenizer: Any = self.tokenizer
        message = [{"role": "user", "content": text}]
        return str(
            tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        )

    def between_turns(self) -> list[int]:
        """Tokens that the chat template puts after an answer and before the user's next message; without
        a template those of a blank line.

        Raises:
            TaskError: a template that takes no such conversation.
        """
        if not self.chat:
            return self.encode_text("\n\n")
        marks = [f"KVBENCH_TURN_{number}" for number in range(3)]
        roles = ("user", "assistant", "user")
        messages = [{"role": r, "content": m} for r, m in zip(roles, marks, strict=True)]
        tokenizer: Any = self.tokenizer
        with tokenizing(tokenizer):
            text = str(tokenizer.apply_chat_template(messages, tokenize=False))
        if [text.count(mark) for mark in marks] != [1, 1, 1]:
            raise TaskError(
                "the model's chat template prints the messages of a conversation not once each; "
                "allowed for tasks of several turns: one that does, or model.chat_template=never"
            )
        return self.encode_text(text.partition(marks[1])[2].partition(marks[2])[0])

    @property
    def begin_ids(self) -> list[int]:
        """Tokens that the tokenizer itself puts before any text (BOS)."""
        plain, whole = self.encode_text("a"), self.tokenizer.encode("a", add_special_tokens=True)
        return list(whole[: whole.index(plain[0])]) if plain and plain[0] in whole else []

    @property
    def overhead(self) -> int:
        """Tokens added around the user's text; count them when a prompt needs an exact length."""
        return len(self.prefix_ids) + len(self.suffix_ids)


@dataclass(frozen=True, kw_only=True)
class Example:
    """One prompt and what counts as its answer.

    The prompt is ``context + question``. Tasks that need exact token counts give `context_ids` and
    `question_ids` (without prefix and suffix, unless `complete`) as well, and those are used as they
    are; otherwise context and question are tokenised separately, so that the boundary is a token
    boundary under both settings of ``compress_after``.

    Attributes:
        id: unique within the task and stable under `limit`.
        context: what may be compressed before the question is known.
        question: the rest of the prompt; may be empty.
        answers: acceptable answers.
        max_new_tokens: generation limit.
        stop: generation ends when one of these strings appears; it is cut from the prediction.
        dataset: name of the subset the example belongs to (the task's name where there is one only).
        complete: `context_ids` and `question_ids` are the whole prompt; nothing is put around them.
        end_ids: tokens that end the generation; None for all that the model knows.
        may_be_empty: False: as the first token, the best one that does not end the generation.
        settled: of the text so far: nothing that may follow changes the score, so generation may end.
        context_id: examples with the same one ask the same context several things. Under
            ``compress_after=context`` that context is prefilled and compressed once for all of them,
            and under either setting the context is the unit of limit, shards and intervals. Names the
            context among those of the task; None: no other example shares it.
        history: what stands between the context and this question: "none", or the earlier examples of
            the same `context_id` in their order, each question with its `golden` answer ("golden"), or
            with what the method answered ("own", under ``compress_after=context`` only).
        golden: its answer before later questions; None: the first of `answers`.
        evidence: the part of the context that holds the answer, as it stands there; empty where the task
            does not know it.
        fields: what the record keeps beside the common fields (number of lines, depth ...);
            JSON values only.
    """

    id: str
    context: str
    question: str
    answers: tuple[str, ...]
    max_new_tokens: int
    dataset: str
    stop: tuple[str, ...] = ()
    context_ids: tuple[int, ...] | None = None
    question_ids: tuple[int, ...] | None = None
    complete: bool = False
    end_ids: frozenset[int] | None = None
    may_be_empty: bool = True
    settled: Callable[[str], bool] | None = field(default=None, compare=False)
    context_id: str | None = None
    history: Literal["none", "golden", "own"] = "none"
    golden: str | None = None
    evidence: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A benchmark: a frozen dataclass whose fields are its options; one file, one YAML."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """Raised whenever prompts or scores change; part of the config hash."""
    score_unit: ClassVar[str] = "fraction"
    """What `score` is measured in (a fraction in 0..1 is shown as per cent)."""
    breakdown: ClassVar[tuple[str, ...]] = ()
    """Record fields that tables split by (e.g. ``("num_lines",)``)."""
    heatmap: ClassVar[tuple[str, str] | None] = None
    """Record fields (x, y) of the heatmap, or None."""
    unit: ClassVar[str] = "example_id"
    """Record field that names the independent unit, which intervals resample."""
    measures: ClassVar[tuple[str, ...]] = ()
    """Scores of `score` that a table shows side by side; none: the primary one alone."""
    long_answers: ClassVar[bool] = False
    """Whether answers are longer than prompts: then the ratio of bytes is that of their means over the
    generation, not of the end of the prompt."""
    unhashed: ClassVar[tuple[str, ...]] = ()
    """Options on which no score depends (how many examples, where the files are)."""

    def __post_init__(self) -> None:
        """Check the options by their hints; a subclass with more to check calls this first.

        Raises:
            TaskError: one line that names the option, its value and what is allowed.
        """
        check_options(self, "task.", TaskError)

    def check_files(self) -> None:  # noqa: B027 - most tasks read no files of the user's
        """Read the user's files that the task names, before anything slow is imported or loaded.

        Raises:
            TaskError: one is missing, empty or broken: the file, and the line.
        """

    def digests(self) -> Mapping[str, str]:
        """Digest of each data file the examples come from; part of the config hash, so that another
        file under the same name is another run. Empty where the data follow from the options."""
        return {}

    @abstractmethod
    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """All examples in an order of which every prefix is a balanced sample.

        Raises:
            TaskError: options that cannot be met, a missing data file (with the command that gets it).
        """

    @abstractmethod
    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """Scores of one prediction; ``"score"`` is the primary one, others are kept beside it."""


def _spread(count: int) -> list[int]:
    """0..count-1 with neighbours far apart: a prefix takes from both ends and the middle."""
    step = next(s for s in range(max(1, round(0.618 * count)), 2 * count + 1) if gcd(s, count) == 1)
    return [(place * step) % count for place in range(count)]


def balanced_order(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Every combination of range(sizes[0]) x range(sizes[1]) x ... once.

    Whatever the prefix, a value of one of them has come up as often as any other of it, or once more
    or less: each runs round and round, and starts one place later whenever all before it and it are
    back where they began.
    """
    orders: list[tuple[int, ...]] = [()]
    for size in sizes:
        known, values = len(orders), _spread(size)
        turn = lcm(known, size)
        orders = [
            (*orders[place % known], values[(place + place // turn) % size])
            for place in range(known * size)
        ]
    return orders
