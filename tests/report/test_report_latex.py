"""LaTeX tables are compiled as a paper would."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.report_runs import HOSTILE, write_demo, write_longbench
from support.tables import made_of

from kvbench.report.build import build_report
from kvbench.report.render.text import latex

AWKWARD = made_of(
    ("method", "[a]", "Δ σ", "ünïcode €"),
    (
        ("[brackets] first", "[1.0, 2.0]", "−3.1 [−5.0, −1.2]", "中文 <|end|>"),
        ("b", "–", '"quoted"', HOSTILE),
    ),
    name="awk_ward {table}",
    title="100 % of $x_1 & ~y^2 #3 \\ {z}",
    notes=("≈ marks × ± ≤ ∞ … ·",),
    bold=((0, 1), (0, 2)),
    groups=("Model_A", "B%"),
    marks={(0, 2): "†≈", (1, 2): "‡"},
)


def compiled(tmp_path: Path, tables: list[str], packages: str) -> Path:
    """The PDF of a document with these tables; the log is the error."""
    if shutil.which("pdflatex") is None:
        pytest.skip("needs pdflatex (Debian: apt-get install texlive-latex-recommended)")
    text = "\n".join(
        [
            r"\documentclass{article}",
            *(rf"\usepackage{{{name}}}" for name in packages.split()),
            r"\begin{document}",
            *tables,
            r"\end{document}",
        ]
    )
    (tmp_path / "paper.tex").write_text(text, encoding="utf-8")
    done = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return tmp_path / "paper.pdf"


def test_anything_in_a_cell_compiles(tmp_path: Path) -> None:
    assert compiled(tmp_path, [latex(AWKWARD)], "booktabs").stat().st_size > 10_000


ATTACKS = (
    r"\input{/etc/passwd}",
    r"\immediate\write18{touch owned}",
    r"\openout0=owned \csname input\endcsname",
    "^^5cinput{/etc/passwd}",
    "a\n\\end{document}\r\\newwrite\\x %",
    r"$\input x$ #1 ~ }}} \begin{verbatim}",
)


def test_no_text_of_a_table_is_a_command() -> None:
    """Labels come from whoever made the records."""
    view = made_of(
        ("method", *ATTACKS),
        [(attack, *ATTACKS) for attack in ATTACKS],
        name=ATTACKS[0],
        title=ATTACKS[1],
        notes=ATTACKS,
        bold=((0, 1), (1, 2)),
        groups=ATTACKS,
    )
    harmless = made_of("abcdefg", ["1234567"], notes=("n",), bold=((0, 1),))
    ours = {*commands(latex(harmless)), *commands(latex(AWKWARD)), "multicolumn", "emph"}
    ours |= {"textbackslash", "textasciicircum", "textasciitilde"}
    assert commands(latex(view)) <= ours
    assert latex(view).count(r"\end{") == latex(view).count(r"\begin{") == 2
    assert "^^" not in latex(view)


def commands(text: str) -> set[str]:
    """The control words in LaTeX source."""
    return set(re.findall(r"\\([A-Za-z]+)", text.replace("\\\\", "")))


def test_every_table_of_an_experiment_compiles(tmp_path: Path) -> None:
    paths = build_report(write_longbench(tmp_path, 3, models=("Llama-3.1-8B-Instruct", "other")))
    more = build_report(write_demo(tmp_path, ("exact", "snapkv", "uniform"), ("longeval_lines",)))
    tables = [p.read_text() for p in (*paths.tables, *more.tables) if p.suffix == ".tex"]
    assert len(tables) > 8
    assert compiled(tmp_path, tables, "booktabs graphicx").stat().st_size > 30_000


def test_narrow_tables_need_booktabs_alone() -> None:
    assert "graphicx" not in latex(AWKWARD)
    wide = made_of([f"c{i}" for i in range(12)], [("1",) * 12])
    assert r"\usepackage{booktabs} and \usepackage{graphicx}" in latex(wide)
    assert r"\rotatebox{90}{c5}" in latex(wide)
