"""Which claims of the papers a model bears out: runs what results/claims.yaml asks for, and decides.

    python scripts/claims.py model=smollm2_135m                     all; what is there is not run again
    python scripts/claims.py model=<any> claims=B1,L1 'files=[essays/*.txt]' results_dir=runs/claims

A claim is one or more comparisons over prompts. A comparison **holds** where the difference lies on
the claimed side in every cell (intervals that hold for all of them together), or in the share of cells
that it names; it holds **on average** where the interval of the mean over cells does, **fails** where
that interval lies on the other side, and **cannot be told** otherwise (then: how many prompts would
tell, if the difference is what it seems). Texts are generated unless `files` names some.
"""

from __future__ import annotations

import math
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from kvbench import load
from kvbench.errors import UserError, complain
from kvbench.report.stats import Estimate, Scores, compared

ROOT = Path(__file__).resolve().parents[1]
ORDER = ("fails", "cannot be told", "holds on average", "holds")
"""Verdicts; a claim of several comparisons has the first of theirs."""


class Verdict(NamedTuple):
    """What a comparison came to: the mean difference over cells with its interval."""

    verdict: str
    difference: Estimate
    prompts: int
    cells: str
    more: int | None = None


def read_run(place: Path) -> pd.DataFrame:
    """The rows of a run: records of kvbench, or a script's CSV file."""
    files = sorted(place.rglob("*.csv")) if not list(place.glob("*/*/*/manifest.json")) else []
    frame = pd.read_csv(files[0]) if files else load(place)
    return frame if files else frame[frame["status"] == "ok"]


def table(rows: pd.DataFrame, asked: Mapping[str, Any]) -> pd.DataFrame:
    """The value of each variant, [units x cells, variants].

    Args:
        asked: `value`, the column; `unit`, `variant` and `cells`, columns; `where`: the values of other
            columns that count; `take`: mean | median | sum of the rows of one cell, or `slope`: the
            exponent of the value as a power of that column.
    """
    for column, allowed in asked.get("where", {}).items():
        rows = rows[rows[column].isin(allowed if isinstance(allowed, list) else [allowed])]
    keys = [asked.get("unit", "prompt"), *asked.get("cells", []), asked.get("variant", "method")]
    groups, value = rows.groupby(keys, sort=False), asked["value"]
    if "slope" not in asked:
        return groups[value].agg(asked.get("take", "mean")).unstack()

    def slope(part: pd.DataFrame) -> float:
        x, y = (np.log(part[column].astype(float)) for column in (asked["slope"], value))
        return float(np.polyfit(x, y, 1)[0])

    return groups[[value, asked["slope"]]].apply(slope).unstack()


def differences(values: pd.DataFrame, asked: Mapping[str, Any]) -> pd.DataFrame:
    """`first` minus `factor` times each of `against` (or the best of them), or minus `target`:
    [units, cells]."""
    first = values[asked["first"]]
    if "target" in asked:
        others = {"target": asked["target"]}
    else:
        names = asked["against"]
        if asked.get("best"):
            means = values[names].mean()
            names = [means.idxmin() if asked["best"] == "lowest" else means.idxmax()]
        others = {name: asked.get("factor", 1) * values[name] for name in names}
    whole: Any = pd.DataFrame({name: first - other for name, other in others.items()})
    cells = list(range(1, whole.index.nlevels))
    found: pd.DataFrame = whole.unstack(cells) if cells else whole
    return found


def intervals(values: Any) -> list[Estimate]:
    """The mean of each column [units, cells] with intervals that hold for all of them together."""
    cells = values.shape[1]
    columns = np.column_stack([values, np.zeros(len(values))])
    scores = Scores(
        "claim", columns, ~np.isnan(columns), np.arange(len(values)), ({},) * (cells + 1)
    )
    return list(compared([scores], [(i, cells) for i in range(cells)], fraction=False).values())


