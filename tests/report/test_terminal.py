"""Tables and the progress line at the widths of terminals: nothing cut, what matters first."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from rich.console import Console
from support.report_runs import lines_records, write_demo, write_run

from kvbench.report.experiment import load_experiment
from kvbench.report.render.terminal import print_tables
from kvbench.report.sections import tables_of
from kvbench.report.stats.estimate import Estimate
from kvbench.report.table import Column, Row, Table
from kvbench.report.tables.score_notes import TIED_NOTE

METHODS = ("exact", "snapkv", "streaming_llm", "balancekv")


def shown(tables: list[Table], width: int) -> list[str]:
    out = io.StringIO()
    print_tables(tables, Console(file=out, width=width, color_system=None))
    return out.getvalue().splitlines()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> list[Table]:
    folder = write_demo(tmp_path_factory.mktemp("demo"), METHODS, ("longeval_lines", "needle"))
    return tables_of(load_experiment(folder))


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_no_line_is_longer_than_the_terminal_and_no_word_is_cut(
    demo: list[Table], width: int
) -> None:
    lines = shown(demo, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for method in METHODS:
        assert len(re.findall(rf"^{method}\b", text, re.M)) >= len(demo)


def test_at_80_columns_a_method_is_one_line_with_interval_difference_and_ratio(
    demo: list[Table],
) -> None:
    lines = shown(demo[:1], 80)
    (line,) = (line for line in lines if line.startswith("streaming_llm"))
    score, difference = re.findall(r"\S+ \[[^]]+\]", line)
    assert difference.startswith("−")
    assert re.search(r"\] +0\.\d+", line), "the ratio"
    assert not any("ms/token" in line for line in lines[:12])
    assert any(line.strip().startswith("On a wider terminal also:") for line in lines)
    wide = shown(demo[:1], 160)
    assert any("ms/token" in line for line in wide)
    assert not any("On a wider terminal" in line for line in wide)
    assert score in "\n".join(wide)


def test_a_failure_is_seen_at_every_width(tmp_path: Path) -> None:
    for method in ("exact", "snapkv"):
        records = lines_records(method)
        if method == "snapkv":
            records[0] |= {"status": "oom", "score": None}
        write_run(tmp_path, task="lines", method=method, records=records)
    tables = tables_of(load_experiment(tmp_path / "demo"))
    for width in (60, 80, 160):
        assert any("1 oom" in line for line in shown(tables, width)), width


def test_the_legend_names_no_mark_that_is_absent(demo: list[Table], tmp_path: Path) -> None:
    alone = tables_of(load_experiment(write_demo(tmp_path, METHODS[:2], ("needle",))))
    for tables in (demo, alone):
        text = "\n".join(shown(tables, 2000))
        body, _, legend = text.partition("\n\n  ")
        assert ("≈" in body) == (TIED_NOTE in legend)
        assert ("†" in body) == ("† some examples" in legend)
        assert ("Δ" in body) == ("Δ is the paired" in legend)


def test_too_many_columns_are_printed_below_one_another_or_without_intervals(
    tmp_path: Path,
) -> None:
    names = [f"dataset_{i}" for i in range(9)]
    columns = (Column("m", "method", "label"), *(Column(n, n, "score", "fraction") for n in names))
    row = Row({"m": "exact", **dict.fromkeys(names, Estimate(0.5, 0.4, 0.6))})
    table = Table("t", "many datasets", columns, (row,))
    for width, intervals, parts in ((220, True, 1), (150, True, 1), (110, False, 1), (50, True, 3)):
        text = "\n".join(shown([table], width))
        assert ("[40.0, 60.0]" in text) == intervals, width
        assert len(re.findall("^exact", text, re.M)) == parts, width
        assert text.count("50.0") == len(names)
