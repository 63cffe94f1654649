"""Results that other harnesses left, as an experiment of ours: kvpress's evaluation folders, and the
samples that lm-evaluation-harness logs.

    kvbench-report <folder of kvpress's evaluate.py>     config.yaml, metrics.json, predictions.csv
    kvbench-report <output_path of lm_eval --log_samples>    samples_<task>_<time>.jsonl

Each folder or model is a variant of the tables, paired with the others example by example. The records
go to ``<folder>_kvbench`` beside the folder, which is left as it is; what is read again is made again.
"""

from __future__ import annotations

import ast
import csv
import hashlib
import io
import json
import shutil
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from kvbench.errors import complain, printable
from kvbench.records.durable import read_file
from kvbench.records.read import COMMON_FIELDS, MANIFEST, StoreError, read_manifest
from kvbench.records.store import RecordStore, config_hash, run_folder, write_manifest
from kvbench.report.__main__ import main as report
from kvbench.tasks.base import TaskError
from kvbench.tasks.longbench import score as longbench_score
from kvbench.tasks.ruler import clean, matched

PREDICTIONS, SETTINGS, METRICS = "predictions.csv", "config.yaml", "metrics.json"
SAMPLES = "samples_*.jsonl"
SCORED = ("ruler", "longbench", "longbench-e")
"""kvpress's datasets whose answers are scored here; it keeps no score per example."""

_SAMPLE_KEYS = (
    "doc_id",
    "doc",
    "target",
    "arguments",
    "resps",
    "filtered_resps",
    "filter",
    "metrics",
)
_NEAR = 0.05
"""Points out of 100 by which a mean may differ from the one in metrics.json before a line says so."""


