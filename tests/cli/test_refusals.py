"""A wrong command is refused in one line, and nothing is written; nothing that a config names is called
before it is checked to be a class of the expected kind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc import locate
from typing import Any

import pytest
from support.cli_cases import BASE, Ended, ended, with_base
from support.paths import ROOT

from kvbench.catalogue import catalogue, config_dir
from kvbench.cli.declared import declared_options
from kvbench.errors.options import allowed, hints_of

TARGET = re.compile(r"^_target_: (\S+)", re.MULTILINE)


def text_of(kind: str, name: str) -> str:
    """A YAML file of conf."""
    return (config_dir() / kind.removesuffix("s") / f"{name}.yaml").read_text(encoding="utf-8")


ALONE: list[tuple[str, str]] = [
    ("method=snapkvv", "unknown method 'snapkvv' (did you mean 'snapkv'?); allowed:"),
    ("experiment=demoo", "unknown experiment 'demoo' (did you mean 'demo'?)"),
    ("methd=exact", "unknown key 'methd' (did you mean 'method'?)"),
    ("budget.rte=0.5", "unknown key of budget 'rte' (did you mean 'rate'?)"),
    ("methods.snapkv.kernl=3", "unknown key of methods.snapkv 'kernl' (did you mean 'kernel_size'"),
    ("methods=snapkv", "methods is 'snapkv'; allowed: method=[...] to choose one or more"),
    ("method=[exact", "cannot read 'method=[exact'; allowed: key=value"),
    ("demo", "cannot read 'demo' (did you mean experiment=demo?)"),
    ("hydra.mode=SIDEWAYS", "hydra.mode is 'SIDEWAYS'; allowed: RUN or MULTIRUN"),
    ("hydra.mode=", "hydra.mode is ''; allowed: RUN or MULTIRUN"),
    ("lists", "cannot read 'lists' (did you mean 'list'?)"),
    ("--model x", "(write model=x)"),
    ("--tasks=needle", "(write task=needle)"),
    ("--seed", "(write seed=...)"),
    (
        "compression_ratio=0.5",
        "unknown key 'compression_ratio' (did you mean 'budget.rate', the share",
    ),
    ("--foo", "unrecognized arguments: --foo"),
    ("--multrun", "(did you mean '--multirun'?)"),
    ("method=[]", "no method is chosen; allowed: method=[...]"),
    ("limit=0", "limit is 0; allowed: an integer >= 1, or null"),
    ("device=tpu", "device is 'tpu'; allowed: auto | cpu | mps | cuda | cuda:N"),
    ("compress_after=never", "compress_after is 'never'; allowed: prompt | context"),
    ("shard=3/2", "shard is '3/2'; allowed: i/k"),
    ("model=hf", "Missing mandatory value: model.path"),
    ("budget.rate=0.5,0.25", "add --multirun"),
    ("+zzz=1", "unknown key 'zzz'"),
    ("+model.api_key=123", "model.api_key is given a value, which the results would keep"),
    ("-m hydra.sweeper._target_=os.getcwd", "hydra.sweeper._target_ is not kvbench's to set"),
    (
        "+hydra.job_logging.handlers.file.filename=/tmp/x",
        "+hydra.job_logging.handlers.file.filename is not",
    ),
    ("hydra/job_logging=default", "hydra/job_logging is not kvbench's to set"),
    ("list taks", "cannot list ['taks'] (did you mean 'tasks'?)"),
    ("show method=nope", "unknown method 'nope'"),
    ("show experiment=balancekv_table6 paper_table.file=a/b", "file is 'a/b'; allowed:"),
    ("show experiment=balancekv_table6 differs=3", "differs is 3; allowed:"),
    ("--config-dir=/nosuch", "--config-dir is '/nosuch'; allowed: a folder"),
    ("experiment_name=a/b", "experiment_name is 'a/b'; allowed: a folder's name"),
    ("reproduce nosuch", "unknown experiment 'nosuch'"),
    ("budget.rate=1.5", "budget.rate is 1.5; allowed: a number in (0, 1]"),
    (
        "budget.rate=0.5 budget.size=100",
        "budget.rate is 0.5 and budget.size is 100; allowed: one of",
    ),
    (
        "budget.rate=0.25 budget.size=100",  # the default, typed
        "budget.rate is 0.25 and budget.size is 100; allowed: one of",
    ),
    (
        "methods.snapkv.kernel_size=8",
        "methods.snapkv.kernel_size is 8; allowed: an odd integer >= 1",
    ),
    ("methods.snapkv.pooling=mean", "methods.snapkv.pooling is 'mean'; allowed: avgpool"),
    (
        "show methods.snapkv.kernel_size=8",
        "methods.snapkv.kernel_size is 8; allowed: an odd integer",
    ),
    ("task=needle task.metric=bleu", "unknown key of task 'metric'"),
    ("task=needle task.max_new_tokens=0", "task.max_new_tokens is 0; allowed: an integer from 1"),
    ("task=jsonl", "no data; allowed: task.files=[my.jsonl]"),
    (
        "task=jsonl task.files=[no.jsonl]",
        "no file matches files='no.jsonl'; allowed: a path or a glob",
    ),
    (
        "task=jsonl task.files=[empty.jsonl] task.metric=bleu",
        "task.metric is 'bleu'; allowed: contains",
    ),
    (
        "task=jsonl task.files=[empty.jsonl]",
        "empty.jsonl is empty; allowed: a row for each context",
    ),
    (
        "task=jsonl task.files=[broken.jsonl]",
        "broken.jsonl line 2 is not complete JSON (Expecting value: column 1)",
    ),
    ("results_dir=empty.jsonl", "empty.jsonl: Not a directory; allowed: a folder that can be made"),
    ("model=./nowhere", "model path './nowhere' does not exist; allowed: a folder with a model"),
    ("reproduce all foo", "cannot read 'foo'"),
    ("reproduce nothing", "unknown experiment 'nothing'"),
    (
        "claims claims=B1",
        "claims has no model, and decides all of results/claims.yaml: about 40 minutes",
    ),
    (
        "hydra/sweeper=optuna",
        "hydra/sweeper is 'optuna'; allowed: kvbench's own, which check every job",
    ),
    (
        "hydra/launcher=joblib",
        "hydra/launcher is 'joblib'; allowed: kvbench's own, which check every job",
    ),
    ("-m hydra/launcher=joblib seed=1,2", "launcher=local, gpus or slurm"),
    ("press=snapkv", "unknown key 'press' (did you mean 'method'?)"),
    ("--cfg", "argument -c/--cfg: expected one argument"),
    ("--cfg nothing", "argument -c/--cfg: invalid choice: 'nothing'"),
]
"""Command lines that are refused before torch is imported, each with a part of its message."""
MADE: list[tuple[str, str]] = [
    ("budget.rate=0", "budget.rate is 0; allowed: a number in (0, 1]"),
    (
        "budget.rate=[0.5,0.25]",
        "allowed: a number in (0, 1]; for a job each: -m budget.rate=0.5,0.25",
    ),
    ("-m budget.rate=0.5,2", "budget.rate is 2; allowed"),
    ("-m seed=interval(0,3)", "does not support sweep type"),
    ("shards=2 shard=1/2", "shards is 2 and shard is given, too; allowed: one of them"),
    (
        "+methods.x._target_=kvbench.Nosuch",
        "'kvbench.Nosuch', which cannot be found; allowed: a Method",
    ),
    ("methods.h2o=3", "methods.h2o is 3; allowed: a mapping with a _target_: Method"),
    (
        "methods.snapkv._target_=kvbench.kv.Budget",
        "_target_ is 'kvbench.kv.Budget'; allowed: a Method",
    ),
    ("model._target_=builtins.dict", "model._target_ is 'builtins.dict'; allowed: a ModelSpec"),
    ("task=needle task.lengths=[]", "lengths"),
    ("task.files=[/nowhere/x.jsonl]", "/nowhere/x.jsonl"),
    ("task.stop=[null]", "task.stop is [None]; allowed: a list of texts"),
    (
        "task=layer_error_synthetic task.synthetic=10",
        "allowed: an instance of SyntheticLayers, or null",
    ),
    (
        "task=layer_error_synthetic task.synthetic._target_=os.getcwd",
        "task.synthetic._target_ is 'os.getcwd'",
    ),
    ("methods.snapkv.quantize=abc", "allowed: an instance of Scheme, a mapping"),
    ("model.path=123", "model.path is 123; allowed: text"),
    ("model=hf model.path=/nowhere", "model path '/nowhere' does not exist"),
    ("model=hf model.path=.", "model path '.' has no config.json"),
    ("~model.architecture.model_type", "cannot be loaded"),
    ("device=cuda:97", "device is 'cuda:97'"),
    ("experiment_name=../../x", "experiment_name is '../../x'; allowed: a folder's name"),
    ("task_label=/etc", "task_label is '/etc'"),
    ("task.seed=${nosuch}", "'nosuch' not found"),
    ("launcher=gpus", "launcher=gpus finds no GPU, and gpus_per_worker is 1; allowed:"),
    (
        "launcher=gpus launcher.workers=0",
        "launcher.workers is 0; allowed: an integer >= 1, or null",
    ),
    ("launcher=slurm launcher.partitoin=x", "unknown key of launcher 'partitoin'"),
    ("+methods.snapkv.zzz=1", "unknown key 'zzz' of methods.snapkv; allowed:"),
]
"""Command lines whose jobs are made first, with a base of other overrides."""


AT_ONCE = [(line.split(" "), message) for line, message in ALONE]
REFUSED: list[tuple[list[str], str]] = []
for line, message in MADE:
    REFUSED.append((with_base([*BASE, "method=[snapkv,h2o]"], line.split(" ")), message))
REFUSED += [
    (["seed=" + "[" * 3000 + "]" * 3000], "maximum recursion depth exceeded"),
    (["\x13\x1b[31mred\r"], r"\x13\x1b[31mred\r"),
    (["experiment_name=" + "y" * 3000], " [...] "),
    (["results_dir='a\0b'"], "allowed: a folder"),
    (["model.name='...'", *BASE[:3]], "'...'"),
    (["task.num_lines={a: 1}"], "Error merging override task.num_lines={a: 1}: "),
]


def make_files(folder: Path) -> None:
    """The files that the commands name: an empty one, and one whose second line is no JSON."""
    (folder / "empty.jsonl").touch()
    row = json.dumps({"context": "a", "question": "b", "answers": "c"})
    (folder / "broken.jsonl").write_text(f"{row}\nno\n")


def check_refused(result: Ended, message: str) -> None:
    """The command ended with one line that has the message in it."""
    assert result.problem() is None, result
    assert result.status == 2, result
    assert len(result.err.splitlines()) == 1
    assert result.err.startswith("kvbench: ")
    assert message in result.err


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: str(value)[-40:])
def test_a_wrong_job_is_refused_in_one_line(tmp_path: Path, words: list[str], message: str) -> None:
    check_refused(ended(words, folder=tmp_path), message)
    assert not list(tmp_path.iterdir())


WITHOUT_TORCH = """
import json, sys
sys.modules["torch"] = None
from dataclasses import asdict
from pathlib import Path
from support.cli_cases import ended
results = [ended(words, folder=Path.cwd()) for words in json.load(sys.stdin)]
print(json.dumps([asdict(result) for result in results]))
"""


def test_a_wrong_command_is_refused_at_once(tmp_path: Path) -> None:
    """Without a banner, and without torch, whose import takes seconds: here it fails."""
    make_files(tmp_path)
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH],
        input=json.dumps([words for words, _ in AT_ONCE]),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    results = [Ended(**fields) for fields in json.loads(process.stdout)]
    for (words, message), result in zip(AT_ONCE, results, strict=True):
        assert not result.out, words
        assert "torch" not in result.err.replace("no torch", ""), result
        check_refused(result, message)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.jsonl", "empty.jsonl"]


@pytest.mark.parametrize("kind", ["methods", "tasks"])
def test_options_are_declared_in_the_source_as_their_classes_have_them(kind: str) -> None:
    targets = {target for name in catalogue(kind) for target in TARGET.findall(text_of(kind, name))}
    assert len(targets) > 10
    unknown = set()
    for target in targets:
        declared, hints = declared_options(target), hints_of(locate(target))
        assert declared is not None, target
        assert set(declared) == set(hints), target
        for option, hint in declared.items():
            if hint is Any:
                unknown.add(option)
            else:
                assert allowed(hint) == allowed(hints[option]), (target, option)
    assert unknown <= {"quantize", "scoring", "queries", "data", "prompts", "synthetic"}


@pytest.mark.parametrize("dry", ["dry_run=true", "dry_run=false", "-m"])
def test_nothing_that_a_config_names_is_called(tmp_path: Path, dry: str) -> None:
    mark = tmp_path / "mark"
    targets = {
        "os.mkdir": [f"+methods.x.path={mark}"],
        "os.system": [f"+methods.x.command='touch {mark}'"],
        "this.d": [],  # a module that prints when it is imported
    }
    for target, options in targets.items():
        words = [*BASE[:-2], "limit=1", "method=[exact]", f"+methods.x._target_={target}", *options]
        result = ended([*words, dry], folder=tmp_path)
        assert result.status == 2
        assert f"methods.x._target_ is '{target}'; allowed: a Method" in result.err
        assert "Zen" not in result.out
        assert not mark.exists()
    user = tmp_path / "conf" / "method"
    user.mkdir(parents=True)
    yaml = f"# @package methods.evil\n_target_: os.mkdir\npath: {mark}\n"
    (user / "evil.yaml").write_text(yaml)
    result = ended([*BASE, f"--config-dir={user.parent}", "method=[evil]"], folder=tmp_path)
    assert "methods.evil._target_ is 'os.mkdir'; allowed: a Method" in result.err
    assert not mark.exists()
