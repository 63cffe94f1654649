"""Writes results of other harnesses as an experiment, which kvbench-report and kvbench.load then read.

    python scripts/import_results.py <folder of kvpress's evaluate.py> runs/kvpress
    python scripts/import_results.py <output_path of lm_eval --log_samples> runs/lm_eval

Of kvpress it reads config.yaml and predictions.csv of RULER, LongBench and LongBench-E, and scores them,
since kvpress has no score of an example. Of lm-evaluation-harness it reads the first numeric metric of
samples_<task>_<time>.jsonl. Each of their folders is a variant, paired with the others example by
example. It writes manifests and records to the new folder, and prints how many examples there are.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import UserError, complain
from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore, config_hash, run_folder, write_manifest
from kvbench.tasks.longbench_datasets import score as longbench_score
from kvbench.tasks.ruler import clean, matched

SCORED = ("ruler", "longbench", "longbench-e")
"""Datasets of kvpress whose predictions are scored here."""
SAMPLE_FIELDS = {
    "doc_id",
    "doc",
    "target",
    "arguments",
    "resps",
    "filtered_resps",
    "filter",
    "metrics",
    "doc_hash",
    "prompt_hash",
    "target_hash",
}
"""Fields of a sample of lm-evaluation-harness that are no metric."""
Imported = tuple[dict[str, Any], list[dict[str, Any]]]
"""What a run was made with (model, task, method and further options), and its records."""


def kvpress_runs(folder: Path) -> Iterator[Imported]:
    """One run per folder with predictions.

    Raises:
        UserError: a dataset that is not scored here.
        KeyError, OSError, ValueError: files that are not kvpress's.
    """
    for path in sorted(folder.rglob("predictions.csv")):
        settings = yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
        dataset = settings["dataset"]
        ratio = settings.get("compression_ratio")
        if dataset not in SCORED:
            raise UserError(f"{path}: dataset is {dataset!r}; allowed: {', '.join(SCORED)}")
        method = "exact" if settings["press_name"] == "no_press" else settings["press_name"]
        query_aware = settings.get("query_aware") or settings.get("compress_questions")
        length = settings.get("data_dir") if dataset == "ruler" else None
        about = {
            "model": settings["model"],
            "task": f"{dataset}_{length}" if length else dataset,
            "method": method,
            "seed": settings.get("seed") or 0,
            "compress_after": "prompt" if query_aware else "context",
        }
        if method != "exact" and ratio is not None:
            about["budget"] = {"total_rate": round(1 - float(ratio), 6)}
        seen: Counter[str] = Counter()
        with path.open(encoding="utf-8", newline="") as file:
            yield about, [kvpress_record(row, dataset, seen) for row in csv.DictReader(file)]


def kvpress_record(row: Mapping[str, str], dataset: str, seen: Counter[str]) -> dict[str, Any]:
    """The record of a row of predictions.csv.

    Its id ends with a number: `seen` counts the rows of each prompt.
    """
    name = row.get("task") or dataset
    prediction = row["predicted_answer"] or ""
    answers = parse_list(row.get("answers") or row.get("answer") or "")
    if dataset == "ruler":
        score = matched(name, clean(prediction), answers)
    else:
        base_name = re.sub("[-_]e$", "", name)
        classes = parse_list(row.get("all_classes") or "")
        score = longbench_score(base_name, prediction, answers, classes)
    words = "\0".join([name, row.get("question") or "", *answers, row.get("length") or ""])
    key = f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"
    seen[key] += 1
    return {
        "example_id": f"{key}-{seen[key]}",
        "dataset": name,
        "prediction": prediction,
        "answers": answers,
        "score": score,
    }


def parse_list(text: str) -> list[str]:
    """The strings and numbers of a list as Python or numpy (without commas) prints it; text that is no
    list is one answer."""
    if not text.strip().startswith("["):
        return [text] if text.strip() else []
    literals = re.findall(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d[\d.e+-]*", text)
    return [str(ast.literal_eval(literal)) for literal in literals]


def lm_eval_runs(folder: Path) -> Iterator[Imported]:
    """One run per model's folder and task, of several files the latest; the method is named by the
    folders above.

    Raises:
        KeyError, ValueError, StopIteration: a line that is no sample, or has no numeric metric.
    """
    latest: dict[tuple[Path, str], Path] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        latest[path.parent, path.stem.removeprefix("samples_").rpartition("_")[0]] = path
    for (place, task), path in latest.items():
        *above, model = place.relative_to(folder).parts or (folder.resolve().name,)
        records = []
        for text in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(text)
            metrics = sample.get("metrics") or [key for key in sample if key not in SAMPLE_FIELDS]
            score = next(sample[key] for key in metrics if isinstance(sample[key], int | float))
            ending = f"-{sample['filter']}" if sample.get("filter", "none") != "none" else ""
            answer = sample.get("filtered_resps")
            records.append(
                {
                    "example_id": f"{task}-{sample['doc_id']}{ending}",
                    "dataset": task + ending,
                    "prediction": answer if isinstance(answer, str) else json.dumps(answer),
                    "answers": [str(sample.get("target"))],
                    "score": float(score),
                }
            )
        yield {"model": model, "task": task, "method": "/".join(above) or model}, records


def write(about: Mapping[str, Any], records: list[dict[str, Any]], place: Path) -> None:
    """Write a run as kvbench writes it, to the experiment whose folder is `place`."""
    model, task, method = about["model"], about["task"], about["method"]
    config = {
        **about,
        "model": {"name": model},
        "task": {"name": task},
        "method": {"name": method},
    }
    run = {
        "model": model,
        "task": task,
        "method": method,
        "experiment": place.name,
        "config_hash": config_hash(config),
        "seed": about.get("seed", 0),
    }
    folder = run_folder(place.parent, place.name, model, task, method, run["config_hash"])
    meta = {"version": 1, "score_unit": "score"}
    write_manifest(folder, {**run, "config": config, "identity": config, "task_meta": meta})
    with RecordStore(folder, root=place.parent) as store:
        for record in records:
            store.append({**dict.fromkeys(COMMON_FIELDS), **run, "status": "ok", **record})


def main(arguments: list[str] | None = None) -> int:
    """Import a folder; the exit status is 1 where it holds nothing that can be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("experiment", type=Path, help="the new folder, e.g. runs/kvpress")
    options = parser.parse_args(arguments)
    try:
        runs = [*kvpress_runs(options.folder), *lm_eval_runs(options.folder)]
        if not runs:
            raise UserError(
                f"{options.folder} has no results of kvpress or lm-evaluation-harness; allowed: a "
                "folder with predictions.csv or samples_*.jsonl files"
            )
        if options.experiment.exists():
            raise UserError(f"{options.experiment} is there already; allowed: a new folder")
    except (UserError, OSError, ValueError, KeyError, StopIteration) as error:
        complain(f"{type(error).__name__}: {error}", "import_results")
        return 1
    for about, records in runs:
        write(about, records, options.experiment)
    print(f"{sum(len(records) for _, records in runs)} examples: {options.experiment}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
