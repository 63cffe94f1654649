"""The contract of a task, which makes examples and scores answers, and the encoding of prompts."""

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
"""A number of examples, fillers or facts. This bound and those below are far above any run that
finishes, so that a mistyped number is refused."""
Repeats = Annotated[int, Ge(1), Le(1000)]
"""The number of copies of a text in a prompt."""
Tokens = Annotated[int, Ge(1), Le(10_000_000)]
"""The number of tokens of a prompt."""
NewTokens = Annotated[int, Ge(1), Le(100_000)]
"""The number of tokens of an answer."""

MOST_CHARACTERS = 20_000_000
"""The most characters of a text that is tokenised: more than any model reads, in some seconds."""


def check_length(text: str) -> None:
    """Refuse a text that would be tokenised for minutes.

    Raises:
        TaskError: the text has more than `MOST_CHARACTERS` characters.
    """
    if len(text) > MOST_CHARACTERS:
        raise TaskError(
            f"a prompt of {len(text)} characters, {text[:20]!r} ...; allowed: at most "
            f"{MOST_CHARACTERS}"
        )


@contextmanager
def tokenizing(tokenizer: object) -> Iterator[None]:
    """Raise a failure of the tokenizer inside the block as an error of one line. A tokenizer may fail
    on a text that a pattern in its files cannot handle.

    Raises:
        TaskError: the library raised an exception, or its Rust code panicked.
    """
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is no `Exception`; neither is a request to end the process.
        panic = type(error).__name__ == "PanicException"
        ends_process = not panic and not isinstance(error, Exception)
        if ends_process or isinstance(error, MemoryError | TimeoutError | TaskError):
            raise
        line = (str(error).strip().splitlines() or ["no message"])[0]
        name = getattr(tokenizer, "name_or_path", None) or type(tokenizer).__name__
        raise TaskError(
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
            TaskError: the text holds half of a surrogate pair, is too long (`check_length`), or the
                tokenizer fails.
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
            TaskError: the template does not print every message once.
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
            raise TaskError(
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


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and its acceptable answers.

    The prompt is ``context + question``. Context and question are tokenised separately, so that the
    boundary between them is a token boundary under both settings of ``compress_after``. Tasks that need
    exact token counts also set `context_ids` and `question_ids`, which are then used instead.

    Attributes:
        id: unique within the task; the same whatever the `limit`.
        context: the part of the prompt that may be compressed before the question is known.
        question: the rest of the prompt; may be empty.
        answers: the acceptable answers.
        max_new_tokens: the most tokens that are generated.
        stop: generation ends when one of these strings appears; the prediction ends before it.
        dataset: the name of the subset to which the example belongs, or else of the task.
        context_ids, question_ids: the token ids of context and question, or None. They lack the tokens
            that the model puts around a user's text, unless `complete`.
        complete: True where `context_ids` and `question_ids` are the whole prompt.
        end_ids: the tokens that end the generation; None for all end tokens of the model.
        may_be_empty: False where the first generated token must not be an end token; the best other
            token is then taken.
        settled: a function of the text generated so far. It returns True when no continuation can
            change the score, so that generation may end early.
        context_id: the name of a context that several examples of the task share; None for a context of
            one example. Under ``compress_after=context`` a shared context is prefilled and compressed
            once. Limits, shards and intervals count contexts.
        history: the text between the context and this question. "none": no text. "golden": the earlier
            examples of the same `context_id`, each question with its `golden` answer. "own": the same
            with the method's answers, under ``compress_after=context`` only.
        golden: the answer of this example in the history of later ones; None for the first of `answers`.
        evidence: the part of the context that holds the answer; empty where the task does not know it.
        fields: fields of the record beside the common ones (number of lines, depth ...), JSON values
            only.
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
    """A benchmark: a frozen dataclass whose fields are its options. A task is one file and one YAML."""

    name: ClassVar[str]
    version: ClassVar[int] = 1
    """To be raised by one when prompts or scores change. It is part of the config hash."""
    score_unit: ClassVar[str] = "fraction"
    """The unit of `score`. Tables show a fraction in 0..1 in per cent."""
    breakdown: ClassVar[tuple[str, ...]] = ()
    """The record fields by whose values tables are split, e.g. ``("num_lines",)``."""
    heatmap: ClassVar[tuple[str, str] | None] = None
    """The record fields on the x and y axis of the task's heatmap; None for no heatmap."""
    unit: ClassVar[str] = "example_id"
    """The record field that names the independent unit of the data, which intervals resample."""
    measures: ClassVar[tuple[str, ...]] = ()
    """The names of scores that a table shows side by side; empty for the primary score alone."""
    long_answers: ClassVar[bool] = False
    """Whether answers are longer than prompts. The ratio of bytes is then one of means over the
    generation, otherwise one of the caches at the end of the prompt."""
    unhashed: ClassVar[tuple[str, ...]] = ()
    """The options on which no score depends (the number of examples, the place of files)."""

    def __post_init__(self) -> None:
        """Check the options by their type hints. A subclass with further checks calls this first.

        Raises:
            TaskError: one line that names the option, its value and what is allowed.
        """
        check_options(self, "task.", TaskError)

    def digests(self) -> Mapping[str, str]:
        """The digests of the data files by name. They are part of the config hash, so that a run does
        not resume with other data. Empty where the examples are generated from the options."""
        return {}

    def metric_name(self) -> str:
        """The metric of `score` as heads of tables name it; empty where the task's own name says it."""
        return ""

    @abstractmethod
    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """All examples, in an order of which every prefix is a balanced sample.

        Raises:
            TaskError: options that cannot be met, or a missing data file; the message has the command
                that fetches it.
        """

    @abstractmethod
    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """The scores of a prediction by name; ``"score"`` is the primary one."""


def _spread(count: int) -> list[int]:
    """The numbers 0 .. count - 1 in an order in which successive numbers are far apart: a prefix has
    numbers from both ends and the middle."""
    first = max(1, round(0.618 * count))
    step = next(step for step in range(first, 2 * count + 1) if gcd(step, count) == 1)
    return [(place * step) % count for place in range(count)]


def balanced_order(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """List all combinations of range(sizes[0]) x range(sizes[1]) x ..., in a balanced order.

    In every prefix of the list the values of one range occur equally often, to within one.
    """
    combinations: list[tuple[int, ...]] = [()]
    for size in sizes:
        # The combinations so far and the values of the next range are both repeated in a cycle. After
        # `period` steps the pairs would repeat, so the values are then shifted by one.
        known = len(combinations)
        values = _spread(size)
        period = lcm(known, size)
        combinations = [
            (*combinations[step % known], values[(step + step // period) % size])
            for step in range(known * size)
        ]
    return combinations
