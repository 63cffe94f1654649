"""The built report: figures, files, the page in a browser."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from matplotlib.collections import LineCollection, QuadMesh
from matplotlib.colors import to_hex, to_rgb
from matplotlib.container import ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from support.chromium import BROWSER, Chromium
from support.page import Page
from support.report_runs import (
    DATASETS,
    HOSTILE,
    NEEDLE_META,
    THROUGHPUT_META,
    lines_records,
    needle_records,
    throughput_records,
    write_demo,
    write_longbench,
    write_run,
)
from support.report_runs import write_sweep as write_rates

from kvbench.cli.catalogue import catalogue
from kvbench.report.__main__ import main
from kvbench.report.build import ReportPaths, build_report
from kvbench.report.experiment import Group, load_experiment
from kvbench.report.figures import vector
from kvbench.report.figures.canvas import name_lines, new_figure
from kvbench.report.figures.heatmap import heatmaps_alone
from kvbench.report.figures.memory import score_against_ratio
from kvbench.report.figures.style import style_of
from kvbench.report.figures.throughput import throughput, throughput_scaling
from kvbench.report.render import page
from kvbench.report.render.answers import bucket_of, marked, sample_of
from kvbench.report.render.page import MOST_BYTES, render_page
from kvbench.report.render.page import Page as Shown
from kvbench.report.render.summary import summary_of
from kvbench.report.sections import figures_of, section_of, tables_of
from kvbench.report.tables.scores import AVERAGE, score_table

METHODS = ("exact", "snapkv", "h2o", "balancekv")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of an experiment with every kind of task."""
    return write_demo(tmp_path_factory.mktemp("results"), METHODS)


@pytest.fixture(scope="module")
def report(demo: Path) -> ReportPaths:
    """The same, built."""
    return build_report(demo, for_print=True)


def group_of(folder: Path, task: str) -> Group:
    return next(g for g in load_experiment(folder).groups if g.task == task)


def test_everything_is_built_from_the_records(demo: Path, report: ReportPaths) -> None:
    assert report.page == demo / "report.html"
    assert report.warnings == ()
    names = {path.name for path in report.figures}
    for stem in ("needle-recall_mini-heatmap", "needle-recall_mini-heatmap-snapkv",
                 "longeval_lines-recall_mini-by-num_lines", "layer_error-recall_mini-bars",
                 "throughput-recall_mini-throughput"):  # fmt: skip
        assert {f"{stem}.png", f"{stem}.pdf"} <= names
    for path in report.figures:
        start = path.read_bytes()[:4]
        assert start == (b"\x89PNG" if path.suffix == ".png" else b"%PDF")
    tables = {path.name for path in report.tables}
    for suffix in (".csv", ".md", ".tex"):
        assert f"longeval_lines-recall_mini{suffix}" in tables
        assert f"longeval_lines-recall_mini-by-num_lines{suffix}" in tables
        assert f"throughput-recall_mini-timing{suffix}" in tables
    assert "overview-recall_mini.md" in tables
    assert all(path.stat().st_size for path in (*report.tables, *report.figures))


def test_the_same_records_give_the_same_files(tmp_path: Path) -> None:
    contents = []
    for _ in range(2):
        folder = write_demo(tmp_path / "results", ("exact", "balancekv"), ("needle", "layer_error"))
        paths = build_report(folder, for_print=True)
        contents.append({p: p.read_bytes() for p in (paths.page, *paths.tables, *paths.figures)})
        shutil.rmtree(tmp_path / "results")
    assert contents[0] == contents[1]


def test_model_output_stays_text(report: ReportPaths) -> None:
    text = report.page.read_text(encoding="utf-8")
    assert HOSTILE not in text
    shown = re.sub("</?mark>", "", text)  # what differs from the baseline's answer
    assert "&lt;script&gt;document.title=" in shown  # the sample on the page has it
    page = Page(text)
    assert len(page.scripts) == 1  # its own
    assert page.handlers == []
    assert all(address.startswith("data:image/png;base64,") for address in page.fetched)


def test_failures_and_provenance_are_on_the_page(report: ReportPaths) -> None:
    text = report.page.read_text(encoding="utf-8")
    assert "2 failed examples" in text
    assert "48/50" in text
    assert "2 oom" in text
    assert "python -m kvbench experiment=demo" in text
    assert "0123abcd" in text
    assert "torch 2.13.0" in text
    assert not re.search(
        r"\b(nan|None)\b", re.sub(r"<pre>.*?</pre>|data:[^\"]*", "", text, flags=re.S)
    )


