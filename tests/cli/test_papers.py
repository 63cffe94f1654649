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
from omegaconf import OmegaConf
from support.command import composed, main, refusal_of
from support.paths import ROOT

from kvbench.cli import reproduce as reproducing
from kvbench.cli.catalogue import experiment_called, paper_items
from kvbench.cli.config import expanded
from kvbench.cli.reproduce import command_lines, reproduce
from kvbench.errors import UserError
from kvbench.records.read import load_runs
from kvbench.run.termination import Terminated

ITEMS = paper_items()
PAPERS = {item.paper for item in ITEMS.values()}
MADE = {name: item for name, item in ITEMS.items() if item.status not in ("no data", "missing")}
COMPOSED = [name for name in MADE if not ITEMS.get(MADE[name].experiment, MADE[name]).script]
EXPERIMENTS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / "conf/experiment").glob("[!_]*.yaml"))
}
PUBLISHED = [name for name, config in EXPERIMENTS.items() if config.get("paper_table")]
NEEDED = {"balancekv_figure4": ["task.haystack_files=[x]"], "subgen_table1": ["task.files=[x]"]}


def test_the_list_has_every_number_of_the_papers() -> None:
    """As printed: BalanceKV v3 has four figures and six tables, H2O v3 13 figures and 12 tables."""
    for paper, kind, count in [
        *(("balancekv", "figure", 4), ("balancekv", "table", 6)),
        *(("h2o", "figure", 13), ("h2o", "table", 12)),
    ]:
        own = [item.id for item in ITEMS.values() if item.paper == paper]
        ids = (re.fullmatch(rf"{kind}(\d+)[a-z]?", name) for name in own)
        assert {int(match[1]) for match in ids if match} == set(range(1, count + 1))
    assert all(item.shows and (item.needs or item.no_data) for item in ITEMS.values())
    assert not [item.name for item in ITEMS.values() if item.status == "missing"]
    for item in ITEMS.values():
        assert not (item.no_data and item.experiment in EXPERIMENTS)
        assert not item.script or (ROOT / "scripts/papers" / f"{item.script}.py").is_file()
        for old in item.was:
            assert experiment_called(old) == item.experiment
    assert expanded(["experiment=table5,table6,demo"]) == [
        "experiment=balancekv_table5,balancekv_table6,demo"
    ]


def test_experiments_and_published_files_are_in_the_list() -> None:
    for name, said in EXPERIMENTS.items():
        if (name.partition("_")[0] in PAPERS and "table" in name) or said.get("paper_table"):
            assert name in ITEMS, f"{name} is not in results/paper/experiments.yaml"
        if name in ITEMS:
            assert said["experiment_name"] in ITEMS
            assert name.startswith(said["experiment_name"])
    for path in (ROOT / "results/paper").glob("*.csv"):
        assert path.stem in (*ITEMS, "models"), f"{path.name} is in no line of experiments.yaml"


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_stands_beside_a_published_table_says_how_it_differs(name: str, capsys: Any) -> None:
    specs: Any = OmegaConf.to_container(composed(f"experiment={name}").paper_table)
    specs = specs if isinstance(specs, list) else [specs]
    assert all(set(spec) - {"where"} == {"file", "differences"} for spec in specs)
    assert all(spec["file"] in ITEMS for spec in specs)
    status, out, err = main(capsys, "show", f"experiment={name}", *NEEDED.get(name, []))
    assert (status, err) == (0, "")
    comments = [line for line in out.splitlines() if line.startswith("#")]
    for line in {line for spec in specs for line in spec["differences"]}:
        assert any(f"# differs from the paper: {line} (" in comment for comment in comments)
    assert yaml.safe_load(out)["paper_table"]  # still YAML, comments and all


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_command_composes_as_on_the_shipped_model(every: bool) -> None:
    """The first line of each, or all of them."""
    for name in COMPOSED:
        lines = list(command_lines(name, ["model=recall_mini", "limit=2", "device=cpu"]))
        assert lines
        for line in lines:
            assert line[0] == lines[0][0] or line[0] in MADE[name].runs
            assert {"limit=2", "task.per_dataset=2"} & set(line)
        for line in lines if every else lines[:1]:
            one = [word for word in line if not re.match(r"[\w.]+=[^\[{']*,", word)]  # of a sweep
            assert refusal_of(one) is None, line


