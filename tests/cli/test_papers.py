"""Every numbered table and figure of the papers has a command: the list of them, the experiments, the
published numbers and what READMEs and make say agree."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import DictConfig, OmegaConf
from support.command import composed, ended, main, refusal_of
from support.paths import ROOT

from kvbench.cli import config
from kvbench.cli import reproduce as reproducing
from kvbench.cli.config import Settings, expanded, hydra_of_conf
from kvbench.cli.items import experiment_called, paper_items
from kvbench.cli.reproduce import command_lines, reproduce
from kvbench.errors import UserError
from kvbench.records.read import load_runs
from kvbench.run.termination import Terminated

ITEMS = paper_items()
PAPERS = {item.paper for item in ITEMS.values()}
MADE = {name: item for name, item in ITEMS.items() if not item.no_data}
COMPOSED = [name for name in MADE if not (MADE[name].script or MADE[name].alias)]
EXPERIMENTS = {
    path.stem: yaml.safe_load(path.read_text())
    for path in sorted((ROOT / "conf/experiment").glob("[!_]*.yaml"))
}
GENERATED = {"balancekv_figure4", "h2o_figure5", "streaming_llm_figure3", "subgen_table1"}
GENERATED |= {"clustergen_table1"}
"""Items whose small runs read texts that a task makes."""
SCRIPTS = ROOT / "scripts/papers"


@cache
def composed_once(*overrides: str) -> DictConfig:
    with hydra_of_conf() as hydra:
        return config.composed(hydra, overrides)


@pytest.fixture(autouse=True)
def _compose_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An experiment is composed once for all tests that ask for its commands."""
    monkeypatch.setattr(reproducing, "composed", lambda _, overrides: composed_once(*overrides))


@pytest.mark.parametrize(
    ("paper", "kind", "count"),
    [
        ("balancekv", "figure", 4),
        ("balancekv", "table", 6),
        ("h2o", "figure", 14),
        ("h2o", "table", 12),
    ],
)
def test_the_list_has_every_number_of_the_papers(paper: str, kind: str, count: int) -> None:
    """As printed in version 3 of BalanceKV and of H2O."""
    ids = [item.id for item in ITEMS.values() if item.paper == paper]
    matches = (re.fullmatch(rf"{kind}(\d+)[a-z]?", item_id) for item_id in ids)
    assert {int(match[1]) for match in matches if match} == set(range(1, count + 1))


def test_every_item_says_what_it_shows_and_what_makes_it() -> None:
    for item in ITEMS.values():
        assert item.alias or (item.shows and (item.needs or item.no_data))
        assert not (item.no_data and item.experiment in EXPERIMENTS)
        assert not item.script or (SCRIPTS / f"{item.script}.py").is_file()


def test_a_number_of_one_paper_is_its_item_and_one_of_several_names_them() -> None:
    assert expanded(["experiment=h2o_table7,figure9"]) == ["experiment=h2o_table7,h2o_figure9"]
    with pytest.raises(UserError, match="is made by a script; use kvbench reproduce error_scaling"):
        expanded(["experiment=error_scaling"])
    four = "balancekv_table1, subgen_table1, clustergen_table1, h2o_table1"
    for words in (["reproduce", "table1"], ["show", "table1"], ["experiment=table1"]):
        result = ended(words)
        assert result.status == 2
        assert result.err == f"kvbench: table1 is of several papers; allowed: {four}\n"


def test_show_shows_what_an_experiment_runs(capsys: Any) -> None:
    """The first job of its own sweep, with the values of them all above it."""
    models = "model=llama31_8b_instruct,qwen25_14b_instruct,qwen25_32b_instruct"
    status, out, err = main(capsys, "show", "experiment=balancekv_table1")
    assert (status, err) == (0, "")
    assert out.startswith(f"# sweep of 3 jobs, the first below: {models}\n")
    assert yaml.safe_load(out)["model"]["name"] == "Llama-3.1-8B-Instruct"
    several = main(capsys, "show", "experiment=balancekv_table5")[1]
    assert yaml.safe_load(several)["budget"]["rate"] == [0.8, 0.9, 0.95], "of one job"
    status, out, err = main(capsys, "show", "experiment=balancekv_table1", "model=recall_mini")
    assert (status, err, "# sweep" in out) == (0, "", False)
    assert yaml.safe_load(out)["model"]["name"] == "recall_mini"


def test_an_alias_is_its_item_and_nothing_else() -> None:
    papers = yaml.safe_load((ROOT / "results/paper/experiments.yaml").read_text())
    aliases = {name: item.alias for name, item in ITEMS.items() if item.alias}
    assert aliases["clustergen_table1"] == "subgen_table1"
    for name in aliases:
        paper, _, number = name.partition("_")
        assert set(papers[paper]["items"][number]) == {"alias"}
    assert len(list(command_lines("clustergen_table1", ["model=recall_mini"]))) == 3


