"""Records and manifests from elsewhere: of wrong types, they are named in one line; with names that are
markup, formulas, escape sequences or megabytes long, they are shown and mean nothing."""

from __future__ import annotations

import csv as standard_csv
import io
import json
import math
import unicodedata
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console
from support.cli_cases import MOST_SECONDS, ended
from support.report_runs import LINES_META, NEEDLE_META, write_run

from kvbench.errors import printable
from kvbench.records.read import StoreError, load_run, load_runs
from kvbench.records.schema import COMMON_FIELDS, NUMBER_FIELDS
from kvbench.records.store import RecordStore, run_folder, safe_name
from kvbench.report.__main__ import main
from kvbench.report.build import tables_to_print
from kvbench.report.experiment import load_experiment
from kvbench.report.render import csv, markdown, terminal
from kvbench.report.table import Column, Table

HUGE = 10**400


def one_run(root: Path, *, meta: Any = NEEDLE_META, **fields: Any) -> Path:
    """A run of three records that all have these fields; without a score, so that nothing is drawn."""
    common: dict[str, Any] = {"length": 1, "depth": 0, "num_lines": 5, "status": "error"}
    records = [{"example_id": f"e{i}"} | common | fields for i in range(3)]
    return write_run(root, task="t", method="exact", records=records, task_meta=meta)


def change(path: Path, key: str, value: Any, line: int = 1) -> None:
    """Set a key, ``a.b`` being b within a, in a manifest or in one line of a records file."""
    lines = path.read_text().split("\n") if path.suffix == ".jsonl" else [path.read_text()]
    content = json.loads(lines[line] if len(lines) > 1 else lines[0])
    *above, last = key.split(".")
    inner = content
    for part in above:
        if not isinstance(inner.get(part), dict):
            inner[part] = {}
        inner = inner[part]
    inner[last] = value
    lines[line if len(lines) > 1 else 0] = json.dumps(content)
    path.write_text("\n".join(lines))


def refused(root: Path, *names: str) -> None:
    """One line of kvbench-report that names all this."""
    found = ended([str(root / "demo")], main=main)
    assert found.problem() is None, found
    assert found.status == 1, found
    for name in names:
        assert name in found.err, (name, found.err)
    assert len(found.err) < 1500


RECORD_FIELDS = [
    *[(name, value) for name in ("seed", "status") for value in ([], {}, "x", 1.5, HUGE)],
    *[(name, value) for name in ("score", "ratio", "decode_s") for value in ([], {}, "x", True)],
    *[("score", value) for value in (HUGE, -HUGE, math.inf, 1e200)],
    *[("entries.mean", value) for value in (HUGE, "x", {}, math.inf, True)],
    *[("entries", value) for value in ([], 5, "x")],
    *[
        (name, value)
        for name in ("dataset", "prediction", "error")
        for value in ([], {}, 5, "\ud800")
    ],
    *[
        ("config_hash", []),
        ("answers", "x"),
        ("answers", {}),
        ("compressed", 1),
        ("example_id", None),
    ],
    *[("example_id", ["a"]), ("example_id", "\udfff")],
]


@pytest.mark.parametrize("key,value", RECORD_FIELDS)  # noqa: PT006
def test_a_record_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    run = one_run(tmp_path)
    change(run / "records.jsonl", key, value)
    said = "half a character" if isinstance(value, str) and not value.isascii() else f"{key} is "
    where = "line 2: " if key != "score" or not isinstance(value, float | int) else "record"
    refused(tmp_path, f"{run.name}/records.jsonl" if where == "line 2: " else run.name, where, said)
    with pytest.raises(StoreError, match=r"^[^\n]*$"):
        load_runs(tmp_path / "demo")


@pytest.mark.parametrize("name", sorted(set(COMMON_FIELDS) - {"example_id", "status"}))
def test_null_is_fine_in_every_other_common_field(tmp_path: Path, name: str) -> None:
    run = one_run(tmp_path)
    change(run / "records.jsonl", name, None)
    assert load_run(run).records[name].isna()[1]


def test_what_no_table_compares_may_be_anything(tmp_path: Path) -> None:
    run = one_run(tmp_path, notes=[{"a": [1, None]}], huge=HUGE)
    assert load_run(run).records["notes"][0] == [{"a": [1, None]}]
    assert ended([str(tmp_path / "demo")], main=main).status == 0


MANIFEST_FIELDS: list[tuple[str, Any]] = [
    *[(key, value) for key in ("identity", "task_meta", "config") for value in ([], [1], "x", 5)],
    *[(key, value) for key in ("model", "task", "method") for value in ([], {}, 5, "\ud800")],
    *[("seed", value) for value in ([], "x", 1.5, HUGE)],
    *[("earlier_starts", value) for value in (5, None, {}, "x", [5])],
    *[("identity.budget.rate", value) for value in ("x", [], HUGE, True)],
    *[("identity.budget", []), ("config.methods", []), ("task_meta.version", "x")],
    *[("task_meta.breakdown", value) for value in (5, "x", [5], [[]], ["x" * 1000], {})],
    *[("task_meta.figures", value) for value in (5, [5], {}, [[]], [{"kind": []}], "x")],
    *[("task_meta.figures", [{"kind": kind, "y": 3}]) for kind in ("heatmap", "scaling", "x")],
    *[("task_meta.score_unit", value) for value in (None, [], "x" * 10**6)],
    *[("task_meta.unit", {}), ("task_meta.lower_is_better", "no"), ("task_meta.subject", 5)],
]


