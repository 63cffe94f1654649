"""Every numbered table and figure of the papers has a command: the list of them, the experiments, the
published numbers and what READMEs and make say agree."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from kvbench.cli.aliases import expand_experiments
from kvbench.cli.papers import (
    experiment_called,
    folder_name,
    limit_key,
    paper_items,
    script_path,
)
from support.command import main, refusal_of
from support.configs import composed
from support.paths import ROOT

from kvbench.cli import reproduce as reproducing
from kvbench.cli.catalogue import catalogue
from kvbench.cli.reproduce import command_lines, reproduce
from kvbench.errors import UserError
from kvbench.records.read import load_runs
from kvbench.report.tables.differences import specs_of
from kvbench.run.termination import Terminated

ITEMS = paper_items()
PAPERS = {item.paper for item in ITEMS.values()}
MADE = {name: item for name, item in ITEMS.items() if item.status not in ("no data", "missing")}

COMPOSED = sorted(
    name for name, item in MADE.items() if not ITEMS.get(item.experiment, item).script
)


def test_the_list_has_every_number_of_the_papers() -> None:
    """As printed: BalanceKV v3 has four figures and six tables, H2O v3 13 figures and 12 tables."""

    def numbers(paper: str, kind: str) -> set[int]:
        found = (
            re.fullmatch(rf"{kind}(\d+)[a-z]?", i.id) for i in ITEMS.values() if i.paper == paper
        )
        return {int(match[1]) for match in found if match}

    assert numbers("balancekv", "figure") == set(range(1, 5))
    assert numbers("balancekv", "table") == set(range(1, 7))
    assert numbers("h2o", "figure") == set(range(1, 14))
    assert numbers("h2o", "table") == set(range(1, 13))
    assert all(item.shows and (item.needs or item.no_data) for item in ITEMS.values())


def test_every_experiment_of_a_paper_is_in_the_list_and_is_called_as_the_list_calls_it() -> None:
    for name in catalogue("experiments"):
        said = yaml.safe_load((ROOT / "conf/experiment" / f"{name}.yaml").read_text())
        if (name.partition("_")[0] in PAPERS and "table" in name) or said.get("paper_table"):
            assert name in ITEMS, f"{name} is not in results/paper/experiments.yaml"
        if name in ITEMS:
            assert said["experiment_name"] in ITEMS
            assert name.startswith(said["experiment_name"])
    for item in ITEMS.values():
        made = item.experiment in catalogue("experiments") or item.experiment in ITEMS
        assert made, f"{item.name} is made by {item.experiment}, which nothing is called"
        assert not (item.no_data and item.experiment in catalogue("experiments"))


def test_every_published_file_is_of_an_item() -> None:
    for path in (ROOT / "results/paper").glob("*.csv"):
        assert path.stem in ITEMS, f"{path.name} is in no line of experiments.yaml"
    for name in COMPOSED:
        config = yaml.safe_load(
            (ROOT / f"conf/experiment/{MADE[name].experiment}.yaml").read_text()
        )
        for spec in specs_of(config.get("paper_table")):
            assert spec["file"] in ITEMS


def test_scripts_are_there_and_are_given_their_arguments() -> None:
    for item in ITEMS.values():
        assert not item.script or script_path(item.script).is_file()
    words = ["model=recall_mini", "limit=2", "launcher=local", "shards=2", "results_dir=x"]
    (line,) = command_lines("balancekv_table3", words)
    assert line == ["script=norms", "name=balancekv_table3", *ITEMS["balancekv_table3"].small.split(),
                    "model=recall_mini", "limit=2", "results_dir=x"]  # fmt: skip
    (line,) = command_lines("clustergen_figure1", [])
    assert line == ["script=clusterability", "name=subgen_figure1"]
    assert len(list(command_lines("clustergen_c2", []))) == 2
    assert len(list(command_lines("clustergen_c2", ["model=opt_6_7b"]))) == 1


@pytest.mark.parametrize("name", COMPOSED)
def test_every_command_composes_as_on_the_shipped_model(name: str) -> None:
    lines = list(command_lines(name, ["model=recall_mini", "limit=2", "device=cpu"]))
    assert lines
    for line in lines:
        experiment = line[0].partition("=")[2]
        assert line[0] == lines[0][0] or line[0] in MADE[name].runs
        assert f"{limit_key(experiment_called(experiment)[0])}=2" in line
        assert refusal_of(line, sweep=True) is None, line


def test_a_small_model_keeps_its_architecture() -> None:
    """What H2O's Table 5 changes of OPT's is no architecture by itself."""
    (line,) = command_lines("h2o_table5", ["model=recall_mini"])
    assert composed(*line).model.architecture is None
    (line, *_) = command_lines("h2o_table5", [])
    assert composed(*line).model.architecture.model_type == "opt"


def test_an_older_name_goes_on_in_its_folder(capsys: Any) -> None:
    for item in ITEMS.values():
        for old in item.was:
            assert experiment_called(old) == (item.experiment, item.was[0])
            assert old not in catalogue("experiments")
    found = [
        main(capsys, "show", f"experiment={name}")[1] for name in ("table6", "balancekv_table6")
    ]
    old, new = (yaml.safe_load(text) for text in found)
    assert (old.pop("experiment_name"), new.pop("experiment_name")) == (
        "table6",
        "balancekv_table6",
    )
    assert old == new
    assert expand_experiments(["experiment=table6", "experiment_name=mine"]) == [
        "experiment=balancekv_table6",
        "experiment_name=mine",
    ]
    assert expand_experiments(["experiment=table5,table6,demo"]) == [
        "experiment=balancekv_table5,balancekv_table6,demo"
    ]


def test_several_runs_and_what_they_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGEVAL", str(tmp_path))
    lines = list(command_lines("subgen_table1", ["task.seed=3"]))
    assert [line[1] for line in lines] == [f"task_label=longeval_{n}" for n in (200, 300, 400)]
    assert all(f"task.files=[{tmp_path}/" in line[2] for line in lines)
    monkeypatch.delenv("LONGEVAL")
    with pytest.raises(UserError, match="LONGEVAL is not set; subgen_table1 needs LongChat"):
        list(command_lines("subgen_table1", []))
    small = list(command_lines("subgen_table1", ["model=recall_mini"]))
    assert all("task.files=[]" in line and not any("LONGEVAL" in w for w in line) for line in small)
    mine = list(command_lines("subgen_table1", ["model=recall_mini", "task.files=[a]"]))
    assert all("task.files=[a]" in line and "task.files=[]" not in line for line in mine)
    assert len(list(command_lines("h2o_table5", []))) == 3
    assert len(list(command_lines("h2o_table5", ["model=opt_6_7b"]))) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["h2o_figure3"], "h2o_figure3 has no experiment: an illustration"),
        (["balancekv_tabel1"], "unknown experiment 'balancekv_tabel1' (did you mean"),
        ([], "unknown experiment ''; allowed: "),
        (["model=x"], "unknown experiment 'model=x'; allowed: "),
        (["figure4"], "ESSAYS is not set; balancekv_figure4 needs"),
    ],
)
def test_what_cannot_be_reproduced_is_one_line(
    words: list[str], said: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESSAYS", raising=False)
    status, _, err = main(capsys, "reproduce", *words)
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith(f"kvbench: {said}")


def test_make_passes_on_what_it_was_given() -> None:
    def told(*words: str) -> list[str]:
        line = ["make", "-n", *words, "VENV=/none"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
        (found,) = (text for text in done.stdout.splitlines() if " reproduce " in text)
        return shlex.split(found.partition(" reproduce ")[2])

    words = ["MODEL=recall_mini", "LIMIT=2", "task.data=x", "ARGS=seed=1", "RESULTS=r", "SHARDS=3"]
    expected = {
        "model=recall_mini",
        "limit=2",
        "task.data=x",
        "seed=1",
        "results_dir=r",
        "shards=3",
    }
    for asked, name in [
        (["reproduce", "EXPERIMENT=balancekv_table1"], "balancekv_table1"),
        (["reproduce-h2o-table3"], "h2o_table3"),
        (["reproduce-table1"], "table1"),
        (["reproduce-all"], "all"),
    ]:
        found = told(*asked, *words)
        assert found[0] == name
        assert expected <= set(found)
    (essays,) = re.findall(r"^ESSAYS \?= (\S+)", (ROOT / "Makefile").read_text(), re.M)
    assert essays.endswith("paul_graham_essays")


def test_a_failure_does_not_keep_the_others_from_being_run(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(line: Any) -> int:
        asked.append(line[0])
        if len(asked) == 1:
            raise UserError("no")
        if len(asked) == 2:
            raise OSError("full")
        folder = tmp_path / folder_of(line[0].partition("=")[2])
        folder.mkdir(exist_ok=True)
        (folder / "report.html").write_text("<p>")
        return 0

    def folder_of(name: str) -> str:
        return folder_name(experiment_called(name)[0])

    scripts: list[str] = []
    monkeypatch.setattr(reproducing, "run_script", lambda line: scripts.append(line[1]) or 0)
    words = ["all", "model=recall_mini", "limit=2", f"results_dir={tmp_path}"]
    assert reproduce(words, run) == 2
    names = [line.partition("=")[2] for line in asked]
    made = [script.removeprefix("name=") for script in scripts]
    found = {experiment_called(name)[0] for name in names} | set(made)
    assert found == {i.experiment for i in MADE.values()}
    page = (tmp_path / "index.html").read_text()
    linked = set(re.findall(r'href="(\w+)/report.html"', page))
    assert linked == {folder_of(name) for name in names[2:]}
    order = re.findall(r'href="(\w+)/report.html"', page)
    assert (
        order.index("balancekv_table2") < order.index("subgen_table2") < order.index("h2o_table9")
    )


def test_a_termination_ends_all_of_them(tmp_path: Path) -> None:
    asked: list[Any] = []

    def run(line: Any) -> int:
        asked.append(line)
        raise Terminated

    with pytest.raises(Terminated):
        reproduce(["all", "model=recall_mini", f"results_dir={tmp_path}"], run)
    assert len(asked) == 1


def test_reproduce_runs_what_it_says(capsys: Any, tmp_path: Path) -> None:
    words = ["model=recall_mini", "limit=1", "logger=none", f"results_dir={tmp_path}"]
    narrow = ["task.datasets=[trec]", "task.max_input=300", "method=[exact,uniform]"]
    assert main(capsys, "reproduce", "balancekv_table6", *words, *narrow)[0] == 0
    runs = load_runs(tmp_path / "balancekv_table6")
    assert {found.manifest["method"] for found in runs} == {"exact", "uniform"}
    assert {len(found.records) for found in runs} == {1}
