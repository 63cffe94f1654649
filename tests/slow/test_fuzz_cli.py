"""Any command line is a correct run or an error of one line: never a traceback, never a silent skip."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.cli_cases import BASE, QUICK, Ended, command_line, ended, lines_of, names, other_line

COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.generate],
}


def explain(arguments: list[str], found: Ended, problem: str) -> str:
    return f"{problem}: kvbench {arguments}\nstatus {found.status}\n{found.err[-3000:]}"


def check(arguments: list[str]) -> None:
    found = ended(arguments)
    problem = found.problem()
    assert problem is None, explain(arguments, found, problem)


@settings(max_examples=15, derandomize=True, **COMMON)
@given(lines_of(command_line))
def test_a_sample_of_command_lines(arguments: list[str]) -> None:
    check(arguments)


@settings(max_examples=10, derandomize=True, **COMMON)
@given(lines_of(other_line))
def test_a_sample_of_other_command_lines(arguments: list[str]) -> None:
    check(arguments)


@pytest.mark.slow
@pytest.mark.parametrize("make", [command_line] * 3 + [other_line], ids=lambda f: f.__name__)
def test_a_thousand_command_lines(make: Callable[[Random], list[str]]) -> None:
    settings(max_examples=250, **COMMON)(given(lines_of(make))(check))()


def test_every_task_has_a_quick_form() -> None:
    """Or its dry runs would take minutes."""
    assert sorted(QUICK) == names("tasks")


FOUND = [
    (["experiment=nan"], "names no experiment"),
    (["experiment=2"], "names no experiment"),
    (["model=3"], "names no model"),
    (["task=[]"], "names no task"),
    (["=", "='\n'"], "is given twice"),
    (["-x", "\x13\x1b[31mred\r"], r"\x13\x1b[31mred\r"),
    (["'" + "x" * 5000 + "'=1"], " [...] "),
    (["experiment_name=" + "y" * 3000], " [...] "),
    (["experiment_name=.hidden"], "experiment_name is '.hidden'; allowed: a folder's name"),
    (["task.files=['" + "y" * 3000 + "']"], None),
    (["methods.snapkv._target_=os.getcwd"], "takes no keyword arguments"),
    (["methods.snapkv._target_=kvbench.kv.Budget"], "unknown key 'kernel_size' of methods.snapkv"),
    (["task._target_=3"], "Expected a callable target"),
    (["model._target_=builtins.dict"], "model._target_ is 'builtins.dict', which makes a dict"),
    (["seed=" + "9" * 400], None),
    (["budget.rate=" + "9" * 400], "allowed: a number in (0, 1]"),
    (["-m", "seed=${nosuch}"], "nosuch"),
    (["model.tokenizer=[a,b]"], "model.tokenizer is ['a', 'b']; allowed: text, or null"),
    (
        ["task=layer_error_synthetic", "task.synthetic=10"],
        "allowed: an instance of SyntheticLayers, or null",
    ),
    (["-m", "model.architecture.hidden_size={}"], "cannot be loaded"),
    (["budget.rate=1e400"], "budget.rate is inf"),
    (["budget.rate=nan"], "budget.rate is nan"),
    (["experiment_name=../../x"], "experiment_name is '../../x'; allowed: a folder's name"),
    (["task_label=.."], "task_label is '..'; allowed: a folder's name"),
    (["task_label=/etc"], "task_label is '/etc'"),
    (["experiment_name='a\nb'"], r"experiment_name is 'a\nb'"),
    (
        ["hydra.job.env_set.HF_TOKEN=hf_abcdefghijklmnopqrstuvwx"],
        "which the results would keep",
    ),
    (["task=needle", "task.answer=${nosuch}"], "'nosuch' not found"),
    (["task.num_lines={a: 1}"], "Error merging override task.num_lines={a: 1}: "),
    (["task.stop=[null]"], "task.stop is [None]; allowed: a list of texts"),
    (["task.files=3"], "task.files is 3; allowed: a list of texts"),
    (["task=needle", "task.question={a: 1}"], "task.question is {'a': 1}; allowed: text"),
    (["task=layer_error", "task.prompts.stop=[1]"], "task.prompts.stop is [1]; allowed:"),
    (["task=layer_error_synthetic", "task.rates=[a]"], "a list of numbers in (0, 1]"),
    (["task=layer_error_synthetic", "task.rates=[0.5,0.5]"], "rate0.5/seed0'; allowed: one"),
    (["task=layer_error_synthetic", "task.seeds=1" + "0" * 30], "an integer from 1 to 100000"),
    (
        ["task=error_scaling", "++task.data={x: {_target_: x, head_dim: 1}}"],
        "Error loading 'x'",
    ),
    (["methods.snapkv.quantize=abc"], "allowed: an instance of Scheme, a mapping"),
    (["methods.snapkv._target_=released"], "Error loading 'released'"),
    (["model.path=123"], "model.path is 123; allowed: text"),
    (["~model.architecture.model_type"], "cannot be loaded: KeyError: 'model_type'"),
    (["+model.config.rope_scaling=3"], "'rope_parameters': TypeError"),
    (["+task._partial_=3"], "_partial_ flag must be a bool"),
    (["seed=" + "9" * 5000], "cannot read 'seed=9"),
    (["seed=" + "[" * 3000 + "]" * 3000], "cannot read 'seed=["),
    (["seed={a:" + "[" * 200 + "]" * 200 + "}"], "lists without end"),
    (["-m", "seed={a:choice(1,2)},3"], "has a sweep, or lists without end, in lists"),
    (["-m", "seed=range(0,1000000000)"], "has too many values; allowed: at most 1000"),
    (["-m", "seed=glob(*)"], "is no list of values"),
    (["-m", "launcher=local,${hydra:job.num}"], "Hydra cannot compose"),
    (["shards=1000000"], "allowed: an integer from 1 to 1000, or null"),
    (["launcher=gpus", "launcher.workers=1000000000"], "a positive integer up to 1000"),
    (["launcher=slurm", "hydra.launcher.mem_gb=U"], "could not be converted to Integer"),
    (["hydra.verbose={a:1}"], "hydra.verbose is {'a': 1}; allowed: true, false"),
    (["hydra.verbose=${hydra:job.num}"], "hydra.verbose is '${hydra:job.num}'; allowed: true"),
    (["hydra.job.chdir=${task}"], "hydra.job.chdir is '${task}'; allowed: true or false"),
    (["--config-name=x"], "--config-name would put another program's config"),
    (["--experimental-rerun=x"], "--experimental-rerun would put"),
    (["--config-dir=/nosuch"], "--config-dir is '/nosuch'; allowed: a folder"),
    (["--cfg", "job", "--run"], "--run and --cfg ask for different things"),
    (["task.seed=${oc.decode:}"], "missing 1 required"),
    (["--resolve"], "--resolve is given without --cfg"),
    (["--cfg", "job", "--package", "hydra"], "--package is 'hydra'; allowed: _global_"),
    (["-sc", "install=x"], "--shell-completion takes one of"),
    (["+model.api_key=123"], "model.api_key is given a value"),
]


@pytest.mark.parametrize(("arguments", "message"), FOUND, ids=lambda v: str(v)[:30])
def test_what_was_found(arguments: list[str], message: str | None) -> None:
    """Command lines that once gave a traceback, several lines, or wrote where they should not."""
    given = {text.partition("=")[0] for text in arguments}
    base = [word for word in BASE if word.partition("=")[0] not in given]
    found = ended([*base, "method=[exact,snapkv]", *arguments])
    problem = found.problem()
    assert problem is None, explain(arguments, found, problem)
    if message is not None:
        assert found.status == 2
        assert message in found.err


def test_setting_up_logging_leaves_the_tests_output_open() -> None:
    """Hydra closes all log handlers, that of a library loaded by an earlier test among them, which may
    hold the stderr of that test."""
    from rouge_score import rouge_scorer  # noqa: F401 - loads absl

    stderr = sys.stderr
    assert ended([*BASE, "task=needle", "method=exact"]).status == 0
    assert not stderr.closed


@pytest.mark.parametrize(
    "name", ["../../escape", "..", "/tmp/escape", "a/../../escape", "~/escape"]
)
def test_no_name_leads_out_of_the_results_folder(tmp_path: Path, name: str) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    base = [word for word in BASE if not word.startswith("dry_run")]
    base += ["method=exact", "task=longeval_lines", "task.num_lines=[5]", "task.max_new_tokens=1"]
    for words in (
        [f"experiment_name={name}"],
        [f"task_label={name}"],
        [f"+methods.'{name}'._target_=kvbench.methods.exact.Exact"],
        [f"model.name={name}"],
    ):
        found = ended([*base, *words], folder=inside)
        assert found.problem() is None, explain(words, found, str(found.problem()))
        written = [path for path in tmp_path.rglob("*") if "escape" in path.name]
        for path in written:
            assert path.is_relative_to(inside / "runs"), path
        assert sorted(path.name for path in tmp_path.iterdir()) == ["inside"]
    assert not Path("/tmp/escape").exists()
    assert not Path("~/escape").expanduser().exists()
