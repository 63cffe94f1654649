"""Which share of a run of 50 ms examples goes into writing records.

    python scripts/benchmarks/bench_store.py [--folder DIR] [--examples 60] [--runs 5]

Each example computes for 50 ms and appends one record of the usual size per method, in a temporary
folder of --folder, which lies on the disk to measure. The run is repeated, and the smallest share
counts: other work on the machine only adds to it. It prints a line for one method and for six.
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
    """Seconds that the records of each example took."""
    seconds = []
    with ExitStack() as stack:
        stores = [stack.enter_context(RecordStore(folder / f"m{n}")) for n in range(methods)]
        for number in range(examples):
            end = time.perf_counter() + EXAMPLE_S
            while time.perf_counter() < end:  # asleep, it would write from an idle machine
                pass
            start = time.perf_counter()
            for store in stores:
                store.append(record(IDENTITY, number, True))
            seconds.append(time.perf_counter() - start)
    return seconds


def main() -> None:
    """Print the share for one record per example, and for six."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to measure")
    parser.add_argument("--examples", type=int, default=60, help="of a run")
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    size = len(json.dumps(record(IDENTITY, 0, True)).encode()) + 1
    print(
        f"{options.runs} runs of {options.examples} examples of {EXAMPLE_S:g} s; records of {size} B"
    )
    for methods in (1, 6):
        shares_and_ms = []
        for _ in range(options.runs):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                seconds = run(Path(folder), options.examples, methods)
            share = sum(seconds) / (sum(seconds) + options.examples * EXAMPLE_S)
            shares_and_ms.append((share, 1000 * statistics.median(seconds) / methods))
        least, ms = min(shares_and_ms)
        shares = ", ".join(f"{share:.2%}" for share, _ in shares_and_ms)
        print(f"{methods} per example: {least:.2%} of the run ({ms:.3f} ms each); runs: {shares}")


if __name__ == "__main__":
    main()
