"""Synthetic run folders for the report's tests: seeded, with failures and hostile text in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore, config_hash, run_folder, write_manifest

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=alert(1)>"
SKILL = {
    "exact": 0.96,
    "streaming_llm": 0.3,
    "uniform": 0.72,
    "snapkv": 0.85,
    "pyramidkv": 0.84,
    "h2o": 0.6,
    "subgen": 0.66,
    "balancekv": 0.78,
}

IDENTITY = ("model", "task", "method", "budget", "seed", "sampling", "compress_after")
"""Keys of a config that change a score."""


def write_run(
    results: Path,
    *,
    records: Sequence[Mapping[str, Any]],
    task: str = "t",
    method: str = "exact",
    task_meta: Mapping[str, Any] | None = None,
    experiment: str = "demo",
    model: str = "recall_mini",
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    manifest: Mapping[str, Any] | None = None,
) -> Path:
    """One run folder; `records`, `options` (of the config, ``a.b`` being b within a) and `manifest` need
    only what differs from the defaults."""
    config: dict[str, Any] = {
        "model": {"name": model},
        "task": {"name": task},
        "method": {"name": method},
        "budget": {"rate": 0.25, "sink": 32, "window": 32},
        "seed": seed,
    }
    for key, value in (options or {}).items():
        *path, last = key.split(".")
        inner: Any = config
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = value
    code = config_hash(config)
    folder = run_folder(results, experiment, model, task, method, code)
    about = {"experiment": experiment, "model": model, "task": task, "method": method}
    about |= {"config_hash": code, "seed": seed}
    identity = {key: config[key] for key in config if key in IDENTITY}
    common = (
        dict.fromkeys(COMMON_FIELDS)
        | about
        | {
            "dataset": task,
            "status": "ok",
            "answers": ["41077"],
            "saves_memory": method != "exact",
            "compressed": method != "exact",
            "prompt_tail": "What is the REGISTER_CONTENT in line brave-otter? ",
        }
    )
    with RecordStore(folder) as store:
        for record in records:
            store.append({**common, **record})
    made = {
        "config": config,
        "identity": identity,
        "command": f"python -m kvbench experiment={experiment} method=[{','.join(SKILL)}]"
        " task=longeval_lines,needle budget.rate=0.5,0.25,0.125 results_dir=somewhere/else",
        "versions": {"kvbench": "0.1.0", "torch": "2.13.0", "transformers": "5.3.0"},
        "code_revision": "0123abcd",
        "hardware": {"cpu": "2 cores", "gpu": None},
        "started": "2026-11-20T12:00:00+00:00",
        "task_meta": LINES_META if task_meta is None else task_meta,
    }
    write_manifest(folder, about | made | dict(manifest or {}))
    return folder


def write_scores(
    folder: Path,
    scores: Mapping[str, Sequence[float | None]],
    *,
    rate: float | None = None,
    fields: Mapping[str, Any] | None = None,
    **about: Any,
) -> Path:
    """A run a method with these scores of examples e0, e1 ..., None being out of memory; returns the
    experiment's folder."""
    for method, each in scores.items():
        records = [
            {
                "example_id": f"e{i}",
                "score": x,
                "status": "oom" if x is None else "ok",
                **(fields or {}),
            }
            for i, x in enumerate(each)
        ]
        options = {} if rate is None else {"budget.rate": rate}
        write_run(folder, method=method, records=records, options=options, **about)
    return folder / about.get("experiment", "demo")


def costs(rng: np.random.Generator, method: str, rate: float, tokens: int) -> dict[str, Any]:
    held = int(tokens * (1.0 if method == "exact" else min(1.0, rate + 64 / tokens)))
    return {
        "prompt_tokens": tokens,
        "new_tokens": 8,
        "capacity": held,
        "ratio": held / tokens,
        "entries": {"mean": held, "max": held},
        "prefill_s": float(rng.normal(0.8, 0.02)),
        "cache_bytes": held * 2048,
        "exact_bytes": tokens * 2048,
        "compress_s": 0.0 if method == "exact" else float(rng.normal(0.05, 0.004)),
        "decode_s": float(rng.normal(0.1, 0.005)),
    }


