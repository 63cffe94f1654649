"""Which claims of the papers a model bears out: runs what results/claims.yaml asks for, and decides.

    kvbench claims model=smollm2_135m                    all; what is there is not run again
    kvbench claims model=<any> claims=B1,L1 'files=[essays/*.txt]' results_dir=runs/claims/mine

A claim is one or more comparisons over prompts, each with a rule. A comparison **holds** where every
cell (or the share of cells that it names) lies on the claimed side; it holds **on average** where the
mean over cells does, **fails** where that lies on the other side, and **cannot be told** otherwise
(then: how many prompts would tell, if the difference is what it seems). Of these a claim has the worst
of its comparisons'. "Lies" is said of 95 % intervals that hold for all cells of a claim together, and
for all its means. Texts are generated unless `files` names some.

In results_dir (runs/claims/<model>): claims.csv, a row for each comparison; claims.md, for each claim
the comparison that decided; a folder for each run.
"""

from __future__ import annotations

import math
import re
import resource
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
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
from kvbench.engine.loading import load_config
from kvbench.errors import UserError, complain
from kvbench.report.claims_page import write_claims_page
from kvbench.report.stats import Array, Estimate, Scores, differences, together

ROOT = Path(__file__).resolve().parents[1]
ABLE = 0.8
"""Share of whole answers of the exact cache below which a task tells nothing about methods."""
UNABLE = "needs a model that retrieves"
ORDER = ("fails", "cannot be told", "holds on average", "holds")
"""Verdicts; a claim has the first of its comparisons', and only where none has any, what they need."""
SHOWN = (
    "id",
    "claim",
    "as stated \\| ours",
    "decided by",
    "difference",
    "claimed",
    "units",
    "holds",
    "verdict",
)


class Verdict(NamedTuple):
    """What a comparison came to: the mean difference over cells with its interval, independent units
    (prompts, texts, fillers), cells that hold, and how many units would tell where it cannot be told."""

    verdict: str
    difference: Estimate
    units: int
    held: int
    cells: int
    more: int | None = None


class Compared(NamedTuple):
    """A comparison and its differences.

    Attributes:
        asked: the comparison of claims.yaml.
        needs: what it needs that the model has not; empty where it tells methods apart.
        differences: [units, cells].
        reach: the largest score that is compared.
    """

    asked: Mapping[str, Any]
    needs: str
    differences: pd.DataFrame
    reach: float


def claims_for(model: str) -> dict[str, Any]:
    """results/claims.yaml, with numbers of this model's layers: those that the papers show, and seven
    from the first to the last."""
    with hydra_of_conf() as hydra:
        spec = instantiate(composed(hydra, expanded([f"model={model}"])).model, _convert_="all")
    every = [layer + 1 for layer in full_layers(load_config(spec).get_text_config())]
    shown = [layer for layer in (1, 2, 5) if layer in every]
    spread = sorted({every[round(i * (len(every) - 1) / 6)] for i in range(7)})
    numbers = {"$SHOWN": shown, "$SPREAD": spread, "$BOTH": sorted({*shown, *spread})}
    text = (ROOT / "results" / "claims.yaml").read_text(encoding="utf-8")
    for name, layers in numbers.items():
        text = text.replace(name, str(layers).replace(" ", ""))
    return dict(yaml.safe_load(text))


def read_run(place: Path) -> pd.DataFrame:
    """The rows of a run: records of kvbench, or a script's CSV file, which is named after the model.

    Raises:
        UserError: examples failed, so that cells would be absent.
    """
    files = [] if list(place.glob("*/*/*/manifest.json")) else sorted(place.rglob("*.csv"))
    if files:
        return pd.read_csv(files[0]).assign(model=files[0].stem)
    rows = load(place)
    wrong = rows[rows["status"] != "ok"]
    if len(wrong):
        one = wrong.iloc[0]
        raise UserError(
            f"{place.name}: {len(wrong)} of {len(rows)} records failed, the first {one['method']} at "
            f"{one['example_id']}: {one['error']}"
        )
    return rows


