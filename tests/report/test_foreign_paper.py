"""What a manifest from elsewhere says of a published table: of wrong types, it is named in one line and
the rest of the report is built; no file but a table is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.cli_cases import ended
from support.report_runs import write_run

from kvbench.report.__main__ import main
from kvbench.report.build import build_report
from kvbench.report.experiment import load_experiment
from kvbench.report.tables.differences import comments_on
from kvbench.report.tables.published import PaperError, published_tables

TABLE = "method,num_lines,accuracy\nexact,5,50\nsnapkv,5,40\n"
SPEC = {"file": "mine", "value": "accuracy", "by": "num_lines", "scale": 100}
HUGE = 10**400


def one_experiment(root: Path, spec: object, table: str | bytes = TABLE) -> Path:
    """An experiment that names a table, and the folder of tables beside it. Returns the experiment."""
    (root / "paper").mkdir()
    content = table if isinstance(table, bytes) else table.encode()
    (root / "paper" / "mine.csv").write_bytes(content)
    records = [
        {"example_id": f"e{i}", "num_lines": 5, "score": float(i % 2), "notes": [1]}
        for i in range(4)
    ]
    options = {"paper_table": spec}
    write_run(root, records=records, options=options)
    return root / "demo"


def refused(folder: Path, *names: str) -> None:
    """One line that names all this, on the command line too, and a report all the same."""
    with pytest.raises(PaperError) as error:
        published_tables(load_experiment(folder))
    line = str(error.value)
    assert "\n" not in line
    assert len(line) < 700
    for name in names:
        assert name in line, (name, line)
    found = ended([str(folder)], main=main)
    assert found.status == 0, found
    assert "Traceback" not in found.err, found
    assert line.split(";")[0][:60] in " ".join(found.err.split()), (line, found.err)
    assert (folder / "report.html").is_file()


def test_a_table_as_it_should_be_is_read(tmp_path: Path) -> None:
    (table,) = published_tables(load_experiment(one_experiment(tmp_path, SPEC)))
    assert [(row.method, row.pairs[0].published) for row in table.rows] == [("exact", 5000.0)]


WRONG: list[tuple[str, Any]] = [
    *[("file", value) for value in (5, None, [], {}, True, "", "x" * 200, HUGE)],
    *[("rename", value) for value in (5, "x", [1], {"accuracy": 5}, {"accuracy": ["x"]})],
    *[("names", value) for value in ([1], 7, "exact", {"exact": 1}, {"exact": [["a"]]})],
    *[("differences", value) for value in (7, "x", {}, True)],
    *[("where", value) for value in ("x", 5, ["method"], {"method": {"a": 1}}, {"method": HUGE})],
    *[("scale", value) for value in ("x", None, [], HUGE, True)],
    *[("methods", value) for value in ("exact", 5, {"a": 1}, [1], [["exact"]])],
    *[("sums", value) for value in ("x", [1], {"a": "x"}, {"a": [1]}, {"a": 5})],
    *[("fields", value) for value in ("x", ["decode_s"], {"accuracy": 1}, 5)],
    *[("setting", value) for value in ("x", ["num_lines"], {"num_lines": 1}, {"num_lines": []})],
    *[("records", value) for value in ("x", [1], {"num_lines": [5]}, {"num_lines": {}})],
    *[("best_of", value) for value in ("x", [1], {"exact": 5}, {"exact": [1]})],
    *[("models", value) for value in ("x", [1], {"recall_mini": 5})],
    *[("rescored", value) for value in ("x", [1], {}, 7, -1, HUGE, True)],
    *[(key, value) for key in ("value", "by", "reduction", "field") for value in (5, [], {"a": 1})],
    *[(key, value) for key in ("method", "model", "across_tasks") for value in (5, [1], {"a": 1})],
]


@pytest.mark.parametrize("key,value", WRONG, ids=range(len(WRONG)))  # noqa: PT006
def test_a_value_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: Any) -> None:
    folder = one_experiment(tmp_path, {**SPEC, key: value})
    refused(folder, "paper_table", key)


@pytest.mark.parametrize("spec", [5, True, [5], [["mine"]], 1.5])
def test_a_paper_table_of_a_wrong_type_is_named(tmp_path: Path, spec: Any) -> None:
    refused(one_experiment(tmp_path, spec), "paper_table is ", "allowed: ")
    with pytest.raises(PaperError):
        comments_on(spec)


POSSIBLE: list[dict[str, Any]] = [
    {"rename": {"accuracy": "method"}},
    {"field": "notes"},
    {"fields": {"accuracy": "notes"}},
    {"methods": ["accuracy"], "value": None, "by": None},
    {"by": "method"},
    {"by": "accuracy", "value": "accuracy"},
    {"rename": {"accuracy": "value"}, "value": "value", "methods": ["method"]},
    {"setting": {"num_lines": "notes"}},
    {"records": {"notes": "x"}},
    {"reduction": "method"},
    {"models": {"recall_mini": "m"}},
    {"names": {"exact": []}},
    {"where": {"num_lines": []}},
    {"sums": {"a": []}},
    {"best_of": {"exact": ["exact", "exact"]}},
]


@pytest.mark.parametrize("spec", POSSIBLE, ids=range(len(POSSIBLE)))
def test_what_cannot_be_compared_is_one_line_at_most(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Types are right, what they say makes no sense: a line, or a table without what is not there."""
    folder = one_experiment(tmp_path, {**SPEC, **spec})
    try:
        published_tables(load_experiment(folder))
    except PaperError as error:
        assert "\n" not in str(error)  # noqa: PT017
    paths = build_report(folder)
    assert len(paths.warnings) <= 1
    assert paths.page.is_file()


TABLES = [b"", b"\xff\xfe\x00", b'a,b\n"x', b"a,b\n1,2,3\n1,2,3,4,5\n", b"\n\n", b"a,a\n1,2\n"]


@pytest.mark.parametrize("content", TABLES, ids=range(len(TABLES)))
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: bytes) -> None:
    refused(one_experiment(tmp_path, SPEC, content), "mine.csv")


SECRET = "method,num_lines,accuracy\nexact,5,987654\n"


@pytest.mark.parametrize("name", ["../secret", "../secret.csv", "{root}/secret", "..", ".", "a/b"])
def test_no_table_is_read_from_elsewhere(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret.csv").write_text(SECRET)
    folder = one_experiment(tmp_path, {**SPEC, "file": name.format(root=tmp_path)})
    refused(folder, "paper_table.file is ", "allowed: the name of a file of results/paper")
    assert "987654" not in (folder / "report.html").read_text()


def test_no_table_is_read_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret.csv").write_text(SECRET)
    folder = one_experiment(tmp_path, SPEC)
    (tmp_path / "paper" / "mine.csv").unlink()
    (tmp_path / "paper" / "mine.csv").symlink_to(tmp_path / "secret.csv")
    refused(folder, "mine.csv", "is a link to another folder")
    assert not any("98765400" in path.read_text() for path in folder.rglob("*.csv"))
