"""What W&B runs show: tables, curves, images and interactive heatmaps, made from a group's records."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvbench.records.read import Run
from kvbench.report.experiment import Group
from kvbench.report.figures.canvas import Drawn
from kvbench.report.figures.heatmap import grid_of, heatmaps, heatmaps_alone
from kvbench.report.figures.kept import kept_figures
from kvbench.report.figures.memory import error_against_memory, score_against_ratio
from kvbench.report.figures.names import axis_name
from kvbench.report.labels import Variant
from kvbench.report.render.answers import clip, sample_of
from kvbench.report.table import Table, unit_text
from kvbench.report.tables.score_tables import as_table
from kvbench.report.tables.scores import ScoreTable, score_table
from kvbench.report.tables.strata import as_text

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import wandb

MAX_PREDICTIONS = 500
"""Rows of a predictions table; a note beside it says when there were more."""


@dataclass(frozen=True)
class Curve:
    """Scores over the values of one record field: what a line panel of W&B shows.

    Attributes:
        section: prefix of the history's keys.
        x: the key below it that is the horizontal axis.
        points: one step each: keys below the section to numbers.
    """

    section: str
    x: str
    points: tuple[Mapping[str, float], ...]


def field_tables(group: Group, fields: Collection[str] | None = None) -> list[ScoreTable]:
    """Scores by each record field that the group's task asks for (of those in `fields`)."""
    wanted = [name for name in _fields(group) if fields is None or name in fields]
    return [score_table(group, name) for name in wanted]


def run_media(
    group: Group, tables: Sequence[ScoreTable], variant: Variant, run: Run
) -> dict[str, Any]:
    """Tables, heatmaps and images of one variant; `tables` as `field_tables` gives them."""
    predicted = run.records["prediction"].notna().any()
    media: dict[str, Any] = {"predictions" if predicted else "records": examples(group, run)}
    for table in tables:
        media[f"by_{table.by}/table"] = as_wandb(
            as_table(table), lambda line: line["variant"] == variant.label
        )
    spec = group.meta.figure("heatmap")
    if spec and _scored(group, variant):
        media["heatmap"] = image(heatmaps_alone(group, [variant], spec)[0])
        media["heatmap_chart"] = heatmap_chart(group, [variant], spec)
    return media


def comparison_media(group: Group, table: ScoreTable) -> dict[str, Any]:
    """Every variant of a group side by side."""
    media: dict[str, Any] = {"scores": as_wandb(as_table(table))}
    answers = side_by_side(group)
    if answers is not None:
        media["predictions"] = answers
    spec = group.meta.figure("heatmap")
    variants = [variant for variant in group.variants if _scored(group, variant)]
    if spec and variants:
        media |= _images("heatmaps", heatmaps(group, spec))
        media["heatmap_chart"] = heatmap_chart(group, variants, spec)
    if len({variant.rate for variant in group.variants if variant.rate is not None}) > 1:
        media["score_against_ratio_figure"] = image(score_against_ratio(group, table))
    media |= _images("kept", kept_figures(group))
    errors = error_against_memory(group)
    if errors is not None:
        media["error_against_memory_figure"] = image(errors)
    lines = memory_lines(group, table)
    if any(len(points) > 1 for points in lines.values()):
        media["score_against_ratio"] = memory_chart(group, lines)
    return media


def curves(group: Group, tables: Sequence[ScoreTable], variant: Variant) -> Iterator[Curve]:
    """One curve for each numeric field that scores are broken down by (see `field_tables`).

    The horizontal axis is the field's value; where the field is the budget, it is the measured ratio.
    """
    records = group.records[group.records["variant"] == variant.label]
    for table in tables:
        field = table.by
        values = pd.to_numeric(records[field], errors="coerce")
        ratios = records["ratio"].groupby(values).mean()
        row = table.row(variant)
        assert row is not None
        points = []
        for value in map(float, ratios.index):
            cell = row.cells.get(as_text(records[field][values == value].iloc[0]))
            if cell is not None and not math.isnan(cell.score.value):
                place = {field: value, "ratio": float(ratios[value])}
                points.append(place | cell.score.named("score"))
        if len(points) > 1:
            x = "ratio" if field in _budget_fields(group) and ratios.nunique() > 1 else field
            yield Curve(f"by_{field}", x, tuple(sorted(points, key=lambda point: point[x])))