def test_heatmaps_share_one_scale(demo: Path) -> None:
    group = group_of(demo, "needle")
    spec = group.meta.figure("heatmap")
    assert spec is not None
    together = figures_of(group, [score_table(group)])[0]
    images = [ax.collections[0] for ax in together.figure.axes[: len(METHODS)]]
    assert all(isinstance(image, QuadMesh) for image in images)
    assert {image.get_clim() for image in images} == {(0.0, 100.0)}
    alone = heatmaps_alone(group, [group.variants[0]], spec)[0]
    ax = alone.figure.axes[0]
    assert ax.collections[0].get_clim() == (0.0, 100.0)
    assert ax.get_xlabel() == "context length (tokens)"
    assert ax.get_ylabel() == "depth (%)"
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # depth 0 on top
    exact = np.asarray(ax.collections[0].get_array())
    records = group.records[group.records["variant"] == "exact"]
    cell = records[(records["length"] == 1024) & (records["depth"] == 50)]["score"].mean()
    assert exact[2, 2] == pytest.approx(100 * cell)


def test_bars_show_mean_and_deviation_over_seeds(demo: Path) -> None:
    group = group_of(demo, "layer_error")
    drawn = next(f for f in figures_of(group, [score_table(group)]) if f.name.endswith("-bars"))
    panels = [ax for ax in drawn.figure.axes if ax.patches]
    assert [ax.get_title() for ax in panels] == ["layer 1", "layer 2", "layer 5"]
    assert [label.get_text() for label in panels[0].get_xticklabels()] == [
        "1/2",
        "1/4",
        "1/8",
        "1/16",
    ]
    variants = [variant.label for variant in group.variants]
    part = group.records[(group.records["variant"] == variants[0]) & (group.records["layer"] == 1)]
    seeds = part[part["rate"] == 0.5].groupby("seed")["score"].mean()
    assert cast(Rectangle, panels[0].patches[0]).get_height() == pytest.approx(seeds.mean())
    segment = cast(LineCollection, panels[0].collections[0]).get_segments()[0]
    assert (segment[1][1] - segment[0][1]) / 2 == pytest.approx(seeds.std())
    assert "standard deviation over 4 seeds" in drawn.caption


def test_a_method_has_one_colour_everywhere(demo: Path, tmp_path: Path) -> None:
    colors = set()
    few = write_demo(tmp_path, ("snapkv", "exact"), ("longeval_lines",))
    for folder in (demo, few):
        group = group_of(folder, "longeval_lines")
        for drawn in figures_of(group, [score_table(group), score_table(group, "num_lines")]):
            for ax in drawn.figure.axes:
                handles, labels = ax.get_legend_handles_labels()
                colors |= {
                    to_hex(cast(ErrorbarContainer, handle)[0].get_color())
                    for handle, label in zip(handles, labels, strict=True)
                    if label == "snapkv"
                }
    assert {color.upper() for color in colors} == {style_of("snapkv").color.upper()}
    assert style_of("a_new_method") == style_of("a_new_method")


def test_methods_that_ship_look_different() -> None:
    names = [*catalogue("methods"), "hf_dynamic", "hf_static", "hf_quantized", "kvpress_snapkv"]
    styles = [style_of(name) for name in names]
    assert len(set(styles)) == len(names)
    near = {("#44AA99", "#44AA99")}  # `fixed` and `pyramidkv_released` are in no table together
    for one, other in itertools.combinations(sorted(style.color for style in styles), 2):
        distance = np.linalg.norm(np.subtract(to_rgb(one), to_rgb(other)))
        assert distance > 0.1 or (one, other) in near, (one, other)


def test_fonts_in_figures_are_truetype(report: ReportPaths) -> None:
    path = next(path for path in report.figures if path.name.endswith("-difference.pdf"))
    assert b"/Type3" not in path.read_bytes()
    assert b"/CIDFontType2" in path.read_bytes()


