"""Draws scores against bytes of several models side by side, from the tidy tables of a report.

    python scripts/readme_figure.py --out results/leaderboard/figures/needles \
        --methods solved,kvzip,snapkv \
        SmolLM2-135M=results/leaderboard/tables/needles-smollm2_135m-Q4_1.csv \
        Gemma-3-270M=results/leaderboard/tables/needles-gemma3_270m-q4_k_m.csv

A panel for each file, with its title before the "="; at most eight methods beside the exact cache, whose
names stand at the ends of their lines. It writes the figure as SVG and PNG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from kvbench.report.drawing import Drawn
from kvbench.report.figures import MOST_LINES, against_bytes
from kvbench.report.frame import totals
from kvbench.report.ratios import at_rate
from kvbench.report.runs import BASELINE


def score_rows(table: Path, methods: Sequence[str]) -> pd.DataFrame:
    """The total scores of these methods and the exact cache, each with its measured ratio."""
    frame = pd.read_csv(table, comment="#")
    frame["by"] = frame["by"].fillna("")  # an empty cell
    total = totals(frame)
    at = total["rate"].map(at_rate)
    rows = total.assign(x=totals(frame, "ratio")["mean"], label=total["method"], at=at)
    missing = [name for name in methods if name not in set(rows["label"])]
    if missing:
        sys.exit(f"{table} has no {', '.join(missing)}; it has {', '.join(rows['label'].unique())}")
    return rows[rows["label"].isin([BASELINE, *methods])]


def figure(
    tables: Mapping[str, Path], methods: Sequence[str], *, title: str, axis: str = "score (%)"
) -> Drawn:
    """The figure of these tables, by the titles of their panels."""
    panels = {name: score_rows(table, methods) for name, table in tables.items()}
    draw, caption = against_bytes(panels, axis)
    return Drawn("readme", title, caption, draw)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="+", metavar="TITLE=CSV")
    parser.add_argument("--methods", required=True, help="names, separated by commas")
    parser.add_argument(
        "--axis", default="score (%)", help="what is measured (default: score (%%))"
    )
    parser.add_argument("--title", default="Score against bytes held", help="for who cannot see it")
    parser.add_argument(
        "--out", required=True, type=Path, help="the files' name without its ending"
    )
    options = parser.parse_args()
    methods = options.methods.split(",")
    if len(methods) > MOST_LINES:
        parser.error(f"{len(methods)} methods; allowed: at most {MOST_LINES}")
    tables = {
        title: Path(name) for title, _, name in (text.partition("=") for text in options.tables)
    }
    drawn = figure(tables, methods, title=options.title, axis=options.axis)
    for file_type in ("svg", "png"):
        options.out.with_suffix(f".{file_type}").write_bytes(drawn.encoded(file_type))


if __name__ == "__main__":
    main()
