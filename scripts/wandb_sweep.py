"""A trial of a W&B sweep: ``python scripts/wandb_sweep.py key=value ...``, which `wandb agent` runs;
takes what ``kvbench`` takes; logs ``score``, ``ratio`` and those of each method. See wandb_sweep.yaml.
"""

from __future__ import annotations

import sys

from kvbench.cli.jobs import FAILED, JobOutcome
from kvbench.cli.main import main as kvbench
from kvbench.errors import redact


def main() -> None:
    """Run the jobs of these overrides, log what they came to, and exit with their status."""
    import wandb

    arguments, status = sys.argv[1:], FAILED
    outcomes: list[JobOutcome] = []
    with wandb.init(job_type="trial", config={"overrides": redact(arguments)}) as run:
        try:
            kvbench(arguments, outcomes)
        except SystemExit as done:
            from kvbench.report.objective import objective_of

            status = done.code if isinstance(done.code, int) else FAILED
            folders = [folder for outcome in outcomes for folder in outcome.runs]
            if folders:
                run.log(objective_of(folders))
        run.finish(exit_code=status)
    sys.exit(status)


if __name__ == "__main__":
    main()
