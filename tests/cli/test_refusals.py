"""What cannot be followed is one line, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli_cases import BASE, ended, with_base

ALONE = r"""
method=snapkvv -> unknown method 'snapkvv' (did you mean 'snapkv'?); allowed:
method=[exact,zzzzzz] -> unknown method 'zzzzzz'; allowed:
task=needel -> unknown task 'needel' (did you mean 'needle'?)
model=gpt17 -> unknown model 'gpt17'
experiment=demoo -> unknown experiment 'demoo' (did you mean 'demo'?)
model.name= -> model.name is ''; allowed: text that is not empty
methd=exact -> unknown key 'methd' (did you mean 'method'?)
budget.rte=0.5 -> unknown key 'rte' of budget (did you mean 'rate'?)
methods.snapkv.kernl=3 -> unknown key 'kernl' of methods.snapkv (did you mean 'kernel_size'
seed.x=3 -> 'seed' has no keys
method=[exact -> cannot read 'method=[exact'; allowed: key=value
snapkv -> 'snapkv' is not an override; allowed: key=value
lists -> 'lists' is not an override (did you mean 'list'?)
--foo -> unrecognized arguments: --foo
--multrun -> (did you mean '--multirun'?)
--cfg jobs -> invalid choice: 'jobs'
method=a method=b -> method is given twice (method=a and method=b); allowed: once; several
seed=1 seed=2 -> seed is given twice (seed=1 and seed=2); allowed: once
method=[exact,exact] -> method names 'exact' twice
method=[] -> method is empty
method= -> 'method=' names no method
experiment=null -> 'experiment=null' names no experiment
model=null -> 'model=null' names no model
model=[hf,recall_mini] -> names no model; allowed: one of
methods.h2o=3 -> methods.h2o is 3
budget=3 -> budget is 3
budget.rate=0 -> budget.rate is 0; allowed: a number in (0, 1]
budget.rate=1.5 -> budget.rate is 1.5
budget.rate=half -> budget.rate is 'half'
budget.sink=-1 -> budget.sink is -1; allowed: an integer >= 0
limit=0 -> limit is 0; allowed: an integer >= 1, or null
limit=all -> limit is 'all'
seed=x -> seed is 'x'; allowed: an integer
device=tpu -> device is 'tpu'; allowed: auto | cpu | mps | cuda | cuda:N
dtype=float8 -> dtype is 'float8'; allowed: auto | float32 | bfloat16 | float16
compress_after=never -> compress_after is 'never'; allowed: prompt | context
example_timeout=-3 -> example_timeout is -3
dry_run=perhaps -> dry_run is 'perhaps'
experiment_name=a/b -> experiment_name is 'a/b'; allowed: a folder's name
model=hf -> model.path has no value; allowed: model.path=...
budget.rate=0.5,0.25 -> has several values; allowed: -m for one job each
-m budget.rate=0.5,2 -> budget.rate is 2; allowed
-m method=snapkv,nope -> unknown method 'nope'
-m methods.snapkv.pooling=avgpool,maxpol method=snapkv -> maxpol
methods.snapkv.pooling=mean method=snapkv -> snapkv.pooling is 'mean'; allowed: avgpool
+zzz=1 -> unknown key 'zzz'
task=needle task.lengths=[] -> lengths
task.files=[/nowhere/x.jsonl] -> /nowhere/x.jsonl
device=cuda:97 -> device is 'cuda:97'
model=hf model.path=/nowhere -> model path '/nowhere' has no config.json
list -> list takes one of: methods, models
list method snapkv -> list takes one of
list taks -> cannot list 'taks' (did you mean 'tasks'?)
show method=nope -> unknown method 'nope'
show -m -> show has no option '-m'
"""
"""Command lines, each with a part of what is said of it."""
SWEEPS = r"""
shards=0 -> shards is 0; allowed: an integer from 1 to 1000, or null
shards=2 shard=1/2 -> shards is 2 and shard is given, too; allowed: one of the two
-m shards=2,3 -> shards has several values (2, 3); allowed: one
launcher=slurms -> unknown launcher 'slurms' (did you mean 'slurm'?)
launcher=slurm launcher.partitoin=x -> unknown key 'partitoin' of launcher
launcher=gpus device=cpu -> launcher=gpus finds no GPU; allowed:
launcher=gpus device=cpu launcher.workers=0 -> launcher.workers is 0; allowed:
launcher=gpus device=cuda:1 -> device is 'cuda:1'; allowed with launcher=gpus:
launcher=slurm methods.h2o.nope=1 -> unknown key 'nope'
launcher=slurm launcher.name=gpus -> launcher.name is 'gpus'; allowed: launcher=
launcher=slurm launcher.timeout_min=1 -> launcher.timeout_min is 1; allowed: min
launcher=slurm launcher.setup=module -> launcher.setup is 'module'; allowed: a list
launcher=slurm launcher.sbatch=x -> launcher.sbatch is 'x'; allowed: options of
launcher=slurm launcher.poll_s=0 -> launcher.poll_s is 0; allowed: a finite number > 0
launcher=slurm launcher.mem_gb=1.5 -> launcher.mem_gb is 1.5; allowed: an integer >= 1
launcher=slurm launcher.partition=[a] -> launcher.partition is ['a']; allowed: text that
launcher=slurm hydra.launcher.nope=1 -> Could not override 'hydra.launcher.nope'
"""
"""The same of sweeps and launchers."""
ONCE_FOUND = r"""
experiment=nan -> names no experiment
experiment=2 -> names no experiment
model=3 -> names no model
task=[] -> names no task
experiment_name=.hidden -> experiment_name is '.hidden'; allowed: a folder's name
methods.snapkv._target_=os.getcwd -> takes no keyword arguments
methods.snapkv._target_=kvbench.kv.Budget -> unknown key 'kernel_size' of methods.snapkv
task._target_=3 -> Expected a callable target
model._target_=builtins.dict -> model._target_ is 'builtins.dict', which makes a dict
-m seed=${nosuch} -> nosuch
model.tokenizer=[a,b] -> model.tokenizer is ['a', 'b']; allowed: text, or null
task=layer_error_synthetic task.synthetic=10 -> allowed: an instance of SyntheticLayers, or null
-m model.architecture.hidden_size={} -> cannot be loaded
budget.rate=1e400 -> budget.rate is inf
budget.rate=nan -> budget.rate is nan
experiment_name=../../x -> experiment_name is '../../x'; allowed: a folder's name
task_label=.. -> task_label is '..'; allowed: a folder's name
task_label=/etc -> task_label is '/etc'
hydra.job.env_set.HF_TOKEN=hf_abcdefghijklmnopqrstuvwx -> which the results would keep
task=needle task.answer=${nosuch} -> 'nosuch' not found
task.stop=[null] -> task.stop is [None]; allowed: a list of texts
task.files=3 -> task.files is 3; allowed: a list of texts
task=layer_error task.prompts.stop=[1] -> task.prompts.stop is [1]; allowed:
task=layer_error_synthetic task.rates=[a] -> a list of numbers in (0, 1]
task=layer_error_synthetic task.rates=[0.5,0.5] -> rate0.5/seed0'; allowed: one
task=layer_error_synthetic task.seeds=1000000000000000000000000000000 -> an integer from 1 to 100000
methods.snapkv.quantize=abc -> allowed: an instance of Scheme, a mapping
methods.snapkv._target_=released -> Error loading 'released'
model.path=123 -> model.path is 123; allowed: text
~model.architecture.model_type -> cannot be loaded: KeyError: 'model_type'
+model.config.rope_scaling=3 -> 'rope_parameters': TypeError
+task._partial_=3 -> _partial_ flag must be a bool
-m seed={a:choice(1,2)},3 -> has a sweep, or lists without end, in lists
-m seed=range(0,1000000000) -> has too many values; allowed: at most 1000
-m seed=glob(*) -> is no list of values
-m launcher=local,${hydra:job.num} -> Hydra cannot compose
shards=1000000 -> allowed: an integer from 1 to 1000, or null
launcher=gpus launcher.workers=1000000000 -> a positive integer up to 1000
launcher=slurm hydra.launcher.mem_gb=U -> could not be converted to Integer
hydra.verbose={a:1} -> hydra.verbose is {'a': 1}; allowed: true, false
hydra.verbose=${hydra:job.num} -> hydra.verbose is '${hydra:job.num}'; allowed: true
hydra.job.chdir=${task} -> hydra.job.chdir is '${task}'; allowed: true or false
--config-name=x -> --config-name would put another program's config
--experimental-rerun=x -> --experimental-rerun would put
--config-dir=/nosuch -> --config-dir is '/nosuch'; allowed: a folder
--cfg job --run -> --run and --cfg ask for different things
task.seed=${oc.decode:} -> missing 1 required
--resolve -> --resolve is given without --cfg
--cfg job --package hydra -> --package is 'hydra'; allowed: _global_
-sc install=x -> --shell-completion takes one of
+model.api_key=123 -> model.api_key is given a value
"""
"""Command lines that once gave a traceback, several lines, or wrote where they should not."""
ODD: list[tuple[list[str], str]] = [
    (
        ["model=tiny_random", "model.architecture.num_hidden_layers=1000000000"],
        "num_hidden_layers of model 'asset:recall_mini' is 1000000000; allowed: at most 10000",
    ),
    (
        ["+methods.snapkv.zzz=1"],
        "unknown key 'zzz' of methods.snapkv; allowed: quantize, kernel_size",
    ),
    (["=", "='\n'"], "is given twice"),
    (["-x", "\x13\x1b[31mred\r"], r"\x13\x1b[31mred\r"),
    (["'" + "x" * 5000 + "'=1"], " [...] "),
    (["experiment_name=" + "y" * 3000], " [...] "),
    (["experiment_name='a\nb'"], r"experiment_name is 'a\nb'"),
    (["budget.rate=" + "9" * 400], "allowed: a number in (0, 1]"),
    (["task.num_lines={a: 1}"], "Error merging override task.num_lines={a: 1}: "),
    (["task=needle", "task.question={a: 1}"], "task.question is {'a': 1}; allowed: text"),
    (["task=error_scaling", "++task.data={x: {_target_: x, head_dim: 1}}"], "Error loading 'x'"),
    (["seed=" + "9" * 5000], "cannot read 'seed=9"),
    (["seed=" + "[" * 3000 + "]" * 3000], "cannot read 'seed=["),
    (["seed={a:" + "[" * 200 + "]" * 200 + "}"], "lists without end"),
]
STRICT = [*BASE, "method=[exact,snapkv]"]


def cases(table: str, base: list[str]) -> list[tuple[list[str], str]]:
    """The command of every line of a table, and what is said of it."""
    parts = (line.split(" -> ") for line in table.strip().splitlines())
    return [(with_base(base, words.split(" ")), said) for words, said in parts]


REFUSED = [*cases(ALONE, []), *cases(SWEEPS, ["logger=none", "method=[h2o]"])]
REFUSED += cases(ONCE_FOUND, STRICT) + [(with_base(STRICT, words), said) for words, said in ODD]


@pytest.mark.parametrize(("words", "said"), REFUSED, ids=lambda value: str(value)[-40:])
def test_what_cannot_be_followed_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    found = ended(words, folder=tmp_path)
    assert found.problem() is None, found
    assert found.status == 2
    assert len(found.err.splitlines()) == 1
    assert found.err.startswith("kvbench: ")
    assert said in found.err
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("words", [["task.files=['" + "y" * 3000 + "']"], ["seed=" + "9" * 400]])
def test_what_is_long_is_followed_or_one_line(tmp_path: Path, words: list[str]) -> None:
    found = ended(with_base(STRICT, words), folder=tmp_path)
    assert found.problem() is None, found
