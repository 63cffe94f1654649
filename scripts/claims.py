"""Which claims of the papers a model bears out: runs what results/claims.yaml asks for, and decides.

    python scripts/claims.py model=smollm2_135m          all; what is there is not run again
    python scripts/claims.py model=<any> claims=B1,L1 'files=[essays/*.txt]' results_dir=runs/claims/mine

A claim is one or more comparisons over prompts, each with a rule. A comparison has cells (a layer at a
rate, say); in each the difference has a 95 % interval of its own. The comparison

- **holds** if the interval of every cell (or of the share of cells that it names) lies on the claimed
  side;
- **holds on average** if the interval of the mean over cells does;
- **fails** if that interval lies on the other side;
- **cannot be told** otherwise. Then it says how many prompts would tell, if the difference is what it
  seems.

A claim's verdict is the worst one of its comparisons. Texts are generated unless `files` names some.

Written to results_dir (default: runs/claims/<model>): claims.csv, a row for each comparison; claims.md,
for each claim the comparison that decided; a page; a folder for each run. The seconds of every run are
printed and are in its file `done`.
"""

from __future__ import annotations

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
from kvbench.report.claims_page import write_claims_page
from kvbench.report.render import write_text
from kvbench.report.stats import Array, Estimate, differences

ROOT = Path(__file__).resolve().parents[1]
ABLE = 0.8
"""Share of whole answers of the exact cache below which a task tells nothing about methods."""
UNABLE = "needs a model that retrieves"
ORDER = ("fails", "cannot be told", "holds on average", "holds")
"""Verdicts, the worst first. A comparison without a verdict says what it needs; a claim says so only if
none of its comparisons has a verdict."""
COLUMNS = (
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
    """How a comparison was decided: the mean difference over cells, of so many independent units
    (prompts, texts, fillers); cells that hold, of all; how many units would tell where it cannot be
    told."""

    verdict: str
    difference: Estimate
    units: int
    held: int
    cells: int
    more: int | None = None


def claims_for(model: str) -> dict[str, Any]:
    """Read results/claims.yaml for a model: $SHOWN stands for those of the layers 1, 2 and 5, which
    BalanceKV's figures show, that the model has; $SPREAD for seven of its layers from the first to the
    last; $BOTH for both."""
    with hydra_of_conf() as hydra:
        spec = instantiate(composed(hydra, expanded([f"model={model}"])).model, _convert_="all")
    numbers = [layer + 1 for layer in full_layers(load_config(spec).get_text_config())]
    shown = [layer for layer in (1, 2, 5) if layer in numbers]
    spread = sorted({numbers[round(i * (len(numbers) - 1) / 6)] for i in range(7)})
    layers_by_name = {"$SHOWN": shown, "$SPREAD": spread, "$BOTH": sorted({*shown, *spread})}
    text = (ROOT / "results" / "claims.yaml").read_text(encoding="utf-8")
    for name, layers in layers_by_name.items():
        text = text.replace(name, str(layers).replace(" ", ""))
    return dict(yaml.safe_load(text))


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


def differences_to_each(
    values: pd.DataFrame, comparison: Mapping[str, Any]
) -> dict[str, pd.DataFrame]:
    """`first` minus `factor` times each of `against`, or minus the number `target`: a table
    [units, cells] for each, by the name of what is subtracted.

    A method that beats the best of several beats each of them, so none is chosen here.
    """
    first = values[comparison["first"]]
    factor = comparison.get("factor", 1)
    subtracted: dict[str, Any] = {}
    if "target" in comparison:
        target = comparison["target"]
        subtracted[f"({target})" if target < 0 else f"{target}"] = target
    for name in comparison.get("against", []):
        subtracted[name if factor == 1 else f"{factor:g} {name}"] = factor * values[name]
    tables = {}
    for name, other in subtracted.items():
        table = (first - other).unstack(list(range(1, values.index.nlevels)))
        table = table.to_frame() if isinstance(table, pd.Series) else table
        tables[name] = table.dropna(how="all")
    return tables


def verdict_on(values: Array, comparison: Mapping[str, Any], reach: float = 1.0) -> Verdict:
    """The verdict on differences [units, cells], which are claimed to lie `below` or `above` the number
    `by`, or `within` it on either side of zero, in the share `share` of the cells.

    Args:
        reach: the largest score that is compared, where scores are fractions.
    """
    side = comparison.get("side", "below")
    by = comparison.get("by", 0.0)
    largest = reach if "fraction" in comparison else None
    least = {"below": -math.inf, "above": by, "within": -by}[side]
    most = math.inf if side == "above" else by
    means = np.nanmean(values, axis=1, keepdims=True)
    (mean,) = differences([means], reach=largest)
    cells = differences([values], reach=largest)
    held = sum(least < cell.low and cell.high < most for cell in cells)
    more = None
    if held >= comparison.get("share", 1.0) * len(cells):
        verdict = "holds"
    elif least < mean.low and mean.high < most:
        verdict = "holds on average"
    elif mean.high <= least or mean.low >= most:
        verdict = "fails"
    else:
        verdict = "cannot be told"
        room = min(abs(mean.value - bound) for bound in (least, most))
        if (
            room and mean.high > mean.value
        ):  # an interval's width falls with the square root of the units
            more = math.ceil(len(values) * ((mean.high - mean.value) / room) ** 2)
    return Verdict(verdict, mean, len(values), held, len(cells), more)


def unmet_need(rows: pd.DataFrame, comparison: Mapping[str, Any]) -> str:
    """What a comparison needs that this model has not; empty where it tells methods apart.

    There must be rows; the method `able` must give whole answers to a share `ABLE` of the prompts; and
    the answers of `first` must differ from those of the method `unlike`.
    """
    if rows.empty:
        return f"needs the records of {comparison['run']} (make results-papers)"
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
    values = values_of_units(runs[run], comparison)
    names = [comparison["first"], *comparison.get("against", [])]
    reach = float(np.nanmax(values[names].abs().to_numpy())) or 1.0
    minus = None if needs else comparison.get("minus")
    subtracted = {}
    if minus:
        subtracted = differences_to_each(values_of_units(runs[minus], comparison), comparison)
    value = comparison["value"]
    if "slope" in comparison:
        value = f"slope of {value}"
    for other, differences_to_other in differences_to_each(values, comparison).items():
        name = f"{run}, {value}: {comparison['first']} - {other}"
        if minus:
            name += f", less that of {minus}"
            differences_to_other = differences_to_other - subtracted[other]
        if "over" in comparison:
            name += f", mean over {comparison['over']}"
        verdict = verdict_on(differences_to_other.to_numpy(float), comparison, reach)
        yield {
            "comparison": name,
            "claimed": f"{comparison.get('side', 'below')} {comparison.get('by', 0):g}",
            **verdict.difference.named("difference"),
            "units": verdict.units,
            "held": verdict.held,
            "cells": verdict.cells,
            "more": None if needs else verdict.more,
            "result": needs or verdict.verdict,
            "run": run,
            "model": "random data" if model == "synthetic" else model,
        }


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", "| --- " * len(COLUMNS) + "|"]
    for row in rows:
        if not row["decides"]:
            continue
        results = [other["result"] for other in rows if other["id"] == row["id"]]
        difference = ""
        if "difference" in row:
            low, high = row["difference_low"], row["difference_high"]
            difference = f"{row['difference']:.3g} [{low:.3g}, {high:.3g}]"
        more = f"; {row['more']:g} would tell" if row.get("more") else ""
        texts = {
            **dict.fromkeys(COLUMNS, ""),
            **row,
            "claim": f"{row['claim']} ({row['place']})",
            "as stated \\| ours": row["measure"],
            "decided by": row["comparison"],
            "difference": difference,
            "holds": f"{results.count('holds')} of {len(results)}",
            "verdict": f"**{row['verdict']}**{more}",
        }
        lines.append(f"| {' | '.join(str(texts[column]) for column in COLUMNS)} |")
    return "\n".join(lines) + "\n"


def line_of(row: Mapping[str, Any]) -> str:
    if "difference" not in row:
        return f"{row['comparison']}: {row['result']}"
    return (
        f"{row['comparison']} {row['difference']:.3g} [{row['difference_low']:.3g}, "
        f"{row['difference_high']:.3g}], claimed {row['claimed']}: {row['result']} "
        f"({row['held']} of {row['cells']} cells, {row['units']} units)"
    )


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
        write_text(place / "claims.md", markdown(rows), f"| {' | '.join(COLUMNS)} |")
    page = write_claims_page(place)
    print(f"tables: {place / 'claims.csv'}, {place / 'claims.md'}; page: {page}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        complain(str(error), "claims")
        sys.exit(2)
