"""What careful writing costs: the store's part of a run of 50 ms examples.

    python scripts/benchmarks/bench_store.py [--folder of the disk to measure]

Each example computes for a while and appends one record of the usual size per method. The run is
repeated; the smallest share counts, as other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench_scale import IDENTITY, record

from kvbench.records.store import RecordStore

EXAMPLE_S = 0.05


def run(folder: Path, examples: int, methods: int) -> list[float]:
    """Seconds that each example's records took."""
    taken = []
    with ExitStack() as stack:
        stores = [stack.enter_context(RecordStore(folder / f"m{n}")) for n in range(methods)]
        for number in range(examples):
            end = time.perf_counter() + EXAMPLE_S
            while time.perf_counter() < end:  # asleep, it would write from an idle machine
                pass
            start = time.perf_counter()
            for store in stores:
                store.append(record(IDENTITY, number, True))
            taken.append(time.perf_counter() - start)
    return taken


def main() -> None:
    """Print the share for one record per example, and for six."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--examples", type=int, default=60, help="of a run")
    parser.add_argument("--runs", type=int, default=5)
    given = parser.parse_args()
    size = len(json.dumps(record(IDENTITY, 0, True)).encode()) + 1
    print(f"{given.runs} runs of {given.examples} examples of {EXAMPLE_S:g} s; records of {size} B")
    for methods in (1, 6):
        found = []
        for _ in range(given.runs):
            with tempfile.TemporaryDirectory(dir=given.folder) as folder:
                taken = run(Path(folder), given.examples, methods)
            share = sum(taken) / (sum(taken) + given.examples * EXAMPLE_S)
            found.append((share, 1000 * statistics.median(taken) / methods))
        share, ms = min(found)
        shares = ", ".join(f"{share:.2%}" for share, _ in found)
        print(f"{methods} per example: {share:.2%} of the run ({ms:.3f} ms each); runs: {shares}")


if __name__ == "__main__":
    main()
