"""The page as a reader meets it: by eye, by keyboard, on a phone, in the dark, on paper."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chromium import AXE, BROWSER, Chromium
from support.report_runs import write_demo, write_longbench
from support.report_runs import write_sweep as write_rates

from kvbench.report.build import build_report
from kvbench.report.render.landing import write_landing
from kvbench.report.render.page import MOST_BYTES

METHODS = ("exact", "snapkv", "balancekv")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of an experiment with every kind of task."""
    return build_report(write_demo(tmp_path_factory.mktemp("results"), METHODS)).page


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if BROWSER is None:
        pytest.skip("needs Chromium on PATH (Debian: apt-get install chromium)")
    with Chromium(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


OPEN_ALL = (  # and wait for the frame in which the page has seen its new sizes
    "document.querySelectorAll('details').forEach(d => { d.open = true; });"
    "new Promise(r => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(r, 0))))"
)


def test_the_page_opens_with_what_was_run_and_found(browser: Chromium, page: Path) -> None:
    browser.open(page)
    facts = browser.evaluate(
        "Object.fromEntries(Array.from(document.querySelectorAll('.facts div')).map("
        "d => [d.children[0].textContent, d.children[1].textContent]))"
    )
    assert facts["model"] == "recall_mini"
    assert facts["rate"] == "0.25"
    assert facts["device"] == "cpu (2 cores)"
    assert facts["date"] == "2026-11-20"
    assert facts["code revision"] == "0123abcd"
    verdicts = browser.evaluate(
        "Array.from(document.querySelectorAll('.verdicts p')).map(p => p.textContent)"
    )
    assert any(text.startswith("longeval_lines At rate 0.25 ") for text in verdicts)
    # each section: score against memory, then the table, then what is folded
    order = browser.evaluate(
        "Array.from(document.querySelector('#section-2').parentNode.children).map(e => e.id ||"
        " e.tagName + (e.querySelector('svg') ? ' svg' : '')"
        " + (e.querySelector('table') ? ' table' : ''))"
    )
    start = order.index("section-1")
    kinds = [kind for kind in order[start : order.index("section-2")] if kind not in ("P", "UL")]
    assert kinds[1:3] == ["FIGURE svg", "DIV table"]
    assert {kind.split()[0] for kind in kinds[3:]} == {"DETAILS"}


@pytest.mark.skipif(not AXE.is_file(), reason=f"needs axe-core at {AXE}: see .ci/run")
@pytest.mark.parametrize("dark", [False, True])
def test_accessibility_rules_hold(browser: Chromium, page: Path, dark: bool) -> None:
    landing = write_landing([page.parent])
    for path, width in ((page, 1280), (page, 400), (landing, 400)):
        browser.open(path, width, dark=dark)
        browser.evaluate(OPEN_ALL)
        assert browser.accessibility(AXE) == []


def test_a_point_says_its_numbers_on_hover_and_on_focus(browser: Chromium, page: Path) -> None:
    browser.open(page)
    tip = "document.querySelector('.tip')"
    svg = "document.querySelector('#section-1 ~ figure svg')"
    assert browser.evaluate(f"{tip}.hidden")
    browser.evaluate(f"{svg}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    x, y = browser.evaluate(
        f"(r => [r.x + r.width / 2, r.y + r.height / 2])({svg}.querySelector('.spot')"
        ".getBoundingClientRect())"
    )
    browser.hover(x, y)
    assert not browser.evaluate(f"{tip}.hidden")
    hovered = browser.evaluate(f"{tip}.textContent")
    assert "at ratio" in hovered
    assert "[" in hovered
    browser.hover(0, 0)
    assert browser.evaluate(f"{tip}.hidden")
    browser.evaluate(f"{svg}.querySelector('[tabindex=\"0\"]').focus()")
    first = browser.evaluate(f"{tip}.textContent")
    browser.press("ArrowRight")
    assert browser.evaluate(f"{tip}.textContent") not in ("", first)
    assert browser.evaluate(
        "document.activeElement.getAttribute('aria-label')"
    ) == browser.evaluate(f"{tip}.textContent")
    # one stop of the tab key for each figure
    assert browser.evaluate(f"{svg}.querySelectorAll('[tabindex=\"0\"]').length") == 1
    labels = browser.evaluate(
        "Array.from(document.querySelectorAll('figure svg')).map(s => s.getAttribute('aria-label'))"
    )
    assert all(any(c.isdigit() for c in label) for label in labels)  # a finding, not a name


def test_figures_follow_dark_mode(browser: Chromium, page: Path) -> None:
    ink = (
        "getComputedStyle(document.querySelector('figure svg text')).fill + ' ' +"
        " getComputedStyle(document.querySelector('figure svg path')).fill"
    )
    browser.open(page)
    light = browser.evaluate(ink)
    browser.open(page, dark=True)
    dark = browser.evaluate(ink)
    assert light == "rgb(28, 36, 48) rgb(255, 255, 255)"
    assert dark == "rgb(228, 232, 237) rgb(20, 24, 29)"


def test_what_does_not_fit_a_phone_says_so(browser: Chromium, page: Path) -> None:
    browser.open(page, 400)
    browser.evaluate(OPEN_ALL)
    hidden = browser.evaluate(
        "new Promise(done => setTimeout(() => done(Array.from(document.querySelectorAll('main *'))"
        ".filter(e => !(e instanceof SVGElement) && e.scrollWidth > e.clientWidth + 1"
        " && ['auto', 'scroll', 'hidden'].includes(getComputedStyle(e).overflowX)"
        " && !e.classList.contains('more')).map(e => e.outerHTML.slice(0, 80))), 300))"
    )
    assert hidden == []
    cues = browser.evaluate("document.querySelectorAll('.scroll.more').length")
    assert cues > 3
    assert browser.evaluate(
        "getComputedStyle(document.querySelector('.scroll.more'), '::before').content"
    ).startswith('"wider than the window')
    browser.open(page, 1280)
    assert browser.evaluate("document.querySelectorAll('main > .scroll.more').length") == 0


def test_paper_has_no_scrollbars(browser: Chromium, page: Path) -> None:
    browser.open(page)
    browser.evaluate(OPEN_ALL)
    browser.as_printed(680)  # A4 within its margins
    scrolling = browser.evaluate(
        "Array.from(document.querySelectorAll('body *')).filter(e => !(e instanceof SVGElement)"
        " && ['auto', 'scroll'].some(v => [getComputedStyle(e).overflowX,"
        " getComputedStyle(e).overflowY].includes(v))).map(e => e.outerHTML.slice(0, 80))"
    )
    assert scrolling == []
    wide = browser.evaluate(
        "Array.from(document.querySelectorAll('figure svg, table')).filter("
        "e => e.getBoundingClientRect().right > 690).map(e => e.textContent.slice(0, 99))"
    )
    assert wide == []


def test_lower_is_better_sorts_the_best_first(browser: Chromium, page: Path) -> None:
    browser.open(page)
    found = browser.evaluate(
        "(t => { const at = Array.from(t.tHead.rows[0].cells).findIndex("
        "c => c.textContent.startsWith('layer_error')); t.tHead.rows[0].cells[at]"
        ".querySelector('button').click(); return Array.from(t.tBodies[0].rows).map("
        "r => parseFloat(r.cells[at].textContent)).filter(x => !isNaN(x)); })"
        "(document.querySelector('.overview table'))"
    )
    assert found == sorted(found)


def test_a_sweep_is_a_table_of_methods_and_rates(browser: Chromium, tmp_path: Path) -> None:
    browser.open(build_report(write_rates(tmp_path, ("exact", "snapkv", "uniform"))).page)
    table = "document.querySelector('main > .scroll table')"
    heads = browser.evaluate(
        f"Array.from({table}.tHead.rows[0].cells).map(c => c.querySelector('button').textContent)"
    )
    assert heads == ["method", "rate 0.5", "rate 0.25", "rate 0.125"]
    assert browser.evaluate(f"{table}.tHead.textContent").count("ratio 0.") == 3
    rows = browser.evaluate(
        f"Array.from({table}.tBodies[0].rows).map(r => r.cells[0].textContent.trim())"
    )
    assert rows == ["exact", "uniform", "snapkv"]
    heights = browser.evaluate(
        f"Array.from({table}.tBodies[0].rows).map(r => r.getBoundingClientRect().height)"
    )
    assert max(heights) < 40  # one line each


def test_a_page_stays_below_its_limit(tmp_path: Path) -> None:
    folder = write_longbench(tmp_path, 20, models=("a", "b", "c", "d"), paper_table=None)
    text = build_report(folder).page.read_bytes()
    assert len(text) <= MOST_BYTES
    assert b"<article" in text