def test_a_rate_sweep_is_drawn_against_the_measured_ratio(tmp_path: Path) -> None:
    (group,) = load_experiment(write_rates(tmp_path)).groups
    drawn = score_against_ratio(group, score_table(group))
    ax = drawn.figure.axes[0]
    assert ax.get_xlabel().startswith("measured ratio")
    handles, labels = ax.get_legend_handles_labels()
    assert labels == ["exact", "uniform", "snapkv", "balancekv"]
    assert cast(Line2D, handles[0]).get_linestyle() == "--"  # the exact cache is a line across
    assert ax.get_legend() is None
    assert [text.get_text() for text in ax.texts].count("snapkv") == 1  # named where it ends
    (by_lines,) = [
        f
        for f in figures_of(group, [score_table(group), score_table(group, "num_lines")])
        if f.name.endswith("num_lines")
    ]
    assert len(by_lines.figure.axes) == 3  # a panel per rate


def test_at_one_rate_methods_are_rows_the_best_first(demo: Path) -> None:
    group = group_of(demo, "longeval_lines")
    ax = score_against_ratio(group, score_table(group)).figure.axes[0]
    names = [label.get_text() for label in ax.get_yticklabels()]
    means = group.records.groupby("variant")["score"].mean()
    assert names == sorted(names, key=lambda name: -means[name])
    assert {text.get_text()[:6] for text in ax.texts} == {"ratio "}


def test_errors_of_many_rates_are_drawn_against_the_measured_ratio(demo: Path) -> None:
    group = group_of(demo, "layer_error")
    drawn = section_of(group, demo).memory
    assert drawn is not None
    assert drawn.name.endswith("-ratio")
    ax = drawn.figure.axes[0]
    assert (ax.get_xscale(), ax.get_yscale()) == ("log", "log")
    handles, labels = ax.get_legend_handles_labels()
    assert labels == [variant.label for variant in group.variants]
    line = cast(ErrorbarContainer, handles[-1])[0]
    records = group.records[group.records["variant"] == labels[-1]].groupby("rate")
    assert list(line.get_xdata()) == pytest.approx(list(records["ratio"].mean()))
    assert list(line.get_ydata()) == pytest.approx(list(records["score"].mean()))


def test_every_dataset_has_its_paired_difference(tmp_path: Path) -> None:
    (group,) = load_experiment(write_longbench(tmp_path, 6)).groups
    table = score_table(group)
    drawn = next(f for f in figures_of(group, [table]) if f.name.endswith("-by-dataset"))
    axes = drawn.figure.axes
    names = [label.get_text() for label in axes[0].get_yticklabels()]
    assert names == [*DATASETS, AVERAGE]  # the order of the task, which is the paper's
    assert [ax.get_title() for ax in axes] == [
        variant.label for variant in group.variants if variant.method != "exact"
    ]
    row = next(row for row in table.rows if row.variant.label == axes[0].get_title())
    line = axes[0].get_lines()[-1]
    expected = [d.value * 100 for n in names if (d := row.cells[n].difference)]
    assert list(line.get_xdata()) == pytest.approx(expected)
    assert list(line.get_ydata()) == list(range(len(names)))  # on their ticks


def test_points_stay_on_their_ticks(demo: Path) -> None:
    group = group_of(demo, "longeval_lines")
    tables = [score_table(group), score_table(group, "num_lines")]
    drawn = next(f for f in figures_of(group, tables) if f.name.endswith("by-num_lines"))
    handles, _ = drawn.figure.axes[0].get_legend_handles_labels()
    ticks = list(drawn.figure.axes[0].get_xticks())
    assert all(list(cast(ErrorbarContainer, h)[0].get_xdata()) == ticks for h in handles)


def test_a_figure_with_many_lines_names_them_at_their_ends() -> None:
    for count, legends in ((10, 1), (11, 0)):
        figure = new_figure(6, 4)
        ax = figure.subplots()
        for i in range(count):
            ax.plot([0, 1], [0, i % 3], label=f"line {i}")
        name_lines(figure, [ax])
        assert len(figure.legends) == legends
        texts = [text for text in ax.texts if text.get_text().startswith("line ")]
        assert len(texts) == (0 if legends else count)
    heights = sorted(text.xyann[1] for text in texts)
    assert np.diff(heights).min() > 0.02  # none on top of another


@pytest.mark.parametrize("length", [4, 24, 60])
def test_a_legend_is_no_wider_than_its_figure(length: int) -> None:
    figure = new_figure(6, 4)
    ax = figure.subplots()
    for letter in "abcde":
        ax.plot([0, 1], [0, 1], label=letter * length)
    name_lines(figure, [ax])
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 5
    figure.canvas.draw()
    shown = legend.get_window_extent()
    assert shown.x0 >= 0
    assert shown.x1 <= figure.bbox.width


