"""Writes the tables of the READMEs from the committed results, and the list of the papers' tables and
figures in conf/README-experiments.md from results/paper/experiments.yaml; checks their sentences.

    python scripts/readme_tables.py            write them
    python scripts/readme_tables.py --check    exit with 1 where one is not what results/ says

A table stands between two comments, `<!-- table NAME -->` and `<!-- end NAME -->`; NAME is a key of
SCORES (columns of several CSV files side by side), of FILES (a CSV file as it is) or of `makers` in
`table`; `NAME MODEL` where there is one for each of MODELS.

A sentence that compares has its claims in a comment behind it:

    <!-- says leaderboard/needles smollm2 0.25: solved 95 > snapkv 65; kvgrad ≈ solved -->

names the experiment and the task, the model and the rate (none where there was one, or where the mean
over a task's rates is meant); then, in turn, a method with its mean as the sentence rounds it (or none),
and how it compares with another: `>` and `<` are significant differences, `≈` is none, of the pairs
table; where that is of a task's mean over rates, of the marks beside the best; to `exact`, of the
differences to it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.cli.items import paper_items
from kvbench.report.ratios import RATIO_AT_95
from kvbench.report.stats import ALPHA
from kvbench.report.table import LIMITS, MARKS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
MODELS = {"smollm2": "smollm2_135m-Q4_1", "gemma3": "gemma3_270m-q4_k_m"}
MODEL = MODELS["smollm2"]
PAGES = (
    "results/README.md",
    "results/README-more.md",
    "kvbench/methods/README.md",
    "scripts/README.md",
    "kvbench/assets/recall_mini/README.md",
    "conf/README-experiments.md",
)


@dataclass(frozen=True)
class Column:
    """One column of a table of scores: a number for every method, from one tidy CSV file.

    Attributes:
        heading: the column's heading.
        file: the CSV file, <experiment>/<name of the table>.
        where: which rows of the file to take: their values by column. A `rate` also takes the methods
            that have none.
        measure: which number.
        digits: after the decimal point.
        first: sorts the rows of its table, the `least` or the `most` first; else as in the file.
    """

    heading: str
    file: str
    where: dict[str, object] = field(default_factory=dict)
    measure: str = "score"
    digits: int = 0
    first: str = ""

    def cells(self) -> pd.Series:
        """The column's text by method, in the file's order; none where results/ lack the file."""
        experiment, _, name = self.file.partition("/")
        file = RESULTS / experiment / "tables" / f"{name}.csv"
        if not file.is_file():
            return pd.Series(dtype=str)
        frame = pd.read_csv(file)
        if "mean" not in frame:  # the file has columns of its own for each measure
            names = {
                self.measure: "mean",
                f"{self.measure}_low": "low",
                f"{self.measure}_high": "high",
            }
            frame = frame.rename(columns=names).assign(measure=self.measure)
            frame = frame.reindex(columns=frame.columns.union(["low", "high", "mark"]))
        frame = frame[frame["measure"] == self.measure]
        for key, value in self.where.items():
            chosen = frame[key].astype(str) == str(value)
            if key == "rate":
                chosen |= frame[key].isna()
            frame = frame[chosen]
        if self.first:
            least = self.first == "least"
            frame = frame.sort_values("mean", ascending=least, kind="stable")
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


@dataclass(frozen=True)
class Bytes:
    """A column of bytes over those of an exact cache in `dtype`, from bytes.csv (`lost_and_won.py`)."""

    heading: str
    experiment: str
    task: str
    model: str
    dtype: str
    rate: float = 0.25

    def cells(self) -> pd.Series:
        file = RESULTS / "bytes.csv"
        if not file.is_file():
            return pd.Series(dtype=str)
        frame = pd.read_csv(file)
        for key in ("experiment", "task", "model"):
            frame = frame[frame[key] == getattr(self, key)]
        frame = frame[frame["rate"].isna() | frame["rate"].eq(self.rate)]
        return frame.set_index("method")[self.dtype].map("{:.3f}".format)


@dataclass(frozen=True)
class Published:
    """A column of what a paper prints of each method, from results/paper; fractions in per cent."""

    heading: str
    file: str
    where: dict[str, str] = field(default_factory=dict)

    def cells(self) -> pd.Series:
        frame = pd.read_csv(RESULTS / "paper" / f"{self.file}.csv", dtype=str)
        for key, value in self.where.items():
            frame = frame[frame[key] == value]
        fraction = frame["unit"].eq("fraction")
        frame["printed"] = [
            f"{100 * float(printed):g}" if of else printed
            for printed, of in zip(frame["printed"], fraction, strict=True)
        ]
        frame = frame[~frame["method"].str.startswith("minference")]  # the same numbers again
        return frame.set_index("method")["printed"]


Columns = Column | Bytes | Published
INNER = (
    "kvzip",
    "kvzip_plus",
    "kvgrad",
    "snapkv",
    "adakv",
    "h2o",
    "balancekv",
    "kvzip_turboquant",
)
"""The methods that `solved` stands around, in the order of its tables."""
AROUND = re.compile(r"solved_(?!turboquant)")
"""Methods of the leaderboard that stand in the tables `solved`, not in its own."""


def _at_rates(heading: str, table: str, model: str, rates: Sequence[float]) -> list[Column]:
    return [
        Column(f"{heading}, {rate:g}", f"{table}-{model}", {"by": "dataset", "rate": rate})
        for rate in rates
    ]


def _needles(experiment: str, model: str) -> list[Column]:
    """At a quarter, which sorts the rows, then at the other rates."""
    quarter, *others = _at_rates("needles", f"{experiment}/needles", model, (0.25, 0.5, 0.125))
    enough = Column("95 % at ratio", f"{experiment}/needles-{model}", {}, RATIO_AT_95, 2)
    return [replace(quarter, first="most"), *others, enough]


def _bytes(experiment: str, model: str) -> list[Bytes]:
    return [
        Bytes("bytes of float32, 0.25", experiment, "needles", model, "float32"),
        Bytes("of bfloat16", experiment, "needles", model, "bfloat16"),
    ]


def _leaderboard(model: str) -> Sequence[Columns]:
    return (
        *_needles("leaderboard", model),
        Column("KL, 0.25", f"fidelity/fidelity-{model}", {"by": "dataset"}, digits=3),
        Column("Δ NLL, 0.25", f"fidelity/fidelity-{model}-fidelity", {}, "difference", 3),
        Column(
            "layer error, 0.25",
            f"fidelity/layer_error-{model}-by-rate",
            {"value": 0.25},
            digits=3,
        ),
        *_bytes("leaderboard", model),
    )


def _ruler(model: str) -> Sequence[Columns]:
    quarter, *others = _at_rates("RULER", "ruler/ruler", model, (0.25, 0.5, 0.125))
    enough = Column("95 % at ratio", f"ruler/ruler-{model}", {}, RATIO_AT_95, 2)
    return (replace(quarter, first="most"), *others, enough)


SCORES: dict[str, Sequence[Columns]] = {
    **{f"leaderboard {key}": _leaderboard(model) for key, model in MODELS.items()},
    **{f"ruler {key}": _ruler(model) for key, model in MODELS.items()},
    **{
        f"context {key}": (*_needles("context", model), *_bytes("context", model))
        for key, model in MODELS.items()
    },
    "frontier": (
        Column("bytes", f"frontier/layer_error-{MODEL}", {}, "ratio", 3, "least"),
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
        Column("ratio", f"instructions/instructions-{MODEL}", {}, "ratio", 3, "least"),
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
        Published("published, Llama-3.1-8B", "balancekv_figure4"),
    ),
    "table1": (
        Column("multi_news, ROUGE-L", f"table1/longbench-{MODEL}", {"by": "dataset"}, digits=1),
        *(
            Published(
                f"published, {model}", "balancekv_table1", {"model": model, "value": "multi_news"}
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


def scores(columns: Sequence[Columns], leave_out: re.Pattern[str] | None = None) -> str:
    """The columns side by side, methods in the order of the first one; an empty cell where a method
    was not run. A column that results made before it do not have is left out."""
    cells_of = {column.heading: column.cells() for column in columns}
    cells_of = {heading: cells for heading, cells in cells_of.items() if len(cells)}
    methods = list(dict.fromkeys(method for cells in cells_of.values() for method in cells.index))
    rows = [["method", *cells_of]]
    rows += [
        [method, *(cells.get(method, "") for cells in cells_of.values())]
        for method in methods
        if not (leave_out and leave_out.match(method))
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
    """Each claim of the papers, and on each model its verdict and the comparison that decided."""
    frames = {
        name: pd.read_csv(RESULTS / folder / "claims.csv")
        for name, folder in (("SmolLM2-135M", "claims"), ("Gemma 3 270M", "claims_gemma3"))
        if (RESULTS / folder / "claims.csv").is_file()
    }
    cells: dict[str, list[str]] = {}
    for frame in frames.values():
        holds = frame["result"].eq("holds").groupby(frame["id"], sort=False)
        for row in frame[frame["decides"].astype(bool)].to_dict("records"):
            about = [row["id"], f"{row['claim']} ({row['place']})", row["measure"]]
            count = f"{holds.sum()[row['id']]} of {holds.size()[row['id']]}"
            cells.setdefault(row["id"], about).append(_claim_cell(row, count))
    return markdown([["id", "claim", "as stated \\| ours", *frames], *cells.values()])


def _claim_cell(row: Mapping[Hashable, Any], holds: str) -> str:
    """The verdict, how many comparisons hold, and the number that decided: a difference or a ratio."""
    text = f"**{row['verdict']}** ({holds}); {row['comparison']}"
    for measure, unit in (("difference", ""), ("times", " times")):
        if pd.notna(row.get(measure)):
            low, high = row[f"{measure}_low"], row[f"{measure}_high"]
            text += f" = {row[measure]:.3g}{unit} [{low:.3g}, {high:.3g}], claimed {row['claimed']}"
    return text


def joint_survival() -> str:
    """The mean over prompts, draws and layers, by distance."""
    frame = pd.read_csv(RESULTS / "balancekv_joint_survival" / f"{MODEL}.csv")
    means = frame.pivot_table(index="method", columns="distance", values="ratio", sort=False)
    rows = [["method", *(f"{distance} apart" for distance in means.columns)]]
    rows += [[str(name), *(f"{v:.2f}" for v in values)] for name, values in means.iterrows()]
    return markdown(rows)


def solved(experiment: str, model: str) -> str:
    """Per cent that each method finds, alone and with solved values, and how many prompts these lose and
    win; KL beside. The aim is to lose at most one more than are won: bold is what misses it."""
    frame = pd.read_csv(RESULTS / "lost_and_won.csv")
    experiments = [experiment]
    if experiment == "leaderboard":
        experiments += ["fidelity", "ruler"]
    frame = frame[frame["model"].eq(model) & frame["experiment"].isin(experiments)]
    columns = [
        (task, rate)
        for task in ("needles", "niah_single_1", "fidelity")
        for rate in (0.5, 0.25, 0.125)
        if ((frame["task"] == task) & (frame["rate"] == rate)).any()
    ]
    names = {"needles": "needles", "niah_single_1": "RULER", "fidelity": "KL"}
    rows = [["of", *(f"{names[task]}, {rate:g}" for task, rate in columns)]]
    for inner in sorted(frame["of"].unique(), key=INNER.index):
        of_inner = frame[frame["of"] == inner].to_dict("records")
        cells = {(row["task"], row["rate"]): _solved_cell(row) for row in of_inner}
        rows.append([inner, *(cells.get(column, "") for column in columns)])
    return markdown(rows)


def _solved_cell(row: Mapping[Hashable, Any]) -> str:
    if row["task"] == "fidelity":
        return f"{row['alone']:.3f} → {row['solved']:.3f} ({row['solved'] / row['alone']:.2f})"
    text = f"{100 * row['alone']:.0f} → {100 * row['solved']:.0f} ({row['lost']}, {row['won']})"
    return f"**{text}**" if row["lost"] - row["won"] > 1 else text


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
        r"(?P<begin><!-- table (?P<name>[\w ]+) -->\n).*?(?P<end><!-- end (?P=name) -->)", re.DOTALL
    )
    return pattern.sub(lambda found: found["begin"] + table(found["name"]) + found["end"], text)


def table(name: str) -> str:
    makers = {
        "claims": claims,
        "experiments": experiments,
        "joint_survival": joint_survival,
        "statistics": statistics,
    }
    kind, _, model = name.partition(" ")
    if kind in ("solved", "solved_context"):
        return solved("leaderboard" if kind == "solved" else "context", MODELS[model])
    if name in FILES:
        return csv_as_markdown(FILES[name])
    if name in makers:
        return makers[name]()
    return scores(SCORES[name], AROUND if kind == "leaderboard" else None)


SAYS = re.compile(r"<!-- says (\w+)/(\w+) (\w+)(?: ([\d.]+))?: (.*?) -->", re.DOTALL)
STATEMENT = re.compile(r"(\w+)(?: (-?[\d.]+))?(?: ([<>≈]) (\w+)(?: (-?[\d.]+))?)?")


def untrue(text: str) -> list[str]:
    """What the comments `says` of a text claim and results/ do not, a line each."""
    found = []
    for experiment, task, model, rate, statements in SAYS.findall(text):
        name = f"{experiment}/{task} {model}{f' {rate}' if rate else ''}"
        try:
            told = Told(experiment, task, MODELS.get(model, model), float(rate) if rate else None)
            for words in statements.split(";"):
                found += [f"{name}: {line}" for line in told.denies(" ".join(words.split()))]
        except (OSError, LookupError) as error:
            found.append(f"{name}: {error}")
    return found


@dataclass(frozen=True)
class Told:
    """What the tables of one task on one model say, at a rate, or of the mean over the task's own."""

    experiment: str
    task: str
    model: str
    rate: float | None

    def denies(self, statement: str) -> Iterator[str]:
        """Why a statement is not true."""
        parts = STATEMENT.fullmatch(statement)
        if parts is None:
            yield f"{statement!r} is no statement"
            return
        first, its, sign, second, others = parts.groups()
        for method, number in ((first, its), (second, others)):
            if number is not None:
                digits = len(number.partition(".")[2])
                mean = f"{self.row(method)['mean']:.{digits}f}"
                if float(mean) != float(number):
                    yield f"{method} is {mean}, not {number}"
        if sign is None:
            return
        is_above = self.row(first)["mean"] > self.row(second)["mean"]
        differs = self.differs(first, second)
        if differs != (sign != "≈") or (differs and is_above != (sign == ">")):
            yield f"{first} {('>' if is_above else '<') if differs else '≈'} {second}, not {sign}"

    def file(self, suffix: str = "") -> Path:
        name = f"{self.task}-{self.model}{suffix}.csv"
        return RESULTS / self.experiment / "tables" / name

    def row(self, method: str, measure: str = "score") -> pd.Series:
        if (
            self.rate is not None and self.file("-by-rate").is_file()
        ):  # the task has its rates itself
            frame = pd.read_csv(self.file("-by-rate"))
            chosen = frame["value"].astype(float).eq(self.rate)
        else:
            frame = pd.read_csv(self.file())
            chosen = frame["by"].isna() | frame["by"].isin(["dataset", ""])
            if self.rate is not None:
                chosen &= frame["rate"].isna() | frame["rate"].eq(self.rate)
        rows = frame[chosen & frame["method"].eq(method) & frame["measure"].eq(measure)]
        if rows.empty:
            raise LookupError(f"no {measure} of {method}")
        return rows.iloc[-1]  # of several datasets the average

    def differs(self, first: str, second: str) -> bool:
        """Whether two methods differ significantly."""
        names = {first, second}
        if "exact" in names:
            (other,) = names - {"exact"}
            return float(self.row(other, "difference")["p"]) < ALPHA
        pairs = pd.read_csv(self.file("-pairs"))
        at = "" if self.rate is None else f", rate {self.rate:g}"
        wanted = {f"{name}{at}" for name in names}
        for one, other, p in zip(pairs["first"], pairs["second"], pairs["p"], strict=True):
            if {one, other} == wanted:
                return float(p) < ALPHA
        marks = [str(self.row(method)["mark"]).split() for method in (first, second)]
        if not any("best" in mark for mark in marks):
            raise LookupError(f"no pair of {first} and {second}")
        return not any("tied" in mark for mark in marks)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale, false = [], []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new = written(text)
        false += [f"{name}: {line}" for line in untrue(text)]
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'not what results/ says' if check else 'written'}: {', '.join(stale)}")
    if false:
        print("\n".join(["sentences that results/ do not bear out:", *false]))
    return int(bool(false) or (check and bool(stale)))


if __name__ == "__main__":
    sys.exit(main())
