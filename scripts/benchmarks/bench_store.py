"""What careful writing costs: the store's part of a run of 50 ms examples.

Each example computes for a while and appends one record of the usual size per method. Counted are the
seconds that the appends take and the CPU seconds of the threads that sync the files meanwhile. The run
is repeated; the smallest share counts, as other work on the machine only adds to it. `--folder` chooses
the disk.

    python scripts/benchmarks/bench_store.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from kvbench.records.read import COMMON_FIELDS
from kvbench.records.store import RecordStore


def record(number: int, method: str) -> dict[str, Any]:
    """A record as a task of one-word answers writes it: about 1.2 kB."""
    fields: dict[str, Any] = dict.fromkeys(COMMON_FIELDS)
    return fields | {
        "experiment": "bench",
        "model": "llama31_8b_instruct",
        "task": "longbench",
        "dataset": "hotpotqa",
        "example_id": f"hotpotqa-{number:05d}",
        "method": method,
        "config_hash": "0123abcd",
        "seed": 0,
        "status": "ok",
        "prompt_tokens": 9151,
        "new_tokens": 12,
        "capacity": 2301,
        "entries": {"mean": 2301.0, "max": 2301},
        "cache_bytes": 301_465_600,
        "exact_bytes": 1_199_439_872,
        "ratio": 0.2513387298583984,
        "prefill_s": 1.2345678901,
        "compress_s": 0.1234567890,
        "decode_s": 0.3456789012,
        "prediction": "The answer is " + "word " * 20,
        "answers": ["first answer", "second answer"],
        "prompt_tail": "x" * 200,
        "score": 0.75,
    }


def compute(seconds: float) -> None:
    """Keep a core busy: a sleeping process would write from an idle machine."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def run(
    folder: Path, examples: int, methods: list[str], example_s: float
) -> tuple[list[float], float]:
    """Seconds that each example's records took, and CPU seconds of the other threads."""
    stores = {method: RecordStore(folder / method) for method in methods}
    taken = []
    for store in stores.values():
        store.__enter__()
    others = time.process_time() - time.thread_time()
    try:
        for number in range(examples):
            compute(example_s)
            start = time.perf_counter()
            for method, store in stores.items():
                store.append(record(number, method))
            taken.append(time.perf_counter() - start)
    finally:
        for store in stores.values():
            store.__exit__(None, None, None)
    return taken, time.process_time() - time.thread_time() - others


def main() -> None:
    """Print the share for one record per example, and for several."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--examples", type=int, default=60, help="of a run")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ms", type=float, default=50.0, help="that an example computes")
    arguments = parser.parse_args()
    size = len(json.dumps(record(0, "snapkv")).encode()) + 1
    print(
        f"{arguments.runs} runs of {arguments.examples} examples of {arguments.ms:g} ms; {size} B"
    )
    for count in (1, 6):
        methods = [f"method{number}" for number in range(count)]
        found = []
        for _ in range(arguments.runs):
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                taken, syncing = run(Path(folder), arguments.examples, methods, arguments.ms / 1000)
            store_s = sum(taken) + syncing
            whole = store_s + arguments.examples * arguments.ms / 1000
            found.append((store_s / whole, 1000 * statistics.median(taken) / count))
        shares = ", ".join(f"{share:.2%}" for share, _ in found)
        least = min(found)
        print(
            f"{count} record{'s' if count > 1 else ''} per example: {least[0]:.2%} of the run "
            f"({least[1]:.3f} ms per record, median); all runs: {shares}"
        )
    os.sync()


if __name__ == "__main__":
    main()