def test_time_and_memory_are_bars_and_what_failed_is_named(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = throughput_records(method)
        if method == "exact":
            for record in records:
                record |= {"status": "oom", "score": None, "error": "out of memory"}
        write_run(tmp_path, method=method, records=records, task_meta=THROUGHPUT_META)
    (group,) = load_experiment(tmp_path / "demo").groups
    figure = throughput(group).figure
    assert [ax.get_xlabel().split(" (")[0] for ax in figure.axes] == [
        "seconds: prefill + compress",
        "new tokens per second while decoding",
        "peak memory",
    ]
    assert [text.get_text().strip() for text in figure.axes[0].texts] == ["5 oom"]
    widths = [cast(Rectangle, bar).get_width() for bar in figure.axes[2].patches]
    assert widths[0] == pytest.approx(9e8 / 2**30)


def test_time_against_length_ends_where_a_method_failed(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = [
            {
                "example_id": f"{n}/{run}",
                "dataset": f"n{n}",
                "prompt_tokens": n,
                "latency_s": n / 1000 + run,
                "decode_tokens_per_s": 10.0,
                "score": 10.0,
            }
            | ({"status": "oom", "score": None} if method == "exact" and n == 4096 else {})
            for n in (1024, 2048, 4096)
            for run in range(3)
        ]
        write_run(tmp_path, method=method, records=records, task_meta=THROUGHPUT_META)
    (group,) = load_experiment(tmp_path / "demo").groups
    drawn = throughput_scaling(group)
    assert drawn is not None
    assert [ax.get_ylabel() for ax in drawn.figure.axes] == [
        "seconds in all",
        "new tokens per second while decoding",
    ]
    handles, labels = drawn.figure.axes[0].get_legend_handles_labels()
    assert labels == ["exact", "snapkv"]
    exact, snapkv = (cast(ErrorbarContainer, handle)[0] for handle in handles)
    assert list(exact.get_xdata()) == [1024, 2048]
    assert list(snapkv.get_ydata()) == pytest.approx([2.024, 3.048, 5.096])
    kept = group.records[group.records["prompt_tokens"] < 4096]
    assert throughput_scaling(replace(group, records=kept)) is None


def test_a_narrow_range_of_scores_fills_the_figure(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = [
            {"example_id": f"{n}-{i}", "num_lines": n, "score": 0.5 + 0.01 * (i % 3)}
            for n in (10, 20)
            for i in range(9)
        ]
        write_run(tmp_path, method=method, records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    figures = figures_of(group, [score_table(group), score_table(group, "num_lines")])
    low, high = figures[0].figure.axes[0].get_ylim()
    assert 45 < low < 50 < 52 < high < 56


def test_a_column_without_one_scored_example_still_draws(tmp_path: Path) -> None:
    records = needle_records("exact")
    for record in records:
        if record["length"] == 2048:
            record |= {"status": "oom", "score": None, "error": "out of memory"}
    write_run(tmp_path, task="needle", records=records, task_meta=NEEDLE_META)
    failed = [
        {"example_id": "x", "status": "error", "error": "<b>boom</b>", "length": 1, "depth": 0}
    ]
    write_run(tmp_path, task="all_failed", records=failed, task_meta=NEEDLE_META)
    write_run(tmp_path, task="nothing_yet", records=[])
    text = build_report(tmp_path / "demo").page.read_text(encoding="utf-8")
    assert "&lt;b&gt;boom&lt;/b&gt;" in text


def test_the_sample_of_predictions_is_spread_and_says_so(demo: Path) -> None:
    shown, total = sample_of(group_of(demo, "longeval_lines"), limit=10)
    assert (len(shown), total) == (10, 50)
    assert len({example.example_id for example in shown}) == 10
    assert {answer.label for answer in shown[0].answers} == set(METHODS)
    wrong = [a for e in shown for a in e.answers if a.verdict == "wrong" and a.method != "exact"]
    assert all(answer.differs for answer in wrong if answer.text != "<41077>")


def test_every_dataset_and_length_is_in_the_sample(tmp_path: Path) -> None:
    (group,) = load_experiment(write_longbench(tmp_path, 30, ("exact", "snapkv"))).groups
    shown, total = sample_of(group)
    assert (len(shown), total) == (60, 13 * 30)
    kinds = Counter((example.dataset, example.fields["length_bucket"]) for example in shown)
    assert len(kinds) == 13 * 3
    assert max(kinds.values()) - min(kinds.values()) <= 1


def test_prompts_are_filtered_by_length(demo: Path) -> None:
    shown, _ = sample_of(group_of(demo, "longeval_lines"))
    assert {e.fields["prompt_tokens"] for e in shown} == {"below 1k", "1–2k"}
    assert "prompt_tokens" not in sample_of(group_of(demo, "needle"))[0][0].fields  # has lengths
    assert [bucket_of(n) for n in (999, 1000, 5000, 130_000, float("nan"))] == [
        "below 1k",
        "1–2k",
        "4–8k",
        "128k and more",
        "",
    ]


def test_words_that_the_baseline_has_not_are_marked() -> None:
    pieces = marked("In 1999, Paris was larger.", "In 1998, Paris was large.")
    assert [text for text, new in pieces if new] == ["1999", "larger"]
    assert "".join(text for text, _ in pieces) == "In 1999, Paris was larger."
    assert marked("same", "same") == (("same", False),)
    assert marked("", "x") == ()


def test_a_large_study_stays_small_and_quick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)
    folder = write_longbench(tmp_path, 40, models=("a", "b"))  # 6,240 records
    start = time.process_time()
    paths = build_report(folder)
    assert time.process_time() - start < 40
    text = paths.page.read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    assert text.count("of 520 examples") == 2


def test_views_to_print_cover_every_group(demo: Path) -> None:
    titles = [table.title for table in tables_of(load_experiment(demo))]
    assert any("minimum / median" in title for title in titles)
    assert titles[-1] == "recall_mini: all tasks"
    assert len(titles) == 5


def test_the_command_rebuilds_and_reports_errors(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(demo.parent / "nowhere")]) == 1
    assert (
        capsys.readouterr().err
        == f"kvbench-report: no results in {demo.parent / 'nowhere'}: the folder does not exist\n"
    )
    assert main([str(demo.parent)]) == 1
    assert capsys.readouterr().err.endswith("manifest.json; experiments in it: demo\n")
    small = write_demo(tmp_path, ("exact", "snapkv"), ("longeval_lines",))
    assert main([str(small), "--list"]) == 0
    printed = set(capsys.readouterr().out.splitlines())
    written = {str(path) for path in small.rglob("*.*") if path.suffix not in (".jsonl", ".json")}
    assert printed == {path for path in written if not Path(path).name.startswith(".")}
    assert {Path(path).suffix for path in printed} == {
        *(".html", ".pdf", ".png", ".csv", ".md", ".tex")
    }


def test_a_report_with_no_published_table_has_no_such_section(demo: Path) -> None:
    experiment = load_experiment(demo)
    sections = [section_of(experiment.groups[0], demo)]
    page = render_page(experiment, Shown(summary_of(experiment, sections), sections))
    assert "Published numbers" not in page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if BROWSER is None:
        pytest.skip("needs Chromium on PATH (Debian: apt-get install chromium)")
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def test_the_page_in_a_browser(browser: Chromium, report: ReportPaths) -> None:
    browser.open(report.page)
    assert browser.evaluate("document.title") == "demo · kvbench"  # the hostile script did not run
    assert browser.complaints == []
    assert [a for a in browser.requests if not a.startswith(("file://", "data:"))] == []

    column = ".overview table"
    first = (
        f"Array.from(document.querySelectorAll('{column} tbody th')).map(t => t.textContent.trim())"
    )
    click = f"document.querySelectorAll('{column} thead button')[2].click()"
    assert browser.evaluate(first) == list(METHODS)
    browser.evaluate(click)
    best_first = browser.evaluate(first)
    assert best_first[0] == "exact"
    assert best_first != list(METHODS)
    browser.evaluate(click)
    assert browser.evaluate(first) == best_first[::-1]

    section = "document.querySelector('.predictions')"
    browser.evaluate(
        f"{section}.querySelector('select').value = '20';"
        f"{section}.dispatchEvent(new Event('change'))"
    )
    visible = f"Array.from({section}.querySelectorAll('.example:not([hidden])'))"
    assert set(browser.evaluate(f"{visible}.map(e => JSON.parse(e.dataset.fields).num_lines)")) == {
        "20"
    }
    before = browser.evaluate(f"{visible}.length")
    browser.evaluate(
        f"{section}.querySelector('input').checked = true;"
        f"{section}.dispatchEvent(new Event('change'))"
    )
    assert 0 < browser.evaluate(f"{visible}.length") < before or before <= 1


def test_cells_are_sorted_as_numbers(browser: Chromium, report: ReportPaths) -> None:
    browser.open(report.page)
    cells = [*("858 MiB", "3.00 GiB", "512 B", "12,345", "−3.1 [−5.0, −1.2] ≈", "<0.001")]
    cells += ["∞", "100.0 [99.0, 100.0]", "50.0", "9.5e-05"]
    numbers = browser.evaluate(f"{cells}.map(numberOf).map(x => x === Infinity ? 'inf' : x)")
    assert numbers[:3] == [858 * 2**20, 3 * 2**30, 512]
    assert numbers[3:] == [12345, -3.1, 0.001, "inf", 100, 50, 9.5e-05]
    browser.evaluate(
        "window.table = Array.from(document.querySelectorAll('details table')).find("
        "t => t.caption && t.caption.textContent.includes('are shown to differ'));"
        "window.at = Array.from(table.tHead.rows[0].cells).findIndex("
        "c => c.textContent.startsWith('needed'));"
        "table.tHead.rows[0].cells[at].querySelector('button').click()"
    )
    texts = browser.evaluate("Array.from(table.tBodies[0].rows).map(r => r.cells[at].textContent)")
    needed = [float("inf") if t == "∞" else float(t.replace(",", "")) for t in texts if t != "–"]
    assert len(needed) == 3
    assert needed == sorted(needed, reverse=True)


def test_groups_of_rows_are_sorted_by_themselves(browser: Chromium, tmp_path: Path) -> None:
    browser.open(build_report(write_longbench(tmp_path, 2, ("exact", "snapkv"), ("a", "b"))).page)
    table = "document.querySelector('.overview table')"
    click = f"{table}.tHead.rows[0].cells[0].querySelector('button').click()"
    rows = f"Array.from({table}.rows).slice(1).map(r => r.cells[0].textContent)"
    browser.evaluate(click)
    assert browser.evaluate(rows) == ["a", "exact", "snapkv", "b", "exact", "snapkv"]
    browser.evaluate(click)
    assert browser.evaluate(rows) == ["a", "snapkv", "exact", "b", "snapkv", "exact"]


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_its_window(
    browser: Chromium, report: ReportPaths, tmp_path: Path, width: int
) -> None:
    browser.open(report.page, width, dark=width == 400)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    dark = browser.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 29)"
    assert dark == (width == 400)
    browser.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_a_card_shows_where_the_prompt_holds_the_answer(tmp_path: Path) -> None:
    held = "line brave-otter: REGISTER_CONTENT is <41077>"
    for method in ("exact", "snapkv"):
        records = [r | {"evidence": held} for r in lines_records(method)[:4]]
        write_run(tmp_path, method=method, records=records)
    (group,) = load_experiment(tmp_path / "demo").groups
    shown, _ = sample_of(group)
    pieces = shown[0].evidence
    assert "".join(text for text, _ in pieces) == held
    assert [text for text, found in pieces if found] == ["41077"]
    text = build_report(tmp_path / "demo").page.read_text(encoding="utf-8")
    assert "REGISTER_CONTENT is &lt;<mark>41077</mark>&gt;" in text


def test_a_page_without_room_leaves_out_the_largest_figures_only(
    demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_report(demo).page.read_text(encoding="utf-8")
    figures = re.findall(r"<svg.*?</svg>", whole, re.S)
    largest = max(figures, key=len)
    monkeypatch.setattr(page, "_EXAMPLES", page._EXAMPLES[-1:])
    fewest = build_report(demo).page.stat().st_size
    monkeypatch.setattr(page, "MOST_BYTES", fewest - 10)
    text = build_report(demo).page.read_text(encoding="utf-8")
    assert len(text.encode()) <= fewest - 10
    assert text.count("<svg") == len(figures) - 1
    assert largest not in text
    assert text.count("1 figure more, for which this page has no room") == 1


def test_lines_along_an_axis_keep_their_corners() -> None:
    drawn = vector._straight(
        re.match(r".*", "M 1 2L 5 2L 5 8.5L 1 8.5L 1 2z M 0 0L 3 4L 3 6L 4 6")  # type: ignore[arg-type]
    )
    assert drawn == "M1 2H5V8.5H1V2zM0 0L3 4V6H4"
