"""Which claims of the papers a model bears out: runs what results/claims.yaml asks for, and decides.

    python scripts/claims.py model=smollm2_135m          all; what is there is not run again
    python scripts/claims.py model=<any> claims=B1,L1 'files=[essays/*.txt]' results_dir=runs/claims/mine

A claim is one or more comparisons over prompts, each with a rule. A comparison has cells (a layer at a
rate, say); in each it is tested as the tables of a report are (results/README-statistics.md), with p
adjusted for all cells and all methods that it names. The comparison

- **holds** if every cell (or the share of cells that it names) differs significantly as claimed;
- **holds on average** if the mean over cells does;
- **fails** if that mean differs significantly the other way;
- **cannot be told** otherwise. Then it says about how many prompts would tell, if the difference is what
  it seems.

A claim's verdict is the worst one of its comparisons. Texts are generated unless `files` names some.

Written to results_dir (default: runs/claims/<model>): claims.csv, a row for each comparison; a page,
which has for each claim the comparison that decided, too; a folder for each run. The seconds of every
run are printed and are in its file `done`.
"""

from __future__ import annotations

import itertools
import math
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import yaml
from hydra.utils import instantiate

from kvbench import load
from kvbench.cli.config import composed, expanded, hydra_of_conf
from kvbench.engine.architecture import full_layers
from kvbench.engine.model import load_config
from kvbench.errors import UserError, complain
from kvbench.report.page import PAGE, html
from kvbench.report.render import PAGE_MARK, write_text
from kvbench.report.stats import ALPHA, Estimate, Scores, holm, paired
from kvbench.report.table import Column, Table, number, score_format, whole, with_values

ROOT = Path(__file__).resolve().parents[1]
ABLE = 0.8
"""Share of whole answers of the exact cache below which a task tells nothing about methods."""
UNABLE = "needs a model that retrieves"
WINDOWED = "needs a model whose layers all attend to everything"
ORDER = ("fails", "cannot be told", "holds on average", "holds")
"""Verdicts, the worst first. A comparison without a verdict says what it needs; a claim says so only if
none of its comparisons has a verdict."""
SUBTITLE = (
    "A claim is tested in several cells (layers, rates or measures), by the tests of all tables, with p"
    " adjusted for the cells and methods that a comparison names. It holds if every cell differs"
    " significantly as claimed, on average if only the mean over cells does; it fails if that mean"
    " differs significantly the other way. Otherwise it cannot be told."
)


class Verdict(NamedTuple):
    """How a comparison was decided: the difference or ratio of the means over cells, of so many
    independent units (prompts, texts, fillers); cells that hold, of all; how many units would tell where
    it cannot be told."""

    verdict: str
    difference: Estimate
    units: int
    held: int
    cells: int
    more: int | None = None


def claims_for(model: str) -> dict[str, Any]:
    """Read results/claims.yaml for a model, its layers in place of the names in `layers_by_name`. Each
    comparison that may have no records says what they need (`unmet`): those of another experiment, and
    what a model with windows cannot run (`full_attention`)."""
    with hydra_of_conf() as hydra:
        spec = instantiate(composed(hydra, expanded([f"model={model}"])).model, _convert_="all")
    config = load_config(spec).get_text_config()
    numbers = [layer + 1 for layer in full_layers(config)]
    text = (ROOT / "results" / "claims.yaml").read_text(encoding="utf-8")
    for name, layers in layers_by_name(numbers).items():
        text = text.replace(name, str(layers).replace(" ", ""))
    result = dict(yaml.safe_load(text))
    has_windows = len(numbers) < config.num_hidden_layers
    for comparison in (each for claim in result["claims"] for each in claim["comparisons"]):
        run = result["runs"][comparison["run"]]
        if "folder" in run:
            comparison["unmet"] = f"needs this model's records of {run['made_by']}"
        elif has_windows and run.get("full_attention"):
            comparison["unmet"] = WINDOWED
    return result


def layers_by_name(numbers: Sequence[int]) -> dict[str, list[int]]:
    """The layers that names in claims.yaml stand for, of a model's layers that attend to everything,
    from 1: $SHOWN for 1, 2 and 5, which BalanceKV's figures show, or those of them that are there, or,
    where none is, the first three; $SPREAD for seven from the first to the last; $BOTH for both."""
    shown = [layer for layer in (1, 2, 5) if layer in numbers] or list(numbers[:3])
    spread = sorted({numbers[round(i * (len(numbers) - 1) / 6)] for i in range(7)})
    return {"$SHOWN": shown, "$SPREAD": spread, "$BOTH": sorted({*shown, *spread})}


