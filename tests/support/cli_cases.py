"""Command lines to try kvbench with, and what may come of one: a correct run or one line.

Keys come from the YAML files, so that what is added there is tried, too.
"""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvbench.cli import main as cli
from kvbench.cli.catalogue import KINDS, catalogue
from support.command import composed

BASE = ["logger=none", "model=tiny_random", "device=cpu", "limit=1", "dry_run=true"]
TASKS = {
    "longeval_lines": ["task.num_lines=[5]", "task.max_new_tokens=4"],
    "throughput": ["task.prompt_tokens=[80]", "task.new_tokens=2", "task.runs=1"],
    "layer_error_synthetic": ["task.exact=8", "task.synthetic.n=64", "task.seeds=1"],
    "jsonl": ["task.files=[/nosuch.jsonl]"],
}
"""Tasks of every kind, made small."""
VALUES = re.findall(
    r"\S+",
    """
    0 -1 1 2 0.5 -0.0 1e400 nan inf 0x10 1_0 true null '' ''''' 1/2 3/2 ' é '%s' '{}' 'a=b' 'a,b'
    [] [[]] {} [1,2] [1,1] [null] [a,b] {a:1} {a:{b:[1]}} {_target_:x} {_target_:os.getcwd} ???
    [exact] [snapkv,h2o] exact needle tiny_random none local slurm gpus ../../x .. /etc/passwd / ~
    a/b a,b 1,2 range(1,3) choice(a,b) glob(*) int(3) cuda:99 cpu os.system builtins.dict ${seed}
    ${nosuch} ${ $ ${task} ${hydra:job.num} ${.seed} ${oc.decode:}
""",
)
VALUES += ["'a b'", "'\ud800'", "'\n'", "a" * 300, "[" * 3000 + "]" * 3000, "{a:" * 300]
FLAGS = re.findall(
    r"\S+",
    """
    -m --multirun -v -vv --help -h --version --nosuch -x -- - list show --config-dir=/nosuch
    --config-dir=. reproduce all
""",
)


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
        logged = ("WARNING: ", "INFO: ")
        shown = re.compile(r"kvbench: .* x .*: (\d+/\d+, |loading)")  # how far a job is
        lines = [line for line in self.err.splitlines() if line.strip() and not shown.match(line)]
        lines = [line for line in lines if not line.startswith(logged)]
        told = [line for line in lines if line.startswith(("kvbench: ", "kvbench-report: "))]
        others = 0 if self.verbose else len(lines) - len(told)
        bugs = ("Traceback", "Error executing job", "HYDRA_FULL_ERROR")
        wrong = {
            "a traceback": any(word in text for word in bugs),
            f"status {self.status!r}": self.status not in (0, 1, 2),
            "not one line": others or (len(told) > 1 and not self.sweep),
            "a failure without a line": self.status != 0 and not told,
            "a complaint and status 0": self.status == 0 and told,
            "a line that nobody reads": any(len(line) > 2000 for line in told),
        }
        return next((why for why, is_so in wrong.items() if is_so), None)


def ended(
    arguments: Sequence[str],
    *,
    folder: Path | None = None,
    main: Callable[[list[str]], int | None] = cli.main,
) -> Ended:
    """Run the command line in this process, in an empty folder or the one given."""
    argv, handlers, level = sys.argv, list(logging.root.handlers), logging.root.level
    environment = dict(os.environ)
    status: Any = None
    with (
        tempfile.TemporaryDirectory() as empty,
        chdir(folder or empty),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
        patch("huggingface_hub.constants.HF_HUB_OFFLINE", True),
    ):
        try:
            status = main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        except Exception:  # noqa: BLE001 - what Python would have printed
            traceback.print_exc()
        finally:  # what Hydra changed
            sys.argv = argv
            logging.root.handlers[:] = handlers
            logging.root.setLevel(level)
            os.environ.clear()
            os.environ.update(environment)
    sweep = bool({"-m", "--multirun"} & set(arguments)) or any(
        word.startswith(("experiment=", "shards=", "launcher=", "hydra.mode")) for word in arguments
    )
    verbose = any(text.startswith(("-v", "--verbose", "hydra.verbose")) for text in arguments)
    return Ended(status, out.getvalue(), err.getvalue(), sweep, verbose)


@lru_cache
def keys_of(*choices: str) -> list[str]:
    """Every key of the config that these choices compose to, inner ones included."""

    def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in values.items():
            yield f"{prefix}{key}"
            yield from flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else ()

    config: Any = OmegaConf.to_container(composed(*choices), resolve=False)
    return [key for key in flattened(config) if re.fullmatch(r"(?!dry_run)[\w.]+", key)]


TOP = re.findall(
    r"\S+",
    """
    experiment launcher logger method model task shard shards budget@x hydra.verbose hydra.mode
    hydra.launcher hydra.sweeper.params hydra.nosuch hydra hydra.searchpath +zzz +model.zzz
    +methods.snapkv.zzz task._args_ +task._partial_ +methods.x +methods.x._target_ ~seed ~methods
    ~model ~task.seed ++task.data ++methods.exact.quantize
    """,
)
"""Keys that no YAML has, and changes of the config's form."""


PLAIN = st.sampled_from(VALUES) | st.integers(-1000, 1000).map(str)
LISTED = st.lists(PLAIN, min_size=1, max_size=2).map(lambda values: f"[{','.join(values)}]")
VALUE = PLAIN | LISTED | st.builds("{{a:{}}}".format, PLAIN)
WORD = st.sampled_from(FLAGS) | st.text(max_size=12)


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A dry run of a small job with a few arguments of any kind, a sweep, or another command."""
    task = draw(st.sampled_from([*TASKS]))
    methods = [m for m in catalogue("methods") if not m.startswith(("exact", "kvp", "min"))]
    job = [f"task={task}", f"method=[exact,{draw(st.sampled_from(methods))}]"]
    known = keys_of(f"task={task}", job[1], "model=tiny_random", "logger=wandb")
    parts = [[k for k in known if k.startswith(part)] for part in ("task.", "methods.", "")]
    keys = st.one_of([st.sampled_from(part) for part in [*parts, TOP] if part])
    chosen = draw(st.lists(st.builds("{}={}".format, keys, VALUE), min_size=1, max_size=3))
    if draw(st.integers(0, 9)) == 0:
        chosen.append(draw(WORD))
    kind = draw(st.sampled_from(["run", "run", "run", "list", "show", "sweep", "gpus", "slurm"]))
    if kind == "list":
        return ["list", *draw(st.lists(st.sampled_from(KINDS) | WORD, max_size=2))]
    if kind == "show":
        return ["show", *job, *chosen]
    if kind == "sweep":
        chosen += ["-m", f"{draw(keys)}={draw(PLAIN)},{draw(PLAIN)}"]
    elif kind in ("gpus", "slurm"):
        chosen += [f"launcher={kind}", *["launcher.workers=2"] * (kind == "gpus")]
    return with_base([*BASE, *job, *TASKS[task]], chosen)


def with_base(base: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The chosen arguments, after those of the base that they do not give themselves."""
    given = {text.partition("=")[0] for text in chosen}
    return [*(text for text in base if text.partition("=")[0] not in given), *chosen]
