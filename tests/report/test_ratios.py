"""The measured ratio stands beside a rate wherever a report names one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.golden_text import TEXTS
from support.report_runs import LINES_META, lines_records, write_run
from support.tables import group_of, heads

from kvbench.report.build import tables_to_print
from kvbench.report.ratios import rate_text, rate_texts, ratio_text
from kvbench.report.runs import load_experiment

TABLES = ("datasets", "leaderboards", "probes", "rates")
NO_RATIO = re.compile(r"rate 0\.\d+(?!\d)(?!, ratio)")
"""A rate without a ratio behind it."""


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([0.3051], "ratio 0.31"),
        ([0.301, 0.299], "ratio 0.30"),
        ([0.31, 0.28, float("nan")], "ratio 0.28 to 0.31"),
        ([0.0426, 1.0], "ratio 0.043 to 1.0"),
        ([float("nan")], ""),
        ([], ""),
    ],
)
def test_ratios_as_text(ratios: list[float], text: str) -> None:
    assert ratio_text(ratios) == text
    assert rate_text("rate 0.25", ratios) == ("rate 0.25" + (f", {text}" if text else ""))


@pytest.mark.parametrize("name", ["page.txt", *(f"{name}.md" for name in TABLES)])
def test_a_page_and_its_tables_name_no_rate_alone(name: str) -> None:
    """Of a sweep, of a probe that measures several rates in one run, of several tasks and datasets."""
    text = (TEXTS / name).read_text(encoding="utf-8")
    assert re.search(r"rate 0\.\d+, ratio 0\.\d\d", text)
    assert not NO_RATIO.findall(text)


def test_methods_of_two_rates_stand_apart_without_the_exact_cache(tmp_path: Path) -> None:
    for rate in (0.5, 0.25):
        options = {"budget.rate": rate}
        records = lines_records("snapkv", rate)
        about: Any = {"method": "snapkv", "task_meta": LINES_META, "options": options}
        write_run(tmp_path, records=records, **about)
    table, over_rates = tables_to_print(load_experiment(tmp_path / "demo"))
    texts = rate_texts(group_of(tmp_path / "demo"))
    assert [heading for heading, _ in table.groups()] == list(texts.values())
    assert heads(over_rates) == ["method", *texts.values()], "no 95 % without exact"
