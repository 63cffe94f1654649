"""Writes the tables of the READMEs from the committed results, and the list of the papers' tables and
figures in conf/README-experiments.md from results/paper/experiments.yaml.

    python scripts/readme_tables.py            write them
    python scripts/readme_tables.py --check    exit with 1 where one is not what results/ says

A table stands between two comments, `<!-- table NAME -->` and `<!-- end NAME -->`; NAME is a key of
SCORES (columns of several CSV files side by side), of FILES (a CSV file as it is), `statistics`,
`claims`, `joint_survival` or `experiments`.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.cli.items import paper_items
from kvbench.report.ratios import RATIO_AT_95
from kvbench.report.table import LIMITS, MARKS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MODEL = "smollm2_135m-Q4_1"


@dataclass(frozen=True)
class Column:
    """One column of a table of scores: a number for every method, from one tidy CSV file.

    Attributes:
        heading: the column's heading.
        file: the CSV file, <experiment>/<name of the table>.
        where: which rows of the file to take: their values by column. A `rate` also takes the methods
            that have none.
        measure: which number; for `bytes` see `bytes_of`.
        digits: after the decimal point.
    """

    heading: str
    file: str
    where: dict[str, object] = field(default_factory=dict)
    measure: str = "score"
    digits: int = 0

    def cells(self) -> pd.Series:
        """The column's text by method, in the file's order; of ratios the smallest first."""
        experiment, _, name = self.file.partition("/")
        frame = pd.read_csv(RESULTS / experiment / "tables" / f"{name}.csv")
        if "mean" not in frame:  # the file has columns of its own for each measure
            names = {
                self.measure: "mean",
                f"{self.measure}_low": "low",
                f"{self.measure}_high": "high",
            }
            frame = frame.rename(columns=names).assign(measure=self.measure)
            frame = frame.reindex(columns=frame.columns.union(["low", "high", "mark"]))
        if self.measure == "bytes":
            frame = bytes_of(frame)
        frame = frame[frame["measure"] == self.measure]
        for key, value in self.where.items():
            chosen = frame[key].astype(str) == str(value)
            if key == "rate":
                chosen |= frame[key].isna()
            frame = frame[chosen]
        if self.measure == "ratio":
            frame = frame.sort_values("mean", kind="stable")
        return pd.Series([self._text(row) for _, row in frame.iterrows()], index=frame["method"])

    def _text(self, row: pd.Series) -> str:
        if pd.isna(row["mean"]):
            return ""
        marks = str(row["mark"]).split()
        limit = "".join(LIMITS.get(mark, "") for mark in marks)
        text = f"{limit}{row['mean']:.{self.digits}f}"
        if not (pd.isna(row["low"]) or pd.isna(row["high"])):
            text += f" [{row['low']:.{self.digits}f}, {row['high']:.{self.digits}f}]"
        text = text.replace("inf", "∞")
        if "best" in marks:
            return f"**{text}**"
        return f"{text} {MARKS['tied']}" if "tied" in marks else text


def bytes_of(frame: pd.DataFrame) -> pd.DataFrame:
    """Every method's bytes over those of an exact cache of bfloat16, as rows with the measure "bytes".

    Where an entry takes more than half the bytes of an exact one, it is made of floats, which would be
    bfloat16 as well: the ratio stays. Packed entries keep their size, so their ratio doubles.
    """
    costs: Any = frame.pivot_table(index="method", columns="measure", values="mean", sort=False)
    size_of_entry = costs["ratio"] * costs.loc["exact", "entries_mean"] / costs["entries_mean"]
    costs["mean"] = costs["ratio"].where(size_of_entry > 0.5, 2 * costs["ratio"])
    return costs.reset_index().assign(measure="bytes", low=None, high=None, mark=None)


def _score_at_rate(heading: str, table: str, rate: float) -> Column:
    where = {"rate": rate, "by": "dataset"}
    return Column(f"{heading}, {rate:g}", f"{table}-{MODEL}", where)


def _at_quarter(
    heading: str, task: str, table: str, measure: str, where: dict[str, object]
) -> Column:
    return Column(f"{heading}, 0.25", f"leaderboard/{task}-{MODEL}{table}", where, measure, 3)


SCORES: dict[str, Sequence[Column]] = {
    "leaderboard": (
        Column("ratio, 0.25", f"leaderboard/needle-{MODEL}", {"rate": 0.25}, "ratio", 3),
        *(_score_at_rate("needle", "leaderboard/needle", rate) for rate in (0.5, 0.25, 0.125)),
        Column("needle, 95 % at ratio", f"leaderboard/needle-{MODEL}", {}, RATIO_AT_95, 2),
        *(_score_at_rate("RULER", "ruler/ruler", rate) for rate in (0.5, 0.25, 0.125)),
        Column("RULER, 95 % at ratio", f"ruler/ruler-{MODEL}", {}, RATIO_AT_95, 2),
        _at_quarter("KL", "fidelity", "-by-rate", "score", {"value": 0.25}),
        _at_quarter("Δ NLL", "fidelity", "-fidelity", "difference", {"group": "rate 0.25"}),
        _at_quarter("layer error", "layer_error", "-by-rate", "score", {"value": 0.25}),
    ),
    "frontier": (
        Column("bytes of float32", f"frontier/layer_error-{MODEL}", {}, "ratio", 3),
        Column("of bfloat16", f"frontier/layer_error-{MODEL}", {}, "bytes", 3),
        *(
            Column(
                f"layer error, {rate}",
                f"frontier/layer_error-{MODEL}-by-rate",
                {"value": rate},
                digits=3,
            )
            for rate in (0.5, 0.25, 0.125)
        ),
    ),
    "instructions": (
        Column("ratio", f"instructions/instructions-{MODEL}", {}, "ratio", 3),
        Column("followed", f"instructions/instructions-{MODEL}", {"by": "dataset"}),
        *(
            Column(name, f"instructions/instructions-{MODEL}-by-measure", {"value": value})
            for name, value in (
                ("the first", "place_1"),
                ("the second", "place_2"),
                ("the third", "place_3"),
            )
        ),
        Column("told", f"instructions/instructions_told-{MODEL}-by-measure", {"value": "leakage"}),
    ),
    "figure4": (
        Column("words found (the paper's measure)", f"figure4/needle-{MODEL}", {"by": "dataset"}),
        Column("whole needle", f"figure4/needle-{MODEL}-by-measure", {"value": "containment"}),
        Column("published, Llama-3.1-8B", "figure4/balancekv_figure4-published", {}, "published"),
    ),
    "table1": (
        Column("multi_news, ROUGE-L", f"table1/longbench-{MODEL}", {"by": "dataset"}, digits=1),
        *(
            Column(
                f"published, {model}",
                "table1/balancekv_table1-published",
                {"published_model": model},
                "published",
                2,
            )
            for model in ("Llama-3.1-8B-Instruct", "Qwen2.5-14B-Instruct", "Qwen2.5-32B-Instruct")
        ),
    ),
    "lines": (
        Column("lines", "lines/longeval_lines-recall_mini", {"value": "average"}),
        Column("asked later", "lines/longeval_lines_context-recall_mini", {"value": "average"}),
        Column(
            "official 200 lines", "lines/longeval_official_prompt-recall_mini", {"by": "dataset"}
        ),
        Column("asked later ", "lines/longeval_official_context-recall_mini", {"by": "dataset"}),
    ),
}
FILES = {
    "training": "recall_mini/training.csv",
    "accuracy": "recall_mini/accuracy.csv",
    "force_needle": "recall_mini/force_needle.csv",
}


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table of texts, its first row the heading."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def scores(columns: Sequence[Column]) -> str:
    """The columns side by side, methods in the order of the first one; an empty cell where a method
    was not run. A column that results made before it do not have is left out."""
    cells_of = {column.heading: column.cells() for column in columns}
    cells_of = {heading: cells for heading, cells in cells_of.items() if len(cells)}
    methods = list(dict.fromkeys(method for cells in cells_of.values() for method in cells.index))
    rows = [["method", *cells_of]]
    rows += [
        [method, *(cells.get(method, "") for cells in cells_of.values())] for method in methods
    ]
    return markdown(rows)


def csv_as_markdown(file: str) -> str:
    frame = pd.read_csv(RESULTS / file, dtype=str, keep_default_na=False)
    return markdown([list(frame.columns), *frame.to_numpy().tolist()])


def statistics() -> str:
    """The worst row of bench_statistics.py of each kind: the one nearest to its bound, or beyond it."""
    frame = pd.read_csv(RESULTS / "bench" / "statistics.csv")
    frame["kind"] = frame["what"].str.partition(",")[0]
    frame["limit"] = 100 * frame["bound"].str.split().str[1].astype(float)
    frame["at_most"] = frame["bound"].str.startswith("<=")
    distance = 100 * frame["share"] - frame["limit"]
    frame["room"] = distance.where(~frame["at_most"], -distance)
    rows = [["simulated", "cells", "the worst of them", "share, %", "bound, %"]]
    for kind, cells in frame.groupby("kind", sort=True):
        worst = cells.sort_values("room").iloc[0]
        sign = "at most" if worst["at_most"] else "at least"
        share, bound = f"{100 * worst['share']:.1f}", f"{sign} {worst['limit']:.0f}"
        if bound == "at least 0":
            bound = "–"
        named = worst["what"].partition(", ")[2] or "–"
        rows.append([str(kind), str(len(cells)), named, share, bound])
    return markdown(rows)


def claims() -> str:
    return (RESULTS / "claims" / "claims.md").read_text(encoding="utf-8")


def joint_survival() -> str:
    """The mean over prompts, draws and layers, by distance."""
    frame = pd.read_csv(RESULTS / "balancekv_joint_survival" / f"{MODEL}.csv")
    means = frame.pivot_table(index="method", columns="distance", values="ratio", sort=False)
    rows = [["method", *(f"{distance} apart" for distance in means.columns)]]
    rows += [[str(name), *(f"{v:.2f}" for v in values)] for name, values in means.iterrows()]
    return markdown(rows)


def experiments() -> str:
    """Every numbered table and figure of the papers, with what it needs."""
    rows = [["name", "shows", "the paper's own run needs"]]
    title = ""
    for name, item in paper_items().items():
        if item.title != title:
            title = item.title
            rows.append([f"**{title}**", "", ""])
        needs = f"no data: {item.no_data}" if item.no_data is not None else item.needs
        shows = f"`{item.alias}` under another name" if item.alias else item.shows
        rows.append([f"`{name}`", shows, needs.replace("<", "&lt;")])
    return markdown(rows)


def written(text: str) -> str:
    """`text` with every table between its comments made again."""
    pattern = re.compile(
        r"(?P<begin><!-- table (?P<name>\w+) -->\n).*?(?P<end><!-- end (?P=name) -->)", re.DOTALL
    )
    return pattern.sub(lambda found: found["begin"] + table(found["name"]) + found["end"], text)


def table(name: str) -> str:
    makers = {
        "claims": claims,
        "experiments": experiments,
        "joint_survival": joint_survival,
        "statistics": statistics,
    }
    if name in FILES:
        return csv_as_markdown(FILES[name])
    return makers[name]() if name in makers else scores(SCORES[name])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale = []
    for name in (
        "results/README.md",
        "results/README-more.md",
        "scripts/README.md",
        "kvbench/assets/recall_mini/README.md",
        "conf/README-experiments.md",
    ):
        path = ROOT / name
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
