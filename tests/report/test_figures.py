"""Figures: what they show of the numbers, strips of what was kept."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from support.report_runs import (
    HOSTILE,
    NEEDLE_META,
    TASKS,
    lines_records,
    needle_records,
    write_demo,
    write_longbench,
    write_run,
    write_scores,
    write_sweep,
)
from support.tables import group_of

from kvbench.records.figures import Heatmap, figures_in
from kvbench.report.drawing import Drawn, lines, rows
from kvbench.report.figures import (
    PARETO,
    RULE_OF_COLOURS,
    figures_of,
    grid_of,
    heatmaps,
    memory,
    pareto,
)
from kvbench.report.frame import totals_at_rates
from kvbench.report.runs import Group
from kvbench.report.table import in_percent


def drawn(group: Group) -> dict[str, Drawn]:
    figures = figures_of(group)
    return {one.name.removeprefix(f"{group.task}-{group.model}-"): one for one in figures}


def test_every_kind_of_task_has_its_figures_and_they_are_the_same_bytes(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "uniform", "balancekv"))
    names = {
        "longeval_lines": ["ratio", "by-num_lines"],
        "needle": ["ratio", "heatmap", "by-length"],
        "layer_error": ["ratio", "bars", "by-rate"],
        "throughput": [],
    }
    for task, expected in names.items():
        figures = drawn(group_of(folder, task))
        known = {name for several in names.values() for name in several}
        assert [name for name in figures if name in known] == expected
    once, again = (drawn(group_of(folder, "longeval_lines"))["ratio"] for _ in range(2))
    for kind in ("svg", "png", "pdf"):
        assert once.encoded(kind) == again.encoded(kind)
    assert b"/Type3" not in once.encoded("pdf"), "many venues refuse Type 3 fonts"
    assert "by-length_bucket" in drawn(group_of(write_longbench(tmp_path)))


def test_values_that_are_no_numbers_are_not_joined(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = [dict(r) | {"first": 1.0, "last": r["score"]} for r in lines_records(method)]
        meta = TASKS["longeval_lines"][1] | {"measures": ["first", "last"]}
        write_run(tmp_path, method=method, records=records, task_meta=meta)
    figures = drawn(group_of(tmp_path / "demo"))
    for name, joined in (("by-num_lines", True), ("by-measure", False)):
        styles = {line.get_linestyle() for line in figures[name].figure.axes[0].lines}
        assert ("-" in styles) is joined


def test_a_sweep_is_drawn_against_the_measured_ratio_with_its_pareto_set(tmp_path: Path) -> None:
    group = group_of(write_sweep(tmp_path))
    rows = in_percent(totals_at_rates(group))
    mine = rows[rows["label"] == "snapkv"]
    assert list(mine["ratio"]) == pytest.approx([0.62, 0.37, 0.25], abs=0.01)
    assert list(mine["mean"]) == pytest.approx([74.0, 72.0, 74.0])
    (ax,) = drawn(group)["ratio"].figure.axes
    assert ax.get_xscale() == "log"
    ticks = [label.get_text() for label in ax.get_xticklabels()]
    assert ticks == ["0.25\n0.125", "0.37\n0.25", "0.62\n0.5"], "the ratios of the rates"
    by_lines = drawn(group)["by-num_lines"].caption
    assert "At rate 0.125, ratio 0.25, the lowest." in by_lines, "no rate without its ratio"
    pairs = list(zip(rows["ratio"], rows["mean"], strict=True))
    best = [p for p, on in zip(pairs, pareto(pairs, lower=False), strict=True) if on]
    for x, y in pairs:
        beaten = any(a <= x and b >= y and (a, b) != (x, y) for a, b in pairs)
        assert ((x, y) in best) is not beaten
    assert pareto([(1, 3), (2, 2), (2, 4), (3, 1)], lower=True) == [True, True, False, True]


def test_at_most_eight_lines_have_a_colour_and_a_name(tmp_path: Path) -> None:
    """Methods that the papers propose come first, however low their means; means decide the rest. A
    point of the Pareto set whose method is grey has the name beside it."""
    means = {"exact": 1.0, "cheap": 0.1, "subgen": 0.0}
    means |= {f"m{i}": i / 10 for i in range(2, 10)}
    for method, mean in means.items():
        for rate in (0.25, 0.5):
            ratio = rate / (9 if method == "cheap" else 1)
            write_scores(tmp_path, {method: [mean]}, rate=rate, fields={"ratio": ratio})
    one = drawn(group_of(tmp_path / "demo"))["ratio"]
    (legend,) = one.figure.legends
    explained = {text.get_text() for text in legend.get_texts()}
    assert explained == {"2 others", PARETO, "95 % interval"}, "what is not named at a line's end"
    in_colour = [f"m{i}" for i in range(3, 10)]
    named = [text.get_text() for text in one.figure.axes[0].texts]
    assert sorted(named) == ["cheap", "exact", *in_colour, "subgen"]
    assert RULE_OF_COLOURS in one.caption


def test_heatmaps_share_one_scale_and_leave_gaps_where_nothing_was_scored(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = needle_records(method)
        if method == "snapkv":
            for record in records[:2]:
                record |= {"status": "oom", "score": None}
        write_run(tmp_path, method=method, records=records, task_meta=NEEDLE_META)
    group = group_of(tmp_path / "demo")
    spec = group.meta.figure(Heatmap)
    assert spec is not None
    grid = grid_of(group, "snapkv", spec)
    assert (list(grid.columns), list(grid.index)) == ([256, 512, 1024, 2048], [0, 25, 50, 75, 100])
    assert np.isnan(grid.to_numpy(float)[0, 0])
    one = heatmaps(group, spec)
    assert one is not None
    panels = one.figure.axes
    assert [ax.get_title() for ax in panels] == ["exact", "snapkv"]
    assert {ax.collections[0].get_clim() for ax in panels} == {(0.0, 100.0)}
    labels = [label.get_text() for label in panels[0].get_xticklabels()]
    assert labels == ["256", "512", "1024", "2048"]
    numbers = [text.get_text() for text in panels[1].texts]
    assert numbers == [f"{value:.0f}" for value in grid.to_numpy().ravel() if not np.isnan(value)]


def test_records_of_a_probe_that_ended_are_read_as_scores(tmp_path: Path) -> None:
    """0.2.0's error_scaling asked for a figure of slopes, and its `kept` is a number."""
    figure = {"kind": "scaling", "x": "held", "y": "scaled_error", "level": "kept"}
    for method in ("uniform", "balancekv"):
        records = [dict(r) | {"kept": 64} for r in lines_records(method)[:10]]
        write_run(tmp_path, method=method, records=records, task_meta={"figures": [figure]})
    assert "ratio" in drawn(group_of(tmp_path / "demo"))


