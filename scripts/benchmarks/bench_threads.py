"""Seconds of one run by number of threads, alone and beside a busy process.

    python scripts/benchmarks/bench_threads.py [--model asset:recall_mini] [--tokens 1024] [--new 48]

Every run is a process of its own: torch's own choice (all cores in every phase, waiting threads spin),
one thread for everything (OMP_NUM_THREADS=1), and kvbench's (`kvbench.engine.threads`: all for a
prefill, one for steps of small matrices, none that spins). Wall and processor seconds are of prefill and
decoding without loading, as ratios to one thread alone; the turns alternate.
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
    """Run once, warm, and print wall and processor seconds."""
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="asset:recall_mini")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--new", type=int, default=48)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", action="store_true", help="one run (used by the script itself)")
    given = parser.parse_args()
    if given.work:
        work(given.model, given.tokens, given.new)
        return
    command = [sys.executable, __file__, "--work", "--model", given.model]
    command += ["--tokens", str(given.tokens), "--new", str(given.new)]
    unset = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    for beside in (False, True):
        spins = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(spins)] if beside else []
        best: dict[str, tuple[float, float]] = {}
        for _ in range(given.turns):
            for way, environment in WAYS.items():
                said = subprocess.run(
                    command, env=unset | environment, check=True, capture_output=True, text=True
                )
                wall, processor = map(float, said.stdout.split())
                best[way] = min(best.get(way, (wall, processor)), (wall, processor))
        for process in busy:
            process.terminate()
        print("beside a busy process" if beside else "alone")
        for way, (wall, processor) in best.items():
            of = best["one"]
            print(
                f"  {way:10} wall {wall / of[0]:.2f} ({wall:.2f} s), processor {processor / of[1]:.2f}"
            )


if __name__ == "__main__":
    main()
