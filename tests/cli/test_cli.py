"""The command line: what it prints without torch, what it prints of a run, and its exit status."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from support.attacks import RUN, SECRETS, TYPED, leaks
from support.command import FAST, SHORT, composed, ended, job_of, main, refusal_of
from support.jobs import Echo, make_job, records_of
from support.paths import write_lines

from kvbench.catalogue import KINDS, catalogue
from kvbench.cli.config import expanded
from kvbench.cli.main import own_task
from kvbench.engine.model import local_path
from kvbench.errors import HIDDEN, UserError
from kvbench.methods import build_method
from kvbench.report.__main__ import main as report_main
from kvbench.run import progress, session
from kvbench.run.plan import TaskPlan
from kvbench.run.progress import Progress
from kvbench.run.runner import run_job

WITHOUT_TORCH = """
import sys, kvbench
from kvbench.cli.main import main
assert "compress" in dir(kvbench)
for *words, status in (
    ["--help", 0], ["list", "methods", 0], ["show", "method=snapkv", "seed=7", 0],
    ["method=snapkvv", 2], ["budget.rate=1.5", 2], ["sampling.top_p=2", 2],
    ["methods.snapkv.kernel_size=4", 2],  # a method's class needs torch
):
    assert "torch" not in sys.modules
    try: main(words)
    except SystemExit as stop: assert stop.code == status, words
