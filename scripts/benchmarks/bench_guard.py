"""What guarding shared tensors costs: CPU seconds spent in the guard over those of the job.

    python scripts/benchmarks/bench_guard.py  # the job of bench_sharing.py, eight methods
    python scripts/benchmarks/bench_guard.py --tokens 512  # a short prompt, where a fixed cost
    weighs most

Every function of the guard is timed where it runs, in CPU time, so that other programs on the machine
do not count. Included are the copies of parts of each layer, the look at them, at the process's
settings and at the random generators; not the comparison of four settings (some microseconds) at later
decoded tokens of a method that evicts. The last line is the ratio in per cent.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from bench_sharing import METHODS, build_model, job

from kvbench.engine.guard import Guard, Settings
from kvbench.kernels.seal import Seal


class Meter:
    """CPU seconds in the functions it is put around, each counted once where they are nested."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._inside = False

    def around(self, owner: type, name: str) -> None:
        """Time this function of a class from here on."""
        function: Callable[..., Any] = getattr(owner, name)

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return function(*args, **kwargs)
            self._inside, start = True, time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._inside = False
                self.seconds += time.process_time() - start

        bound = isinstance(owner.__dict__[name], classmethod)
        setattr(owner, name, staticmethod(timed) if bound else timed)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096, help="prompt tokens")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--rate", type=float, default=0.25)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    meter = Meter()
    for owner, name in (
        (Guard, "__init__"),
        (Guard, "_changed"),
        (Guard, "suspicious"),
        (Settings, "now"),
        (Settings, "restore_changed"),
        (Seal, "__init__"),
    ):
        meter.around(owner, name)
    model = build_model()
    ids = torch.randint(2048, (arguments.tokens,)).tolist()
    ratios = []
    for run in range(arguments.runs + 1):
        meter.seconds, start = 0.0, time.process_time()
        job(model, ids, list(METHODS), arguments.new_tokens, arguments.rate)
        spent = time.process_time() - start
        if run:  # the first warms up
            ratios.append(meter.seconds / spent)
            print(f"guard {meter.seconds:.4f} s of {spent:.2f} s CPU")
    print(f"{100 * statistics.median(ratios):.2f} %")


if __name__ == "__main__":
    main()