def memory_lines(group: Group, table: ScoreTable) -> dict[str, list[tuple[float, float]]]:
    """For each method (measured ratio, score), smallest ratio first: across the variants of a sweep, and
    across the budgets that one run goes through. A method that keeps everything is one point."""
    budgets = field_tables(group, _budget_fields(group))
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in table.rows:
        within = [c for c in curves(group, budgets, row.variant) if c.x == "ratio"]
        if within:
            found = [(point["ratio"], point["score"]) for point in within[0].points]
        else:
            found = [(row.ratio, row.total.score.value)]
        lines.setdefault(row.variant.method, []).extend(
            p for p in found if not any(map(math.isnan, p))
        )
    return {method: sorted(points) for method, points in lines.items() if points}


def memory_chart(group: Group, lines: Mapping[str, Sequence[tuple[float, float]]]) -> Any:
    """Score (or error) against memory, one line per method, as one of W&B's own charts."""
    import wandb

    what = "error" if group.meta.lower_is_better else "score"
    scale = 100 if group.meta.score_unit == "fraction" else 1
    return wandb.plot.line_series(
        xs=[[ratio for ratio, _ in points] for points in lines.values()],
        ys=[[scale * score for _, score in points] for points in lines.values()],
        keys=list(lines),
        title=f"{group.task} on {group.model}: {what}{unit_text(group.meta.score_unit)}",
        xname="measured ratio (bytes held / bytes of the exact cache)",
    )


def heatmap_chart(
    group: Group, variants: Sequence[Variant], spec: Mapping[str, Any]
) -> wandb.Plotly:
    """The variants' heatmaps on one scale, with the numbers at hand: a chart that W&B draws itself."""
    import wandb

    return wandb.Plotly(heatmap_figure(group, variants, spec))


