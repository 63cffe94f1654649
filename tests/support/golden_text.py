"""Golden texts: what pages and tables say as a whole, compared with files; a failure shows a diff.

``KVBENCH_GOLDEN=write python -m pytest tests/report -k "golden or what_a_page_says"`` writes the files
again: read what changed."""

from __future__ import annotations

import difflib
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from support.paths import GOLDEN

TEXTS = GOLDEN / "texts"
MOST_ARTICLES = 2
"""Examples of answers that a page's text has of each task."""
HIDDEN = {"head", "script", "style", "svg"}
INLINE = {"a", "b", "button", "code", "dd", "mark", "pre", "q", "small", "span", "td", "th", "wbr"}
BEGINNINGS = {"h1": "# ", "h2": "## ", "li": "- ", "td": " | ", "th": " | ", "dd": ": "}


def assert_golden(name: str, text: str) -> None:
    """Fail with a unified diff where a text is not the one in the file of that name."""
    path = TEXTS / name
    lines = [line.rstrip() for line in text.strip().splitlines()]
    if os.environ.get("KVBENCH_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    golden = path.read_text(encoding="utf-8").splitlines()
    diff = difflib.unified_diff(golden, lines, f"golden/texts/{name}", "now", lineterm="")
    if lines != golden:
        pytest.fail("\n".join(diff), pytrace=False)


class _Text(HTMLParser):
    """A line for each block; what a fold holds is indented below its summary."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.line, self.is_summary, self.folds = "", False, 0
        self.hidden, self.articles = 0, 0

    def end_line(self) -> None:
        if line := " ".join(self.line.split()):
            self.lines.append("  " * self.folds + line.removeprefix("| "))
        self.line = ""

    def is_hidden(self, tag: str) -> bool:
        return tag in HIDDEN or (tag == "article" and self.articles > MOST_ARTICLES)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.articles = 0 if tag == "summary" else self.articles + (tag == "article")
        if tag == "svg" and not self.hidden:
            self.line += "[figure]"
        self.hidden += self.is_hidden(tag)
        if self.hidden:
            return
        if tag not in INLINE and not self.is_summary:
            self.end_line()
        if tag == "summary":
            self.is_summary, self.line = True, "▸ "
        self.line += BEGINNINGS.get(tag, "")

    def handle_endtag(self, tag: str) -> None:
        if self.hidden:
            self.hidden -= self.is_hidden(tag)
            return
        if tag == "summary" or not (tag in INLINE or tag == "dt" or self.is_summary):
            self.end_line()
        if tag == "summary":
            self.is_summary, self.folds = False, self.folds + 1
        self.folds -= tag == "details"

    def handle_data(self, data: str) -> None:
        self.line += "" if self.hidden else data


def text_of(page: Path) -> str:
    """What a reader sees of a page, pictures left out."""
    text = _Text()
    text.feed(page.read_text(encoding="utf-8"))
    return "\n".join(text.lines)