def read_made(beside: Path, run: Mapping[str, Any], model: str) -> pd.DataFrame:
    """The rows of an experiment that another command makes, which takes too long for this one; empty
    where it was not made, not to its end, or of another model."""
    place = beside / run["folder"]
    if not list(place.glob("*/*/*/manifest.json")):
        return pd.DataFrame()
    rows = read_run(place)
    ours = rows["model"].astype(str).str.startswith(model.rpartition("/")[2]).all()
    return rows if ours and len(rows) >= run["records"] else pd.DataFrame()


def values_of_units(rows: pd.DataFrame, asked: Mapping[str, Any]) -> pd.DataFrame:
    """The value of each variant, [units x cells, variants].

    Args:
        asked: `value`, the column; `unit`, `variant` and `cells`, columns; `where`: the values of other
            columns that count; `slope`: instead of the mean of a cell's rows, the exponent of the value
            as a power of that column.
    """
    for column, allowed in asked.get("where", {}).items():
        rows = rows[rows[column].isin(allowed if isinstance(allowed, list) else [allowed])]
    keys = [asked.get("unit", "prompt"), *asked.get("cells", []), asked.get("variant", "method")]
    groups, value = rows.groupby(keys, sort=False), asked["value"]
    if "slope" not in asked:
        return groups[value].mean().unstack()

    def slope(part: pd.DataFrame) -> float:
        x, y = (np.log(part[column].astype(float)) for column in (asked["slope"], value))
        return float(np.polyfit(x, y, 1)[0])

    return groups[[value, asked["slope"]]].apply(slope).unstack()


def differences_to_each(values: pd.DataFrame, asked: Mapping[str, Any]) -> dict[str, pd.DataFrame]:
    """`first` minus `factor` times each of `against`, or minus `target`: a table [units, cells] for
    each, by what is subtracted. (Who beats the best of several beats each, so none is chosen.)"""
    first, factor = values[asked["first"]], asked.get("factor", 1)
    others: dict[str, Any] = {}
    if "target" in asked:
        target = asked["target"]
        others[f"({target})" if target < 0 else f"{target}"] = target
    for name in asked.get("against", []):
        others[name if factor == 1 else f"{factor:g} {name}"] = factor * values[name]
    differences_by_name = {}
    for name, other in others.items():
        each = (first - other).unstack(list(range(1, values.index.nlevels)))
        each = each.to_frame() if isinstance(each, pd.Series) else each
        differences_by_name[name] = each.dropna(how="all")
    return differences_by_name


def family_of_all(tables: Sequence[Array]) -> Array:
    """Sorted: how large the largest |z| of all columns of these tables [units, cells] is where no mean
    differs from zero. Columns of one table go together; tables, of other units, are independent."""
    shuffled, rng = [], np.random.default_rng(0)
    for values in tables:
        cells = values.shape[1]
        scores = of_columns(np.column_stack([values, np.zeros(len(values))]))
        shuffled.append(rng.permutation(together([scores], [(i, cells) for i in range(cells)])))
    return np.sort(np.max(shuffled, axis=0))


def of_columns(values: Array) -> Scores:
    """Each row a unit of its own."""
    none_failed = ({},) * values.shape[1]
    return Scores("", "claim", values, ~np.isnan(values), np.arange(len(values)), none_failed)


def intervals(values: Array, family: Array, fraction: bool, reach: float) -> list[Estimate]:
    """The mean of each column [units, cells], with intervals that hold with all those of `family`;
    `reach` as `kvbench.report.stats.differences` has it."""
    part = of_columns(values)
    return differences([part.stratum(values)], fraction=fraction, family=family, reach=reach)


