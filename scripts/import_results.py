"""Results of other harnesses as an experiment of ours, which kvbench-report and kvbench.load then read.

    python scripts/import_results.py <folder of kvpress's evaluate.py> runs/kvpress
    python scripts/import_results.py <output_path of lm_eval --log_samples> runs/lm_eval

Of kvpress: config.yaml and predictions.csv of RULER, LongBench and LongBench-E, scored here, since it
has no score of an example. Of lm-evaluation-harness: the first numeric metric of
samples_<task>_<time>.jsonl. Each of their folders is a variant, paired with the others example by
example.
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
OF_SAMPLES = {
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
Imported = tuple[dict[str, Any], list[dict[str, Any]]]
"""What a run was made with (model, task, method and further options), and its records."""


def kvpress_runs(folder: Path) -> Iterator[Imported]:
    """One run per folder with predictions.

    Raises:
        UserError: a dataset that is not scored here. KeyError, OSError, ValueError: no such files.
    """
    for path in sorted(folder.rglob("predictions.csv")):
        settings = yaml.safe_load((path.parent / "config.yaml").read_text(encoding="utf-8"))
        dataset, ratio = settings["dataset"], settings.get("compression_ratio")
        if dataset not in SCORED:
            raise UserError(f"{path}: dataset is {dataset!r}; allowed: {', '.join(SCORED)}")
        method = "exact" if settings["press_name"] == "no_press" else settings["press_name"]
        aware = settings.get("query_aware") or settings.get("compress_questions")
        part = settings.get("data_dir") if dataset == "ruler" else None
        about = {
            "model": settings["model"],
            "task": f"{dataset}_{part}" if part else dataset,
            "method": method,
            "seed": settings.get("seed") or 0,
            "compress_after": "prompt" if aware else "context",
        }
        if method != "exact" and ratio is not None:
            about["budget"] = {"total_rate": round(1 - float(ratio), 6)}
        seen: Counter[str] = Counter()
        with path.open(encoding="utf-8", newline="") as file:
            yield about, [kvpress_record(row, dataset, seen) for row in csv.DictReader(file)]


def kvpress_record(row: Mapping[str, str], dataset: str, seen: Counter[str]) -> dict[str, Any]:
    """A row of predictions.csv; `seen` counts the rows of one prompt, which its id ends with."""
    name, said = row.get("task") or dataset, row["predicted_answer"] or ""
    answers = parse_list(row.get("answers") or row.get("answer") or "")
    if dataset == "ruler":
        value = matched(name, clean(said), answers)
    else:
        short = re.sub("[-_]e$", "", name)
        value = longbench_score(short, said, answers, parse_list(row.get("all_classes") or ""))
    words = "\0".join([name, row.get("question") or "", *answers, row.get("length") or ""])
    key = f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"
    seen[key] += 1
    example = {"example_id": f"{key}-{seen[key]}", "dataset": name}
    return example | {"prediction": said, "answers": answers, "score": value}


def parse_list(text: str) -> list[str]:
    """The strings and numbers of a list as Python or numpy (without commas) prints it; other text is one
    answer."""
    if not text.strip().startswith("["):
        return [text] if text.strip() else []
    found = re.findall(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d[\d.e+-]*", text)
    return [str(ast.literal_eval(one)) for one in found]


def lm_eval_runs(folder: Path) -> Iterator[Imported]:
    """One run per model's folder and task: of several files the latest, named by the folders above.

    Raises:
        KeyError, ValueError: a line that is no sample.
    """
    latest: dict[tuple[Path, str], Path] = {}
    for path in sorted(folder.rglob("samples_*.jsonl")):
        latest[path.parent, path.stem.removeprefix("samples_").rpartition("_")[0]] = path
    for (place, task), path in latest.items():
        *above, model = place.relative_to(folder).parts or (folder.resolve().name,)
        records = []
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            metrics = line.get("metrics") or [key for key in line if key not in OF_SAMPLES]
            value = next(line[key] for key in metrics if isinstance(line[key], int | float))
            ending = f"-{line['filter']}" if line.get("filter", "none") != "none" else ""
            example = {"example_id": f"{task}-{line['doc_id']}{ending}", "dataset": task + ending}
            said = line.get("filtered_resps")
            answer = {"prediction": said if isinstance(said, str) else json.dumps(said)}
            answers = [str(line.get("target"))]
            records.append({**example, **answer, "answers": answers, "score": float(value)})
        yield {"model": model, "task": task, "method": "/".join(above) or model}, records


def write(about: Mapping[str, Any], records: list[dict[str, Any]], place: Path) -> None:
    """One run as kvbench writes it."""
    config = {**about, **{key: {"name": about[key]} for key in ("model", "task", "method")}}
    names = {key: about[key] for key in ("model", "task", "method")} | {
        "experiment": place.name,
        "config_hash": config_hash(config),
        "seed": about.get("seed", 0),
    }
    folder = run_folder(
        place.parent,
        place.name,
        names["model"],
        names["task"],
        names["method"],
        names["config_hash"],
    )
    meta = {"version": 1, "score_unit": "score"}
    write_manifest(folder, {**names, "config": config, "identity": config, "task_meta": meta})
    with RecordStore(folder, root=place.parent) as store:
        for record in records:
            store.append({**dict.fromkeys(COMMON_FIELDS), **names, "status": "ok", **record})


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 1 where a folder holds nothing that can be read."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("experiment", type=Path, help="the new folder, e.g. runs/kvpress")
    given = parser.parse_args(arguments)
    try:
        runs = [*kvpress_runs(given.folder), *lm_eval_runs(given.folder)]
        if given.experiment.exists() or not runs:
            why = "is there already" if runs else f"has nothing to read in {given.folder}"
            raise UserError(f"{given.experiment} {why}; allowed: a new folder, results of others")
    except (UserError, OSError, ValueError, KeyError, StopIteration) as error:
        complain(f"{type(error).__name__}: {error}", "import_results")
        return 1
    for about, records in runs:
        write(about, records, given.experiment)
    print(f"{sum(len(records) for _, records in runs)} examples: {given.experiment}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
