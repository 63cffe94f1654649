"""Writes the tables of results/README.md and of the model card from the committed results, and
the list of the papers' tables and figures in conf/README.md from results/paper/experiments.yaml.

    python scripts/readme_tables.py            write them
    python scripts/readme_tables.py --check    exit with 1 where one is not what results/ says

A table stands between two comments, `<!-- table NAME -->` and `<!-- end NAME -->`; NAME is a key of
TABLES below. Numbers come from the CSV files that a report writes, so that no number in a text is
typed by hand. `experiments` is the list.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from kvbench.cli.catalogue import paper_items

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
DEMO = "demo/tables"


@dataclass(frozen=True)
class Column:
    """One column of such a table: a score of every method from one CSV file.

    Attributes:
        heading: what the table calls it.
        file: the CSV file below results/.
        where: the row of the file to take, by column, beside the method.
        value: the file's column with the number; `<value>_low` and `<value>_high` bound it.
        digits: after the decimal point.
    """

    heading: str
    file: str
    where: dict[str, object] = field(default_factory=dict)
    value: str = "score"
    digits: int = 0

    def cells(self) -> pd.Series:
        """The column's text by method (by the run's label where a method has several)."""
        frame = pd.read_csv(RESULTS / self.file)
        where = self.where
        if "measure" in frame and "mean" in frame:  # tidy, as reports write since 0.2
            frame = frame[frame["measure"] == "score"]
            frame = frame.rename(
                columns={"mean": "score", "low": "score_low", "high": "score_high"}
            )
            where = {"value": str(*where.values())}
        for key, value in where.items():
            frame = frame[frame[key] == value]
        return pd.Series([self._text(row) for _, row in frame.iterrows()], index=frame["variant"])

    def _text(self, row: pd.Series) -> str:
        value, low, high = (row.get(f"{self.value}{end}") for end in ("", "_low", "_high"))
        text = f"{value:.{self.digits}f}"
        if pd.isna(low) or pd.isna(high):
            return text
        return f"{text} [{low:.{self.digits}f}, {high:.{self.digits}f}]"


def _lines(heading: str, task: str, dataset: str = "average") -> Column:
    return Column(heading, f"{DEMO}/{task}-recall_mini.csv", {"dataset": dataset})


def _needle(heading: str, task: str, measure: str) -> Column:
    return Column(heading, f"{DEMO}/{task}-recall_mini-by-measure.csv", {"measure": measure})


LAYER_ERROR = Column(
    "layer error", f"{DEMO}/layer_error-recall_mini-by-rate.csv", {"rate": 0.25}, digits=3
)
LINES = (
    _lines("lines", "longeval_lines"),
    _lines("lines, asked later", "longeval_lines_context"),
    _lines("official 200 lines", "longeval_official_prompt", "200_lines"),
    _lines("official, asked later", "longeval_official_context", "200_lines"),
    _lines("every line four times", "longeval_redundant", "30 lines"),
)
TABLES: dict[str, Sequence[Column]] = {
    "demo": (
        LAYER_ERROR,
        *LINES,
        _needle("short needle", "needle_short", "word_recall"),
        _needle("long needle", "needle", "word_recall"),
    ),
    "card": (
        *LINES,
        _needle("short needle, contained", "needle_short", "containment"),
        _needle("words", "needle_short", "word_recall"),
        _needle("long needle, contained", "needle", "containment"),
        _needle("words ", "needle", "word_recall"),
    ),
}


def table(columns: Sequence[Column]) -> str:
    """The columns side by side as Markdown, methods in the order of the first one; an empty cell where
    a method was not run."""
    found = [column.cells() for column in columns]
    methods = list(dict.fromkeys(method for cells in found for method in cells.index))
    rows = [["method", *(column.heading for column in columns)], ["---"] * (len(columns) + 1)]
    rows += [[method, *(cells.get(method, "") for cells in found)] for method in methods]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def experiments() -> str:
    """Every numbered table and figure of the papers as Markdown, with what it needs."""
    lines = ["| name | shows | the paper's own run needs |\n| --- | --- | --- |\n"]
    title = ""
    for name, item in paper_items().items():
        if item.title != title:
            title = item.title
            lines.append(f"| **{title}** | | |\n")
        needs = f"no data: {item.no_data}" if item.no_data is not None else item.needs
        shows = f"`{item.alias}` under another name" if item.alias else item.shows
        lines.append(f"| `{name}` | {shows} | {needs.replace('<', '&lt;')} |\n")
    return "".join(lines)


def written(text: str) -> str:
    """`text` with every table between its comments made again.

    Raises:
        KeyError: a comment names a table that is not in TABLES.
    """

    def made(found: re.Match[str]) -> str:
        name = found[2]
        return (
            found[1] + (experiments() if name == "experiments" else table(TABLES[name])) + found[3]
        )

    return re.sub(r"(<!-- table (\w+) -->\n).*?(<!-- end \2 -->)", made, text, flags=re.S)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale = []
    for name in ("results", "kvbench/assets/recall_mini", "conf"):
        path = ROOT / name / "README.md"
        text = path.read_text(encoding="utf-8")
        new = written(text)
        if new != text:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'not what results/ says' if check else 'written'}: {', '.join(stale)}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