def verdict_on(
    values: Array,
    asked: Mapping[str, Any],
    cells: Array | None = None,
    means: Array | None = None,
    reach: float = 1.0,
) -> Verdict:
    """The verdict on differences [units, cells], claimed to lie `below` or `above` `by`, or `within` it
    on either side of zero, in `share` of the cells.

    Args:
        cells, means: the families of intervals (`family_of_all`); of these differences alone.
        reach: the largest score of a fraction.
    """
    side, by, fraction = asked.get("side", "below"), asked.get("by", 0.0), "fraction" in asked
    least = {"below": -math.inf, "above": by, "within": -by}[side]
    most = math.inf if side == "above" else by
    average = np.nanmean(values, axis=1, keepdims=True)
    (mean,) = intervals(
        average, family_of_all([average]) if means is None else means, fraction, reach
    )
    every = intervals(values, family_of_all([values]) if cells is None else cells, fraction, reach)
    held = sum(least < one.low and one.high < most for one in every)
    told = mean, len(values), held, len(every)
    if held >= asked.get("share", 1.0) * len(every):
        return Verdict("holds", *told)
    if least < mean.low and mean.high < most:
        return Verdict("holds on average", *told)
    if mean.high <= least or mean.low >= most:
        return Verdict("fails", *told)
    room = min(abs(mean.value - bound) for bound in (least, most))
    more = math.ceil(len(values) * ((mean.high - mean.value) / room) ** 2) if room else None
    return Verdict("cannot be told", *told, more)


def unmet_need(rows: pd.DataFrame, asked: Mapping[str, Any]) -> str:
    """What a comparison needs that this model has not; empty where it tells methods apart. The method
    `able` must give as many whole answers as `ABLE`, and `first` others than the method `unlike`; and
    there must be rows."""
    if rows.empty:
        return f"needs the records of {asked['run']} (make results-papers)"
    if "able" in asked:
        whole = "containment" if "containment" in rows else "score"
        if rows.loc[rows["method"] == asked["able"], whole].mean() < ABLE:
            return UNABLE
    if "unlike" in asked:
        both = [asked["first"], asked["unlike"]]
        answers = rows.pivot(index="example_id", columns="method", values="prediction")[both]
        if answers[both[0]].equals(answers[both[1]]):
            return f"needs a model on which {both[0]} differs from {both[1]}"
    return ""


