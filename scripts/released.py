"""Scores predictions that were published with a paper, and pairs them with a run.

    python scripts/released.py run=<run folder> predictions=<folder of LongBench's pred.py>

The folder holds one ``<dataset>.jsonl`` (or ``<dataset>_e.jsonl``) per dataset, a line per example
with ``pred``, ``answers``, ``length`` and ``all_classes``, as github.com/THUDM/LongBench writes them.
A line is matched with the run's record of the same answers and length, scored as that is, and written
beside the run's experiment as ``<experiment>_released``, which ``kvbench-report`` compares with it
example by example. It prints how many were matched, and that command.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.errors import UserError, complain, printable
from kvbench.records.read import MANIFEST, read_manifest, read_records
from kvbench.records.store import RecordStore, write_manifest
from kvbench.tasks.longbench_datasets import score

MEASURED = ("entries", "cache_bytes", "exact_bytes", "ratio", "prefill_s", "compress_s", "decode_s")
"""Record fields that are measured in a run; published predictions have none of them."""


def pair_released(arguments: Sequence[str]) -> None:
    """Write the paired run; print where it is and how many examples were matched.

    Raises:
        UserError: arguments that name no run or no predictions, or predictions of other examples.
    """
    options = dict(argument.partition("=")[::2] for argument in arguments)
    if set(options) != {"run", "predictions"}:
        raise UserError("released.py takes run=<run folder> and predictions=<folder>")
    run, folder = Path(options["run"]), Path(options["predictions"])
    if not (run / MANIFEST).is_file():
        raise UserError(f"run is {options['run']!r}; allowed: a run's folder, with its {MANIFEST}")
    if not folder.is_dir():
        raise UserError(f"predictions is {options['predictions']!r}; allowed: a folder")
    manifest = read_manifest(run / MANIFEST)
    ours = [record for record in read_records(run) if record["status"] == "ok"]
    paired = list(paired_records(ours, folder))
    if not paired:
        raise UserError(f"no line of {folder} has the answers and length of a record of {run}")
    experiment = f"{manifest['experiment']}_released"
    place = run.parents[2].with_name(experiment).joinpath(*run.parts[-3:])
    command = f"python scripts/released.py run={run} predictions={folder}"
    write_manifest(place, {**manifest, "experiment": experiment, "command": command})
    with RecordStore(place, root=place.parents[3]) as store:
        for record in paired:
            store.append({**record, "experiment": experiment})
    print(printable(f"{len(paired)} of {len(ours)} examples matched: {place}"))
    print(printable(f"kvbench-report {run.parents[2]} {place.parents[2]}"))


def paired_records(ours: Sequence[Mapping[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    """Our records that match a line, with its prediction and the score of that.

    Of several examples with the same answers and length, the n-th line is matched with the n-th record.
    """
    lines = {dataset: _lines_of(folder, dataset) for dataset in {str(r["dataset"]) for r in ours}}
    for record in sorted(ours, key=lambda record: str(record["example_id"])):
        dataset = str(record["dataset"])
        unmatched = lines[dataset].get(_key(record))
        if unmatched:
            line = unmatched.popleft()
            value = score(dataset, line["pred"], record["answers"], line.get("all_classes") or None)
            yield {**record, **dict.fromkeys(MEASURED), "prediction": line["pred"], "score": value}


def _lines_of(folder: Path, dataset: str) -> dict[str, deque[dict[str, Any]]]:
    """The lines of a dataset by `_key`; empty where there is no file.

    Raises:
        UserError: a line that is no prediction.
    """
    lines: dict[str, deque[dict[str, Any]]] = defaultdict(deque)
    paths = [folder / f"{dataset}{suffix}.jsonl" for suffix in ("", "_e")]
    path = next((path for path in paths if path.is_file()), None)
    for number, text in enumerate(path.read_bytes().splitlines() if path else (), 1):
        try:
            line = json.loads(text)
            if not isinstance(line["pred"], str) or not isinstance(line["answers"], list):
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(
                f"{path}, line {number} is no prediction; allowed: JSON with pred (text) and answers "
                "(a list)"
            ) from error
        lines[_key(line)].append(line)
    return lines


def _key(line: Mapping[str, Any]) -> str:
    """What a line and the record of the same example have in common."""
    return json.dumps([line["answers"] or [], line.get("length")])


if __name__ == "__main__":
    try:
        pair_released(sys.argv[1:])
    except UserError as error:
        complain(str(error), "released.py")
        sys.exit(error.status)