@pytest.mark.parametrize("key,value", MANIFEST_FIELDS, ids=range(len(MANIFEST_FIELDS)))  # noqa: PT006
def test_a_manifest_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    run = one_run(tmp_path)
    change(run / "manifest.json", key, value)
    names = ("half a character",) if value == "\ud800" else (key.partition(".")[0], "allowed: ")
    refused(tmp_path, f"{run.name}/manifest.json", *names, "move it away")


def test_deep_values_are_named(tmp_path: Path) -> None:
    run = one_run(tmp_path)
    lines = (run / "records.jsonl").read_text().split("\n")
    deep = "[" * 5000 + "]" * 5000
    lines[1] = lines[1].replace('"answers": ["41077"]', f'"answers": {deep}')
    (run / "records.jsonl").write_text("\n".join(lines))
    refused(tmp_path, "line 2: not JSON")
    (run / "records.jsonl").unlink()
    (run / "manifest.json").write_text('{"identity": ' + '{"a": ' * 5000 + "1" + "}" * 5001)
    refused(tmp_path, "manifest.json cannot be read: not JSON")


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    """A record is refused when it is written for what it would be refused for when it is read."""
    record = dict.fromkeys(COMMON_FIELDS) | {"example_id": "a", "status": "ok"}
    with RecordStore(tmp_path) as store:
        for wrong in ({"seed": "x"}, {"score": "high"}, {"dataset": 5}, {"status": "fine"}):
            with pytest.raises(StoreError, match=rf"^{next(iter(wrong))} is .*; allowed: [^\n]*$"):
                store.append(record | wrong)
        assert store.append(record | dict.fromkeys(NUMBER_FIELDS, 3))
    assert (tmp_path / "records.jsonl").read_text().count("\n") == 1


def test_records_without_a_seed_or_a_unit(tmp_path: Path) -> None:
    """Are of one seed, and each is a unit of its own: 4 units of 2, 2, 1 and 1 records."""
    units = ["a", "a", "b", "b", None, None]
    records = [
        {"example_id": f"e{i}", "unit_name": unit, "seed": None, "score": float(i)}
        for i, unit in enumerate(units)
    ]
    meta = LINES_META | {"unit": "unit_name"}
    write_run(tmp_path, task="t", method="exact", records=records, task_meta=meta)
    (group,) = load_experiment(tmp_path / "demo").groups
    assert group.records["unit_name"].nunique() == 4
    assert group.records["seed"].eq(0).all()
    table = next(iter(tables_to_print(load_experiment(tmp_path / "demo"))))
    assert len(table.frame)


LONG = "x" * 1_000_000


def test_names_of_a_megabyte_are_shortened_in_tables_and_figures(tmp_path: Path) -> None:
    """Records keep them; the whole report takes no longer than any other."""
    for method in ("exact", f"m{LONG}"):
        records = [
            {"example_id": f"e{i}", "dataset": f"{i % 2}{LONG}", "num_lines": LONG, "score": i % 2}
            for i in range(4)
        ]
        write_run(
            tmp_path,
            task=LONG,
            method=method,
            records=records,
            task_meta=LINES_META,
            model=LONG,
            options={"budget.name": LONG},
        )
    found = ended([str(tmp_path / "demo"), "--list"], main=main)  # which has a limit of CPU time
    assert found.status == 0, found.err[-2000:]
    assert found.problem() is None
    assert MOST_SECONDS <= 60
    (group,) = load_experiment(tmp_path / "demo").groups
    assert group.records["dataset"].nunique() == 2, "two names that begin alike stay two"
    assert {len(name) for name in group.records["dataset"]} == {80}
    for run in load_runs(tmp_path / "demo"):
        assert run.records["dataset"].str.len().eq(1_000_001).all(), "records stay as they are"
    for path in (tmp_path / "demo").rglob("*"):
        assert len(path.name.encode()) <= 210


@pytest.mark.parametrize("letter", ["x", "é", "日", "\U0001f9ea", "\ud800"])
def test_names_of_folders_and_files_are_bounded_in_bytes(tmp_path: Path, letter: str) -> None:
    for length in (119, 120, 121, 255, 300):
        name = safe_name("a" + letter * length)
        assert len(name.encode()) <= 120
        (tmp_path / name).mkdir(exist_ok=True)
    assert safe_name("é" * 300) != safe_name("é" * 301)
    folder = run_folder(tmp_path, "e", letter * 999 + "a", letter * 999 + "b", "m", "0")
    folder.mkdir(parents=True)


NAMES = [
    "$a$ b$",
    "\\frac{$x$",
    "a\nb",
    "\x1b[31mred\x1b[0m",
    "\u202eevil",
    "$\\nosuch{$",
    "_^{}%&",
]


