"""What a line of a records file and a manifest may hold, whoever wrote them.

Keys that are not named here may hold any JSON value.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, get_type_hints

from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic wants it before Python 3.12

from kvbench.errors import FAILED, UserError
from kvbench.records.figures import TaskKind

FORMAT = 1
"""Of manifest and records; raised when an older kvbench would misread them. Absent means 1."""
Text = str | None
Number = float | None
Truth = bool | None

_checked = with_config(ConfigDict(extra="allow", strict=True, allow_inf_nan=False))


@_checked
class Record(TypedDict):
    """A line of a records file."""

    experiment: Text
    model: Text
    task: Text
    dataset: Text
    example_id: str
    method: Text
    config_hash: Text
    seed: int | None
    status: Literal["ok", "over_budget", "oom", "error", "timeout"]
    prompt_tokens: Number
    new_tokens: Number
    capacity: Number
    entries: dict[str, Any] | None
    cache_bytes: Number
    exact_bytes: Number
    ratio: Number
    compressed: Truth
    saves_memory: Truth
    prefill_s: Number
    compress_s: Number
    decode_s: Number
    decode: NotRequired[Text]  # records before 0.3 have none
    prediction: Text
    answers: list[Any] | None
    prompt_tail: Text
    score: Number
    error: Text


COMMON_FIELDS = tuple(Record.__annotations__)
"""Fields every record has; a value that its status makes unavailable is null."""

NUMBER_FIELDS = tuple(name for name, kind in get_type_hints(Record).items() if kind == Number)
"""Common fields that are numbers (or null)."""


@_checked
class BudgetPart(TypedDict, total=False):
    """The numbers of a run's budget that reports show."""

    rate: int | float | None
    total_rate: int | float | None
    size: int | float | None


@_checked
class Config(TypedDict, total=False):
    """What a report asks of a run's config, or of the part of it that is the run's identity."""

    budget: BudgetPart | None
    sampling: dict[str, Any] | None
    logger: dict[str, Any] | None
    differs: list[Any] | None
    small: str | None


@_checked
class About(TypedDict, total=False):
    """What a task says about its scores."""

    score_unit: str
    lower_is_better: bool
    breakdown: list[str] | None
    measures: list[str] | None
    figures: list[dict[str, Any]] | None
    kind: TaskKind | None
    metric: Text
    unit: str
    subject: Text


@_checked
class Manifest(TypedDict, total=False):
    """What made a run's records."""

    format: Annotated[int, Ge(1), Le(FORMAT)]
    experiment: Text
    model: Text
    task: Text
    method: Text
    config_hash: Text
    seed: int | None
    config: Config | None
    identity: Config | None
    task_meta: About | None
    hardware: dict[str, Any] | None
    versions: dict[str, Any] | None
    earlier_starts: list[dict[str, Any]]


class StoreError(UserError, RuntimeError):
    """A results folder that cannot be read or written."""

    status = FAILED


RECORD: TypeAdapter[Any] = TypeAdapter(Record)
MANIFEST: TypeAdapter[Any] = TypeAdapter(Manifest)
EXAMPLES: TypeAdapter[Any] = TypeAdapter(list[str])


def parsed(kind: TypeAdapter[Any], content: bytes, where: str) -> Any:
    """A record from its line, a manifest or a list of example ids from its file; common fields that
    are numbers come as floats.

    Args:
        kind: `RECORD`, `MANIFEST` or `EXAMPLES`.
        where: whose content it is, which an error names with the key and what it may hold.

    Raises:
        StoreError: it is none.
    """
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise StoreError(f"{where}: {_explanation(error)}") from error


def _explanation(error: ValidationError) -> str:
    """The first thing that is wrong, or all keys that are missing."""
    problems = error.errors(include_url=False)
    first = problems[0]
    if first["type"] == "json_invalid":
        return f"not JSON ({first['msg'].removeprefix('Invalid JSON: ')})"
    if not first["loc"]:
        return "not a JSON object"
    missing = [str(one["loc"][0]) for one in problems if one["type"] == "missing"]
    if missing:
        return f"lacks {', '.join(missing)}"
    allowed = first["msg"].replace("Input should be ", "").replace("'", "")
    return f"{'.'.join(map(str, first['loc']))} is {first['input']!r:.60}; allowed: {allowed}"