def read_run(place: Path) -> pd.DataFrame:
    """The rows of a run: records of kvbench, or a script's CSV file, which is named after the model.
    Where examples failed cells would be absent, so that is refused."""
    files = [] if list(place.glob("*/*/*/manifest.json")) else sorted(place.rglob("*.csv"))
    if files:
        return pd.read_csv(files[0]).assign(model=files[0].stem)
    rows = load(place)
    failed = rows[rows["status"] != "ok"]
    if len(failed):
        first = failed.iloc[0]
        raise UserError(
            f"{place.name}: {len(failed)} of {len(rows)} records failed, the first {first['method']} at "
            f"{first['example_id']}: {first['error']}"
        )
    return rows


def read_other_experiment(beside: Path, run: Mapping[str, Any], model: str) -> pd.DataFrame:
    """The rows of an experiment that takes too long for this command, which another command makes in a
    folder beside its own; empty where that was not made to its end, or with another model."""
    place = beside / run["folder"]
    if not list(place.glob("*/*/*/manifest.json")):
        return pd.DataFrame()
    rows = read_run(place)
    same_model = rows["model"].astype(str).str.startswith(model.rpartition("/")[2]).all()
    return rows if same_model and len(rows) >= run["records"] else pd.DataFrame()


def values_of_units(rows: pd.DataFrame, comparison: Mapping[str, Any]) -> pd.DataFrame:
    """The value of each variant, [units x cells, variants].

    Args:
        comparison: `value`, the column; `unit`, `variant` and `cells`, columns; `where`: the values of
            other columns that count; `slope`: instead of the mean of a cell's rows, the exponent of the
            value as a power of that column.
    """
    for column, allowed in comparison.get("where", {}).items():
        rows = rows[rows[column].isin(allowed if isinstance(allowed, list) else [allowed])]
    groups = rows.groupby(
        [
            comparison.get("unit", "prompt"),
            *comparison.get("cells", []),
            comparison.get("variant", "method"),
        ],
        sort=False,
    )
    value = comparison["value"]
    if "slope" not in comparison:
        return groups[value].mean().unstack()
    base = comparison["slope"]

    def slope(part: pd.DataFrame) -> float:
        x, y = (np.log(part[column].astype(float)) for column in (base, value))
        return float(np.polyfit(x, y, 1)[0])

    return groups[[value, base]].apply(slope).unstack()


Sides = tuple[pd.DataFrame, pd.DataFrame]
"""A variant's values and those that it is compared with, each [units, cells]."""


def sides_to_each(values: pd.DataFrame, comparison: Mapping[str, Any]) -> dict[str, Sides]:
    """`first` beside `factor` times each of `against`, or the number `target`, by its name.

    A method that beats the best of several beats each of them, so none is chosen here.
    """

    def by_cell(series: pd.Series) -> pd.DataFrame:
        table = series.unstack(list(range(1, series.index.nlevels)))
        return table.to_frame("all") if isinstance(table, pd.Series) else table

    first, factor = by_cell(values[comparison["first"]]), comparison.get("factor", 1)
    others: dict[str, pd.DataFrame] = {}
    if "target" in comparison:
        target = comparison["target"]
        others[f"({target})" if target < 0 else f"{target}"] = first * 0 + target
    for name in comparison.get("against", []):
        others[name if factor == 1 else f"{factor:g} {name}"] = by_cell(factor * values[name])
    return {name: (first, other) for name, other in others.items()}


class CellTest(NamedTuple):
    """A difference, or ratio, tested as the report's tables test it (`kvbench.report.stats.paired`).

    Attributes:
        on_side: whether it is on the claimed side, whatever its p.
        room: how far from it the claimed bound is, of two (`within`) the nearer one.
        p: of that bound, of two the larger one.
        p_against: of a bound on whose other side it is, the smaller one; NaN where it is on the claimed
            side of all.
    """

    change: Estimate
    on_side: bool
    room: float
    p: float
    p_against: float


