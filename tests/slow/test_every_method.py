"""Every method on one benchmark and four on every one: an example on a random model, and their tables.
No method knows which task it is run on, and no task which method."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.command import job_of
from support.paths import ROOT
from support.tables import heads, shown

from kvbench.catalogue import files_of
from kvbench.report.build import tables_to_print
from kvbench.report.runs import load_experiment
from kvbench.report.table import Table
from kvbench.run.runner import run_job

DATA = ROOT / "tests" / "data"
INVENTED = DATA / "benchmarks"
LEFT_OUT = ("kvpress", "minference", "transformers")
"""Methods that need packages which are not installed, and the witness of ``task=throughput`` alone."""
PROBES = ("fidelity", "layer_error", "stream", "throughput")
SMALL: dict[str, list[str]] = {
    **{name: [f"task.data={INVENTED / name}"] for name in ("longbench_v2", "infinitebench")},
    **{name: [f"task.data={INVENTED / name}"] for name in ("zeroscrolls", "scbench")},
    **{name: [f"task.files=[{INVENTED / name}.jsonl]"] for name in ("gsm8k", "math500")},
    **{name: [f"task.files=[{INVENTED / name}.jsonl]"] for name in ("aime24", "aime25")},
    **{name: [f"task.data={DATA / 'longbench'}"] for name in ("longbench", "longbench_official")},
    **{name: ["task.lengths=[300]"] for name in ("passkey", "number_string", "needle")},
    **{name: ["task.num_lines=[10]"] for name in ("longeval_lines", "longeval_lines_context")},
    "h2o_summaries": [f"task.data={DATA / 'summaries'}"],
    "instructions": [],
    "instructions_told": [],
    "jsonl": [
        f"task.files=[{INVENTED}/gsm8k.jsonl]",
        "task.fields.context=question",
        "task.fields.answers=answer",
    ],
    "key_value": ["task.num_pairs=[4]"],
    "lm_eval": ["task.tasks=[copa]", "task.num_fewshot=6", f"task.include_path={DATA / 'lm_eval'}"],
    "loogle": [f"task.data={INVENTED / 'loogle'}", "task.datasets=[shortdep_cloze]"],
    "longeval_redundant": ["task.num_lines=[5]"],
    "needle_questions": ["task.lengths=[600]", "task.depths=[0,50]"],
    "needle_short": ["task.lengths=[300]"],
    "needles": ["task.lengths=[300]"],
    "ruler": ["task.lengths=[700]", "task.tasks=[niah_single_1]"],
    "text": ["task.tokens=200"],
}
"""What gives each benchmark data that lie here, and short prompts."""
LONG = ("lm_eval", "longbench", "longbench_official", "ruler")
"""Benchmarks that say themselves how long an answer is."""
WHERE = ["model=tiny_random", "device=cpu", "limit=1", "experiment_name=all"]
WHERE += ["budget.sink=2", "budget.window=4", "budget.rate=0.5"]
WHERE += [f"model.architecture.{key}=64" for key in ("hidden_size", "intermediate_size")]
WHERE += [f"model.architecture.num_{key}=2" for key in ("hidden_layers", "attention_heads")]


def tables_of(tmp_path: Path, tasks: Sequence[str], methods: Sequence[str]) -> list[Table]:
    """The tables of each task run with the methods, of which none fails."""
    shared: dict[str, Any] = {}
    failed: dict[str, int] = {}
    for task in tasks:
        words = [f"task={task}", f"task_label={task}", f"results_dir={tmp_path}", *WHERE]
        words += [f"method=[{','.join(methods)}]", *SMALL[task]]
        words += ["methods.pages.size=4"] if "pages" in methods else []
        words += [] if task in LONG else ["task.max_new_tokens=3"]
        result = run_job(job_of(*words, shared=shared))
        assert result.written >= len(methods)
        if result.failed:
            failed[task] = result.failed
    assert not failed
    return list(tables_to_print(load_experiment(tmp_path / "all")))


@pytest.mark.slow
def test_every_benchmark_runs_and_all_stand_side_by_side(tmp_path: Path) -> None:
    """With methods that score a window, draw, and evict while they decode; those that compress the
    context stand in a table of their own."""
    tasks = [name for name in files_of("tasks") if not name.startswith(PROBES)]
    assert set(tasks) == set(SMALL), "a new benchmark is to run here, too"
    methods = ("exact", "snapkv", "balancekv", "h2o")
    tables = [t for t in tables_of(tmp_path, tasks, methods) if t.kind == "overview"]
    assert len(tables) == 2
    columns = {re.split("[:,]", head)[0] for table in tables for head in heads(table)}
    assert columns == {"method", "ratio", *tasks}  # "needle: containment, %"
    for table in tables:
        assert {row[0] for row in shown(table)} == set(methods)


@pytest.mark.slow
def test_every_method_runs_and_all_stand_in_one_table(tmp_path: Path) -> None:
    methods = [name for name in files_of("methods") if not name.startswith(LEFT_OUT)]
    *_, table = tables_of(tmp_path, ["longeval_lines"], methods)
    assert len(shown(table)) == len(methods)
