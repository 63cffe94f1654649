"""Names that users and their environment give to folders: what they come to is checked once and used
everywhere, and what cannot be one is one line before a model is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from support.cli_cases import ended

from kvbench.cli import main as cli
from kvbench.cli.build import results_folder
from kvbench.cli.check import check_command
from kvbench.cli.overrides import is_folder_name
from kvbench.kv import KVError
from kvbench.records.store import safe_name

RUN = [
    *("logger=none", "model=tiny_random", "device=cpu", "task=longeval_lines", "method=[exact]"),
    *("task.num_lines=[5]", "task.num_examples=1", "task.max_new_tokens=1"),
]


@pytest.mark.parametrize(
    "value",
    [
        "/home/victim",
        "..",
        "../up",
        "a/../../b",
        ".hidden",
        "a b",
        "x" * 121,
        "é" * 61,
        "",
        "a\x1b",
    ],
)
@pytest.mark.parametrize("sweep", [False, True])
def test_what_an_interpolation_comes_to_is_a_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, sweep: bool
) -> None:
    monkeypatch.setenv("NAME_FROM_OUTSIDE", value)
    words = [*RUN, "experiment_name='${oc.env:NAME_FROM_OUTSIDE}'"]
    found = ended([*words, *(["-m", "seed=0,1"] if sweep else [])], folder=tmp_path)
    assert found.status == 2
    assert found.problem() is None, found
    assert "experiment_name is " in found.err
    assert "allowed: a folder's name" in found.err
    assert not list(tmp_path.iterdir()), "nothing was begun"


def test_records_and_page_of_an_interpolated_name_lie_in_one_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAME_FROM_OUTSIDE", "night-run")
    found = ended([*RUN, "experiment_name='${oc.env:NAME_FROM_OUTSIDE}'"], folder=tmp_path)
    assert found.status == 0, found.err
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["night-run"]
    folder = tmp_path / "runs" / "night-run"
    assert (folder / "report.html").exists()
    assert len(list(folder.glob("*/*/*/records.jsonl"))) == 1
    assert f"page: {Path('runs', 'night-run', 'report.html')}" in found.out


@pytest.mark.parametrize("name", ["a", "é" * 60, "a.b", "x" * 120, "日本", "a+b=c@d", "_"])
def test_a_name_that_is_allowed_is_the_folders(name: str) -> None:
    assert is_folder_name(name)
    assert safe_name(name) == name


@pytest.mark.parametrize(
    "value", ["~nosuchuser/x", "a\udcff", "a\0b", "x" * 256, "é" * 128, "", None, 5, ["a"]]
)
def test_a_results_folder_that_cannot_be_is_one_line(value: object) -> None:
    with pytest.raises(KVError, match=r"^results_dir is [^\n]*; allowed: a folder") as error:
        results_folder(value)
    assert len(str(error.value)) < 600


@pytest.mark.parametrize("value", ["'~nosuchuser/x'", "'a\udcff'", "'" + "é" * 128 + "'"])
def test_and_so_it_is_on_the_command_line(tmp_path: Path, value: str) -> None:
    found = ended([*RUN, f"results_dir={value}"], folder=tmp_path)
    assert found.status == 2
    assert found.problem() is None, found
    assert "results_dir" in found.err
    assert not list(tmp_path.iterdir())


def test_the_home_folder_is_meant_wherever_results_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By jobs, and by what Hydra and the launchers leave of a sweep."""
    home = tmp_path / "home"
    monkeypatch.setenv("HOME", str(home))
    assert results_folder("~/r") == home / "r"
    words = [*RUN, "results_dir='~/my results'", "launcher=gpus", "launcher.workers=1"]
    config = check_command(words, sweep=True).first
    (override,) = cli._sweep_folder(config, words)
    parsed = OverridesParser.create().parse_override(override)
    folder = Path(str(parsed.value()))
    assert parsed.key_or_group == "hydra.sweep.dir"
    assert folder.parent == home / "my results" / "default" / ".submitit"
    assert cli._sweep_folder(config, [*words, "hydra.sweep.dir=x"]) == [], "the user's own stays"


@pytest.mark.parametrize("name", ["", "...", "."])
def test_a_model_that_cannot_name_a_folder_is_wrong_usage(tmp_path: Path, name: str) -> None:
    found = ended([*RUN, f"model.name='{name}'"], folder=tmp_path)
    assert found.status == 2
    assert found.problem() is None, found
    assert f"model.name is {name!r}" in found.err
    assert not list(tmp_path.iterdir())


def test_a_model_may_be_called_anything_else(tmp_path: Path) -> None:
    """Markup of the terminal library, escape sequences and marks that turn the direction of writing."""
    name = "[/bold]\x1b]0;owned\x07\u202e[red]"
    found = ended([*RUN, f"model.name='{name}'"], folder=tmp_path)
    assert found.status == 0, found.err
    assert not {"\x1b", "\x07", "\u202e"} & set(found.out + found.err)
    (run,) = (tmp_path / "runs" / "default").glob("*/*/*/records.jsonl")
    assert "\u202e[red]" in run.read_text(), "records stay as they are"
    assert os.sep not in run.parents[2].name