def tests_of(sides: Sides, comparison: Mapping[str, Any]) -> list[CellTest]:
    """A test for each cell. Right or wrong answers have McNemar's, what is never negative is compared by
    its ratio where no difference (`by`) is claimed, all else by the t test of the difference."""
    side, by = comparison.get("side", "below"), comparison.get("by", 0.0)
    bounds = {"below": [(by, -1)], "above": [(by, 1)], "within": [(by, -1), (-by, 1)]}[side]
    values = np.hstack([one.to_numpy(float) for one in sides])
    count = values.shape[1] // 2
    given, units = np.ones(values.shape, dtype=bool), np.arange(len(values))
    strata = [Scores("", values, given, units, ({},) * (2 * count))]
    pairs = [(i, count + i) for i in range(count)]
    by_bound = [
        paired(strata, pairs, fraction="fraction" in comparison, by=bound) for bound, _ in bounds
    ]
    tests = []
    for changes in zip(*by_bound, strict=True):
        p = [change.p for change in changes]
        leads = [
            sign * (change.lead - bound)
            for change, (bound, sign) in zip(changes, bounds, strict=True)
        ]
        against = [own for own, lead in zip(p, leads, strict=True) if lead < 0]
        tests.append(
            CellTest(
                changes[0],
                on_side=all(lead > 0 for lead in leads),
                room=min(map(abs, leads)),
                p=max(p),
                p_against=min(against, default=math.nan),
            )
        )
    return tests


def adjusted(tests: Sequence[CellTest]) -> list[CellTest]:
    """With the p-values of these, one family, adjusted as those of a table are."""
    discordant = [test.change.discordant for test in tests]
    against = [test.p if math.isnan(test.p_against) else test.p_against for test in tests]
    p, p_against = holm([test.p for test in tests], discordant), holm(against, discordant)
    p_against = np.where([math.isnan(test.p_against) for test in tests], math.nan, p_against)
    return [
        test._replace(p=float(p[i]), p_against=float(p_against[i])) for i, test in enumerate(tests)
    ]


def verdicts_on(sides: Sequence[Sides], comparison: Mapping[str, Any]) -> list[Verdict]:
    """The verdict on each first variant beside what it is compared with: their difference is claimed to
    lie `below` or `above` the number `by`, or `within` it on either side of zero, in the share `share`
    of the cells. P-values are adjusted for all cells of all of them."""
    both = [(a.where(b.notna()), b.where(a.notna())) for a, b in sides]
    both = [(a.dropna(how="all"), b.dropna(how="all")) for a, b in both]
    cells = iter(adjusted([test for one in both for test in tests_of(one, comparison)]))
    over_cells = [(a.mean(axis=1).to_frame(), b.mean(axis=1).to_frame()) for a, b in both]
    means = adjusted([test for one in over_cells for test in tests_of(one, comparison)])
    verdicts = []
    for (first, _), mean in zip(both, means, strict=True):
        units, count = first.shape
        held = sum(cell.on_side and cell.p < ALPHA for cell in itertools.islice(cells, count))
        more = None
        if held >= comparison.get("share", 1.0) * count:
            verdict = "holds"
        elif mean.on_side and mean.p < ALPHA:
            verdict = "holds on average"
        elif mean.p_against < ALPHA:
            verdict = "fails"
        else:
            verdict = "cannot be told"
            change = mean.change
            half = (math.log(change.high) if change.times else change.high) - change.lead
            # An interval's width falls with the square root of the units.
            if mean.room and half > 0:
                more = math.ceil(units * (half / mean.room) ** 2)
        verdicts.append(Verdict(verdict, mean.change, units, held, count, more))
    return verdicts


def unmet_need(rows: pd.DataFrame, comparison: Mapping[str, Any]) -> str:
    """The need of a comparison that this model does not meet; empty where it tells methods apart.

    There must be rows; the method `able` must give whole answers to a share `ABLE` of the prompts; and
    the answers of `first` must differ from those of the method `unlike`.
    """
    if rows.empty:
        return str(comparison["unmet"])
    if "able" in comparison:
        column = "containment" if "containment" in rows else "score"
        if rows.loc[rows["method"] == comparison["able"], column].mean() < ABLE:
            return UNABLE
    if "unlike" in comparison:
        first, unlike = comparison["first"], comparison["unlike"]
        answers = rows.pivot(index="example_id", columns="method", values="prediction")
        if answers[first].equals(answers[unlike]):
            return f"needs a model on which {first} differs from {unlike}"
    return ""


def rows_of_claim(
    claim: Mapping[str, Any], runs: Mapping[str, pd.DataFrame]
) -> list[dict[str, Any]]:
    """A row for each comparison of a claim with each method that it names.

    The row with the claim's verdict has `decides` (of several the first). A comparison with `minus`, a
    run of the same units, is of how much smaller the difference is in that run.
    """
    rows: list[dict[str, Any]] = []
    for comparison in claim["comparisons"]:
        rows += compare(comparison, runs)
    results = [row["result"] for row in rows]
    worst = min(results, key=lambda result: ORDER.index(result) if result in ORDER else len(ORDER))
    deciding = results.index(worst)
    about = {key: claim[key] for key in ("id", "place", "stated", "measure", "claim")}
    about["verdict"] = worst
    return [about | {"decides": i == deciding} | row for i, row in enumerate(rows)]


