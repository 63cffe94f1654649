"""Command lines to try kvbench with, and what may come of one: a correct run or one line.

Keys come from the YAML files, so that what is added there is tried, too.
"""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

from hydra import compose
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvbench.cli import main as cli
from kvbench.cli.catalogue import KINDS, catalogue
from kvbench.cli.check import composer
from kvbench.cli.compose import flattened

BASE = ["logger=none", "model=tiny_random", "device=cpu", "dry_run=true", "limit=1"]
LONGBENCH = Path(__file__).parents[1] / "data" / "longbench"
SUMMARIES = LONGBENCH.with_name("summaries")
MOST_SECONDS = 60
"""Of CPU time, for one command line: what takes longer hangs."""

_SHORT_LINES = ["task.num_lines=[5]", "task.max_new_tokens=4"]
_ON_LINES = ["task.prompts.num_lines=[20]", "task.num_prompts=1", "task.layers=[1]"]
QUICK = {
    "longeval_lines": _SHORT_LINES,
    "longeval_lines_context": _SHORT_LINES,
    "longeval_redundant": _SHORT_LINES,
    "needle": ["task.lengths=[256]", "task.max_new_tokens=4"],
    "needle_short": ["task.lengths=[256]", "task.max_new_tokens=4"],
    "longbench": [f"task.data={LONGBENCH}", "task.max_input=300"],
    "longbench_official": [f"task.data={LONGBENCH}", "task.max_input=300"],
    "throughput": ["task.prompt_tokens=[80]", "task.new_tokens=2", "task.runs=1"],
    "layer_error": ["task.exact=8", "task.seeds=1", *_ON_LINES],
    "layer_error_synthetic": ["task.exact=8", "task.synthetic.n=64", "task.seeds=1"],
    "error_scaling": ["task.n=128", "task.kept=[16,32]", "task.draws=1"],
    "error_scaling_streaming": ["task.n=128", "task.kept=[16,32]", "task.draws=1"],
    "error_scaling_model": ["task.n=64", "task.queries=4", "task.kept=[16]", *_ON_LINES],
    "error_scaling_streaming_model": ["task.n=64", "task.queries=4", "task.kept=[16]", *_ON_LINES],
    "fidelity": ["task.prompts.num_lines=[20]", "task.num_prompts=1", "task.tokens=4"],
    "jsonl": [
        f"task.files=[{LONGBENCH}/qasper_e.jsonl]",
        "task.fields={context: context, question: input, answers: answers}",
        "task.max_new_tokens=4",
    ],
    "key_value": ["task.num_pairs=[5]", "task.max_new_tokens=4"],
    "passkey": ["task.lengths=[512]", "task.max_new_tokens=4"],
    "number_string": ["task.lengths=[512]", "task.max_new_tokens=4"],
    "needle_questions": ["task.lengths=[512]", "task.max_new_tokens=4"],
    "ruler": ["task.tasks=[niah_single_1]", "task.lengths=[1024]", "task.num_examples=1"],
    "lm_eval": ["task.source=local", "task.per_dataset=1"],
    "stream": ["task.tokens=64", "task.num_texts=1"],
    "text": ["task.tokens=64", "task.num_examples=1", "task.max_new_tokens=4"],
    "h2o_summaries": [f"task.data={SUMMARIES}", "task.max_new_tokens=4"],
    **{
        key: ["task.dataset=null", "task.files=[/nosuch.jsonl]"]
        for key in (
            *("aime24", "aime25", "gsm8k", "infinitebench", "longbench_v2", "loogle"),
            *("math500", "scbench", "zeroscrolls"),
        )
    },
}
"""What makes a task's dry run, which tries an example, short."""

LEFT_OUT = re.compile(r"(dry_run|hydra\.(run|sweep)\.dir|hydra\.output_subdir)\b")
"""Keys that make a run of a dry run, or folders wherever they are told to: not left to chance."""