def test_a_forest_has_its_intervals_along_the_scores_and_a_name_that_no_font_has() -> None:
    with pytest.raises(ValueError, match=r"^task_meta\.figures: 0\.heatmap\.y: Field required$"):
        figures_in({"figures": [{"kind": "heatmap", "x": "length"}]})
    row = {"row": "snapkv", "method": "snapkv", "mean": 50.0, "low": 30.0, "high": 90.0}
    frame = pd.DataFrame([row]).rename(columns={"row": "label"})
    (ax,) = rows({"": frame}, "score", explained={}).axes
    intervals: Any = ax.collections[0]
    (interval,) = intervals.get_segments()
    assert interval.tolist() == [[30.0, 0.0], [90.0, 0.0]]
    figure = Figure()
    figure.suptitle("\U00012000")
    with warnings.catch_warnings(action="error"):
        assert Drawn("name", "title", "caption", lambda above: figure).encoded("png")


def test_panels_show_the_best_methods_of_the_lowest_rate_and_name_the_rest(tmp_path: Path) -> None:
    means = {"exact": 1.0} | {f"m{i:02d}": i / 20 for i in range(18)}
    for method, mean in means.items():
        for rate in (0.5, 0.25):
            records = [
                {
                    "example_id": f"{x}-{y}",
                    "length": x,
                    "depth": y,
                    "score": mean,
                    "ratio": rate + 0.06,
                }
                for x in (256, 512)
                for y in (0, 50)
            ]
            options = {"budget.rate": rate}
            about: Any = {"method": method, "task_meta": NEEDLE_META, "options": options}
            write_run(tmp_path, records=records, **about)
    one = drawn(group_of(tmp_path / "demo"))["heatmap"]
    titles = [ax.get_title() for ax in one.figure.axes if ax.get_title()]
    assert titles[:3] == ["exact", "m17\nrate 0.25\nratio 0.31", "m16\nrate 0.25\nratio 0.31"]
    assert len(titles) == 12
    rest = one.caption.partition(
        "The best at the lowest rate (rate 0.25, ratio 0.31) first. Left out: "
    )[2]
    assert rest.startswith("m06, rate 0.25, ratio 0.31; m05, rate 0.25, ratio 0.31; m04,")
    assert rest.endswith(" and 13 more.")