def compare(
    comparison: Mapping[str, Any], runs: Mapping[str, pd.DataFrame]
) -> Iterator[dict[str, Any]]:
    """A row for the comparison with each method that it names."""
    run = comparison["run"]
    needs = unmet_need(runs[run], comparison)
    if runs[run].empty:
        name = f"{run}, {comparison['value']}"
        yield {"comparison": name, "result": needs, "run": run, "model": "none"}
        return
    model = runs[run]["model"].iloc[0]
    sides = sides_to_each(values_of_units(runs[run], comparison), comparison)
    minus = None if needs else comparison.get("minus")
    if minus:
        less = sides_to_each(values_of_units(runs[minus], comparison), comparison)
        sides = {name: (a - less[name][0], b - less[name][1]) for name, (a, b) in sides.items()}
    value = comparison["value"]
    if "slope" in comparison:
        value = f"slope of {value}"
    verdicts = verdicts_on(list(sides.values()), comparison)
    for other, verdict in zip(sides, verdicts, strict=True):
        name = f"{run}, {value}: {comparison['first']} - {other}"
        if minus:
            name += f", less that of {minus}"
        if "over" in comparison:
            name += f", mean over {comparison['over']}"
        change, by = verdict.difference, comparison.get("by", 0)
        yield {
            "comparison": name.replace(" - ", " / ") if change.times else name,
            "claimed": f"{comparison.get('side', 'below')} {1 if change.times else by:g}",
            **change.named("times" if change.times else "difference"),
            "units": verdict.units,
            "held": verdict.held,
            "cells": verdict.cells,
            "more": None if needs else verdict.more,
            "result": needs or verdict.verdict,
            "run": run,
            "model": "random data" if model == "synthetic" else model,
        }