def rows_of_claim(
    claim: Mapping[str, Any], runs: Mapping[str, pd.DataFrame]
) -> list[dict[str, Any]]:
    """A row for each comparison of a claim with each method that it names; `decides` marks the one that
    has the claim's verdict (of several the first). With `minus`, a run of the same units, a comparison
    is of how much smaller the difference is there."""
    compared_rows: list[tuple[Compared, dict[str, Any]]] = []
    rows: list[dict[str, Any]] = []
    for asked in claim["comparisons"]:
        needs = unmet_need(runs[asked["run"]], asked)
        if runs[asked["run"]].empty:
            absent = {"comparison": f"{asked['run']}, {asked['value']}", "result": needs}
            rows.append(absent | {"run": asked["run"], "model": "none"})
            continue
        values = values_of_units(runs[asked["run"]], asked)
        names = [asked["first"], *asked.get("against", [])]
        reach = float(np.nanmax(values[names].abs().to_numpy())) or 1.0
        less = None if needs else asked.get("minus")
        for other, each in differences_to_each(values, asked).items():
            if less:
                each = each - differences_to_each(values_of_units(runs[less], asked), asked)[other]
            value = f"slope of {asked['value']}" if "slope" in asked else asked["value"]
            said = f"{asked['run']}, {value}: {asked['first']} - {other}"
            said += f", less that of {less}" if less else ""
            said += f", mean over {asked['over']}" if "over" in asked else ""
            rows.append({"comparison": said})
            compared_rows.append((Compared(asked, needs, each, reach), rows[-1]))
    told = [one for one, _ in compared_rows if not one.needs]
    by_run = {one.asked["run"] for one in told}

    def family(mean: bool) -> Array:
        """The family of all cells of the claim, or of its means over cells."""
        tables = []
        for run in sorted(by_run):
            parts = [one.differences for one in told if one.asked["run"] == run]
            parts = [part.mean(axis=1).to_frame() if mean else part for part in parts]
            tables.append(pd.concat(parts, axis=1).to_numpy(float))
        return family_of_all(tables)

    cells, means = (family(False), family(True)) if told else (None, None)
    for (asked, needs, each, reach), row in compared_rows:
        verdict = verdict_on(each.to_numpy(float), asked, cells, means, reach)
        by = asked.get("by", 0)
        model = runs[asked["run"]]["model"].iloc[0]
        row |= {
            "claimed": f"{asked.get('side', 'below')} {by:g}",
            **verdict.difference.named("difference"),
            "units": verdict.units,
            "held": verdict.held,
            "cells": verdict.cells,
            "more": None if needs else verdict.more,
            "result": needs or verdict.verdict,
            "run": asked["run"],
            "model": "random data" if str(model) == "nan" else model,
        }
    results = [row["result"] for row in rows]
    worst = min(results, key=lambda one: ORDER.index(one) if one in ORDER else len(ORDER))
    first = next(row for row in rows if row["result"] == worst)
    about = {key: claim[key] for key in ("id", "place", "stated", "measure", "claim")}
    about |= {"verdict": worst}
    return [about | {"decides": row is first} | row for row in rows]


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows that decide, as a table."""
    lines = [f"| {' | '.join(SHOWN)} |", "| --- " * len(SHOWN) + "|"]
    for row in (row for row in rows if row["decides"]):
        mine = [other for other in rows if other["id"] == row["id"]]
        held = sum(other["result"] == "holds" for other in mine)
        difference = ""
        if "difference" in row:
            low, high = row["difference_low"], row["difference_high"]
            difference = f"{row['difference']:.3g} [{low:.3g}, {high:.3g}]"
        more = f"; {row['more']:g} would tell" if row.get("more") else ""
        shown = (
            dict.fromkeys(SHOWN, "")
            | dict(row)
            | {
                "claim": f"{row['claim']} ({row['place']})",
                "as stated \\| ours": row["measure"],
                "decided by": row["comparison"],
                "difference": difference,
                "holds": f"{held} of {len(mine)}",
                "verdict": f"**{row['verdict']}**{more}",
            }
        )
        lines.append(f"| {' | '.join(str(shown[key]) for key in SHOWN)} |")
    return "\n".join(lines) + "\n"


def line_of(row: Mapping[str, Any]) -> str:
    """A comparison as the terminal shows it."""
    if "difference" not in row:
        return f"{row['comparison']}: {row['result']}"
    return (
        f"{row['comparison']} {row['difference']:.3g} [{row['difference_low']:.3g}, "
        f"{row['difference_high']:.3g}], claimed {row['claimed']}: {row['result']} "
        f"({row['held']} of {row['cells']} cells, {row['units']} units)"
    )


def command(name: str, words: str, options: Mapping[str, str], place: Path) -> list[str]:
    """The command line of a run: of kvbench, or of the script of scripts/papers that it names. Texts go
    where the run reads text; a needle's filler is generated unless the run says otherwise."""
    given = shlex.split(words)
    files, task = options["files"], "task=stream" in given or given[0].endswith(".py")
    if "task@task.prompts=text" in given:
        texts = [f"task.prompts.files={files}"]
    elif "experiment=balancekv_figure4" in given:
        kind = "files" if files else "generated"
        texts = [f"task.haystack={kind}", f"task.haystack_files={files or '[]'}"]
        files = "given"
    else:
        texts = [f"task.files={files}"] if task else []
    model = (
        [] if any(word.startswith("model=") for word in given) else [f"model={options['model']}"]
    )
    start = ["-m", "kvbench"]
    where = [f"results_dir={place}", f"experiment_name={name}", "logger=none"]
    if given[0].endswith(".py"):
        start = [str(ROOT / "scripts" / "papers" / given.pop(0))]
        where = [f"results_dir={place}", f"name={name}"]
    return [sys.executable, *start, *model, *given, *(texts if files else []), *where]