assert not {"transformers", "wandb", "pandas"} & set(sys.modules)
"""


@pytest.fixture(scope="module")
def printed() -> str:
    """What --help, list and show print, none of which needs torch, nor do four refusals of a line."""
    process = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert (process.returncode, process.stderr.count("\n")) == (0, 4), process.stderr
    return process.stdout


def test_help_and_list_name_what_there_is_in_short_lines(printed: str) -> None:
    for word in ("Choose one", "snapkv", "longeval_lines", "method (presets): ", "dry_run=true"):
        assert word in printed
    help_text = printed.partition("exact ")[0]
    assert not re.search(r"\b_\w+", help_text), "parts of other YAML files are no choice"
    assert "reproduce <name>|all" in help_text
    assert max(map(len, printed.partition("adakv  ")[0].splitlines())) <= 80


def test_show_prints_a_config_with_everything_filled_in(printed: str) -> None:
    shown = printed.partition("model:\n")[2]
    assert "kernel_size: 5" in shown
    assert shown.count("seed: 7") == 1, "of the draws alone"
    assert "${" not in shown
    assert "hydra" not in shown


def test_the_first_line_comes_before_torch() -> None:
    script = "import builtins, sys\nreal = builtins.__import__\n"
    script += "def spy(name, *rest):\n    if name == 'torch' and 'torch' not in sys.modules:\n"
    script += "        print('IMPORTED', flush=True); sys.exit(9)\n    return real(name, *rest)\n"
    script += "builtins.__import__ = spy\nfrom kvbench.cli.main import main\nmain(sys.argv[1:])\n"
    sweep = ["-m", "model=recall_mini", "task=needle,longeval_lines", "limit=1"]
    command = [sys.executable, "-c", script, *sweep]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    first, second = process.stdout.splitlines()
    assert first.endswith(
        ": 2 jobs, the first: recall_mini x needle, 8 methods -> runs/recall_mini"
    )
    assert second == "IMPORTED", process.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_everything_listed_has_a_line_about_it(capsys: Any, kind: Any) -> None:
    status, out, _ = main(capsys, "list", kind)
    assert status == 0
    lines = [line for line in out.splitlines() if line[0] != "#"]
    assert {line.split()[0] for line in lines} >= set(catalogue(kind)) > set()
    groups = {"methods": "presets: ", "tasks": "benchmarks ", "experiments": "tables and figures "}
    assert f"# {groups.get(kind, '')}" in out or kind not in groups
    for line in lines:
        name, _, text = line.partition(" ")
        assert len(text.strip()) > 10, name
    assert main(capsys, "list", kind.removesuffix("s"))[1] == out


def test_a_hub_id_or_a_folder_is_a_model_with_one_label(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "2 mine").mkdir()
    hub = "Qwen/Qwen2.5-0.5B-Instruct"
    assert composed(f"model={hub}").model.name == hub
    assert (
        composed(f"model={hub}", "task=needle").experiment_name
        == "needle-Qwen_Qwen2.5-0.5B-Instruct"
    )
    for value in (
        "./2 mine",
        "2 mine/",
        str(tmp_path / "2 mine"),
        "../" + tmp_path.name + "/2 mine",
    ):
        for words in ([f"model='{value}'"], ["model=hf", f"model.path='{value}'"]):
            model = composed(*words).model
            assert (model.path, model.name) == (value, "2 mine")


@pytest.mark.parametrize(
    ("words", "model"),
    [
        ("task=longeval_lines", "recall_mini"),  # trained on them; SmolLM2 answers none
        ("task=needle", "smollm2_135m"),
        ("task=needle model=tiny_random", "tiny_random"),
        ("task=layer_error task@task.prompts=longeval_lines", "smollm2_135m"),
        ("experiment=h2o_table7", "OPT-6.7B"),
        ("experiment=demo_recall_mini task=needle", "recall_mini"),
    ],
)
def test_a_task_or_an_experiment_says_which_model_it_runs_on(words: str, model: str) -> None:
    assert composed(*words.split()).model.name == model


def test_a_sweep_shows_its_progress_and_loads_a_model_once(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded: list[str] = []
    real_load_model = session.load_model

    def load(spec: Any, **options: Any) -> Any:
        loaded.append(spec.name)
        return real_load_model(spec, **options)

    monkeypatch.setattr(session, "load_model", load)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0)
    status, out, err = main(capsys, *SHORT, "-m", "compress_after=all_but_last,context")
    assert (status, loaded) == (0, ["tiny_random"]), err
    jobs = [line for line in err.splitlines() if line.startswith("kvbench: job ")]
    of_two = ("1 of 2: compress_after=all_but_last", "2 of 2: compress_after=context")
    assert jobs == [f"kvbench: job {line}" for line in of_two]
    first = out.index("longeval_lines on tiny_random")  # as soon as the first job has ended
    of_protocols = [
        out.index(f"longeval_lines, compress_after {protocol} on tiny_random")
        for protocol in ("all_but_last", "context")
    ]
    assert first < of_protocols[0] < of_protocols[1], "a table of each protocol, at the end"
    lines = [line.partition("longeval_lines: ")[2] for line in err.splitlines()]
    assert "loading the data and the model" in lines
    prefill = re.compile(r"0/2, prefill of \d+ tokens: layer 1 of 6")
    assert any(map(prefill.fullmatch, lines))
    assert any(line.endswith(" tokens: snapkv compresses layer 6 of 6") for line in lines)
    assert any(line.endswith("decoding 2 methods, token 1 of 2") for line in lines)
    assert any(line.startswith("2/2, done, about 0 s left; exact ") for line in lines)
    again = main(capsys, *SHORT, "lock_timeout=9")[2]
    assert again.endswith("longeval_lines: 2/2, 2 of 2 on disk\n")


def test_methods_and_rates_of_a_sweep_are_one_job(capsys: Any, tmp_path: Path) -> None:
    """They share prefills with exact; each run's folder and records are those of a job of its own."""
    task = [*SHORT[:2], *SHORT[3:]]
    swept = ["-m", "method=h2o,snapkv", "budget.rate=0.5,0.25", f"results_dir={tmp_path}/one"]
    status, out, err = main(capsys, *task, *swept)
    assert (status, out.splitlines()[0].partition(": ")[2].partition(" ->")[0]) == (
        0,
        "tiny_random x longeval_lines, 3 methods at 2 rates",
    ), err
    for rate in (0.5, 0.25):
        alone = [f"budget.rate={rate}", f"results_dir={tmp_path}/two"]
        run_job(job_of(*task, "method=[exact,snapkv,h2o]", *alone))
    one, two = (
        {
            path.parent.name: [
                {key: record[key] for key in ("method", "example_id", "prediction", "cache_bytes")}
                for record in map(json.loads, path.read_text().splitlines())
            ]
            for path in (tmp_path / name).rglob("records.jsonl")
        }
        for name in ("one", "two")
    )
    assert len(one) == 5
    assert one == two


