"""The contract of a task, which makes examples and scores answers."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from math import gcd, lcm
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Ge, Le

from kvbench.errors import UserError
from kvbench.errors.options import check_options
from kvbench.prompts import PromptEncoder

T = TypeVar("T")


class TaskError(UserError, ValueError):
    """A user-facing error: one line that names the thing, its value and what is allowed."""


Many = Annotated[int, Ge(1), Le(1_000_000)]
"""A number of examples, fillers or repetitions. This bound and those below are far above any run that
finishes, so that a mistyped number is refused."""
Tokens = Annotated[int, Ge(1), Le(10_000_000)]
NewTokens = Annotated[int, Ge(1), Le(100_000)]


WORDING = ("template", "question", "answer_prefix", "needle", "stop")
"""The options of tasks that are texts of a prompt or texts that end an answer."""


def with_newlines(typed: str) -> str:
    """A text in which a backslash and an n, behind no other backslash, are a newline."""
    return re.sub(r"(?<!\\)\\n", "\n", typed)


@dataclass(frozen=True, kw_only=True)
class Example:
    """A prompt and its acceptable answers.

    The prompt is ``context + question``. It has the tokens of its whole text, and one across the seam
    is the question's. Tasks that need exact token counts also set `context_ids` and `question_ids`,
    which are then used instead.

    Attributes:
        id: unique within the task; the same whatever the `limit`.
        context: the part of the prompt that may be compressed before the question is known.
        question: the rest of the prompt; may be empty.
        stop: generation ends when one of these strings appears; the prediction ends before it.
        dataset: the name of the subset to which the example belongs, or else of the task.
        context_ids, question_ids: the token ids of context and question, or None. Together they are the
            whole prompt, with the tokens that the model puts around a user's text.
        end_ids: the tokens that end the generation; None for all end tokens of the model.
        may_be_empty: False where the first generated token must not be an end token; the best other
            token is then taken.
        is_final: a function of the text generated so far. It returns True when no continuation can
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
    end_ids: frozenset[int] | None = None
    may_be_empty: bool = True
    is_final: Callable[[str], bool] | None = field(default=None, compare=False)
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

        A backslash and an n in an option of `WORDING`, as Hydra hands on what is typed, are a newline.
        """
        check_options(self, "task.", TaskError)
        for option in WORDING:
            typed = getattr(self, option, None)
            meant = tuple(map(with_newlines, typed)) if isinstance(typed, tuple) else typed
            meant = with_newlines(meant) if isinstance(meant, str) else meant
            if meant != typed:
                object.__setattr__(self, option, meant)
                # A record of the same command made before has another prompt, so another hash.
                object.__setattr__(self, "version", type(self).version + 1)

    def check_files(self) -> None:  # noqa: B027 - most tasks read no files of the user's
        """Read the user's files that the task names, before anything slow is imported or loaded. What is
        missing, empty or broken is a TaskError that names the file, and the line."""

    def digests(self) -> Mapping[str, str]:
        """The digests of the data files, in the order in which they are read. They are part of the
        config hash, so that a run does not resume with other data. Empty where the examples are
        generated from the options."""
        return {}

    def code(self) -> Sequence[object]:
        """The classes and functions outside the task's own class on which its scores depend. Their files
        are part of a run's identity, as the class's is."""
        return ()

    def metric_name(self) -> str:
        """The metric of `score` as heads of tables name it; empty where the task's own name says it."""
        return ""

    def if_scored_by(
        self, kind: type[Task], is_final: Callable[[str], bool]
    ) -> Callable[[str], bool] | None:
        """`is_final` for the examples of a task of `kind`, or None for a subclass with a score of its
        own, which may be about what comes later in an answer."""
        return is_final if type(self).score is kind.score else None

    @abstractmethod
    def examples(self, encoder: PromptEncoder) -> Sequence[Example]:
        """All examples, in an order of which every prefix is a balanced sample.

        Raises:
            TaskError: options that cannot be met, or a missing data file; the message has the command
                that fetches it.
        """

    def first(self, contexts: int) -> Task:
        """A task whose first `contexts` contexts are this one's. It may make fewer others, so that a
        limit saves their tokenising; by default it makes all."""
        return self

    @abstractmethod
    def score(self, prediction: str, example: Example) -> Mapping[str, float]:
        """The scores of a prediction by name; ``"score"`` is the primary one."""


def depth_in_tens(place: int, last: int) -> int:
    """The depth of a place among 0 .. `last`, in per cent rounded to tens."""
    return 10 * round(10 * place / max(1, last))


def in_turn(queues: Iterable[Iterable[T]]) -> list[T]:
    """The first of every queue, then the second of every one that has so many, and so on."""
    nothing = object()
    turns = chain.from_iterable(zip_longest(*queues, fillvalue=nothing))
    return [one for one in turns if one is not nothing]  # type: ignore[misc]


def by_digest(ids: Iterable[str]) -> str:
    """A key by which things with these ids are sorted into an order that looks random. It depends on the
    ids alone: neither on their order nor on what else is sorted."""
    return hashlib.sha256("\n".join(sorted(ids)).encode()).hexdigest()


def _spread(count: int) -> list[int]:
    """The numbers 0 .. count - 1 in an order in which successive numbers are far apart: a prefix has
    numbers from both ends and the middle."""
    first = max(1, round(0.618 * count))
    step = next(step for step in range(first, 2 * count + 1) if gcd(step, count) == 1)
    return [(place * step) % count for place in range(count)]


def balanced_order(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """All combinations of range(sizes[0]) x range(sizes[1]) x ..., so that in every prefix the values of
    one range occur equally often, to within one."""
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
