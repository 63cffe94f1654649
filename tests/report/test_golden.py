"""What tables say as a whole; a failure shows the diff. To write them again: support/golden_text.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.golden_text import assert_golden
from support.report_runs import (
    ERROR_META,
    FIDELITY_META,
    LINES_META,
    THROUGHPUT_META,
    error_records,
    fidelity_records,
    lines_records,
    throughput_records,
    write_longbench,
    write_run,
    write_scores,
    write_sweep,
)
from support.tables import group_of, printed

from kvbench.report.build import tables_to_print
from kvbench.report.frame import tidy, totals
from kvbench.report.published import beside, published_tables
from kvbench.report.render import markdown
from kvbench.report.runs import load_experiment
from kvbench.report.table import Table
from kvbench.report.tables import pairs_table, paper_table, tables_of


def assert_tables(name: str, shown: Mapping[str, Sequence[Table]]) -> None:
    """Tables under headings, with the sentences above them."""
    parts = []
    for heading, tables in shown.items():
        parts.append(f"## {heading}")
        for table in tables:
            if table.columns:
                parts += ["\n".join(f"> {line}" for line in table.answer), markdown(table)]
    assert_golden(name, "\n\n".join(part.strip() for part in parts if part))


SCORED: dict[str, Mapping[str, Sequence[float | None]]] = {
    "exact alone": {"exact": [1, 0] * 10},
    "four prompts": {"exact": [1] * 4, "snapkv": [1] * 4, "uniform": [0] * 4},
    "twelve prompts": {"exact": [1] * 12, "snapkv": [1] * 12, "uniform": [0] * 12},
    "one method": {"exact": [1] * 20, "snapkv": [1, 0] * 10},
    "one method, without exact": {"snapkv": [1, 0] * 10},
    "better and worse": {"snapkv": [1] * 20, "uniform": [0] * 20},
    "equal": {"snapkv": [1, 0] * 10, "uniform": [0, 1] * 10, "h2o": [0, 1] * 10},
    "equal, of six prompts": dict.fromkeys(("snapkv", "h2o", "balancekv"), [1] + [0] * 5),
    "failures": {
        "snapkv": [1, 0.5] * 20,
        "h2o": [None, *[1] * 39],
        "uniform": [*[1] * 20, *[None] * 20],
    },
    "no prompt in common": {"snapkv": [1] * 10 + [None] * 10, "uniform": [None] * 10 + [0] * 10},
    "six methods": {"snapkv": [1] * 20}
    | dict.fromkeys(("h2o", "uniform", "subgen", "pyramidkv", "balancekv"), [0] * 20),
}


def test_notes_and_verdicts_say_what_is_in_their_table(tmp_path: Path) -> None:
    """Of a task that says nothing of its scores, of which higher ones are better."""
    shown = {}
    for number, (name, scored) in enumerate(SCORED.items()):
        folder = write_scores(tmp_path / f"{number}", scored, task_meta={})
        score_table, *others = tables_of(group_of(folder))
        shown[name] = [score_table]
        if name == "four prompts":
            shown["pairs of four prompts"] = others
    assert_tables("notes.md", shown)


def test_several_rates(tmp_path: Path) -> None:
    """Exact 80 of 80; snapkv 72, 76 and 80 of them at ratios .2, .3 and .5: 95 % from .3 on. Of several
    tasks h2o stands last, which never has them, and at half the ratios; an error has no 95 %. And fifty
    prompts, which are too few."""
    right = {"exact": [80] * 3, "snapkv": [72, 76, 80], "h2o": [36, 48, 74]}
    for method, counts in right.items():
        for rate, ratio, count in zip((0.1, 0.2, 0.4), (0.2, 0.3, 0.5), counts, strict=True):
            held = 1.0 if method == "exact" else ratio
            scored = {method: [float(i < count) for i in range(80)]}
            write_scores(tmp_path / "one", scored, rate=rate, fields={"ratio": held})
            held *= 0.5 if method == "h2o" else 1.0
            for task, meta in (("a", LINES_META), ("b", LINES_META), ("error", ERROR_META)):
                about: Any = {"task": task, "task_meta": meta, "fields": {"ratio": held}}
                write_scores(tmp_path / "several", scored, rate=rate, **about)
    folders = {
        "eighty prompts": tmp_path / "one" / "demo",
        "fifty prompts": write_sweep(tmp_path),
        "several tasks": tmp_path / "several" / "demo",
    }
    shown = {name: tables_to_print(load_experiment(folder)) for name, folder in folders.items()}
    shown["several tasks"] = shown["several tasks"][-1:]
    pairs = pairs_table(group_of(folders["fifty prompts"]))
    assert pairs
    assert_tables("rates.md", shown | {"pairs of fifty prompts": [pairs]})
    narrow = " ".join(printed(shown["eighty prompts"][-1], width=72))
    assert " 0.300 [0, 0.459]" in narrow, "the last column's interval is the last to go"
    assert "[87.0, 98.4]" not in narrow
    frame = tidy(group_of(folders["eighty prompts"]))
    found = totals(frame, "ratio_at_95")
    assert found["mean"].to_dict() == pytest.approx({"snapkv": 0.3, "h2o": 0.5})
    assert list(found["mark"]) == ["", "more_than"]


def test_leaderboards(tmp_path: Path) -> None:
    """A task that is run once a rate beside one that measures several rates in one run; two models."""
    meta = ERROR_META | {"metric": "per_query"}
    for method in ("exact", "uniform", "balancekv"):
        about: Any = {"experiment": "tasks", "method": method}
        for rate in (0.5, 0.25):
            records = lines_records(method, rate if method != "exact" else 1.0)
            options = {"budget.rate": rate}
            write_run(tmp_path, task="longeval_lines", records=records, options=options, **about)
        records = error_records(method)
        write_run(tmp_path, task="layer_error", records=records, task_meta=meta, **about)
    for model in ("one", "two"):
        for method in ("exact", "snapkv", "h2o"):
            about = {"experiment": "models", "model": model, "method": method}
            write_run(tmp_path, records=lines_records(method), **about)
    names = ("tasks", "models")
    shown = {name: tables_to_print(load_experiment(tmp_path / name)) for name in names}
    assert_tables("leaderboards.md", shown | {"models": shown["models"][-1:]})


def test_datasets_beside_published_ones(tmp_path: Path) -> None:
    experiment = load_experiment(write_longbench(tmp_path))
    (group,) = experiment.groups
    published = beside(experiment)
    shown = {
        "ours": tables_of(group),
        "as papers print them": [paper_table([group], published)],
        "published": published_tables(published),
    }
    assert_tables("datasets.md", shown)


def test_probes(tmp_path: Path) -> None:
    """Runs that failed are counted and not timed; distances are averaged over prompts."""
    speedups = [1.2, 9.0, 1.0, 1.1, 0.9, 1.3, 1.4]
    first = throughput_records("snapkv")[0]
    timed = [first | {"example_id": f"run-{i}", "speedup": x} for i, x in enumerate(speedups)]
    failed = {"status": "oom", "score": None, "error": "out of memory", "decode_s": None}
    timed += [first | failed | {"example_id": f"run-{i}"} for i in (7, 8)]
    write_run(
        tmp_path, task="throughput", method="snapkv", records=timed, task_meta=THROUGHPUT_META
    )
    about: Any = {"task": "fidelity", "records": fidelity_records(), "task_meta": FIDELITY_META}
    write_run(tmp_path, method="snapkv", **about)
    shown = {
        name: tables_of(group_of(tmp_path / "demo", name)) for name in ("throughput", "fidelity")
    }
    assert_tables("probes.md", shown)