def test_experiments_and_published_files_are_in_the_list() -> None:
    for name, experiment in EXPERIMENTS.items():
        is_table = name.partition("_")[0] in PAPERS and "table" in name
        if is_table or experiment.get("paper_table"):
            assert name in ITEMS, f"{name} is not in results/paper/experiments.yaml"
        if name in ITEMS:
            assert experiment["experiment_name"] in ITEMS
            assert name.startswith(experiment["experiment_name"])
    for path in (ROOT / "results/paper").glob("*.csv"):
        assert path.stem in (*ITEMS, "models"), f"{path.name} is in no line of experiments.yaml"


def test_every_experiment_says_how_it_differs_from_its_paper(capsys: Any) -> None:
    for name in COMPOSED:
        made = composed_once(f"experiment={MADE[name].experiment}")
        assert made.differs, name
        # The published Self-BLEU stands beside that of scripts/papers/self_bleu.py.
        if name != "h2o_figure7":
            assert (MADE[name].status == "published") is bool(made.paper_table), name
        specs: Any = OmegaConf.to_container(made.paper_table) if made.paper_table else []
        for spec in specs if isinstance(specs, list) else [specs]:
            assert set(spec) - {"where", "model", "statistic"} == {"file"}
            assert spec["file"] in ITEMS
    status, out, err = main(capsys, "show", "experiment=h2o_figure2d")  # without a published table
    assert (status, err) == (0, "")
    for line in yaml.safe_load(out)["differs"]:
        assert f"# differs from the paper: {line}" in out.splitlines()


@pytest.mark.parametrize("name", ["demo_official", "subgen_table1", "balancekv_figure4"])
def test_a_missing_file_is_a_line_that_says_where_it_comes_from(capsys: Any, name: str) -> None:
    refusal = refusal_of([f"experiment={name}", "model=recall_mini"]) or ""
    pattern = r"a file is missing: task\.\w+=\[.*\], of .*git clone .*"
    assert re.fullmatch(pattern, refusal), refusal
    status, out, err = main(capsys, "show", f"experiment={name}")
    assert (status, err) == (0, "")
    assert re.search(r": '?<task\.\w+=\[.*\]: ", out), "what is missing is shown, too"
    assert refusal_of([f"experiment={name}", "model=recall_mini"]) == refusal


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_command_composes_on_the_shipped_model(every: bool) -> None:
    for name in COMPOSED:
        lines = list(command_lines(name, ["model=recall_mini", "limit=2", "device=cpu"]))
        assert lines
        for line in lines:
            assert line[0] == lines[0][0] or line[0] in MADE[name].runs
            assert {"limit=2", "task.per_dataset=2"} & set(line)
        for line in lines if every else lines[:1]:
            check_small_run(name, line)


def check_small_run(name: str, line: Sequence[str]) -> None:
    swept = re.compile(r"[\w.]+=[^\[{']*,")
    words = [word for word in line if not swept.match(word)]
    settings = Settings.of(composed(*words))
    assert settings.paper_table is None
    assert settings.experiment_name.endswith("_small")
    sentence = settings.small or ""
    assert sentence.startswith("A small run, not that of the paper: model recall_mini")
    reads_fixtures = any("fixtures" in word or "tests/data" in word for word in words)
    is_invented = reads_fixtures or name in GENERATED
    assert settings.task_label.startswith("fixture_") is is_invented, words
    assert ("invented texts" in sentence) is is_invented


def test_a_script_has_its_arguments_and_its_exit_status_is_the_commands(
    capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "scripts/papers/attention_mass.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys\nprint(*sys.argv[1:])\nsys.exit(2)\n")
    monkeypatch.setattr(reproducing, "config_dir", lambda: tmp_path / "conf")
    status, out, err = main(capfd, "reproduce", "h2o_figure2b", "limit=2", "dry_run=true")
    assert (status, err) == (2, "")
    difference, command, printed = out.splitlines()
    assert difference.startswith("differs from the paper: attention is summed by position here")
    assert command == "python scripts/papers/attention_mass.py name=h2o_figure2b limit=2"
    assert printed == "name=h2o_figure2b limit=2 dry_run=true"


