"""The landing page of several experiments, and the folder that a static host can serve."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.page import Page
from support.report_runs import lines_records, write_run

from kvbench.report.__main__ import main
from kvbench.report.render.summary import SUMMARY, read_summary


def write_small(results: Path, name: str) -> Path:
    """Two methods on one task."""
    for method in ("exact", "snapkv"):
        write_run(
            results,
            experiment=name,
            task="longeval_lines",
            method=method,
            records=lines_records(method)[:10],
        )
    return results / name


def test_several_experiments_are_linked_and_summarised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = tmp_path / "results"
    folders = [write_small(results, name) for name in ("one", "two")]
    folders[1] = folders[1].rename(results / "two & more")
    (results / "paper").mkdir()  # no experiment: left out
    (results / "README.md").write_text("no experiment either")
    assert main([str(path) for path in sorted(results.iterdir())]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(results / "index.html")
    text = (results / "index.html").read_text(encoding="utf-8")
    assert 'href="one/report.html"' in text
    assert 'href="two%20%26%20more/report.html"' in text
    assert "two &amp; more" in text
    summary = read_summary(folders[0])
    assert summary is not None
    (verdict,) = summary.verdicts
    assert verdict.text.startswith("At rate 0.25 snapkv ")
    assert text.count(verdict.text) == 2
    assert Page(text).fetched == []

    for folder in folders:  # of a clone, which has no records
        shutil.rmtree(folder / "recall_mini")
    site = tmp_path / "site"
    assert main(["--site", str(site), *map(str, folders)]) == 0
    assert (site / "one" / "report.html").read_bytes() == (folders[0] / "report.html").read_bytes()
    assert (site / "one" / "tables" / "longeval_lines-recall_mini.csv").is_file()
    assert 'href="one/report.html"' in (site / "index.html").read_text(encoding="utf-8")
    copied = {path.name for path in (site / "one").iterdir()}
    assert copied == {"report.html", SUMMARY, "tables"}


def test_what_cannot_be_linked_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert main(["--index", str(empty)]) == 1
    assert capsys.readouterr().err.startswith(f"kvbench-report: no reports in {empty}; expected")
    (empty / SUMMARY).write_text('{"name": 3')
    assert read_summary(empty) is None
    (empty / "report.html").write_text("of a version before summaries")
    assert main(["--index", str(empty)]) == 0
    assert ">empty</a>" in (tmp_path / "index.html").read_text(encoding="utf-8")
    for name in ("a", "b"):
        write_small(tmp_path / name, "same")
    assert (
        main(["--site", str(tmp_path / "site"), *(str(tmp_path / n / "same") for n in "ab")]) == 1
    )
    assert "two experiments are called 'same'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*map(str, (empty, empty, empty)), "--out", "x"])


def test_two_folders_are_compared_and_linked_only_when_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(write_small(tmp_path, name)) for name in ("a", "b")]
    assert main([*folders, "--out", str(tmp_path / "compared")]) == 0
    assert (tmp_path / "compared" / "compare.html").is_file()
    assert not (tmp_path / "index.html").exists()
    capsys.readouterr()
    assert main(["--index", *folders]) == 0
    assert (tmp_path / "index.html").is_file()