def run_once(name: str, words: Sequence[str], place: Path) -> None:
    """Run a command whose results go to place/name, unless it ran to its end there before.

    Raises:
        UserError: the folder is of another command, or the command failed.
    """
    done = place / name / "done"
    line = shlex.join(words[1:]).replace(str(ROOT / "scripts"), "scripts")
    said = f"{name}: python {line}"
    if done.is_file():
        if done.read_text(encoding="utf-8").splitlines()[0] != said:
            raise UserError(f"{done.parent} is of another command; allowed: another results_dir")
        return
    print(said, flush=True)
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if subprocess.run(words, check=False, stdout=subprocess.DEVNULL).returncode:
        raise UserError(
            f"{name} failed; what it did is on disk, the same command goes on from there"
        )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    took = f"{name}: {time.perf_counter() - begin:.0f} s, {used:.0f} s of processor time"
    print(took, flush=True)
    done.write_text(f"{said}\n{took}\n", encoding="utf-8")


def options_of(given: Sequence[str]) -> dict[str, str]:
    """The command line's options.

    Raises:
        UserError: a word that is none.
    """
    options = {"model": "smollm2_135m", "claims": "", "files": "", "results_dir": ""}
    for text in given:
        key, equals, value = text.partition("=")
        if key not in options or not equals:
            raise UserError(
                f"{text!r} is unknown; allowed: {', '.join(options)}, each as key=value"
            )
        options[key] = value
    return options


def run_comparisons(
    claim: Mapping[str, Any],
    asked: Mapping[str, Any],
    options: Mapping[str, str],
    place: Path,
    runs: dict[str, pd.DataFrame],
) -> None:
    """Put the rows of every run that a claim's comparisons need into `runs`; those that are not there
    yet are run. A run that a difference is subtracted from (`minus`) is left out where the model cannot
    do the task."""
    for comparison, key in product(claim["comparisons"], ("run", "minus")):
        name = comparison.get(key)
        if name is None or name in runs:
            continue
        if "folder" in asked["runs"][name]:
            runs[name] = read_made(place.parent, asked["runs"][name], options["model"])
        elif key == "run" or not unmet_need(runs[comparison["run"]], comparison):
            run_once(name, command(name, asked["runs"][name]["command"], options, place), place)
            runs[name] = read_run(place / name)


def main(given: Sequence[str]) -> None:
    """Run, decide, print a line for each comparison; write the tables.

    Raises:
        UserError: an unknown key or claim, or a run that failed.
    """
    options = options_of(given)
    asked = claims_for(options["model"])
    known = {claim["id"]: claim for claim in asked["claims"]}
    wanted = options["claims"].split(",") if options["claims"] else list(known)
    if set(wanted) - set(known):
        raise UserError(f"claims={options['claims']}; allowed: {','.join(known)}")
    place = Path(options["results_dir"] or f"runs/claims/{options['model'].replace('/', '_')}")
    names = re.findall(r"[^\[\],'\" ]+", options["files"])
    texts = ", ".join("/".join(Path(name).parts[-2:]) for name in names) or "generated sentences"
    device = "a GPU" if torch.cuda.is_available() else "a CPU"
    runs: dict[str, pd.DataFrame] = {}
    rows: list[dict[str, Any]] = []
    place.mkdir(parents=True, exist_ok=True)
    for claim in (known[name] for name in wanted):
        run_comparisons(claim, asked, options, place, runs)
        of_claim = rows_of_claim(claim, runs)
        for row in of_claim:
            protocol = asked["runs"][row["run"]]["protocol"]
            row["protocol"] = protocol.format(texts=texts, device=device) + "; seed 0"
            print(f"  {line_of(row)}")
        rows += of_claim
        print(f"{claim['id']} {claim['claim']}: {of_claim[0]['verdict']}", flush=True)
        pd.DataFrame(rows).to_csv(place / "claims.csv", index=False, float_format="%.4g")
        (place / "claims.md").write_text(markdown(rows), encoding="utf-8")
    page = write_claims_page(place)
    print(f"tables: {place / 'claims.csv'}, {place / 'claims.md'}; page: {page}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        complain(str(error), "claims")
        sys.exit(2)
