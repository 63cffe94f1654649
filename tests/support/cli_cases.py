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
from random import Random
from types import FrameType
from typing import Any
from unittest.mock import patch

from hydra import compose
from hypothesis import strategies as st
from omegaconf import OmegaConf

from kvbench.cli import main as cli
from kvbench.cli.catalogue import KINDS, catalogue
from kvbench.cli.check import composer

BASE = ["logger=none", "model=tiny_random", "device=cpu", "dry_run=true", "limit=1"]
LONGBENCH = Path(__file__).parents[1] / "data" / "longbench"
SUMMARIES = LONGBENCH.with_name("summaries")
MOST_SECONDS = 60
"""Of CPU time, for one command line: what takes longer hangs."""

_SHORT_LINES = ["task.num_lines=[5]", "task.max_new_tokens=4"]
_ON_TEXT = ["task.prompts.tokens=64", "task.prompts.num_examples=1", "task.num_prompts=1"]
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
    "walk_discrepancy": ["task.steps=[8,16]", "task.walks=2"],
    "layer_error": ["task.exact=8", "task.seeds=1", *_ON_LINES],
    "layer_error_synthetic": ["task.exact=8", "task.synthetic.n=64", "task.seeds=1"],
    "joint_survival": ["task.exact=8", "task.seeds=1", *_ON_LINES],
    "joint_survival_numbers": ["task.exact=8", "task.seeds=1", *_ON_LINES],
    "balancekv_ablation": ["task.exact=8", "task.seeds=1", *_ON_LINES],
    "balancekv_ablation_synthetic": ["task.exact=8", "task.synthetic.n=64", "task.layers=[1]"],
    "error_scaling": ["task.n=128", "task.kept=[16,32]", "task.draws=1"],
    "error_scaling_streaming": ["task.n=128", "task.kept=[16,32]", "task.draws=1"],
    "error_scaling_model": ["task.n=64", "task.queries=4", "task.kept=[16]", *_ON_LINES],
    "error_scaling_streaming_model": ["task.n=64", "task.queries=4", "task.kept=[16]", *_ON_LINES],
    "subgen_clusters": ["task.steps=[8,16]", "task.draws=1"],
    "subgen_clusters_model": ["task.steps=[8,16]", *_ON_LINES],
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
    "index": ["task.synthetic.n=64", "task.rates=[0.5]", "task.layers=[1]", "task.seeds=1"],
    "text": ["task.tokens=64", "task.num_examples=1", "task.max_new_tokens=4"],
    "norms": _ON_LINES,
    "attention_mass": _ON_TEXT,
    "attention_sparsity": _ON_TEXT,
    "neuron_frequency": _ON_TEXT,
    "neuron_dropping": [*_ON_TEXT, "task.num_prompts=2", "task.calibration=1"],
    "neuron_overlap": ["task.contents={}"],
    "neuron_overlap_texts": ["task.contents={}"],
    "neuron_overlap_training": ["task.contents={}"],
    "clusterability": ["task.generate=8", "task.counts=[1,2]", "task.centres=2"],
    "h2o_summaries": [f"task.data={SUMMARIES}", "task.max_new_tokens=4"],
    "captions": ["task.data=/nosuch.json"],
    **{
        key: ["task.dataset=null", "task.files=[/nosuch.jsonl]"]
        for key in (
            *("aime24", "aime25", "gsm8k", "infinitebench", "longbench_v2", "loogle"),
            *("math500", "scbench", "zeroscrolls"),
        )
    },
}
"""What makes a task's dry run, which tries an example, short."""
EXPERIMENTS = {
    "walk_discrepancy": "walk_discrepancy",
    "subgen_clusters": "subgen_clusters",
    "subgen_clusters_model": "subgen_clusters",
}
"""Experiments that bring what these tasks take in place of methods."""

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
        ${oc.env:NO_SUCH_VARIABLE} context prompt chunked shared always graph largest wandb theory
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
    """Every key, inner ones included, of the config that these choices compose to, and what it is; of
    those that Hydra's grammar cannot name, what they are in."""
    with composer():
        config = OmegaConf.to_container(compose("config", overrides=list(choices)), resolve=False)
    return {key: value for key, value in _keys(config) if not LEFT_OUT.match(key)}


