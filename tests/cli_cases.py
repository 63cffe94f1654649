"""Command lines to try kvbench with, and what may come of one: a correct run or one line."""

from __future__ import annotations

import io
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from kvbench import cli

BASE = ["logger=none", "model=tiny_random", "device=cpu", "dry_run=true", "limit=1"]

KEYS = {
    "longeval_lines": [
        *(
            "num_lines",
            "num_examples",
            "seed",
            "number_range",
            "repeats",
            "files",
            "max_new_tokens",
        ),
        "stop",
    ],
    "needle": [
        *("lengths", "depths", "num_examples", "needle", "question", "answer", "haystack"),
        *("haystack_files", "dataset_name", "dataset_split", "facts", "repeats", "seed", "primary"),
        *("max_new_tokens", "stop"),
    ],
    "throughput": ["prompt_tokens", "new_tokens", "runs"],
    "layer_error_synthetic": [
        *("rates", "layers", "seeds", "num_prompts", "exact", "synthetic", "synthetic.n"),
        *("synthetic.heads", "synthetic.kv_heads", "synthetic.head_dim", "synthetic.key_norm"),
        *("synthetic.clusters", "synthetic.spread", "synthetic._target_", "prompts"),
    ],
    "walk_discrepancy": ["steps", "walks", "compare", "data", "data.x"],
    "subgen_clusters": ["steps", "draws", "prompts", "data", "data.'d 4'.head_dim"],
    "error_scaling": [
        *("n", "kept", "queries", "draws", "fit_rate", "per_kept", "compare", "expected", "data"),
        *("prompts", "data.'d 4, bound 1'.head_dim", "data.'d 4, bound 1'.key_norm"),
    ],
}
"""Options of tasks; names that a task does not have are cases, too."""

QUICK = {
    "throughput": ["task.prompt_tokens=[80]", "task.new_tokens=2"],
    "layer_error_synthetic": ["task.exact=8", "task.synthetic.n=64", "task.seeds=1"],
    "walk_discrepancy": ["task.steps=[8,16]", "task.walks=2"],
    "subgen_clusters": ["task.steps=[8,16]", "task.draws=1"],
    "error_scaling": ["task.n=128", "task.kept=[16,32]", "task.draws=1"],
}
"""What makes a task's dry run, which tries an example, short."""

TOP = [
    *("seed", "limit", "device", "dtype", "compress_after", "prefill", "chunk_tokens"),
    *("example_timeout", "retry_failed", "paper_table", "lock_timeout", "experiment_name"),
    *("results_dir", "task_label", "budget", "budget.rate", "budget.sink", "budget.window"),
    *("model", "task", "method", "logger", "launcher", "experiment", "model.name", "model.path"),
    *("model.revision", "model.tokenizer", "model.chat_template", "model.random_weights"),
    *("model.architecture", "model.architecture.hidden_size", "model.architecture.model_type"),
    *(
        "model.trust_remote_code",
        "model.device_map",
        "logger.name",
        "logger.mode",
        "shard",
        "shards",
    ),
    *("logger.project", "methods", "methods.snapkv", "methods.snapkv.kernel_size", "task"),
    *("methods.snapkv.pooling", "methods.snapkv._target_", "methods.h2o", "methods.h2o.decode"),
    *("methods.balancekv", "methods.balancekv.itrs", "methods.nosuch", "methods.subgen.delta"),
    *(
        "task._target_",
        "model._target_",
        "budget._target_",
        "hydra.verbose",
        "batch",
        "+batch_size",
    ),
    *(
        "+zzz",
        "+model.zzz",
        "+methods.snapkv.zzz",
        "~seed",
        "~budget",
        "~methods",
        "~model",
        "~task",
    ),
]