def lines_records(method: str, rate: float = 0.25, seed: int = 0) -> list[dict[str, Any]]:
    """50 questions over 10..50 lines; exact and others share prompts' difficulty."""
    hard = np.random.default_rng([seed, 1])
    rng = np.random.default_rng([seed, *method.encode(), int(rate * 1000)])
    records: list[dict[str, Any]] = []
    for i in range(50):
        lines = 10 * (1 + i % 5)
        skill = SKILL[method] - 0.004 * lines - (0.0 if method == "exact" else 0.1 * (1 - rate))
        right = hard.random() * 0.8 + rng.random() * 0.2 < skill
        said = "<41077>" if right else f"<{rng.integers(1, 50000)}>"
        record = {"example_id": f"lines-{lines}-{i:03d}", "num_lines": lines, "prediction": said}
        record |= {"score": float(right)} | costs(rng, method, rate, 24 * lines)
        if method == "h2o" and i in (7, 31):
            record |= {"status": "oom", "score": None, "prediction": None, "error": "out of memory"}
        if method == "snapkv" and i in (0, 4):
            record |= {"prediction": HOSTILE} | ({"score": 0.0} if i else {})
        records.append(record)
    return records


def needle_records(method: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng([5, *method.encode()])
    records = []
    for length, depth, i in itertools.product(
        (256, 512, 1024, 2048), (0, 25, 50, 75, 100), range(2)
    ):
        skill = SKILL[method] if depth not in (0, 100) else 0.97
        right = rng.random() < skill - (length > 1000) * 0.1
        record = {"example_id": f"{length}-{depth}-{i}", "length": length, "depth": depth}
        record |= {"answers": ["eat a sandwich in the park"], "score": float(right)}
        record["prediction"] = "a sandwich in the park" if right else "I do not know."
        records.append(record | costs(rng, method, 0.25, length))
    return records


def error_records(method: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng([9, *method.encode()])
    factor = {"uniform": 1.0, "balancekv": 0.7}.get(method, 1.3)
    records = []
    rates, layers = (0.5, 0.25, 0.125, 0.0625), (1, 2, 5)
    for prompt, seed, rate, layer in itertools.product(range(3), range(4), rates, layers):
        error = float(factor * 0.1 / rate**0.7 * rng.uniform(0.9, 1.1))
        record = {"example_id": f"p{prompt}-s{seed}-r{rate}-l{layer}", "prompt": f"p{prompt}"}
        record |= {"seed": seed, "rate": rate, "layer": layer, "relative_error": error}
        records.append(record | {"score": error, "prompt_tokens": 1024, "ratio": rate})
    return records


def throughput_records(method: str) -> list[dict[str, Any]]:
    rng = np.random.default_rng([13, *method.encode()])
    records = []
    for run in range(5):
        cost = costs(rng, method, 0.25, 4096) | {"new_tokens": 128}
        decode = float(rng.normal(3.0 if method == "exact" else 2.2, 0.05))
        extra = {"decode_s": decode, "tokens_per_s": 128 / decode, "peak_bytes": 9e8}
        extra |= {"prefill_compress_s": cost["prefill_s"] + cost["compress_s"]}
        extra |= {"decode_tokens_per_s": 128 / decode}
        record = {"example_id": f"run-{run}", "run": run, "score": 128 / decode}
        records.append(cost | extra | record)
    return records


def fidelity_records() -> list[dict[str, Any]]:
    """Distances of four prompts at two rates, the first of which keeps one prompt whole."""
    records = []
    for prompt, rate in itertools.product(range(4), (0.5, 0.25)):
        kl = (prompt + 1) / 10 / rate
        about = {"example_id": f"p{prompt}/{rate}", "prompt": f"p{prompt}", "rate": rate}
        about |= {"ratio": rate, "compressed": prompt > 0 or rate < 0.5, "agreement": 0.5}
        distances = {"score": kl, "kl": kl, "max_kl": 2 * kl, "difference": kl / 2}
        distances |= {"perplexity_ratio": math.exp(kl / 2), "kl_floor": 1e-7}
        records.append(about | distances)
    return records


LINES_META: dict[str, Any] = {"version": 1, "score_unit": "fraction", "lower_is_better": False}
LONGBENCH_META = LINES_META | {"breakdown": ["length_bucket"], "figures": []}
LINES_META |= {"breakdown": ["num_lines"], "figures": []}
NEEDLE_META = LINES_META | {
    "breakdown": ["length"],
    "figures": [{"kind": "heatmap", "x": "length", "y": "depth"}],
}
_BARS = {"kind": "bars", "x": "rate", "facet": "layer"}
ERROR_META = {
    "version": 1,
    "score_unit": "relative_error",
    "lower_is_better": True,
    "unit": "prompt",
    "breakdown": ["rate"],
    "figures": [_BARS | {"ylabel": "relative error"}],
}
FIDELITY_META = LINES_META | {"score_unit": "KL in nats", "lower_is_better": True}
FIDELITY_META |= {"unit": "prompt", "breakdown": ["rate"], "kind": "fidelity"}
THROUGHPUT_META = LINES_META | {"score_unit": "tokens/s", "breakdown": [], "kind": "throughput"}
TASKS = {
    "longeval_lines": (lines_records, LINES_META),
    "needle": (needle_records, NEEDLE_META),
    "throughput": (throughput_records, THROUGHPUT_META),
    "layer_error": (error_records, ERROR_META),
}


def write_demo(
    results: Path, methods: Sequence[str] = tuple(SKILL), tasks: Sequence[str] = tuple(TASKS)
) -> Path:
    for task in tasks:
        make, meta = TASKS[task]
        for method in methods:
            if task != "layer_error" or method in ("uniform", "balancekv", "streaming_llm"):
                write_run(results, task=task, method=method, records=make(method), task_meta=meta)
    return results / "demo"


def write_sweep(results: Path) -> Path:
    methods = "exact", "snapkv", "balancekv", "uniform"
    for method, rate in itertools.product(methods, (0.5, 0.25, 0.125)):
        records = lines_records(method, rate if method != "exact" else 1.0)
        about: Any = {"experiment": "sweep", "task": "longeval_lines", "method": method}
        write_run(results, records=records, options={"budget.rate": rate}, **about)
    return results / "sweep"


DATASETS = {  # how well an exact cache does, and the width of scores: right or wrong, or in between
    "qasper": (0.43, 0.35),
    "hotpotqa": (0.52, 0.48),
    "gov_report": (0.31, 0.05),
    "trec": (0.72, 0.0),
    "triviaqa": (0.91, 0.2),
    "passage_count": (0.20, 0.0),
}


def longbench_records(method: str, model: str) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    loss = {"exact": 0.0, "streaming_llm": 0.11}.get(method, 0.1 * (0.9 - SKILL[method]))
    for name, (mean, width) in DATASETS.items():
        hard = np.random.default_rng([len(model), *name.encode()])
        rng = np.random.default_rng([len(model), *name.encode(), *method.encode()])
        for i in range(12):
            difficulty, noise = hard.normal(), rng.normal()
            score = mean - loss + width * (0.8 * difficulty + 0.3 * noise)
            if not width:
                score = float(0.9 * difficulty + 0.4 * noise < norm.ppf(max(0.02, mean - loss)))
            tokens = (2000, 6000, 11000)[i % 3] + int(hard.integers(1500))
            record = {"example_id": f"{name}-{i:04d}", "dataset": name}
            record |= {"length_bucket": ("0-4k", "4-8k", "8k+")[i % 3]}
            record["prediction"] = f"The answer to {name} {i} is {round(score, 1)}."
            record["score"] = float(np.clip(score, 0, 1))
            records.append(record | costs(rng, method, 0.25, tokens))
    return records


def write_longbench(results: Path, paper_table: Any = "balancekv_table1") -> Path:
    """An experiment in the shape of BalanceKV's Table 1; returns its folder."""
    model = "Llama-3.1-8B-Instruct"
    for method in ("exact", "streaming_llm", "snapkv", "uniform", "balancekv"):
        about: Any = {"experiment": "table1", "task": "longbench", "model": model}
        about |= {"method": method, "task_meta": LONGBENCH_META}
        records = longbench_records(method, model)
        write_run(results, records=records, options={"paper_table": paper_table}, **about)
    return results / "table1"