def _keys(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in node.items():
        if re.fullmatch(r"\w+", str(name)):
            yield f"{prefix}{name}", inner
            if isinstance(inner, Mapping):
                yield from _keys(inner, f"{prefix}{name}.")


def texts_of(known: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of a config as overrides have them: right for one key and wrong for others."""
    texts = {str(value).replace("'", "").replace(" ", "") for value in known.values()}
    return tuple(sorted(text for text in texts if len(text) < 60 and "{" not in text))


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

INNER = [
    *("head_dim", "key_norm", "query_norm", "value_norm", "heads", "clusters", "spread", "zzz"),
    *("_target_", "_partial_"),
]


def text_of(rng: Random) -> str:
    """Up to a dozen characters: plain, of any script, beyond the basic plane, control characters."""
    spans = [(32, 126), (32, 126), (0, 255), (256, 0xD7FF), (0xE000, 0x10FFFF)]
    return "".join(chr(rng.randint(*rng.choice(spans))) for _ in range(rng.randint(0, 12)))


def quoted(text: str) -> str:
    """As Hydra takes any text."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def value_of(rng: Random, *more: str) -> str:
    """A value: of the lists, a number, any text; or a list, mapping or node that holds one."""

    def plain() -> str:
        kind = rng.randrange(8)
        if kind == 0:  # what a job of a legal size costs is no matter here
            return str(rng.randint(-1000, 1000))
        if kind == 1:
            return quoted(text_of(rng))
        return rng.choice(VALUES) if kind < 5 else rng.choice(more or VALUES)

    def node() -> str:
        target = "_target_: kvbench.probes.error_scaling.BoundedData"
        return f"{{{target}, {rng.choice(INNER)}: {plain()}}}"

    forms = ["{0}"] * 10 + [
        "[{0}]",
        "[{0}]",
        "[{0},{1}]",
        "[[{0}]]",
        "{{a:{0}}}",
        "{2}",
        "{{x:{2}}}",
    ]
    return rng.choice(forms).format(plain(), plain(), node())


def like(rng: Random, default: Any) -> str:
    """A value of the default's type, in most cases one that is allowed."""
    if isinstance(default, bool):
        return rng.choice(["true", "false"])
    if isinstance(default, int | float):
        return str(rng.choice([rng.randint(0, 9), round(rng.uniform(0, 1), 2), default]))
    if isinstance(default, list) and default:
        several = rng.choices(default, k=rng.choice([0, 1, 1, 2]))
        return f"[{','.join(like(rng, each) for each in several)}]"
    return rng.choice(["null", "[]", "1", "x", quoted(str(default))])


def override_of(rng: Random, known: Mapping[str, Any], *more: str) -> str:
    """One argument: mostly a key that exists with a value that may be wrong."""
    groups = [[key for key in known if key.startswith(part)] for part in ("task.", "methods.")]
    others = [key for key in known if not key.startswith(("task.", "methods."))]
    key = rng.choice(rng.choice([groups[0], groups[0], groups[1] or others, others, TOP]))
    default = known.get(key, {})
    if isinstance(default, Mapping) or rng.random() < 0.6:
        return f"{key}={value_of(rng, *more)}"
    return f"{key}={like(rng, default)}"


def odd_word(rng: Random) -> str:
    """An argument that is no override of anything."""
    return rng.choice([text_of(rng), f"{text_of(rng)}={value_of(rng)}", *[rng.choice(FLAGS)] * 4])


def command_line(rng: Random) -> list[str]:
    """A dry run of a small job, with a few arguments of any kind."""
    task = rng.choice([*names("tasks"), "longeval_lines", "needle", "longbench"])
    if task in EXPERIMENTS:  # what takes other things than methods
        job = [f"experiment={EXPERIMENTS[task]}", f"task={task}"]
        known = keys_of(*job)
    else:
        methods = rng.sample(names("methods"), rng.choice([1, 1, 2, 3]))
        job = [f"task={task}", f"method=[{','.join(methods)}]"]
        known = keys_of(job[0], "method=exact", "model=tiny_random", "logger=wandb")
        known = {key: known[key] for key in known if not key.startswith("methods.")}
        options = keys_of("method=" + methods[0])
        known |= {key: options[key] for key in options if key.startswith("methods.")}
    chosen = [override_of(rng, known, *texts_of(known)) for _ in range(rng.choice([1, 1, 1, 2, 3]))]
    if rng.random() < 0.1:
        chosen.append(odd_word(rng))
    base = [*BASE, *job, *QUICK[task]]
    return [*_not_given(base, chosen), *chosen]


def other_line(rng: Random) -> list[str]:
    """The other commands: list, show, experiments, launchers, sweeps, and Hydra's own options."""
    task = rng.choice(list(QUICK))
    base = [*BASE, "method=exact", f"task={task}", *QUICK[task]]
    known = keys_of("method=exact", f"task={task}", "model=tiny_random")
    chosen = [override_of(rng, known) for _ in range(rng.choice([0, 1, 1, 2]))]
    kind = rng.choice(["list", "show", "experiment", "launcher", "sweep", "option"])
    if kind == "list":
        words = [rng.choice([*KINDS, *KINDS, "method", "s", "", odd_word(rng)]) for _ in range(2)]
        return ["list", *words[: rng.choice([0, 1, 1, 1, 2])]]
    if kind == "show":
        experiment = f"experiment={rng.choice(names('experiments'))}"
        return ["show", *rng.choice([[experiment], [f"task={task}"], []]), *chosen]
    if kind == "experiment":
        base = [f"experiment={rng.choice(names('experiments'))}", *base]
        base = [word for word in base if word != "method=exact" or rng.random() < 0.5]
    elif kind == "launcher":
        launcher = rng.choice(["slurm", "gpus"])
        keys = [key for key in keys_of(f"launcher={launcher}") if "launcher." in key]
        base += [f"launcher={launcher}", *["launcher.workers=2"][launcher == "slurm" :]]
        chosen = [f"{rng.choice(keys)}={value_of(rng)}" for _ in range(rng.choice([1, 1, 2]))]
    elif kind == "sweep":
        values = ",".join(value_of(rng) for _ in range(rng.choice([1, 2, 3])))
        chosen.append(f"{rng.choice(list(known))}={values}")
        base.append("-m")
    else:
        base += rng.choices(FLAGS, k=rng.choice([1, 1, 2]))
    return [*_not_given(base, chosen), *chosen]


def _not_given(base: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Of the base what the chosen arguments do not give themselves."""
    given = {text.partition("=")[0] for text in chosen}
    return [text for text in base if text.partition("=")[0] not in given]


def lines_of(make: Callable[[Random], list[str]]) -> st.SearchStrategy[list[str]]:
    """Of one seed each: nothing here needs to be made smaller when it fails."""
    return st.randoms(use_true_random=True).map(make)
