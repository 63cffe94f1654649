"""The tables of results/README.md and of the model card say what the committed results say."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "results"
READMES = (
    "conf/README.md",
    "kvbench/README.md",
    "kvbench/methods/README.md",
    "results/README.md",
    "scripts/README.md",
)


def rows(text: str, name: str) -> dict[str, list[str]]:
    """Cells by method of the table called `name`."""
    block = re.search(rf"<!-- table {name} -->\n(.*?)<!-- end {name} -->", text, re.S)
    assert block
    lines = [line.strip("| \n").split(" | ") for line in block[1].splitlines()]
    assert len(lines) > 8
    return {line[0]: line[1:] for line in [lines[0], *lines[2:]]}


def committed(file: str, method: str, **where: str) -> tuple[float, float, float]:
    """Score and interval of one method in a committed CSV file, read without pandas."""
    with (RESULTS / file).open(encoding="utf-8") as stream:
        (line,) = (
            line
            for line in csv.DictReader(stream)
            if line["variant"] == method and all(line[key] == value for key, value in where.items())
        )
    return tuple(float(line[key]) for key in ("score", "score_low", "score_high"))  # type: ignore[return-value]


def test_the_tables_are_what_results_say() -> None:
    script = [sys.executable, str(ROOT / "scripts/readme_tables.py"), "--check"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_numbers_of_the_first_table() -> None:
    """Read independently of the script that wrote them."""
    found = rows((RESULTS / "README.md").read_text(encoding="utf-8"), "demo")
    for method in ("exact", "snapkv", "h2o", "uniform", "balancekv"):
        cells = dict(zip(found["method"], found[method], strict=True))
        lines = committed("demo/tables/longeval_lines-recall_mini.csv", method, dataset="average")
        assert cells["lines"] == "{:.0f} [{:.0f}, {:.0f}]".format(*lines)
        error = committed("demo/tables/layer_error-recall_mini-by-rate.csv", method, rate="0.25")
        assert cells["layer error"] == "{:.3f} [{:.3f}, {:.3f}]".format(*error)


def test_every_figure_and_page_that_a_text_shows_is_committed() -> None:
    texts = [ROOT / "README.md", *(ROOT / room for room in READMES)]
    for text in texts:
        for target in re.findall(r"\]\(([^)#]+)\)", text.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (text.parent / target).exists(), (text.name, target)
