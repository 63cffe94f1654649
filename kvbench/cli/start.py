"""What a command says first: before torch and transformers are imported, which takes seconds."""

from __future__ import annotations

from typing import Any

from kvbench import __version__
from kvbench.cli.check import Checked, resolved
from kvbench.cli.compose import job_config
from kvbench.errors import presentable

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
