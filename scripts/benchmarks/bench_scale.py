"""What many records, examples, jobs and methods cost, and how the cost grows: CPU seconds.

    python scripts/benchmarks/bench_scale.py records  report and comparison of up to 100,000 records
    python scripts/benchmarks/bench_scale.py lengths  a report of 8 methods at up to 1,000 lengths
    python scripts/benchmarks/bench_scale.py examples  a job of up to 10,000 short examples
    python scripts/benchmarks/bench_scale.py jobs  planning up to 5,000 jobs; the first record of a sweep
    python scripts/benchmarks/bench_scale.py methods  one job with up to 200 methods

Each is measured at a quarter of the number and at all of it (--most takes another number): linear growth
is a ratio of 4 at most. It prints the processor seconds of a process of its own, its start included (of
`examples`, without those inside the engine), and its largest memory; what it makes in a temporary folder
is removed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.methods.fixed import Fixed
from kvbench.records.read import COMMON_FIELDS, MANIFEST, RECORDS
from kvbench.records.store import config_hash, run_folder

METHODS = ("exact", "streaming_llm", "uniform", "snapkv", "pyramidkv", "h2o", "subgen", "balancekv")
DATASETS = 4
IDENTITY = {"experiment": "bench", "model": "m", "task": "t", "method": "snapkv", "seed": 0}
META = {"version": 1, "score_unit": "fraction", "breakdown": ["length_bucket"]}


def write_experiment(
    results: Path, name: str, records: int, seed: int = 0, *, lengths: bool = False
) -> Path:
    """Write an experiment of about so many records: 8 methods on one task of 4 datasets, scores of 0 and
    1; returns its folder.

    Args:
        lengths: there is one dataset, every prompt has a length of its own, and tables are split by it.
    """
    draws = np.random.default_rng(seed)
    count = max(1, records // len(METHODS))
    ease = draws.random(count)
    for place, method in enumerate(METHODS):
        config = {"method": {"name": method}, "budget": {"rate": 0.25}, "seed": 0}
        identity: dict[str, Any] = {**IDENTITY, "experiment": name, "method": method}
        code = config_hash(config)
        folder = run_folder(results, name, "m", "t", method, code)
        folder.mkdir(parents=True)
        identity["config_hash"] = code
        meta = {**META, "breakdown": ["length"]} if lengths else META
        manifest = {"format": 1, **identity, "config": config, "task_meta": meta}
        (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
        right = ease + 0.05 * place < draws.random(count) + 0.5  # later methods are worse
        with (folder / RECORDS).open("w", encoding="utf-8") as file:
            for number in range(count):
                line = record(identity, number, bool(right[number]))
                if lengths:
                    line |= {"dataset": "d", "length": 500 + number}
                file.write(json.dumps(line) + "\n")
    return results / name


def record(identity: Mapping[str, Any], number: int, right: bool) -> dict[str, Any]:
    """A record as a task of one-word answers writes it: about 1 kB."""
    return {
        **dict.fromkeys(COMMON_FIELDS),
        **identity,
        "dataset": f"d{number % DATASETS}",
        "example_id": f"e{number:06d}",
        "length_bucket": ("0-4k", "4-8k", "8k+")[number % 3],
        "status": "ok",
        "prompt_tokens": 1000 + number % 3000,
        "new_tokens": 6,
        "capacity": 300,
        "entries": {"mean": 300.0, "max": 300},
        "cache_bytes": 614_400,
        "exact_bytes": 2_097_152,
        "ratio": 0.29296875,
        "compressed": identity["method"] != "exact",
        "saves_memory": identity["method"] != "exact",
        "prefill_s": 0.1234,
        "compress_s": 0.0123,
        "decode_s": 0.2345,
        "prediction": f"The REGISTER_CONTENT is {10_000 + number * (1 if right else 7) % 90_000}.",
        "answers": [str(10_000 + number % 90_000)],
        "prompt_tail": "x" * 200,
        "score": float(right),
    }


@dataclass(frozen=True)
class Used:
    """Processor seconds of a process, and the most MiB that it held; None: not measured."""

    seconds: float
    peak: float | None = None


def used_by(arguments: list[str]) -> Used:
    """Run Python with these arguments; what the process and those that it waited for used.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return Used(usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024)


def bench_records(count: int, folder: Path) -> Iterator[tuple[str, Used]]:
    """A report of so many records, and a comparison of two experiments of so many each."""
    first = write_experiment(folder / str(count), "first", count, seed=0)
    second = write_experiment(folder / str(count), "second", count, seed=1)
    yield "report", used_by(["-m", "kvbench.report", str(first)])
    out = str(folder / f"compared-{count}")
    used = used_by(["-m", "kvbench.report", str(first), str(second), "--out", out])
    yield "comparison", used


def bench_lengths(count: int, folder: Path) -> Iterator[tuple[str, Used]]:
    """A report of prompts of so many lengths."""
    place = write_experiment(folder / str(count), "lengths", len(METHODS) * count, lengths=True)
    yield "report", used_by(["-m", "kvbench.report", str(place)])


