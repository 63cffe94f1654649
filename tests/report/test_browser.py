"""The page in a real browser: it asks no network for anything, its own policy refuses nothing, axe-core
finds nothing, and clicks do what they say.

Chromium (Debian: ``apt-get install chromium``) opens copies of the page that have one more script, which
clicks and writes what it found into the page; its hash joins the page's policy. axe-core is a file of
npm (``npm install --no-save axe-core``), or the one that KVBENCH_AXE names.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT
from support.report_runs import ERROR_META, error_records, lines_records, write_demo, write_run

from kvbench.report.build import build_report
from kvbench.report.compare import comparison_of, write_comparison
from kvbench.report.page import write_index
from kvbench.report.runs import load_experiment

AXE = Path(os.environ.get("KVBENCH_AXE", ROOT / "node_modules" / "axe-core" / "axe.min.js"))
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=20000",
)
DARK = "--blink-settings=preferredColorScheme=0"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium (Debian: apt-get install chromium)"),
]


def run_in(page: Path, scripts: Sequence[str], *options: str) -> tuple[Any, list[str]]:
    """Open a copy of a page with more scripts.

    Returns:
        What they left as JSON in ``document.body.dataset.found``, and what the browser logged.
    """
    text = page.read_text()
    place = page.with_name(f"tried-{page.name}")
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        text = text.replace("; script-src", f"; script-src 'sha256-{digest}'", 1)
    begin, end, rest = text.rpartition("</body>")
    added = "".join(f"<script>{script}</script>" for script in scripts)
    place.write_text(begin + added + end + rest)
    profile = page.parent / "profile"
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, *QUIET, *options, f"--user-data-dir={profile}", "--dump-dom", f"file://{place}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    logged = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    found = re.search(r'data-found="([^"]*)"', done.stdout)
    return json.loads(html.unescape(found[1])) if found else None, logged


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of several tasks and rates, a comparison, and the page that links experiments."""
    results = tmp_path_factory.mktemp("results")
    folder = write_demo(results, ("exact", "snapkv", "h2o", "balancekv", "uniform"))
    for rate in (0.5, 0.125):
        for method in ("exact", "snapkv", "h2o", "balancekv"):
            records, options = lines_records(method, rate), {"budget.rate": rate}
            write_run(
                results, task="longeval_lines", method=method, records=records, options=options
            )
    for method in ("exact", "uniform", "balancekv", "attention_matching_turboquant"):
        errors: Any = {"records": error_records(method), "task_meta": ERROR_META}
        write_run(results, experiment="errors", task="layer_error", method=method, **errors)
    pages = {
        "report": build_report(folder).page,
        "errors": build_report(results / "errors").page,
        "index": write_index([folder, results / "errors"]),
    }
    compared = comparison_of(load_experiment(folder), load_experiment(folder))
    return pages | {"compare": write_comparison(compared, results / "compare")[0]}


RUN_AXE = """
axe.run(document, {resultTypes: ["violations"]}).then((result) => {
  document.body.dataset.found = JSON.stringify(result.violations.map((rule) =>
    [rule.id, rule.help, rule.nodes.slice(0, 3).map((node) => node.html.slice(0, 200))]));
});
"""
OPEN_ALL = 'for (const one of document.querySelectorAll("details")) one.open = true;'


@pytest.mark.skipif(not AXE.is_file(), reason="no axe-core (npm install --no-save axe-core)")
@pytest.mark.parametrize("look", [(), (DARK,), ("--window-size=390,844",)], ids=["", "dark", "390"])
@pytest.mark.parametrize("name", ["report", "compare", "index"])
def test_axe_finds_nothing(pages: dict[str, Path], name: str, look: tuple[str, ...]) -> None:
    scripts = [OPEN_ALL, AXE.read_text(), RUN_AXE]
    found, _ = run_in(pages[name], scripts, *look)
    assert found == []


@pytest.mark.parametrize("name", ["report", "compare", "index"])
def test_a_page_makes_no_request_and_logs_nothing(pages: dict[str, Path], name: str) -> None:
    script = """document.body.dataset.found = JSON.stringify(
      performance.getEntriesByType("resource").map((one) => one.name)
        .filter((one) => !one.startsWith("data:")));"""
    found, logged = run_in(pages[name], [script])
    assert (found, logged) == ([], [])


CLICKS = (ROOT / "tests" / "data" / "page_clicks.js").read_text()


@pytest.fixture(scope="module")
def clicked(pages: dict[str, Path]) -> dict[str, Any]:
    seen, _ = run_in(pages["report"], [CLICKS])
    return seen


def test_the_leaderboard_is_at_one_rate_until_another_is_chosen(clicked: dict[str, Any]) -> None:
    assert clicked["boardAtOneRate"] == ["rate 0.25, ratio 0.25 to 0.37"], "the middle one at first"
    assert clicked["groups"] == len({0.5, 0.25, 0.125, 0.0625})


def test_a_click_on_a_head_sorts_by_its_column(clicked: dict[str, Any]) -> None:
    first, *names = clicked["names"]
    assert first == "exact"
    assert names == sorted(names), "A to Z first"
    assert clicked["backwards"][1:] == names[::-1]
    assert clicked["order"] == "descending"
    assert clicked["together"] == sorted(clicked["together"], reverse=True), "across rates"
    assert len(clicked["together"]) > 9


@pytest.mark.parametrize("look", [(), (DARK,)], ids=["light", "dark"])
def test_the_text_of_figures_is_readable_on_the_ground(
    pages: dict[str, Path], look: tuple[str, ...]
) -> None:
    script = """
      const sum = (color) => color.match(/[0-9]+/g).slice(0, 3).reduce((a, b) => a + Number(b), 0);
      const ground = sum(getComputedStyle(document.body).backgroundColor);
      const inCells = ["rgb(253, 253, 254)", "rgb(10, 10, 11)"];
      const colors = [...document.querySelectorAll("svg text")]
        .map((one) => getComputedStyle(one).fill).filter((one) => !inCells.includes(one));
      const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
      document.body.dataset.found = JSON.stringify({
        figures: document.querySelectorAll("svg").length,
        near: colors.filter((one) => Math.abs(sum(one) - ground) < 250).length,
        twice: ids.length - new Set(ids).size,
      });"""
    found, _ = run_in(pages["report"], [script], *look)
    assert found["figures"] > 5
    assert (found["near"], found["twice"]) == (0, 0)


@pytest.mark.parametrize("name", ["report", "errors"])
def test_a_phone_shows_the_difference_and_the_page_does_not_scroll_sideways(
    pages: dict[str, Path], name: str
) -> None:
    """Chromium's windows are 500 pixels wide at least: the page's body is made narrower."""
    script = """
      document.body.style.width = "390px";
      document.body.style.margin = 0;
      dispatchEvent(new Event("resize"));
      for (const one of document.querySelectorAll("details")) one.open = true;
      const heads = [...document.querySelectorAll("th")]
        .filter((one) => /^[Δ×] exact/.test(one.textContent) && one.checkVisibility());
      setTimeout(() => {
        document.body.dataset.found = JSON.stringify({
          width: document.body.scrollWidth,
          right: heads.map((one) => one.getBoundingClientRect().right),
          figures: [...document.querySelectorAll("figure")].filter((one) => one.checkVisibility())
            .map((one) => one.getBoundingClientRect().width),
        });
      }, 1000);"""
    found, _ = run_in(pages[name], [script], "--window-size=390,844")
    assert found["width"] <= 390
    assert found["right"]
    assert max(found["right"]) <= 390
    assert found["figures"]
    assert all(200 < width <= 390 for width in found["figures"])
