"""The figures that a task or probe asks for: types where it is written, JSON in the manifest's
``task_meta.figures`` on the way to the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
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
        ylabel: of the axis; by default the field's name.
    """

    x: str
    facet: str | None = None
    repeat: str = "seed"
    ylabel: str | None = None
    kind: Literal["bars"] = "bars"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """`y` against `x` on logarithmic axes with the slope of each curve, a panel per value of `facet`.

    Attributes:
        x, y: record fields. level: the field that was set; y is averaged over the records of a level.
        unit: record field of the independent repetitions, which intervals resample.
        fit_most: up to which level the slope is fitted (None: all).
        guides: slopes drawn in grey. expected: slope predicted, by the beginning of a label.
        compare: method whose curve the others are divided by, at the last level fitted.
    """

    x: str
    y: str
    level: str
    facet: str = "dataset"
    unit: str = "replicate"
    xlabel: str | None = None
    ylabel: str | None = None
    fit_most: float | None = None
    guides: tuple[float, ...] = ()
    expected: Mapping[str, float] = field(default_factory=dict)
    compare: str | None = None
    kind: Literal["scaling"] = "scaling"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds, tokens per second and peak memory of each setting, and against the prompt's length."""

    kind: Literal["throughput"] = "throughput"


@dataclass(frozen=True, kw_only=True)
class Distances:
    """Distances from the exact model's distribution, by rate."""

    kind: Literal["fidelity"] = "fidelity"


Figure = Heatmap | Bars | Curve | Times | Distances
_FIGURES: TypeAdapter[tuple[Figure, ...]] = TypeAdapter(
    tuple[Annotated[Figure, Field(discriminator="kind")], ...]
)


def as_json(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """Figures as a manifest holds them."""
    return [asdict(figure) for figure in figures]


def figures_in(meta: Mapping[str, Any]) -> tuple[Figure, ...]:
    """The figures that a manifest's ``task_meta`` asks for.

    Raises:
        ValueError: one is of no kind above, lacks a key, or holds a value of a wrong type.
    """
    try:
        return _FIGURES.validate_python(meta.get("figures") or ())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"task_meta.figures: {where}: {first['msg']}") from error