def number_of(row: Mapping[str, Any]) -> str:
    """The difference or ratio of a row with its interval; empty where there is none."""
    measure = next((name for name in ("difference", "times") if name in row), None)
    if measure is None:
        return ""
    value, low, high = (row[f"{measure}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.3g}{' times' * (measure == 'times')} [{low:.3g}, {high:.3g}]"


def line_of(row: Mapping[str, Any]) -> str:
    if not number_of(row):
        return f"{row['comparison']}: {row['result']}"
    return (
        f"{row['comparison']} {number_of(row)}, claimed {row['claimed']}: {row['result']} "
        f"({row['held']} of {row['cells']} cells, {row['units']} units)"
    )


def write_page(folder: Path) -> Path:
    """The page of claims.csv: each claim with its verdict, then every comparison."""
    rows = pd.read_csv(folder / "claims.csv")
    models = ", ".join(rows["model"].dropna().unique()) if "model" in rows else ""
    deciding = rows[rows["decides"].astype(bool)]
    deciding = deciding.assign(claim=deciding["claim"] + " (" + deciding["place"] + ")")
    numbers = (
        Column("difference", text=score_format("")),
        Column("times", "ratio", number),
        Column("claimed"),
        Column("units", text=whole),
    )
    verdicts = (
        Column("id"),
        Column("verdict"),
        Column("claim"),
        Column("comparison", "decided by"),
        *numbers,
        Column("more", "prompts needed to tell", whole),
        Column("measure", "as stated, or ours"),
    )
    every = rows.assign(group=rows["id"] + ": " + rows["claim"])
    comparisons = (
        Column("comparison"),
        Column("result"),
        *numbers,
        Column("held", "cells that hold", whole),
        Column("cells", text=whole),
        Column("protocol"),
    )
    page = html(
        "tables.html.j2",
        title=f"Claims of the papers on {models}" if models else "Claims of the papers",
        subtitle=SUBTITLE,
        tables=[
            Table("claims", "Verdicts", deciding, with_values(deciding, verdicts)),
            Table("comparisons", "Every comparison", every, with_values(every, comparisons)),
        ],
    )
    return write_text(folder / PAGE, page, PAGE_MARK)


def command(name: str, words: str, options: Mapping[str, str], place: Path) -> list[str]:
    """The command line of a run: of kvbench, or of the script of scripts/papers that it names.

    The files of the option `files` take the place of generated texts in every run that reads texts; a
    needle's filler is generated without files.
    """
    run_words = shlex.split(words)
    files = options["files"]
    is_script = run_words[0].endswith(".py")
    texts: list[str] = []
    if "experiment=balancekv_figure4" in run_words:
        texts = [f"task.haystack_files={files or '[]'}"]
    elif files and "task@task.prompts=text" in run_words:
        texts = [f"task.prompts.files={files}"]
    elif files and is_script and "task=text" in run_words:
        texts = [f"task.files={files}"]
    model = []
    if not any(word.startswith("model=") for word in run_words):
        model = [f"model={options['model']}"]
    if is_script:
        script = str(ROOT / "scripts" / "papers" / run_words.pop(0))
        where = [f"results_dir={place}", f"name={name}"]
        return [sys.executable, script, *model, *run_words, *texts, *where]
    where = [f"results_dir={place}", f"experiment_name={name}", "logger=none"]
    return [sys.executable, "-m", "kvbench", *model, *run_words, *texts, *where]


def run_once(name: str, words: Sequence[str], place: Path) -> None:
    """Run a command whose results go to place/name, unless it ran to its end there before."""
    done = place / name / "done"
    line = shlex.join(words[1:]).replace(str(ROOT / "scripts"), "scripts")
    heading = f"{name}: python {line}"
    if done.is_file():
        if done.read_text(encoding="utf-8").splitlines()[0] != heading:
            raise UserError(f"{done.parent} is of another command; allowed: another results_dir")
        return
    print(heading, flush=True)
    begin = time.perf_counter()
    if subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode:
        raise UserError(
            f"{name} failed; what it did is on disk, the same command goes on from there"
        )
    times = f"{name}: {time.perf_counter() - begin:.0f} s"
    print(times, flush=True)
    done.write_text(f"{heading}\n{times}\n", encoding="utf-8")


def options_of(arguments: Sequence[str]) -> dict[str, str]:
    options = {"model": "smollm2_135m", "claims": "", "files": "", "results_dir": ""}
    for text in arguments:
        key, equals, value = text.partition("=")
        if key not in options or not equals:
            raise UserError(
                f"{text!r} is unknown; allowed: {', '.join(options)}, each as key=value"
            )
        options[key] = value
    return options


def run_comparisons(
    claim: Mapping[str, Any],
    known_runs: Mapping[str, Any],
    options: Mapping[str, str],
    place: Path,
    runs: dict[str, pd.DataFrame],
) -> None:
    """Put the rows of every run that a claim's comparisons need into `runs`, after running what was not
    run yet. A run that a difference is subtracted from (`minus`) is left out where the model cannot
    do the task."""
    for comparison, key in product(claim["comparisons"], ("run", "minus")):
        name = comparison.get(key)
        if name is None or name in runs:
            continue
        run = known_runs[name]
        if "folder" in run:
            runs[name] = read_other_experiment(place.parent, run, options["model"])
        elif "unmet" in comparison:
            runs[name] = pd.DataFrame()
        elif key == "run" or not unmet_need(runs[comparison["run"]], comparison):
            run_once(name, command(name, run["command"], options, place), place)
            runs[name] = read_run(place / name)


def main(arguments: Sequence[str]) -> None:
    options = options_of(arguments)
    yaml_of_model = claims_for(options["model"])
    known_runs = yaml_of_model["runs"]
    known_claims = {claim["id"]: claim for claim in yaml_of_model["claims"]}
    ids = options["claims"].split(",") if options["claims"] else list(known_claims)
    if set(ids) - set(known_claims):
        raise UserError(f"claims={options['claims']}; allowed: {','.join(known_claims)}")
    place = Path(options["results_dir"] or f"runs/claims/{options['model'].replace('/', '_')}")
    place.mkdir(parents=True, exist_ok=True)
    files = re.findall(r"[^\[\],'\" ]+", options["files"])
    texts = ", ".join("/".join(Path(file).parts[-2:]) for file in files) or "generated sentences"
    device = "a GPU" if torch.cuda.is_available() else "a CPU"
    runs: dict[str, pd.DataFrame] = {}
    rows: list[dict[str, Any]] = []
    for claim in (known_claims[name] for name in ids):
        run_comparisons(claim, known_runs, options, place, runs)
        claim_rows = rows_of_claim(claim, runs)
        for row in claim_rows:
            protocol = known_runs[row["run"]]["protocol"]
            row["protocol"] = protocol.format(texts=texts, device=device) + "; seed 0"
            print(f"  {line_of(row)}")
        rows += claim_rows
        print(f"{claim['id']} {claim['claim']}: {claim_rows[0]['verdict']}", flush=True)
        text = pd.DataFrame(rows).to_csv(index=False, float_format="%.4g")
        write_text(place / "claims.csv", text, "id,place,")
    page = write_page(place)
    print(f"table: {place / 'claims.csv'}; page: {page}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        complain(str(error), "claims")
        sys.exit(2)