def test_a_column_without_one_scored_example_still_draws(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = [dict(r) | {"score": None, "status": "oom"} for r in lines_records(method)[:10]]
        write_run(tmp_path, method=method, records=records)
    assert drawn(group_of(tmp_path / "demo")) == {}
    write_run(tmp_path, method="h2o", records=lines_records("h2o"))
    assert all(one.encoded("png") for one in drawn(group_of(tmp_path / "demo")).values())


def points(method: str, x: list[float], mean: list[float]) -> pd.DataFrame:
    frame = pd.DataFrame({"label": method, "method": method, "x": x, "mean": mean})
    return frame.assign(low=frame["mean"] - 5, high=frame["mean"] + 5)


def test_a_figure_is_one_svg_that_a_page_can_hold_beside_others(tmp_path: Path) -> None:
    """It parses, has a title and a description, ids and classes of its own, colours for a dark ground,
    and what records hold as text."""
    group = group_of(write_demo(tmp_path, ("exact", "snapkv", "uniform"), ("needle",)))
    figures = list(drawn(group).values())
    names: list[str] = []
    for one in figures:
        root = ElementTree.fromstring(one.svg)
        assert [child.tag.rpartition("}")[2] for child in root][:2] == ["title", "desc"]
        assert (root[0].text, root.get("role")) == (one.title, "img")
        ids = [str(element.get("id")) for element in root.iter() if element.get("id")]
        linked = re.findall(r'(?:href="#|url\(#)([^")]+)', one.svg)
        assert set(linked) == set(ids)
        names += ids
        classes = {element.get("class") for element in root.iter()} - {None}
        assert len({str(name).split("-")[0] for name in classes}) == 1
        names += map(str, classes)
        light, _, dark = one.svg.partition("prefers-color-scheme:dark")
        assert "fill: #1c2430" in light
        assert "#1c2430" not in dark.partition("</style>")[0]
        assert len(one.svg) < 100_000
    assert len(names) == len(set(names)), "none twice on a page"
    odd = f"<b>{HOSTILE}</b>"
    frame = points("snapkv", [0.2, 0.4], [1.0, 2.0]).assign(label=odd)
    look: Any = {"ticks": lambda _: {0.2: "a"}, "explained": {}}
    figure = Drawn("n", odd, odd, lambda above: lines({"": frame}, "x", "y", **look))
    assert "<b>" not in figure.svg
    assert odd[:30] in "".join(ElementTree.fromstring(figure.svg).itertext())


def test_names_at_the_ends_of_lines_do_not_meet_and_a_short_last_row_keeps_its_ticks() -> None:
    frame = pd.concat([points(f"m{i}", [0.2, 0.4], [0.0, 0.01 * i]) for i in range(8)])
    look: Any = {"ticks": lambda _: {0.2: "0.2", 0.4: "0.4"}, "explained": {}, "log": "x"}
    figure = lines({"": frame}, "x", "y", **look)
    (ax,) = figure.axes
    heights = sorted(text.get_position()[1] for text in ax.texts)
    line = 8 / 72 / (ax.get_position().height * figure.get_figheight())
    assert np.diff(heights).min() > line
    assert 0 <= heights[0] < heights[-1] <= 1
    five = rows({f"task {i}": frame.head(2) for i in range(5)}, "score", explained={})
    shown = [ax.xaxis.get_tick_params()["labelbottom"] for ax in five.axes]
    lowest = [round(ax.get_position().y0, 6) for ax in five.axes]
    columns = lowest.count(max(lowest))
    assert lowest.count(min(lowest)) < columns, "the last row is not full"
    assert sum(shown) == columns


def test_panels_share_an_axis_that_holds_the_points_of_all() -> None:
    low, high = (points("a", [0.2, 0.4], means) for means in ([10.0, 20.0], [90.0, 100.0]))
    look: Any = {"ticks": lambda _: {0.2: "0.2", 0.4: "0.4"}, "explained": {}, "log": "x"}
    figure = lines({"low": low, "high": high}, "x", "y", **look)
    for ax in figure.axes:
        assert ax.get_ylim()[0] < 5
        assert ax.get_ylim()[1] > 105
    # The name of a line that ends at the top of its panel stands above one that ends at the bottom.
    places = [text.get_position()[1] for ax in figure.axes for text in ax.texts]
    assert places[0] < 0.3
    assert places[1] > 0.8


def test_several_tasks_stand_side_by_side_in_one_figure(tmp_path: Path) -> None:
    folder = write_demo(tmp_path, ("exact", "snapkv", "uniform"), ("longeval_lines", "needle"))
    groups = [group_of(folder, task) for task in ("longeval_lines", "needle")]
    one = memory(groups)
    assert one is not None
    assert [ax.get_title() for ax in one.figure.axes] == ["longeval_lines", "needle"]
