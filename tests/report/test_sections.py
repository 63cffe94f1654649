"""Which runs stand in one table, and on which prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.report_runs import write_run
from support.tables import data

from kvbench.cli.results import print_scores
from kvbench.records.read import EXAMPLES, StoreError, load_run
from kvbench.records.store import write_examples
from kvbench.report.runs import Group, load_experiment
from kvbench.report.tables import score_table


def run_of(
    folder: Path,
    method: str,
    examples: Sequence[str],
    *,
    started: str = "10",
    command: str = "kvbench a",
    asked: Sequence[str] | None = None,
    options: dict[str, Any] | None = None,
    manifest: dict[str, Any] | None = None,
) -> Path:
    """A run with a record of each example; `asked`: what its last command asked for, if not these."""
    records = [{"example_id": example, "score": float(i % 2)} for i, example in enumerate(examples)]
    said = {"started": started, "command": command, **(manifest or {})}
    run = write_run(folder, method=method, records=records, options=options, manifest=said)
    write_examples(run, examples if asked is None else asked)
    return run


def groups_of(folder: Path) -> dict[str, Group]:
    return {group.task: group for group in load_experiment(folder / "demo").groups}


def prompts_of(group: Group) -> dict[str, set[str]]:
    rows = group.records.groupby("variant")["example_id"]
    return {str(variant): set(names) for variant, names in rows}


def test_other_settings_of_a_task_are_a_table_of_their_own(tmp_path: Path) -> None:
    run_of(tmp_path, "exact", "abcd", options={"task.num_lines": [20, 50]})
    run_of(tmp_path, "h2o", "abcd", options={"task.num_lines": [20, 50]})
    (before,) = groups_of(tmp_path).values()
    later: dict[str, Any] = {"started": "11", "command": "kvbench b"}
    run_of(tmp_path, "exact", "ab", options={"task.num_lines": [20]}, **later)
    run_of(tmp_path, "knorm", "ab", options={"task.num_lines": [20]}, **later)
    groups = groups_of(tmp_path)
    first = "t, num_lines 20, 50"
    assert set(groups) == {first, "t, num_lines 20"}
    assert groups[first].labels == before.labels == ["exact", "h2o"]
    assert groups["t, num_lines 20"].labels == ["exact", "knorm"]
    assert groups["t, num_lines 20"].baseline == {"exact": None, "knorm": "exact"}
    now, then = (data(score_table(group)).drop(columns="task") for group in (groups[first], before))
    assert now.equals(then)
    run_of(tmp_path / "older", "exact", "ab", options={"task.size": 1})
    run_of(tmp_path / "older", "h2o", "ab", options={"task.size": 1, "task.new": 0}, **later)
    assert list(groups_of(tmp_path / "older")) == ["t"], "a setting that older runs lack"


def test_terminal_and_page_say_which_row_is_of_which_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for size, started in ((5, "10"), (7, "11")):
        options = {"method.kernel_size": size, "task.num_lines": 20}
        about: dict[str, Any] = {"started": started, "command": f"kvbench {size}"}
        run = run_of(tmp_path, "snapkv", "abcd", options=options, **about)
    run_of(tmp_path, "exact", "ab", options={"task.num_lines": 9})
    print_scores(tmp_path / "demo", [run])
    printed = capsys.readouterr().out
    group = groups_of(tmp_path)["t, num_lines 20"]
    note = "Of the last command: snapkv, kernel_size 7. Of earlier ones: snapkv, kernel_size 5."
    assert note in score_table(group).notes
    assert note in printed
    assert all(f" snapkv, kernel_size {size} " in printed for size in (5, 7)), printed
    assert "exact  " not in printed, "of this command's task alone"


def test_datasets_that_every_run_left_out_are_named(tmp_path: Path) -> None:
    for method, datasets in (("exact", ["b", "a"]), ("h2o", ["a", "b", "c"])):
        run_of(tmp_path, method, "xy", manifest={"datasets_left_out": datasets})
    (group,) = groups_of(tmp_path).values()
    assert "Datasets of which the limit leaves no example: a, b." in score_table(group).notes


CASES: list[tuple[dict[str, str], dict[str, str], list[str]]] = [
    # records of each method in the order of their commands; rows of the table; methods left out
    ({"exact": "abcd", "h2o": "ab"}, {"exact": "ab", "h2o": "ab"}, []),
    ({"h2o": "ab", "exact": "abcd"}, {"exact": "abcd"}, ["h2o"]),
    ({"exact": "abcd", "h2o": "abcd"}, {"exact": "abcd", "h2o": "abcd"}, []),
]


@pytest.mark.parametrize(("records", "rows", "left_out"), CASES)
def test_a_table_is_about_the_prompts_of_the_last_command(
    tmp_path: Path, records: dict[str, str], rows: dict[str, str], left_out: list[str]
) -> None:
    for hour, (method, examples) in enumerate(records.items(), 10):
        run_of(tmp_path, method, examples, started=str(hour))
    (group,) = groups_of(tmp_path).values()
    assert prompts_of(group) == {method: set(examples) for method, examples in rows.items()}
    assert list(group.left_out) == left_out
    named = f"were run on other prompts: {', '.join(left_out)}."
    assert any(named in note for note in score_table(group).notes) == bool(left_out)


def test_an_interrupted_run_stays_in_its_table(tmp_path: Path) -> None:
    """It was asked for every prompt, and its row says how many are missing; as do runs that do not say
    what they were asked for."""
    runs = [run_of(tmp_path, "h2o", "ab", asked="abcd")]
    runs += [run_of(tmp_path, "exact", "abcd", started="11")]
    for _ in range(2):
        (group,) = groups_of(tmp_path).values()
        assert prompts_of(group) == {"exact": set("abcd"), "h2o": set("ab")}
        for run in runs:
            (run / EXAMPLES).unlink(missing_ok=True)


@pytest.mark.parametrize("content", ['{"a": 1}', "[1]", "no JSON"])
def test_a_damaged_list_of_examples_is_one_line(tmp_path: Path, content: str) -> None:
    run = run_of(tmp_path, "exact", "ab")
    (run / EXAMPLES).write_text(content)
    with pytest.raises(StoreError) as refused:
        load_run(run)
    assert str(run / EXAMPLES) in str(refused.value)
    assert "\n" not in str(refused.value)