def judged(found: pd.DataFrame, asked: Mapping[str, Any]) -> Verdict:
    """The verdict on differences [units, cells], claimed to lie `below` or `above` `by`, or `within` it
    on either side of zero, in `share` of the cells."""
    side, by = asked.get("side", "below"), asked.get("by", 0.0)
    least = {"below": -math.inf, "above": by, "within": -by}[side]
    most = math.inf if side == "above" else by
    values = found.to_numpy(float)
    (mean,) = intervals(np.nanmean(values, axis=1, keepdims=True))
    held = [least <= one.low and one.high <= most for one in intervals(values)]
    result = ("holds", mean, len(found), f"{sum(held)} of {len(held)} cells")
    if sum(held) >= asked.get("share", 1.0) * len(held):
        return Verdict(*result)
    if least <= mean.low and mean.high <= most:
        return Verdict("holds on average", *result[1:])
    if mean.high < least or mean.low > most:
        return Verdict("fails", *result[1:])
    room = min(abs(mean.value - bound) for bound in (least, most))
    more = math.ceil(len(found) * ((mean.high - mean.value) / room) ** 2) if room else None
    return Verdict("cannot be told", *result[1:], more)


def command(name: str, words: str, options: Mapping[str, str], place: Path) -> list[str]:
    """The command line of a run: of kvbench, or of the script of scripts/papers that it names."""
    texts = f"task.prompts.files={options['files']}" if "task@task.prompts=text" in words else ""
    given = shlex.split(words)
    if given[0].endswith(".py"):
        texts = f"task.files={options['files']}"
        start = [sys.executable, str(ROOT / "scripts" / "papers" / given.pop(0))]
        where = [f"results_dir={place}", f"name={name}"]
    else:
        start = [sys.executable, "-m", "kvbench"]
        where = [f"results_dir={place}", f"experiment_name={name}", "logger=none"]
    model = (
        [] if any(word.startswith("model=") for word in given) else [f"model={options['model']}"]
    )
    return [*start, *model, *given, *([texts] if texts and options["files"] else []), *where]


def main(given: Sequence[str]) -> None:
    """Run and decide; the table, as Markdown, is printed and kept beside the runs."""
    options = {"model": "smollm2_135m", "claims": "", "files": "", "results_dir": "runs/claims"}
    for text in given:
        key, equals, value = text.partition("=")
        if key not in options or not equals:
            raise UserError(
                f"{text!r} is unknown; allowed: {', '.join(options)}, each as key=value"
            )
        options[key] = value
    asked = yaml.safe_load((ROOT / "results" / "claims.yaml").read_text(encoding="utf-8"))
    wanted = (
        options["claims"].split(",") if options["claims"] else [c["id"] for c in asked["claims"]]
    )
    known = {claim["id"]: claim for claim in asked["claims"]}
    if set(wanted) - set(known):
        raise UserError(f"claims={options['claims']}; allowed: {','.join(known)}")
    place = Path(options["results_dir"], options["model"].replace("/", "_"))
    lines = ["| id | place | claim | first - other | verdict |", "| --- | --- | --- | --- | --- |"]
    for claim in (known[name] for name in wanted):
        found: list[tuple[str, Verdict]] = []
        for comparison in claim.get("comparisons", []):
            run = comparison["run"]
            words = command(run, asked["runs"][run], options, place)
            if not (place / run / "done").is_file():
                print(f"{claim['id']}: {shlex.join(words[1:])}", flush=True)
                subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
                (place / run / "done").touch()
            values = table(read_run(place / run), comparison)
            found.append((comparison["first"], judged(differences(values, comparison), comparison)))
        verdict = min(
            (one.verdict for _, one in found), key=ORDER.index, default=claim.get("needs")
        )
        numbers = "; ".join(
            f"{name} {v.difference.value:.3g} [{v.difference.low:.3g}, {v.difference.high:.3g}], "
            f"{v.cells}, {v.prompts} units" + (f", {v.more} would tell" if v.more else "")
            for name, v in found
        )
        line = f"| {claim['id']} | {claim['place']} | {claim['claim']} | {numbers} | {verdict} |"
        print(line, flush=True)
        lines.append(line)
    place.mkdir(parents=True, exist_ok=True)
    (place / "claims.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (UserError, subprocess.CalledProcessError) as error:
        complain(str(error), "claims")
        sys.exit(2)