def test_what_a_command_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lines(name: str, *words: str) -> list[list[str]]:
        return list(command_lines(name, words))

    words = ["model=recall_mini", "limit=2", "launcher=local", "shards=2", "results_dir=x"]
    (line,) = lines("balancekv_table3", *words)  # a script, which knows nothing of jobs
    assert line[:2] == ["script=norms", "name=balancekv_table3"]
    assert line[-3:] == ["model=recall_mini", "limit=2", "results_dir=x"]
    assert lines("clustergen_figure1") == [["script=clusterability", "name=subgen_figure1"]]
    assert [len(lines("clustergen_c2", *w)) for w in ([], ["model=opt_6_7b"])] == [2, 1]
    # what H2O's Table 5 changes of OPT's is no architecture by itself
    assert composed(*lines("h2o_table5", "model=recall_mini")[0]).model.architecture is None
    assert composed(*lines("h2o_table5")[0]).model.architecture.model_type == "opt"
    assert len(lines("h2o_table5")) == 3
    monkeypatch.setenv("LONGEVAL", str(tmp_path))
    found = lines("subgen_table1", "task.seed=3")
    assert [line[1] for line in found] == [f"task_label=longeval_{n}" for n in (200, 300, 400)]
    assert all(f"task.files=[{tmp_path}/" in line[2] for line in found)
    monkeypatch.delenv("LONGEVAL")
    monkeypatch.delenv("ESSAYS", raising=False)  # make exports it
    small = lines("subgen_table1", "model=recall_mini")
    assert all("task.files=[]" in line and not any("LONGEVAL" in w for w in line) for line in small)
    mine = lines("subgen_table1", "model=recall_mini", "task.files=[a]")
    assert all("task.files=[a]" in line and "task.files=[]" not in line for line in mine)
    for name, said in (
        ("subgen_table1", "LONGEVAL is not set; subgen_table1 needs LongChat"),
        ("figure4", "ESSAYS is not set; balancekv_figure4 needs"),
        ("h2o_figure3", "h2o_figure3 has no experiment: an illustration"),
        ("balancekv_tabel1", r"unknown experiment 'balancekv_tabel1' \(did you mean"),
    ):
        with pytest.raises(UserError, match=said):
            lines(name)


def test_make_passes_on_what_it_was_given() -> None:
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
        (["reproduce-all"], "all"),
    ]:
        line = ["make", "-n", *asked, *words, "VENV=/none"]
        told = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (text,) = (text for text in told.splitlines() if " reproduce " in text)
        found, *given = shlex.split(text.partition(" reproduce ")[2])
        assert found == name
        assert expected <= set(given)


def test_a_failure_does_not_keep_the_others_from_being_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def run(line: Any) -> int:
        asked.append(line[0].partition("=")[2])
        if len(asked) < 3:
            raise [UserError("no"), OSError("full")][len(asked) - 1]
        folder = tmp_path / EXPERIMENTS[experiment_called(asked[-1])]["experiment_name"]
        folder.mkdir(exist_ok=True)
        (folder / "report.html").write_text("<p>")
        return 0

    scripts: list[str] = []
    monkeypatch.setattr(reproducing, "run_script", lambda line: scripts.append(line[1]) or 0)
    words = ["all", "model=recall_mini", "limit=2", f"results_dir={tmp_path}"]
    assert reproduce(words, run) == 2
    made = {script.removeprefix("name=") for script in scripts}
    assert {*map(experiment_called, asked), *made} == {i.experiment for i in MADE.values()}
    order = re.findall(r'href="(\w+)/report.html"', (tmp_path / "index.html").read_text())
    assert order.index("balancekv_table2") < order.index("subgen_table2")

    def stopped(line: Any) -> int:
        raise Terminated

    with pytest.raises(Terminated):
        reproduce(words, stopped)


def test_reproduce_runs_what_it_says(capsys: Any, tmp_path: Path) -> None:
    words = ["model=recall_mini", "limit=1", "logger=none", f"results_dir={tmp_path}"]
    narrow = ["task.datasets=[trec]", "task.max_input=300", "method=[exact,uniform]"]
    assert main(capsys, "reproduce", "balancekv_table6", *words, *narrow)[0] == 0
    runs = load_runs(tmp_path / "balancekv_table6")
    assert {found.manifest["method"] for found in runs} == {"exact", "uniform"}
    assert {len(found.records) for found in runs} == {1}