VALUES = [
    *re.findall(
        r"\S+",
        """
        0 -1 1 2 0.5 1.5 -0.0 1e400 -1e400 nan inf 1e-300 1e308 0x10 1_0 true false null '' '''' 1/2
        [] [[]] {} [1,2] [1,1] [null] [a,b] {a:1} {a:{b:[1]}} {_target_:x} [[1,2,a],[3]] ??? 3/2 5/0
        [exact] [snapkv,h2o] exact snapkv needle longbench tiny_random none demo mars local slurm gpus
        ../../x .. . /etc/passwd / ~ a/b a\\\\b 'a=b' 'a,b' a,b 1,2 range(1,3) choice(a,b) glob(*)
        int(3) é 日本語 'a\u202eb' '%s' '{}' '<script>' \\ ' cuda cuda:0 cuda:99 cpu float16 auto
        ${seed} ${nosuch} ${ $ '${oc.env:HOME}' ${task} ${hydra:job.num} ${now:%Y} ${.seed} ${oc.decode:}
        ${oc.env:NO_SUCH_VARIABLE} context prompt always graph largest wandb theory
        os.system kvbench.kv.Budget builtins.dict asset:recall_mini asset:nosuch mean released
        """,
    ),
    *("'a b'", "'\U0001f9ea'", "'\\u0000'", "'\x00'", "'\ud800'", "'\n'", "a" * 300),
    *("'" + "x" * 5000 + "'", "1" + "0" * 30, "9" * 400, "9" * 5000),
    *("[" * 3000 + "]" * 3000, "{a:" * 300 + "1" + "}" * 300),
    f"'{LONGBENCH}'",
]
FLAGS = re.findall(
    r"\S+",
    """
    -m --multirun -v -vv --cfg job all hydra --help -h --hydra-help --version --nosuch -x -- - list show
    --info --info=config --info=x --resolve --run --package task -p -c -sc --config-name=config
    --config-name=x --config-dir=/nosuch --config-dir=. --config-path=x --experimental-rerun=x
    install=bash install=x --package=hydra --package=[ --cfg=job --package=task
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
        lines = [line for line in self.err.splitlines() if line.strip() and " left; " not in line]
        lines = [line for line in lines if not line.startswith(logged)]
        told = [line for line in lines if line.startswith(("kvbench: ", "kvbench-report: "))]
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


class Hangs(BaseException):
    """Nothing is to catch this and go on."""


@contextmanager
def _cpu_limit() -> Iterator[None]:
    def over(_signal: int, _frame: FrameType | None) -> None:
        raise Hangs(f"more than {MOST_SECONDS} s")

    before = signal.signal(signal.SIGPROF, over)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


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
            with _cpu_limit():
                status = main(list(arguments))
        except SystemExit as stop:
            status = stop.code
        except Hangs as hangs:
            status = str(hangs)
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


def names(kind: str) -> list[str]:
    """What ``kvbench list`` lists."""
    return list(catalogue(kind))


@lru_cache
def keys_of(*choices: str) -> Mapping[str, Any]:
    """Every key of the config that these choices compose to, inner ones included, and its value; of
    those that Hydra's grammar cannot name, what they are in."""
    with composer():
        config: Any = OmegaConf.to_container(compose("config", overrides=[*choices]), resolve=False)
    found = {key: value for key, value in flattened(config) if re.fullmatch(r"[\w.]+", key)}
    return {key: value for key, value in found.items() if not LEFT_OUT.match(key)}


TOP = [
    *("experiment", "launcher", "logger", "method", "model", "task", "shard", "shards"),
    *("hydra.verbose", "hydra.mode", "hydra.job.chdir", "hydra.job.name", "hydra.sweeper.params"),
    *("hydra.launcher", "hydra.job_logging", "hydra.nosuch", "hydra", "hydra.searchpath"),
    *("+zzz", "+model.zzz", "+methods.snapkv.zzz", "+task.zzz", "+budget.zzz", "+batch_size"),
    *("task._args_", "+task._args_", "+task._partial_", "+task._convert_", "+task._recursive_"),
    *("+methods.x", "+methods.x._target_", "+model.config.rope_scaling", "+model.config.zzz"),
    *("+model.architecture.zzz", "++model.architecture.num_key_value_heads", "~seed", "~budget"),
    *("~methods", "~model", "~task", "~methods.snapkv", "~task.seed", "~logger", "~launcher"),
    *("+task.data", "++task.data", "++task.prompts", "++task.synthetic", "++task.per_kept"),
    *("+methods.snapkv.quantize.bits", "++methods.exact.quantize", "budget@x", "task@prompts"),
]
"""Keys that no YAML has, and changes of the config's form."""


def quoted(text: str) -> str:
    """As Hydra takes any text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


PLAIN = st.one_of(
    *[st.sampled_from(VALUES)] * 4,
    st.integers(-1000, 1000).map(str),  # what a job of a legal size costs is no matter here
    st.text(max_size=12).map(quoted),
)
KEYS = ["head_dim", "key_norm", "query_norm", "heads", "clusters", "spread", "zzz", "_partial_"]
NODE = st.builds(
    "{{_target_: kvbench.probes.error_scaling.BoundedData, {}: {}}}".format,
    st.sampled_from(KEYS),
    PLAIN,
)
VALUE = st.one_of(
    *[PLAIN] * 4,
    st.lists(PLAIN, min_size=1, max_size=2).map(lambda values: f"[{','.join(values)}]"),
    st.builds("{{a:{}}}".format, PLAIN | NODE),
    st.builds("[[{}]]".format, PLAIN),
    NODE,
)
WORD = st.one_of(st.text(max_size=12), *[st.sampled_from(FLAGS)] * 3)


def overrides(known: Mapping[str, Any]) -> st.SearchStrategy[str]:
    """A key, of a task in most cases, with any value or one that is right for some other key."""
    texts = {str(value).replace("'", "").replace(" ", "") for value in known.values()}
    fitting = sorted(text for text in texts if len(text) < 60 and "{" not in text)
    parts = [
        [k for k in known if k.startswith(part)] for part in ("task.", "task.", "methods.", "")
    ]
    keys = [st.sampled_from(part) for part in [*parts, TOP] if part]
    return st.builds("{}={}".format, st.one_of(keys), st.one_of(VALUE, st.sampled_from(fitting)))


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A dry run of a small job, with a few arguments of any kind."""
    task = draw(st.sampled_from([*names("tasks"), "longeval_lines", "needle", "longbench"]))
    methods = draw(st.lists(st.sampled_from(names("methods")), min_size=1, max_size=3, unique=True))
    job = [f"task={task}", f"method=[{','.join(methods)}]"]
    known = keys_of(*job, "model=tiny_random", "logger=wandb")
    chosen = draw(st.lists(overrides(known), min_size=1, max_size=3))
    chosen += draw(st.one_of(*[st.just([])] * 9, st.lists(WORD, min_size=1, max_size=1)))
    return with_base([*BASE, *job, *QUICK[task]], chosen)


@st.composite
def other_lines(draw: st.DrawFn) -> list[str]:
    """The other commands: list, show, experiments, launchers, sweeps, and Hydra's own options."""
    task = draw(st.sampled_from(list(QUICK)))
    known = keys_of("method=exact", f"task={task}", "model=tiny_random")
    chosen = draw(st.lists(overrides(known), max_size=2))
    job = ["method=exact", f"task={task}", *QUICK[task]]
    experiment = f"experiment={draw(st.sampled_from(names('experiments')))}"
    kind = draw(st.sampled_from(["list", "show", "experiment", "launcher", "sweep", "option"]))
    if kind == "list":
        return ["list", *draw(st.lists(st.sampled_from(KINDS) | WORD, max_size=2))]
    if kind == "show":
        return ["show", draw(st.sampled_from([experiment, f"task={task}"])), *chosen]
    if kind == "experiment":
        job = [experiment, *job[draw(st.integers(0, 1)) :]]
    elif kind == "launcher":
        launcher = draw(st.sampled_from(["slurm", "gpus"]))
        keys = [key for key in keys_of(f"launcher={launcher}") if "launcher." in key]
        job += [f"launcher={launcher}", *["launcher.workers=2"][launcher == "slurm" :]]
        chosen = draw(st.lists(st.builds("{}={}".format, st.sampled_from(keys), VALUE), max_size=2))
    elif kind == "sweep":
        values = ",".join(draw(st.lists(VALUE, min_size=1, max_size=3)))
        chosen += ["-m", f"{draw(st.sampled_from(list(known)))}={values}"]
    else:
        chosen += draw(st.lists(st.sampled_from(FLAGS), min_size=1, max_size=2))
    return with_base([*BASE, *job], chosen)


def with_base(base: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """The chosen arguments, after those of the base that they do not give themselves."""
    given = {text.partition("=")[0] for text in chosen}
    return [*(text for text in base if text.partition("=")[0] not in given), *chosen]