VALUES = [
    *("0", "-1", "1", "2", "0.5", "1.5", "-0.0", "1e400", "-1e400", "nan", "inf", "1e-300"),
    *("1000000000000000000000000000000", "9" * 400, "0x10", "1_0", "true", "false", "null", "''"),
    *("''''", "[]", "[[]]", "{}", "[1,2]", "[1,1]", "[null]", "[a,b]", "{a:1}", "{a:{b:[1]}}"),
    *(
        "[exact]",
        "[snapkv,h2o]",
        "exact",
        "snapkv",
        "needle",
        "tiny_random",
        "none",
        "demo",
        "mars",
    ),
    *(
        "../../x",
        "..",
        ".",
        "/etc/passwd",
        "/",
        "~",
        "a/b",
        "a\\\\b",
        "'a b'",
        "'a=b'",
        "'a,b'",
        "a,b",
    ),
    *("é", "日本語", "\u202e", "'\U0001f9ea'", "'\\u0000'", "'\x00'", "'\ud800'", "'\n'", "'%s'"),
    *(
        "'{}'",
        "'<script>'",
        "???",
        "${seed}",
        "${nosuch}",
        "${",
        "$",
        "'${oc.env:HOME}'",
        "\\",
        "'",
    ),
    *("a" * 300, "'" + "x" * 5000 + "'", "cuda", "cuda:0", "cuda:99", "cpu", "float16", "auto"),
    *(
        "context",
        "prompt",
        "chunked",
        "shared",
        "always",
        "os.system",
        "kvbench.kv.Budget",
        "1/2",
        "3/2",
    ),
]

FLAGS = [
    "-m",
    "--multirun",
    "-v",
    "-vv",
    "--cfg",
    "job",
    "--help",
    "--nosuch",
    "-x",
    "list",
    "show",
    "--",
    "-",
]


@dataclass(frozen=True)
class Ended:
    """What became of a command line."""

    status: Any
    out: str
    err: str
    sweep: bool
    verbose: bool
    """Whether the libraries' own messages were asked for."""

    def problem(self) -> str | None:
        """Why this is neither a correct run nor an error of one line; None if it is."""
        text = self.out + self.err
        lines = [line for line in self.err.splitlines() if line.strip() and " left; " not in line]
        told = [line for line in lines if line.startswith("kvbench: ")]
        if "Traceback" in text or "Error executing job" in text or "HYDRA_FULL_ERROR" in text:
            return "a traceback"
        if self.status not in (0, 1, 2):
            return f"status {self.status!r}"
        others = 0 if self.verbose else len(lines) - len(told)
        if others or (len(told) > 1 and not self.sweep):
            return "not one line"
        if self.status == 2 and not told:
            return "refused without a line"
        if self.status == 1 and not told:
            return "a failure without a line"
        if self.status == 0 and told:
            return "a complaint and status 0"
        if any(len(line) > 2000 for line in told):
            return "a line that nobody reads"
        return None


def ended(arguments: Sequence[str], *, folder: Path | None = None) -> Ended:
    """Run the command line in this process, in an empty folder or the one given."""
    argv, handlers, level = sys.argv, list(logging.root.handlers), logging.root.level
    environment = dict(os.environ)
    status: Any = None
    with (
        tempfile.TemporaryDirectory() as empty,
        chdir(folder or empty),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        try:
            cli.main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        finally:  # what Hydra changed
            sys.argv = argv
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
            os.environ.clear()
            os.environ.update(environment)
    sweep = bool({"-m", "--multirun"} & set(arguments))
    verbose = any(text.startswith(("-v", "--verbose", "hydra.verbose")) for text in arguments)
    return Ended(status, out.getvalue(), err.getvalue(), sweep, verbose)


def overrides() -> st.SearchStrategy[str]:
    """One argument: mostly a key that exists with a value that may be wrong."""
    text = st.text(st.characters(codec="utf-8"), max_size=12)
    value = st.one_of(
        st.sampled_from(VALUES), st.sampled_from(VALUES), st.integers().map(str), text
    )
    keys = st.sampled_from([*TOP, *(f"task.{k}" for names in KEYS.values() for k in names)])
    usual = st.builds("{}={}".format, keys, value)
    odd = st.one_of(text, st.builds("{}={}".format, text, value), st.sampled_from(FLAGS))
    return st.one_of(usual, usual, usual, usual, odd)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A dry run of a small job, with a few arguments of any kind."""
    task = draw(st.sampled_from([*KEYS, "longeval_lines", "needle"]))
    own = st.builds("task.{}={}".format, st.sampled_from(KEYS[task]), st.sampled_from(VALUES))
    methods = draw(st.sampled_from(["exact", "[exact,snapkv]", "[h2o,balancekv,subgen]"]))
    chosen = draw(st.lists(st.one_of(own, overrides()), min_size=1, max_size=3))
    given = {text.partition("=")[0] for text in chosen}
    base = [*BASE, f"task={task}", f"method={methods}", *QUICK.get(task, [])]
    return [*(b for b in base if b.partition("=")[0] not in given), *chosen]
