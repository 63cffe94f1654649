"""The figures that a task or probe asks the report to draw, and the kind of task that it is.

A task lists its figures as the types below; they travel to the report as JSON, under
``task_meta.figures`` of a run's manifest. ``task_meta.kind`` says what the task measures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Heatmap:
    """The mean score by two record fields, a panel per variant."""

    x: str
    y: str
    kind: Literal["heatmap"] = "heatmap"


@dataclass(frozen=True, kw_only=True)
class Bars:
    """The mean score by the record field `x`, a panel per value of `facet`.

    Attributes:
        repeat: the record field over whose values the standard deviation is drawn.
        ylabel: the name of the y axis; by default the field's.
    """

    x: str
    facet: str | None = None
    repeat: str = "seed"
    ylabel: str | None = None
    kind: Literal["bars"] = "bars"


Figure = Heatmap | Bars
TaskKind = Literal["scores", "throughput", "fidelity"]
"""A task measures scores of answers or errors, or seconds and bytes, or distances from the exact model's
distribution."""
_FIGURES: TypeAdapter[tuple[Figure, ...]] = TypeAdapter(
    tuple[Annotated[Figure, Field(discriminator="kind")], ...]
)


def as_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """Figures as a manifest holds them."""
    return [asdict(figure) for figure in figures]


def figures_in(meta: Mapping[str, Any]) -> tuple[Figure, ...]:
    """The figures that a manifest's ``task_meta`` asks for.

    Raises:
        ValueError: a figure is of no kind above, lacks a key, or holds a value of a wrong type.
    """
    figures = meta.get("figures") or ()
    if isinstance(figures, list | tuple):
        # The slopes of a probe that is a script today; its records are read as scores.
        slopes = [one for one in figures if isinstance(one, dict) and one.get("kind") == "scaling"]
        figures = [one for one in figures if one not in slopes]
    try:
        return _FIGURES.validate_python(figures)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(f"task_meta.figures: {place}: {problem['msg']}") from error