TIMED_JOB = """
import sys, time
from pathlib import Path
from kvbench.cli.main import main
from kvbench.run import plan
file, words, engine, seconds = Path(sys.argv[1]), sys.argv[2:], plan.run_conversations, []
def timed(*arguments, **options):
    start = time.process_time()
    try:
        return engine(*arguments, **options)
    finally:
        seconds.append(time.process_time() - start)
plan.run_conversations = timed
try:
    main(words)
finally:
    file.write_text(str(sum(seconds)))
"""
"""A program that runs a job, counts the engine's processor seconds and writes them to a file."""


def bench_examples(count: int, folder: Path) -> Iterator[tuple[str, Used]]:
    """A job of so many short examples: planning, prompts, store, progress, scores, report."""
    data = folder / f"{count}.jsonl"
    engine_seconds = folder / f"{count}.txt"
    with data.open("w", encoding="utf-8") as file:
        for i in range(count):
            question = f"Item {i} has code {i * 7919 % 10007}. Its code is"
            file.write(json.dumps({"question": question, "answers": "7"}) + "\n")
    overrides = [
        "task=jsonl",
        f"task.files=[{data}]",
        "task.fields.context=null",
        "task.template='{{ question }}'",
        "task.max_new_tokens=2",
        "method=[exact]",
        "model=tiny_random",
        "logger=none",
        "batch_size=16",
        f"results_dir={folder / str(count)}",
    ]
    job = used_by(["-c", TIMED_JOB, str(engine_seconds), *overrides])
    rest = replace(job, seconds=job.seconds - float(engine_seconds.read_text()))
    print(f"{1000 * rest.seconds / count:.2f} ms per record beside the model, {count:,} records")
    yield "job without the model", rest


def bench_jobs(count: int, folder: Path) -> Iterator[tuple[str, Used]]:
    """A dry run of so many jobs, five rates and as many seeds as that needs; and the same sweep up to
    its first record."""
    words = [
        "-m",
        "kvbench",
        "-m",
        "logger=none",
        "limit=1",
        "method=[exact,snapkv]",
        f"seed=range({max(1, count // 5)})",
        "budget.rate=0.5,0.4,0.3,0.2,0.1",
        f"results_dir={folder / str(count)}",
    ]
    yield "dry run", used_by([*words, "dry_run=true"])
    yield "first record", Used(_until_first_record(words, folder / str(count)))


def _until_first_record(words: list[str], results: Path) -> float:
    """Processor seconds of a Python process with these arguments until its first record; it is then
    killed."""
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
    try:
        while not any(path.stat().st_size for path in results.rglob(RECORDS)):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(words)} ended without a record")
            time.sleep(0.05)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    finally:
        process.kill()
        process.wait()


def bench_methods(count: int, folder: Path) -> Iterator[tuple[str, Used]]:
    """One job with two examples and so many methods: fixed with as many summaries."""
    path = folder / f"conf-{count}" / "experiment" / "many.yaml"
    path.parent.mkdir(parents=True)
    lines = ["# @package _global_", "methods:"]
    for size in range(1, count):
        lines.append(f"  s{size}: {{_target_: {Fixed.__module__}.Fixed, summary: {size}}}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    words = [
        "experiment=many",
        "method=[exact]",
        "logger=none",
        "limit=2",
        "model=tiny_random",
        f"--config-dir={path.parent.parent}",
        f"results_dir={folder / str(count)}",
    ]
    yield "job", used_by(["-m", "kvbench", *words])


BENCHES: dict[str, tuple[int, Callable[[int, Path], Iterator[tuple[str, Used]]]]] = {
    "records": (100_000, bench_records),
    "lengths": (1_000, bench_lengths),
    "examples": (10_000, bench_examples),
    "jobs": (5_000, bench_jobs),
    "methods": (200, bench_methods),
}


def main(arguments: list[str] | None = None) -> None:
    """Print seconds at a quarter of the number and at all of it; the ratios come last."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=BENCHES)
    parser.add_argument("--most", type=int, help="the number; by default that of the text above")
    options = parser.parse_args(arguments)
    number, bench = BENCHES[options.what]
    most = options.most or number
    measured: dict[str, list[float]] = {}
    folder = Path(tempfile.mkdtemp(prefix="bench-scale-"))
    try:
        for count in (max(1, most // 4), most):
            for name, used in bench(count, folder):
                measured.setdefault(name, []).append(used.seconds)
                peak = "" if used.peak is None else f", at most {used.peak:.0f} MiB"
                print(
                    f"{name}, {count:,} {options.what}: {used.seconds:.1f} CPU s{peak}", flush=True
                )
    finally:
        shutil.rmtree(folder)
    for name, (quarter, full) in measured.items():
        print(f"{name}: {full / quarter:.2f} times as long for 4 times as many {options.what}")


if __name__ == "__main__":
    main()