def test_several_tasks_or_models_are_a_sweep_with_and_without_m(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    words = ["task=passkey,key_value", "model=tiny_random", "device=cpu", "dry_run=true", "limit=1"]
    words += ["logger=none", f"results_dir={tmp_path}"]
    plain, swept = (main(capsys, *more, *words) for more in ([], ["-m"]))
    assert plain == swept
    assert (plain[0], plain[1].count("job 2: task=key_value: ")) == (0, 1)
    folders = ["assets/a", "assets/b"]
    monkeypatch.chdir(tmp_path)
    for folder in folders:
        shutil.copytree(local_path("asset:recall_mini"), folder)
    words[:2] = ["task=passkey", f"model={','.join(folders)}"]
    status, out, err = main(capsys, *words)
    assert (status, out.count("job 2: model.path=assets/b: ")) == (0, 1), err


def test_a_finished_command_loads_no_weights_and_prints_its_tables(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    words = [*SHORT, "budget.rate=0.5,0.25", f"results_dir={tmp_path}"]
    first = main(capsys, *words)
    monkeypatch.setattr(session, "load_model", None)  # to be called it would have to be a function
    again = main(capsys, *words)
    assert (again.status, again.out) == (0, first.out), again.err
    assert again.err.endswith(": 2/2, 2 of 2 on disk\n")
    lines = map(json.loads, next(tmp_path.glob("*/log.jsonl")).read_text().splitlines())
    job, report, *_ = lines
    assert (job["task"], list(report["seconds"])) == ("longeval_lines", ["report"])
    assert set(job["seconds"]) == {"load", "prefill", "compress", "decode", "score"}
    assert all(value >= 0 for value in job["seconds"].values())
    assert report_main([str(next(tmp_path.glob("*")))]) == 0
    assert "seconds: load " in capsys.readouterr().out


def test_the_time_left_is_that_of_the_items_so_far(monkeypatch: Any) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    watched = Progress()
    watched.begin([(SimpleNamespace(examples=()), {})] * 4, total=10)
    assert watched.left is None, "six were on disk"
    for left in (6.0, 4.0, 2.0, 0.0):
        now += 2
        watched.item_done([])
        assert watched.left == left
    watched.begin([], total=10, labels="gabcdef")
    watched.item_done([{"method": method, "score": 0.5} for method in "abcdefg"])
    assert str(watched).endswith("; g 0.50  a 0.50  b 0.50  c 0.50  d 0.50  and 2 more")


def test_a_sweep_has_one_folder(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    folders = {
        "seed=0,1": "runs/longeval_lines-tiny_random/",
        "task=longeval_lines,longeval_redundant": "runs/tiny_random/",
        "model=tiny_random,recall_mini": "runs/longeval_lines/",
    }
    for swept, folder in folders.items():
        words = [word for word in SHORT if word.partition("=")[0] != swept.partition("=")[0]]
        status, out, err = main(capsys, *words, "-m", swept, "dry_run=true")
        assert (status, err, out.count(f"; {folder}")) == (0, "", 2)


def test_a_folder_of_configs_may_come_before_the_command(capsys: Any, tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    target = "_target_: kvbench.methods.snapkv.SnapKV\nkernel_size: 3\n"
    (tmp_path / "method" / "mine.yaml").write_text(f"# @package methods.mine\n{target}")
    before = main(capsys, f"--config-dir={tmp_path}", "show", "method=mine")
    assert before == main(capsys, "show", "method=mine", "--config-dir", str(tmp_path))
    words = ["reproduce", "balancekv_table6", "model=recall_mini", "method=mine", "dry_run=true"]
    status, out, err = main(capsys, f"--config-dir={tmp_path}", *words)
    assert (status, "mine" in out) == (0, True), err
    assert (before[0], yaml.safe_load(before[1])["methods"]["mine"]["kernel_size"]) == (0, 3)


def test_kvbench_alone_is_a_short_help_and_no_run(
    capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = main(capsys)
    assert (status, err) == (0, "")
    assert len(out.splitlines()) < 20
    for line in re.findall(r"^  kvbench (\S*=.*?)(?:  .*)?$", out, re.M):
        assert refusal_of(shlex.split(line)) is None
    assert not list(tmp_path.iterdir())
    assert main(capsys, "--version")[1].startswith("kvbench 0.")


def test_own_rows_are_one_word(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    text = "Ann walked to the mill. The number of the house is 4711. " * 4
    Path("it's mine, x=1.csv").write_text(f"Text,q,gold\n{text},What is the number?,4711\n")
    words = [
        *FAST[:2],
        "method=[snapkv]",
        "budget.rate=0.5,0.25",
        "budget.sink=4",
        "budget.window=8",
    ]
    status, out, err = main(capsys, "own", "it's mine, x=1.csv", *words, "task.max_new_tokens=2")
    assert status == 0, err
    assert "tiny_random x it_s_mine,_x=1, 1 method at 2 rates" in out
    assert "task.fields={context: Text, question: q, answers: gold}" in err
    assert len(list(Path("runs").rglob("records.jsonl"))) == 2
    of_hub = ["task=jsonl", "task.dataset=me/my.rows", "task_label='my'", "-m"]
    assert own_task(["-m", "me/my.rows"]) == of_hub
    assert "nothing; allowed: one file" in main(capsys, "own")[2]
    assert "no.jsonl" in main(capsys, "own", "no.jsonl", *words)[2]


def test_every_command_has_help(capsys: Any) -> None:
    for command in ("list", "show", "own", "reproduce", "score", "prune"):
        status, out, err = main(capsys, command, "--help")
        assert (status, err) == (0, "")
        assert out.startswith(f"kvbench {command}")
        assert all(len(line) <= 80 for line in out.splitlines())
    assert main(capsys, "reproduce") == main(capsys, "list", "experiments")


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    """The whole plan of one job; of several jobs a line for each."""
    monkeypatch.chdir(tmp_path)
    status, out, err = main(capsys, *SHORT, "dry_run=true")
    assert (status, err) == (0, "")
    assert out.count("tiny_random x longeval_lines: dry run, nothing written") == 1
    for word in ("2 examples, 2 of them to run", "prompt tokens (min", "snapkv", "0/2", "(100%)"):
        assert word in out
    status, out, err = main(capsys, *SHORT, "-m", "seed=range(3)", "dry_run=true", "shards=2")
    assert (status, err) == (0, "")
    assert out.count("prompt tokens (min") == 3
    assert "job 3: seed=2: 2 methods, 2 examples, 2 of them to run; " in out
    assert "6 jobs; launcher=local" in out
    assert list(tmp_path.iterdir()) == []


def test_failed_examples_are_status_1_and_a_log_stays_readable(
    capsys: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    failing = [a.replace("tiny_random", "recall_mini") for a in SHORT]
    status, out, err = main(capsys, *failing, "example_timeout=1e-9", "-v")
    assert status == 1, err
    assert "\033" not in out + err
    assert "recall_mini x longeval_lines: 2/2" in err
    where = "failed: recall_mini on longeval_lines: exact (2), snapkv (2): TimeoutError: "
    again = "to run again what failed: retry_failed=true"
    assert f"{where}the example took more than 1e-09 s\n{again}\npage: " in out
    assert ", in check\n    raise TimeoutError(" in err, "with -v there is a traceback"
    assert (tmp_path / "runs/longeval_lines-recall_mini/report.html").exists()
    lines = [p.read_text().splitlines() for p in tmp_path.glob("runs/**/records.jsonl")]
    assert [json.loads(line)["status"] for file in lines for line in file] == ["timeout"] * 4


# Secrets


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("planted")
def test_a_config_is_shown_without_secrets(tmp_path: Path) -> None:
    for value in (TYPED, "'${oc.env:HF_TOKEN}'"):
        words = ["show", f"model.revision={value}", *RUN, "logger=none"]
        result = ended(words, folder=tmp_path)
        assert not leaks(tmp_path, result.out + result.err)
        assert result.status == 0, result.err
        assert f"revision: {HIDDEN}" in result.out


@pytest.mark.usefixtures("planted")
def test_a_bug_is_reported_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = f"GET https://me:{SECRETS['HF_TOKEN']}@hub {SECRETS['MY_PASSWORD']} failed"

    def items(*_: Any) -> None:
        raise AssertionError(message)

    monkeypatch.setattr(TaskPlan, "items", items)
    sweep = ["-m", f"model.revision={TYPED},main"]
    result = ended([*RUN, "logger=none", *sweep], folder=tmp_path)
    assert not leaks(tmp_path, result.out + result.err)
    assert result.status == 1
    assert "Traceback" in result.err
    assert f"AssertionError: GET https://{HIDDEN}@hub {HIDDEN} failed" in result.err
    assert f"model.revision={HIDDEN}" in result.out
    assert "2 of them failed" in result.out


def test_a_closed_pipe_is_no_traceback_and_leaves_the_page(tmp_path: Path) -> None:
    for words, first in (
        ("list methods", "# methods, "),
        (shlex.join([*SHORT, f"results_dir={tmp_path}"]), "kvbench "),
    ):
        line = f"{shlex.quote(sys.executable)} -m kvbench {words} | head -1"
        process = subprocess.run(line, shell=True, capture_output=True, text=True)
        assert "Traceback" not in process.stderr
        assert process.stdout.startswith(first)
    assert list(tmp_path.glob("*/report.html"))


def test_stored_answers_are_scored_by_another_metric_without_the_model(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    rows = [{"text": f"{i} a b", "q": "?", "gold": "x"} for i in range(3)]
    (tmp_path / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "scoring.py").write_text(
        "def length(answer, gold):\n    return len(answer) / 100\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fields = "task.fields={context: text, question: q, answers: gold}"
    words = ["logger=none", "model=tiny_random", "method=[exact]", "task.max_new_tokens=3", fields]
    words.append("experiment_name='x=1'")
    assert main(capsys, "own", "r.jsonl", *words, "task.metric=rouge_l").status == 0
    (experiment,) = tmp_path.glob("runs/*")
    (records,) = experiment.rglob("records.jsonl")
    before = records.read_text()
    monkeypatch.setattr(session, "load_model", None)
    ended = main(capsys, "score", str(experiment), "metric=scoring.length")
    assert ended.status == 0, ended.err
    assert "scoring.length" in ended.out
    scores = (experiment / "scores/scoring.length.csv").read_text().splitlines()[1:]
    answers = [json.loads(line)["prediction"] for line in before.splitlines()]
    assert [float(line.rpartition(",")[2]) for line in scores] == [
        len(text) / 100 for text in answers
    ]
    assert records.read_text() == before
    assert "allowed: " in main(capsys, "score", str(experiment), "metric=choice").err
    for value, why in (("true", "ended as soon as"), ("null", "did not note")):
        records.write_text(before.replace('"ended_early": false', f'"ended_early": {value}', 2))
        ended = main(capsys, "score", str(experiment), "metric=substring")
        assert (ended.status, f"2 of 3 answers in {records.parent} " in ended.err) == (2, True)
        assert why in ended.err
    records.write_text(re.sub('"status": "ok"', '"status": "error"', before))
    ended = main(capsys, "score", str(experiment), "metric=substring")
    assert (ended.status, "no answers are stored in " in ended.err) == (2, True)


def test_scores_that_say_nothing_and_answers_that_were_cut_are_said(
    capsys: Any, tmp_path: Path
) -> None:
    out = main(capsys, *SHORT, f"results_dir={tmp_path}").out
    where = "note: tiny_random on longeval_lines: "
    assert f"{where}exact scores 0 %, so that no score says what a method loses" in out
    assert f"{where}all 4 answers end at max_new_tokens (2), none by itself" in out
    out = main(capsys, *FAST[:1], "limit=2", "task.num_lines=[20]", f"results_dir={tmp_path}").out
    assert "recall_mini" in out
    assert "note:" not in out
    rows = [{"context": "x " * n, "question": "?", "answers": "y"} for n in (40, 110, 120)]
    write_lines(tmp_path / "my.jsonl", rows)
    own = ["own", str(tmp_path / "my.jsonl"), "task.max_input=100", "task.max_new_tokens=2"]
    budget = ["budget.sink=4", "budget.window=4", f"results_dir={tmp_path}"]
    out = main(capsys, *own, *SHORT[:3], *budget).out
    assert "my: 2 of 3 prompts are longer than task or model allows and lost their middle, " in out


def test_an_answer_that_its_task_ended_says_so(tmp_path: Path) -> None:
    final = replace(Echo().examples(None)[0], is_final=lambda text: len(text) > 2)
    echo = Echo()
    object.__setattr__(echo, "examples", lambda encoder: [final])
    for task, early, tokens in ((Echo(count=1), False, 6), (echo, True, 3)):
        result = run_job(
            make_job(tmp_path / str(early), {"exact": build_method("exact")}, echo=task)
        )
        (record,) = records_of(result)["exact"]
        found = record["ended_early"], record["new_tokens"], record["max_new_tokens"]
        assert found == (early, tokens, 6)


def test_a_range_of_rates_has_the_numbers_that_were_meant() -> None:
    assert expanded(["budget.rate=range(.1,.4,.1)"]) == ["budget.rate=[0.1,0.2,0.3]"]
    assert expanded(["budget.size=range(64,65,1)"]) == ["budget.size=64"]
    for wrong in ("1", "a,b,c", "1,0,1", "0,1,0", "0,1"):
        with pytest.raises(UserError, match=r"allowed: range\(start,stop,step\)"):
            expanded([f"budget.rate=range({wrong})"])


def test_hydra_s_own_options_work_as_in_any_of_its_programs(
    capsys: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = main(capsys, "--cfg", "job", "--package", "budget", "budget.rate=0.5")
    assert (status, err) == (0, "")
    assert out.startswith("# @package budget\n")
    assert "rate: 0.5" in out
    status, out, err = main(capsys, "--info", "defaults", "task=needle")
    assert (status, err) == (0, "")
    assert "task/needle" in out
    assert "Hydra" in main(capsys, "--hydra-help")[1]
    assert composed("+experiment=demo") == composed("experiment=demo")
    assert "hydra_bash_completion" in main(capsys, "-sc", "install=bash")[1]
    monkeypatch.setenv("COMP_LINE", "kvbench task=longeval_l")
    monkeypatch.setenv("COMP_POINT", str(len("kvbench task=longeval_l")))
    status, out, _ = main(capsys, "-sc", "query=bash")
    assert (status, out.split()) == (0, ["task=longeval_lines", "task=longeval_lines_context"])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("typed", "methods"),
    [
        ("snapkv", "[exact,snapkv]"),
        ("snapkv,h2o", "[exact,snapkv,h2o]"),
        ("h2o,exact", "[h2o,exact]"),
        ("exact", "[exact]"),
        ("[snapkv]", "[snapkv]"),
        ("[snapkv,h2o]", "[snapkv,h2o]"),
    ],
)
def test_exact_runs_beside_every_method_unless_a_list_says_otherwise(
    typed: str, methods: str
) -> None:
    assert expanded([f"method={typed}"]) == [f"method={methods}"]
