"""A wrong command is refused in one line, before the model is loaded, and nothing is written; nothing
that a config names is called before it is checked to be a class of the expected kind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.command import ended

from kvbench.catalogue import config_dir

BASE = ["logger=none", "model=tiny_random", "device=cpu", "limit=1", "dry_run=true"]
JOB = [*BASE, "method=[snapkv,h2o]"]
REFUSED: list[tuple[list[str], str]] = [
    (["--foo"], "unrecognized arguments: --foo; allowed: key=value and the options"),
    (
        ["--model", "hf", "--tasks", "piqa"],
        "(did you mean python -m kvbench.lm_eval, which has lm-evaluation-harness's options?); allowed",
    ),
    (["--method", "snapkv"], "(did you mean method=<value>?); allowed: key=value"),
    (["lists"], "cannot read 'lists' (did you mean 'list'?)"),
    (["report", "runs/demo"], "cannot read 'report' (did you mean kvbench-report <folder>?)"),
    (
        ["method=snapkv", "h2o"],
        "cannot read 'h2o' (did you mean method=<name>,h2o, or kvbench show",
    ),
    (["method=my/snapkv"], "'method/my/snapkv' (did you mean 'snapkv'?); allowed: adakv, "),
    (
        ["show", "method=snapkvv"],
        "Could not find 'method/snapkvv' (did you mean 'snapkv'?); allowed: ",
    ),
    (["method=[exact,h3o]"], "Could not find 'method/h3o' (did you mean 'h2o'?); allowed: adakv, "),
    (
        ["task=hotpotqa"],
        "'task/hotpotqa' (did you mean task=longbench 'task.datasets=[hotpotqa]'?)",
    ),
    (["task=niah_single_1"], "(did you mean task=ruler 'task.tasks=[niah_single_1]'?); allowed: "),
    (["task=kv_retrieval"], "(did you mean task=infinitebench 'task.datasets=[kv_retrieval]'?)"),
    (["task=piqa"], "(did you mean task=lm_eval 'task.tasks=[piqa]'?)"),
    (["rate=0.5"], "'rate' (did you mean budget.rate?); allowed: "),
    (["+rate=0.5"], "unknown key 'rate' (did you mean budget.rate?); allowed: "),
    (
        ["compression_ratio=0.5"],
        "(did you mean budget.total_rate, which is 1 - compression_ratio?)",
    ),
    (["max_capacity_prompt=128"], "'max_capacity_prompt' (did you mean budget.size?); allowed: "),
    (
        ["pretrained=gpt2"],
        "(did you mean model=<an id of the Hub, a folder or a name>?); allowed: ",
    ),
    (
        ["model=hf"],
        "model.path has no value; allowed: model.path=<value>, or a line of a YAML file",
    ),
    (
        ["model=gpt3"],
        "qwen25_72b_instruct, recall_mini, smollm2_135m, tiny_random, an id of the Hub",
    ),
    (
        ["model=recall_mini,a/b"],
        "model is recall_mini,a/b; allowed in one sweep: names of kvbench ",
    ),
    (["methods=[snapkv,h2o]"], "methods is [snapkv,h2o]; allowed: method=<name>,<name>, and "),
    (["budget=0.5"], "budget is 0.5; allowed: budget.rate=, the share that is kept; or "),
    (["paper_table=h2o_tabel7"], "paper_table is 'h2o_tabel7' (did you mean 'h2o_table7'?); allo"),
    (["show", "paper_table=mine"], "paper_table is 'mine'; allowed: balancekv_figure3, "),
    (["max_new_tokens=9"], "'max_new_tokens' (did you mean task.max_new_tokens?); allowed: "),
    (["temperature=1"], "'temperature' (did you mean sampling.temperature?); allowed: "),
    (["snapkv.kernel_size=7"], "(did you mean methods.snapkv.kernel_size?); allowed: "),
    (["kernel_size=7"], "methods.<method>.kernel_size, an option of attention_matching, "),
    (["safeguard=0.1"], "(did you mean methods.adakv.safeguard?); allowed: "),
    (["press=snapkv"], "(did you mean method=<name>, e.g. method=snapkv, or method=kvpress "),
    (["show", "method=SnapKVPress"], "'method/SnapKVPress' (did you mean snapkv?); allowed: "),
    (
        ["show", "method=KnormPress"],
        "(did you mean method=kvpress methods.kvpress.press=KnormPress?)",
    ),
    (["compare"], "cannot read 'compare' (did you mean method=a,b, which compares methods, kvb"),
    (["run"], "cannot read 'run' (did you mean the same without it?); allowed: key=value"),
    (["compress"], "cannot read 'compress' (in Python: from kvbench import compress)"),
    (["task=needel"], "(did you mean 'needle'?)"),
    (["methd=exact"], "Could not override 'methd' (did you mean 'method'?); allowed: "),
    (["methods.snapkv.kernl=3"], "'methods.snapkv.kernl' (did you mean 'kernel_size'?); allowed: "),
    (["+methods.snapkv.kernl=3"], "unknown key 'kernl' of methods.snapkv (did you mean 'kernel_s"),
    (["methods.snapkv.kernel_size=8"], "methods.snapkv.kernel_size is 8; allowed: an odd integer"),
    (["-m", "budget.rate=0.5,2"], "budget.rate is 2; allowed: less than or equal to 1"),
    (["budget.rate=[0.5,0.5]"], "budget.rate is [0.5, 0.5]; allowed: different numbers"),
    (["seed=0,1"], "To sweep over it, add --multirun"),
    (
        ["budget.rate=0.25", "budget.size=100"],
        "budget.rate is 0.25 and budget.size is 100; allowed:",
    ),
    (["score", "runs/demo"], "['runs/demo']; allowed: an experiment's folder and metric=<metric>"),
    (["prune"], "kvbench prune has nothing; allowed: an experiment's folder"),
    (["shards=2", "shard=1/2"], "shards is 2 and shard is given, too; allowed: one of them"),
    (["limit=auto"], "limit is 'auto'; allowed: "),
    (["rerun=yes"], "rerun is 'yes'; allowed: true or false"),
    (
        ["logger=wandb", "logger.mode=sometimes"],
        "logger.mode is 'sometimes'; allowed: 'auto', 'online', 'offline'",
    ),
    (["device=tpu"], "device is 'tpu'; allowed: auto, cpu, mps, cuda or cuda:N"),
    (["experiment_name=../x"], "experiment_name is '../x'; allowed: a folder's name"),
    (["results_dir=rows.jsonl"], "rows.jsonl is no folder that can be written"),
    (["task=jsonl", "task.files=[rows.jsonl]"], "rows.jsonl line 2 is not complete JSON"),
    (["+model.api_key=1"], "model.api_key is given a value, which the results would keep"),
    (["+hydra.launcher={x: {_target_: os.getcwd}}"], "hydra.launcher is not kvbench's to set"),
    (["model._target_=builtins.dict"], "model._target_ is 'builtins.dict'; allowed: a ModelSpec"),
]
"""Words beside those of `JOB`, and a part of the line that refuses them."""


@pytest.mark.parametrize(("words", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_command_is_refused_in_one_line(
    tmp_path: Path, words: list[str], message: str
) -> None:
    row = json.dumps({"context": "a", "question": "b", "answers": "c"})
    (tmp_path / "rows.jsonl").write_text(f"{row}\nno\n")
    given = {word.partition("=")[0] for word in words}
    base = (
        []
        if words[0] in ("show", "score", "prune")
        else [w for w in JOB if w.partition("=")[0] not in given]
    )
    result = ended([*words, *base], folder=tmp_path)
    assert (result.status, result.err.count("\n")) == (2, 1), result
    assert result.err.startswith("kvbench: ")
    assert message in result.err
    assert len(result.err) < 2000, "nobody would read it"
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_file_of_ones_own_that_would_do_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "method").mkdir()
    own = tmp_path / "method" / "snapkv.yaml"
    words = [*BASE, f"--config-dir={tmp_path}"]
    own.write_text((config_dir() / "method" / "snapkv.yaml").read_text())
    assert ended([*words, "method=snapkv"]).status == 0, "a copy"
    own.write_text("# @package methods.snapkv\n_target_: mine.SnapKV\n")
    result = ended([*words, "method=snapkv"])
    assert result[::2] == (
        2,
        f"kvbench: {own} would not be read, since kvbench has a snapkv; rename it\n",
    )
    own.rename(own.with_name("mine.yaml"))
    (tmp_path / "method" / "mine.yaml").write_text("_target_: mine.SnapKV\n")
    result = ended([*words, "method=mine"])
    assert "unknown key 'method' (the first line of a file in method/ is # @package" in result.err


@pytest.mark.parametrize("dry", ["dry_run=false", "-m"])
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