@pytest.mark.parametrize(
    ("field", "status", "printed"),
    [
        ("max_seq_len", 0, "settings checked: model MPT-7B (MptConfig), task LongBench\n"),
        ("max_length_of_all", 2, "'max_length_of_all', which MptConfig does not have; allowed: "),
    ],
)
def test_a_dry_run_of_a_script_checks_its_settings(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    status: int,
    printed: str,
) -> None:
    """Before anything is downloaded: a field that MPT's config has, and one that it does not have."""
    script = str(SCRIPTS / "clusterability.py")
    (panel,) = [line for line in command_lines("clustergen_figure1", []) if "model=_mpt_7b" in line]
    words = [word.replace("max_seq_len", field) for word in panel[1:]]
    monkeypatch.syspath_prepend(SCRIPTS)
    monkeypatch.setattr(sys, "argv", [script, *words, "dry_run=true"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(script, run_name="__main__")
    assert (stop.value.code or 0) == status
    output = capsys.readouterr()
    assert printed in (output.err if status else output.out)


def test_show_knows_every_item(capsys: Any) -> None:
    for name, item in ITEMS.items():
        if item.alias or not (item.script or item.no_data):
            continue
        status, out, err = main(capsys, "show", name)
        assert (status, err) == (0, "")
        facts = yaml.safe_load(out)
        assert facts["shows"] == item.shows
        assert facts.get("differs", []) == list(item.differs)
    status, out, err = main(capsys, "show", "h2o_table8")  # by an experiment
    assert (status, err) == (0, "")
    assert yaml.safe_load(out)["experiment_name"] == "h2o_table8"


def lines_of(name: str, *words: str) -> list[list[str]]:
    return list(command_lines(name, words))


def test_a_command_that_is_a_script_says_which_run_it_is_of() -> None:
    words = ["model=recall_mini", "limit=2", "launcher=local", "shards=2", "results_dir=x"]
    (line,) = lines_of("balancekv_table3", *words)  # a script, which knows nothing of jobs
    assert line[:2] == ["script=norms", "name=balancekv_table3_small"]
    assert line[2].startswith("small='A small run, not that of the paper: model recall_mini")
    assert line[-3:] == ["model=recall_mini", "limit=2", "results_dir=x"]


def test_another_model_takes_the_place_of_the_papers() -> None:
    assert [len(lines_of("clustergen_c2", *w)) for w in ([], ["model=opt_6_7b"])] == [4, 1]
    # what H2O's Table 5 changes of OPT's is no architecture by itself
    assert composed(*lines_of("h2o_table5", "model=recall_mini")[0]).model.architecture is None
    assert composed(*lines_of("h2o_table5")[0]).model.architecture.model_type == "opt"
    assert len(lines_of("h2o_table5")) == 3


def test_a_command_reads_the_papers_files_or_invented_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LONGEVAL", str(tmp_path))
    papers = lines_of("subgen_table1", "task.seed=3")
    assert [line[1] for line in papers] == [f"task_label=longeval_{n}" for n in (200, 300, 400)]
    assert all(f"task.files=[{tmp_path}/" in line[2] for line in papers)
    monkeypatch.delenv("LONGEVAL")
    small = lines_of("subgen_table1", "model=recall_mini")
    assert all("task.files=[]" in line and not any("LONGEVAL" in w for w in line) for line in small)
    mine = lines_of("subgen_table1", "model=recall_mini", "task.files=[a]")
    assert all("task.files=[a]" in line and "task.files=[]" not in line for line in mine)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("subgen_table1", "LONGEVAL is not set; subgen_table1 needs LongChat"),
        ("balancekv_figure4", "ESSAYS is not set; balancekv_figure4 needs"),
        ("h2o_figure3", "h2o_figure3 has no experiment: an illustration"),
        ("balancekv_tabel1", r"'balancekv_tabel1' \(did you mean 'balance.* balancekv_figure3,"),
    ],
)
def test_a_command_that_lacks_something_says_what(
    monkeypatch: pytest.MonkeyPatch, name: str, message: str
) -> None:
    for variable in ("LONGEVAL", "ESSAYS"):
        monkeypatch.delenv(variable, raising=False)  # make exports it
    with pytest.raises(UserError, match=message):
        lines_of(name)


def test_longbenchs_metrics_need_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproducing, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lm-eval is not installed; try: .*kvbench\[lm-eval\]"):
        lines_of("balancekv_table1", "model=recall_mini")


def test_all_visits_every_name_whatever_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    experiments: list[str] = []

    def run(line: Any) -> int:
        experiments.append(line[0].partition("=")[2])
        if len(experiments) < 3:
            raise [UserError("no"), OSError("full")][len(experiments) - 1]
        folder = next(word.partition("=")[2] for word in line if word[:15] == "experiment_name")
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "report.html").write_text("<p>")
        return 0

    scripts: list[str] = []
    monkeypatch.setattr(
        reproducing, "run_script", lambda _, words, dry: scripts.append(words[0]) or 0
    )
    words = ["all", "model=recall_mini", "limit=2", f"results_dir={tmp_path}"]
    assert reproduce(words, run) == 2
    heads = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert [head for head in heads if head in ITEMS] == list(ITEMS)
    by_scripts = {script.removeprefix("name=").removesuffix("_small") for script in scripts}
    assert {*experiments, *by_scripts} == {experiment_called(name) for name in MADE}
    order = re.findall(r'href="(\w+)/report.html"', (tmp_path / "index.html").read_text())
    assert order.index("balancekv_table2_small") < order.index("subgen_table2_small")

    def stopped(line: Any) -> int:
        raise Terminated

    with pytest.raises(Terminated):
        reproduce(words, stopped)


def test_reproduce_runs_what_it_says(capsys: Any, tmp_path: Path) -> None:
    words = ["model=recall_mini", "limit=1", "logger=none", f"results_dir={tmp_path}"]
    narrow = ["task.datasets=[trec]", "task.max_input=300", "method=[exact,uniform]"]
    assert main(capsys, "reproduce", "balancekv_table6", *words, *narrow)[0] == 0
    runs = load_runs(tmp_path / "balancekv_table6_small")
    assert {run.manifest["method"] for run in runs} == {"exact", "uniform"}
    assert {len(run.records) for run in runs} == {1}