def heatmap_figure(group: Group, variants: Sequence[Variant], spec: Mapping[str, Any]) -> go.Figure:
    """The figure of `heatmap_chart`."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    x, y, value = spec["x"], spec["y"], str(spec.get("value", "score"))
    percent = group.meta.score_unit == "fraction"
    grids = [grid_of(group, variant, spec) * (100 if percent else 1) for variant in variants]
    every = np.concatenate([grid.to_numpy(float).ravel() for grid in grids])
    low, high = (0.0, 100.0) if percent else (float(np.nanmin(every)), float(np.nanmax(every)))
    columns = min(4, len(variants))
    rows = math.ceil(len(variants) / columns)
    figure = make_subplots(
        rows,
        columns,
        subplot_titles=[variant.label for variant in variants] if len(variants) > 1 else None,
        shared_xaxes="all",
        shared_yaxes="all",
        horizontal_spacing=0.03,
        vertical_spacing=min(0.12, 0.4 / rows),
        x_title=axis_name(x),
        y_title=axis_name(y),
    )
    label = value.replace("_", " ")
    for i, grid in enumerate(grids):
        cells = [[_number(v) for v in line] for line in grid.to_numpy(float)]
        figure.add_trace(
            go.Heatmap(
                x=[as_text(name) for name in grid.columns],
                y=[as_text(name) for name in grid.index],
                z=cells,
                coloraxis="coloraxis",
                xgap=1,
                ygap=1,
                texttemplate="%{z:.3~g}" if grid.size <= 64 else None,
                hoverongaps=False,
                hovertemplate=f"{x} %{{x}}<br>{y} %{{y}}<br>{label} %{{z:.3g}}<extra></extra>",
            ),
            i // columns + 1,
            i % columns + 1,
        )
    figure.update_xaxes(type="category")
    figure.update_yaxes(type="category", autorange="reversed")  # the prompt's beginning on top
    figure.update_layout(
        title=f"{group.task}, {group.model}"
        + (f": {variants[0].label}" if len(variants) == 1 else ""),
        coloraxis={
            "colorscale": "Viridis",
            "cmin": low,
            "cmax": high,
            "colorbar": {
                "title": {"text": f"{label}{unit_text(group.meta.score_unit)}", "side": "right"}
            },
        },
        width=220 + 260 * columns,
        height=160 + 240 * rows,
    )
    return figure


def examples(group: Group, run: Run) -> wandb.Table:
    """What one run answered (where it answers anything) and scored: its first `MAX_PREDICTIONS`
    examples."""
    import wandb

    fields = [name for name in group.meta.breakdown if name in run.records]
    predicted = run.records["prediction"].notna().any()
    lines = []
    for _, record in run.records.head(MAX_PREDICTIONS).iterrows():
        answers = record["answers"] if isinstance(record["answers"], list) else []
        line: dict[str, Any] = {name: str(record[name]) for name in ("example_id", "dataset")}
        line |= {name: as_text(record[name]) for name in fields}
        if predicted:
            line |= {
                "prompt_tail": clip(record["prompt_tail"], from_end=True),
                "answer": " | ".join(map(str, answers)),
                "prediction": clip(record["prediction"]),
            }
        line |= {name: _number(record[name]) for name in ("score", "ratio")}
        lines.append(line | {"status": str(record["status"]), "error": clip(record["error"])})
    return wandb.Table(columns=list(lines[0]), data=[list(line.values()) for line in lines])


def side_by_side(group: Group) -> wandb.Table | None:
    """One line per example: every variant's prediction, score and ratio; None where nothing is
    predicted.

    Of more than `MAX_PREDICTIONS` examples, as many spread evenly.
    """
    import wandb

    shown, _ = sample_of(group, MAX_PREDICTIONS)
    lines = []
    for example in shown:
        line: dict[str, Any] = {"example_id": example.example_id, "seed": example.seed}
        line |= {"dataset": example.dataset, **example.fields}
        line |= {"prompt_tail": example.prompt_tail, "answer": example.expected}
        answers = {answer.label: answer for answer in example.answers}
        for label in (variant.label for variant in group.variants):
            cells: list[Any] = [None, None, None]
            if (answer := answers.get(label)) is not None:
                failed = "" if answer.status == "ok" else f"({answer.status}) "
                cells = [failed + answer.text, _number(answer.score), _number(answer.ratio)]
            line |= zip((f"{label}: {what}" for what in _ANSWERED), cells, strict=True)
        lines.append(line)
    if not lines:
        return None
    return wandb.Table(columns=list(lines[0]), data=[list(line.values()) for line in lines])


_ANSWERED = ("prediction", "score", "ratio")


def cap_note(count: int, where: str) -> dict[str, Any]:
    """What the summary says of a predictions table that does not hold everything."""
    if count <= MAX_PREDICTIONS:
        return {}
    return {"predictions_note": f"{MAX_PREDICTIONS} of {count} are shown; all are in {where}"}


def as_wandb(
    table: Table, keep: Callable[[Mapping[str, Any]], bool] = lambda _: True
) -> wandb.Table:
    """What a table's files hold, as W&B's table."""
    import wandb

    lines = [line for line in table.records() if keep(line)]
    columns: list[str | int] = list(lines[0]) if lines else [column.key for column in table.columns]
    return wandb.Table(columns=columns, data=[[_plain(x) for x in line.values()] for line in lines])


def image(drawn: Drawn) -> wandb.Image:
    """A figure as W&B's image, with its caption."""
    import wandb
    from PIL import Image

    caption = f"{drawn.title}. {drawn.caption}" if drawn.caption else drawn.title
    return wandb.Image(Image.open(io.BytesIO(drawn.png)), caption=caption)


def _images(name: str, figures: Sequence[Drawn]) -> dict[str, Any]:
    """Figures by a name; from the second on it bears a number."""
    return {f"{name}_{i}" if i > 1 else name: image(drawn) for i, drawn in enumerate(figures, 1)}


def _fields(group: Group) -> list[str]:
    return [name for name in group.meta.breakdown if name in group.records]


def _budget_fields(group: Group) -> set[str]:
    """Record fields whose values are the budgets that one run goes through."""
    scaling = group.meta.figure("scaling") or {}
    return {"rate", str(scaling.get("level", "rate"))}


def _scored(group: Group, variant: Variant) -> bool:
    mine = group.records[group.records["variant"] == variant.label]
    return bool(((mine["status"] == "ok") & mine["score"].notna()).any())


def _number(value: Any) -> float | None:
    return None if value is None or math.isnan(float(value)) else float(value)


def _plain(value: Any) -> Any:
    """A value that W&B's tables take: NaN is nothing, numpy's numbers are Python's."""
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and math.isnan(value) else value