MARKS = [
    "\x1b]0;owned\x07",
    "\x1b[2J",
    "\u202egnp.exe",
    "\u2066x",
    "a\rb",
    "a\nb",
    "\x9b31m",
    "\u200b",
]


def unseen(text: str) -> set[str]:
    return {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")} - {"\n"}


@pytest.mark.parametrize("mark", MARKS)
def test_nothing_unseen_reaches_the_terminal(tmp_path: Path, mark: str) -> None:
    """From a manifest, a record, a folder's name: tables, errors and paths."""
    for method in ("exact", f"m{mark}"):
        records = [
            {"example_id": f"e{mark}{i}", "dataset": mark, "num_lines": mark} for i in (0, 1)
        ]
        write_run(
            tmp_path,
            task=f"task{mark}",
            method=method,
            records=[r | {"status": "error", "error": mark} for r in records],
            task_meta=LINES_META | {"score_unit": f"unit{mark}"},
            model=f"model{mark}",
        )
    folder = tmp_path / f"demo{mark}"
    (tmp_path / "demo").rename(folder)
    for words in ([str(folder), "--list"], [str(folder), str(folder)], [f"{folder}{mark}"]):
        found = ended(words, folder=tmp_path, main=main)
        assert found.problem() is None, found
        assert not unseen(found.out + found.err), found
    out = io.StringIO()
    console = Console(file=out, force_terminal=False, width=200)
    terminal(tables_to_print(load_experiment(folder)), console)
    assert "model" in out.getvalue()
    assert not unseen(out.getvalue())
    for path in (*folder.rglob("*.md"), *folder.rglob("*.tex")):
        assert not unseen(path.read_text()), path


def test_what_is_seen_stays_as_it_is() -> None:
    for text in ("plain", "日本語 é ü", "a\u00a0b\u3000c", "−0.5 ± σ ≤ ∞ …", ""):
        assert printable(text) == text
    assert printable("a\tb\u2028\ud800") == "a\\tb\\u2028\\ud800"


FORMULAS = ["=1+1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "\t=1", "\n=1", "＝1", "-x", "=-0.5"]
NOT_FORMULAS = [
    "\\r=1",
    "a\\r=1",
    "-0.5",
    "+3",
    "-1e5",
    "-inf",
    "0.5",
    "a=b",
    "",
    " =1",
    "é",
    "'=1",
]


def test_no_cell_of_a_csv_is_a_formula_and_numbers_stay_numbers() -> None:
    texts = [*FORMULAS, *(text.replace("\\r", "\r") for text in NOT_FORMULAS)]
    frame = pd.DataFrame(
        {
            "text": texts,
            "=1+2": [-0.5, None, *[-1.0] * (len(texts) - 2)],
            "mixed": ["=1", 2.25, None, *["x"] * (len(texts) - 3)],
            "flag": [True] * len(texts),
            "count": [-3] * len(texts),
        }
    )
    before = frame.copy(deep=True)
    rows = list(standard_csv.reader(io.StringIO(csv(frame), newline="")))
    pd.testing.assert_frame_equal(frame, before)
    assert rows[0] == ["text", "'=1+2", "mixed", "flag", "count"]
    shown = [row[0] for row in rows[1:]]
    assert shown == [*(f"'{text}" for text in FORMULAS), *NOT_FORMULAS]
    assert [row[1] for row in rows[1:4]] == ["-0.5", "", "-1"]
    assert [row[2] for row in rows[1:5]] == ["'=1", "2.25", "", "x"]
    assert {(row[3], row[4]) for row in rows[1:]} == {("True", "-3")}
    assert csv(pd.DataFrame()).strip() == '""' or not csv(pd.DataFrame()).strip()


LINKS = [
    "[click](javascript:alert(1))",
    "![pixel](https://tracker.example/x.png)",
    "[a][b] [b]: javascript:alert(1)",
    "![a][b]",
    "<javascript:alert(1)>",
    "<img src=https://tracker.example/x.png>",
    "\\[a](http://x)",
    "a\\|b | c",
    "`](x)`",
]


@pytest.mark.parametrize("text", LINKS)
def test_markdown_has_no_links_and_no_images(text: str) -> None:
    """As a parser of CommonMark with tables sees it."""
    markdown_it = pytest.importorskip("markdown_it", reason="needs the package markdown-it-py")
    parser = markdown_it.MarkdownIt("commonmark").enable("table")
    rows = ((text, "0.82 [0.75, 0.88]"), ("x", text))
    frame = pd.DataFrame(rows, columns=["method", "score"])
    columns = (Column("method"), Column("score", text))
    written = markdown(Table("name", text, frame, columns, (text,)))
    kinds: list[str] = []
    cells: list[str] = []
    for token in parser.parse(written):
        kinds += [token.type, *(child.type for child in token.children or ())]
        if token.type == "inline":
            cells.append("".join(child.content for child in token.children or ()))
    assert not {"link_open", "image", "html_inline", "html_block"} & set(kinds), written
    assert kinds.count("td_open") == 4, "every text stays in its cell"
    assert cells.count(text.replace("`", "")) == 5 or "`" in text, cells
    assert "0.82 [0.75, 0.88]" in written
