"""The measured ratio stands beside a rate wherever a report names one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import (
    ERROR_META,
    LINES_META,
    error_records,
    lines_records,
    write_longbench,
    write_run,
    write_sweep,
)
from support.tables import group_of, heads

from kvbench.report.build import build_report, tables_to_print
from kvbench.report.ratios import rate_in_title, rate_text, rate_texts, ratio_text
from kvbench.report.runs import load_experiment

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


def text_of(page: Path) -> str:
    """What a reader sees of a page, without its scripts, pictures and the commands of its runs."""
    html = page.read_text(encoding="utf-8")
    html = re.sub(r"<(script|style|pre)\b.*?</\1>", "", html, flags=re.S)
    return re.sub(r"<[^>]*>", " ", html)


def test_a_page_names_no_rate_alone(tmp_path: Path) -> None:
    """Nor do its figures, nor the tables of the terminal: of a sweep, of a probe that measures several
    rates in one run, and of several datasets."""
    sweep = write_sweep(tmp_path)
    for method in ("exact", "balancekv", "uniform"):
        records = error_records(method)
        about: Any = {"experiment": "sweep", "task_meta": ERROR_META}
        write_run(tmp_path, task="layer_error", method=method, records=records, **about)
    over_rates = rate_in_title(group_of(sweep, "layer_error"))
    assert over_rates == ", mean over rates 0.5, 0.25, 0.125 and 0.0625"
    for folder in (sweep, write_longbench(tmp_path)):
        report = build_report(folder)
        text = text_of(report.page)
        assert re.search(r"rate 0\.25, ratio 0\.\d\d", text)
        assert not NO_RATIO.findall(text)
        for one in report.drawn:
            titles = [ax.get_title() for ax in one.figure.axes]
            assert not NO_RATIO.findall(" ".join(titles).replace("\n", " "))
        for table in tables_to_print(load_experiment(folder)):
            said = [table.title, *heads(table), *table.answer, *table.notes]
            said += [heading for heading, _ in table.groups()]
            assert not NO_RATIO.findall("\n".join(said))


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
