"""The keys of a record, which is a line of a records file, and of a manifest, with the types of their
values. Files are checked as they are read, since anybody may have written them.

Keys that are not named here may hold any JSON value.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from kvbench.errors import FAILED, UserError
from kvbench.records.figures import TaskKind

FORMAT = 2
"""The version of manifest and records; it is raised when an older kvbench would misread them. A manifest
without one is of format 1, whose `identity` does not say what code and weights its records are of."""
TextOrNull = str | None
NumberOrNull = float | None
FlagOrNull = bool | None

_checked = with_config(ConfigDict(extra="allow", strict=True, allow_inf_nan=False))


@_checked
class Record(TypedDict):
    """A line of a records file."""

    experiment: TextOrNull
    model: TextOrNull
    task: TextOrNull
    dataset: TextOrNull
    example_id: str
    method: TextOrNull
    config_hash: TextOrNull
    seed: int | None
    status: Literal["ok", "over_budget", "oom", "error", "timeout"]
    prompt_tokens: NumberOrNull
    new_tokens: NumberOrNull
    capacity: NumberOrNull
    entries: dict[str, Any] | None
    cache_bytes: NumberOrNull
    exact_bytes: NumberOrNull
    ratio: NumberOrNull
    compressed: FlagOrNull
    saves_memory: FlagOrNull
    prefill_s: NumberOrNull
    compress_s: NumberOrNull
    decode_s: NumberOrNull
    decode: NotRequired[TextOrNull]  # records before 0.3 lack these five
    max_new_tokens: NotRequired[NumberOrNull]  # of answers
    # Whether the task's score was settled before the answer's own end.
    ended_early: NotRequired[FlagOrNull]
    held_back: NotRequired[NumberOrNull]  # the prompt's last tokens that were fed, not compressed
    # Of the first token's text alone, where it is the exact cache's.
    first_token_score: NotRequired[NumberOrNull]
    prediction: TextOrNull
    answers: list[Any] | None
    prompt_tail: TextOrNull
    score: NumberOrNull
    error: TextOrNull


COMMON_FIELDS = tuple(Record.__annotations__)
"""Fields every record has; a value that its status makes unavailable is null."""

NUMBER_FIELDS = tuple(name for name, kind in get_type_hints(Record).items() if kind == NumberOrNull)
"""Common fields that are numbers (or null)."""


@_checked
class BudgetPart(TypedDict, total=False):
    """The numbers of a run's budget that reports show."""

    rate: int | float | None
    total_rate: int | float | None
    size: int | float | None


@_checked
class Config(TypedDict, total=False):
    """The keys that a report reads of a run's config, or of the part of it that identifies the run."""

    budget: BudgetPart | None
    sampling: dict[str, Any] | None
    logger: dict[str, Any] | None
    differs: list[Any] | None
    small: str | None


@_checked
class TaskMeta(TypedDict, total=False):
    """How a task's scores are to be read, and the fields that a report breaks them down by."""

    score_unit: str
    lower_is_better: bool
    breakdown: list[str] | None
    measures: list[str] | None
    figures: list[dict[str, Any]] | None
    kind: TaskKind | None
    metric: TextOrNull
    unit: str
    subject: TextOrNull


@_checked
class Manifest(TypedDict, total=False):
    """The config, versions and hardware that a run's records were made with."""

    format: Annotated[int, Ge(1), Le(FORMAT)]
    experiment: TextOrNull
    model: TextOrNull
    task: TextOrNull
    method: TextOrNull
    config_hash: TextOrNull
    settings_hash: TextOrNull
    seed: int | None
    config: Config | None
    identity: Config | None
    task_meta: TaskMeta | None
    hardware: dict[str, Any] | None
    versions: dict[str, Any] | None
    earlier_starts: list[dict[str, Any]]


class StoreError(UserError, RuntimeError):
    """A results folder that cannot be read or written."""

    status = FAILED


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an `OSError` about the file or folder `path` into a `StoreError` of one line."""
    try:
        yield
    except OSError as error:
        line = f"cannot use {path}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            line = (
                f"no space left to write {path}; its earlier records are intact: free some and run the "
                "same command again"
            )
        raise StoreError(line) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parsed(kind: Any, content: bytes, where: str) -> Any:
    """A `Record`, a `Manifest` or a list of example ids from its JSON; an error begins with `where`.
    Common fields that are numbers become floats."""
    try:
        return _adapter(kind).validate_json(content)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = problems[0]
        missing = [str(problem["loc"][0]) for problem in problems if problem["type"] == "missing"]
        if first["type"] == "json_invalid":
            why = f"not JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
        elif not first["loc"]:
            why = "not a JSON object"
        elif missing:
            why = f"lacks {', '.join(missing)}"
        else:
            allowed = first["msg"].replace("Input should be ", "").replace("'", "")
            key = ".".join(map(str, first["loc"]))
            why = f"{key} is {first['input']!r:.60}; allowed: {allowed}"
        raise StoreError(f"{where}: {why}") from error
