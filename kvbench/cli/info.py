"""What a command says at once, before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from kvbench import __version__
from kvbench.cli.catalogue import KINDS, catalogue
from kvbench.cli.check import Checked, check_command, resolved
from kvbench.cli.compose import job_config
from kvbench.cli.papers import experiment_lines
from kvbench.errors import UserError, nearest, presentable, redact
from kvbench.report.papers import comments_on


def list_kind(arguments: Sequence[str]) -> int:
    """``kvbench list <kind>``."""
    kinds = ", ".join(KINDS)
    if len(arguments) != 1:
        raise UserError(f"list takes one of: {kinds}")
    kind = arguments[0] if arguments[0].endswith("s") else arguments[0] + "s"
    if kind not in KINDS:
        raise UserError(f"cannot list {arguments[0]!r}{nearest(kind, KINDS)}; allowed: {kinds}")
    lines = experiment_lines() if kind == "experiments" else catalogue(kind)
    width = max(map(len, lines), default=0)
    bold, plain = ("\033[1m", "\033[0m") if _colours() else ("", "")
    for name, text in lines.items():
        print(f"{bold}{name:{width}}{plain}  {text}".rstrip())
    return 0


def _colours() -> bool:
    """On a terminal that has them, unless the user said no."""
    dumb = os.environ.get("TERM") == "dumb" or "NO_COLOR" in os.environ
    return sys.stdout.isatty() and not dumb


def show_config(arguments: Sequence[str]) -> int:
    """``kvbench show key=value ...``: the config these overrides compose to, resolved; above it, as
    comments, how the experiment differs from the paper that it stands beside."""
    for argument in arguments:
        if argument.startswith("-"):
            raise UserError(f"show has no option {argument!r}; allowed: key=value")
    job = resolved(job_config(check_command(arguments, sweep=False).first))
    comments = "".join(f"{line}\n" for line in comments_on(job.get("paper_table")))
    print(redact(comments + OmegaConf.to_yaml(job)), end="")
    return 0


SHORT_HELP = f"""\
kvbench {__version__}: KV-cache compression methods for large language models, compared

  kvbench experiment=demo                     the shipped model, eight methods, six tasks: some minutes
  kvbench task=needle limit=5                 one task; its results in runs/default/report.html
  kvbench 'method=[exact,snapkv]' budget.rate=0.5 limit=5
  kvbench -m budget.rate=0.5,0.25 limit=5     a sweep: one job for each value
  kvbench model=Qwen/Qwen2.5-0.5B-Instruct    a model of the Hub; model=./folder: of this machine

  kvbench list methods|models|tasks|experiments
  kvbench show task=needle                    every key and its value
  kvbench --help                              all of it
"""


def announce(checked: Checked, shards: int) -> None:
    """One line: what will be run and where it goes, and why nothing moves for some seconds."""
    values: Any = resolved(job_config(checked.first))
    name, jobs = f"{values['model']['name']} x {values['task_label']}", checked.jobs * shards
    methods = list(values["methods"] or ())
    what = f"{name}, {', '.join(methods) if len(methods) < 4 else f'{len(methods)} methods'}"
    if jobs > 1:
        what = f"{jobs} jobs, the first: {what}"
    where = (
        "dry run"
        if values["dry_run"]
        else f"-> {values['results_dir']}/{values['experiment_name']}"
    )
    print(presentable(f"kvbench {__version__}: {what} {where}"), flush=True)
    print("loading torch and transformers ...", flush=True)
