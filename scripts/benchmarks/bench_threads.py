"""Seconds of one run by number of threads, alone and beside a busy process.

    python scripts/benchmarks/bench_threads.py [--turns 2] [--tokens 1024] [--new 48] [--model ...]

Every run is a process of its own: torch's own choice (all cores in every phase, waiting threads spin),
one thread for everything (OMP_NUM_THREADS=1), and kvbench's (`kvbench.engine.threads`: all for a
prefill, one for steps of small matrices, none that spins). Wall and processor seconds are of prefill and
decoding, without loading; the least of --turns is printed, as a ratio to one thread. Nothing is written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

WAYS: dict[str, dict[str, str]] = {
    "torch's": {"KVBENCH_THREADS": "torch"},
    "one": {"OMP_NUM_THREADS": "1"},
    "by phase": {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"},
}


def work(model: str, tokens: int, new: int) -> None:
    """Generate once as a warm-up and once more, and print the wall and processor seconds of the second
    time."""
    import torch

    from kvbench.engine import threads
    from kvbench.engine.generate import run_forks
    from kvbench.engine.loading import load_model
    from kvbench.engine.model_spec import ModelSpec
    from kvbench.engine.stopping import Stopping
    from kvbench.kv import Budget
    from kvbench.methods import build_method

    if os.environ.get("KVBENCH_THREADS") == "torch":
        threads.SMALL = 0
    spec = ModelSpec(name="m", path=model)
    loaded = load_model(spec, device=torch.device("cpu"), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(loaded.config.vocab_size, (tokens,), generator=generator).tolist()
    methods = {name: (build_method(name), Budget()) for name in ("exact", "snapkv", "h2o")}
    for stopping in (Stopping(4), Stopping(new)):
        wall, processor = time.perf_counter(), time.process_time()
        run_forks(loaded, ids, [], methods, stopping, seed=0, example_id="x")
    print(time.perf_counter() - wall, time.process_time() - processor)


def main() -> None:
    """Measure alone and beside a busy process, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="asset:recall_mini")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", action="store_true", help="one run (used by the script itself)")
    options = parser.parse_args()
    if options.work:
        work(options.model, options.tokens, options.new)
        return
    print("alone")
    print_ratios(least_seconds(options))
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        print("beside a busy process")
        print_ratios(least_seconds(options))
    finally:
        busy.terminate()


def least_seconds(options: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """The least wall seconds of each of `WAYS`, with the processor seconds of that run."""
    command = [sys.executable, __file__, "--work", "--model", options.model]
    command += ["--tokens", str(options.tokens), "--new", str(options.new)]
    unset = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    least: dict[str, tuple[float, float]] = {}
    for _ in range(options.turns):
        for way, environment in WAYS.items():
            done = subprocess.run(
                command, env=unset | environment, check=True, capture_output=True, text=True
            )
            wall, processor = map(float, done.stdout.split())
            least[way] = min(least.get(way, (wall, processor)), (wall, processor))
    return least


def print_ratios(seconds: dict[str, tuple[float, float]]) -> None:
    """Print wall and processor seconds of each way over those of one thread."""
    wall_of_one, processor_of_one = seconds["one"]
    for way, (wall, processor) in seconds.items():
        ratio = processor / processor_of_one
        print(f"  {way:10} wall {wall / wall_of_one:.2f} ({wall:.2f} s), processor {ratio:.2f}")


if __name__ == "__main__":
    main()