@dataclass
class OtherRun:
    """One variant: a press at a ratio on one dataset, or what one lm-eval run logged."""

    model: str
    task: str
    method: str
    options: dict[str, Any]
    read_from: Path
    records: list[dict[str, Any]] = field(default_factory=list)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of ``kvbench-report``: folders of others are read first."""
    csv.field_size_limit(2**31 - 1)
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        given = [text if text.startswith("-") else experiment_of(text) for text in given]
    except StoreError as error:
        complain(str(error), "kvbench-report")
        return 1
    return report(given)


def experiment_of(folder: str) -> str:
    """The experiment folder that stands for `folder`: itself, or what its results are read into.

    Raises:
        StoreError: results that cannot be read, or that no task here scores.
    """
    path = Path(folder)
    if not path.is_dir() or next(path.rglob(MANIFEST), None) is not None:
        return folder
    if next(path.rglob(PREDICTIONS), None) is None and next(path.rglob(SAMPLES), None) is None:
        return folder
    runs = [*kvpress_runs(path), *lm_eval_runs(path)]
    if not any(run.records for run in runs):
        raise StoreError(
            f"{folder} has results of no dataset scored here; allowed: {', '.join(SCORED)}"
        )
    place = path.resolve().with_name(f"{path.resolve().name}_kvbench")
    if place.is_dir():
        others = [
            found for found in place.rglob(MANIFEST) if "read_from" not in read_manifest(found)
        ]
        if others:
            raise StoreError(f"{place} holds runs of kvbench; allowed: another name for {folder}")
        shutil.rmtree(place)
    for run in runs:
        if run.records:
            _write(run, place)
    print(
        printable(f"{sum(len(run.records) for run in runs)} examples of {len(runs)} runs: {place}")
    )
    return str(place)


def _write(run: OtherRun, place: Path) -> None:
    config = {
        "model": {"name": run.model},
        "task": {"name": run.task},
        "method": {"name": run.method},
        **run.options,
    }
    code = config_hash({**config, "read_from": str(run.read_from)})
    folder = run_folder(place.parent, place.name, run.model, run.task, run.method, code)
    names = {
        "experiment": place.name,
        "model": run.model,
        "task": run.task,
        "method": run.method,
        "config_hash": code,
        "seed": run.options.get("seed", 0),
    }
    manifest = {
        **names,
        "config": config,
        "identity": config,
        "task_meta": {"version": 1, "score_unit": "score"},
        "read_from": str(run.read_from),
    }
    write_manifest(folder, manifest)
    with RecordStore(folder, root=place.parent) as store:
        for record in run.records:
            store.append({**dict.fromkeys(COMMON_FIELDS), **names, "status": "ok", **record})


# -- kvpress -------------------------------------------------------------------------------------


def kvpress_runs(folder: Path) -> Iterator[OtherRun]:
    """One per folder with predictions and settings; what cannot be scored is left out with a line.

    Raises:
        StoreError: a file that is not what kvpress writes.
    """
    for path in sorted(folder.rglob(PREDICTIONS)):
        settings = _settings(path.parent / SETTINGS)
        dataset, press = str(settings.get("dataset")), str(settings.get("press_name"))
        if dataset not in SCORED:
            complain(
                f"{path} left out: dataset is {dataset!r}, kvpress keeps no score per example, and "
                f"scored here are {', '.join(SCORED)}",
                "kvbench-report",
            )
            continue
        parts = (dataset, settings.get("data_dir")) if dataset == "ruler" else (dataset,)
        ratio = settings.get("compression_ratio")
        options: dict[str, Any] = {"seed": settings.get("seed") or 0}
        if press == "no_press":
            press = "exact"
        elif isinstance(ratio, int | float):
            options["budget"] = {"total_rate": round(1 - float(ratio), 6)}
        if settings.get("query_aware") or settings.get("compress_questions"):
            options["compress_after"] = "prompt"
        else:
            options["compress_after"] = "context"
        model = str(settings.get("model") or "unknown")
        task = "_".join(str(part) for part in parts if part)
        run = OtherRun(model, task, press, options, path.parent)
        seen: Counter[str] = Counter()
        for row in _rows(path):
            run.records.append(_record_of(row, dataset, path, seen))
        _compare_means(run, path.parent / METRICS)
        yield run


def _record_of(
    row: Mapping[str, str], dataset: str, path: Path, seen: Counter[str]
) -> dict[str, Any]:
    """A row of predictions as the fields of a record; equal questions are told apart by their order."""
    name = row.get("task") or dataset
    answers = parse_list(row.get("answers") or row.get("answer") or "")
    prediction = row["predicted_answer"]
    if not answers:
        raise StoreError(f"{path} has a row without answers; allowed: a column answer or answers")
    words = "\0".join([name, row.get("question", ""), *answers, row.get("length", "")])
    key = f"{name}-{hashlib.sha256(words.encode()).hexdigest()[:12]}"
    seen[key] += 1
    try:
        if dataset == "ruler":
            value = matched(name, clean(prediction), answers)
        else:
            short = name.removesuffix("-e").removesuffix("_e")
            value = longbench_score(
                short, prediction, answers, parse_list(row.get("all_classes", ""))
            )
    except TaskError as error:
        raise StoreError(f"{path}: {error}") from error
    return {
        "example_id": f"{key}-{seen[key]}",
        "dataset": name,
        "prediction": prediction,
        "answers": answers,
        "score": value,
    }


def parse_list(text: str) -> list[str]:
    """The strings or numbers of a list as a CSV file has it: Python's or numpy's way, with commas or
    without; text that is no list is one answer."""
    if not text.strip().startswith("["):
        return [text] if text.strip() else []
    flat = " ".join(text.strip().splitlines())
    try:
        tokens = list(tokenize.generate_tokens(io.StringIO(flat).readline))
    except (tokenize.TokenError, SyntaxError):
        return [text]
    kinds = (tokenize.STRING, tokenize.NUMBER)
    return [str(ast.literal_eval(token.string)) for token in tokens if token.type in kinds]


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    text = read_file(path).decode("utf-8", errors="replace")
    reader = csv.DictReader(io.StringIO(text, newline=""))
    if "predicted_answer" not in (reader.fieldnames or ()):
        raise StoreError(
            f"{path} has no column predicted_answer; allowed: kvpress's predictions.csv"
        )
    for row in reader:
        yield {str(key): value or "" for key, value in row.items() if key is not None}


def _settings(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise StoreError(f"{path} is not there; allowed: a folder of kvpress's evaluate.py")
    try:
        found = yaml.safe_load(read_file(path))
    except yaml.YAMLError as error:
        raise StoreError(f"{path} is no YAML") from error
    if not isinstance(found, Mapping):
        raise StoreError(f"{path} is no mapping; allowed: kvpress's settings")
    return found


def _compare_means(run: OtherRun, path: Path) -> None:
    """Say where the scores made here have another mean than metrics.json."""
    if not path.is_file():
        return
    try:
        theirs = json.loads(read_file(path))
    except ValueError as error:
        raise StoreError(f"{path} is no JSON") from error
    for name in sorted({str(record["dataset"]) for record in run.records}):
        said = theirs.get(name) if isinstance(theirs, Mapping) else theirs
        said = said.get("string_match") if isinstance(said, Mapping) else said
        scores = [100 * record["score"] for record in run.records if record["dataset"] == name]
        mean = sum(scores) / len(scores)
        if isinstance(said, int | float) and abs(float(said) - mean) > _NEAR:
            complain(
                f"{run.read_from}: {name} has {mean:.2f} by the scores made here, {said} in {path.name}",
                "kvbench-report",
            )


# -- lm-evaluation-harness -----------------------------------------------------------------------


def lm_eval_runs(folder: Path) -> Iterator[OtherRun]:
    """One per folder of samples and task; of several files of a task the latest. The variant is named by
    the folders above the model's, or where there are none by the model's.

    Raises:
        StoreError: a file that holds no samples.
    """
    latest: dict[tuple[Path, str], Path] = {}
    for path in sorted(folder.rglob(SAMPLES)):
        task = path.stem.removeprefix("samples_").rpartition("_")[0] or path.stem
        latest[path.parent, task] = path
    for (place, task), path in latest.items():
        parts = place.relative_to(folder).parts
        method = "/".join(parts[:-1] if len(parts) > 1 else parts) or folder.resolve().name
        model = parts[-1] if len(parts) > 1 else "lm_eval"
        run = OtherRun(model, task, method, {}, path)
        run.records.extend(_samples(path, task))
        yield run


def _samples(path: Path, task: str) -> Iterator[dict[str, Any]]:
    for number, text in enumerate(read_file(path).splitlines(), 1):
        try:
            line = json.loads(text)
            name, value = _metric(line)
            document, filtered = line["doc_id"], str(line.get("filter") or "none")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise StoreError(
                f"{path}, line {number} is no sample; allowed: JSON with doc_id and a metric, as "
                "lm_eval --log_samples writes it"
            ) from error
        said = line.get("filtered_resps")
        yield {
            "example_id": f"{task}-{document}" + ("" if filtered == "none" else f"-{filtered}"),
            "dataset": task if filtered == "none" else f"{task} ({filtered})",
            "prediction": said if isinstance(said, str) else json.dumps(said),
            "answers": [str(line.get("target"))],
            "score": value,
            "metric": name,
        }


def _metric(line: Mapping[str, Any]) -> tuple[str, float]:
    """Name and value of a sample's first metric that is a number.

    Raises:
        ValueError: there is none.
    """
    names = line.get("metrics") or [key for key in line if key not in _SAMPLE_KEYS]
    for name in names:
        value = line.get(name)
        if isinstance(value, int | float):
            return str(name), float(value)
    raise ValueError("no metric")
